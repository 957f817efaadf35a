"""Features: something public is taken out with its tests, its documents and what only it used; the task is to write it.

Only what the rest of the code base does without: it must still import, and every other test must still pass.
"""

import ast
import random
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from etude.tasks.generators import prompts
from etude.tasks.generators.candidate import Candidate, Draft, State, Unfit, back, generator
from etude.tasks.generators.code import FunctionNode, docstring_node, inside_fstring
from etude.tasks.generators.executor import Changes, Trial
from etude.tasks.generators.failure_report import test_name, test_text
from etude.tasks.generators.removal import (
    Target,
    doomed_with,
    free_standing,
    registered_as,
    removed,
    targets,
    tests_about,
    tests_without,
    uses,
)
from etude.tasks.generators.repository import Repository
from etude.tasks.generators.task_writer import protected_globs, pytest_check, suite_of

LINES = range(5, 160)  # of what is taken out
SHARE = 0.1  # of all tests that may go with it
LONGEST = 30  # lines of a docstring that are shown
SHOWN = 6  # texts that are told


@generator("feature", "feature", weight=1.3, most=0.6)
def feature(repository: Repository, rng: random.Random) -> Iterator[Candidate]:
    found = [target for target in targets(repository) if _may_go(target)]
    rng.shuffle(found)
    for target in found:
        doomed = doomed_with(repository, target) if not target.owner else [target]
        if not free_standing(repository, doomed):
            continue
        candidate = deletion(repository, target, doomed, rng.getrandbits(64))
        if candidate is not None:
            yield candidate


def _may_go(target: Target) -> bool:
    public = not target.name.startswith("_") and not any(part.startswith("_") for part in target.owner)
    plain = not (isinstance(target.node, FunctionNode) and target.node.decorator_list and target.owner)
    return public and plain and len(target.lines) in LINES and bool(ast.get_docstring(target.node))


def deletion(repository: Repository, target: Target, doomed: Sequence[Target], seed: int) -> Candidate | None:
    ran = repository.running(target.file, _inner_lines(target))
    if not ran:
        return None
    gone = tests_about(repository, doomed, ran)
    if len(gone) > SHARE * len(repository.seconds):
        return None
    tests = tests_without(repository, doomed, gone)
    if tests is None:
        return None
    product = removed(repository, doomed)
    workspace = {**product, **tests}
    touched = {test_name(test)[0] for test in gone} | set(tests)
    left = [test for test in repository.seconds if test_name(test)[0] in touched and test not in gone]
    rng = random.Random(seed)
    others = repository.graded_tests((), left, rng)
    states = {
        "hidden": State(product, tuple(sorted(gone)), breaks=True),
        "left": State(workspace, tuple(dict.fromkeys([*left[:400], *others]))),
    }

    def finish(trials: Mapping[str, Trial]) -> Draft:
        return make_draft(repository, target, doomed, workspace, gone, trials, rng)

    kind = "class" if isinstance(target.node, ast.ClassDef) else "method" if target.owner else "function"
    return Candidate(f"{target.file}:{target.qualname}", kind, states, finish)


def _inner_lines(target: Target) -> range:
    """Lines that run when it is used, not when it is defined."""
    node = target.node
    if isinstance(node, ast.ClassDef):
        bodies = [each for each in node.body if isinstance(each, FunctionNode)]
        return range(bodies[0].body[-1].lineno, (node.end_lineno or 0) + 1) if bodies else range(0)
    return (
        range(node.body[-1].lineno if docstring_node(node) is None else node.body[1].lineno, target.lines[-1] + 1)
        if (len(node.body) > 1)
        else range(node.body[0].lineno, target.lines[-1] + 1)
    )


def make_draft(
    repository: Repository,
    target: Target,
    doomed: Sequence[Target],
    workspace: Changes,
    gone: set[str],
    trials: Mapping[str, Trial],
    rng: random.Random,
) -> Draft:
    if not (trials["hidden"].complete and trials["left"].complete):
        raise Unfit("timeout", "the tests did not come to their end")
    failed = sorted(test for test in gone if trials["hidden"].status(test) != "passed")
    if not failed:
        raise Unfit("survives", "its tests pass without it")
    missing = [test for test, outcome in trials["left"].tests.items() if outcome.status != "passed"]
    if missing or not trials["left"].tests:
        raise Unfit("needed", f"{len(missing)} other tests fail without it: {missing[:3]}")
    suite = suite_of(repository)
    size = sum(len(each.lines) for each in doomed)
    return Draft(
        category="feature",
        family="class" if isinstance(target.node, ast.ClassDef) else "method" if target.owner else "function",
        register=(register := rng.choice(("imperative", "issue", "spec"))),
        request=put_request(repository, target, register, rng)
        + _texts(texts_asked_for(repository, target, doomed, failed)),
        difficulty=min(5, 1 + (size > 20) + (size > 45) + (size > 80) + (len(failed) > 15)),
        workspace=workspace,
        solved=back(repository, workspace),
        checks=(pytest_check(repository, repository.graded_tests(failed, gone, rng), suite),),
        suite=suite,
        protected=protected_globs(repository),
        facts={"failing": len(failed), "lines": size},
    )


