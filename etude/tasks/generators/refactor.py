"""Refactorings with an oracle: a function or class gets another name, or moves to another module, and all that use it
follow. Graded by the tests as the oracle rewrites them, and by names that must be gone or be there.
"""

import ast
import random
from collections.abc import Iterator, Mapping

from etude.tasks.generators import prompts
from etude.tasks.generators.candidate import Candidate, Check, Draft, State, Unfit, generator
from etude.tasks.generators.code import Edit, FunctionNode, Module, parse, spliced
from etude.tasks.generators.executor import Changes, Trial
from etude.tasks.generators.failure_report import test_name
from etude.tasks.generators.identifiers import is_unique, other_name, renamed
from etude.tasks.generators.removal import Place, Target, python_files, targets, uses
from etude.tasks.generators.repository import Repository
from etude.tasks.generators.task_writer import protected_globs, pytest_check, suite_of

LEAST = 3  # uses of a name that make its change worth a task


@generator("refactor", "refactor", weight=1.2, most=0.5)
def refactor(repository: Repository, rng: random.Random) -> Iterator[Candidate]:
    found = targets(repository)
    rng.shuffle(found)
    makers = [rename, rename, move, rename_keeping]
    for number, target in enumerate(found):
        candidate = makers[number % len(makers)](repository, target, random.Random(rng.getrandbits(64)))
        if candidate is not None:
            yield candidate


def _uses(repository: Repository, name: str) -> list[Place]:
    return [*uses(repository, name), *uses(repository, name, tests=True)]


def _tests(repository: Repository, target: Target, places: list[Place], rng: random.Random) -> list[str]:
    """Tests that run the definition or a place where it is used, and those of test files that have the name."""
    found: set[str] = set()
    for file, line in [(target.file, target.node.body[-1].lineno), *((each.file, each.line) for each in places)]:
        found |= repository.running(file, [line]) or set()
    having = {place.file for place in places}
    found |= {test for test in repository.seconds if test_name(test)[0] in having}
    return repository.graded_tests((), found, rng)


def candidate_for(
    repository: Repository,
    site: str,
    family: str,
    solved: Mapping[str, bytes | None],
    tests: list[str],
    request: str,
    names: Mapping[str, object],
    difficulty: int,
    extra: Mapping[str, bytes] | None = None,
) -> Candidate:
    """A refactoring whose oracle is `solved`: its tests must pass there, and the names be as they should."""
    rewritten = {path: data for path, data in solved.items() if repository.source.is_test_path(path)}
    more = tuple(extra or ())

    def finish(trials: Mapping[str, Trial]) -> Draft:
        trial = trials["solved"]
        bad = [test for test in (*tests, *_ids(more)) if trial.status(test) != "passed"]
        if bad or not trial.complete:
            raise Unfit("oracle-fails", f"{len(bad)} tests fail after it: {bad[:3]}")
        suite = {**suite_of(repository, rewritten), **(extra or {})}
        return Draft(
            category="refactor",
            family=family,
            register="imperative",
            request=request,
            difficulty=difficulty,
            workspace={},
            solved=solved,
            checks=(pytest_check(repository, [*tests, *_ids(more)], suite), Check("names", {}, names)),
            suite=suite,
            protected=() if rewritten else protected_globs(repository),
            facts={"files": len(solved)},
        )

    return Candidate(site, family, {"solved": State({**solved, **(extra or {})}, (*tests, *more))}, finish)


def _ids(files: tuple[str, ...]) -> list[str]:
    return [f"{path}::test_both_names" for path in files]


# ------------------------------------------------------------------------------------------------- names


