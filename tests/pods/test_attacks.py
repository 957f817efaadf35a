"""Attacks from inside a pod on the kernel, the host's files, sockets and secrets, and the guest init: all refused.

`attack_script.py` runs inside, once for each zygote; every attack is a test here. Afterwards the host and other pods
still work, and nothing is left behind.
"""

import asyncio
import json
import os
import socket
import tempfile
from pathlib import Path

import pytest

from etude.pods.fleet import open_host
from etude.pods.pod import Pod, PodError
from etude.pods.runtime.backend import LocalPod
from etude.pods.runtime.namespaces import ZYGOTE
from tests.pods import inventory
from tests.pods.attacking import run_in_pod, well
from tests.pods.needs import need

SCRIPT = Path(__file__).with_name("attack_script.py")
SECRET = "secret-6f1c0d1e"


@pytest.fixture(scope="module")
def findings(state: Path) -> dict[str, str]:
    """Return the outcomes of the script, with bait for every attack on the host."""
    os.environ["ETUDE_ATTACK_SECRET"] = SECRET
    private = tempfile.TemporaryDirectory(prefix="etude-hidden-")
    with private as directory, socket.create_server(("127.0.0.1", 0)) as server:
        hidden = Path(directory) / "root" / ".ssh" / "id_ed25519"
        hidden.parent.mkdir(parents=True)
        hidden.write_text(SECRET)
        abstract = socket.socket(socket.AF_UNIX)
        abstract.bind(f"\0etude-attack-{os.getpid()}")
        abstract.listen()
        docker = socket.socket(socket.AF_UNIX)
        docker.bind(f"{directory}/docker.sock")
        docker.listen()
        facts = {
            "port": server.getsockname()[1],
            "abstract": f"etude-attack-{os.getpid()}",
            "secret": SECRET,
            "hidden": [str(hidden), directory, str(state), str(Path(__file__)), str(Path.home() / ".ssh")],
            "sockets": [f"{directory}/docker.sock", f"{state}/{ZYGOTE}.sock"],
            "private_names": [str(state), directory],
        }
        try:
            return asyncio.run(run_script(state, facts))
        finally:
            abstract.close()
            docker.close()


async def run_script(state: Path, facts: dict[str, object]) -> dict[str, str]:
    host = await open_host("namespace", state)
    try:
        before = await inventory.baseline(host)
        pod, other = await host.create(), await host.create()
        await other.write("/tmp/file-of-the-other", SECRET)
        facts = {**facts, "hidden": [*facts["hidden"], "/tmp/file-of-the-other", str(state / "pods" / other.id)]}  # type: ignore[misc]
        facts["sockets"] = [*facts["sockets"], *(f"{state}/pods/{one.id}/agent.sock" for one in (pod, other))]  # type: ignore[misc]
        await pod.write("attack.py", SCRIPT.read_bytes())
        result = await pod.exec(["python3", "attack.py", json.dumps(facts)], timeout=60)
        assert result.exit_code == 0, result
        found: dict[str, str] = json.loads(result.stdout)
        found["the pod afterwards"] = await well(pod)
        found["the other pod afterwards"] = await well(other)
        await pod.close()
        await other.close()
        now = await asyncio.to_thread(inventory.settled, host, before)
        found["what is left"] = str(now.difference(before))
        return found
    finally:
        await host.close()
        await host.backend.shutdown()


