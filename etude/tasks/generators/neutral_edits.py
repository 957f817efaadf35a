"""Changes to code that mean nothing: what a diff under review has beside its defects."""

import ast
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from etude.tasks.generators.code import Edit, Function, Module, inside_fstring

SPARE = {"result": "outcome", "res": "found", "value": "item", "name": "label", "key": "entry", "data": "content"}
RESULTS = ("result", "outcome", "found", "answer", "computed")
CONDITIONS = ("applies", "matches", "wanted", "is_given", "relevant", "should")
SPARE |= {"i": "index", "x": "each", "f": "function", "rv": "result", "k": "key", "v": "value", "a": "attribute"}


@dataclass(frozen=True)
class Rewording:
    """One change that means nothing: its edits, all within a function."""

    kind: str
    function: Function
    edits: tuple[Edit, ...]


def rewordings(function: Function, rng: random.Random) -> list[Rewording]:
    """Ways of writing a function otherwise."""
    free = [name for name in (*RESULTS, *CONDITIONS) if name not in _names(function)]
    rng.shuffle(free)
    result = next((name for name in free if name in RESULTS), "")
    condition = next((name for name in free if name in CONDITIONS), "")
    found = [*_unfolded(function), *_turned(function)]
    found += _named_returns(function, result) if result else []
    found += _named_conditions(function, condition) if condition else []
    local = _renamed_local(function, rng)
    return [*found, *([local] if local else [])]


def _own(function: Function) -> Iterator[ast.AST]:
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            continue
        yield node
        waiting += ast.iter_child_nodes(node)


def _alone(module: Module, node: ast.stmt) -> bool:
    """Whether a statement has its lines for itself, and fits on one."""
    line = module.lines[node.lineno - 1]
    return node.lineno == node.end_lineno and not line[: node.col_offset].strip() and "#" not in line


def _names(function: Function) -> set[str]:
    return {node.id for node in ast.walk(function.node) if isinstance(node, ast.Name)} | {
        node.arg for node in ast.walk(function.node) if isinstance(node, ast.arg)
    }


def _named_returns(function: Function, name: str) -> Iterator[Rewording]:
    module = function.module
    for node in _own(function):
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Call | ast.BinOp) and _alone(module, node):
            text = f"{name} = {module.text(node.value)}\n{' ' * node.col_offset}return {name}"
            yield Rewording("named-return", function, (module.replace(node, text),))


def _named_conditions(function: Function, name: str) -> Iterator[Rewording]:
    module = function.module
    for node in _own(function):
        if isinstance(node, ast.If) and isinstance(node.test, ast.BoolOp | ast.Compare):
            line = module.lines[node.lineno - 1]
            plain = re.fullmatch(r"\s*if .*:", line) and node.test.end_lineno == node.lineno
            walrus = any(isinstance(inner, ast.NamedExpr) for inner in ast.walk(node.test))
            if plain and not walrus and not line.strip().startswith("elif"):
                start, _ = module.span(node)
                text = f"{name} = {module.text(node.test)}\n{' ' * node.col_offset}if {name}"
                yield Rewording("named-condition", function, (Edit(start, module.span(node.test)[1], text),))


def _unfolded(function: Function) -> Iterator[Rewording]:
    """`return a if c else b` in three lines."""
    module = function.module
    for node in _own(function):
        if isinstance(node, ast.Return) and isinstance(node.value, ast.IfExp) and _alone(module, node):
            indent, value = " " * node.col_offset, node.value
            text = (
                f"if {module.text(value.test)}:\n{indent}    return {module.text(value.body)}\n"
                f"{indent}return {module.text(value.orelse)}"
            )
            yield Rewording("unfolded", function, (module.replace(node, text),))


def _turned(function: Function) -> Iterator[Rewording]:
    """`if not a: x else: y` the other way round, where both are one line."""
    module = function.module
    for node in _own(function):
        if not isinstance(node, ast.If) or len(node.body) != 1 or len(node.orelse) != 1:
            continue
        one, two = node.body[0], node.orelse[0]
        if isinstance(two, ast.If) or not (_alone(module, one) and _alone(module, two)):
            continue
        if isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not):
            operand = module.text(node.test.operand)
            edits = (
                module.replace(node.test, operand),
                module.replace(one, module.text(two)),
                module.replace(two, module.text(one)),
            )
            yield Rewording("turned", function, edits)


def _renamed_local(function: Function, rng: random.Random) -> Rewording | None:
    """A local variable has another name."""
    module = function.module
    strings = inside_fstring(function.node)
    inner = any(
        isinstance(node, ast.FunctionDef | ast.Lambda | ast.ClassDef | ast.Global | ast.Nonlocal)
        for node in ast.walk(function.node)
        if node is not function.node
    )
    if inner or any(
        isinstance(node, ast.Name) and node.id in ("locals", "vars", "eval", "exec") for node in ast.walk(function.node)
    ):
        return None
    stored = {
        node.id for node in ast.walk(function.node) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    given = {node.arg for node in ast.walk(function.node) if isinstance(node, ast.arg)}
    names = sorted(name for name in stored - given if name in SPARE and SPARE[name] not in _names(function))
    if not names:
        return None
    name = rng.choice(names)
    uses = [node for node in ast.walk(function.node) if isinstance(node, ast.Name) and node.id == name]
    if any(id(node) in strings for node in uses):
        return None
    return Rewording("renamed-local", function, tuple(module.replace(node, SPARE[name]) for node in uses))
