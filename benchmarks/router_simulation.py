"""Discrete-event simulation of a cluster, to evaluate routers: hosts, groups of pods, forks, host deaths, late reports.

The world (`make_world`) is drawn once from a seed and run against any placer: the real PodRouter or the two baselines.
Pods use more memory while they start than afterwards, groups of one image arrive in bursts, every host has all images,
and hosts die silently and are noticed late. Hosts accept every pod and kill none, so that mistakes show as time
over the pressure ceilings instead of disappearing in a queue.
"""

import heapq
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np

from etude.pods.scheduling.admission import GIB, MIB, Thresholds
from etude.pods.scheduling.pressure import Pressure
from etude.pods.scheduling.router import HostReport, NoHost, Placement, PlacementPolicy, PlacementRequest, PodRouter

THRESHOLDS, POLICY = Thresholds(), PlacementPolicy()
CONNECT_S = 1.0  # until a connection to a dead host fails
TRANSFER_S = 5.0  # to transfer a fork's files to another host
RETRY_S = 1.0  # between attempts to place pods that no host could take
STEADY_CORES = 0.1  # cores a started pod uses: agents wait for their model most of the time
MAX_PODS = 400


@dataclass(frozen=True, slots=True)
class Scenario:
    """Size and failure rates of the simulated cluster."""

    hosts: int = 1000
    pods: int = 40_000
    images: int = 300
    group: int = 16  # rollouts of one prompt: the same image at once
    arrivals_s: float = 600.0
    bursts: int = 10  # half of all groups arrive in this many bursts
    life_s: float = 200.0  # median lifetime
    fork_share: float = 0.1  # fraction of pods that fork once, in mid-life
    deaths: float = 0.01  # fraction of the hosts that die; as many join
    report_interval_s: float = 5.0
    max_report_delay_s: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class SimulatedHostSpec:
    name: str
    cores: int
    memory: int
    joins: float
    dies: float


@dataclass(frozen=True, slots=True)
class SimulatedPodSpec:
    """One pod: `expected` memory is in its request, it uses `peak` while it starts and `steady` afterwards."""

    arrives: float
    image: int
    expected: int
    peak: int
    steady: int
    startup_s: float
    life_s: float
    forks: int


@dataclass(frozen=True, slots=True)
class World:
    scenario: Scenario
    hosts: tuple[SimulatedHostSpec, ...]
    pods: tuple[SimulatedPodSpec, ...]


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Measurements of one placer's run."""

    name: str
    placed: int
    per_second: float  # placements a second, counting only the time inside `place`
    hosts_used: int  # at the busiest moment
    hosts_bound: int  # lower bound for the same pods, by total memory
    hosts_first_fit: int  # hosts that first-fit-decreasing needs for them, with everything known
    utilisation: float  # fraction of memory used on the hosts in use, at the busiest moment
    fork_local: float  # fraction of forks on their parent's host
    memory_over_s: float  # host-seconds over the memory ceiling
    cpu_over_s: float
    lost: int  # pods that died with their host
    replaced: int  # of those, the pods that were started again
    unfinished: int
    wait_p99_s: float  # from arrival to placement
    ready_p50_s: float  # from arrival to started
    ready_p99_s: float


class Placer(Protocol):
    """The part of the router's interface that the simulation uses."""

    def report(self, report: HostReport) -> None: ...
    def forget(self, host: str) -> None: ...
    def mark_failed(self, host: str) -> None: ...
    def place(self, request: PlacementRequest, exclude: Collection[str] = ()) -> Placement: ...


