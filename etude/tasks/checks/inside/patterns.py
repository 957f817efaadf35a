"""Legacy Python patterns that migrations replace, and the lines of a file with them; for generator and verifier."""

from __future__ import annotations

import ast

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MODULE = ("typing", "t", "_t")
TYPING = ("List", "Dict", "Set", "FrozenSet", "Tuple", "Type", "Optional", "Union")


def percent(tree: ast.AST) -> Iterator[ast.AST]:
    """`"..." % x`"""
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and _is_string(node.left):
            yield node


def str_format(tree: ast.AST) -> Iterator[ast.AST]:
    """`"...".format(x)`"""
    for node in ast.walk(tree):
        function = node.func if isinstance(node, ast.Call) else None
        if isinstance(function, ast.Attribute) and function.attr == "format" and _is_string(function.value):
            yield node


def typing_names(tree: ast.AST) -> Iterator[ast.AST]:
    """`typing.List[int]`, `Optional[str]`: replaced by builtins and `|`"""
    known = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "typing":
            known |= {alias.asname or alias.name for alias in node.names if alias.name in TYPING}
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript):
            value = node.value
            if (isinstance(value, ast.Name) and value.id in known) or (
                isinstance(value, ast.Attribute) and value.attr in TYPING and ast.unparse(value.value) in MODULE
            ):
                yield node


def classes(tree: ast.AST) -> Iterator[ast.AST]:
    """`class A(object)` and `super(A, self)`"""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            if any(isinstance(base, ast.Name) and base.id == "object" for base in node.bases):
                yield node
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super" and node.args:
            yield node


def literals(tree: ast.AST) -> Iterator[ast.AST]:
    """`dict()`, `list()`, `set([...])`: replaced by literals"""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
            empty = node.func.id in ("dict", "list", "tuple") and not node.args
            if empty or (node.func.id == "set" and len(node.args) == 1 and isinstance(node.args[0], ast.List)):
                yield node


def os_errors(tree: ast.AST) -> Iterator[ast.AST]:
    """`IOError`, `EnvironmentError`: old names of OSError"""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in ("IOError", "EnvironmentError"):
            yield node


def maps(tree: ast.AST) -> Iterator[ast.AST]:
    """`list(map(lambda ...))` and `list(filter(lambda ...))`: replaced by comprehensions"""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _calls(node, ("list", "set", "tuple")) and len(node.args) == 1:
            inner = node.args[0]
            if (
                isinstance(inner, ast.Call)
                and _calls(inner, ("map", "filter"))
                and isinstance(inner.args[0], ast.Lambda)
            ):
                yield node


def text_formatting(tree: ast.AST) -> Iterator[ast.AST]:
    """`"..." % x`, and `x.format(...)` of anything: replaced by f-strings"""
    yield from percent(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
            yield node


def none_comparisons(tree: ast.AST) -> Iterator[ast.AST]:
    """`x == None`"""
    for node, sides in _equality_comparisons(tree):
        if any(isinstance(side, ast.Constant) and side.value is None for side in sides):
            yield node


def type_comparisons(tree: ast.AST) -> Iterator[ast.AST]:
    """`type(x) == y`"""
    for node, sides in _equality_comparisons(tree):
        if any(isinstance(side, ast.Call) and getattr(side.func, "id", "") == "type" for side in sides):
            yield node


def _equality_comparisons(tree: ast.AST) -> Iterator[tuple[ast.Compare, list[ast.expr]]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.Eq, ast.NotEq)):
            yield node, [node.left, *node.comparators]


def _calls(node: ast.Call, names: tuple[str, ...]) -> bool:
    return isinstance(node.func, ast.Name) and node.func.id in names and bool(node.args)


def _is_string(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


PATTERNS: dict[str, Callable[[ast.AST], Iterator[ast.AST]]] = {
    "percent": percent,
    "str-format": str_format,
    "typing": typing_names,
    "classes": classes,
    "literals": literals,
    "os-errors": os_errors,
    "maps": maps,
    "text-formatting": text_formatting,
    "none-comparisons": none_comparisons,
    "type-comparisons": type_comparisons,
}


def lines_with(family: str, tree: ast.AST) -> list[int]:
    """Return the lines of a file that have a legacy pattern."""
    return sorted(getattr(node, "lineno", 0) for node in PATTERNS[family](tree))
