"""Pods start only when the host can take them; the queue survives cancellation, timeouts and failures."""

import asyncio
import random
import selectors
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.errors import InputError
from etude.pods.pod import PodError
from etude.pods.scheduling.admission import (
    GIB,
    MIB,
    Admission,
    AdmissionQueue,
    MemoryEstimator,
    NeverFits,
    Reservation,
    ResourceRequest,
    Thresholds,
    WaitedTooLong,
)
from etude.pods.scheduling.pressure import Pressure

CALM = Pressure(0, 0, 0, 0, 60 * GIB, 64 * GIB, 500 * GIB, 1000 * GIB, 10**7, load=1, cores=4)
SMALL = ResourceRequest("tiny", 100 * MIB)


class Host:
    """A host whose reading and clock the test sets."""

    def __init__(self, reading: Pressure = CALM, **thresholds: Any) -> None:
        self.reading, self.now = reading, 0.0
        self.broken = False
        self.admission = Admission(self.measure, Thresholds(**thresholds), clock=lambda: self.now)

    def measure(self) -> Pressure:
        if self.broken:
            raise PodError("no meminfo")
        return self.reading

    def set(self, **facts: Any) -> None:
        self.reading = replace(self.reading, **facts)

    def admit(self, request: ResourceRequest = SMALL) -> Reservation:
        answer = self.admission.admit(request)
        assert isinstance(answer, Reservation), answer
        return answer

    def reason(self, request: ResourceRequest = SMALL) -> str:
        return str(self.admission.decide(request))


# -- admission


def test_an_idle_host_admits_a_pod() -> None:
    host = Host()
    assert host.admission.decide(SMALL).admitted
    assert host.reason() == "admitted"


def test_a_burst_on_one_stale_reading_is_not_all_admitted() -> None:
    host = Host(creations_per_core=1e9, max_pods=10**6)
    request = ResourceRequest("heavy", 2 * GIB)  # expected to use 1 GiB; 60 GiB free, 4 GiB headroom
    admitted = sum(isinstance(host.admission.admit(request), Reservation) for _ in range(1000))
    assert admitted == 56
    assert host.reason(request) == (
        "needs 1 GiB of memory, 0 B free after 4 GiB headroom and 56 GiB reserved for starting pods"
    )


def test_reserved_memory_falls_as_the_pod_shows_in_the_measurements() -> None:
    host = Host()
    reservation = host.admit(ResourceRequest("heavy", 2 * GIB))
    host.now = 100
    assert reservation.reserved_memory() == GIB, "during creation: all of it"
    reservation.mark_started()
    host.now += 7.5
    assert reservation.reserved_memory() == GIB // 2
    reservation.observe_memory(512 * MIB)
    assert reservation.reserved_memory() == GIB // 4, "the observed peak is in the measurements"
    host.now += 7.5
    assert reservation.reserved_memory() == 0
    assert host.admission.reserved_memory() == 0


def test_memory_estimates_rise_at_once_and_fall_slowly() -> None:
    estimator = MemoryEstimator(unseen_fraction=0.5)
    assert estimator.estimate("a", 4 * GIB) == 2 * GIB, "never seen: half its limit"
    estimator.update("a", 100 * MIB, final=True)
    assert estimator.estimate("a", 4 * GIB) == 120 * MIB
    estimator.update("a", 1000 * MIB, final=False)
    assert estimator.estimate("a", 4 * GIB) == 1200 * MIB
    estimator.update("a", 500 * MIB, final=False)
    assert estimator.estimate("a", 4 * GIB) == 1200 * MIB, "its start is not over: a lower value does not count yet"
    estimator.update("a", 500 * MIB, final=True)
    assert estimator.estimate("a", 4 * GIB) == 1140 * MIB
    assert estimator.estimate("a", 800 * MIB) == 800 * MIB, "never over its limit"


def test_a_seat_teaches_once_however_often_it_is_observed() -> None:
    host = Host()
    host.admission.estimator.update("tiny", 1000 * MIB, final=True)
    reservation = host.admit(ResourceRequest("tiny", 4 * GIB))
    reservation.mark_started()
    host.now = 20
    for _ in range(50):
        reservation.observe_memory(100 * MIB)
    reservation.release()
    assert host.admission.estimator.estimate("tiny", 4 * GIB) == int(1.2 * 910 * MIB)


