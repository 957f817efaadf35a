"""The effort penalty on and off: what a solved task costs when looking again is possible, and needless.

The thing asked for is on the first note, or the tool says to wait once or twice before it shows. The expert of the
fine-tuning is of the anxious kind: having seen the note, it looks up to three more times before it answers. Without a
penalty nothing speaks against that. With one, every rollout of a group may be right and the shorter ones are still
better; but whoever answers before the note is there, fails.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from etude.evaluation.plot import Axis, Mark
from etude.harness.session import Budget
from etude.harness.trace import Trace
from etude.model.transformer import Transformer
from etude.rewards.effort import EffortWeights, effort, units
from etude.rl.objective import PolicyGradient
from etude.system.progress import Report
from etude.train.optim import AdamSettings
from etude.train.trainer import Trainer
from studies.study import Finding, Point, counting, curve_panel, last_of, study
from studies.toy_policy import Lockstep, advantages_by_group, copy_of, imitate, reinforce, weigh
from studies.toy_tasks import (
    VALUES,
    Errand,
    Rules,
    demonstrate,
    errand_dialect,
    note,
    play,
    taught_to_recall,
)

WAIT = "wait"
DIALECT = errand_dialect(WAIT)
RULES = Rules(Budget(turns=10, answer=4))
OFF, ON = "no penalty", "penalty"


@dataclass(frozen=True)
class Settings:
    lessons: int = 100
    fine_tuning_steps: int = 250
    demonstrations: int = 64  # per step
    steps: int = 40
    groups: int = 15  # per step; of each number of waits, equally many
    group_size: int = 8
    learning_rate: float = 2e-4
    penalty: float = 0.1  # weight of the effort
    most_waits: int = 2
    most_needless: int = 3


@study("length")
def length(seed: int, report: Report, settings: Settings | None = None) -> Finding:
    """The effort penalty on and off: how many tokens does a solved task cost, and what becomes of success?"""
    s = settings or Settings()
    total = s.fine_tuning_steps + 2 * s.steps
    base = fine_tuned(s, seed, lambda done: report(done, total, "fine-tuning"))
    curves: dict[str, list[Point]] = {}
    for name, weight in ((OFF, 0.0), (ON, s.penalty)):
        before = s.fine_tuning_steps + len(curves) * s.steps
        curves[name] = learn(base, s, weight, seed, told=counting(report, before, total, name))
    errands = errands_of(s.most_waits + 1, random.Random(seed), s)
    shortest = demonstrate(errands, expert(random.Random(seed), 0), DIALECT, RULES)
    return finding(curves, seen_in(errands, shortest)["tokens_per_solved"], s)


# ------------------------------------------------------------------------------------------------- the policy


def errands_of(count: int, luck: random.Random, s: Settings) -> list[Errand]:
    """As many of no wait as of one, and of more."""
    found = []
    for number in range(count):
        seen = note("a", luck.randrange(VALUES))
        found.append(Errand("Find a", [*[WAIT] * (number % (s.most_waits + 1)), seen], seen))
    return found


def expert(luck: random.Random, most_needless: int) -> Callable[[Errand], Callable[[str], str]]:
    """Looks until the note is there, then up to so many times more, then answers."""

    def begin(task: Errand) -> Callable[[str], str]:
        looks = len(task.notes) + luck.randint(0, most_needless)
        return lambda read: task.answer if read.count("<tool>") >= looks else ""

    return begin


def fine_tuned(s: Settings, seed: int, told: Callable[[int], None]) -> Transformer:
    """Imitates the anxious expert."""
    luck = random.Random(seed)
    anxious = expert(luck, s.most_needless)
    trainer = Trainer(taught_to_recall(DIALECT, seed, s.lessons), AdamSettings(2e-3, weight_decay=0.0))
    for step in range(s.fine_tuning_steps):
        shown = demonstrate(errands_of(s.demonstrations, luck, s), anxious, DIALECT, RULES)
        imitate(trainer, [segment for trace in shown for segment in trace.segments], 1 - step / s.fine_tuning_steps)
        told(step + 1)
    return trainer.model


def learn(base: Transformer, s: Settings, weight: float, seed: int, told: Callable[[int], None]) -> list[Point]:
    """Reinforce a copy of the base; what its rollouts were like at every step."""
    trainer, luck = Trainer(copy_of(base), AdamSettings(s.learning_rate, weight_decay=0.0)), random.Random(seed)
    policy = Lockstep(base)
    points = []
    for step in range(s.steps):
        policy.follow(trainer.model, step)
        errands = [task for task in errands_of(s.groups, luck, s) for _ in range(s.group_size)]
        traces = play(errands, policy, DIALECT, RULES, (seed * s.steps + step) * len(errands))
        points.append(seen_in(errands, traces))
        rewards = [reward(task, trace, weight) for task, trace in zip(errands, traces, strict=True)]
        found = zip(traces, advantages_by_group(rewards, s.group_size), strict=True)
        pieces = [piece for trace, advantage in found for piece in weigh(trace.segments, advantage)]
        reinforce(trainer, pieces, PolicyGradient())
        told(step + 1)
    return points


def reward(task: Errand, trace: Trace, weight: float) -> float:
    """Right or not, less the weighted effort: the same curve and the same weights as in a run."""
    weights = EffortWeights()
    return float(trace.final == task.answer) - weight * effort(units(trace.cost, weights), weights.k, weights.q)


def seen_in(errands: Sequence[Errand], traces: Sequence[Trace]) -> Point:
    solved = [trace.final == task.answer for task, trace in zip(errands, traces, strict=True)]
    needless = [max(0, trace.cost.calls - len(task.notes)) for task, trace in zip(errands, traces, strict=True)]
    used = sum(trace.cost.made + trace.cost.output for trace in traces)
    return {
        "success": float(np.mean(solved)),
        "tokens_per_solved": used / max(1, sum(solved)),
        "needless_looks": float(np.mean(needless)),
        "turns": float(np.mean([trace.cost.turns for trace in traces])),
        "effort": float(np.mean([effort(units(trace.cost, EffortWeights())) for trace in traces])),
    }


# ------------------------------------------------------------------------------------------------- the picture


def finding(curves: Mapping[str, Sequence[Point]], least: float, s: Settings) -> Finding:
    start = curves[OFF][0]
    off, on = last_of(curves[OFF]), last_of(curves[ON])
    cost = curve_panel("Cost", Axis("tokens per solved task", low=0), curves, "tokens_per_solved")
    return Finding(
        title="The effort penalty",
        conclusion=(
            f"From {start['tokens_per_solved']:.1f} tokens per solved task, {s.steps} steps lead to "
            f"{off['tokens_per_solved']:.1f} without the penalty and to {on['tokens_per_solved']:.1f} with a weight of "
            f"{s.penalty:g} (the least that solves is {least:.1f}), at {off['success']:.1%} and {on['success']:.1%} "
            f"success; needless looks per task go from {start['needless_looks']:.2f} to {off['needless_looks']:.2f} "
            f"and to {on['needless_looks']:.2f}."
        ),
        columns=("", "tokens per solved task", "success", "needless looks", "turns", "effort"),
        rows=[_row("before", start), _row(OFF, off), _row(ON, on)],
        panels=[
            replace(cost, marks=[Mark(least, "the least that solves", across="y", below=True)]),
            curve_panel("Success", Axis("tasks solved", low=0, high=1, percent=True), curves, "success"),
            curve_panel("Habits", Axis("needless looks per task", low=0), curves, "needless_looks"),
        ],
        data={"curves": curves, "least_tokens_per_solved": least},
        settings=s,
    )


def _row(name: str, point: Point) -> tuple[str, ...]:
    tokens, success, needless = point["tokens_per_solved"], point["success"], point["needless_looks"]
    return name, f"{tokens:.1f}", f"{success:.1%}", f"{needless:.2f}", f"{point['turns']:.2f}", f"{point['effort']:.2f}"
