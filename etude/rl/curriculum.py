"""Curriculum: the order in which prompts are sampled, and their expected duration.

By default the order is a seeded shuffle, and every prompt is used once. Late in training, prompts of hard kinds are
moved forward: a kind is what tasks share (category, family, difficulty), and it is hard if its rollouts took more turns
and more thinking than the average and solved it sometimes. The order `solve_rate` draws prompts by how informative
their groups are expected to be (`solve_rate.py`), and may use them again. Every choice is a function of the seed and
the rollout queue, of which `prompt_history.py` keeps the sums, so a restarted run continues as it would have.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import accumulate
from statistics import fmean
from typing import Annotated, Any, Self, TypeVar

from pydantic import Field, JsonValue, model_validator

from etude.config import Registry, Settings, check_options, registered
from etude.errors import InputError
from etude.rl.prompt_history import KindStatistics, PromptHistory, PromptRules
from etude.rl.solve_rate import PromptStates, SolveRates
from etude.rollouts.queue_client import AnyQueue
from etude.tasks.task import Task

NameT = TypeVar("NameT")
MIN_ROLLOUTS = 8  # of a kind before its hardness is known


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
    used: int  # groups so far
    seed: int
    reusable: tuple[str, ...] = ()  # prompts that were used and may be used again
    rates: SolveRates | None = None  # expected informativeness; None: the order does not ask for it


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


@prompt_order
def solve_rate(choice: PromptChoice, count: int, *, floor: float) -> Iterator[str]:
    """Draw prompts in proportion to how informative their groups are expected to be, at least `floor`."""
    assert choice.rates is not None
    left = {kind: list(reversed(prompts)) for kind, prompts in choice.unused.items()}
    own = {task: max(floor, choice.rates.tasks.get(task, 0.0)) for task in choice.reusable}
    for number in range(choice.used, choice.used + min(count, len(own) + sum(map(len, left.values())))):
        weights = {("kind", kind): len(left[kind]) * max(floor, choice.rates.of_kind(kind)) for kind in left}
        weights |= {("task", task): weight for task, weight in own.items()}
        what, name = _draw(weights, choice.seed, number)
        if what == "task":
            del own[name]
            yield name
            continue
        yield left[name].pop()
        if not left[name]:
            del left[name]


ORDER_KEYS = {
    "hard_kinds_late": ("hard_after", "hard_weight"),
    "solve_rate": ("floor", "half_life", "reuse", "rest_steps", "unsolved_rest_steps", "retire_after", "siblings"),
}


class CurriculumSettings(Settings):
    """The order of prompts: when hard kinds are preferred, or how solve rates choose."""

    order: Annotated[str, registered(PROMPT_ORDERS)] = Field(
        default="hard_kinds_late", description="order of the prompts: hard_kinds_late, solve_rate, or one of a plugin"
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

    floor: float = Field(
        default=0.05, gt=0, le=1, description="solve_rate: least weight of a prompt, whatever is expected of its group"
    )
    half_life: float = Field(
        default=8.0, gt=0, description="solve_rate: policy steps after which a group counts half in the solve rates"
    )
    reuse: int = Field(default=1, ge=1, description="solve_rate: groups of one prompt in a run, at most")
    rest_steps: int = Field(default=8, ge=1, description="solve_rate: policy steps before a prompt is used again")
    unsolved_rest_steps: int = Field(
        default=32, ge=1, description="solve_rate: the same for a prompt that no rollout has solved so far"
    )
    retire_after: int = Field(
        default=2, ge=1, description="solve_rate: a prompt solved by all rollouts of this many groups is not used again"
    )

    siblings: str = Field(
        default="",
        description="solve_rate: task source that makes harder siblings of retired tasks during the run; default: none",
    )

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        for order, keys in ORDER_KEYS.items():
            for key in keys:
                if self.order != order and getattr(self, key) != type(self).model_fields[key].default:
                    raise ValueError(f"{key} would not be used: the order is {self.order}")
        check_options("options", PROMPT_ORDERS[self.order], self.order_options)
        return self

    @property
    def order_options(self) -> dict[str, Any]:
        """The keyword arguments of the order."""
        if self.order == "solve_rate":
            return {**self.options, "floor": self.floor}
        if self.order != "hard_kinds_late":
            return self.options
        return {**self.options, "hard_after": self.hard_after, "hard_weight": self.hard_weight}


@dataclass(frozen=True)
class PromptDraw:
    """Prompts with their expected seconds, as `RolloutQueue.add` takes them."""

    prompts: tuple[tuple[str, float], ...]
    wanted: int
    waiting: int = 0  # prompts that may be used again later

    @property
    def missing(self) -> int:
        """How many of the wanted prompts do not exist: every task was used."""
        return self.wanted - len(self.prompts)


@dataclass
class Curriculum:
    """The order of prompts of one run. `tasks` maps each to its kind."""

    tasks: Mapping[str, str]
    seed: int = 0
    settings: CurriculumSettings = field(default_factory=CurriculumSettings)

    def __post_init__(self) -> None:
        self.set_tasks(self.tasks)

    def change(self, settings: CurriculumSettings) -> None:
        """Choose by other settings from now on."""
        self.settings = settings
        self.set_tasks(self.tasks)

    def set_tasks(self, tasks: Mapping[str, str]) -> None:
        """Choose from these tasks from now on."""
        if not tasks:
            raise InputError("curriculum: there are no tasks to train on")
        self.tasks = tasks
        self.history = PromptHistory(self.tasks, self.settings.half_life)
        self._shuffled = sorted(self.tasks, key=lambda name: _shuffle_key(self.seed, name))

    def next(self, queue: AnyQueue, count: int, progress: float) -> PromptDraw:
        """Return the next prompts, at most `count`. `progress` is the fraction of the run's steps taken."""
        states, figures = self.states(queue), queue.state()
        kinds = self.history.kind_statistics()
        by_kind: defaultdict[str, list[str]] = defaultdict(list)
        for name in self._shuffled:
            if name in states.unused:
                by_kind[self.tasks[name]].append(name)
        reusable = states.reusable
        # Rather than to stop, use a prompt again early: first the one that was not used for longest.
        few = queue.settings.groups_per_step - figures.outstanding - len(states.unused) - len(reusable)
        reusable += states.waiting[: max(0, few)]
        choice = PromptChoice(
            {kind: tuple(names) for kind, names in sorted(by_kind.items())},
            kinds,
            progress,
            len(self.history.groups),
            self.seed,
            reusable,
            self.history.rates(queue.settings.group_size, figures.last_step, reusable),
        )
        chosen = list(PROMPT_ORDERS[self.settings.order](choice, count, **self.settings.order_options))
        if len(chosen) > count or len(set(chosen) & {*states.unused, *reusable}) != len(chosen):
            raise InputError(f"rl.curriculum.order {self.settings.order} must choose at most {count} unused prompts")
        prompts = tuple((name, expected_seconds(kinds, self.tasks[name])) for name in chosen)
        return PromptDraw(prompts, count, len(states.waiting))

    def states(self, queue: AnyQueue) -> PromptStates:
        """Return what each prompt may be used for next."""
        self.history.refresh(queue)
        settings = self.settings
        rules = PromptRules(settings.reuse, settings.rest_steps, settings.unsolved_rest_steps, settings.retire_after)
        return self.history.states(queue.last_step(), rules)

    def facts(self, queue: AnyQueue) -> dict[str, int]:
        """Return how many prompts are retired, rest and are unused, if solve rates choose them."""
        if self.settings.order != "solve_rate":
            return {}
        states = self.states(queue)
        counts = {"prompts": self.tasks, "retired": states.retired, "resting": states.resting, "unused": states.unused}
        return {f"curriculum/{name}": len(prompts) for name, prompts in counts.items()}

    def exhausted(self, queue: AnyQueue) -> str:
        """Return why there can be no further step; "" while there can."""
        states, outstanding = self.states(queue), queue.outstanding()
        left = len(states.unused) + len(states.reusable) + len(states.waiting) + outstanding
        if left >= queue.settings.groups_per_step:
            return ""
        alike, (ended, dropped) = queue.alike_groups(), self.history.ended()
        return (
            f"the prompts are exhausted: of {len(self.tasks)} tasks {ended - dropped} were trained on, "
            f"{alike} had rewards without a difference, and {dropped} were dropped; the {left} left do not fill a step "
            f"of {queue.settings.groups_per_step}. Give more tasks or fewer steps"
            + ("; or start from a model that solves some of them, which SFT may give" if alike else "")
        )


# ------------------------------------------------------------------------------------------- statistics of kinds


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


# ------------------------------------------------------------------------------------------- random draws


def _shuffle_key(seed: int, name: str) -> bytes:
    """Return a task's sort key. It does not depend on other tasks, so adding some keeps the order of the rest."""
    return sha256(f"{seed}/task/{name}".encode()).digest()


def _draw(weights: Mapping[NameT, float], seed: int, number: int) -> NameT:
    """Draw a name in proportion to its weight. The draw is a function of the seed and the number of prompts used."""
    uniform = int.from_bytes(sha256(f"{seed}/draw/{number}".encode()).digest()[:8], "big") / 2**64
    ends = list(accumulate(weights.values()))
    return list(weights)[min(bisect_right(ends, uniform * ends[-1]), len(ends) - 1)]
