"""What a study is: a function of a seed that finds something out, and leaves its numbers, a plot and one sentence.

To add one, write a module in this package with a function under `@study("name")`; its docstring's first line says what
it asks. The sentence is made from the numbers that were seen, whether or not they are the expected ones.
"""

import json
import math
import pkgutil
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import torch

import etude
import etude.rl.studies
from etude.errors import InputError
from etude.plot import Axis, Line, Panel, draw
from etude.progress import Report
from etude.rl.studies.tiny import one_thread

DIGITS = 6  # that are kept of a number
Point = Mapping[str, float]  # what was seen at one step
Ask = TypeVar("Ask", bound=Callable[..., "Finding"])


@dataclass(frozen=True)
class Finding:
    """What came out. `data` is everything that was measured, in plain JSON; the rows are those of a table to print."""

    title: str
    conclusion: str  # one sentence, with numbers
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    panels: Sequence[Panel]
    data: Mapping[str, Any]
    settings: Any  # a dataclass


@dataclass(frozen=True)
class Study:
    """A question by its name. `ask` is called with a seed and a report of progress."""

    name: str
    question: str
    ask: Callable[..., Finding]


STUDIES: dict[str, Study] = {}


def study(name: str) -> Callable[[Ask], Ask]:
    """Register a function (seed, report, settings = the usual ones) -> Finding under a name."""

    def register(ask: Ask) -> Ask:
        if name in STUDIES:
            raise InputError(f"studies: there are two of the name {name}")
        STUDIES[name] = Study(name, (ask.__doc__ or "").strip().splitlines()[0], ask)
        return ask

    return register


def known_studies() -> Mapping[str, Study]:
    """All studies of this package, by name."""
    for module in pkgutil.iter_modules(etude.rl.studies.__path__):
        import_module(f"{etude.rl.studies.__name__}.{module.name}")
    return dict(sorted(STUDIES.items()))


def find_study(name: str) -> Study:
    found = known_studies()
    if name not in found:
        raise InputError(f"{name!r} is not a study; there are {', '.join(found)}")
    return found[name]


def run_study(chosen: Study, out: Path, seed: int, report: Report) -> Finding:
    """Ask, and leave NAME.json and NAME.svg in `out`."""
    started = time.monotonic()
    with one_thread():
        finding = chosen.ask(seed, report)
    leave(chosen, finding, out, seed, time.monotonic() - started)
    return finding


def leave(chosen: Study, finding: Finding, out: Path, seed: int, seconds: float) -> None:
    record = {
        "study": chosen.name,
        "question": chosen.question,
        "conclusion": finding.conclusion,
        "command": f"etude reproduce {chosen.name} --seed {seed} --out DIR",
        "seed": seed,
        "settings": asdict(finding.settings),
        "versions": {"etude": etude.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "seconds": round(seconds, 1),
        "table": {"columns": list(finding.columns), "rows": [list(row) for row in finding.rows]},
        "data": shortened(finding.data),
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{chosen.name}.json").write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    figure = draw(finding.panels, title=finding.title, description=finding.conclusion)
    (out / f"{chosen.name}.svg").write_text(figure, encoding="utf-8")


def counting(report: Report, before: int, total: int, note: str) -> Callable[[int], None]:
    """Progress of a part, told as that of the whole."""
    return lambda done: report(before + done, total, note)


def curve_panel(title: str, axis: Axis, curves: Mapping[str, Sequence[Point]], key: str) -> Panel:
    """One number of every step, a line for each arm."""
    lines = [Line(name, range(len(points)), [point[key] for point in points]) for name, points in curves.items()]
    return Panel(Axis("step"), axis, lines, title=title)


def last_of(points: Sequence[Point]) -> Point:
    """What a curve comes to: the mean of its last eighth."""
    end = points[-max(1, len(points) // 8) :]
    return {key: sum(point[key] for point in end) / len(end) for key in end[0]}


def shortened(value: Any) -> Any:
    """The same without digits that mean nothing, and with None where there is no number."""
    if isinstance(value, Mapping):
        return {str(key): shortened(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [shortened(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    return value
