"""Mutation operators: each finds the nodes of a function to which it applies, and the edit that makes the code wrong.

The kinds are those of mutation testing and bug generators. The effect on tests is not known here: callers keep most
mutations only after seeing tests fail.
"""

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from etude.tasks.generators.code import Module, PythonFunction, SourceEdit, fstring_node_ids

Operator = Callable[[Module, ast.AST], Iterator[tuple[ast.AST, SourceEdit]]]
OPERATORS: dict[str, Operator] = {}
COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
COMPARISONS |= {"is": "is not", "is not": "is", "in": "not in", "not in": "in"}
ARITHMETIC = {ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"), ast.FloorDiv: ("//", "*")}
ARITHMETIC |= {ast.Mod: ("%", "*"), ast.BitOr: ("|", "&"), ast.BitAnd: ("&", "|")}
METHODS = {"startswith": "endswith", "endswith": "startswith", "lstrip": "rstrip", "rstrip": "lstrip", "lower": "upper"}
METHODS |= {"upper": "lower", "append": "extend", "find": "rfind", "partition": "rpartition", "rpartition": "partition"}
METHODS |= {"split": "rsplit", "rsplit": "split", "keys": "values", "strip": "lstrip"}
BUILTINS = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list"}
RAISED = {"KeyError": "IndexError", "AttributeError": "KeyError", "ValueError": "TypeError", "TypeError": "ValueError"}


@dataclass(frozen=True)
class Mutation:
    """One mutation: operator, location and edit."""

    operator: str
    function: PythonFunction
    line: int  # the line whose execution exposes the mutation
    edit: SourceEdit

    @property
    def site(self) -> str:
        return f"{self.function.file}:{self.function.qualname}:{self.edit.start}:{self.operator}"


def operator(name: str) -> Callable[[Operator], Operator]:
    def register(function: Operator) -> Operator:
        OPERATORS[name] = function
        return function

    return register


def mutations(function: PythonFunction) -> list[Mutation]:
    """Return every mutation of a function that an operator can make, nested functions excluded."""
    module = function.module
    strings = fstring_node_ids(function.node)
    found: list[Mutation] = []
    for node in function.own_nodes():
        if id(node) in strings or not hasattr(node, "lineno"):
            continue
        for name, apply in OPERATORS.items():
            for target, edit in apply(module, node):
                found.append(Mutation(name, function, getattr(target, "lineno", 0), edit))
    return found


# ------------------------------------------------------------------------------------------------- conditions


@operator("negate-condition")
def negate_condition(module: Module, node: ast.AST) -> Iterator[tuple[ast.AST, SourceEdit]]:
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        if isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not):
            yield node.test, module.replace(node.test, module.text(node.test.operand))
        elif not isinstance(node.test, ast.Compare):  # comparisons are handled by swap-comparison
            text = module.text(node.test)
            plain = isinstance(node.test, ast.Name | ast.Attribute | ast.Call | ast.Subscript)
            yield node.test, module.replace(node.test, f"not {text}" if plain else f"not ({text})")


@operator("swap-comparison")
def swap_comparison(module: Module, node: ast.AST) -> Iterator[tuple[ast.AST, SourceEdit]]:
    if not isinstance(node, ast.Compare) or len(node.ops) != 1:
        return
    start, end = module.span(node.left)[1], module.span(node.comparators[0])[0]
    between = module.data[start:end].decode()
    found = re.fullmatch(r"(\s*\)*\s*)(is\s+not|not\s+in|is|in|[<>=!]=|[<>])(\s*\(*\s*)", between)
    if found is not None:
        sign = " ".join(found[2].split())
        yield node, SourceEdit(start, end, found[1] + COMPARISONS[sign] + found[3])


@operator("drop-condition")
def drop_condition(module: Module, node: ast.AST) -> Iterator[tuple[ast.AST, SourceEdit]]:
    """Drop the last operand of `a and b`."""
    if isinstance(node, ast.BoolOp) and len(node.values) >= 2:
        first, last = module.span(node.values[-2])[1], module.span(node)[1]
        between = module.data[first : module.span(node.values[-1])[0]]
        if b"\n" not in module.data[first:last] and b"(" not in between and b")" not in between:
            yield node.values[-1], SourceEdit(first, last, "")


