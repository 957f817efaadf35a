"""Solve rates of tasks and kinds, and how informative a group of a task is expected to be.

A group of n rollouts has a gradient unless all are solved or none is: with solve rate p that has the probability
1 - p^n - (1 - p)^n. The rate of a task is measured on its own groups, and on those of its kind as a prior; older groups
count less, because the policy changes. There is no state: everything is a function of the finished groups.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from etude.rollouts.queue_records import GroupEffort, GroupUse

KIND_PRIOR, TASK_PRIOR = 4.0, 2.0  # rollouts that the mean of all groups, and that of the kind, count as
GROUP_PRIOR = 2.0  # groups that the expectation from a kind's solve rate counts as


def informativeness(rate: float, size: int) -> float:
    """Return the probability that a group of `size` rollouts is neither solved by all nor by none."""
    return 1.0 - rate**size - (1.0 - rate) ** size


@dataclass
class _Sums:
    """Decayed sums over groups."""

    rollouts: float = 0.0
    solved: float = 0.0
    groups: float = 0.0
    informative: float = 0.0

    def add(self, effort: GroupEffort, weight: float) -> None:
        rate = effort.solved or 0.0
        self.rollouts += weight * effort.rollouts
        self.solved += weight * effort.rollouts * rate
        self.groups += weight
        self.informative += weight * (0 < rate < 1)

    def rate(self, prior: float, count: float) -> float:
        return (self.solved + count * prior) / (self.rollouts + count)


@dataclass(frozen=True)
class SolveRates:
    """Expected informativeness of groups of `size` rollouts: of kinds, and of tasks that were sampled before."""

    size: int
    mean: float
    kinds: Mapping[str, float]
    tasks: Mapping[str, float]

    def of_kind(self, kind: str) -> float:
        return self.kinds.get(kind, informativeness(self.mean, self.size))


def measure(
    efforts: Sequence[GroupEffort], kinds: Mapping[str, str], size: int, step: int, half_life: float
) -> SolveRates:
    """Measure the solve rates of kinds and tasks; `kinds` maps every task to its kind.

    The tasks of a kind differ: where half of them are always solved and half never, their mean rate promises much and
    no group is informative. So the kind's share of informative groups counts, and its mean rate only as a prior.
    """
    everything, by_kind, by_task = _Sums(), defaultdict[str, _Sums](_Sums), defaultdict[str, _Sums](_Sums)
    for effort in efforts:
        if effort.solved is None or effort.task not in kinds:
            continue
        age = 0 if effort.step is None else max(0, step - effort.step)
        for sums in (everything, by_kind[kinds[effort.task]], by_task[effort.task]):
            sums.add(effort, 0.5 ** (age / half_life))
    mean = everything.rate(0.5, 2.0)
    rates = {kind: sums.rate(mean, KIND_PRIOR) for kind, sums in by_kind.items()}
    expected = {
        kind: (sums.informative + GROUP_PRIOR * informativeness(rates[kind], size)) / (sums.groups + GROUP_PRIOR)
        for kind, sums in by_kind.items()
    }
    tasks = {task: informativeness(sums.rate(rates[kinds[task]], TASK_PRIOR), size) for task, sums in by_task.items()}
    return SolveRates(size, mean, expected, tasks)


@dataclass(frozen=True)
class PromptStates:
    """The prompts of a run by what they may be used for next."""

    unused: frozenset[str]
    reusable: tuple[str, ...] = ()  # used before, and may be used again now
    waiting: tuple[str, ...] = ()  # may be used again later, the least recently used first; those never solved last
    resting: frozenset[str] = field(default_factory=frozenset)  # of these: never solved so far
    retired: frozenset[str] = field(default_factory=frozenset)  # always solved


def prompt_states(
    tasks: Collection[str],
    uses: Sequence[GroupUse],
    efforts: Sequence[GroupEffort],
    step: int,
    *,
    reuse: int,
    rest_steps: int,
    unsolved_rest_steps: int,
    retire_after: int,
) -> PromptStates:
    """Return which prompts are unused, may be used again, wait, rest or are retired, at a policy step."""
    used, busy = defaultdict[str, list[int]](list), set[str]()
    for use in uses:
        used[use.task].append(use.step or 0)
        if use.step is None and not use.dropped:
            busy.add(use.task)
    rates = defaultdict[str, list[float]](list)
    for effort in efforts:
        if effort.solved is not None and effort.task not in busy:
            rates[effort.task].append(effort.solved)
    known = [task for task in used if task in tasks and task not in busy]
    retired = {
        task for task in known if len(rates[task]) >= min(retire_after, reuse) and min(rates[task], default=0.0) == 1.0
    }
    unsolved = {task for task in known if rates[task] and not any(rates[task])}
    reusable, waiting = list[str](), list[str]()
    for task in sorted(known, key=lambda task: (task in unsolved, max(used[task]), task)):
        if task in retired or len(used[task]) >= reuse:
            continue
        rest = unsolved_rest_steps if task in unsolved else rest_steps
        (reusable if step - max(used[task]) >= rest else waiting).append(task)
    resting = frozenset(unsolved & set(waiting))
    return PromptStates(frozenset(tasks) - used.keys(), tuple(reusable), tuple(waiting), resting, frozenset(retired))
