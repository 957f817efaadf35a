"""Feature tasks: remove a public definition with its tests, documentation and helpers; the task is to implement it.

Only definitions the rest of the code base does not need: it must still import, and every other test must still pass.
"""

import ast
import random
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from etude.tasks.generators import prompts
from etude.tasks.generators.candidate import (
    CandidateRejected,
    TaskCandidate,
    TaskDraft,
    WorkspaceState,
    generator,
    revert_changes,
)
from etude.tasks.generators.code import FunctionNode, docstring_node, fstring_node_ids
from etude.tasks.generators.executor import Changes, ExecutionResult
from etude.tasks.generators.failure_report import test_name, test_text
from etude.tasks.generators.removal import (
    Target,
    is_removable,
    registrations,
    targets,
    tests_of_targets,
    uses,
    with_helpers,
    without_targets,
    without_tests_of_targets,
)
from etude.tasks.generators.repository import Repository
from etude.tasks.generators.task_writer import protected_globs, pytest_check, suite_files

LINE_COUNTS = range(5, 160)  # of the removed definition
MAX_TEST_SHARE = 0.1  # of all tests that may be removed with it
MAX_DOCSTRING_LINES = 30  # shown in the request
MAX_TEXTS = 6  # quoted in the request


@generator("feature", "feature", weight=1.3, max_family_share=0.6)
def feature(repository: Repository, rng: random.Random) -> Iterator[TaskCandidate]:
    found = [target for target in targets(repository) if _is_suitable(target)]
    rng.shuffle(found)
    for target in found:
        removed = with_helpers(repository, target) if not target.owner else [target]
        if not is_removable(repository, removed):
            continue
        candidate = removal_candidate(repository, target, removed, rng.getrandbits(64))
        if candidate is not None:
            yield candidate


def _is_suitable(target: Target) -> bool:
    public = not target.name.startswith("_") and not any(part.startswith("_") for part in target.owner)
    plain = not (isinstance(target.node, FunctionNode) and target.node.decorator_list and target.owner)
    return public and plain and len(target.lines) in LINE_COUNTS and bool(ast.get_docstring(target.node))


def removal_candidate(
    repository: Repository, target: Target, removed: Sequence[Target], seed: int
) -> TaskCandidate | None:
    ran = repository.tests_covering(target.file, _inner_lines(target))
    if not ran:
        return None
    removed_tests = tests_of_targets(repository, removed, ran)
    if len(removed_tests) > MAX_TEST_SHARE * len(repository.durations):
        return None
    tests = without_tests_of_targets(repository, removed, removed_tests)
    if tests is None:
        return None
    product = without_targets(repository, removed)
    workspace = {**product, **tests}
    touched = {test_name(test)[0] for test in removed_tests} | set(tests)
    left = [test for test in repository.durations if test_name(test)[0] in touched and test not in removed_tests]
    rng = random.Random(seed)
    others = repository.select_graded_tests((), left, rng)
    states = {
        "hidden": WorkspaceState(product, tuple(sorted(removed_tests)), expect_failure=True),
        "left": WorkspaceState(workspace, tuple(dict.fromkeys([*left[:400], *others]))),
    }

    def finish(results: Mapping[str, ExecutionResult]) -> TaskDraft:
        return make_draft(repository, target, removed, workspace, removed_tests, results, rng)

    return TaskCandidate(f"{target.file}:{target.qualname}", target.kind, states, finish)


def _inner_lines(target: Target) -> range:
    """Return the lines that execute when the target is used, not when it is defined."""
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
    removed: Sequence[Target],
    workspace: Changes,
    removed_tests: set[str],
    results: Mapping[str, ExecutionResult],
    rng: random.Random,
) -> TaskDraft:
    if not (results["hidden"].complete and results["left"].complete):
        raise CandidateRejected("timeout", "the test run did not finish")
    failed = sorted(test for test in removed_tests if results["hidden"].status(test) != "passed")
    if not failed:
        raise CandidateRejected("survives", "its tests pass without it")
    missing = [test for test, outcome in results["left"].tests.items() if outcome.status != "passed"]
    if missing or not results["left"].tests:
        raise CandidateRejected("needed", f"{len(missing)} other tests fail without it: {missing[:3]}")
    suite = suite_files(repository)
    size = sum(len(each.lines) for each in removed)
    return TaskDraft(
        category="feature",
        family=target.kind,
        register=(register := rng.choice(("imperative", "issue", "spec"))),
        request=write_request(repository, target, register, rng)
        + _texts_section(required_texts(repository, target, removed, failed)),
        difficulty=min(5, 1 + (size > 20) + (size > 45) + (size > 80) + (len(failed) > 15)),
        workspace=workspace,
        solution=revert_changes(repository, workspace),
        checks=(pytest_check(repository, repository.select_graded_tests(failed, removed_tests, rng), suite),),
        suite=suite,
        protected=protected_globs(repository),
        metadata={"failing": len(failed), "lines": size},
    )


