"""The effort penalty on and off: the cost of a solved task when further tool calls are possible and useless.

The requested thing is on the first note, or the tool answers `wait` once or twice before it. The demonstrator of the
fine-tuning calls the tool up to three more times after it has seen the note. Without a penalty nothing discourages
that. With one, all rollouts of a group may be right and the shorter ones still score higher; a rollout that answers
before it has seen the note fails.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from etude.evaluation.plot import Axis, Mark
from etude.harness.budget import Budget
from etude.harness.trace import Trace
from etude.model.transformer import Transformer
from etude.rewards.effort import EffortSettings, effort, effort_units
from etude.rl.objective import PolicyGradient
from etude.system.progress import ProgressCallback
from etude.train.optim import AdamSettings
from etude.train.trainer import Trainer
from studies.study import Point, StudyResult, curve_panel, final_mean, offset_progress, study
from studies.toy_policy import (
    LockstepPolicy,
    advantages_by_group,
    copy_model,
    rl_step,
    sft_step,
    training_sequences,
)
from studies.toy_tasks import (
    VALUES,
    ToySessionSettings,
    ToyTask,
    note,
    pretrain_recall,
    run_demonstrations,
    run_sessions,
    toy_task_dialect,
)

WAIT = "wait"
DIALECT = toy_task_dialect(WAIT)
SESSION = ToySessionSettings(Budget(turns=10, max_turn_tokens=4))
OFF, ON = "no penalty", "penalty"


@dataclass(frozen=True)
class LengthSettings:
    pretraining_steps: int = 100
    fine_tuning_steps: int = 250
    demonstrations: int = 64  # per step
    steps: int = 40
    groups: int = 15  # per step; equally many for each number of waits
    group_size: int = 8
    learning_rate: float = 2e-4
    penalty: float = 0.1  # weight of the effort
    max_waits: int = 2
    max_needless: int = 3


@study("length")
def length(seed: int, progress: ProgressCallback, settings: LengthSettings | None = None) -> StudyResult:
    """The effort penalty on and off: how many tokens does a solved task cost, and what becomes of success?"""
    s = settings or LengthSettings()
    total = s.fine_tuning_steps + 2 * s.steps
    base = fine_tune(s, seed, lambda done: progress(done, total, "fine-tuning"))
    curves: dict[str, list[Point]] = {}
    for name, weight in ((OFF, 0.0), (ON, s.penalty)):
        before = s.fine_tuning_steps + len(curves) * s.steps
        curves[name] = train(base, s, weight, seed, offset_progress(progress, before, total, name))
    tasks = draw_tasks(s.max_waits + 1, random.Random(seed), s)
    shortest = run_demonstrations(tasks, demonstrator(random.Random(seed), 0), DIALECT, SESSION)
    return build_result(curves, measure(tasks, shortest)["tokens_per_solved"], s)


# ------------------------------------------------------------------------------------------------- policy


def draw_tasks(count: int, rng: random.Random, s: LengthSettings) -> list[ToyTask]:
    """Draw tasks; the number of waits cycles from 0 to `max_waits`."""
    tasks = []
    for number in range(count):
        shown = note("a", rng.randrange(VALUES))
        tasks.append(ToyTask("Find a", [*[WAIT] * (number % (s.max_waits + 1)), shown], shown))
    return tasks


def demonstrator(rng: random.Random, max_needless: int) -> Callable[[ToyTask], Callable[[str], str]]:
    """Return a demonstrator that looks until it has the note, then up to `max_needless` times more, then answers."""

    def begin(task: ToyTask) -> Callable[[str], str]:
        looks = len(task.notes) + rng.randint(0, max_needless)
        return lambda context: task.answer if context.count("<tool>") >= looks else ""

    return begin


def fine_tune(s: LengthSettings, seed: int, progress: Callable[[int], None]) -> Transformer:
    """Return a policy that imitates the demonstrator with needless looks."""
    rng = random.Random(seed)
    needless = demonstrator(rng, s.max_needless)
    trainer = Trainer(pretrain_recall(DIALECT, seed, s.pretraining_steps), AdamSettings(2e-3, weight_decay=0.0))
    for step in range(s.fine_tuning_steps):
        traces = run_demonstrations(draw_tasks(s.demonstrations, rng, s), needless, DIALECT, SESSION)
        sft_step(trainer, [segment for trace in traces for segment in trace.segments], 1 - step / s.fine_tuning_steps)
        progress(step + 1)
    return trainer.model


def train(
    base: Transformer, s: LengthSettings, weight: float, seed: int, progress: Callable[[int], None]
) -> list[Point]:
    """Train a copy of the base by RL; return the measurements of each step's rollouts."""
    trainer, rng = Trainer(copy_model(base), AdamSettings(s.learning_rate, weight_decay=0.0)), random.Random(seed)
    policy = LockstepPolicy(base)
    points = []
    for step in range(s.steps):
        policy.load_model(trainer.model, step)
        tasks = [task for task in draw_tasks(s.groups, rng, s) for _ in range(s.group_size)]
        traces = run_sessions(tasks, policy, DIALECT, SESSION, (seed * s.steps + step) * len(tasks))
        points.append(measure(tasks, traces))
        rewards = [reward(task, trace, weight) for task, trace in zip(tasks, traces, strict=True)]
        scored = zip(traces, advantages_by_group(rewards, s.group_size), strict=True)
        sequences = [each for trace, advantage in scored for each in training_sequences(trace.segments, advantage)]
        rl_step(trainer, sequences, PolicyGradient())
        progress(step + 1)
    return points


