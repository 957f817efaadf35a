"""When a step with enough ready groups waits for older unfinished ones, so that they do not become stale.

The simulation at the end uses the real queue on a virtual clock. Sessions share the samplers, whose total throughput
grows with the number of sessions up to a point while that of each falls. Tasks and sessions differ in length, so that
the slowest of a group takes twice as long as its mean; sessions of some tasks hang for a while. Weights reach the
samplers a while after the step.
"""

import heapq
import itertools
import json
import math
import random
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st
from run_services import FakeStatuses

from etude.files import write_atomically
from etude.recipe.recipe import load_recipe
from etude.rl.orchestrator import Orchestrator, RlTaskSets, named_tasks
from etude.rollouts.queue import RolloutQueue
from etude.rollouts.queue_records import ReadyGroup, Slot
from etude.rollouts.settings import QueueSettings, evaluation_queue
from etude.runs.layout import RunLayout
from etude.runs.run import Run
from etude.system.clock import Clock
from etude_nano.source import generate_nano

SETTINGS = QueueSettings(
    group_size=8, groups_per_step=8, max_staleness=2, prefetch_steps=1.5, in_flight=96, lease_s=1e9
)
LARGE = SETTINGS.model_copy(update={"groups_per_step": 16, "in_flight": 192})


# ------------------------------------------------------------------------------------------- the rule


def queue_of(groups: Sequence[tuple[int, bool]], settings: QueueSettings) -> RolloutQueue:
    """Return a queue of groups, each started with the weights of a step, complete or not."""
    queue = RolloutQueue(":memory:", settings.model_copy(update={"group_size": 2, "in_flight": 1000}))
    queue.add((f"{number}", 0.0) for number in range(len(groups)))
    for age, complete in groups:
        queue.set_served_step(age)
        claimed = [slot for _ in range(2) if (slot := queue.claim("w", 0.0)) is not None]
        for slot in claimed if complete else claimed[:1]:
            queue.finish(slot, {"total": 1.0}, "t", (age, age))
    return queue


def test_a_step_waits_for_a_group_that_would_become_stale() -> None:
    settings = QueueSettings(groups_per_step=2, max_staleness=2)
    queue = queue_of([(0, False), (1, True), (2, True)], settings)
    assert queue.take(1) is not None  # it can still be trained in the next step
    assert queue.awaited_tasks(1) == []
    assert queue.take(2) is None
    assert queue.awaited_tasks(2) == ["0"]
    late = next(slot for slot in queue.group(1).slots if slot.state == "starting")
    queue.finish(late, {"total": 1.0}, "t", (0, 2))
    assert [group.task for group in queue.take(2) or []] == ["0", "1"]


def test_the_trainer_waits_a_step_earlier_if_one_step_cannot_take_all_stale_groups() -> None:
    settings = QueueSettings(groups_per_step=2, max_staleness=2)
    queue = queue_of([(0, False), (0, False), (0, False), (1, True), (1, True)], settings)
    assert queue.take(1) is None  # the next step can train two of the three
    assert queue.awaited_tasks(1) == ["0", "1"]


def test_the_trainer_waits_only_if_that_saves_a_group() -> None:
    settings = QueueSettings(groups_per_step=2, max_staleness=2)
    assert queue_of([(0, False), (0, True), (0, True)], settings).take(2) is not None  # one becomes stale anyway
    assert queue_of([(0, False), (3, True), (3, True)], settings).take(3) is not None  # stale already
    assert queue_of([(1, False), (0, True), (0, True)], settings).take(2) is not None  # the newer one has time
    few = queue_of([(0, False), (1, True)], settings)
    assert few.take(2) is None
    assert few.awaited_tasks(2) == []  # it waits for any group


def test_a_resumed_rollout_keeps_its_staleness() -> None:
    queue = queue_of([(0, False), (1, True), (2, True)], QueueSettings(groups_per_step=2, max_staleness=2))
    (late,) = (slot for slot in queue.group(1).slots if slot.state == "starting")
    queue.checkpoint(late, {"snapshot": "s"}, 0.0)
    assert queue.slot(late.id).oldest_step == 0
    queue.fail(late, "its pod died")
    assert queue.awaited_tasks(2) == ["0"]
    again = queue.claim("w", 0.0)
    assert again is not None
    assert (again.id, again.oldest_step) == (late.id, 0)
    queue.fail(again, "its pod died", keep_resume=False)
    restarted = queue.claim("w", 0.0)
    assert restarted is not None
    assert (restarted.id, restarted.oldest_step) == (late.id, 2)


