"""The router prefers the host with the lowest cost; its columns decide as a loop over hosts would."""

import json
import math
import random
import zlib
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.errors import InputError
from etude.pods.host_system import HostSystem
from etude.pods.pod import Capabilities
from etude.pods.remote.messages import parse, to_json
from etude.pods.scheduling.pressure import Pressure
from etude.pods.scheduling.router import (
    HostReport,
    NoHost,
    Placement,
    PlacementPolicy,
    PlacementRequest,
    PodRouter,
    capability_labels,
)

GIB = 1 << 30
CALM = Pressure(0, 0, 0, 0, 60 * GIB, 64 * GIB, 1 << 40, 2 << 40, 10**7, load=1, cores=16)


def report(host: str, **facts: Any) -> HostReport:
    stalls = {name: facts.pop(name) for name in ("memory_some", "memory_full", "io_full", "cpu_some") if name in facts}
    usual = {"pods": 0, "max_pods": 100, "memory_free": 50 * GIB, "cores": 16.0, "images": frozenset({"py"})}
    return HostReport(host, replace(CALM, **stalls), **{**usual, **facts})


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def router(clock: Clock, *reports: HostReport, **policy: Any) -> PodRouter:
    made = PodRouter(PlacementPolicy(**policy), clock=clock)
    for each in reports:
        made.report(each)
    return made


ONE = PlacementRequest("py", GIB)


# -- the policy, case by case


def test_only_a_host_with_the_image_is_chosen(clock: Clock) -> None:
    none: frozenset[str] = frozenset()
    crowded = report("b", memory_free=2 * GIB, cpu_some=99.0, starting=50)
    made = router(clock, report("a", images=none), crowded, report("c", images=none, snapshots=frozenset({"s"})))
    assert made.place(ONE).host == "b"
    assert made.place(replace(ONE, image="s")).host == "c"  # a snapshot by its id
    assert made.place(replace(ONE, image="lost", snapshot="s")).host == "c"
    with pytest.raises(NoHost, match=r"a pod of lost .*: 3 without the image; waiting will not help"):
        made.place(replace(ONE, image="lost"))


def test_an_image_that_can_be_sent_goes_to_other_hosts_when_those_that_have_it_are_busy(clock: Clock) -> None:
    sendable = replace(ONE, image="digest", holders=frozenset({"b"}))
    made = router(clock, report("a"), report("b"), report("c", draining=True))
    placed = Counter(made.place(sendable).host for _ in range(60))
    assert placed["b"] > placed["a"] > 0
    assert router(clock, report("a")).place(sendable).host == "a"
    of_system = replace(sendable, requires=frozenset({"system:debian 12"}))
    made = router(clock, report("a", capabilities=frozenset({"system:debian 12"})), report("b"))
    assert made.place(of_system).host == "a"


def test_a_warm_pod_is_better_than_an_image_and_is_used_once(clock: Clock) -> None:
    made = router(clock, report("a"), report("b", warm={"py": 2}))
    placed = [made.place(ONE) for _ in range(3)]
    assert [p.host for p in placed[:2]] == ["b", "b"]
    assert [p.warm for p in placed] == [True, True, False]


def test_forks_and_snapshots_are_placed_with_their_files(clock: Clock) -> None:
    made = router(
        clock, report("a", images=frozenset({"py"}), warm={"py": 5}), report("b", snapshots=frozenset({"s1"}))
    )
    fork = made.place(replace(ONE, parent_host="b"))
    restored = made.place(replace(ONE, snapshot="s1"))
    assert (fork.host, fork.transfer) == ("b", False)
    assert (restored.host, restored.transfer) == ("b", False)


@pytest.mark.parametrize("trouble", [{"memory_some": 50.0}, {"memory_free": 0}, {"pods": 100}, {"draining": True}])
def test_a_fork_is_placed_elsewhere_when_its_host_cannot_take_it(clock: Clock, trouble: dict[str, Any]) -> None:
    placed = router(clock, report("a"), report("b", **trouble)).place(replace(ONE, parent_host="b"))
    assert (placed.host, placed.transfer) == ("a", True)


def test_an_unreported_snapshot_must_be_transferred(clock: Clock) -> None:
    assert router(clock, report("a")).place(replace(ONE, snapshot="lost")).transfer


def test_the_fuller_host_is_filled_first_until_its_target(clock: Clock) -> None:
    half, empty, nearly = report("half", memory_free=30 * GIB), report("empty"), report("nearly", memory_free=3 * GIB)
    assert router(clock, half, empty, nearly).place(ONE).host == "half"


