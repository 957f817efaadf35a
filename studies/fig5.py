"""The report's figure of average and best-of-K: does RL enlarge the set of solvable tasks, or only reweight it?

If training only made likely what was possible before, the average would rise and the best of K samples would not. Both
are read from a run's validations during RL, every `evaluation.every` steps; K is the number of samples per task.
Without a run, `recipes/nano-rl.toml` is run first, with more frequent evaluations.
"""

import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.errors import InputError
from etude.evaluation import held_out, statistics
from etude.evaluation.plot import Axis, Line, Panel
from etude.evaluation.run_results import validations
from etude.rollouts.queue import RolloutQueue
from etude.rollouts.settings import load_evaluation
from etude.runs.layout import RunLayout
from etude.runs.run import Run
from etude.system.progress import ProgressCallback
from studies.study import StudyResult, study
from studies.subprocess_runs import recipe_file, run_command, run_commands

RECIPE = "nano-rl.toml"
MINUTES = 15  # of that run with the default settings, on two CPU cores

Metrics = Mapping[str, Any]  # of one evaluation, or the difference of two


@dataclass(frozen=True)
class Fig5Settings:
    """Settings of the run that is made when none is given."""

    steps: int = 24
    every: int = 6  # steps between evaluations
    samples: int = 8  # K
    tasks: int = 24  # of the validation set


@study("fig5")
def fig5(
    seed: int,
    progress: ProgressCallback,
    settings: Fig5Settings | None = None,
    run: Path | None = None,
    directory: Path | None = None,
) -> StudyResult:
    """Average and best of K on held-out tasks: do both rise in training, or one at the other's cost?"""
    s = settings or Fig5Settings()
    if run is not None and settings is not None:
        raise InputError("fig5 with --run reads an existing run, so --set would not be used; leave one of them out")
    if run is None:
        if directory is None:
            raise InputError("fig5 needs a run to read, or a directory to make one in")
        run = make_run(s, seed, directory / "run", progress)
    name, evaluations, change = read_evaluations(run)
    progress(1, 1)
    return build_result(name, evaluations, change, s)


def make_run(s: Fig5Settings, seed: int, out: Path, progress: ProgressCallback) -> Path:
    """Run the recipe, or the rest of it."""
    about = f"fig5: runs recipes/{RECIPE} with {s.steps} steps, about {MINUTES} minutes on two CPU cores"
    print(f"{about}; finished work is not repeated", file=sys.stderr)
    command = run_command(recipe_file(RECIPE), out, *recipe_overrides(s, seed))
    run_commands({RECIPE: command}, lambda done, note: progress(done, 1, note))
    return out


def recipe_overrides(s: Fig5Settings, seed: int) -> list[str]:
    """Return the overrides of the recipe."""
    keys: dict[str, object] = {"seed": seed, "rl.steps": s.steps, "evaluation.every": s.every}
    keys |= {"evaluation.validation_samples": s.samples, "evaluation.max_tasks": s.tasks}
    keys |= {"evaluation.models": '["rl"]', "evaluation.test": "[]"}  # only the curve is read
    return [f"{key}={value}" for key, value in keys.items()]


def read_evaluations(run: Path) -> tuple[str, list[Metrics], Metrics]:
    """Return a run's name, its validations during RL, and the paired change from the first to the last."""
    opened = Run.read(run)
    lines = [line for line in validations(opened.metrics("rl")) if line.get("tasks")]
    evaluations: list[Metrics] = sorted(lines, key=lambda line: line["step"])
    if len(evaluations) < 2:
        raise InputError(
            f"{run} has {len(evaluations)} evaluations on held-out tasks, and a curve needs two: name a run whose "
            "recipe has [evaluation], with `every` set for more than the first and the last"
        )
    with closing(RolloutQueue.open_read_only(RunLayout(run).evaluations)) as queue:
        settings = load_evaluation(RunLayout(run))
        name = "" if settings is None else Path(settings.validation).name
        ends = [held_out.results(queue, evaluations[index]["step"], name) for index in (0, -1)]
    return opened.settings.name, evaluations, statistics.compare(*ends)


def best_of_sizes(evaluation: Metrics) -> list[int]:
    """Return every k for which an evaluation has best-of-k."""
    words = (key.removeprefix("best/") for key in evaluation if key.startswith("best/"))
    return sorted(int(word) for word in words if word.isdigit())


# ------------------------------------------------------------------------------------------------- plot


