"""Conformance: files, upload and download."""

import errno
import hashlib
import os
import stat

from etude.errors import InputError
from etude.pods.pod import PodError, PodFileError
from tests.pods.conformance import CheckContext, check, raises

ODD_NAMES = ("a b", "new\nline", "-rf", "*", "caf\u00e9", "bytes-\udcff\udcfe", "quote'\"", "\\", "#", " ", "x" * 255)


@check
async def written_files_can_be_read_back(context: CheckContext) -> None:
    async with context.pod() as pod:
        await pod.write("text", "h\u00e9llo\n")
        assert await pod.read("text") == "h\u00e9llo\n".encode()
        await pod.write("text", b"\x00\xff")
        assert await pod.read("text") == b"\x00\xff"
        await pod.write("empty", b"")
        assert await pod.read("empty") == b""
        await pod.write(f"{pod.workdir}/absolute", "x")
        assert await pod.read("absolute") == b"x"
        await pod.write("deep/er/than/this", "made on the way")
        assert await pod.read("./deep//er/than/../than/this") == b"made on the way"


@check
async def a_part_of_a_file_can_be_read(context: CheckContext) -> None:
    async with context.pod() as pod:
        content = os.urandom(3_000_001)
        await pod.write("file", content)
        assert await pod.read("file", offset=10, length=20) == content[10:30]
        assert await pod.read("file", offset=2_999_990) == content[2_999_990:]
        assert await pod.read("file", offset=4_000_000) == b""
        assert await pod.read("file", length=0) == b""
        assert await pod.read("file", offset=5, length=2_500_000) == content[5:2_500_005]
        with raises(PodError):
            await pod.read("file", offset=-1)


@check
async def appending_creates_the_file_and_appends(context: CheckContext) -> None:
    async with context.pod() as pod:
        await pod.write("log", "one\n", append=True)
        await pod.write("log", b"x" * 600_000, append=True)
        await pod.write("log", "end", append=True)
        assert await pod.read("log") == b"one\n" + b"x" * 600_000 + b"end"


@check
async def a_large_file_goes_in_and_out_unchanged(context: CheckContext) -> None:
    async with context.pod() as pod:
        content = os.urandom(20 << 20)
        await pod.write("large", content)
        assert hashlib.sha256(await pod.read("large")).digest() == hashlib.sha256(content).digest()
        assert (await pod.exec("sha256sum < large")).stdout.split()[0] == hashlib.sha256(content).hexdigest()
        await pod.write("large", b"short")
        assert await pod.read("large") == b"short"


@check
async def modes_are_as_requested_and_have_usual_defaults(context: CheckContext) -> None:
    async with context.pod() as pod:
        await pod.write("script", "#!/bin/sh\necho ran\n", mode=0o755)
        assert (await pod.exec(["./script"])).stdout == "ran\n"
        await pod.write("plain", "x")
        assert (await pod.stat("plain")).mode == 0o644
        await pod.write("secret", b"x" * 700_000, mode=0o400)  # more than one frame
        assert (await pod.stat("secret")).mode == 0o400
        await pod.make_directory("directory", mode=0o711)
        assert (await pod.stat("directory")).mode == 0o711
        assert (await pod.exec("umask")).stdout.strip() == "0022"


@check
async def stat_and_list_do_not_follow_links(context: CheckContext) -> None:
    async with context.pod() as pod:
        await pod.write("d/file", "12345")
        await pod.exec("ln -s file d/link; ln -s /nowhere d/broken; mkfifo d/pipe; mkdir d/sub", cwd=pod.workdir)
        found = {info.name: info for info in await pod.list("d")}
        assert {name: info.kind for name, info in found.items()} == {
            "file": "file",
            "link": "symlink",
            "broken": "symlink",
            "pipe": "other",
            "sub": "directory",
        }
        assert found["file"].size == 5
        assert found["broken"].target == "/nowhere"
        assert abs(found["file"].modified - (await pod.stat("d/file")).modified) < 1
        assert (await pod.stat("d/link")).target == "file"
        assert (await pod.stat(".")).kind == "directory"
        assert (await pod.stat("/")).name == "/"
        assert await pod.read("d/link") == b"12345"
        assert [info.name for info in await pod.list("d")] == sorted(found)


@check
async def unusual_file_names_are_preserved(context: CheckContext) -> None:
    async with context.pod() as pod:
        for name in ODD_NAMES:
            await pod.write(f"odd/{name}", name.encode("utf-8", "surrogateescape"))
        assert {info.name for info in await pod.list("odd")} == set(ODD_NAMES)
        for name in ODD_NAMES:
            assert await pod.read(f"odd/{name}") == name.encode("utf-8", "surrogateescape")
            assert (await pod.stat(f"odd/{name}")).name == name
        target = context.new_directory() / "odd"
        await pod.download("odd", target)
        assert set(os.listdir(target)) == set(ODD_NAMES)
        await pod.upload(target, "again")
        assert {info.name for info in await pod.list("again")} == set(ODD_NAMES)
        for name in ODD_NAMES:
            await pod.remove(f"odd/{name}")
        assert await pod.list("odd") == []


