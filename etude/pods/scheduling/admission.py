"""Decide whether a pod may start now on this host, and in which order waiting pods start.

`Admission` decides by live pressure, not by the sum of limits: a pod uses most while it starts and far less afterwards,
so summed limits would leave most of the machine empty, and a mere pod count would overload it. Memory of newly admitted
pods stays reserved until the measurements include it. `AdmissionQueue` holds the requests that wait, rechecked on a
timer because falling pressure raises no event. Every refusal gives a reason.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from etude.errors import InputError
from etude.pods.pod import PodError
from etude.pods.scheduling.pressure import Pressure
from etude.system.units import format_bytes

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
            limit, total = format_bytes(request.memory), format_bytes(now.memory_total)
            cause = f"its memory limit of {limit} is over the {total} of this host"
        elif need > usable:
            expected, free = format_bytes(need), format_bytes(usable)
            cause = f"it is expected to use {expected} of memory; this host has {free} for pods"
        elif request.disk > disk:
            limit, free = format_bytes(request.disk), format_bytes(disk)
            cause = f"its disk limit of {limit} is over the {free} this host has for pods"
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
            starting = f" and {format_bytes(reserved)} reserved for starting pods" if reserved else ""
            left = f"{format_bytes(max(0, free))} free after {format_bytes(reserve)} headroom"
            own.append(f"needs {format_bytes(need)} of memory, {left}{starting}")
        if request.disk > now.disk_free - thresholds.disk_reserve(now.disk_total):
            own.append(f"needs {format_bytes(request.disk)} of disk, {format_bytes(now.disk_free)} free")
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
            reasons.append(f"{format_bytes(now.disk_free)} of disk free is under {format_bytes(reserve)}")
        if now.inodes_free is not None and now.inodes_free < thresholds.min_free_inodes:
            reasons.append(f"{now.inodes_free} inodes free is under {thresholds.min_free_inodes}")
        return reasons


@dataclass(eq=False)
class _QueuedRequest:
    request: ResourceRequest
    background: bool
    since: float
    future: "asyncio.Future[Reservation]"
    refused_since: float | None = None
    reason: str = "others are ahead in the queue"


class AdmissionQueue:
    """Pods waiting for admission, first come, first served; background requests (warm pools) come after all others.

    A request that does not fit yet is bypassed by those behind it that do for `max_bypass_s`; then the queue is held
    for it, so that it cannot starve.
    """

    def __init__(
        self,
        admission: Admission,
        *,
        recheck_s: float = 0.25,  # pressure averages over seconds; a decision costs microseconds
        max_bypass_s: float = 10.0,
    ) -> None:
        self._admission, self._recheck_s, self._max_bypass_s = admission, recheck_s, max_bypass_s
        self._waiting: dict[_QueuedRequest, None] = {}  # ordered, with a fast removal
        self._timer: asyncio.TimerHandle | None = None
        admission.on_change(self._dispatch)

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self._waiting)

    @asynccontextmanager
    async def acquire(
        self, request: ResourceRequest, *, timeout: float | None = None, background: bool = False
    ) -> AsyncIterator[Reservation]:
        """Wait for admission; create the pod inside the block. The reservation lasts until `reservation.release()`.

        Leaving the block marks the creation as finished; leaving it by an exception releases the reservation.
        """
        self._admission.check_feasible(request)
        reservation = await self._wait(request, timeout, background)
        try:
            yield reservation
        except BaseException:
            reservation.release()
            raise
        reservation.mark_started()

    async def _wait(self, request: ResourceRequest, timeout: float | None, background: bool) -> Reservation:
        loop = asyncio.get_running_loop()
        waiter = _QueuedRequest(request, background, loop.time(), loop.create_future())
        self._waiting[waiter] = None
        self._dispatch()
        try:
            async with asyncio.timeout(timeout):
                return await waiter.future
        except BaseException as error:
            if waiter.future.done() and not waiter.future.cancelled() and waiter.future.exception() is None:
                waiter.future.result().release()  # admitted at the moment of cancellation: free it for the next waiter
            message = self._refusal(waiter)
            self._waiting.pop(waiter, None)
            self._dispatch()
            if isinstance(error, TimeoutError):
                raise WaitedTooLong(message) from None
            raise

    def _refusal(self, waiter: _QueuedRequest) -> str:
        queue = self._in_order()
        position = queue.index(waiter) + 1 if waiter in self._waiting else 1
        waited = asyncio.get_running_loop().time() - waiter.since
        return (
            f"a pod of {waiter.request.image} was not admitted within {waited:.1f} s: position {position} of "
            f"{len(queue)} waiting; {queue[0].reason if queue else waiter.reason}"
        )

    def _in_order(self) -> list[_QueuedRequest]:
        return sorted(self._waiting, key=lambda waiter: waiter.background)

    def _dispatch(self) -> None:
        """Admit every waiter that can start now; set the recheck timer while any waits."""
        if not self._waiting:
            return
        loop, refused = asyncio.get_running_loop(), set[ResourceRequest]()
        for waiter in self._in_order():
            if waiter.future.done() or waiter.request in refused:  # done: cancelled, its task has not run yet
                continue
            try:
                answer = self._admission.admit(waiter.request)
            except Exception as error:  # measuring failed, or it can no longer fit: fail this waiter, not the queue
                del self._waiting[waiter]
                waiter.future.set_exception(error)
                continue
            if isinstance(answer, Reservation):
                del self._waiting[waiter]
                waiter.future.set_result(answer)
                continue
            waiter.reason = str(answer)
            waiter.refused_since = loop.time() if waiter.refused_since is None else waiter.refused_since
            if answer.blocks_all or loop.time() - waiter.refused_since >= self._max_bypass_s:
                break
            refused.add(waiter.request)
        if self._waiting and self._timer is None:
            self._timer = loop.call_later(self._recheck_s, self._recheck)

    def _recheck(self) -> None:
        self._timer = None
        self._dispatch()
