"""Remove a definition from a code base with its helpers, imports, exports, documentation and tests."""

import ast
import re
import tokenize
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from etude.tasks.generators.code import (
    Definition,
    FunctionNode,
    Module,
    SourceEdit,
    apply_edits,
    definitions,
    import_text,
    mentions,
    parse,
    remove_definitions,
    span_lines,
)
from etude.tasks.generators.failure_report import names_by_file, test_name, test_text
from etude.tasks.generators.repository import Repository

PROSE_SUFFIXES = (".rst", ".md", ".txt")


@dataclass(frozen=True)
class Target:
    """A function, class or method of the product (the code outside the tests)."""

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

    @property
    def kind(self) -> str:
        return "class" if isinstance(self.node, ast.ClassDef) else "method" if self.owner else "function"


@dataclass(frozen=True)
class NameUse:
    """One use of a name: file, line, and kind of use."""

    file: str
    line: int
    kind: str  # import, listed, entry, code


def targets(repository: Repository) -> list[Target]:
    """Return the top-level functions and classes of all modules, and the methods of these classes."""
    return [
        Target(module.path, node, owner)
        for module in repository.modules
        for node, owner in definitions(module.tree)
        if not owner or (len(owner) == 1 and isinstance(node, FunctionNode) and _is_class(module, owner[0]))
    ]


def _is_class(module: Module, name: str) -> bool:
    return any(node.name == name and not owner for node, owner in module.classes)


def python_files(repository: Repository, *, tests: bool) -> list[str]:
    """Return the Python files and stubs of the product, or the Python files of the tests."""
    product = {*repository.source.modules, *(path for path in repository.files if path.endswith(".pyi"))}
    if not tests:
        return sorted(path for path in product & repository.python_paths if not repository.source.is_test_path(path))
    return [module.path for module in repository.test_modules]


def uses(repository: Repository, name: str, *, tests: bool = False) -> list[NameUse]:
    """Return the uses of a name in the product or in the tests, without its definitions."""
    found: list[NameUse] = []
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
                found.append(NameUse(file, line, kind))
            elif token.type == tokenize.STRING and token.start[0] in lists and name in token.string:
                found.append(NameUse(file, token.start[0], "listed"))
    return found


def _import_lines(module: Module) -> set[int]:
    found: set[int] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom):
            found.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return found


def _listed_lines(module: Module, name: str) -> set[int]:
    return {item.lineno for items in _dunder_all_lists(module) for item in items if _is_name_string(item, name)}


def _dunder_all_lists(module: Module) -> list[list[ast.expr]]:
    found = []
    for node in module.tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and target.id == "__all__" and isinstance(value, ast.List | ast.Tuple):
            found.append(value.elts)
    return found


def _is_name_string(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Constant) and node.value == name


def _table_entries(module: Module, name: str) -> list[tuple[ast.Dict, int]]:
    """Return the entries of top-level dict displays whose value is just the name."""
    found = []
    for node in module.tree.body:
        value = getattr(node, "value", None)
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(value, ast.Dict) and len(value.values) > 1:
            for number, item in enumerate(value.values):
                if isinstance(item, ast.Name) and item.id == name and isinstance(value.keys[number], ast.Constant):
                    found.append((value, number))
    return found


def _entry_lines(module: Module, name: str) -> set[int]:
    return {table.values[number].lineno for table, number in _table_entries(module, name)}


def registrations(repository: Repository, target: Target) -> list[tuple[str, str]]:
    """Return the (table, key) pairs under which a definition is registered in its module."""
    module = repository.module(target.file)
    found = []
    for node in module.tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            for table, number in _table_entries(module, target.name):
                key = table.keys[number]
                if table is node.value and isinstance(key, ast.Constant):
                    found.append((node.targets[0].id, str(key.value)))
    return found


# ------------------------------------------------------------------------------------------------- removal


def with_helpers(repository: Repository, target: Target) -> list[Target]:
    """Return a definition and those of its module that only it and its helpers use."""
    removed = [target]
    others = [each for each in targets(repository) if each.file == target.file and not each.owner and each != target]
    changed = True
    while changed:
        changed = False
        for other in others:
            if other in removed or repository.module(target.file).names.get(other.name, 0) < 2:
                continue
            outside_uses = [use for use in uses(repository, other.name) if not _is_within(use, [*removed, other])]
            if not outside_uses and not uses(repository, other.name, tests=True):
                removed.append(other)
                changed = True
    return removed


def _is_within(use: NameUse, spans: Iterable[Target]) -> bool:
    return any(use.file == each.file and use.line in each.lines for each in spans)


def is_removable(repository: Repository, removed: Collection[Target]) -> bool:
    """Return whether the rest of the product only imports, exports or registers the removed definitions."""
    for target in removed:
        left = [use for use in uses(repository, target.name) if not _is_within(use, removed)]
        if any(use.kind == "code" for use in left):
            return False
    return True


