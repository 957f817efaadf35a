"""Layers on disk, in overlay form: copy one, merge several into one, and look into a stack as a mount would show it.

`merge` gives exactly what the kernel shows for the same stack (a property test holds it to real mounts). It is told
what lies below, and keeps a whiteout or an opaque mark only where that hides something: a whiteout in a directory
that exists in one layer only would be listed by the kernel as a name that cannot be opened. Sources are never changed.
"""

import errno
import os
import stat
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from etude.errors import InputError
from etude.pods.images.trees import (
    check_depth,
    components,
    copy_leaf,
    copy_metadata,
    entered,
    is_opaque,
    is_whiteout,
    make_opaque,
    make_whiteout,
    pod_id,
)

_MAX_LINKS = 40  # symbolic links followed in one path, as in the kernel


@dataclass(frozen=True, slots=True)
class LayerDir:
    """One layer of a stack: its directory, and where its ids start."""

    path: str
    shift: int = 0


@dataclass(frozen=True, slots=True)
class StackEntry:
    """What a stack shows under one name: the file of the highest layer that has it, or directories to be merged."""

    parts: tuple[LayerDir, ...] = ()  # highest first; one, unless a directory
    info: os.stat_result | None = None
    closed: bool = False  # nothing below the searched parts can show through
    gone: bool = False  # a whiteout: the name is hidden in what lies below

    @property
    def there(self) -> bool:
        return self.info is not None

    @property
    def directory(self) -> bool:
        return self.info is not None and stat.S_ISDIR(self.info.st_mode)


def find(parts: Sequence[LayerDir], name: str) -> StackEntry:
    """`name` in a directory that is merged of `parts`, highest first: the kernel's own rule."""
    found: list[LayerDir] = []
    info: os.stat_result | None = None
    for part in parts:
        path = f"{part.path}/{name}"
        try:
            here = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        if is_whiteout(here):
            return StackEntry(tuple(found), info, closed=True, gone=True)
        if not stat.S_ISDIR(here.st_mode):
            if info is None:
                return StackEntry((LayerDir(path, part.shift),), here, closed=True)
            return StackEntry(tuple(found), info, closed=True)
        info = info or here
        found.append(LayerDir(path, part.shift))
        if is_opaque(path):
            return StackEntry(tuple(found), info, closed=True)
    return StackEntry(tuple(found), info)


# -- merging


@dataclass(slots=True)
class _Merge:
    """The settings of one merge, and the hard links made so far."""

    link: bool  # the sources' files may be shared: same owners on disk, same file system
    unknown: bool  # what lies below is not known: keep every mark
    keep_shift: bool
    links: dict[tuple[int, int], str] = field(default_factory=dict)

    def shift(self, part: LayerDir) -> int | None:
        return None if self.keep_shift else part.shift


def merge(layers: Sequence[LayerDir], below: Sequence[LayerDir] | None, target: Path, link: bool = False) -> None:
    """Write into the empty directory `target` what `layers` (lowest first) are together.

    `below` (lowest first) is what the result will lie on; None if that is not known. Ids are written unshifted,
    except with `link`: then files are shared with the sources, which must all have the same shift, and keep it.
    """
    settings = _Merge(link, below is None, keep_shift=link)
    _merge_directory(settings, tuple(reversed(layers)), tuple(reversed(below or ())), str(target), 0)


def copy(source: Path, target: Path, shift: int = 0, *, lowest: bool = False, keep_shift: bool = False) -> None:
    """Copy one layer into the empty directory `target`, with its marks; those of a `lowest` one mean nothing."""
    settings = _Merge(False, unknown=not lowest, keep_shift=keep_shift)
    # the dot: a source may be given as an open directory in /proc, which is a link
    _merge_directory(settings, (LayerDir(f"{source}/.", shift),), (), str(target), 0)


def _merge_directory(
    m: _Merge, parts: tuple[LayerDir, ...], below: tuple[LayerDir, ...], target: str, depth: int
) -> None:
    """Fill `target`, which exists, from directories that are merged; then give it the facts of the highest."""
    check_depth(target, depth)
    facts = os.stat(parts[0].path)  # before `entered` touches a mode
    with ExitStack() as stack:
        names: set[str] = set()
        for part in parts:
            names.update(stack.enter_context(entered(part.path)))
        for part in below:
            stack.enter_context(entered(part.path))
        for name in sorted(names, key=os.fsencode):
            _merge_name(m, parts, below, name, f"{target}/{name}", depth)
    copy_metadata(parts[0].path, target, facts, m.shift(parts[0]))


