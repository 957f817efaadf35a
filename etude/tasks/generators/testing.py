"""Testing tasks: the tests of a function are removed; new ones must pass on it and fail on mutants.

The mutants are hidden, and each fails the removed tests. Equivalent versions are hidden too. All versions but the
submitted one are rewritten, and only their bytecode is there: a test that judges how the code looks gains nothing.
"""

import hashlib
import math
import random
from collections.abc import Iterator, Mapping, Sequence

from etude.tasks.checks import VerifierCheck
from etude.tasks.checks.equivalents import rewrite_equivalently
from etude.tasks.generators import prompts
from etude.tasks.generators.candidate import (
    CandidateRejected,
    TaskCandidate,
    TaskDraft,
    WorkspaceState,
    apply_changes,
    generator,
)
from etude.tasks.generators.code import (
    PythonFunction,
    apply_edits,
    definitions,
    mentions,
    parse,
    remove_definitions,
    source_text,
)
from etude.tasks.generators.executor import ExecutionResult, run_spec
from etude.tasks.generators.failure_report import test_name, test_text, without_tests
from etude.tasks.generators.operators import Mutation, mutations
from etude.tasks.generators.repository import Repository
from etude.tasks.generators.task_writer import scope_check

TRIED_MUTANTS, KEPT_MUTANTS = 8, 5
EQUIVALENT_VERSIONS = 2
MIN_KILLED_SHARE = 0.8  # of the kept mutants
MAX_TEST_SECONDS = 4.0  # for the existing tests of a function
# slower mutants are dropped: an endless loop would take its whole timeout in every verification
MAX_MUTANT_SECONDS = 12.0


@generator("testing", "testing", weight=1.0, max_family_share=1.0)
def testing(repository: Repository, rng: random.Random) -> Iterator[TaskCandidate]:
    functions = [each for each in repository.functions if _is_suitable(each)]
    rng.shuffle(functions)
    for function in functions:
        tests = _own_tests(repository, function)
        files = {test_name(test)[0] for test in tests}
        if not tests or len(tests) > 60 or len(files) > 1 or repository.total_duration(tests) > MAX_TEST_SECONDS:
            continue
        found = [each for each in mutations(function) if repository.tests_covering(function.file, [each.line])]
        rng.shuffle(found)
        chosen = _diverse(found)[:TRIED_MUTANTS]
        if len(chosen) >= KEPT_MUTANTS:
            yield candidate_for(repository, function, sorted(tests), chosen, rng.getrandbits(64))


def _is_suitable(function: PythonFunction) -> bool:
    public = not any(part.startswith("_") for part in (*function.owner, function.name))
    return public and len(function.owner) <= 1 and len(function.body) >= 2 and len(function.name) > 3


def _own_tests(repository: Repository, function: PythonFunction) -> set[str]:
    """Return the tests that execute a function and mention its name."""
    ran: set[str] = set()
    for line in function.body_lines:
        ran |= repository.tests_covering(function.file, [line]) or set()
    return {test for test in ran if mentions(test_text(repository, test), function.name)}


def _diverse(found: Sequence[Mutation]) -> list[Mutation]:
    """Order mutations so that each operator occurs once before any occurs twice; one per operator and line."""
    first: dict[tuple[str, int], Mutation] = {}
    for mutation in found:
        first.setdefault((mutation.operator, mutation.line), mutation)
    count_by_operator: dict[str, int] = {}
    ranked: list[tuple[int, int, Mutation]] = []
    for mutation in first.values():
        count_by_operator[mutation.operator] = count_by_operator.get(mutation.operator, 0) + 1
        ranked.append((count_by_operator[mutation.operator], len(ranked), mutation))
    return [mutation for _, _, mutation in sorted(ranked, key=lambda each: each[:2])]


def candidate_for(
    repository: Repository, function: PythonFunction, tests: Sequence[str], chosen: Sequence[Mutation], seed: int
) -> TaskCandidate:
    file = function.file
    original = function.module.data
    changed = [apply_edits(original, [mutation.edit]) for mutation in chosen]
    mutants = [rewritten(function, data, (original, data), seed) for data in changed]
    equal = [rewritten(function, original, (original, data), seed) for data in changed[:EQUIVALENT_VERSIONS]]
    states = {str(number): WorkspaceState({file: data}, tuple(tests)) for number, data in enumerate(mutants)}
    states |= {f"equal-{number}": WorkspaceState({file: data}, tuple(tests)) for number, data in enumerate(equal)}

    def finish(results: Mapping[str, ExecutionResult]) -> TaskDraft:
        return make_draft(repository, function, tests, mutants, equal, results, random.Random(seed))

    return TaskCandidate(f"{file}:{function.qualname}", "function" if not function.owner else "method", states, finish)


