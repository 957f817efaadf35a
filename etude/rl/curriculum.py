"""Curriculum: the order in which prompts are sampled, and their expected duration. Every prompt is used once.

The order is a seeded shuffle. Late in training, prompts of hard kinds are moved forward: a kind is what tasks share
(category, family, difficulty), and it is hard if its rollouts took more turns and more thinking than the average and
solved it sometimes. There is no state here: every choice is a function of the seed and the rollout queue, so a
restarted run continues as it would have.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import accumulate
from statistics import fmean
from typing import Annotated, Any, Self

from pydantic import Field, JsonValue, model_validator

from etude.config import Registry, Settings, check_options, registered
from etude.errors import InputError
from etude.rollouts.queue import GroupEffort, RolloutQueue
from etude.tasks.task import Task

MIN_ROLLOUTS = 8  # of a kind before its hardness is known


@dataclass(frozen=True)
class KindStatistics:
    """Mean effort and success of the rollouts of a kind so far."""

    rollouts: int
    effort: float  # turns and thinking tokens, each relative to the mean of all rollouts
    solved: float
    seconds: float | None  # of the slowest rollout of a group


def kind_of(task: Task) -> str:
    """Return the kind of a task: its category, family and difficulty."""
    parts = (task.metadata.get(name) for name in ("category", "family", "difficulty"))
    return "/".join(str(part) for part in parts if part not in (None, "")) or "any"


@dataclass(frozen=True)
class PromptChoice:
    """What a prompt order chooses from: the unused prompts, and what is known about their kinds."""

    unused: Mapping[str, tuple[str, ...]]  # by kind, in the seed's order
    kinds: Mapping[str, KindStatistics]  # of the rollouts so far
    progress: float  # fraction of the run's steps taken
    used: int  # prompts so far
    seed: int


# Functions of a choice and of the number of prompts wanted that return prompts in the order to use, at most that many;
# options are keyword-only parameters.
PROMPT_ORDERS = Registry[Callable[..., Iterable[str]]]("prompt order")
prompt_order = PROMPT_ORDERS.add  # decorator


@prompt_order
def hard_kinds_late(choice: PromptChoice, count: int, *, hard_after: float, hard_weight: float) -> Iterator[str]:
    """Draw a kind in proportion to its unused prompts times its weight, then take its first unused prompt.

    With equal weights this is a shuffle. Late in training hard kinds have a larger weight.
    """
    late = hard_weight > 0 and choice.progress >= hard_after
    weights = hard_weights(choice.kinds, hard_weight) if late else {}
    left = {kind: list(reversed(prompts)) for kind, prompts in choice.unused.items()}  # the next one last
    for number in range(choice.used, choice.used + min(count, sum(map(len, left.values())))):
        kind = _draw({kind: len(tasks) * weights.get(kind, 1.0) for kind, tasks in left.items()}, choice.seed, number)
        yield left[kind].pop()
        if not left[kind]:
            del left[kind]


class CurriculumSettings(Settings):
    """The order of prompts; by default, when prompts of hard kinds are preferred and by how much."""

    order: Annotated[str, registered(PROMPT_ORDERS)] = Field(
        default="hard_kinds_late", description="order of the prompts: hard_kinds_late, or one of a plugin"
    )
    options: dict[str, JsonValue] = Field(default={}, description="options of an order of a plugin")
    hard_after: float = Field(
        default=0.6,
        ge=0,
        le=1,
        description="fraction of the steps after which hard kinds of task are sampled more often",
    )
    hard_weight: float = Field(
        default=1.0, ge=0, description="a kind with twice the mean effort is sampled 1 + hard_weight times as often"
    )

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        for key in ("hard_after", "hard_weight"):
            if self.order != "hard_kinds_late" and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} would not be used: the order is {self.order}")
        check_options("options", PROMPT_ORDERS[self.order], self.order_options)
        return self

    @property
    def order_options(self) -> dict[str, Any]:
        """The keyword arguments of the order."""
        if self.order != "hard_kinds_late":
            return self.options
        return {**self.options, "hard_after": self.hard_after, "hard_weight": self.hard_weight}


@dataclass(frozen=True)
class PromptDraw:
    """Prompts with their expected seconds, as `RolloutQueue.add` takes them."""

    prompts: tuple[tuple[str, float], ...]
    wanted: int

    @property
    def missing(self) -> int:
        """How many of the wanted prompts do not exist: every task was used."""
        return self.wanted - len(self.prompts)


@dataclass(frozen=True)
class Curriculum:
    """The order of prompts. `tasks` maps each to its kind."""

    tasks: Mapping[str, str]
    seed: int = 0
    settings: CurriculumSettings = field(default_factory=CurriculumSettings)

    def __post_init__(self) -> None:
        if not self.tasks:
            raise InputError("curriculum: there are no tasks to train on")

    def next(self, queue: RolloutQueue, count: int, progress: float) -> PromptDraw:
        """Return the next prompts, at most `count`. `progress` is the fraction of the run's steps taken."""
        unused = self.tasks.keys() - set(queue.tasks())
        by_kind: defaultdict[str, list[str]] = defaultdict(list)
        for name in sorted(unused, key=lambda name: _shuffle_key(self.seed, name)):
            by_kind[self.tasks[name]].append(name)
        kinds = summarise_kinds(queue.efforts(), self.tasks)
        left = {kind: tuple(names) for kind, names in sorted(by_kind.items())}
        choice = PromptChoice(left, kinds, progress, len(self.tasks) - len(unused), self.seed)
        order = PROMPT_ORDERS[self.settings.order]
        chosen = list(order(choice, count, **self.settings.order_options))
        if len(chosen) > count or len(set(chosen) & unused) != len(chosen):
            raise InputError(f"rl.curriculum.order {self.settings.order} must choose at most {count} unused prompts")
        return PromptDraw(tuple((name, expected_seconds(kinds, self.tasks[name])) for name in chosen), count)

    def exhausted(self, queue: RolloutQueue) -> str:
        """Return why there can be no further step; "" while there can."""
        groups, outstanding = queue.progress(), queue.outstanding()
        left = len(self.tasks.keys() - {group.task for group in groups}) + outstanding
        if left >= queue.settings.groups_per_step:
            return ""
        dropped = sum(bool(group.dropped) for group in groups)
        return (
            f"the prompts are exhausted: of {len(self.tasks)} tasks {len(groups) - dropped - outstanding} were trained "
            f"on and {dropped} dropped; the {left} left do not fill a step of {queue.settings.groups_per_step}"
        )


