"""A run directory, read without trust: beside whoever writes it, half finished, or damaged.

What cannot be understood is left out and told in words, for the page to show: nothing here fails because of what is in
a run, and nothing is ever written into it.
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
from etude.files import holder

Facts = dict[str, Any]
Complain = Callable[[str], None]


def is_run(path: Path) -> bool:
    return (path / "recipe.toml").is_file()


def find_runs(path: Path) -> dict[str, Path]:
    """The runs in a directory, by name: itself under "" if it is one, else those right below it."""
    if is_run(path):
        return {"": path}
    try:
        below = sorted(each for each in path.iterdir() if is_run(each))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; name a run, or a directory of runs") from None
    if not below:
        raise InputError(
            f"{path} is no run, and there is none in it: no recipe.toml; name a directory made by `etude run`"
        )
    return {each.name: each for each in below}


class JsonLines:
    """A file of JSON objects, one per line, that somebody appends to: each look reads only what is new."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[Facts] = []
        self.damaged: list[int] = []  # numbers of lines
        self._file: tuple[int, int] = (0, 0)
        self._at = self._line = 0

    def read(self, complain: Complain) -> list[Facts]:
        """All records; what is no record is complained of. A last line without its end is still being written."""
        try:
            with self.path.open("rb") as file:
                found = os.fstat(file.fileno())
                if (found.st_dev, found.st_ino) != self._file or found.st_size < self._at:  # another file has its name
                    self.records, self.damaged, self._at, self._line = [], [], 0, 0
                    self._file = found.st_dev, found.st_ino
                file.seek(self._at)
                self._take(file.read())
        except FileNotFoundError:
            self.records, self.damaged, self._at, self._line = [], [], 0, 0
        except OSError as error:
            complain(f"{self.path.name} cannot be read: {error.strerror}")
        if self.damaged:
            shown = ", ".join(map(str, self.damaged[:5])) + (", ..." if len(self.damaged) > 5 else "")
            lines = "line" if len(self.damaged) == 1 else "lines"
            complain(f"{self.path.name}: {lines} {shown} cannot be understood and {_is(self.damaged)} left out")
        return self.records

    def _take(self, data: bytes) -> None:
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        for line in whole.split(b"\n")[:-1]:
            self._line += 1
            try:
                record = json.loads(line)
            except ValueError:  # bytes that are no text are one too
                record = None
            if isinstance(record, dict):
                self.records.append(record)
            else:
                self.damaged.append(self._line)


def _is(things: list[int]) -> str:
    return "is" if len(things) == 1 else "are"


def read_json(path: Path, complain: Complain) -> Facts:
    """A JSON object; an empty one where there is none."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        complain(f"{path.name} cannot be read: {error}")
        return {}
    if not isinstance(found, dict):
        complain(f"{path.name}: expected an object")
        return {}
    return found


def read_recipe(path: Path, complain: Complain) -> tuple[str, Facts]:
    """The recipe's text and its tables, of whatever version of Etude: nothing is checked."""
    try:
        text = (path / "recipe.toml").read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        complain(f"recipe.toml cannot be read: {error.strerror}")
        return "", {}
    try:
        return text, tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        complain(f"recipe.toml cannot be understood: {error}")
        return text, {}


def read_stages(path: Path, recipe: Facts, complain: Complain) -> list[Facts]:
    """The stages in the recipe's order, each with what it has kept; those that nobody asked for come last."""
    state = read_json(path / "state.json", complain).get("stages", {})
    kept: Facts = state if isinstance(state, dict) else {}
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


# ------------------------------------------------------------------------------------------- is anybody there


@dataclass(frozen=True)
class Life:
    """Whether a run goes on."""

    state: Literal["running", "finished", "stopped"]
    words: str


def life(path: Path, stages: list[Facts]) -> Life:
    """A run is over when its stages are done; before that somebody holds its lock, or it stopped."""
    if who := holder(path / "lock"):
        elsewhere = "" if who.here else f"held by a process on {who.host} "
        return Life("running", f"{elsewhere}since {_clock(who.since)}")
    unfinished = [stage["name"] for stage in stages if not stage["done"]]
    if not stages or unfinished:
        stage = unfinished[0] if unfinished else "its first stage"
        return Life("stopped", f"in {stage}: no process works on it; `etude run ... --resume` goes on")
    return Life("finished", "all stages are done")


def _clock(time: str) -> str:
    try:
        return datetime.fromisoformat(time).astimezone().strftime("%H:%M:%S on %d %B %Y")
    except ValueError:
        return time


def number(value: object) -> float | None:
    """A finite number, or None for anything else."""
    if isinstance(value, bool):
        return float(value)
    if not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if found - found == 0 else None
