"""The report's figure of average and best-of-K: does reinforcement learning widen what can be solved, or only reweigh?

If training only made likely what was possible before, the average would rise and the best of K samples would not. Both
are read from the measurements a run makes of itself on held-out tasks, every `rl.evaluation.every` steps; K is how many
samples each task got. Without a run, `recipes/nano-rl.toml` is run first, measured more often than it asks for.
"""

import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from etude.errors import InputError
from etude.evaluation import held_out
from etude.evaluation.plot import Axis, Line, Panel
from etude.rollouts.queue import Slots
from etude.runs.layout import Place
from etude.runs.run import Run
from etude.system.progress import Report
from studies.study import Finding, study
from studies.subprocess_runs import carry_out, recipe_file, run_command

RECIPE = "nano-rl.toml"
MINUTES = 15  # that it takes with the usual settings, on two CPU cores

Measurement = Mapping[str, Any]  # a line of metrics, or a difference of two


@dataclass(frozen=True)
class Settings:
    """Of the run that is made where none is given."""

    steps: int = 24
    every: int = 6  # steps between measurements
    samples: int = 8  # K
    tasks: int = 16  # of each set that is measured with


@study("fig5")
def fig5(
    seed: int, report: Report, settings: Settings | None = None, run: Path | None = None, place: Path | None = None
) -> Finding:
    """Average and best of K on held-out tasks: do both rise in training, or one at the other's cost?"""
    s = settings or Settings()
    if run is not None and settings is not None:
        raise InputError("fig5 with --run looks at a run that is there: --set would not be used")
    if run is None:
        if place is None:
            raise InputError("fig5 needs a run to look at, or a place to make one in")
        run = make_run(s, seed, place / "run", report)
    name, measured, rises = measurements(run)
    report(1, 1)
    return finding(name, measured, rises, s)


def make_run(s: Settings, seed: int, out: Path, report: Report) -> Path:
    """Run the recipe, or what is left of it."""
    about = f"fig5: runs recipes/{RECIPE} with {s.steps} steps, about {MINUTES} minutes on two CPU cores"
    print(f"{about}; what is done already is not done again", file=sys.stderr)
    command = run_command(recipe_file(RECIPE), out, *changes(s, seed))
    carry_out({RECIPE: command}, lambda done, note: report(done, 1, note))
    return out


def changes(s: Settings, seed: int) -> list[str]:
    """What is not as the recipe has it."""
    keys = {"seed": seed, "rl.steps": s.steps, "rl.evaluation.every": s.every}
    keys |= {"rl.evaluation.samples": s.samples, "rl.evaluation.most": s.tasks}
    return [f"{key}={value}" for key, value in keys.items()]


def measurements(run: Path) -> tuple[str, list[Measurement], dict[str, Measurement]]:
    """A run's name, its measurements, and what changed from the first to the last, task by task: in all, by set."""
    read = Run.read(run)
    lines = [line for line in read.metrics("rl") if line.get("evaluation") and line.get("tasks")]
    measured: list[Measurement] = sorted(lines, key=lambda line: line["step"])
    if len(measured) < 2:
        raise InputError(
            f"{run} has {len(measured)} measurements on held-out tasks, and a curve takes two: name a run whose recipe "
            "has [rl.evaluation], with `every` set for more than the first and the last"
        )
    with closing(Slots.look(Place(run).evaluations)) as table:
        ends = [held_out.results(table, measured[place]["step"]) for place in (0, -1)]
    rises = {name: held_out.compare(*(held_out.part(end, f"{name}/") for end in ends)) for name in sets_of(measured[0])}
    return read.recipe.name, measured, {"": held_out.compare(*ends), **rises}


def sets_of(line: Measurement) -> list[str]:
    """The sets of tasks that a measurement tells of one by one."""
    return sorted(key.split("/")[1] for key in line if key.startswith("set/") and key.endswith("/solved"))


def samples_of(line: Measurement) -> list[int]:
    """Every k of which the best is known."""
    words = (key.removeprefix("best/") for key in line if key.startswith("best/"))
    return sorted(int(word) for word in words if word.isdigit())


# ------------------------------------------------------------------------------------------------- the picture


