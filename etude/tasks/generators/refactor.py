"""Refactoring tasks with an oracle: rename a function or class, or move it to another module, and update all uses.

The verifier runs the tests as rewritten by the oracle, and checks which names must be absent or defined.
"""

import ast
import random
from collections.abc import Iterator, Mapping

from etude.tasks.checks import VerifierCheck
from etude.tasks.checks.inside.file_judges import count_lookups
from etude.tasks.generators import prompts
from etude.tasks.generators.candidate import (
    CandidateRejected,
    TaskCandidate,
    TaskDraft,
    WorkspaceState,
    generator,
)
from etude.tasks.generators.code import FunctionNode, Module, SourceEdit, apply_edits, import_text, parse
from etude.tasks.generators.executor import Changes, ExecutionResult
from etude.tasks.generators.failure_report import test_name
from etude.tasks.generators.identifiers import alternative_name, is_unique, rename_in_files
from etude.tasks.generators.removal import NameUse, Target, python_files, targets, uses
from etude.tasks.generators.repository import Repository
from etude.tasks.generators.task_writer import protected_globs, pytest_check, suite_files

MIN_USES = 3  # names with fewer uses make no task


@generator("refactor", "refactor", weight=1.2, max_family_share=0.5)
def refactor(repository: Repository, rng: random.Random) -> Iterator[TaskCandidate]:
    found = targets(repository)
    rng.shuffle(found)
    makers = [rename, rename, move, rename_with_alias]
    for number, target in enumerate(found):
        candidate = makers[number % len(makers)](repository, target, random.Random(rng.getrandbits(64)))
        if candidate is not None:
            yield candidate


def _all_uses(repository: Repository, name: str) -> list[NameUse]:
    return [*uses(repository, name), *uses(repository, name, tests=True)]


def _related_tests(repository: Repository, target: Target, name_uses: list[NameUse], rng: random.Random) -> list[str]:
    """Return tests that execute the definition or a use of it, and those of test files that mention the name."""
    found: set[str] = set()
    for file, line in [(target.file, target.node.body[-1].lineno), *((each.file, each.line) for each in name_uses)]:
        found |= repository.tests_covering(file, [line]) or set()
    files_with_name = {use.file for use in name_uses}
    found |= {test for test in repository.durations if test_name(test)[0] in files_with_name}
    return repository.select_graded_tests((), found, rng)


def candidate_for(
    repository: Repository,
    site: str,
    family: str,
    solution: Mapping[str, bytes | None],
    tests: list[str],
    request: str,
    names: Mapping[str, object],
    difficulty: int,
    extra: Mapping[str, bytes] | None = None,
) -> TaskCandidate:
    """Return the candidate of a refactoring whose oracle is `solution`: after it, the tests must pass."""
    rewritten = {path: data for path, data in solution.items() if repository.source.is_test_path(path)}
    extra_files = tuple(extra or ())

    def finish(results: Mapping[str, ExecutionResult]) -> TaskDraft:
        result = results["solved"]
        bad = [test for test in (*tests, *_ids(extra_files)) if result.status(test) != "passed"]
        if bad or not result.complete:
            raise CandidateRejected("oracle-fails", f"{len(bad)} tests fail after it: {bad[:3]}")
        suite = {**suite_files(repository, rewritten), **(extra or {})}
        return TaskDraft(
            category="refactor",
            family=family,
            register="imperative",
            request=request,
            difficulty=difficulty,
            workspace={},
            solution=solution,
            checks=(pytest_check(repository, [*tests, *_ids(extra_files)], suite), VerifierCheck("names", {}, names)),
            suite=suite,
            protected=() if rewritten else protected_globs(repository),
            metadata={"files": len(solution)},
        )

    return TaskCandidate(
        site, family, {"solved": WorkspaceState({**solution, **(extra or {})}, (*tests, *extra_files))}, finish
    )


def _ids(files: tuple[str, ...]) -> list[str]:
    return [f"{path}::test_both_names" for path in files]


# ------------------------------------------------------------------------------------------------- names


