"""The best checkpoint on validation, which ones to keep for it, and whether a run has collapsed.

The orchestrator writes the validation score of every evaluated step to `rl/validation.json`; the trainer reads it
before it deletes old checkpoints. A run collapses when validation falls below its best so far by more than
`rl.max_validation_fall` and by more than chance explains; the orchestrator then ends it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from etude.evaluation import held_out, statistics
from etude.evaluation.run_results import validations
from etude.files import write_atomically
from etude.rl.settings import RlSettings
from etude.rollouts.queue_client import AnyQueue
from etude.runs.layout import RunLayout


def validation_scores(records: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Return the solve rate of every evaluated step, from the run's metrics."""
    return {record["step"]: record["solved"] for record in validations(records) if record.get("solved") is not None}


def finished_steps(layout: RunLayout, lineage: int) -> set[int]:
    """Return the steps whose evaluations have all ended, as the orchestrator knows them in this lineage of weights."""
    try:
        found = json.loads(layout.evaluated.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return set()
    return set(found["steps"]) if found["lineage"] == lineage else set()


def write_finished_steps(layout: RunLayout, lineage: int, steps: Collection[int]) -> None:
    write_atomically(layout.evaluated, json.dumps({"lineage": lineage, "steps": sorted(steps)}))


def write_scores(layout: RunLayout, scores: Mapping[int, float]) -> None:
    write_atomically(layout.validation, json.dumps(scores), durable=True)


def read_scores(layout: RunLayout) -> dict[int, float]:
    """Return the scores by step; empty before the first evaluation has finished."""
    try:
        found = json.loads(layout.validation.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return {int(step): float(score) for step, score in found.items()}


def best_step(scores: Mapping[int, float]) -> int | None:
    """Return the step with the highest score, of equal ones the latest; None if there is none."""
    return max(scores, key=lambda step: (scores[step], step), default=None)


def kept_steps(
    saved: Collection[int], settings: RlSettings, scores: Mapping[int, float], validate_every: int
) -> set[int]:
    """Return the steps whose checkpoints stay: the newest, the best, and those whose validation may still be best."""
    newest = set(sorted(saved)[-settings.keep :])
    if not settings.keep_best:
        return newest
    best = best_step({step: score for step, score in scores.items() if step in saved or step == 0})
    validated = {step for step in saved if validate_every and step % validate_every == 0}
    pending = validated - scores.keys()
    return newest | pending | ({best} if best else set())


def collapse(evaluations: AnyQueue, scores: Mapping[int, float], settings: RlSettings, validation: str) -> str:
    """Return why the run has collapsed, at its first evaluation that says so; "" if it has not.

    `validation` is the name of the task set.
    """
    limit = settings.max_validation_fall
    for step in sorted(scores) if limit else ():
        best = best_step({earlier: score for earlier, score in scores.items() if earlier < step})
        if best is None or scores[best] - scores[step] <= limit:
            continue
        before, after = (held_out.results(evaluations, each, validation) for each in (best, step))
        fall = statistics.compare(before, after)
        if fall["solved_high"] is not None and fall["solved_high"] < 0:
            interval = f"95 % interval {100 * fall['solved_low']:+.0f} to {100 * fall['solved_high']:+.0f}"
            return (
                f"validation fell from {scores[best]:.1%} at step {best} to {scores[step]:.1%} at step {step} "
                f"({interval} points; rl.max_validation_fall = {limit:g}): the run was stopped"
            )
    return ""
