"""Legacy Python patterns that migrations replace, and what replaces them; for generator and verifier.

A legacy pattern is recognised in any spelling of the same operation: the operator, its method, a function of
`operator`, an alias. `modern_forms` counts what a migration puts in its place, so that code which merely hides the old
form from the patterns is not migrated. `lookups` counts where a name is looked up at run time: neither a migration nor
a rename needs more of that, and it reaches an old form or name in spellings without end.
"""

from __future__ import annotations

import ast
import re

from etude.syntax import parse_tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TYPING = ("List", "Dict", "Set", "FrozenSet", "Tuple", "Type", "Optional", "Union")
BUILTIN_GENERICS = ("list", "dict", "set", "frozenset", "tuple", "type")
OLD_ERRORS = ("IOError", "EnvironmentError")
# By these a name is looked up that the code does not have to spell.
LOOKUP_FUNCTIONS = (
    "getattr",
    "setattr",
    "globals",
    "locals",
    "exec",
    "__import__",
    "__builtins__",
    "import_module",
    "attrgetter",
    "methodcaller",
)
LOOKUP_NAMES = (*LOOKUP_FUNCTIONS, "vars", "eval", "compile", "builtins")
LOOKUP_METHODS = ("__getattr__", "__getattribute__")
LOOKUP_ATTRIBUTES = (*LOOKUP_FUNCTIONS, *LOOKUP_METHODS, "__dict__", "__subclasses__")
TEST_PATH = re.compile(r"(^|/)(tests?/|test_[^/]*$|conftest\.py$|[^/]*_test\.py$)")
FORMAT_METHODS = ("format", "format_map", "vformat", "substitute", "safe_substitute")


# ------------------------------------------------------------------------------------------------- legacy forms


def text_formatting(tree: ast.AST) -> Iterator[ast.AST]:
    """`"..." % x`, `x.format(...)` and other ways to fill in a text, without fields: replaced by f-strings"""
    texts = _names_of(tree, _is_string)
    yield from _spellings(tree, ("__mod__", "__rmod__", "__imod__"), ("mod", "imod"))
    for node in ast.walk(tree):
        if isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, ast.Mod):
            left = node.left if isinstance(node, ast.BinOp) else node.target
            if _is_string(left) or (isinstance(left, ast.Name) and left.id in texts):
                yield node
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            sides = (node.left, node.right)
            if any(map(_is_string, sides)) and not any(map(_fields, ast.walk(node))):
                yield node
        elif (
            (isinstance(node, ast.Attribute) and node.attr == "join" and _is_string(node.value))
            or (isinstance(node, ast.Attribute) and node.attr in FORMAT_METHODS)
            or (isinstance(node, ast.Name) and node.id == "format" and isinstance(node.ctx, ast.Load))
        ):
            yield node


def typing_names(tree: ast.AST) -> Iterator[ast.AST]:
    """`typing.List[int]`, `Optional[str]`, quoted or not: replaced by builtins and `|`"""
    modules, known = {"typing", "typing_extensions"}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname for alias in node.names if alias.name in modules and alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module in ("typing", "typing_extensions"):
            known |= {alias.asname or alias.name for alias in node.names if alias.name in TYPING}
    for part in (tree, *_quoted_annotations(tree)):
        for node in ast.walk(part):
            value = node.value if isinstance(node, ast.Subscript) else None
            if (isinstance(value, ast.Name) and value.id in known) or (
                isinstance(value, ast.Attribute) and value.attr in TYPING and ast.unparse(value.value) in modules
            ):
                yield node
    yield from _spellings(tree, TYPING, ())


