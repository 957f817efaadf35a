"""How many rollouts are under way: what a step does to the number, and what the number does to a run.

The run is the real table on a virtual clock. Sessions share the samplers, which make more tokens in all the more
sessions there are, up to a point, and fewer for each; some tasks are long and some sessions are, so that the slowest of
a group takes twice as long as its mean. Weights reach the samplers a while after the step.
"""

import heapq
import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, pstdev

import pytest
import tomli_w

from etude.errors import InputError
from etude.recipe import load_recipe
from etude.rl.balance import balanced
from etude.rl.orchestrator import Care, TaskSets, named_tasks
from etude.rl.place import Place, write_status, write_whole
from etude.rl.settings import evaluation_plan, plan_of
from etude.rl.slots import Plan, ReadyGroup, Slot, Slots
from etude.run import Run
from etude.tasks.nano.source import generate_nano

PLAN = Plan(group_size=8, groups_per_step=8, max_staleness=2, in_flight=96, lease_s=1e9)
STEP = PLAN.group_size * PLAN.groups_per_step


# ------------------------------------------------------------------------------------------- the rule


def test_what_was_thrown_away_comes_off_and_when_the_trainer_waited_more_come_on() -> None:
    assert balanced(96, PLAN, stale=STEP, waited=False) == 48  # half of all samples were for nothing
    assert balanced(48, PLAN, stale=0, waited=False) == 48  # more would only grow old
    assert balanced(48, PLAN, stale=0, waited=True) == 52


def test_there_are_never_more_than_planned_and_never_fewer_than_a_group() -> None:
    assert balanced(95.9, PLAN, stale=0, waited=True) == PLAN.in_flight
    assert balanced(9, PLAN, stale=100 * STEP, waited=False) == PLAN.group_size
    assert balanced(3, replace(PLAN, in_flight=3), stale=100 * STEP, waited=False) == 3


def test_where_nothing_may_be_stale_nothing_is_balanced() -> None:
    assert balanced(20, replace(PLAN, max_staleness=0), stale=STEP, waited=False) == PLAN.in_flight


def test_all_who_claim_keep_to_what_is_allowed_also_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "slots.sqlite"
    orchestrator, worker = Slots(path, PLAN), Slots(path, PLAN)
    assert worker.allowed() == PLAN.in_flight
    worker.add((f"task-{number}", 0.0) for number in range(4))
    held = [slot for _ in range(6) if (slot := worker.claim("w", 0.0)) is not None]
    orchestrator.allow(4.9)
    assert worker.claim("w", 0.0) is None
    for slot in held[:2]:  # the others go on: what runs is not ended
        worker.finish(slot, {"total": 1.0}, "t", (0, 0))
    assert worker.claim("w", 0.0) is None
    worker.finish(held[2], {"total": 1.0}, "t", (0, 0))
    assert worker.claim("w", 0.0) is not None
    assert worker.claim("w", 0.0) is None
    assert Slots(path, PLAN).allowed() == 4.9
    assert Slots(path, replace(PLAN, in_flight=2)).allowed() == 2  # the recipe was changed: it is the most
    with pytest.raises(InputError, match="at least 1"):
        orchestrator.allow(0)


# ------------------------------------------------------------------------------------------- the orchestrator


def care_of(directory: Path, max_staleness: int) -> Care:
    """An orchestrator without its processes: groups of two, two a step."""
    generate_nano(directory / "tasks", 12, "train", 0, (1,))
    (directory / "model").mkdir()
    numbers = {"steps": 4, "group_size": 2, "groups_per_step": 2, "in_flight": 8, "max_staleness": max_staleness}
    table = {"model": "model", "tasks": "./tasks", **numbers}
    (directory / "recipe.toml").write_text(tomli_w.dumps({"name": "tiny", "stages": ["rl"], "rl": table}))
    recipe = load_recipe(directory / "recipe.toml")
    assert recipe.rl is not None
    run = Run.create_or_resume(directory / "run", recipe)
    place = Place(run.path)
    place.make()
    tasks = TaskSets(named_tasks(directory / "tasks"), {})
    slots, evaluations = Slots(place.slots, plan_of(recipe.rl)), Slots(place.evaluations, evaluation_plan(recipe.rl))
    return Care(run, recipe.rl, place, slots, evaluations, tasks, 0, lambda *_: None)


def finish_all(slots: Slots, version: int) -> None:
    while (slot := slots.claim("w", 0.0)) is not None:
        slots.finish(slot, {"total": 1.0}, "t", (version, version))


def test_the_orchestrator_says_what_is_allowed_and_balances_after_every_step(tmp_path: Path) -> None:
    care = care_of(tmp_path, max_staleness=2)
    slots = care.slots
    slots.add((f"task-{number}", 0.0) for number in range(4))
    finish_all(slots, version=0)
    assert slots.reconcile(0.0, 3)["stale"] == 8
    finish_all(slots, version=3)
    for step in (1, 2):
        groups = slots.take(3) or []
        slots.mark_trained(groups, step)
        told = {"groups": [group.id for group in groups], "wall_s": 9.0, "waited_for": {"rollouts": 5.0}}
        write_whole(care.place.steps / f"{step:06d}.json", json.dumps(told))
        care.log_steps(step)
    assert [line["in_flight_allowed"] for line in care.run.metrics("rl")] == [8, 2]
    assert slots.allowed() == pytest.approx(8 * 4 / 12 + 2 * 4 / 16)  # two thirds for nothing, then waiting twice


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_the_last_groups_are_begun_when_the_samplers_have_the_newest_weights(
    tmp_path: Path, max_staleness: int
) -> None:
    care = care_of(tmp_path, max_staleness)
    care.fill(0)
    assert care.slots.outstanding() == 2 * max_staleness
    write_status(care.place, "sampler-0", version=0)
    care.fill(0)
    assert care.slots.outstanding() == 2 * max_staleness + 2


