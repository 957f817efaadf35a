"""Weights of rewards that can change while a run goes on. Every change is written down with the step it came at.

A run's weights begin as its recipe says. Whoever watches the run may edit `rewards.toml` in its directory:

    correctness = 1.0
    effort_spent = 0.05
    thought_in_comments = 0.2      # added when the run began to think in comments

It is read before each step. A file that is wrong changes nothing and says so, once.
"""

import json
import math
import os
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etude.errors import InputError
from etude.rewards.reward import TERMS, known_terms

FILE = "rewards.toml"
LOG = "rewards.jsonl"


class LiveWeights:
    """The weights in force, by step."""

    def __init__(self, directory: Path, recipe: Mapping[str, float]) -> None:
        self.directory = directory
        self._recipe = check_weights(recipe, "the recipe's rewards")
        self._stamp: tuple[int, int] | None = None
        self.problem = ""  # with the file, as it is now
        self.weights: Mapping[str, float] = self._last_logged() or self._recipe
        if not self._log_file.exists():
            self._log(0, self.weights, "recipe")

    def at(self, step: int) -> Mapping[str, float]:
        """The weights for this step; a change since the last is logged with it."""
        found = self._read()
        if found is not None and found != self.weights:
            self.weights = found
            self._log(step, found, FILE)
        return self.weights

    @property
    def _log_file(self) -> Path:
        return self.directory / LOG

    def _read(self) -> Mapping[str, float] | None:
        """What the file says, if it is new and right."""
        path = self.directory / FILE
        try:
            found = path.stat()
        except OSError:
            return None
        stamp = found.st_mtime_ns, found.st_size
        if stamp == self._stamp:
            return None
        self._stamp, self.problem = stamp, ""
        try:
            return check_weights(tomllib.loads(path.read_text(encoding="utf-8")), str(path))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, InputError) as error:
            self.problem = f"{path}: {error}; the weights stay as they were"
            return None

    def _last_logged(self) -> dict[str, float] | None:
        """A run that is resumed goes on with the weights it had."""
        try:
            lines = self._log_file.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return None
        entries = [json.loads(line) for line in lines if line.endswith("}")]  # a torn last line is no entry
        return entries[-1]["weights"] if entries else None

    def _log(self, step: int, weights: Mapping[str, float], source: str) -> None:
        entry: dict[str, Any] = {"step": step, "weights": dict(weights), "source": source, "time": time.time()}
        self.directory.mkdir(parents=True, exist_ok=True)
        with open(self._log_file, "a", encoding="utf-8") as log:
            log.write(json.dumps(entry) + "\n")
            log.flush()
            os.fsync(log.fileno())


def check_weights(weights: Mapping[str, Any], where: str) -> dict[str, float]:
    """Weights of known terms, as numbers."""
    known_terms()
    for name, value in weights.items():
        if name not in TERMS:
            raise InputError(f"{where}: {name} is no term; there are {', '.join(sorted(TERMS))}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise InputError(f"{where}: {name} is {value!r}; expected a number")
    return {name: float(value) for name, value in weights.items()}
