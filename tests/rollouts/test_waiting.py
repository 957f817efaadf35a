"""For what a step waits that has groups enough: for older ones under way, rather than make them too old.

The run at the end is the real table on a virtual clock. Sessions share the samplers, which make more tokens in all the
more sessions there are, up to a point, and fewer for each; some tasks are long and some sessions are, so that the
slowest of a group takes twice as long as its mean; of some tasks sessions hang for a while. Weights reach the samplers
a while after the step.
"""

import heapq
import itertools
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from etude.recipe.recipe import load_recipe
from etude.rl.orchestrator import Care, TaskSets, named_tasks
from etude.rl.settings import evaluation_plan, plan_of
from etude.rollouts.queue import Plan, ReadyGroup, Slot, Slots
from etude.runs.layout import Place, write_status, write_whole
from etude.runs.run import Run
from etude_nano.source import generate_nano

PLAN = Plan(group_size=8, groups_per_step=8, max_staleness=2, ahead=1.5, in_flight=96, lease_s=1e9)
LARGE = replace(PLAN, groups_per_step=16, in_flight=192)


# ------------------------------------------------------------------------------------------- the rule


def table_of(groups: Sequence[tuple[int, bool]], plan: Plan) -> Slots:
    """A table of groups, each begun with the weights of a step, and all there or not."""
    slots = Slots(":memory:", replace(plan, group_size=2, in_flight=1000))
    slots.add((f"{number}", 0.0) for number in range(len(groups)))
    for age, complete in groups:
        slots.serve(age)
        held = [slot for _ in range(2) if (slot := slots.claim("w", 0.0)) is not None]
        for slot in held if complete else held[:1]:
            slots.finish(slot, {"total": 1.0}, "t", (age, age))
    return slots


def test_a_step_waits_for_a_group_that_would_be_too_old_after_it() -> None:
    plan = Plan(groups_per_step=2, max_staleness=2)
    slots = table_of([(0, False), (1, True), (2, True)], plan)
    assert slots.take(1) is not None  # it may still come in the step after
    assert slots.awaited(1) == []
    assert slots.take(2) is None
    assert slots.awaited(2) == ["0"]
    late = next(slot for slot in slots.group(1).slots if slot.state == "starting")
    slots.finish(late, {"total": 1.0}, "t", (0, 2))
    assert [group.task for group in slots.take(2) or []] == ["0", "1"]


def test_it_waits_a_step_before_where_a_step_cannot_take_them_all() -> None:
    plan = Plan(groups_per_step=2, max_staleness=2)
    slots = table_of([(0, False), (0, False), (0, False), (1, True), (1, True)], plan)
    assert slots.take(1) is None  # the next step can train two of the three
    assert slots.awaited(1) == ["0", "1"]


def test_it_does_not_wait_in_vain() -> None:
    plan = Plan(groups_per_step=2, max_staleness=2)
    assert table_of([(0, False), (0, True), (0, True)], plan).take(2) is not None  # one of the three is lost anyway
    assert table_of([(0, False), (3, True), (3, True)], plan).take(3) is not None  # lost already
    assert table_of([(1, False), (0, True), (0, True)], plan).take(2) is not None  # the younger one has time
    few = table_of([(0, False), (1, True)], plan)
    assert few.take(2) is None
    assert few.awaited(2) == []  # what it waits for is groups, any


def test_who_goes_on_from_a_checkpoint_is_as_old_as_it_was() -> None:
    slots = table_of([(0, False), (1, True), (2, True)], Plan(groups_per_step=2, max_staleness=2))
    (late,) = (slot for slot in slots.group(1).slots if slot.state == "starting")
    slots.checkpoint(late, {"snapshot": "s"}, 0.0)
    assert slots.slot(late.id).oldest == 0
    slots.fail(late, "its pod died")
    assert slots.awaited(2) == ["0"]
    again = slots.claim("w", 0.0)
    assert again is not None
    assert (again.id, again.oldest) == (late.id, 0)
    slots.fail(again, "its pod died", keep_resume=False)
    anew = slots.claim("w", 0.0)
    assert anew is not None
    assert (anew.id, anew.oldest) == (late.id, 2)