@operator("and-or")
def and_or(module: Module, node: ast.AST) -> Iterator[tuple[ast.AST, SourceEdit]]:
    if isinstance(node, ast.BoolOp) and len(node.values) == 2:
        start, end = module.span(node.values[0])[1], module.span(node.values[1])[0]
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        between = module.data[start:end].decode()
        if len(re.findall(rf"\b{old}\b", between)) == 1:
            yield node, SourceEdit(start, end, re.sub(rf"\b{old}\b", new, between))


@operator("skip-branch")
def skip_branch(module: Module, node: ast.AST) -> Iterator[tuple[ast.AST, SourceEdit]]:
    """Remove an `if` without `else`."""
    if isinstance(node, ast.If) and not node.orelse and module.data[module.span(node)[0] :].startswith(b"if"):
        yield from _remove_statement(module, node)


# ------------------------------------------------------------------------------------------------- values


@operator("off-by-one")
def off_by_one(module: Module, node: ast.AST) -> Iterator[tuple[ast.AST, SourceEdit]]:
    if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < 1000:
        yield node, module.replace(node, str(node.value + 1 if node.value != 1 else 0))


@operator("flip-boolean")
def flip_boolean(module: Module, node: ast.AST) -> Iterator[tuple[ast.AST, SourceEdit]]:
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        yield node, module.replace(node, str(not node.value))


@operator("swap-arithmetic")
def swap_arithmetic(module: Module, node: ast.AST) -> Iterator[tuple[ast.AST, SourceEdit]]:
    if not isinstance(node, ast.BinOp) or type(node.op) not in ARITHMETIC:
        return
    if any(isinstance(side, ast.Constant | ast.JoinedStr) and _is_text(side) for side in (node.left, node.right)):
        return
    start, end = module.span(node.left)[1], module.span(node.right)[0]
    between, (old, new) = module.data[start:end].decode(), ARITHMETIC[type(node.op)]
    if between.count(old) == 1:
        yield node, SourceEdit(start, end, between.replace(old, new))


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


@operator("swap-method")
def swap_method(module: Module, node: ast.AST) -> Iterator[tuple[ast.AST, SourceEdit]]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
        _, end = module.span(node.func)
        yield node.func, SourceEdit(end - len(node.func.attr), end, METHODS[node.func.attr])


@operator("swap-builtin")
def swap_builtin(module: Module, node: ast.AST) -> Iterator[tuple[ast.AST, SourceEdit]]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        name = node.func.id
        if name in BUILTINS and (name != "sorted" or not node.keywords):
            yield node.func, module.replace(node.func, BUILTINS[name])


@operator("swap-arguments")
def swap_arguments(module: Module, node: ast.AST) -> Iterator[tuple[ast.AST, SourceEdit]]:
    if isinstance(node, ast.Call) and len(node.args) >= 2:
        one, two = node.args[0], node.args[1]
        if all(isinstance(arg, ast.Name | ast.Attribute) for arg in (one, two)) and module.text(one) != module.text(
            two
        ):
            start, end = module.span(one)[0], module.span(two)[1]
            between = module.data[module.span(one)[1] : module.span(two)[0]].decode()
            yield node, SourceEdit(start, end, module.text(two) + between + module.text(one))


@operator("drop-keyword")
def drop_keyword(module: Module, node: ast.AST) -> Iterator[tuple[ast.AST, SourceEdit]]:
    """Drop the last keyword argument of a call."""
    if isinstance(node, ast.Call) and len(node.keywords) >= 1 and node.keywords[-1].arg and len(node.args) >= 1:
        last = node.keywords[-1]
        before = node.keywords[-2] if len(node.keywords) > 1 else node.args[-1]
        start, end = module.span(before)[1], module.span(last)[1]
        if b"#" not in module.data[start:end] and b")" not in module.data[start : module.span(last)[0]]:
            yield last.value, SourceEdit(start, end, "")


