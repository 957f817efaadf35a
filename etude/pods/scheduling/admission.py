"""Whether a pod may start now on this host, and whose turn it is when not all may.

`Admission` answers from live pressure, not from the sum of limits: a pod takes most when it starts and far less
after, so limits added up would leave most of a machine empty, and a count would kill it. What has just been admitted
is held against memory until the measurements show it. `FairQueue` hands out turns: fair between tenants by weight, in
order within one, re-asked on a timer because pressure falls without telling anybody. Neither touches a pod; both
live on one event loop. Every no is a sentence, so that whoever waits can be told why.
"""

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from etude.errors import InputError
from etude.pods.pod import PodError
from etude.pods.scheduling.pressure import Pressure

MIB, GIB = 1 << 20, 1 << 30
HELD_AGE = 0.05  # seconds: adding up a thousand promises for every question would cost more than the question


class NeverFits(PodError):
    """This pod cannot start on this host however long it waits."""


class WaitedTooLong(PodError):
    """The time given to wait for a turn has passed; the message says where it stood and what it waited for."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Where admission draws its lines. Stall ceilings are per cent of time (PSI avg10)."""

    memory_headroom: float = 0.10  # of all memory stays free: the page cache and our own service live there
    memory_headroom_most: int = 4 * GIB  # ... but a big machine needs no more than this
    memory_some: float = 10.0  # reclaim is measurable: running pods already pay for every new one
    memory_full: float = 5.0  # everybody stops at once: thrashing begins here
    io_full: float = 40.0  # unpacking images makes short peaks; a disk that is full of work stays above
    cpu_some: float = 90.0  # a busy core slows, it does not kill: over this, creations slow down but never stop
    resume: float = 0.7  # what was over its ceiling must fall below this share of it, or the gate flutters
    disk_headroom: float = 0.05  # of the disk stays free ...
    disk_headroom_most: int = 2 * GIB  # ... but no more than this
    inodes: int = 10_000  # about one node_modules
    max_pods: int = 1000
    creations_per_core: float = 2.0  # measured best: fewer leaves cores idle in the kernel's waits, more only queue
    creations_per_core_busy: float = 0.5  # over the ceiling for cpu
    unknown_need: float = 0.5  # of its limit is what a pod of an image never seen is expected to take
    settle_s: float = 15.0  # from start to the peak being over and visible in the measurements

    def memory_line(self, total: int) -> int:
        """Bytes of memory that must stay free."""
        return min(int(self.memory_headroom * total), self.memory_headroom_most)

    def disk_line(self, total: int) -> int:
        """Bytes of disk that must stay free."""
        return min(int(self.disk_headroom * total), self.disk_headroom_most)


@dataclass(frozen=True, slots=True)
class ResourceRequest:
    """What somebody wants to start: the image and the pod's own limits, in bytes."""

    image: str
    memory: int
    disk: int = 0

    def __post_init__(self) -> None:
        if self.memory <= 0:
            raise InputError(f"a pod of {self.image}: memory is {self.memory}; admission needs a limit in bytes")


@dataclass(frozen=True, slots=True)
class AdmissionDecision:
    """Whether it may start now; if not, why not, in words."""

    reasons: tuple[str, ...] = ()
    everyone: bool = False  # the cause would stop any other pod too

    @property
    def admitted(self) -> bool:
        return not self.reasons

    def __str__(self) -> str:
        return "; ".join(self.reasons) or "may start"


class MemoryEstimator:
    """What a pod of an image takes at its start, learned from what pods took: up at once, down slowly.

    Too low an expectation kills pods, too high only delays them.
    """

    FALL = 0.1  # of the distance per pod that took less: one light pod among heavy ones changes little
    MARGIN = 1.2  # the next one may take somewhat more than any before
    LEAST = 16 * MIB  # a pod that did nothing still had a kernel side

    def __init__(self, unknown: float) -> None:
        self._unknown = unknown
        self._peaks: dict[str, float] = {}

    def expect(self, image: str, limit: int) -> int:
        """Bytes a pod of `image` is expected to take at its peak; never over its limit."""
        peak = self._peaks.get(image)
        need = self._unknown * limit if peak is None else max(self.LEAST, self.MARGIN * peak)
        return min(limit, math.ceil(need))

    def learn(self, image: str, peak: int, final: bool) -> None:
        """A pod took `peak` bytes; `final` when its start is over, and less than expected means something."""
        known = self._peaks.get(image)
        if known is not None and peak >= known:
            self._peaks[image] = peak
        elif final:
            self._peaks[image] = peak if known is None else known + self.FALL * (peak - known)