def test_a_burst_between_two_reports_is_spread(clock: Clock) -> None:
    made = router(clock, *(report(f"h{i}", images=frozenset({"py"})) for i in range(20)))
    placed = Counter(made.place(ONE).host for _ in range(700))
    assert len(placed) == 20
    assert max(placed.values()) * GIB <= 50 * GIB


def test_pending_placements_end_when_a_report_must_have_counted_them(clock: Clock) -> None:
    made = router(clock, report("a", max_pods=2))
    made.place(ONE)
    clock.now += 1
    made.place(ONE)
    made.report(report("a", max_pods=2, pods=1, time=1))
    with pytest.raises(NoHost):
        made.place(ONE)
    clock.now += 1.5
    made.report(report("a", max_pods=2, pods=1, time=2))
    with pytest.raises(NoHost):  # the second may still be starting
        made.place(ONE)
    clock.now += 1
    made.report(report("a", max_pods=2, pods=1, time=3))
    made.place(ONE)


def test_an_unused_placement_can_be_released(clock: Clock) -> None:
    made = router(clock, report("a", max_pods=1, warm={"py": 1}))
    for _ in range(3):
        placed = made.place(ONE)
        assert placed.warm
        made.release(placed)
        made.release(placed)


def test_silent_draining_failed_and_excluded_hosts_get_no_pods(clock: Clock) -> None:
    made = router(clock, report("silent"))
    clock.now += 11
    for each in (report("draining", draining=True), report("failed"), report("excluded"), report("good")):
        made.report(each)
    made.mark_failed("failed")
    assert {made.place(ONE, exclude={"excluded", "unknown"}).host for _ in range(50)} == {"good"}


def test_backoff_doubles_and_resets(clock: Clock) -> None:
    made = router(clock, report("a"), stale_s=1e9)

    def excluded_for() -> float:
        start = clock.now
        while True:
            try:
                made.place(ONE)
                return clock.now - start
            except NoHost:
                clock.now += 0.5

    waits = []
    for _ in range(4):
        made.mark_failed("a")
        waits.append(excluded_for())
    assert waits == [1, 2, 4, 8]
    clock.now += 100
    made.mark_failed("a")
    assert excluded_for() == 1


def test_an_outdated_report_is_dropped_unless_the_host_is_stale(clock: Clock) -> None:
    made = router(clock, report("a", pods=100, time=50))
    made.report(report("a", pods=0, time=49))
    with pytest.raises(NoHost):
        made.place(ONE)
    clock.now += 20
    made.report(report("a", pods=0, time=10))  # its clock was set back
    assert made.place(ONE).host == "a"


def test_busy_cores_are_the_last_choice_but_better_than_none(clock: Clock) -> None:
    made = router(clock, report("busy", cpu_some=99.0, images=frozenset({"py"})), report("calm"))
    assert made.place(ONE).host == "calm"
    assert made.place(ONE, exclude={"calm"}).host == "busy"


def test_required_capabilities_select_hosts(clock: Clock) -> None:
    can = capability_labels(
        "fire", Capabilities("vm", limits=frozenset({"disk"}), snapshots=frozenset({"full"}), users=True), HostSystem()
    )
    assert can >= {"backend:fire", "isolation:vm", "limit:disk", "snapshot:full", "images", "users"}
    made = router(clock, report("plain"), report("vm", capabilities=can))
    assert made.place(replace(ONE, requires=frozenset({"isolation:vm"}))).host == "vm"
    with pytest.raises(
        NoHost, match=r"\(requires egress:transparent\).*2 without a required capability; waiting will not help"
    ):
        made.place(replace(ONE, requires=frozenset({"egress:transparent"})))


def test_a_refusal_counts_the_hosts_by_reason(clock: Clock) -> None:
    made = router(clock, *(report(f"s{i}") for i in range(2)))
    clock.now += 60
    for i in range(5):
        made.report(report(f"f{i}", pods=100))
    for i in range(3):
        made.report(report(f"m{i}", memory_full=20.0))
    made.report(report("small", memory_free=10))
    with pytest.raises(NoHost) as caught:
        made.place(ONE)
    assert str(caught.value) == (
        "none of 11 hosts can take a pod of py with 1024 MiB: 5 full, 3 under memory pressure, 2 stale, "
        "1 without enough free memory"
    )
    assert caught.value.rejections["full"] == 5
    assert caught.value.retryable
    with pytest.raises(NoHost, match="waiting will not help") as never:
        made.place(replace(ONE, memory=63 * GIB))
    assert not never.value.retryable