# ------------------------------------------------------------------------------------------- statistics of kinds


def summarise_kinds(efforts: Sequence[GroupEffort], tasks: Mapping[str, str]) -> dict[str, KindStatistics]:
    """Return the statistics of each kind; groups are weighted by their rollouts."""
    known = [effort for effort in efforts if effort.task in tasks and effort.turns is not None]
    of_kind: defaultdict[str, list[GroupEffort]] = defaultdict(list)
    for effort in known:
        of_kind[tasks[effort.task]].append(effort)
    turns, thinking = _mean(known, "turns"), _mean(known, "thinking")
    kinds = {}
    for name, found in of_kind.items():
        # A model that never thinks has mean 0, and no relative effort.
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
    """Return the weights of hard kinds: from 1 at the mean effort to 1 + `hard_weight` at twice that or more.

    A kind that is never or always solved has no gradient: its weight stays 1.
    """
    return {
        name: 1.0 + hard_weight * min(1.0, max(0.0, kind.effort - 1.0))
        for name, kind in kinds.items()
        if kind.rollouts >= MIN_ROLLOUTS and 0 < kind.solved < 1
    }


def expected_seconds(kinds: Mapping[str, KindStatistics], name: str) -> float:
    """Return the expected seconds of a group of this kind; the mean of the others if the kind is unknown."""
    known = kinds.get(name)
    if known is not None and known.seconds is not None:
        return known.seconds
    others = [kind.seconds for kind in kinds.values() if kind.seconds is not None]
    return fmean(others) if others else 0.0


def _mean(efforts: Sequence[GroupEffort], part: str) -> float:
    known = [(getattr(effort, part), effort.rollouts) for effort in efforts if getattr(effort, part) is not None]
    return float(sum(value * rollouts for value, rollouts in known)) / max(1, sum(rollouts for _, rollouts in known))


# ------------------------------------------------------------------------------------------- random draws


def _shuffle_key(seed: int, name: str) -> bytes:
    """Return a task's sort key. It does not depend on other tasks, so adding some keeps the order of the rest."""
    return sha256(f"{seed}/task/{name}".encode()).digest()


def _draw(weights: Mapping[str, float], seed: int, number: int) -> str:
    """Draw a name in proportion to its weight. The draw is a function of the seed and the number of prompts used."""
    uniform = int.from_bytes(sha256(f"{seed}/draw/{number}".encode()).digest()[:8], "big") / 2**64
    ends = list(accumulate(weights.values()))
    return list(weights)[min(bisect_right(ends, uniform * ends[-1]), len(ends) - 1)]
