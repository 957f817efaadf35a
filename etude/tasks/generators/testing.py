"""Testing: the tests of a function are gone; new ones must pass on it and notice versions of it that are wrong.

The wrong versions are hidden, and each was seen to fail the tests that were taken out. Beside them stand versions that
mean the same: a test that looks at the source instead of what it does fails on those.
"""

import ast
import hashlib
import math
import random
from collections.abc import Iterator, Mapping, Sequence

from etude.tasks.generators import prompts
from etude.tasks.generators.candidate import Candidate, Check, Draft, State, Unfit, generator, overlaid
from etude.tasks.generators.code import (
    Edit,
    Function,
    definitions,
    mentions,
    parse,
    parses,
    spliced,
    without_definitions,
)
from etude.tasks.generators.executor import Trial, run_spec
from etude.tasks.generators.failure_report import hidden_tests, test_name, test_text
from etude.tasks.generators.operators import Mutation, mutations
from etude.tasks.generators.repository import Repository
from etude.tasks.generators.task_writer import scope_check

TRIED, KEPT = 8, 5  # wrong versions
TARGET = 0.8  # of them that must be noticed
SECONDS = 4.0  # that the tests of a function may take
SLOW = 12.0  # seconds after which a wrong version is not used: an endless loop costs its whole time in every grading


@generator("testing", "testing", weight=1.0, most=1.0)
def testing(repository: Repository, rng: random.Random) -> Iterator[Candidate]:
    functions = [each for each in repository.functions if _may_be_asked(each)]
    rng.shuffle(functions)
    for function in functions:
        tests = _own_tests(repository, function)
        files = {test_name(test)[0] for test in tests}
        if not tests or len(tests) > 60 or len(files) > 1 or repository.time_of(tests) > SECONDS:
            continue
        found = [each for each in mutations(function) if repository.running(function.file, [each.line])]
        rng.shuffle(found)
        chosen = _varied(found)[:TRIED]
        if len(chosen) >= KEPT:
            yield candidate_for(repository, function, sorted(tests), chosen, rng.getrandbits(64))


def _may_be_asked(function: Function) -> bool:
    public = not any(part.startswith("_") for part in (*function.owner, function.name))
    return public and len(function.owner) <= 1 and len(function.body) >= 2 and len(function.name) > 3


def _own_tests(repository: Repository, function: Function) -> set[str]:
    """Tests that run a function and have its name."""
    ran: set[str] = set()
    for line in function.body_lines:
        ran |= repository.running(function.file, [line]) or set()
    return {test for test in ran if mentions(test_text(repository, test), function.name)}


def _varied(found: Sequence[Mutation]) -> list[Mutation]:
    """One of each operator and line before a second of any."""
    first: dict[tuple[str, int], Mutation] = {}
    for mutation in found:
        first.setdefault((mutation.operator, mutation.line), mutation)
    seen: dict[str, int] = {}
    ranked: list[tuple[int, int, Mutation]] = []
    for mutation in first.values():
        seen[mutation.operator] = seen.get(mutation.operator, 0) + 1
        ranked.append((seen[mutation.operator], len(ranked), mutation))
    return [mutation for _, _, mutation in sorted(ranked, key=lambda each: each[:2])]


def candidate_for(
    repository: Repository, function: Function, tests: Sequence[str], chosen: Sequence[Mutation], seed: int
) -> Candidate:
    file = function.file
    versions = [spliced(function.module.data, [mutation.edit]) for mutation in chosen]
    equal = same_meaning(function)
    states = {str(number): State({file: data}, tuple(tests)) for number, data in enumerate(versions)}
    states["equal"] = State({file: equal}, tuple(tests))

    def finish(trials: Mapping[str, Trial]) -> Draft:
        return make_draft(repository, function, tests, versions, equal, trials, random.Random(seed))

    return Candidate(f"{file}:{function.qualname}", "function" if not function.owner else "method", states, finish)


