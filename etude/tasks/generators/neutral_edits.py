"""Edits that preserve behaviour: the neutral part of a diff under review."""

import ast
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from etude.tasks.generators.code import Module, PythonFunction, SourceEdit, fstring_node_ids

LOCAL_NAMES = {"result": "outcome", "res": "found", "value": "item", "name": "label", "key": "entry", "data": "content"}
RESULT_NAMES = ("result", "outcome", "found", "answer", "computed")
CONDITION_NAMES = ("applies", "matches", "wanted", "is_given", "relevant", "should")
LOCAL_NAMES |= {"i": "index", "x": "each", "f": "function", "rv": "result", "k": "key", "v": "value", "a": "attribute"}


@dataclass(frozen=True)
class NeutralEdit:
    """One behaviour-preserving change; all its edits are within one function."""

    kind: str
    function: PythonFunction
    edits: tuple[SourceEdit, ...]


def neutral_edits(function: PythonFunction, rng: random.Random) -> list[NeutralEdit]:
    """Return behaviour-preserving changes of a function."""
    free = [name for name in (*RESULT_NAMES, *CONDITION_NAMES) if name not in _names(function)]
    rng.shuffle(free)
    result = next((name for name in free if name in RESULT_NAMES), "")
    condition = next((name for name in free if name in CONDITION_NAMES), "")
    found = [*_expand_conditionals(function), *_invert_branches(function)]
    found += _name_returns(function, result) if result else []
    found += _name_conditions(function, condition) if condition else []
    local = _rename_local(function, rng)
    return [*found, *([local] if local else [])]


def _is_alone(module: Module, node: ast.stmt) -> bool:
    """Return whether a statement is alone on a single line, without a comment."""
    line = module.lines[node.lineno - 1]
    return node.lineno == node.end_lineno and not line[: node.col_offset].strip() and "#" not in line


def _names(function: PythonFunction) -> set[str]:
    return {node.id for node in ast.walk(function.node) if isinstance(node, ast.Name)} | {
        node.arg for node in ast.walk(function.node) if isinstance(node, ast.arg)
    }


def _name_returns(function: PythonFunction, name: str) -> Iterator[NeutralEdit]:
    module = function.module
    for node in function.own_nodes():
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Call | ast.BinOp) and _is_alone(module, node):
            text = f"{name} = {module.text(node.value)}\n{' ' * node.col_offset}return {name}"
            yield NeutralEdit("named-return", function, (module.replace(node, text),))


def _name_conditions(function: PythonFunction, name: str) -> Iterator[NeutralEdit]:
    module = function.module
    for node in function.own_nodes():
        if isinstance(node, ast.If) and isinstance(node.test, ast.BoolOp | ast.Compare):
            line = module.lines[node.lineno - 1]
            plain = re.fullmatch(r"\s*if .*:", line) and node.test.end_lineno == node.lineno
            walrus = any(isinstance(inner, ast.NamedExpr) for inner in ast.walk(node.test))
            if plain and not walrus and not line.strip().startswith("elif"):
                start, _ = module.span(node)
                text = f"{name} = {module.text(node.test)}\n{' ' * node.col_offset}if {name}"
                yield NeutralEdit("named-condition", function, (SourceEdit(start, module.span(node.test)[1], text),))


def _expand_conditionals(function: PythonFunction) -> Iterator[NeutralEdit]:
    """Rewrite `return a if c else b` as an if statement."""
    module = function.module
    for node in function.own_nodes():
        if isinstance(node, ast.Return) and isinstance(node.value, ast.IfExp) and _is_alone(module, node):
            indent, value = " " * node.col_offset, node.value
            text = (
                f"if {module.text(value.test)}:\n{indent}    return {module.text(value.body)}\n"
                f"{indent}return {module.text(value.orelse)}"
            )
            yield NeutralEdit("unfolded", function, (module.replace(node, text),))


def _invert_branches(function: PythonFunction) -> Iterator[NeutralEdit]:
    """Invert `if not a: x else: y` where both branches are one line."""
    module = function.module
    for node in function.own_nodes():
        if not isinstance(node, ast.If) or len(node.body) != 1 or len(node.orelse) != 1:
            continue
        one, two = node.body[0], node.orelse[0]
        if isinstance(two, ast.If) or not (_is_alone(module, one) and _is_alone(module, two)):
            continue
        if isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not):
            operand = module.text(node.test.operand)
            edits = (
                module.replace(node.test, operand),
                module.replace(one, module.text(two)),
                module.replace(two, module.text(one)),
            )
            yield NeutralEdit("turned", function, edits)


def _rename_local(function: PythonFunction, rng: random.Random) -> NeutralEdit | None:
    """Rename a local variable, or return None if none can be renamed safely."""
    module = function.module
    strings = fstring_node_ids(function.node)
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
    names = sorted(name for name in stored - given if name in LOCAL_NAMES and LOCAL_NAMES[name] not in _names(function))
    if not names:
        return None
    name = rng.choice(names)
    uses = [node for node in ast.walk(function.node) if isinstance(node, ast.Name) and node.id == name]
    if any(id(node) in strings for node in uses):
        return None
    return NeutralEdit("renamed-local", function, tuple(module.replace(node, LOCAL_NAMES[name]) for node in uses))
