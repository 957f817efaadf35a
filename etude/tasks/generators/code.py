"""Python source text with its syntax tree, and text edits that leave everything else unchanged.

Trees come from `ast`; edits are made to the text by byte offsets, so that comments and layout are preserved.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from etude.syntax import parse_tree

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
Definition = FunctionNode | ast.ClassDef


def source_text(data: bytes) -> str:
    """Return a file as text that the verifier turns into the same bytes."""
    return data.decode("utf-8", "surrogateescape")


@dataclass(frozen=True)
class SourceEdit:
    """Replace bytes `start` to `end` of a file by `text`."""

    start: int
    end: int
    text: str


def apply_edits(data: bytes, edits: Sequence[SourceEdit]) -> bytes:
    """Return a file with the edits applied; they must not overlap."""
    parts, position = [], 0
    for edit in sorted(edits, key=lambda edit: (edit.start, edit.end)):
        if edit.start < position:
            raise ValueError(f"edits overlap at byte {edit.start}")
        parts += [data[position : edit.start], edit.text.encode()]
        position = edit.end
    return b"".join([*parts, data[position:]])


@dataclass(frozen=True)
class PythonFunction:
    """A function or method. `owner` holds the names of the enclosing classes and functions."""

    module: "Module"
    node: FunctionNode
    owner: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def qualname(self) -> str:
        return ".".join([*self.owner, self.node.name])

    @property
    def file(self) -> str:
        return self.module.path

    @property
    def body(self) -> list[ast.stmt]:
        """The statements without the docstring."""
        return self.node.body[1:] if docstring_node(self.node) is not None else self.node.body

    def own_nodes(self) -> Iterator[ast.AST]:
        """Yield the nodes of the body in order, without those of nested functions and classes."""
        waiting: list[ast.AST] = list(reversed(self.body))
        while waiting:
            node = waiting.pop()
            if not isinstance(node, Definition | ast.Lambda):
                yield node
                waiting += reversed([*ast.iter_child_nodes(node)])

    @property
    def lines(self) -> range:
        """The lines from the first decorator to the end."""
        return span_lines(self.node)

    @property
    def body_lines(self) -> range:
        return range(self.body[0].lineno, (self.node.end_lineno or 0) + 1) if self.body else range(0)


class Module:
    """One Python file: text, tree, and the mapping between them."""

    def __init__(self, path: str, data: bytes) -> None:
        self.path, self.data = path, data
        self.tree = parse_tree(data, path)

    @cached_property
    def line_offsets(self) -> list[int]:
        """The byte offset of each line; entry 0 is unused, because lines count from 1."""
        found = [0, 0]
        for line in self.data.splitlines(keepends=True):
            found.append(found[-1] + len(line))
        return found

    def offset(self, line: int, column: int) -> int:
        return self.line_offsets[line] + column

    def span(self, node: ast.expr | ast.stmt | ast.excepthandler | ast.arg | ast.keyword) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.offset(node.lineno, node.col_offset), self.offset(node.end_lineno, node.end_col_offset)

    def text(self, node: ast.expr | ast.stmt | ast.arg | ast.keyword) -> str:
        start, end = self.span(node)
        return self.data[start:end].decode()

    def line_span(self, first: int, last: int) -> tuple[int, int]:
        """Return the byte span of whole lines, newlines included."""
        end = self.line_offsets[last + 1] if last + 1 < len(self.line_offsets) else len(self.data)
        return self.line_offsets[first], end

    def replace(self, node: ast.expr | ast.stmt, text: str) -> SourceEdit:
        return SourceEdit(*self.span(node), text)

    @cached_property
    def lines(self) -> list[str]:
        return self.data.decode("utf-8", "replace").split("\n")  # as Python counts them

    @cached_property
    def functions(self) -> list[PythonFunction]:
        return [
            PythonFunction(self, node, owner)
            for node, owner in definitions(self.tree)
            if isinstance(node, FunctionNode)
        ]

    @cached_property
    def classes(self) -> list[tuple[ast.ClassDef, tuple[str, ...]]]:
        return [(node, owner) for node, owner in definitions(self.tree) if isinstance(node, ast.ClassDef)]

    @cached_property
    def names(self) -> Mapping[str, int]:
        """The number of occurrences of every name token, keywords included."""
        found: dict[str, int] = {}
        for token in self.tokens:
            if token.type == tokenize.NAME:
                found[token.string] = found.get(token.string, 0) + 1
        return found

    @cached_property
    def tokens(self) -> list[tokenize.TokenInfo]:
        try:
            return list(tokenize.tokenize(io.BytesIO(self.data).readline))
        except (tokenize.TokenError, SyntaxError):
            return []

    def removal_edit(self, node: Definition) -> SourceEdit:
        """Return the edit that removes a definition with its decorators, leaving `pass` in an otherwise empty body."""
        first = node.decorator_list[0].lineno if node.decorator_list else node.lineno
        start, end = self.line_span(first, node.end_lineno or node.lineno)
        if len(self.enclosing_body(node)) == 1:
            return SourceEdit(start, end, " " * node.col_offset + "pass\n")
        return SourceEdit(start, self._skip_blank_lines(end), "")

    def enclosing_body(self, node: ast.stmt) -> list[ast.stmt]:
        """Return the statement list that contains a statement."""
        return self._bodies.get(id(node), [])

    @cached_property
    def _bodies(self) -> dict[int, list[ast.stmt]]:
        found: dict[int, list[ast.stmt]] = {}
        for outer in ast.walk(self.tree):
            for name in ("body", "orelse", "finalbody"):
                body = getattr(outer, name, None)
                if isinstance(body, list):
                    found |= dict.fromkeys(map(id, body), body)
        return found

    def _skip_blank_lines(self, position: int) -> int:
        while (found := re.match(rb"[ \t]*\r?\n", self.data[position:])) is not None:
            position += found.end()
        return position


@lru_cache(maxsize=512)
def parse(path: str, data: bytes) -> Module:
    """Parse a file; raise SyntaxError if it is not Python."""
    return Module(path, data)


def is_parsable(data: bytes) -> bool:
    """Return whether a file is UTF-8 and valid syntax for the running Python version."""
    try:
        parse_tree(data.decode())
    except (SyntaxError, ValueError):
        return False
    return True


def definitions(tree: ast.AST, owner: tuple[str, ...] = ()) -> Iterator[tuple[Definition, tuple[str, ...]]]:
    """Yield functions and classes at any depth, in order, with the names of the enclosing ones."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Definition):
            yield node, owner
            yield from definitions(node, (*owner, node.name))
        else:
            yield from definitions(node, owner)