def same_meaning(function: Function) -> bytes:
    """The function with the same behaviour in other words: values are named before they are returned."""
    module = function.module
    edits = []
    for node in ast.walk(function.node):
        if isinstance(node, ast.Return) and node.value is not None and node.lineno == node.end_lineno:
            line = module.lines[node.lineno - 1]
            if line.strip().startswith("return") and line[: node.col_offset].strip() == "":
                indent = " " * node.col_offset
                start, end = module.span(node)
                edits.append(Edit(start, end, f"outcome_ = {module.text(node.value)}\n{indent}return outcome_"))
    first = function.body[0]
    if not edits and module.lines[first.lineno - 1][: first.col_offset].strip() == "":
        at = module.offset(first.lineno, 0)
        edits.append(Edit(at, at, " " * first.col_offset + "outcome_ = None\n"))
    return spliced(module.data, edits)


def make_draft(
    repository: Repository,
    function: Function,
    tests: Sequence[str],
    versions: Sequence[bytes],
    equal: bytes,
    trials: Mapping[str, Trial],
    rng: random.Random,
) -> Draft:
    def passes(trial: Trial) -> bool:
        return trial.complete and all(trial.status(test) == "passed" for test in tests)

    if equal == function.module.data or not parses(equal) or not passes(trials["equal"]):
        raise Unfit("no-equal", "there is no version that means the same")
    runs = [(data, trials[str(number)]) for number, data in enumerate(versions)]
    noticed = [data for data, trial in runs if trial.complete and trial.seconds < SLOW and not passes(trial)]
    if len(noticed) < KEPT:
        raise Unfit("survives", f"{len(noticed)} of {len(versions)} wrong versions fail its tests")
    noticed = noticed[:KEPT]
    file = function.file
    workspace = dict(hidden_tests(repository, tests))
    whole = overlaid(repository.files, workspace)
    directories = list(repository.source.test_directories) or ["."]
    known = {
        path: hashlib.sha256(data).hexdigest() for path, data in whole.items() if repository.source.is_test_path(path)
    }
    run = {
        **run_spec(repository.source, repository.plugins, [], 15.0 + 10 * repository.time_of(tests)),
        "known": known,
        "directories": directories,
        "count": KEPT,
    }
    hidden = {f"mutants/{number}/{file}": data for number, data in enumerate(noticed)}
    return Draft(
        category="testing",
        family="function" if not function.owner else "method",
        register=(register := rng.choice(("imperative", "issue"))),
        request=put_request(function, directories[0], register, rng),
        difficulty=min(5, 2 + (len(function.lines) > 20) + (len(function.lines) > 40)),
        workspace=workspace,
        solved={again(repository, tests)[0]: again(repository, tests)[1]},
        checks=(
            Check("mutants", run, {"least": math.ceil(TARGET * KEPT)}),
            scope_check(whole, tuple(f"{directory}/*" for directory in directories)),
        ),
        hidden={**hidden, f"equal/0/{file}": equal},
        protected=tuple(sorted({each.rpartition("/")[0] + "/**" for each in repository.source.modules if "/" in each})),
        facts={"removed": len(tests)},
    )


def again(repository: Repository, tests: Sequence[str]) -> tuple[str, bytes]:
    """A test file with the tests that were taken out, and no others."""
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
    data = without_definitions(module.data, file, others)
    assert parse(file, data)
    return f"{folder}/test_{stem}_more.py".lstrip("/"), data


def put_request(function: Function, directory: str, register: str, rng: random.Random) -> str:
    name = prompts.quoted(function.qualname)
    if register == "issue":
        return prompts.pick(
            rng,
            f"{name} ({function.file}) has no tests. A mistake there would go unnoticed; write some in {directory}/.",
            f"Coverage dropped: nothing in {directory}/ checks {name} any more. Please add tests (not code).",
        )
    return prompts.pick(
        rng,
        f"Add tests for {name} in {function.file}. They have to notice when it does something wrong, the corners too.",
        f"Write tests for {name}, below {directory}/. Leave the code as it is.",
        f"Test {name} ({function.file}) thoroughly: pytest, in {directory}/.",
    )