class Reservation:
    """One pod's place on this host, from the moment it was admitted until `leave`."""

    def __init__(self, admission: "Admission", ask: ResourceRequest, expected: int) -> None:
        self.ask = ask
        self.expected = expected
        self._admission = admission
        self._started: float | None = None
        self._peak = 0
        self._learned = False
        self.left = False

    @property
    def creating(self) -> bool:
        return self._started is None and not self.left

    def started(self) -> None:
        """The pod is up: another may be created, and what it takes begins to show in the measurements."""
        if self.creating:
            self._started = self._admission.clock()
            self._admission.created()

    def observed(self, memory: int) -> None:
        """The pod takes this many bytes now (or did at its peak)."""
        self._peak = max(self._peak, memory)
        settled = self._started is not None and self._age() >= self._admission.thresholds.settle_s
        self._teach(final=settled)

    def leave(self) -> None:
        """The pod is gone, or was never made. Leaving twice is fine."""
        if not self.left:
            if self._started is not None and self._peak:
                self._teach(final=True)
            self._admission.vacate(self)
            self.left = True
            self._admission.changed()

    def held(self) -> int:
        """Bytes that are promised to this pod and that the measurements cannot show yet.

        All that is expected while it is made; after that less and less, and never what it is known to have taken.
        """
        if self.left:
            return 0
        settle = self._admission.thresholds.settle_s
        rest = 1.0 if self._started is None else max(0.0, 1 - self._age() / settle) if settle else 0.0
        return math.ceil(rest * max(0, self.expected - self._peak))

    def _age(self) -> float:
        return self._admission.clock() - (self._started or 0.0)

    def _teach(self, final: bool) -> None:
        self._admission.needs.learn(self.ask.image, self._peak, final and not self._learned)
        self._learned = self._learned or final


