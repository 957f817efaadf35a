"""The work directory of a corpus that is being built: one writer, stages that are done or not, texts on disk.

    lock               held while a process builds; another one is told who holds it
    plan.json          arguments and inputs; a build goes on only under the same ones
    texts              every document that passed the filters, back to back
    STAGE.json         what a finished stage found; written whole or not at all
    shards.jsonl       one line for each finished shard
    corpus/            what becomes the corpus

Killed at any moment it is in one of few states, and each is where a build can go on from.
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
class Entry:
    """One spooled document: its place, and where its text lies."""

    repository: str
    path: str
    offset: int
    size: int
    digest: str


class Workspace:
    """The directory, open for the one process that builds in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._texts: int | None = None

    @property
    def corpus(self) -> Path:
        return self.path / "corpus"

    def stage(self, name: str) -> Any:
        """What a finished stage found, None when it has not finished."""
        path = self.path / f"{name}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def finish_stage(self, name: str, found: object) -> None:
        write_whole(self.path / f"{name}.json", json.dumps(found))

    def text(self, entry: Entry) -> str:
        if self._texts is None:
            self._texts = os.open(self.path / TEXTS, os.O_RDONLY | os.O_CLOEXEC)
        return os.pread(self._texts, entry.size, entry.offset).decode()

    def finished_shards(self) -> list[dict[str, Any]]:
        """The shards that are whole; the line that a kill tore is dropped, and its shard is made again."""
        path = self.path / SHARDS
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        whole = [line for line in lines if line.endswith(b"\n")]
        if len(whole) < len(lines):
            path.write_bytes(b"".join(whole))
        return [json.loads(line) for line in whole]

    def add_shard(self, entry: dict[str, Any]) -> None:
        with (self.path / SHARDS).open("ab", buffering=0) as file:
            file.write(json.dumps(entry).encode() + b"\n")
            os.fsync(file.fileno())

    def publish(self, out: Path) -> None:
        """The corpus gets its name, complete; the rest of the work directory goes."""
        # Without a plan what is left here counts for nothing: a kill after the move must not look like half a build.
        (self.path / "plan.json").unlink()
        self.corpus.replace(out)
        self.close()
        shutil.rmtree(self.path)

    def close(self) -> None:
        if self._texts is not None:
            os.close(self._texts)
            self._texts = None


@contextmanager
def open_workspace(out: Path, plan: dict[str, Any], *, restart: bool) -> Iterator[Workspace]:
    """The work directory beside `out`, new or left by a build that was killed; it stays when this one fails."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out}: already exists and is not empty; choose another name or remove it")
    path = out.with_name(f".{out.name}.partial")
    path.mkdir(parents=True, exist_ok=True)
    lock = take_lock(path / "lock", str(path))
    work = Workspace(path)
    try:
        if restart:
            _clear(path)
        _check_plan(path, plan)
        yield work
    finally:
        work.close()
        os.close(lock)


def write_whole(path: Path, text: str) -> None:
    """Replace a file so that a reader, or a kill, meets the old content or the new."""
    draft = path.with_name(f"{path.name}.draft")
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def _check_plan(path: Path, plan: dict[str, Any]) -> None:
    place = path / "plan.json"
    if not place.exists():
        _clear(path)  # a build killed before it had a plan has nothing worth keeping
        write_whole(place, json.dumps(plan))
        return
    recorded = json.loads(place.read_text(encoding="utf-8"))
    asked = json.loads(json.dumps(plan))
    differing = [key for key in {**recorded, **asked} if recorded.get(key) != asked.get(key)]
    if not differing:
        return
    lines = [f"{path} holds a half-built corpus of other arguments or inputs; repeat those, or add --restart"]
    for key in differing:
        before, now = recorded.get(key), asked.get(key)
        changed = f"    {key}: it has changed" if key.startswith("content of ") else f"    {key}: {before} -> {now}"
        lines.append(changed)
    raise InputError("\n".join(lines))


def _clear(path: Path) -> None:
    for found in path.iterdir():
        if found.is_dir():
            shutil.rmtree(found)
        elif found.name != "lock":
            found.unlink()
