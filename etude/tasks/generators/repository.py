"""A surveyed repository: which tests pass, how long each takes, and which lines each of them executes.

`prepare` fetches the packages, builds the environment and runs all tests twice, with and without coverage. The survey
is cached by the digest of the sources.
"""

import json
import os
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from etude.errors import EtudeError
from etude.files import user_cache
from etude.pods.fleet import Fleet
from etude.pods.host_system import host_system
from etude.tasks.base_images import HostSettings
from etude.tasks.generators.code import Module, PythonFunction, is_parsable, parse
from etude.tasks.generators.executor import ExecutionResult, RepositoryExecutor, open_executor
from etude.tasks.generators.packages import fetch_wheels, pytest_plugin_names
from etude.tasks.generators.source import RepositorySource

SURVEY_FORMAT = 2  # version of survey.json
SURVEY_TIMEOUT_S = 900.0
MIN_PASSING_TESTS = 10  # fewer give no useful tasks
SLOW_TEST_S = 3.0  # slower tests are not added to the graded tests


@dataclass(frozen=True)
class Repository:
    """The input of generators. `coverage` maps file and line to the tests that execute it, or their number if many."""

    source: RepositorySource
    wheels: Mapping[str, bytes] = field(repr=False)
    durations: Mapping[str, float] = field(repr=False)  # of the tests that pass in both runs
    flaky_tests: tuple[str, ...] = ()  # tests whose status differs between the runs
    coverage: Mapping[str, Mapping[int, tuple[str, ...] | int]] = field(default_factory=dict, repr=False)
    # lines executed before the first test
    import_time_lines: Mapping[str, frozenset[int]] = field(default_factory=dict, repr=False)

    @property
    def label(self) -> str:
        return self.source.label

    @property
    def files(self) -> Mapping[str, bytes]:
        return self.source.files

    @cached_property
    def plugins(self) -> tuple[str, ...]:
        return pytest_plugin_names(self.wheels)

    def module(self, path: str) -> Module:
        return parse(path, self.files[path])

    @cached_property
    def python_paths(self) -> frozenset[str]:
        """The Python files and stubs that parse; some repositories contain others as test data."""
        return frozenset(
            path for path, data in self.files.items() if path.endswith((".py", ".pyi")) and is_parsable(data)
        )

    @cached_property
    def modules(self) -> tuple[Module, ...]:
        """The non-test modules that tests execute."""
        return tuple(
            self.module(path) for path in self.source.modules if path in self.coverage and path in self.python_paths
        )

    @cached_property
    def functions(self) -> tuple[PythonFunction, ...]:
        return tuple(function for module in self.modules for function in module.functions)

    @cached_property
    def test_modules(self) -> tuple[Module, ...]:
        """Test files and their helpers."""
        paths = [path for path in sorted(self.python_paths) if path.endswith(".py") and self.source.is_test_path(path)]
        return tuple(self.module(path) for path in paths)

    def tests_covering(self, file: str, lines: Iterable[int]) -> set[str] | None:
        """Return the stable tests that execute any of these lines, or None when there are very many."""
        found: set[str] = set()
        known = self.coverage.get(file, {})
        for line in lines:
            tests = known.get(line, ())
            if isinstance(tests, int):
                return None
            found.update(tests)
        return {test for test in found if test in self.durations}

    def total_duration(self, tests: Iterable[str]) -> float:
        return sum(self.durations.get(test, 0.0) for test in tests)

    def select_graded_tests(self, required: Collection[str], nearby: Collection[str], rng: random.Random) -> list[str]:
        """Return the tests a verifier runs: the required ones, and samples of those near the change and of all others.

        Samples have a fixed time budget and come from few files: importing a test module takes longer than most tests,
        and running everything would make verification as slow as the repository's whole suite.
        """
        chosen = dict.fromkeys(sorted(required))
        for pool, file_count, budget, limit in ((nearby, 3, 1.0, 40), (self.durations, 1, 0.5, 20)):
            left = sorted(
                test for test in pool if test not in chosen and self.durations.get(test, SLOW_TEST_S) < SLOW_TEST_S
            )
            rng.shuffle(left)
            known = {test.partition("::")[0] for test in chosen}
            fresh = list(
                dict.fromkeys(test.partition("::")[0] for test in left if test.partition("::")[0] not in known)
            )
            allowed = {*fresh[:file_count], *(known if pool is nearby else ())}
            for test in [test for test in left if test.partition("::")[0] in allowed][:limit]:
                budget -= self.durations[test]
                if budget < 0:
                    break
                chosen[test] = None
        order = {test: number for number, test in enumerate(self.durations)}  # order of the suite
        return sorted(chosen, key=lambda test: order.get(test, 0))


