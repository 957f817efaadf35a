"""The machine resources that a host's pods use at one moment, to detect leaks by comparing two moments."""

import asyncio
import contextlib
import gc
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from etude.pods.host import Host

SETTLE_S = 60.0  # namespaces and cgroups disappear a moment after their processes


@dataclass(frozen=True)
class Inventory:
    """Everything a pod could leak."""

    processes: frozenset[str]  # descendants of the zygote, or in a cgroup of the host
    mounts: int  # visible to this process
    zygote_mounts: int
    loops: frozenset[str]  # loop devices of the state directory
    groups: frozenset[str]
    files: frozenset[str]  # in the state directory, without the store
    descriptors: int  # of this process
    zygote_descriptors: tuple[str, ...]
    zygote_memory: int = field(compare=False)  # private bytes

    def difference(self, other: "Inventory") -> dict[str, tuple[object, object]]:
        """Return the fields that differ, by name."""
        names = [name for name in self.__dataclass_fields__ if name != "zygote_memory"]
        return {n: (getattr(self, n), getattr(other, n)) for n in names if getattr(self, n) != getattr(other, n)}


def take(host: Host) -> Inventory:
    """Take an inventory now."""
    zygote = zygote_of(host.state)
    layout = host.backend.layout  # type: ignore[attr-defined]
    groups = {str(entry) for base in layout.bases for entry in directories(base)}
    members = {pid for group in groups for pid in read(f"{group}/cgroup.procs").split()}
    processes = members | {str(pid) for pid in descendants(zygote)}
    return Inventory(
        processes=frozenset(f"{pid} {read(f'/proc/{pid}/comm').strip()}" for pid in processes),
        mounts=len(read("/proc/self/mountinfo").splitlines()),
        zygote_mounts=len(read(f"/proc/{zygote}/mountinfo").splitlines()),
        loops=frozenset(loop_devices(host.state)),
        groups=frozenset(groups),
        files=frozenset(below(host.state)),
        descriptors=len(os.listdir("/proc/self/fd")),
        # It keeps a user namespace for every range of ids that pods had at the same time.
        zygote_descriptors=tuple(sorted(link for link in links(f"/proc/{zygote}/fd") if link != "user")),
        zygote_memory=own_memory(zygote),
    )


async def baseline(host: Host) -> Inventory:
    """Take an inventory after a first pod was created and closed, so that one-time allocations are included."""
    gc.collect()  # garbage of earlier tests must not be freed in between, with its descriptors
    await (await host.create()).close()
    deadline = time.monotonic() + SETTLE_S
    while host.backend.background and time.monotonic() < deadline:  # files are removed in threads
        await asyncio.sleep(0.01)
    return take(host)


def settled(host: Host, before: Inventory) -> Inventory:
    """Wait until the inventory equals `before`; return the last one. Call it in a thread beside the event loop."""
    deadline = time.monotonic() + SETTLE_S
    while (now := take(host)).difference(before) and time.monotonic() < deadline:
        time.sleep(0.05)
    return now


def zygote_of(state: Path) -> int:
    """Return the zygote's pid: the only process whose working directory is the state directory; 0 if none."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{name}/cwd") == str(state):
                return int(name)
    return 0


def descendants(root: int) -> Iterator[int]:
    waiting = [root] if root else []
    while waiting:
        pid = waiting.pop()
        for child in map(int, read(f"/proc/{pid}/task/{pid}/children").split()):
            yield child
            waiting.append(child)


def own_memory(pid: int) -> int:
    """Return the private memory of a process in bytes."""
    rows = (line.split() for line in read(f"/proc/{pid}/smaps_rollup").splitlines())
    return sum(int(row[1]) << 10 for row in rows if row and row[0] in ("Private_Dirty:", "Private_Clean:"))


def directories(base: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return [entry for entry in base.iterdir() if entry.is_dir()]
    return []


def below(state: Path) -> Iterator[str]:
    for directory, names, files in os.walk(state):
        if Path(directory) == state:
            names[:] = [name for name in names if name not in ("store", "cache", "disk-templates")]
        for name in (*names, *files):
            yield os.path.relpath(os.path.join(directory, name), state)


def loop_devices(state: Path) -> Iterator[str]:
    """Return the loop devices whose file is, or was, in the state directory."""
    for file in Path("/sys/block").glob("loop*/loop/backing_file"):
        if read(str(file)).startswith(f"{state}/"):
            yield file.parts[3]


def links(directory: str) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):
            with contextlib.suppress(OSError):
                kind = os.readlink(f"{directory}/{name}")
                yield kind.partition(":")[0]  # "socket", "pipe", or a path


def read(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text()
    return ""