def attack_names() -> list[str]:
    """Return the names of the attacks without running them."""
    import importlib.util
    import sys

    spec = importlib.util.spec_from_file_location("attack_script_names", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    arguments, sys.argv = sys.argv, [str(SCRIPT)]
    try:
        spec.loader.exec_module(module)
    finally:
        sys.argv = arguments
    return sorted(module.ATTACKS)


@pytest.mark.parametrize("name", attack_names())
def test_an_attack_from_inside_is_refused(name: str, findings: dict[str, str]) -> None:
    assert findings[name].startswith("refused"), findings[name]


def test_every_attack_generated_from_the_facts_is_refused(findings: dict[str, str]) -> None:
    rest = {name: how for name, how in findings.items() if not how.startswith("refused")}
    assert rest == {"the pod afterwards": "well", "the other pod afterwards": "well", "what is left": "{}"}
    assert sum("connect to socket" in name for name in findings) >= 6
    assert sum(name.startswith("see ") for name in findings) >= 10


# -- the guest init, PID 1 of the pod


def test_a_pod_that_starves_its_guest_init_does_not_affect_others(state: Path) -> None:
    async def act(pod: Pod) -> None:
        code = "import resource; resource.prlimit(1, resource.RLIMIT_NOFILE, (3, 3))"  # we have the guest init's uid
        await pod.exec(["python3", "-c", code], timeout=5)

    run_in_pod(state, act)


@pytest.mark.parametrize(
    "command", ["kill -9 1", "kill -INT 1", "kill -STOP 1", "kill -TERM 1", "kill -9 -1", "kill -STOP -1"]
)
def test_signals_to_the_guest_init_have_no_effect(command: str, state: Path) -> None:
    async def act(pod: Pod) -> None:
        with_python = "import os,signal; os.kill(%d, %d)"
        _, number, target = command.split()
        code = with_python % (int(target), {"-9": 9, "-INT": 2, "-STOP": 19, "-TERM": 15}[number])
        await pod.exec(["python3", "-c", code], timeout=5)
        assert await well(pod) == "well"

    run_in_pod(state, act)


def test_injecting_terminal_input_is_refused(state: Path) -> None:
    async def act(pod: Pod) -> None:
        code = "import fcntl, termios\nfor c in 'id\\n': fcntl.ioctl(0, termios.TIOCSTI, c.encode())"
        job = await pod.spawn(["python3", "-c", code], terminal=(24, 80))
        text = b"".join([data async for _, data in job.output()])
        assert b"PermissionError" in text or b"OSError" in text, text

    run_in_pod(state, act)


def test_an_unresponsive_pod_can_be_closed(state: Path) -> None:
    need(snapshot="fs-live")

    async def act(pod: Pod) -> None:
        assert isinstance(pod, LocalPod)
        await asyncio.to_thread(pod.group.freeze, True)
        calls = [pod.exec("true"), pod.read("/etc/hosts"), pod.write("x", "y"), pod.list("/"), pod.spawn("true")]
        for call in calls:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(call, 0.1)

    run_in_pod(state, act)


def test_programs_have_no_new_privileges_and_few_capabilities(state: Path) -> None:
    async def act(pod: Pod) -> None:
        status = (await pod.exec("cat /proc/self/status")).stdout
        rows = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert rows["NoNewPrivs"] == "1"
        assert rows["Seccomp"] == "2"
        from etude.pods.runtime import capabilities

        for name in ("CapEff", "CapPrm", "CapBnd"):
            assert int(rows[name], 16) & ~capabilities.mask() == 0
        assert int(rows["CapInh"], 16) == int(rows["CapAmb"], 16) == 0

    run_in_pod(state, act)


TRAPS = (
    "mkfifo /etc/passwd",
    "mkdir /etc/passwd",
    "ln -s /dev/zero /etc/passwd",
    "ln -s /proc/1/mem /etc/passwd",
    "head -c 30000000 /dev/zero > /etc/passwd",
    "yes x:y:z:w > /etc/passwd & sleep 0.1; kill $!",
)


def test_hostile_account_files_do_not_block_the_guest_init(state: Path) -> None:
    async def act(pod: Pod) -> None:
        for trap in TRAPS:
            await pod.exec(f"rm -rf /etc/passwd; {trap}", timeout=10)
            with pytest.raises(PodError):
                await asyncio.wait_for(pod.exec("id", user="daemon"), 10)
            assert await well(pod) == "well"

    run_in_pod(state, act)


def test_short_connections_do_not_harm_the_guest_init(state: Path) -> None:
    async def act(pod: Pod) -> None:
        directory = os.open(state / "pods" / pod.id, os.O_PATH)
        try:
            ping, broken = b"\x05\0\0\0\x01\x01\0\0\0", b"\x09\0\0\0\x02\x01\0\0\0\x01\xff\xff\xff\x7f"
            for payload in (b"", b"\xff" * 64, ping, broken):
                for _ in range(50):
                    with socket.socket(socket.AF_UNIX) as sock:
                        sock.connect(f"/proc/self/fd/{directory}/agent.sock")
                        sock.sendall(payload)
        finally:
            os.close(directory)
        assert await well(pod) == "well"

    run_in_pod(state, act)
