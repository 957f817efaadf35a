"""Find the files of a pod that differ from the upload, and format them as a patch.

The patch is accepted by `git apply`, except that binary files are only named. `apply.py` writes the files themselves,
never the patch.
"""

import difflib
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from etude.agent.manifest import MAX_BYTES, FileManifest, ManifestEntry, list_pod_files
from etude.errors import EtudeError
from etude.pods.pod import Pod

MAX_CHANGED_FILES = 5_000  # more means that something was installed, not edited
MAX_DIFFED_BYTES = 1 << 20  # larger files are treated as binary
BINARY_PROBE_BYTES = 8000  # a NUL in these first bytes means binary, as in git
GIT_MODES = {("file", False): "100644", ("file", True): "100755", ("link", False): "120000"}


@dataclass(frozen=True)
class FileDiff:
    """One file before and after; None where it does not exist. `data` holds the new contents."""

    path: str
    before: ManifestEntry | None
    after: ManifestEntry | None
    data: bytes = b""

    @property
    def verb(self) -> str:
        if self.before is None:
            return "new"
        if self.after is None:
            return "deleted"
        if self.before.kind != self.after.kind:
            return f"{self.before.kind} to {self.after.kind}"
        return "changed" if self.before.digest != self.after.digest else "mode"


async def find_changes(pod: Pod, root: str, before: FileManifest, known: Sequence[FileDiff] = ()) -> list[FileDiff]:
    """Return what differs in the pod now, sorted by path. Contents that are in `known` are not fetched again."""
    after = await list_pod_files(pod, root, list(before))
    paths = sorted(path for path in {*before, *after} if before.get(path) != after.get(path))
    if len(paths) > MAX_CHANGED_FILES:
        top_level = ", ".join(sorted({path.split("/")[0] for path in paths})[:5])
        raise EtudeError(
            f"{len(paths):,} files changed in the pod (in {top_level}); at most {MAX_CHANGED_FILES:,} are copied back: "
            "ask for installed and built files to be removed, or added to .gitignore"
        )
    have = {(change.path, change.after): change.data for change in known}
    changes, left = [], MAX_BYTES
    for path in paths:
        entry = after.get(path)
        data = have.get((path, entry), b"")
        size = len(data)
        if entry is not None and entry.kind == "file" and (path, entry) not in have:
            data = await pod.read(f"{root}/{path}", length=left + 1) if entry.size <= left else b""
            size = max(entry.size, len(data))
            entry = ManifestEntry("file", hashlib.sha256(data).hexdigest(), len(data), entry.executable)
        left -= size
        if left < 0:
            raise EtudeError(
                f"the changes in the pod are over {MAX_BYTES >> 20} MiB, with {path} of {size:,} bytes; ask for it to "
                "be removed, or added to .gitignore"
            )
        changes.append(FileDiff(path, before.get(path), entry, data))
    return [change for change in changes if change.before != change.after]


def find_renames(changes: Sequence[FileDiff]) -> dict[str, str]:
    """Map new path to old path, for files that were renamed without edits."""
    gone: dict[str, list[str]] = {}
    for change in changes:
        if change.after is None and change.before is not None and change.before.size:
            gone.setdefault(change.before.digest, []).append(change.path)
    found = {}
    for change in changes:
        if change.before is None and change.after is not None and gone.get(change.after.digest):
            found[change.path] = gone[change.after.digest].pop(0)
    return found


def format_patch(changes: Sequence[FileDiff], directory: Path) -> str:
    """Return all changes as one patch. Bytes that are not UTF-8 become surrogates."""
    moved = find_renames(changes)
    sources = set(moved.values())
    befores = {change.path: change.before for change in changes}
    parts = []
    for change in changes:
        if change.path in moved:
            parts.append(_format_rename(moved[change.path], change, befores))
        elif change.path not in sources:
            parts.append(format_file_patch(change, directory))
    return "".join(parts)


