"""Under a ruleset nothing outside can be read, written, executed, connected to or signalled, not even indirectly."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from etude.pods.runtime import landlock, seccomp
from tests.pods.children import in_child, outcome
from tests.pods.confining import drop_capabilities, install, restrict

needs_landlock = pytest.mark.skipif(landlock.abi() < 6, reason="needs Landlock ABI 6 (Linux 6.12)")
SYSTEM = [path for path in ("/usr", "/bin", "/lib", "/lib64", sys.base_prefix, sys.prefix) if Path(path).exists()]


@dataclass(frozen=True)
class Directories:
    """Three directories with a file `text` in each: writable, readable and inaccessible."""

    write: Path
    read: Path
    outside: Path


@pytest.fixture
def directories(tmp_path: Path) -> Directories:
    found = Directories(tmp_path / "write", tmp_path / "read", tmp_path / "outside")
    for directory in (found.write, found.read, found.outside):
        directory.mkdir()
        (directory / "text").write_text(directory.name)
    return found


def confined(directories: Directories, action: Callable[[], Any], **options: Any) -> Any:
    """Return the result of `action` in a child restricted to the directories."""

    def child() -> Any:
        restrict([directories.read, "/proc"], [directories.write, "/dev/null"], **{"execute": SYSTEM} | options)
        return action()

    return in_child(child)


def outcomes(*attempts: Sequence[Any]) -> list[str]:
    return [outcome(call, *arguments) for call, *arguments in attempts]


# -- arguments and ABI versions


def test_an_abi_has_the_rights_of_those_before_it() -> None:
    rights = [landlock.file_rights(version) for version in range(10)]
    assert rights[0] == 0
    assert rights[1] == 0x1FFF
    assert rights[4] == rights[3] == 0x7FFF
    assert rights[8] == 0xFFFF
    assert rights[9] == 0x1FFFF


@pytest.mark.parametrize(
    ("version", "options", "message"),
    [
        (0, {"scope": False}, "needs ABI 1 .Linux 5.13.; this kernel has no Landlock"),
        (2, {"scope": False}, "truncated needs ABI 3 .Linux 6.2.; this kernel has 2"),
        (3, {"scope": False, "tcp": False}, "TCP ports needs ABI 4 .Linux 6.7.; this kernel has 3"),
        (5, {}, "signals and abstract sockets inside needs ABI 6 .Linux 6.12.; this kernel has 5"),
    ],
)
def test_restrictions_that_this_kernel_lacks_are_refused(
    monkeypatch: pytest.MonkeyPatch, version: int, options: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(landlock, "abi", lambda: version)
    with pytest.raises(OSError, match=message):
        restrict(**options)


@needs_landlock
def test_paths_that_do_not_exist_have_no_rule(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ruleset = landlock.build_ruleset([str(tmp_path / "missing"), str(tmp_path / "file")])
    assert [rule[8:] for rule in ruleset.rules] == [os.fsencode(tmp_path / "file")]


# -- files


@needs_landlock
def test_only_the_given_paths_can_be_read(directories: Directories) -> None:
    def child() -> list[str]:
        return outcomes(
            ((directories.read / "text").read_text,),
            ((directories.write / "text").read_text,),
            (os.listdir, directories.read),
            ((directories.outside / "text").read_text,),
            (os.listdir, directories.outside),
            (os.listdir, directories.outside.parent),
            (os.listdir, "/"),
        )

    assert confined(directories, child) == ["ok"] * 3 + ["EACCES"] * 4


@needs_landlock
def test_only_the_given_paths_can_be_written(directories: Directories) -> None:
    def child() -> tuple[list[str], list[str]]:
        forbidden = (directories.read, directories.outside)
        refused = outcomes(
            *((directory.joinpath(name).write_text, "x") for directory in forbidden for name in ("text", "new")),
            *((os.truncate, directory / "text", 0) for directory in forbidden),
            *((os.unlink, directory / "text") for directory in forbidden),
            (os.mkdir, directories.read / "new"),
            (os.symlink, "/", directories.read / "new"),
            (os.mkfifo, directories.read / "new"),
            (os.mknod, directories.write / "null", 0o020666, 0),
        )
        allowed = outcomes(
            (directories.write.joinpath("new").write_text, "x"),
            (os.truncate, directories.write / "new", 0),
            (os.mkdir, directories.write / "directory"),
            (os.link, directories.write / "new", directories.write / "directory" / "linked"),
            (os.rename, directories.write / "new", directories.write / "directory" / "renamed"),
            (os.symlink, "renamed", directories.write / "directory" / "symbolic"),
            (os.mkfifo, directories.write / "fifo"),
            (os.unlink, directories.write / "fifo"),
            (shutil.rmtree, directories.write / "directory"),
            (Path("/dev/null").write_text, "x"),
        )
        return refused, allowed

    refused, allowed = confined(directories, child)
    assert refused == ["EACCES"] * 12
    assert allowed == ["ok"] * 10
    assert (directories.read / "text").read_text() == "read"


@needs_landlock
def test_a_rule_for_a_file_is_for_that_file(directories: Directories) -> None:
    def child() -> list[str]:
        restrict([directories.read / "text"], [directories.write / "text"])
        return outcomes(
            ((directories.read / "text").read_text,),
            ((directories.write / "text").write_text, "x"),
            ((directories.read / "text").write_text, "x"),
            ((directories.write / "new").write_text, "x"),
            (os.listdir, directories.read),
        )

    assert in_child(child) == ["ok"] * 2 + ["EACCES"] * 3


@needs_landlock
def test_links_and_renames_do_not_bypass_the_rules(directories: Directories) -> None:
    (directories.write / "symbolic").symlink_to(directories.outside / "text")
    (directories.write / "directory").symlink_to(directories.outside)

    def child() -> list[str]:
        os.chdir(directories.write)
        directory = os.open(".", os.O_PATH)
        os.symlink("../outside/text", "made")
        return outcomes(
            (Path("symbolic").read_text,),
            (Path("made").read_text,),
            (Path("made").write_text, "x"),
            (Path("directory/text").read_text,),
            (Path("../outside/text").read_text,),
            (Path(f"/proc/self/fd/{directory}/../outside/text").read_text,),
            (Path("/proc/self/root").joinpath(*directories.outside.parts[1:], "text").read_text,),
            (os.link, directories.outside / "text", "stolen"),
            (os.rename, directories.outside / "text", "stolen"),
            (os.rename, "text", directories.outside / "planted"),
            (os.link, "text", directories.outside / "planted"),
            (os.rename, directories.outside, "stolen"),
            # from a read-only to a writable directory
            (os.link, directories.read / "text", "writable"),
            (os.rename, directories.read / "text", "writable"),
        )

    found = confined(directories, child)
    assert set(found) <= {"EACCES", "EXDEV"}, found
    assert [path.name for path in directories.outside.iterdir()] == ["text"]


@needs_landlock
def test_only_the_given_paths_can_be_executed(directories: Directories) -> None:
    true = shutil.which("true")
    assert true
    for directory in (directories.read, directories.write):
        shutil.copy(true, directory / "program")

    def child() -> list[str]:
        programs = (directories.read / "program", directories.write / "program", true)
        return outcomes(*((subprocess.check_call, [program]) for program in programs))

    assert confined(directories, child) == ["EACCES", "EACCES", "ok"]
    assert confined(directories, child, execute=[*SYSTEM, directories.write]) == ["EACCES", "ok", "ok"]


@needs_landlock
def test_programs_inherit_the_restriction(directories: Directories) -> None:
    def child() -> list[int]:
        files = [directories.read / "text", directories.outside / "text"]
        commands = [["cat", file] for file in files] + [["sh", "-c", f"sh -c 'cat {file}'"] for file in files]
        return [subprocess.run(command, capture_output=True, check=False).returncode for command in commands]

    assert confined(directories, child) == [0, 1, 0, 1]


@needs_landlock
def test_a_second_restriction_only_takes_away(directories: Directories) -> None:
    def child() -> list[str]:
        restrict([directories.read, directories.outside])
        return outcomes(
            ((directories.read / "text").read_text,),
            ((directories.outside / "text").read_text,),
            ((directories.write / "text").read_text,),
        )

    assert confined(directories, child) == ["ok", "EACCES", "EACCES"]


@needs_landlock
@pytest.mark.parametrize("version", [3, 4, 5])
def test_the_ruleset_of_an_older_abi_is_as_tight_for_files(
    monkeypatch: pytest.MonkeyPatch, directories: Directories, version: int
) -> None:
    monkeypatch.setattr(landlock, "abi", lambda: version)

    def child() -> list[str]:
        files = (directories.outside / "text", directories.read / "text")
        return outcomes(*((os.truncate, file, 0) for file in files), (files[0].read_text,), (files[1].read_text,))

    assert confined(directories, child, scope=False) == ["EACCES"] * 3 + ["ok"]


# -- network


@needs_landlock
def test_tcp_is_refused_unless_allowed(directories: Directories) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def child() -> list[str]:
            return outcomes((socket.create_connection, server.getsockname()), (socket.create_server, ("127.0.0.1", 0)))

        assert confined(directories, child) == ["ok", "ok"]
        assert confined(directories, child, tcp=False) == ["EACCES", "EACCES"]


@needs_landlock
def test_the_tcp_only_filter_closes_every_other_way_to_a_port(directories: Directories) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = other.getsockname()

        def fast_open() -> None:
            with socket.socket() as client:
                client.sendto(b"x", 0x20000000, address)

        def multipath() -> None:
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262) as client:
                client.connect(address)

        def child() -> list[str]:
            install(program)
            return outcomes((socket.create_connection, address), (fast_open,), (multipath,))

        program = seccomp.build_filter("tcp-only")
        assert confined(directories, child, tcp=False) == ["EACCES", "ENOTSUP", "EPROTONOSUPPORT"]


# -- processes


@needs_landlock
def test_signals_reach_own_children_only(directories: Directories) -> None:
    def child() -> list[Any]:
        with subprocess.Popen(["sleep", "60"]) as own:
            own.terminate()
        return [*outcomes((os.kill, os.getppid(), 0), (os.kill, os.getpid(), 0)), own.returncode]

    assert confined(directories, child) == ["EPERM", "ok", -signal.SIGTERM]
    assert confined(directories, child, scope=False) == ["ok", "ok", -signal.SIGTERM]


@needs_landlock
def test_abstract_sockets_outside_cannot_be_connected_to(directories: Directories) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(b"\0" + os.urandom(8).hex().encode())
        server.listen()

        def child() -> str:
            with socket.socket(socket.AF_UNIX) as client:
                return outcome(client.connect, server.getsockname())

        assert confined(directories, child) == "EPERM"
        assert confined(directories, child, scope=False) == "ok"


@needs_landlock
def test_the_memory_and_environment_of_processes_outside_cannot_be_read(directories: Directories) -> None:
    def child() -> list[str]:
        drop_capabilities()  # with perfmon root can read all memory despite Landlock
        outside = Path("/proc", str(os.getppid()))
        return outcomes(
            ((outside / "environ").read_text,),
            ((outside / "mem").open, "rb"),
            ((outside / "root" / directories.outside.relative_to("/") / "text").read_text,),
            (Path("/proc/self/environ").read_text,),
        )

    assert confined(directories, child) == ["EACCES"] * 3 + ["ok"]
