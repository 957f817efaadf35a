"""Rewrite Python code so that it does the same and looks different: versions of the code for tests of written tests.

A test must judge what code does. One that reads the code, as text, syntax tree or bytecode, tells neither the rewritten
correct versions from each other nor, by how they are rewritten, from the wrong ones.
"""

import ast
from random import Random

OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.BitAnd, ast.BitOr, ast.LShift)
COMPARISONS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq, ast.In, ast.NotIn)
MIRRORED = {ast.Lt: ast.Gt, ast.LtE: ast.GtE, ast.Gt: ast.Lt, ast.GtE: ast.LtE, ast.Eq: ast.Eq, ast.NotEq: ast.NotEq}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def rewrite_equivalently(source: str, rng: Random, name: str = "") -> str:
    """Return a module whose functions, or only those called `name`, are rewritten without a change of behaviour."""
    tree = ast.parse(source)
    constants = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and type(node.value) is int]
    taken = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for node in list(ast.walk(tree)):
        if isinstance(node, FUNCTIONS) and name in ("", node.name):
            node.body = [_Rewrite(rng, taken).visit(statement) for statement in node.body]
            at = 1 if ast.get_docstring(node, clean=False) is not None else 0
            node.body.insert(at, _unused_code(rng, taken, constants))
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


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