# ------------------------------------------------------------------------------------------- a run


@dataclass(frozen=True)
class Hardware:
    """`half` sessions get half of the tokens that any number could get; times are in seconds."""

    half: float = 64.0
    session_s: float = 3.0  # of a mean session that has the samplers for itself
    step_s: float = 1.0
    publish_s: float = 0.5


@dataclass
class Course:
    """A run in virtual time."""

    seed: int
    hardware: Hardware = Hardware()
    plan: Plan = PLAN
    balance: bool = True
    allowed: list[float] = field(default_factory=list)  # on the way to each step
    stale: list[int] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)  # of steps

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.slots = Slots(":memory:", self.plan)
        self.now = self.served = 0.0  # served: seconds of work that every session has had since the beginning
        self.version = self.sampled = 0  # of the trainer, and of the samplers
        self.running: list[tuple[float, int, Slot, int]] = []  # done when so much is served; the oldest version
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.waits_since: float | None = 0.0
        self.tasks = self.order = 0
        self.long: dict[int, float] = {}  # how long a group's task is

    def later(self, delay: float, act: Callable[[], None]) -> None:
        self.order += 1
        heapq.heappush(self.events, (self.now + delay, self.order, act))

    def orchestrate(self) -> None:
        self.slots.reconcile(self.now, self.version)
        wanted = self.slots.wanted(fresh=self.sampled == self.version)
        self.slots.add((f"task-{self.tasks + number}", 0.0) for number in range(wanted))
        self.tasks += wanted
        self.claim()
        self.later(0.25, self.orchestrate)

    def claim(self) -> None:
        while (slot := self.slots.claim("w", self.now)) is not None:
            task = self.long.setdefault(slot.group, self.chance.lognormvariate(0, 0.4))
            work = self.hardware.session_s * task * self.chance.lognormvariate(0, 0.45)
            heapq.heappush(self.running, (self.served + work, slot.id, slot, self.sampled))

    def train(self) -> None:
        groups = self.slots.take(self.version)
        if groups is not None:
            waited, self.waits_since = self.now != self.waits_since, None
            self.later(self.hardware.step_s, lambda: self.mark(groups, waited))

    def mark(self, groups: list[ReadyGroup], waited: bool) -> None:
        self.version = version = self.version + 1
        self.slots.mark_trained(groups, version)
        self.later(self.hardware.publish_s, lambda: setattr(self, "sampled", version))
        self.allowed.append(self.slots.allowed())
        self.stale.append(sum(trouble.kind == "stale" for trouble in self.slots.troubles(version)))
        if self.balance:
            self.slots.allow(balanced(self.slots.allowed(), self.plan, self.stale[-1], waited))
        self.ends.append(self.now)
        self.waits_since = self.now
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
            self.slots.finish(slot, {"total": 1.0}, "t", (oldest, self.sampled))
            self.claim()
            if self.waits_since is not None:
                self.train()
        return self

    @property
    def waste(self) -> float:
        """The share of all samples that were thrown away, after the first steps."""
        late = self.stale[8:]
        return sum(late) / (sum(late) + STEP * len(late))

    @property
    def rate(self) -> float:
        """Steps in a second."""
        return len(self.ends) / self.ends[-1]


def compare(hardware: Hardware, plan: Plan, seeds: range, steps: int) -> tuple[list[Course], list[Course]]:
    fixed, balances = (
        [Course(seed, hardware, plan, balance).run(steps) for seed in seeds] for balance in (False, True)
    )
    for each, other in zip(fixed, balances, strict=True):
        print(
            f"seed {each.seed}: thrown away {each.waste:.0%} -> {other.waste:.0%}, steps/s {each.rate:.4f} -> ", end=""
        )
        print(f"{other.rate:.4f}, allowed {[int(allowed) for allowed in other.allowed]}, stale {other.stale}")
    return fixed, balances


@pytest.mark.parametrize("hardware", [Hardware(half=32.0), Hardware(step_s=6.0)], ids=["busy-samplers", "busy-trainer"])
def test_far_less_is_thrown_away_and_no_step_comes_later(hardware: Hardware) -> None:
    fixed, balances = compare(hardware, PLAN, range(3), steps=24)
    assert fmean(course.waste for course in balances) < 0.5 * fmean(course.waste for course in fixed)
    assert fmean(course.rate for course in balances) > fmean(course.rate for course in fixed)


def test_the_number_settles() -> None:
    course = Course(seed=7).run(36)
    late = course.allowed[12:]
    assert pstdev(late) < 0.2 * fmean(late), course.allowed
    assert PLAN.group_size < min(late)
    assert max(late) < PLAN.in_flight


def test_where_nothing_grows_old_as_many_run_as_are_planned() -> None:
    few = replace(PLAN, in_flight=16)
    course = Course(0, plan=few).run(12)
    assert sum(course.stale) == 0
    assert set(course.allowed) == {16}
