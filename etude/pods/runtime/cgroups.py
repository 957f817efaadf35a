"""Control groups of pods, in cgroup v1, v2 or both side by side.

On ordinary hosts one v2 directory per pod holds every limit; elsewhere memory, pids and cpu are v1 hierarchies and
v2 can only freeze. The layout is found by reading `cgroup.controllers` and creating a group, never by path. All pods
of a state directory live below one base group, so that they compete with the host as one, and so that the groups a
killed service left behind can be found.
"""

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from etude.pods.pod import Limits, PodError

MOUNTINFO = Path("/proc/self/mountinfo")
OWN_CGROUPS = Path("/proc/self/cgroup")
CONTROLLERS = ("memory", "pids", "cpu")
CPU_PERIOD_US = 100_000  # over which a cpu limit is counted
FREEZE_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class CgroupLayout:
    """Where groups can be created: the base directory of this service in each usable hierarchy."""

    name: str
    unified: Path | None  # v2: freezer, and the controllers in `in_unified`
    in_unified: frozenset[str]
    legacy: Mapping[str, Path]  # v1 controller -> directory
    reason: str  # why something is missing

    @property
    def controllers(self) -> frozenset[str]:
        return self.in_unified | frozenset(self.legacy)

    @property
    def bases(self) -> list[Path]:
        return [*([self.unified] if self.unified else []), *self.legacy.values()]


def find_layout(name: str) -> CgroupLayout:
    """Create the base group `name` in every hierarchy that permits it, and return the usable controllers."""
    mounts = list(_mounts())
    member = dict(_memberships())
    unified: Path | None = None
    in_unified: frozenset[str] = frozenset()
    reasons = []
    for mount, kind, _ in mounts:
        if kind == "cgroup2" and unified is None:
            try:
                unified, in_unified = _create_unified(mount, member.get("", "/"), name)
            except OSError as error:
                reasons.append(f"cgroup v2 at {mount}: {error.strerror}")
    legacy = {}
    for mount, kind, options in mounts:
        for controller in set(CONTROLLERS) & set(options if kind == "cgroup" else ()):
            try:
                base = _own_group(mount, member.get(controller, "/")) / name
                base.mkdir(exist_ok=True)
                probe = base / f"probe-{os.getpid()}-{threading.get_ident()}"
                probe.mkdir()
                probe.rmdir()
                legacy[controller] = base
            except OSError as error:
                reasons.append(f"cgroup v1 {controller}: {error.strerror}")
    if not mounts:
        reasons.append("no cgroup file system is mounted")
    return CgroupLayout(name, unified, in_unified, legacy, "; ".join(reasons))


def remove_base_groups(layout: CgroupLayout) -> None:
    """Remove the base groups that contain no pod; they are created again when needed."""
    for base in layout.bases:
        with contextlib.suppress(OSError):
            base.rmdir()


def _mounts() -> Iterable[tuple[Path, str, list[str]]]:
    for line in MOUNTINFO.read_text().splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split()[:3]
        if kind in ("cgroup", "cgroup2"):
            yield Path(left.split()[4]), kind, options.split(",")


def _memberships() -> Iterable[tuple[str, str]]:
    for line in OWN_CGROUPS.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            yield controller, path


def _own_group(mount: Path, path: str) -> Path:
    """Return this process's group in a hierarchy, or the root where the path belongs to another namespace."""
    own = mount / path.lstrip("/")
    return own if own.is_dir() else mount


def _create_unified(mount: Path, path: str, name: str) -> tuple[Path, frozenset[str]]:
    """Create the v2 base group and enable as many of our controllers in it as possible."""
    parent = mount if os.geteuid() == 0 else _own_group(mount, path)
    base = parent / name
    base.mkdir(exist_ok=True)
    wanted = set(CONTROLLERS) & set((parent / "cgroup.controllers").read_text().split())
    for controller in wanted:
        for group in (parent, base):
            _enable(group, controller)
    return base, frozenset(wanted & set((base / "cgroup.subtree_control").read_text().split()))


def _enable(group: Path, controller: str) -> None:
    control = group / "cgroup.subtree_control"
    if controller in control.read_text().split():
        return
    try:
        control.write_text(f"+{controller}")
    except OSError:
        # A group that contains processes cannot enable controllers for its children (v2's "no internal processes"
        # rule, seen in containers): move them to a leaf group next to the pods first.
        leaf = group / "etude-service"
        with contextlib.suppress(OSError):
            leaf.mkdir(exist_ok=True)
            for pid in (group / "cgroup.procs").read_text().split():
                (leaf / "cgroup.procs").write_text(pid)
            control.write_text(f"+{controller}")


