"""A session's changes as lines: what was added, what was taken away, and which of it is comment."""

import difflib
import io
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from etude.tasks.verifier_result import FileChange

MOST_LINES = 20_000  # of a file that are compared line by line; a larger one counts as a whole


@dataclass(frozen=True)
class LineChanges:
    """Lines of one file that are new, by their number in the new text, and how many are gone."""

    path: str
    added: tuple[tuple[int, str], ...]
    removed: int


def line_changes(changes: Iterable[FileChange]) -> Iterator[LineChanges]:
    for change in changes:
        if change.kind != "file":
            continue
        before, after = change.lines("before"), change.lines("after")
        if max(len(before), len(after)) > MOST_LINES:
            yield LineChanges(change.path, tuple(enumerate(after, 1)), len(before))
            continue
        added, removed = [], 0
        for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
            if tag != "equal":
                added += [(number + 1, after[number]) for number in range(j1, j2)]
                removed += i2 - i1
        yield LineChanges(change.path, tuple(added), removed)


def comments(text: str) -> dict[int, str]:
    """The comments of Python text by line, as far as it can be read; a string is not a comment."""
    found: dict[int, str] = {}
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                found[token.start[0]] = token.string
    except (tokenize.TokenError, SyntaxError, ValueError):
        pass  # what was read up to there counts
    return found
