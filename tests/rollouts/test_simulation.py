"""A simulation of the rollout queue and its users on a virtual clock, with random faults: hundreds of runs in seconds.

Workers claim slots, sample over several weight versions and report; the trainer takes groups and steps; all of them
die, stall, report twice and restart from checkpoints. In every run: no slot is lost, no prompt is trained twice in the
surviving weights, no group exceeds max_staleness, counted in updates over all lineages of weights, in_flight is
respected, every step has its informative groups or has reached its limit, no group is judged twice, and the run reaches
its step count. Without faults, nothing is resampled.
"""

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from etude.rollouts.queue import RolloutQueue, StaleClaim
from etude.rollouts.queue_reader import IN_FLIGHT_STATES
from etude.rollouts.queue_records import ReadyGroup, Slot
from etude.rollouts.settings import QueueSettings

STEPS = 6


@dataclass(order=True)
class Event:
    time: float
    order: int
    act: Callable[[], None] = field(compare=False)


class World:
    """A simulated run."""

    def __init__(self, seed: int) -> None:
        self.rng = draw = random.Random(seed)
        self.settings = QueueSettings(
            group_size=draw.randint(1, 4),
            groups_per_step=(groups := draw.randint(1, 3)),
            max_groups_per_step=draw.choice([None, groups + 2, 40]),
            max_staleness=draw.randint(0, 3),
            in_flight=draw.randint(1, 12),
            lease_s=draw.choice([5.0, 20.0]),
            max_attempts=50,
        )
        self.fault_rate = draw.choice([0.0, 0.05, 0.2])  # probability of a fault
        self.alike_rate = draw.choice([0.0, 0.3, 0.8])  # share of groups whose rewards are all alike
        self.judged: dict[int, tuple[str, ...]] = {}  # traces of the groups that the trainer has judged
        self.skew = draw.uniform(-1, 1)  # of the workers' clocks, in seconds
        self.queue = RolloutQueue(":memory:", self.settings)
        self.now = 0.0
        self.step = 0  # of the trainer's weights
        self.saved = 0  # step of its checkpoint
        self.updates: list[int] = []  # that made the trainer's weights
        self.published: list[tuple[int, ...]] = []  # the updates of each weight version
        self.next_update = 0
        self.publish()
        self.next_task = 0
        self.events: list[Event] = []
        self.order = 0
        self.trained: dict[int, list[ReadyGroup]] = {}  # by step, in the current weights
        self.lost_reports = Counter[str]()

    def later(self, delay: float, act: Callable[[], None]) -> None:
        self.order += 1
        heapq.heappush(self.events, Event(self.now + delay, self.order, act))

    def fault(self) -> bool:
        return self.rng.random() < self.fault_rate

    # -- weights

    @property
    def version(self) -> int:
        return len(self.published) - 1

    def publish(self) -> None:
        self.published.append(tuple(self.updates))
        self.queue.record_version(self.version, self.step)

    def updates_between(self, version: int) -> int:
        """Return the number of updates between a version and the trainer's weights: undone ones and new ones."""
        return len(set(self.published[version]) ^ set(self.updates))

    # -- groups

    def is_alike(self, group: int) -> bool:
        return self.settings.group_size > 1 and random.Random(group).random() < self.alike_rate

    def is_informative(self, group: ReadyGroup) -> bool:
        """Judge a group as the trainer does; never twice unless it was sampled again."""
        traces = tuple(slot.trace for slot in group.slots)
        assert self.judged.get(group.id) != traces, "judged twice"
        self.judged[group.id] = traces
        return not self.is_alike(group.id)

    # -- processes

    def orchestrate(self) -> None:
        found = self.queue.groups_to_start(fresh=not self.fault())
        self.queue.add((f"task-{self.next_task + i}", self.rng.random()) for i in range(found))
        self.next_task += found
        self.queue.reconcile(self.now, self.step)
        if not self.fault():
            self.queue.set_served_step(self.queue.step_of(self.version))
        self.later(1.0, self.orchestrate)

    def work(self, name: str) -> None:
        slot = None if self.fault() else self.queue.claim(name, self.now + self.skew)
        if slot is None:
            self.later(self.rng.uniform(0.5, 2.0), lambda: self.work(name))
            return
        counts = self.queue.counts()
        assert sum(counts.get(state, 0) for state in IN_FLIGHT_STATES) <= self.settings.in_flight
        self.roll(name, slot, self.version, self.rng.randint(1, 6))

    def roll(self, name: str, slot: Slot, oldest: int, turns: int) -> None:
        """Sample a turn; each may be the last."""
        if self.fault():  # the worker dies; another of its name starts later
            self.later(self.rng.uniform(1, 30), lambda: self.work(name))
            return
        stalled = self.rng.uniform(5, 40) if self.fault() else 0.0
        self.later(self.rng.uniform(0.1, 2.0) + stalled, lambda: self.turn(name, slot, oldest, turns))

    def turn(self, name: str, slot: Slot, oldest: int, turns: int) -> None:
        try:
            if self.fault():
                self.queue.fail(slot, self.rng.choice(["pod died", "engine lost", "verifier crashed"]))
            elif turns > 1:
                self.queue.heartbeat(slot, self.now + self.skew)
                self.roll(name, slot, oldest, turns - 1)
                return
            else:
                self.queue.heartbeat(slot, self.now + self.skew, "grading")
                reward = {"total": 0.5 if self.is_alike(slot.group) else self.rng.random()}
                self.queue.finish(slot, reward, f"{slot.id}/{slot.attempt}", (oldest, self.version))
                if self.fault():  # a duplicate report
                    self.queue.finish(slot, {"total": -1.0}, "twice", (oldest, self.version))
        except StaleClaim:
            self.lost_reports[name] += 1
        self.later(0.1, lambda: self.work(name))

    def train(self) -> None:
        groups = self.queue.take(self.step, self.is_informative)
        if groups is None:
            self.later(0.5, self.train)
            return
        for group in groups:
            ranges = [slot.record["versions"] for slot in group.slots]
            used = {version for first, last in ranges for version in range(first, last + 1)}
            assert self.step - group.oldest_step == max(map(self.updates_between, used))
            assert self.is_alike(group.id) or self.step - group.oldest_step <= self.settings.max_staleness
            assert len(group.slots) == self.settings.group_size
            assert all(slot.reward is not None and slot.reward["total"] >= 0 for slot in group.slots)
        informative = sum(not self.is_alike(group.id) for group in groups)
        assert informative == self.settings.groups_per_step or (
            informative < self.settings.groups_per_step and len(groups) == self.settings.groups_limit
        )
        step = self.step + 1
        if self.fault():  # killed before the groups are marked
            self.later(5.0, self.restart)
            return
        self.queue.mark_trained(groups, step)
        self.trained[step] = groups
        self.step = step
        self.next_update += 1
        self.updates.append(self.next_update)
        self.publish()
        if self.fault():  # killed before the checkpoint
            self.later(5.0, self.restart)
            return
        if self.rng.random() < 0.5 or step >= STEPS:
            self.saved = step
        self.later(1.0, self.train)

    def restart(self) -> None:
        """Restart the trainer from its checkpoint, or, if that is damaged, from an earlier one."""
        if self.fault():
            self.saved = self.rng.randint(0, self.saved)
        back = self.queue.rewind(self.saved)
        assert back == sum(len(groups) for step, groups in self.trained.items() if step > self.saved)
        self.trained = {step: groups for step, groups in self.trained.items() if step <= self.saved}
        self.step = self.saved
        self.updates = self.updates[: self.saved]
        self.publish()
        self.train()

    def run(self) -> None:
        self.orchestrate()
        self.train()
        for number in range(self.rng.randint(1, 6)):
            self.work(f"worker-{number}")
        while self.saved < STEPS:
            event = heapq.heappop(self.events)
            self.now = event.time
            assert self.now < 100_000, f"no progress: step {self.step}, {self.queue.waiting_for(self.now)}"
            event.act()


