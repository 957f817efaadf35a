"""Reading, writing, listing and deleting files in a real pod: results, caps and refusals."""

import pytest
from harness_pods import PodFixture, PodTools, open_pod_fixture, shared_pod_fixture

from etude.harness.tool_set import ToolSet


@pytest.fixture
def pods(request: pytest.FixtureRequest) -> PodFixture:
    return shared_pod_fixture(request.config)


def test_a_file_is_read_with_line_numbers_from_any_line(pods: PodFixture) -> None:
    async def check(tools: PodTools) -> None:
        read = tools.text
        assert await read("read_file", target_file="a.txt") == "1|one\n2|two\n3|three"
        assert await read("read_file", target_file=f"{tools.root}/a.txt", offset=2, limit=1) == (
            "2|two\n[lines 2-2 of 3; go on with offset 3]"
        )
        assert await read("read_file", target_file="a.txt", offset=-2) == (
            "2|two\n3|three\n[lines 2-3 of 3, the end of the file]"
        )
        assert await read("read_file", target_file="a.txt", offset=-99) == "1|one\n2|two\n3|three"
        assert await read("read_file", target_file="no-newline") == "1|x"
        assert await read("read_file", target_file="empty") == "[the file is empty]"
        assert "line 9 is past the end" in await tools.error("environment", "read_file", target_file="a.txt", offset=9)
        outcome = await tools.call("read_file", target_file="a.txt")
        assert outcome.facts == {"path": "a.txt", "size": 14, "total": 3, "first": 1, "last": 3}

    pods.run(check, files={"a.txt": "one\ntwo\nthree\n", "no-newline": "x", "empty": ""})


def test_long_files_and_lines_are_cut_with_a_notice(pods: PodFixture) -> None:
    async def check(tools: PodTools) -> None:
        text = await tools.text("read_file", target_file="lines")
        assert text.startswith("1|0\n")
        assert text.endswith("2000|1999\n[lines 1-2000 of 5000; go on with offset 2001]")
        text = await tools.text("read_file", target_file="wide")
        assert len(text.encode()) < 52_000
        last = int(text.rpartition("offset ")[2].rstrip("]"))
        assert text.splitlines()[-2].startswith(f"{last - 1}|")
        assert (await tools.text("read_file", target_file="wide", offset=last)).startswith(f"{last}|")
        text = await tools.text("read_file", target_file="one-line")
        assert len(text) < 2200
        assert "[cut: the line has 3,000,000 characters]" in text
        assert "\ufffd" not in text
        assert (await tools.text("read_file", target_file="huge", offset=-1)).startswith("600000|last")
        await tools.pod.exec(f"truncate -s 80M {tools.root}/sparse")
        assert "too large" in await tools.error("environment", "read_file", target_file="sparse")

    files = {
        "lines": "".join(f"{i}\n" for i in range(5000)),
        "wide": ("é" * 400 + "\n") * 500,
        "one-line": "€" * 3_000_000,
        "huge": "twelve chars\n" * 599_999 + "last",
    }
    pods.run(check, files=files)


def test_binary_and_missing_files_are_refused_with_a_reason(pods: PodFixture) -> None:
    async def check(tools: PodTools) -> None:
        await tools.sh(f"cd {tools.root} && mkfifo pipe && ln -s nowhere broken && ln -s loop loop && mkdir dir")

        async def refused(path: str) -> str:
            return await tools.error("environment", "read_file", target_file=path)

        assert await refused("logo.png") == "logo.png is a binary file (PNG image, 12 bytes), not text"
        assert "not a regular file" in await refused("pipe")
        assert "not a regular file" in await refused("/dev/zero")
        assert await refused("broken") == "broken is a symbolic link to nowhere, which does not exist"
        assert "symbolic links" in await refused("loop")
        assert await refused("dir") == "dir is a directory, not a file. List it with list_dir."
        assert await refused("src/mian.py") == "src/mian.py does not exist. Did you mean src/main.py?"
        assert await refused("main.py") == "main.py does not exist. Did you mean src/main.py?"
        assert (
            await refused("scr/main.py")
            == "scr/main.py does not exist. There is no directory scr. Did you mean src/...?"
        )
        assert "does not exist" in await refused("a" * 200 + "/" + "b" * 200)
        assert "file name too long" in await refused("a" * 5000)
        assert "is a file, not a directory" in await tools.error(
            "environment", "list_dir", target_directory="src/main.py"
        )

    pods.run(check, files={"logo.png": b"\x89PNG\0\0\0\0abcd", "src/main.py": "x = 1\n"})


