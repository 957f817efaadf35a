"""Layers as tar archives in OCI form: `.wh.NAME` deletes a name, `.wh..wh..opq` makes a directory opaque.

`unpack` accepts untrusted archives. It writes below the target only, follows no link, creates no device, and raises
InputError, naming the member, for absolute names, `..`, names that pass through a link, hard links to anything outside
the archive, and more data or entries than allowed. Whiteouts apply to lower layers only, wherever they stand in the
archive. The caller removes the target when it fails.
"""

import bz2
import errno
import gzip
import hashlib
import io
import lzma
import math
import os
import stat
import tarfile
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self, cast

import zstandard

from etude.errors import InputError
from etude.pods.images.trees import (
    DIGEST_LENGTH,
    MAX_ID,
    OVERFLOW_ID,
    Metadata,
    can_chown,
    check_depth,
    components,
    is_opaque,
    is_portable_xattr,
    is_whiteout,
    make_opaque,
    make_whiteout,
    open_to_read,
    portable_xattrs,
    readable_directory,
    remove_tree,
    set_metadata,
    unshift_id,
)
from etude.pods.pod import PodError

WHITEOUT = ".wh."
OPAQUE_NAME = ".wh..wh..opq"
XATTR = "SCHILY.xattr."

_MAX_HEADER = 1 << 20  # bytes of a pax or long-name header, which tarfile reads into memory
_MAX_MEMORY = 256 << 20  # bytes an xz or zstd stream may make its decoder allocate
_MAX_EOF_READS = 100  # tarfile reads for ever when a sparse map is truncated
_BLOCK = 1 << 18
_HEADERS = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
_DAMAGE = (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError, ValueError, OverflowError)


@dataclass(frozen=True, slots=True)
class UnpackLimits:
    """Limits on an archive's contents."""

    size: int = 64 << 30  # bytes of all files, holes included
    entries: int = 4_000_000
    depth: int = 120


DEFAULT_LIMITS = UnpackLimits()


# -- streams


class HashingReader(io.RawIOBase):
    """Reads from another stream, computing the digest and size of what was read; raises InputError over `limit`."""

    def __init__(self, source: IO[bytes], limit: int | None = None, label: str = "", kind: str = "sha256") -> None:
        self._source, self._limit, self._label = source, limit, label
        self._hash = hashlib.new(kind)
        self._eof_reads = 0
        self.size = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._source.read(len(buffer))
        self._eof_reads += not data
        if self._eof_reads > _MAX_EOF_READS:
            raise EOFError("the archive is truncated")
        buffer[: len(data)] = data
        self._hash.update(data)
        self.size += len(data)
        if self._limit is not None and self.size > self._limit:
            raise InputError(f"{self._label}: more than the {self._limit} bytes allowed once unpacked")
        return len(data)

    def drain(self) -> str:
        """Read to the end and return the digest, in hex."""
        while self.read(_BLOCK):
            pass
        return self._hash.hexdigest()


class _XzReader(io.RawIOBase):
    """Like lzma.open with a memory limit: an xz stream may make its decoder allocate 4 GiB."""

    def __init__(self, source: IO[bytes]) -> None:
        self._source = source
        self._decoder = lzma.LZMADecompressor(memlimit=_MAX_MEMORY)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            if self._decoder.eof:
                rest = self._decoder.unused_data or self._source.read(_BLOCK)
                if not rest.strip(b"\0"):
                    return 0
                self._decoder = lzma.LZMADecompressor(memlimit=_MAX_MEMORY)
            else:
                rest = self._source.read(_BLOCK) if self._decoder.needs_input else b""
                if not rest and self._decoder.needs_input:
                    raise EOFError("the compressed stream is truncated")
            data = self._decoder.decompress(rest, len(buffer))
            if data:
                buffer[: len(data)] = data
                return len(data)


def decompress(file: IO[bytes]) -> IO[bytes]:
    """Return a reader of a plain, gzip, xz, bzip2 or zstd stream, detected by its first bytes."""
    buffered = file if isinstance(file, io.BufferedReader) else io.BufferedReader(cast(io.RawIOBase, file), _BLOCK)
    magic = buffered.peek(6)[:6]
    if magic.startswith(b"\x1f\x8b"):
        return cast(IO[bytes], gzip.GzipFile(fileobj=buffered))
    if magic.startswith(b"BZh"):
        return bz2.BZ2File(buffered)
    if magic.startswith(b"\xfd7zXZ\0"):
        return io.BufferedReader(_XzReader(buffered), _BLOCK)
    if magic.startswith(b"\x28\xb5\x2f\xfd"):
        reader = zstandard.ZstdDecompressor(max_window_size=_MAX_MEMORY)
        return reader.stream_reader(buffered, read_across_frames=True)
    return buffered


# -- packing


