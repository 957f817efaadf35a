"""What a host's pods take of the machine at one moment, so that two moments can be compared: the measure of a leak."""

import asyncio
import contextlib
import gc
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from etude.pods.host import Host

SETTLE_S = 10.0  # namespaces and groups of the dead go away a moment after them


@dataclass(frozen=True)
class Inventory:
    """Everything a pod could leave behind."""

    processes: frozenset[str]  # below the keeper, or in a control group of ours
    mounts: int  # that this process sees
    keeper_mounts: int
    groups: frozenset[str]
    files: frozenset[str]  # in the state directory, without the store
    descriptors: int  # of this process
    keeper_descriptors: tuple[str, ...]
    keeper_memory: int = field(compare=False)  # bytes of its own

    def difference(self, other: "Inventory") -> dict[str, tuple[object, object]]:
        """What differs, by name."""
        names = [name for name in self.__dataclass_fields__ if name != "keeper_memory"]
        return {n: (getattr(self, n), getattr(other, n)) for n in names if getattr(self, n) != getattr(other, n)}


def take(host: Host) -> Inventory:
    """Look at everything."""
    keeper = keeper_of(host.state)
    layout = host.backend.layout  # type: ignore[attr-defined]
    groups = {str(entry) for base in layout.bases for entry in directories(base)}
    members = {pid for group in groups for pid in read(f"{group}/cgroup.procs").split()}
    processes = members | {str(pid) for pid in descendants(keeper)}
    return Inventory(
        processes=frozenset(f"{pid} {read(f'/proc/{pid}/comm').strip()}" for pid in processes),
        mounts=len(read("/proc/self/mountinfo").splitlines()),
        keeper_mounts=len(read(f"/proc/{keeper}/mountinfo").splitlines()),
        groups=frozenset(groups),
        files=frozenset(below(host.state)),
        descriptors=len(os.listdir("/proc/self/fd")),
        keeper_descriptors=tuple(sorted(links(f"/proc/{keeper}/fd"))),
        keeper_memory=own_memory(keeper),
    )


async def baseline(host: Host) -> Inventory:
    """An inventory after a first pod has come and gone: what the keeper makes once is made."""
    gc.collect()  # what an earlier test left to it would go away in between, descriptors and all
    await (await host.create()).close()
    deadline = time.monotonic() + SETTLE_S
    while any((host.state / "trash").iterdir()) and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    return take(host)


def settled(host: Host, before: Inventory) -> Inventory:
    """An inventory that is as `before`, or the last one that was not. Called in a thread beside the loop."""
    deadline = time.monotonic() + SETTLE_S
    while (now := take(host)).difference(before) and time.monotonic() < deadline:
        time.sleep(0.05)
    return now


def keeper_of(state: Path) -> int:
    """The keeper's process: the only one that stands in the state directory; 0 when there is none."""
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
    """Bytes that only this process holds."""
    rows = (line.split() for line in read(f"/proc/{pid}/smaps_rollup").splitlines())
    return sum(int(row[1]) << 10 for row in rows if row and row[0] in ("Private_Dirty:", "Private_Clean:"))


def directories(base: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return [entry for entry in base.iterdir() if entry.is_dir()]
    return []


def below(state: Path) -> Iterator[str]:
    for directory, names, files in os.walk(state):
        if Path(directory) == state:
            names[:] = [name for name in names if name not in ("store", "cache")]
        for name in (*names, *files):
            yield os.path.relpath(os.path.join(directory, name), state)


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
