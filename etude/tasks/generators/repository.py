"""A repository that was run once: which tests pass, how long each takes, and which lines each of them runs.

`prepare` fetches its packages, makes its environment and runs its tests twice, once watched and once plain. What came
of it is kept by the digest of the sources, so it happens once.
"""

import json
import os
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from etude.errors import EtudeError
from etude.pods.fleet import Fleet
from etude.tasks.base_images import Provision, host_python
from etude.tasks.generators.code import Function, Module, parse, parses
from etude.tasks.generators.executor import Trial, Workbench, open_workbench
from etude.tasks.generators.packages import fetch_wheels, plugins_among
from etude.tasks.generators.source import Source

FORMAT = 2  # of what is kept
SURVEY_S = 900.0
LEAST = 10  # tests that pass: fewer make no tasks worth having
SLOW = 3.0  # seconds from which on a test is not used in grading


@dataclass(frozen=True)
class Repository:
    """What generators work on. `covers` has for a file and line the tests that run it, or their number if very many."""

    source: Source
    wheels: Mapping[str, bytes] = field(repr=False)
    seconds: Mapping[str, float] = field(repr=False)  # tests that pass every time
    unsteady: tuple[str, ...] = ()  # those that do not
    covers: Mapping[str, Mapping[int, tuple[str, ...] | int]] = field(default_factory=dict, repr=False)
    early: Mapping[str, frozenset[int]] = field(default_factory=dict, repr=False)  # lines that run before any test does

    @property
    def label(self) -> str:
        return self.source.label

    @property
    def files(self) -> Mapping[str, bytes]:
        return self.source.files

    @cached_property
    def plugins(self) -> tuple[str, ...]:
        return plugins_among(self.wheels)

    def module(self, path: str) -> Module:
        return parse(path, self.files[path])

    @cached_property
    def python(self) -> frozenset[str]:
        """The Python files and stubs that can be read; some repositories have others, for their tests."""
        return frozenset(path for path, data in self.files.items() if path.endswith((".py", ".pyi")) and parses(data))

    @cached_property
    def modules(self) -> tuple[Module, ...]:
        """The product's files that tests ran."""
        return tuple(self.module(path) for path in self.source.modules if path in self.covers and path in self.python)

    @cached_property
    def functions(self) -> tuple[Function, ...]:
        return tuple(function for module in self.modules for function in module.functions)

    @cached_property
    def test_modules(self) -> tuple[Module, ...]:
        """Test files, and what helps them."""
        paths = [path for path in sorted(self.python) if path.endswith(".py") and self.source.is_test_path(path)]
        return tuple(self.module(path) for path in paths)

    def running(self, file: str, lines: Iterable[int]) -> set[str] | None:
        """The steady tests that run any of these lines; None when they are very many."""
        found: set[str] = set()
        known = self.covers.get(file, {})
        for line in lines:
            tests = known.get(line, ())
            if isinstance(tests, int):
                return None
            found.update(tests)
        return {test for test in found if test in self.seconds}

    def time_of(self, tests: Iterable[str]) -> float:
        return sum(self.seconds.get(test, 0.0) for test in tests)

    def graded_tests(self, must: Collection[str], near: Collection[str], rng: random.Random) -> list[str]:
        """What a grader runs: the tests that matter, and a sample of those near the change and of all others.

        A fixed share of time, out of few files: importing test modules takes longer than most tests do, and running
        everything would make grading as slow as the repository's whole suite.
        """
        chosen = dict.fromkeys(sorted(must))
        for pool, files, seconds, most in ((near, 3, 1.0, 40), (self.seconds, 1, 0.5, 20)):
            left = sorted(test for test in pool if test not in chosen and self.seconds.get(test, SLOW) < SLOW)
            rng.shuffle(left)
            known = {test.partition("::")[0] for test in chosen}
            fresh = list(
                dict.fromkeys(test.partition("::")[0] for test in left if test.partition("::")[0] not in known)
            )
            allowed = {*fresh[:files], *(known if pool is near else ())}
            for test in [test for test in left if test.partition("::")[0] in allowed][:most]:
                seconds -= self.seconds[test]
                if seconds < 0:
                    break
                chosen[test] = None
        order = {test: number for number, test in enumerate(self.seconds)}  # the suite's own
        return sorted(chosen, key=lambda test: order.get(test, 0))