class _BaselinePlacer:
    """Common part of both baselines: they track which hosts are alive and how many pods each has, counting their own
    placements since the last report."""

    def __init__(self, seed: int, clock: Callable[[], float], stale_s: float = POLICY.stale_s) -> None:
        self._clock, self._stale_s = clock, stale_s
        self._rng = np.random.default_rng(seed)
        self._rows: dict[str, int] = {}
        self._names: list[str] = []
        self._seen, self._pods, self._cores, self._most = (np.zeros(0) for _ in range(4))

    def report(self, report: HostReport) -> None:
        row = self._rows.get(report.host)
        if row is None:
            row = self._rows[report.host] = len(self._names)
            self._names.append(report.host)
            self._seen, self._pods = np.append(self._seen, 0.0), np.append(self._pods, 0.0)
            self._cores, self._most = np.append(self._cores, 1.0), np.append(self._most, 0.0)
        self._seen[row], self._pods[row] = self._clock(), report.pods
        self._cores[row], self._most[row] = report.cores, report.max_pods

    def forget(self, host: str) -> None:
        if host in self._rows:
            self._seen[self._rows[host]] = -math.inf

    def mark_failed(self, host: str) -> None:
        self.forget(host)  # until its next report

    def place(self, request: PlacementRequest, exclude: Collection[str] = ()) -> Placement:
        fits = (self._seen > self._clock() - self._stale_s) & (self._pods < self._most)
        for name in exclude:
            if name in self._rows:
                fits[self._rows[name]] = False
        rows = np.flatnonzero(fits)
        if not len(rows):
            raise NoHost("no live host is below its max_pods", {}, retryable=True)
        row = self._choose(rows)
        self._pods[row] += 1
        return Placement(self._names[row], 0.0)

    def _choose(self, rows: "np.typing.NDArray[np.intp]") -> int:
        raise NotImplementedError


class RandomPlacer(_BaselinePlacer):
    """Chooses any live host below its max_pods."""

    def _choose(self, rows: "np.typing.NDArray[np.intp]") -> int:
        return int(rows[self._rng.integers(len(rows))])


class LeastLoadedPlacer(_BaselinePlacer):
    """Chooses the host with the fewest pods per core, counting its own placements at once."""

    def _choose(self, rows: "np.typing.NDArray[np.intp]") -> int:
        return int(rows[np.argmin(self._pods[rows] / self._cores[rows])])


def make_world(scenario: Scenario) -> World:
    """Draw hosts, images and pods; the same scenario gives the same world."""
    rng = np.random.default_rng(scenario.seed)
    kinds = [(4, 16), (8, 32), (16, 64)]
    doomed = round(scenario.deaths * scenario.hosts)
    hosts = []
    for i in range(scenario.hosts + doomed):
        cores, gib = kinds[rng.choice(3, p=[0.4, 0.4, 0.2])]
        dies = rng.uniform(0.2, 0.9) * scenario.arrivals_s if i < doomed else math.inf
        joins = rng.uniform(0.1, 0.5) * scenario.arrivals_s if i >= scenario.hosts else 0.0
        hosts.append(SimulatedHostSpec(f"host-{i}", cores, gib * GIB, joins, dies))
    popularity = 1 / np.arange(1, scenario.images + 1) ** 0.8
    popularity /= popularity.sum()
    typical = rng.lognormal(math.log(600 * MIB), 0.5, scenario.images)  # steady use depends mostly on the image
    peaks = rng.uniform(2.0, 4.0, scenario.images)
    pods: list[SimulatedPodSpec] = []
    moments = (np.arange(scenario.bursts) + 0.5) * scenario.arrivals_s / max(1, scenario.bursts)
    while len(pods) < scenario.pods:
        image = int(rng.choice(scenario.images, p=popularity))
        in_burst = scenario.bursts and rng.random() < 0.5
        at = rng.choice(moments) + rng.uniform(0, 1) if in_burst else rng.uniform(0, scenario.arrivals_s)
        for _ in range(min(scenario.group, scenario.pods - len(pods))):
            steady = typical[image] * rng.lognormal(0, 0.2)
            pods.append(
                SimulatedPodSpec(
                    arrives=float(at + rng.uniform(0, 0.5)),
                    image=image,
                    expected=int(typical[image] * peaks[image] * 1.2),
                    peak=int(steady * peaks[image]),
                    steady=int(steady),
                    startup_s=float(rng.uniform(2, 10)),
                    life_s=float(rng.lognormal(math.log(scenario.life_s), 0.5)),
                    forks=int(rng.integers(1, 5)) if rng.random() < scenario.fork_share else 0,
                )
            )
    return World(scenario, tuple(hosts), tuple(pods))