def span_lines(node: Definition) -> range:
    first = node.decorator_list[0].lineno if node.decorator_list else node.lineno
    return range(first, (node.end_lineno or node.lineno) + 1)


def docstring_node(node: ast.AST) -> ast.Expr | None:
    body = getattr(node, "body", None)
    if isinstance(body, list) and body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        return body[0] if isinstance(body[0].value.value, str) else None
    return None


def import_text(
    node: ast.Import | ast.ImportFrom, names: Sequence[ast.alias], indent: str = "", wrap: bool = False
) -> str:
    """Return an import of some of the names of an import statement, on one line or with `wrap` on a line per name."""
    words = [alias.name + (f" as {alias.asname}" if alias.asname else "") for alias in names]
    if isinstance(node, ast.Import):
        return f"{indent}import {', '.join(words)}"
    head = f"{indent}from {'.' * node.level}{node.module or ''} import "
    lines = "".join(f"{indent}    {word},\n" for word in words)
    return f"{head}(\n{lines}{indent})" if wrap else head + ", ".join(words)


def parameters(node: FunctionNode) -> list[str]:
    """Return the parameter names without self and cls."""
    given = node.args
    names = [arg.arg for arg in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return [name for name in names if name not in ("self", "cls")]


def mentions(text: str, name: str) -> bool:
    """Return whether a text contains a name as a whole word."""
    return re.search(rf"(?<![A-Za-z0-9_]){re.escape(name)}(?![A-Za-z0-9_])", text) is not None


def fstring_node_ids(tree: ast.AST) -> set[int]:
    """Return the ids of nodes within f-strings, which have no correct positions before Python 3.12."""
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            found |= {id(inner) for inner in ast.walk(node) if inner is not node}
    return found


def remove_definitions(data: bytes, path: str, names: set[str]) -> bytes:
    """Return a file without the functions and classes of these qualified names (`Class.method`, `function`)."""
    module = parse(path, data)
    edits: list[SourceEdit] = []
    removed_lines: list[range] = []
    removed = [(node, owner) for node, owner in definitions(module.tree) if ".".join([*owner, node.name]) in names]
    for node, _ in removed:
        lines = span_lines(node)
        if any(lines[0] in other for other in removed_lines):
            continue  # an enclosing definition is removed too
        removed_lines.append(lines)
        edits.append(module.removal_edit(node))
    emptied = _emptied_bodies(module, [node for node, _ in removed])
    return apply_edits(data, [edit for edit in edits if edit.start not in emptied] + list(emptied.values()))


def _emptied_bodies(module: Module, removed: Sequence[Definition]) -> dict[int, SourceEdit]:
    """Return, for bodies emptied by several removals, the edit of the last statement, which leaves a `pass`."""
    found: dict[int, SourceEdit] = {}
    removed_ids = {id(node) for node in removed}
    for outer in ast.walk(module.tree):
        body = getattr(outer, "body", None)
        if not isinstance(body, list) or isinstance(outer, ast.Module) or len(body) < 2:
            continue
        kept = [node for node in body if id(node) not in removed_ids]
        if not kept and not (isinstance(outer, Definition) and id(outer) in removed_ids):
            last = body[-1]
            edit = module.removal_edit(last)
            found[edit.start] = SourceEdit(edit.start, edit.end, " " * last.col_offset + "pass\n")
    return found
