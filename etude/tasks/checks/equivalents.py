"""Rewrite Python code so that it does the same and looks different: versions of the code for tests of written tests.

A test must judge what code does. One that reads the code, as text, syntax tree or bytecode, tells neither the rewritten
correct versions from each other nor, by how they are rewritten, from the wrong ones.
"""

import ast
import copy
from collections.abc import Sequence
from random import Random

from etude.syntax import parse_tree

OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.BitAnd, ast.BitOr, ast.LShift)
COMPARISONS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq, ast.In, ast.NotIn)
MIRRORED = {ast.Lt: ast.Gt, ast.LtE: ast.GtE, ast.Gt: ast.Lt, ast.GtE: ast.LtE, ast.Eq: ast.Eq, ast.NotEq: ast.NotEq}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def rewrite_equivalently(
    source: str, versions: Sequence[str], rng: Random, name: str = "", *, plain: bool = False
) -> str:
    """Return a module whose functions, or only those called `name`, are rewritten without a change of behaviour.

    `versions` are the sources of all versions of the module. Each rewritten function has the code of all of them, in
    branches that never run, so that no version lacks a name, constant or operator that another one has. With `plain`
    it takes values of built-in types only: an object that records how it is used shows the code, not its result."""
    tree = parse_tree(source)
    trees = [parse_tree(each) for each in versions]
    constants = sorted(
        {node.value for each in trees for node in ast.walk(each) if _is_integer(node)}  # type: ignore[attr-defined]
    )
    taken = {node.id for each in (tree, *trees) for node in ast.walk(each) if isinstance(node, ast.Name)}
    for path, node in _functions(tree):
        if name in ("", node.name):
            others = [dict(_functions(each)).get(path) for each in trees]
            node.body = [_Rewrite(rng, taken).visit(statement) for statement in node.body]
            at = 1 if ast.get_docstring(node, clean=False) is not None else 0
            node.body[at:at] = [_unused_code(rng, taken, constants), *_unused_bodies(rng, others)]
            if plain:
                node.body[at:at] = _plain_arguments(node, rng, taken)
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


# Without the names of built-in functions, which a test can replace in the module.
PLAIN_ARGUMENTS = """
def CHECK(VALUE, KIND=(0).__class__.__class__):
    if KIND(VALUE) in ([].__class__, ().__class__, {0}.__class__, {}.__class__):
        for PART in [*VALUE, *VALUE.values()] if KIND(VALUE) is {}.__class__ else VALUE:
            CHECK(PART)
    elif KIND(VALUE) not in (0 .__class__, 0.0.__class__, "".__class__, b"".__class__, True.__class__, None.__class__):
        {}[VALUE.__class__]
CHECK([])
"""


def _plain_arguments(node: ast.FunctionDef | ast.AsyncFunctionDef, rng: Random, taken: set[str]) -> list[ast.stmt]:
    """Return statements that raise KeyError if an argument is, or contains, an object that is no plain value."""
    text = PLAIN_ARGUMENTS
    for word in ("CHECK", "VALUE", "KIND", "PART"):
        text = text.replace(word, _draw_name(rng, taken))
    *statements, call = parse_tree(text).body
    given = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    call.value.args[0].elts = [ast.Name(name, ast.Load()) for name in given]
    return [*statements, call]


def _functions(tree: ast.AST) -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Return the functions of a tree with names that are the same in all versions of a module."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [(f"{node.name} {number}", node) for number, node in enumerate(found)]


def _unused_bodies(rng: Random, functions: Sequence[ast.FunctionDef | ast.AsyncFunctionDef | None]) -> list[ast.stmt]:
    """Return the bodies of functions, some twice, in branches that never run; none if that could change the meaning of
    a name."""
    known = [each for each in functions if each is not None]
    if len({_assigned(each) for each in known}) != 1 or None in map(_assigned, known):
        return []
    chosen = [each for each in known for _ in range(rng.randint(1, 2))]
    rng.shuffle(chosen)
    found: list[ast.stmt] = []
    for each in chosen:
        at = 1 if ast.get_docstring(each, clean=False) is not None else 0
        body = copy.deepcopy(each.body[at:]) or [ast.Pass()]
        found.append(ast.If(ast.UnaryOp(ast.Not(), ast.Name("__name__", ast.Load())), body, []))
    return found