async def prepare(
    fleet: Fleet,
    source: Source,
    cache: Path,
    *,
    extra: Sequence[str] = (),
    wheels: Path | None = None,
    packages: Mapping[str, bytes] | None = None,
    provision: Provision | None = None,
) -> Repository:
    """A repository's survey, from `cache` where it is known.

    `extra` are requirements that the repository does not name, `wheels` a directory to take all from instead of the
    package index; `packages` are the wheels themselves where the caller has them (none: the image has what is needed).
    """
    place = cache / f"{source.label}-{source.digest[:16]}"
    kept = place / "survey.json"
    if packages is None:
        packages = _kept_wheels(place / "wheels") if kept.exists() else fetch_wheels(source, extra, wheels)
    if (found := _recall(kept, source, packages)) is not None:
        return found
    async with open_workbench(fleet, source, packages, provision) as bench:
        repository = await survey(bench, packages)
    _keep(place, repository)
    return repository


async def survey(bench: Workbench, packages: Mapping[str, bytes]) -> Repository:
    """Run the whole suite twice."""
    source = bench.source
    watched = await bench.try_tests({}, source.tests, seconds=SURVEY_S, measure=True)
    plain = await bench.try_tests({}, [*_collected(watched, source)], seconds=SURVEY_S)
    passed = [id for id, outcome in watched.tests.items() if outcome.status == "passed"]
    steady = {id: plain.tests[id].seconds for id in passed if plain.status(id) == "passed"}
    if len(steady) < LEAST:
        raise EtudeError(
            f"{source.label}: {len(steady)} tests pass, expected at least {LEAST}; they say:\n{plain.output[-2000:]}"
        )
    both = {*watched.tests, *plain.tests}
    unsteady = tuple(sorted(id for id in both if watched.status(id) != plain.status(id)))
    return Repository(source, packages, steady, unsteady, watched.lines, watched.early)


def _collected(trial: Trial, source: Source) -> list[str]:
    """The test files of which something ran."""
    seen = {id.partition("::")[0] for id in trial.tests}
    return [path for path in source.tests if path in seen] or list(source.tests)


# ------------------------------------------------------------------------------------------------- keeping


def default_cache() -> Path:
    """Where surveys are kept: the cache directory of the desktop's convention."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "etude" / "repositories"


def _kept_wheels(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.glob("*.whl"))}


def _recall(file: Path, source: Source, packages: Mapping[str, bytes]) -> Repository | None:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    same = {"format": FORMAT, "digest": source.digest, "python": host_python(), "wheels": sorted(packages)}
    if any(found.get(key) != value for key, value in same.items()):
        return None
    names = list(found["names"])
    covers = {
        path: {
            int(line): tests if isinstance(tests, int) else tuple(names[number] for number in tests)
            for line, tests in lines.items()
        }
        for path, lines in found["covers"].items()
    }
    early = {path: frozenset(lines) for path, lines in found["early"].items()}
    return Repository(source, packages, found["seconds"], tuple(found["unsteady"]), covers, early)


def _keep(place: Path, repository: Repository) -> None:
    (place / "wheels").mkdir(parents=True, exist_ok=True)
    for name, data in repository.wheels.items():
        (place / "wheels" / name).write_bytes(data)
    names: dict[str, int] = {}
    covers = {
        path: {
            line: tests if isinstance(tests, int) else [names.setdefault(test, len(names)) for test in tests]
            for line, tests in lines.items()
        }
        for path, lines in repository.covers.items()
    }
    record = {
        "format": FORMAT,
        "digest": repository.source.digest,
        "python": host_python(),
        "wheels": sorted(repository.wheels),
        "seconds": dict(repository.seconds),
        "unsteady": list(repository.unsteady),
        "names": list(names),
        "covers": covers,
        "early": {path: sorted(lines) for path, lines in repository.early.items()},
    }
    staging = place / f"survey.{os.getpid()}"
    staging.write_text(json.dumps(record))
    staging.replace(place / "survey.json")
