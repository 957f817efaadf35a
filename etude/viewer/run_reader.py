"""Read a run directory without trusting its contents: it may be written to, unfinished, or damaged.

Unreadable parts are left out and reported as problems, which the page shows. Nothing here fails because of the contents
of a run, and nothing is written into it.
"""

import json
import os
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from etude.errors import InputError
from etude.files import lock_holder
from etude.runs.layout import RunLayout

JsonObject = dict[str, Any]
ReportProblem = Callable[[str], None]  # called with a message for the page


def is_run(path: Path) -> bool:
    return RunLayout(path).recipe.is_file()


def find_runs(path: Path) -> dict[str, Path]:
    """Return runs by name: the directory itself under "" if it is a run, otherwise the runs directly below it."""
    if is_run(path):
        return {"": path}
    try:
        below = sorted(each for each in path.iterdir() if is_run(each))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; name a run, or a directory of runs") from None
    if not below:
        raise InputError(f"{path} is not a run and contains none: no recipe.toml; name a directory made by `etude run`")
    return {each.name: each for each in below}


class JsonLines:
    """Reads a JSON Lines file that is being appended to; each read parses only the new lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[JsonObject] = []
        self.damaged: list[int] = []  # numbers of lines
        self._file: tuple[int, int] = (0, 0)
        self._at = self._line = 0

    def read(self, report_problem: ReportProblem) -> list[JsonObject]:
        """Return all records and report damaged lines. A last line without a newline is still being written."""
        try:
            with self.path.open("rb") as file:
                found = os.fstat(file.fileno())
                if (found.st_dev, found.st_ino) != self._file or found.st_size < self._at:  # the file was replaced
                    self.records, self.damaged, self._at, self._line = [], [], 0, 0
                    self._file = found.st_dev, found.st_ino
                file.seek(self._at)
                self._parse(file.read())
        except FileNotFoundError:
            self.records, self.damaged, self._at, self._line = [], [], 0, 0
        except OSError as error:
            report_problem(f"{self.path.name} cannot be read: {error.strerror}")
        if self.damaged:
            shown = ", ".join(map(str, self.damaged[:5])) + (", ..." if len(self.damaged) > 5 else "")
            lines = "line" if len(self.damaged) == 1 else "lines"
            report_problem(f"{self.path.name}: {lines} {shown} cannot be parsed and {_verb(self.damaged)} left out")
        return self.records

    def _parse(self, data: bytes) -> None:
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        for line in whole.split(b"\n")[:-1]:
            self._line += 1
            try:
                record = json.loads(line)
            except ValueError:  # includes UnicodeDecodeError
                record = None
            if isinstance(record, dict):
                self.records.append(record)
            else:
                self.damaged.append(self._line)


def _verb(things: list[int]) -> str:
    return "is" if len(things) == 1 else "are"


def read_json(path: Path, report_problem: ReportProblem) -> JsonObject:
    """Read a JSON object; return an empty one if there is none."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        report_problem(f"{path.name} cannot be read: {error}")
        return {}
    if not isinstance(found, dict):
        report_problem(f"{path.name}: expected an object")
        return {}
    return found


def read_recipe(layout: RunLayout, report_problem: ReportProblem) -> tuple[str, JsonObject]:
    """Return the recipe's text and its tables, unvalidated: it may be of any version of Etude."""
    try:
        text = layout.recipe.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        report_problem(f"recipe.toml cannot be read: {error.strerror}")
        return "", {}
    try:
        return text, tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        report_problem(f"recipe.toml cannot be parsed: {error}")
        return text, {}


def read_stages(layout: RunLayout, recipe: JsonObject, report_problem: ReportProblem) -> list[JsonObject]:
    """Return the stages in the recipe's order with their saved state; stages that are not in the recipe come last."""
    state = read_json(layout.state, report_problem).get("stages", {})
    kept: JsonObject = state if isinstance(state, dict) else {}
    wanted = recipe.get("stages", [])
    names = [str(name) for name in wanted] if isinstance(wanted, list) else []
    names += [name for name in kept if name not in names]
    stages = []
    for name in names:
        entry = kept.get(name) if isinstance(kept.get(name), dict) else {}
        assert isinstance(entry, dict)
        facts = entry.get("facts")
        stages.append(
            {
                "name": name,
                "done": bool(entry.get("done")),
                "saved": entry.get("saved"),
                "facts": facts if isinstance(facts, dict) else {},
            }
        )
    return stages


# ------------------------------------------------------------------------------------------- status


@dataclass(frozen=True)
class RunStatus:
    """The state of a run, and a text for the page."""

    state: Literal["running", "finished", "stopped"]
    text: str


def run_status(layout: RunLayout, stages: list[JsonObject]) -> RunStatus:
    """Return the status: running if a process holds the lock, finished if all stages are done, otherwise stopped."""
    if holder := lock_holder(layout.lock):
        elsewhere = "" if holder.is_local else f"held by a process on {holder.host} "
        return RunStatus("running", f"{elsewhere}since {_format_time(holder.since)}")
    unfinished = [stage["name"] for stage in stages if not stage["done"]]
    if not stages or unfinished:
        stage = unfinished[0] if unfinished else "its first stage"
        return RunStatus("stopped", f"in {stage}: no process is running; `etude run ... --resume` continues it")
    return RunStatus("finished", "all stages are done")


def _format_time(time: str) -> str:
    try:
        return datetime.fromisoformat(time).astimezone().strftime("%H:%M:%S on %d %B %Y")
    except ValueError:
        return time


def as_number(value: object) -> float | None:
    """Return a finite number as float, None for anything else."""
    if isinstance(value, bool):
        return float(value)
    if not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if found - found == 0 else None
