"""Candidates and drafts: a candidate lists the workspace states to execute in pods and builds a draft from the results.

    @generator("debugging", "debugging")
    def debugging(repository, rng) -> Iterator[TaskCandidate]: ...

A draft is a task before it is written to files: workspace, solution, request and verifier checks.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from etude.tasks.checks import VerifierCheck
from etude.tasks.generators.executor import Changes, ExecutionResult
from etude.tasks.generators.repository import Repository
from etude.tasks.task import Category


class CandidateRejected(Exception):
    """Raised when a candidate yields no task; `reason` is a short code that the journals count."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class WorkspaceState:
    """A changed workspace and the tests or the command to run in it.

    With `expect_failure`, the candidate is rejected when all these tests pass.
    """

    changes: Changes
    tests: tuple[str, ...] = ()
    command: str = ""
    expect_failure: bool = False

    def survived(self, result: ExecutionResult) -> bool:
        """Return whether all tests passed although the change was expected to make one fail."""
        return self.expect_failure and result.complete and all(result.status(test) == "passed" for test in self.tests)


@dataclass(frozen=True)
class TaskDraft:
    """A task before it is written to files."""

    category: Category
    family: str  # the operator, or the kind of change
    register: str  # style of the request: symptom, issue, imperative, log, ...
    request: str
    difficulty: int  # 1 to 5, estimated from the effort to find and to make the change
    workspace: Changes  # relative to the repository's files; the agent's initial state
    solution: Changes  # relative to the workspace
    checks: tuple[VerifierCheck, ...]
    suite: Mapping[str, bytes] = field(default_factory=dict)  # copied into the workspace before verification
    protected: tuple[str, ...] = ()
    may_edit: bool = True
    answer: str = ""  # a correct final message
    committed: Changes | None = None  # contents of the commit, where they differ from the workspace
    forbidden_words: tuple[str, ...] = ()  # names of the site, which the request must not mention
    metadata: Mapping[str, Any] = field(default_factory=dict)  # further entries of the [metadata] table


@dataclass(frozen=True)
class TaskCandidate:
    """A possible task. No two tasks of a set share a `site`."""

    site: str
    family: str
    states: Mapping[str, WorkspaceState]
    finish: Callable[[Mapping[str, ExecutionResult]], TaskDraft]  # raises CandidateRejected


GenerateFunction = Callable[[Repository, random.Random], Iterator[TaskCandidate]]


@dataclass(frozen=True)
class Generator:
    """A registered generator. `weight` is its share of a task set, `max_family_share` limits each of its families."""

    name: str
    category: Category
    generate: GenerateFunction
    weight: float = 1.0
    max_family_share: float = 0.34


GENERATORS: dict[str, Generator] = {}


def generator(
    name: str, category: Category, weight: float = 1.0, max_family_share: float = 0.34
) -> Callable[[GenerateFunction], GenerateFunction]:
    """Register a function as a generator."""

    def register(function: GenerateFunction) -> GenerateFunction:
        GENERATORS[name] = Generator(name, category, function, weight, max_family_share)
        return function

    return register


def apply_changes(files: Mapping[str, bytes], *layers: Changes) -> dict[str, bytes]:
    """Return the files after applying each layer of changes in order."""
    files_after = dict(files)
    for changes in layers:
        for path, data in changes.items():
            if data is None:
                files_after.pop(path, None)
            else:
                files_after[path] = data
    return files_after


def revert_changes(repository: Repository, workspace: Changes) -> dict[str, bytes | None]:
    """Return the changes that restore the original non-test files; tests stay as they are in the workspace."""
    return {path: repository.files.get(path) for path in workspace if not repository.source.is_test_path(path)}
