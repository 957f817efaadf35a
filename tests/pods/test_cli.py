"""`etude pods` as a process: arguments, streams, a terminal and exit codes."""

import importlib.util
import json
import math
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from fcntl import ioctl
from pathlib import Path

import pytest

from etude.cli import app
from etude.errors import InputError
from etude.pods.cli.units import parse_seconds, parse_size, show_seconds, show_size
from etude.pods.fleet import check_isolation
from etude.pods.pod import Capabilities, Unsupported
from etude.pods.runtime.native.build import PREBUILT
from tests.pods.needs import namespaces, need
from tests.pods.serving import ENVIRONMENT, TOKEN, need_namespaces, server, state_directory
from tests.pods.test_conformance import OVERFLOW_ID, command_of


@pytest.fixture(scope="module")
def state() -> Iterator[Path]:
    need_namespaces()
    with state_directory() as directory:
        yield directory


def arguments(*words: object) -> list[str]:
    return [sys.executable, "-m", "etude.cli", "pods", *map(str, words)]


def pods(state: Path, *words: object, stdin: bytes = b"", **environment: str) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(
        arguments(*words), input=stdin, capture_output=True, env=environment_of(state, **environment), timeout=60
    )
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def environment_of(state: Path, **more: str) -> dict[str, str]:
    return {**ENVIRONMENT, "ETUDE_PODS": str(state), **more}