@pytest.mark.parametrize("block", [*range(3), *(pytest.param(block, marks=pytest.mark.slow) for block in range(3, 10))])
def test_with_random_faults_nothing_is_lost_or_trained_twice_and_the_run_finishes(block: int) -> None:
    for seed in range(block * 20, block * 20 + 20):
        world = World(seed)
        try:
            world.run()
        except Exception as problem:
            raise AssertionError(f"simulation seed {seed}: {problem!r}") from problem
        trained = world.queue.trained()
        tasks = [task for task, _ in trained]
        assert len(tasks) == len(set(tasks)), f"seed {seed}"
        assert sorted(step for _, step in trained) == sorted(
            step for step, groups in world.trained.items() for _ in groups
        )
        if not world.alike_rate:
            assert len(tasks) == STEPS * world.settings.groups_per_step, f"seed {seed}"
        # no slot is missing
        total = sum(world.queue.counts().values())
        assert total % world.settings.group_size == 0, f"seed {seed}"
        assert total == world.next_task * world.settings.group_size, f"seed {seed}"
        # only groups that failed too often were dropped
        assert all(failures >= world.settings.max_attempts for failures in world.queue.dropped().values()), (
            f"seed {seed}"
        )
        if not world.fault_rate:
            assert not world.queue.incidents(), f"seed {seed}"
