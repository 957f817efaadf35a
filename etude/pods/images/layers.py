"""Layers on disk in overlayfs form: copy one, merge several into one, and read a stack as a mount would show it.

`merge` gives exactly what the kernel shows for the same stack (a property test compares it with real mounts). Given the
layers below, it keeps a whiteout or an opaque marker only where that hides something: the kernel would list a whiteout
in a directory that exists in one layer only as a name that cannot be opened. Sources are never changed.
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
    is_opaque,
    is_whiteout,
    make_opaque,
    make_whiteout,
    readable_directory,
)

_MAX_LINKS = 40  # symbolic links followed in one path, as in the kernel


@dataclass(frozen=True, slots=True)
class LayerDir:
    """A directory in one layer of a stack, and the id shift of that layer."""

    path: str
    shift: int = 0


@dataclass(frozen=True, slots=True)
class StackEntry:
    """The result of looking up one name: the file of the highest layer that has it, or directories to be merged."""

    dirs: tuple[LayerDir, ...] = ()  # highest first; for anything but a directory one, with the file's path
    info: os.stat_result | None = None
    hides_lower: bool = False  # layers below the searched ones do not show through
    whiteout: bool = False  # the name is deleted in the layers below

    @property
    def exists(self) -> bool:
        return self.info is not None

    @property
    def is_directory(self) -> bool:
        return self.info is not None and stat.S_ISDIR(self.info.st_mode)


def lookup(dirs: Sequence[LayerDir], name: str) -> StackEntry:
    """Look up `name` in the merged directory of `dirs`, highest first, by the kernel's rules."""
    found: list[LayerDir] = []
    info: os.stat_result | None = None
    for layer_dir in dirs:
        path = f"{layer_dir.path}/{name}"
        try:
            here = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        if is_whiteout(here):
            return StackEntry(tuple(found), info, hides_lower=True, whiteout=True)
        if not stat.S_ISDIR(here.st_mode):
            if info is None:
                return StackEntry((LayerDir(path, layer_dir.shift),), here, hides_lower=True)
            return StackEntry(tuple(found), info, hides_lower=True)
        info = info or here
        found.append(LayerDir(path, layer_dir.shift))
        if is_opaque(path):
            return StackEntry(tuple(found), info, hides_lower=True)
    return StackEntry(tuple(found), info)


# -- merging


@dataclass(slots=True)
class _Merge:
    """Options of one merge, and the hard links made so far."""

    link: bool  # files may be hard-linked to the sources: same owners on disk, same file system
    lower_unknown: bool  # keep every whiteout and opaque marker
    keep_shift: bool
    links: dict[tuple[int, int], str] = field(default_factory=dict)

    def shift(self, layer_dir: LayerDir) -> int | None:
        return None if self.keep_shift else layer_dir.shift


def merge(layers: Sequence[LayerDir], below: Sequence[LayerDir] | None, target: Path, link: bool = False) -> None:
    """Merge `layers` (lowest first) into the empty directory `target`.

    `below` (lowest first) are the layers the result will lie on; None if unknown. Ids are written without their shift,
    except with `link`: then files are hard-linked to the sources, which must all have the same shift.
    """
    options = _Merge(link, below is None, keep_shift=link)
    _merge_directory(options, tuple(reversed(layers)), tuple(reversed(below or ())), str(target), 0)


def copy(source: Path, target: Path, shift: int = 0, *, lowest: bool = False, keep_shift: bool = False) -> None:
    """Copy one layer into the empty directory `target`; drop the whiteouts of a `lowest` one, which have no effect."""
    options = _Merge(False, lower_unknown=not lowest, keep_shift=keep_shift)
    # the dot: a source may be an open directory in /proc, which is a link
    _merge_directory(options, (LayerDir(f"{source}/.", shift),), (), str(target), 0)


def _merge_directory(
    m: _Merge, dirs: tuple[LayerDir, ...], below: tuple[LayerDir, ...], target: str, depth: int
) -> None:
    """Fill the existing `target` from the merged `dirs`; then give it the metadata of the highest."""
    check_depth(target, depth)
    info = os.stat(dirs[0].path)  # before `readable_directory` changes a mode
    with ExitStack() as stack:
        names: set[str] = set()
        for layer_dir in dirs:
            names.update(stack.enter_context(readable_directory(layer_dir.path)))
        for layer_dir in below:
            stack.enter_context(readable_directory(layer_dir.path))
        for name in sorted(names, key=os.fsencode):
            _merge_name(m, dirs, below, name, f"{target}/{name}", depth)
    copy_metadata(dirs[0].path, target, info, m.shift(dirs[0]))


