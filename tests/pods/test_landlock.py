"""Under a ruleset nothing outside can be read, written, run, connected to or signalled, by any detour."""

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

from etude.pods.runtime import capabilities, seccomp
from etude.pods.runtime.landlock import ruleset as landlock
from tests.pods.children import in_child, outcome

needs_landlock = pytest.mark.skipif(landlock.abi() < 6, reason="needs Landlock ABI 6 (Linux 6.12)")
SYSTEM = [path for path in ("/usr", "/bin", "/lib", "/lib64", sys.base_prefix, sys.prefix) if Path(path).exists()]


@dataclass(frozen=True)
class Places:
    """Three directories with a file `text` in each: to write in, to read from, and out of reach."""

    write: Path
    read: Path
    outside: Path


@pytest.fixture
def places(tmp_path: Path) -> Places:
    found = Places(tmp_path / "write", tmp_path / "read", tmp_path / "outside")
    for directory in (found.write, found.read, found.outside):
        directory.mkdir()
        (directory / "text").write_text(directory.name)
    return found


def confined(places: Places, action: Callable[[], Any], **options: Any) -> Any:
    """What `action` returns in a child restricted to the places."""

    def child() -> Any:
        landlock.restrict([places.read, "/proc"], [places.write, "/dev/null"], **{"execute": SYSTEM} | options)
        return action()

    return in_child(child)


def outcomes(*attempts: Sequence[Any]) -> list[str]:
    return [outcome(call, *arguments) for call, *arguments in attempts]


