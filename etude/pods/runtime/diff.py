"""The files that a pod added, changed or removed, from its layers on disk or in memory.

`diff_layers` compares what was written with what the pod was created from, by the kernel's rules for overlays
(whiteouts, opaque directories, replaced types). The written directory belongs to programs that may change it meanwhile:
it is walked by descriptors, no link is followed, and depth and number of files are limited. It blocks: call it in a
thread.
"""

import os
import stat
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Literal

from etude.pods.images.layers import LayerDir, StackEntry, lookup
from etude.pods.images.trees import MAX_DEPTH, open_to_read, readable_directory
from etude.pods.pod import DiffTooLarge, FileInfo, PodError

MAX_CHANGES = 100_000  # paths of one diff
MAX_VISITED = 1_000_000  # names looked at
_BLOCK = 1 << 20

Changes = dict[str, FileInfo | None]
_Kind = Literal["file", "directory", "symlink", "other"]
_KINDS: dict[int, _Kind] = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink"}


def diff_layers(
    written: Sequence[LayerDir],
    base: Sequence[LayerDir],
    paths: Sequence[str] = ("/",),
    *,
    root: str = "",
    complete: bool = False,
) -> Changes:
    """Return the changes of `written` over `base`, both highest first, at and below `paths`; `root` is their own path.

    The first of `written` may be in use. With `complete` it is a whole tree instead of an overlay's upper directory:
    a name that it lacks was removed.
    """
    walk = _Walk(paths)
    try:
        walk.directory(root, tuple(written), tuple(base), complete, 0)
    except OSError as error:
        raise PodError(f"the pod's files cannot be compared: {error}") from error
    return walk.changes


def is_below(path: str, top: str) -> bool:
    """Return whether a path is `top` or below it."""
    return path == top or path.startswith(f"{top.rstrip('/')}/")


class _Walk:
    """One comparison: the changes found and the number of names visited so far."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = paths
        self.changes: Changes = {}
        self.visited = 0

    def is_wanted(self, path: str) -> bool:
        return any(is_below(path, top) for top in self.paths)

    def names_towards(self, path: str) -> set[str]:
        """Return the names in a directory that lead to the wanted paths."""
        return {top[len(path) + 1 :].split("/")[0] for top in self.paths if top.startswith(f"{path}/")}

    def add(self, path: str, info: FileInfo | None) -> None:
        self.changes[path] = info
        if len(self.changes) > MAX_CHANGES:
            raise DiffTooLarge(f"more than {MAX_CHANGES:,} files were changed in the pod, the limit of a diff")

    def directory(
        self, path: str, written: tuple[LayerDir, ...], base: tuple[LayerDir, ...], complete: bool, depth: int
    ) -> None:
        """Compare a merged directory with that of the same path in `base`."""
        if depth > MAX_DEPTH:
            raise DiffTooLarge(f"a diff is limited to {MAX_DEPTH} nested directories; there are more at {path[:200]}")
        with ExitStack() as stack:
            # Through a descriptor: the programs of the pod may replace the directory by a link at any moment.
            pinned = os.open(written[0].path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            stack.callback(os.close, pinned)
            written = (LayerDir(f"/proc/self/fd/{pinned}"), *written[1:])
            wanted = self.is_wanted(path or "/")
            names = set() if wanted else self.names_towards(path)
            for number, layer_dir in enumerate((*written, *base)):
                limit = MAX_CHANGES + 1 if wanted and (complete or number < len(written)) else 0
                names.update(stack.enter_context(readable_directory(layer_dir.path, limit)))
            if len(names) > MAX_CHANGES:  # of one directory, before it is sorted
                raise DiffTooLarge(f"more than {MAX_CHANGES:,} files are in {path[:200]}, the limit of a diff")
            self.visited += len(names)
            if self.visited > MAX_VISITED:
                raise DiffTooLarge(f"the pod has more than {MAX_VISITED:,} files to compare, the limit of a diff")
            for name in sorted(names, key=os.fsencode):
                with suppress(FileNotFoundError, NotADirectoryError):  # it was changed meanwhile
                    self.name(f"{path}/{name}", lookup(written, name), lookup(base, name), complete, depth)

    def name(self, path: str, found: StackEntry, before: StackEntry, complete: bool, depth: int) -> None:
        if not found.exists:
            if before.exists and (complete or found.whiteout):  # else it was not written to
                self.add(path, None)
            return
        if not same(found, before) and (self.is_wanted(path) or not found.is_directory):
            self.add(path, describe(path, found))
        if found.is_directory:
            base = before.dirs if before.is_directory else ()
            self.directory(path, found.dirs, base, complete or found.hides_lower, depth + 1)


def describe(path: str, found: StackEntry) -> FileInfo:
    """Return the description of a file."""
    info = found.info
    assert info is not None
    kind = _KINDS.get(stat.S_IFMT(info.st_mode), "other")
    target = os.readlink(found.dirs[0].path) if kind == "symlink" else ""
    mode = stat.S_IMODE(info.st_mode)
    return FileInfo(os.path.basename(path), kind, info.st_size, mode, info.st_mtime_ns / 1e9, target)


def same(one: StackEntry, other: StackEntry) -> bool:
    """Return whether two entries have the same kind, mode and content; owners and times are not compared."""
    if one.info is None or other.info is None or one.info.st_mode != other.info.st_mode:
        return False
    if stat.S_ISLNK(one.info.st_mode):
        return os.readlink(one.dirs[0].path) == os.readlink(other.dirs[0].path)
    if not stat.S_ISREG(one.info.st_mode):
        return stat.S_ISDIR(one.info.st_mode) or one.info.st_rdev == other.info.st_rdev
    return one.info.st_size == other.info.st_size and _same_content(one.dirs[0].path, other.dirs[0].path)


def _same_content(one: str, other: str) -> bool:
    with open(open_to_read(one), "rb", 0) as left, open(open_to_read(other), "rb", 0) as right:
        while part := left.read(_BLOCK):
            if part != right.read(len(part)):
                return False
        return not right.read(1)
