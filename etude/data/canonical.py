"""Canonical syntax trees of definitions: what two functions have in common when only names and constants differ.

Measured tasks are kept apart from training data by them: a function whose tree is the answer of a measured task gives
that task away, whatever its names, numbers and texts are. `definition_digest` is the digest of one definition,
`definition_digests` are those of all definitions in a text, also where the text is a listing with line numbers, a diff,
or JSON, as in the transcript of a session.
"""

import ast
import builtins
import hashlib
import re
from collections.abc import Iterator
from functools import lru_cache

from etude.syntax import parse_tree

_KEPT_NAMES = frozenset(dir(builtins))
_KEPT_CONSTANTS = (0, 1, "")
_HEADER = re.compile(r"^([ \t]*)(?:async )?def \w+\(", re.MULTILINE)
_LINE_NUMBER = re.compile(r"^ *\d+\|", re.MULTILINE)
_DIFF_SIGN = re.compile(r"^[+ ]", re.MULTILINE)
_ADDED_DEFINITION = re.compile(r"^\+[ \t]*(?:async )?def ", re.MULTILINE)
_STRING_START = re.compile(r'"(?=(?:async )?def )')
_STRING_END = re.compile(r'"[\s,}\]]*[^"\n]*$')
_ESCAPES = {"n": "\n", "t": "\t"}
MAX_DEFINITION_LINES = 200  # longer ones are no answers of tasks; bounds the work on hostile text


def canonical_form(definition: ast.AST) -> str:
    """Return the syntax tree of a definition with names and constants numbered and without docstrings.

    Names of builtins, attributes and keywords stay, and so do 0, 1, "", True, False and None.
    """
    return ast.dump(_Canonical().visit(definition))


def definition_digests(text: str) -> dict[str, str]:
    """Return the digests of all function definitions in a text that parse, each with the source that it came from."""
    views = [text]
    if "\\n" in text:  # code inside of JSON strings
        unescaped = re.sub(r'\\(["\\/nt])', lambda found: _ESCAPES.get(found.group(1), found.group(1)), text)
        views.append(_STRING_START.sub('"\n', unescaped))
    views += [_LINE_NUMBER.sub("", view) for view in views if _LINE_NUMBER.search(view)]
    views += [_DIFF_SIGN.sub("", view) for view in views if _ADDED_DEFINITION.search(view)]
    found: dict[str, str] = {}
    for view in views:
        for source in _definition_sources(view):
            if digest := definition_digest(source) or definition_digest(_STRING_END.sub("", source)):
                found.setdefault(digest, source)
    return found


@lru_cache(maxsize=1 << 14)
def definition_digest(source: str) -> str:
    """Return the digest of the first definition of a source text; "" if it does not parse."""
    try:
        (node, *_) = parse_tree(source).body
        return hashlib.sha256(canonical_form(node).encode()).hexdigest()[:24]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""


class _Canonical(ast.NodeTransformer):
    """Renumbers names and constants in the order in which they occur, and drops docstrings and annotations."""

    def __init__(self) -> None:
        self.marks: dict[tuple[str, object], str] = {}

    def mark(self, kind: str, value: object) -> str:
        return self.marks.setdefault((kind, value), f"{kind}{len(self.marks)}")

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._definition(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._definition(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self._definition(node)

    def _definition(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> ast.AST:
        node.name = self.mark("name", node.name)
        if not isinstance(node, ast.ClassDef):
            node.returns = None
        node.body = [line for line in node.body if not _is_text(line)] or [ast.Pass()]
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        node.arg = self.mark("name", node.arg)
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id not in _KEPT_NAMES:
            node.id = self.mark("name", node.id)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        value = node.value
        if isinstance(value, int | float | complex | str | bytes) and not isinstance(value, bool):
            if value not in _KEPT_CONSTANTS:
                node.value = self.mark(type(value).__name__, value)
            node.kind = None
        return node


def _is_text(line: ast.stmt) -> bool:
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) and isinstance(line.value.value, str)


def _definition_sources(text: str) -> Iterator[str]:
    """Yield each `def` of a text with the indented lines below it, dedented."""
    for header in _HEADER.finditer(text):
        indent, at = header.group(1), header.start()
        block: list[str] = []
        while at < len(text) and len(block) < MAX_DEFINITION_LINES:
            end = text.find("\n", at)
            line = text[at : end if end >= 0 else len(text)]
            if block and line.strip() and len(line) - len(line.lstrip()) <= len(indent):
                break
            block.append(line.removeprefix(indent))
            at = end + 1 if end >= 0 else len(text)
        yield "\n".join(block).rstrip()
