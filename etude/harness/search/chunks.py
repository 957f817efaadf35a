"""Files cut into the pieces that search finds: functions, classes, runs of module level; blocks in other languages.

Every chunk knows its lines; together the chunks of a file hold every line that is not blank. The text is data that
anybody may have written: it is parsed, never run, and whatever cannot be parsed is cut by its indentation instead.
"""

import ast
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# A screenful. The embedding model reads about 25 lines of code; what is longer is found by its head and by its words.
MAX_LINES = 40
MAX_CHARS = 3_000
MIN_LINES = 8  # blocks of unknown languages are joined until there is something to recognise
OVERLAP = 4  # lines that two pieces of one long definition share
LINE_CHARS = 400  # of a longer line, minified or data, only the beginning is looked at

# A file's own warnings (an invalid escape) are about code that is not ours. They carry this name of a module.
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
    """Lines `first` to `last` of a file, from 1, and what they define: `Class.method`, a heading, or nothing."""

    path: str
    first: int
    last: int
    name: str = ""


@dataclass(frozen=True)
class _Span:
    first: int
    last: int
    name: str


def read_lines(data: bytes) -> list[str] | None:
    """The lines of a text file, as editors count them; None when it is not text."""
    if b"\0" in data:
        return None
    lines = data.decode("utf-8", errors="replace").split("\n")
    if lines[-1] == "":
        lines.pop()
    return lines


def cut(path: str, lines: Sequence[str]) -> list[Chunk]:
    """The chunks of a file in order of their lines."""
    spans = _python_spans(lines) if path.endswith((".py", ".pyi")) else None
    if spans is None:
        spans = _block_spans(lines, prose=path.endswith(PROSE))
    pieces = (piece for span in spans for piece in _bounded(lines, span))
    return [Chunk(path, span.first, span.last, span.name) for span in pieces]


def chunk_text(chunk: Chunk, lines: Sequence[str]) -> str:
    """What is looked at of a chunk's lines."""
    return "\n".join(line[:LINE_CHARS].rstrip() for line in lines[chunk.first - 1 : chunk.last])


# ------------------------------------------------------------------------------------------------- Python


def _python_spans(lines: Sequence[str]) -> list[_Span] | None:
    """By the syntax tree; None for what is not Python of our version."""
    if any("\r" in line[:-1] for line in lines):
        return None  # Python counts a lone carriage return as the end of a line; editors do not
    try:
        tree = ast.parse("\n".join(lines).lstrip("\ufeff"), filename=_SOURCE)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return list(_tile(tree.body, 1, len(lines), ""))


def _tile(body: Sequence[ast.stmt], first: int, last: int, owner: str) -> Iterator[_Span]:
    """Lines `first` to `last` without gaps: each definition with the comments above it, and the runs in between."""
    start = end = first - 1  # of the run: its lines are start + 1 .. end
    for node in body:
        stop = node.end_lineno or node.lineno
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            end = max(end, stop)
            continue
        if end > start:
            yield _Span(start + 1, end, owner)
        if stop > end:
            yield from _definition(node, end + 1, stop, owner)
        start = end = max(end, stop)
    if last > start:
        yield _Span(start + 1, last, owner)


def _definition(
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, first: int, last: int, owner: str
) -> Iterator[_Span]:
    name = f"{owner}.{node.name}" if owner else node.name
    if isinstance(node, ast.ClassDef) and last - first >= MAX_LINES // 2:
        yield from _tile(node.body, first, last, name)
    else:
        yield _Span(first, last, name)


# ------------------------------------------------------------------------------------------------- other languages


def _block_spans(lines: Sequence[str], prose: bool) -> list[_Span]:
    """Blocks that start at the margin after a blank line (in prose, at headings), the short ones joined."""
    starts = [
        number
        for number, line in enumerate(lines)
        if (_HEADING.match(line) if prose else _opens(lines, number)) or number == 0
    ]
    spans: list[_Span] = []
    first = 0
    for stop in [*starts[1:], len(lines)]:
        if stop - first < MIN_LINES and stop < len(lines):
            continue
        spans.append(_Span(first + 1, stop, _name(lines[first:stop], prose)))
        first = stop
    return spans


def _opens(lines: Sequence[str], number: int) -> bool:
    """Whether a block starts here: at the margin, after a blank line, and not with what ends one."""
    line = lines[number]
    at_margin = line[:1].strip() != "" and not line.startswith(_CLOSES)
    return at_margin and lines[number - 1].strip() == ""


def _name(lines: Sequence[str], prose: bool) -> str:
    pattern = _HEADING if prose else _DEFINES
    found = (pattern.match(line[:LINE_CHARS]) for line in lines)
    return next((match[1][:80] for match in found if match), "")


# ------------------------------------------------------------------------------------------------- size


def _bounded(lines: Sequence[str], span: _Span) -> Iterator[_Span]:
    """The span without blank lines around it, in overlapping pieces when it is long."""
    first, last = span.first, span.last
    while last >= first and not lines[last - 1].strip():
        last -= 1
    while first <= last:
        if not lines[first - 1].strip():
            first += 1
            continue
        stop = _fitting(lines, first, last)
        if stop < last:
            stop = _break(lines, first, stop)
        yield _Span(first, stop, span.name)
        if stop == last:
            return
        first = max(first + 1, stop + 1 - OVERLAP)


def _fitting(lines: Sequence[str], first: int, last: int) -> int:
    """The last line of a piece that starts at `first` and is within bounds; at least one line."""
    chars = 0
    stop = first
    for number in range(first, min(last, first + MAX_LINES - 1) + 1):
        chars += min(len(lines[number - 1]), LINE_CHARS) + 1
        if chars > MAX_CHARS and number > first:
            break
        stop = number
    return stop


def _break(lines: Sequence[str], first: int, stop: int) -> int:
    """Where to end a piece that could go on to `stop`: before the least indented line, rather after a blank one."""
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