class _SimulatedPod:
    def __init__(self, spec: SimulatedPodSpec, arrived: float, parent_host: str | None = None) -> None:
        self.spec, self.arrived, self.parent_host = spec, arrived, parent_host
        self.exclude: set[str] = set()
        self.host: _SimulatedHost | None = None
        self.memory = 0  # bytes in use now
        self.generation = 0  # incremented when its host dies: events scheduled for it before are void
        self.lost = False
        self.starting = False


@dataclass
class _SimulatedHost:
    spec: SimulatedHostSpec
    images: frozenset[str]
    alive: bool = True
    used: int = 0
    reserved: int = 0  # for pods that wait for their snapshot
    starting: int = 0
    pods: dict[_SimulatedPod, None] = field(default_factory=dict)
    accounted_until: float = 0.0
    memory_over_s: float = 0.0
    cpu_over_s: float = 0.0

    def pressure(self) -> tuple[float, float]:
        """Return (memory_some, cpu_some); memory pressure reaches its ceiling when half of the headroom is used."""
        reserve = THRESHOLDS.memory_reserve(self.spec.memory)
        free = self.spec.memory - self.used
        memory = 100.0 if free < 0 else max(0.0, THRESHOLDS.memory_some * (reserve - free) / (reserve / 2))
        demand = self.starting + STEADY_CORES * (len(self.pods) - self.starting)
        return memory, min(100.0, max(0.0, 100 * (demand / self.spec.cores - 0.5)))

    def account(self, now: float) -> None:
        """Add the time since the last change to the time over each exceeded ceiling."""
        if self.alive and now > self.accounted_until:
            memory, cpu = self.pressure()
            self.memory_over_s += (now - self.accounted_until) * (memory > THRESHOLDS.memory_some)
            self.cpu_over_s += (now - self.accounted_until) * (cpu > THRESHOLDS.cpu_some)
        self.accounted_until = now

    def report(self, now: float) -> HostReport:
        spec, (memory, cpu) = self.spec, self.pressure()
        available = max(0, spec.memory - self.used)
        reading = Pressure(cpu, memory, 0, 0, available, spec.memory, GIB, GIB, None, self.starting, spec.cores)
        return HostReport(
            host=spec.name,
            pressure=reading,
            pods=len(self.pods),
            max_pods=MAX_PODS,
            memory_free=max(0, available - THRESHOLDS.memory_reserve(spec.memory) - self.reserved),
            images=self.images,
            cores=spec.cores,
            starting=self.starting,
            time=now,
        )


