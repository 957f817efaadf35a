"""What a session has changed: files of the pod that differ from those it was given, and how a person reads them.

The text is a patch that `git apply` takes, binary files apart, which are only named in it. What is applied is never the
text but the files themselves.
"""

import difflib
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from etude.agent.manifest import MAX_BYTES, Entry, Tree, list_pod
from etude.errors import EtudeError
from etude.pods.pod import Pod

MAX_CHANGED = 5_000  # files; more is something that was installed, not written
MAX_SHOWN = 1 << 20  # bytes of a file whose lines are compared; larger ones are named
SAMPLE = 8000  # bytes in which a NUL means binary, as in git
MODES = {("file", False): "100644", ("file", True): "100755", ("link", False): "120000"}


@dataclass(frozen=True)
class Change:
    """One file before and after; None where there is none. `data` are the new contents."""

    path: str
    before: Entry | None
    after: Entry | None
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


async def find_changes(pod: Pod, root: str, before: Tree, known: Sequence[Change] = ()) -> list[Change]:
    """What differs in the pod now, in the order of paths; contents that are in `known` are not fetched again."""
    after = await list_pod(pod, root, list(before))
    paths = sorted(path for path in {*before, *after} if before.get(path) != after.get(path))
    if len(paths) > MAX_CHANGED:
        places = ", ".join(sorted({path.split("/")[0] for path in paths})[:5])
        raise EtudeError(
            f"{len(paths):,} files changed in the pod (in {places}); at most {MAX_CHANGED:,} are brought back: "
            "have what was installed or built removed, or ignored by .gitignore"
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
            entry = Entry("file", hashlib.sha256(data).hexdigest(), len(data), entry.executable)
        left -= size
        if left < 0:
            raise EtudeError(
                f"what changed in the pod is over {MAX_BYTES >> 20} MiB, with {path} of {size:,} bytes; have it "
                "removed, or ignored by .gitignore"
            )
        changes.append(Change(path, before.get(path), entry, data))
    return [change for change in changes if change.before != change.after]


def renames(changes: Sequence[Change]) -> dict[str, str]:
    """New path to old path, for files that only moved."""
    gone: dict[str, list[str]] = {}
    for change in changes:
        if change.after is None and change.before is not None and change.before.size:
            gone.setdefault(change.before.digest, []).append(change.path)
    found = {}
    for change in changes:
        if change.before is None and change.after is not None and gone.get(change.after.digest):
            found[change.path] = gone[change.after.digest].pop(0)
    return found


def patch(changes: Sequence[Change], directory: Path) -> str:
    """All changes as one text. Bytes that are not UTF-8 are kept as surrogates."""
    moved = renames(changes)
    sources = set(moved.values())
    befores = {change.path: change.before for change in changes}
    parts = []
    for change in changes:
        if change.path in moved:
            parts.append(_renamed(moved[change.path], change, befores))
        elif change.path not in sources:
            parts.append(one_patch(change, directory))
    return "".join(parts)


def one_patch(change: Change, directory: Path) -> str:
    """One change as text."""
    if change.before is not None and change.after is not None and change.before.kind != change.after.kind:
        halves = Change(change.path, change.before, None), Change(change.path, None, change.after, change.data)
        return "".join(one_patch(half, directory) for half in halves)
    a, b = _quoted(f"a/{change.path}"), _quoted(f"b/{change.path}")
    lines = [f"diff --git {a} {b}\n"]
    old, new = _mode(change.before), _mode(change.after)
    if change.before is None:
        lines.append(f"new file mode {new}\n")
    elif change.after is None:
        lines.append(f"deleted file mode {old}\n")
    elif old != new:
        lines.append(f"old mode {old}\nnew mode {new}\n")
    if change.verb == "mode":
        return "".join(lines)
    was, now = original(change, directory), _contents(change.after, change.data)
    if was is None:
        return "".join([*lines, f"# {change.path} was changed on disk meanwhile: what it was before is not known\n"])
    if was == now:
        return "".join(lines)
    froms = a if change.before else "/dev/null"
    tos = b if change.after else "/dev/null"
    if max(len(was), len(now)) > MAX_SHOWN or is_binary(was) or is_binary(now):
        return "".join([*lines, f"Binary files {froms} and {tos} differ\n"])
    return "".join([*lines, *_hunks(was, now, froms, tos)])


def original(change: Change, directory: Path) -> bytes | None:
    """The old contents, from the disk; None when they are not there any more."""
    entry = change.before
    if entry is None or entry.kind == "link":
        return _contents(entry, b"")
    try:
        place = directory / change.path
        data = b"" if place.is_symlink() else place.read_bytes()
    except OSError:
        return None
    return data if hashlib.sha256(data).hexdigest() == entry.digest else None


def counts(text: str) -> tuple[int, int]:
    """Lines that a patch adds and removes."""
    lines = text.split("\n")
    heads = [line for line in lines if line.startswith(("+++ ", "--- "))]
    plus, minus = (sum(line.startswith(sign) for line in lines) for sign in "+-")
    return plus - sum(line[0] == "+" for line in heads), minus - sum(line[0] == "-" for line in heads)


def is_binary(data: bytes) -> bool:
    return b"\0" in data[:SAMPLE]


def _contents(entry: Entry | None, data: bytes) -> bytes:
    if entry is None:
        return b""
    return entry.digest.encode("utf-8", "surrogateescape") if entry.kind == "link" else data


def _mode(entry: Entry | None) -> str:
    return "000000" if entry is None else MODES[entry.kind, entry.executable and entry.kind == "file"]


def _renamed(source: str, change: Change, befores: Mapping[str, Entry | None]) -> str:
    old, new = _mode(befores[source]), _mode(change.after)
    lines = [f"diff --git {_quoted(f'a/{source}')} {_quoted(f'b/{change.path}')}\n"]
    lines += [f"old mode {old}\nnew mode {new}\n"] if old != new else []
    lines += ["similarity index 100%\n", f"rename from {_quoted(source)}\n", f"rename to {_quoted(change.path)}\n"]
    return "".join(lines)


def _hunks(was: bytes, now: bytes, froms: str, tos: str) -> list[str]:
    old, new = (_lines(data.decode("utf-8", "surrogateescape")) for data in (was, now))
    # A name with a blank ends with a tab, or programs take the blank for the end of it.
    heads = [name + ("\t" if " " in name else "") for name in (froms, tos)]
    lines = difflib.unified_diff(old, new, heads[0], heads[1])
    return [line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines]


def _lines(text: str) -> list[str]:
    """Lines by "\\n" alone: a form feed or a carriage return is part of a line."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def _quoted(path: str) -> str:
    """A path as git writes it: in quotes when it holds what could be misread."""
    raw = path.encode("utf-8", "surrogateescape")
    if all(32 <= byte < 127 and byte not in b'"\\' for byte in raw):
        return path
    names = {7: "a", 8: "b", 9: "t", 10: "n", 11: "v", 12: "f", 13: "r", 34: '"', 92: "\\"}
    spelt = (f"\\{names[b]}" if b in names else chr(b) if 32 <= b < 127 else f"\\{b:03o}" for b in raw)
    return f'"{"".join(spelt)}"'
