"""Explains why a text was not found in a file: the nearest match, its place and the difference.

The message names a single cause if there is one: indentation, copied line numbers, line breaks written as "\\n", letter
case. Otherwise it shows the most similar lines. Nothing is corrected automatically.
"""

from __future__ import annotations

import difflib
import re

TYPE_CHECKING = False  # typing is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable

MAX_SHOWN = 12  # lines of the file
MAX_LINES = 20_000  # lines of the file that are compared
WIDTH = 200  # characters of a line that are shown or compared
MAX_COMPARED = 5000  # lines compared by character, few of them fully: a file may be adversarial
MAX_FULLY_COMPARED = 200


def explain(data: bytes, old: str) -> str:
    """Return a few lines for the model: the cause, and the nearest text with its line numbers."""
    text = data.decode("utf-8", "replace").replace("\r\n", "\n")
    lines = text.split("\n")[:MAX_LINES]
    wanted = old.replace("\r\n", "\n").split("\n")
    if not text:
        return "The file is empty."
    if re.search(r"^ *\d+\|", old, re.MULTILINE) and (bare := re.sub(r"^ *\d+\|", "", old, flags=re.MULTILINE)) in text:
        at = text.count("\n", 0, text.index(bare))
        cause = "It has line numbers (`N|`) at the beginning of lines, which are not part of the file."
        return _found(cause, lines, at, bare.count("\n") + 1)
    for written, meant in (("\\n", "\n"), ('\\"', '"'), ("\\t", "\t")):
        if written in old and (plain := old.replace(written, meant)) in text:
            at = text.count("\n", 0, text.index(plain))
            cause = f"It has {written} as a backslash and a letter where the file has the character itself."
            return _found(cause, lines, at, plain.count("\n") + 1)
    if (at := _find(lines, wanted, str.rstrip)) >= 0:
        return _found("It differs in white space at the end of lines.", lines, at, len(wanted), wanted)
    if (at := _find(lines, wanted, str.strip)) >= 0:
        return _found(_indentation(lines, wanted, at), lines, at, len(wanted), wanted)
    if (at := _find(lines, wanted, lambda line: re.sub(r"\s+", "", line))) >= 0:
        return _found("It differs in white space inside lines.", lines, at, len(wanted), wanted)
    if (at := _find(lines, wanted, lambda line: line.strip().lower())) >= 0:
        return _found("It differs in upper and lower case.", lines, at, len(wanted), wanted)
    return _most_similar_lines(lines, wanted)


def _find(lines: list[str], wanted: list[str], key: Callable[[str], str]) -> int:
    """Return the position of the wanted lines, compared by `key`; the first and last line may be partial."""
    keys = [key(line) for line in wanted]
    while len(keys) > 1 and not keys[-1]:
        keys.pop()
    lead = 0
    while len(keys) > 1 and not keys[0]:
        keys.pop(0)
        lead += 1
    if not any(keys):
        return -1
    have = [key(line) for line in lines]
    if len(keys) == 1:
        return next((at for at, line in enumerate(have) if keys[0] in line), -1)
    for at in range(len(have) - len(keys) + 1):
        middle = have[at + 1 : at + len(keys) - 1] == keys[1:-1]
        if middle and have[at].endswith(keys[0]) and have[at + len(keys) - 1].startswith(keys[-1]):
            return max(0, at - lead)
    return -1


def _indentation(lines: list[str], wanted: list[str], at: int) -> str:
    for offset, line in enumerate(wanted):
        if at + offset >= len(lines) or not line.strip():
            continue
        in_file, in_old = (text[: len(text) - len(text.lstrip())] for text in (lines[at + offset], line))
        if in_file != in_old:
            have, wants = _describe_space(in_file), _describe_space(in_old)
            place = f"line {at + offset + 1} begins with {have}, in old_string with {wants}"
            return f"It differs in indentation: {place}."
    return "It differs in white space at the beginning or end of lines."


def _describe_space(text: str) -> str:
    """Describe white space in words."""
    if not text:
        return "nothing"
    parts = []
    for name, char in (("space", " "), ("tab", "\t")):
        if count := text.count(char):
            parts.append(f"{count} {name}{'s' if count > 1 else ''}")
    others = len(text) - text.count(" ") - text.count("\t")
    return " and ".join(parts + ([f"{others} other blank characters"] if others else []))


def _found(cause: str, lines: list[str], at: int, count: int, wanted: list[str] | None = None) -> str:
    first = at
    for offset, line in enumerate(wanted or []):  # start at the first difference if the match is long
        if count > MAX_SHOWN and at + offset < len(lines) and lines[at + offset] != line:
            first = max(at, at + offset - 2)
            break
    return f"{cause} The file has:\n{_numbered(lines, first, min(MAX_SHOWN, at + count - first))}"


def _numbered(lines: list[str], at: int, count: int) -> str:
    return "\n".join(f"{at + i + 1}|{line[:WIDTH]}" for i, line in enumerate(lines[at : at + max(1, count)]))


def _most_similar_lines(lines: list[str], wanted: list[str]) -> str:
    """Show the region that shares most lines, exactly or nearly, with the wanted text."""
    keys = [line.strip()[:WIDTH] for line in wanted]
    have = [line.strip()[:WIDTH] for line in lines]
    at = _by_equal_lines(have, keys)
    if at is None:
        at = _by_similar_line(have, keys)
    if at is None:
        return "Nothing in the file is like it. Read the file again before the next attempt."
    count = min(len(wanted), MAX_SHOWN)
    text = f"The nearest text is:\n{_numbered(lines, at, count)}"
    for offset, key in enumerate(keys[:count]):
        if at + offset < len(have) and have[at + offset] != key:
            return f"{text}\nThe first difference is at line {at + offset + 1}; old_string has there:\n{key}"
    return text


def _by_equal_lines(have: list[str], keys: list[str]) -> int | None:
    """Return the start of the region with most wanted lines in place; frequent lines count less."""
    places: dict[str, list[int]] = {}
    for at, line in enumerate(have):
        if len(line) > 2:
            places.setdefault(line, []).append(at)
    votes: dict[int, float] = {}
    for offset, key in enumerate(keys):
        for at in places.get(key, [])[:50]:
            if at >= offset:
                votes[at - offset] = votes.get(at - offset, 0.0) + len(key) / len(places[key])
    return min(votes, key=lambda at: (-votes[at], at)) if votes else None


def _by_similar_line(have: list[str], keys: list[str]) -> int | None:
    """Return the start of the region around the line most similar to the longest wanted line, if any is similar."""
    offset = max(range(len(keys)), key=lambda index: len(keys[index]))
    matcher = difflib.SequenceMatcher(autojunk=False)
    matcher.set_seq2(keys[offset])
    best, found, compared = 0.55, None, 0
    for at, line in enumerate(have[:MAX_COMPARED]):
        matcher.set_seq1(line)
        if matcher.real_quick_ratio() <= best or matcher.quick_ratio() <= best:
            continue
        if (ratio := matcher.ratio()) > best:
            best, found = ratio, at
        compared += 1
        if compared == MAX_FULLY_COMPARED:
            break
    return None if found is None else max(0, found - offset)
