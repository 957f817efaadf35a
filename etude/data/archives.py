"""Read zip, wheel and (compressed) tar archives in memory, without extracting them.

Archives are untrusted. One that unpacks to more than the limit is refused while it is read, whatever its headers say;
links, devices and paths outside the archive are skipped; a large member is reported by its size and never held in
memory.
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

from etude.data.documents import ARCHIVES, File, ReadLimits, clean_name
from etude.data.sources import SKIPPED_FOLDERS
from etude.errors import InputError

_MAX_HEADER_BYTES = 1 << 16  # tarfile reads names and extended attributes into memory before it yields a member
_READ_ERRORS = (
    tarfile.TarError,
    zipfile.BadZipFile,
    EOFError,
    zlib.error,
    lzma.LZMAError,
    OSError,
    NotImplementedError,
)


def read_archive(path: Path, limits: ReadLimits) -> Iterator[File]:
    """Yield the files of an archive, which is one repository, named after the archive without its suffix."""
    suffix = max((suffix for suffix in ARCHIVES if path.name.endswith(suffix)), key=len)
    repository = path.name.removesuffix(suffix)
    reader = _read_zip if suffix in (".zip", ".whl") else _read_tar
    with _read_errors_as_input_errors(path):
        yield from reader(path, repository, limits)


@contextmanager
def _read_errors_as_input_errors(path: Path) -> Iterator[None]:
    """Turn the exceptions that a broken archive causes into an InputError that names it."""
    try:
        yield
    except _READ_ERRORS as error:
        raise InputError(f"archive {path} cannot be read: {error}; copy or download it again") from None


def _read_zip(path: Path, repository: str, limits: ReadLimits) -> Iterator[File]:
    with zipfile.ZipFile(path) as archive:
        members = sorted(archive.infolist(), key=lambda member: member.filename)
        total = sum(member.file_size for member in members)
        if total > limits.max_archive_bytes:
            raise _too_much(path, limits)
        for member in members:
            link = (member.external_attr >> 16) & 0o170000 == 0o120000
            if not member.is_dir() and not link and _is_inside(member.filename):
                # zipfile stops at the size in the header, so the sum above bounds the bytes read.
                read = partial(_read_zip_member, path, archive, member, limits)
                yield File(repository, clean_name(member.filename), member.file_size, read)


def _read_zip_member(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo, limits: ReadLimits) -> bytes:
    if member.flag_bits & 1:
        raise InputError(f"archive {path}: {member.filename} is encrypted; unpack it first")
    _check_member(path, member.filename, member.file_size, limits)
    with _read_errors_as_input_errors(path):
        return archive.read(member)


def _read_tar(path: Path, repository: str, limits: ReadLimits) -> Iterator[File]:
    with (
        _unpack(path) as unpacked,
        tarfile.open(fileobj=_LimitedReader(unpacked, path, limits), mode="r|", tarinfo=_LimitedTarInfo) as archive,
    ):
        for member in archive:
            if member.isreg() and _is_inside(member.name):
                read = partial(_read_tar_member, path, archive, member, limits)
                yield File(repository, clean_name(member.name.removeprefix("./")), member.size, read)


def _unpack(path: Path) -> IO[bytes]:
    openers: dict[str, Callable[..., Any]] = {"gz": gzip.open, "tgz": gzip.open, "bz2": bz2.open, "xz": lzma.open}
    opened: IO[bytes] = openers.get(path.name.rpartition(".")[2], Path.open)(path, "rb")
    return opened


def _read_tar_member(path: Path, archive: tarfile.TarFile, member: tarfile.TarInfo, limits: ReadLimits) -> bytes:
    _check_member(path, member.name, member.size, limits)
    with _read_errors_as_input_errors(path):
        opened = archive.extractfile(member)
        return opened.read() if opened else b""


def _check_member(path: Path, name: str, size: int, limits: ReadLimits) -> None:
    if size > limits.max_item_bytes:
        raise InputError(
            f"archive {path}: {name} unpacks to {size:,} bytes; at most {limits.max_item_bytes:,} are read"
        )


class _LimitedReader(io.RawIOBase):
    """Stops reading after the limit of unpacked bytes: a decompression bomb is a small file."""

    def __init__(self, unpacked: IO[bytes], path: Path, limits: ReadLimits) -> None:
        self._unpacked, self._path, self._limits, self._bytes_read = unpacked, path, limits, 0

    def read(self, size: int = -1) -> bytes:
        data = self._unpacked.read(size)
        self._bytes_read += len(data)
        if self._bytes_read > self._limits.max_archive_bytes:
            raise _too_much(self._path, self._limits)
        return data


class _LimitedTarInfo(tarfile.TarInfo):
    """Refuses headers with very long names or attributes, which tarfile would read into memory."""

    @classmethod
    def frombuf(cls, buf: Any, encoding: str, errors: str) -> Self:
        info = super().frombuf(buf, encoding, errors)
        if not info.isreg() and info.size > _MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {info.size:,} bytes")
        return info


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or not path.parts:
        return False
    return not any(part in SKIPPED_FOLDERS or part.startswith(".") for part in path.parts[:-1])


def _too_much(path: Path, limits: ReadLimits) -> InputError:
    return InputError(
        f"archive {path} unpacks to more than {limits.max_archive_bytes:,} bytes; unpack it yourself if you trust it"
    )