async def prepare(
    fleet: Fleet,
    source: RepositorySource,
    cache: Path,
    *,
    extra: Sequence[str] = (),
    wheels: Path | None = None,
    packages: Mapping[str, bytes] | None = None,
    host_settings: HostSettings | None = None,
) -> Repository:
    """Survey a repository, or load its survey from `cache`.

    `extra` are requirements that the repository does not declare; `wheels` is a directory that replaces the package
    index; `packages` are the wheels themselves if the caller has them (empty: the image has all that is needed).
    """
    directory = cache / f"{source.label}-{source.digest[:16]}"
    survey_file = directory / "survey.json"
    if packages is None:
        packages = _cached_wheels(directory / "wheels") if survey_file.exists() else fetch_wheels(source, extra, wheels)
    if (found := _load_survey(survey_file, source, packages)) is not None:
        return found
    async with open_executor(fleet, source, packages, host_settings) as executor:
        repository = await survey(executor, packages)
    _save_survey(directory, repository)
    return repository


async def survey(executor: RepositoryExecutor, packages: Mapping[str, bytes]) -> Repository:
    """Run the whole suite twice; keep the tests that pass both times."""
    source = executor.source
    traced = await executor.run_tests({}, source.tests, timeout=SURVEY_TIMEOUT_S, measure=True)
    plain = await executor.run_tests({}, [*_collected_files(traced, source)], timeout=SURVEY_TIMEOUT_S)
    passed = [id for id, outcome in traced.tests.items() if outcome.status == "passed"]
    stable = {id: plain.tests[id].seconds for id in passed if plain.status(id) == "passed"}
    if len(stable) < MIN_PASSING_TESTS:
        raise EtudeError(
            f"{source.label}: {len(stable)} tests pass, expected at least {MIN_PASSING_TESTS}; output of pytest:\n"
            f"{plain.output[-2000:]}"
        )
    both = {*traced.tests, *plain.tests}
    flaky_tests = tuple(sorted(id for id in both if traced.status(id) != plain.status(id)))
    return Repository(source, packages, stable, flaky_tests, traced.coverage, traced.import_time_lines)


def _collected_files(result: ExecutionResult, source: RepositorySource) -> list[str]:
    """Return the test files of which at least one test ran."""
    seen = {id.partition("::")[0] for id in result.tests}
    return [path for path in source.tests if path in seen] or list(source.tests)


# ------------------------------------------------------------------------------------------------- cache


def default_cache() -> Path:
    """Return the cache directory of surveys."""
    return user_cache("repositories")


def _cached_wheels(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.glob("*.whl"))}


def _load_survey(file: Path, source: RepositorySource, packages: Mapping[str, bytes]) -> Repository | None:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    python, wheels = host_system().python, sorted(packages)
    same = {"format": SURVEY_FORMAT, "digest": source.digest, "python": python, "wheels": wheels}
    if any(found.get(key) != value for key, value in same.items()):
        return None
    names = list(found["names"])
    coverage = {
        path: {
            int(line): tests if isinstance(tests, int) else tuple(names[number] for number in tests)
            for line, tests in lines.items()
        }
        for path, lines in found["covers"].items()
    }
    import_time_lines = {path: frozenset(lines) for path, lines in found["early"].items()}
    return Repository(source, packages, found["seconds"], tuple(found["unsteady"]), coverage, import_time_lines)


def _save_survey(directory: Path, repository: Repository) -> None:
    (directory / "wheels").mkdir(parents=True, exist_ok=True)
    for name, data in repository.wheels.items():
        (directory / "wheels" / name).write_bytes(data)
    names: dict[str, int] = {}
    coverage = {
        path: {
            line: tests if isinstance(tests, int) else [names.setdefault(test, len(names)) for test in tests]
            for line, tests in lines.items()
        }
        for path, lines in repository.coverage.items()
    }
    record = {
        "format": SURVEY_FORMAT,
        "digest": repository.source.digest,
        "python": host_system().python,
        "wheels": sorted(repository.wheels),
        "seconds": dict(repository.durations),
        "unsteady": list(repository.flaky_tests),
        "names": list(names),
        "covers": coverage,
        "early": {path: sorted(lines) for path, lines in repository.import_time_lines.items()},
    }
    staging = directory / f"survey.{os.getpid()}"
    staging.write_text(json.dumps(record))
    staging.replace(directory / "survey.json")