def test_after_a_rewind_a_lost_update_counts_as_staleness() -> None:
    queue = queue_of([(3, True), (5, False)], QueueSettings(groups_per_step=1, max_staleness=1))
    queue.rewind(4)  # sampled after step 5: one update away from the trainer, which is back at step 4
    assert [slot.oldest_step for slot in queue.group(2).slots] == [3, 3]
    queue.add([("new", 0.0)])
    new = next(slot for _ in range(2) if (slot := queue.claim("w", 0.0)) is not None)
    assert new.oldest_step == 3


def test_a_group_that_kills_its_workers_is_not_waited_for() -> None:
    queue = queue_of([(0, False), (2, True), (2, True)], QueueSettings(groups_per_step=2, max_staleness=2))
    for _ in range(queue.settings.max_attempts - 1):
        assert queue.awaited_tasks(2) == ["0"]
        queue.release()  # the orchestrator saw the worker die: no failure is counted
        queue.set_served_step(0)
        assert queue.claim("w", 0.0) is not None
    queue.release()
    assert queue.claim("w", 0.0) is not None
    assert queue.awaited_tasks(2) == []
    assert queue.take(2) is not None


def test_a_heartbeat_advances_the_last_heartbeat() -> None:
    queue = queue_of([(0, False)], SETTINGS)
    before = queue.last_heartbeat()
    queue.heartbeat(next(slot for slot in queue.group(1).slots if slot.state == "starting"), 5.0)
    assert queue.last_heartbeat() == before + 5.0


def trainable(ages: Sequence[int], first: int, settings: QueueSettings) -> int:
    """Return how many groups can be trained in the steps from `first` on before they are stale, over all orders."""
    steps = [first + number // settings.groups_per_step for number in range(len(ages))]
    return max(
        sum(step - age <= settings.max_staleness for step, age in zip(steps, order, strict=True))
        for order in itertools.permutations(ages)
    )


@given(
    st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=7),
    st.integers(1, 2),
    st.integers(0, 2),
    st.integers(0, 4),
)
def test_the_trainer_waits_if_and_only_if_fewer_groups_become_stale(
    groups: list[tuple[int, bool]], size: int, staleness: int, step: int
) -> None:
    settings = QueueSettings(groups_per_step=size, max_staleness=staleness)
    queue = queue_of(groups, settings)
    alive = {number: age for number, (age, _) in enumerate(groups) if step - age <= staleness}
    ready = sorted((number for number in alive if groups[number][1]), key=lambda number: alive[number])
    taken = queue.take(step)
    if len(ready) < size:
        assert taken is None
        assert queue.awaited_tasks(step) == []
        return
    now = ready[:size]
    # the choice if all older groups were complete
    then = sorted((*now, *(number for number in alive if not groups[number][1])), key=lambda number: alive[number])[
        :size
    ]
    saved = [trainable([alive[n] for n in alive if n not in gone], step + 1, settings) for gone in (now, then)]
    waits = saved[1] > saved[0]
    assert (taken is None) == waits
    assert queue.awaited_tasks(step) == ([str(number) for number in then if not groups[number][1]] if waits else [])
    if taken is not None:
        assert [group.task for group in taken] == [str(number) for number in now]


# ------------------------------------------------------------------------------------------- the orchestrator


def orchestrator_of(directory: Path, max_staleness: int, samplers: int = 1) -> Orchestrator:
    """Return an orchestrator without its processes: groups of two, two per step."""
    generate_nano(directory / "tasks", 12, "train", 0, (1,))
    (directory / "model").mkdir()
    numbers = {"steps": 4, "group_size": 2, "groups_per_step": 2, "in_flight": 8, "max_staleness": max_staleness}
    table = {"model": "model", "tasks": "./tasks", **numbers, "sampler": {"count": samplers}}
    (directory / "recipe.toml").write_text(tomli_w.dumps({"name": "tiny", "stages": ["rl"], "rl": table}))
    recipe = load_recipe(directory / "recipe.toml")
    assert recipe.rl is not None
    run = Run.create_or_resume(directory / "run", recipe)
    layout = RunLayout(run.path)
    layout.make()
    tasks = RlTaskSets(named_tasks(directory / "tasks"), {})
    queue, evaluations = (
        RolloutQueue(layout.slots, recipe.rl),
        RolloutQueue(layout.evaluations, evaluation_queue(recipe.rl, 1)),
    )
    return Orchestrator(run, recipe.rl, layout, queue, evaluations, FakeStatuses(), tasks, 0, lambda *_: None)