def fine(state: Path, *words: object) -> str:
    done = pods(state, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_run_passes_streams_and_the_exit_code_through(state: Path) -> None:
    done = pods(state, "run", "--env", "A=b", "--cwd", "/tmp", "--", "sh", "-c", "echo $A $PWD; echo bad >&2; exit 7")
    assert (done.returncode, done.stdout, done.stderr) == (7, "b /tmp\n", "bad\n")
    assert pods(state, "run", "-i", "--", "cat", stdin=b"x" * 3_000_000).stdout == "x" * 3_000_000
    assert pods(state, "run", "--", "cat", stdin=b"not asked for").stdout == ""
    assert pods(state, "run", "--", "no-such-program").returncode == 127
    late = pods(state, "run", "--timeout", "0.3s", "--", "sleep", "9")
    assert (late.returncode, late.stderr) == (137, "etude: the command was killed: its timeout passed\n")
    assert fine(state, "ps") == "no pods"


def test_run_says_that_a_pod_ran_out_of_memory(state: Path) -> None:
    need(limit="memory")
    full = pods(state, "run", "--memory", "64M", "--", "python3", "-c", "b'x' * (256 << 20)")
    assert "the pod ran out of memory (limit 64 MiB)" in full.stderr


def test_a_detached_pod_can_be_used_by_other_invocations(state: Path, tmp_path: Path) -> None:
    need(snapshot="fs-live")
    pod = fine(state, "run", "-d", "--ttl", "5m", "--", "sh", "-c", "echo begun; sleep 600")
    try:
        assert fine(state, "exec", pod[:6], "--", "cat", "run.log") == "begun"
        (shown,) = json.loads(fine(state, "ps", "--json"))
        assert (shown["id"], shown["state"], shown["stats"]["pids"]) == (pod, "running", 3)
        assert 200 < shown["remaining"] <= 300
        (tmp_path / "tree").mkdir()
        (tmp_path / "tree" / "file").write_text("there and back")
        fine(state, "cp", tmp_path / "tree", f"{pod}:/tmp/")
        fine(state, "cp", f"{pod}:/tmp/tree/file", tmp_path)
        assert (tmp_path / "file").read_text() == "there and back"
        snapshot = fine(state, "snapshot", pod)
        children = fine(state, "fork", pod, "-n", "2").splitlines()
        assert [fine(state, "exec", child, "--", "cat", "/tmp/tree/file") for child in children] == [
            "there and back"
        ] * 2
        assert fine(state, "run", snapshot, "--", "cat", "/tmp/tree/file") == "there and back"
        fine(state, "export", snapshot, tmp_path / "snapshot.tar")
        fine(state, "forget", snapshot)
        assert fine(state, "import", tmp_path / "snapshot.tar") == snapshot
        assert snapshot in fine(state, "snapshots")
        assert "created" in fine(state, "events", pod)
        fine(state, "close", *children)
        assert [shown["id"] for shown in json.loads(fine(state, "ps", "--json"))] == [pod]
    finally:
        removed = json.loads(fine(state, "gc", "--all", "--json"))
    assert (removed["pods"], removed["snapshots"]) == ([pod], [snapshot])
    assert fine(state, "ps") == "no pods"


def test_images_are_added_used_and_removed(state: Path, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM host\nRUN echo built > /made\nENV A=b\nCMD cat /made\n")
    assert fine(state, "image", "add", "mine", "--dockerfile", tmp_path / "Dockerfile").startswith("mine  ")
    assert fine(state, "run", "mine") == "built"
    assert "mine" in [image["name"] for image in json.loads(fine(state, "images", "--json"))]
    fine(state, "image", "remove", "mine")
    assert pods(state, "run", "mine").returncode == 2


BAD = (
    (("run", "--memory", "lots", "--", "true"), "--memory lots: expected a size"),
    (("run", "nonsense", "--", "true"), "no image or snapshot 'nonsense'"),
    (("run",), "no command"),
    (("run", "-t", "--", "sh"), "not on a terminal"),
    (("run", "-d", "--allow", "example.org"), "etude pods serve"),
    (("exec", "ffff", "--", "true"), "no pods whose id begins with 'ffff'"),
    (("cp", "a", "b"), "must be POD:path"),
    (("close",), "give pod ids, or --all"),
    (("serve", "--token-file", os.devnull), "openssl"),
    (("serve", "--no-token", "--listen", "0.0.0.0:0"), "needs a token"),
    (("ps", "--host", "ftp://x"), "is not the address"),
    (("image", "add", "x"), "give one of"),
    (("doctor", "--backend", "x"), "expected one of all"),
)


@pytest.mark.parametrize(("words", "message"), BAD)
def test_bad_input_is_explained(
    state: Path, words: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ETUDE_PODS", str(state))
    monkeypatch.delenv("ETUDE_PODS_TOKEN", raising=False)
    with pytest.raises(InputError, match=re.escape(message)):
        app(["pods", *words], standalone_mode=False)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing(state: Path, number: int) -> None:
    command = arguments("run", "--", "sh", "-c", "echo up; sleep 60")
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment_of(state)
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"up\n"
        running.send_signal(number)
        _, errors = running.communicate(timeout=20)
    assert running.returncode == 130, errors
    assert b"Traceback" not in errors
    assert list((state / "pods").iterdir()) == []


def test_a_terminal_gets_the_window_size_and_its_changes(state: Path) -> None:
    child, terminal = pty.fork()
    if child == 0:
        os.execve(sys.executable, arguments("run", "-t", "--", "sh"), environment_of(state))
    try:
        ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 99, 0, 0))
        type_and_see(terminal, b"", b"# ")
        type_and_see(terminal, b"stty size\n", b"33 99")
        ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 44, 111, 0, 0))
        resized = b"until [ \"$(stty size)\" = '44 111' ]; do sleep 0.05; done; echo re''sized\n"
        type_and_see(terminal, resized, b"resized")
        type_and_see(terminal, b"echo be''gun; sleep 600\n", b"begun")
        # It goes to the command, not to the CLI. The shell loses one that comes while it starts the command.
        type_and_see(terminal, b"\x03", b"# ", repeat_s=3)
        os.write(terminal, b"exit 5\n")
        deadline, status = time.monotonic() + 60, (0, 0)
        while status == (0, 0):
            drain(terminal)
            status = os.waitpid(child, os.WNOHANG)
            assert time.monotonic() < deadline
        assert os.waitstatus_to_exitcode(status[1]) == 5
    finally:
        os.close(terminal)


def test_a_command_without_a_terminal_cannot_control_ours(state: Path) -> None:
    child, terminal = pty.fork()
    if child == 0:
        os.execve(sys.executable, arguments("run", "--", "printf", r"\033[2Jseen\n"), environment_of(state))
    try:
        type_and_see(terminal, b"", "␛[2Jseen".encode())
        os.waitpid(child, 0)
    finally:
        os.close(terminal)


def type_and_see(terminal: int, keys: bytes, wanted: bytes, repeat_s: float = math.inf) -> None:
    """Type keys, again after every `repeat_s`, until the wanted text is seen."""
    os.write(terminal, keys)
    typed, seen, deadline = time.monotonic(), b"", time.monotonic() + 60
    while wanted not in seen:
        assert time.monotonic() < deadline, f"typed {keys!r}, saw {seen!r}, expected {wanted!r}"
        seen += drain(terminal)
        if time.monotonic() > typed + repeat_s:
            os.write(terminal, keys)
            typed = time.monotonic()


