"""Taking a name out of a code base: its definition, what only it used, imports and lists that have it, docs, tests."""

import ast
import re
import tokenize
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from etude.tasks.generators.code import (
    Definition,
    Edit,
    FunctionNode,
    Module,
    definitions,
    mentions,
    parse,
    span_lines,
    spliced,
    without_definitions,
)
from etude.tasks.generators.failure_report import test_name, test_text
from etude.tasks.generators.repository import Repository

PROSE = (".rst", ".md", ".txt")


@dataclass(frozen=True)
class Target:
    """A definition of the product: where it is, and what it is called there."""

    file: str
    node: Definition
    owner: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def qualname(self) -> str:
        return ".".join([*self.owner, self.node.name])

    @property
    def lines(self) -> range:
        return span_lines(self.node)


@dataclass(frozen=True)
class Place:
    """One use of a name: the file, the line, and what kind of use it is."""

    file: str
    line: int
    kind: str  # import, listed, entry, code


def targets(repository: Repository) -> list[Target]:
    """Functions and classes at the top of modules, and methods of classes there."""
    return [
        Target(module.path, node, owner)
        for module in repository.modules
        for node, owner in definitions(module.tree)
        if not owner or (len(owner) == 1 and isinstance(node, FunctionNode) and _is_class(module, owner[0]))
    ]


def _is_class(module: Module, name: str) -> bool:
    return any(node.name == name and not owner for node, owner in module.classes)


def python_files(repository: Repository, *, tests: bool) -> list[str]:
    """The product's Python files and stubs, or those of the tests."""
    product = {*repository.source.modules, *(path for path in repository.files if path.endswith(".pyi"))}
    if not tests:
        return sorted(path for path in product & repository.python if not repository.source.is_test_path(path))
    return [module.path for module in repository.test_modules]


def uses(repository: Repository, name: str, *, tests: bool = False) -> list[Place]:
    """Where the product (or the tests) has a name, its definitions left out."""
    found: list[Place] = []
    for file in python_files(repository, tests=tests):
        if name.encode() not in repository.files[file]:
            continue
        module = repository.module(file)
        defined = {node.lineno for node, _ in definitions(module.tree) if node.name == name}
        imports, lists, entries = _import_lines(module), _listed_lines(module, name), _entry_lines(module, name)
        for token in module.tokens:
            if token.type == tokenize.NAME and token.string == name:
                line = token.start[0]
                if line in defined and re.match(r"\s*(async\s+)?(def|class)\b", token.line):
                    continue
                kind = "import" if line in imports else "entry" if line in entries else "code"
                found.append(Place(file, line, kind))
            elif token.type == tokenize.STRING and token.start[0] in lists and name in token.string:
                found.append(Place(file, token.start[0], "listed"))
    return found


def _import_lines(module: Module) -> set[int]:
    found: set[int] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom):
            found.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return found


def _listed_lines(module: Module, name: str) -> set[int]:
    return {item.lineno for items in _all_lists(module) for item in items if _is_name(item, name)}


def _all_lists(module: Module) -> list[list[ast.expr]]:
    found = []
    for node in module.tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and target.id == "__all__" and isinstance(value, ast.List | ast.Tuple):
            found.append(value.elts)
    return found


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Constant) and node.value == name


def _entries(module: Module, name: str) -> list[tuple[ast.Dict, int]]:
    """Entries of tables at the top of a module whose value is the name alone."""
    found = []
    for node in module.tree.body:
        value = getattr(node, "value", None)
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(value, ast.Dict) and len(value.values) > 1:
            for number, item in enumerate(value.values):
                if isinstance(item, ast.Name) and item.id == name and isinstance(value.keys[number], ast.Constant):
                    found.append((value, number))
    return found


def _entry_lines(module: Module, name: str) -> set[int]:
    return {table.values[number].lineno for table, number in _entries(module, name)}


def registered_as(repository: Repository, target: Target) -> list[tuple[str, str]]:
    """Tables that have a definition under a key: (table, key)."""
    module = repository.module(target.file)
    found = []
    for node in module.tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            for table, number in _entries(module, target.name):
                key = table.keys[number]
                if table is node.value and isinstance(key, ast.Constant):
                    found.append((node.targets[0].id, str(key.value)))
    return found


# ------------------------------------------------------------------------------------------------- taking out


def doomed_with(repository: Repository, target: Target) -> list[Target]:
    """A definition, and others of its module that nothing but what goes uses."""
    doomed = [target]
    others = [each for each in targets(repository) if each.file == target.file and not each.owner and each != target]
    growing = True
    while growing:
        growing = False
        for other in others:
            if other in doomed or repository.module(target.file).names.get(other.name, 0) < 2:
                continue
            inside = [place for place in uses(repository, other.name) if not _within(place, [*doomed, other])]
            if not inside and not uses(repository, other.name, tests=True):
                doomed.append(other)
                growing = True
    return doomed


def _within(place: Place, spans: Iterable[Target]) -> bool:
    return any(place.file == each.file and place.line in each.lines for each in spans)


def free_standing(repository: Repository, doomed: Collection[Target]) -> bool:
    """Whether the rest of the product only imports, lists and registers what goes."""
    for target in doomed:
        left = [place for place in uses(repository, target.name) if not _within(place, doomed)]
        if any(place.kind == "code" for place in left):
            return False
    return True