def test_no_hosts_at_all(clock: Clock) -> None:
    with pytest.raises(NoHost, match=r"none of 0 hosts .*: no host has reported yet"):
        router(clock).place(ONE)


def test_a_removed_host_may_return(clock: Clock) -> None:
    made = router(clock, report("a", images=frozenset({"py"}), warm={"py": 1}, snapshots=frozenset({"s"})), report("b"))
    made.place(ONE)
    made.forget("a")
    made.forget("a")
    assert made.place(replace(ONE, snapshot="s")).host == "b"
    made.report(report("c"))  # reuses the row of the removed host, without its data
    assert len(made) == 2
    assert not made.place(ONE, exclude={"b"}).warm


def test_a_report_survives_json_and_another_version_is_refused() -> None:
    sent = report("a", images=frozenset({"x", "y"}), warm={"x": 1}, capabilities=frozenset({"pause"}), memory_some=None)
    assert parse(HostReport, json.dumps(to_json(sent)).encode(), "report") == sent
    with pytest.raises(InputError, match=r"report: pods is 'many'; Input should be a valid integer"):
        parse(HostReport, json.dumps({**to_json(sent), "pods": "many"}).encode(), "report")
    with pytest.raises(InputError, match=r"report: version is '99'; Input should be 2"):
        parse(HostReport, json.dumps({**to_json(sent), "version": 99}).encode(), "report")


# -- a reference implementation in plain Python


@dataclass
class ReferenceHost:
    report: HostReport
    seen: float
    pending: list[dict[str, Any]] = field(default_factory=list)
    until: float = -math.inf
    failures: int = 0


class ReferenceRouter:
    """The router's policy as a loop over hosts; slow and simple."""

    def __init__(self, policy: PlacementPolicy, clock: Clock, seed: int) -> None:
        self.p, self.clock, self.seed, self.hosts = policy, clock, seed, {}

    def report(self, new: HostReport) -> None:
        now, host = self.clock(), self.hosts.get(new.host)
        if host is None:
            self.hosts[new.host] = ReferenceHost(new, now)
            return
        if new.time < host.report.time and now - host.seen < self.p.stale_s:
            return
        host.report, host.seen = new, now
        host.pending = [c for c in host.pending if c["time"] > now - self.p.report_lag_s]

    def mark_failed(self, name: str) -> None:
        if host := self.hosts.get(name):
            now, last = self.clock(), min(self.p.max_backoff_s, self.p.backoff_s * 2.0 ** (host.failures - 1))
            if host.failures and now > host.until + last:
                host.failures = 0
            host.until = max(host.until, now + min(self.p.max_backoff_s, self.p.backoff_s * 2.0**host.failures))
            host.failures += 1

    def has_warm(self, host: ReferenceHost, image: str) -> bool:
        return host.report.warm.get(image, 0) > sum(c["warm"] == image for c in host.pending)

    def cost(self, name: str, host: ReferenceHost, request: PlacementRequest) -> float | None:
        p, now, r, thresholds = self.p, self.clock(), host.report, self.p.thresholds
        free, stalls = r.memory_free - sum(c["memory"] for c in host.pending), r.pressure
        fits = (
            host.seen > now - p.stale_s
            and host.until <= now
            and not r.draining
            and r.pods + len(host.pending) < r.max_pods
            and (stalls.memory_some or 0) <= thresholds.memory_some
            and (stalls.memory_full or 0) <= thresholds.memory_full
            and (stalls.io_full or 0) <= thresholds.io_full
            and free >= request.memory
            and request.requires <= r.capabilities
            and (request.snapshot is not None or request.image in r.images | r.snapshots)
        )
        if not fits:
            return None
        starting = r.starting + sum(not c["warm"] for c in host.pending)
        start = p.startup_s * max(1.0, (starting + 1) / r.cores)
        if self.has_warm(host, request.image):
            start = 0.0
        fill = 1 - (free - request.memory) / stalls.memory_total
        price = p.pack_s * (1 - fill) + p.crowding_s * (max(0.0, fill - p.target_fill) / (1 - p.target_fill)) ** 2
        busy = p.busy_s if (stalls.cpu_some or 0) > thresholds.cpu_some else 0.0
        return start + price + busy + 1e-3 * zlib.crc32(f"{self.seed}:{name}".encode()) / 2**32

    def place(self, request: PlacementRequest, exclude: set[str]) -> tuple[str, float] | None:
        costs = {n: self.cost(n, h, request) for n, h in self.hosts.items() if n not in exclude}
        costs = {n: c for n, c in costs.items() if c is not None}
        holders = {n for n in costs if n == request.parent_host or request.snapshot in self.hosts[n].report.snapshots}
        pool = {n: costs[n] for n in holders} or costs
        if not pool:
            return None
        name = min(pool, key=lambda n: pool[n])
        host, now = self.hosts[name], self.clock()
        warm = self.has_warm(host, request.image) and not holders
        host.pending.append({"time": now, "memory": request.memory, "warm": request.image if warm else ""})
        return name, costs[name]