def rename(repository: Repository, target: Target, rng: random.Random) -> Candidate | None:
    """Another name everywhere."""
    old = target.name
    if not is_unique(repository, old) or (new := other_name(old, rng, repository)) is None:
        return None
    places = _uses(repository, old)
    if len(places) < LEAST:
        return None
    solved = renamed(repository, old, new)
    kind = "class" if isinstance(target.node, ast.ClassDef) else "method" if target.owner else "function"
    request = prompts.pick(
        rng,
        f"Rename {prompts.quoted(old)} to {prompts.quoted(new)}, everywhere.",
        f"The {kind} {prompts.quoted(old)} should be called {prompts.quoted(new)}. No alias, please.",
        f"{prompts.quoted(old)} -> {prompts.quoted(new)}, throughout code, tests and docs (not in the changelog).",
        f"I don't like the name {prompts.quoted(old)}. Make it {prompts.quoted(new)} and update whatever uses it.",
    )
    defined = [[target.file, ".".join([*target.owner, new])]]
    names = {"gone": [old], "excused": {}, "defined": defined, "undefined": []}
    tests = _tests(repository, target, places, rng)
    level = min(5, 1 + (len(places) > 8) + (len({place.file for place in places}) > 3) + (len(places) > 25))
    return candidate_for(repository, f"rename:{target.file}:{old}", "rename", solved, tests, request, names, level)


def rename_keeping(repository: Repository, target: Target, rng: random.Random) -> Candidate | None:
    """Another name everywhere, and the old one stays as an alias where it was defined."""
    old = target.name
    if target.owner or not is_unique(repository, old) or (new := other_name(old, rng, repository)) is None:
        return None
    places = _uses(repository, old)
    if len(places) < LEAST or not any(place.kind == "import" for place in places):
        return None
    solved: dict[str, bytes | None] = dict(renamed(repository, old, new))
    module = parse(target.file, solved[target.file] or b"")
    node = next(each for each in module.tree.body if getattr(each, "name", "") == new)
    _, end = module.line_span(node.lineno, node.end_lineno or node.lineno)
    alias = f"\n\n{old} = {new}  # the former name\n"
    solved[target.file] = spliced(module.data, [Edit(end, end, alias)])
    dotted = repository.source.module_name(target.file)
    test = f"import {dotted} as module\n\n\ndef test_both_names():\n    assert module.{old} is module.{new}\n"
    place = f"{repository.source.test_directories[0]}/" if repository.source.test_directories else ""
    request = prompts.pick(
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
    tests = _tests(repository, target, places, rng)
    site, extra = f"alias:{target.file}:{old}", {f"{place}test_former_name.py": test.encode()}
    return candidate_for(repository, site, "rename-alias", solved, tests, request, names, 3, extra)


# ------------------------------------------------------------------------------------------------- moves


def move(repository: Repository, target: Target, rng: random.Random) -> Candidate | None:
    """A definition goes to a module of its own; imports of it follow."""
    if target.owner or not is_unique(repository, target.name) or target.file.endswith("__init__.py"):
        return None
    module = repository.module(target.file)
    needed = _imports_for(module, target)
    if needed is None or len(target.lines) < 6:
        return None
    stem = target.name.strip("_").lower()
    folder = target.file.rpartition("/")[0]
    new_file = f"{folder}/_{stem}.py" if folder else f"_{stem}.py"
    if new_file in repository.files:
        return None
    solved = _moved(repository, module, target, needed, f"_{stem}", new_file)
    places = _uses(repository, target.name)
    if solved is None or len(places) < LEAST:
        return None
    request = prompts.pick(
        rng,
        f"Move {prompts.quoted(target.name)} out of {target.file} into {new_file}. Import it from there wherever used.",
        f"{target.file} is too long. Put {prompts.quoted(target.name)} into {new_file} and adapt the imports; "
        "public names stay as they are.",
        f"{prompts.quoted(target.name)} should live in {new_file}, not in {target.file}.",
    )
    names = {"gone": [], "defined": [[new_file, target.name]], "undefined": [[target.file, target.name]]}
    tests = _tests(repository, target, places, rng)
    return candidate_for(repository, f"move:{target.file}:{target.name}", "move", solved, tests, request, names, 3)


def _imports_for(module: Module, target: Target) -> list[str] | None:
    """The import statements a definition needs where it goes; None when it needs more of its module than that."""
    found: dict[str, str] = {}
    made: set[str] = set()
    for node in module.tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                found[alias.asname or alias.name.partition(".")[0]] = _one_import(node, alias)
        elif isinstance(node, FunctionNode | ast.ClassDef):
            made.add(node.name)
        else:
            made |= {
                each.id for each in ast.walk(node) if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load)
            }
            if isinstance(node, ast.If | ast.Try):  # imports under a condition
                made |= {
                    (a.asname or a.name)
                    for each in ast.walk(node)
                    if isinstance(each, ast.ImportFrom)
                    for a in each.names
                }
    used = {node.id for node in ast.walk(target.node) if isinstance(node, ast.Name)}
    if used & (made - {target.name}):
        return None
    future = [line for name, line in found.items() if line.startswith("from __future__")]
    return [*future, *sorted({found[name] for name in used if name in found and found[name] not in future})]