# ------------------------------------------------------------------------------------------------- request


def signature(target: Target) -> str:
    """Return the head of the definition without decorators and body."""
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
    """Return the dotted names of the target: re-exports first, then its definition."""
    source = repository.source
    if target.owner:
        return [f"{source.module_name(target.file)}.{target.qualname}"]
    found = [f"{source.module_name(target.file)}.{target.name}"]
    for use in uses(repository, target.name):
        if use.kind in ("import", "listed") and use.file.endswith("__init__.py"):
            found.insert(0, f"{source.module_name(use.file)}.{target.name}")
    return list(dict.fromkeys(found))


def required_texts(
    repository: Repository, target: Target, removed: Sequence[Target], tests: Sequence[str]
) -> list[str]:
    """Return strings that the tests check and the docstring does not contain: an agent cannot guess them."""
    test_code = "\n".join({test_text(repository, test) for test in tests})
    docstring = ast.get_docstring(target.node) or ""
    docs = {
        id(doc.value) for each in removed for node in ast.walk(each.node) if (doc := docstring_node(node)) is not None
    }
    found: dict[str, None] = {}
    for each in removed:
        inner = fstring_node_ids(each.node)
        for node in ast.walk(each.node):
            if id(node) in docs or id(node) in inner:
                continue
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            texts = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
            if any(
                len(text.strip()) > 5 and text.strip() in test_code and text.strip() not in docstring for text in texts
            ):
                found[ast.unparse(node)] = None
    return list(found)[:MAX_TEXTS]


def _texts_section(texts: Sequence[str]) -> str:
    if not texts:
        return ""
    return "\n\nIts texts, word for word:\n\n" + "\n".join(f"- {prompts.quoted(text)}" for text in texts)


def write_request(repository: Repository, target: Target, register: str, rng: random.Random) -> str:
    names = public_names(repository, target)
    docstring = textwrap.dedent(ast.get_docstring(target.node) or "").strip()
    first = re.sub(r"\s+", " ", docstring.split("\n\n")[0]).strip()
    lines = docstring.splitlines()
    spec = docstring if len(lines) <= MAX_DOCSTRING_LINES else "\n".join(lines[:MAX_DOCSTRING_LINES]) + "\n..."
    where = f"It belongs into {target.file}" + (f", in {target.owner[0]}" if target.owner else "")
    if len(names) > 1:
        where += f", and is imported as {' and '.join(prompts.quoted(name) for name in names)}"
    for table, key in registrations(repository, target):
        where += f"; {table} has it as {key!r}"
    head = signature(target)
    if register == "spec":
        return f"Implement\n\n{prompts.fenced(head, 'python')}\n\n{where}.\n\n{prompts.fenced(spec)}"
    if register == "issue":
        opening = prompts.choose(
            rng,
            f"We miss {prompts.quoted(names[0])}.",
            f"{prompts.quoted(names[0])} was lost in the last clean-up, bring it back.",
            f"There is no {prompts.quoted(target.qualname)} in here, and I need it.",
        )
        shown = f"{prompts.fenced(head, 'python')}\n\nWhat it has to do:\n\n{prompts.fenced(spec)}"
        return f"{opening} {first}\n\n{shown}\n\n{where}."
    opening = prompts.choose(rng, "Add", "Write", "Implement")
    sentence = f"{opening} {prompts.quoted(target.qualname)}. {where}."
    return f"{sentence}\n\n{prompts.fenced(head, 'python')}\n\n{prompts.fenced(spec)}"
