"""Directories that travel: a digest of a tree of files, the tree as a tar archive, and safe unpacking into a cache.

A tree is a mapping of relative names to files, links (`TreeLink`), directories, or bytes of its own. Its digest covers
names, kinds, permissions and contents, so that what was unpacked can be compared with what was sent.
"""

import hashlib
import os
import shutil
import stat
import tarfile
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from etude.errors import EtudeError, InputError

BLOCK = 512  # bytes of a tar archive are written in multiples of this
CHUNK = 1 << 20


@dataclass(frozen=True)
class TreeLink:
    """A symbolic link in a tree."""

    target: str


Entry = Path | TreeLink | bytes
Tree = Mapping[str, Entry]


def read_tree(directory: Path) -> dict[str, Entry]:
    """Return all files, links and directories below a directory."""
    found: dict[str, Entry] = {}
    for folder, names, files in os.walk(directory):
        for name in (*names, *files):
            path = Path(folder, name)
            relative = path.relative_to(directory).as_posix()
            found[relative] = TreeLink(os.readlink(path)) if path.is_symlink() else path
    return found


def tree_digest(tree: Tree) -> str:
    """Return a digest of a tree."""
    hasher = hashlib.sha256(b"etude tree 1\0")
    for name, entry in sorted(tree.items()):
        kind, mode, size = _kind(entry)
        hasher.update(b"%b\0%b %o %d\0" % (os.fsencode(name), kind, mode, size))
        for data in _content(entry):
            hasher.update(data)
    return hasher.hexdigest()


def pack_tree(tree: Tree) -> Iterator[bytes]:
    """Yield a tar archive of a tree, the same for equal trees."""
    for name, entry in sorted(tree.items()):
        kind, mode, size = _kind(entry)
        info = tarfile.TarInfo(name)
        info.mode, info.size = mode, size if kind == b"f" else 0
        if isinstance(entry, TreeLink):
            info.type, info.linkname = tarfile.SYMTYPE, entry.target
        elif kind == b"d":
            info.type = tarfile.DIRTYPE
        yield info.tobuf(tarfile.PAX_FORMAT, errors="surrogateescape")
        if info.size:
            sent = 0
            for data in _content(entry):
                sent += len(data)
                yield data
            if sent != size:
                raise EtudeError(f"{entry!r} changed while it was read")
            yield bytes(-size % BLOCK)
    yield bytes(2 * BLOCK)


def _kind(entry: Entry) -> tuple[bytes, int, int]:
    """Return the kind of an entry (file, link, directory), its permissions and its size."""
    if isinstance(entry, bytes):
        return b"f", 0o644, len(entry)
    if isinstance(entry, TreeLink):
        return b"l", 0o777, len(os.fsencode(entry.target))
    info = entry.stat()
    if stat.S_ISDIR(info.st_mode):
        return b"d", 0o755, 0
    if not stat.S_ISREG(info.st_mode):
        raise InputError(f"{entry} is neither a file, a link nor a directory, and cannot be sent to other machines")
    return b"f", info.st_mode & 0o777, info.st_size


def _content(entry: Entry) -> Iterator[bytes]:
    if isinstance(entry, bytes):
        yield entry
    elif isinstance(entry, TreeLink):
        yield os.fsencode(entry.target)
    elif entry.is_file():
        with entry.open("rb") as file:
            while data := file.read(CHUNK):
                yield data


# ------------------------------------------------------------------------------------------- receiving


def unpack_tree(archive: IO[bytes], digest: str, cache: Path) -> Path:
    """Unpack an archive into the cache and return its directory there; InputError if it is not the tree of the digest.

    Nothing is written outside of the directory: absolute names, links that lead out of it and devices are refused.
    """
    if not hasattr(tarfile, "data_filter"):
        raise InputError("files of a run on another machine need Python 3.11.4 or newer")
    final = cache / digest
    draft = cache / f".{digest}.{uuid.uuid4().hex}.part"
    draft.mkdir(parents=True)
    try:
        with tarfile.open(fileobj=archive, mode="r|") as opened:
            for member in opened:
                if member.name.startswith("/") or ".." in member.name.split("/"):
                    raise InputError(f"the archive of tree {digest[:12]} is refused: {member.name!r:.100} is outside")
                mode = member.mode & 0o777
                opened.extract(member, draft, filter="data")
                if member.isreg():
                    (draft / member.name).chmod(mode)
        if tree_digest(read_tree(draft)) != digest:
            raise InputError(f"the files of tree {digest[:12]} are not those that were announced")
        try:
            draft.rename(final)
        except OSError:  # another process was faster
            if not final.is_dir():
                raise
    except tarfile.TarError as error:
        raise InputError(f"the archive of tree {digest[:12]} is refused: {error}") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return final
