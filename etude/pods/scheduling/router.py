"""Choose the host on which a pod starts: host reports in, one placement out. Starts no pods and makes no requests.

An image that is given by name must be on the host; the layers of any other can be sent there, at a price. The cost of a
host is the expected seconds until the pod runs there (start-up behind other starting pods) plus a price for its fill
after placement: fuller hosts are preferred up to a target fill, so that empty ones can be released or take a large pod.
Forks and snapshots stay with their files. Reports are stale on arrival, so each placement counts against its host until
a report must include it. Hosts are rows of numeric columns; equal inputs give equal placements.
"""

import math
import time
import zlib
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from etude.pods.host_system import HostSystem
from etude.pods.pod import Capabilities, PodError
from etude.pods.scheduling.admission import Thresholds
from etude.pods.scheduling.pressure import Pressure

Floats = npt.NDArray[np.float64]
Booleans = npt.NDArray[np.bool_]


class NoHost(PodError):
    """No host can take the pod now. `rejections` counts hosts by reason; `retryable` says whether waiting may help."""

    def __init__(self, message: str, rejections: Mapping[str, int], retryable: bool) -> None:
        super().__init__(message)
        self.rejections = dict(rejections)
        self.retryable = retryable


@dataclass(frozen=True, slots=True)
class HostReport:
    """A host's state, sent every few seconds."""

    host: str
    pressure: Pressure
    pods: int  # with a reservation, including those being created
    max_pods: int
    memory_free: int  # for new pods: available, less headroom and reservations
    capabilities: frozenset[str] = frozenset()  # as `capability_labels` writes them
    images: frozenset[str] = frozenset()
    snapshots: frozenset[str] = frozenset()
    warm: Mapping[str, int] = field(default_factory=dict)  # ready pods in warm pools, by image
    cores: float = 1.0
    starting: int = 0  # pods that are being created
    draining: bool = False
    time: float = 0.0  # of the host's own clock: only compared with its other reports
    system: HostSystem = field(default_factory=HostSystem)
    lacks: tuple[str, ...] = ()  # isolation that the strongest backend as root has and this host has not
    version: Literal[2] = 2  # of this message, and of all others between a host and its clients


REPORT_VERSION = 2


def system_label(system: HostSystem) -> str:
    """Return the label of the hosts whose own programs are those of this system."""
    return f"system:{system}"


def capability_labels(backend: str, capabilities: Capabilities, system: HostSystem) -> frozenset[str]:
    """Return what a host has as labels that a request can require: `isolation:vm`, `limit:disk`, `users`."""
    labels = {f"backend:{backend}", f"isolation:{capabilities.isolation}", system_label(system)}
    labels |= {f"limit:{name}" for name in capabilities.limits} | {f"egress:{name}" for name in capabilities.egress}
    labels |= {f"snapshot:{kind}" for kind in capabilities.snapshots}
    labels |= {name for name in ("images", "users") if getattr(capabilities, name)}
    return frozenset(labels)


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """A pod to place. `memory` is its expected use while it starts, not its limit."""

    image: str
    memory: int
    snapshot: str | None = None  # start from this instead of the bare image
    parent_host: str | None = None  # of a fork: the host the parent runs on
    requires: frozenset[str] = frozenset()  # labels of `capability_labels`
    holders: frozenset[str] | None = None  # hosts that have the image, which can be sent to others; None: by its name


@dataclass(eq=False, slots=True)
class _PendingPlacement:
    """One placement that no report has counted yet."""

    time: float
    image: str
    memory: int
    warm: bool


@dataclass(frozen=True, slots=True)
class Placement:
    """The host to start a pod on. `score` is minus the cost in seconds: greater is better."""

    host: str
    score: float
    warm: bool = False
    transfer: bool = False  # the snapshot must be transferred there first
    pending: _PendingPlacement | None = field(default=None, compare=False, repr=False)  # for `PodRouter.release`


@dataclass(frozen=True, slots=True)
class PlacementPolicy:
    """Cost weights of the router, in seconds, and the times after which it distrusts a host."""

    startup_s: float = 4.0  # of one core while a pod starts; a warm one has already spent it
    busy_s: float = 30.0  # price of a host whose cores are over their ceiling: last choice, better than none
    pack_s: float = 2.0  # start-up time given up, at most, to fill hosts instead of spreading
    target_fill: float = 0.8  # pack up to here: the rest is for peaks, and for forks, which stay with their parent
    transfer_s: float = 10.0  # to send an image to a host that lacks it; how long it takes is not known before
    crowding_s: float = 20.0  # price of a host's last byte; rises from 0 at `target_fill`
    stale_s: float = 10.0  # a host without a report for this long counts as dead
    report_lag_s: float = 2.0  # from a placement until an arriving report must have counted it
    backoff_s: float = 1.0  # after a failure; doubles with each further one
    max_backoff_s: float = 60.0
    thresholds: Thresholds = field(default_factory=Thresholds)  # the hosts' pressure ceilings, as admission has them


