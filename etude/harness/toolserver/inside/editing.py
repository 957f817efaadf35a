"""Exact replacement, writing and deleting of files inside the workspace; each change is atomic.

Text is compared as bytes, so the rest of the file stays unchanged, valid UTF-8 or not. Only line ends are flexible:
"\\n" from the model matches "\\r\\n" in the file. Before the first change of a file its original is saved, to compare
lints; the copies are named by path relative to the root, so that they are valid in a fork.
"""

from __future__ import annotations

import os

from etude.harness.toolserver.inside.paths import (
    Refusal,
    ToolWorkspace,
    check_text,
    read_bytes,
    refusal_for,
    replace_file,
)
from etude.pod_stdlib import dumps, loads

TYPE_CHECKING = False  # typing is slow to import
if TYPE_CHECKING:
    from typing import Any

MAX_NAME = 100  # bytes of a path that is part of a file name
MAX_ORIGINAL = 1 << 20  # bytes of a file whose original is saved


def search_replace(workspace: ToolWorkspace, arguments: dict[str, Any]) -> dict[str, Any]:
    """Replace the only occurrence of `old_string`, or with `replace_all` every one."""
    old, new = arguments["old_string"], arguments["new_string"]
    path = workspace.resolve(arguments["file_path"])
    shown = workspace.display(path)
    if old == "":
        return _create(workspace, path, new)
    real = workspace.writable(path)
    data, _ = read_bytes(workspace, path)
    check_text(workspace, path, data)
    if old == new:
        raise Refusal("bad_arguments", "old_string and new_string are the same; nothing was changed")
    if not old.strip():
        raise Refusal("bad_arguments", "old_string is only white space; give some of the text around it too")
    places = _find(data, old)
    if not places:
        from etude.harness.toolserver.inside import nearest

        raise Refusal("environment", f"old_string was not found in {shown}.\n{nearest.explain(data, old)}")
    if len(places) > 1 and not arguments.get("replace_all"):
        raise Refusal("environment", _ambiguous_match_text(shown, data, [start for start, _ in places]))
    replacement = _lines_as_in(new, data)
    parts, at = [], 0
    for start, end in places:
        parts += [data[at:start], replacement]
        at = end
    changed = b"".join([*parts, data[at:]])
    if changed == data:
        raise Refusal("bad_arguments", "old_string and new_string differ only in line ends; nothing was changed")
    _save_and_write(workspace, real, changed, data, existed=True)
    removed = sum(_line_count(data[start:end]) for start, end in places)
    added = _line_count(replacement) * len(places)
    first = data.count(b"\n", 0, places[0][0]) + 1
    where = f"at line {first}" if len(places) == 1 else f"in {len(places)} places, the first at line {first}"
    facts = {"path": workspace.display(real), "lines_added": added, "lines_removed": removed, "places": len(places)}
    return {"text": f"Edited {shown} {where}.", "facts": facts}


def _create(workspace: ToolWorkspace, path: str, text: str) -> dict[str, Any]:
    """Create a new file (an empty `old_string`)."""
    if os.path.exists(path) and os.stat(path).st_size:
        message = f"{workspace.display(path)} exists and is not empty; an empty old_string only makes a new file"
        raise Refusal("bad_arguments", f"{message}. To change it, give the text to replace as old_string")
    return _write_file(workspace, path, text.encode(), "Created")


def write(workspace: ToolWorkspace, arguments: dict[str, Any]) -> dict[str, Any]:
    """Write a complete file. With `only_new`, refuse to replace a file that was not read before."""
    path = workspace.resolve(arguments["file_path"])
    unread = arguments.get("only_new") and workspace.display(os.path.realpath(path)) not in arguments.get("seen", ())
    if unread and os.path.exists(path):
        hint = workspace.hint("read_file", "Read it with {} first.")
        raise Refusal("environment", f"{workspace.display(path)} exists and has not been read in this session.{hint}")
    return _write_file(workspace, path, arguments["contents"].encode(), "Wrote")


def _write_file(workspace: ToolWorkspace, path: str, data: bytes, verb: str) -> dict[str, Any]:
    shown = workspace.display(path)
    real = workspace.writable(path)
    if os.path.isdir(real):
        raise Refusal("environment", f"{shown} is a directory, not a file")
    if os.path.lexists(real) and not os.path.isfile(real):
        raise Refusal("environment", f"{shown} is not a regular file (a pipe, a socket or a device)")
    existed = os.path.exists(real)
    old = _read_if_small(workspace, real) if existed else None
    _save_and_write(workspace, real, data, old, existed)
    added, removed = _line_count(data), _line_count(old or b"")
    facts = {"path": workspace.display(real), "lines_added": added, "lines_removed": removed}
    return {"text": f"{verb} {shown} ({added} line{'s' if added != 1 else ''}).", "facts": facts}


