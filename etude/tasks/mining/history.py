"""Read the history of a git repository as changes, newest first.

A change is a commit compared with its first parent. The merge of a pull request is one change, of all its commits;
other merges are no change themselves, and the commits that they bring in are changes of their own.
"""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from etude.data.documents import is_bare
from etude.errors import InputError
from etude.system.git import run_git
from etude.tasks.installation.snapshot import MAX_FILE_BYTES, split_revision

PULL_REQUEST = re.compile(r"Merge pull request #\d+ from |Merge branch '.*' into '.*'$|.*\(merge request !\d+\)$")
_FIELDS = "%x1e%H%x1f%P%x1f%an%x1f%ae%x1f%cI%x1f%B"


class BlobTooLarge(InputError):
    """A changed file is larger than any that is installed."""


@dataclass(frozen=True)
class HistoryCommit:
    """One commit. `parents` are commit ids, the first is the state that the commit changed."""

    id: str
    parents: tuple[str, ...]
    author: str
    email: str
    date: str  # of the committer, ISO 8601
    subject: str
    body: str = ""
    merged: tuple[str, ...] = ()  # of the merge of a pull request: subjects of its commits

    @property
    def is_merge(self) -> bool:
        return len(self.parents) > 1

    @property
    def is_pull_request(self) -> bool:
        return self.is_merge and PULL_REQUEST.match(self.subject) is not None and bool(self.body.strip())

    @property
    def timestamp(self) -> float:
        return datetime.fromisoformat(self.date).timestamp()

    @property
    def message(self) -> tuple[str, str]:
        """Subject and body of what was done: of a pull request its title and its description."""
        if not self.is_pull_request:
            return self.subject, self.body
        title, _, rest = self.body.strip().partition("\n")
        return title.strip(), rest.strip()


@dataclass(frozen=True)
class FileDifference:
    """A file before and after a commit; None where it does not exist. Links and submodules have only their mode."""

    path: str
    before: bytes | None = field(repr=False)
    after: bytes | None = field(repr=False)
    mode: str = "100644"


class History:
    """The history of a repository up to a revision. Nothing that the repository configures is executed."""

    def __init__(self, root: Path, revision: str = "HEAD") -> None:
        self.root, self.revision = root, revision
        name = root.resolve().name
        if name in ("repo", ".git"):
            name = root.resolve().parent.name.rpartition("+")[2]
        self.name = re.sub(r"[^a-z0-9]+", "-", name.removesuffix(".git").lower()).strip("-") or "repository"
        self.head = ""

    def commits(self) -> list[HistoryCommit]:
        """Return the changes newest first, and the merges among them that are no change."""
        listed = run_git(self.root, "log", "--topo-order", f"--format={_FIELDS}", self.head, "--")
        found = {commit.id: commit for commit in _parse_log(listed.decode("utf-8", "replace"))}
        return changes_of(found, self.head)

    def differences(self, commit: HistoryCommit) -> list[FileDifference]:
        """Return what a commit changed with respect to its first parent; renames are removals and additions."""
        if not commit.parents:
            return []
        listed = run_git(self.root, "diff-tree", "-r", "-z", "--raw", "--no-renames", commit.parents[0], commit.id)
        fields = [os.fsdecode(part) for part in listed.split(b"\0")]
        entries = [(head.lstrip(":").split(), path) for head, path in zip(fields[::2], fields[1::2], strict=False)]
        ids = [
            id for (old, new, *pair, _), _ in entries for mode, id in zip((old, new), pair, strict=True) if _plain(mode)
        ]
        contents = self.read_objects(ids)
        return [
            FileDifference(
                path,
                contents[pair[0]] if _plain(old) else None,
                contents[pair[1]] if _plain(new) else None,
                new if new != "000000" else old,
            )
            for (old, new, *pair, _), path in entries
        ]

    def paths(self) -> list[str]:
        """Return the paths of the newest revision."""
        listed = run_git(self.root, "ls-tree", "-r", "-z", "--name-only", "--full-tree", self.head)
        return [os.fsdecode(path) for path in listed.split(b"\0") if path]

    def read_objects(self, ids: Sequence[str]) -> dict[str, bytes]:
        """Return the contents of blobs by id; raise BlobTooLarge before any is read if one is."""
        if not ids:
            return {}
        asked = "".join(f"{id}\n" for id in dict.fromkeys(ids)).encode()
        sizes = [line.split() for line in run_git(self.root, "cat-file", "--batch-check", stdin=asked).splitlines()]
        if large := [int(size) for _, kind, *rest in sizes for size in rest if int(size) > MAX_FILE_BYTES]:
            raise BlobTooLarge(f"a file of {large[0]:,} bytes, more than {MAX_FILE_BYTES:,}")
        data = run_git(self.root, "cat-file", "--batch", stdin=asked)
        found, position = {}, 0
        while position < len(data):
            end = data.index(b"\n", position)
            header = data[position:end].decode().split()
            if len(header) != 3:
                raise InputError(f"{self.root}: object {header[0]} is {header[-1]}; fetch all of the partial clone")
            size = int(header[2])
            found[header[0]] = data[end + 1 : end + 1 + size]
            position = end + size + 2
        return found


