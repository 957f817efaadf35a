"""Layers on disk: merging equals an overlay mount, tars round-trip, hostile tars change nothing outside."""

import bz2
import gzip
import io
import json
import lzma
import os
import shutil
import stat
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from etude.errors import InputError
from etude.pods.images import trees
from etude.pods.images.archive import UnpackLimits, pack, tree_digest, unpack
from etude.pods.images.layers import LayerDir, LayerStack, copy, merge
from etude.pods.pod import PodError

# -- real overlay mounts to compare with

VIEWER = r"""
import json, os, stat, subprocess, sys
def walk(top):
    seen, stray = {}, []
    def visit(path, name):
        info = os.lstat(path)
        kind = stat.S_IFMT(info.st_mode)
        if stat.S_ISREG(kind): what = open(path).read()
        elif stat.S_ISLNK(kind): what = os.readlink(path)
        else: what = ""
        seen[name] = [kind, stat.S_IMODE(info.st_mode), what]
        if stat.S_ISDIR(kind):
            for child in os.listdir(path):
                try: os.lstat(f"{path}/{child}")
                except FileNotFoundError: stray.append(f"{name}/{child}"); continue
                visit(f"{path}/{child}", f"{name}/{child}")
    visit(top, "")
    return seen, stray
for line in sys.stdin:
    given = json.loads(line)
    lower = ":".join(reversed(given["layers"]))
    done = subprocess.run(["mount", "-t", "overlay", "overlay", "-o", f"userxattr,lowerdir={lower}", given["at"]],
                          capture_output=True, text=True)
    if done.returncode: print(json.dumps({"error": done.stderr}), flush=True); continue
    seen, stray = walk(given["at"])
    subprocess.run(["umount", given["at"]], check=True)
    print(json.dumps({"seen": seen, "stray": stray}), flush=True)
"""

