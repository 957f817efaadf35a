"""Decide whether a pod may start now on this host, and in which order waiting pods start.

`Admission` decides by live pressure, not by the sum of limits: a pod uses most while it starts and far less afterwards,
so summed limits would leave most of the machine empty, and a mere pod count would overload it. Memory of newly admitted
pods stays reserved until the measurements include it. `FairQueue` orders waiting requests: weighted fair between
tenants, FIFO within one, rechecked on a timer because falling pressure raises no event. Every refusal gives a reason.
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
RESERVED_MAX_AGE_S = 0.05  # summing a thousand reservations for every decision would cost more than the decision


class NeverFits(PodError):
    """This pod can never start on this host, however long it waits."""


class WaitedTooLong(PodError):
    """The timeout of an admission request passed; the message gives its queue position and what blocked it."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Limits at which admission refuses pods. Stall ceilings are per cent of time (PSI avg10)."""

    memory_headroom: float = 0.10  # fraction of memory kept free for the page cache and this service ...
    max_memory_headroom: int = 4 * GIB  # ... but a big machine needs no more than this
    memory_some: float = 10.0  # reclaim is measurable: running pods already pay for every new one
    memory_full: float = 5.0  # all processes stall at once: thrashing begins here
    io_full: float = 40.0  # unpacking images makes short peaks; a saturated disk stays above
    cpu_some: float = 90.0  # busy cores slow pods down but do not kill them: above this, creations slow, never stop
    hysteresis: float = 0.7  # a stall over its ceiling must fall below this fraction of it before pods start again
    disk_headroom: float = 0.05  # fraction of the disk kept free ...
    max_disk_headroom: int = 2 * GIB  # ... but no more than this
    min_free_inodes: int = 10_000  # about one node_modules
    max_pods: int = 1000
    creations_per_core: float = 2.0  # measured best: fewer leaves cores idle in the kernel's waits, more only queue
    creations_per_core_busy: float = 0.5  # while cpu pressure is over its ceiling
    unseen_image_fraction: float = 0.5  # fraction of its memory limit expected of a pod whose image was never seen
    settle_s: float = 15.0  # from start until the peak is over and visible in the measurements

    def memory_reserve(self, total: int) -> int:
        """Return the bytes of memory that must stay free."""
        return min(int(self.memory_headroom * total), self.max_memory_headroom)

    def disk_reserve(self, total: int) -> int:
        """Return the bytes of disk that must stay free."""
        return min(int(self.disk_headroom * total), self.max_disk_headroom)


@dataclass(frozen=True, slots=True)
class ResourceRequest:
    """A pod to admit: its image and its own limits, in bytes."""

    image: str
    memory: int
    disk: int = 0

    def __post_init__(self) -> None:
        if self.memory <= 0:
            raise InputError(f"a pod of {self.image}: memory is {self.memory}; admission needs a limit in bytes")


@dataclass(frozen=True, slots=True)
class AdmissionDecision:
    """The decision whether a pod may start now, with the reasons if it may not."""

    reasons: tuple[str, ...] = ()
    blocks_all: bool = False  # the reasons would stop any other pod too

    @property
    def admitted(self) -> bool:
        return not self.reasons

    def __str__(self) -> str:
        return "; ".join(self.reasons) or "admitted"


class MemoryEstimator:
    """Estimates the peak memory of a pod at start from earlier pods of its image: rises at once, falls slowly.

    An estimate that is too low kills pods; one that is too high only delays them.
    """

    DECAY = 0.1  # fraction of the difference per pod that used less: one light pod among heavy ones changes little
    MARGIN = 1.2  # the next pod may use somewhat more than any before
    MIN_MEMORY = 16 * MIB  # an idle pod still uses kernel memory

    def __init__(self, unseen_fraction: float) -> None:
        self._unseen_fraction = unseen_fraction
        self._peaks: dict[str, float] = {}

    def estimate(self, image: str, limit: int) -> int:
        """Return the bytes a pod of `image` is expected to use at its peak; never more than its limit."""
        peak = self._peaks.get(image)
        need = self._unseen_fraction * limit if peak is None else max(self.MIN_MEMORY, self.MARGIN * peak)
        return min(limit, math.ceil(need))

    def update(self, image: str, peak: int, final: bool) -> None:
        """Record that a pod used `peak` bytes. Only a `final` value, taken after its start, can lower the estimate."""
        known = self._peaks.get(image)
        if known is not None and peak >= known:
            self._peaks[image] = peak
        elif final:
            self._peaks[image] = peak if known is None else known + self.DECAY * (peak - known)