# -- asking


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
        (3, {"scope": False, "connect_ports": ()}, "TCP ports needs ABI 4 .Linux 6.7.; this kernel has 3"),
        (5, {}, "signals and abstract sockets inside needs ABI 6 .Linux 6.12.; this kernel has 5"),
    ],
)
def test_what_this_kernel_cannot_do_is_refused_not_left_out(
    monkeypatch: pytest.MonkeyPatch, version: int, options: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(landlock, "abi", lambda: version)
    with pytest.raises(OSError, match=message):
        landlock.restrict(**options)


@needs_landlock
def test_what_cannot_be_a_rule_is_refused_with_a_reason_and_nothing_is_restricted(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"landlock: cannot open .*/missing"):
        landlock.restrict([tmp_path / "missing"])
    with pytest.raises(ValueError, match="not the string '/usr'"):
        landlock.restrict("/usr")
    with pytest.raises(ValueError, match="70000 is not a TCP port"):
        landlock.restrict(connect_ports=[70000])
    with pytest.raises(ValueError, match="bind_ports needs connect_ports"):
        landlock.restrict(bind_ports=[80])
    (tmp_path / "file").write_text("still here")


def test_the_gaps_of_a_kernel_are_named() -> None:
    assert landlock.gaps(0) == ("there is no Landlock",)
    assert any("TCP ports" in gap for gap in landlock.gaps(3))
    assert not any("TCP ports" in gap for gap in landlock.gaps(4))
    assert len(landlock.gaps(1)) > len(landlock.gaps(6)) > len(landlock.gaps(9)) > 0


# -- files


@needs_landlock
def test_only_what_was_given_can_be_read(places: Places) -> None:
    def child() -> list[str]:
        return outcomes(
            ((places.read / "text").read_text,),
            ((places.write / "text").read_text,),
            (os.listdir, places.read),
            ((places.outside / "text").read_text,),
            (os.listdir, places.outside),
            (os.listdir, places.outside.parent),
            (os.listdir, "/"),
        )

    assert confined(places, child) == ["ok"] * 3 + ["EACCES"] * 4


@needs_landlock
def test_only_what_was_given_can_be_written(places: Places) -> None:
    def child() -> tuple[list[str], list[str]]:
        forbidden = (places.read, places.outside)
        refused = outcomes(
            *((directory.joinpath(name).write_text, "x") for directory in forbidden for name in ("text", "new")),
            *((os.truncate, directory / "text", 0) for directory in forbidden),
            *((os.unlink, directory / "text") for directory in forbidden),
            (os.mkdir, places.read / "new"),
            (os.symlink, "/", places.read / "new"),
            (os.mkfifo, places.read / "new"),
            (os.mknod, places.write / "null", 0o020666, 0),
        )
        allowed = outcomes(
            (places.write.joinpath("new").write_text, "x"),
            (os.truncate, places.write / "new", 0),
            (os.mkdir, places.write / "directory"),
            (os.link, places.write / "new", places.write / "directory" / "linked"),
            (os.rename, places.write / "new", places.write / "directory" / "renamed"),
            (os.symlink, "renamed", places.write / "directory" / "symbolic"),
            (os.mkfifo, places.write / "fifo"),
            (os.unlink, places.write / "fifo"),
            (shutil.rmtree, places.write / "directory"),
            (Path("/dev/null").write_text, "x"),
        )
        return refused, allowed

    refused, allowed = confined(places, child)
    assert refused == ["EACCES"] * 12
    assert allowed == ["ok"] * 10
    assert (places.read / "text").read_text() == "read"


@needs_landlock
def test_a_rule_for_a_file_is_for_that_file(places: Places) -> None:
    def child() -> list[str]:
        landlock.restrict([places.read / "text"], [places.write / "text"])
        return outcomes(
            ((places.read / "text").read_text,),
            ((places.write / "text").write_text, "x"),
            ((places.read / "text").write_text, "x"),
            ((places.write / "new").write_text, "x"),
            (os.listdir, places.read),
        )

    assert in_child(child) == ["ok"] * 2 + ["EACCES"] * 3


@needs_landlock
def test_links_and_renames_are_no_way_out_or_in(places: Places) -> None:
    (places.write / "symbolic").symlink_to(places.outside / "text")
    (places.write / "directory").symlink_to(places.outside)

    def child() -> list[str]:
        os.chdir(places.write)
        directory = os.open(".", os.O_PATH)
        os.symlink("../outside/text", "made")
        return outcomes(
            (Path("symbolic").read_text,),
            (Path("made").read_text,),
            (Path("made").write_text, "x"),
            (Path("directory/text").read_text,),
            (Path("../outside/text").read_text,),
            (Path(f"/proc/self/fd/{directory}/../outside/text").read_text,),
            (Path("/proc/self/root").joinpath(*places.outside.parts[1:], "text").read_text,),
            (os.link, places.outside / "text", "stolen"),
            (os.rename, places.outside / "text", "stolen"),
            (os.rename, "text", places.outside / "planted"),
            (os.link, "text", places.outside / "planted"),
            (os.rename, places.outside, "stolen"),
            # from where it may only be read to where it could be written
            (os.link, places.read / "text", "writable"),
            (os.rename, places.read / "text", "writable"),
        )

    found = confined(places, child)
    assert set(found) <= {"EACCES", "EXDEV"}, found
    assert [path.name for path in places.outside.iterdir()] == ["text"]


@needs_landlock
def test_only_what_was_given_can_be_run(places: Places) -> None:
    true = shutil.which("true")
    assert true
    for directory in (places.read, places.write):
        shutil.copy(true, directory / "program")

    def child() -> list[str]:
        programs = (places.read / "program", places.write / "program", true)
        return outcomes(*((subprocess.check_call, [program]) for program in programs))

    assert confined(places, child) == ["EACCES", "EACCES", "ok"]
    assert confined(places, child, execute=[*SYSTEM, places.write]) == ["EACCES", "ok", "ok"]


@needs_landlock
def test_programs_inherit_the_restriction(places: Places) -> None:
    def child() -> list[int]:
        files = [places.read / "text", places.outside / "text"]
        commands = [["cat", file] for file in files] + [["sh", "-c", f"sh -c 'cat {file}'"] for file in files]
        return [subprocess.run(command, capture_output=True, check=False).returncode for command in commands]

    assert confined(places, child) == [0, 1, 0, 1]


@needs_landlock
def test_a_second_restriction_only_takes_away(places: Places) -> None:
    def child() -> list[str]:
        landlock.restrict([places.read, places.outside])
        return outcomes(
            ((places.read / "text").read_text,),
            ((places.outside / "text").read_text,),
            ((places.write / "text").read_text,),
        )

    assert confined(places, child) == ["ok", "EACCES", "EACCES"]


@needs_landlock
@pytest.mark.parametrize("version", [3, 4, 5])
def test_the_ruleset_of_an_older_abi_is_as_tight_for_files(
    monkeypatch: pytest.MonkeyPatch, places: Places, version: int
) -> None:
    monkeypatch.setattr(landlock, "abi", lambda: version)

    def child() -> list[str]:
        files = (places.outside / "text", places.read / "text")
        return outcomes(*((os.truncate, file, 0) for file in files), (files[0].read_text,), (files[1].read_text,))

    assert confined(places, child, scope=False) == ["EACCES"] * 3 + ["ok"]


# -- the network


@needs_landlock
def test_tcp_goes_to_the_given_ports_only(places: Places) -> None:
    with socket.create_server(("127.0.0.1", 0)) as allowed, socket.create_server(("127.0.0.1", 0)) as other:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]

        def child() -> list[str]:
            return outcomes(
                (socket.create_connection, allowed.getsockname()),
                (socket.create_connection, other.getsockname()),
                (socket.create_server, ("127.0.0.1", port)),
            )

        ports = {"connect_ports": [allowed.getsockname()[1]]}
        assert confined(places, child) == ["ok", "ok", "ok"]
        assert confined(places, child, connect_ports=()) == ["EACCES"] * 3
        assert confined(places, child, **ports) == ["ok", "EACCES", "EACCES"]
        assert confined(places, child, **ports, bind_ports=[port]) == ["ok", "EACCES", "ok"]


