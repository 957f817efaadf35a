"""Pods start when this host can bear them, and turns are fair whatever comes, waits, fails or goes away."""

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
    FairQueue,
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

    def seat(self, ask: ResourceRequest = SMALL) -> Reservation:
        answer = self.admission.admit(ask)
        assert isinstance(answer, Reservation), answer
        return answer

    def why(self, ask: ResourceRequest = SMALL) -> str:
        return str(self.admission.verdict(ask))


# -- admission


def test_an_idle_host_lets_a_pod_start() -> None:
    host = Host()
    assert host.admission.verdict(SMALL).admitted
    assert host.why() == "may start"


def test_a_burst_on_one_stale_reading_is_not_all_admitted() -> None:
    host = Host(creations_per_core=1e9, max_pods=10**6)
    ask = ResourceRequest("heavy", 2 * GIB)  # expected to take 1 GiB; 60 GiB free, 4 GiB kept back
    admitted = sum(isinstance(host.admission.admit(ask), Reservation) for _ in range(1000))
    assert admitted == 56
    assert host.why(ask) == (
        "1 GiB of memory needed, 0 bytes free over the 4 GiB kept back, 56 GiB promised to pods that are starting"
    )


def test_a_promise_fades_as_the_pod_shows_in_the_measurements() -> None:
    host = Host()
    seat = host.seat(ResourceRequest("heavy", 2 * GIB))
    host.now = 100
    assert seat.held() == GIB, "still being made: all of it"
    seat.started()
    host.now += 7.5
    assert seat.held() == GIB // 2
    seat.observed(512 * MIB)
    assert seat.held() == GIB // 4, "what it is known to have taken is in the measurements"
    host.now += 7.5
    assert seat.held() == 0
    assert host.admission.held() == 0


def test_what_an_image_takes_is_learned_up_at_once_and_down_slowly() -> None:
    needs = MemoryEstimator(unknown=0.5)
    assert needs.expect("a", 4 * GIB) == 2 * GIB, "never seen: half its limit"
    needs.learn("a", 100 * MIB, final=True)
    assert needs.expect("a", 4 * GIB) == 120 * MIB
    needs.learn("a", 1000 * MIB, final=False)
    assert needs.expect("a", 4 * GIB) == 1200 * MIB
    needs.learn("a", 500 * MIB, final=False)
    assert needs.expect("a", 4 * GIB) == 1200 * MIB, "its start is not over: less means nothing yet"
    needs.learn("a", 500 * MIB, final=True)
    assert needs.expect("a", 4 * GIB) == 1140 * MIB
    assert needs.expect("a", 800 * MIB) == 800 * MIB, "never over its limit"


def test_a_seat_teaches_once_however_often_it_is_observed() -> None:
    host = Host()
    host.admission.needs.learn("tiny", 1000 * MIB, final=True)
    seat = host.seat(ResourceRequest("tiny", 4 * GIB))
    seat.started()
    host.now = 20
    for _ in range(50):
        seat.observed(100 * MIB)
    seat.leave()
    assert host.admission.needs.expect("tiny", 4 * GIB) == int(1.2 * 910 * MIB)


def test_stalls_close_the_gate_until_they_are_well_below_the_ceiling() -> None:
    host = Host()
    host.seat().started()
    host.set(memory_some=23.0)
    assert host.why() == "memory pressure 23 % is over 10 %"
    host.set(memory_some=8.0)
    assert host.why() == "memory pressure 8 % was over 10 % and is not under 7 %"
    host.set(memory_some=6.9)
    assert host.admission.verdict(SMALL).admitted
    host.set(memory_some=8.0)
    assert host.admission.verdict(SMALL).admitted, "rising to the ceiling does not close it"
    host.set(memory_full=6.0, io_full=50.0)
    assert host.why() == "full memory pressure 6 % is over 5 %; full disk pressure 50 % is over 40 %"


def test_a_kernel_that_does_not_measure_stalls_never_closes_the_gate() -> None:
    host = Host(replace(CALM, cpu_some=None, memory_some=None, memory_full=None, io_full=None))
    host.seat()
    assert host.admission.verdict(SMALL).admitted


def test_pressure_made_by_others_does_not_keep_the_first_pod_out() -> None:
    host = Host(replace(CALM, memory_some=90.0, io_full=90.0))
    host.seat()
    assert "memory pressure 90 %" in host.why()