def finding(name: str, measured: Sequence[Measurement], rises: Mapping[str, Measurement], s: Settings) -> Finding:
    rise = rises[""]
    most = min(samples_of(line)[-1] for line in measured)
    best, first, last = f"best/{most}", measured[0], measured[-1]
    return Finding(
        title=f"Average and best of {most}: {name}",
        conclusion=(
            f"Over {last['step'] - first['step']} steps of {name} the average on {rise['tasks']} held-out tasks goes "
            f"from {first['solved']:.1%} to {last['solved']:.1%} ({_change(rise, 'solved')}) and the best of {most} "
            f"from {first[best]:.1%} to {last[best]:.1%} ({_change(rise, best)}): {verdict(rise, best)}."
        ),
        columns=("step", "average, 95% interval", f"best of {most}, 95% interval", "tokens per session", "weights"),
        rows=[
            (
                str(line["step"]),
                _with_interval(line, "solved"),
                _with_interval(line, best),
                f"{line['tokens']:.0f}",
                f"{line.get('versions/oldest', '-')} to {line.get('versions/newest', '-')}",
            )
            for line in measured
        ],
        panels=panels(measured, most),
        data={
            "run": name,
            "k": most,
            "measurements": [_kept(line) for line in measured],
            "rise": dict(rise),
            "rise_by_set": {each: dict(found) for each, found in rises.items() if each},
        },
        settings=s,
    )


def verdict(rise: Measurement, best: str) -> str:
    """What is beyond the intervals, and what is not."""
    match _sign(rise, "solved"), _sign(rise, best):
        case True, True:
            return "both have risen"
        case None, None:
            return "neither has moved by more than its interval"
        case average, widest:
            words = {True: "has risen", False: "has fallen", None: "has moved by no more than its interval"}
            return f"the average {words[average]}, the best {words[widest]}"


def _sign(rise: Measurement, key: str) -> bool | None:
    """Whether it rose; None where the interval holds zero, or where there is none."""
    low, high = rise.get(f"{key}_low"), rise.get(f"{key}_high")
    if low is None or high is None or low <= 0 <= high:
        return None
    return bool(low > 0)


def _change(rise: Measurement, key: str) -> str:
    low, high = rise.get(f"{key}_low"), rise.get(f"{key}_high")
    interval = "" if low is None or high is None else f", 95% interval {100 * low:+.1f} to {100 * high:+.1f}"
    return f"{100 * rise[key]:+.1f} points{interval}"


def _with_interval(line: Measurement, key: str) -> str:
    low, high = line.get(f"{key}_low"), line.get(f"{key}_high")
    return f"{line[key]:.1%}" + ("" if low is None or high is None else f" ({low:.1%} to {high:.1%})")


def _kept(line: Measurement) -> dict[str, Any]:
    """A measurement without what is not of this figure."""
    wanted = (
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
        "set/",
    )
    return {key: value for key, value in line.items() if key.startswith(wanted) and not key.startswith("best_score")}


def panels(measured: Sequence[Measurement], most: int) -> list[Panel]:
    steps = [line["step"] for line in measured]

    def bound(key: str) -> list[float]:
        values = [line.get(key) for line in measured]
        return [value for value in values if value is not None] if None not in values else []  # one task has none

    def curve(label: str, key: str) -> Line:
        y = [line[key] for line in measured]
        return Line(label, steps, y, bound(f"{key}_low"), bound(f"{key}_high"), "both")

    ladder = [k for k in samples_of(measured[0]) if all(f"best/{k}" in line for line in measured)]
    widening = [
        Line(f"step {line['step']}", ladder, [line[f"best/{k}"] for k in ladder], style="both")
        for line in (measured[0], measured[-1])
    ]
    by_set = [
        line
        for colour, name in enumerate(sets_of(measured[0]))
        for line in (
            replace(curve(f"{name}, average", f"set/{name}/solved"), colour=colour),
            replace(curve(f"{name}, best of {most}", f"set/{name}/best/{most}"), colour=colour, style="dashed"),
        )
    ]
    solved = Axis("tasks solved", low=0, high=1, percent=True)
    found = [
        Panel(
            Axis("step"),
            solved,
            [curve("average", "solved"), curve(f"best of {most}", f"best/{most}")],
            "Held-out tasks",
        )
    ]
    if len(ladder) > 1:
        found.append(Panel(Axis("k, samples of a task", log=True), solved, widening, title="Best of k, first and last"))
    if by_set:
        found.append(Panel(Axis("step"), solved, by_set, title="By set of tasks"))
    return found
