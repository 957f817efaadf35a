"""Migration tasks with a mechanical oracle: modern code is rewritten in a legacy form; the task is to modernize it.

Each family rewrites one to three files; the tests that execute those lines must pass in the legacy form too. The
verifier counts the remaining legacy patterns and runs the tests.
"""

import ast
import random
from collections.abc import Callable, Iterator, Mapping, Sequence

from etude.syntax import parse_tree
from etude.tasks.checks import VerifierCheck
from etude.tasks.checks.inside.patterns import lines_with, lookups, modern_forms
from etude.tasks.generators import prompts
from etude.tasks.generators.candidate import (
    CandidateRejected,
    TaskCandidate,
    TaskDraft,
    WorkspaceState,
    generator,
    revert_changes,
)
from etude.tasks.generators.code import (
    FunctionNode,
    Module,
    SourceEdit,
    apply_edits,
    definitions,
    fstring_node_ids,
    is_parsable,
)
from etude.tasks.generators.executor import ExecutionResult
from etude.tasks.generators.repository import Repository
from etude.tasks.generators.task_writer import protected_globs, pytest_check, suite_files

MIN_EDITS = 3  # per task
MAX_EDITS_PER_FILE = 40
LegacyRewrite = Callable[[Module], Iterator[SourceEdit]]
LEGACY_REWRITES: dict[str, LegacyRewrite] = {}
REQUESTS: dict[str, tuple[str, ...]] = {
    "percent": (
        "Use f-strings instead of % formatting in {files}.",
        '{files}: no more `"..." % x`, f-strings please. Output stays the same.',
        "We are dropping percent formatting. Migrate {files} to f-strings.",
    ),
    "str-format": (
        "Replace `str.format` by f-strings in {files}.",
        '{files} still uses `"...".format(...)` on literals. f-strings, same output.',
    ),
    "typing": (
        "{files}: `Optional[X]`, `List[X]` and the like are old; write `X | None`, `list[X]` (PEP 604, PEP 585).",
        "Migrate the annotations in {files} from typing's generics to builtins and `|`.",
    ),
    "classes": (
        "Python 2 leftovers in {files}: `class X(object)` and `super(X, self)`. Modernise.",
        "{files}: drop `object` as a base and the arguments of `super`.",
    ),
    "literals": (
        "{files}: use literals instead of `dict()`, `list()`, `tuple()` and `set([...])`.",
        "Ruff complains about C405 and C408 in {files} (calls where a literal does). Fix all of them.",
    ),
    "os-errors": (
        "{files}: IOError and EnvironmentError are aliases since 3.3; use OSError.",
        "Replace the deprecated aliases of OSError in {files}.",
    ),
    "maps": (
        "{files}: comprehensions instead of `list(map(lambda ...))` and `list(filter(lambda ...))`.",
        "Ruff C417 in {files}: rewrite map and filter over lambdas as comprehensions.",
    ),
}


def legacy_rewrite(family: str) -> Callable[[LegacyRewrite], LegacyRewrite]:
    def register(function: LegacyRewrite) -> LegacyRewrite:
        LEGACY_REWRITES[family] = function
        return function

    return register


# ------------------------------------------------------------------------------------------------- legacy rewrites


def _fstrings(module: Module) -> Iterator[tuple[ast.JoinedStr, list[ast.Constant | ast.FormattedValue]]]:
    """Yield single-line f-strings that are not concatenated with another string and have no format specification."""
    inner = fstring_node_ids(module.tree)
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.JoinedStr) or id(node) in inner or node.lineno != node.end_lineno:
            continue
        text = module.text(node)
        parts = [part for part in node.values if isinstance(part, ast.Constant | ast.FormattedValue)]
        values = [part for part in parts if isinstance(part, ast.FormattedValue)]
        plain = all(part.format_spec is None and part.conversion in (-1, 114, 115) for part in values)
        unsupported = (
            "\\" in text or "=}" in text or any(isinstance(part.value, ast.Await | ast.Lambda) for part in values)
        )
        if text[0] in "fF" and text[1] in "\"'" and values and plain and text.count(text[1]) == 2 and not unsupported:
            yield node, parts


