"""A person's directory on its way into a pod: which files go, and what is told about them.

Of a git work tree go the tracked and the untracked files that are not ignored, and its history without anything that
may hold a secret (configuration, remotes, credentials); of any other directory everything. Links go as links. What is
too large is refused with where the bytes are.
"""

import asyncio
import contextlib
import hashlib
import io
import os
import stat
import subprocess
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO

from etude.agent.manifest import MAX_BYTES, MAX_FILES, Entry, Tree, is_ours
from etude.errors import EtudeError, InputError
from etude.pods.pod import Pod, PodError

PART = 1 << 20
RECENT = 10  # files named in the prompt as changed lately

# Of the configuration: what says how files are stored, and who commits. No remotes: their URLs hold passwords.
CORE = ("repositoryformatversion", "filemode", "ignorecase", "symlinks", "autocrlf", "eol", "precomposeunicode")
OTHERS = ("extensions.objectformat", "extensions.refstorage", "user.name", "user.email")
KEPT = frozenset((*(f"core.{name}" for name in CORE), *OTHERS))
# Of the git directory: other work trees, large files that are checked out, configuration, and what git would run.
LEFT_OUT = ("worktrees", "modules", "lfs", "annex", "config", "config.worktree", "credentials", "hooks")
# Without these git sees no repository, and they may be empty.
PLACES = (".git/objects", ".git/refs", ".git/refs/heads")

UNPACK = """\
import sys, tarfile
tar = tarfile.open(fileobj=sys.stdin.buffer, mode="r|")
tar.extraction_filter = lambda member, path: member
tar.extractall(".")
"""


@dataclass(frozen=True)
class Intake:
    """What went in: the files by path, and what a person should know about what did not."""

    tree: Tree
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Choice:
    """What is to go in: files of the workspace, and git's own directory as (its path in the pod, file here)."""

    files: Sequence[str]
    history: Sequence[tuple[str, Path]] = ()
    config: bytes | None = None
    notes: tuple[str, ...] = ()


async def take_in(pod: Pod, root: str, directory: Path, *, include: Sequence[str] = (), history: bool = True) -> Intake:
    """Copy a directory to `root` in the pod. `include` are ignored paths that go all the same."""
    choice = await asyncio.to_thread(choose, directory, include, history)
    with tempfile.TemporaryFile(prefix="etude-intake-") as file:
        tree = await asyncio.to_thread(pack, directory, choice, file)
        file.seek(0)
        await unpack(pod, root, file)
    left = [path for path in choice.files if path not in tree]
    notes = (f"left out, for they are no files or cannot be read: {len(left)}, {left[0]!r} first",) if left else ()
    return Intake(tree, (*choice.notes, *notes))


async def unpack(pod: Pod, root: str, file: IO[bytes]) -> None:
    """Unpack a tar in the pod, as it is read."""
    job = await pod.spawn(["python3", "-I", "-S", "-c", UNPACK], cwd=root)
    said = bytearray()

    async def listen() -> None:
        async for _, data in job.output():
            said.extend(data[: 4096 - len(said)])

    listening = asyncio.create_task(listen())
    with contextlib.suppress(PodError):  # it ended before its input did, and says why
        while data := await asyncio.to_thread(file.read, PART):
            await job.write(data)
        await job.close_stdin()
    done = await job.wait()
    await listening
    if not done.ok:
        lines = said.decode("utf-8", "replace").strip().splitlines()
        raise EtudeError(f"the files could not be copied into the pod: {lines[-1] if lines else done.exit_code}")


# ------------------------------------------------------------------------------------------------- choosing


def choose(directory: Path, include: Sequence[str] = (), history: bool = True) -> Choice:
    """Which files of a directory go."""
    if directory in (Path.home(), Path(directory.anchor)):
        raise InputError(f"{directory} is not a project: go to the directory to work in, or name it with -C")
    notes: list[str] = []
    kept: Sequence[tuple[str, Path]] = ()
    config = None
    if is_work_tree(directory):
        files = git_files(directory)
        top = Path(os.fsdecode(git(directory, "rev-parse", "--show-toplevel").rstrip(b"\n")))
        if top != directory.resolve():
            notes.append(f"only {directory.name}/ is there, not the rest of the repository {top}, nor its history")
        elif history:
            kept, reason = git_history(directory)
            config = plain_config(directory) if kept else None
            notes += [reason] if reason else []
    else:
        files = list(islice(walk(directory), MAX_FILES + 1))  # one more is enough to refuse
    for path in include:
        files += named(directory, path)
    found = [path for path in dict.fromkeys(files) if is_ours(path)]
    check_size(directory, found, kept)
    return Choice(found, kept, config, tuple(notes))


