"""The study contract: a function of a seed that returns measurements, panels of a plot and one sentence.

To add a study NAME, write a module `studies/NAME.py` with a function under `@study("NAME")` whose docstring's first
line is the question, and end it with `if __name__ == "__main__": main("NAME")`. The sentence is built from the measured
numbers, expected or not. A parameter `run` receives a run to read, a parameter `directory` a place for runs of its own.
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
from etude.system.progress import ProgressCallback
from studies.toy_policy import one_thread

SIGNIFICANT_DIGITS = 6  # of the numbers in a record
Point = Mapping[str, float]  # the measurements of one step
StudyFunction = TypeVar("StudyFunction", bound=Callable[..., "StudyResult"])


@dataclass(frozen=True)
class StudyResult:
    """The result of a study. `data` holds every measurement as plain JSON; `rows` are those of the printed table."""

    title: str
    conclusion: str  # one sentence, with numbers
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    panels: Sequence[Panel]
    data: Mapping[str, Any]
    settings: Any  # a dataclass


@dataclass(frozen=True)
class Study:
    """A registered study. `function` is called with a seed and a progress callback."""

    name: str
    question: str
    function: Callable[..., StudyResult]

    def accepts(self, parameter: str) -> bool:
        return parameter in inspect.signature(self.function).parameters


STUDIES: dict[str, Study] = {}


def study(name: str) -> Callable[[StudyFunction], StudyFunction]:
    """Register a function (seed, progress, settings = defaults) -> StudyResult under a name."""

    def register(function: StudyFunction) -> StudyFunction:
        if function.__module__ == "__main__":  # `python -m studies.NAME`: registered when it is imported by its name
            return function
        if name in STUDIES:
            raise InputError(f"studies: two studies have the name {name}; rename one")
        STUDIES[name] = Study(name, (function.__doc__ or "").strip().splitlines()[0], function)
        return function

    return register


def known_studies() -> Mapping[str, Study]:
    """Return all studies of this package, by name."""
    for module in pkgutil.iter_modules(studies.__path__):
        if not module.name.startswith("_"):
            import_module(f"{studies.__name__}.{module.name}")
    return dict(sorted(STUDIES.items()))


def find_study(name: str) -> Study:
    """Return the study of this name; InputError if there is none."""
    known = known_studies()
    if name not in known:
        raise InputError(f"{name!r} is not a study; there are {', '.join(known)}")
    return known[name]


def run_study(
    chosen: Study,
    out: Path,
    seed: int,
    progress: ProgressCallback,
    *,
    run: Path | None = None,
    overrides: Sequence[str] = (),
) -> StudyResult:
    """Run a study and write NAME.json and NAME.svg to `out`; runs that the study starts are kept in `out`/NAME."""
    if run is not None and not chosen.accepts("run"):
        readers = ", ".join(name for name, each in known_studies().items() if each.accepts("run"))
        raise InputError(f"study {chosen.name} reads no run, --run would not be used; those that do: {readers}")
    arguments = {"settings": settings_with_overrides(chosen, overrides)} if overrides else {}
    arguments |= {"run": run} if chosen.accepts("run") else {}
    arguments |= {"directory": out / chosen.name} if chosen.accepts("directory") else {}
    started = time.monotonic()
    with one_thread():
        result = chosen.function(seed, progress, **arguments)
    options = [*(["--run RUN"] if run else []), *(f"--set {each}" for each in overrides)]
    write_result(chosen, result, out, seed, time.monotonic() - started, options)
    return result


def settings_with_overrides(chosen: Study, overrides: Sequence[str]) -> Any:
    """Return the study's settings with overrides such as `steps=20` applied."""
    hint = get_type_hints(chosen.function).get("settings")
    kind: Any = next((each for each in (hint, *get_args(hint)) if isinstance(each, type) and is_dataclass(each)), None)
    if kind is None:
        raise InputError(f"study {chosen.name} has no settings, so --set {overrides[0]} would not be used")
    defaults, names = kind(), [field.name for field in fields(kind)]
    changed: dict[str, Any] = {}
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals or name not in names:
            raise InputError(f"--set {override}: expected KEY=VALUE, and KEY one of {', '.join(names)}")
        changed[name] = _parse_value(getattr(defaults, name), text, override)
    return kind(**changed)


def _parse_value(default: Any, text: str, override: str) -> Any:
    """Return a value in TOML syntax, or a bare word; it must have the type of the default."""
    value: Any
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    value = _coerce(default, value)
    item_types = [{type(item) for item in each} if isinstance(each, tuple) else set() for each in (default, value)]
    if type(value) is not type(default) or (item_types[0] and item_types[0] != item_types[1]):
        raise InputError(f"--set {override}: expected something like {json.dumps(default)}")
    return value


def _coerce(default: Any, value: Any) -> Any:
    """Turn a list into a tuple and an integer into a float where the default is one."""
    if isinstance(default, tuple) and isinstance(value, list):
        return tuple(_coerce(default[0], each) if default else each for each in value)
    return float(value) if isinstance(default, float) and type(value) is int else value


def write_result(
    chosen: Study, result: StudyResult, out: Path, seed: int, seconds: float, options: Sequence[str] = ()
) -> None:
    """Write the record NAME.json and the plot NAME.svg."""
    record = {
        "study": chosen.name,
        "question": chosen.question,
        "conclusion": result.conclusion,
        "command": " ".join([f"python -m studies.{chosen.name} --seed {seed} --out DIR", *options]),
        "seed": seed,
        "settings": asdict(result.settings),
        "versions": {"etude": etude.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "seconds": round(seconds, 1),
        "table": {"columns": list(result.columns), "rows": [list(row) for row in result.rows]},
        "data": round_numbers(result.data),
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{chosen.name}.json").write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    figure = draw(result.panels, title=result.title, description=result.conclusion)
    (out / f"{chosen.name}.svg").write_text(figure, encoding="utf-8")


def offset_progress(progress: ProgressCallback, before: int, total: int, note: str) -> Callable[[int], None]:
    """Return a callback that reports the progress of a part as progress of the whole."""
    return lambda done: progress(before + done, total, note)


def curve_panel(title: str, axis: Axis, curves: Mapping[str, Sequence[Point]], key: str) -> Panel:
    """Return a panel of one measurement over steps, with a line for each arm."""
    lines = [Line(name, range(len(points)), [point[key] for point in points]) for name, points in curves.items()]
    return Panel(Axis("step"), axis, lines, title=title)


def final_mean(points: Sequence[Point]) -> Point:
    """Return the mean of each measurement over the last eighth of a curve."""
    end = points[-max(1, len(points) // 8) :]
    return {key: sum(point[key] for point in end) / len(end) for key in end[0]}


def round_numbers(value: Any) -> Any:
    """Return nested data with floats rounded to SIGNIFICANT_DIGITS, and None for those that are not finite."""
    if isinstance(value, Mapping):
        return {str(key): round_numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [round_numbers(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{SIGNIFICANT_DIGITS}g}") if math.isfinite(value) else None
    return value
