"""Read files and list directories: numbered lines up to a cap, with a notice of what was left out."""

from __future__ import annotations

import os

from etude.harness.toolserver.inside.paths import (
    Refusal,
    ToolWorkspace,
    check_text,
    quote_name,
    read_bytes,
    refusal_for,
)

TYPE_CHECKING = False  # typing is slow to import
if TYPE_CHECKING:
    from typing import Any

MAX_LINES = 2000
MAX_BYTES = 50 << 10
MAX_LINE = 2000  # characters
MAX_ENTRIES = 500
MAX_SCANNED = 50_000  # entries of one directory

BOM = b"\xef\xbb\xbf"


def read_file(workspace: ToolWorkspace, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return lines of a file as `N|line`, from `offset` (1-based; from the end if negative), at most `limit`."""
    path = workspace.resolve(arguments["target_file"])
    data, _ = read_bytes(workspace, path)
    check_text(workspace, path, data)
    facts = {"path": workspace.display(os.path.realpath(path)), "size": len(data)}
    body = data[len(BOM) :] if data.startswith(BOM) else data
    total = body.count(b"\n") + (not body.endswith(b"\n")) if body else 0
    facts["total"] = total
    if not total:
        return {"text": "[the file is empty]", "facts": facts}
    first = arguments.get("offset") or 1
    if first < 0:
        first = max(1, total + 1 + first)
    if first > total:
        count = f"{total} line{'s' if total > 1 else ''}"
        raise Refusal("environment", f"line {first} is past the end of {workspace.display(path)}, which has {count}")
    lines: list[str] = []
    size, crlf = 0, False
    at = _start_of(body, first)
    number = first
    while number <= total and len(lines) < min(arguments.get("limit") or MAX_LINES, MAX_LINES):
        end = body.find(b"\n", at)
        raw = body[at : end if end >= 0 else len(body)]
        if raw.endswith(b"\r"):
            raw, crlf = raw[:-1], True
        line = f"{number}|{_cut(raw)}"
        size += len(line.encode("utf-8", "replace")) + 1
        if size > MAX_BYTES and lines:
            break
        lines.append(line)
        number, at = number + 1, end + 1
    last = number - 1
    notices = []
    if last < total:
        notices.append(f"[lines {first}-{last} of {total}; go on with offset {last + 1}]")
    elif first > 1:
        notices.append(f"[lines {first}-{last} of {total}, the end of the file]")
    if crlf:
        notices.append("[lines end with CRLF; edits keep that]")
    if _is_invalid_utf8(body):
        notices.append("[some bytes are not UTF-8 and are shown as \ufffd]")
    return {"text": "\n".join(lines + notices), "facts": dict(facts, first=first, last=last)}


def _start_of(data: bytes, line: int) -> int:
    """Return the offset of a line; lines are numbered from 1."""
    at = 0
    for _ in range(line - 1):
        at = data.index(b"\n", at) + 1
    return at


def _cut(raw: bytes) -> str:
    line = raw[: 4 * MAX_LINE + 4].decode("utf-8", "replace")
    if len(line) <= MAX_LINE:
        return line
    whole = len(raw.decode("utf-8", "replace"))
    return f"{line[:MAX_LINE]} [cut: the line has {whole:,} characters]"


def _is_invalid_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return True
    return False


def list_dir(workspace: ToolWorkspace, arguments: dict[str, Any]) -> dict[str, Any]:
    """List the names in a directory, sorted, without those that begin with a dot; directories end with "/"."""
    path = workspace.resolve(arguments.get("target_directory") or ".")
    from etude.globs import GitGlobs

    ignored = GitGlobs(arguments.get("ignore_globs") or [])
    shown = workspace.display(path)
    names, count, dots = [], 0, 0
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                count += 1
                if count > MAX_SCANNED:
                    break
                if entry.name.startswith("."):
                    dots += 1
                elif not ignored.match(entry.name, _is_directory(entry)):
                    names.append((entry.name, _display_entry(entry)))
    except NotADirectoryError:
        hint = workspace.hint("read_file", "Read it with {}.")
        raise Refusal("environment", f"{shown} is a file, not a directory.{hint}") from None
    except OSError as error:
        raise refusal_for(workspace, path, error) from None
    names.sort()
    lines = [line for _, line in names[:MAX_ENTRIES]]
    if not names:
        lines.append("[empty]" if not dots else "[nothing but names that begin with a dot]")
    if len(names) > MAX_ENTRIES:
        found = f"at least {len(names):,}" if count > MAX_SCANNED else f"{len(names):,}"
        lines.append(f"[the first {MAX_ENTRIES} of {found} entries]")
    facts = {"path": workspace.display(path), "entries": len(names)}
    return {"text": "\n".join([shown.rstrip("/") + "/", *lines]), "facts": facts}


def _is_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _display_entry(entry: os.DirEntry[str]) -> str:
    name = quote_name(entry.name) + ("/" if _is_directory(entry) else "")
    if not entry.is_symlink():
        return name
    try:
        return f"{name} -> {quote_name(os.readlink(entry.path))}"
    except OSError:
        return name