def format_file_patch(change: FileDiff, directory: Path) -> str:
    """Return the patch of one file."""
    if change.before is not None and change.after is not None and change.before.kind != change.after.kind:
        halves = FileDiff(change.path, change.before, None), FileDiff(change.path, None, change.after, change.data)
        return "".join(format_file_patch(half, directory) for half in halves)
    a, b = _quote_path(f"a/{change.path}"), _quote_path(f"b/{change.path}")
    lines = [f"diff --git {a} {b}\n"]
    old, new = _git_mode(change.before), _git_mode(change.after)
    if change.before is None:
        lines.append(f"new file mode {new}\n")
    elif change.after is None:
        lines.append(f"deleted file mode {old}\n")
    elif old != new:
        lines.append(f"old mode {old}\nnew mode {new}\n")
    if change.verb == "mode":
        return "".join(lines)
    was, now = read_original(change, directory), _contents(change.after, change.data)
    if was is None:
        return "".join(
            [*lines, f"# {change.path} was changed on disk meanwhile: its original contents are not known\n"]
        )
    if was == now:
        return "".join(lines)
    froms = a if change.before else "/dev/null"
    tos = b if change.after else "/dev/null"
    if max(len(was), len(now)) > MAX_DIFFED_BYTES or is_binary(was) or is_binary(now):
        return "".join([*lines, f"Binary files {froms} and {tos} differ\n"])
    return "".join([*lines, *_format_hunks(was, now, froms, tos)])


def read_original(change: FileDiff, directory: Path) -> bytes | None:
    """Return the old contents from disk, or None if the file has changed since."""
    entry = change.before
    if entry is None or entry.kind == "link":
        return _contents(entry, b"")
    try:
        file = directory / change.path
        data = b"" if file.is_symlink() else file.read_bytes()
    except OSError:
        return None
    return data if hashlib.sha256(data).hexdigest() == entry.digest else None


def count_changed_lines(text: str) -> tuple[int, int]:
    """Return how many lines a patch adds and removes."""
    lines = text.split("\n")
    heads = [line for line in lines if line.startswith(("+++ ", "--- "))]
    plus, minus = (sum(line.startswith(sign) for line in lines) for sign in "+-")
    return plus - sum(line[0] == "+" for line in heads), minus - sum(line[0] == "-" for line in heads)


def is_binary(data: bytes) -> bool:
    return b"\0" in data[:BINARY_PROBE_BYTES]


def _contents(entry: ManifestEntry | None, data: bytes) -> bytes:
    if entry is None:
        return b""
    return entry.digest.encode("utf-8", "surrogateescape") if entry.kind == "link" else data


def _git_mode(entry: ManifestEntry | None) -> str:
    return "000000" if entry is None else GIT_MODES[entry.kind, entry.executable and entry.kind == "file"]


def _format_rename(source: str, change: FileDiff, befores: Mapping[str, ManifestEntry | None]) -> str:
    old, new = _git_mode(befores[source]), _git_mode(change.after)
    lines = [f"diff --git {_quote_path(f'a/{source}')} {_quote_path(f'b/{change.path}')}\n"]
    lines += [f"old mode {old}\nnew mode {new}\n"] if old != new else []
    lines += [
        "similarity index 100%\n",
        f"rename from {_quote_path(source)}\n",
        f"rename to {_quote_path(change.path)}\n",
    ]
    return "".join(lines)


def _format_hunks(was: bytes, now: bytes, froms: str, tos: str) -> list[str]:
    old, new = (_split_lines(data.decode("utf-8", "surrogateescape")) for data in (was, now))
    # As in git: a name with a space ends with a tab, or programs take the space for the end of the name.
    heads = [name + ("\t" if " " in name else "") for name in (froms, tos)]
    lines = difflib.unified_diff(old, new, heads[0], heads[1])
    return [line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines]


def _split_lines(text: str) -> list[str]:
    """Split at "\\n" only: a form feed or a carriage return is part of a line."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def _quote_path(path: str) -> str:
    """Return a path as git writes it: quoted and escaped if it contains special characters."""
    raw = path.encode("utf-8", "surrogateescape")
    if all(32 <= byte < 127 and byte not in b'"\\' for byte in raw):
        return path
    names = {7: "a", 8: "b", 9: "t", 10: "n", 11: "v", 12: "f", 13: "r", 34: '"', 92: "\\"}
    escaped = (f"\\{names[b]}" if b in names else chr(b) if 32 <= b < 127 else f"\\{b:03o}" for b in raw)
    return f'"{"".join(escaped)}"'