def without_names(path: str, data: bytes, names: set[str]) -> bytes:
    """A Python file whose imports, __all__ and tables do not have names any more."""
    module = parse(path, data)
    imports = [node for node in ast.walk(module.tree) if isinstance(node, ast.ImportFrom)]
    edits = [_import_without(module, node, names) for node in imports if names & {alias.name for alias in node.names}]
    for items in _all_lists(module):
        edits += [_item_out(module, item) for item in items if isinstance(item, ast.Constant) and item.value in names]
    for name in names:
        for table, number in _entries(module, name):
            key = table.keys[number]
            assert key is not None
            edits.append(_item_out(module, table.values[number], start=module.span(key)[0]))
    return spliced(data, edits)


def _import_without(module: Module, node: ast.ImportFrom, names: set[str]) -> Edit:
    kept = [alias for alias in node.names if alias.name not in names]
    start, end = module.line_span(node.lineno, node.end_lineno or node.lineno)
    indent = " " * node.col_offset
    if not kept:
        alone = len(module.body_around(node)) == 1
        return Edit(start, end, f"{indent}pass\n" if alone else "")
    words = [alias.name + (f" as {alias.asname}" if alias.asname else "") for alias in kept]
    source = "." * node.level + (node.module or "")
    if node.end_lineno == node.lineno:
        return Edit(start, end, f"{indent}from {source} import {', '.join(words)}\n")
    lines = "".join(f"{indent}    {word},\n" for word in words)
    return Edit(start, end, f"{indent}from {source} import (\n{lines}{indent})\n")


def _item_out(module: Module, item: ast.expr, start: int | None = None) -> Edit:
    """One element of a display with its comma; with its line, if it has one of its own."""
    first, last = module.span(item)
    first = first if start is None else start
    tail = re.match(rb"[ \t]*,?[ \t]*(#[^\n]*)?", module.data[last:])
    last += tail.end() if tail else 0
    begin = module.data.rfind(b"\n", 0, first) + 1
    if not module.data[begin:first].strip() and module.data[last : last + 1] == b"\n":
        return Edit(begin, last + 1, "")
    return Edit(first, last, "")


def prose_without(text: str, names: Collection[str]) -> str:
    """A document without the paragraphs that have a name, nor what is indented below them."""
    kept: list[str] = []
    dropping = -1
    for block in re.split(r"(\n[ \t]*\n+)", text):
        if not block.strip():
            if dropping < 0:
                kept.append(block)
            continue
        indent = len(block.strip("\n")) - len(block.strip("\n").lstrip(" "))
        if dropping >= 0 and indent > dropping:
            continue
        dropping = -1
        if any(mentions(block, name) for name in names):
            dropping = indent
            continue
        kept.append(block if not kept or not kept[-1].strip() else f"\n\n{block}")
    return "".join(kept)


def removed(repository: Repository, doomed: Collection[Target]) -> dict[str, bytes | None]:
    """The product and its documents without what is doomed."""
    names = {target.name for target in doomed}
    changes: dict[str, bytes | None] = {}
    for file in python_files(repository, tests=False):
        data = repository.files[file]
        if not any(name.encode() in data for name in names):
            continue
        here = {target.qualname for target in doomed if target.file == file or file == f"{target.file}i"}
        stubs = {target.qualname for target in doomed} if file.endswith(".pyi") else set()
        after = without_names(file, without_definitions(data, file, here | stubs), _imported(doomed))
        if after != data:
            changes[file] = after
    for path, data in repository.files.items():
        if path.endswith(PROSE) and any(name.encode() in data for name in names):
            text = data.decode("utf-8", "replace")
            after_text = prose_without(text, names)
            if after_text != text:
                changes[path] = after_text.encode()
    return changes


def _imported(doomed: Collection[Target]) -> set[str]:
    return {target.name for target in doomed if not target.owner}


def tests_about(repository: Repository, doomed: Collection[Target], ran: Collection[str]) -> set[str]:
    """Tests that go with what is doomed: those that run it, and those that have its name."""
    names = {target.name for target in doomed}
    texts: dict[tuple[str, str], bool] = {}
    found = set(ran)
    for test in repository.seconds:
        key = test_name(test)
        if key not in texts:
            texts[key] = any(mentions(test_text(repository, test), name) for name in names)
        if texts[key]:
            found.add(test)
    return found


def tests_without(
    repository: Repository, doomed: Collection[Target], gone: Collection[str]
) -> Mapping[str, bytes | None] | None:
    """Test files without these tests and without imports of what is doomed; None if more of it is left in them."""
    by_file: dict[str, set[str]] = {}
    for test in gone:
        file, name = test_name(test)
        by_file.setdefault(file, set()).add(name)
    names = _imported(doomed)
    changes: dict[str, bytes | None] = {}
    for module in repository.test_modules:
        if module.path not in by_file and not any(name in module.names for name in names):
            continue
        left = {test_name(id)[1] for id in repository.seconds if test_name(id)[0] == module.path}
        if module.path in by_file and not left - by_file[module.path]:
            changes[module.path] = None
            continue
        data = without_definitions(module.data, module.path, by_file.get(module.path, set()))
        data = without_names(module.path, data, names)
        if any(name in parse(module.path, data).names for name in names):
            return None
        changes[module.path] = data
    return changes