# ------------------------------------------------------------------------------------------------- the request


def signature(target: Target) -> str:
    """How it is called: the definition's head without its body and decorators."""
    node = target.node
    if isinstance(node, ast.ClassDef):
        init = next((each for each in node.body if isinstance(each, FunctionNode) and each.name == "__init__"), None)
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        head = f"class {node.name}({bases})" if bases else f"class {node.name}"
        return head if init is None else f"{head}:\n    def __init__({ast.unparse(init.args)})"
    head = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{head} {node.name}({ast.unparse(node.args)}){returns}"


def public_names(repository: Repository, target: Target) -> list[str]:
    """What it is imported as: where it is defined, and where it is passed on."""
    source = repository.source
    if target.owner:
        return [f"{source.module_name(target.file)}.{target.qualname}"]
    found = [f"{source.module_name(target.file)}.{target.name}"]
    for place in uses(repository, target.name):
        if place.kind in ("import", "listed") and place.file.endswith("__init__.py"):
            found.insert(0, f"{source.module_name(place.file)}.{target.name}")
    return list(dict.fromkeys(found))


def texts_asked_for(
    repository: Repository, target: Target, doomed: Sequence[Target], tests: Sequence[str]
) -> list[str]:
    """Texts of the removed code that its tests look for and its docstring does not tell: nobody could guess them."""
    asked = "\n".join({test_text(repository, test) for test in tests})
    said = ast.get_docstring(target.node) or ""
    docs = {
        id(doc.value) for each in doomed for node in ast.walk(each.node) if (doc := docstring_node(node)) is not None
    }
    found: dict[str, None] = {}
    for each in doomed:
        inner = inside_fstring(each.node)
        for node in ast.walk(each.node):
            if id(node) in docs or id(node) in inner:
                continue
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            texts = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
            if any(len(text.strip()) > 5 and text.strip() in asked and text.strip() not in said for text in texts):
                found[ast.unparse(node)] = None
    return list(found)[:SHOWN]


def _texts(texts: Sequence[str]) -> str:
    if not texts:
        return ""
    return "\n\nIts texts, word for word:\n\n" + "\n".join(f"- {prompts.quoted(text)}" for text in texts)


def put_request(repository: Repository, target: Target, register: str, rng: random.Random) -> str:
    names = public_names(repository, target)
    said = textwrap.dedent(ast.get_docstring(target.node) or "").strip()
    first = re.sub(r"\s+", " ", said.split("\n\n")[0]).strip()
    lines = said.splitlines()
    spec = said if len(lines) <= LONGEST else "\n".join(lines[:LONGEST]) + "\n..."
    where = f"It belongs into {target.file}" + (f", in {target.owner[0]}" if target.owner else "")
    if len(names) > 1:
        where += f", and is imported as {' and '.join(prompts.quoted(name) for name in names)}"
    for table, key in registered_as(repository, target):
        where += f"; {table} has it as {key!r}"
    head = signature(target)
    if register == "spec":
        return f"Implement\n\n{prompts.fenced(head, 'python')}\n\n{where}.\n\n{prompts.fenced(spec)}"
    if register == "issue":
        opening = prompts.pick(
            rng,
            f"We miss {prompts.quoted(names[0])}.",
            f"{prompts.quoted(names[0])} was lost in the last clean-up, bring it back.",
            f"There is no {prompts.quoted(target.qualname)} in here, and I need it.",
        )
        shown = f"{prompts.fenced(head, 'python')}\n\nWhat it has to do:\n\n{prompts.fenced(spec)}"
        return f"{opening} {first}\n\n{shown}\n\n{where}."
    opening = prompts.pick(rng, "Add", "Write", "Implement")
    asked = f"{opening} {prompts.quoted(target.qualname)}. {where}."
    return f"{asked}\n\n{prompts.fenced(head, 'python')}\n\n{prompts.fenced(spec)}"