@check
async def removing_is_recursive_and_follows_no_link(context: CheckContext) -> None:
    async with context.pod() as pod:
        await pod.exec("mkdir -p keep gone/a/b/c; touch keep/file gone/a/f; ln -s ../keep gone/link; chmod 0 gone/a/b")
        await pod.remove("gone")
        assert (await pod.exec("ls -d gone")).exit_code == 2
        assert await pod.read("keep/file") == b""
        await pod.exec("ln -s keep link")
        await pod.remove("link")
        assert (await pod.stat("keep")).kind == "directory"
        await pod.remove("keep/file")
        with raises(PodFileError) as caught:
            await pod.remove("keep/file")
        assert caught["error"].errno == errno.ENOENT  # type: ignore[attr-defined]


@check
async def errors_of_file_calls_have_the_errno_and_the_path(context: CheckContext) -> None:
    async with context.pod() as pod:
        await pod.write("file", "x")
        await pod.exec("mkfifo pipe")
        wrong = (
            (pod.read("missing"), errno.ENOENT, "missing"),
            (pod.stat("missing"), errno.ENOENT, "missing"),
            (pod.list("missing"), errno.ENOENT, "missing"),
            (pod.list("file"), errno.ENOTDIR, "file"),
            (pod.read("."), errno.EISDIR, pod.workdir),
            (pod.write(".", "x"), errno.EISDIR, pod.workdir),
            (pod.write("file/below", "x"), errno.ENOTDIR, "file"),
            (pod.make_directory("file"), errno.EEXIST, "file"),
            (pod.read("n" * 300), errno.ENAMETOOLONG, "nnn"),
        )
        for call, number, name in wrong:
            with raises(PodFileError) as caught:
                await call
            assert caught["error"].errno == number, caught  # type: ignore[attr-defined]
            assert name in str(caught["error"])
        for call in (pod.read("pipe"), pod.write("pipe", "x"), pod.read(""), pod.read("/dev/zero"), pod.read("a\0b")):
            with raises(PodError):  # at once, without waiting for the other end of a pipe
                await call
        assert (await pod.exec("echo fine")).ok


@check
async def making_a_directory_creates_parents_and_is_idempotent(context: CheckContext) -> None:
    async with context.pod() as pod:
        await pod.make_directory("one/two/three")
        await pod.make_directory("one/two/three")
        assert (await pod.stat("one/two/three")).kind == "directory"


@check
async def trees_are_copied_in_and_out_with_links_and_modes(context: CheckContext) -> None:
    async with context.pod() as pod:
        source = context.new_directory() / "tree"
        (source / "sub" / "empty").mkdir(parents=True)
        (source / "run").write_text("#!/bin/sh\necho ran\n")
        (source / "run").chmod(0o755)
        (source / "sub" / "data").write_bytes(os.urandom(2_500_000))
        (source / "sub" / "none").touch(0o600)
        os.symlink("../run", source / "sub" / "up")
        os.symlink("/nowhere/at/all", source / "dangling")
        os.symlink("sub", source / "directory-link")
        (source / "sub" / "empty").chmod(0o700)
        await pod.upload(source, "tree")
        assert (await pod.exec(["tree/sub/up"])).stdout == "ran\n"
        assert (await pod.exec("readlink tree/dangling")).stdout == "/nowhere/at/all\n"
        target = context.new_directory() / "back"
        await pod.download("tree", target)
        assert describe(source) == describe(target)
        with raises(InputError):
            await pod.download("tree", target)  # it already exists
        await pod.download("tree/run", context.new_directory() / "one")
        await pod.upload(source / "run", "single")
        assert (await pod.exec(["./single"])).stdout == "ran\n"
        await pod.upload(source / "dangling", "link-only")
        assert (await pod.stat("link-only")).target == "/nowhere/at/all"
        with raises(InputError):
            await pod.upload(source / "missing", "x")
        with raises(PodFileError):
            await pod.download("missing", context.new_directory() / "x")


def describe(root: os.PathLike[str]) -> dict[str, tuple[str, int, bytes]]:
    """Return kind, mode and content of everything below `root`."""
    found = {}
    for directory, names, files in os.walk(root):
        for name in (*names, *files):
            path = os.path.join(directory, name)
            info = os.lstat(path)
            if stat.S_ISLNK(info.st_mode):
                row = ("link", 0, os.fsencode(os.readlink(path)))
            elif stat.S_ISDIR(info.st_mode):
                row = ("directory", stat.S_IMODE(info.st_mode), b"")
            else:
                with open(path, "rb") as file:
                    row = ("file", stat.S_IMODE(info.st_mode), hashlib.sha256(file.read()).digest())
            found[os.path.relpath(path, root)] = row
    return found


@check
async def special_files_are_not_downloaded(context: CheckContext) -> None:
    async with context.pod() as pod:
        await pod.exec("mkdir t; mkfifo t/pipe; touch t/file; chmod u+s,g+s t/file")
        target = context.new_directory() / "t"
        await pod.download("t", target)
        assert os.listdir(target) == ["file"]
        assert (target / "file").stat().st_mode & 0o7000 == 0  # set-id bits are not copied
        with raises(PodError):
            await pod.download("t/pipe", context.new_directory() / "pipe")


@check
async def a_sparse_file_of_a_terabyte_is_harmless(context: CheckContext) -> None:
    async with context.pod() as pod:
        if not (await pod.exec("mkdir hole && truncate -s 1T hole/file")).ok:
            assert (await pod.exec("truncate -s 200G hole/file")).ok
        with raises(PodError):
            await pod.read("hole/file")
        with raises(PodError):
            await pod.download("hole", context.new_directory() / "hole")
        assert await pod.read("hole/file", offset=1 << 36, length=5) == bytes(5)
