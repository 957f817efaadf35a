"""Find the files of a pod that differ from the upload, and format them as a patch.

The patch is accepted by `git apply`, except that binary files are only named. `apply_to_directory` writes the files
themselves, never the patch.
"""

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from etude.agent.upload import MAX_BYTES
from etude.errors import EtudeError
from etude.pods.pod import Pod
from etude.pods.workspace import (
    CACHE_DIRECTORIES,
    FileChange,
    FileState,
    changed_files,
    is_workspace_path,
    parents,
    read_files,
    read_state,
    stat_if_exists,
    touched_paths,
)

LIST_TIMEOUT_S = 60.0
MAX_LISTING_BYTES = 64 << 20
MAX_CHANGED_FILES = 5_000  # more means that something was installed, not edited
MAX_DIFFED_BYTES = 1 << 20  # larger files are treated as binary
BINARY_PROBE_BYTES = 8000  # a NUL in these first bytes means binary, as in git
GIT_MODES = {("file", False): "100644", ("file", True): "100755", ("symlink", False): "120000"}


async def find_changes(
    pod: Pod, root: str, manifest: Mapping[str, FileState], directory: Path, known: Sequence[FileChange] = ()
) -> list[FileChange]:
    """Return what differs in the pod from the manifest, sorted by path; caches and files that git ignores do not.

    Earlier contents are those of `known` changes, or of the directory where they are still the same.
    """
    files = changed_files(await touched_paths(pod, root), manifest)
    new = [path for path in files if path not in manifest and is_workspace_path(path)]
    new = [path for path in new if not CACHE_DIRECTORIES.intersection(path.split("/"))]
    listed = await _list_unignored(pod, root) if new else None
    shown = {path for path in new if listed is None or path in listed or any(map(listed.__contains__, parents(path)))}
    files = {path: info for path, info in files.items() if path in manifest or path in shown}
    if len(files) > MAX_CHANGED_FILES:
        top_level = ", ".join(sorted({path.split("/")[0] for path in files})[:5])
        raise EtudeError(
            f"{len(files):,} files changed in the pod (in {top_level}); at most {MAX_CHANGED_FILES:,} are copied back: "
            "ask for installed and built files to be removed, or added to .gitignore"
        )
    left = MAX_BYTES
    for path, info in sorted(files.items()):
        left -= info.size if info is not None and info.kind == "file" else 0
        if left < 0 and info is not None:
            raise EtudeError(
                f"the changes in the pod are over {MAX_BYTES >> 20} MiB, with {path} of {info.size:,} bytes; ask for "
                "it to be removed, or added to .gitignore"
            )
    after, _ = await read_files(pod, root, files, MAX_BYTES, MAX_BYTES)
    originals = {change.path: change.before for change in known}
    changes = []
    for path in sorted(after):
        before = manifest.get(path)
        if before != after[path]:
            if before is not None and before.data is None:
                before = _with_contents(before, originals.get(path), directory / path)
            changes.append(FileChange(path, before, after[path]))
    return changes


async def _list_unignored(pod: Pod, root: str) -> set[str] | None:
    """Return the files, and nested repositories, that git in the pod does not ignore; None where there is no git."""
    if await stat_if_exists(pod, f"{root}/.git") is None:
        return None
    command = ["git", "-c", "core.fsmonitor=false", "ls-files", "-z", "-co", "--exclude-standard"]
    done = await pod.exec(command, cwd=root, timeout=LIST_TIMEOUT_S, max_output=MAX_LISTING_BYTES)
    if not done.ok or done.truncated:
        return None
    return {path.rstrip("/") for path in os.fsdecode(done.stdout_bytes).split("\0")}


def _with_contents(state: FileState, earlier: FileState | None, file: Path) -> FileState:
    """Return the state with its contents, if those found earlier or on disk are the same."""
    try:
        found = earlier if earlier == state and earlier.data is not None else read_state(None, str(file))
    except OSError:
        return state
    return replace(state, data=found.data) if found is not None and found.digest == state.digest else state


