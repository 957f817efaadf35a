"""Filter the changes of a history without running anything, and order those worth trying."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from etude.tasks.mining.classify import ChangeParts, added_lines, reason_of_files, reason_of_message, split_parts
from etude.tasks.mining.duplicates import ChangeFingerprint, fingerprint
from etude.tasks.mining.history import BlobTooLarge, History, HistoryCommit
from etude.tasks.mining.options import MiningOptions
from etude.tasks.mining.requests import MinedRequest, choose_request
from etude.tasks.mining.session_logs import session_of_change

BLOCK = 16  # changes worth trying among which those of several files come first


@dataclass(frozen=True)
class ScreenedChange:
    """A change that passed all filters that need no pod."""

    commit: HistoryCommit
    parts: ChangeParts = field(repr=False)
    request: MinedRequest
    fingerprint: ChangeFingerprint = field(repr=False)


DropListener = Callable[[HistoryCommit, str, str, float], None]  # commit, reason, detail, seconds


class Screening:
    """Yields the changes worth trying, newest first in blocks; in a block, changes of several files come first."""

    def __init__(
        self, history: History, commits: Sequence[HistoryCommit], options: MiningOptions, on_drop: DropListener
    ) -> None:
        self.history, self.commits, self.options, self.on_drop = history, commits, options, on_drop
        self.looked_at = 0
        self._kept: dict[str, ChangeFingerprint] = {}  # of all changes that passed
        self._changes = self._ordered()

    def next_change(self) -> ScreenedChange | None:
        return next(self._changes, None)

    def _ordered(self) -> Iterator[ScreenedChange]:
        block: list[ScreenedChange] = []
        for commit in self.commits:
            self.looked_at += 1
            change = self._screen(commit)
            if change is not None:
                block.append(change)
            if len(block) == BLOCK:
                yield from by_files(block)
                block = []
        yield from by_files(block)

    def _screen(self, commit: HistoryCommit) -> ScreenedChange | None:
        started = time.monotonic()
        reason, detail = reason_of_message(commit), commit.subject
        if not reason:
            try:
                files = self.history.differences(commit)
                reason = reason_of_files(files, self.options.limits)
            except BlobTooLarge as error:
                reason, detail = "too-large", str(error)
        if not reason:
            parts = split_parts(files)
            session = session_of_change(parts, self.options.sessions)
            request = choose_request(commit, added_lines(parts.source), self.options.issues, session)
            own = fingerprint(parts)
            twin = next((id for id, each in self._kept.items() if each.resembles(own)), "")
            if request is not None and not twin:
                self._kept[commit.id] = own
                return ScreenedChange(commit, parts, request, own)
            reason, detail = ("duplicate", twin) if twin else ("vague", detail)
        self.on_drop(commit, reason, detail, time.monotonic() - started)
        return None


def by_files(block: Sequence[ScreenedChange]) -> list[ScreenedChange]:
    """Return changes of several source files first, each kind in the given order."""
    return sorted(block, key=lambda change: len(change.parts.source) < 2)


def selected_commits(history: History, options: MiningOptions) -> list[HistoryCommit]:
    """Return the changes to look at, newest first."""
    commits = history.commits()
    if options.since:
        commits = [commit for commit in commits if commit.date[: len(options.since)] >= options.since]
    return commits[: options.limit_commits]