@operator("swap-branches")
def swap_branches(module: Module, node: ast.AST) -> Iterator[tuple[ast.AST, SourceEdit]]:
    """Swap the two results of `a if c else b`."""
    if isinstance(node, ast.IfExp):
        start, end = module.span(node)
        text = f"{module.text(node.orelse)} if {module.text(node.test)} else {module.text(node.body)}"
        if b"#" not in module.data[start:end] and not isinstance(node.test, ast.IfExp):
            yield node, SourceEdit(start, end, text)


# ------------------------------------------------------------------------------------------------- statements


@operator("drop-statement")
def drop_statement(module: Module, node: ast.AST) -> Iterator[tuple[ast.AST, SourceEdit]]:
    """Remove a call made for its side effect, or an assignment to an attribute or item."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await):
        yield from _remove_statement(module, node)
    elif isinstance(node, ast.Assign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if isinstance(node, ast.AugAssign) or all(isinstance(each, ast.Attribute | ast.Subscript) for each in targets):
            yield from _remove_statement(module, node)


def _remove_statement(module: Module, node: ast.stmt) -> Iterator[tuple[ast.AST, SourceEdit]]:
    """Remove the lines of a statement if it shares them with no other and does not empty its body: no trace remains."""
    start, end = module.line_span(node.lineno, node.end_lineno or node.lineno)
    first, last = module.span(node)
    alone = not module.data[start:first].strip() and not module.data[last:end].partition(b"#")[0].strip()
    if alone and len(module.enclosing_body(node)) > 1:
        yield node, SourceEdit(start, end, "")


@operator("return-nothing")
def return_nothing(module: Module, node: ast.AST) -> Iterator[tuple[ast.AST, SourceEdit]]:
    if isinstance(node, ast.Return) and node.value is not None and module.text(node.value) != "None":
        yield node, module.replace(node.value, "None")


@operator("lose-default")
def lose_default(module: Module, node: ast.AST) -> Iterator[tuple[ast.AST, SourceEdit]]:
    """Drop the default of `x.get(key, default)` and `x.pop(key, default)`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "pop"):
        none = len(node.args) == 2 and isinstance(node.args[1], ast.Constant) and node.args[1].value is None
        if len(node.args) == 2 and not node.keywords and not none:
            start, end = module.span(node.args[0])[1], module.span(node.args[1])[1]
            if b"#" not in module.data[start:end]:
                yield node, SourceEdit(start, end, "" if node.func.attr == "get" else ", None")


@operator("other-exception")
def other_exception(module: Module, node: ast.AST) -> Iterator[tuple[ast.AST, SourceEdit]]:
    """Catch or raise another exception type."""
    if isinstance(node, ast.ExceptHandler) and isinstance(node.type, ast.Name) and node.type.id in RAISED:
        yield node, module.replace(node.type, RAISED[node.type.id])
    raised = node.exc.func if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) else None
    if isinstance(raised, ast.Name) and raised.id in RAISED:
        yield node, module.replace(raised, RAISED[raised.id])


@operator("break-continue")
def break_continue(module: Module, node: ast.AST) -> Iterator[tuple[ast.AST, SourceEdit]]:
    if isinstance(node, ast.Break):
        yield node, module.replace(node, "continue")
    elif isinstance(node, ast.Continue):
        yield node, module.replace(node, "break")


@operator("shorten")
def shorten(module: Module, node: ast.AST) -> Iterator[tuple[ast.AST, SourceEdit]]:
    """Skip the first element of a loop."""
    if isinstance(node, ast.For) and isinstance(node.iter, ast.Name | ast.Attribute):
        yield node, module.replace(node.iter, f"list({module.text(node.iter)})[1:]")


@operator("wrong-name")
def wrong_name(module: Module, node: ast.AST) -> Iterator[tuple[ast.AST, SourceEdit]]:
    """Compare a name with itself instead of the other name."""
    if isinstance(node, ast.Compare) and len(node.comparators) == 1:
        one, two = node.left, node.comparators[0]
        if isinstance(one, ast.Name) and isinstance(two, ast.Name) and one.id != two.id:
            yield node, module.replace(two, one.id)