def _literal(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t") + '"'


@legacy_rewrite("percent")
def percent(module: Module) -> Iterator[SourceEdit]:
    for node, parts in _fstrings(module):
        text, values = "", []
        for part in parts:
            if isinstance(part, ast.FormattedValue):
                text += "%r" if part.conversion == 114 else "%s"
                values.append(ast.unparse(part.value))
            else:
                text += str(part.value).replace("%", "%%")
        given = f"({values[0]},)" if len(values) == 1 else f"({', '.join(values)})"
        yield module.replace(node, f"({_literal(text)} % {given})")


@legacy_rewrite("str-format")
def str_format(module: Module) -> Iterator[SourceEdit]:
    for node, parts in _fstrings(module):
        text, values = "", []
        for part in parts:
            if isinstance(part, ast.FormattedValue):
                text += "{!r}" if part.conversion == 114 else "{}"
                values.append(ast.unparse(part.value))
            else:
                text += str(part.value).replace("{", "{{").replace("}", "}}")
        yield module.replace(node, f"{_literal(text)}.format({', '.join(values)})")


@legacy_rewrite("typing")
def typing_names(module: Module) -> Iterator[SourceEdit]:
    """Rewrite function annotations, in modules that import typing and never evaluate annotations."""
    if b"from __future__ import annotations" not in module.data:
        return
    alias = next((name for name in ("t", "typing") if f"import typing as {name}\n".encode() in module.data), "")
    alias = alias or ("typing" if b"\nimport typing\n" in module.data else "")
    for node in ast.walk(module.tree) if alias else ():
        if isinstance(node, FunctionNode):
            given = node.args
            found = [each.annotation for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
            for annotation in [*found, node.returns]:
                if annotation is not None and annotation.lineno == annotation.end_lineno:
                    old = _legacy_annotation(annotation, alias)
                    if old != ast.unparse(annotation):
                        yield module.replace(annotation, old)


def _legacy_annotation(node: ast.expr, alias: str) -> str:
    generics = {
        "list": "List",
        "dict": "Dict",
        "set": "Set",
        "frozenset": "FrozenSet",
        "tuple": "Tuple",
        "type": "Type",
    }
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        parts = _alternatives(node)
        rest = [_legacy_annotation(part, alias) for part in parts if not _is_none(part)]
        inner = rest[0] if len(rest) == 1 else f"{alias}.Union[{', '.join(rest)}]"
        return f"{alias}.Optional[{inner}]" if len(rest) < len(parts) else inner
    if isinstance(node, ast.Subscript):
        value = node.value
        head = (
            f"{alias}.{generics[value.id]}"
            if isinstance(value, ast.Name) and value.id in generics
            else ast.unparse(value)
        )
        items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        return f"{head}[{', '.join(_legacy_annotation(item, alias) for item in items)}]"
    return ast.unparse(node)


def _alternatives(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return [*_alternatives(node.left), *_alternatives(node.right)]
    return [node]


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


@legacy_rewrite("classes")
def classes(module: Module) -> Iterator[SourceEdit]:
    for node, owner in module.classes:
        line = module.lines[node.lineno - 1]
        if not node.bases and not node.keywords and line.rstrip().endswith(f"class {node.name}:") and not owner:
            at = module.offset(node.lineno, node.col_offset) + len(f"class {node.name}")
            yield SourceEdit(at, at, "(object)")
    for function in module.functions:
        owner = function.owner
        inside = owner and any(node.name == owner[-1] and around == owner[:-1] for node, around in module.classes)
        if not inside or not function.node.args.args or len(owner) != 1:
            continue
        first = function.node.args.args[0].arg
        nested = {id(inner) for node, _ in definitions(function.node) for inner in ast.walk(node)}
        for call in ast.walk(function.node):
            if isinstance(call, ast.Call) and id(call) not in nested and ast.unparse(call) == "super()":
                yield module.replace(call, f"super({owner[0]}, {first})")


@legacy_rewrite("literals")
def literals(module: Module) -> Iterator[SourceEdit]:
    inner = fstring_node_ids(module.tree)
    for node in ast.walk(module.tree):
        if id(node) in inner:
            continue
        if isinstance(node, ast.Dict) and not node.keys and module.text(node) == "{}":
            yield module.replace(node, "dict()")
        elif (
            isinstance(node, ast.List)
            and not node.elts
            and isinstance(node.ctx, ast.Load)
            and module.text(node) == "[]"
        ):
            yield module.replace(node, "list()")
        elif isinstance(node, ast.Set) and node.lineno == node.end_lineno:
            yield module.replace(node, f"set([{module.text(node)[1:-1]}])")


@legacy_rewrite("os-errors")
def os_errors(module: Module) -> Iterator[SourceEdit]:
    for number, node in enumerate(
        each for each in ast.walk(module.tree) if isinstance(each, ast.Name) and each.id == "OSError"
    ):
        yield module.replace(node, ("IOError", "EnvironmentError")[number % 2])


@legacy_rewrite("maps")
def maps(module: Module) -> Iterator[SourceEdit]:
    inner = fstring_node_ids(module.tree)
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.ListComp | ast.SetComp) or id(node) in inner or len(node.generators) != 1:
            continue
        part = node.generators[0]
        unsupported = any(
            isinstance(each, ast.Await | ast.NamedExpr | ast.Yield | ast.ListComp)
            for each in ast.walk(node)
            if each is not node
        )
        if part.is_async or len(part.ifs) > 1 or not isinstance(part.target, ast.Name) or unsupported:
            continue
        name, source = part.target.id, module.text(part.iter)
        if part.ifs:
            source = f"filter(lambda {name}: {module.text(part.ifs[0])}, {source})"
        if ast.unparse(node.elt) != name:
            source = f"map(lambda {name}: {module.text(node.elt)}, {source})"
        if source != module.text(part.iter) and "\n" not in source:
            yield module.replace(node, f"{'list' if isinstance(node, ast.ListComp) else 'set'}({source})")


# ------------------------------------------------------------------------------------------------- candidates


@generator("migration", "migration", weight=1.0, max_family_share=0.3)
def migration(repository: Repository, rng: random.Random) -> Iterator[TaskCandidate]:
    edits_by_family: dict[str, dict[str, list[SourceEdit]]] = {family: {} for family in LEGACY_REWRITES}
    for module in repository.modules:
        for family, rewrite in LEGACY_REWRITES.items():
            edits = _without_overlaps(list(rewrite(module)))
            if edits:
                edits_by_family[family][module.path] = edits
    remaining = {family: sorted(files) for family, files in edits_by_family.items()}
    for files in remaining.values():
        rng.shuffle(files)
    while any(remaining.values()):
        for family in sorted(remaining):
            count = rng.choice((1, 1, 2, 3))
            files, remaining[family] = remaining[family][:count], remaining[family][count:]
            chosen = {file: edits_by_family[family][file][:MAX_EDITS_PER_FILE] for file in files}
            if files and sum(map(len, chosen.values())) >= MIN_EDITS:
                yield candidate_for(repository, family, chosen, rng.getrandbits(64))


def _without_overlaps(edits: Sequence[SourceEdit]) -> list[SourceEdit]:
    kept: list[SourceEdit] = []
    for edit in sorted(edits, key=lambda each: (each.start, -each.end)):
        if not kept or edit.start >= kept[-1].end:
            kept.append(edit)
    return kept


def candidate_for(
    repository: Repository, family: str, edits: Mapping[str, Sequence[SourceEdit]], seed: int
) -> TaskCandidate:
    rng = random.Random(seed)
    workspace: dict[str, bytes | None] = {}
    covering: set[str] = set()
    for file, found in edits.items():
        module = repository.module(file)
        workspace[file] = apply_edits(module.data, found)
        for edit in found:
            line = module.data[: edit.start].count(b"\n") + 1
            covering |= repository.tests_covering(file, [line]) or set()
    tests = repository.select_graded_tests((), covering, rng)

    def finish(results: Mapping[str, ExecutionResult]) -> TaskDraft:
        result = results["old"]
        if not result.complete or any(result.status(test) != "passed" for test in tests):
            raise CandidateRejected("not-the-same", "tests fail in the legacy form")
        return make_draft(repository, family, edits, workspace, tests, rng)

    site = f"{family}:{'+'.join(sorted(edits))}"
    return TaskCandidate(site, family, {"old": WorkspaceState(workspace, tuple(tests))}, finish)


def make_draft(
    repository: Repository,
    family: str,
    edits: Mapping[str, Sequence[SourceEdit]],
    workspace: Mapping[str, bytes | None],
    tests: list[str],
    rng: random.Random,
) -> TaskDraft:
    allowed, least, dynamic = {}, {}, {}
    for file, data in workspace.items():
        if data is None or not is_parsable(data):
            raise CandidateRejected("no-python", f"{file} does not parse in the legacy form")
        allowed[file] = len(lines_with(family, parse_tree(repository.files[file])))
        if len(lines_with(family, parse_tree(data))) <= allowed[file]:
            raise CandidateRejected("not-old", f"{file} has nothing to migrate")
        dynamic[file] = lookups(parse_tree(repository.files[file]))
        # One place in five may be written without the new form, for example `str(x)` for an f-string.
        least[file] = modern_forms(family, parse_tree(repository.files[file])) - len(edits[file]) // 5
    count = sum(map(len, edits.values()))
    files = " and ".join(filter(None, [", ".join(sorted(edits)[:-1]), sorted(edits)[-1]]))
    suite = suite_files(repository)
    return TaskDraft(
        category="migration",
        family=family,
        register="imperative",
        request=prompts.choose(rng, *REQUESTS[family]).format(files=files),
        difficulty=min(4, 1 + (count > 8) + (count > 20) + (len(edits) > 1)),
        workspace=workspace,
        solution=revert_changes(repository, workspace),
        checks=(
            pytest_check(repository, tests, suite),
            VerifierCheck("patterns", {}, {"family": family, "files": allowed, "least": least, "lookups": dynamic}),
        ),
        suite=suite,
        protected=protected_globs(repository),
        metadata={"places": count},
    )
