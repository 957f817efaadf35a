"""The simulation loses no pods, is deterministic, and the router beats both baselines in it."""

from functools import partial

import pytest

from benchmarks.router_simulation import (
    RandomPlacer,
    Scenario,
    Simulation,
    SimulationResult,
    compare,
    make_world,
)
from etude.pods.scheduling.router import PodRouter

SMALL = Scenario(hosts=40, pods=1500, images=20, arrivals_s=200, bursts=4, life_s=80, deaths=0.1, seed=3)


@pytest.fixture(scope="module")
def results() -> list[SimulationResult]:
    return compare(make_world(SMALL))


def test_every_pod_ends_and_every_lost_one_is_restarted(results: list[SimulationResult]) -> None:
    for each in results:
        assert each.unfinished == 0, f"{each.name}, seed {SMALL.seed}"
        assert 0 < each.lost == each.replaced, f"{each.name}, seed {SMALL.seed}"
        assert each.placed >= SMALL.pods + each.lost


def test_the_router_beats_both_baselines(results: list[SimulationResult]) -> None:
    ours, *others = results
    for other in others:
        assert ours.fork_local > 0.8 > other.fork_local, other.name
        assert ours.memory_over_s <= other.memory_over_s, other.name
        assert ours.ready_p50_s < other.ready_p50_s, other.name


def test_no_placer_uses_fewer_hosts_than_the_bound(results: list[SimulationResult]) -> None:
    for each in results:
        assert each.hosts_bound <= each.hosts_first_fit <= each.hosts_used <= SMALL.hosts + 4, each.name
        assert 0 < each.utilisation <= 1, each.name


def test_the_same_world_gives_the_same_result() -> None:
    world = make_world(Scenario(hosts=10, pods=200, images=5, arrivals_s=60, life_s=30, seed=9))
    assert world == make_world(world.scenario)
    first, second = (Simulation(world, "ours", lambda clock: PodRouter(clock=clock)).run() for _ in range(2))
    differ = {name for name in SimulationResult.__slots__ if getattr(first, name) != getattr(second, name)}
    assert differ <= {"per_second"}


def test_on_a_cluster_that_is_too_small_pods_wait_instead_of_overloading_hosts() -> None:
    world = make_world(Scenario(hosts=2, pods=300, images=2, arrivals_s=30, bursts=1, life_s=20, deaths=0, seed=1))
    ours = Simulation(world, "ours", lambda clock: PodRouter(clock=clock)).run()
    blind = Simulation(world, "random", partial(RandomPlacer, 1)).run()
    assert ours.unfinished == 0
    assert ours.wait_p99_s > 10
    assert ours.memory_over_s < 0.1 * blind.memory_over_s