class HashingWriter(io.RawIOBase):
    """Writes to another stream, if any, computing the digest and size of what was written."""

    def __init__(self, target: Any = None) -> None:
        self._target, self._hash, self.size = target, hashlib.sha256(), 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._hash.update(data)
        self.size += len(data)
        if self._target is not None:
            self._target.write(data)
        return len(data)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def pack(layer: Path, file: IO[bytes], shift: int = 0) -> None:
    """Write a layer as a tar: sorted, ids without `shift`, the same bytes for the same layer and times."""
    _Packer(file, shift).pack(layer)


def pack_compressed(layer: Path, file: Path, shift: int = 0) -> tuple[HashingWriter, HashingWriter]:
    """Write a layer to a new file as a compressed tar; return the writers of the file and of the plain tar."""
    with open(file, "xb") as target:
        packed = HashingWriter(target)
        compressor = zstandard.ZstdCompressor(level=3, threads=-1)
        with compressor.stream_writer(cast(IO[bytes], packed), closefd=False) as stream:
            plain = HashingWriter(stream)
            pack(layer, cast(IO[bytes], plain), shift)
    return packed, plain


def tree_digest(root: Path) -> str:
    """Return a digest of a tree's names, types, modes, owners, contents, links, attributes and whiteouts; not times."""
    writer = HashingWriter()
    _Packer(cast(IO[bytes], writer), 0, for_digest=True).pack(root)
    return writer.hexdigest()[:DIGEST_LENGTH]


class _Packer:
    def __init__(self, file: IO[bytes], shift: int, for_digest: bool = False) -> None:
        self._tar = tarfile.open(fileobj=file, mode="w|", format=tarfile.PAX_FORMAT, encoding="utf-8")  # noqa: SIM115
        self._shift, self._for_digest = shift, for_digest  # a digest needs no times, and allows names of whiteouts
        self._links: dict[tuple[int, int], str] = {}

    def pack(self, layer: Path) -> None:
        with self._tar:
            self._add_directory(str(layer), "", 0)

    def _add_directory(self, path: str, name: str, depth: int) -> None:
        check_depth(path, depth)
        self._tar.addfile(self._member(name or ".", os.lstat(path), path))
        above = f"{name}/" if name else ""
        with readable_directory(path) as names:
            if is_opaque(path):
                self._add_marker(above + OPAQUE_NAME)
            for child in names:
                inside, full = above + child, f"{path}/{child}"
                info = os.lstat(full)
                if is_whiteout(info):
                    self._add_marker(above + WHITEOUT + child)
                elif child.startswith(WHITEOUT) and not self._for_digest:
                    raise PodError(f"{inside}: a name that starts with {WHITEOUT} means a deletion in a tar; rename it")
                elif stat.S_ISDIR(info.st_mode):
                    self._add_directory(full, inside, depth + 1)
                else:
                    self._add_leaf(full, inside, info)

    def _add_leaf(self, path: str, name: str, info: os.stat_result) -> None:
        inode = (info.st_dev, info.st_ino)
        member = self._member(name, info, path)
        if info.st_nlink > 1 and inode in self._links and not stat.S_ISFIFO(info.st_mode):
            member.type, member.linkname, member.size = tarfile.LNKTYPE, self._links[inode], 0
            self._tar.addfile(member)
        elif stat.S_ISREG(info.st_mode):
            if info.st_size > DEFAULT_LIMITS.size:
                raise PodError(f"{name}: a file of {info.st_size} bytes (with holes) is too large to export; remove it")
            with os.fdopen(open_to_read(path), "rb") as file:
                self._tar.addfile(member, file)
            self._links[inode] = name
        elif stat.S_ISLNK(info.st_mode) or stat.S_ISFIFO(info.st_mode):
            self._tar.addfile(member)
            self._links[inode] = name
        # a socket is useless without its process, and layers contain no devices

    def _add_marker(self, name: str) -> None:
        member = tarfile.TarInfo(name)
        member.mode = 0o600
        self._tar.addfile(member)

    def _member(self, name: str, info: os.stat_result, path: str) -> tarfile.TarInfo:
        member = tarfile.TarInfo(name)
        member.mode, member.mtime = stat.S_IMODE(info.st_mode), 0 if self._for_digest else int(info.st_mtime)
        if can_chown():
            member.uid, member.gid = unshift_id(info.st_uid, self._shift), unshift_id(info.st_gid, self._shift)
        if stat.S_ISDIR(info.st_mode):
            member.type = tarfile.DIRTYPE
        elif stat.S_ISLNK(info.st_mode):
            member.type, member.linkname = tarfile.SYMTYPE, os.readlink(path)
        elif stat.S_ISFIFO(info.st_mode):
            member.type = tarfile.FIFOTYPE
        else:
            member.size = info.st_size
        if not stat.S_ISLNK(info.st_mode):
            xattrs = sorted(portable_xattrs(path).items())
            member.pax_headers = {XATTR + key: value.decode("utf-8", "surrogateescape") for key, value in xattrs}
        return member


