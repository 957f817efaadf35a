"""Upload the user's directory into a pod: select the files and copy them.

From a git work tree: the tracked files, the untracked ones that are not ignored, and the history without anything that
may hold a secret (configuration, remotes, credentials). From any other directory: everything. Symlinks stay symlinks.
A directory that is too large is refused, with its largest entries.
"""

import asyncio
import contextlib
import os
import stat
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from etude.errors import InputError
from etude.pods.fleet import Fleet
from etude.pods.pod import Pod
from etude.pods.workspace import FileState, is_workspace_path, read_state
from etude.system.git import run_git
from etude.system.run_limited import run_limited

MAX_FILES = 100_000
MAX_BYTES = 512 << 20  # of a workspace, and of its changes: a pod holds its files in memory
MAX_RECENT_FILES = 10  # files named in the prompt as changed lately

# Git settings that are uploaded: how files are stored, and the author. No remotes: their URLs may hold passwords.
KEPT_CORE = ("repositoryformatversion", "filemode", "ignorecase", "symlinks", "autocrlf", "eol", "precomposeunicode")
KEPT_OTHER = ("extensions.objectformat", "extensions.refstorage", "user.name", "user.email")
KEPT_CONFIG = frozenset((*(f"core.{name}" for name in KEPT_CORE), *KEPT_OTHER))
# Not uploaded from the git directory: other work trees, large checked-out files, configuration, and hooks.
EXCLUDED_FROM_GIT_DIR = ("worktrees", "modules", "lfs", "annex", "config", "config.worktree", "credentials", "hooks")
# Git recognises no repository without these directories, and they may be empty.
REQUIRED_GIT_DIRECTORIES = (".git/objects", ".git/refs", ".git/refs/heads")


@dataclass(frozen=True)
class UploadResult:
    """The manifest of the uploaded files, and notes for the user about files that were left out."""

    manifest: Mapping[str, FileState]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class UploadSelection:
    """Files to upload: those of the workspace, and those of the git directory as (path in the pod, file on disk)."""

    files: Sequence[str]
    history: Sequence[tuple[str, Path]] = ()
    config: bytes | None = None
    notes: tuple[str, ...] = ()


@asynccontextmanager
async def open_workspace(
    fleet: Fleet,
    image: str,
    directory: Path,
    *,
    root: str = "",
    include: Sequence[str] = (),
    history: bool = True,
    **options: Any,
) -> AsyncIterator[tuple[Pod, UploadResult]]:
    """Open a pod with the files of a directory at `root`, or in its working directory; its diff contains only changes
    to them. `options` are those of `Fleet.create`."""
    async with AsyncExitStack() as stack:
        pod = await stack.enter_async_context(await fleet.create(image, **options))
        uploaded = await upload_directory(pod, root or pod.workdir, directory, include=include, history=history)
        snapshot = await pod.snapshot("fs")
        try:
            await pod.close()
            pod = await stack.enter_async_context(await fleet.create(snapshot, **options))
        finally:
            await fleet.remove_snapshot(snapshot.id)
        yield pod, uploaded


async def upload_directory(
    pod: Pod, root: str, directory: Path, *, include: Sequence[str] = (), history: bool = True
) -> UploadResult:
    """Copy a directory to `root` in the pod. `include` names ignored paths that are copied nevertheless."""
    selection = await asyncio.to_thread(select_files, directory, include, history)
    manifest: dict[str, FileState] = {}

    async def send(path: str) -> None:
        try:
            state = read_state(None, str(directory / path))
        except OSError:
            state = None
        if state is None or not state.digest:
            return
        if state.kind == "symlink":
            await pod.symlink(state.target, f"{root}/{path}")
        else:
            await pod.write(f"{root}/{path}", state.contents, mode=0o755 if state.executable else 0o644)
        manifest[path] = replace(state, data=None)

    await run_limited(send(path) for path in selection.files)
    for path in REQUIRED_GIT_DIRECTORIES if selection.history else ():
        await pod.make_directory(f"{root}/{path}")
    await run_limited(pod.upload(source, f"{root}/{path}") for path, source in selection.history)
    if selection.config is not None:
        await pod.write(f"{root}/.git/config", selection.config)
    skipped = [path for path in selection.files if path not in manifest]
    count = len(skipped)
    notes = (f"{count} left out (not regular files, or unreadable), first: {skipped[0]!r}",) if skipped else ()
    return UploadResult(manifest, (*selection.notes, *notes))