def test_busy_cores_slow_creations_but_never_stop_them() -> None:
    host = Host(replace(CALM, cpu_some=97.0))
    seats = [host.seat(), host.seat()]
    assert host.why() == "2 pods are being created, at most 2 at once while cpu pressure is 97 %"
    seats[0].started()
    host.seat()


def test_creations_at_once_are_limited_by_the_cores() -> None:
    host = Host()
    for _ in range(8):
        host.seat()
    assert host.why() == "8 pods are being created, at most 8 at once"


def test_lines_of_disk_inodes_and_pods() -> None:
    host = Host(max_pods=1)
    host.set(disk_free=GIB, inodes_free=5)
    assert host.why() == "1 GiB of disk free is under 2 GiB; 5 inodes free is under 10000"
    host.set(disk_free=10 * GIB, inodes_free=None)
    assert host.why(ResourceRequest("big", GIB, disk=9 * GIB)) == "9 GiB of disk needed, 10 GiB free"
    host.seat()
    assert host.why() == "1 pods of at most 1"


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (ResourceRequest("x", 65 * GIB), "its memory limit of 65 GiB is over the 64 GiB this host has"),
        (
            ResourceRequest("x", GIB, disk=2000 * GIB),
            "its disk limit of 1.95 TiB is over the 998 GiB this host gives to pods",
        ),
    ],
)
def test_what_can_never_fit_is_refused_at_once(ask: ResourceRequest, words: str) -> None:
    with pytest.raises(NeverFits) as caught:
        Host().admission.admit(ask)
    assert words in str(caught.value)


def test_a_need_learned_to_be_over_what_the_host_gives_never_fits() -> None:
    host = Host()
    host.admission.needs.learn("monster", 62 * GIB, final=True)
    with pytest.raises(NeverFits, match="expected to take 64 GiB of memory; this host gives 60 GiB to pods"):
        host.admission.admit(ResourceRequest("monster", 64 * GIB))


def test_a_pod_without_a_memory_limit_is_an_input_error() -> None:
    with pytest.raises(InputError, match="admission needs a limit"):
        ResourceRequest("x", 0)


def test_a_pod_found_after_a_restart_is_counted_and_holds_nothing() -> None:
    host = Host(max_pods=1)
    seat = host.admission.adopt(SMALL)
    assert (len(host.admission), host.admission.held()) == (1, 0)
    seat.leave()
    seat.leave()
    assert len(host.admission) == 0
    host.seat()


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_promises_never_pass_the_headroom(seed: int) -> None:
    """Whatever starts, is measured, ends or takes time: when a pod is admitted, all that is promised fits."""
    rng = random.Random(seed)
    host = Host(creations_per_core=100, settle_s=rng.choice([0.0, 1.0, 15.0]))
    seats: list[Reservation] = []
    for _ in range(120):
        match rng.randrange(7):
            case 0:
                host.now += rng.choice([0.01, 0.1, 5.0])
            case 1:
                host.set(memory_available=rng.randrange(64 * GIB))
            case 2 if seats:
                rng.choice(seats).started()
            case 3 if seats:
                rng.choice(seats).observed(rng.randrange(8 * GIB))
            case 4 if seats:
                seats.pop(rng.randrange(len(seats))).leave()
            case _:
                answer = host.admission.admit(ResourceRequest(rng.choice("abc"), rng.randrange(MIB, 16 * GIB)))
                if isinstance(answer, Reservation):
                    seats.append(answer)
                    free = host.reading.memory_available - 4 * GIB
                    assert sum(seat.held() for seat in seats) <= free, f"seed {seed}"
        assert host.admission.held() >= sum(seat.held() for seat in seats), f"seed {seed}"
    for seat in seats:
        seat.leave()
    host.now += 1  # promises may be added up a moment late, never low
    assert (len(host.admission), host.admission.held()) == (0, 0), f"seed {seed}"


# -- the queue, on a loop whose time jumps to the next timer