def build_result(name: str, evaluations: Sequence[Metrics], change: Metrics, s: Fig5Settings) -> StudyResult:
    k = min(best_of_sizes(line)[-1] for line in evaluations)
    best, first, last = f"best/{k}", evaluations[0], evaluations[-1]
    return StudyResult(
        title=f"Average and best of {k}: {name}",
        conclusion=(
            f"Over {last['step'] - first['step']} steps of {name} the average on {change['tasks']} held-out tasks goes "
            f"from {first['solved']:.1%} to {last['solved']:.1%} ({_format_change(change, 'solved')}) and the best "
            f"of {k} from {first[best]:.1%} to {last[best]:.1%} ({_format_change(change, best)}): "
            f"{describe_change(change, best)}."
        ),
        columns=("step", "average, 95% interval", f"best of {k}, 95% interval", "tokens per session", "weights"),
        rows=[
            (
                str(line["step"]),
                _with_interval(line, "solved"),
                _with_interval(line, best),
                f"{line['tokens']:.0f}",
                f"{line.get('versions/oldest', '-')} to {line.get('versions/newest', '-')}",
            )
            for line in evaluations
        ],
        panels=panels(evaluations, k),
        data={
            "run": name,
            "k": k,
            "measurements": [_recorded(line) for line in evaluations],
            "rise": dict(change),
        },
        settings=s,
    )


def describe_change(change: Metrics, best: str) -> str:
    """Describe which of average and best-of-k changed by more than the 95% interval."""
    match _has_risen(change, "solved"), _has_risen(change, best):
        case True, True:
            return "both have risen"
        case None, None:
            return "neither has moved by more than its interval"
        case average, best_of_k:
            words = {True: "has risen", False: "has fallen", None: "has moved by no more than its interval"}
            return f"the average {words[average]}, the best {words[best_of_k]}"


def _has_risen(change: Metrics, key: str) -> bool | None:
    """Return whether a value rose; None if its interval contains zero, or there is no interval."""
    low, high = change.get(f"{key}_low"), change.get(f"{key}_high")
    if low is None or high is None or low <= 0 <= high:
        return None
    return bool(low > 0)


def _format_change(change: Metrics, key: str) -> str:
    low, high = change.get(f"{key}_low"), change.get(f"{key}_high")
    interval = "" if low is None or high is None else f", 95% interval {100 * low:+.1f} to {100 * high:+.1f}"
    return f"{100 * change[key]:+.1f} points{interval}"


def _with_interval(line: Metrics, key: str) -> str:
    low, high = line.get(f"{key}_low"), line.get(f"{key}_high")
    return f"{line[key]:.1%}" + ("" if low is None or high is None else f" ({low:.1%} to {high:.1%})")


def _recorded(line: Metrics) -> dict[str, Any]:
    """Return the metrics of an evaluation that belong to this figure."""
    prefixes = (
        "step",
        "tasks",
        "samples",
        "solved",
        "score",
        "best/",
        "tokens",
        "turns",
        "versions/",
        "infrastructure/",
    )
    return {key: value for key, value in line.items() if key.startswith(prefixes) and not key.startswith("best_score")}


def panels(evaluations: Sequence[Metrics], k: int) -> list[Panel]:
    steps = [line["step"] for line in evaluations]

    def bound(key: str) -> list[float]:
        values = [line.get(key) for line in evaluations]
        return (
            [value for value in values if value is not None] if None not in values else []
        )  # one task has no interval

    def curve(label: str, key: str) -> Line:
        y = [line[key] for line in evaluations]
        return Line(label, steps, y, bound(f"{key}_low"), bound(f"{key}_high"), "both")

    sizes = [size for size in best_of_sizes(evaluations[0]) if all(f"best/{size}" in line for line in evaluations)]
    best_of_curves = [
        Line(f"step {line['step']}", sizes, [line[f"best/{size}"] for size in sizes], style="both")
        for line in (evaluations[0], evaluations[-1])
    ]
    solved = Axis("tasks solved", low=0, high=1, percent=True)
    found = [
        Panel(
            Axis("step"),
            solved,
            [curve("average", "solved"), curve(f"best of {k}", f"best/{k}")],
            "Held-out tasks",
        )
    ]
    if len(sizes) > 1:
        found.append(
            Panel(Axis("k, samples of a task", log=True), solved, best_of_curves, title="Best of k, first and last")
        )
    return found


if __name__ == "__main__":
    from studies.cli import main

    main("fig5")
