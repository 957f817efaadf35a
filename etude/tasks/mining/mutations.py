"""Mutations of a reference solution: it without one hunk, or with one new function stubbed. Tests must notice each."""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from etude.syntax import parse_tree
from etude.tasks.mining.classify import ChangeParts, without_docstrings
from etude.tasks.mining.history import FileDifference

MAX_MUTATIONS = 14  # of one task, evenly chosen
CONTEXT = 3  # lines; changes that are closer are one hunk, as in git


@dataclass(frozen=True)
class ReferenceMutation:
    """One changed file of the solution; `data` None removes it. `sure` if it cannot even be parsed or imported."""

    name: str
    path: str
    data: bytes | None
    sure: bool = False


def mutations_of(parts: ChangeParts, limit: int = MAX_MUTATIONS) -> list[ReferenceMutation]:
    """Return the mutations of a reference solution that change what it does, at most `limit`."""
    found = [each for file in parts.source for each in (*_without_hunks(file), *_stubbed(file))]
    unique = {(each.path, each.data): each for each in found}
    chosen = list(unique.values())
    count = min(limit, MAX_MUTATIONS)
    if len(chosen) > count:
        chosen = [chosen[number * len(chosen) // count] for number in range(count)]
    return chosen


def _without_hunks(file: FileDifference) -> Iterator[ReferenceMutation]:
    if file.before is None or file.after is None:
        if file.after is None or _says_something(file.after, file.path):
            yield ReferenceMutation(f"{file.path} as it was", file.path, file.before)
        return
    before, after = file.before.splitlines(keepends=True), file.after.splitlines(keepends=True)
    matcher = SequenceMatcher(None, before, after, autojunk=False)
    for group in matcher.get_grouped_opcodes(CONTEXT):
        changed = [each for each in group if each[0] != "equal"]
        (_, i1, _, j1, _), (_, _, i2, _, j2) = changed[0], changed[-1]
        data = b"".join([*after[:j1], *before[i1:i2], *after[j2:]])
        kind = _kind(data, file.after, file.path)
        if kind != "same":
            yield ReferenceMutation(f"{file.path}:{j1 + 1} without its hunk", file.path, data, kind == "broken")


def _kind(data: bytes, after: bytes, path: str) -> str:
    """Return whether a file is the "same" code as another, "broken", or "other" code."""
    if not path.endswith(".py"):
        return "same" if data.split() == after.split() or path.endswith((".pyi", ".d.ts")) else "other"
    try:
        return "same" if same_behaviour(data, after) else "other"
    except (SyntaxError, ValueError):
        return "broken"


class _WithoutTypes(ast.NodeTransformer):
    """Removes what no test can notice: annotations, blocks for type checkers, `__all__`."""

    in_class = False

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self._scope(node, in_class=True)

    def _scope(self, node: ast.AST, *, in_class: bool) -> ast.AST:
        outer, self.in_class = self.in_class, in_class
        self.generic_visit(node)
        self.in_class = outer
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST | None:
        return self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST | None:
        return self._function(node)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST | None:
        if any(ast.unparse(each).rpartition(".")[2] == "overload" for each in node.decorator_list):
            return None
        node.returns = None
        return self._scope(node, in_class=False)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        if self.in_class:
            node.annotation = ast.Constant("")  # the fields of dataclasses remain
            return node
        return None if node.value is None else ast.Assign([node.target], node.value)

    def visit_If(self, node: ast.If) -> ast.AST | None:
        if ast.unparse(node.test).rpartition(".")[2] == "TYPE_CHECKING":
            return None
        self.generic_visit(node)
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        return None if [ast.unparse(each) for each in node.targets] == ["__all__"] else node


def same_behaviour(one: bytes, other: bytes) -> bool:
    """Return whether Python files differ in docstrings and types alone; raise SyntaxError if one cannot be parsed."""
    trees = [without_docstrings(parse_tree(data)) for data in (one, other)]
    used = set[str]().union(*map(_mentioned, trees))
    evaluated = any(map(_evaluates_annotations, trees))
    plain = [_WithoutTypes().visit(tree) for tree in trees]
    if not evaluated:
        unneeded = used.difference(*map(_mentioned, plain))
        plain = [_WithoutImports(unneeded).visit(tree) for tree in plain]
    return ast.dump(plain[0]) == ast.dump(plain[1])


def _evaluates_annotations(tree: ast.Module) -> bool:
    """Return whether an import that only annotations use is needed: without `from __future__ import annotations`."""
    future = (each for each in tree.body if isinstance(each, ast.ImportFrom) and each.module == "__future__")
    return not any(name.name == "annotations" for each in future for name in each.names)


def _mentioned(tree: ast.AST) -> set[str]:
    """Return the names of a tree, also those in texts."""
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return names | {str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)}


class _WithoutImports(ast.NodeTransformer):
    """Removes the imports of some names."""

    def __init__(self, names: set[str]) -> None:
        self.names = names

    def visit_Import(self, node: ast.Import) -> ast.AST | None:
        return self._import(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | None:
        return self._import(node)

    def _import(self, node: ast.Import | ast.ImportFrom) -> ast.AST | None:
        node.names = [each for each in node.names if (each.asname or each.name.partition(".")[0]) not in self.names]
        return node if node.names else None


def _says_something(data: bytes, path: str) -> bool:
    return _kind(b"", data, path) == "other"


def _stubbed(file: FileDifference) -> Iterator[ReferenceMutation]:
    """Yield the file with the body of a new function replaced."""
    if file.after is None or not file.path.endswith(".py"):
        return
    try:
        old = {name for name, _ in _functions(parse_tree(file.before or b"").body)}
        new = [(name, node) for name, node in _functions(parse_tree(file.after).body) if name not in old]
    except (SyntaxError, ValueError):
        return
    lines = file.after.splitlines(keepends=True)
    for name, node in new:
        body = node.body[1:] if ast.get_docstring(node) is not None else node.body
        plain = [each for each in body if not isinstance(each, ast.Pass) and not _is_stub(each)]
        if not plain or body[0].lineno <= node.lineno:
            continue
        stub = b" " * body[0].col_offset + b"return None\n"
        data = b"".join([*lines[: _first_line(body[0]) - 1], stub, *lines[node.end_lineno or node.lineno :]])
        if _kind(data, file.after, file.path) == "other":
            yield ReferenceMutation(f"{file.path}: {name} stubbed", file.path, data)


def _is_stub(node: ast.stmt) -> bool:
    """Return whether a statement is `...` or a bare `return`."""
    if isinstance(node, ast.Return):
        return node.value is None or (isinstance(node.value, ast.Constant) and node.value.value is None)
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _first_line(node: ast.stmt) -> int:
    decorators = getattr(node, "decorator_list", [])
    return decorators[0].lineno if decorators else node.lineno


def _functions(
    body: Sequence[ast.stmt], owner: str = ""
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{owner}{node.name}", node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{owner}{node.name}.")
        elif isinstance(node, ast.If | ast.Try):
            yield from _functions([*node.body, *node.orelse], owner)
