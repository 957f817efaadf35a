"""What the groups of a run have come to, kept as sums: by kind for the order of prompts, and by task for their reuse.

The queue says which groups have changed since the last look (`changed_groups`), and only these are read, so the work
does not grow with the length of a run. Everything here follows from the queue: a restarted run reads it all once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean

from etude.rl.solve_rate import (
    GROUP_PRIOR,
    KIND_PRIOR,
    TASK_PRIOR,
    DecayedSums,
    PromptStates,
    SolveRates,
    SolveSums,
    informativeness,
)
from etude.rollouts.queue_client import AnyQueue
from etude.rollouts.queue_records import GroupEffort, GroupRecord

PARTS = ("turns", "thinking", "solved")  # of an effort
BATCH = 1000  # changed groups that are read at once


@dataclass(frozen=True)
class KindStatistics:
    """Mean effort and success of the rollouts of a kind so far."""

    rollouts: int
    effort: float  # turns and thinking tokens, each relative to the mean of all rollouts
    solved: float
    seconds: float | None  # of the slowest rollout of a group


@dataclass
class EffortSums:
    """Sums over the groups of a kind, weighted by their rollouts."""

    rollouts: int = 0
    groups: int = 0
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    weights: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))
    seconds: float = 0.0
    timed: int = 0  # groups whose seconds are known

    def add(self, effort: GroupEffort, sign: int) -> None:
        self.rollouts += sign * effort.rollouts
        self.groups += sign
        for part in PARTS:
            if (value := getattr(effort, part)) is not None:
                self.parts[part] += sign * value * effort.rollouts
                self.weights[part] += sign * effort.rollouts
        if effort.seconds is not None:
            self.seconds += sign * effort.seconds
            self.timed += sign

    def mean(self, part: str) -> float:
        return self.parts[part] / max(1, self.weights[part])


@dataclass(frozen=True)
class PromptRules:
    """When a prompt may be used again, in policy steps, and when it retires."""

    reuse: int
    rest_steps: int
    unsolved_rest_steps: int
    retire_after: int


@dataclass
class PromptHistory:
    """The history of a run's prompts. `kinds` maps every task to its kind."""

    kinds: Mapping[str, str]
    half_life: float
    groups: dict[int, GroupRecord] = field(default_factory=dict)
    by_task: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))  # groups
    change: int = 0  # the last one that was read

    def __post_init__(self) -> None:
        self._open: set[int] = set()  # groups that no step has consumed; dropped ones stay
        self._everything = DecayedSums(self.half_life)
        self._decayed: defaultdict[str, DecayedSums] = defaultdict(lambda: DecayedSums(self.half_life))
        self._dropped: defaultdict[str, SolveSums] = defaultdict(SolveSums)  # they do not age
        self._efforts: defaultdict[str, EffortSums] = defaultdict(EffortSums)

    def refresh(self, queue: AnyQueue) -> None:
        """Read what has changed in the queue since the last call."""
        while changed := queue.changed_groups(self.change, BATCH):
            self.update(changed)

    def update(self, records: Iterable[GroupRecord]) -> None:
        """Take note of groups as they are now."""
        for record in records:
            if (before := self.groups.get(record.id)) is not None:
                self._count(before, -1)
            self.groups[record.id] = record
            self.by_task[record.task].add(record.id)
            self._count(record, 1)
            self.change = max(self.change, record.change)

    def _count(self, record: GroupRecord, sign: int) -> None:
        """Add a group to all sums, or take it out again."""
        is_open = record.step is None and not record.dropped
        if is_open:
            (self._open.add if sign > 0 else self._open.discard)(record.id)
        kind, effort = self.kinds.get(record.task), record.effort
        if kind is None or effort is None:
            return
        if effort.turns is not None:
            self._efforts[kind].add(effort, sign)
        if effort.solved is None or is_open:
            return  # an open group is added when it is asked for: it does not age, and changes often
        if record.step is None:
            self._dropped[kind].add(effort, sign)
        else:
            self._everything.add(effort, record.step, sign)
            self._decayed[kind].add(effort, record.step, sign)

    # ------------------------------------------------------------------------------------------ kinds

    def kind_statistics(self) -> dict[str, KindStatistics]:
        """Return the statistics of each kind; groups are weighted by their rollouts."""
        known = {kind: sums for kind, sums in self._efforts.items() if sums.groups}
        found = {}
        wholes = {part: _mean_of_all(known.values(), part) for part in ("turns", "thinking")}
        for kind, sums in sorted(known.items()):
            # A model that never thinks has mean 0, and no relative effort.
            shares = [sums.mean(part) / whole for part, whole in wholes.items() if whole]
            seconds = sums.seconds / sums.timed if sums.timed else None
            effort = fmean(shares) if shares else 1.0
            found[kind] = KindStatistics(sums.rollouts, effort, sums.mean("solved"), seconds)
        return found

    def rates(self, size: int, step: int, tasks: Collection[str]) -> SolveRates:
        """Return the solve rates of kinds, and of these tasks, at a policy step.

        The tasks of a kind differ: where half of them are always solved and half never, their mean rate promises much
        and no group is informative. So the kind's share of informative groups counts, its mean rate only as a prior.
        """
        everything = self._everything.at(step)
        by_kind = {kind: sums.at(step) for kind, sums in self._decayed.items()}
        for kind, dropped in self._dropped.items():
            for sums in (everything, by_kind.setdefault(kind, SolveSums())):
                _merge(sums, dropped)
        for id in self._open:
            record = self.groups[id]
            effort, known = record.effort, self.kinds.get(record.task)
            if effort is not None and effort.solved is not None and known is not None:
                for sums in (everything, by_kind.setdefault(known, SolveSums())):
                    sums.add(effort, 1.0)
        mean = everything.rate(0.5, 2.0)
        rates = {kind: sums.rate(mean, KIND_PRIOR) for kind, sums in by_kind.items()}
        expected = {
            kind: (sums.informative + GROUP_PRIOR * informativeness(rates[kind], size)) / (sums.groups + GROUP_PRIOR)
            for kind, sums in by_kind.items()
        }
        own = {task: self._task_sums(task, step) for task in tasks}
        found = {
            task: informativeness(sums.rate(rates[self.kinds[task]], TASK_PRIOR), size)
            for task, sums in own.items()
            if sums.groups
        }
        return SolveRates(size, mean, expected, found)

    def _task_sums(self, task: str, step: int) -> SolveSums:
        sums = SolveSums()
        for id in sorted(self.by_task.get(task, ())):
            record = self.groups[id]
            if record.effort is not None and record.effort.solved is not None:
                age = 0 if record.step is None else max(0, step - record.step)
                sums.add(record.effort, 0.5 ** (age / self.half_life))
        return sums

    # ------------------------------------------------------------------------------------------ prompts

    def states(self, step: int, rules: PromptRules) -> PromptStates:
        """Return which prompts are unused, may be used again, wait, rest or are retired, at a policy step."""
        retired, unsolved = set[str](), set[str]()
        last_used: dict[str, int] = {}
        for task in self.kinds:
            uses = [self.groups[id] for id in self.by_task.get(task, ())]
            if not uses or any(use.id in self._open for use in uses):
                continue
            rates = [use.effort.solved for use in uses if use.effort is not None and use.effort.solved is not None]
            if len(rates) >= min(rules.retire_after, rules.reuse) and min(rates, default=0.0) == 1.0:
                retired.add(task)
            elif len(uses) < rules.reuse:
                last_used[task] = max(use.step or 0 for use in uses)
            if rates and not any(rates):
                unsolved.add(task)
        reusable, waiting = list[str](), list[str]()
        for task in sorted(last_used, key=lambda task: (task in unsolved, last_used[task], task)):
            rest = rules.unsolved_rest_steps if task in unsolved else rules.rest_steps
            (reusable if step - last_used[task] >= rest else waiting).append(task)
        resting = frozenset(unsolved & set(waiting))
        unused = frozenset(task for task in self.kinds if not self.by_task.get(task))
        return PromptStates(unused, tuple(reusable), tuple(waiting), resting, frozenset(retired))

    def ended(self) -> tuple[int, int]:
        """Return how many groups of the run are no longer open, and how many of these were dropped."""
        dropped = sum(record.dropped for record in self.groups.values())
        return len(self.groups) - len(self._open), dropped


def _mean_of_all(sums: Iterable[EffortSums], part: str) -> float:
    found = list(sums)
    return sum(each.parts[part] for each in found) / max(1, sum(each.weights[part] for each in found))


def _merge(sums: SolveSums, more: SolveSums) -> None:
    sums.rollouts += more.rollouts
    sums.solved += more.solved
    sums.groups += more.groups
    sums.informative += more.informative