class Reservation:
    """The resources of one pod on this host, from its admission until `release`."""

    def __init__(self, admission: "Admission", request: ResourceRequest, expected_memory: int) -> None:
        self.request = request
        self.expected_memory = expected_memory
        self._admission = admission
        self._started: float | None = None
        self._peak = 0
        self._estimate_final = False
        self.released = False

    @property
    def creating(self) -> bool:
        return self._started is None and not self.released

    def mark_started(self) -> None:
        """Record that the pod is up: another may be created, and its memory begins to show in the measurements."""
        if self.creating:
            self._started = self._admission.clock()
            self._admission.creation_finished()

    def observe_memory(self, memory: int) -> None:
        """Record that the pod uses this many bytes now (or did at its peak)."""
        self._peak = max(self._peak, memory)
        settled = self._started is not None and self._age() >= self._admission.thresholds.settle_s
        self._update_estimate(final=settled)

    def release(self) -> None:
        """Give the resources back: the pod has ended or was never created. May be called twice."""
        if not self.released:
            if self._started is not None and self._peak:
                self._update_estimate(final=True)
            self._admission.remove(self)
            self.released = True
            self._admission.notify()

    def reserved_memory(self) -> int:
        """Return the bytes reserved for this pod that the measurements cannot show yet.

        During creation this is the whole estimate less the observed peak; after that it falls linearly to 0.
        """
        if self.released:
            return 0
        settle = self._admission.thresholds.settle_s
        rest = 1.0 if self._started is None else max(0.0, 1 - self._age() / settle) if settle else 0.0
        return math.ceil(rest * max(0, self.expected_memory - self._peak))

    def _age(self) -> float:
        return self._admission.clock() - (self._started or 0.0)

    def _update_estimate(self, final: bool) -> None:
        self._admission.estimator.update(self.request.image, self._peak, final and not self._estimate_final)
        self._estimate_final = self._estimate_final or final


