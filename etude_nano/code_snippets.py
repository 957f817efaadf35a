"""Pieces of real Python code, small enough to be a file in miniature, and words to give them other names.

Nothing here is run: a piece is text that a model practises reading and changing. Under other names it has to be copied,
not remembered.
"""

import ast
import builtins
import keyword
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

from etude_nano import word_lists as words

LINES = range(3, 31)  # of a piece
WIDTH = 84  # characters of its longest line
SIZE = 1100  # characters
_WORD = re.compile(r"[A-Za-z_]\w*")
_FIXED = frozenset(
    {*keyword.kwlist, *dir(builtins), "self", "cls", "args", "kwargs", "append", "join", "format", "split"}
)
_SYLLABLES = [first + second for first in "bdfgklmnprstv" for second in "aeio"]


@dataclass(frozen=True)
class Piece:
    """Some lines of code that belong together, and the name that they define."""

    name: str
    text: str


@dataclass(frozen=True)
class Pool:
    """What exercises are made of."""

    pieces: tuple[Piece, ...]
    words: tuple[str, ...]


def take_pieces(sources: Iterable[str]) -> list[Piece]:
    """The functions, classes and methods in texts of Python code that are neither too long nor too wide."""
    found: dict[str, Piece] = {}
    for source in sources:
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        lines = source.split("\n")
        inside = [each for node in tree.body if isinstance(node, ast.ClassDef) for each in node.body]
        for node in [*tree.body, *inside]:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and (piece := _piece(node, lines)) is not None:
                found.setdefault(piece.text, piece)
    return list(found.values())


def _piece(node: ast.FunctionDef | ast.ClassDef, lines: list[str]) -> Piece | None:
    """The lines of a definition, without its decorators and without a docstring of several lines."""
    taken = list(range(node.lineno - 1, node.end_lineno or node.lineno))
    first = node.body[0]
    if ast.get_docstring(node, clean=False) is not None and (last := first.end_lineno or 0) > first.lineno:
        if len(node.body) == 1:
            return None
        taken = [number for number in taken if number not in range(first.lineno - 1, last)]
    if len(taken) not in LINES:
        return None
    cut = [lines[number][node.col_offset :].rstrip() for number in taken]
    text = "\n".join(cut) + "\n"
    plain = text.isascii() and "\t" not in text and "\f" not in text and "\r" not in text and "\\\n" not in text
    if not plain or len(text) > SIZE or max(map(len, cut)) > WIDTH or "<|" in text or "\n\n\n" in text:
        return None
    return Piece(node.name, text)


def make_pool(pieces: Iterable[Piece]) -> Pool:
    """Pieces with the words that their names are made of."""
    pieces = tuple(pieces)
    seen = {part for piece in pieces for name in _WORD.findall(piece.text) for part in name.lower().split("_")}
    plain = {word for word in seen if 3 <= len(word) <= 9 and word.isalpha() and word not in _FIXED}
    own = {each for pair in (*words.NOUNS, *words.NAMED) for each in pair} | {*words.LABELS, *words.MODULES}
    return Pool(pieces, tuple(sorted(plain | {word for word in own if "_" not in word})))


def invented(chance: Random, pool: Pool) -> str:
    """A name that nobody has used."""
    way = chance.random()
    if way < 0.25:
        return chance.choice(pool.words)
    if way < 0.7:
        return f"{chance.choice(pool.words)}_{chance.choice(pool.words)}"
    made = "".join(chance.choice(_SYLLABLES) for _ in range(chance.randint(2, 3)))
    return made if way < 0.88 else f"{made}_{chance.choice(pool.words)}"


def module_name(chance: Random, pool: Pool, taken: Iterable[str] = ()) -> str:
    """A name for a file, without its suffix, that no module of Python's has."""
    while True:
        name = chance.choice(words.MODULES) if chance.random() < 0.3 else invented(chance, pool)
        if name not in sys.stdlib_module_names and name not in sys.modules and name not in taken and name not in _FIXED:
            return name


def renamed(piece: Piece, chance: Random, pool: Pool, share: float) -> Piece:
    """The piece with a share of its names changed for invented ones, each in all its places."""
    names = sorted({name for name in _WORD.findall(piece.text) if name not in _FIXED and not name.startswith("__")})
    others: dict[str, str] = {}
    for name in names:
        if chance.random() < share:
            other = invented(chance, pool)
            if other not in names and other not in others.values() and other not in _FIXED:
                others[name] = other.title().replace("_", "") if name[0].isupper() else other
    text = _WORD.sub(lambda found: others.get(found.group(), found.group()), piece.text)
    if max(map(len, text.split("\n"))) > WIDTH + 16:
        return piece
    return Piece(others.get(piece.name, piece.name), text)


def names_in(text: str) -> list[str]:
    """The names that code uses, without Python's own."""
    return sorted({name for name in _WORD.findall(text) if name not in _FIXED and len(name) > 1})
