"""The whole asynchronous system on a virtual clock, with faults drawn from a seed: hundreds of runs, each in a moment.

Workers take slots, sample over several versions, grade and report; the trainer takes groups, steps and publishes; all
of them die, stall, say things twice and are restarted from checkpoints. Whatever happens: no slot is lost, no prompt is
trained twice in the weights that survive, no group beyond the bound is trained, no more are under way than are planned,
and the run reaches its step count; and where nothing goes wrong, nothing is sampled in vain.
"""

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from etude.rollouts.queue import IN_FLIGHT, Plan, ReadyGroup, Slot, Slots, StaleClaim

STEPS = 6


@dataclass(order=True)
class Event:
    time: float
    order: int
    act: Callable[[], None] = field(compare=False)


class World:
    """A run, seen from outside."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        draw = self.chance
        self.plan = Plan(
            group_size=draw.randint(1, 4),
            groups_per_step=draw.randint(1, 3),
            max_staleness=draw.randint(0, 3),
            in_flight=draw.randint(1, 12),
            lease_s=draw.choice([5.0, 20.0]),
            attempts=50,
        )
        self.trouble = draw.choice([0.0, 0.05, 0.2])  # how often anything goes wrong
        self.skew = draw.uniform(-1, 1)  # of the workers' clocks, in seconds
        self.slots = Slots(":memory:", self.plan)
        self.now, self.version, self.saved = (
            0.0,
            0,
            0,
        )  # version: steps in the trainer's weights; saved: in its checkpoint
        self.next_task = 0
        self.events: list[Event] = []
        self.order = 0
        self.trained: dict[int, list[ReadyGroup]] = {}  # by step, in the weights that live now
        self.lost_reports = Counter[str]()

    def later(self, delay: float, act: Callable[[], None]) -> None:
        self.order += 1
        heapq.heappush(self.events, Event(self.now + delay, self.order, act))

    def bad_luck(self) -> bool:
        return self.chance.random() < self.trouble

    # -- the actors

    def orchestrate(self) -> None:
        found = self.slots.wanted(fresh=not self.bad_luck())
        self.slots.add((f"task-{self.next_task + i}", self.chance.random()) for i in range(found))
        self.next_task += found
        self.slots.reconcile(self.now, self.version)
        if not self.bad_luck():
            self.slots.serve(self.version)
        self.later(1.0, self.orchestrate)

    def work(self, name: str) -> None:
        slot = None if self.bad_luck() else self.slots.claim(name, self.now + self.skew)
        if slot is None:
            self.later(self.chance.uniform(0.5, 2.0), lambda: self.work(name))
            return
        counts = self.slots.counts()
        assert sum(counts.get(state, 0) for state in IN_FLIGHT) <= self.plan.in_flight
        self.roll(name, slot, self.version, self.chance.randint(1, 6))

    def roll(self, name: str, slot: Slot, oldest: int, turns: int) -> None:
        """One turn after another, each maybe the last."""
        if self.bad_luck():  # the worker dies without a word; another takes its name later
            self.later(self.chance.uniform(1, 30), lambda: self.work(name))
            return
        stalled = self.chance.uniform(5, 40) if self.bad_luck() else 0.0
        self.later(self.chance.uniform(0.1, 2.0) + stalled, lambda: self.turn(name, slot, oldest, turns))

    def turn(self, name: str, slot: Slot, oldest: int, turns: int) -> None:
        try:
            if self.bad_luck():
                self.slots.fail(slot, self.chance.choice(["pod died", "engine lost", "verifier crashed"]))
            elif turns > 1:
                self.slots.beat(slot, self.now + self.skew)
                self.roll(name, slot, oldest, turns - 1)
                return
            else:
                self.slots.beat(slot, self.now + self.skew, "grading")
                reward = {"total": self.chance.random()}
                self.slots.finish(slot, reward, f"{slot.id}/{slot.attempt}", (oldest, self.version))
                if self.bad_luck():  # the network delivers it a second time
                    self.slots.finish(slot, {"total": -1.0}, "twice", (oldest, self.version))
        except StaleClaim:
            self.lost_reports[name] += 1
        self.later(0.1, lambda: self.work(name))

    def train(self) -> None:
        groups = self.slots.take(self.version)
        if groups is None:
            self.later(0.5, self.train)
            return
        for group in groups:
            assert self.version - group.oldest <= self.plan.max_staleness
            assert len(group.slots) == self.plan.group_size
            assert all(slot.reward is not None and slot.reward["total"] >= 0 for slot in group.slots)
        step = self.version + 1
        if self.bad_luck():  # killed between taking and marking: nothing happened
            self.later(5.0, self.restart)
            return
        self.slots.mark_trained(groups, step)
        self.trained[step] = groups
        self.version = step
        if self.bad_luck():  # killed after the step and before its checkpoint
            self.later(5.0, self.restart)
            return
        if self.chance.random() < 0.5 or step >= STEPS:
            self.saved = step
        self.later(1.0, self.train)

    def restart(self) -> None:
        """The trainer comes back with the weights of its checkpoint."""
        back = self.slots.rewind(self.saved)
        assert back == sum(len(groups) for step, groups in self.trained.items() if step > self.saved)
        self.trained = {step: groups for step, groups in self.trained.items() if step <= self.saved}
        self.version = self.saved
        self.train()

    def run(self) -> None:
        self.orchestrate()
        self.train()
        for number in range(self.chance.randint(1, 6)):
            self.work(f"worker-{number}")
        while self.saved < STEPS:
            event = heapq.heappop(self.events)
            self.now = event.time
            assert self.now < 20_000, f"no progress: version {self.version}, {self.slots.waiting_for(self.now)}"
            event.act()


@pytest.mark.parametrize("block", range(10))
def test_whatever_fails_nothing_is_lost_nothing_is_trained_twice_and_the_run_arrives(block: int) -> None:
    for seed in range(block * 20, block * 20 + 20):
        world = World(seed)
        try:
            world.run()
        except Exception as problem:
            raise AssertionError(f"simulation seed {seed}: {problem!r}") from problem
        ledger = world.slots.trained()
        tasks = [task for task, _ in ledger]
        assert len(tasks) == len(set(tasks)), f"seed {seed}"
        assert sorted(step for _, step in ledger) == sorted(
            step for step, groups in world.trained.items() for _ in groups
        )
        assert len(tasks) == STEPS * world.plan.groups_per_step, f"seed {seed}"
        # every group that began is trained, or its slots are all somewhere
        total = sum(world.slots.counts().values())
        assert total % world.plan.group_size == 0, f"seed {seed}"
        assert total == world.next_task * world.plan.group_size, f"seed {seed}"
        # and only what failed again and again was given up
        assert all(failures >= world.plan.attempts for failures in world.slots.given_up().values()), f"seed {seed}"
        if not world.trouble:
            assert not world.slots.troubles(), f"seed {seed}"