def test_invalid_utf8_and_crlf_are_shown_with_a_notice(pods: PodFixture) -> None:
    async def check(tools: PodTools) -> None:
        assert await tools.text("read_file", target_file="latin") == (
            "1|caf\ufffd\n[some bytes are not UTF-8 and are shown as \ufffd]"
        )
        assert await tools.text("read_file", target_file="dos") == "1|a\n2|b\n[lines end with CRLF; edits keep that]"
        assert await tools.text("read_file", target_file="bom") == "1|x = 1"
        assert "UTF-16" in await tools.error("environment", "read_file", target_file="wide")
        assert await tools.text("read_file", target_file="separators") == "1|a\u2028b\x85c\x0cd"

    files = {
        "latin": b"caf\xe9\n",
        "dos": b"a\r\nb\r\n",
        "bom": b"\xef\xbb\xbfx = 1\n",
        "wide": "\ufeffa".encode("utf-16"),
    }
    pods.run(check, files={**files, "separators": "a\u2028b\x85c\x0cd\n"})


def test_a_directory_is_listed_without_dot_files_under_a_cap(pods: PodFixture) -> None:
    async def check(tools: PodTools) -> None:
        await tools.sh(f"cd {tools.root} && ln -s b.py link && mkdir sub many && cd many && touch $(seq 1000 1599)")
        assert await tools.text("list_dir", target_directory=".") == "./\nb.py\nlink -> b.py\nmany/\nsub/\nz.md"
        assert await tools.text("list_dir", target_directory=".", ignore_globs=["*.md", "many"]) == (
            "./\nb.py\nlink -> b.py\nsub/"
        )
        assert await tools.text("list_dir", target_directory="sub") == "sub/\n[empty]"
        text = await tools.text("list_dir", target_directory="many")
        assert text.count("\n") == 501
        assert text.endswith("1499\n[the first 500 of 600 entries]")
        assert "bin/" in await tools.text("list_dir", target_directory="/usr")

    pods.run(check, files={"b.py": "", "z.md": "", ".hidden": ""})


def test_hostile_file_names_are_quoted_on_one_line_and_accepted_back(pods: PodFixture) -> None:
    names = {
        b"new\nline": '"new\\nline"',
        b"-rf": "-rf",
        b"caf\xe9": '"caf\\xe9"',
        "ünïcödé 文".encode(): "ünïcödé 文",
        b'"quoted"': '"\\"quoted\\""',
        b"back\\slash": "back\\slash",
        b"\x1b[31mred": '"\\x1b[31mred"',
        b"[ab]*?{x,y}": "[ab]*?{x,y}",
        b" space ": " space ",
        b"~": "~",
    }

    async def check(tools: PodTools) -> None:
        program = f"import os\nfor n in {list(names)!r}: open(b'{tools.root}/' + n, 'wb').write(b'found it\\n')"
        await tools.sh(f"python3 -c {_quoted(program)}")
        listed = (await tools.text("list_dir", target_directory=".")).split("\n")[1:]
        assert sorted(listed) == sorted(names.values())
        assert sorted((await tools.text("glob_file_search", glob_pattern="*")).split("\n")) == sorted(names.values())
        found = await tools.text("grep", pattern="found", output_mode="files_with_matches")
        assert sorted(found.split("\n")) == sorted(names.values())
        for shown in names.values():
            assert await tools.text("read_file", target_file=shown) == "1|found it", shown
            await tools.text("search_replace", file_path=shown, old_string="found", new_string="changed")
        assert (await tools.text("grep", pattern="changed it", output_mode="count")).count(":1\n") == len(names)
        await tools.text("delete_file", target_file='"new\\nline"')
        assert '"new\\nline"' not in await tools.text("list_dir", target_directory=".")

    pods.run(check)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def test_a_file_is_written_whole_with_the_directories_above_it(pods: PodFixture) -> None:
    async def check(tools: PodTools) -> None:
        assert (
            await tools.text("write", file_path="new/deep/a.py", contents="x = 1\ny = 2\n")
            == "Wrote new/deep/a.py (2 lines)."
        )
        assert await tools.read("new/deep/a.py") == b"x = 1\ny = 2\n"
        await tools.sh(f"chmod 750 {tools.root}/run.sh && ln {tools.root}/run.sh {tools.root}/twin")
        outcome = await tools.call("write", file_path="run.sh", contents="é\n")
        assert outcome.facts == {"path": "run.sh", "lines_added": 1, "lines_removed": 2}
        assert (await tools.pod.stat(f"{tools.root}/run.sh")).mode == 0o750
        assert await tools.read("twin") == "é\n".encode()
        await tools.sh(f"truncate -s 100M {tools.root}/new/sparse")
        assert await tools.text("write", file_path="new/sparse", contents="") == "Wrote new/sparse (0 lines)."
        assert "is a directory" in await tools.error("environment", "write", file_path="new", contents="")
        assert "not a directory" in await tools.error("environment", "write", file_path="run.sh/x", contents="")
        assert sorted(entry.name for entry in await tools.pod.list(tools.root)) == ["new", "run.sh", "twin"]

    pods.run(check, files={"run.sh": "a\nb\n"})


