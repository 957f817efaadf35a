"""On which host a pod starts: reports of hosts in, one placement out. Knows no pods, talks to nobody.

The cost of a host is the seconds we expect until the pod runs there (image to fetch, start-up behind the others that
are starting) plus a price for where it leaves the host: full ones are preferred, so that empty ones can go or take
something big, until filling further would risk their peaks. Forks and snapshots stay where their files are. Reports
are old by the time they arrive, so every placement is held against its host until a report can have seen it: a
thousand placements between two reports do not all go to one host. Hosts are columns of numbers; one placement is a
few operations on whole columns, and the same reports and requests in the same order give the same placements.
"""

import math
import time
import zlib
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from etude.errors import InputError
from etude.pods.pod import Capabilities, PodError
from etude.pods.scheduling.admission import Thresholds
from etude.pods.scheduling.pressure import Pressure

REPORT_VERSION = 1
Floats = npt.NDArray[np.float64]
Booleans = npt.NDArray[np.bool_]


class NoHost(PodError):
    """No host can take the pod now. `bound` counts the hosts by what stopped them; `ever` says if waiting may help."""

    def __init__(self, message: str, bound: Mapping[str, int], ever: bool) -> None:
        super().__init__(message)
        self.bound = dict(bound)
        self.ever = ever


@dataclass(frozen=True, slots=True)
class HostReport:
    """What a host says of itself every few seconds. Crosses processes: `to_wire` and `from_wire`."""

    host: str
    address: str
    backend: str
    pressure: Pressure
    pods: int  # that hold a seat, those being created with them
    max_pods: int
    memory_free: int  # that new pods may take: available, less what is kept back and what is promised
    capabilities: frozenset[str] = frozenset()  # as `capability_labels` writes them
    images: frozenset[str] = frozenset()
    snapshots: frozenset[str] = frozenset()
    warm: Mapping[str, int] = field(default_factory=dict)  # started pods in stock, by image
    cores: float = 1.0
    starting: int = 0  # of the pods, those being created
    draining: bool = False
    time: float = 0.0  # of the host's own clock: only compared with its other reports
    version: int = REPORT_VERSION

    def to_wire(self) -> dict[str, Any]:
        """As plain lists and numbers, for JSON."""
        plain = asdict(self)
        return {k: sorted(v) if isinstance(v, frozenset) else v for k, v in plain.items()}

    @classmethod
    def from_wire(cls, plain: Mapping[str, Any]) -> "HostReport":
        if plain.get("version") != REPORT_VERSION:
            raise InputError(
                f"report of host {plain.get('host')!r}: version {plain.get('version')!r}; "
                f"this router reads {REPORT_VERSION}: run the same release on both sides"
            )
        sets = {name: frozenset(plain[name]) for name in ("capabilities", "images", "snapshots")}
        return cls(**{**plain, **sets, "pressure": Pressure(**plain["pressure"])})


def capability_labels(backend: str, can: Capabilities) -> frozenset[str]:
    """A backend's capabilities as words that a request can ask for: `isolation:vm`, `limit:disk`, `snapshot:full`."""
    words = {f"backend:{backend}", f"isolation:{can.isolation}"}
    words |= {f"limit:{name}" for name in can.limits} | {f"egress:{name}" for name in can.egress}
    words |= {f"snapshot:{kind}" for kind in can.snapshots}
    words |= {name for name in ("images", "pause", "users") if getattr(can, name)}
    return frozenset(words)


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """A pod to place. `memory` is what it is expected to take while it starts, not its limit."""

    image: str
    memory: int
    tenant: str = ""
    snapshot: str | None = None  # start from this instead of the bare image
    origin: str | None = None  # of a fork: the host the parent runs on
    image_size: int | None = None  # bytes to fetch where the image is missing, when known
    needs: frozenset[str] = frozenset()  # words of `capability_labels`


@dataclass(frozen=True, slots=True)
class Placement:
    """Where to start it. `score` is minus the cost in seconds: greater is better."""

    host: str
    address: str
    score: float
    reason: str
    warm: bool = False
    image_local: bool = False
    transfer: bool = False  # the snapshot must be brought there first
    claim: int = 0  # for `PodRouter.returned`


