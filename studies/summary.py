"""Self-summaries trained by the final reward, against untrained ones, on tasks longer than a segment may be.

Five notes are read one by one. A segment has room for two; then it is summarized and the work continues from the
summary. The answer needs one requested thing from the first two notes and the thing of the last note. Demonstrations
for the fine-tuning have summaries of the right form that keep a random note, so that the policy knows the form and not
what to keep. Three arms follow: self-summary with the final reward on every token of the chain; the same with zero
advantage on summary tokens; and compaction by the long prompt, sampled in a separate segment that is not trained.
"""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from etude.evaluation.plot import Axis
from etude.harness.budget import Budget
from etude.harness.summary import COMPACTION_PROMPT, SUMMARY_PROMPT, SummaryMode, SummarySettings
from etude.harness.trace import Trace
from etude.model.transformer import Transformer
from etude.rl.objective import PolicyGradient
from etude.rl.packing import TrainingSequence
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
    THINGS,
    UNKNOWN,
    VALUES,
    ToySessionSettings,
    ToyTask,
    note,
    pretrain_recall,
    run_demonstrations,
    run_sessions,
    toy_task_dialect,
)

FIRST, LAST = THINGS[0], THINGS[-1]  # the requested things
REQUEST, AND = f"Find {FIRST} and {LAST}", ", "
DIALECT = toy_task_dialect(REQUEST, AND)
NOTE = re.compile(r"([a-f]) is (\d)")
TRAINED, MASKED, COMPACTED = "self-summary", "self-summary, untrained", "prompt compaction"
MODES: Mapping[str, SummaryMode] = {TRAINED: "self", MASKED: "self", COMPACTED: "compaction"}


@dataclass(frozen=True)
class SummaryStudySettings:
    pretraining_steps: int = 100
    fine_tuning_steps: int = 200
    demonstrations: int = 48  # per step
    steps: int = 40
    groups: int = 8  # per step
    group_size: int = 16
    learning_rate: float = 5e-4
    notes: int = 5
    trigger: int = 24  # tokens of a segment at which it is summarized


@study("summary")
def summary(seed: int, progress: ProgressCallback, settings: SummaryStudySettings | None = None) -> StudyResult:
    """Self-summary trained by the final reward, untrained, or prompt compaction: which keeps what matters?"""
    s = settings or SummaryStudySettings()
    total = s.fine_tuning_steps + len(MODES) * s.steps
    base = fine_tune(s, seed, lambda done: progress(done, total, "fine-tuning"))
    curves: dict[str, list[Point]] = {}
    for name in MODES:
        before = s.fine_tuning_steps + len(curves) * s.steps
        curves[name] = train(base, s, name, seed, offset_progress(progress, before, total, name))
    return build_result(curves, s)


def session_settings(mode: SummaryMode, s: SummaryStudySettings) -> ToySessionSettings:
    return ToySessionSettings(
        Budget(turns=2 * s.notes + 2, max_turn_tokens=8),
        SummarySettings(mode=mode, trigger=s.trigger, reserve=64, max_attempts=1),
    )


def draw_task(rng: random.Random, notes: int) -> ToyTask:
    """Draw a task: the first thing is on one of the first two notes, the last thing on the last."""
    things = rng.sample(THINGS[1:-1], notes - 2)
    things.insert(rng.randrange(2), FIRST)
    shown = [note(thing, rng.randrange(VALUES)) for thing in [*things, LAST]]
    values = dict(NOTE.findall(" ".join(shown)))
    return ToyTask(REQUEST, shown, AND.join(note(thing, int(values[thing])) for thing in (FIRST, LAST)))


# ------------------------------------------------------------------------------------------------- policy


def demonstrator(rng: random.Random) -> Callable[[ToyTask], Callable[[str], str]]:
    """Return a demonstrator that keeps a random note, and answers from what is left when it has read the last."""

    def respond(context: str) -> str:
        seen = NOTE.findall(context)
        if SUMMARY_PROMPT in context or COMPACTION_PROMPT[:40] in context:
            return note(*rng.choice(seen))
        values = dict(seen)
        if LAST not in values:
            return ""
        return AND.join(note(thing, values[thing]) if thing in values else UNKNOWN for thing in (FIRST, LAST))

    return lambda task: respond