def test_a_trainer_that_went_back_finds_nothing_newer_than_itself() -> None:
    slots = table_of([(3, True), (5, False)], Plan(groups_per_step=1, max_staleness=1))
    slots.rewind(4)
    assert [slot.oldest for slot in slots.group(2).slots] == [4, 4]
    slots.add([("new", 0.0)])
    new = next(slot for _ in range(2) if (slot := slots.claim("w", 0.0)) is not None)
    assert new.oldest == 4


def test_who_takes_its_workers_along_is_not_waited_for() -> None:
    slots = table_of([(0, False), (2, True), (2, True)], Plan(groups_per_step=2, max_staleness=2))
    for _ in range(slots.plan.attempts - 1):
        assert slots.awaited(2) == ["0"]
        slots.release()  # the orchestrator saw the worker die: nobody's failure
        slots.serve(0)
        assert slots.claim("w", 0.0) is not None
    slots.release()
    assert slots.claim("w", 0.0) is not None
    assert slots.awaited(2) == []
    assert slots.take(2) is not None


def test_a_sign_of_life_is_seen() -> None:
    slots = table_of([(0, False)], PLAN)
    before = slots.last_sign()
    slots.beat(next(slot for slot in slots.group(1).slots if slot.state == "starting"), 5.0)
    assert slots.last_sign() == before + 5.0


def in_time(ages: Sequence[int], first: int, plan: Plan) -> int:
    """How many groups can be trained in the steps from version `first` on before they are too old: all orders tried."""
    places = [first + number // plan.groups_per_step for number in range(len(ages))]
    return max(
        sum(version - age <= plan.max_staleness for version, age in zip(places, order, strict=True))
        for order in itertools.permutations(ages)
    )


@given(
    st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=7),
    st.integers(1, 2),
    st.integers(0, 2),
    st.integers(0, 4),
)
def test_it_waits_if_and_only_if_that_saves_a_group(
    groups: list[tuple[int, bool]], size: int, staleness: int, version: int
) -> None:
    plan = Plan(groups_per_step=size, max_staleness=staleness)
    slots = table_of(groups, plan)
    alive = {number: age for number, (age, _) in enumerate(groups) if version - age <= staleness}
    ready = sorted((number for number in alive if groups[number][1]), key=lambda number: alive[number])
    taken = slots.take(version)
    if len(ready) < size:
        assert taken is None
        assert slots.awaited(version) == []
        return
    now = ready[:size]
    # if all that are older than one of those were there
    then = sorted((*now, *(number for number in alive if not groups[number][1])), key=lambda number: alive[number])[
        :size
    ]
    saved = [in_time([alive[n] for n in alive if n not in gone], version + 1, plan) for gone in (now, then)]
    waits = saved[1] > saved[0]
    assert (taken is None) == waits
    assert slots.awaited(version) == ([str(number) for number in then if not groups[number][1]] if waits else [])
    if taken is not None:
        assert [group.task for group in taken] == [str(number) for number in now]


# ------------------------------------------------------------------------------------------- the orchestrator


def care_of(directory: Path, max_staleness: int, samplers: int = 1) -> Care:
    """An orchestrator without its processes: groups of two, two a step."""
    generate_nano(directory / "tasks", 12, "train", 0, (1,))
    (directory / "model").mkdir()
    numbers = {"steps": 4, "group_size": 2, "groups_per_step": 2, "in_flight": 8, "max_staleness": max_staleness}
    table = {"model": "model", "tasks": "./tasks", **numbers, "sampler": {"count": samplers}}
    (directory / "recipe.toml").write_text(tomli_w.dumps({"name": "tiny", "stages": ["rl"], "rl": table}))
    recipe = load_recipe(directory / "recipe.toml")
    assert recipe.rl is not None
    run = Run.create_or_resume(directory / "run", recipe)
    place = Place(run.path)
    place.make()
    tasks = TaskSets(named_tasks(directory / "tasks"), {})
    slots, evaluations = Slots(place.slots, plan_of(recipe.rl)), Slots(place.evaluations, evaluation_plan(recipe.rl))
    return Care(run, recipe.rl, place, slots, evaluations, tasks, 0, lambda *_: None)