def test_stalls_stop_admission_until_they_are_well_below_the_ceiling() -> None:
    host = Host()
    host.admit().mark_started()
    host.set(memory_some=23.0)
    assert host.reason() == "memory pressure 23 % is over 10 %"
    host.set(memory_some=8.0)
    assert host.reason() == "memory pressure 8 % was over 10 % and is not under 7 %"
    host.set(memory_some=6.9)
    assert host.admission.decide(SMALL).admitted
    host.set(memory_some=8.0)
    assert host.admission.decide(SMALL).admitted, "rising to the ceiling does not stop admission"
    host.set(memory_full=6.0, io_full=50.0)
    assert host.reason() == "full memory pressure 6 % is over 5 %; full disk pressure 50 % is over 40 %"


def test_missing_psi_values_never_stop_admission() -> None:
    host = Host(replace(CALM, cpu_some=None, memory_some=None, memory_full=None, io_full=None))
    host.admit()
    assert host.admission.decide(SMALL).admitted


def test_pressure_of_other_processes_does_not_stop_the_first_pod() -> None:
    host = Host(replace(CALM, memory_some=90.0, io_full=90.0))
    host.admit()
    assert "memory pressure 90 %" in host.reason()


def test_busy_cores_slow_creations_but_never_stop_them() -> None:
    host = Host(replace(CALM, cpu_some=97.0))
    reservations = [host.admit(), host.admit()]
    assert host.reason() == "2 pods are being created, at most 2 at once while cpu pressure is 97 %"
    reservations[0].mark_started()
    host.admit()


def test_creations_at_once_are_limited_by_the_cores() -> None:
    host = Host()
    for _ in range(8):
        host.admit()
    assert host.reason() == "8 pods are being created, at most 8 at once"


def test_thresholds_of_disk_inodes_and_pods() -> None:
    host = Host(max_pods=1)
    host.set(disk_free=GIB, inodes_free=5)
    assert host.reason() == "1 GiB of disk free is under 2 GiB; 5 inodes free is under 10000"
    host.set(disk_free=10 * GIB, inodes_free=None)
    assert host.reason(ResourceRequest("big", GIB, disk=9 * GIB)) == "needs 9 GiB of disk, 10 GiB free"
    host.admit()
    assert host.reason() == "1 pods of at most 1"


@pytest.mark.parametrize(
    ("pod", "reason"),
    [
        (ResourceRequest("x", 65 * GIB), "its memory limit of 65 GiB is over the 64 GiB of this host"),
        (
            ResourceRequest("x", GIB, disk=2000 * GIB),
            "its disk limit of 1.95 TiB is over the 998 GiB this host has for pods",
        ),
    ],
)
def test_a_pod_that_can_never_fit_is_refused_at_once(pod: ResourceRequest, reason: str) -> None:
    with pytest.raises(NeverFits) as caught:
        Host().admission.admit(pod)
    assert reason in str(caught.value)


def test_a_pod_whose_estimate_exceeds_the_host_never_fits() -> None:
    host = Host()
    host.admission.estimator.update("monster", 62 * GIB, final=True)
    with pytest.raises(NeverFits, match="expected to use 64 GiB of memory; this host has 60 GiB for pods"):
        host.admission.admit(ResourceRequest("monster", 64 * GIB))


def test_a_pod_without_a_memory_limit_is_an_input_error() -> None:
    with pytest.raises(InputError, match="admission needs a limit"):
        ResourceRequest("x", 0)