def attempt(made: PodRouter, request: PlacementRequest, exclude: set[str]) -> tuple[Placement | None, dict[str, int]]:
    try:
        return made.place(request, exclude), {}
    except NoHost as error:
        return None, error.rejections


def random_report(rng: random.Random, moment: int) -> HostReport:
    def some(things: list[str], k: int) -> frozenset[str]:
        return frozenset(rng.sample(things, rng.randrange(k)))

    return report(
        f"h{rng.randrange(12)}",
        pods=rng.choice([0, 3, 9]),
        max_pods=10,
        memory_free=rng.randrange(20 * GIB),
        images=some(["i1", "i2", "i3"], 3),
        snapshots=some(["s1", "s2"], 2),
        warm={"i1": rng.randrange(3)} if rng.random() < 0.3 else {},
        capabilities=some(["pause", "users"], 3),
        cores=float(rng.choice([2, 8])),
        starting=rng.randrange(3),
        draining=rng.random() < 0.1,
        time=float(moment - rng.choice([0, 0, 0, 5])),
        memory_some=rng.choice([0.0, 0.0, 0.0, None, 30.0]),
        io_full=rng.choice([0.0, 0.0, 0.0, 90.0]),
        cpu_some=rng.choice([0.0, 95.0]),
    )


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_columns_decide_as_the_reference_does(seed: int) -> None:
    rng, clock = random.Random(seed), Clock()
    policy = PlacementPolicy()
    made, reference = PodRouter(policy, seed=seed, clock=clock), ReferenceRouter(policy, clock, seed)
    for moment in range(150):
        match rng.randrange(10):
            case 0 | 1 | 2:
                new = random_report(rng, moment)
                made.report(new)
                reference.report(new)
            case 3:
                clock.now += rng.choice([0.1, 1.0, 3.0, 8.0])
            case 4 if rng.random() < 0.3:
                name = f"h{rng.randrange(12)}"
                made.forget(name)
                reference.hosts.pop(name, None)
            case 5 if rng.random() < 0.5:
                name = f"h{rng.randrange(12)}"
                made.mark_failed(name)
                reference.mark_failed(name)
            case _:
                request = PlacementRequest(
                    rng.choice(["i1", "i2", "i3", "s1"]),
                    rng.randrange(1, 8 * GIB),
                    snapshot=rng.choice([None, None, "s1", "s2"]),
                    parent_host=rng.choice([None, None, "h1", "gone"]),
                    requires=frozenset(rng.sample(["pause", "users", "isolation:vm"], rng.choice([0, 0, 1]))),
                )
                exclude = {f"h{rng.randrange(12)}"} if rng.random() < 0.2 else set()
                wanted = reference.place(request, exclude)
                got, rejections = attempt(made, request, exclude)
                assert (got is None) == (wanted is None), f"seed {seed}, step {moment}: {got}, {wanted}, {rejections}"
                assert got is not None or sum(rejections.values()) == len(made), (
                    f"seed {seed}, step {moment}: {rejections}"
                )
                if got is not None and wanted is not None:
                    assert got.host == wanted[0], f"seed {seed}, step {moment}: {got}"
                    assert got.score == pytest.approx(-wanted[1]), f"seed {seed}, step {moment}"


def test_the_same_seed_and_reports_give_the_same_placements() -> None:
    def play(seed: int) -> list[Placement]:
        rng, clock = random.Random(5), Clock()
        made = PodRouter(seed=seed, clock=clock)
        for i in range(300):
            made.report(report(f"h{i}", images=frozenset(f"i{number}" for number in range(9))))
        return [made.place(PlacementRequest(f"i{rng.randrange(9)}", GIB)) for _ in range(500)]

    assert play(1) == play(1)
    assert play(1) != play(2)
