"""Debugging tasks: one to three mutations in covered code; the request describes the failure, never its location.

A mutation must fail some tests and not too many; most must have tracebacks that do not reach the mutated function.
"""

import random
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
from etude.tasks.generators.code import apply_edits, mentions
from etude.tasks.generators.executor import WORKSPACE, ExecutionResult
from etude.tasks.generators.failure_report import (
    FailureReport,
    mentions_any,
    mentions_none,
    read_failure_report,
    test_text,
    without_tests,
)
from etude.tasks.generators.operators import Mutation, mutations
from etude.tasks.generators.repository import Repository
from etude.tasks.generators.task_writer import protected_globs, pytest_check, suite_files

MAX_FAILING_SHARE = 0.15  # of all tests
MAX_TESTS = 250  # that execute the mutated line
MAX_TEST_SECONDS = 25.0
HIDDEN_TEST_REGISTERS = ("symptom", "issue", "imperative")  # in these, the failing tests are removed from the workspace
REGISTERS = (*HIDDEN_TEST_REGISTERS, "symptom", "issue", "log", "log", "tests")
P_REJECT_DIRECT = 0.7  # for a candidate whose tracebacks all reach the mutated functions


@generator("debugging", "debugging", weight=2.0, max_family_share=0.15)
def debugging(repository: Repository, rng: random.Random) -> Iterator[TaskCandidate]:
    mutations_left = covered_mutations(repository, rng)
    while True:
        count = rng.choice((1, 1, 1, 2, 2, 3))
        chosen: list[Mutation] = []
        for mutation in mutations_left:
            apart = all(mutation.function.file != other.function.file for other in chosen) or rng.random() < 0.2
            if apart and all(mutation.function.lines[0] not in other.function.lines for other in chosen):
                chosen.append(mutation)
            if len(chosen) == count:
                break
        if not chosen:
            return
        yield mutation_candidate(repository, chosen, rng.getrandbits(64))


def covered_mutations(repository: Repository, rng: random.Random) -> Iterator[Mutation]:
    """Yield mutations that a moderate number of tests execute, one per function before a second of any."""
    functions = [function for function in repository.functions if function.body_lines]
    tried: dict[int, set[str]] = {}
    for _ in range(6):
        rng.shuffle(functions)
        for function in functions:
            found = [each for each in mutations(function) if each.operator not in tried.setdefault(id(function), set())]
            rng.shuffle(found)
            for mutation in found:
                if mutation.line in repository.import_time_lines.get(function.file, ()):
                    continue  # executed at import: nothing could be collected
                tests = tests_executing(repository, [mutation])
                if not tests or len(tests) > MAX_TESTS or repository.total_duration(tests) > MAX_TEST_SECONDS:
                    continue
                if any(not mentions(test_text(repository, test), function.name) for test in sorted(tests)[:40]):
                    tried[id(function)].add(mutation.operator)
                    yield mutation
                    break


def tests_executing(repository: Repository, chosen: Sequence[Mutation]) -> set[str]:
    found: set[str] = set()
    for mutation in chosen:
        found |= repository.tests_covering(mutation.function.file, [mutation.line]) or set()
    return found


def mutated_files(repository: Repository, chosen: Sequence[Mutation]) -> dict[str, bytes | None]:
    """Return the mutated files."""
    files = sorted({mutation.function.file for mutation in chosen})
    return {
        file: apply_edits(repository.files[file], [each.edit for each in chosen if each.function.file == file])
        for file in files
    }


def site_words(repository: Repository, chosen: Sequence[Mutation]) -> tuple[str, ...]:
    """Return the names that would reveal the site: those of the functions and of their files."""
    found: dict[str, None] = {}
    for mutation in chosen:
        function = mutation.function
        for name in (function.name, *function.owner):
            if not name.startswith("__") and (name == function.name or name[0].islower()):
                found[name] = None
        found[function.file] = found[function.file.rpartition("/")[2]] = None
        if (dotted := repository.source.module_name(function.file)).count("."):
            found[dotted] = None
    found.pop("__init__.py", None)
    return tuple(found)


def mutation_candidate(repository: Repository, chosen: Sequence[Mutation], seed: int) -> TaskCandidate:
    """Return a candidate of these mutations. Each is executed separately, because each must fail a test."""
    states = {}
    for number, mutation in enumerate(chosen):
        tests = tuple(sorted(tests_executing(repository, [mutation])))
        states[str(number)] = WorkspaceState(mutated_files(repository, [mutation]), tests, expect_failure=True)

    def finish(results: Mapping[str, ExecutionResult]) -> TaskDraft:
        return make_draft(repository, chosen, [*results.values()], random.Random(seed))

    site = " ".join(sorted(mutation.site for mutation in chosen))
    family = chosen[0].operator if len(chosen) == 1 else f"{len(chosen)}-places"
    return TaskCandidate(site, family, states, finish)


