"""The staging directory of a corpus build. A build killed at any moment can be resumed from it.

lock               held by the one process that builds
plan.json          arguments and inputs; only a build with the same ones may resume
texts              every document that passed the filters, concatenated
STAGE.json         result of a finished stage (collected, decided); written atomically
shards.jsonl       one line per finished shard
corpus/            the corpus itself, renamed to its final path at the end
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.errors import InputError
from etude.files import take_lock

TEXTS = "texts"
SHARDS = "shards.jsonl"


@dataclass(frozen=True)
class StagedDocument:
    """A document that passed the filters: its name, the span of its text in `texts`, and its digest."""

    repository: str
    path: str
    offset: int
    size: int
    digest: str


class StagingArea:
    """The staging directory, open in the one process that builds in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._texts: int | None = None

    @property
    def corpus(self) -> Path:
        return self.path / "corpus"

    def stage_result(self, name: str) -> Any:
        """Return the result of a finished stage, or None if it has not finished."""
        path = self.path / f"{name}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def finish_stage(self, name: str, result: object) -> None:
        write_atomic(self.path / f"{name}.json", json.dumps(result))

    def text(self, document: StagedDocument) -> str:
        if self._texts is None:
            self._texts = os.open(self.path / TEXTS, os.O_RDONLY | os.O_CLOEXEC)
        return os.pread(self._texts, document.size, document.offset).decode()

    def finished_shards(self) -> list[dict[str, Any]]:
        """Return the finished shards. A line torn by a kill is dropped, and its shard is written again."""
        path = self.path / SHARDS
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        complete = [line for line in lines if line.endswith(b"\n")]
        if len(complete) < len(lines):
            path.write_bytes(b"".join(complete))
        return [json.loads(line) for line in complete]

    def add_shard(self, shard: dict[str, Any]) -> None:
        with (self.path / SHARDS).open("ab", buffering=0) as file:
            file.write(json.dumps(shard).encode() + b"\n")
            os.fsync(file.fileno())

    def publish(self, out: Path) -> None:
        """Move the complete corpus to `out` and delete the staging directory."""
        # Without a plan the directory is ignored: a kill after the move must not leave something that can be resumed.
        (self.path / "plan.json").unlink()
        self.corpus.replace(out)
        self.close()
        shutil.rmtree(self.path)

    def close(self) -> None:
        if self._texts is not None:
            os.close(self._texts)
            self._texts = None


@contextmanager
def open_staging_area(out: Path, plan: dict[str, Any], *, restart: bool) -> Iterator[StagingArea]:
    """Open the staging directory next to `out`, new or left by a killed build; it is kept when this build fails."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out}: already exists and is not empty; choose another name or remove it")
    path = out.with_name(f".{out.name}.partial")
    path.mkdir(parents=True, exist_ok=True)
    lock = take_lock(path / "lock", str(path))
    staging = StagingArea(path)
    try:
        if restart:
            _clear(path)
        _check_plan(path, plan)
        yield staging
    finally:
        staging.close()
        os.close(lock)


def write_atomic(path: Path, text: str) -> None:
    """Replace a file atomically: a reader sees the old content or the new, also after a kill."""
    draft = path.with_name(f"{path.name}.draft")
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def _check_plan(path: Path, plan: dict[str, Any]) -> None:
    plan_file = path / "plan.json"
    if not plan_file.exists():
        _clear(path)  # a build killed before it wrote a plan left nothing to resume
        write_atomic(plan_file, json.dumps(plan))
        return
    recorded = json.loads(plan_file.read_text(encoding="utf-8"))
    requested = json.loads(json.dumps(plan))
    differing = [key for key in {**recorded, **requested} if recorded.get(key) != requested.get(key)]
    if not differing:
        return
    lines = [f"{path} holds a half-built corpus with other arguments or inputs; repeat those, or add --restart"]
    for key in differing:
        before, now = recorded.get(key), requested.get(key)
        changed = f"    {key}: it has changed" if key.startswith("content of ") else f"    {key}: {before} -> {now}"
        lines.append(changed)
    raise InputError("\n".join(lines))


def _clear(path: Path) -> None:
    for found in path.iterdir():
        if found.is_dir():
            shutil.rmtree(found)
        elif found.name != "lock":
            found.unlink()