def test_a_claim_records_the_oldest_step_it_can_be_sampled_with(tmp_path: Path) -> None:
    orchestrator = orchestrator_of(tmp_path, max_staleness=2)
    orchestrator.queue.add([("task", 0.0)])
    orchestrator.update_served_step()
    assert (slot := orchestrator.queue.claim("w", 0.0)) is not None
    assert slot.oldest_step == 0  # unknown yet
    for version, step in ((1, 1), (2, 2), (7, 2)):  # the trainer went back to step 1 after the first of them
        orchestrator.queue.record_version(version, step)
    orchestrator.statuses.report("sampler-0", version=7)
    orchestrator.update_served_step()
    assert (slot := orchestrator.queue.claim("w", 0.0)) is not None
    assert slot.oldest_step == 2


def test_nothing_is_sampled_with_weights_that_are_too_old_to_train_on() -> None:
    queue = RolloutQueue(":memory:", QueueSettings(group_size=1, groups_per_step=1, max_staleness=2, in_flight=8))
    queue.add((f"task-{number}", 0.0) for number in range(8))
    queue.set_served_step(0, 0)
    for step in range(4):
        slot = queue.claim("w", 0.0)
        assert slot is not None or step == 3
        if slot is not None:
            queue.finish(slot, {"total": 1.0}, "t", (step, step))
            queue.record_version(step, step)
            queue.mark_trained([queue.group(slot.group)], step + 1)
    # Steps 1 to 3 were trained with rollouts of newer weights; the samplers are said to have those of step 0 only.
    assert queue.claimable() == 0
    assert queue.waiting_for(0.0) == "newer weights at the samplers; 5 queued, 3 trained"
    queue.set_served_step(0, 1)  # one of them
    assert queue.claimable() == 5
    queue.set_served_step(0)  # what is not said stays
    assert queue.claim("w", 0.0) is not None
    queue.rewind(0)
    assert queue.claimable() > 0


def test_the_served_step_is_that_of_the_oldest_sampler(tmp_path: Path) -> None:
    orchestrator = orchestrator_of(tmp_path, max_staleness=2, samplers=2)
    orchestrator.queue.add([("a", 0.0), ("b", 0.0)])
    found = []
    for versions in ({0: 3}, {1: 1}, {1: 2}):
        for number, version in versions.items():
            orchestrator.statuses.report(f"sampler-{number}", version=version)
        orchestrator.update_served_step()
        slot = orchestrator.queue.claim("w", 0.0)
        found.append(slot and slot.oldest_step)
    assert found == [0, 1, 2]  # one of the two had not reported at first


def test_the_queue_learns_again_what_samplers_have_after_the_trainer_went_back(tmp_path: Path) -> None:
    class MovedClock(Clock):
        now = 0.0

        def monotonic(self) -> float:
            return self.now

    orchestrator = orchestrator_of(tmp_path, max_staleness=0)
    orchestrator.clock = clock = MovedClock()
    queue = orchestrator.queue
    queue.add([("task", 0.0)])
    for version, step in ((1, 1), (2, 2)):
        queue.record_version(version, step)
    orchestrator.statuses.report("sampler-0", version=2)
    orchestrator.update_served_step()
    queue.rewind(1)  # to the checkpoint of step 1; step 2 is taken again before the orchestrator looks
    for version, step in ((3, 1), (4, 2)):
        queue.record_version(version, step)
    orchestrator.statuses.report("sampler-0", version=4)
    clock.now += 11.0
    orchestrator.update_served_step()
    assert (slot := queue.claim("w", 0.0)) is not None
    assert slot.oldest_step == 2