def _merge_name(
    m: _Merge, parts: tuple[LayerDir, ...], below: tuple[LayerDir, ...], name: str, to: str, depth: int
) -> None:
    found = find(parts, name)
    under = find(below, name)
    if not found.there:
        if found.gone and (m.unknown or under.there):
            make_whiteout(to)
    elif found.directory:
        os.mkdir(to, 0o700)
        if found.closed and (m.unknown or under.directory):
            make_opaque(to)
        lower = under.parts if under.directory and not found.closed else ()
        _merge_directory(m, found.parts, lower, to, depth + 1)
    else:
        assert found.info is not None
        _place_leaf(m, found.parts[0], found.info, to)


def _place_leaf(m: _Merge, part: LayerDir, info: os.stat_result, to: str) -> None:
    if m.link and _linked(part.path, to):
        return
    inode = (info.st_dev, info.st_ino)
    if info.st_nlink > 1 and inode in m.links:
        os.link(m.links[inode], to, follow_symlinks=False)
    elif copy_leaf(part.path, to, info, m.shift(part)) and info.st_nlink > 1:
        m.links[inode] = to


def _linked(source: str, target: str) -> bool:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        # another file system, too many links, or a file that this user may not link: a copy does as well
        if error.errno in (errno.EXDEV, errno.EMLINK, errno.EPERM):
            return False
        raise
    return True


# -- looking


@dataclass(frozen=True, slots=True)
class LayerStack:
    """Layers as a mount would show them, read-only and without one; lowest first."""

    parts: tuple[LayerDir, ...]

    @classmethod
    def of(cls, parts: Iterable[LayerDir]) -> "LayerStack":
        return cls(tuple(parts))

    def locate(self, path: str, follow: bool = True) -> tuple[str, StackEntry]:
        """Where a path leads, with no link left in it (but maybe in its last name), and what is there.

        Names that do not exist are kept as they are; a link that leads above the root stops at the root.
        """
        waiting = list(reversed(components(path)))
        trail: list[tuple[str, tuple[LayerDir, ...]]] = [("", tuple(reversed(self.parts)))]
        found = StackEntry(trail[0][1], os.lstat(self.parts[-1].path) if self.parts else None)
        followed = 0
        while waiting:
            name = waiting.pop()
            if name == "..":
                if len(trail) > 1:
                    trail.pop()
                found = StackEntry(trail[-1][1], _directory_info(trail[-1][1]))
                continue
            where, parts = trail[-1]
            found = find(parts, name)
            if found.info is not None and stat.S_ISLNK(found.info.st_mode) and (waiting or follow):
                followed += 1
                if followed > _MAX_LINKS:
                    raise InputError(f"{path}: more than {_MAX_LINKS} symbolic links in one path")
                to = os.readlink(found.parts[0].path)
                if to.startswith("/"):
                    del trail[1:]
                waiting += reversed(components(to))
                found = StackEntry(trail[-1][1], _directory_info(trail[-1][1]))
                continue
            trail.append((f"{where}/{name}", found.parts if found.directory else ()))
        return trail[-1][0] or "/", found

    def read(self, path: str, limit: int = 1 << 20) -> bytes:
        """A small file's contents; nothing if it is not there."""
        _, found = self.locate(path)
        if found.info is None or not stat.S_ISREG(found.info.st_mode):
            return b""
        with open(found.parts[0].path, "rb") as file:
            return file.read(limit)

    def names(self, found: StackEntry) -> list[str]:
        """The names in a directory that `locate` found."""
        names: set[str] = set()
        for part in found.parts:
            with entered(part.path) as here:
                names.update(here)
        return sorted((name for name in names if find(found.parts, name).there), key=os.fsencode)

    def owner(self, found: StackEntry) -> tuple[int, int]:
        """The owner that a pod sees."""
        assert found.info is not None
        shift = found.parts[0].shift
        return pod_id(found.info.st_uid, shift), pod_id(found.info.st_gid, shift)


def _directory_info(parts: tuple[LayerDir, ...]) -> os.stat_result | None:
    return os.lstat(parts[0].path) if parts else None