# ------------------------------------------------------------------------------------------------- selection


def select_files(directory: Path, include: Sequence[str] = (), history: bool = True) -> UploadSelection:
    """Select the files of a directory to upload."""
    if directory in (Path.home(), Path(directory.anchor)):
        raise InputError(f"{directory} is not a project: go to the directory to work in, or name it with -C")
    notes: list[str] = []
    git_dir: Sequence[tuple[str, Path]] = ()
    config = None
    if is_work_tree(directory):
        files = git_files(directory)
        top = Path(os.fsdecode(run_git(directory, "rev-parse", "--show-toplevel").rstrip(b"\n")))
        if top != directory.resolve():
            notes.append(f"only {directory.name}/ is uploaded, not the rest of the repository {top}, nor its history")
        elif history:
            git_dir, reason = git_history(directory)
            config = filtered_git_config(directory) if git_dir else None
            notes += [reason] if reason else []
    else:
        files = list(islice(walk_files(directory), MAX_FILES + 1))  # one more than allowed is enough to refuse
    for path in include:
        files += expand_include(directory, path)
    found = [path for path in dict.fromkeys(files) if is_workspace_path(path)]
    check_size(directory, found, git_dir)
    return UploadSelection(found, git_dir, config, tuple(notes))


def expand_include(directory: Path, path: str) -> list[str]:
    """Return the files below a path given with --include, which must be in the directory."""
    relative = os.path.normpath(path)
    if os.path.isabs(relative) or not is_workspace_path(relative):
        raise InputError(f"--include {path}: expected a path below {directory}")
    if not os.path.lexists(directory / relative):
        raise InputError(f"--include {path}: no such file in {directory}")
    is_directory = (directory / relative).is_dir() and not (directory / relative).is_symlink()
    return list(walk_files(directory, relative)) if is_directory else [relative]


def walk_files(directory: Path, below: str = "") -> Iterator[str]:
    """Yield all files and symlinks except those in .git."""
    for here, names, files in os.walk(directory / below):
        names[:] = sorted(name for name in names if name != ".git")
        links = [name for name in names if os.path.islink(os.path.join(here, name))]
        for name in sorted(files + links):
            yield os.path.relpath(os.path.join(here, name), directory)


def is_work_tree(directory: Path) -> bool:
    """Return whether the directory belongs to a git work tree; an error if it does and git is not installed."""
    if not any(os.path.lexists(parent / ".git") for parent in (directory, *directory.parents)):
        return False
    try:
        if run_git(directory, "rev-parse", "--is-inside-work-tree").strip() != b"true":
            return False
        with contextlib.suppress(InputError):  # raised if the directory is not ignored
            run_git(directory, "check-ignore", "-q", str(directory))
            return False  # ignored by the enclosing repository: an ordinary directory
        return True
    except InputError as error:
        if "not a git repository (or any" in str(error):
            return False
        # Owned by another user, or damaged. Treated as a plain directory, its ignored files would be uploaded.
        raise InputError(f"{error}\n  a repository that git refuses to read is not copied") from None


def git_files(directory: Path, prefix: str = "") -> list[str]:
    """Return tracked and untracked files that are not ignored, including those of nested repositories."""
    found: list[str] = []
    for raw in run_git(directory, "ls-files", "-z", "-co", "--exclude-standard").split(b"\0"):
        path = os.fsdecode(raw)
        if not path:
            continue
        file = directory / path
        if file.is_dir() and not file.is_symlink():
            if (file / ".git").exists():
                found += git_files(file, f"{prefix}{path.rstrip('/')}/")
        elif os.path.lexists(file):
            found.append(prefix + path)
    return found


def git_history(directory: Path) -> tuple[list[tuple[str, Path]], str]:
    """Return the files of the git directory with their paths in the pod, or none and the reason."""
    own, common = git_directories(directory)
    if (common / "objects" / "info" / "alternates").exists():
        return [], "the history is left out: the repository uses objects of another one (alternates)"
    found: dict[str, Path] = {}
    for top in dict.fromkeys((common, own)):  # a linked work tree's own files replace the shared ones
        for here, names, files in os.walk(top):
            if here == str(top):
                names[:] = [name for name in names if name not in EXCLUDED_FROM_GIT_DIR]
                files = [name for name in files if name not in (*EXCLUDED_FROM_GIT_DIR, "commondir", "gitdir")]
            for name in sorted(files):
                path = Path(here, name)
                if not name.endswith(".lock") and path.is_file() and not path.is_symlink():
                    found[f".git/{path.relative_to(top)}"] = path
    return sorted(found.items()), ""