def named(directory: Path, path: str) -> list[str]:
    """The files that a person names, which must be in the directory."""
    relative = os.path.normpath(path)
    if os.path.isabs(relative) or not is_ours(relative):
        raise InputError(f"--include {path}: expected a path below {directory}")
    if not os.path.lexists(directory / relative):
        raise InputError(f"--include {path}: there is no such file in {directory}")
    real = (directory / relative).is_dir() and not (directory / relative).is_symlink()
    return list(walk(directory, relative)) if real else [relative]


def walk(directory: Path, below: str = "") -> Iterator[str]:
    """All files and links, without git's own."""
    for here, names, files in os.walk(directory / below):
        names[:] = sorted(name for name in names if name != ".git")
        links = [name for name in names if os.path.islink(os.path.join(here, name))]
        for name in sorted(files + links):
            yield os.path.relpath(os.path.join(here, name), directory)


def is_work_tree(directory: Path) -> bool:
    """Whether git keeps this directory; an error where it does and there is no git to ask."""
    try:
        if git(directory, "rev-parse", "--is-inside-work-tree").strip() != b"true":
            return False
        with contextlib.suppress(EtudeError):  # which says no
            git(directory, "check-ignore", "-q", str(directory))
            return False  # a directory that its repository ignores is none of its business
        return True
    except FileNotFoundError:
        if any((parent / ".git").exists() for parent in (directory, *directory.parents)):
            raise InputError(f"{directory} is a git work tree, but there is no git here to read it") from None
        return False
    except EtudeError as error:
        if "not a git repository (or any" in str(error):
            return False
        # Somebody else's, or damaged. Taken for a plain directory, what it ignores would go along.
        raise InputError(f"{error}\n  a repository that git refuses to read is not copied") from None


def git_files(directory: Path, prefix: str = "") -> list[str]:
    """Tracked and untracked files that are not ignored, those of repositories within included."""
    found: list[str] = []
    for raw in git(directory, "ls-files", "-z", "-co", "--exclude-standard").split(b"\0"):
        path = os.fsdecode(raw)
        if not path:
            continue
        place = directory / path
        if place.is_dir() and not place.is_symlink():
            if (place / ".git").exists():
                found += git_files(place, f"{prefix}{path.rstrip('/')}/")
        elif os.path.lexists(place):
            found.append(prefix + path)
    return found


def git_history(directory: Path) -> tuple[list[tuple[str, Path]], str]:
    """The files of the git directory by their names in the pod, or why none of them go."""
    own, common = (
        Path(os.fsdecode(git(directory, "rev-parse", "--path-format=absolute", which).rstrip(b"\n")))
        for which in ("--git-dir", "--git-common-dir")
    )
    if (common / "objects" / "info" / "alternates").exists():
        return [], "its history is left out: it borrows objects from another repository"
    found: dict[str, Path] = {}
    for top in dict.fromkeys((common, own)):  # what a linked work tree has of its own goes over the shared
        for here, names, files in os.walk(top):
            if here == str(top):
                names[:] = [name for name in names if name not in LEFT_OUT]
                files = [name for name in files if name not in (*LEFT_OUT, "commondir", "gitdir")]
            for name in sorted(files):
                path = Path(here, name)
                if not name.endswith(".lock") and path.is_file() and not path.is_symlink():
                    found[f".git/{path.relative_to(top)}"] = path
    return sorted(found.items()), ""


def plain_config(directory: Path) -> bytes:
    """A configuration for the pod with nothing in it but what is KEPT."""
    found: dict[str, str] = {}
    for item in git(directory, "config", "--list", "-z").split(b"\0"):
        key, _, value = item.decode("utf-8", "surrogateescape").partition("\n")
        if key in KEPT:
            found[key] = value
    lines = []
    for key, value in found.items():
        section, name = key.split(".")
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        lines.append(f'[{section}]\n\t{name} = "{escaped}"\n')
    return "".join(lines).encode("utf-8", "surrogateescape")


def recent_files(directory: Path) -> tuple[str, ...]:
    """Files that git says are changed and not committed, newest first."""
    if not is_work_tree(directory):
        return ()
    names = git(directory, "ls-files", "-z", "-mo", "--exclude-standard", settings=no_filters(directory)).split(b"\0")
    times = {}
    for name in filter(None, map(os.fsdecode, names)):
        with contextlib.suppress(OSError):
            info = os.lstat(directory / name)
            if stat.S_ISREG(info.st_mode) and name.isprintable():
                times[name] = info.st_mtime_ns
    return tuple(sorted(times, key=lambda name: (-times[name], name))[:RECENT])