class _Holders:
    """The rows of the hosts that have something; cached as an array until the next change."""

    def __init__(self) -> None:
        self.rows: set[int] = set()
        self._array: npt.NDArray[np.intp] | None = None

    def add(self, row: int) -> None:
        self.rows.add(row)
        self._array = None

    def discard(self, row: int) -> None:
        self.rows.discard(row)
        self._array = None

    def array(self) -> npt.NDArray[np.intp]:
        if self._array is None:
            self._array = np.fromiter(self.rows, np.intp, len(self.rows))
        return self._array


class _HostState:
    """State of a host that is not in a column: its latest report and the placements since."""

    def __init__(self, row: int) -> None:
        self.row = row
        self.report: HostReport | None = None
        self.pending: deque[_PendingPlacement] = deque()
        self.failures = 0


_STALLS = ("memory_some", "memory_full", "io_full", "cpu_some")
_COLUMNS = (
    *("last_seen", "backoff_until", "draining", "memory_free", "memory_total", "pods", "max_pods", "starting", "cores"),
    *("tie_break", *_STALLS),
)


class PodRouter:
    """Places pods on hosts from their reports. `clock` is this process's own; the hosts' clocks are not trusted."""

    def __init__(
        self, policy: PlacementPolicy | None = None, *, seed: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.policy = policy or PlacementPolicy()
        self._clock = clock
        self._seed = seed
        self._hosts: dict[str, _HostState] = {}
        self._names: list[str | None] = []  # by row
        self._free_rows: list[int] = []
        self._images: dict[str, _Holders] = {}
        self._snapshots: dict[str, _Holders] = {}
        self._capabilities: dict[str, _Holders] = {}
        self._indexes = {"images": self._images, "snapshots": self._snapshots, "capabilities": self._capabilities}
        self._warm: dict[str, _Holders] = {}
        self._column: dict[str, Floats] = {name: np.zeros(0) for name in _COLUMNS}
        self._grow(64)

    def __len__(self) -> int:
        return len(self._hosts)

    def hosts(self) -> list[HostReport]:
        """Return the latest report of every known host, including stale ones."""
        return [host.report for host in self._hosts.values() if host.report is not None]

    # -- host reports

    def report(self, report: HostReport) -> None:
        """Take in a host's report. One that arrives after a later one is dropped."""
        now = self._clock()
        host = self._hosts.get(report.host) or self._add_host(report.host)
        last, row = host.report, host.row
        # A host clock that was set back must not exclude its host for ever: once stale, any report is accepted.
        if last is not None and report.time < last.time and now - self._column["last_seen"][row] < self.policy.stale_s:
            return
        self._update_indexes(row, last, report)
        host.report = report
        while host.pending and host.pending[0].time <= now - self.policy.report_lag_s:
            host.pending.popleft()
        stalls, column = report.pressure, self._column
        column["last_seen"][row] = now
        column["memory_total"][row] = max(1, stalls.memory_total)
        column["max_pods"][row] = report.max_pods
        column["cores"][row] = max(0.1, report.cores)
        for name in _STALLS:
            value = getattr(stalls, name)
            column[name][row] = 0.0 if value is None else value
        column["draining"][row] = report.draining
        self._recount(host, last.warm if last else {})

    def forget(self, host: str) -> None:
        """Remove a host; a later report adds it again as new."""
        gone = self._hosts.pop(host, None)
        if gone is None:
            return
        if gone.report is not None:
            self._update_indexes(gone.row, gone.report, None)
            for image in gone.report.warm:
                self._warm[image].discard(gone.row)
        self._names[gone.row] = None
        self._column["last_seen"][gone.row] = -math.inf
        self._free_rows.append(gone.row)

    def mark_failed(self, host: str) -> None:
        """Exclude a host for a while after a failed request, twice as long with each failure in a row."""
        known = self._hosts.get(host)
        if known is None:
            return
        now, until = self._clock(), float(self._column["backoff_until"][known.row])
        last = min(self.policy.max_backoff_s, self.policy.backoff_s * 2.0 ** (known.failures - 1))
        if known.failures and now > until + last:
            known.failures = 0  # it has worked for as long as it was excluded
        backoff = min(self.policy.max_backoff_s, self.policy.backoff_s * 2.0**known.failures)
        known.failures += 1
        self._column["backoff_until"][known.row] = max(until, now + backoff)

    def release(self, placement: Placement) -> None:
        """Free what a placement counts against its host: the placement was not used."""
        host, pending = self._hosts.get(placement.host), placement.pending
        if host is not None and pending is not None and pending in host.pending:
            host.pending.remove(pending)
            self._recount(host, {pending.image: 1} if pending.warm else {})

    # -- placement

    def place(self, request: PlacementRequest, exclude: Collection[str] = ()) -> Placement:
        """Return the best host for the pod now. Raise NoHost, with the rejections by reason, when none can take it."""
        now = self._clock()
        fits = self._schedulable(now) & ~self._under_pressure() & (self._column["memory_free"] >= request.memory)
        fits &= self._capable(request.requires) & self._has_image(request)
        for name in exclude:
            if name in self._hosts:
                fits[self._hosts[name].row] = False
        local_rows = [row for row in self._file_holders(request) if fits[row]]
        cost = self._costs(request)
        if local_rows:
            rows = np.array(local_rows, np.intp)
            row = int(rows[np.argmin(cost[rows])])
        else:
            cost = np.where(fits, cost, np.inf)
            row = int(np.argmin(cost))
            if not fits[row]:
                raise self._no_host(request, now, exclude)
        return self._assign(request, row, float(cost[row]), now, bool(local_rows))

    def _schedulable(self, now: float) -> Booleans:
        """Return the hosts that are alive, not backed off, not draining and below max_pods."""
        c = self._column
        alive = c["last_seen"] > now - self.policy.stale_s
        return np.asarray(alive & (c["backoff_until"] <= now) & (c["draining"] == 0) & (c["pods"] < c["max_pods"]))

    def _under_pressure(self) -> Booleans:
        """Return the hosts that stall on memory or disk: another pod would slow those that run there."""
        c, thresholds = self._column, self.policy.thresholds
        memory = (c["memory_some"] > thresholds.memory_some) | (c["memory_full"] > thresholds.memory_full)
        return np.asarray(memory | (c["io_full"] > thresholds.io_full))

    def _capable(self, requires: frozenset[str]) -> Booleans:
        """Return the hosts that have all required capabilities."""
        able = np.full(len(self._column["last_seen"]), True)
        for label in requires:
            able &= self._rows_of(self._capabilities.get(label))
        return able

    def _has_image(self, request: PlacementRequest) -> Booleans:
        """Return the hosts that have or can get the image. A snapshot travels with its image; its id names one, too."""
        if request.snapshot is not None or request.holders is not None:
            return np.full(len(self._column["last_seen"]), True)
        return self._rows_of(self._images.get(request.image)) | self._rows_of(self._snapshots.get(request.image))

    def _rows_of(self, holders: _Holders | None) -> Booleans:
        found = np.zeros(len(self._column["last_seen"]), bool)
        if holders is not None:
            found[holders.array()] = True
        return found

    def _file_holders(self, request: PlacementRequest) -> list[int]:
        """Return the rows of the hosts that hold the files a fork or a snapshot starts from."""
        rows = []
        if request.parent_host is not None and request.parent_host in self._hosts:
            rows.append(self._hosts[request.parent_host].row)
        if request.snapshot is not None and request.snapshot in self._snapshots:
            rows.extend(self._snapshots[request.snapshot].rows)
        return rows

    def _costs(self, request: PlacementRequest) -> Floats:
        """Return, for every row, the seconds until the pod runs plus the price of the host's fill afterwards."""
        c, p = self._column, self.policy
        start = p.startup_s * np.maximum(1.0, (c["starting"] + 1) / c["cores"])
        if (warm := self._warm.get(request.image)) is not None:
            start[warm.array()] = 0.0
        fill = 1 - (c["memory_free"] - request.memory) / c["memory_total"]
        crowding = np.maximum(0.0, fill - p.target_fill) / (1 - p.target_fill)
        price = p.pack_s * (1 - fill) + p.crowding_s * crowding * crowding
        busy = p.busy_s * (c["cpu_some"] > p.thresholds.cpu_some)
        transfer = np.zeros(len(c["last_seen"]))
        if request.holders is not None:
            transfer += p.transfer_s
            transfer[[self._hosts[name].row for name in request.holders if name in self._hosts]] = 0.0
        return np.asarray(start + price + busy + transfer + c["tie_break"])

    def _assign(self, request: PlacementRequest, row: int, cost: float, now: float, local_files: bool) -> Placement:
        """Count the placement against its host and return it."""
        name = self._names[row]
        assert name is not None
        host = self._hosts[name]
        assert host.report is not None
        with_warm = self._warm.get(request.image)
        warm = with_warm is not None and row in with_warm.rows and not local_files
        pending = _PendingPlacement(now, request.image, request.memory, warm)
        host.pending.append(pending)
        self._count_pending(row, pending, host.report)
        transfer = bool(request.snapshot or request.parent_host) and not local_files
        return Placement(name, -cost, warm, transfer, pending)

    # -- refusal

    def _no_host(self, request: PlacementRequest, now: float, exclude: Collection[str]) -> NoHost:
        """Return the error that counts every host under the first constraint that rejected it."""
        c, p, thresholds = self._column, self.policy, self.policy.thresholds
        left, excluded = np.zeros(len(c["last_seen"]), bool), np.zeros(len(c["last_seen"]), bool)
        left[[host.row for host in self._hosts.values()]] = True
        excluded[[self._hosts[name].row for name in exclude if name in self._hosts]] = True
        stalled = (c["memory_some"] > thresholds.memory_some) | (c["memory_full"] > thresholds.memory_full)
        headroom = np.minimum(thresholds.memory_headroom * c["memory_total"], thresholds.max_memory_headroom)
        large_enough = c["memory_total"] - headroom >= request.memory
        suited = self._capable(request.requires) & self._has_image(request)
        retryable = bool((left & suited & large_enough).any())
        rejections: dict[str, int] = {}
        for reason, mask in (
            ("excluded by the caller", excluded),
            ("stale", c["last_seen"] <= now - p.stale_s),
            ("draining", c["draining"] > 0),
            ("backed off after failures", c["backoff_until"] > now),
            ("without a required capability", ~self._capable(request.requires)),
            ("without the image", ~self._has_image(request)),
            ("full", c["pods"] >= c["max_pods"]),
            ("under memory pressure", stalled),
            ("under disk pressure", c["io_full"] > thresholds.io_full),
            ("without enough free memory", c["memory_free"] < request.memory),
        ):
            if count := int((left & mask).sum()):
                rejections[reason] = count
            left &= ~mask
        counts = ", ".join(
            f"{count} {reason}" for reason, count in sorted(rejections.items(), key=lambda item: -item[1])
        )
        requires = f" (requires {', '.join(sorted(request.requires))})" if request.requires else ""
        pod = f"a pod of {request.image}{requires} with {request.memory >> 20} MiB"
        message = f"none of {len(self._hosts)} hosts can take {pod}: {counts or 'no host has reported yet'}"
        return NoHost(message if retryable else f"{message}; waiting will not help", rejections, retryable)

    # -- columns and indexes

    def _grow(self, size: int) -> None:
        start = len(self._column["last_seen"])
        for name in _COLUMNS:
            # A row without a host looks like a host that never reported.
            empty = {"last_seen": -math.inf, "memory_total": 1.0, "cores": 1.0}.get(name, 0.0)
            self._column[name] = np.concatenate([self._column[name], np.full(size - start, empty)])

    def _add_host(self, name: str) -> _HostState:
        if self._free_rows:
            row = self._free_rows.pop()
            self._names[row] = name
        else:
            row = len(self._names)
            self._names.append(name)
            if row >= len(self._column["last_seen"]):
                self._grow(2 * row)
        host = self._hosts[name] = _HostState(row)
        self._column["backoff_until"][row] = -math.inf
        # Equal hosts differ by up to a millisecond that depends on the seed, so that parallel routers do not herd.
        self._column["tie_break"][row] = 1e-3 * zlib.crc32(f"{self._seed}:{name}".encode()) / 2**32
        return host

    def _update_indexes(self, row: int, old: HostReport | None, new: HostReport | None) -> None:
        """Record what a host holds by its new report, in place of what it held by the old one."""
        for name, index in self._indexes.items():
            before: frozenset[str] = getattr(old, name, frozenset())
            after: frozenset[str] = getattr(new, name, frozenset())
            for item in before - after:
                index[item].discard(row)
                if not index[item].rows:
                    del index[item]
            for item in after - before:
                index.setdefault(item, _Holders()).add(row)

    def _recount(self, host: _HostState, was_warm: Mapping[str, int]) -> None:
        """Set the columns that placements change, from the latest report and the placements it cannot include."""
        report, row = host.report, host.row
        assert report is not None
        self._column["memory_free"][row] = report.memory_free
        self._column["pods"][row] = report.pods
        self._column["starting"][row] = report.starting
        for image in {*was_warm, *report.warm}:
            holders = self._warm.setdefault(image, _Holders())
            if report.warm.get(image, 0) > 0:
                holders.add(row)
            else:
                holders.discard(row)
        for pending in host.pending:
            self._count_pending(row, pending, report)

    def _count_pending(self, row: int, pending: _PendingPlacement, report: HostReport) -> None:
        self._column["pods"][row] += 1
        self._column["memory_free"][row] -= pending.memory
        self._column["starting"][row] += not pending.warm
        if pending.warm:
            host = self._hosts[report.host]
            taken = sum(other.warm and other.image == pending.image for other in host.pending)
            if taken >= report.warm.get(pending.image, 0):
                self._warm[pending.image].discard(row)