def _quoted_annotations(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the trees of annotations that are texts."""
    for node in ast.walk(tree):
        given = getattr(node, "annotation", None) or getattr(node, "returns", None)
        for part in ast.walk(given) if given is not None else ():
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                try:
                    parsed = parse_tree(part.value.strip(), mode="eval")
                except (SyntaxError, ValueError):
                    continue
                for inner in ast.walk(parsed):
                    if hasattr(inner, "lineno"):
                        inner.lineno = part.lineno
                yield parsed


def classes(tree: ast.AST) -> Iterator[ast.AST]:
    """`class A(object)` and `super(A, self)`"""
    objects = _names_of(tree, lambda value: isinstance(value, ast.Name) and value.id == "object") | {"object"}
    plain = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call) and not node.args}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            if any(_last_name(base) in objects for base in node.bases):
                yield node
        elif isinstance(node, ast.Name) and node.id == "super" and id(node) not in plain:
            yield node


def literals(tree: ast.AST) -> Iterator[ast.AST]:
    """`dict()`, `list()`, `set([...])`: replaced by literals"""
    kinds = ("dict", "list", "tuple", "set")
    aliases = {
        name: kind
        for kind in kinds
        for name in (kind, *_names_of(tree, lambda value, kind=kind: _is_name(value, kind)))  # type: ignore[misc]
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or node.keywords or len(node.args) > 1:
            continue
        kind = aliases.get(_last_name(node.func), "")
        argument = node.args[0] if node.args else None
        displayed = isinstance(argument, (ast.List, ast.Tuple, ast.Dict, ast.Set))
        if (kind == "set" and isinstance(argument, (ast.List, ast.Tuple))) or (
            kind and kind != "set" and (argument is None or (displayed and _is_empty(argument)))
        ):
            yield node


def _is_empty(node: ast.expr | None) -> bool:
    return not (node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", None))


def os_errors(tree: ast.AST) -> Iterator[ast.AST]:
    """`IOError`, `EnvironmentError`: old names of OSError"""
    yield from _spellings(tree, OLD_ERRORS, ())
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in OLD_ERRORS:
            yield node


def maps(tree: ast.AST) -> Iterator[ast.AST]:
    """`list(map(lambda ...))` and `list(filter(lambda ...))`: replaced by comprehensions"""
    functions = _names_of(tree, lambda value: isinstance(value, ast.Lambda))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _last_name(node.func) in ("map", "filter") and node.args:
            first = node.args[0]
            if isinstance(first, ast.Lambda) or (isinstance(first, ast.Name) and first.id in functions):
                yield node


def none_comparisons(tree: ast.AST) -> Iterator[ast.AST]:
    """`x == None`"""
    nothing = _names_of(tree, _is_none)
    yield from _spellings(tree, ("__eq__", "__ne__"), ("eq", "ne"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            compared = [each for side in sides for each in ([side] if not _is_display(side) else side.elts)]  # type: ignore[attr-defined]
            old = any(isinstance(op, (ast.Eq, ast.NotEq, ast.In, ast.NotIn)) for op in node.ops)
            if old and any(_is_none(each) or (isinstance(each, ast.Name) and each.id in nothing) for each in compared):
                yield node


def type_comparisons(tree: ast.AST) -> Iterator[ast.AST]:
    """`type(x) == y`"""
    types = _names_of(tree, _is_type_of)
    yield from _spellings(tree, ("__eq__", "__ne__"), ("eq", "ne", "is_", "is_not"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(_is_type_of(side) or (isinstance(side, ast.Name) and side.id in types) for side in sides):
                yield node


# ------------------------------------------------------------------------------------------------- spellings


def _spellings(tree: ast.AST, attributes: tuple[str, ...], functions: tuple[str, ...]) -> Iterator[ast.AST]:
    """Yield methods with these names, texts that name them, and functions of the module operator."""
    modules, imported = {"operator", "_operator"}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname for alias in node.names if alias.name in modules and alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module in ("operator", "_operator"):
            wanted = (*functions, *attributes)
            imported |= {alias.asname or alias.name for alias in node.names if alias.name in wanted}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            of_operator = node.attr in functions and ast.unparse(node.value) in modules
            if of_operator or (node.attr in attributes and node.attr not in TYPING):
                yield node
        elif (isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in attributes) or (
            isinstance(node, ast.Name) and node.id in imported and isinstance(node.ctx, ast.Load)
        ):
            yield node


def _names_of(tree: ast.AST, is_value: Callable[[ast.expr], bool]) -> set[str]:
    """Return the variables that are only ever assigned values of a kind."""
    wanted: set[str] = set()
    others: set[str] = set()
    for node in ast.walk(tree):
        pairs: list[tuple[ast.expr, ast.expr]] = []
        if isinstance(node, ast.Assign):
            pairs = [(target, node.value) for target in node.targets]
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            pairs = [(node.target, node.value)]
        for target, value in pairs:
            if isinstance(target, ast.Name):
                (wanted if is_value(value) else others).add(target.id)
    return wanted - others


def _last_name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _is_display(node: ast.AST) -> bool:
    return isinstance(node, (ast.Tuple, ast.List, ast.Set))


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_type_of(node: ast.AST) -> bool:
    """Whether an expression is `type(x)` or `x.__class__`."""
    if isinstance(node, ast.Attribute):
        return node.attr == "__class__"
    return isinstance(node, ast.Call) and _is_name(node.func, "type") and len(node.args) == 1


def _is_string(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


# ------------------------------------------------------------------------------------------------- modern forms


def _fields(node: ast.AST) -> bool:
    return isinstance(node, ast.FormattedValue)


def _modern_annotation(node: ast.AST) -> bool:
    generic = isinstance(node, ast.Subscript) and _last_name(node.value) in BUILTIN_GENERICS
    return generic or (isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr))


def _modern_class(node: ast.AST) -> bool:
    plain = isinstance(node, ast.ClassDef) and not node.bases
    return plain or (isinstance(node, ast.Call) and _is_name(node.func, "super") and not node.args)


def _literal(node: ast.AST) -> bool:
    return isinstance(node, ast.Set) or (isinstance(node, (ast.Dict, ast.List, ast.Tuple)) and _is_empty(node))


def _new_error(node: ast.AST) -> bool:
    return _is_name(node, "OSError")


def _comprehension(node: ast.AST) -> bool:
    return isinstance(node, (ast.ListComp, ast.SetComp))


def _identity_with_none(node: ast.AST) -> bool:
    identity = isinstance(node, ast.Compare) and any(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops)
    return identity and any(_is_none(each) for each in ast.iter_child_nodes(node))


def _isinstance(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and _is_name(node.func, "isinstance")


# family -> nodes of the legacy form, and whether a node is of the modern form
PATTERNS: dict[str, tuple[Callable[[ast.AST], Iterator[ast.AST]], Callable[[ast.AST], bool]]] = {
    "percent": (text_formatting, _fields),
    "str-format": (text_formatting, _fields),
    "typing": (typing_names, _modern_annotation),
    "classes": (classes, _modern_class),
    "literals": (literals, _literal),
    "os-errors": (os_errors, _new_error),
    "maps": (maps, _comprehension),
    "text-formatting": (text_formatting, _fields),
    "none-comparisons": (none_comparisons, _identity_with_none),
    "type-comparisons": (type_comparisons, _isinstance),
}


def lines_with(family: str, tree: ast.AST) -> list[int]:
    """Return the lines of a file that have a legacy pattern."""
    return sorted(getattr(node, "lineno", 0) for node in PATTERNS[family][0](tree))


def modern_forms(family: str, tree: ast.AST) -> int:
    """Return how often a file has what replaces the legacy pattern."""
    return sum(map(PATTERNS[family][1], ast.walk(tree)))


def lookups(tree: ast.AST) -> int:
    """Return how often a file looks up names at run time, or defines how its own are looked up."""
    found = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found += node.id in LOOKUP_NAMES
        elif isinstance(node, ast.Attribute):
            of_sys = node.attr == "modules" and _is_name(node.value, "sys")
            found += node.attr in LOOKUP_ATTRIBUTES or of_sys
        elif isinstance(node, ast.FunctionDef):
            found += node.name in LOOKUP_METHODS
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            of_builtins = isinstance(node, ast.ImportFrom) and node.module in ("builtins", "operator")
            wanted = (*LOOKUP_FUNCTIONS, "builtins", *(LOOKUP_NAMES if of_builtins else ()))
            found += sum(alias.name in wanted for alias in node.names)
    return found
