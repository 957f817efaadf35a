"""Debugging: one to three covered wrong changes; the request tells what fails, never where.

Kept are changes that fail some tests and leave most alone, and mostly those whose tracebacks do not lead to the place.
"""

import random
from collections.abc import Iterator, Mapping, Sequence

from etude.tasks.generators import prompts
from etude.tasks.generators.candidate import Candidate, Draft, State, Unfit, back, generator
from etude.tasks.generators.code import mentions, spliced
from etude.tasks.generators.executor import WORKSPACE, Trial
from etude.tasks.generators.failure_report import Evidence, hidden_tests, named, read_evidence, silent, test_text
from etude.tasks.generators.operators import Mutation, mutations
from etude.tasks.generators.repository import Repository
from etude.tasks.generators.task_writer import protected_globs, pytest_check, suite_of

SHARE = 0.15  # of all tests that may fail
MOST = 250  # tests that are run to see what fails
SECONDS = 25.0
HIDING = ("symptom", "issue", "imperative")  # registers in which the failing tests are not in the workspace
REGISTERS = (*HIDING, "symptom", "issue", "log", "log", "tests")
PICKY = 0.7  # of candidates must not have a traceback that leads to the place


@generator("debugging", "debugging", weight=2.0, most=0.15)
def debugging(repository: Repository, rng: random.Random) -> Iterator[Candidate]:
    stream = covered_mutations(repository, rng)
    while True:
        count = rng.choice((1, 1, 1, 2, 2, 3))
        chosen: list[Mutation] = []
        for mutation in stream:
            apart = all(mutation.function.file != other.function.file for other in chosen) or rng.random() < 0.2
            if apart and all(mutation.function.lines[0] not in other.function.lines for other in chosen):
                chosen.append(mutation)
            if len(chosen) == count:
                break
        if not chosen:
            return
        yield planted(repository, chosen, rng.getrandbits(64))


def covered_mutations(repository: Repository, rng: random.Random) -> Iterator[Mutation]:
    """Wrong changes that a moderate number of tests run, one of each function before a second of any."""
    functions = [function for function in repository.functions if function.body_lines]
    tried: dict[int, set[str]] = {}
    for _ in range(6):
        rng.shuffle(functions)
        for function in functions:
            found = [each for each in mutations(function) if each.operator not in tried.setdefault(id(function), set())]
            rng.shuffle(found)
            for mutation in found:
                if mutation.line in repository.early.get(function.file, ()):
                    continue  # wrong before the first test: nothing could be collected
                tests = tests_of(repository, [mutation])
                if not tests or len(tests) > MOST or repository.time_of(tests) > SECONDS:
                    continue
                if any(not mentions(test_text(repository, test), function.name) for test in sorted(tests)[:40]):
                    tried[id(function)].add(mutation.operator)
                    yield mutation
                    break


def tests_of(repository: Repository, planted: Sequence[Mutation]) -> set[str]:
    found: set[str] = set()
    for mutation in planted:
        found |= repository.running(mutation.function.file, [mutation.line]) or set()
    return found


def mutated(repository: Repository, planted: Sequence[Mutation]) -> dict[str, bytes | None]:
    """The files that have the changes, with these."""
    files = sorted({mutation.function.file for mutation in planted})
    return {
        file: spliced(repository.files[file], [each.edit for each in planted if each.function.file == file])
        for file in files
    }


def secrets_of(repository: Repository, chosen: Sequence[Mutation]) -> tuple[str, ...]:
    """Names that would give the place away: of the functions, and of their files."""
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


def planted(repository: Repository, chosen: Sequence[Mutation], seed: int) -> Candidate:
    """A candidate out of wrong changes. Each is tried by itself: each must be seen."""
    states = {}
    for number, mutation in enumerate(chosen):
        tests = tuple(sorted(tests_of(repository, [mutation])))
        states[str(number)] = State(mutated(repository, [mutation]), tests, breaks=True)

    def finish(trials: Mapping[str, Trial]) -> Draft:
        return make_draft(repository, chosen, [*trials.values()], random.Random(seed))

    site = " ".join(sorted(mutation.site for mutation in chosen))
    family = chosen[0].operator if len(chosen) == 1 else f"{len(chosen)}-places"
    return Candidate(site, family, states, finish)


