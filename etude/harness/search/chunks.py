"""Splits files into chunks: functions, classes and runs of module-level code in Python, blocks in other languages.

Together the chunks of a file contain every line that is not blank. The text is untrusted: it is parsed, never run, and
a file that cannot be parsed is split by its indentation.
"""

import ast
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from etude.syntax import parse_tree

# About a screenful. The embedding model reads about 25 lines of code; longer chunks are found by their head and words.
MAX_LINES = 40
MAX_CHARS = 3_000
MIN_LINES = 8  # shorter blocks of unknown languages are joined
OVERLAP = 4  # lines shared by two parts of one long definition
LINE_CHARS = 400  # the rest of a longer line, minified or data, is ignored

# Suppress warnings about searched code (such as invalid escapes); they carry this module name.
_SOURCE = "<searched>"
warnings.filterwarnings("ignore", module=re.escape(_SOURCE))

_DEFINES = re.compile(
    r"^\s*(?:(?:export|default|pub(?:\([^)]*\))?|public|private|protected|static|abstract|final|async|unsafe|extern)\s+)*"
    r"(?:def|class|function\*?|func|fn|struct|enum|interface|trait|impl|type|module|namespace|package|object|sub|proc)"
    r"\s+(?:\([^)]*\)\s*)?([A-Za-z_$][\w$.:]*)"
)
_HEADING = re.compile(r"#{1,6} +(.+?) *#*$")
_CLOSES = ("}", ")", "]", "end", "else", "elif", "except", "finally", "catch", "fi", "done", "esac")
PROSE = (".md", ".markdown", ".mdx")


@dataclass(frozen=True)
class Chunk:
    """Lines `first` to `last` of a file (1-based), and the name they define: `Class.method`, a heading, or empty."""

    path: str
    first: int
    last: int
    name: str = ""


def read_lines(data: bytes) -> list[str] | None:
    """Return the lines of a text file as editors number them; None if it is not text."""
    if b"\0" in data:
        return None
    lines = data.decode("utf-8", errors="replace").split("\n")
    if lines[-1] == "":
        lines.pop()
    return lines


def cut_chunks(path: str, lines: Sequence[str]) -> list[Chunk]:
    """Return the chunks of a file, ordered by line."""
    spans = _python_spans(path, lines) if path.endswith((".py", ".pyi")) else None
    if spans is None:
        spans = _block_spans(path, lines)
    return [part for span in spans for part in _split_long(lines, span)]


def chunk_text(chunk: Chunk, lines: Sequence[str]) -> str:
    """Return the text of a chunk, with long lines cut."""
    return "\n".join(line[:LINE_CHARS].rstrip() for line in lines[chunk.first - 1 : chunk.last])


# ------------------------------------------------------------------------------------------------- Python


def _python_spans(path: str, lines: Sequence[str]) -> list[Chunk] | None:
    """Return spans from the syntax tree; None if the file does not parse with this Python."""
    if any("\r" in line[:-1] for line in lines):
        return None  # Python treats a lone carriage return as a line end; editors do not
    try:
        tree = parse_tree("\n".join(lines).lstrip("\ufeff"), _SOURCE)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return list(_tile(tree.body, Chunk(path, 1, len(lines))))


def _tile(body: Sequence[ast.stmt], whole: Chunk) -> Iterator[Chunk]:
    """Yield spans over the whole: each definition with the comments above it, and the runs between."""
    start = end = whole.first - 1  # the current run has lines start + 1 .. end
    for node in body:
        stop = node.end_lineno or node.lineno
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            end = max(end, stop)
            continue
        if end > start:
            yield replace(whole, first=start + 1, last=end)
        if stop > end:
            yield from _definition(node, replace(whole, first=end + 1, last=stop))
        start = end = max(end, stop)
    if whole.last > start:
        yield replace(whole, first=start + 1)


def _definition(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, span: Chunk) -> Iterator[Chunk]:
    named = replace(span, name=f"{span.name}.{node.name}" if span.name else node.name)
    if isinstance(node, ast.ClassDef) and span.last - span.first >= MAX_LINES // 2:
        yield from _tile(node.body, named)
    else:
        yield named


# ------------------------------------------------------------------------------------------------- other languages


def _block_spans(path: str, lines: Sequence[str]) -> list[Chunk]:
    """Return blocks that start unindented after a blank line (in prose, at headings), short ones joined."""
    prose = path.endswith(PROSE)
    starts = [
        number
        for number, line in enumerate(lines)
        if (_HEADING.match(line) if prose else _opens(lines, number)) or number == 0
    ]
    spans: list[Chunk] = []
    first = 0
    for stop in [*starts[1:], len(lines)]:
        if stop - first < MIN_LINES and stop < len(lines):
            continue
        spans.append(Chunk(path, first + 1, stop, _name(lines[first:stop], prose)))
        first = stop
    return spans


def _opens(lines: Sequence[str], number: int) -> bool:
    """Return whether a block starts here: unindented, after a blank line, and not with a closing token."""
    line = lines[number]
    at_margin = line[:1].strip() != "" and not line.startswith(_CLOSES)
    return at_margin and lines[number - 1].strip() == ""


def _name(lines: Sequence[str], prose: bool) -> str:
    pattern = _HEADING if prose else _DEFINES
    found = (pattern.match(line[:LINE_CHARS]) for line in lines)
    return next((match[1][:80] for match in found if match), "")


# ------------------------------------------------------------------------------------------------- size


def _split_long(lines: Sequence[str], span: Chunk) -> Iterator[Chunk]:
    """Yield the span without surrounding blank lines, in overlapping parts if it is long."""
    first, last = span.first, span.last
    while last >= first and not lines[last - 1].strip():
        last -= 1
    while first <= last:
        if not lines[first - 1].strip():
            first += 1
            continue
        stop = _last_fitting_line(lines, first, last)
        if stop < last:
            stop = _break_line(lines, first, stop)
        yield replace(span, first=first, last=stop)
        if stop == last:
            return
        first = max(first + 1, stop + 1 - OVERLAP)


def _last_fitting_line(lines: Sequence[str], first: int, last: int) -> int:
    """Return the last line of a part that starts at `first` and is within the limits; at least one line."""
    chars = 0
    stop = first
    for number in range(first, min(last, first + MAX_LINES - 1) + 1):
        chars += min(len(lines[number - 1]), LINE_CHARS) + 1
        if chars > MAX_CHARS and number > first:
            break
        stop = number
    return stop


def _break_line(lines: Sequence[str], first: int, stop: int) -> int:
    """Return where to end a part that may extend to `stop`: before the least indented line, best after a blank."""
    best, least = stop, (len(lines), True)
    for number in range(first + (stop - first) * 2 // 3, stop):
        following = lines[number]
        if not following.strip():
            continue
        indent = len(following) - len(following.lstrip())
        rank = (indent, bool(lines[number - 1].strip()))
        if rank <= least:
            best, least = number, rank
    return best