@dataclass(frozen=True, slots=True)
class PlacementPolicy:
    """What the router weighs, in seconds, and when it stops believing a host."""

    pull_s: float = 20.0  # an image of unknown size that is not there: about 2 GB
    pull_rate: float = 200e6  # bytes/s from a registry, unpacking included
    startup_s: float = 4.0  # of one core while a pod starts; a warm one has had it
    busy_s: float = 30.0  # price of a host whose cores are over their ceiling: last choice, better than none
    pack_s: float = 2.0  # start-up time given up, at most, to fill hosts instead of spreading
    target: float = 0.8  # fill up to here: the rest is for peaks, and for forks, which want to stay
    crowd_s: float = 20.0  # the price of the last byte of a host; it rises from nothing at `target`
    stale_s: float = 10.0  # without a report for so long a host is taken for dead
    lag_s: float = 2.0  # from a placement until a report that arrives must have counted it
    suspect_s: float = 1.0  # after a failure; doubles with each further one
    suspect_most_s: float = 60.0
    thresholds: Thresholds = field(default_factory=Thresholds)  # the ceilings of hosts, as admission has them

    def pull(self, request: PlacementRequest) -> float:
        """Seconds to fetch the request's image where it is missing."""
        return self.pull_s if request.image_size is None else request.image_size / self.pull_rate


class _Holders:
    """Which hosts have a thing, by row; as an array that is made again only after a change."""

    def __init__(self) -> None:
        self.rows: dict[int, float] = {}  # -> when it is (expected) there; -inf: reported
        self._arrays: tuple[npt.NDArray[np.intp], Floats] | None = None

    def put(self, row: int, when: float = -math.inf) -> None:
        if self.rows.get(row, math.inf) > when:
            self.rows[row] = when
            self._arrays = None

    def drop(self, row: int) -> None:
        if self.rows.pop(row, None) is not None:
            self._arrays = None

    def arrays(self) -> tuple[npt.NDArray[np.intp], Floats]:
        if self._arrays is None:
            rows = np.fromiter(self.rows.keys(), np.intp, len(self.rows))
            self._arrays = rows, np.fromiter(self.rows.values(), np.float64, len(self.rows))
        return self._arrays


class _Claim:
    """One placement that no report has counted yet."""

    __slots__ = ("image", "memory", "number", "returned", "time", "warm")

    def __init__(self, number: int, now: float, image: str, memory: int, warm: bool) -> None:
        self.number, self.time, self.image, self.memory, self.warm = number, now, image, memory, warm
        self.returned = False


class _HostState:
    """What is not a column: the latest report and the claims since."""

    def __init__(self, row: int) -> None:
        self.row = row
        self.report: HostReport | None = None
        self.claims: deque[_Claim] = deque()
        self.coming: dict[str, float] = {}  # images it was sent to fetch -> when to stop believing in it
        self.failures = 0


_STALLS = ("memory_some", "memory_full", "io_full", "cpu_some")
_COLUMNS = ("seen", "until", "draining", "free", "total", "pods", "most", "starting", "cores", "tie", *_STALLS)