View = Callable[[list[Path]], tuple[dict[str, list[object]], list[str]]]


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> Iterator[View]:
    """Return what a real overlay mount of layers (lowest first) shows, and names that it lists but cannot open."""
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare, so no overlay can be mounted")
    at = tmp_path_factory.mktemp("mounted")
    empty = tmp_path_factory.mktemp("empty")
    command = ["unshare", "-Urm", sys.executable, "-c", VIEWER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def show(layers: list[Path]) -> tuple[dict[str, list[object]], list[str]]:
            # a mount without an upper directory needs two lower ones
            asked = {"layers": [str(empty), *map(str, layers)], "at": str(at)}
            print(json.dumps(asked), file=process.stdin, flush=True)
            answer = json.loads(process.stdout.readline() or '{"error": "no user namespaces"}')
            if "error" in answer:
                pytest.skip(f"overlay cannot be mounted here: {answer['error']}")
            return answer["seen"], answer["stray"]

        show([tmp_path_factory.mktemp("other")])
        yield show
        process.stdin.close()


# -- trees to compare

Tree = dict[str, object]  # name -> "text" (file) | None (whiteout) | ("opaque" | "", Tree) | ("link", target)
NAMES = st.sampled_from("abc")


def _trees(children: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.tuples(st.sampled_from(["", "", "opaque"]), st.dictionaries(NAMES, children, max_size=3))


LEAVES = st.one_of(st.sampled_from(["x", "yy", ""]), st.none(), st.just(("link", "b")))
LAYER = st.dictionaries(NAMES, st.recursive(LEAVES, _trees, max_leaves=6), max_size=3)


def write_tree(top: Path, tree: Tree) -> Path:
    top.mkdir(exist_ok=True)
    for name, what in tree.items():
        path = top / name
        if what is None:
            trees.make_whiteout(str(path))
        elif isinstance(what, str):
            path.write_text(what)
        elif what[0] == "link":  # type: ignore[index]
            path.symlink_to(what[1])  # type: ignore[index]
        else:
            write_tree(path, what[1])  # type: ignore[index]
            if what[0] == "opaque":  # type: ignore[index]
                trees.make_opaque(str(path))
    return top


def parts(*paths: Path) -> list[LayerDir]:
    return [LayerDir(str(path)) for path in paths]


def shown(top: Path) -> dict[str, str]:
    """Return a tree's paths with their contents or types."""
    found = {}
    for path in sorted(top.rglob("*")):
        kind = stat.S_IFMT(path.lstat().st_mode)
        found[str(path.relative_to(top))] = path.read_text() if stat.S_ISREG(kind) else f"{kind:o}"
    return found


def work_in(directory: Path) -> Path:
    """An empty directory for one example."""
    path = directory / "work"
    trees.remove_tree(path)
    path.mkdir()
    return path


SETTINGS = settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@SETTINGS
@given(base=LAYER, deltas=st.lists(LAYER, min_size=1, max_size=4), link=st.booleans())
def test_merged_layers_show_what_the_kernel_shows(
    view: View, tmp_path: Path, base: Tree, deltas: list[Tree], link: bool
) -> None:
    work = work_in(tmp_path)
    lowest = write_tree(work / "base", base)
    stack = [write_tree(work / f"d{i}", delta) for i, delta in enumerate(deltas)]
    (work / "flat").mkdir()
    (work / "whole").mkdir()
    merge(parts(*stack), parts(lowest), work / "flat", link=link)
    merge(parts(lowest, *stack), (), work / "whole", link=link)

    seen, _ = view([lowest, *stack])
    flat, stray = view([lowest, work / "flat"])
    assert flat == seen
    assert set(stray) <= set(view([lowest])[1]), "the merged layer contains whiteouts that the kernel lists"
    whole, stray = view([work / "whole"])
    assert whole == seen
    assert not stray


@SETTINGS
@given(layers=st.lists(LAYER, min_size=1, max_size=4), path=st.lists(NAMES, min_size=1, max_size=3))
def test_a_stack_finds_what_merging_it_would_show(tmp_path: Path, layers: list[Tree], path: list[str]) -> None:
    work = work_in(tmp_path)
    stack = [write_tree(work / f"l{i}", layer) for i, layer in enumerate(layers)]
    (work / "whole").mkdir()
    merge(parts(*stack), (), work / "whole")
    try:
        _, found = LayerStack.of(parts(*stack)).locate("/".join(path), follow=False)
    except InputError:
        with pytest.raises(OSError, match="symbolic links"):  # a loop for the kernel too
            os.stat(work / "whole" / Path(*path))
        return
    there = work / "whole" / Path(*path[:-1])
    plain = there.resolve().is_relative_to(work / "whole") and os.path.lexists(there / path[-1])
    if plain:
        assert found.info is not None
        assert stat.S_IFMT(found.info.st_mode) == stat.S_IFMT(os.lstat(there / path[-1]).st_mode)
    else:
        assert not found.exists


def test_links_in_a_stack_never_lead_above_its_root(tmp_path: Path) -> None:
    low = write_tree(tmp_path / "low", {"bin": ("link", "usr/bin"), "usr": ("", {"bin": ("", {"sh": "#!"})})})
    top = write_tree(tmp_path / "top", {"out": ("link", "../../../../bin"), "loop": ("link", "loop")})
    stack = LayerStack.of(parts(low, top))
    assert stack.locate("/out/sh")[0] == "/usr/bin/sh"
    assert stack.read("/bin/sh") == b"#!"
    assert stack.locate("/bin/new/deep")[0] == "/usr/bin/new/deep"
    with pytest.raises(InputError, match="symbolic links"):
        stack.locate("/loop")


def test_merging_keeps_hard_links_modes_times_and_attributes(tmp_path: Path) -> None:
    low = write_tree(tmp_path / "low", {"a": "text", "d": ("", {})})
    os.link(low / "a", low / "b")
    os.chmod(low / "a", 0o4751)
    os.setxattr(low / "a", "user.note", b"\xff\n")
    os.utime(low / "d", (5, 5))
    os.setxattr(low / "d", "user.overlay.impure", b"y")
    (tmp_path / "out").mkdir()
    merge(parts(low), (), tmp_path / "out")
    a, b = (tmp_path / "out" / name for name in "ab")
    assert a.stat().st_ino == b.stat().st_ino != (low / "a").stat().st_ino
    assert stat.S_IMODE(a.stat().st_mode) == 0o4751
    assert os.getxattr(a, "user.note") == b"\xff\n"
    assert (tmp_path / "out/d").stat().st_mtime == 5
    assert os.listxattr(tmp_path / "out/d") == []
    assert tree_digest(low) == tree_digest(tmp_path / "out")


def test_a_sparse_terabyte_is_copied_at_once(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    with open(tmp_path / "in/big", "wb") as file:
        file.write(b"start")
        file.truncate(1 << 40)
    (tmp_path / "out").mkdir()
    copy(tmp_path / "in", tmp_path / "out")
    made = (tmp_path / "out/big").stat()
    assert made.st_size == 1 << 40
    assert made.st_blocks < 1000


@pytest.mark.skipif(not trees.can_chown(), reason="only root keeps owners")
def test_ids_lose_their_shift(tmp_path: Path) -> None:
    low = write_tree(tmp_path / "low", {"mine": "a", "other": "b", "d": ("", {})})
    for name, owner in (("mine", 100_007), ("other", 5), ("d", 100_000)):
        os.chown(low / name, owner, owner)
    (tmp_path / "out").mkdir()
    merge([LayerDir(str(low), 100_000)], (), tmp_path / "out")
    owners = {name: (tmp_path / "out" / name).stat().st_uid for name in ("mine", "other", "d")}
    assert owners == {"mine": 7, "other": trees.OVERFLOW_ID, "d": 0}


def test_a_tree_too_deep_to_walk_is_an_error_not_a_crash(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    deepest = tmp_path / "in"
    for _ in range(trees.MAX_DEPTH + 2):
        deepest = deepest / "d"
        deepest.mkdir()
    (tmp_path / "out").mkdir()
    with pytest.raises(PodError, match="nested deeper"):
        copy(tmp_path / "in", tmp_path / "out")


def test_files_whose_mode_forbids_reading_are_copied(tmp_path: Path) -> None:
    low = write_tree(tmp_path / "low", {"etc": ("", {"shadow": "secret"})})
    os.chmod(low / "etc/shadow", 0)
    os.chmod(low / "etc", 0)
    (tmp_path / "out").mkdir()
    copy(low, tmp_path / "out")
    before = tree_digest(low)
    assert before == tree_digest(tmp_path / "out")
    assert stat.S_IMODE((tmp_path / "out/etc").stat().st_mode) == 0
    packed = io.BytesIO()
    pack(low, packed)
    assert b"secret" in packed.getvalue()


# -- tars


@SETTINGS
@given(layer=LAYER)
def test_a_layer_survives_packing_and_unpacking(tmp_path: Path, layer: Tree) -> None:
    work = work_in(tmp_path)
    source = write_tree(work / "in", layer)
    (work / "tidy").mkdir()
    # whiteouts in an opaque directory have no effect, and a tar does not contain them
    packed = io.BytesIO()
    pack(source, packed)
    packed.seek(0)
    unpack(packed, work / "tidy", "layer")
    again = io.BytesIO()
    pack(work / "tidy", again)
    (work / "out").mkdir()
    again.seek(0)
    unpack(again, work / "out", "layer")
    assert tree_digest(work / "out") == tree_digest(work / "tidy")
    if not any("opaque" in repr(what) for what in layer.values()):
        assert tree_digest(work / "out") == tree_digest(source)


def tar_of(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for member, data in members:
            member.size = member.size or len(data)
            tar.addfile(member, io.BytesIO(data))
    return out.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", **facts: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, link, 0o755
    for key, value in facts.items():
        setattr(info, key, value)
    return info


def test_every_compression_is_detected_by_its_first_bytes(tmp_path: Path) -> None:
    plain = tar_of((member("d/file"), b"text"))
    forms = [plain, gzip.compress(plain), bz2.compress(plain), lzma.compress(plain), zstandard.compress(plain)]
    # concatenated streams are one
    forms.append(gzip.compress(plain[:700]) + gzip.compress(plain[700:]))
    forms.append(lzma.compress(plain[:700]) + lzma.compress(plain[700:]))
    for number, form in enumerate(forms):
        target = tmp_path / str(number)
        target.mkdir()
        unpack(io.BytesIO(form), target, "archive")
        assert shown(target) == {"d": "40000", "d/file": "text"}


def test_whiteouts_apply_to_lower_layers_only(tmp_path: Path) -> None:
    data = tar_of(
        (member("new/file"), b"x"),
        (member(".wh.new"), b""),
        (member("kept"), b"y"),
        (member(".wh.kept"), b""),
        (member("d/.wh.gone"), b""),
        (member("o/.wh..wh..opq"), b""),
        (member("o/.wh.x"), b""),
        (member(".wh..wh.plnk"), b""),
        (member("raw", tarfile.CHRTYPE), b""),
        (member("null", tarfile.CHRTYPE, devmajor=1, devminor=3), b""),
    )
    unpack(io.BytesIO(data), tmp_path, "layer")
    assert trees.is_opaque(str(tmp_path / "new"))
    assert (tmp_path / "kept").read_text() == "y"
    assert trees.is_whiteout(os.lstat(tmp_path / "d/gone"))
    assert trees.is_whiteout(os.lstat(tmp_path / "raw"))
    assert trees.is_opaque(str(tmp_path / "o"))
    assert os.listdir(tmp_path / "o") == []
    assert sorted(os.listdir(tmp_path)) == ["d", "kept", "new", "o", "raw"]


PAX = tarfile.PAX_FORMAT
HOSTILE = {
    "absolute": [(member("/evil"), b"")],
    "dotdot": [(member("a/../../evil"), b"")],
    "dotdot alone": [(member(".."), b"")],
    "through a link": [(member("l", tarfile.SYMTYPE, "OUTSIDE"), b""), (member("l/evil"), b"x")],
    "through a relative link": [(member("l", tarfile.SYMTYPE, "../.."), b""), (member("l/evil"), b"x")],
    "directory through a link": [
        (member("l", tarfile.SYMTYPE, "OUTSIDE"), b""),
        (member("l/evil", tarfile.DIRTYPE), b""),
    ],
    "hard link out": [(member("h", tarfile.LNKTYPE, "../../evil"), b"")],
    "hard link absolute": [(member("h", tarfile.LNKTYPE, "/etc/hostname"), b"")],
    "hard link through a link": [
        (member("l", tarfile.SYMTYPE, "OUTSIDE"), b""),
        (member("h", tarfile.LNKTYPE, "l/kept"), b""),
    ],
    "hard link to nothing": [(member("h", tarfile.LNKTYPE, "nothing"), b"")],
    "hard link to itself": [(member("h", tarfile.LNKTYPE, "h"), b"")],
    "hard link to a directory": [(member("d", tarfile.DIRTYPE), b""), (member("h", tarfile.LNKTYPE, "d"), b"")],
    "whiteout of dotdot": [(member("d/.wh..."), b"")],
    "whiteout of nothing": [(member("d/.wh."), b"")],
    "whiteout through a link": [(member("l", tarfile.SYMTYPE, "OUTSIDE"), b""), (member("l/.wh.kept"), b"")],
    "opaque through a link": [(member("l", tarfile.SYMTYPE, "OUTSIDE"), b""), (member("l/.wh..wh..opq"), b"")],
    "long name": [(member("n" * 300), b"")],
    "too deep": [(member("d/" * 150 + "f"), b"")],
    "no name": [(member("."), b"x")],
    "empty link": [(member("l", tarfile.SYMTYPE, ""), b"")],
    "unknown kind": [(member("u", b"Z"), b"")],
    "file over a parent": [(member("f"), b"x"), (member("f/below"), b"y")],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_member_is_refused_by_name_and_nothing_outside_changes(tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    target = tmp_path / "deep/target"
    target.mkdir(parents=True)
    for info, _ in HOSTILE[name]:
        if info.linkname == "OUTSIDE":
            info.linkname = str(outside)
    with pytest.raises(InputError, match=r"member|archive"):
        unpack(io.BytesIO(tar_of(*HOSTILE[name])), target, "hostile.tar")
    assert shown(outside) == {"kept": "kept"}
    assert sorted(os.listdir(tmp_path)) == ["deep", "outside"]
    assert os.listdir(tmp_path / "deep") == ["target"]


def test_a_link_that_replaces_a_directory_is_not_followed_by_what_comes_after(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    target = tmp_path / "target"
    target.mkdir()
    data = tar_of((member("d/one"), b"1"), (member("d", tarfile.SYMTYPE, str(outside)), b""), (member("d/two"), b"2"))
    with pytest.raises(InputError, match="passes through"):
        unpack(io.BytesIO(data), target, "swap.tar")
    assert os.listdir(outside) == []


def test_later_members_replace_earlier_ones(tmp_path: Path) -> None:
    data = tar_of(
        (member("a"), b"1"),
        (member("a"), b"22"),
        (member("b/c"), b"3"),
        (member("b"), b"4"),
        (member("e"), b"5"),
        (member("e", tarfile.DIRTYPE), b""),
        (member("e/f"), b"6"),
    )
    unpack(io.BytesIO(data), tmp_path, "archive")
    assert shown(tmp_path) == {"a": "22", "b": "4", "e": "40000", "e/f": "6"}


def test_modes_that_forbid_writing_are_set_last(tmp_path: Path) -> None:
    data = tar_of((member("d", tarfile.DIRTYPE, mode=0o500), b""), (member("d/f", mode=0o4000), b"x"))
    unpack(io.BytesIO(data), tmp_path, "archive")
    assert stat.S_IMODE(os.lstat(tmp_path / "d").st_mode) == 0o500
    assert stat.S_IMODE(os.lstat(tmp_path / "d/f").st_mode) == 0o4000


def test_more_than_allowed_is_refused(tmp_path: Path) -> None:
    many = tar_of(*((member(f"f{i}"), b"") for i in range(20)))
    with pytest.raises(InputError, match="entries allowed"):
        unpack(io.BytesIO(many), tmp_path, "many.tar", UnpackLimits(entries=10))
    large = gzip.compress(tar_of((member("zeros"), bytes(1 << 20))))
    with pytest.raises(InputError, match="bytes allowed"):
        unpack(io.BytesIO(large), tmp_path, "large.tar.gz", UnpackLimits(size=1000))
    bomb = gzip.compress(bytes(30 << 20))  # zeros are not members: the stream itself is limited
    with pytest.raises(InputError, match=r"allowed|damaged"):
        unpack(io.BytesIO(tar_of((member("a"), b""))[:512] + bomb), tmp_path, "bomb", UnpackLimits(size=1, entries=1))


def test_sparse_bombs_count_by_their_unpacked_size(tmp_path: Path) -> None:
    sparse = member("huge", tarfile.REGTYPE)
    sparse.pax_headers = {
        "GNU.sparse.major": "0",
        "GNU.sparse.minor": "1",
        "GNU.sparse.name": "huge",
        "GNU.sparse.size": str(1 << 50),
        "GNU.sparse.map": "0,0",
    }
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=PAX) as tar:
        tar.addfile(sparse, io.BytesIO(b""))
    with pytest.raises(InputError, match="bytes allowed"):
        unpack(io.BytesIO(out.getvalue()), tmp_path, "sparse.tar")


def test_a_truncated_sparse_map_does_not_hang(tmp_path: Path) -> None:
    info = member("f")
    info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "9"}
    info.size = 512
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=PAX) as tar:
        tar.addfile(info, io.BytesIO(b"999999999\n" + b"1" * 502))
    with pytest.raises(InputError, match="damaged"):
        unpack(io.BytesIO(out.getvalue()[: 512 * 5]), tmp_path, "cut.tar")


def test_a_damaged_archive_is_an_error(tmp_path: Path) -> None:
    data = tar_of((member("a"), b"1" * 600), (member("b"), b"2" * 600))
    for cut in (100, 512 + 300, 512 + 1024 + 200, 512 + 1024 + 512 + 10):
        target = tmp_path / str(cut)
        target.mkdir()
        with pytest.raises(InputError, match=r"damaged|truncated|cannot be created"):
            unpack(io.BytesIO(data[:cut]), target, "cut.tar")
    wrong = bytearray(data)
    wrong[512 + 1024 + 150] ^= 1  # the checksum of the second header
    with pytest.raises(InputError, match="damaged"):
        unpack(io.BytesIO(bytes(wrong)), tmp_path, "wrong.tar")
    for form in (gzip.compress(data)[:-20], zstandard.compress(data)[:-9], lzma.compress(data)[:-30], b"\x1f\x8bjunk"):
        with pytest.raises(InputError, match=r"damaged|cannot be created"):
            unpack(io.BytesIO(form), tmp_path, "cut")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.integers(0, 6000), st.integers(0, 255)), min_size=1, max_size=12))
def test_any_bytes_are_an_archive_or_an_input_error(tmp_path: Path, changes: list[tuple[int, int]]) -> None:
    info = member("long/" + "n" * 120)
    info.pax_headers = {"SCHILY.xattr.user.x": "1", "mtime": "12.5"}
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=PAX) as tar:
        tar.addfile(info, io.BytesIO(b""))
        tar.addfile(member("d", tarfile.DIRTYPE))
        tar.addfile(member("d/l", tarfile.SYMTYPE, "../x"))
    data = bytearray(out.getvalue())
    for at, value in changes:
        data[at % len(data)] = value
        block = at % len(data) // 512 * 512  # with a right checksum, so that more is reached than the header check
        if at % 3:
            data[block + 148 : block + 156] = b" " * 8
            data[block + 148 : block + 156] = b"%06o\0 " % sum(data[block : block + 512])
    work = work_in(tmp_path)
    (work / "in").mkdir()
    with suppress(InputError):
        unpack(io.BytesIO(bytes(data)), work / "in", "any", UnpackLimits(size=1 << 20, entries=100))
    assert os.listdir(work) == ["in"]


def test_a_file_named_like_a_whiteout_is_not_exported(tmp_path: Path) -> None:
    (tmp_path / ".wh.file").write_text("mine")
    with pytest.raises(PodError, match="means a deletion"):
        pack(tmp_path, io.BytesIO())


def test_odd_names_and_attributes_survive(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    for name in (b"\xff\xfe", b"new\nline", b"sp ace", b"-rf", "ünï".encode(), b"x" * 255):
        (source / os.fsdecode(name)).write_bytes(name)
    os.setxattr(source / "-rf", "user.binary", bytes(range(256)))
    os.mkfifo(source / "pipe")
    packed = io.BytesIO()
    pack(source, packed)
    packed.seek(0)
    (tmp_path / "out").mkdir()
    unpack(packed, tmp_path / "out", "odd")
    assert tree_digest(source) == tree_digest(tmp_path / "out")
