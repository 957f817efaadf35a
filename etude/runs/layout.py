"""The files of a run directory: the one place that names them.

    recipe.toml, metrics.jsonl, state.json, lineage.jsonl, lock     see `etude.runs.run`
    artefacts/NAME/, checkpoints/STAGE-STEP/                        outputs of stages
    logs/STAGE/rank-N.log                               of further processes of a training stage
    .cluster-probe                            by which nodes of a cluster show that they see this directory
    rl/slots.sqlite, rl/evaluations.sqlite    the rollout queues of training and of evaluation
    rl/tasks.json                             task directories by name
    rl/id                                     identifies the run to its weight store; a copy of the run has the same
    rl/model/, rl/origin.json                 the model that RL started from, and the artefact it is a copy of
    rl/weights/                               the chain of weight versions, unless the recipe names another store
    rl/traces/, rl/evaluation-traces/         the trace of every finished rollout
    rl/partial/                               checkpoints of rollouts in progress
    rl/pods/                                  state of the workers' pods
    rl/trainer/                               trainer checkpoints, the facts of each policy step, the present session
    rl/exhausted                              why no prompt is left, if that is so
    rl/siblings.json, rl/siblings/            harder siblings of retired tasks
    rl/validation.json                        solve rate on validation by policy step
    rl/evaluated.json                         policy steps whose evaluations have all ended
    live.toml, rl/changes.jsonl               settings that were changed during the run, and when they took effect
    rl/collapsed                              why the run was stopped, if its validation fell
    rl/services/NAME.json, rl/logs/NAME.log   status and log of every process
    evaluation/MODEL/                         the same files for the evaluation of one model, by the stage `evaluation`
    evaluation/pods/                          state of the pods of all these evaluations
    control/                                  a run of its own, by the stage `control`
    scorings.jsonl                            which model was scored on which task set, and when

The processes of `rl`, and those of an evaluation, share these files and HTTP, nothing else.
"""

import json
import os
from pathlib import Path

from etude.config import read_toml
from etude.errors import InputError

RL_ROOT, EVALUATION_ROOT = "rl", "evaluation"


class RunLayout:
    """The paths of one run. `weights_url` is a store outside the run directory.

    `service_root` is the directory that a set of processes shares: `rl`, or `evaluation/MODEL`.
    """

    def __init__(self, run: Path, weights_url: str = "", service_root: str = RL_ROOT) -> None:
        self.run, self.service_root = run, service_root
        self.recipe, self.lock = run / "recipe.toml", run / "lock"
        self.metrics, self.state, self.lineage = run / "metrics.jsonl", run / "state.json", run / "lineage.jsonl"
        self.artefacts, self.checkpoints = run / "artefacts", run / "checkpoints"
        self.rank_logs = run / "logs"
        self.scorings, self.control = run / "scorings.jsonl", run / "control"
        self.cluster_probe = run / ".cluster-probe"
        self.root = root = run / service_root
        self.id = root / "id"
        self.slots, self.evaluations = root / "slots.sqlite", root / "evaluations.sqlite"
        self.tasks, self.exhausted = root / "tasks.json", root / "exhausted"
        self.pods = (root if service_root == RL_ROOT else root.parent) / "pods"
        self.model, self.origin, self.store = root / "model", root / "origin.json", weights_url or str(root / "weights")
        self.siblings, self.sibling_tasks = root / "siblings.json", root / "siblings"
        self.evaluated = root / "evaluated.json"
        self.live, self.changes = run / "live.toml", root / "changes.jsonl"
        self.validation, self.collapsed = root / "validation.json", root / "collapsed"
        self.traces, self.evaluation_traces = root / "traces", root / "evaluation-traces"
        self.partial, self.trainer = root / "partial", root / "trainer"
        self.steps, self.trainer_session = self.trainer / "steps", self.trainer / "session"
        self.logs = root / "logs"
        self.service_address, self.service_token = root / "service.json", root / "service.token"
        self.instance, self.statuses = root / "service.instance", root / "statuses.json"

    @classmethod
    def of_run(cls, path: Path | str, service_root: str = RL_ROOT) -> "RunLayout":
        """Return the layout of an existing run; InputError if it has no recipe."""
        layout = cls(Path(os.path.abspath(path)), service_root=service_root)
        if not layout.recipe.is_file():
            raise InputError(f"{layout.run} is not a run: it has no recipe.toml; name a directory made by `etude run`")
        return layout

    def evaluation_of(self, model: str) -> "RunLayout":
        """Return the layout of the evaluation of one model."""
        return RunLayout(self.run, service_root=f"{EVALUATION_ROOT}/{model}")

    def sessions_table(self) -> str:
        """Return the table of the recorded recipe that says how sessions run: `[rl]` if there is that stage."""
        return "rl" if "rl" in read_toml(self.recipe) else "evaluation.sessions"

    def make(self) -> None:
        """Create the directories that the processes share."""
        for path in (self.traces, self.evaluation_traces, self.partial, self.steps, self.logs):
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