class _Jump(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("everybody waits and nothing will ever wake them")
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


def one_at_a_time(**options: Any) -> tuple[Host, FairQueue]:
    host = Host(replace(CALM, cores=0.5), settle_s=0.0)
    return host, FairQueue(host.admission, **options)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@settings(max_examples=60, deadline=None)
@given(
    weights=st.lists(st.floats(0.1, 10), min_size=2, max_size=5),
    costs=st.lists(st.floats(0.1, 5), min_size=2, max_size=5),
    seed=st.integers(0, 2**32 - 1),
)
def test_backlogged_tenants_share_by_weight_within_one_cost(
    weights: list[float], costs: list[float], seed: int
) -> None:
    """Some waiters go away while they wait; the shares of those who stay backlogged hold at every moment."""
    rng = random.Random(seed)
    shares = {f"run-{i}": weight for i, weight in enumerate(weights)}
    _, queue = one_at_a_time(weights=shares)
    served = dict.fromkeys(shares, 0.0)
    order: list[dict[str, float]] = []
    backlogged: list[bool] = []

    async def ask(tenant: str, cost: float) -> None:
        async with queue.turn(tenant, SMALL, cost=cost) as seat:
            served[tenant] += cost
            backlogged.append(len(queue.waiting()) == len(shares))
            if all(backlogged):
                order.append(dict(served))
            await asyncio.sleep(1)
        seat.leave()

    async def story() -> None:
        async with queue.turn("first", SMALL):
            stay = [(name, rng.choice(costs)) for name in shares for _ in range(40)]
            rng.shuffle(stay)
            tasks = [asyncio.create_task(ask(*each)) for each in stay]
            await settle()
        for _ in range(60):
            await asyncio.sleep(1)
            rng.choice(tasks).cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    play(story)
    most = max(costs)
    for moment in order:
        level = {name: moment[name] / shares[name] for name in shares}
        for a in shares:
            for b in shares:
                bound = most / shares[a] + most / shares[b] + 1e-9
                assert abs(level[a] - level[b]) <= bound, f"seed {seed}: {a} {level[a]}, {b} {level[b]}"


def test_a_tenant_that_floods_delays_another_by_one_turn_only() -> None:
    _, queue = one_at_a_time()
    order: list[str] = []

    async def ask(tenant: str) -> None:
        async with queue.turn(tenant, SMALL):
            order.append(tenant)
            await asyncio.sleep(1)

    async def story() -> None:
        tasks = [asyncio.create_task(ask("flood")) for _ in range(100)]
        await asyncio.sleep(10.5)
        start = len(order)
        tasks += [asyncio.create_task(ask("late")) for _ in range(3)]
        await asyncio.gather(*tasks)
        assert Counter(order[start : start + 6])["late"] == 3

    play(story)


def test_within_a_tenant_the_first_comes_first() -> None:
    _, queue = one_at_a_time()
    order: list[int] = []

    async def ask(number: int) -> None:
        async with queue.turn("run", SMALL):
            order.append(number)
            await asyncio.sleep(0.1)

    async def story() -> None:
        await asyncio.gather(*(ask(n) for n in range(20)))

    play(story)
    assert order == list(range(20))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_no_wake_up_is_lost_when_waiters_are_cancelled_time_out_or_fail(seed: int) -> None:
    """The timer that re-asks is set a year ahead: a lost wake-up would show as a year."""
    rng = random.Random(seed)
    host, queue = one_at_a_time(recheck_s=3e7)
    host.set(cores=rng.choice([0.5, 1.5]))
    outcomes: Counter[str] = Counter()

    async def ask(tenant: str) -> None:
        await asyncio.sleep(rng.random() * 10)
        try:
            async with queue.turn(tenant, SMALL, timeout=rng.choice([None, 0, 2.0, 20.0])) as seat:
                if rng.random() < 0.2:
                    raise ValueError("the creation failed")
                await asyncio.sleep(rng.random())
            await asyncio.sleep(rng.random())
            seat.leave()
            outcomes["done"] += 1
        except (WaitedTooLong, ValueError, asyncio.CancelledError) as error:
            outcomes[type(error).__name__] += 1
            if "seat" in locals():
                locals()["seat"].leave()

    async def story() -> None:
        tasks = [asyncio.create_task(ask(f"run-{rng.randrange(3)}")) for _ in range(40)]

        async def cancel() -> None:
            while not all(task.done() for task in tasks):
                await asyncio.sleep(rng.random() * 0.5)
                if rng.random() < 0.5:
                    rng.choice(tasks).cancel()
                    if rng.random() < 0.5:
                        await asyncio.sleep(0)

        await asyncio.gather(*tasks, cancel(), return_exceptions=True)
        assert time_now() < 1e6, f"seed {seed}: somebody waited for the timer"
        assert queue.waiting() == [], f"seed {seed}"

    play(story)
    assert len(host.admission) == 0, f"seed {seed}: {outcomes}"


def test_a_seat_given_in_the_moment_of_cancellation_passes_on() -> None:
    host, queue = one_at_a_time(recheck_s=3e7)

    async def story() -> None:
        async def ask() -> None:
            async with queue.turn("run", SMALL):
                pass

        async with queue.turn("run", SMALL) as held:
            doomed, after = asyncio.create_task(ask()), asyncio.create_task(ask())
            await settle()
            held.started()  # gives the doomed one its seat; its task has not run yet
            doomed.cancel()
            await asyncio.gather(doomed, return_exceptions=True)
            assert doomed.cancelled()
            await after
        assert len(host.admission) == 2

    play(story)


def test_a_timeout_says_where_it_stood_and_why() -> None:
    _, queue = one_at_a_time()

    async def story() -> None:
        async def ask(tenant: str, timeout: float) -> None:
            async with queue.turn(tenant, SMALL, timeout=timeout):
                await asyncio.sleep(60)

        tasks = [asyncio.create_task(ask(*each)) for each in [("a", 1), ("a", 50), ("a", 30), ("b", 50)]]
        await asyncio.sleep(1)
        assert [(w.tenant, w.waiters, w.why) for w in queue.waiting()] == [
            ("a", 2, "1 pods are being created, at most 1 at once"),
            ("b", 1, "its turn has not come"),
        ]
        with pytest.raises(WaitedTooLong) as caught:
            await tasks[2]
        assert str(caught.value) == (
            "a pod of tiny for a waited 30.0 s for its turn: number 2 of 2 of its tenant, 3 waiting in all; "
            "1 pods are being created, at most 1 at once"
        )
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    play(story)


def test_pressure_that_falls_unannounced_is_noticed() -> None:
    host, queue = one_at_a_time()

    async def story() -> None:
        host.seat().started()
        host.set(memory_some=50.0)
        asyncio.get_running_loop().call_later(7, lambda: host.set(memory_some=0.0))
        async with queue.turn("run", SMALL):
            assert 7 <= time_now() <= 7.5

    play(story)


def test_a_big_pod_lets_small_ones_pass_for_a_while_and_then_is_waited_for() -> None:
    host, queue = one_at_a_time(patience_s=10)
    host.set(memory_available=6 * GIB)  # 2 GiB over what is kept back
    passed: list[float] = []

    async def small() -> None:
        async with queue.turn("small", SMALL) as seat:
            passed.append(time_now())
            await asyncio.sleep(1)
        seat.leave()

    async def story() -> None:
        async with queue.turn("first", SMALL):
            tasks = [asyncio.create_task(small()) for _ in range(40)]
            await settle()
        asyncio.get_running_loop().call_later(20, lambda: host.set(memory_available=60 * GIB))
        async with queue.turn("big", ResourceRequest("big", 8 * GIB)) as seat:
            assert 20 <= time_now() <= 21.5
        seat.leave()
        assert not [at for at in passed if 12 < at < 20], "held for the big one"
        assert [at for at in passed if at < 10], "but not at once"
        await asyncio.gather(*tasks)

    play(story)


def test_a_reading_that_fails_fails_the_waiter_and_not_the_queue() -> None:
    host, queue = one_at_a_time()

    async def story() -> None:
        async def ask() -> None:
            async with queue.turn("run", SMALL):
                pass

        async with queue.turn("run", SMALL):
            task = asyncio.create_task(ask())
            await settle()
            host.broken = True
        with pytest.raises(PodError, match="no meminfo"):
            await task
        host.broken = False
        await ask()

    play(story)


def test_what_can_never_fit_does_not_queue() -> None:
    _, queue = one_at_a_time()

    async def story() -> None:
        with pytest.raises(NeverFits):
            async with queue.turn("run", ResourceRequest("x", 65 * GIB)):
                pass
        with pytest.raises(InputError, match="cost"):
            async with queue.turn("run", SMALL, cost=0):
                pass

    play(story)
    with pytest.raises(InputError, match="weight"):
        queue.set_weight("run", 0)