def test_no_more_groups_start_than_the_remaining_steps_need(tmp_path: Path) -> None:
    orchestrator = orchestrator_of(tmp_path, max_staleness=2)
    orchestrator.statuses.report("sampler-0", version=99)
    for step in range(4):
        orchestrator.start_groups(step)
        while (slot := orchestrator.queue.claim("w", 0.0)) is not None:
            orchestrator.queue.finish(slot, {"total": 1.0}, "t", (step, step))
        orchestrator.queue.mark_trained(orchestrator.queue.take(step) or [], step + 1)
        orchestrator.start_groups(step)  # before the trainer has written the step's facts
        write_atomically(orchestrator.layout.steps / f"{step + 1:06d}.json", json.dumps({"version": step + 1}))
    assert len(orchestrator.queue.tasks()) == 8


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_the_last_groups_start_when_the_samplers_have_the_newest_weights(tmp_path: Path, max_staleness: int) -> None:
    orchestrator = orchestrator_of(tmp_path, max_staleness)
    orchestrator.start_groups(0)
    assert orchestrator.queue.outstanding() == max_staleness
    orchestrator.statuses.report("sampler-0", version=0)
    orchestrator.start_groups(0)
    assert orchestrator.queue.outstanding() == max_staleness + 2


# ------------------------------------------------------------------------------------------- a simulated run


@dataclass(frozen=True)
class Hardware:
    """Throughput and times in seconds. `half` sessions reach half of the maximum throughput."""

    half: float = 64.0
    session_s: float = 3.0  # of a mean session alone on the samplers
    step_s: float = 1.0
    publish_s: float = 0.5
    hanging: float = 0.0  # share of tasks of whose sessions half hang ...
    hang_s: float = 20.0  # ... for this long


class NonWaitingQueue(RolloutQueue):
    """Takes a step as soon as enough groups are ready."""

    def _choose(self, step: int, trainable: Sequence[sqlite3.Row]) -> tuple[list[int], list[str]]:
        return super()._choose(step, trainable)[0], []


@dataclass
class SimulatedRun:
    """A run in virtual time."""

    seed: int
    hardware: Hardware = Hardware()
    settings: QueueSettings = SETTINGS
    queue_class: type[RolloutQueue] = RolloutQueue
    stale: list[int] = field(default_factory=list)  # rollouts before each step
    ends: list[float] = field(default_factory=list)  # of steps

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.queue = self.queue_class(":memory:", self.settings)
        self.now = self.served = 0.0  # served: seconds of work each session has had since the start
        self.step = self.served_step = 0  # of the trainer, and of the samplers
        self.running: list[tuple[float, int, Slot, int]] = []  # (served when done, id, slot, oldest step)
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.learning = False
        self.tasks = self.order = 0
        self.length: dict[int, float] = {}  # length of a group's task
        self.hangs: dict[int, bool] = {}

    def later(self, delay: float, act: Callable[[], None]) -> None:
        self.order += 1
        heapq.heappush(self.events, (self.now + delay, self.order, act))

    def orchestrate(self) -> None:
        self.queue.reconcile(self.now, self.step)
        self.queue.set_served_step(self.served_step)
        wanted = self.queue.groups_to_start(fresh=self.served_step == self.step)
        self.queue.add((f"task-{self.tasks + number}", 0.0) for number in range(wanted))
        self.tasks += wanted
        self.claim()
        self.train()
        self.later(0.25, self.orchestrate)

    def claim(self) -> None:
        while (slot := self.queue.claim("w", self.now)) is not None:
            task = self.length.setdefault(slot.group, self.rng.lognormvariate(0, 0.4))
            hangs = self.hangs.setdefault(slot.group, self.rng.random() < self.hardware.hanging)
            work = self.hardware.session_s * task * self.rng.lognormvariate(0, 0.45)
            if hangs and self.rng.random() < 0.5:
                self.later(self.hardware.hang_s + work, partial(self.end, slot, self.served_step))
            else:
                heapq.heappush(self.running, (self.served + work, slot.id, slot, self.served_step))

    def end(self, slot: Slot, oldest: int) -> None:
        self.queue.finish(slot, {"total": 1.0}, "t", (oldest, self.served_step))
        self.claim()
        self.train()

    def train(self) -> None:
        groups = None if self.learning else self.queue.take(self.step)
        if groups is not None:
            assert all(self.step - group.oldest_step <= self.settings.max_staleness for group in groups)
            self.learning = True
            self.later(self.hardware.step_s, partial(self.mark, groups))

    def mark(self, groups: list[ReadyGroup]) -> None:
        self.step = step = self.step + 1
        self.queue.mark_trained(groups, step)
        self.later(self.hardware.publish_s, lambda: setattr(self, "served_step", step))
        self.stale.append(sum(incident.kind == "stale" for incident in self.queue.incidents(step)))
        self.ends.append(self.now)
        self.learning = False
        self.train()

    def run(self, steps: int) -> "SimulatedRun":
        self.orchestrate()
        while self.step < steps:
            speed = (1 + self.hardware.half) / (len(self.running) + self.hardware.half)
            done = self.now + (self.running[0][0] - self.served) / speed if self.running else math.inf
            happens = min(done, self.events[0][0])
            assert happens < 1e4, f"seed {self.seed}: no progress: {self.queue.waiting_for(self.now)}"
            self.served += speed * (happens - self.now)
            self.now = happens
            if happens < done:
                heapq.heappop(self.events)[2]()
                continue
            _, _, slot, oldest = heapq.heappop(self.running)
            self.end(slot, oldest)
        return self

    @property
    def waste(self) -> float:
        """The share of all rollouts that became stale."""
        trained = self.settings.group_size * self.settings.groups_per_step * len(self.stale)
        return sum(self.stale) / (sum(self.stale) + trained)

    @property
    def starving(self) -> int:
        """Groups that were started early enough and never trained."""
        early = self.settings.groups_per_step * (self.step - self.settings.max_staleness - 1)
        return sum(1 for each in self.queue.progress() if each.step is None and each.id <= early)

    @property
    def rate(self) -> float:
        """Steps per second."""
        return len(self.ends) / self.ends[-1]