def open_history(repository: str) -> History:
    """Return the history of a bare clone, a working tree, or REPO@REV; InputError if there is none to mine."""
    root, revision = split_revision(repository)
    revision = revision or "HEAD"
    if revision.startswith("-") or not root.is_dir():
        raise InputError(f"{repository}: no such repository; expected a clone, or CLONE@REVISION")
    if not (is_bare(root) or (root / ".git").exists()):
        raise InputError(f"{repository}: has no git history; expected a clone with its .git directory, or a bare clone")
    history = History(root, revision)
    if run_git(root, "rev-parse", "--is-shallow-repository").strip() == b"true":
        raise InputError(f"{repository}: the history is shallow; fetch all of it with `git fetch --unshallow`")
    try:
        history.head = run_git(root, "rev-parse", "--verify", f"{revision}^{{commit}}").decode().strip()
    except InputError:
        if revision == "HEAD":
            raise InputError(f"{repository}: the repository has no commit; a benchmark needs a history") from None
        raise InputError(f"{repository}: {revision} is not a commit of this repository") from None
    if int(run_git(root, "rev-list", "--count", history.head)) < 2:
        raise InputError(f"{repository}: the history is a single commit; a benchmark needs changes with a parent")
    if b"\n160000 " in b"\n" + run_git(root, "ls-tree", "-r", "--full-tree", history.head):
        raise InputError(f"{repository}: has submodules, whose files are not in its history; they are not supported")
    return history


def _plain(mode: str) -> bool:
    return mode in ("100644", "100755", "100664")


def _parse_log(text: str) -> Iterator[HistoryCommit]:
    for record in text.split("\x1e")[1:]:
        id, parents, author, email, date, message = record.split("\x1f", 5)
        subject, _, body = message.strip().partition("\n")
        yield HistoryCommit(id, tuple(parents.split()), author, email, date, subject.strip(), body.strip())


def changes_of(commits: dict[str, HistoryCommit], tip: str) -> list[HistoryCommit]:
    """Return the changes that lead to `tip`, newest first: along first parents, and into merges that are no change."""
    return _chain(commits, tip, set())


def _chain(commits: dict[str, HistoryCommit], tip: str, seen: set[str]) -> list[HistoryCommit]:
    chain = []
    at = tip
    while at in commits and at not in seen:
        seen.add(at)
        chain.append(commits[at])
        at = commits[at].parents[0] if commits[at].parents else ""
    found: list[list[HistoryCommit]] = []
    for commit in reversed(chain):  # oldest first: a merge brings in what no older one has
        if commit.is_pull_request:
            merged = _introduced(commits, commit, seen)
            found.append([HistoryCommit(**{**vars(commit), "merged": tuple(each.subject for each in merged)})])
        else:
            sides = [each for parent in commit.parents[1:] for each in _chain(commits, parent, seen)]
            found.append([commit, *sides])
    return [commit for group in reversed(found) for commit in group]


def _introduced(commits: dict[str, HistoryCommit], merge: HistoryCommit, seen: set[str]) -> list[HistoryCommit]:
    """Return the commits that a merge brings in, and mark them as seen."""
    found, pending = [], list(merge.parents[1:])
    while pending:
        id = pending.pop()
        if id in commits and id not in seen:
            seen.add(id)
            found.append(commits[id])
            pending += commits[id].parents
    return [commit for commit in found if not commit.is_merge]