class Simulation:
    """Runs one world against one placer. `placer` builds it from the simulation's clock."""

    def __init__(self, world: World, name: str, placer: Callable[[Callable[[], float]], Placer]) -> None:
        self.world, self.name, self.now = world, name, 0.0
        self.placer = placer(lambda: self.now)
        self.rng = np.random.default_rng(world.scenario.seed + 1)
        self.hosts: dict[str, _SimulatedHost] = {}
        self.images = frozenset(f"image-{number}" for number in range(world.scenario.images))
        self.outstanding = 0
        self.waiting: deque[_SimulatedPod] = deque()
        self.place_s = 0.0  # seconds spent in `place`
        self.placed = self.forks = self.forks_local = 0
        self.lost = self.replaced = 0
        self.waits: list[float] = []
        self.ready: list[float] = []
        # at the busiest moment: pods, hosts used, memory of those hosts, memory of each pod
        self.busiest: tuple[int, int, int, list[int]] = (0, 0, 0, [])
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._count = itertools.count()

    def run(self) -> SimulationResult:
        """Run until every pod has ended, or an hour after the last arrival."""
        scenario = self.world.scenario
        for host in self.world.hosts:
            self._at(host.joins, partial(self._join, host))
        self.outstanding = len(self.world.pods)
        for spec in self.world.pods:
            self._at(spec.arrives, partial(self._place, _SimulatedPod(spec, spec.arrives)))
        self._at(1.0, self._retry)
        self._at(10.0, self._sample_load)
        while self._events and self.outstanding and self.now < scenario.arrivals_s + 3600:
            self.now, _, event = heapq.heappop(self._events)
            event()
        for each in self.hosts.values():
            each.account(self.now)
        return self._result()

    def _at(self, when: float, event: Callable[[], object]) -> None:
        heapq.heappush(self._events, (when, next(self._count), event))

    def _after(self, pod: _SimulatedPod, delay: float, step: Callable[[_SimulatedPod], None]) -> None:
        """Run `step` later, unless the pod's host dies in between."""
        generation = pod.generation
        self._at(self.now + delay, lambda: step(pod) if pod.generation == generation else None)

    # -- hosts

    def _join(self, spec: SimulatedHostSpec) -> None:
        host = self.hosts[spec.name] = _SimulatedHost(spec, self.images, accounted_until=self.now)
        if math.isfinite(spec.dies):
            self._at(spec.dies, lambda: self._die(host))
        first = 0.0 if self.now == 0 else float(self.rng.uniform(0, self.world.scenario.report_interval_s))
        self._at(self.now + first, lambda: self._send_report(host))

    def _send_report(self, host: _SimulatedHost) -> None:
        if host.alive:
            scenario = self.world.scenario
            report, delay = host.report(self.now), float(self.rng.uniform(0, scenario.max_report_delay_s))
            self._at(self.now + (delay if self.now else 0.0), lambda: self.placer.report(report))
            interval = scenario.report_interval_s * float(self.rng.uniform(0.9, 1.1))
            self._at(self.now + interval, lambda: self._send_report(host))

    def _die(self, host: _SimulatedHost) -> None:
        """Kill a host silently: its pods count as lost once its reports have been missing for `stale_s`."""
        host.account(self.now)
        host.alive = False
        lost = list(host.pods)
        host.pods.clear()
        for pod in lost:
            pod.generation += 1

        def notice() -> None:
            self.placer.forget(host.spec.name)
            for pod in lost:
                self.lost += not pod.lost  # lost twice before it ran again counts once
                pod.arrived, pod.parent_host, pod.lost, pod.memory = self.now, None, True, 0
                self._place(pod)

        self._at(self.now + POLICY.stale_s, notice)

    # -- pods

    def _place(self, pod: _SimulatedPod) -> bool:
        spec = pod.spec
        request = PlacementRequest(
            f"image-{spec.image}",
            spec.expected,
            parent_host=pod.parent_host,
        )
        start = time.perf_counter()
        try:
            placement = self.placer.place(request, pod.exclude)
        except NoHost:
            self.place_s += time.perf_counter() - start
            pod.exclude.clear()
            self.waiting.append(pod)
            return False
        self.place_s += time.perf_counter() - start
        self.placed += 1
        host = self.hosts[placement.host]
        if host.alive:
            self._begin(pod, host)
        else:
            self._after(pod, CONNECT_S, lambda pod: self._connect_failed(pod, host.spec.name))
        return True

    def _connect_failed(self, pod: _SimulatedPod, host: str) -> None:
        self.placer.mark_failed(host)
        pod.exclude.add(host)
        self._place(pod)

    def _begin(self, pod: _SimulatedPod, host: _SimulatedHost) -> None:
        """Assign the pod to a host: transfer its snapshot if need be, then start it."""
        self.waits.append(self.now - pod.arrived)
        host.account(self.now)
        pod.host = host
        host.pods[pod] = None
        host.reserved += pod.spec.expected
        delay = 0.0
        if pod.parent_host is not None:
            self.forks += 1
            self.forks_local += pod.parent_host == host.spec.name
            delay = 0.0 if pod.parent_host == host.spec.name else TRANSFER_S
        self._after(pod, delay, self._start)

    def _start(self, pod: _SimulatedPod) -> None:
        host = self._host(pod)
        host.reserved -= pod.spec.expected
        host.starting += 1
        pod.starting = True
        self._set_memory(pod, pod.spec.peak)
        slowed = max(1.0, host.starting / host.spec.cores)
        self._after(pod, pod.spec.startup_s * slowed, self._settle)

    def _settle(self, pod: _SimulatedPod) -> None:
        self._set_memory(pod, pod.spec.steady)
        self._host(pod).starting -= 1
        pod.starting = False
        self.ready.append(self.now - pod.arrived)
        self.replaced += pod.lost
        pod.lost = False
        if pod.spec.forks:
            self._after(pod, pod.spec.life_s / 2, self._fork)
        self._after(pod, pod.spec.life_s, self._end)

    def _fork(self, pod: _SimulatedPod) -> None:
        """Fork a pod. Its files are present: children have a lower peak, a shorter start and half the lifetime."""
        s, peak = pod.spec, int(1.3 * pod.spec.steady)
        for _ in range(s.forks):
            child = SimulatedPodSpec(self.now, s.image, peak, peak, s.steady, 0.5, s.life_s / 2, 0)
            self.outstanding += 1
            self._place(_SimulatedPod(child, self.now, parent_host=self._host(pod).spec.name))

    def _end(self, pod: _SimulatedPod) -> None:
        self._set_memory(pod, 0)
        self._host(pod).pods.pop(pod)
        self.outstanding -= 1

    def _host(self, pod: _SimulatedPod) -> _SimulatedHost:
        assert pod.host is not None
        return pod.host

    def _set_memory(self, pod: _SimulatedPod, memory: int) -> None:
        host = self._host(pod)
        host.account(self.now)
        host.used += memory - pod.memory
        pod.memory = memory

    def _retry(self) -> None:
        failures = 0
        for _ in range(len(self.waiting)):
            failures += not self._place(self.waiting.popleft())
            if failures >= 20:  # no host will take the rest either: they stay queued in order
                break
        self.waiting.rotate(min(failures, 20))
        self._at(self.now + RETRY_S, self._retry)

    # -- results

    def _sample_load(self) -> None:
        pods = sum(len(host.pods) for host in self.hosts.values())
        if pods > self.busiest[0]:
            used = [host for host in self.hosts.values() if host.pods]
            sizes = [pod.memory for host in used for pod in host.pods]
            self.busiest = (pods, len(used), sum(host.spec.memory for host in used), sizes)
        self._at(self.now + 10.0, self._sample_load)

    def _result(self) -> SimulationResult:
        _, used, memory, sizes = self.busiest
        usable = [host.memory - THRESHOLDS.memory_reserve(host.memory) for host in self.world.hosts]
        ready, waits = np.array(self.ready or [math.nan]), np.array(self.waits or [math.nan])
        hosts = self.hosts.values()
        return SimulationResult(
            name=self.name,
            placed=self.placed,
            per_second=self.placed / max(self.place_s, 1e-9),
            hosts_used=used,
            hosts_bound=volume_bound(sizes, usable),
            hosts_first_fit=first_fit_decreasing(sizes, usable),
            utilisation=sum(sizes) / max(1, memory),
            fork_local=self.forks_local / max(1, self.forks),
            memory_over_s=sum(host.memory_over_s for host in hosts),
            cpu_over_s=sum(host.cpu_over_s for host in hosts),
            lost=self.lost,
            replaced=self.replaced,
            unfinished=self.outstanding,
            wait_p99_s=float(np.quantile(waits, 0.99)),
            ready_p50_s=float(np.quantile(ready, 0.5)),
            ready_p99_s=float(np.quantile(ready, 0.99)),
        )


