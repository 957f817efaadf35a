"""A run directory: everything one run of a recipe writes, in one layout.

    recipe.toml            the resolved recipe; a resume with another one is refused
    metrics.jsonl          one object per line: time, stage, step and the values
    state.json             finished stages and the facts each keeps; always replaced as a whole
    lineage.jsonl          one record per artefact: kind, parents, content digests
    artefacts/NAME/        outputs of stages; checkpoints/STAGE-STEP/ for model weights
    lock                   held with flock by the one process that may write; names it

The writer may be killed at any moment: whatever has its final name is complete, and the next writer removes the rest.
"""

import errno
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from pydantic import Field

from etude import __version__
from etude.config import Settings, differing_keys, read_toml, render_toml, settings_data
from etude.errors import EtudeError, InputError
from etude.files import commit_directory, content_digest, disk_errors, take_lock, write_atomically
from etude.runs.layout import RunLayout

UNFINISHED = ".unfinished-"  # prefix of every artefact that is still being written
MAX_DIFFERENCES = 10  # differing keys that an error lists
FORMAT = 1  # of state.json and lineage.jsonl


class RunSettings(Settings):
    """The part of a recipe that a run directory uses. `etude.recipe.Recipe` extends it with the stages' tables."""

    name: str = Field(min_length=1, description="name of the run, also in its loggers")
    seed: int = Field(default=0, ge=0, lt=2**63, description="seed of all random choices")
    stages: tuple[str, ...] = Field(strict=False, min_length=1, description="stages to run, in pipeline order")
    loggers: tuple[Literal["wandb", "tensorboard"], ...] = Field(
        default=(), strict=False, description="tools that get a copy of the metrics, if installed"
    )


@dataclass(frozen=True)
class Parent:
    """An input of an artefact: a path or other name, and the digest of its content at that time."""

    path: str
    digest: str


@dataclass(frozen=True)
class Artefact:
    """A finished directory of a run, as its lineage records it."""

    name: str
    kind: str
    path: Path
    stage: str
    run: str
    parents: tuple[Parent, ...]
    digest: str
    created: str
    etude: str


