"""The result of a sweep: solve rates of its arms, paired differences, the choice, and what it can detect.

A choice among arms uses the validation set only. The other sets are read only for a final report, after all choices.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from etude.config import settings_data
from etude.errors import InputError
from etude.evaluation.paired import (
    MIN_SEEDS,
    DifferenceVariance,
    PairedDifference,
    SeedSamples,
    assumed_variance,
    compare_arms,
    detectable_difference,
    measured_variance,
)
from etude.evaluation.run_results import MeasuredSet, measured_sets, task_results
from etude.evaluation.statistics import LEVEL, best_of
from etude.pipeline.sweep import Sweep, SweepOutcome
from etude.runs.layout import RunLayout
from etude.runs.run import Run

JsonObject = dict[str, Any]


def sets_of(sweep: Sweep, validation: str | None) -> list[MeasuredSet]:
    """Return the task sets that the runs are measured on; InputError if none of them is the validation set."""
    sets = measured_sets(settings_data(sweep.runs[0].recipe), validation)
    if sets and not any(each.is_validation for each in sets):
        names = ", ".join(each.name for each in sets)
        raise InputError(
            f"--validation {validation}: the recipe measures {names}; name the set that choices are made on"
        )
    return sets


# ------------------------------------------------------------------------------------------- power


def detectable(
    sets: Sequence[MeasuredSet], seeds: int, variance: DifferenceVariance, *, final: bool = False
) -> dict[str, float]:
    """Return the smallest difference that each set can show, by set."""
    shown = [each for each in sets if each.is_validation or final]
    return {each.name: detectable_difference(variance, each.tasks, each.samples, seeds) for each in shown}


def power_lines(
    sets: Sequence[MeasuredSet], seeds: int, variance: DifferenceVariance, *, final: bool = False
) -> list[str]:
    """Return what the sweep can detect, for people."""
    if not sets:
        return ["no task set is measured: the runs will not be compared"]
    over = "tasks and seeds" if seeds >= MIN_SEEDS else "the tasks of these seeds"
    lines = []
    by_name = {each.name: each for each in sets}
    for name, difference in detectable(sets, seeds, variance, final=final).items():
        plan = by_name[name]
        size = f"{plan.tasks} tasks x {plan.samples} samples x {seeds} seed{'s' if seeds > 1 else ''}"
        found = f"detects a difference of {100 * difference:.1f} points between two arms"
        lines.append(f"{name}: {size} {found} (80 % power, two-sided 5 %, over {over})")
    return [*lines, f"variance {variance.origin}"]


def find_variance(sweep: Sweep, sets: Sequence[MeasuredSet], others: Sequence[Path]) -> DifferenceVariance:
    """Return the variance of earlier results: of the given runs or sweeps, else below --out, else an assumption."""
    validation = next((each.name for each in sets if each.is_validation), "")
    for directory in others:
        if not _runs_in(directory):
            raise InputError(f"--variance-from {directory}: there is no run; name a run or the directory of a sweep")
    for directories in (others, [sweep.out]):
        pairs = [pair for directory in directories for pair in earlier_pairs(directory, validation)]
        names = ", ".join(map(str, directories))
        found = measured_variance(pairs, f"measured on {validation} in {names}") if pairs else None
        if found is not None:
            return found
        if directories is others and others:
            raise InputError(f"--variance-from {names}: no two results on the tasks {validation} to compare")
    return assumed_variance()


def earlier_pairs(directory: Path, task_set: str) -> list[tuple[SeedSamples, SeedSamples]]:
    """Return the pairs of arms of a sweep, or of the first and last model of a run, with results on a task set."""
    arms: dict[str, dict[int, Mapping[str, Sequence[float]]]] = {}
    within: list[tuple[SeedSamples, SeedSamples]] = []
    for path in _runs_in(directory):
        seed = Run.read(path).settings.seed
        found = [sets[task_set] for sets in task_results(path).values() if task_set in sets]
        if found:
            arms.setdefault(re.sub(r",?seed=\d+$", "", path.name), {})[seed] = found[-1]
        if len(found) > 1:
            within.append(({seed: found[0]}, {seed: found[-1]}))
    between = [pair for pair in combinations(arms.values(), 2) if _share_a_task(*pair)]
    return list(between) or within


def _share_a_task(before: SeedSamples, after: SeedSamples) -> bool:
    return any(before[seed].keys() & after[seed].keys() for seed in before.keys() & after.keys())


def _runs_in(directory: Path) -> list[Path]:
    """Return the run in a directory, or the runs directly below it."""
    candidates = [directory, *sorted(directory.glob("*/"))] if directory.is_dir() else []
    return [path for path in candidates if RunLayout(path).recipe.is_file()]


# ------------------------------------------------------------------------------------------- result


def arm_results(sweep: Sweep, task_set: str) -> dict[str, SeedSamples]:
    """Return the samples of every arm by seed, of the last model that its runs have results for."""
    arms: dict[str, dict[int, Mapping[str, Sequence[float]]]] = {name: {} for name in sweep.arms}
    for run in sweep.runs:
        if not sweep.is_finished(run):
            continue
        found = [sets[task_set] for sets in task_results(run.path).values() if task_set in sets]
        if found:
            arms[run.arm.name][run.seed] = found[-1]
    return {name: seeds for name, seeds in arms.items() if seeds}


def summarize_sweep(
    sweep: Sweep, outcome: SweepOutcome, sets: Sequence[MeasuredSet], baseline: str, *, final: bool
) -> JsonObject:
    """Return the result of a sweep as JSON. Test sets are read only if it is final."""
    shown = [each for each in sets if each.is_validation or final]
    found = {each.name: arm_results(sweep, each.name) for each in shown}
    validation = next((each.name for each in shown if each.is_validation), None)
    return {
        "out": str(sweep.out),
        "seeds": sweep.seeds,
        "runs": asdict(outcome),
        "baseline": baseline,
        "comparisons": len(sweep.arms) - 1,
        "sets": {
            name: {
                "validation": name == validation,
                "arms": {arm: _rates(samples) for arm, samples in arms.items()},
                "differences": _differences(arms, baseline),
            }
            for name, arms in found.items()
        },
        "choice": _choose(found[validation]) if validation else None,
    }


def _rates(samples: SeedSamples) -> JsonObject:
    """Return solve rate and best of K of an arm: means over seeds of means over tasks."""
    size = min(len(row) for tasks in samples.values() for row in tasks.values())
    best = [np.mean([best_of(row, size) for row in tasks.values()]) for tasks in samples.values()]
    solved = {seed: float(np.mean([np.mean(row) for row in tasks.values()])) for seed, tasks in samples.items()}
    tasks = sum(map(len, samples.values()))
    mean = float(np.mean(list(solved.values())))
    return {"solved": mean, f"best/{size}": float(np.mean(best)), "by_seed": solved, "tasks": tasks}


def _differences(arms: Mapping[str, SeedSamples], baseline: str) -> dict[str, JsonObject]:
    """Return the paired differences of the other arms to the baseline."""
    if baseline not in arms:
        return {}
    rows = {}
    for name, samples in arms.items():
        if name != baseline and _share_a_task(arms[baseline], samples):
            size = min(
                len(row) for arm in (arms[baseline], samples) for tasks in arm.values() for row in tasks.values()
            )
            best = compare_arms(arms[baseline], samples, lambda row, size=size: best_of(row, size))  # type: ignore[misc]
            rows[name] = {"solved": _as_json(compare_arms(arms[baseline], samples)), f"best/{size}": _as_json(best)}
    return rows


def _as_json(difference: PairedDifference) -> JsonObject:
    return {**asdict(difference), "interval": difference.interval}


def _choose(arms: Mapping[str, SeedSamples]) -> JsonObject | None:
    """Return the arm with the best solve rate on validation, over the seeds that all arms have."""
    if len(arms) < 2:
        return None
    common = sorted(set.intersection(*(set(samples) for samples in arms.values())))
    if not common:
        return None
    rates = {
        name: float(np.mean([np.mean([np.mean(row) for row in samples[seed].values()]) for seed in common]))
        for name, samples in arms.items()
    }
    best = max(rates, key=lambda name: rates[name])
    return {"arm": best, "solved": rates[best], "seeds": common, "among": len(arms)}


# ------------------------------------------------------------------------------------------- text


def result_table(summary: JsonObject) -> Table:
    """Return the table of a sweep: a row for each set and arm."""
    table = Table(box=None, header_style="bold")
    for column in ("set", "arm", "seeds", "tasks", "solved", "best of k", "difference", "95 %, these seeds"):
        table.add_column(column, overflow="fold")
    table.add_column(f"95 %, {MIN_SEEDS}+ seeds", overflow="fold")
    for name, found in summary["sets"].items():
        label = f"{name} (validation)" if found["validation"] else f"{name} (test)"
        for arm, rates in found["arms"].items():
            best = next(key for key in rates if key.startswith("best/"))
            change = found["differences"].get(arm, {}).get("solved")
            cells = (
                [f"{change['mean'] * 100:+.1f}", *map(_points, (change["over_tasks"], change["over_seeds"]))]
                if change
                else ["", "", ""]
            )
            if arm == summary["baseline"]:
                cells[0] = "baseline"
            shown = f"{rates[best]:.1%} (k = {best.removeprefix('best/')})"
            table.add_row(
                label,
                escape(arm),
                str(len(rates["by_seed"])),
                str(rates["tasks"]),
                f"{rates['solved']:.1%}",
                shown,
                *cells,
            )
    return table


def conclusions(summary: JsonObject) -> list[str]:
    """Return what a reader of the table must know."""
    runs = summary["runs"]
    counts = [f"{len(runs[state])} {state}" for state in ("finished", "skipped", "failed") if runs[state]]
    lines = [f"runs: {', '.join(counts) or 'none'}"]
    lines += [f"{name} failed: {reason}" for name, reason in runs["failed"].items()]
    if not summary["sets"]:
        return [*lines, "no task set is measured: the runs are not compared"]
    comparisons = summary["comparisons"]
    if comparisons > 1:
        luck = 1 - LEVEL**comparisons
        lines.append(
            f"{comparisons} arms are compared with {summary['baseline']}, each at {LEVEL:.0%}: if all were equal, at "
            f"least one interval would exclude zero with a probability of up to {luck:.0%}"
        )
    if choice := summary["choice"]:
        lines.append(
            f"choice: {choice['arm']}, the best of {choice['among']} arms on the validation set over "
            f"{len(choice['seeds'])} seed{'s' if len(choice['seeds']) > 1 else ''}; its own rate there is optimistic"
        )
    if not any(not found["validation"] for found in summary["sets"].values()):
        lines.append("only the validation set was read; --final shows the test sets, once all choices are made")
    return lines


def _points(bounds: Sequence[float] | None) -> str:
    return f"{100 * bounds[0]:+.1f} to {100 * bounds[1]:+.1f}" if bounds else "-"
