"""What tests say about a change: which it fixes, which it keeps, which are flaky. Pure functions over statuses."""

import random
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from etude.tasks.generators.executor import ExecutionResult

RUNS = 3  # before and after a change
MAX_KEPT = 120  # tests that passed before and after, in a verifier
OTHER_FILES, OTHER_TESTS = 3, 30  # of files that the change does not touch
SMALL_FILE_BYTES = 40_000
SLOW_TEST_S = 5.0
IMPORT_ERROR = re.compile(
    r"ImportError|ModuleNotFoundError|cannot import name|No module named|SyntaxError|Cannot find module"
)
ADDRESS = re.compile(r" at 0x[0-9a-f]+>")  # in the name of a test whose parameter is shown by its address


@dataclass(frozen=True)
class TestEvidence:
    """Tests by what they did in all runs before and after a change."""

    __test__ = False  # no test class

    fail_to_pass: tuple[str, ...] = ()
    pass_to_pass: tuple[str, ...] = ()
    flaky: tuple[str, ...] = ()
    import_only: bool = False  # every fail-to-pass test fails because a file cannot be imported
    durations: Mapping[str, float] = field(default_factory=dict, repr=False)

    def seconds(self, tests: Collection[str]) -> float:
        return sum(self.durations.get(test, 0.0) for test in tests)


def compare_runs(
    before: Sequence[ExecutionResult], after: Sequence[ExecutionResult], chosen: Sequence[str] = ()
) -> TestEvidence:
    """Return the evidence of runs before and after a change, of all tests or of the chosen ones. Tests whose status is
    not constant are flaky; those that have another name in every run cannot be asked for, and do not count."""
    names = chosen or list(dict.fromkeys(test for run in (*after, *before) for test in run.tests))
    names = [test for test in names if not ADDRESS.search(test)]
    flaky: list[str] = []
    fixed: list[str] = []
    kept: list[str] = []
    for test in names:
        old, new = {run.status(test) for run in before}, {run.status(test) for run in after}
        if len(old) > 1 or len(new) > 1:
            flaky.append(test)
        elif new == {"passed"}:
            (kept if old == {"passed"} else fixed).append(test)
    durations = {test: outcome.seconds for test, outcome in after[-1].tests.items()}
    unimported = bool(fixed) and all(_fails_by_import(test, before[0]) for test in fixed)
    return TestEvidence(tuple(fixed), tuple(kept), tuple(sorted(flaky)), unimported, durations)


def _fails_by_import(test: str, run: ExecutionResult) -> bool:
    """Return whether a test was not collected, or fails because a name cannot be imported."""
    outcome = run.tests.get(test)
    return outcome is None or IMPORT_ERROR.match(outcome.message.strip()) is not None


def graded_files(
    files: Sequence[str], changed: Sequence[str], sizes: Mapping[str, int], rng: random.Random
) -> list[str]:
    """Return the test files that a verifier may run: the changed ones, and a few small others."""
    others = [file for file in sorted(files) if file not in changed and sizes.get(file, 0) <= SMALL_FILE_BYTES]
    rng.shuffle(others)
    return [*changed, *others[:OTHER_FILES]]


def kept_tests(evidence: TestEvidence, changed: Sequence[str], rng: random.Random) -> list[str]:
    """Return the pass-to-pass tests that a verifier runs: those of changed files first."""
    usable = [test for test in evidence.pass_to_pass if evidence.durations.get(test, 0.0) < SLOW_TEST_S]
    near = [test for test in usable if test.partition("::")[0] in changed]
    far = [test for test in usable if test.partition("::")[0] not in changed]
    rng.shuffle(near)
    rng.shuffle(far)
    return [*near[: MAX_KEPT - OTHER_TESTS], *far[:OTHER_TESTS]]
