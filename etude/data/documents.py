"""Read sources file by file: directories, git repositories, archives, rows, the standard library.

`read_source` chooses the reader; each reader yields `File`s whose bytes are read on demand, so that a filter on names
costs no reading. A repository is a directory with `.git` or a project file; in any other directory each sub-directory
and each loose file is one; an archive is one; rows name theirs. Nothing is extracted to disk, no link is followed,
and no program that a repository configures is run.
"""

import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from etude.data.licences import is_licence
from etude.data.sources import NAMED_SOURCES, SKIPPED_FOLDERS, locate_source
from etude.errors import InputError
from etude.system.git import object_reader, run_git

PROJECT_FILES = ("pyproject.toml", "setup.py", "package.json", "Cargo.toml", "go.mod")
ARCHIVES = (".zip", ".whl", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
ROWS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")


@dataclass(frozen=True)
class Document:
    """The text of a file or row, with its repository and path."""

    repository: str
    path: str
    text: str

    @property
    def name(self) -> str:
        return document_name(self.repository, self.path)


@dataclass(frozen=True)
class File:
    """A file or row before it is read. `read` may be called until the next file is requested."""

    repository: str
    path: str
    size: int
    read: Callable[[], bytes]
    explicit: bool = False  # named by the user, or a row without a path: not filtered by suffix
    mtime_ns: int = 0  # time of the last change, if known
    reopenable: bool = False  # `read` may be called at any time and in another process


@dataclass(frozen=True)
class ReadLimits:
    """Limits on the bytes read from one source; anything larger is an accident or an attack, not text."""

    max_item_bytes: int = 64 << 20  # one archive member or row; larger ones are reported, never held in memory
    max_archive_bytes: int = 8 << 30  # unpacked size of one archive


READ_LIMITS = ReadLimits()


def clean_name(name: str) -> str:
    """Replace bytes that are not UTF-8: names on disk and in archives are bytes, and reports are UTF-8."""
    return name.encode(errors="replace").decode()


def document_name(repository: str, path: str) -> str:
    return path if path == repository else f"{repository}/{path}"


def read_source(source: str, limits: ReadLimits = READ_LIMITS) -> Iterator[File]:
    """Yield the files of one source, in an order that depends only on their content and names."""
    root = locate_source(source)
    if root.is_dir():
        yield from _read_directory(root, source)
    elif root.is_file() and root.name.endswith(ARCHIVES):
        from etude.data.archives import read_archive

        yield from read_archive(root, limits)
    elif root.is_file() and root.name.endswith(ROWS):
        from etude.data.rows import read_text_rows

        yield from read_text_rows(root, limits)
    elif root.is_file():
        yield _file_on_disk(str(root), root.name, root.name, explicit=True)
    elif (parts := _split_revision(source)) is not None:
        yield from _read_revision(*parts)
    else:
        expected = f"a directory, a file, PATH@REVISION, or {' or '.join(NAMED_SOURCES)}"
        raise InputError(f"source {source} does not exist; name {expected}")


def source_digest(source: str) -> str:
    """Return a digest that changes with the source, without reading it: of names, sizes, times or the revision."""
    path = Path(source)
    digest = hashlib.sha256()
    if path.is_file():
        found = path.stat()
        digest.update(f"{found.st_size} {found.st_mtime_ns}".encode())
    elif not path.is_dir() and (parts := _split_revision(source)) is not None:
        digest.update(run_git(parts[0], "rev-parse", "--verify", f"{parts[1]}^{{commit}}"))
    else:
        for file in read_source(source):
            line = f"{file.repository}\0{file.path}\0{file.size}\0{file.mtime_ns}\n"
            digest.update(line.encode(errors="surrogateescape"))
    return digest.hexdigest()


# ------------------------------------------------------------------------------------------------ directories


def _read_directory(root: Path, source: str) -> Iterator[File]:
    if is_bare(root):
        yield from _read_revision(root, "HEAD")
    elif is_repository(root):
        yield from _read_repository(root, root.resolve().name)
    else:
        yield from _read_folder_of_repositories(root, source)


def is_repository(directory: Path) -> bool:
    return any((directory / name).exists() for name in (".git", *PROJECT_FILES))


def is_bare(directory: Path) -> bool:
    """Return whether this is a git repository without a working tree, which has the content of a .git directory."""
    return (directory / "HEAD").is_file() and (directory / "objects").is_dir() and (directory / "refs").is_dir()


def _read_folder_of_repositories(root: Path, source: str) -> Iterator[File]:
    """Read each sub-directory and each loose file as a repository; a licence file next to them applies to all."""
    try:
        entries = sorted(os.scandir(root), key=lambda entry: entry.name)
    except OSError as error:
        raise InputError(f"source {source} cannot be read: {error.strerror}") from None
    shared = [Path(entry.path) for entry in entries if _is_plain(entry) and is_licence(entry.name)]
    for entry in entries:
        path = Path(entry.path)
        if _is_plain(entry) and path not in shared:
            yield _file_on_disk(entry.path, entry.name, entry.name)
        elif entry.is_dir(follow_symlinks=False) and not _is_skipped(entry.name):
            reader = _read_revision(path, "HEAD") if is_bare(path) else _read_repository(path, entry.name)
            yield from reader
        else:
            continue
        for licence in shared:
            yield _file_on_disk(str(licence), entry.name, f"../{licence.name}")


def _read_repository(root: Path, name: str) -> Iterator[File]:
    paths = _git_files(root) if (root / ".git").exists() else _walk(root, "")
    for path in sorted(paths):
        # One system call per file, and no Path: the files are listed by one process, twice.
        full_path = os.path.join(root, path)
        try:
            found = os.lstat(full_path)
        except (FileNotFoundError, NotADirectoryError):  # deleted, but still tracked by git
            continue
        if stat.S_ISREG(found.st_mode):
            yield _file_on_disk(full_path, name, path, found)


def _walk(root: Path, prefix: str) -> Iterator[str]:
    try:
        entries = list(os.scandir(root))
    except OSError as error:
        raise InputError(f"source folder {error.filename} cannot be read: {error.strerror}") from None
    for entry in entries:
        if entry.is_dir(follow_symlinks=False) and not _is_skipped(entry.name):
            yield from _walk(Path(entry.path), f"{prefix}{entry.name}/")
        elif _is_plain(entry):
            yield prefix + entry.name


def _is_skipped(folder: str) -> bool:
    return folder.startswith(".") or folder in SKIPPED_FOLDERS


def _is_plain(entry: "os.DirEntry[str]") -> bool:
    return entry.is_file(follow_symlinks=False)


def _file_on_disk(
    path: str, repository: str, name: str, found: os.stat_result | None = None, *, explicit: bool = False
) -> File:
    found = found or os.stat(path)
    return File(
        clean_name(repository),
        clean_name(name),
        found.st_size,
        partial(_read_bytes, path),
        explicit,
        found.st_mtime_ns,
        reopenable=True,
    )


def _read_bytes(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise InputError(f"source file {path} cannot be read: {error.strerror}") from None


# -------------------------------------------------------------------------------------------------------- git


def _git_files(root: Path) -> list[str]:
    """Return tracked and untracked files, without those that .gitignore excludes."""
    listed = run_git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--exclude=.*.partial/")
    paths = sorted({os.fsdecode(path) for path in listed.split(b"\0") if path})
    # a forged index names files outside: by "..", or below a symbolic link
    folders = {os.path.dirname(path) for path in paths}
    top = os.path.realpath(root)
    inside = {
        folder for folder in folders if os.path.realpath(f"{top}/{folder}") == os.path.join(top, folder).rstrip("/")
    }
    return [path for path in paths if os.path.dirname(path) in inside]


def _split_revision(source: str) -> tuple[Path, str] | None:
    path, at, revision = source.rpartition("@")
    if not at or not revision or revision.startswith("-"):
        return None
    return (Path(path), revision) if Path(path).is_dir() else None


def _read_revision(root: Path, revision: str) -> Iterator[File]:
    """Read the files of one commit from git's object store: no checkout, no filter programs, no attributes."""
    name = root.resolve().name.removesuffix(".git")
    commit = run_git(root, "rev-parse", "--verify", f"{revision}^{{commit}}").decode().strip()
    listed = run_git(root, "ls-tree", "-r", "-l", "-z", "--full-tree", commit)
    with object_reader(root) as read_object:
        for line in listed.split(b"\0"):
            header, _, path = line.partition(b"\t")
            mode, kind, digest, size = header.split() if line else (b"", b"", b"", b"")
            if kind == b"blob" and mode != b"120000":  # a submodule has kind commit; mode 120000 is a symbolic link
                if not size.isdigit():  # git says BAD; it is not allowed to fetch the object
                    raise InputError(f"{root}: {os.fsdecode(path)} is missing; fetch all of the partial clone")
                yield File(name, path.decode(errors="replace"), int(size), partial(read_object, digest))