def test_the_table_knows_how_old_what_begins_now_is_at_most(tmp_path: Path) -> None:
    care = care_of(tmp_path, max_staleness=2)
    care.slots.add([("task", 0.0)])
    care.see_samplers()
    assert (slot := care.slots.claim("w", 0.0)) is not None
    assert slot.oldest == 0  # nobody knows
    for version, step in ((1, 1), (2, 2), (7, 2)):  # the trainer went back to step 1 after the first of them
        care.slots.published(version, step)
    write_status(care.place, "sampler-0", version=7)
    care.see_samplers()
    assert (slot := care.slots.claim("w", 0.0)) is not None
    assert slot.oldest == 2


def test_the_slowest_sampler_counts(tmp_path: Path) -> None:
    care = care_of(tmp_path, max_staleness=2, samplers=2)
    care.slots.add([("a", 0.0), ("b", 0.0)])
    found = []
    for versions in ({0: 3}, {1: 1}, {1: 2}):
        for number, version in versions.items():
            write_status(care.place, f"sampler-{number}", version=version)
        care.see_samplers()
        slot = care.slots.claim("w", 0.0)
        found.append(slot and slot.oldest)
    assert found == [0, 1, 2]  # of one of the two nothing was known at first


def test_no_more_groups_are_begun_than_the_steps_that_are_left_take(tmp_path: Path) -> None:
    care = care_of(tmp_path, max_staleness=2)
    write_status(care.place, "sampler-0", version=99)
    for step in range(4):
        care.fill(step)
        while (slot := care.slots.claim("w", 0.0)) is not None:
            care.slots.finish(slot, {"total": 1.0}, "t", (step, step))
        care.slots.mark_trained(care.slots.take(step) or [], step + 1)
        care.fill(step)  # before the trainer has written down what it did
        write_whole(care.place.steps / f"{step + 1:06d}.json", json.dumps({"version": step + 1}))
    assert len(care.slots.tasks()) == 8


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_the_last_groups_are_begun_when_the_samplers_have_the_newest_weights(
    tmp_path: Path, max_staleness: int
) -> None:
    care = care_of(tmp_path, max_staleness)
    care.fill(0)
    assert care.slots.outstanding() == max_staleness
    write_status(care.place, "sampler-0", version=0)
    care.fill(0)
    assert care.slots.outstanding() == max_staleness + 2


# ------------------------------------------------------------------------------------------- a run


@dataclass(frozen=True)
class Hardware:
    """`half` sessions get half of the tokens that any number could get; times are in seconds."""

    half: float = 64.0
    session_s: float = 3.0  # of a mean session that has the samplers for itself
    step_s: float = 1.0
    publish_s: float = 0.5
    hanging: float = 0.0  # the share of tasks of whose sessions half hang ...
    hang_s: float = 20.0  # ... for so long


class Hasty(Slots):
    """Takes a step whenever it can."""

    def _choose(self, version: int) -> tuple[list[int], list[str]]:
        return super()._choose(version)[0], []


