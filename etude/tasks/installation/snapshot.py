"""A revision of a repository as files in memory, read from git's object store; nothing of it is executed."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from etude.errors import InputError
from etude.pods.workspace import FileState
from etude.system.git import object_reader, run_git
from etude.tasks.generators.source import ARCHIVES, archive_files

MAX_FILE_BYTES = 64 << 20
MAX_TOTAL_BYTES = 512 << 20
MAX_FILES = 50_000


@dataclass(frozen=True)
class RepositorySnapshot:
    """The files of one revision of a repository; paths are relative to its top."""

    name: str
    commit: str  # full commit id; empty for a plain directory or an archive
    date: str  # of the commit, ISO 8601; empty if unknown
    files: Mapping[str, FileState] = field(repr=False)
    version: str = ""  # from the nearest tag, for projects that take their version from git
    submodules: tuple[str, ...] = ()  # paths whose files are in other repositories

    @property
    def label(self) -> str:
        return f"{self.name}@{self.commit[:12]}" if self.commit else self.name

    def text(self, path: str) -> str:
        """Return the text of a file; empty if there is none."""
        state = self.files.get(path)
        return state.contents.decode("utf-8", "replace") if state is not None and state.kind == "file" else ""


def split_revision(given: str) -> tuple[Path, str]:
    """Return the path and revision of REPO[@REV]; the revision is empty if there is none."""
    path, at, revision = given.rpartition("@")
    if not at or Path(given).exists():
        return Path(given), ""
    return Path(path), revision


def checkout(repository: Path | str, revision: str = "") -> RepositorySnapshot:
    """Return the files of a revision (default: HEAD) of a git directory, or of a plain directory or source archive."""
    path = Path(repository)
    if not path.exists():
        raise InputError(f"{path}: there is no such repository; expected a git repository, a directory or an archive")
    is_git = path.is_dir() and ((path / ".git").exists() or ((path / "objects").is_dir() and (path / "HEAD").exists()))
    if is_git:
        return _read_commit(path, revision or "HEAD")
    if revision:
        raise InputError(f"{path}: not a git repository, so it has no revision {revision!r}; leave out @{revision}")
    if path.is_file() and path.name.endswith(ARCHIVES):
        files = {name: FileState.file(data) for name, data in archive_files(path, MAX_FILE_BYTES, MAX_TOTAL_BYTES)}
        name = path.name.removesuffix(next(end for end in ARCHIVES if path.name.endswith(end)))
        return RepositorySnapshot(re.sub(r"-\d[^-]*$", "", name), "", "", files, _version_in(name))
    if not path.is_dir():
        raise InputError(f"{path}: expected a git repository, a directory or an archive ({', '.join(ARCHIVES)})")
    return RepositorySnapshot(path.resolve().name, "", "", dict(_read_directory(path)))


def _version_in(name: str) -> str:
    found = re.search(r"-(\d[^-]*)$", name)
    return found[1] if found else ""


def _read_directory(top: Path) -> Iterator[tuple[str, FileState]]:
    total = count = 0
    for directory, names, files in os.walk(top):
        names[:] = sorted(name for name in names if name not in (".git", "__pycache__", "node_modules", ".venv"))
        for name in sorted([*files, *(name for name in names if os.path.islink(f"{directory}/{name}"))]):
            path = Path(directory, name)
            inside = path.relative_to(top).as_posix()
            if path.is_symlink():
                yield inside, FileState.symlink(os.readlink(path))
                continue
            if not path.is_file():
                continue  # a socket or device
            info = path.stat()
            total, count = total + info.st_size, count + 1
            _check_size(top, inside, info.st_size, total, count)
            yield inside, FileState.file(path.read_bytes(), bool(info.st_mode & 0o100))


def _check_size(where: Path, path: str, size: int, total: int, count: int) -> None:
    if size > MAX_FILE_BYTES:
        raise InputError(
            f"{where}: {path} has {size:,} bytes, more than {MAX_FILE_BYTES:,} for a file; "
            "the repository cannot be installed with it"
        )
    if total > MAX_TOTAL_BYTES or count > MAX_FILES:
        limit = f"{MAX_FILES:,} files or {MAX_TOTAL_BYTES >> 20} MiB"
        raise InputError(f"{where}: more than {limit}; it is too large to be installed")


def _read_commit(root: Path, revision: str) -> RepositorySnapshot:
    commit = _commit_id(root, revision)
    files: dict[str, FileState] = {}
    submodules: list[str] = []
    total = 0
    listed = [line for line in run_git(root, "ls-tree", "-r", "-l", "-z", "--full-tree", commit).split(b"\0") if line]
    with object_reader(root) as read_object:
        for count, line in enumerate(listed):
            header, _, raw = line.partition(b"\t")
            mode, kind, digest, size = header.split()
            path = os.fsdecode(raw)
            if kind == b"commit":
                submodules.append(path)
                continue
            if not size.isdigit():  # git says BAD; it is not allowed to fetch the object
                raise InputError(f"{root}: {path} is missing; fetch all of the partial clone")
            if not _is_safe(path):
                raise InputError(f"{root}: {path!r} is not a path that a file can be written to")
            total += int(size)
            _check_size(root, path, int(size), total, count)
            data = read_object(digest)
            link = mode == b"120000"
            files[path] = FileState.symlink(os.fsdecode(data)) if link else FileState.file(data, mode == b"100755")
    if not files:
        raise InputError(f"{root}: the commit {commit[:12]} has no files")
    date = run_git(root, "log", "-1", "--format=%cI", commit).decode().strip()
    return RepositorySnapshot(_name(root), commit, date, files, _tagged_version(root, commit), tuple(submodules))


def _commit_id(root: Path, revision: str) -> str:
    if revision.startswith("-"):
        raise InputError(f"{root}: {revision!r} is not a revision")
    try:
        return run_git(root, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}").decode().strip()
    except InputError as error:
        reason = str(error)
        if "no reason given" not in reason:
            raise
        if revision == "HEAD":
            raise InputError(f"{root}: the repository has no commit; there is nothing to install") from None
        raise InputError(f"{root}: there is no revision {revision!r}; `git log` there lists commits") from None


def _name(root: Path) -> str:
    """Return the name of a repository; a bare clone in a directory `repo` is named by its parent, OWNER+NAME."""
    path = root.resolve()
    name = path.name.removesuffix(".git") or path.parent.name
    if name == "repo" and not (path / ".git").exists():
        name = path.parent.name.rpartition("+")[2]
    return name


def _is_safe(path: str) -> bool:
    parts = path.split("/")
    return not (path.startswith("/") or ".." in parts or "" in parts or ".git" in (part.lower() for part in parts))


def _tagged_version(root: Path, commit: str) -> str:
    """Return the version of the nearest tag, with the number of commits since then; "0" without a tag."""
    try:
        described = run_git(root, "describe", "--tags", "--long", "--match", "*[0-9].[0-9]*", commit).decode().strip()
    except InputError:
        return "0"
    found = re.search(r"(\d+(?:\.\d+)*)\S*?-(\d+)-g[0-9a-f]+$", described)
    if found is None:
        return "0"
    return found[1] if found[2] == "0" else f"{found[1]}.post{found[2]}"
