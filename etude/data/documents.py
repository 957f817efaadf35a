"""What a user has, as files one by one: directories, git repositories, archives, rows, the standard library.

`read_source` chooses the reader by what the source is; each reader is a generator of `File`s whose bytes are read only
when asked for, so that a filter on names costs no reading. A repository is a directory with `.git` or a project file;
in any other directory each sub-directory and each loose file is one; an archive is one; rows name theirs.
Nothing is extracted to disk, no link is followed, and nothing that a repository configures is executed.
"""

import contextlib
import hashlib
import os
import stat
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from etude.data.licences import is_licence
from etude.data.sources import SKIPPED_FOLDERS, WORDS, locate
from etude.errors import InputError

PROJECT_FILES = ("pyproject.toml", "setup.py", "package.json", "Cargo.toml", "go.mod")
ARCHIVES = (".zip", ".whl", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
ROWS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")

# A configured monitor is a program that git would start; the repository may be a stranger's.
GIT = ("git", "-c", "core.fsmonitor=false", "--no-optional-locks")


@dataclass(frozen=True)
class Document:
    """A text with its place: what every later step works on."""

    repository: str
    path: str
    text: str

    @property
    def name(self) -> str:
        return document_name(self.repository, self.path)


@dataclass(frozen=True)
class File:
    """A document before anybody has looked inside. `read` may be called until the next file is asked for."""

    repository: str
    path: str
    size: int
    read: Callable[[], bytes]
    chosen: bool = False  # named by the user, or a row without a path: its suffix decides nothing
    stamp: int = 0  # of last change, where there is one
    anywhere: bool = False  # `read` may be called at any time and in another process


@dataclass(frozen=True)
class Limits:
    """How much one source may make us read; what is larger is not a source of text but an accident or an attack."""

    member: int = 64 << 20  # bytes of one member or row: larger ones are reported, never held in memory
    total: int = 8 << 30  # bytes that one archive may unpack to


LIMITS = Limits()


def clean_name(name: str) -> str:
    """Names on disk and in archives are bytes; those that are not UTF-8 could be written to no report."""
    return name.encode(errors="replace").decode()


def document_name(repository: str, path: str) -> str:
    return path if path == repository else f"{repository}/{path}"


def read_source(source: str, limits: Limits = LIMITS) -> Iterator[File]:
    """The files of one source, in an order that depends on nothing but their content and names."""
    root = locate(source)
    if root.is_dir():
        yield from _read_directory(root, source)
    elif root.is_file() and root.name.endswith(ARCHIVES):
        from etude.data.archives import read_archive

        yield from read_archive(root, limits)
    elif root.is_file() and root.name.endswith(ROWS):
        from etude.data.rows import read_text_rows

        yield from read_text_rows(root, limits)
    elif root.is_file():
        yield _file_on_disk(str(root), root.name, root.name, chosen=True)
    elif (parts := _split_revision(source)) is not None:
        yield from _read_revision(*parts)
    else:
        kinds = f"a directory, a file, PATH@REVISION, or {' or '.join(WORDS)}"
        raise InputError(f"source {source} does not exist; name {kinds}")


def source_digest(source: str) -> str:
    """Changes when what `read_source` would give changes, without reading it: names, sizes, times, revisions."""
    path = Path(source)
    seen = hashlib.sha256()
    if path.is_file():
        found = path.stat()
        seen.update(f"{found.st_size} {found.st_mtime_ns}".encode())
    elif not path.is_dir() and (parts := _split_revision(source)) is not None:
        seen.update(_git(parts[0], "rev-parse", "--verify", f"{parts[1]}^{{commit}}"))
    else:
        for file in read_source(source):
            line = f"{file.repository}\0{file.path}\0{file.size}\0{file.stamp}\n"
            seen.update(line.encode(errors="surrogateescape"))
    return seen.hexdigest()


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
    """A git repository without a working tree is its own .git directory."""
    return (directory / "HEAD").is_file() and (directory / "objects").is_dir() and (directory / "refs").is_dir()


def _read_folder_of_repositories(root: Path, source: str) -> Iterator[File]:
    """Each sub-directory and each loose file by itself; a licence beside them is a licence of all of them."""
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
        # One call to the system for a file, and no Path: the list of files is made by one process, twice.
        place = os.path.join(root, path)
        try:
            found = os.lstat(place)
        except (FileNotFoundError, NotADirectoryError):  # git still knows what has been deleted
            continue
        if stat.S_ISREG(found.st_mode):
            yield _file_on_disk(place, name, path, found)


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
    path: str, repository: str, name: str, found: os.stat_result | None = None, *, chosen: bool = False
) -> File:
    found = found or os.stat(path)
    return File(
        clean_name(repository),
        clean_name(name),
        found.st_size,
        partial(_read_bytes, path),
        chosen,
        found.st_mtime_ns,
        anywhere=True,
    )


def _read_bytes(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise InputError(f"source file {path} cannot be read: {error.strerror}") from None


# -------------------------------------------------------------------------------------------------------- git


def _git_files(root: Path) -> list[str]:
    """Tracked files and new ones; what .gitignore names is left out."""
    listed = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--exclude=.*.partial/")
    return sorted({os.fsdecode(path) for path in listed.split(b"\0") if path})


def _split_revision(source: str) -> tuple[Path, str] | None:
    path, at, revision = source.rpartition("@")
    if not at or not revision or revision.startswith("-"):
        return None
    return (Path(path), revision) if Path(path).is_dir() else None


def _read_revision(root: Path, revision: str) -> Iterator[File]:
    """The files of one commit, straight from git's objects: no checkout, no filter programs, no attributes."""
    name = root.resolve().name.removesuffix(".git")
    commit = _git(root, "rev-parse", "--verify", f"{revision}^{{commit}}").decode().strip()
    listed = _git(root, "ls-tree", "-r", "-l", "-z", "--full-tree", commit)
    command = [*GIT, "-C", str(root), "cat-file", "--batch"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_git_environment()) as objects:
        try:
            for line in listed.split(b"\0"):
                about, _, path = line.partition(b"\t")
                mode, kind, digest, size = about.split() if line else (b"", b"", b"", b"")
                if kind == b"blob" and mode != b"120000":  # a submodule is a commit, 120000 is a link
                    read = partial(_read_object, objects, digest)
                    yield File(name, path.decode(errors="replace"), int(size), read)
        finally:
            with contextlib.suppress(OSError):
                objects.kill()


def _read_object(objects: "subprocess.Popen[bytes]", digest: bytes) -> bytes:
    assert objects.stdin is not None
    assert objects.stdout is not None
    objects.stdin.write(digest + b"\n")
    objects.stdin.flush()
    size = int(objects.stdout.readline().split()[2])
    return objects.stdout.read(size + 1)[:-1]  # a newline follows


def _git_environment() -> dict[str, str]:
    """Ours without GIT_DIR and its like, which a hook sets and which win over -C."""
    return {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}


def _git(root: Path, *arguments: str) -> bytes:
    try:
        done = subprocess.run(
            [*GIT, "-C", str(root), *arguments], capture_output=True, check=False, env=_git_environment()
        )
    except FileNotFoundError:
        raise InputError(f"source {root} is a git repository, but the program git is not installed") from None
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip().splitlines() or ["no reason given"]
        raise InputError(f"source {root}: git {arguments[0]} failed: {reason[0]}")
    return done.stdout