def test_a_file_is_deleted_and_nothing_else_is(pods: PodFixture) -> None:
    async def check(tools: PodTools) -> None:
        await tools.sh(f"cd {tools.root} && ln -s a link && ln -s /etc/hostname out && mkdir dir")
        assert await tools.text("delete_file", target_file="link") == "Deleted link."
        await tools.text("delete_file", target_file="out")
        assert await tools.sh("test -e /etc/hostname && echo there") == "there\n"
        await tools.text("delete_file", target_file="a", explanation="not needed")
        assert "does not exist" in await tools.error("environment", "delete_file", target_file="a")
        assert "is a directory" in await tools.error("environment", "delete_file", target_file="dir")

    pods.run(check, files={"a": "x"})


def test_nothing_outside_the_workspace_is_changed_whatever_a_path_leads_through(pods: PodFixture) -> None:
    async def check(tools: PodTools) -> None:
        outside = (await tools.sh('mktemp -d "${TMPDIR:-/tmp}/out.XXXX"')).strip()
        await tools.pod.write(f"{outside}/file", "precious\n")
        await tools.sh(
            f"cd {tools.root} && ln -s {outside} dir && ln -s {outside}/file file && ln -s {outside}/new dangling && "
            "ln -s dir/file twice && ln -s . self"
        )
        for path in ("dir/file", "file", "twice", f"{outside}/file", "dir/../dir/file", "self/self/file"):
            said = await tools.error("denied", "write", file_path=path, contents="gone")
            assert "outside the workspace" in said
            await tools.error("denied", "search_replace", file_path=path, old_string="precious", new_string="gone")
        for path in ("dangling", "dir/new", "dir/new/deep", "../escaped", "/escaped"):
            await tools.error("denied", "write", file_path=path, contents="x")
            await tools.error("denied", "search_replace", file_path=path, old_string="", new_string="x")
        await tools.error("denied", "delete_file", target_file="dir/file")
        await tools.error("denied", "delete_file", target_file=f"{outside}/file")
        assert await tools.sh(f"ls -A {outside} && cat {outside}/file") == "file\nprecious\n"
        assert await tools.text("read_file", target_file="dir/file") == "1|precious"  # reading is free
        await tools.text("write", file_path="self/inside", contents="fine\n")
        assert await tools.read("inside") == b"fine\n"

    pods.run(check)


def test_permission_errors_are_reported_and_change_nothing() -> None:
    async def check(tools: PodTools) -> None:
        await tools.sh(f"cd {tools.root} && chmod 000 secret && chmod 444 fixed && mkdir -p shut/in && chmod 000 shut")
        assert await tools.error("environment", "read_file", target_file="secret") == "secret: permission denied"
        assert "permission denied" in await tools.error("environment", "write", file_path="fixed", contents="x")
        assert "permission denied" in await tools.error("environment", "list_dir", target_directory="shut")
        assert "permission denied" in await tools.error("environment", "write", file_path="shut/in/x", contents="x")
        assert await tools.read("fixed") == b"b\n"
        await tools.sh(f"chmod 700 {tools.root}/shut")

    with open_pod_fixture("landlock") as pods:  # where a pod is an ordinary user
        pods.run(check, files={"secret": "a\n", "fixed": "b\n"})


def test_system_files_are_readable_and_a_full_disk_is_reported(pods: PodFixture) -> None:
    async def check(tools: PodTools) -> None:
        assert "root" in await tools.text("read_file", target_file="/etc/passwd")
        said = await tools.error("denied", "write", file_path="/etc/passwd", contents="")
        assert "outside the workspace" in said
        await tools.sh(f"head -c 100000000000 /dev/zero > {tools.root}/fill || true")
        assert "no space left" in await tools.error("environment", "write", file_path="a", contents="x" * 3_000_000)
        assert await tools.read("a") == b"whole\n"
        assert await tools.text("read_file", target_file="a") == "1|whole"
        assert "1|whole" in await tools.text("run_terminal_cmd", command="grep -n '' a | tr : '|'")
        await tools.sh(f"rm {tools.root}/fill")
        await tools.text("write", file_path="a", contents="x" * 3_000_000)

    if pods.backend != "namespace":
        pytest.skip("only there is a disk limited")
    pods.run(check, files={"a": "whole\n"})


def test_in_strict_training_a_file_that_was_never_read_is_not_overwritten(pods: PodFixture) -> None:
    async def check(tools: PodTools) -> None:
        said = await tools.error("environment", "write", file_path="old.py", contents="x")
        assert said == "old.py exists and has not been read in this session. Read it with read_file first."
        await tools.text("write", file_path="new.py", contents="x")
        await tools.text("write", file_path="new.py", contents="y")
        await tools.text("read_file", target_file="./old.py")
        await tools.text("write", file_path="old.py", contents="x")
        await tools.text("search_replace", file_path="third.py", old_string="", new_string="made\n")
        await tools.text("write", file_path="third.py", contents="z")

    pods.run(check, files={"old.py": "1"}, tool_set=ToolSet(strict=True))