@pytest.mark.parametrize(
    ("settings", "hardware"),
    [
        (SETTINGS, Hardware(half=32.0)),
        (SETTINGS, Hardware(step_s=6.0)),
        (SETTINGS, Hardware(hanging=0.05)),
        pytest.param(
            LARGE,
            Hardware(half=100.0, session_s=0.9, step_s=1.2, publish_s=0.6, hanging=0.02, hang_s=10.0),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["busy-samplers", "busy-trainer", "hanging", "as-measured"],
)
def test_waiting_wastes_no_rollouts_starves_no_group_and_costs_no_time(
    settings: QueueSettings, hardware: Hardware
) -> None:
    hasty, patient = (
        [SimulatedRun(seed, hardware, settings, queue_class).run(24) for seed in range(3)]
        for queue_class in (NonWaitingQueue, RolloutQueue)
    )
    for each, other in zip(hasty, patient, strict=True):
        print(f"seed {each.seed}: stale {each.waste:.0%} -> {other.waste:.0%}, ", end="")
        print(f"starving {each.starving} -> {other.starving}, steps/s {each.rate:.4f} -> {other.rate:.4f}")
    assert fmean(run.waste for run in hasty) > 0.1
    assert fmean(run.waste for run in patient) < 0.005
    assert sum(run.starving for run in patient) == 0 < sum(run.starving for run in hasty)
    assert fmean(run.rate for run in patient) > 0.95 * fmean(run.rate for run in hasty)


@pytest.mark.parametrize(("prefetch_steps", "staleness"), [(1.0, 1.0), (1.5, 1.5), (None, 2.0)])
def test_mean_staleness_is_set_by_prefetch_steps(prefetch_steps: float | None, staleness: float) -> None:
    # max_staleness only bounds the slowest rollouts.
    settings = SETTINGS.model_copy(update={"prefetch_steps": prefetch_steps, "max_staleness": 4})
    run = SimulatedRun(0, Hardware(hanging=0.05), settings).run(24)
    later = [each for each in run.queue.progress() if each.step is not None and each.step > 8]
    found = [(each.step or 0) - 1 - run.queue.group(each.id).oldest_step for each in later]
    assert fmean(found) == pytest.approx(staleness, abs=0.05)
    assert staleness < max(found) <= 4