def remove_names(path: str, data: bytes, names: set[str]) -> bytes:
    """Return a Python file without these names in its imports, `__all__` and tables."""
    module = parse(path, data)
    imports = [node for node in ast.walk(module.tree) if isinstance(node, ast.ImportFrom)]
    edits = [_import_removal(module, node, names) for node in imports if names & {alias.name for alias in node.names}]
    for items in _dunder_all_lists(module):
        edits += [
            _item_removal(module, item) for item in items if isinstance(item, ast.Constant) and item.value in names
        ]
    for name in names:
        for table, number in _table_entries(module, name):
            key = table.keys[number]
            assert key is not None
            edits.append(_item_removal(module, table.values[number], start=module.span(key)[0]))
    return apply_edits(data, edits)


def _import_removal(module: Module, node: ast.ImportFrom, names: set[str]) -> SourceEdit:
    kept = [alias for alias in node.names if alias.name not in names]
    start, end = module.line_span(node.lineno, node.end_lineno or node.lineno)
    indent = " " * node.col_offset
    if not kept:
        alone = len(module.enclosing_body(node)) == 1
        return SourceEdit(start, end, f"{indent}pass\n" if alone else "")
    return SourceEdit(start, end, import_text(node, kept, indent, wrap=node.end_lineno != node.lineno) + "\n")


def _item_removal(module: Module, item: ast.expr, start: int | None = None) -> SourceEdit:
    """Return the edit that removes an element of a display with its comma, and its line if it is alone on it."""
    first, last = module.span(item)
    first = first if start is None else start
    tail = re.match(rb"[ \t]*,?[ \t]*(#[^\n]*)?", module.data[last:])
    last += tail.end() if tail else 0
    line_start = module.data.rfind(b"\n", 0, first) + 1
    if not module.data[line_start:first].strip() and module.data[last : last + 1] == b"\n":
        return SourceEdit(line_start, last + 1, "")
    return SourceEdit(first, last, "")


def remove_paragraphs(text: str, names: Collection[str]) -> str:
    """Return a document without the paragraphs that mention a name and the blocks indented below them."""
    kept: list[str] = []
    dropped_indent = -1
    for block in re.split(r"(\n[ \t]*\n+)", text):
        if not block.strip():
            if dropped_indent < 0:
                kept.append(block)
            continue
        indent = len(block.strip("\n")) - len(block.strip("\n").lstrip(" "))
        if dropped_indent >= 0 and indent > dropped_indent:
            continue
        dropped_indent = -1
        if any(mentions(block, name) for name in names):
            dropped_indent = indent
            continue
        kept.append(block if not kept or not kept[-1].strip() else f"\n\n{block}")
    return "".join(kept)


def without_targets(repository: Repository, removed: Collection[Target]) -> dict[str, bytes | None]:
    """Return the changes that remove definitions from the product and its documentation."""
    names = {target.name for target in removed}
    changes: dict[str, bytes | None] = {}
    for file in python_files(repository, tests=False):
        data = repository.files[file]
        if not any(name.encode() in data for name in names):
            continue
        here = {target.qualname for target in removed if target.file == file or file == f"{target.file}i"}
        stubs = {target.qualname for target in removed} if file.endswith(".pyi") else set()
        after = remove_names(file, remove_definitions(data, file, here | stubs), _importable_names(removed))
        if after != data:
            changes[file] = after
    for path, data in repository.files.items():
        if path.endswith(PROSE_SUFFIXES) and any(name.encode() in data for name in names):
            text = data.decode("utf-8", "replace")
            after_text = remove_paragraphs(text, names)
            if after_text != text:
                changes[path] = after_text.encode()
    return changes


def _importable_names(removed: Collection[Target]) -> set[str]:
    return {target.name for target in removed if not target.owner}


def tests_of_targets(repository: Repository, removed: Collection[Target], ran: Collection[str]) -> set[str]:
    """Return the tests to remove with the definitions: those that execute them, and those that mention their names."""
    names = {target.name for target in removed}
    texts: dict[tuple[str, str], bool] = {}
    found = set(ran)
    for test in repository.durations:
        key = test_name(test)
        if key not in texts:
            texts[key] = any(mentions(test_text(repository, test), name) for name in names)
        if texts[key]:
            found.add(test)
    return found


def without_tests_of_targets(
    repository: Repository, removed: Collection[Target], removed_tests: Collection[str]
) -> Mapping[str, bytes | None] | None:
    """Return the changes that remove these tests and imports of removed names; None if other uses remain."""
    by_file, all_names = names_by_file(removed_tests), names_by_file(repository.durations)
    names = _importable_names(removed)
    changes: dict[str, bytes | None] = {}
    for module in repository.test_modules:
        if module.path not in by_file and not any(name in module.names for name in names):
            continue
        if module.path in by_file and not all_names.get(module.path, set()) - by_file[module.path]:
            changes[module.path] = None
            continue
        data = remove_definitions(module.data, module.path, by_file.get(module.path, set()))
        data = remove_names(module.path, data, names)
        if any(name in parse(module.path, data).names for name in names):
            return None
        changes[module.path] = data
    return changes
