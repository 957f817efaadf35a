"""Compare pods with the distribution's sandboxes, in one run: time until a command has run, throughput and memory.

    python benchmarks/pods.py                          # about two minutes; as root also runc, crun and podman
    python benchmarks/pods.py --peers bubblewrap       # only that one

Every peer runs `/bin/echo hi` on the same root (the system's /usr, read-only), started by this process, from nothing to
the end of the sandbox. Pods are measured the same way (create, first command, close) and by operation.
"""

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from etude.pods import Limits
from etude.pods.fleet import open_host
from etude.pods.host import Host
from etude.pods.scheduling.admission import Thresholds

ECHO = ["/bin/echo", "hi"]
LIMITS = Limits(memory=512 << 20, pids=256, disk=400 << 20, inodes=50_000)
TARGETS = "create+first <= 7 ms and >= 1.2x bubblewrap; exec <= 1.5; fork <= 5, flat; >= 200 cycles/s; <= 1.5 MB a pod"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200, help="repetitions of each timed operation")
    parser.add_argument("--idle", type=int, default=300, help="pods alive when memory per pod is measured")
    parser.add_argument("--peers", default="bubblewrap,runc,crun,podman", help="comma-separated")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="etude-bench-") as directory:
        ours = asyncio.run(measure_ours(Path(directory), arguments))
        peers = {name: measure_peer(name, Path(directory), arguments.rounds) for name in arguments.peers.split(",")}
    show(ours, peers)


# ------------------------------------------------------------------------------------------------- ours