def delete_file(workspace: ToolWorkspace, arguments: dict[str, Any]) -> dict[str, Any]:
    """Delete a file or a link (the link itself, not its target)."""
    path = workspace.resolve(arguments["target_file"])
    shown = workspace.display(path)
    directory, name = os.path.split(os.path.normpath(path))
    real = os.path.join(workspace.writable(directory), name)
    try:
        if os.path.isdir(real) and not os.path.islink(real):
            hint = workspace.hint("run_terminal_cmd", "Remove it with {}.")
            raise Refusal("environment", f"{shown} is a directory; only files are deleted.{hint}")
        old = None if os.path.islink(real) or not os.path.isfile(real) else _read_if_small(workspace, real)
        save_original(workspace, real, old, existed=True)
        os.unlink(real)
    except OSError as error:
        raise refusal_for(workspace, real, error) from None
    facts = {"path": workspace.display(real), "lines_removed": _line_count(old or b"")}
    return {"text": f"Deleted {shown}.", "facts": facts}


def _read_if_small(workspace: ToolWorkspace, real: str) -> bytes | None:
    """Return the content of a file if it is small enough to save."""
    return read_bytes(workspace, real)[0] if os.path.getsize(real) <= MAX_ORIGINAL else None


def _save_and_write(workspace: ToolWorkspace, real: str, data: bytes, old: bytes | None, existed: bool) -> None:
    try:
        save_original(workspace, real, old, existed)
        os.makedirs(os.path.dirname(real), exist_ok=True)
        replace_file(real, data)
    except FileExistsError:
        raise Refusal("environment", f"{workspace.display(os.path.dirname(real))} is not a directory") from None
    except OSError as error:
        raise refusal_for(workspace, real, error) from None


def _line_count(data: bytes) -> int:
    return data.count(b"\n") + bool(data and not data.endswith(b"\n"))


def _find(data: bytes, old: str) -> list[tuple[int, int]]:
    """Return the start and end of every occurrence of `old`, with any line ends, in order and without overlaps."""
    wanted = old.replace("\r\n", "\n").encode()
    if b"\r" in data:
        import re  # a pattern that has only literal characters cannot backtrack

        return [found.span() for found in re.finditer(rb"\r?\n".join(map(re.escape, wanted.split(b"\n"))), data)]
    found, at = [], data.find(wanted)
    while at >= 0:
        found.append((at, at + len(wanted)))
        at = data.find(wanted, at + len(wanted))
    return found


def _lines_as_in(text: str, data: bytes) -> bytes:
    """Return the text with the line ends that most lines of the file have."""
    lines = text.replace("\r\n", "\n").encode()
    crlf = data.count(b"\r\n")
    return lines.replace(b"\n", b"\r\n") if crlf > data.count(b"\n") - crlf else lines


def _ambiguous_match_text(shown: str, data: bytes, starts: list[int]) -> str:
    numbers = [data.count(b"\n", 0, start) + 1 for start in starts[:20]]
    listed = ", ".join(map(str, numbers)) + (", ..." if len(starts) > 20 else "")
    advice = "Add lines around it to old_string until it is found once, or set replace_all"
    return f"old_string is found {len(starts)} times in {shown}, at lines {listed}; nothing was changed. {advice}."


# -- originals


def save_original(workspace: ToolWorkspace, real: str, data: bytes | None, existed: bool) -> None:
    """Save a file before its first change. A full disk does not prevent the edit."""
    name = workspace.relative(real)
    place = os.path.join(workspace.state, "originals")
    note = os.path.join(place, _note_name(os.fsencode(name)))
    if os.path.exists(note + ".json"):
        return
    kept = data is not None and len(data) <= MAX_ORIGINAL
    try:
        os.makedirs(place, mode=0o700, exist_ok=True)
        if data is not None and kept:
            replace_file(note + ".data", data)
        replace_file(note + ".json", dumps({"path": name, "existed": existed, "kept": kept}).encode())
    except OSError:
        return


def _note_name(path: bytes) -> str:
    """Return a file name for a path: its bytes, or their digest if that would be too long."""
    if len(path) <= MAX_NAME:
        return f"p-{path.hex()}"
    import hashlib  # which loads OpenSSL

    return f"d-{hashlib.sha256(path).hexdigest()}"


def originals(workspace: ToolWorkspace) -> dict[str, bytes | None]:
    """Return the changed files (relative to the root) with their originals: empty if new, None if not saved."""
    found: dict[str, bytes | None] = {}
    place = os.path.join(workspace.state, "originals")
    try:
        names = sorted(os.listdir(place))
    except OSError:
        return {}
    for name in names:
        if not name.endswith(".json"):
            continue
        try:
            with open(os.path.join(place, name), encoding="utf-8") as file:
                note = loads(file.read())
            data: bytes | None = b"" if not note["existed"] else None
            if note["kept"]:
                with open(os.path.join(place, name[:-5] + ".data"), "rb") as file:
                    data = file.read()
            found[str(note["path"])] = data
        except (OSError, ValueError, KeyError, TypeError):
            continue  # other processes in the pod can write here too
    return found
