"""Snippets of real Python code, small enough to be a file of a miniature task, and words to rename identifiers with.

Snippets are never run: they are text that a model practises reading and editing. Renaming their identifiers forces the
model to copy instead of recalling.
"""

import ast
import builtins
import keyword
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

from etude.syntax import parse_tree
from etude_nano import word_lists as words

SNIPPET_LINES = range(3, 31)
MAX_LINE_WIDTH = 84
MAX_SNIPPET_CHARS = 1100
_WORD = re.compile(r"[A-Za-z_]\w*")
_FIXED = frozenset(
    {*keyword.kwlist, *dir(builtins), "self", "cls", "args", "kwargs", "append", "join", "format", "split"}
)
_SYLLABLES = [first + second for first in "bdfgklmnprstv" for second in "aeio"]


@dataclass(frozen=True)
class CodeSnippet:
    """The lines of one definition, and the name that it defines."""

    name: str
    text: str


@dataclass(frozen=True)
class SnippetPool:
    """The material of exercises: snippets, and words for invented names."""

    snippets: tuple[CodeSnippet, ...]
    words: tuple[str, ...]


def extract_snippets(sources: Iterable[str]) -> list[CodeSnippet]:
    """Return the functions, classes and methods of Python sources that are neither too long nor too wide."""
    found: dict[str, CodeSnippet] = {}
    for source in sources:
        try:
            tree = parse_tree(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        lines = source.split("\n")
        members = [each for node in tree.body if isinstance(node, ast.ClassDef) for each in node.body]
        for node in [*tree.body, *members]:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                snippet = _extract_snippet(node, lines)
                if snippet is not None:
                    found.setdefault(snippet.text, snippet)
    return list(found.values())


def _extract_snippet(node: ast.FunctionDef | ast.ClassDef, lines: list[str]) -> CodeSnippet | None:
    """Return the lines of a definition, without its decorators and without a docstring of several lines."""
    taken = list(range(node.lineno - 1, node.end_lineno or node.lineno))
    first = node.body[0]
    if ast.get_docstring(node, clean=False) is not None and (last := first.end_lineno or 0) > first.lineno:
        if len(node.body) == 1:
            return None
        taken = [number for number in taken if number not in range(first.lineno - 1, last)]
    if len(taken) not in SNIPPET_LINES:
        return None
    cut = [lines[number][node.col_offset :].rstrip() for number in taken]
    text = "\n".join(cut) + "\n"
    plain = text.isascii() and "\t" not in text and "\f" not in text and "\r" not in text and "\\\n" not in text
    if not plain or len(text) > MAX_SNIPPET_CHARS or max(map(len, cut)) > MAX_LINE_WIDTH:
        return None
    if "<|" in text or "\n\n\n" in text:
        return None
    return CodeSnippet(node.name, text)


def make_pool(snippets: Iterable[CodeSnippet]) -> SnippetPool:
    """Return a pool of the snippets and the words that their identifiers consist of."""
    snippets = tuple(snippets)
    seen = {part for snippet in snippets for name in _WORD.findall(snippet.text) for part in name.lower().split("_")}
    plain = {word for word in seen if 3 <= len(word) <= 9 and word.isalpha() and word not in _FIXED}
    own = {each for pair in (*words.NOUNS, *words.NAMED) for each in pair} | {*words.LABELS, *words.MODULES}
    return SnippetPool(snippets, tuple(sorted(plain | {word for word in own if "_" not in word})))


def invent_name(rng: Random, pool: SnippetPool) -> str:
    """Return a random identifier of words, of syllables, or of both."""
    kind = rng.random()
    if kind < 0.25:
        return rng.choice(pool.words)
    if kind < 0.7:
        return f"{rng.choice(pool.words)}_{rng.choice(pool.words)}"
    made = "".join(rng.choice(_SYLLABLES) for _ in range(rng.randint(2, 3)))
    return made if kind < 0.88 else f"{made}_{rng.choice(pool.words)}"


def draw_module_name(rng: Random, pool: SnippetPool, taken: Iterable[str] = ()) -> str:
    """Return a module name that is neither taken nor the name of an importable standard or loaded module."""
    while True:
        name = rng.choice(words.MODULES) if rng.random() < 0.3 else invent_name(rng, pool)
        if name not in sys.stdlib_module_names and name not in sys.modules and name not in taken and name not in _FIXED:
            return name


def rename_identifiers(snippet: CodeSnippet, rng: Random, pool: SnippetPool, share: float) -> CodeSnippet:
    """Return the snippet with about this share of its identifiers replaced by invented ones, consistently."""
    names = sorted({name for name in _WORD.findall(snippet.text) if name not in _FIXED and not name.startswith("__")})
    others: dict[str, str] = {}
    for name in names:
        if rng.random() < share:
            other = invent_name(rng, pool)
            if other not in names and other not in others.values() and other not in _FIXED:
                others[name] = other.title().replace("_", "") if name[0].isupper() else other
    text = _WORD.sub(lambda found: others.get(found.group(), found.group()), snippet.text)
    if max(map(len, text.split("\n"))) > MAX_LINE_WIDTH + 16:
        return snippet
    return CodeSnippet(others.get(snippet.name, snippet.name), text)


def identifiers_in(text: str) -> list[str]:
    """Return the identifiers of a code text, without keywords and builtins."""
    return sorted({name for name in _WORD.findall(text) if name not in _FIXED and len(name) > 1})