def _one_import(node: ast.Import | ast.ImportFrom, alias: ast.alias) -> str:
    name = alias.name + (f" as {alias.asname}" if alias.asname else "")
    if isinstance(node, ast.Import):
        return f"import {name}"
    return f"from {'.' * node.level}{node.module or ''} import {name}"


def _moved(
    repository: Repository, module: Module, target: Target, needed: list[str], stem: str, new_file: str
) -> Changes | None:
    """The files after the move; None where a use is not an import that can follow."""
    start, end = module.line_span(target.lines[0], target.lines[-1])
    body = module.data[start:end].decode()
    future = [line for line in needed if line.startswith("from __future__")]
    head = "\n".join([*future, ""] * bool(future) + [line for line in needed if line not in future])
    text = (head + "\n\n\n" if head.strip() else "") + body
    changes: dict[str, bytes | None] = {new_file: text.encode()}
    dotted = repository.source.module_name(target.file)
    new_dotted = ".".join([*dotted.split(".")[:-1], stem])
    here = [place for place in uses(repository, target.name) if place.file == target.file]
    outside = [place for place in here if place.line not in target.lines and place.kind != "listed"]
    edits = [module.removal(target.node)]
    if outside or any(place.kind == "listed" for place in here):
        after = max(
            (node.end_lineno or 0 for node in module.tree.body if isinstance(node, ast.Import | ast.ImportFrom)),
            default=0,
        )
        if not after:
            return None
        at = module.line_span(after, after)[1]
        edits.append(
            Edit(
                at,
                at,
                f"from .{stem} import {target.name}\n" if "." in dotted else f"from {stem} import {target.name}\n",
            )
        )
    changes[target.file] = spliced(module.data, edits)
    for file in [*python_files(repository, tests=False), *python_files(repository, tests=True)]:
        if file == target.file or target.name not in repository.module(file).names:
            continue
        after_data = _following(repository.module(file), target.name, dotted, new_dotted, file.endswith(".pyi"))
        if after_data is None:
            return None
        if after_data != repository.files[file]:
            changes[file] = after_data
    return changes


def _following(module: Module, name: str, old: str, new: str, stub: bool) -> bytes | None:
    """A file whose imports of a name come from its new module; None if it reaches it through the old one itself."""
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
            rest = _import_of(node, kept, indent) if kept else ""
            edits.append(Edit(start, end, f"{rest}{indent}{line}\n"))
    return spliced(module.data, edits)


def _import_of(node: ast.ImportFrom, kept: list[ast.alias], indent: str) -> str:
    names = [each.name + (f" as {each.asname}" if each.asname else "") for each in kept]
    source = "." * node.level + (node.module or "")
    if node.end_lineno == node.lineno:
        return f"{indent}from {source} import {', '.join(names)}\n"
    return f"{indent}from {source} import (\n" + "".join(f"{indent}    {name},\n" for name in names) + f"{indent})\n"