class PodCgroup:
    """The control group of one pod."""

    def __init__(self, layout: CgroupLayout, name: str) -> None:
        self.layout, self.name = layout, name
        self.directories = [base / name for base in layout.bases]  # in every hierarchy
        self.joined = [layout.unified / name] if layout.unified else []  # those that its processes join
        self._memory = self._directory("memory")
        self._seen_oom_kills = 0

    def _directory(self, controller: str) -> Path | None:
        if controller in self.layout.legacy:
            return self.layout.legacy[controller] / self.name
        if controller in self.layout.in_unified and self.layout.unified:
            return self.layout.unified / self.name
        return None

    @property
    def legacy_procs(self) -> list[Path]:
        """The files of v1 groups to write a pid to, to move a process into the group."""
        return [directory / "cgroup.procs" for directory in self.joined if directory != self.unified]

    @property
    def unified(self) -> Path | None:
        """The v2 directory, into which a process can be cloned."""
        return self.layout.unified / self.name if self.layout.unified else None

    def create(self, limits: Limits) -> None:
        """Create the group and set its limits.

        A v1 hierarchy without a limit to set is skipped: moving a process into one costs an RCU grace period.
        """
        bound = [name for name in self.layout.legacy if getattr(limits, name)]
        self.joined = [base / self.name for base in ([self.layout.unified] if self.layout.unified else [])]
        self.joined += [self.layout.legacy[name] / self.name for name in bound]
        try:
            for directory in self.joined:
                directory.mkdir(exist_ok=True)
        except FileNotFoundError:  # another process removed the base group with its last pod
            find_layout(self.layout.name)
            for directory in self.joined:
                directory.mkdir(exist_ok=True)
        memory, pids, cpu = (self._directory(controller) for controller in CONTROLLERS)
        if limits.memory and memory:
            v1 = "memory" in self.layout.legacy
            _write(memory / ("memory.limit_in_bytes" if v1 else "memory.max"), limits.memory)
            for swap in ("memory.memsw.limit_in_bytes",) if v1 else ("memory.swap.max",):
                if (memory / swap).exists():
                    _write(memory / swap, limits.memory if v1 else 0)
        if limits.pids and pids:
            _write(pids / "pids.max", limits.pids)
        if limits.cpu and cpu:
            quota = max(1000, int(limits.cpu * CPU_PERIOD_US))
            if "cpu" in self.layout.legacy:
                _write(cpu / "cpu.cfs_quota_us", quota)
            else:
                _write(cpu / "cpu.max", f"{quota} {CPU_PERIOD_US}")
        self._seen_oom_kills = self._oom_kills()

    def new_oom_kills(self) -> int:
        """Return the number of OOM kills since the last call."""
        kills = self._oom_kills()
        new, self._seen_oom_kills = kills - self._seen_oom_kills, kills
        return new

    def _oom_kills(self) -> int:
        if self._memory is None:
            return 0
        file = self._memory / ("memory.oom_control" if "memory" in self.layout.legacy else "memory.events")
        with contextlib.suppress(OSError):
            for line in file.read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
        return 0

    def memory(self) -> float:
        """Return the bytes in use, 0 where they are not counted."""
        if self._memory is None:
            return 0.0
        v1 = "memory" in self.layout.legacy
        return _read(self._memory / ("memory.usage_in_bytes" if v1 else "memory.current"))

    def usage(self) -> dict[str, float]:
        """Return the current usage of every resource that is counted."""
        found: dict[str, float] = {}
        pids, cpu = self._directory("pids"), self._directory("cpu")
        if self._memory:
            found["memory"] = self.memory()
        if pids:
            found["pids"] = _read(pids / "pids.current")
        stat = self.layout.unified / self.name / "cpu.stat" if self.layout.unified else None
        if cpu and stat and stat.exists():
            for line in stat.read_text().splitlines():
                if line.startswith("usage_usec "):
                    found["cpu_s"] = int(line.split()[1]) / 1e6
        return found

    def freeze(self, frozen: bool) -> None:
        """Freeze or thaw every process in the group; blocks for about half a millisecond."""
        # Only v2's freezer: v1's stays in FREEZING forever when a task is inside vfork.
        if self.layout.unified is None:
            raise PodError(f"cannot freeze: no cgroup v2 here ({self.layout.reason})")
        directory = self.layout.unified / self.name
        _write(directory / "cgroup.freeze", int(frozen))
        deadline = time.monotonic() + FREEZE_TIMEOUT_S
        wanted = f"frozen {int(frozen)}"
        while wanted not in (directory / "cgroup.events").read_text():
            if time.monotonic() > deadline:
                _write(directory / "cgroup.freeze", 0)
                raise PodError(f"pod {self.name} did not freeze within {FREEZE_TIMEOUT_S:g} s")
            time.sleep(0.0002)

    def thaw(self) -> None:
        """Thaw the group if it exists."""
        if self.unified is not None and self.unified.is_dir():
            self.freeze(False)

    @contextlib.asynccontextmanager
    async def frozen(self) -> AsyncIterator[None]:
        """Keep every process in the group frozen."""
        await asyncio.to_thread(self.freeze, True)
        try:
            yield
        finally:
            await asyncio.to_thread(self.freeze, False)

    def remove(self) -> bool:
        """Remove the group; return False when it still contains a process."""
        for directory in self.directories:
            try:
                directory.rmdir()
            except FileNotFoundError:
                continue
            except OSError:
                return False
        return True

    def kill(self) -> None:
        """Kill the remaining processes, for a pod whose zygote died."""
        for directory in self.directories:
            with contextlib.suppress(OSError):
                for pid in (directory / "cgroup.procs").read_text().split():
                    with contextlib.suppress(OSError):
                        os.kill(int(pid), 9)


def list_groups(layout: CgroupLayout) -> set[str]:
    """Return the names of the pods' groups that exist."""
    names: set[str] = set()
    for base in layout.bases:
        with contextlib.suppress(OSError):
            names |= {entry.name for entry in base.iterdir() if entry.is_dir()}
    return names


def _write(file: Path, value: object) -> None:
    fd = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, str(value).encode())
    except OSError as error:
        raise PodError(f"cannot set {file.name} to {value}: {error.strerror}") from error
    finally:
        os.close(fd)


def _read(file: Path) -> float:
    try:
        return float(file.read_text())
    except (OSError, ValueError):
        return 0.0
