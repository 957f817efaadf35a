"""What a study is: a function of a seed that finds something out, and leaves its numbers, a plot and one sentence.

To add one, write a module in this package with a function under `@study("name")`; its docstring's first line says what
it asks. The sentence is made from the numbers that were seen, whether or not they are the expected ones. A study that
looks at a run has a parameter `run`; one that makes runs of its own has a parameter `place`, a directory to keep them.
"""

import inspect
import json
import math
import pkgutil
import platform
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import torch

import etude
import studies
from etude.errors import InputError
from etude.evaluation.plot import Axis, Line, Panel, draw
from etude.system.progress import Report
from studies.toy_policy import one_thread

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

    def takes(self, what: str) -> bool:
        return what in inspect.signature(self.ask).parameters


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
    for module in pkgutil.iter_modules(studies.__path__):
        import_module(f"{studies.__name__}.{module.name}")
    return dict(sorted(STUDIES.items()))


def find_study(name: str) -> Study:
    found = known_studies()
    if name not in found:
        raise InputError(f"{name!r} is not a study; there are {', '.join(found)}")
    return found[name]


def run_study(
    chosen: Study, out: Path, seed: int, report: Report, *, run: Path | None = None, overrides: Sequence[str] = ()
) -> Finding:
    """Ask, and leave NAME.json and NAME.svg in `out`; runs that the study makes are kept in `out`/NAME."""
    if run is not None and not chosen.takes("run"):
        able = ", ".join(name for name, each in known_studies().items() if each.takes("run"))
        raise InputError(f"study {chosen.name} looks at no run, --run would not be used; those that do: {able}")
    given = {"settings": settings_with(chosen, overrides)} if overrides else {}
    given |= {"run": run} if chosen.takes("run") else {}
    given |= {"place": out / chosen.name} if chosen.takes("place") else {}
    started = time.monotonic()
    with one_thread():
        finding = chosen.ask(seed, report, **given)
    options = [*(["--run RUN"] if run else []), *(f"--set {each}" for each in overrides)]
    leave(chosen, finding, out, seed, time.monotonic() - started, options)
    return finding


def settings_with(chosen: Study, overrides: Sequence[str]) -> Any:
    """The study's settings with some changed, such as `steps=20`."""
    hint = get_type_hints(chosen.ask).get("settings")
    kind: Any = next((each for each in (hint, *get_args(hint)) if isinstance(each, type) and is_dataclass(each)), None)
    if kind is None:
        raise InputError(f"study {chosen.name} has no settings, so --set {overrides[0]} would not be used")
    usual, names = kind(), [field.name for field in fields(kind)]
    changed: dict[str, Any] = {}
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals or name not in names:
            raise InputError(f"--set {override}: expected KEY=VALUE, and KEY one of {', '.join(names)}")
        changed[name] = _like(getattr(usual, name), text, override)
    return kind(**changed)


def _like(usual: Any, text: str, override: str) -> Any:
    """A value as TOML writes it, of the same type as the usual one."""
    value: Any
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word
    value = _of_kind(usual, value)
    inside = [{type(each) for each in found} if isinstance(found, tuple) else set() for found in (usual, value)]
    if type(value) is not type(usual) or (inside[0] and inside[0] != inside[1]):
        raise InputError(f"--set {override}: expected something like {json.dumps(usual)}")
    return value


def _of_kind(usual: Any, value: Any) -> Any:
    """A list as a tuple and a whole number as a float, where that is what is usual."""
    if isinstance(usual, tuple) and isinstance(value, list):
        return tuple(_of_kind(usual[0], each) if usual else each for each in value)
    return float(value) if isinstance(usual, float) and type(value) is int else value


def leave(chosen: Study, finding: Finding, out: Path, seed: int, seconds: float, options: Sequence[str] = ()) -> None:
    record = {
        "study": chosen.name,
        "question": chosen.question,
        "conclusion": finding.conclusion,
        "command": " ".join([f"etude reproduce {chosen.name} --seed {seed} --out DIR", *options]),
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