def make_draft(
    repository: Repository, chosen: Sequence[Mutation], results: Sequence[ExecutionResult], rng: random.Random
) -> TaskDraft:
    failed: set[str] = set()
    direct = 0
    for mutation, result in zip(chosen, results, strict=True):
        own = failed_tests(repository, result, tests_executing(repository, [mutation]))
        direct += all(_traceback_reaches(result, test, mutation) for test in own)
        failed.update(own)
    if direct == len(chosen) and rng.random() < P_REJECT_DIRECT:
        raise CandidateRejected("traceback-tells", "every traceback reaches the mutated function")
    forbidden_words = site_words(repository, chosen)
    register, request = write_request(repository, results, forbidden_words, rng)
    workspace = mutated_files(repository, chosen)
    if register in HIDDEN_TEST_REGISTERS:
        workspace |= without_tests(repository, failed)
    near = {test for mutation in chosen for test in _tests_near(repository, mutation)}
    suite = suite_files(repository)
    level = 1 + (register in HIDDEN_TEST_REGISTERS) + (direct < len(chosen)) + (len(chosen) > 1) + (len(chosen) > 2)
    return TaskDraft(
        category="debugging",
        family=chosen[0].operator if len(chosen) == 1 else f"{len(chosen)}-places",
        register=register,
        request=request,
        difficulty=level,
        workspace=workspace,
        solution=revert_changes(repository, workspace),
        checks=(pytest_check(repository, repository.select_graded_tests(failed, near, rng), suite),),
        suite=suite,
        protected=protected_globs(repository),
        forbidden_words=forbidden_words,
        metadata={"failing": len(failed), "operators": [mutation.operator for mutation in chosen]},
    )


def failed_tests(repository: Repository, result: ExecutionResult, tests: Sequence[str] | set[str]) -> list[str]:
    """Return the failed tests; raise CandidateRejected if there are none, too many, or the run was incomplete."""
    if not result.complete:
        raise CandidateRejected("timeout", "the test run did not finish")
    failed = [test for test in sorted(tests) if result.status(test) != "passed"]
    if not failed:
        raise CandidateRejected("survives", "no test fails")
    if len(failed) > max(3, MAX_FAILING_SHARE * len(repository.durations)):
        raise CandidateRejected("too-broken", f"{len(failed)} of {len(repository.durations)} tests fail")
    if all(result.status(test) == "missing" for test in failed):
        raise CandidateRejected("not-importable", "no failing test can be collected")
    return failed


def _traceback_reaches(result: ExecutionResult, test: str, mutation: Mutation) -> bool:
    outcome = result.tests.get(test)
    file = f"{WORKSPACE}/{mutation.function.file}"
    return outcome is not None and any(
        frame[0] == file and frame[2] == mutation.function.name for frame in outcome.frames
    )


def _tests_near(repository: Repository, mutation: Mutation) -> set[str]:
    found: set[str] = set()
    for line in mutation.function.body_lines:
        found |= repository.tests_covering(mutation.function.file, [line]) or set()
    return found


def write_request(
    repository: Repository, results: Sequence[ExecutionResult], forbidden_words: Sequence[str], rng: random.Random
) -> tuple[str, str]:
    """Return the first sampled register that can describe every failure, and the request in it."""
    for register in dict.fromkeys(rng.sample(REGISTERS, len(REGISTERS))):
        if register == "tests":
            ids = [[id for id in _failing_ids(result) if not mentions_any(id, forbidden_words)] for result in results]
            if all(ids):
                return register, prompts.failing_tests(rng, [id for each in ids for id in each])
        elif register == "log":
            seen = [
                _discreet_reports(repository, result, forbidden_words, rng, 3 - len(results), log=True)
                for result in results
            ]
            if all(seen):
                return register, prompts.log(rng, [each for found in seen for each in found])
        else:
            parts = [_sentence(repository, result, forbidden_words, register, rng) for result in results]
            if all(parts):
                return register, prompts.numbered_list(list(dict.fromkeys(parts)))
    raise CandidateRejected("names-site", "every failure mentions the site")


def _failing_ids(result: ExecutionResult) -> list[str]:
    return [test for test, outcome in sorted(result.tests.items()) if outcome.status in ("failed", "error")]


def _discreet_reports(
    repository: Repository,
    result: ExecutionResult,
    forbidden_words: Sequence[str],
    rng: random.Random,
    limit: int,
    log: bool = False,
) -> list[FailureReport]:
    """Return reports of different tests that do not mention the site."""
    ids = _failing_ids(result)
    rng.shuffle(ids)
    found: dict[str, FailureReport] = {}
    for id in ids[:20]:
        report = read_failure_report(repository, id, result.tests[id])
        if report is not None and mentions_none(report, forbidden_words, log):
            found.setdefault(id.partition("[")[0], report)
        if len(found) >= max(1, limit):
            break
    return list(found.values())


def _sentence(
    repository: Repository, result: ExecutionResult, forbidden_words: Sequence[str], register: str, rng: random.Random
) -> str:
    writers = {"symptom": prompts.symptom, "issue": prompts.issue, "imperative": prompts.imperative}
    texts = (writers[register](rng, seen) for seen in _discreet_reports(repository, result, forbidden_words, rng, 8))
    return next((text for text in texts if text), "")
