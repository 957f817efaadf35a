"""The files of a run directory: the one place that names them.

    recipe.toml, metrics.jsonl, state.json, lineage.jsonl, lock     see `etude.runs.run`
    artefacts/NAME/, checkpoints/STAGE-STEP/                        outputs of stages
    rl/slots.sqlite, rl/evaluations.sqlite    the rollout queues of training and of evaluation
    rl/tasks.json                             task directories by name
    rl/id                                     identifies the run to its weight store; a copy of the run has the same
    rl/model/, rl/origin.json                 the model that RL started from, and the artefact it is a copy of
    rl/weights/                               the chain of weight versions, unless the recipe names another store
    rl/traces/, rl/evaluation-traces/         the trace of every finished rollout
    rl/partial/                               checkpoints of rollouts in progress
    rl/pods/                                  state of the workers' pods
    rl/trainer/                               trainer checkpoints, and the facts of each policy step
    rl/exhausted                              why no prompt is left, if that is so
    rl/siblings.json, rl/siblings/            harder siblings of retired tasks
    rl/validation.json                        solve rate on validation by policy step
    rl/collapsed                              why the run was stopped, if its validation fell
    rl/services/NAME.json, rl/logs/NAME.log   status and log of every process

The processes of `rl` share these files and HTTP, nothing else.
"""

import json
import os
from pathlib import Path

from etude.errors import InputError


class RunLayout:
    """The paths of one run. `weights_url` is a store outside the run directory."""

    def __init__(self, run: Path, weights_url: str = "") -> None:
        self.run = run
        self.recipe, self.lock = run / "recipe.toml", run / "lock"
        self.metrics, self.state, self.lineage = run / "metrics.jsonl", run / "state.json", run / "lineage.jsonl"
        self.artefacts, self.checkpoints = run / "artefacts", run / "checkpoints"
        self.root = root = run / "rl"
        self.id = root / "id"
        self.slots, self.evaluations = root / "slots.sqlite", root / "evaluations.sqlite"
        self.tasks, self.exhausted, self.pods = root / "tasks.json", root / "exhausted", root / "pods"
        self.model, self.origin, self.store = root / "model", root / "origin.json", weights_url or str(root / "weights")
        self.siblings, self.sibling_tasks = root / "siblings.json", root / "siblings"
        self.validation, self.collapsed = root / "validation.json", root / "collapsed"
        self.traces, self.evaluation_traces = root / "traces", root / "evaluation-traces"
        self.partial, self.trainer = root / "partial", root / "trainer"
        self.steps = self.trainer / "steps"
        self.services, self.logs, self.sampler_token = root / "services", root / "logs", root / "sampler.token"

    @classmethod
    def of_run(cls, path: Path | str) -> "RunLayout":
        """Return the layout of an existing run; InputError if it has no recipe."""
        layout = cls(Path(os.path.abspath(path)))
        if not layout.recipe.is_file():
            raise InputError(f"{layout.run} is not a run: it has no recipe.toml; name a directory made by `etude run`")
        return layout

    def make(self) -> None:
        """Create the directories of RL."""
        for path in (self.traces, self.evaluation_traces, self.partial, self.steps, self.services, self.logs):
            path.mkdir(parents=True, exist_ok=True)

    def run_id(self) -> str:
        """Return the id of this run, which its weight store records; "" before RL has started."""
        return self.id.read_text(encoding="utf-8").strip() if self.id.exists() else ""

    def step_file(self, step: int) -> Path:
        """Return the file with the facts of a policy step."""
        return self.steps / f"{step:06d}.json"

    def task_lists(self) -> dict[str, dict[str, Path]]:
        """Return task directories by name: training tasks under "train", evaluation tasks under "held_out"."""
        lists = json.loads(self.tasks.read_text(encoding="utf-8"))
        return {split: {name: Path(path) for name, path in tasks.items()} for split, tasks in lists.items()}
