"""A run directory: everything one run of a recipe leaves behind, in one layout.

    recipe.toml            the resolved recipe; a resume with another one is refused
    metrics.jsonl          one object per line: time, stage, step and the values
    state.json             which stages are done and the facts each keeps; replaced whole, never edited
    lineage.jsonl          one record per artefact: what it is, what it was made from, content digests
    artefacts/NAME/        what stages make; checkpoints/STAGE-STEP/ for model weights
    lock                   held with flock by the one process that may write; says which

Kill the writer at any moment: what has its final name is complete, and the next writer sweeps the rest away.
"""

import errno
import hashlib
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from etude import __version__
from etude.errors import EtudeError, InputError
from etude.files import take_lock
from etude.recipe.recipe import Recipe, differing_keys, load_recipe, render_toml

UNFINISHED = ".unfinished-"  # prefix of every name that is still being written
MOST_NAMED = 10  # differences of a recipe that are told: with more it is another one
FORMAT = 1  # of state.json and lineage.jsonl


@dataclass(frozen=True)
class Parent:
    """What an artefact was made from: a path or another name for it, and the digest of its content then."""

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

    def __init__(self, path: Path, recipe: Recipe, lock: int | None) -> None:
        self.path = path
        self.recipe = recipe
        self._lock = lock
        self.listeners: list[Callable[[str, int, dict[str, Any]], None]] = []  # told of every line that is logged
        self._state: dict[str, dict[str, Any]] = _read_state(path / "state.json")

    @classmethod
    def create_or_resume(
        cls, path: Path | str, recipe: Recipe, *, resume: bool = False, allow_changes: bool = False
    ) -> Self:
        """Open for writing: a new run, or with `resume` the one that is there.

        `allow_changes` lets a run go on under a different recipe, which then replaces the recorded one.
        """
        path = Path(os.path.abspath(path))
        check_usable(path)
        with _disk(path):
            path.mkdir(parents=True, exist_ok=True)
            lock = take_lock(path / "lock", f"run {path}")
        try:
            if (path / "recipe.toml").exists():
                check_resumable(path, recipe, resume, allow_changes)
            _sweep(path)
            _replace(path / "recipe.toml", render_toml(recipe))
            return cls(path, recipe, lock)
        except BaseException:
            os.close(lock)
            raise

    @classmethod
    def read(cls, path: Path | str) -> Self:
        """Open for reading; a writer may be at work at the same time."""
        path = Path(os.path.abspath(path))
        if not (path / "recipe.toml").is_file():
            raise InputError(f"{path} is not a run: it has no recipe.toml; name a directory made by `etude run`")
        return cls(path, load_recipe(path / "recipe.toml"), None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let another process write. The lock file stays: without it two processes could lock two files."""
        if self._lock is not None:
            os.ftruncate(self._lock, 0)
            os.close(self._lock)
            self._lock = None

    # ------------------------------------------------------------------------------------------- metrics

    def log(self, stage: str, step: int, /, **values: object) -> None:
        """Append one line of metrics. A number that is not finite is kept as a string: "NaN", "Infinity"."""
        if taken := values.keys() & {"time", "stage", "step"}:
            raise ValueError(f"{sorted(taken)} are set by log itself")
        self._append("metrics.jsonl", {"time": round(time.time(), 3), "stage": stage, "step": step, **values})
        for listen in self.listeners:
            listen(stage, step, values)

    def metrics(self, stage: str | None = None) -> list[dict[str, Any]]:
        """All complete lines of metrics, oldest first."""
        records = _read_jsonl(self.path / "metrics.jsonl")
        return [record for record in records if stage in (None, record.get("stage"))]

    def rewind(self, stage: str, step: int = -1) -> None:
        """Forget metrics of `stage` after `step`: a stage calls it before it repeats them."""
        self._check_writable()
        kept = [record for record in self.metrics() if record["stage"] != stage or record["step"] <= step]
        _replace(self.path / "metrics.jsonl", "".join(json.dumps(record) + "\n" for record in kept))

    # --------------------------------------------------------------------------------------------- state

    def stage_done(self, stage: str) -> bool:
        return bool(self._state.get(stage, {}).get("done"))

    def facts(self, stage: str) -> dict[str, Any]:
        """What the stage has kept so far."""
        return dict(self._state.get(stage, {}).get("facts", {}))

    def keep(self, stage: str, **facts: object) -> None:
        """Remember small facts of a stage across a kill: where it stands, what it found."""
        self._save_stage(stage, self.stage_done(stage), facts)

    def finish_stage(self, stage: str, **facts: object) -> None:
        """Mark the stage done, for good: a resume skips it."""
        self._save_stage(stage, True, facts)

    def _save_stage(self, stage: str, done: bool, facts: dict[str, object]) -> None:
        self._check_writable()
        entry = {"done": done, "saved": _now(), "facts": {**self.facts(stage), **plain(facts)}}
        state = {**self._state, stage: entry}
        _replace(self.path / "state.json", json.dumps({"format": FORMAT, "stages": state}, indent=2) + "\n")
        self._state = state

    # ----------------------------------------------------------------------------------------- artefacts

    def artefact(
        self, name: str, *, kind: str, stage: str, parents: Sequence[Parent | Artefact | Path] = ()
    ) -> AbstractContextManager[Path]:
        """A directory to write into; it gets its name and its lineage record only if the block succeeds."""
        return self._write_directory(self.path / "artefacts" / name, kind, stage, parents)

    def checkpoint(
        self, stage: str, step: int, *, parents: Sequence[Parent | Artefact | Path] = ()
    ) -> AbstractContextManager[Path]:
        """Like `artefact`, for model weights: `checkpoints/STAGE-STEP`, of kind "checkpoint"."""
        final = self.path / "checkpoints" / f"{stage}-{step}"
        return self._write_directory(final, "checkpoint", stage, parents)

    def artefacts(self, kind: str | None = None) -> list[Artefact]:
        """The artefacts that are there, oldest first, each once."""
        newest: dict[Path, Artefact] = {}
        for record in _read_jsonl(self.path / "lineage.jsonl"):
            artefact = _artefact_from(record, self.path)
            if kind in (None, artefact.kind) and artefact.path.is_dir():
                newest.pop(artefact.path, None)  # made again: it moves to the end
                newest[artefact.path] = artefact
        return list(newest.values())

    def find(self, kind: str) -> Artefact:
        """The newest artefact of a kind."""
        if not (found := self.artefacts(kind)):
            raise InputError(f"run {self.path} holds no {kind}; run the stage that makes one")
        return found[-1]

    def remove(self, artefact: Artefact) -> None:
        """Give the space of an artefact back. Its lineage stays; what was made from it still names it."""
        self._check_writable()
        gone = artefact.path.with_name(f"{UNFINISHED}gone-{artefact.path.name}")
        with _disk(artefact.path):
            artefact.path.rename(gone)  # at once: a kill never leaves half of it under its name
            shutil.rmtree(gone)

    @contextmanager
    def _write_directory(
        self, final: Path, kind: str, stage: str, parents: Sequence[Parent | Artefact | Path]
    ) -> Iterator[Path]:
        self._check_writable()
        if final.name.startswith(".") or final.parent.parent != self.path:
            raise InputError(f"{final.name!r} cannot name an artefact; use a plain word")
        origins = tuple(self.parent(parent) for parent in parents)
        draft = final.with_name(UNFINISHED + final.name)
        old = final.with_name(f"{UNFINISHED}old-{final.name}")
        with _disk(final):
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
        try:
            yield draft
            with _disk(final):
                _sync_tree(draft)
                digest = content_digest(draft)
                # Moved aside, not deleted in place: a kill must not leave half of the old one under its name.
                if final.exists():
                    final.rename(old)
                draft.rename(final)
                _sync(final.parent)
                shutil.rmtree(old, ignore_errors=True)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        record = Artefact(
            name=final.name,
            kind=kind,
            path=final.relative_to(self.path),  # relative, so a run directory can be moved
            stage=stage,
            run=self.recipe.name,
            parents=origins,
            digest=digest,
            created=_now(),
            etude=__version__,
        )
        self._append("lineage.jsonl", {"format": FORMAT, **asdict(record)})

    def parent(self, parent: Parent | Artefact | Path) -> Parent:
        """How the lineage names something that an artefact is made from."""
        if isinstance(parent, Parent):
            return parent
        path, digest = (
            (parent.path, parent.digest) if isinstance(parent, Artefact) else (parent, content_digest(parent))
        )
        inside = path.is_relative_to(self.path)
        return Parent(str(path.relative_to(self.path) if inside else path), digest)

    # -------------------------------------------------------------------------------------------- writing

    def _check_writable(self) -> None:
        if self._lock is None:
            raise EtudeError(f"run {self.path} is open for reading only; open it with Run.create_or_resume")

    def _append(self, name: str, record: dict[str, object]) -> None:
        self._check_writable()
        line = json.dumps(plain(record), allow_nan=False) + "\n"
        path = self.path / name
        # One unbuffered write per line: a kill leaves the line whole or torn, and never mixes two.
        with _disk(path), path.open("ab", buffering=0) as file:
            size = file.tell()
            try:
                written = file.write(line.encode())
            except OSError:
                file.truncate(size)
                raise
            if written != len(line.encode()):  # a full disk takes part of a line without a word
                file.truncate(size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def content_digest(path: Path) -> str:
    """sha256 of a file; of a directory, the sha256 of what `sha256sum` prints for its files in order."""
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    if not path.is_dir():
        raise InputError(f"{path} does not exist, so it cannot be recorded as a parent")
    files = {file.relative_to(path).as_posix(): file for file in path.rglob("*") if file.is_file()}
    return files_digest(sorted(files.items()))


def files_digest(files: Iterable[tuple[str, Path]]) -> str:
    """One digest for files and the names they go by."""
    manifest = "".join(f"{content_digest(path)}  {name}\n" for name, path in files)
    return hashlib.sha256(manifest.encode(errors="surrogateescape")).hexdigest()


# ------------------------------------------------------------------------------------------- opening a run


def check_usable(path: Path) -> None:
    """Refuse a directory that holds somebody's files before anything is written into it."""
    if path.exists() and not path.is_dir():
        raise InputError(f"{path} is a file; name a directory for the run")
    if not path.is_dir() or (path / "recipe.toml").exists():
        return
    # A run killed while it was being created holds nothing but these.
    ours = ("lock", UNFINISHED)
    if foreign := [name for name in sorted(os.listdir(path)) if not name.startswith(ours)]:
        raise InputError(f"{path} is not a run and not empty (it has {foreign[0]}); name another directory")


def check_resumable(path: Path, recipe: Recipe, resume: bool, allow_changes: bool) -> None:
    if not resume:
        raise InputError(f"{path} already holds a run; add --resume to go on with it or name another directory")
    recorded = load_recipe(path / "recipe.toml")
    if recorded == recipe or allow_changes:
        return
    begun = _begun(path)
    free = {"track", *(stage for stage in (*recorded.stages, *recipe.stages) if stage not in begun)}
    waiting = [stage for stage in recipe.stages if stage not in begun]
    # a new stage must come after what has begun: what is finished would not be made again on top of it
    if begun <= set(recipe.stages) and list(recipe.stages[-len(waiting) :] if waiting else ()) == waiting:
        free.add("stages")
    lines = [f"    {line}" for line in differing_keys(recorded, recipe) if re.split(r"[.:]", line)[0] not in free]
    if lines:
        more = [f"    and {len(lines) - MOST_NAMED} more"] if len(lines) > MOST_NAMED else []
        about = "\n".join([*lines[:MOST_NAMED], *more])
        raise InputError(
            f"run {path} was started with another recipe; undo this or name another directory "
            f"(only stages that have not begun may change)\n{about}"
        )


def _begun(path: Path) -> set[str]:
    """Stages that have left anything behind: their settings can no longer change under them."""
    records = [*_read_jsonl(path / "lineage.jsonl"), *_read_jsonl(path / "metrics.jsonl")]
    return {*_read_state(path / "state.json"), *(str(record.get("stage")) for record in records)}


def _sweep(path: Path) -> None:
    """Clear away what a killed writer left half done. Only the holder of the lock may call this."""
    # No artefact's name starts with a dot, so in their folders every such name is somebody's draft.
    for draft in (*path.glob(f"{UNFINISHED}*"), *path.glob("artefacts/.*"), *path.glob("checkpoints/.*")):
        with _disk(draft):
            shutil.rmtree(draft) if draft.is_dir() else draft.unlink()
    for name in ("metrics.jsonl", "lineage.jsonl"):
        _drop_torn_line(path / name)


def _drop_torn_line(path: Path) -> None:
    if not path.exists():
        return
    with _disk(path), path.open("rb+") as file:
        whole = _whole_length(file.read())
        file.truncate(whole)


# --------------------------------------------------------------------------------------- files that survive


def _whole_length(content: bytes) -> int:
    """Bytes up to the end of the last whole line; a power cut may also leave a last line of rubbish."""
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


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    with _disk(path):
        content = path.read_bytes()
    records = []
    for number, line in enumerate(content[: _whole_length(content)].splitlines(), start=1):
        if not _is_object(line):
            raise EtudeError(f"{path}:{number} is not a JSON object; the file was changed by something else")
        records.append(json.loads(line))
    return records


def _read_state(path: Path) -> dict[str, dict[str, Any]]:
    if not path.exists():
        return {}
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        if state["format"] != FORMAT:
            raise EtudeError(f"{path} has format {state['format']}, this etude reads {FORMAT}; use a newer one")
        stages: dict[str, dict[str, Any]] = {name: dict(entry) for name, entry in state["stages"].items()}
        return stages
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EtudeError(f"{path} cannot be understood ({error}); it was changed by something else") from None


def _replace(path: Path, text: str) -> None:
    """Give `path` new content at once: a reader or a kill sees the old content or the new, never a part."""
    draft = path.with_name(UNFINISHED + path.name)
    with _disk(path):
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        _sync(path.parent)


def _sync_tree(root: Path) -> None:
    """Have everything below on disk. Many at once: those that wait together share a commit of the file system's
    journal. For a set of tasks, 13,500 small files, that is 2 s instead of 57 on a busy disk.
    """
    below = [os.path.join(folder, name) for folder, _, names in os.walk(root) for name in (*names, "")]
    with ThreadPoolExecutor(16) as pool:
        for _ in pool.map(_sync, below):
            pass


def _sync(path: str | Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


@contextmanager
def _disk(path: Path) -> Iterator[None]:
    """Turn what the file system says into one line that names the file."""
    try:
        yield
    except OSError as error:
        advice = "; free some space, then continue with --resume" if error.errno == errno.ENOSPC else ""
        raise EtudeError(f"{error.filename or path}: {error.strerror or error}{advice}") from error


def _artefact_from(record: dict[str, Any], run: Path) -> Artefact:
    try:
        fields = {name: record[name] for name in Artefact.__dataclass_fields__}
        parents = tuple(Parent(**parent) for parent in record["parents"])
        return Artefact(**{**fields, "path": run / record["path"], "parents": parents})
    except (KeyError, TypeError) as error:
        raise EtudeError(
            f"{run / 'lineage.jsonl'} holds a line that is no artefact ({error}); it was changed"
        ) from None


def plain(value: Any) -> Any:
    """The value as JSON can hold it; tensors and numpy scalars of one element become numbers."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else json.dumps(value)  # JSON has no word for these
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    item: Callable[[], object] | None = getattr(value, "item", None)
    if item is None:
        raise TypeError(f"{value!r} is neither a number, a string nor a collection of them")
    return plain(item())


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