def test_an_adopted_pod_is_counted_and_reserves_no_memory() -> None:
    host = Host(max_pods=1)
    reservation = host.admission.adopt(SMALL)
    assert (len(host.admission), host.admission.reserved_memory()) == (1, 0)
    reservation.release()
    reservation.release()
    assert len(host.admission) == 0
    host.admit()


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_reservations_never_exceed_the_headroom(seed: int) -> None:
    """After any sequence of events, the reserved memory fits when a pod is admitted."""
    rng = random.Random(seed)
    host = Host(creations_per_core=100, settle_s=rng.choice([0.0, 1.0, 15.0]))
    reservations: list[Reservation] = []
    for _ in range(120):
        match rng.randrange(7):
            case 0:
                host.now += rng.choice([0.01, 0.1, 5.0])
            case 1:
                host.set(memory_available=rng.randrange(64 * GIB))
            case 2 if reservations:
                rng.choice(reservations).mark_started()
            case 3 if reservations:
                rng.choice(reservations).observe_memory(rng.randrange(8 * GIB))
            case 4 if reservations:
                reservations.pop(rng.randrange(len(reservations))).release()
            case _:
                answer = host.admission.admit(ResourceRequest(rng.choice("abc"), rng.randrange(MIB, 16 * GIB)))
                if isinstance(answer, Reservation):
                    reservations.append(answer)
                    free = host.reading.memory_available - 4 * GIB
                    assert sum(reservation.reserved_memory() for reservation in reservations) <= free, f"seed {seed}"
        assert host.admission.reserved_memory() >= sum(reservation.reserved_memory() for reservation in reservations), (
            f"seed {seed}"
        )
    for reservation in reservations:
        reservation.release()
    host.now += 1  # the sum may lag a moment, and is never too low
    assert (len(host.admission), host.admission.reserved_memory()) == (0, 0), f"seed {seed}"


# -- the queue, on an event loop whose time jumps to the next timer