def rename(repository: Repository, target: Target, rng: random.Random) -> TaskCandidate | None:
    """Rename a definition everywhere."""
    old = target.name
    if not is_unique(repository, old) or (new := alternative_name(old, rng, repository)) is None:
        return None
    name_uses = _all_uses(repository, old)
    if len(name_uses) < MIN_USES:
        return None
    solution = rename_in_files(repository, old, new)
    request = prompts.choose(
        rng,
        f"Rename {prompts.quoted(old)} to {prompts.quoted(new)}, everywhere.",
        f"The {target.kind} {prompts.quoted(old)} should be called {prompts.quoted(new)}. No alias, please.",
        f"{prompts.quoted(old)} -> {prompts.quoted(new)}, throughout code, tests and docs (not in the changelog).",
        f"I don't like the name {prompts.quoted(old)}. Make it {prompts.quoted(new)} and update whatever uses it.",
    )
    defined = [[target.file, ".".join([*target.owner, new])]]
    known = count_lookups({path: data for path, data in {**repository.files, **solution}.items() if data is not None})
    names = {"gone": [old], "excused": {}, "defined": defined, "undefined": [], "lookups": known}
    tests = _related_tests(repository, target, name_uses, rng)
    level = min(5, 1 + (len(name_uses) > 8) + (len({use.file for use in name_uses}) > 3) + (len(name_uses) > 25))
    return candidate_for(repository, f"rename:{target.file}:{old}", "rename", solution, tests, request, names, level)


def rename_with_alias(repository: Repository, target: Target, rng: random.Random) -> TaskCandidate | None:
    """Rename a definition everywhere, and keep the old name as an alias in its module."""
    old = target.name
    if target.owner or not is_unique(repository, old) or (new := alternative_name(old, rng, repository)) is None:
        return None
    name_uses = _all_uses(repository, old)
    if len(name_uses) < MIN_USES or not any(use.kind == "import" for use in name_uses):
        return None
    solution: dict[str, bytes | None] = dict(rename_in_files(repository, old, new))
    module = parse(target.file, solution[target.file] or b"")
    node = next(each for each in module.tree.body if getattr(each, "name", "") == new)
    _, end = module.line_span(node.lineno, node.end_lineno or node.lineno)
    alias = f"\n\n{old} = {new}  # the former name\n"
    solution[target.file] = apply_edits(module.data, [SourceEdit(end, end, alias)])
    dotted = repository.source.module_name(target.file)
    test = f"import {dotted} as module\n\n\ndef test_both_names():\n    assert module.{old} is module.{new}\n"
    test_prefix = f"{repository.source.test_directories[0]}/" if repository.source.test_directories else ""
    request = prompts.choose(
        rng,
        f"Rename {prompts.quoted(old)} to {prompts.quoted(new)}. Others still import the old name from {dotted}: "
        "leave an alias there, and use it nowhere.",
        f"{prompts.quoted(old)} becomes {prompts.quoted(new)}. "
        f"Keep {prompts.quoted(f'{dotted}.{old}')} as an alias for now; "
        "everything in here uses the new name.",
    )
    names = {
        "gone": [old],
        "excused": {old: [target.file]},
        "defined": [[target.file, new]],
        "undefined": [[target.file, old]],
    }
    tests = _related_tests(repository, target, name_uses, rng)
    site, extra = f"alias:{target.file}:{old}", {f"{test_prefix}test_former_name.py": test.encode()}
    return candidate_for(repository, site, "rename-alias", solution, tests, request, names, 3, extra)


# ------------------------------------------------------------------------------------------------- moves


def move(repository: Repository, target: Target, rng: random.Random) -> TaskCandidate | None:
    """Move a definition to a module of its own, and update its imports."""
    if target.owner or not is_unique(repository, target.name) or target.file.endswith("__init__.py"):
        return None
    module = repository.module(target.file)
    imports = _imports_for(module, target)
    if imports is None or len(target.lines) < 6:
        return None
    stem = target.name.strip("_").lower()
    folder = target.file.rpartition("/")[0]
    new_file = f"{folder}/_{stem}.py" if folder else f"_{stem}.py"
    if new_file in repository.files:
        return None
    solution = _moved_files(repository, module, target, imports, f"_{stem}", new_file)
    name_uses = _all_uses(repository, target.name)
    if solution is None or len(name_uses) < MIN_USES:
        return None
    request = prompts.choose(
        rng,
        f"Move {prompts.quoted(target.name)} out of {target.file} into {new_file}. Import it from there wherever used.",
        f"{target.file} is too long. Put {prompts.quoted(target.name)} into {new_file} and adapt the imports; "
        "public names stay as they are.",
        f"{prompts.quoted(target.name)} should live in {new_file}, not in {target.file}.",
    )
    names = {"gone": [], "defined": [[new_file, target.name]], "undefined": [[target.file, target.name]]}
    tests = _related_tests(repository, target, name_uses, rng)
    return candidate_for(repository, f"move:{target.file}:{target.name}", "move", solution, tests, request, names, 3)