def _merge_name(
    m: _Merge, dirs: tuple[LayerDir, ...], below: tuple[LayerDir, ...], name: str, to: str, depth: int
) -> None:
    found = lookup(dirs, name)
    under = lookup(below, name)
    if not found.exists:
        if found.whiteout and (m.lower_unknown or under.exists):
            make_whiteout(to)
    elif found.is_directory:
        os.mkdir(to, 0o700)
        if found.hides_lower and (m.lower_unknown or under.is_directory):
            make_opaque(to)
        lower = under.dirs if under.is_directory and not found.hides_lower else ()
        _merge_directory(m, found.dirs, lower, to, depth + 1)
    else:
        assert found.info is not None
        _write_leaf(m, found.dirs[0], found.info, to)


def _write_leaf(m: _Merge, layer_dir: LayerDir, info: os.stat_result, to: str) -> None:
    if m.link and _hard_link(layer_dir.path, to):
        return
    inode = (info.st_dev, info.st_ino)
    if info.st_nlink > 1 and inode in m.links:
        os.link(m.links[inode], to, follow_symlinks=False)
    elif copy_leaf(layer_dir.path, to, info, m.shift(layer_dir)) and info.st_nlink > 1:
        m.links[inode] = to


def _hard_link(source: str, target: str) -> bool:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        # another file system, too many links, or a file that this user may not link: copy it instead
        if error.errno in (errno.EXDEV, errno.EMLINK, errno.EPERM):
            return False
        raise
    return True


# -- reading


@dataclass(frozen=True, slots=True)
class LayerStack:
    """Read-only view of layers (lowest first) as an overlay mount would show them, without mounting."""

    layers: tuple[LayerDir, ...]

    @classmethod
    def of(cls, layers: Iterable[LayerDir]) -> "LayerStack":
        return cls(tuple(layers))

    def locate(self, path: str, follow: bool = True) -> tuple[str, StackEntry]:
        """Resolve a path's links (of its last name only with `follow`); return the resolved path and its entry.

        Names that do not exist are kept; a link that leads above the root stops at the root.
        """
        remaining = list(reversed(components(path)))
        trail: list[tuple[str, tuple[LayerDir, ...]]] = [("", tuple(reversed(self.layers)))]
        found = StackEntry(trail[0][1], os.lstat(self.layers[-1].path) if self.layers else None)
        followed = 0
        while remaining:
            name = remaining.pop()
            if name == "..":
                if len(trail) > 1:
                    trail.pop()
                found = StackEntry(trail[-1][1], _directory_info(trail[-1][1]))
                continue
            parent, dirs = trail[-1]
            found = lookup(dirs, name)
            if found.info is not None and stat.S_ISLNK(found.info.st_mode) and (remaining or follow):
                followed += 1
                if followed > _MAX_LINKS:
                    raise InputError(f"{path}: more than {_MAX_LINKS} symbolic links in one path")
                to = os.readlink(found.dirs[0].path)
                if to.startswith("/"):
                    del trail[1:]
                remaining += reversed(components(to))
                found = StackEntry(trail[-1][1], _directory_info(trail[-1][1]))
                continue
            trail.append((f"{parent}/{name}", found.dirs if found.is_directory else ()))
        return trail[-1][0] or "/", found

    def read(self, path: str, limit: int = 1 << 20) -> bytes:
        """Return a small file's contents; empty if there is no such file."""
        _, found = self.locate(path)
        if found.info is None or not stat.S_ISREG(found.info.st_mode):
            return b""
        with open(found.dirs[0].path, "rb") as file:
            return file.read(limit)

    def names(self, found: StackEntry) -> list[str]:
        """Return the names in a directory that `locate` found."""
        names: set[str] = set()
        for layer_dir in found.dirs:
            with readable_directory(layer_dir.path) as here:
                names.update(here)
        return sorted((name for name in names if lookup(found.dirs, name).exists), key=os.fsencode)


def _directory_info(dirs: tuple[LayerDir, ...]) -> os.stat_result | None:
    return os.lstat(dirs[0].path) if dirs else None