@needs_landlock
def test_with_the_tcp_only_filter_no_other_way_to_a_port_is_left(places: Places) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = other.getsockname()

        def fast_open() -> None:
            with socket.socket() as client:
                client.sendto(b"x", 0x20000000, address)

        def multipath() -> None:
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262) as client:
                client.connect(address)

        def child() -> list[str]:
            seccomp.install(program)
            return outcomes((socket.create_connection, address), (fast_open,), (multipath,))

        program = seccomp.build_filter("tcp-only")
        assert confined(places, child, connect_ports=()) == ["EACCES", "ENOTSUP", "EPROTONOSUPPORT"]


# -- processes


@needs_landlock
def test_signals_reach_own_children_only(places: Places) -> None:
    def child() -> list[Any]:
        with subprocess.Popen(["sleep", "60"]) as own:
            own.terminate()
        return [*outcomes((os.kill, os.getppid(), 0), (os.kill, os.getpid(), 0)), own.returncode]

    assert confined(places, child) == ["EPERM", "ok", -signal.SIGTERM]
    assert confined(places, child, scope=False) == ["ok", "ok", -signal.SIGTERM]


@needs_landlock
def test_abstract_sockets_outside_cannot_be_connected_to(places: Places) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(b"\0" + os.urandom(8).hex().encode())
        server.listen()

        def child() -> str:
            with socket.socket(socket.AF_UNIX) as client:
                return outcome(client.connect, server.getsockname())

        assert confined(places, child) == "EPERM"
        assert confined(places, child, scope=False) == "ok"


@needs_landlock
def test_the_memory_and_environment_of_processes_outside_cannot_be_read(places: Places) -> None:
    def child() -> list[str]:
        capabilities.drop((), bounding=False)  # root's perfmon reads the memory of all, whatever Landlock says
        outside = Path("/proc", str(os.getppid()))
        return outcomes(
            ((outside / "environ").read_text,),
            ((outside / "mem").open, "rb"),
            ((outside / "root" / places.outside.relative_to("/") / "text").read_text,),
            (Path("/proc/self/environ").read_text,),
        )

    assert confined(places, child) == ["EACCES"] * 3 + ["ok"]