def drain(terminal: int) -> bytes:
    if select.select([terminal], [], [], 0.1)[0]:
        try:
            return os.read(terminal, 1 << 16)
        except OSError:  # EIO: the other end is closed
            time.sleep(0.05)
    return b""


@pytest.mark.slow
def test_every_command_works_on_a_remote_host(state: Path, tmp_path: Path) -> None:
    with server() as running:

        def there(*words: object) -> str:
            return fine(state, *words, "--host", running.url)

        def run_there(*words: object, command: tuple[str, ...]) -> "subprocess.CompletedProcess[str]":
            return pods(state, *words, "--host", running.url, "--", *command)

        assert run_there("run", command=("sh", "-c", "echo far; exit 4")).returncode == 4
        pod = run_there("run", "-d", command=("sleep", "600")).stdout.strip()
        assert run_there("exec", pod[:6], command=("hostname",)).stdout == "pod\n"
        (shown,) = json.loads(there("ps", "--json"))
        assert shown["id"] == pod
        (tmp_path / "here").write_text("sent")
        there("cp", tmp_path / "here", f"{pod}:/tmp/there")
        (child,) = there("fork", pod).splitlines()
        assert run_there("exec", child, command=("cat", "/tmp/there")).stdout == "sent"
        snapshot = there("snapshot", pod)
        there("export", snapshot, tmp_path / "file.tar")
        assert fine(state, "import", tmp_path / "file.tar") == snapshot
        assert "snapshot" in there("events", pod)
        there("close", "--all")
        assert there("ps") == "no pods"
        wrong = pods(state, "ps", "--host", running.url, ETUDE_PODS_TOKEN="x" * len(TOKEN))
        assert (wrong.returncode, "token" in wrong.stderr) == (2, True)


@pytest.mark.slow
def test_an_operator_looks_after_several_hosts(state: Path) -> None:
    with server() as first, server("--max-pods", "5") as second:
        both = ("--host", first.url, "--host", second.url)
        ids = {}
        for host in (first, second):
            started = pods(state, "run", "-d", "--host", host.url, "--", "sleep", "600")
            ids[host.url] = started.stdout.strip()
        assert {row["host"]: row["id"] for row in json.loads(fine(state, "ps", *both, "--json"))} == ids
        listed = fine(state, "ps", *both).splitlines()
        assert [line.split()[:2] for line in listed[1:]] == [[url, id] for url, id in ids.items()]
        one_gone = pods(state, "ps", "--host", "http://127.0.0.1:9", *both, "--json")
        assert (one_gone.returncode, len(json.loads(one_gone.stdout))) == (1, 2)
        assert (
            one_gone.stderr.strip() == "etude: host http://127.0.0.1:9 does not answer: All connection attempts failed"
        )
        assert fine(state, "drain", "--host", second.url) == f"{second.url} takes no new pods"
        refused = pods(state, "run", "--host", second.url, "--", "true")
        assert "is draining and takes no new pods" in refused.stderr
        text = fine(state, "doctor", *both)
        for words in (
            f"{first.url} takes pods, 1 of at most",
            f"{second.url} draining: takes no new pods, 1 of at most 5",
        ):
            assert words in text, text
        assert text.count("namespace   works") == text.count("system      ") == 2
        found = json.loads(fine(state, "doctor", *both, "--json"))
        assert [found[host.url]["report"]["draining"] for host in (first, second)] == [False, True]
        fine(state, "drain", "--off", "--host", second.url)
        assert pods(state, "run", "--host", second.url, "--", "true").returncode == 0
        for host in (first, second):
            fine(state, "close", "--all", "--host", host.url)


def test_doctor_reports_what_works_and_why(state: Path) -> None:
    found = json.loads(fine(state, "doctor", "--backend", "namespace", "--json"))
    (backend,) = found["backends"]
    assert backend["works"]
    assert backend["capabilities"]["isolation"] == "namespace"
    assert found["state"]["path"] == str(state)
    assert {"kernel", "cgroups", "helper", "pressure", "default_limits"} <= set(found)
    text = fine(state, "doctor", "--backend", "namespace")
    for word in ("kernel", "namespace   works", "cgroups", "helper", "pressure", "state"):
        assert word in text


@pytest.fixture(scope="module")
def ordinary_home() -> Iterator[Path]:
    """A home directory of an ordinary user, with the compiled helper after the first command."""
    with tempfile.TemporaryDirectory(prefix="etude-home-") as home:
        if os.geteuid() == 0:
            os.chown(home, OVERFLOW_ID, OVERFLOW_ID)
        yield Path(home)


