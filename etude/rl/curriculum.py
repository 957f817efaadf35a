"""Which prompts come next, and how long they will take. One epoch: a prompt has one turn, and the slots' table knows
which have had theirs.

The order is a seeded shuffle. Late in training prompts of hard kinds come earlier than their place in it: a kind is
what tasks share (category, family, difficulty), and it is hard when its rollouts took more turns and more thinking
than the average one, and solved it sometimes. There is no state here: every choice is a function of the seed and the
table, so a run that is restarted goes on as it would have.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import accumulate
from statistics import fmean

from pydantic import Field

from etude.config import Settings
from etude.errors import InputError
from etude.rollouts.queue import GroupEffort, RolloutQueue
from etude.tasks.task import Task

LEAST = 8  # rollouts of a kind before anything is said of it


def kind_of(task: Task) -> str:
    """What a task has in common with others that are about as hard."""
    parts = (task.metadata.get(name) for name in ("category", "family", "difficulty"))
    return "/".join(str(part) for part in parts if part not in (None, "")) or "any"


class CurriculumSettings(Settings):
    """Which prompts are sampled when."""

    hard_after: float = Field(
        default=0.6, ge=0, le=1, description="fraction of the steps after which hard kinds are sampled more often"
    )
    hard_weight: float = Field(
        default=1.0, ge=0, description="a kind of twice the mean effort is sampled 1 + this times as often"
    )


@dataclass(frozen=True)
class KindStatistics:
    """What rollouts of a kind took so far."""

    rollouts: int
    effort: float  # turns and thinking tokens, each against the mean of all rollouts
    solved: float
    seconds: float | None  # of a group: its slowest rollout


@dataclass(frozen=True)
class PromptDraw:
    """Prompts to begin, each with its expected seconds, as `RolloutQueue.add` takes them."""

    prompts: tuple[tuple[str, float], ...]
    wanted: int

    @property
    def missing(self) -> int:
        """Prompts that were wanted and are not there: every task has had its turn."""
        return self.wanted - len(self.prompts)


@dataclass(frozen=True)
class Curriculum:
    """The order of prompts. `tasks` gives each its kind; `hard_after` is a share of the run's steps."""

    tasks: Mapping[str, str]
    seed: int = 0
    settings: CurriculumSettings = field(default_factory=CurriculumSettings)

    def __post_init__(self) -> None:
        if not self.tasks:
            raise InputError("curriculum: there are no tasks to train on")

    def next(self, slots: RolloutQueue, count: int, done: float) -> PromptDraw:
        """The next prompts, at most so many, when this share of the run's steps is done.

        With equal weights it is a shuffle: a kind by how many are left of it, then the first of that kind in the seed's
        order.
        """
        left = self._left(set(slots.tasks()))
        kinds = summarise_kinds(slots.efforts(), self.tasks)
        late = self.settings.hard_weight > 0 and done >= self.settings.hard_after
        weights = hard_weights(kinds, self.settings.hard_weight) if late else {}
        begun = len(self.tasks) - sum(map(len, left.values()))
        prompts = []
        for number in range(begun, min(begun + count, len(self.tasks))):
            kind = _pick({kind: len(tasks) * weights.get(kind, 1.0) for kind, tasks in left.items()}, self.seed, number)
            prompts.append((left[kind].pop(), expected_seconds(kinds, kind)))
            if not left[kind]:
                del left[kind]
        return PromptDraw(tuple(prompts), count)

    def _left(self, used: set[str]) -> dict[str, list[str]]:
        """Prompts that had no turn yet, by kind, the next one last."""
        left: defaultdict[str, list[str]] = defaultdict(list)
        for name in sorted(self.tasks.keys() - used, key=lambda name: _place(self.seed, name), reverse=True):
            left[self.tasks[name]].append(name)
        return dict(sorted(left.items()))

    def exhausted(self, slots: RolloutQueue) -> str:
        """Why there can be no further step; nothing while there can."""
        standings = slots.progress()
        left = len(self.tasks.keys() - {standing.task for standing in standings})
        going = sum(standing.step is None and not standing.dropped for standing in standings)
        if left + going >= slots.settings.groups_per_step:
            return ""
        fates = Counter("dropped" if s.dropped else "trained" for s in standings if s.dropped or s.step is not None)
        return (
            f"the prompts have run out: of {len(self.tasks)} tasks {fates['trained']} were trained on, "
            f"{fates['dropped']} dropped, and the {left + going} left make no step of {slots.settings.groups_per_step}"
        )


# ------------------------------------------------------------------------------------------- what rollouts took


def summarise_kinds(efforts: Sequence[GroupEffort], tasks: Mapping[str, str]) -> dict[str, KindStatistics]:
    """What is known of each kind; groups weigh by their rollouts."""
    known = [effort for effort in efforts if effort.task in tasks and effort.turns is not None]
    of_kind: defaultdict[str, list[GroupEffort]] = defaultdict(list)
    for effort in known:
        of_kind[tasks[effort.task]].append(effort)
    turns, thinking = _mean(known, "turns"), _mean(known, "thinking")
    kinds = {}
    for name, found in of_kind.items():
        # a model that never thinks has no mean to be measured against
        shares = [_mean(found, part) / whole for part, whole in (("turns", turns), ("thinking", thinking)) if whole]
        slowest = [effort.seconds for effort in found if effort.seconds is not None]
        kinds[name] = KindStatistics(
            sum(effort.rollouts for effort in found),
            fmean(shares) if shares else 1.0,
            _mean(found, "solved"),
            fmean(slowest) if slowest else None,
        )
    return kinds


def hard_weights(kinds: Mapping[str, KindStatistics], hard_weight: float) -> dict[str, float]:
    """How much more often hard kinds come: up to 1 + `hard_weight` times, from the mean effort to twice that.

    A kind that is never solved teaches nothing yet, and one that always is nothing any more: both stay as they are.
    """
    return {
        name: 1.0 + hard_weight * min(1.0, max(0.0, kind.effort - 1.0))
        for name, kind in kinds.items()
        if kind.rollouts >= LEAST and 0 < kind.solved < 1
    }


def expected_seconds(kinds: Mapping[str, KindStatistics], name: str) -> float:
    """How long a group of this kind takes; of one never seen, as long as the others."""
    known = kinds.get(name)
    if known is not None and known.seconds is not None:
        return known.seconds
    others = [kind.seconds for kind in kinds.values() if kind.seconds is not None]
    return fmean(others) if others else 0.0


def _mean(efforts: Sequence[GroupEffort], part: str) -> float:
    said = [(getattr(effort, part), effort.rollouts) for effort in efforts if getattr(effort, part) is not None]
    return float(sum(value * rollouts for value, rollouts in said)) / max(1, sum(rollouts for _, rollouts in said))


# ------------------------------------------------------------------------------------------- chance


def _place(seed: int, name: str) -> bytes:
    """A task's place in the shuffle; no other task has a part in it, so adding some moves none."""
    return sha256(f"{seed}/task/{name}".encode()).digest()


def _pick(weights: Mapping[str, float], seed: int, number: int) -> str:
    """One of them by weight: always the same one after the same number of prompts."""
    chance = int.from_bytes(sha256(f"{seed}/draw/{number}".encode()).digest()[:8], "big") / 2**64
    ends = list(accumulate(weights.values()))
    return list(weights)[min(bisect_right(ends, chance * ends[-1]), len(ends) - 1)]
