"""Solve rates of tasks and kinds, and how informative a group of a task is expected to be.

A group of n rollouts has a gradient unless all are solved or none is: with solve rate p that has the probability
1 - p^n - (1 - p)^n. The rate of a task is measured on its own groups, and on those of its kind as a prior; older groups
count less, because the policy changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from etude.rollouts.queue_records import GroupEffort

KIND_PRIOR, TASK_PRIOR = 4.0, 2.0  # rollouts that the mean of all groups, and that of the kind, count as
GROUP_PRIOR = 2.0  # groups that the expectation from a kind's solve rate counts as


def informativeness(rate: float, size: int) -> float:
    """Return the probability that a group of `size` rollouts is neither solved by all nor by none."""
    return 1.0 - rate**size - (1.0 - rate) ** size


@dataclass
class SolveSums:
    """Sums over groups: their rollouts, how many of these were solved, and how many groups were informative."""

    rollouts: float = 0.0
    solved: float = 0.0
    groups: float = 0.0
    informative: float = 0.0

    def add(self, effort: GroupEffort, weight: float) -> None:
        """Add a group, or with a negative weight take it out again."""
        rate = effort.solved or 0.0
        self.rollouts += weight * effort.rollouts
        self.solved += weight * effort.rollouts * rate
        self.groups += weight
        self.informative += weight * (0 < rate < 1)

    def scale(self, factor: float) -> None:
        self.rollouts, self.solved = self.rollouts * factor, self.solved * factor
        self.groups, self.informative = self.groups * factor, self.informative * factor

    def rate(self, prior: float, count: float) -> float:
        """Return the solve rate, with a prior that counts as `count` rollouts."""
        return (self.solved + count * prior) / (self.rollouts + count)


@dataclass
class DecayedSums:
    """Sums over groups that count half after `half_life` policy steps, kept as of the newest step of a group."""

    half_life: float
    step: int = 0
    sums: SolveSums = field(default_factory=SolveSums)

    def add(self, effort: GroupEffort, step: int, weight: float = 1.0) -> None:
        """Add a group that was consumed by `step`, or with a weight of -1 take it out again."""
        if step > self.step:
            self.sums.scale(0.5 ** ((step - self.step) / self.half_life))
            self.step = step
        self.sums.add(effort, weight * 0.5 ** ((self.step - step) / self.half_life))

    def at(self, step: int) -> SolveSums:
        """Return the sums as they are at a later step."""
        found = SolveSums(self.sums.rollouts, self.sums.solved, self.sums.groups, self.sums.informative)
        found.scale(0.5 ** (max(0, step - self.step) / self.half_life))
        return found


@dataclass(frozen=True)
class SolveRates:
    """Expected informativeness of groups of `size` rollouts: of kinds, and of tasks that were sampled before."""

    size: int
    mean: float
    kinds: Mapping[str, float]
    tasks: Mapping[str, float]

    def of_kind(self, kind: str) -> float:
        return self.kinds.get(kind, informativeness(self.mean, self.size))


@dataclass(frozen=True)
class PromptStates:
    """The prompts of a run by what they may be used for next."""

    unused: frozenset[str]
    reusable: tuple[str, ...] = ()  # used before, and may be used again now
    waiting: tuple[str, ...] = ()  # may be used again later, the least recently used first; those never solved last
    resting: frozenset[str] = field(default_factory=frozenset)  # of these: never solved so far
    retired: frozenset[str] = field(default_factory=frozenset)  # always solved