def make_draft(
    repository: Repository, chosen: Sequence[Mutation], trials: Sequence[Trial], rng: random.Random
) -> Draft:
    failed: set[str] = set()
    shown = 0
    for mutation, trial in zip(chosen, trials, strict=True):
        own = failures(repository, trial, tests_of(repository, [mutation]))
        shown += all(_leads_there(trial, test, mutation) for test in own)
        failed.update(own)
    if shown == len(chosen) and rng.random() < PICKY:
        raise Unfit("traceback-tells", "every traceback leads to the place")
    secret = secrets_of(repository, chosen)
    register, request = put_request(repository, trials, secret, rng)
    workspace = mutated(repository, chosen)
    if register in HIDING:
        workspace |= hidden_tests(repository, failed)
    near = {test for mutation in chosen for test in _near(repository, mutation)}
    suite = suite_of(repository)
    level = 1 + (register in HIDING) + (shown < len(chosen)) + (len(chosen) > 1) + (len(chosen) > 2)
    return Draft(
        category="debugging",
        family=chosen[0].operator if len(chosen) == 1 else f"{len(chosen)}-places",
        register=register,
        request=request,
        difficulty=level,
        workspace=workspace,
        solved=back(repository, workspace),
        checks=(pytest_check(repository, repository.graded_tests(failed, near, rng), suite),),
        suite=suite,
        protected=protected_globs(repository),
        secret=secret,
        facts={"failing": len(failed), "operators": [mutation.operator for mutation in chosen]},
    )


def failures(repository: Repository, trial: Trial, tests: Sequence[str] | set[str]) -> list[str]:
    """The tests that a state fails; Unfit when they are none, or too many, or were not all run."""
    if not trial.complete:
        raise Unfit("timeout", "the tests did not come to their end")
    failed = [test for test in sorted(tests) if trial.status(test) != "passed"]
    if not failed:
        raise Unfit("survives", "no test fails")
    if len(failed) > max(3, SHARE * len(repository.seconds)):
        raise Unfit("too-broken", f"{len(failed)} of {len(repository.seconds)} tests fail")
    if all(trial.status(test) == "missing" for test in failed):
        raise Unfit("not-importable", "tests cannot even be collected")
    return failed


def _leads_there(trial: Trial, test: str, mutation: Mutation) -> bool:
    outcome = trial.tests.get(test)
    file = f"{WORKSPACE}/{mutation.function.file}"
    return outcome is not None and any(
        frame[0] == file and frame[2] == mutation.function.name for frame in outcome.frames
    )


def _near(repository: Repository, mutation: Mutation) -> set[str]:
    found: set[str] = set()
    for line in mutation.function.body_lines:
        found |= repository.running(mutation.function.file, [line]) or set()
    return found


def put_request(
    repository: Repository, trials: Sequence[Trial], secret: Sequence[str], rng: random.Random
) -> tuple[str, str]:
    """A register that the failures have words for, and the request in it: something of each trial."""
    for register in dict.fromkeys(rng.sample(REGISTERS, len(REGISTERS))):
        if register == "tests":
            ids = [[id for id in _failed(trial) if not named(id, secret)] for trial in trials]
            if all(ids):
                return register, prompts.failing(rng, [id for each in ids for id in each])
        elif register == "log":
            seen = [_seen(repository, trial, secret, rng, 3 - len(trials), log=True) for trial in trials]
            if all(seen):
                return register, prompts.log(rng, [each for found in seen for each in found])
        else:
            parts = [_sentence(repository, trial, secret, register, rng) for trial in trials]
            if all(parts):
                return register, prompts.listed(list(dict.fromkeys(parts)))
    raise Unfit("names-site", "every failure names the place")


def _failed(trial: Trial) -> list[str]:
    return [test for test, outcome in sorted(trial.tests.items()) if outcome.status in ("failed", "error")]


def _seen(
    repository: Repository, trial: Trial, secret: Sequence[str], rng: random.Random, most: int, log: bool = False
) -> list[Evidence]:
    """Failures that name no place, of different tests."""
    ids = _failed(trial)
    rng.shuffle(ids)
    found: dict[str, Evidence] = {}
    for id in ids[:20]:
        evidence = read_evidence(repository, id, trial.tests[id])
        if evidence is not None and silent(evidence, secret, log):
            found.setdefault(id.partition("[")[0], evidence)
        if len(found) >= max(1, most):
            break
    return list(found.values())


def _sentence(repository: Repository, trial: Trial, secret: Sequence[str], register: str, rng: random.Random) -> str:
    writers = {"symptom": prompts.symptom, "issue": prompts.issue, "imperative": prompts.imperative}
    texts = (writers[register](rng, seen) for seen in _seen(repository, trial, secret, rng, 8))
    return next((text for text in texts if text), "")