# -- unpacking


class _CheckedInfo(tarfile.TarInfo):
    """TarInfo that refuses damaged headers, which tarfile takes for the end, and oversized ones."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> Self:
        try:
            return super().fromtarfile(archive)
        except tarfile.HeaderError as error:
            if type(error).__name__ in ("EOFHeaderError", "EmptyHeaderError"):
                raise  # the end
            raise ValueError(f"bad header at byte {archive.offset}: {error}") from None

    def _proc_member(self, archive: tarfile.TarFile) -> Self:
        if self.size < 0:
            raise ValueError(f"member {self.name!r} has a negative size")
        if self.type in _HEADERS and self.size > _MAX_HEADER:
            raise ValueError(f"member {self.name!r} has a header of {self.size} bytes")
        return super()._proc_member(archive)  # type: ignore[misc, no-any-return]


def unpack(
    source: IO[bytes], target: Path, label: str, limits: UnpackLimits = DEFAULT_LIMITS, lowest: bool = False
) -> list[str]:
    """Unpack a tar (compressed or not) into the empty directory `target`; `label` names it in errors.

    In a `lowest` layer whiteouts have no effect and are skipped. Returns the directories that no member describes.
    """
    try:
        # padding and headers of the tar come on top of the file contents
        counted = HashingReader(decompress(source), limits.size + 2048 * limits.entries + _MAX_HEADER, label)
        stream = io.BufferedReader(counted, _BLOCK)
        unpacker = _Unpacker(target, label, limits)
        with tarfile.open(fileobj=stream, mode="r|", bufsize=_BLOCK, tarinfo=_CheckedInfo, encoding="utf-8") as tar:
            for member in tar:
                unpacker.add(tar, member)
                tar.members = []  # type: ignore[attr-defined]  # tarfile keeps every member it has read
        unpacker.finish(lowest)
        while stream.read(_BLOCK):
            pass  # bytes after the end marker are part of the layer's digest
        return unpacker.implied
    except _DAMAGE as error:
        raise InputError(f"{label}: the archive is damaged ({error}); get it again") from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise InputError(f"{label}: the archive is damaged ({error}); get it again") from error  # from gzip or bz2
    except RecursionError as error:  # an endless sequence of pax or long-name headers
        raise InputError(f"{label}: the archive is damaged (too many headers in a row)") from error


class _Unpacker:
    """Writes one archive into a directory that nothing else writes to.

    Every directory is in `directories`, so a name that exists and is not there is a file or a link, and nothing is
    created below it. Modes and times of directories are set last: a mode may forbid writing.
    """

    def __init__(self, target: Path, label: str, limits: UnpackLimits) -> None:
        self._target, self._label, self._limits = target, label, limits
        self._directories: dict[str, Metadata | None] = {"": None}  # None: no member describes it
        self._whiteouts: list[str] = []
        self._opaque: set[str] = set()
        self._size = self._entries = 0

    @property
    def implied(self) -> list[str]:
        """Return the directories that no member describes: they exist only because of their contents."""
        return sorted(path for path, metadata in self._directories.items() if metadata is None)

    def _refuse(self, member: str, why: str) -> InputError:
        return InputError(f"{self._label}: member {member!r} {why}; nothing was unpacked")

    def _place(self, path: str) -> str:
        return f"{self._target}/{path}"

    def add(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        """Unpack one member."""
        self._entries += 1
        self._size += max(member.size, 0) if member.isreg() else 0
        if self._entries > self._limits.entries:
            raise self._refuse(member.name, f"is one more than the {self._limits.entries} entries allowed")
        if self._size > self._limits.size:
            raise self._refuse(member.name, f"makes it more than the {self._limits.size} bytes allowed")
        path = self._path(member.name, member.name)
        try:
            self._put(tar, member, path)
        except (OSError, UnicodeError) as error:
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):  # of the disk
                raise
            raise self._refuse(member.name, f"cannot be created ({error})") from error

    def _path(self, path: str, member: str) -> str:
        """Return a checked name of the archive, relative to the target."""
        parts = components(path)
        if path.startswith("/"):
            raise self._refuse(member, f"has the absolute path {path!r}")
        if ".." in parts:
            raise self._refuse(member, f"leads outside by {path!r}")
        if "\0" in path:
            raise self._refuse(member, "has a NUL in its name")
        if len(parts) > self._limits.depth:
            raise self._refuse(member, f"is nested deeper than {self._limits.depth} directories")
        return "/".join(parts)

    def _make_directory(self, path: str, member: str) -> None:
        """Create a directory and its parents."""
        if path in self._directories:
            return
        parent, _, name = path.rpartition("/")
        self._make_directory(parent, member)
        try:
            os.mkdir(self._place(path), 0o755)
        except FileExistsError:
            raise self._refuse(member, f"passes through {name!r}, which is a link or a file") from None
        self._directories[path] = None

    def _put(self, tar: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
        parent, _, name = path.rpartition("/")
        if name.startswith(WHITEOUT):
            self._add_marker(member, parent, name)
        elif not path and not member.isdir():
            raise self._refuse(member.name, "has no name")
        elif member.ischr() and member.devmajor == member.devminor == 0:
            self._whiteouts.append(path)
        elif member.ischr() or member.isblk():
            self._make_directory(parent, member.name)  # only its directory: a pod has its own /dev
        else:
            self._make_directory(parent, member.name)
            if not member.isdir() or path not in self._directories:
                self._remove_earlier(path)
            if member.isdir():
                self._make_directory(path, member.name)
                self._directories[path] = _metadata(member)
            else:
                self._create(tar, member, path)

    def _remove_earlier(self, path: str) -> None:
        """Remove an earlier member of the same name."""
        if path not in self._directories:
            with suppress(FileNotFoundError):
                os.unlink(self._place(path))
            return
        remove_tree(Path(self._place(path)))
        gone = {each for each in self._directories if each == path or each.startswith(path + "/")}
        self._opaque -= gone
        for each in gone:
            del self._directories[each]

    def _create(self, tar: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
        place = self._place(path)
        if member.islnk():
            self._link(member, path)
            return
        if member.isreg():
            self._write(tar, member, place)
        elif member.issym():
            os.symlink(member.linkname, place)
        elif member.isfifo():
            os.mkfifo(place)
        else:
            raise self._refuse(member.name, f"has the unknown type {member.type!r}")
        set_metadata(place, _metadata(member))

    def _write(self, tar: tarfile.TarFile, member: tarfile.TarInfo, place: str) -> None:
        source = tar.extractfile(member)
        assert source is not None
        with open(place, "xb") as file:
            left = member.size
            while left:
                block = source.read(min(_BLOCK, left))
                if not block:
                    raise EOFError(f"member {member.name!r} is truncated")
                left -= len(block)
                if member.issparse() and not block.strip(b"\0"):
                    file.seek(len(block), os.SEEK_CUR)
                else:
                    file.write(block)
            file.truncate(member.size)

    def _link(self, member: tarfile.TarInfo, path: str) -> None:
        source = self._path(member.linkname, member.name)
        missing = self._refuse(member.name, f"links to {member.linkname!r}, not an earlier file of the archive")
        if source == path or source in self._directories or os.path.dirname(source) not in self._directories:
            raise missing
        try:
            os.link(self._place(source), self._place(path), follow_symlinks=False)
        except FileNotFoundError:
            raise missing from None

    def _add_marker(self, member: tarfile.TarInfo, parent: str, name: str) -> None:
        if name == OPAQUE_NAME:
            self._make_directory(parent, member.name)
            self._opaque.add(parent)
        elif name.startswith(WHITEOUT * 2):
            return  # metadata of aufs, where this format comes from
        elif name[len(WHITEOUT) :] in ("", ".", ".."):
            raise self._refuse(member.name, "is a whiteout without a name")
        else:
            self._whiteouts.append(f"{parent}/{name[len(WHITEOUT) :]}".lstrip("/"))

    def finish(self, lowest: bool) -> None:
        """Write whiteouts and opaque markers, then the metadata of directories, deepest first."""
        for path in self._whiteouts if not lowest else ():
            parent = os.path.dirname(path)
            self._make_directory(parent, f"{parent}/{WHITEOUT}{os.path.basename(path)}")
            if path in self._directories:  # deleted in lower layers and created again here
                self._opaque.add(path)
            elif parent not in self._opaque and not os.path.lexists(self._place(path)):
                make_whiteout(self._place(path))
        for path in self._opaque if not lowest else ():
            make_opaque(self._place(path))
        plain = Metadata(0o755, (0, 0), (0, 0), {})
        for path in sorted(self._directories, key=lambda path: path.count("/") + bool(path), reverse=True):
            set_metadata(self._place(path), self._directories[path] or plain)


def _metadata(member: tarfile.TarInfo) -> Metadata:
    xattrs = {
        key[len(XATTR) :]: value.encode("utf-8", "surrogateescape")
        for key, value in member.pax_headers.items()
        if key.startswith(XATTR) and is_portable_xattr(key[len(XATTR) :])
    }
    uid, gid = (owner if 0 <= owner <= MAX_ID else OVERFLOW_ID for owner in (member.uid, member.gid))
    time = float(member.mtime)
    ns = int(time * 1e9) if math.isfinite(time) and 0 <= time < 1 << 33 else 0
    return Metadata(None if member.issym() else member.mode & 0o7777, (uid, gid), (ns, ns), xattrs)