class Admission:
    """Decides whether a pod may start now on this host. `measure` returns the live pressure, `clock` seconds."""

    def __init__(
        self,
        measure: Callable[[], Pressure],
        thresholds: Thresholds | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.thresholds = thresholds or Thresholds()
        self.clock = clock
        self.estimator = MemoryEstimator(self.thresholds.unseen_image_fraction)
        self._measure = measure
        self._reservations: set[Reservation] = set()
        self._creating = 0
        self._unsettled: set[Reservation] = set()  # those whose memory may not be measured completely yet
        self._reserved, self._reserved_at = 0, -math.inf
        self._over: set[str] = set()  # stalls that exceeded their ceiling and have not recovered yet
        self._listeners: list[Callable[[], None]] = []

    def __len__(self) -> int:
        """Return the number of pods that hold a reservation."""
        return len(self._reservations)

    def reserved_memory(self) -> int:
        """Return the bytes reserved for all pods that the measurements cannot show yet.

        The sum may lag up to RESERVED_MAX_AGE_S behind when it falls, and is never too low: reservations only shrink,
        so between two full sums it is enough to add new ones and subtract released ones.
        """
        now = self.clock()
        if now - self._reserved_at >= RESERVED_MAX_AGE_S:
            self._unsettled = {each for each in self._unsettled if each.reserved_memory() > 0}
            self._reserved, self._reserved_at = sum(each.reserved_memory() for each in self._unsettled), now
        return self._reserved

    def free_memory(self) -> int:
        """Return the bytes of memory that new pods may still use, as the host reports them to the router."""
        now = self._measure()
        reserve = self.thresholds.memory_reserve(now.memory_total)
        return max(0, now.memory_available - reserve - self.reserved_memory())

    def check_feasible(self, request: ResourceRequest) -> None:
        """Raise NeverFits for a pod that could not start even on an idle host."""
        now, thresholds = self._measure(), self.thresholds
        usable = now.memory_total - thresholds.memory_reserve(now.memory_total)
        need = self.estimator.estimate(request.image, request.memory)
        disk = now.disk_total - thresholds.disk_reserve(now.disk_total)
        if request.memory > now.memory_total:
            cause = f"its memory limit of {_size(request.memory)} is over the {_size(now.memory_total)} of this host"
        elif need > usable:
            cause = f"it is expected to use {_size(need)} of memory; this host has {_size(usable)} for pods"
        elif request.disk > disk:
            cause = f"its disk limit of {_size(request.disk)} is over the {_size(disk)} this host has for pods"
        elif thresholds.max_pods < 1:
            cause = f"max_pods is {thresholds.max_pods}"
        else:
            return
        raise NeverFits(f"a pod of {request.image} can never start here: {cause}; lower its limit or use a larger host")

    def decide(self, request: ResourceRequest) -> AdmissionDecision:
        """Return whether the pod may start now; if not, the reasons that stop every pod, else those of this one."""
        now, thresholds = self._measure(), self.thresholds
        if general := [*self._count_reasons(now), *self._stall_reasons(now), *self._disk_reasons(now)]:
            return AdmissionDecision(tuple(general), blocks_all=True)
        own = []
        need = self.estimator.estimate(request.image, request.memory)
        reserve, reserved = thresholds.memory_reserve(now.memory_total), self.reserved_memory()
        free = now.memory_available - reserve - reserved
        if need > free:
            starting = f" and {_size(reserved)} reserved for starting pods" if reserved else ""
            own.append(
                f"needs {_size(need)} of memory, {_size(max(0, free))} free after {_size(reserve)} headroom{starting}"
            )
        if request.disk > now.disk_free - thresholds.disk_reserve(now.disk_total):
            own.append(f"needs {_size(request.disk)} of disk, {_size(now.disk_free)} free")
        return AdmissionDecision(tuple(own))

    def admit(self, request: ResourceRequest) -> Reservation | AdmissionDecision:
        """Return a reservation, or the decision that refuses it for now. Raise NeverFits if it can never start."""
        self.check_feasible(request)
        decision = self.decide(request)
        if not decision.admitted:
            return decision
        reservation = Reservation(self, request, self.estimator.estimate(request.image, request.memory))
        self._reservations.add(reservation)
        self._unsettled.add(reservation)
        self._creating += 1
        self._reserved += reservation.reserved_memory()
        return reservation

    def adopt(self, request: ResourceRequest) -> Reservation:
        """Return a reservation for a pod that already runs here, found after a restart: counted, never refused."""
        reservation = Reservation(self, request, expected_memory=0)
        self._reservations.add(reservation)
        self._creating += 1
        reservation.mark_started()
        return reservation

    def creation_finished(self) -> None:
        """Called by a reservation whose pod is up."""
        self._creating -= 1
        self.notify()

    def remove(self, reservation: Reservation) -> None:
        """Called by a reservation that is being released."""
        self._reservations.discard(reservation)
        self._unsettled.discard(reservation)
        self._creating -= reservation.creating
        self._reserved = max(0, self._reserved - reservation.reserved_memory())

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever a reservation is released or a creation finishes."""
        self._listeners.append(listener)

    def notify(self) -> None:
        for listener in self._listeners:
            listener()

    def _count_reasons(self, now: Pressure) -> list[str]:
        thresholds, reasons = self.thresholds, []
        if len(self._reservations) >= thresholds.max_pods:
            reasons.append(f"{len(self._reservations)} pods of at most {thresholds.max_pods}")
        slow = self._is_over("cpu pressure", now.cpu_some, thresholds.cpu_some)
        per_core = thresholds.creations_per_core_busy if slow else thresholds.creations_per_core
        at_once = max(1, int(per_core * now.cores))
        if self._creating >= at_once:
            why = f" while cpu pressure is {now.cpu_some:.0f} %" if slow and now.cpu_some is not None else ""
            reasons.append(f"{self._creating} pods are being created, at most {at_once} at once{why}")
        return reasons

    def _stall_reasons(self, now: Pressure) -> list[str]:
        thresholds, reasons = self.thresholds, []
        for name, value, ceiling in (
            ("memory pressure", now.memory_some, thresholds.memory_some),
            ("full memory pressure", now.memory_full, thresholds.memory_full),
            ("full disk pressure", now.io_full, thresholds.io_full),
        ):
            if value is not None and self._is_over(name, value, ceiling):
                if value > ceiling:
                    reasons.append(f"{name} {value:g} % is over {ceiling:g} %")
                else:
                    recovered = thresholds.hysteresis * ceiling
                    reasons.append(f"{name} {value:g} % was over {ceiling:g} % and is not under {recovered:g} %")
        # Without a pod of ours the stall has another cause and may never end. One pod is always tried, within the
        # memory and disk thresholds, so that a shared machine makes progress.
        return reasons if self._reservations else []

    def _is_over(self, name: str, value: float | None, ceiling: float) -> bool:
        if value is None or value < self.thresholds.hysteresis * ceiling:
            self._over.discard(name)
        elif value > ceiling:
            self._over.add(name)
        return name in self._over

    def _disk_reasons(self, now: Pressure) -> list[str]:
        thresholds, reasons = self.thresholds, []
        reserve = thresholds.disk_reserve(now.disk_total)
        if now.disk_free < reserve:
            reasons.append(f"{_size(now.disk_free)} of disk free is under {_size(reserve)}")
        if now.inodes_free is not None and now.inodes_free < thresholds.min_free_inodes:
            reasons.append(f"{now.inodes_free} inodes free is under {thresholds.min_free_inodes}")
        return reasons


@dataclass(frozen=True, slots=True)
class TenantQueueStatus:
    """One tenant's waiting requests: how many, how long the first has waited, and why."""

    tenant: str
    waiters: int
    longest_s: float
    reason: str


class _QueuedRequest:
    def __init__(
        self, tenant: str, request: ResourceRequest, cost: float, now: float, reservation: "asyncio.Future[Reservation]"
    ) -> None:
        self.tenant = tenant
        self.request = request
        self.cost = cost
        self.since = now
        self.reservation = reservation
        self.refused_since: float | None = None  # when it was first at the head of the queue and refused
        self.reason = "others are ahead in the queue"


class _Tenant:
    def __init__(self, tag: float, order: int) -> None:
        self.tag = tag  # virtual start time of its next waiter: sum of cost / weight over all it was served
        self.order = order  # arrival order breaks ties
        self.waiters: OrderedDict[_QueuedRequest, None] = OrderedDict()  # O(1) removal of a cancelled one


class FairQueue:
    """Queue of pods waiting for admission: weighted fair between tenants, FIFO within one.

    Start-time fair queueing: a tenant's tag grows by cost / weight with each admitted request, the lowest tag is next,
    and a tenant that (re)joins starts at the current virtual time, so that neither idling nor flooding gains anything.
    Tags grow on admission only, so a request that is cancelled costs its tenant nothing.

    A request at the head that does not fit yet is bypassed by smaller ones for `max_bypass_s`; then the queue is held
    for it, so that it cannot starve.
    """

    def __init__(
        self,
        admission: Admission,
        weights: Mapping[str, float] | None = None,
        *,
        recheck_s: float = 0.25,  # pressure averages over seconds; a decision costs microseconds
        max_bypass_s: float = 10.0,
    ) -> None:
        self._admission = admission
        self._weights: dict[str, float] = {}
        self._recheck_s = recheck_s
        self._max_bypass_s = max_bypass_s
        self._tenants: dict[str, _Tenant] = {}
        self._virtual_time = 0.0  # tag of the latest admitted request
        self._orders = 0
        self._timer: asyncio.TimerHandle | None = None
        self._dispatching = False
        admission.on_change(self._dispatch)
        for tenant, weight in (weights or {}).items():
            self.set_weight(tenant, weight)

    def set_weight(self, tenant: str, weight: float) -> None:
        """Give `tenant` this share relative to the others, whose weight is 1 unless set."""
        if not (weight > 0 and math.isfinite(weight)):
            raise InputError(f"queue: the weight of {tenant} is {weight!r}; expected a positive number")
        self._weights[tenant] = weight

    def status(self) -> list[TenantQueueStatus]:
        """Return the waiting requests by tenant: how many, how long and why."""
        now, found = asyncio.get_running_loop().time(), []
        for name, tenant in self._tenants.items():
            if tenant.waiters:
                first = next(iter(tenant.waiters))
                found.append(TenantQueueStatus(name, len(tenant.waiters), now - first.since, first.reason))
        return found

    @asynccontextmanager
    async def acquire(
        self, tenant: str, request: ResourceRequest, *, cost: float = 1.0, timeout: float | None = None
    ) -> AsyncIterator[Reservation]:
        """Wait for admission; create the pod inside the block. The reservation lasts until `reservation.release()`.

        Leaving the block marks the creation as finished; leaving it by an exception releases the reservation.
        """
        if not (cost > 0 and math.isfinite(cost)):
            raise InputError(f"queue: the cost of a request is {cost!r}; expected a positive number")
        self._admission.check_feasible(request)
        reservation = await self._wait(tenant, request, cost, timeout)
        try:
            yield reservation
        except BaseException:
            reservation.release()
            raise
        reservation.mark_started()

    async def _wait(self, tenant: str, request: ResourceRequest, cost: float, timeout: float | None) -> Reservation:
        loop = asyncio.get_running_loop()
        waiter = _QueuedRequest(tenant, request, cost, loop.time(), loop.create_future())
        self._enqueue(waiter)
        self._dispatch()
        deadline = None if timeout is None else loop.call_later(timeout, self._expire, waiter)
        try:
            return await waiter.reservation
        except BaseException:
            future = waiter.reservation
            if future.done() and not future.cancelled() and future.exception() is None:
                future.result().release()  # admitted at the moment of cancellation: free it for the next waiter
            self._remove(waiter)
            self._dispatch()
            raise
        finally:
            if deadline is not None:
                deadline.cancel()

    def _enqueue(self, waiter: _QueuedRequest) -> None:
        tenant = self._tenants.get(waiter.tenant)
        if tenant is None:
            tenant = self._tenants[waiter.tenant] = _Tenant(self._virtual_time, self._orders)
            self._orders += 1
        if not tenant.waiters:
            tenant.tag = max(tenant.tag, self._virtual_time)
        tenant.waiters[waiter] = None

    def _remove(self, waiter: _QueuedRequest) -> None:
        tenant = self._tenants.get(waiter.tenant)
        if tenant is not None:
            tenant.waiters.pop(waiter, None)

    def _expire(self, waiter: _QueuedRequest) -> None:
        """Fail a waiter whose timeout passed. One that was admitted in the same instant keeps its reservation."""
        if waiter.reservation.done():
            return
        own = list(self._tenants[waiter.tenant].waiters)
        total = sum(len(tenant.waiters) for tenant in self._tenants.values())
        waited = asyncio.get_running_loop().time() - waiter.since
        waiter.reservation.set_exception(
            WaitedTooLong(
                f"a pod of {waiter.request.image} for tenant {waiter.tenant!r} was not admitted within {waited:.1f} s: "
                f"position {own.index(waiter) + 1} of {len(own)} of its tenant, {total} waiting in all; {own[0].reason}"
            )
        )
        self._remove(waiter)

    def _dispatch(self) -> None:
        """Admit every waiter that can start now; set the recheck timer while any waits."""
        if self._dispatching:  # an admission may notify of a change: the loop below continues anyway
            return
        self._dispatching = True
        try:
            while self._dispatch_one():
                pass
            self._drop_idle_tenants()
        finally:
            self._dispatching = False
        waiting = any(tenant.waiters for tenant in self._tenants.values())
        if not waiting and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        elif waiting and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._recheck_s, self._recheck)

    def _recheck(self) -> None:
        self._timer = None
        self._dispatch()

    def _dispatch_one(self) -> bool:
        """Settle the waiter of the lowest tag, or the next that fits; return False when none may start."""
        due = sorted((tenant for tenant in self._tenants.values() if tenant.waiters), key=lambda t: (t.tag, t.order))
        for tenant in due:
            waiter = next(iter(tenant.waiters))
            if waiter.reservation.done():  # cancelled in this instant, its task has not run yet
                self._remove(waiter)
                return True
            try:
                answer = self._admission.admit(waiter.request)
            except Exception as error:  # measuring failed, or it can no longer fit: fail this waiter, not the queue
                self._remove(waiter)
                waiter.reservation.set_exception(error)
                return True
            if isinstance(answer, Reservation):
                self._remove(waiter)
                self._virtual_time = max(self._virtual_time, tenant.tag)
                tenant.tag += waiter.cost / self._weights.get(waiter.tenant, 1.0)
                waiter.reservation.set_result(answer)
                return True
            waiter.reason = str(answer)
            now = asyncio.get_running_loop().time()
            if waiter.refused_since is None:
                waiter.refused_since = now
            if answer.blocks_all or now - waiter.refused_since >= self._max_bypass_s:
                return False
        return False

    def _drop_idle_tenants(self) -> None:
        """Drop tenants without waiters whose tag is not ahead of the virtual time; all of them when none waits.

        Tenants come and go by the thousand. When the queue is empty, no tenant is behind, so all restart equal.
        """
        any_waiting = any(tenant.waiters for tenant in self._tenants.values())
        self._tenants = {
            name: tenant
            for name, tenant in self._tenants.items()
            if tenant.waiters or (any_waiting and tenant.tag > self._virtual_time)
        }


def _size(count: float) -> str:
    """Format bytes: 512 MiB, 1.5 GiB."""
    for unit, size in (("TiB", 1024 * GIB), ("GiB", GIB), ("MiB", MIB)):
        if abs(count) >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} bytes"