def _imports_for(module: Module, target: Target) -> list[str] | None:
    """Return the imports a definition needs in a new module, or None if it uses other names of its module."""
    found: dict[str, str] = {}
    defined_here: set[str] = set()
    for node in module.tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                found[alias.asname or alias.name.partition(".")[0]] = import_text(node, [alias])
        elif isinstance(node, FunctionNode | ast.ClassDef):
            defined_here.add(node.name)
        else:
            defined_here |= {
                each.id for each in ast.walk(node) if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load)
            }
            if isinstance(node, ast.If | ast.Try):  # imports under a condition
                defined_here |= {
                    (a.asname or a.name)
                    for each in ast.walk(node)
                    if isinstance(each, ast.ImportFrom)
                    for a in each.names
                }
    used = {node.id for node in ast.walk(target.node) if isinstance(node, ast.Name)}
    if used & (defined_here - {target.name}):
        return None
    future = [line for name, line in found.items() if line.startswith("from __future__")]
    return [*future, *sorted({found[name] for name in used if name in found and found[name] not in future})]


def _moved_files(
    repository: Repository, module: Module, target: Target, imports: list[str], stem: str, new_file: str
) -> Changes | None:
    """Return the files after the move, or None if a use is not an import that can be updated."""
    start, end = module.line_span(target.lines[0], target.lines[-1])
    body = module.data[start:end].decode()
    future = [line for line in imports if line.startswith("from __future__")]
    head = "\n".join([*future, ""] * bool(future) + [line for line in imports if line not in future])
    text = (head + "\n\n\n" if head.strip() else "") + body
    changes: dict[str, bytes | None] = {new_file: text.encode()}
    dotted = repository.source.module_name(target.file)
    new_dotted = ".".join([*dotted.split(".")[:-1], stem])
    here = [use for use in uses(repository, target.name) if use.file == target.file]
    outside = [use for use in here if use.line not in target.lines and use.kind != "listed"]
    edits = [module.removal_edit(target.node)]
    if outside or any(use.kind == "listed" for use in here):
        after = max(
            (node.end_lineno or 0 for node in module.tree.body if isinstance(node, ast.Import | ast.ImportFrom)),
            default=0,
        )
        if not after:
            return None
        at = module.line_span(after, after)[1]
        edits.append(SourceEdit(at, at, f"from {'.' if '.' in dotted else ''}{stem} import {target.name}\n"))
    changes[target.file] = apply_edits(module.data, edits)
    for file in [*python_files(repository, tests=False), *python_files(repository, tests=True)]:
        if file == target.file or target.name not in repository.module(file).names:
            continue
        after_data = _redirect_imports(repository.module(file), target.name, dotted, new_dotted, file.endswith(".pyi"))
        if after_data is None:
            return None
        if after_data != repository.files[file]:
            changes[file] = after_data
    return changes


def _redirect_imports(module: Module, name: str, old: str, new: str, stub: bool) -> bytes | None:
    """Return a file that imports the name from its new module, or None if it uses it as an attribute of the old one."""
    last_old, last_new = old.rpartition(".")[2], new.rpartition(".")[2]
    edits = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and node.attr == name and not stub and ast.unparse(node.value) == last_old:
            return None
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
            if (node.module or "").rpartition(".")[2] != last_old:
                continue
            alias = next(alias for alias in node.names if alias.name == name)
            source = "." * node.level + (node.module or "").removesuffix(last_old) + last_new
            line = f"from {source} import {name}" + (f" as {alias.asname}" if alias.asname else "")
            indent = " " * node.col_offset
            start, end = module.line_span(node.lineno, node.end_lineno or node.lineno)
            kept = [each for each in node.names if each is not alias]
            rest = import_text(node, kept, indent, wrap=node.end_lineno != node.lineno) + "\n" if kept else ""
            edits.append(SourceEdit(start, end, f"{rest}{indent}{line}\n"))
    return apply_edits(module.data, edits)