def as_ordinary_user(home: Path, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run `etude pods` as an ordinary user."""
    command, environment, reason = command_of("nobody")
    if reason:
        pytest.skip(reason)
    environment = {**environment, "HOME": str(home), "TMPDIR": str(home), **variables}
    whole = [*command, "-m", "etude.cli", "pods", *arguments]
    return subprocess.run(whole, cwd="/", env=environment, capture_output=True, text=True, timeout=120)


def test_doctor_says_what_is_weaker_for_an_ordinary_user(ordinary_home: Path) -> None:
    done = as_ordinary_user(ordinary_home, "doctor", "--backend", "namespace", "--json")
    (found,) = json.loads(done.stdout)["backends"]
    if not found["works"]:
        pytest.skip(found["reason"])
    limits, notes = found["capabilities"]["limits"], "\n".join(found["capabilities"]["notes"])
    missing = re.findall(r"no limit on ([a-z, ]+):", notes)
    assert not set(limits) & {name for names in missing for name in names.split(", ")}, (limits, notes)
    assert {"disk", "inodes", "pids"} <= set(limits)
    assert found["capabilities"]["disk_limits"] == "soft"
    assert not found["capabilities"]["own_users"]
    for text in (
        "with storage=disk, limits on disk and inodes are soft",
        "pods share a user outside",
        "one user in a pod",
    ):
        assert text in notes
    weak = "; ".join(found["refused_if_strong"])
    assert "users of its own" in weak
    assert "hard limits of files on disk" in weak


def test_weaker_isolation_can_be_refused(state: Path, ordinary_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = as_ordinary_user(
        ordinary_home, "run", "--backend", "namespace", "--", "true", ETUDE_POD_ISOLATION="strong"
    )
    assert refused.returncode != 0
    assert "ETUDE_POD_ISOLATION=strong refuses the namespace backend here, without users of its own" in refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 1
    here = namespaces().capabilities
    assert here is not None
    strong = pods(state, "run", "--", "echo", "ran", ETUDE_POD_ISOLATION="strong")
    assert (strong.stdout == "ran\n") is not bool(here.lacks(isolation=True)), (strong, here)
    monkeypatch.setenv("ETUDE_POD_ISOLATION", "strong")
    with pytest.raises(Unsupported, match="without namespaces"):
        check_isolation("landlock", Capabilities("lsm"))
    monkeypatch.setenv("ETUDE_POD_ISOLATION", "stronger")
    with pytest.raises(InputError, match="expected any or strong"):
        check_isolation("namespace", here)
    monkeypatch.delenv("ETUDE_POD_ISOLATION")
    check_isolation("subprocess", Capabilities("none"))


def test_without_a_compiler_run_and_doctor_say_what_to_install(state: Path, tmp_path: Path) -> None:
    bare = {"PATH": "/nowhere", "CC": "", "XDG_CACHE_HOME": str(tmp_path)}
    if PREBUILT.exists() or importlib.util.find_spec("ziglang"):
        pytest.skip("the helper can be had here without a compiler on the path")
    advice = "install a C compiler (gcc or clang), or `pip install ziglang`"
    refused = pods(state, "run", "--", "true", **bare)
    assert refused.returncode != 0
    assert refused.stderr.strip().endswith(advice)
    assert len(refused.stderr.strip().splitlines()) == 1
    found = json.loads(pods(state, "doctor", "--json", **bare).stdout)
    assert found["helper"]["reason"].endswith(advice)
    assert not any(each["works"] for each in found["backends"])


def test_sizes_and_durations() -> None:
    sizes = ("512", "1K", "512M", "1.5G", "2GiB", "3 MB")
    assert [parse_size(text, "x") for text in sizes] == [512, 1024, 512 << 20, 3 << 29, 2 << 30, 3 << 20]
    assert [parse_seconds(text, "x") for text in ("90", "1.5s", "5m", "1h30m", "2d")] == [90, 1.5, 300, 5400, 172800]
    for text in ("", "0", "-1M", "1X", "M", "1M5"):
        with pytest.raises(InputError, match="expected a size"):
            parse_size(text, "--memory")
        with pytest.raises(InputError, match="expected a time"):
            parse_seconds(text.lower().replace("m", "y"), "--ttl")
    assert (show_size(512 << 20), show_size(None), show_seconds(7300)) == ("512 MiB", "-", "2h")