def no_filters(directory: Path) -> dict[str, str]:
    """Settings that turn filters off: to tell whether a file has changed, git would run those of its configuration."""
    keys = os.fsdecode(git(directory, "config", "--list", "--name-only", "-z")).split("\0")
    drivers = {key.rpartition(".")[0] for key in keys if key.startswith("filter.") and key.count(".") > 1}
    off = {"clean": "", "process": "", "required": "false"}
    return {f"{driver}.{name}": value for driver in sorted(drivers) for name, value in off.items()}


def git(directory: Path, *command: str, settings: Mapping[str, str] | None = None) -> bytes:
    """What git says; nothing in the repository may make it run another program."""
    moved = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_OBJECT_DIRECTORY")
    environment = {key: value for key, value in os.environ.items() if key not in moved} | {
        "GIT_OPTIONAL_LOCKS": "0",
        "LC_ALL": "C",  # its complaints are read
    }
    given = {"core.fsmonitor": "false", **(settings or {})}
    first = int(environment.get("GIT_CONFIG_COUNT") or 0)
    for number, (key, value) in enumerate(given.items(), first):  # as variables: a filter's name may hold a "="
        environment |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    environment["GIT_CONFIG_COUNT"] = str(first + len(given))
    done = subprocess.run(["git", "-C", str(directory), *command], capture_output=True, env=environment)
    if done.returncode:
        raise EtudeError(f"git {command[0]} in {directory}: {os.fsdecode(done.stderr).strip()}")
    return done.stdout


def check_size(directory: Path, files: Sequence[str], history: Sequence[tuple[str, Path]]) -> None:
    """Refuse what is more than goes into a pod, and say where it is."""
    sizes: Counter[str] = Counter()
    places = [(path, directory / path) for path in files] + list(history)
    for path, place in places:
        with contextlib.suppress(OSError):
            sizes[path.split("/")[0]] += place.lstat().st_size
    if len(places) <= MAX_FILES and sizes.total() <= MAX_BYTES:
        return
    largest = ", ".join(f"{name} {size / 2**20:,.0f} MiB" for name, size in sizes.most_common(3))
    advice = "leave the history out with --no-history, " if history else ""
    limit = f"{MAX_BYTES >> 20} MiB or {MAX_FILES:,} files that are copied into a pod"
    raise InputError(
        f"{directory}: {sizes.total() / 2**20:,.0f} MiB in {len(places):,} files are more than the {limit} "
        f"(the largest: {largest});\n  {advice}name a smaller directory with -C, list what is not needed in "
        ".gitignore, or work on the directory itself with --direct"
    )


# ------------------------------------------------------------------------------------------------- packing


def pack(directory: Path, choice: Choice, out: IO[bytes]) -> Tree:
    """Write the chosen files as a tar; the table of those that are the workspace's, as they were when read."""
    tree: dict[str, Entry] = {}
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT, errors="surrogateescape") as tar:
        for path in choice.files:
            if (entry := add(tar, path, directory / path)) is not None:
                tree[path] = entry
        for path in PLACES if choice.history else ():
            member = tarfile.TarInfo(path)
            member.type, member.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(member)
        for path, place in choice.history:
            add(tar, path, place)
        if choice.config is not None:
            info = tarfile.TarInfo(".git/config")
            info.size = len(choice.config)
            tar.addfile(info, io.BytesIO(choice.config))
    return tree


def add(tar: tarfile.TarFile, path: str, place: Path) -> Entry | None:
    """Add a file or a link as it is now; None when it is neither, or gone, or not to be read."""
    try:
        descriptor = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return add_link(tar, path, place)
    with os.fdopen(descriptor, "rb") as file:
        info = os.fstat(file.fileno())
        if not stat.S_ISREG(info.st_mode):
            return None
        member = tarfile.TarInfo(path)
        member.size, member.mode, member.mtime = info.st_size, info.st_mode & 0o777, info.st_mtime
        reading = _Reading(file)
        try:
            tar.addfile(member, reading)  # type: ignore[arg-type]  # all it does is read
        except OSError as error:
            raise EtudeError(f"{place}: changed while it was copied ({error}); try again") from None
        return Entry("file", reading.digest.hexdigest(), info.st_size, bool(info.st_mode & 0o100))


def add_link(tar: tarfile.TarFile, path: str, place: Path) -> Entry | None:
    try:
        target = os.readlink(place)
    except OSError:
        return None
    member = tarfile.TarInfo(path)
    member.type, member.linkname = tarfile.SYMTYPE, target
    tar.addfile(member)
    return Entry("link", target)


class _Reading:
    """A file that is digested as it is read."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.digest = file, hashlib.sha256()

    def read(self, size: int) -> bytes:
        data = self.file.read(size)
        self.digest.update(data)
        return data