class Admission:
    """Decides whether a pod may start now on this host. `measure` gives the live pressure, `clock` seconds."""

    def __init__(
        self,
        measure: Callable[[], Pressure],
        thresholds: Thresholds | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.thresholds = thresholds or Thresholds()
        self.clock = clock
        self.needs = MemoryEstimator(self.thresholds.unknown_need)
        self._measure = measure
        self._seats: set[Reservation] = set()
        self._creating = 0
        self._unsettled: set[Reservation] = set()  # those that may still hold something
        self._held, self._held_at = 0, -math.inf
        self._over: set[str] = set()  # stalls that went over their ceiling and are not yet well below it
        self._listeners: list[Callable[[], None]] = []

    def __len__(self) -> int:
        """Pods that hold a seat."""
        return len(self._seats)

    def held(self) -> int:
        """Bytes promised to pods that the measurements cannot show yet; up to HELD_AGE late in falling, never low.

        Between two sums over all seats only what is new is added and what left taken off: promises only shrink.
        """
        now = self.clock()
        if now - self._held_at >= HELD_AGE:
            self._unsettled = {seat for seat in self._unsettled if seat.held() > 0}
            self._held, self._held_at = sum(seat.held() for seat in self._unsettled), now
        return self._held

    def room(self) -> int:
        """Bytes of memory that new pods may still take: what a host tells the router."""
        now = self._measure()
        return max(0, now.memory_available - self.thresholds.memory_line(now.memory_total) - self.held())

    def check(self, ask: ResourceRequest) -> None:
        """Raise NeverFits for a pod that no waiting would let in."""
        now, lines = self._measure(), self.thresholds
        usable = now.memory_total - lines.memory_line(now.memory_total)
        need = self.needs.expect(ask.image, ask.memory)
        disk = now.disk_total - lines.disk_line(now.disk_total)
        if ask.memory > now.memory_total:
            cause = f"its memory limit of {_size(ask.memory)} is over the {_size(now.memory_total)} this host has"
        elif need > usable:
            cause = f"it is expected to take {_size(need)} of memory; this host gives {_size(usable)} to pods"
        elif ask.disk > disk:
            cause = f"its disk limit of {_size(ask.disk)} is over the {_size(disk)} this host gives to pods"
        elif lines.max_pods < 1:
            cause = f"max_pods is {lines.max_pods}"
        else:
            return
        raise NeverFits(f"a pod of {ask.image} can never start here: {cause}; lower its limit or use a larger host")

    def verdict(self, ask: ResourceRequest) -> AdmissionDecision:
        """Whether it may start now; if not, what stops every pod, or else what stops this one."""
        now, lines = self._measure(), self.thresholds
        if general := [*self._counts(now), *self._stalls(now), *self._disk_lines(now)]:
            return AdmissionDecision(tuple(general), everyone=True)
        own = []
        need = self.needs.expect(ask.image, ask.memory)
        line, held = lines.memory_line(now.memory_total), self.held()
        free = now.memory_available - line - held
        if need > free:
            promised = f", {_size(held)} promised to pods that are starting" if held else ""
            own.append(
                f"{_size(need)} of memory needed, {_size(max(0, free))} free over the {_size(line)} kept back{promised}"
            )
        if ask.disk > now.disk_free - lines.disk_line(now.disk_total):
            own.append(f"{_size(ask.disk)} of disk needed, {_size(now.disk_free)} free")
        return AdmissionDecision(tuple(own))

    def admit(self, ask: ResourceRequest) -> Reservation | AdmissionDecision:
        """A seat for it, or why not now. NeverFits when not ever."""
        self.check(ask)
        verdict = self.verdict(ask)
        if not verdict.admitted:
            return verdict
        seat = Reservation(self, ask, self.needs.expect(ask.image, ask.memory))
        self._seats.add(seat)
        self._unsettled.add(seat)
        self._creating += 1
        self._held += seat.held()
        return seat

    def adopt(self, ask: ResourceRequest) -> Reservation:
        """A seat for a pod that already runs here, found after a restart: counted, never refused."""
        seat = Reservation(self, ask, expected=0)
        self._seats.add(seat)
        self._creating += 1
        seat.started()
        return seat

    def created(self) -> None:
        """Called by a seat whose pod is up."""
        self._creating -= 1
        self.changed()

    def vacate(self, seat: Reservation) -> None:
        """Called by a seat that is being left."""
        self._seats.discard(seat)
        self._unsettled.discard(seat)
        self._creating -= seat.creating
        self._held = max(0, self._held - seat.held())

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` when a seat is left or a creation is over."""
        self._listeners.append(listener)

    def changed(self) -> None:
        for listener in self._listeners:
            listener()

    def _counts(self, now: Pressure) -> list[str]:
        lines, reasons = self.thresholds, []
        if len(self._seats) >= lines.max_pods:
            reasons.append(f"{len(self._seats)} pods of at most {lines.max_pods}")
        slow = self._is_over("cpu pressure", now.cpu_some, lines.cpu_some)
        per_core = lines.creations_per_core_busy if slow else lines.creations_per_core
        at_once = max(1, int(per_core * now.cores))
        if self._creating >= at_once:
            why = f" while cpu pressure is {now.cpu_some:.0f} %" if slow and now.cpu_some is not None else ""
            reasons.append(f"{self._creating} pods are being created, at most {at_once} at once{why}")
        return reasons

    def _stalls(self, now: Pressure) -> list[str]:
        lines, reasons = self.thresholds, []
        for name, value, ceiling in (
            ("memory pressure", now.memory_some, lines.memory_some),
            ("full memory pressure", now.memory_full, lines.memory_full),
            ("full disk pressure", now.io_full, lines.io_full),
        ):
            if value is not None and self._is_over(name, value, ceiling):
                rest = (
                    "" if value > ceiling else f" was over {ceiling:g} % and is not under {lines.resume * ceiling:g} %"
                )
                reasons.append(f"{name} {value:g} % is over {ceiling:g} %" if not rest else f"{name} {value:g} %{rest}")
        # With no pod of ours the stall is somebody else's and may never end: one pod is always tried, under the
        # lines of memory and disk, so that a shared machine makes progress.
        return reasons if self._seats else []

    def _is_over(self, name: str, value: float | None, ceiling: float) -> bool:
        if value is None or value < self.thresholds.resume * ceiling:
            self._over.discard(name)
        elif value > ceiling:
            self._over.add(name)
        return name in self._over

    def _disk_lines(self, now: Pressure) -> list[str]:
        lines, reasons = self.thresholds, []
        least = lines.disk_line(now.disk_total)
        if now.disk_free < least:
            reasons.append(f"{_size(now.disk_free)} of disk free is under {_size(least)}")
        if now.inodes_free is not None and now.inodes_free < lines.inodes:
            reasons.append(f"{now.inodes_free} inodes free is under {lines.inodes}")
        return reasons


@dataclass(frozen=True, slots=True)
class TenantQueueStatus:
    """How one tenant stands in the queue."""

    tenant: str
    waiters: int
    longest_s: float
    why: str


class _Waiter:
    def __init__(
        self, tenant: str, ask: ResourceRequest, cost: float, now: float, seat: "asyncio.Future[Reservation]"
    ) -> None:
        self.tenant = tenant
        self.ask = ask
        self.cost = cost
        self.since = now
        self.seat = seat
        self.refused_since: float | None = None  # since when it has been first in line and refused
        self.why = "its turn has not come"


class _Tenant:
    def __init__(self, tag: float, order: int) -> None:
        self.tag = tag  # virtual time at which its next waiter is due: cost / weight of all it was served
        self.order = order  # breaks ties: who came first
        self.waiters: OrderedDict[_Waiter, None] = OrderedDict()  # O(1) removal of a cancelled one


class FairQueue:
    """Turns to create a pod: by weight between tenants, first come first served within one.

    Start-time fair queueing: a tenant's tag grows by cost / weight with each turn, the lowest tag is next, and a
    tenant that comes (back) starts at the present, so that neither idling nor flooding earns anything. Tags belong to
    tenants and grow when a turn is given, so a waiter that goes away costs its tenant nothing.

    A waiter that is next but too big for now lets smaller ones pass for `patience_s`; then the queue is held for it,
    so nobody starves.
    """

    def __init__(
        self,
        admission: Admission,
        weights: Mapping[str, float] | None = None,
        *,
        recheck_s: float = 0.25,  # pressure averages over seconds; asking costs microseconds
        patience_s: float = 10.0,
    ) -> None:
        self._admission = admission
        self._weights: dict[str, float] = {}
        self._recheck_s = recheck_s
        self._patience_s = patience_s
        self._tenants: dict[str, _Tenant] = {}
        self._now = 0.0  # virtual time: the tag of the latest turn
        self._orders = 0
        self._timer: asyncio.TimerHandle | None = None
        self._pumping = False
        admission.on_change(self._pump)
        for tenant, weight in (weights or {}).items():
            self.set_weight(tenant, weight)

    def set_weight(self, tenant: str, weight: float) -> None:
        """Give `tenant` this share relative to the others, whose weight is 1 unless set."""
        if not (weight > 0 and math.isfinite(weight)):
            raise InputError(f"queue: the weight of {tenant} is {weight!r}; expected a positive number")
        self._weights[tenant] = weight

    def waiting(self) -> list[TenantQueueStatus]:
        """Who waits, how long and why, by tenant."""
        now, lines = asyncio.get_running_loop().time(), []
        for name, tenant in self._tenants.items():
            if tenant.waiters:
                first = next(iter(tenant.waiters))
                lines.append(TenantQueueStatus(name, len(tenant.waiters), now - first.since, first.why))
        return lines

    @asynccontextmanager
    async def turn(
        self, tenant: str, ask: ResourceRequest, *, cost: float = 1.0, timeout: float | None = None
    ) -> AsyncIterator[Reservation]:
        """Wait for a turn and create the pod inside it; the seat is the pod's until `seat.leave()`.

        Leaving the block says that the creation is over; leaving it by an exception gives the seat back.
        """
        if not (cost > 0 and math.isfinite(cost)):
            raise InputError(f"queue: the cost of a turn is {cost!r}; expected a positive number")
        self._admission.check(ask)
        seat = await self._wait(tenant, ask, cost, timeout)
        try:
            yield seat
        except BaseException:
            seat.leave()
            raise
        seat.started()

    async def _wait(self, name: str, ask: ResourceRequest, cost: float, timeout: float | None) -> Reservation:
        loop = asyncio.get_running_loop()
        waiter = _Waiter(name, ask, cost, loop.time(), loop.create_future())
        self._enter(waiter)
        self._pump()
        deadline = None if timeout is None else loop.call_later(timeout, self._expire, waiter)
        try:
            return await waiter.seat
        except BaseException:
            if waiter.seat.done() and not waiter.seat.cancelled() and waiter.seat.exception() is None:
                waiter.seat.result().leave()  # given in the very moment of being cancelled: pass it on
            self._remove(waiter)
            self._pump()
            raise
        finally:
            if deadline is not None:
                deadline.cancel()

    def _enter(self, waiter: _Waiter) -> None:
        tenant = self._tenants.get(waiter.tenant)
        if tenant is None:
            tenant = self._tenants[waiter.tenant] = _Tenant(self._now, self._orders)
            self._orders += 1
        if not tenant.waiters:
            tenant.tag = max(tenant.tag, self._now)
        tenant.waiters[waiter] = None

    def _remove(self, waiter: _Waiter) -> None:
        tenant = self._tenants.get(waiter.tenant)
        if tenant is not None:
            tenant.waiters.pop(waiter, None)

    def _expire(self, waiter: _Waiter) -> None:
        """The waiter's time is up: say where it stood. One that was given a seat in the same instant keeps it."""
        if waiter.seat.done():
            return
        own = list(self._tenants[waiter.tenant].waiters)
        everyone = sum(len(tenant.waiters) for tenant in self._tenants.values())
        waited = asyncio.get_running_loop().time() - waiter.since
        waiter.seat.set_exception(
            WaitedTooLong(
                f"a pod of {waiter.ask.image} for {waiter.tenant} waited {waited:.1f} s for its turn: number "
                f"{own.index(waiter) + 1} of {len(own)} of its tenant, {everyone} waiting in all; {own[0].why}"
            )
        )
        self._remove(waiter)

    def _pump(self) -> None:
        """Give every turn that can be given now; look again soon while somebody waits."""
        if self._pumping:  # giving a seat may report a change: the loop below goes on anyway
            return
        self._pumping = True
        try:
            while self._give_one():
                pass
            self._forget_idle()
        finally:
            self._pumping = False
        waiting = any(tenant.waiters for tenant in self._tenants.values())
        if not waiting and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        elif waiting and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._recheck_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._pump()

    def _give_one(self) -> bool:
        """One turn to the tenant that is due, or to the next that fits; False when nobody may start."""
        due = sorted((tenant for tenant in self._tenants.values() if tenant.waiters), key=lambda t: (t.tag, t.order))
        for tenant in due:
            waiter = next(iter(tenant.waiters))
            if waiter.seat.done():  # cancelled in this instant, its task has not run yet
                self._remove(waiter)
                return True
            try:
                answer = self._admission.admit(waiter.ask)
            except Exception as error:  # measuring failed, or it can no longer fit: its own affair, not the queue's
                self._remove(waiter)
                waiter.seat.set_exception(error)
                return True
            if isinstance(answer, Reservation):
                self._remove(waiter)
                self._now = max(self._now, tenant.tag)
                tenant.tag += waiter.cost / self._weights.get(waiter.tenant, 1.0)
                waiter.seat.set_result(answer)
                return True
            waiter.why = str(answer)
            now = asyncio.get_running_loop().time()
            if waiter.refused_since is None:
                waiter.refused_since = now
            if answer.everyone or now - waiter.refused_since >= self._patience_s:
                return False
        return False

    def _forget_idle(self) -> None:
        """Tenants come and go by the thousand. One that does not wait and is not ahead of the others is forgotten;
        when nobody waits nobody is behind, and all start even."""
        anybody = any(tenant.waiters for tenant in self._tenants.values())
        self._tenants = {
            name: tenant
            for name, tenant in self._tenants.items()
            if tenant.waiters or (anybody and tenant.tag > self._now)
        }


def _size(count: float) -> str:
    """Bytes in words: 512 MiB, 1.5 GiB."""
    for unit, size in (("TiB", 1024 * GIB), ("GiB", GIB), ("MiB", MIB)):
        if abs(count) >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} bytes"