def reward(task: ToyTask, trace: Trace, weight: float) -> float:
    """Return 1 for a right answer, less the weighted effort, with the curve and the weights of a run."""
    weights = EffortSettings()
    return float(trace.final == task.answer) - weight * effort(effort_units(trace.cost, weights), weights.k, weights.q)


def measure(tasks: Sequence[ToyTask], traces: Sequence[Trace]) -> Point:
    solved = [trace.final == task.answer for task, trace in zip(tasks, traces, strict=True)]
    needless = [max(0, trace.cost.calls - len(task.notes)) for task, trace in zip(tasks, traces, strict=True)]
    tokens = sum(trace.cost.sampled + trace.cost.output for trace in traces)
    return {
        "success": float(np.mean(solved)),
        "tokens_per_solved": tokens / max(1, sum(solved)),
        "needless_looks": float(np.mean(needless)),
        "turns": float(np.mean([trace.cost.turns for trace in traces])),
        "effort": float(np.mean([effort(effort_units(trace.cost, EffortSettings())) for trace in traces])),
    }


# ------------------------------------------------------------------------------------------------- plot


def build_result(curves: Mapping[str, Sequence[Point]], least: float, s: LengthSettings) -> StudyResult:
    start = curves[OFF][0]
    off, on = final_mean(curves[OFF]), final_mean(curves[ON])
    cost = curve_panel("Cost", Axis("tokens per solved task", low=0), curves, "tokens_per_solved")
    return StudyResult(
        title="The effort penalty",
        conclusion=(
            f"From {start['tokens_per_solved']:.1f} tokens per solved task, {s.steps} steps lead to "
            f"{off['tokens_per_solved']:.1f} without the penalty and to {on['tokens_per_solved']:.1f} with a weight of "
            f"{s.penalty:g} (the minimum is {least:.1f}), at {off['success']:.1%} and {on['success']:.1%} "
            f"success; needless looks per task go from {start['needless_looks']:.2f} to {off['needless_looks']:.2f} "
            f"and to {on['needless_looks']:.2f}."
        ),
        columns=("", "tokens per solved task", "success", "needless looks", "turns", "effort"),
        rows=[_row("before", start), _row(OFF, off), _row(ON, on)],
        panels=[
            replace(cost, marks=[Mark(least, "minimum", across="y", below=True)]),
            curve_panel("Success", Axis("tasks solved", low=0, high=1, percent=True), curves, "success"),
            curve_panel("Needless tool calls", Axis("needless looks per task", low=0), curves, "needless_looks"),
        ],
        data={"curves": curves, "least_tokens_per_solved": least},
        settings=s,
    )


def _row(name: str, point: Point) -> tuple[str, ...]:
    tokens, success, needless = point["tokens_per_solved"], point["success"], point["needless_looks"]
    return name, f"{tokens:.1f}", f"{success:.1%}", f"{needless:.2f}", f"{point['turns']:.2f}", f"{point['effort']:.2f}"


if __name__ == "__main__":
    from studies.cli import main

    main("length")