def git_directories(directory: Path) -> tuple[Path, Path]:
    """Return the git directory of a work tree and the one that it shares; refuse those of another work tree.

    A `.git` that is a file or a link, and a `commondir` file, can name any repository of the user. Git's own linked
    work trees and submodules are named by that repository in turn, which a foreign tree cannot achieve.
    """
    own, common = (
        Path(os.fsdecode(run_git(directory, "rev-parse", "--path-format=absolute", which).rstrip(b"\n"))).resolve()
        for which in ("--git-dir", "--git-common-dir")
    )
    entry = directory.resolve() / ".git"
    if entry.is_dir() and not entry.is_symlink():
        known = own == common == entry
    elif own != common:
        known = own.parent == common / "worktrees" and _named_path(own, own / "gitdir") == entry
    else:
        known = False
        with contextlib.suppress(InputError):  # it has no such setting
            named = run_git(own, "config", "--file", str(own / "config"), "core.worktree").rstrip(b"\n")
            known = (own / os.fsdecode(named)).resolve() == entry.parent
    if not known:
        raise InputError(
            f"{entry} leads to the repository {common}, which does not name {directory} as a work tree of its own: "
            "its history is not uploaded.\n  Upload the files alone with --no-history"
        )
    return own, common


def _named_path(base: Path, file: Path) -> Path | None:
    """Return the path in the first line of a file, relative to `base`; None if there is none."""
    try:
        path = base / os.fsdecode(file.read_bytes().split(b"\n")[0])
        return path.parent.resolve() / path.name
    except (OSError, ValueError):
        return None


def filtered_git_config(directory: Path) -> bytes:
    """Return a git config for the pod with only the settings in KEPT_CONFIG."""
    found: dict[str, str] = {}
    for item in run_git(directory, "config", "--list", "-z").split(b"\0"):
        key, _, value = item.decode("utf-8", "surrogateescape").partition("\n")
        if key in KEPT_CONFIG:
            found[key] = value
    lines = []
    for key, value in found.items():
        section, name = key.split(".")
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        lines.append(f'[{section}]\n\t{name} = "{escaped}"\n')
    return "".join(lines).encode("utf-8", "surrogateescape")


def recent_files(directory: Path) -> tuple[str, ...]:
    """Return the files with uncommitted changes, newest first."""
    if not is_work_tree(directory):
        return ()
    names = run_git(directory, "ls-files", "-z", "-mo", "--exclude-standard").split(b"\0")
    times = {}
    for name in filter(None, map(os.fsdecode, names)):
        with contextlib.suppress(OSError):
            info = os.lstat(directory / name)
            if stat.S_ISREG(info.st_mode) and name.isprintable():
                times[name] = info.st_mtime_ns
    return tuple(sorted(times, key=lambda name: (-times[name], name))[:MAX_RECENT_FILES])


def check_size(directory: Path, files: Sequence[str], history: Sequence[tuple[str, Path]]) -> None:
    """Raise InputError if the selection exceeds the limits of a pod, naming its largest entries."""
    sizes: Counter[str] = Counter()
    selected = [(path, directory / path) for path in files] + list(history)
    for path, file in selected:
        with contextlib.suppress(OSError):
            sizes[path.split("/")[0]] += file.lstat().st_size
    if len(selected) <= MAX_FILES and sizes.total() <= MAX_BYTES:
        return
    largest = ", ".join(f"{name} {size / 2**20:,.0f} MiB" for name, size in sizes.most_common(3))
    advice = "leave the history out with --no-history, " if history else ""
    limit = f"{MAX_BYTES >> 20} MiB or {MAX_FILES:,} files that can be copied into a pod"
    raise InputError(
        f"{directory}: {sizes.total() / 2**20:,.0f} MiB in {len(selected):,} files are more than the {limit} "
        f"(the largest: {largest});\n  {advice}name a smaller directory with -C, add files that are not needed to "
        ".gitignore, or work on the directory itself with --direct"
    )