def _assigned(function: ast.FunctionDef | ast.AsyncFunctionDef) -> frozenset[str] | None:
    """Return the local variables of a function; None if it declares some to be of another scope, or defines others."""
    names: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Global | ast.Nonlocal) or (
            isinstance(node, (*FUNCTIONS, ast.ClassDef)) and node is not function
        ):
            return None
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Yield | ast.YieldFrom):
            names.add("yield")
        elif isinstance(node, ast.ExceptHandler) and node.name:
            names.add(node.name)
    return frozenset(names)


def _is_integer(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int


class _Rewrite(ast.NodeTransformer):
    """Mirrors comparisons, exchanges branches and names results, at random; leaves nested functions as they are."""

    def __init__(self, rng: Random, taken: set[str]) -> None:
        self.rng, self.result = rng, _draw_name(rng, taken)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        sides = [node.left, *node.comparators]
        plain = len(sides) == 2 and all(isinstance(side, ast.Name | ast.Constant) for side in sides)
        mirrored = MIRRORED.get(type(node.ops[0]))
        if plain and mirrored is not None and self.rng.random() < 0.5:
            return ast.copy_location(ast.Compare(sides[1], [mirrored()], [sides[0]]), node)
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        self.generic_visit(node)
        if node.orelse and self.rng.random() < 0.5:
            node.test, node.body, node.orelse = ast.UnaryOp(ast.Not(), node.test), node.orelse, node.body
        return node

    def visit_Return(self, node: ast.Return) -> ast.AST:
        self.generic_visit(node)
        if node.value is None:
            return node
        always: ast.expr = ast.Constant(True)
        named = ast.Assign([ast.Name(self.result, ast.Store())], node.value)
        returned = ast.Return(ast.Name(self.result, ast.Load()))
        return ast.copy_location(ast.If(always, [named, returned], []), node)


def _unused_code(rng: Random, taken: set[str], constants: list[int]) -> ast.stmt:
    """Return statements that never run, with operators, comparisons and constants like those of real code."""
    names = [_draw_name(rng, taken) for _ in range(rng.randint(1, 3))]
    body: list[ast.stmt] = [ast.Assign([ast.Name(name, ast.Store())], _number(rng, constants)) for name in names]
    for _ in range(rng.randint(2, 5)):
        left, right = (ast.Name(rng.choice(names), ast.Load()) for _ in range(2))
        value = ast.BinOp(left, rng.choice(OPERATORS)(), rng.choice([right, _number(rng, constants)]))
        body.append(ast.Assign([ast.Name(rng.choice(names), ast.Store())], value))
    operator, among = rng.choice(COMPARISONS), ast.Tuple([_number(rng, constants)], ast.Load())
    other = among if operator in (ast.In, ast.NotIn) else _number(rng, constants)
    compared = ast.Compare(ast.Name(rng.choice(names), ast.Load()), [operator()], [other])
    body.append(ast.If(compared, [ast.Assign([ast.Name(names[0], ast.Store())], _number(rng, constants))], []))
    return ast.If(ast.UnaryOp(ast.Not(), ast.Name("__name__", ast.Load())), body, [])


def _number(rng: Random, constants: list[int]) -> ast.expr:
    return ast.Constant(rng.choice([*constants, rng.randint(0, 20), rng.randint(0, 20)]))


def _draw_name(rng: Random, taken: set[str]) -> str:
    while (name := f"{rng.choice(('part', 'extra', 'value', 'step', 'other'))}_{rng.randint(2, 99)}") in taken:
        pass
    taken.add(name)
    return name
