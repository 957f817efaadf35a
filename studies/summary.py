"""Summaries that the final reward trains, against summaries that it does not, on tasks longer than a segment may be.

Five notes are read one by one; a segment has room for two, then it is summed up and the work goes on from the summary.
Wanted are the thing of the first two notes that was asked for, and the one of the last. The expert of the fine-tuning
writes summaries of the right form that keep any one note, so that the form is known, and what to keep is not. Three
ways from there: self-summary with the final reward on every token of the chain; the same, with the tokens of summaries
worth nothing; and compaction by the long worded prompt, sampled apart and trained on by nobody.
"""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from etude.evaluation.plot import Axis
from etude.harness.session import Budget
from etude.harness.summary import ASK, COMPACT, Summaries, SummaryMode
from etude.harness.trace import Trace
from etude.model.transformer import Transformer
from etude.rl.objective import PolicyGradient
from etude.rl.packing import Piece
from etude.system.progress import Report
from etude.train.optim import AdamSettings
from etude.train.trainer import Trainer
from studies.study import Finding, Point, counting, curve_panel, last_of, study
from studies.toy_policy import Lockstep, advantages_by_group, copy_of, imitate, reinforce, weigh
from studies.toy_tasks import (
    THINGS,
    UNKNOWN,
    VALUES,
    Errand,
    Rules,
    demonstrate,
    errand_dialect,
    note,
    play,
    taught_to_recall,
)

FIRST, LAST = THINGS[0], THINGS[-1]  # what is asked for
REQUEST, AND = f"Find {FIRST} and {LAST}", ", "
DIALECT = errand_dialect(REQUEST, AND)
NOTE = re.compile(r"([a-f]) is (\d)")
TRAINED, MASKED, COMPACTED = "self-summary", "self-summary, untrained", "prompt compaction"
MODES: Mapping[str, SummaryMode] = {TRAINED: "self", MASKED: "self", COMPACTED: "compaction"}


@dataclass(frozen=True)
class Settings:
    lessons: int = 100
    fine_tuning_steps: int = 200
    demonstrations: int = 48  # per step
    steps: int = 40
    groups: int = 8  # per step
    group_size: int = 16
    learning_rate: float = 5e-4
    notes: int = 5
    trigger: int = 24  # tokens of a segment at which it is summed up


@study("summary")
def summary(seed: int, report: Report, settings: Settings | None = None) -> Finding:
    """Self-summary trained by the final reward, against untrained and compacted: who keeps what matters?"""
    s = settings or Settings()
    total = s.fine_tuning_steps + len(MODES) * s.steps
    base = fine_tuned(s, seed, lambda done: report(done, total, "fine-tuning"))
    curves: dict[str, list[Point]] = {}
    for name in MODES:
        before = s.fine_tuning_steps + len(curves) * s.steps
        curves[name] = learn(base, s, name, seed, counting(report, before, total, name))
    return finding(curves, s)


def rules_of(mode: SummaryMode, s: Settings) -> Rules:
    return Rules(Budget(turns=2 * s.notes + 2, answer=8), Summaries(mode, trigger=s.trigger, reserve=64, attempts=1))


def errand(luck: random.Random, notes: int) -> Errand:
    """The first thing is on one of the first two notes, the last on the last."""
    between = luck.sample(THINGS[1:-1], notes - 2)
    between.insert(luck.randrange(2), FIRST)
    told = [note(thing, luck.randrange(VALUES)) for thing in [*between, LAST]]
    known = dict(NOTE.findall(" ".join(told)))
    return Errand(REQUEST, told, AND.join(note(thing, int(known[thing])) for thing in (FIRST, LAST)))


# ------------------------------------------------------------------------------------------------- the policy


def careless(luck: random.Random) -> Callable[[Errand], Callable[[str], str]]:
    """An expert that keeps any note, and answers with what is left when it has read the last."""

    def say(read: str) -> str:
        seen = NOTE.findall(read)
        if ASK in read or COMPACT[:40] in read:
            return note(*luck.choice(seen))
        known = dict(seen)
        if LAST not in known:
            return ""
        return AND.join(note(thing, known[thing]) if thing in known else UNKNOWN for thing in (FIRST, LAST))

    return lambda task: say


