"""Python text and its tree together: where things stand in a file, and edits that touch nothing else.

Trees come from `ast`; changes are made to the text itself, by offsets, so that comments and layout stay as they were.
"""

import ast
import io
import re
import threading
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
Definition = FunctionNode | ast.ClassDef


@dataclass(frozen=True)
class Edit:
    """Bytes `start` to `end` of a file become `text`."""

    start: int
    end: int
    text: str


def spliced(data: bytes, edits: Sequence[Edit]) -> bytes:
    """A file with edits made; they must not overlap."""
    parts, at = [], 0
    for edit in sorted(edits, key=lambda edit: (edit.start, edit.end)):
        if edit.start < at:
            raise ValueError(f"edits overlap at byte {edit.start}")
        parts += [data[at : edit.start], edit.text.encode()]
        at = edit.end
    return b"".join([*parts, data[at:]])


@dataclass(frozen=True)
class Function:
    """A function or method. `owner` is the chain of classes and functions around it."""

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
        """Its statements without the docstring."""
        return self.node.body[1:] if docstring_node(self.node) is not None else self.node.body

    @property
    def lines(self) -> range:
        """From its first decorator to its end."""
        return span_lines(self.node)

    @property
    def body_lines(self) -> range:
        return range(self.body[0].lineno, (self.node.end_lineno or 0) + 1) if self.body else range(0)


def tree_of(source: str | bytes, path: str = "<unknown>") -> ast.Module:
    """`ast.parse`, by one thread at a time: before Python 3.13 it counts its depth for all threads together, and raises
    SystemError when two of them are at it."""
    with _PARSING:
        return ast.parse(source, path)


_PARSING = threading.Lock()


class Module:
    """One Python file: text, tree, and the way between them."""

    def __init__(self, path: str, data: bytes) -> None:
        self.path, self.data = path, data
        self.tree = tree_of(data, path)

    @cached_property
    def starts(self) -> list[int]:
        """Where each line begins, in bytes; the first is not used, so that lines count from 1."""
        found = [0, 0]
        for line in self.data.splitlines(keepends=True):
            found.append(found[-1] + len(line))
        return found

    def offset(self, line: int, column: int) -> int:
        return self.starts[line] + column

    def span(self, node: ast.expr | ast.stmt | ast.excepthandler | ast.arg | ast.keyword) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.offset(node.lineno, node.col_offset), self.offset(node.end_lineno, node.end_col_offset)

    def text(self, node: ast.expr | ast.stmt | ast.arg | ast.keyword) -> str:
        start, end = self.span(node)
        return self.data[start:end].decode()

    def line_span(self, first: int, last: int) -> tuple[int, int]:
        """Whole lines, with their ends."""
        end = self.starts[last + 1] if last + 1 < len(self.starts) else len(self.data)
        return self.starts[first], end

    def replace(self, node: ast.expr | ast.stmt, text: str) -> Edit:
        return Edit(*self.span(node), text)

    @cached_property
    def lines(self) -> list[str]:
        return self.data.decode("utf-8", "replace").split("\n")  # as Python counts them

    @cached_property
    def functions(self) -> list[Function]:
        return [Function(self, node, owner) for node, owner in definitions(self.tree) if isinstance(node, FunctionNode)]

    @cached_property
    def classes(self) -> list[tuple[ast.ClassDef, tuple[str, ...]]]:
        return [(node, owner) for node, owner in definitions(self.tree) if isinstance(node, ast.ClassDef)]

    @cached_property
    def names(self) -> Mapping[str, int]:
        """Every name token of the file with the number of times it occurs; keywords too."""
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

    def removal(self, node: Definition) -> Edit:
        """Take a definition out with its decorators; a body that would be empty gets `pass`."""
        first = node.decorator_list[0].lineno if node.decorator_list else node.lineno
        start, end = self.line_span(first, node.end_lineno or node.lineno)
        if len(self.body_around(node)) == 1:
            return Edit(start, end, " " * node.col_offset + "pass\n")
        return Edit(start, self._over_blank_lines(end), "")

    def body_around(self, node: ast.stmt) -> list[ast.stmt]:
        """The statements among which a statement stands."""
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

    def _over_blank_lines(self, at: int) -> int:
        while (found := re.match(rb"[ \t]*\r?\n", self.data[at:])) is not None:
            at += found.end()
        return at


@lru_cache(maxsize=512)
def parse(path: str, data: bytes) -> Module:
    """A file as a module; SyntaxError if it is none."""
    return Module(path, data)


def parses(data: bytes) -> bool:
    """Whether a file is Python that can be edited here: in UTF-8, and of this version's syntax."""
    try:
        tree_of(data.decode())
    except (SyntaxError, ValueError):
        return False
    return True


def definitions(tree: ast.AST, owner: tuple[str, ...] = ()) -> Iterator[tuple[Definition, tuple[str, ...]]]:
    """Functions and classes at any depth, in order, with the names around them."""
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


def parameters(node: FunctionNode) -> list[str]:
    """The names that a caller can give, without self and cls."""
    given = node.args
    names = [arg.arg for arg in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return [name for name in names if name not in ("self", "cls")]


def mentions(text: str, name: str) -> bool:
    """Whether a text has a name as a word of its own."""
    return re.search(rf"(?<![A-Za-z0-9_]){re.escape(name)}(?![A-Za-z0-9_])", text) is not None


def inside_fstring(tree: ast.AST) -> set[int]:
    """Ids of the nodes within f-strings, whose places in the text are not told before Python 3.12."""
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            found |= {id(inner) for inner in ast.walk(node) if inner is not node}
    return found


def without_definitions(data: bytes, path: str, names: set[str]) -> bytes:
    """A file without the functions and classes of these qualified names (`Class.method`, `function`)."""
    module = parse(path, data)
    edits: list[Edit] = []
    gone: list[range] = []
    doomed = [(node, owner) for node, owner in definitions(module.tree) if ".".join([*owner, node.name]) in names]
    for node, _ in doomed:
        lines = span_lines(node)
        if any(lines[0] in other for other in gone):
            continue  # what it stands in goes too
        gone.append(lines)
        edits.append(module.removal(node))
    emptied = _emptied(module, [node for node, _ in doomed])
    return spliced(data, [edit for edit in edits if edit.start not in emptied] + list(emptied.values()))


def _emptied(module: Module, doomed: Sequence[Definition]) -> dict[int, Edit]:
    """Bodies that lose all their statements to several removals: the last of these leaves a `pass`."""
    found: dict[int, Edit] = {}
    going = {id(node) for node in doomed}
    for outer in ast.walk(module.tree):
        body = getattr(outer, "body", None)
        if not isinstance(body, list) or isinstance(outer, ast.Module) or len(body) < 2:
            continue
        kept = [node for node in body if id(node) not in going]
        if not kept and not (isinstance(outer, Definition) and id(outer) in going):
            last = body[-1]
            edit = module.removal(last)
            found[edit.start] = Edit(edit.start, edit.end, " " * last.col_offset + "pass\n")
    return found