def fine_tune(s: SummaryStudySettings, seed: int, progress: Callable[[int], None]) -> Transformer:
    """Return a policy that knows the form of calls, answers and both kinds of summary, and not which note to keep."""
    rng = random.Random(seed)
    trainer = Trainer(pretrain_recall(DIALECT, seed, s.pretraining_steps), AdamSettings(2e-3, weight_decay=0.0))
    variants = [(mode, notes) for mode in dict.fromkeys(MODES.values()) for notes in (3, s.notes)]
    for step in range(s.fine_tuning_steps):
        segments = []
        for mode, notes in variants:
            tasks = [draw_task(rng, notes) for _ in range(s.demonstrations // len(variants))]
            traces = run_demonstrations(tasks, demonstrator(rng), DIALECT, session_settings(mode, s))
            segments += [segment for trace in traces for segment in trace.segments]
        sft_step(trainer, segments, 1 - step / s.fine_tuning_steps)
        progress(step + 1)
    return trainer.model


def train(
    base: Transformer, s: SummaryStudySettings, name: str, seed: int, progress: Callable[[int], None]
) -> list[Point]:
    """Train a copy of the base by RL; return the measurements of each step's rollouts."""
    trainer, rng = Trainer(copy_model(base), AdamSettings(s.learning_rate, weight_decay=0.0)), random.Random(seed)
    policy, settings, points = LockstepPolicy(base), session_settings(MODES[name], s), []
    for step in range(s.steps):
        policy.load_model(trainer.model, step)
        tasks = [task for _ in range(s.groups) for task in [draw_task(rng, s.notes)] * s.group_size]
        traces = run_sessions(tasks, policy, DIALECT, settings, (seed * s.steps + step) * len(tasks))
        points.append(measure(tasks, traces))
        rewards = [float(trace.final == task.answer) for task, trace in zip(tasks, traces, strict=True)]
        scored = zip(traces, advantages_by_group(rewards, s.group_size), strict=True)
        sequences = [
            sequence
            for trace, advantage in scored
            for sequence in trained_sequences(trace, advantage, masked=name == MASKED)
        ]
        rl_step(trainer, sequences, PolicyGradient())
        progress(step + 1)
    return points


def trained_sequences(trace: Trace, advantage: float, *, masked: bool) -> list[TrainingSequence]:
    """Return the segments of a trace with the advantage on sampled tokens, without compactions.

    With `masked`, summary tokens get an advantage of zero.
    """
    sequences = training_sequences(trace.segments, advantage)
    if masked:
        sequences = [_without_summaries(sequence, trace, number) for number, sequence in enumerate(sequences)]
    return [sequence for sequence in sequences if sequence.segment.kind != "compaction"]


def _without_summaries(sequence: TrainingSequence, trace: Trace, number: int) -> TrainingSequence:
    advantages = np.zeros(len(sequence), np.float32)
    advantages[sequence.segment.sampled] = sequence.token_advantages
    for step in trace.steps:
        if step.kind == "summary" and step.segment == number:
            advantages[slice(*step.span)] = 0.0
    return replace(sequence, token_advantages=advantages[sequence.segment.sampled])


def measure(tasks: Sequence[ToyTask], traces: Sequence[Trace]) -> Point:
    """Return the success rate, the share of summaries that keep the needed note, and what summaries cost."""
    kept, written = [], 0
    for task, trace in zip(tasks, traces, strict=True):
        needed = task.answer.split(AND)[0]
        summaries = [step.message.content for step in trace.steps if step.kind == "summary"]
        kept += [needed in text for text in summaries]
        written += len(summaries)
    return {
        "success": float(np.mean([trace.final == task.answer for task, trace in zip(tasks, traces, strict=True)])),
        "kept": float(np.mean(kept)) if kept else 0.0,
        "summaries": written / len(traces),
        "summary_tokens": sum(trace.cost.summary for trace in traces) / max(1, written),
        "turns": float(np.mean([trace.cost.turns for trace in traces])),
    }


# ------------------------------------------------------------------------------------------------- plot


def build_result(curves: Mapping[str, Sequence[Point]], s: SummaryStudySettings) -> StudyResult:
    ends = {name: final_mean(points) for name, points in curves.items()}
    start = {name: points[0] for name, points in curves.items()}
    return StudyResult(
        title="Summaries on tasks longer than a segment",
        conclusion=(
            f"In {s.steps} steps success goes from {start[TRAINED]['success']:.0%} to {ends[TRAINED]['success']:.0%} "
            f"where the final reward trains the summaries too, from {start[MASKED]['success']:.0%} to "
            f"{ends[MASKED]['success']:.0%} where it trains all but the summaries, and from "
            f"{start[COMPACTED]['success']:.0%} to {ends[COMPACTED]['success']:.0%} with prompt compaction; at the end "
            f"a summary has the needed note in {ends[TRAINED]['kept']:.0%}, {ends[MASKED]['kept']:.0%} and "
            f"{ends[COMPACTED]['kept']:.0%} of cases."
        ),
        columns=("", "success before", "after", "kept before", "after", "tokens of a summary", "summaries", "turns"),
        rows=[
            (
                name,
                *(f"{point[key]:.1%}" for key in ("success", "kept") for point in (start[name], ends[name])),
                *(f"{ends[name][key]:.1f}" for key in ("summary_tokens", "summaries", "turns")),
            )
            for name in curves
        ],
        panels=[
            curve_panel("Success", Axis("tasks solved", low=0, high=1, percent=True), curves, "success"),
            curve_panel(
                "Summaries that keep the needed note",
                Axis("share of summaries", low=0, high=1, percent=True),
                curves,
                "kept",
            ),
        ],
        data={"curves": curves},
        settings=s,
    )


if __name__ == "__main__":
    from studies.cli import main

    main("summary")