def fine_tuned(s: Settings, seed: int, told: Callable[[int], None]) -> Transformer:
    """Knows the form of calls, of answers, and of summaries in both ways; not which note to keep."""
    luck = random.Random(seed)
    trainer = Trainer(taught_to_recall(DIALECT, seed, s.lessons), AdamSettings(2e-3, weight_decay=0.0))
    ways = [(mode, notes) for mode in dict.fromkeys(MODES.values()) for notes in (3, s.notes)]
    for step in range(s.fine_tuning_steps):
        segments = []
        for mode, notes in ways:
            errands = [errand(luck, notes) for _ in range(s.demonstrations // len(ways))]
            shown = demonstrate(errands, careless(luck), DIALECT, rules_of(mode, s))
            segments += [segment for trace in shown for segment in trace.segments]
        imitate(trainer, segments, 1 - step / s.fine_tuning_steps)
        told(step + 1)
    return trainer.model


def learn(base: Transformer, s: Settings, name: str, seed: int, told: Callable[[int], None]) -> list[Point]:
    """Reinforce a copy of the base; what its rollouts were like at every step."""
    trainer, luck = Trainer(copy_of(base), AdamSettings(s.learning_rate, weight_decay=0.0)), random.Random(seed)
    policy, rules, points = Lockstep(base), rules_of(MODES[name], s), []
    for step in range(s.steps):
        policy.follow(trainer.model, step)
        errands = [task for _ in range(s.groups) for task in [errand(luck, s.notes)] * s.group_size]
        traces = play(errands, policy, DIALECT, rules, (seed * s.steps + step) * len(errands))
        points.append(seen_in(errands, traces))
        rewards = [float(trace.final == task.answer) for task, trace in zip(errands, traces, strict=True)]
        found = zip(traces, advantages_by_group(rewards, s.group_size), strict=True)
        pieces = [piece for trace, gain in found for piece in taught(trace, gain, masked=name == MASKED)]
        reinforce(trainer, pieces, PolicyGradient())
        told(step + 1)
    return points


def taught(trace: Trace, advantage: float, *, masked: bool) -> list[Piece]:
    """The chain with its advantage on every made token; but not on compactions, nor `masked` on summaries."""
    pieces = weigh(trace.segments, advantage)
    if masked:
        pieces = [_without_summaries(piece, trace, number) for number, piece in enumerate(pieces)]
    return [piece for piece in pieces if piece.segment.kind != "compaction"]


def _without_summaries(piece: Piece, trace: Trace, number: int) -> Piece:
    worth = np.zeros(len(piece), np.float32)
    worth[piece.segment.made] = piece.worths
    for step in trace.steps:
        if step.kind == "summary" and step.segment == number:
            worth[slice(*step.span)] = 0.0
    return replace(piece, worths=worth[piece.segment.made])


def seen_in(errands: Sequence[Errand], traces: Sequence[Trace]) -> Point:
    """Success; how often a summary has the note that will be needed; and what summaries took."""
    kept, written = [], 0
    for task, trace in zip(errands, traces, strict=True):
        wanted = task.answer.split(AND)[0]
        summaries = [step.message.content for step in trace.steps if step.kind == "summary"]
        kept += [wanted in text for text in summaries]
        written += len(summaries)
    return {
        "success": float(np.mean([trace.final == task.answer for task, trace in zip(errands, traces, strict=True)])),
        "kept": float(np.mean(kept)) if kept else 0.0,
        "summaries": written / len(traces),
        "summary_tokens": sum(trace.cost.summary for trace in traces) / max(1, written),
        "turns": float(np.mean([trace.cost.turns for trace in traces])),
    }


# ------------------------------------------------------------------------------------------------- the picture


def finding(curves: Mapping[str, Sequence[Point]], s: Settings) -> Finding:
    ends = {name: last_of(points) for name, points in curves.items()}
    start = {name: points[0] for name, points in curves.items()}
    return Finding(
        title="Summaries on tasks longer than a segment",
        conclusion=(
            f"In {s.steps} steps success goes from {start[TRAINED]['success']:.0%} to {ends[TRAINED]['success']:.0%} "
            f"where the final reward trains the summaries too, from {start[MASKED]['success']:.0%} to "
            f"{ends[MASKED]['success']:.0%} where it trains all but the summaries, and from "
            f"{start[COMPACTED]['success']:.0%} to {ends[COMPACTED]['success']:.0%} with prompt compaction; a summary "
            f"then has the needed note in {ends[TRAINED]['kept']:.0%}, {ends[MASKED]['kept']:.0%} and "
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
            curve_panel("What summaries keep", Axis("those that have it", low=0, high=1, percent=True), curves, "kept"),
        ],
        data={"curves": curves},
        settings=s,
    )