@dataclass
class Course:
    """A run in virtual time."""

    seed: int
    hardware: Hardware = Hardware()
    plan: Plan = PLAN
    table: type[Slots] = Slots
    stale: list[int] = field(default_factory=list)  # on the way to each step
    ends: list[float] = field(default_factory=list)  # of steps

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.slots = self.table(":memory:", self.plan)
        self.now = self.served = 0.0  # served: seconds of work that every session has had since the beginning
        self.version = self.sampled = 0  # of the trainer, and of the samplers
        self.running: list[tuple[float, int, Slot, int]] = []  # done when so much is served; the oldest version
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.learning = False
        self.tasks = self.order = 0
        self.long: dict[int, float] = {}  # how long a group's task is
        self.hangs: dict[int, bool] = {}

    def later(self, delay: float, act: Callable[[], None]) -> None:
        self.order += 1
        heapq.heappush(self.events, (self.now + delay, self.order, act))

    def orchestrate(self) -> None:
        self.slots.reconcile(self.now, self.version)
        self.slots.serve(self.sampled)
        wanted = self.slots.wanted(fresh=self.sampled == self.version)
        self.slots.add((f"task-{self.tasks + number}", 0.0) for number in range(wanted))
        self.tasks += wanted
        self.claim()
        self.train()
        self.later(0.25, self.orchestrate)

    def claim(self) -> None:
        while (slot := self.slots.claim("w", self.now)) is not None:
            task = self.long.setdefault(slot.group, self.chance.lognormvariate(0, 0.4))
            hangs = self.hangs.setdefault(slot.group, self.chance.random() < self.hardware.hanging)
            work = self.hardware.session_s * task * self.chance.lognormvariate(0, 0.45)
            if hangs and self.chance.random() < 0.5:
                self.later(self.hardware.hang_s + work, partial(self.end, slot, self.sampled))
            else:
                heapq.heappush(self.running, (self.served + work, slot.id, slot, self.sampled))

    def end(self, slot: Slot, oldest: int) -> None:
        self.slots.finish(slot, {"total": 1.0}, "t", (oldest, self.sampled))
        self.claim()
        self.train()

    def train(self) -> None:
        groups = None if self.learning else self.slots.take(self.version)
        if groups is not None:
            assert all(self.version - group.oldest <= self.plan.max_staleness for group in groups)
            self.learning = True
            self.later(self.hardware.step_s, partial(self.mark, groups))

    def mark(self, groups: list[ReadyGroup]) -> None:
        self.version = version = self.version + 1
        self.slots.mark_trained(groups, version)
        self.later(self.hardware.publish_s, lambda: setattr(self, "sampled", version))
        self.stale.append(sum(trouble.kind == "stale" for trouble in self.slots.troubles(version)))
        self.ends.append(self.now)
        self.learning = False
        self.train()

    def run(self, steps: int) -> "Course":
        self.orchestrate()
        while self.version < steps:
            speed = (1 + self.hardware.half) / (len(self.running) + self.hardware.half)
            done = self.now + (self.running[0][0] - self.served) / speed if self.running else math.inf
            happens = min(done, self.events[0][0])
            assert happens < 1e4, f"seed {self.seed}: no progress: {self.slots.waiting_for(self.now)}"
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
        """The share of all samples that were thrown away."""
        trained = self.plan.group_size * self.plan.groups_per_step * len(self.stale)
        return sum(self.stale) / (sum(self.stale) + trained)

    @property
    def starving(self) -> int:
        """Groups that were not trained though they were begun when the steps could not have gone on without them."""
        early = self.plan.groups_per_step * (self.version - self.plan.max_staleness - 1)
        return sum(1 for each in self.slots.standings() if each.step is None and each.id <= early)

    @property
    def rate(self) -> float:
        """Steps in a second."""
        return len(self.ends) / self.ends[-1]


@pytest.mark.parametrize(
    ("plan", "hardware"),
    [
        (PLAN, Hardware(half=32.0)),
        (PLAN, Hardware(step_s=6.0)),
        (PLAN, Hardware(hanging=0.05)),
        (LARGE, Hardware(half=100.0, session_s=0.9, step_s=1.2, publish_s=0.6, hanging=0.02, hang_s=10.0)),
    ],
    ids=["busy-samplers", "busy-trainer", "hanging", "as-measured"],
)
def test_nothing_is_thrown_away_nobody_starves_and_steps_come_as_soon(plan: Plan, hardware: Hardware) -> None:
    hasty, patient = ([Course(seed, hardware, plan, table).run(24) for seed in range(3)] for table in (Hasty, Slots))
    for each, other in zip(hasty, patient, strict=True):
        print(f"seed {each.seed}: thrown away {each.waste:.0%} -> {other.waste:.0%}, ", end="")
        print(f"starving {each.starving} -> {other.starving}, steps/s {each.rate:.4f} -> {other.rate:.4f}")
    assert fmean(course.waste for course in hasty) > 0.1
    assert fmean(course.waste for course in patient) < 0.005
    assert sum(course.starving for course in patient) == 0 < sum(course.starving for course in hasty)
    assert fmean(course.rate for course in patient) > 0.95 * fmean(course.rate for course in hasty)


@pytest.mark.parametrize(("ahead", "age"), [(1.0, 1.0), (1.5, 1.5), (None, 2.0)])
def test_how_old_samples_are_is_a_matter_of_how_many_are_begun(ahead: float | None, age: float) -> None:
    plan = replace(PLAN, ahead=ahead, max_staleness=4)  # a bound for the slowest: the others are far from it
    course = Course(0, Hardware(hanging=0.05), plan).run(24)
    later = [each for each in course.slots.standings() if each.step is not None and each.step > 8]
    ages = [(each.step or 0) - 1 - course.slots.group(each.id).oldest for each in later]
    assert fmean(ages) == pytest.approx(age, abs=0.05)
    assert age < max(ages) <= 4