class PodRouter:
    """Places pods on hosts from their reports. `clock` is this process's own: nobody else's time is trusted."""

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
        self._warm: dict[str, _Holders] = {}
        self._kinds: dict[frozenset[str], int] = {frozenset(): 0}  # capabilities -> their number in `_kind`
        self._able: dict[frozenset[str], Booleans] = {}
        self._claims: dict[int, tuple[str, _Claim]] = {}
        self._claimed = 0
        self._column: dict[str, Floats] = {name: np.zeros(0) for name in _COLUMNS}
        self._kind = np.zeros(0, np.intp)
        self._grow(64)

    def __len__(self) -> int:
        return len(self._hosts)

    def hosts(self) -> list[HostReport]:
        """The latest report of every host that is known, stale ones too."""
        return [host.report for host in self._hosts.values() if host.report is not None]

    # -- what hosts say

    def report(self, report: HostReport) -> None:
        """A host's report has arrived. One that was overtaken by a later one is dropped."""
        now = self._clock()
        host = self._hosts.get(report.host) or self._add(report.host)
        last, row = host.report, host.row
        # A clock that was set back must not shut a host out for ever: once stale, any report is believed.
        if last is not None and report.time < last.time and now - self._column["seen"][row] < self.policy.stale_s:
            return
        self._index(self._images, row, last.images if last else frozenset(), report.images)
        self._index(self._snapshots, row, last.snapshots if last else frozenset(), report.snapshots)
        host.report = report
        self._forget_coming(host, now)
        while host.claims and (host.claims[0].returned or host.claims[0].time <= now - self.policy.lag_s):
            self._claims.pop(host.claims.popleft().number, None)
        stalls, column = report.pressure, self._column
        column["seen"][row] = now
        column["total"][row] = max(1, stalls.memory_total)
        column["most"][row] = report.max_pods
        column["cores"][row] = max(0.1, report.cores)
        for name in _STALLS:
            value = getattr(stalls, name)
            column[name][row] = 0.0 if value is None else value
        column["draining"][row] = report.draining
        words = report.capabilities | {f"backend:{report.backend}"}
        self._kind[row] = self._kinds.setdefault(words, len(self._kinds))
        self._recount(host, last.warm if last else {})

    def forget(self, host: str) -> None:
        """The host is gone for good; a later report brings it back as new."""
        gone = self._hosts.pop(host, None)
        if gone is None:
            return
        if gone.report is not None:
            self._index(self._images, gone.row, gone.report.images, frozenset())
            self._index(self._snapshots, gone.row, gone.report.snapshots, frozenset())
            for image in gone.report.warm:
                self._warm[image].drop(gone.row)
        self._forget_coming(gone, math.inf)
        for claim in gone.claims:
            self._claims.pop(claim.number, None)
        self._names[gone.row] = None
        self._column["seen"][gone.row] = -math.inf
        self._free_rows.append(gone.row)

    def failed(self, host: str) -> None:
        """Something asked of the host failed: leave it alone for a while, twice as long each time in a row."""
        known = self._hosts.get(host)
        if known is None:
            return
        now, until = self._clock(), float(self._column["until"][known.row])
        last = min(self.policy.suspect_most_s, self.policy.suspect_s * 2.0 ** (known.failures - 1))
        if known.failures and now > until + last:
            known.failures = 0  # it did well for as long as it was left alone
        pause = min(self.policy.suspect_most_s, self.policy.suspect_s * 2.0**known.failures)
        known.failures += 1
        self._column["until"][known.row] = max(until, now + pause)

    def returned(self, placement: Placement) -> None:
        """The placement was not used: what it claimed is free again."""
        host_name, claim = self._claims.pop(placement.claim, (None, None))
        if host_name is None or claim is None or claim.returned:
            return
        claim.returned = True
        host = self._hosts[host_name]
        self._recount(host, {claim.image: 1} if claim.warm else {})

    # -- where to

    def place(self, request: PlacementRequest, exclude: Collection[str] = ()) -> Placement:
        """The best host for it now. NoHost, with what bound how many hosts, when none can take it."""
        now = self._clock()
        open_, over = self._open(now), self._over()
        fits = open_ & ~over & (self._column["free"] >= request.memory) & self._can(request.needs)
        for name in exclude:
            if name in self._hosts:
                fits[self._hosts[name].row] = False
        home = self._home(request)
        at_home = [row for row in home if fits[row]]
        cost = self._costs(request, now)
        if at_home:
            rows = np.array(at_home, np.intp)
            row = int(rows[np.argmin(cost[rows])])
        else:
            cost = np.where(fits, cost, np.inf)
            row = int(np.argmin(cost))
            if not fits[row]:
                raise self._nobody(request, now, exclude)
        return self._claim(request, row, float(cost[row]), now, home, bool(at_home))

    def _open(self, now: float) -> Booleans:
        """Hosts that live, are trusted, stay and have a seat."""
        c = self._column
        alive = c["seen"] > now - self.policy.stale_s
        return np.asarray(alive & (c["until"] <= now) & (c["draining"] == 0) & (c["pods"] < c["most"]))

    def _over(self) -> Booleans:
        """Hosts that stall on memory or disk: another pod would make those that run there worse."""
        c, lines = self._column, self.policy.thresholds
        memory = (c["memory_some"] > lines.memory_some) | (c["memory_full"] > lines.memory_full)
        return np.asarray(memory | (c["io_full"] > lines.io_full))

    def _can(self, needs: frozenset[str]) -> Booleans:
        """Hosts that can do all that is asked for."""
        table = self._able.get(needs)
        if table is None or len(table) != len(self._kinds):
            table = self._able[needs] = np.array([needs <= words for words in self._kinds], bool)
        return np.asarray(table[self._kind])

    def _home(self, request: PlacementRequest) -> list[int]:
        """Rows of the hosts that hold the files a fork or a snapshot starts from."""
        rows = []
        if request.origin is not None and request.origin in self._hosts:
            rows.append(self._hosts[request.origin].row)
        if request.snapshot is not None and request.snapshot in self._snapshots:
            rows.extend(self._snapshots[request.snapshot].rows)
        return rows

    def _costs(self, request: PlacementRequest, now: float) -> Floats:
        """Seconds until the pod runs, and the price of where it leaves the host; for every row."""
        c, p = self._column, self.policy
        pull = p.pull(request)
        fetch = np.full(len(c["seen"]), pull)
        if (holders := self._images.get(request.image)) is not None:
            rows, ready = holders.arrays()
            fetch[rows] = np.clip(ready - now, 0.0, pull)
        start = p.startup_s * np.maximum(1.0, (c["starting"] + 1) / c["cores"])
        if (stock := self._warm.get(request.image)) is not None:
            rows, _ = stock.arrays()
            fetch[rows], start[rows] = 0.0, 0.0
        fill = 1 - (c["free"] - request.memory) / c["total"]
        crowd = np.maximum(0.0, fill - p.target) / (1 - p.target)
        price = p.pack_s * (1 - fill) + p.crowd_s * crowd * crowd
        busy = p.busy_s * (c["cpu_some"] > p.thresholds.cpu_some)
        return np.asarray(fetch + start + price + busy + c["tie"])

    def _claim(
        self, request: PlacementRequest, row: int, cost: float, now: float, home: list[int], at_home: bool
    ) -> Placement:
        name = self._names[row]
        assert name is not None
        host = self._hosts[name]
        assert host.report is not None
        holders, stock = self._images.get(request.image), self._warm.get(request.image)
        there = holders.rows.get(row, math.inf) if holders is not None else math.inf
        warm = stock is not None and row in stock.rows and not at_home
        if there == math.inf and not at_home:  # the first of a group fetches, the others wait for the same fetch
            pull = self.policy.pull(request)
            self._images.setdefault(request.image, _Holders()).put(row, now + pull)
            host.coming[request.image] = now + 2 * pull + self.policy.stale_s
        local = there == -math.inf
        self._claimed += 1
        claim = _Claim(self._claimed, now, request.image, request.memory, warm)
        host.claims.append(claim)
        self._claims[claim.number] = (name, claim)
        self._add_claim(row, claim, host.report)
        transfer = bool(request.snapshot or request.origin) and not at_home
        reason = self._reason(request, home, at_home, warm, local)
        return Placement(name, host.report.address, -cost, reason, warm, local, transfer, claim.number)

    def _reason(self, request: PlacementRequest, home: list[int], at_home: bool, warm: bool, local: bool) -> str:
        if at_home:
            return "its files are there"
        image = "a warm pod is there" if warm else "its image is there" if local else "best fit, its image is fetched"
        if not (request.snapshot or request.origin):
            return image
        holders = ", ".join(sorted(str(self._names[row]) for row in home)[:3])
        source = f"{holders} cannot take it now" if holders else "no host is known to hold its files"
        return f"{image}; its files must be brought: {source}"

    # -- why not

    def _nobody(self, request: PlacementRequest, now: float, exclude: Collection[str]) -> NoHost:
        """Count every host under the first constraint that stopped it."""
        c, p, lines = self._column, self.policy, self.policy.thresholds
        left, shut = np.zeros(len(c["seen"]), bool), np.zeros(len(c["seen"]), bool)
        left[[host.row for host in self._hosts.values()]] = True
        shut[[self._hosts[name].row for name in exclude if name in self._hosts]] = True
        stall = (c["memory_some"] > lines.memory_some) | (c["memory_full"] > lines.memory_full)
        kept = np.minimum(lines.memory_headroom * c["total"], lines.memory_headroom_most)
        ever = bool((left & self._can(request.needs) & (c["total"] - kept >= request.memory)).any())
        bound: dict[str, int] = {}
        for what, mask in (
            ("excluded by the caller", shut),
            ("stale", c["seen"] <= now - p.stale_s),
            ("draining", c["draining"] > 0),
            ("suspected after failures", c["until"] > now),
            ("without what it needs", ~self._can(request.needs)),
            ("full", c["pods"] >= c["most"]),
            ("under memory pressure", stall),
            ("under disk pressure", c["io_full"] > lines.io_full),
            ("without enough free memory", c["free"] < request.memory),
        ):
            if count := int((left & mask).sum()):
                bound[what] = count
            left &= ~mask
        words = ", ".join(f"{count} {what}" for what, count in sorted(bound.items(), key=lambda item: -item[1]))
        needs = f" (needs {', '.join(sorted(request.needs))})" if request.needs else ""
        asked = f"a pod of {request.image}{needs} with {request.memory >> 20} MiB"
        message = f"no host for {asked}: of {len(self._hosts)} hosts {words or 'none is known'}"
        return NoHost(message if ever else f"{message}; waiting will not help", bound, ever)

    # -- the columns

    def _grow(self, size: int) -> None:
        start = len(self._kind)
        for name in _COLUMNS:
            # A row without a host is as a host that never spoke.
            empty = {"seen": -math.inf, "total": 1.0, "cores": 1.0}.get(name, 0.0)
            self._column[name] = np.concatenate([self._column[name], np.full(size - start, empty)])
        self._kind = np.concatenate([self._kind, np.zeros(size - start, np.intp)])

    def _add(self, name: str) -> _HostState:
        if self._free_rows:
            row = self._free_rows.pop()
            self._names[row] = name
        else:
            row = len(self._names)
            self._names.append(name)
            if row >= len(self._kind):
                self._grow(2 * row)
        host = self._hosts[name] = _HostState(row)
        self._column["until"][row] = -math.inf
        # Equal hosts are told apart by a millisecond that depends on the seed: routers side by side do not herd.
        self._column["tie"][row] = 1e-3 * zlib.crc32(f"{self._seed}:{name}".encode()) / 2**32
        return host

    def _index(self, index: dict[str, _Holders], row: int, old: frozenset[str], new: frozenset[str]) -> None:
        if old == new:  # nearly always: what a host has seldom changes
            return
        for thing in old - new:
            self._drop(index, thing, row)
        for thing in new - old:
            index.setdefault(thing, _Holders()).put(row)

    def _drop(self, index: dict[str, _Holders], thing: str, row: int) -> None:
        if (holders := index.get(thing)) is not None:
            holders.drop(row)
            if not holders.rows:
                del index[thing]

    def _forget_coming(self, host: _HostState, now: float) -> None:
        """Images that have come are in the report; those that should have by now are not believed in any more."""
        assert host.report is not None
        for image, until in list(host.coming.items()):
            if image in host.report.images:
                del host.coming[image]
            elif until < now:
                del host.coming[image]
                self._drop(self._images, image, host.row)

    def _recount(self, host: _HostState, was_warm: Mapping[str, int]) -> None:
        """The columns that claims change, from the latest report and the claims it cannot have counted."""
        report, row = host.report, host.row
        assert report is not None
        self._column["free"][row] = report.memory_free
        self._column["pods"][row] = report.pods
        self._column["starting"][row] = report.starting
        for image in {*was_warm, *report.warm}:
            stock = self._warm.setdefault(image, _Holders())
            if report.warm.get(image, 0) > 0:
                stock.put(row)
            else:
                stock.drop(row)
        for claim in host.claims:
            if not claim.returned:
                self._add_claim(row, claim, report)

    def _add_claim(self, row: int, claim: _Claim, report: HostReport) -> None:
        self._column["pods"][row] += 1
        self._column["free"][row] -= claim.memory
        self._column["starting"][row] += not claim.warm
        if claim.warm:
            host = self._hosts[report.host]
            taken = sum(other.warm and other.image == claim.image and not other.returned for other in host.claims)
            if taken >= report.warm.get(claim.image, 0):
                self._warm[claim.image].drop(row)
