"""Where the reinforcement learning of a run lies, and how its processes tell how they are.

    rl/slots.sqlite, rl/evaluations.sqlite    the tables of rollouts to train on and to measure with
    rl/model/                                 what the run began with: config, tokenizer, weights
    rl/weights/                               the chain of versions, unless the recipe names another store
    rl/traces/, rl/evaluation-traces/         every finished rollout
    rl/partial/                               rollouts that are under way, as far as they were written down
    rl/trainer/                               checkpoints, and what each step came to
    rl/services/NAME.json, rl/logs/NAME.log   one of each for every process

Processes share these files and HTTP, nothing else.
"""

import ctypes
import json
import os
import signal
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from etude.errors import EtudeError, InputError
from etude.recipe.recipe import Recipe, load_recipe
from etude.recipe.sections import RlStage

PR_SET_PDEATHSIG = 1


class GivenUp(EtudeError):
    """A process of the run cannot go on, and started again it would come to the same end."""

    exit_code: ClassVar[int] = 4


@dataclass(frozen=True)
class Place:
    """The paths of one run."""

    run: Path
    weights_url: str = ""  # of another store than the run's own directory

    @property
    def root(self) -> Path:
        return self.run / "rl"

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
        return self.root / "origin.json"  # what `model` is a copy of

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
        """Make the directories."""
        for path in (self.traces, self.evaluation_traces, self.partial, self.steps, self.services, self.logs):
            path.mkdir(parents=True, exist_ok=True)


def place_and_section(run: Path | str) -> tuple[Place, RlStage, Recipe]:
    """What a service needs to know, from the run's own recipe."""
    path = Path(os.path.abspath(run))
    if not (path / "recipe.toml").is_file():
        raise InputError(f"{path} is not a run: it has no recipe.toml; name a directory made by `etude run`")
    recipe = load_recipe(path / "recipe.toml")
    if recipe.rl is None:
        raise InputError(f"{path}: this run has no stage rl")
    return Place(path, recipe.rl.weights.store), recipe.rl, recipe


def read_tasks(place: Place) -> dict[str, dict[str, Path]]:
    """Directories of tasks by name: those to learn from under "train", those to measure with under "held_out"."""
    found = json.loads(place.tasks.read_text(encoding="utf-8"))
    return {split: {name: Path(path) for name, path in tasks.items()} for split, tasks in found.items()}


def write_whole(path: Path, data: bytes | str) -> None:
    """Replace a file in one go: whoever reads sees the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        part.write_bytes(data.encode() if isinstance(data, str) else data)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------- how services are


def write_status(place: Place, name: str, **facts: Any) -> None:
    """What a service says of itself: a `state`, what it is `waiting_for`, and figures."""
    known = {"pid": os.getpid(), "time": time.time(), "state": "working", "waiting_for": ""}
    write_whole(place.services / f"{name}.json", json.dumps({**known, **facts}))


def read_status(place: Place, name: str) -> dict[str, Any] | None:
    """What a service last said; None if it never has."""
    try:
        found = json.loads((place.services / f"{name}.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except json.JSONDecodeError as error:  # never by us: it is replaced whole
        raise EtudeError(f"{place.services / name}.json: damaged: {error}") from error
    return dict(found)


def statuses(place: Place) -> dict[str, dict[str, Any]]:
    """What every service last said, by name."""
    names = sorted(path.stem for path in place.services.glob("*.json"))
    found = {name: read_status(place, name) for name in names}
    return {name: status for name, status in found.items() if status is not None}


def parent_process() -> int:
    """Who started this process, as it said itself: by the time we look, it may be dead and somebody else our parent."""
    return int(os.environ.get("ETUDE_PARENT", os.getppid()))


def die_with_parent(parent: int) -> None:
    """Have the kernel end this process when the one that started it ends, however that happens."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before we asked
        raise EtudeError("the process that started this one has ended")