def volume_bound(sizes: Iterable[int], hosts: Iterable[int]) -> int:
    """Return the fewest hosts, largest first, whose total memory covers the pods' use."""
    need, count = sum(sizes), 0
    for host in sorted(hosts, reverse=True):
        if need <= 0:
            break
        need, count = need - host, count + 1
    return count


def first_fit_decreasing(sizes: Iterable[int], hosts: Iterable[int]) -> int:
    """Return how many hosts first-fit-decreasing uses, largest pods and hosts first; skip pods that fit nowhere."""
    free = np.array(sorted(hosts, reverse=True), dtype=np.float64)
    last = 0
    for size in sorted(sizes, reverse=True):
        fits = free >= size
        row = int(np.argmax(fits))
        if fits[row]:
            free[row] -= size
            last = max(last, row + 1)
    return last


def compare(world: World) -> list[SimulationResult]:
    """Run the real PodRouter and both baselines on the same world."""
    seed = world.scenario.seed
    placers: dict[str, Callable[[Callable[[], float]], Placer]] = {
        "etude router": lambda clock: PodRouter(seed=seed, clock=clock),
        "least loaded": lambda clock: LeastLoadedPlacer(seed, clock),
        "random": lambda clock: RandomPlacer(seed, clock),
    }
    return [Simulation(world, name, placer).run() for name, placer in placers.items()]
