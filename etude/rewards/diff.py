"""The changes of a trial by line, and the comments of Python code."""

import difflib
import io
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from etude.pods.workspace import FileChange

MAX_LINES = 20_000  # of a file that is compared line by line; a larger one counts as replaced


@dataclass(frozen=True)
class LineChanges:
    """The added lines of one file, by their number in the new text, and the count of removed ones."""

    path: str
    added: tuple[tuple[int, str], ...]
    removed: int


def line_changes(changes: Iterable[FileChange]) -> Iterator[LineChanges]:
    """Give the line changes of each changed file."""
    for change in changes:
        before, after = change.lines("before"), change.lines("after")
        if before == after:  # a link, or only the mode
            continue
        if max(len(before), len(after)) > MAX_LINES:
            yield LineChanges(change.path, tuple(enumerate(after, 1)), len(before))
            continue
        added, removed = [], 0
        for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
            if tag != "equal":
                added += [(number + 1, after[number]) for number in range(j1, j2)]
                removed += i2 - i1
        yield LineChanges(change.path, tuple(added), removed)


def comments(text: str) -> dict[int, str]:
    """Return the comments of Python code by line number, up to the first syntax error."""
    found: dict[int, str] = {}
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                found[token.start[0]] = token.string
    except (tokenize.TokenError, SyntaxError, ValueError):
        pass
    return found