def find_renames(changes: Sequence[FileChange]) -> dict[str, str]:
    """Map new path to old path, for files that were renamed without edits."""
    empty = FileState.file(b"").digest
    gone: dict[str, list[str]] = {}
    for change in changes:
        if change.after is None and change.before is not None and change.before.digest != empty:
            gone.setdefault(change.before.digest, []).append(change.path)
    found = {}
    for change in changes:
        if change.before is None and change.after is not None and gone.get(change.after.digest):
            found[change.path] = gone[change.after.digest].pop(0)
    return found


def describe_change(change: FileChange) -> str:
    """Return what happened to a file, in a word or two."""
    if change.before is None or change.after is None:
        return "new" if change.before is None else "deleted"
    if change.before.kind != change.after.kind:
        return "file to link" if change.after.kind == "symlink" else "link to file"
    return "changed" if change.before.digest != change.after.digest else "mode"


# ------------------------------------------------------------------------------------------------- patch


def format_patch(changes: Sequence[FileChange]) -> str:
    """Return all changes as one patch. Bytes that are not UTF-8 become surrogates."""
    moved = find_renames(changes)
    befores = {change.path: change.before for change in changes}
    parts = []
    for change in changes:
        if (source := moved.get(change.path)) is not None:
            parts.append(_header(source, change.path, befores[source], change.after))
            names = f"rename from {_quote_path(source)}\nrename to {_quote_path(change.path)}\n"
            parts.append(f"similarity index 100%\n{names}")
        elif change.path not in moved.values():
            parts.append(format_file_patch(change))
    return "".join(parts)


def format_file_patch(change: FileChange) -> str:
    """Return the patch of one file."""
    before, after = change.before, change.after
    if before is not None and after is not None and before.kind != after.kind:
        halves = FileChange(change.path, before, None), FileChange(change.path, None, after)
        return "".join(map(format_file_patch, halves))
    header = _header(change.path, change.path, before, after)
    if before is not None and after is not None and before.digest == after.digest:
        return header
    was, now = (b"" if state is None else state.data for state in (before, after))
    if was is None or now is None:
        return f"{header}# {change.path} was changed on disk meanwhile: its original contents are not known\n"
    if was == now:
        return header
    old = _quote_path(f"a/{change.path}") if before else "/dev/null"
    new = _quote_path(f"b/{change.path}") if after else "/dev/null"
    if max(len(was), len(now)) > MAX_DIFFED_BYTES or any(b"\0" in data[:BINARY_PROBE_BYTES] for data in (was, now)):
        return f"{header}Binary files {old} and {new} differ\n"
    # As in git: a name with a space ends with a tab, or programs take the space for the end of the name.
    old, new = (name + ("\t" if " " in name else "") for name in (old, new))
    # Split at "\n" only: a form feed or a carriage return is part of a line.
    one, other = (re.findall(r"[^\n]*\n|[^\n]+", data.decode("utf-8", "surrogateescape")) for data in (was, now))
    lines = difflib.unified_diff(one, other, old, new)
    return header + "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )


def _header(source: str, path: str, before: FileState | None, after: FileState | None) -> str:
    """Return the first lines of a file's patch: names and modes."""
    names = f"diff --git {_quote_path(f'a/{source}')} {_quote_path(f'b/{path}')}\n"
    old, new = (state and GIT_MODES[state.kind, state.executable] for state in (before, after))
    if old is None:
        return f"{names}new file mode {new}\n"
    if new is None:
        return f"{names}deleted file mode {old}\n"
    return names if old == new else f"{names}old mode {old}\nnew mode {new}\n"


def _quote_path(path: str) -> str:
    """Return a path as git writes it: quoted and escaped if it contains special characters."""
    raw = path.encode("utf-8", "surrogateescape")
    if all(32 <= byte < 127 and byte not in b'"\\' for byte in raw):
        return path
    names = {7: "a", 8: "b", 9: "t", 10: "n", 11: "v", 12: "f", 13: "r", 34: '"', 92: "\\"}
    escaped = (f"\\{names[b]}" if b in names else chr(b) if 32 <= b < 127 else f"\\{b:03o}" for b in raw)
    return f'"{"".join(escaped)}"'


def count_changed_lines(text: str) -> tuple[int, int]:
    """Return how many lines a patch adds and removes."""
    lines = [line for line in text.split("\n") if not line.startswith(("+++ ", "--- "))]
    plus, minus = (sum(line.startswith(sign) for line in lines) for sign in "+-")
    return plus, minus