def rewritten(function: PythonFunction, data: bytes, versions: Sequence[bytes], seed: int) -> bytes:
    """Return a version of a function's module with the function rewritten equivalently."""
    rng = random.Random(f"{seed} {[hashlib.sha256(each).hexdigest() for each in (data, *versions)]}")
    texts = [source_text(each) for each in versions]
    return rewrite_equivalently(source_text(data), texts, rng, function.name).encode("utf-8", "surrogateescape")


def make_draft(
    repository: Repository,
    function: PythonFunction,
    tests: Sequence[str],
    mutants: Sequence[bytes],
    equal: Sequence[bytes],
    results: Mapping[str, ExecutionResult],
    rng: random.Random,
) -> TaskDraft:
    def passes(result: ExecutionResult) -> bool:
        return result.complete and all(result.status(test) == "passed" for test in tests)

    if not all(passes(results[f"equal-{number}"]) for number in range(len(equal))):
        raise CandidateRejected("no-equal", "no equivalent version can be made")
    runs = [(data, results[str(number)]) for number, data in enumerate(mutants)]
    killed = [
        data for data, result in runs if result.complete and result.seconds < MAX_MUTANT_SECONDS and not passes(result)
    ]
    if len(killed) < KEPT_MUTANTS:
        raise CandidateRejected("survives", f"{len(killed)} of {len(mutants)} mutants fail its tests")
    file = function.file
    correct: list[bytes | None] = [None, *equal]  # None: the submitted code as it is
    versions = [*correct, *killed[:KEPT_MUTANTS]]
    random.Random(versions[-1]).shuffle(versions)  # which are correct is not to be seen from their order
    workspace = dict(without_tests(repository, tests))
    files = apply_changes(repository.files, workspace)
    directories = list(repository.source.test_directories) or ["."]
    known = {
        path: hashlib.sha256(data).hexdigest() for path, data in files.items() if repository.source.is_test_path(path)
    }
    run = {
        **run_spec(repository.source, repository.plugins, [], 15.0 + 10 * repository.total_duration(tests)),
        "known": known,
        "directories": directories,
        "versions": [{file: source_text(data)} if data is not None else {} for data in versions],
        "compiled": [file],
    }
    expected = {
        "versions": len(versions),
        "correct": [number for number, data in enumerate(versions) if data in correct],
        "least": math.ceil(MIN_KILLED_SHARE * KEPT_MUTANTS),
    }
    return TaskDraft(
        category="testing",
        family="function" if not function.owner else "method",
        register=(register := rng.choice(("imperative", "issue"))),
        request=write_request(function, directories[0], register, rng),
        difficulty=min(5, 2 + (len(function.lines) > 20) + (len(function.lines) > 40)),
        workspace=workspace,
        solution={removed_tests_file(repository, tests)[0]: removed_tests_file(repository, tests)[1]},
        checks=(
            VerifierCheck("mutants", run, expected),
            scope_check(files, tuple("*" if directory == "." else f"/{directory}/*" for directory in directories)),
        ),
        protected=tuple(sorted({each.rpartition("/")[0] + "/**" for each in repository.source.modules if "/" in each})),
        metadata={"removed": len(tests)},
    )


def removed_tests_file(repository: Repository, tests: Sequence[str]) -> tuple[str, bytes]:
    """Return path and contents of a test file with exactly the removed tests."""
    file = test_name(tests[0])[0]
    kept = {test_name(test)[1] for test in tests}
    module = repository.module(file)
    others = {
        ".".join([*owner, node.name])
        for node, owner in definitions(module.tree)
        if node.name.startswith(("test", "Test"))
        and not any(
            name == ".".join([*owner, node.name]) or name.startswith(".".join([*owner, node.name]) + ".")
            for name in kept
        )
    }
    folder, _, name = file.rpartition("/")
    stem = name.removesuffix(".py").removeprefix("test_")
    data = remove_definitions(module.data, file, others)
    assert parse(file, data)
    return f"{folder}/test_{stem}_more.py".lstrip("/"), data


def write_request(function: PythonFunction, directory: str, register: str, rng: random.Random) -> str:
    name = prompts.quoted(function.qualname)
    if register == "issue":
        return prompts.choose(
            rng,
            f"{name} ({function.file}) has no tests. A mistake there would go unnoticed; write some in {directory}/.",
            f"Coverage dropped: nothing in {directory}/ checks {name} any more. Please add tests (not code).",
        )
    return prompts.choose(
        rng,
        f"Add tests for {name} in {function.file}. They have to notice when it does something wrong, the corners too.",
        f"Write tests for {name}, below {directory}/. Leave the code as it is.",
        f"Test {name} ({function.file}) thoroughly: pytest, in {directory}/.",
    )
