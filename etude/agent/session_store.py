"""Sessions saved on disk so that they can be resumed: one directory each below $XDG_STATE_HOME/etude/sessions.

    session.json    options, request and tool state of the session (SessionRecord)
    session.trace   the trace, token for token (harness/trace_store.py)
    changes.zip     files that differ from those on disk and were not applied yet; changes.patch: the same as text

API keys are never written, only the name of the variable that holds the key.
"""

import io
import json
import os
import re
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from etude.agent.changes import format_patch
from etude.agent.options import AgentOptions
from etude.errors import InputError
from etude.files import write_atomically
from etude.harness.prompt import SessionRequest
from etude.harness.trace import Trace
from etude.harness.trace_store import from_json, load_trace, save_trace, to_json
from etude.pods.workspace import FileChange, FileState

VERSION = 2
RECORD_FILE, TRACE_FILE, CHANGES_FILE, PATCH_FILE = "session.json", "session.trace", "changes.zip", "changes.patch"
ID_PATTERN = re.compile(r"[0-9a-f]{4,32}")
SHORT_ID_LENGTH = 12  # characters of an id that are displayed


@dataclass(frozen=True)
class SessionRecord:
    """The contents of session.json. Field names are its keys."""

    id: str
    options: AgentOptions
    tokenizer: str  # digest; "" if the client does not handle tokens
    request: SessionRequest
    started: float  # seconds since 1970
    updated: float
    ending: str = ""
    tools: Mapping[str, Any] = field(default_factory=dict)  # ToolExecutor.state()
    version: int = VERSION


def sessions_directory() -> Path:
    """Return the directory that holds all saved sessions."""
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser().absolute() / "etude" / "sessions"


def save_session(record: SessionRecord, trace: Trace, changes: Sequence[FileChange]) -> Path:
    """Save a session and return its directory."""
    directory = sessions_directory() / record.id
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    save_trace(trace, directory / TRACE_FILE)
    _write_changes(directory / CHANGES_FILE, changes)
    write_atomically(directory / PATCH_FILE, format_patch(changes).encode("utf-8", "surrogateescape"))
    write_atomically(
        directory / RECORD_FILE,
        json.dumps(to_json(replace(record, updated=time.time()), "session"), indent=1).encode(),
    )
    return directory


def load_session(id: str) -> tuple[SessionRecord, Trace, list[FileChange]]:
    """Load a session by its id or a unique prefix of it."""
    directory = find_session(id)
    return (
        load_record(directory),
        load_trace(directory / TRACE_FILE),
        _read_changes(directory / CHANGES_FILE),
    )


def find_session(id: str) -> Path:
    """Return the directory of the session whose id starts with `id`."""
    matching = sorted(sessions_directory().glob(f"{id}*")) if ID_PATTERN.fullmatch(id) else []
    if len(matching) != 1:
        found = f"{len(matching)} sessions have this prefix" if matching else "no such session"
        raise InputError(f"session {id}: {found}; see `etude agent --list`")
    return matching[0]


def is_session_id(word: str) -> bool:
    """Return whether a word is the id of a saved session, or too long a hex number to be anything else."""
    return bool(ID_PATTERN.fullmatch(word)) and (
        len(word) >= SHORT_ID_LENGTH or any(sessions_directory().glob(f"{word}*"))
    )


def load_record(directory: Path) -> SessionRecord:
    file = directory / RECORD_FILE
    try:
        data = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: cannot be read: {error}") from None
    if not isinstance(data, dict) or data.get("version") != VERSION:
        raise InputError(f"{file}: not a session of version {VERSION}")
    found: SessionRecord = from_json(SessionRecord, data, str(file))
    return found


def sessions_of_directory(directory: Path) -> list[SessionRecord]:
    """Return the sessions of a directory, newest first, skipping those that cannot be read."""
    found = []
    for file in sessions_directory().glob(f"*/{RECORD_FILE}"):
        try:
            record = load_record(file.parent)
        except InputError:
            continue
        if record.options.directory == directory:
            found.append(record)
    return sorted(found, key=lambda record: -record.updated)


def latest_session_id(directory: Path) -> str:
    """Return the id of the newest session of a directory."""
    if not (found := sessions_of_directory(directory)):
        raise InputError(f"there is no session of {directory} to resume; start one without --resume")
    return found[0].id


def _write_changes(file: Path, changes: Sequence[FileChange]) -> None:
    """Write the states of the files as a table, and their contents where they are known."""
    table = []
    with io.BytesIO() as out:
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
            for number, change in enumerate(changes):
                row: list[Any] = [change.path]
                for side, state in (("before", change.before), ("after", change.after)):
                    row.append(state and [state.kind, state.digest, state.executable])
                    if state is not None and state.data is not None:
                        archive.writestr(f"{number}.{side}", state.data)
                table.append(row)
            archive.writestr("table.json", json.dumps(table))
        write_atomically(file, out.getvalue())


def _read_changes(file: Path) -> list[FileChange]:
    def state(row: Any, name: str) -> FileState | None:
        if row is None:
            return None
        kind, digest, executable = from_json(tuple[Literal["file", "symlink"], str, bool], row, str(file))
        return FileState(kind, digest, executable, archive.read(name) if name in names else None)

    try:
        with zipfile.ZipFile(file) as archive:
            names = set(archive.namelist())
            table = json.loads(archive.read("table.json"))
            return [
                FileChange(str(path), state(before, f"{number}.before"), state(after, f"{number}.after"))
                for number, (path, before, after) in enumerate(table)
            ]
    except (OSError, ValueError, LookupError, TypeError, zipfile.BadZipFile) as error:
        raise InputError(f"{file}: cannot be read: {error}") from None
