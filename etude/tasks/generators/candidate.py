"""What a generator makes, in two steps: a candidate says what to try in a pod, and makes a draft of what came of it.

    @generator("debugging", "debugging")
    def debugging(repository, rng) -> Iterator[Candidate]: ...

A draft is a task before it is files: the workspace, what solves it, what is asked, and the checks that grade it.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from etude.tasks.generators.executor import Changes, Trial
from etude.tasks.generators.repository import Repository
from etude.tasks.task import Category


class Unfit(Exception):
    """A candidate that makes no task; the reason is a short code that tables count."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class State:
    """A changed workspace, and what to run in it: tests, or a command.

    Where a state `breaks`, nothing more is tried when all its tests pass.
    """

    changes: Changes
    tests: tuple[str, ...] = ()
    command: str = ""
    breaks: bool = False

    def survived(self, trial: Trial) -> bool:
        """Whether a change that should break something broke nothing."""
        return self.breaks and trial.complete and all(trial.status(test) == "passed" for test in self.tests)


@dataclass(frozen=True)
class Check:
    """One thing that a verifier looks at. `run` is known to the tested code, `expected` never is."""

    kind: str
    run: Mapping[str, Any] = field(default_factory=dict)
    expected: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Draft:
    """A task before it is files."""

    category: Category
    family: str  # the operator, or the kind of change
    register: str  # how the request is put
    request: str
    difficulty: int  # 1 to 5, by what it takes to find and to change
    workspace: Changes  # over the repository's files: what the agent finds
    solved: Changes  # over the workspace: what solves it
    checks: tuple[Check, ...]
    suite: Mapping[str, bytes] = field(default_factory=dict)  # put into the workspace before grading
    hidden: Mapping[str, bytes] = field(default_factory=dict)  # other files of the verifier
    protected: tuple[str, ...] = ()
    may_edit: bool = True
    answer: str = ""  # the final message that is right
    head: Changes | None = None  # what the commit holds, where it is not the workspace
    secret: tuple[str, ...] = ()  # words that the request must not have: the site's names
    facts: Mapping[str, Any] = field(default_factory=dict)  # into metadata


@dataclass(frozen=True)
class Candidate:
    """A task that may come to be. `site` is what no two tasks of a set share."""

    site: str
    family: str
    states: Mapping[str, State]
    finish: Callable[[Mapping[str, Trial]], Draft]  # raises Unfit


Generate = Callable[[Repository, random.Random], Iterator[Candidate]]


@dataclass(frozen=True)
class Generator:
    """A source of candidates. `weight` is its share of a set; `most` what one family may have of its tasks."""

    name: str
    category: Category
    generate: Generate
    weight: float = 1.0
    most: float = 0.34


GENERATORS: dict[str, Generator] = {}


def generator(name: str, category: Category, weight: float = 1.0, most: float = 0.34) -> Callable[[Generate], Generate]:
    """Register a function as a generator."""

    def register(function: Generate) -> Generate:
        GENERATORS[name] = Generator(name, category, function, weight, most)
        return function

    return register


def overlaid(files: Mapping[str, bytes], *layers: Changes) -> dict[str, bytes]:
    """Files with changes made to them, one after the other."""
    found = dict(files)
    for changes in layers:
        for path, data in changes.items():
            if data is None:
                found.pop(path, None)
            else:
                found[path] = data
    return found


def difference(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> dict[str, bytes | None]:
    """The changes that make `after` of `before`."""
    changed: dict[str, bytes | None] = {path: data for path, data in after.items() if before.get(path) != data}
    return {**changed, **{path: None for path in before if path not in after}}


def back(repository: Repository, workspace: Changes) -> dict[str, bytes | None]:
    """What undoes a change of the repository's product; tests stay as the workspace has them."""
    return {path: repository.files.get(path) for path in workspace if not repository.source.is_test_path(path)}