class Run:
    """One run directory, open for reading or, as a context manager, for writing by this process alone."""

    def __init__(self, path: Path, settings: RunSettings, lock: int | None) -> None:
        self.path, self.layout, self.settings = path, RunLayout(path), settings
        self._lock = lock
        self.listeners: list[Callable[[str, int, dict[str, Any]], None]] = []  # called with every logged line
        self._state: dict[str, dict[str, Any]] = read_stage_states(self.layout.state)

    @classmethod
    def create_or_resume(
        cls, path: Path | str, recipe: RunSettings, *, resume: bool = False, allow_changes: bool = False
    ) -> Self:
        """Open for writing: a new run or, with `resume`, the existing one.

        `allow_changes` lets a run continue under a different recipe, which then replaces the recorded one.
        """
        layout = RunLayout(path := Path(os.path.abspath(path)))
        check_usable(layout)
        with disk_errors(path):
            path.mkdir(parents=True, exist_ok=True)
            lock = take_lock(layout.lock, f"run {path}")
        try:
            if layout.recipe.exists():
                check_resumable(layout, recipe, resume, allow_changes)
            _remove_unfinished(layout)
            _replace(layout.recipe, render_toml(recipe))
            return cls(path, recipe, lock)
        except BaseException:
            os.close(lock)
            raise

    @classmethod
    def read(cls, path: Path | str) -> Self:
        """Open for reading; a writer may be active at the same time."""
        layout = RunLayout.of_run(path)
        return cls(layout.run, _recorded_settings(layout), None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock. The lock file stays: without it two processes could lock two different files."""
        if self._lock is not None:
            os.ftruncate(self._lock, 0)
            os.close(self._lock)
            self._lock = None

    # ------------------------------------------------------------------------------------------ metrics

    def log(self, stage: str, step: int, /, **values: object) -> None:
        """Append one line of metrics. A number that is not finite is kept as a string: "NaN", "Infinity"."""
        if taken := values.keys() & {"time", "stage", "step"}:
            raise ValueError(f"{sorted(taken)} are set by log itself")
        self._append(self.layout.metrics, {"time": round(time.time(), 3), "stage": stage, "step": step, **values})
        for listener in self.listeners:
            listener(stage, step, values)

    def metrics(self, stage: str | None = None) -> list[dict[str, Any]]:
        """Return all complete lines of metrics, oldest first."""
        records = read_jsonl(self.layout.metrics)
        return [record for record in records if stage in (None, record.get("stage"))]

    def rewind(self, stage: str, step: int = -1) -> None:
        """Delete the metrics of `stage` after `step`, before the stage repeats them."""
        self.remove_metrics(stage, lambda record: record["step"] > step)

    def remove_metrics(self, stage: str, is_lost: Callable[[dict[str, Any]], bool]) -> None:
        """Delete the metrics of `stage` that are no longer so."""
        self._check_writable()
        kept = [record for record in self.metrics() if record["stage"] != stage or not is_lost(record)]
        _replace(self.layout.metrics, "".join(json.dumps(record) + "\n" for record in kept))

    # ------------------------------------------------------------------------------------------ state

    def stage_done(self, stage: str) -> bool:
        return bool(self._state.get(stage, {}).get("done"))

    def facts(self, stage: str) -> dict[str, Any]:
        """Return the facts that the stage has saved so far."""
        return dict(self._state.get(stage, {}).get("facts", {}))

    def save_facts(self, stage: str, **facts: object) -> None:
        """Save small facts of a stage that must survive a kill, such as its position."""
        self._save_stage(stage, self.stage_done(stage), facts)

    def finish_stage(self, stage: str, **facts: object) -> None:
        """Mark the stage as done: a resume skips it."""
        self._save_stage(stage, True, facts)

    def _save_stage(self, stage: str, done: bool, facts: dict[str, object]) -> None:
        self._check_writable()
        entry = {"done": done, "saved": _now(), "facts": {**self.facts(stage), **to_plain(facts)}}
        state = {**self._state, stage: entry}
        _replace(self.layout.state, json.dumps({"format": FORMAT, "stages": state}, indent=2) + "\n")
        self._state = state

    # ------------------------------------------------------------------------------------------ artefacts

    def artefact(
        self, name: str, *, kind: str, stage: str, parents: Sequence[Parent | Artefact | Path] = ()
    ) -> AbstractContextManager[Path]:
        """Yield a directory to write into; it gets its name and its lineage record only if the block succeeds."""
        return self._write_directory(self.layout.artefacts / name, kind, stage, parents)

    def checkpoint(
        self, stage: str, step: int, *, parents: Sequence[Parent | Artefact | Path] = ()
    ) -> AbstractContextManager[Path]:
        """Like `artefact`, for model weights: `checkpoints/STAGE-STEP`, of kind "checkpoint"."""
        final = self.layout.checkpoints / f"{stage}-{step}"
        return self._write_directory(final, "checkpoint", stage, parents)

    def artefacts(self, kind: str | None = None) -> list[Artefact]:
        """Return the artefacts that exist, oldest first, each once."""
        newest: dict[Path, Artefact] = {}
        for record in read_jsonl(self.layout.lineage):
            artefact = _artefact_from(record, self.path)
            if kind in (None, artefact.kind) and artefact.path.is_dir():
                newest.pop(artefact.path, None)  # written again: it moves to the end
                newest[artefact.path] = artefact
        return list(newest.values())

    def find(self, kind: str) -> Artefact:
        """Return the newest artefact of a kind."""
        if not (found := self.artefacts(kind)):
            raise InputError(f"run {self.path} holds no {kind}; run the stage that makes one")
        return found[-1]

    def remove(self, artefact: Artefact) -> None:
        """Delete the files of an artefact. Its lineage record stays, because later artefacts name it as a parent."""
        self._check_writable()
        removed = artefact.path.with_name(f"{UNFINISHED}gone-{artefact.path.name}")
        with disk_errors(artefact.path):
            artefact.path.rename(removed)  # first, so that a kill never leaves half of it under its name
            shutil.rmtree(removed)

    @contextmanager
    def _write_directory(
        self, final: Path, kind: str, stage: str, parents: Sequence[Parent | Artefact | Path]
    ) -> Iterator[Path]:
        self._check_writable()
        if final.name.startswith(".") or final.parent.parent != self.path:
            raise InputError(f"{final.name!r} cannot name an artefact; use a plain word")
        recorded_parents = tuple(self.parent(parent) for parent in parents)
        draft = final.with_name(UNFINISHED + final.name)
        with disk_errors(final):
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
        try:
            yield draft
            with disk_errors(final):
                digest = content_digest(draft)
                commit_directory(draft, final)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        record = Artefact(
            name=final.name,
            kind=kind,
            path=final.relative_to(self.path),  # relative, so that a run directory can be moved
            stage=stage,
            run=self.settings.name,
            parents=recorded_parents,
            digest=digest,
            created=_now(),
            etude=__version__,
        )
        self._append(self.layout.lineage, {"format": FORMAT, **asdict(record)})

    def parent(self, parent: Parent | Artefact | Path) -> Parent:
        """Return how the lineage names an input of an artefact."""
        if isinstance(parent, Parent):
            return parent
        path, digest = (
            (parent.path, parent.digest) if isinstance(parent, Artefact) else (parent, content_digest(parent))
        )
        inside = path.is_relative_to(self.path)
        return Parent(str(path.relative_to(self.path) if inside else path), digest)

    # ------------------------------------------------------------------------------------------ writing

    def _check_writable(self) -> None:
        if self._lock is None:
            raise EtudeError(f"run {self.path} is open for reading only; open it with Run.create_or_resume")

    def _append(self, path: Path, record: dict[str, object]) -> None:
        self._check_writable()
        line = json.dumps(to_plain(record), allow_nan=False) + "\n"
        # One unbuffered write per line: a kill leaves the line whole or torn, and never mixes two.
        with disk_errors(path), path.open("ab", buffering=0) as file:
            size = file.tell()
            try:
                written = file.write(line.encode())
            except OSError:
                file.truncate(size)
                raise
            if written != len(line.encode()):  # a full disk accepts part of a line without an error
                file.truncate(size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


# ------------------------------------------------------------------------------------------ opening a run


def check_usable(layout: RunLayout) -> None:
    """Refuse a directory that holds other files, before anything is written into it."""
    path = layout.run
    if path.exists() and not path.is_dir():
        raise InputError(f"{path} is a file; name a directory for the run")
    if not path.is_dir() or layout.recipe.exists():
        return
    # A run that was killed while it was created holds nothing but these.
    own = ("lock", UNFINISHED, ".recipe.toml.")
    if foreign := [name for name in sorted(os.listdir(path)) if not name.startswith(own)]:
        raise InputError(f"{path} is not a run and not empty (it has {foreign[0]}); name another directory")


def check_resumable(layout: RunLayout, recipe: RunSettings, resume: bool, allow_changes: bool) -> None:
    """Refuse to continue a run under a recipe that differs in anything that has already been used."""
    if not resume:
        raise InputError(f"{layout.run} already holds a run; add --resume to continue it or name another directory")
    recorded, wanted = read_toml(layout.recipe), settings_data(recipe)
    if recorded == wanted or allow_changes:
        return
    digests = wanted.get("plugin_digests", {})
    for plugin, digest in recorded.get("plugin_digests", {}).items():
        if digests.get(plugin, digest) != digest:
            raise InputError(
                f"run {layout.run} was started with another version of the plugin {plugin}; restore that version"
            )
    started = _started_stages(layout)
    free = {
        "loggers",
        "cluster",
        *(stage for stage in (*recorded.get("stages", ()), *recipe.stages) if stage not in started),
    }
    waiting = [stage for stage in recipe.stages if stage not in started]
    # A new stage must come after those that have started, because their outputs are not made again.
    if started <= set(recipe.stages) and list(recipe.stages[-len(waiting) :] if waiting else ()) == waiting:
        free.add("stages")
    # Any mesh continues to the same losses, and the run service may listen elsewhere.
    same = r"(\w+\.)?parallel[.:]|service[.:]"
    differing = [line for line in differing_keys(recorded, wanted) if not re.match(same, line)]
    lines = [f"    {line}" for line in differing if re.split(r"[.:]", line)[0] not in free]
    if lines:
        more = [f"    and {len(lines) - MAX_DIFFERENCES} more"] if len(lines) > MAX_DIFFERENCES else []
        differences = "\n".join([*lines[:MAX_DIFFERENCES], *more])
        raise InputError(
            f"run {layout.run} was started with another recipe; undo this or name another directory "
            f"(only stages that have not started may change)\n{differences}"
        )


def _recorded_settings(layout: RunLayout) -> RunSettings:
    data = read_toml(layout.recipe)
    known = {name: value for name, value in data.items() if name in RunSettings.model_fields}
    return RunSettings.model_validate(known)


def _started_stages(layout: RunLayout) -> set[str]:
    """Return the stages that have written anything: their settings can no longer change."""
    records = [*read_jsonl(layout.lineage), *read_jsonl(layout.metrics)]
    return {*read_stage_states(layout.state), *(str(record.get("stage")) for record in records)}


def _remove_unfinished(layout: RunLayout) -> None:
    """Remove unfinished files of a killed writer. Only the holder of the lock may call this."""
    # No artefact's name starts with a dot, so in these folders every such name is a draft.
    drafts = [*layout.run.glob(f"{UNFINISHED}*"), *layout.run.glob(".*.part"), *layout.artefacts.glob(".*")]
    for draft in (*drafts, *layout.checkpoints.glob(".*")):
        with disk_errors(draft):
            shutil.rmtree(draft) if draft.is_dir() else draft.unlink()
    for path in (layout.metrics, layout.lineage):
        _drop_torn_line(path)


def _drop_torn_line(path: Path) -> None:
    if not path.exists():
        return
    with disk_errors(path), path.open("rb+") as file:
        complete = _complete_length(file.read())
        file.truncate(complete)


# ------------------------------------------------------------------------------------------ reading and writing


def _complete_length(content: bytes) -> int:
    """Return the length up to the last complete line; a power cut may also leave garbage in the last line."""
    end = content.rfind(b"\n") + 1
    start = content.rfind(b"\n", 0, max(end - 1, 0)) + 1
    if end and not _is_object(content[start:end]):
        return start
    return end


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    with disk_errors(path):
        content = path.read_bytes()
    records = []
    for number, line in enumerate(content[: _complete_length(content)].splitlines(), start=1):
        if not _is_object(line):
            raise EtudeError(f"{path}:{number} is not a JSON object; another program has changed the file")
        records.append(json.loads(line))
    return records


def read_stage_states(path: Path) -> dict[str, dict[str, Any]]:
    if not path.exists():
        return {}
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        if state["format"] != FORMAT:
            raise EtudeError(f"{path} has format {state['format']}, this etude reads {FORMAT}; use a newer one")
        stages: dict[str, dict[str, Any]] = {name: dict(entry) for name, entry in state["stages"].items()}
        return stages
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EtudeError(f"{path} cannot be understood ({error}); another program has changed the file") from None


def _replace(path: Path, text: str) -> None:
    with disk_errors(path):
        write_atomically(path, text, durable=True)


def _artefact_from(record: dict[str, Any], run: Path) -> Artefact:
    try:
        fields = {name: record[name] for name in Artefact.__dataclass_fields__}
        parents = tuple(Parent(**parent) for parent in record["parents"])
        return Artefact(**{**fields, "path": run / record["path"], "parents": parents})
    except (KeyError, TypeError) as error:
        file = run / "lineage.jsonl"
        raise EtudeError(
            f"{file} has a line that is not an artefact ({error}); another program has changed the file"
        ) from None


def to_plain(value: Any) -> Any:
    """Return the value as JSON can hold it; tensors and numpy scalars of one element become numbers."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else json.dumps(value)  # JSON has no NaN or Infinity
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    item: Callable[[], object] | None = getattr(value, "item", None)
    if item is None:
        raise TypeError(f"{value!r} is neither a number, a string nor a collection of them")
    return to_plain(item())


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
