"""The paths of a run's reinforcement learning, below its run directory.

    rl/slots.sqlite, rl/evaluations.sqlite    the rollout queues of training and of evaluation
    rl/model/                                 the model that RL started from: config, tokenizer, weights
    rl/weights/                               the chain of weight versions, unless the recipe names another store
    rl/traces/, rl/evaluation-traces/         the trace of every finished rollout
    rl/partial/                               checkpoints of rollouts in progress
    rl/trainer/                               trainer checkpoints, and the facts of each policy step
    rl/services/NAME.json, rl/logs/NAME.log   status and log of every process

Processes share these files and HTTP, nothing else.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from etude.errors import InputError


@dataclass(frozen=True)
class RunLayout:
    """The paths of one run."""

    run: Path
    weights_url: str = ""  # of a store outside the run directory

    @property
    def root(self) -> Path:
        return self.run / "rl"

    @property
    def recipe(self) -> Path:
        return self.run / "recipe.toml"

    @property
    def slots(self) -> Path:
        return self.root / "slots.sqlite"

    @property
    def evaluations(self) -> Path:
        return self.root / "evaluations.sqlite"

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def origin(self) -> Path:
        return self.root / "origin.json"  # the artefact that `model` is a copy of

    @property
    def store(self) -> str:
        return self.weights_url or str(self.root / "weights")

    @property
    def traces(self) -> Path:
        return self.root / "traces"

    @property
    def evaluation_traces(self) -> Path:
        return self.root / "evaluation-traces"

    @property
    def partial(self) -> Path:
        return self.root / "partial"

    @property
    def trainer(self) -> Path:
        return self.root / "trainer"

    @property
    def steps(self) -> Path:
        return self.trainer / "steps"

    @property
    def services(self) -> Path:
        return self.root / "services"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def tasks(self) -> Path:
        return self.root / "tasks.json"

    def make(self) -> None:
        """Create the directories."""
        for path in (self.traces, self.evaluation_traces, self.partial, self.steps, self.services, self.logs):
            path.mkdir(parents=True, exist_ok=True)

    def step_file(self, step: int) -> Path:
        """Return the file with the facts of a policy step."""
        return self.steps / f"{step:06d}.json"


def run_directory(path: Path | str) -> Path:
    """Return the absolute path of a run; InputError if it has no recipe."""
    found = Path(os.path.abspath(path))
    if not (found / "recipe.toml").is_file():
        raise InputError(f"{found} is not a run: it has no recipe.toml; name a directory made by `etude run`")
    return found


def read_task_lists(layout: RunLayout) -> dict[str, dict[str, Path]]:
    """Return task directories by name: training tasks under "train", evaluation tasks under "held_out"."""
    lists = json.loads(layout.tasks.read_text(encoding="utf-8"))
    return {split: {name: Path(path) for name, path in tasks.items()} for split, tasks in lists.items()}
