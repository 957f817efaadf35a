"""Reward weights that can change during a run; every change is logged.

A run starts with the weights of its recipe. To change them, write `rewards.toml` in the run directory:

    correctness = 1.0
    effort_spent = 0.05
    thought_in_comments = 0.2      # added when the model began to reason in comments

The file replaces all weights. Workers read it to know which graders to run; the trainer reads it when it takes groups,
scores all their rollouts with the weights in force then, and logs a change. An invalid file changes nothing and is
reported in the worker's status.
"""

import json
import os
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etude.errors import InputError
from etude.rewards.reward import check_weights

FILE = "rewards.toml"
LOG = "rewards.jsonl"


class LiveWeights:
    """The reward weights in force."""

    def __init__(self, directory: Path, recipe: Mapping[str, float]) -> None:
        self.directory = directory
        self._recipe = check_weights(recipe, "the recipe's rewards")
        self._stamp: tuple[int, int] | None = None  # of the last file read
        self.problem = ""  # with the current file
        self.weights: Mapping[str, float] = self._last_logged() or self._recipe

    def current(self) -> Mapping[str, float]:
        """Return the current weights."""
        found = self._read()
        self.weights = self.weights if found is None else found
        return self.weights

    def at(self, step: int) -> Mapping[str, float]:
        """Return the weights of a policy step. The first ones, and every change, are logged with the step."""
        before = self.weights
        if not self._log_file.exists():
            self._log(0, before, "recipe")
        if self.current() != before:
            self._log(step, self.weights, FILE)
        return self.weights

    @property
    def _log_file(self) -> Path:
        return self.directory / LOG

    def _read(self) -> Mapping[str, float] | None:
        """Return the weights of the file; None if it is missing, unchanged or invalid."""
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
            self.problem = f"{path}: {error}; the weights are unchanged"
            return None

    def _last_logged(self) -> dict[str, float] | None:
        """Return the weights last logged, so that a resumed run keeps them; None if there are none."""
        try:
            lines = self._log_file.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return None
        entries = [json.loads(line) for line in lines if line.endswith("}")]  # the last line may be incomplete
        return entries[-1]["weights"] if entries else None

    def _log(self, step: int, weights: Mapping[str, float], source: str) -> None:
        entry: dict[str, Any] = {"step": step, "weights": dict(weights), "source": source, "time": time.time()}
        self.directory.mkdir(parents=True, exist_ok=True)
        with open(self._log_file, "a", encoding="utf-8") as log:
            log.write(json.dumps(entry) + "\n")
            log.flush()
            os.fsync(log.fileno())
