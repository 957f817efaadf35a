"""Sessions on disk, so that one can go on another day: a directory each, below $XDG_STATE_HOME/etude/sessions.

    session.json    what it worked on, with which model, the state of its tools
    session.trace   what was said, token for token (harness/store.py)
    changes.zip     files that differ from those on disk and were not applied yet; changes.patch: the same to read

No key is ever in there: of the endpoint's key only the name of its variable.
"""

import json
import os
import re
import time
import uuid
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from etude.agent.diff import Change, patch
from etude.agent.manifest import Entry
from etude.agent.options import Model
from etude.errors import InputError
from etude.harness.prompt import Request
from etude.harness.tool_set import ToolSet
from etude.harness.trace import Trace
from etude.harness.trace_store import load_trace, plain, read, save_trace

VERSION = 1
RECORD, TRACE, CHANGES, PATCH = "session.json", "session.trace", "changes.zip", "changes.patch"
ID = re.compile(r"[0-9a-f]{4,32}")
SHOWN = 12  # characters of an id that people are shown


@dataclass(frozen=True)
class Saved:
    """A session that was left."""

    id: str
    directory: str  # real path of the working directory
    identity: tuple[int, int]  # its device and inode
    direct: bool
    model: Model
    tokenizer: str  # digest; "" where the model is not known by its tokens
    environment: ToolSet
    request: Request
    image: str
    egress: tuple[str, ...]
    include: tuple[str, ...]
    history: bool
    started: float  # seconds since 1970
    updated: float
    ending: str = ""
    tools: Mapping[str, Any] = field(default_factory=dict)  # the toolbox's own state
    version: int = VERSION


def home() -> Path:
    """Where sessions are kept."""
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser().absolute() / "etude" / "sessions"


def identity(directory: Path) -> tuple[int, int]:
    info = directory.stat()
    return info.st_dev, info.st_ino


def save(saved: Saved, trace: Trace, changes: Sequence[Change]) -> Path:
    """Write a session down as it is now; the directory it is in."""
    place = home() / saved.id
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    save_trace(trace, place / TRACE)
    _write_changes(place / CHANGES, changes)
    text = patch(changes, Path(saved.directory))
    _replace(place / PATCH, text.encode("utf-8", "surrogateescape"))
    _replace(place / RECORD, json.dumps(plain(replace(saved, updated=time.time()), "session"), indent=1).encode())
    return place


def load(id: str) -> tuple[Saved, Trace, list[Change]]:
    """A session by its id, or the beginning of it."""
    place = find(id)
    return load_record(place), load_trace(place / TRACE), _read_changes(place / CHANGES)


def find(id: str) -> Path:
    """The directory of a session."""
    matching = sorted(home().glob(f"{id}*")) if ID.fullmatch(id) else []
    if len(matching) != 1:
        found = f"{len(matching)} sessions begin so" if matching else "there is no such session"
        raise InputError(f"session {id}: {found}; see `etude agent --list`")
    return matching[0]


def is_id(word: str) -> bool:
    """Whether a word is the id of a session that is there, or can be nothing else."""
    return bool(ID.fullmatch(word)) and (len(word) >= SHOWN or any(home().glob(f"{word}*")))


def load_record(place: Path) -> Saved:
    file = place / RECORD
    try:
        data = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: cannot be read: {error}") from None
    if not isinstance(data, dict) or data.get("version") != VERSION:
        raise InputError(f"{file}: not a session of version {VERSION}")
    found: Saved = read(Saved, data, str(file))
    return found


def of_directory(directory: Path) -> list[Saved]:
    """The sessions of a directory, newest first; one that cannot be read is left out."""
    found = []
    for file in home().glob(f"*/{RECORD}"):
        try:
            saved = load_record(file.parent)
        except InputError:
            continue
        if saved.directory == str(directory):
            found.append(saved)
    return sorted(found, key=lambda saved: -saved.updated)


def last_of(directory: Path) -> str:
    """The id of the newest session of a directory."""
    if not (found := of_directory(directory)):
        raise InputError(f"there is no session of {directory} to go on with")
    return found[0].id


def _write_changes(file: Path, changes: Sequence[Change]) -> None:
    part = file.with_name(f".{uuid.uuid4().hex}.part")
    table = [[change.path, plain(change.before, "before"), plain(change.after, "after")] for change in changes]
    try:
        with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("table.json", json.dumps(table))
            for number, change in enumerate(changes):
                archive.writestr(str(number), change.data)
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def _read_changes(file: Path) -> list[Change]:
    try:
        with zipfile.ZipFile(file) as archive:
            table = json.loads(archive.read("table.json"))
            found = []
            for number, row in enumerate(table):
                path, before, after = read(tuple[str, Entry | None, Entry | None], row, str(file))
                found.append(Change(path, before, after, archive.read(str(number))))
            return found
    except (OSError, ValueError, LookupError, TypeError, zipfile.BadZipFile) as error:
        raise InputError(f"{file}: cannot be read: {error}") from None


def _replace(file: Path, data: bytes) -> None:
    """Write a file that is there whole or not at all."""
    part = file.with_name(f".{uuid.uuid4().hex}.part")
    try:
        part.write_bytes(data)
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)