class _Jump(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("all tasks wait and no timer is set")
        self.now += 0.0 if ready else timeout or 0.0
        return ready


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.jump = _Jump()
        super().__init__(self.jump)

    def time(self) -> float:
        return self.jump.now


def play(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=_Loop) as runner:
        runner.run(story())


def time_now() -> float:
    return asyncio.get_running_loop().time()


def one_at_a_time(**options: Any) -> tuple[Host, AdmissionQueue]:
    host = Host(replace(CALM, cores=0.5), settle_s=0.0)
    return host, AdmissionQueue(host.admission, **options)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_background_requests_come_after_all_others() -> None:
    _, queue = one_at_a_time()
    order: list[str] = []

    async def create(name: str, background: bool) -> None:
        async with queue.acquire(SMALL, background=background):
            order.append(name)
            await asyncio.sleep(1)

    async def story() -> None:
        tasks = [asyncio.create_task(create("refill", True)) for _ in range(3)]
        await settle()
        tasks += [asyncio.create_task(create("request", False)) for _ in range(3)]
        await asyncio.gather(*tasks)

    play(story)
    assert order == ["refill", "request", "request", "request", "refill", "refill"]


def test_the_queue_is_fifo() -> None:
    _, queue = one_at_a_time()
    order: list[int] = []

    async def create(number: int) -> None:
        async with queue.acquire(SMALL):
            order.append(number)
            await asyncio.sleep(0.1)

    async def story() -> None:
        await asyncio.gather(*(create(n) for n in range(20)))

    play(story)
    assert order == list(range(20))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_no_wake_up_is_lost_when_waiters_are_cancelled_time_out_or_fail(seed: int) -> None:
    """The recheck timer is set a year ahead: a lost wake-up would show as a year."""
    rng = random.Random(seed)
    host, queue = one_at_a_time(recheck_s=3e7)
    host.set(cores=rng.choice([0.5, 1.5]))
    outcomes: Counter[str] = Counter()

    async def create() -> None:
        await asyncio.sleep(rng.random() * 10)
        try:
            async with queue.acquire(SMALL, timeout=rng.choice([None, 0, 2.0, 20.0])) as reservation:
                if rng.random() < 0.2:
                    raise ValueError("the creation failed")
                await asyncio.sleep(rng.random())
            await asyncio.sleep(rng.random())
            reservation.release()
            outcomes["done"] += 1
        except (WaitedTooLong, ValueError, asyncio.CancelledError) as error:
            outcomes[type(error).__name__] += 1
            if "reservation" in locals():
                locals()["reservation"].release()

    async def story() -> None:
        tasks = [asyncio.create_task(create()) for _ in range(40)]

        async def cancel() -> None:
            while not all(task.done() for task in tasks):
                await asyncio.sleep(rng.random() * 0.5)
                if rng.random() < 0.5:
                    rng.choice(tasks).cancel()
                    if rng.random() < 0.5:
                        await asyncio.sleep(0)

        await asyncio.gather(*tasks, cancel(), return_exceptions=True)
        assert time_now() < 1e6, f"seed {seed}: a waiter needed the timer"
        assert len(queue) == 0, f"seed {seed}"

    play(story)
    assert len(host.admission) == 0, f"seed {seed}: {outcomes}"


def test_a_seat_given_in_the_moment_of_cancellation_passes_on() -> None:
    host, queue = one_at_a_time(recheck_s=3e7)

    async def story() -> None:
        async def create() -> None:
            async with queue.acquire(SMALL):
                pass

        async with queue.acquire(SMALL) as first:
            doomed, after = asyncio.create_task(create()), asyncio.create_task(create())
            await settle()
            first.mark_started()  # admits `doomed`, whose task has not run yet
            doomed.cancel()
            await asyncio.gather(doomed, return_exceptions=True)
            assert doomed.cancelled()
            await after
        assert len(host.admission) == 2

    play(story)


def test_a_timeout_reports_queue_position_and_reason() -> None:
    _, queue = one_at_a_time()

    async def story() -> None:
        async def create(timeout: float) -> None:
            async with queue.acquire(SMALL, timeout=timeout):
                await asyncio.sleep(60)

        tasks = [asyncio.create_task(create(timeout)) for timeout in (1, 50, 30, 50)]
        await asyncio.sleep(1)
        with pytest.raises(WaitedTooLong) as caught:
            await tasks[2]
        assert str(caught.value) == (
            "a pod of tiny was not admitted within 30.0 s: position 2 of 3 waiting; "
            "1 pods are being created, at most 1 at once"
        )
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    play(story)


def test_falling_pressure_is_noticed_by_the_recheck_timer() -> None:
    host, queue = one_at_a_time()

    async def story() -> None:
        host.admit().mark_started()
        host.set(memory_some=50.0)
        asyncio.get_running_loop().call_later(7, lambda: host.set(memory_some=0.0))
        async with queue.acquire(SMALL):
            assert 7 <= time_now() <= 7.5

    play(story)


def test_a_big_pod_is_bypassed_for_a_while_and_then_holds_the_queue() -> None:
    host, queue = one_at_a_time(max_bypass_s=10)
    host.set(memory_available=6 * GIB)  # 2 GiB over the headroom
    passed: list[float] = []

    async def small() -> None:
        async with queue.acquire(SMALL) as reservation:
            passed.append(time_now())
            await asyncio.sleep(1)
        reservation.release()

    async def big() -> None:
        async with queue.acquire(ResourceRequest("big", 8 * GIB)) as reservation:
            assert 20 <= time_now() <= 21.5
        reservation.release()

    async def story() -> None:
        async with queue.acquire(SMALL):
            tasks = [asyncio.create_task(big()), *(asyncio.create_task(small()) for _ in range(40))]
            await settle()
        asyncio.get_running_loop().call_later(20, lambda: host.set(memory_available=60 * GIB))
        await tasks[0]
        assert not [at for at in passed if 12 < at < 20], "held for the big one"
        assert [at for at in passed if at < 10], "but not at once"
        await asyncio.gather(*tasks)

    play(story)


def test_a_failed_reading_fails_the_waiter_and_not_the_queue() -> None:
    host, queue = one_at_a_time()

    async def story() -> None:
        async def create() -> None:
            async with queue.acquire(SMALL):
                pass

        async with queue.acquire(SMALL):
            task = asyncio.create_task(create())
            await settle()
            host.broken = True
        with pytest.raises(PodError, match="no meminfo"):
            await task
        host.broken = False
        await create()

    play(story)


def test_a_pod_that_can_never_fit_does_not_queue() -> None:
    _, queue = one_at_a_time()

    async def story() -> None:
        with pytest.raises(NeverFits):
            async with queue.acquire(ResourceRequest("x", 65 * GIB)):
                pass

    play(story)
