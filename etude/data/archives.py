"""Archives as files, read in memory and never extracted: zip and wheel, tar plain or compressed.

The archive may be hostile. What unpacks to more than the limit is refused while it is being read, whatever its headers
promise; links, devices and paths that leave the archive are passed over; one large member is reported by its size and
never held in memory.
"""

import bz2
import gzip
import io
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, Self

from etude.data.documents import ARCHIVES, File, Limits, clean_name
from etude.data.sources import SKIPPED_FOLDERS
from etude.errors import InputError

_LONGEST_NAME = 1 << 16  # bytes; tarfile holds names and their attributes in memory before it shows a member
_BROKEN = (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error, lzma.LZMAError, OSError, NotImplementedError)


def read_archive(path: Path, limits: Limits) -> Iterator[File]:
    """One repository, named by the archive without its suffix."""
    suffix = max((suffix for suffix in ARCHIVES if path.name.endswith(suffix)), key=len)
    repository = path.name.removesuffix(suffix)
    reader = _read_zip if suffix in (".zip", ".whl") else _read_tar
    with _naming(path):
        yield from reader(path, repository, limits)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Whatever a broken archive makes the libraries raise, as a line with its name."""
    try:
        yield
    except _BROKEN as error:
        raise InputError(f"archive {path} cannot be read: {error}; copy or download it again") from None


def _read_zip(path: Path, repository: str, limits: Limits) -> Iterator[File]:
    with zipfile.ZipFile(path) as archive:
        members = sorted(archive.infolist(), key=lambda member: member.filename)
        total = sum(member.file_size for member in members)
        if total > limits.total:
            raise _too_much(path, limits)
        for member in members:
            link = (member.external_attr >> 16) & 0o170000 == 0o120000
            if not member.is_dir() and not link and _is_inside(member.filename):
                # zipfile stops at the size the header promises, so the sum above bounds what is read.
                read = partial(_read_zip_member, path, archive, member, limits)
                yield File(repository, clean_name(member.filename), member.file_size, read)


def _read_zip_member(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo, limits: Limits) -> bytes:
    if member.flag_bits & 1:
        raise InputError(f"archive {path}: {member.filename} is encrypted; unpack it first")
    _check_member(path, member.filename, member.file_size, limits)
    with _naming(path):
        return archive.read(member)


def _read_tar(path: Path, repository: str, limits: Limits) -> Iterator[File]:
    with (
        _unpack(path) as unpacked,
        tarfile.open(fileobj=_Limited(unpacked, path, limits), mode="r|", tarinfo=_Member) as archive,
    ):
        for member in archive:
            if member.isreg() and _is_inside(member.name):
                read = partial(_read_tar_member, path, archive, member, limits)
                yield File(repository, clean_name(member.name.removeprefix("./")), member.size, read)


def _unpack(path: Path) -> IO[bytes]:
    openers: dict[str, Callable[..., Any]] = {"gz": gzip.open, "tgz": gzip.open, "bz2": bz2.open, "xz": lzma.open}
    found: IO[bytes] = openers.get(path.name.rpartition(".")[2], Path.open)(path, "rb")
    return found


def _read_tar_member(path: Path, archive: tarfile.TarFile, member: tarfile.TarInfo, limits: Limits) -> bytes:
    _check_member(path, member.name, member.size, limits)
    with _naming(path):
        opened = archive.extractfile(member)
        return opened.read() if opened else b""


def _check_member(path: Path, name: str, size: int, limits: Limits) -> None:
    if size > limits.member:
        raise InputError(f"archive {path}: {name} unpacks to {size:,} bytes; at most {limits.member:,} are read")


class _Limited(io.RawIOBase):
    """Counts what comes out of a decompressor: a bomb is a small file that never ends."""

    def __init__(self, unpacked: IO[bytes], path: Path, limits: Limits) -> None:
        self._unpacked, self._path, self._limits, self._seen = unpacked, path, limits, 0

    def read(self, size: int = -1) -> bytes:
        data = self._unpacked.read(size)
        self._seen += len(data)
        if self._seen > self._limits.total:
            raise _too_much(self._path, self._limits)
        return data


class _Member(tarfile.TarInfo):
    """A header; one that announces megabytes of name would be read into memory whole."""

    @classmethod
    def frombuf(cls, buf: Any, encoding: str, errors: str) -> Self:
        found = super().frombuf(buf, encoding, errors)
        if not found.isreg() and found.size > _LONGEST_NAME:
            raise tarfile.ReadError(f"a header of {found.size:,} bytes")
        return found


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or not path.parts:
        return False
    return not any(part in SKIPPED_FOLDERS or part.startswith(".") for part in path.parts[:-1])


def _too_much(path: Path, limits: Limits) -> InputError:
    return InputError(f"archive {path} unpacks to more than {limits.total:,} bytes; unpack it yourself if you trust it")