async def measure_ours(directory: Path, arguments: argparse.Namespace) -> dict[str, float | str]:
    # No pod may wait for admission: the queue is not measured here.
    ceilings = {"cpu_some": 100, "memory_some": 100}
    thresholds = Thresholds(max_pods=5000, creations_per_core=64, unseen_image_fraction=0.001, **ceilings)
    host = await open_host("namespace", directory / "state", thresholds)
    found: dict[str, float | str] = {}
    try:
        for _ in range(10):
            await (await host.create(limits=LIMITS)).close()
        await measure_cycles(host, arguments.rounds, found)
        await measure_exec(host, arguments.rounds, found)
        await measure_forks(host, max(20, arguments.rounds // 4), found)
        await measure_parallel(host, arguments.rounds * 2, found)
        await measure_memory(host, arguments.idle, found)
    finally:
        await host.close()
        await host.backend.shutdown()
    return found


async def measure_cycles(host: Host, rounds: int, found: dict[str, float | str]) -> None:
    created, ready, whole = [], [], []
    for _ in range(rounds):
        start = time.perf_counter()
        pod = await host.create(limits=LIMITS)
        created.append(time.perf_counter() - start)
        result = await pod.exec(ECHO)
        ready.append(time.perf_counter() - start)
        assert result.stdout == "hi\n", result
        await pod.close()
        whole.append(time.perf_counter() - start)
    found |= {"create": median(created), "create+first": median(ready), "create+first p99": p99(ready)}
    found |= {"cycle": median(whole), "cycles/s, one at a time": rounds / sum(whole)}


async def measure_exec(host: Host, rounds: int, found: dict[str, float | str]) -> None:
    async with await host.create(limits=LIMITS) as pod:
        found["exec"] = median(await timed(rounds, lambda: pod.exec(["/bin/true"])))
        found["exec bash -c"] = median(await timed(rounds, lambda: pod.exec(["bash", "-c", "echo hi"])))
        found["write 1 KB"] = median(await timed(rounds, lambda: pod.write("file", b"x" * 1024)))


async def measure_forks(host: Host, rounds: int, found: dict[str, float | str]) -> None:
    """Fork one child, ready for a command, of an empty pod and of one with 200 MB in 5,000 files."""
    fill = "mkdir d; cd d; for i in $(seq 5000); do head -c 40960 /dev/zero > f$i; done; sync"
    for name, command in (("fork, empty", "true"), ("fork, 200 MB in 5,000 files", fill)):
        times = []
        parent = await host.create(limits=LIMITS)
        assert (await parent.exec(command, timeout=120)).ok
        for _ in range(rounds):
            await parent.stat(".")  # the parent restarts after the children of the last fork
            start = time.perf_counter()
            (child,) = await parent.fork()
            times.append(time.perf_counter() - start)
            if "MB" in name:
                assert len(await child.list("d")) == 5000
            await child.close()
            # A snapshot every 16 rounds, so that the depth does not grow with the rounds.
            snapshot = await parent.snapshot() if len(times) % 16 == 0 else None
            if snapshot is not None:
                await host.remove_snapshot(snapshot.id)
        found[name] = median(times)
        await parent.close()


async def measure_parallel(host: Host, cycles: int, found: dict[str, float | str]) -> None:
    best = 0.0
    for workers in (2, 4, 8):

        async def work(count: int) -> None:
            for _ in range(count):
                pod = await host.create(limits=LIMITS)
                await pod.exec(ECHO)
                await pod.close()

        start = time.perf_counter()
        await asyncio.gather(*(work(cycles // workers) for _ in range(workers)))
        best = max(best, cycles // workers * workers / (time.perf_counter() - start))
    found["cycles/s, in parallel"] = best


async def measure_memory(host: Host, count: int, found: dict[str, float | str]) -> None:
    before = available()
    pods = [await host.create(limits=LIMITS) for _ in range(count)]
    await asyncio.sleep(0.5)
    found["MB per idle pod"] = (before - available()) / count / 1e6
    await asyncio.gather(*(pod.close() for pod in pods))


async def timed(rounds: int, call: Callable[[], Awaitable[object]]) -> list[float]:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        await call()
        times.append(time.perf_counter() - start)
    return times


def cgroup_mode() -> str:
    """Describe whether moving a process into a cgroup waits for an RCU grace period on this machine."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines() if " cgroup" in line]
    legacy = any(mount[2] == "cgroup" and "memory" in mount[3].split(",") for mount in mounts)
    quick = any("favordynmods" in mount[3] for mount in mounts)
    return f"limits by {'v1' if legacy else 'v2'}, favordynmods {'on' if quick else 'not shown'}"


def available() -> int:
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))


# ------------------------------------------------------------------------------------------------- peers


def measure_peer(name: str, directory: Path, rounds: int) -> dict[str, float | str]:
    """Return the median and rate of a peer, or the reason it cannot be measured."""
    binary = {"bubblewrap": "bwrap"}.get(name, name)
    if shutil.which(binary) is None:
        return {"unavailable": f"{binary} is not installed"}
    rounds = max(10, rounds // {"podman": 10, "runc": 4, "crun": 4}.get(name, 1))
    with sandbox_command(name, directory) as command:
        try:
            hide = hide_unified if name == "crun" else None
            first = subprocess.run(command("warm"), capture_output=True, text=True, timeout=60, preexec_fn=hide)
            if first.returncode or first.stdout.strip() != "hi":
                return {"unavailable": (first.stderr.strip().splitlines() or ["it failed"])[-1][:120]}
            times = []
            for index in range(rounds):
                start = time.perf_counter()
                given = {"stdout": subprocess.DEVNULL, "preexec_fn": hide}
                subprocess.run(command(str(index)), check=True, timeout=60, **given)  # type: ignore[call-overload]
                times.append(time.perf_counter() - start)
        except (subprocess.SubprocessError, OSError) as error:
            return {"unavailable": str(error)[:120]}
    return {"cycle": median(times), "cycle p99": p99(times), "cycles/s, one at a time": rounds / sum(times)}


def hide_unified() -> None:
    """Hide the unified cgroup hierarchy from crun, which refuses a machine with both layouts."""
    if os.path.isdir("/sys/fs/cgroup/unified"):
        libc = ctypes.CDLL(None)
        libc.unshare(0x20000)  # CLONE_NEWNS
        libc.mount(b"", b"/", b"", ctypes.c_ulong(0x44000), None)  # MS_REC | MS_PRIVATE
        libc.umount2(b"/sys/fs/cgroup/unified", 2)


@contextlib.contextmanager
def sandbox_command(name: str, directory: Path) -> Iterator[Callable[[str], list[str]]]:
    """Yield a function from a unique name to the command line with which a peer runs one echo on the system's /usr."""
    links = [link for link in ("bin", "sbin", "lib", "lib64", "lib32") if Path("/", link).is_symlink()]
    if name == "bubblewrap":
        view = [part for link in links for part in ("--symlink", f"usr/{link}", f"/{link}")]
        command = ["bwrap", "--unshare-all", "--die-with-parent", "--ro-bind", "/usr", "/usr", *view]
        command += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", *ECHO]
        yield lambda _: command
        return
    root = directory / name / "rootfs"
    for place in ("usr", "proc", "dev", "sys", "tmp", "etc", "run"):
        (root / place).mkdir(parents=True)
    for link in links:
        (root / link).symlink_to(f"usr/{link}")
    if name == "podman":
        limits = ["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1000:1000"]
        view = ["-v", "/usr:/usr:ro", "--rootfs", str(root)]
        runtime = ["--runtime", "runc"] if shutil.which("runc") else []  # crun refuses hybrid cgroups
        command = ["podman", *runtime, "run", "--rm", "--network=none", *limits, *view, *ECHO]
        yield lambda _: command
        return
    bundle = root.parent
    subprocess.run([name, "spec"], cwd=bundle, check=True)
    config = json.loads((bundle / "config.json").read_text())
    config["process"] |= {"terminal": False, "args": ECHO}
    config["process"].pop("rlimits", None)
    config["mounts"].append({"destination": "/usr", "source": "/usr", "type": "bind", "options": ["rbind", "ro"]})
    (bundle / "config.json").write_text(json.dumps(config))
    yield lambda unique: [name, "run", "--bundle", str(bundle), f"etude-{os.getpid()}-{unique}"]


# ------------------------------------------------------------------------------------------------- the table


def median(times: list[float]) -> float:
    return statistics.median(times) * 1000


def p99(times: list[float]) -> float:
    return sorted(times)[int(len(times) * 0.99)] * 1000


def show(ours: dict[str, float | str], peers: dict[str, dict[str, float | str]]) -> None:
    console = Console(width=110)
    parts = Table(title="pods (median ms unless stated otherwise)")
    parts.add_column("operation")
    parts.add_column("pods", justify="right")
    for name, value in ours.items():
        parts.add_row(name, f"{value:,.2f}")
    console.print(parts)
    table = Table(title="start, /bin/echo and end of a sandbox")
    for column in ("", "median ms", "p99 ms", "per second", "speed-up of pods"):
        table.add_column(column, justify="left" if not column else "right")
    cycle, rate = float(ours["cycle"]), float(ours["cycles/s, one at a time"])
    table.add_row("pod", f"{cycle:.2f}", "", f"{rate:.0f}", "")
    for name, row in peers.items():
        if "unavailable" in row:
            table.add_row(name, "-", "-", "-", str(row["unavailable"]))
            continue
        time_, rate_ = float(row["cycle"]), float(row["cycles/s, one at a time"])
        table.add_row(name, f"{time_:.2f}", f"{float(row['cycle p99']):.2f}", f"{rate_:.0f}", f"{time_ / cycle:.2f}x")
    console.print(table)
    if "cycle" in (bubble := peers.get("bubblewrap", {})):
        first = float(bubble["cycle"]) / float(ours["create+first"])
        console.print(
            f"Create and first command {ours['create+first']:.2f} ms, {first:.2f}x faster than a bubblewrap sandbox; "
            f"a fork of 200 MB takes {ours['fork, 200 MB in 5,000 files']:.2f} ms, an exec {ours['exec']:.2f} ms."
        )
    console.print(f"Targets: {TARGETS}.\nCgroups: {cgroup_mode()}.")


if __name__ == "__main__":
    main()
