"""Write a mined change as the files of a Harbor task directory."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import tomli_w

from etude.tasks.checks import VerifierCheck, check_files
from etude.tasks.generators.candidate import apply_changes
from etude.tasks.generators.executor import WORKSPACE, run_spec
from etude.tasks.generators.single_commit_repo import single_commit_git_dir
from etude.tasks.generators.source import LEAKING_PATHS, RepositorySource
from etude.tasks.generators.task_writer import VERIFIER_TIMEOUT_S, TaskFiles, solution_script
from etude.tasks.mining.classify import ChangeParts, is_test_path
from etude.tasks.mining.command_verifier import command_verifier_files
from etude.tasks.mining.environments import CommitEnvironment
from etude.tasks.mining.evidence import TestEvidence
from etude.tasks.mining.history import HistoryCommit
from etude.tasks.mining.suites import CommandSuite, PytestSuite
from etude.tasks.task import Category

TIME_LIMITS_S = (
    60.0,
    120.0,
    240.0,
)  # of a verifier's run; few values, so that a task does not depend on measured times


@dataclass(frozen=True)
class MinedTask:
    """A change that became a task, before it is written to files."""

    name: str
    commit: HistoryCommit
    category: Category
    parts: ChangeParts
    environment: CommitEnvironment
    evidence: TestEvidence
    instruction: str
    request_source: str  # message, issue, session; with "full" the over-specified variant
    tried_mutations: int
    unnoticed_mutations: tuple[str, ...]
    extra_files: Mapping[str, bytes] = field(default_factory=dict)  # logs in the workspace, not committed
    log: str = ""  # kind of the log, if there is one

    @property
    def difficulty(self) -> int:
        """From 1 to 5, estimated from the size of the solution."""
        lines, files = self.parts.changed_lines, len(self.parts.source)
        return min(5, 1 + (lines > 15) + (lines > 60) + (files > 1) + (files > 3 or lines > 200))


def mined_task_files(task: MinedTask, suite: PytestSuite | CommandSuite) -> TaskFiles:
    """Return the files of the task, without the archive of its environment."""
    parent = {path: data for path, data in task.environment.files.items() if is_kept(path)}
    after = apply_changes(parent, task.parts.solution, task.parts.test_changes)
    python_path = _python_path(suite.source) if isinstance(suite, PytestSuite) else ""
    solution = {path: data for path, data in task.parts.solution.items() if is_kept(path)}
    return {
        "task.toml": tomli_w.dumps(_config(task)),
        "instruction.md": task.instruction.strip() + "\n",
        "environment/Dockerfile": task.environment.dockerfile(python_path),
        **{f"environment/repo/{path}": data for path, data in {**parent, **task.extra_files}.items()},
        **{f"environment/repo/.git/{path}": data for path, data in single_commit_git_dir(parent).items()},
        **solution_script(solution),
        **_verifier(task, suite, after),
    }


def is_kept(path: str) -> bool:
    """Return whether a tracked file is in the workspace; committed products of builds are not."""
    return LEAKING_PATHS.search(path) is None


def suite_of(files: Mapping[str, bytes], source: RepositorySource | None = None) -> dict[str, bytes]:
    """Return the tests and their helpers among files."""
    return {
        path: data
        for path, data in files.items()
        if is_test_path(path) or (source is not None and source.is_test_path(path))
    }


def _verifier(task: MinedTask, suite: PytestSuite | CommandSuite, after: Mapping[str, bytes]) -> TaskFiles:
    evidence = task.evidence
    tests = [*evidence.fail_to_pass, *evidence.pass_to_pass]
    if isinstance(suite, CommandSuite):
        return command_verifier_files(task.environment.installation, suite.line, tests, suite_of(after))
    files = suite_of(after, suite.source)
    expected = 30.0 + 10 * evidence.seconds(tests)
    seconds = next((each for each in TIME_LIMITS_S if each >= expected), TIME_LIMITS_S[-1])
    run = {**run_spec(suite.source, suite.plugins, tests, seconds), "placed": sorted(files)}
    check = VerifierCheck("pytest", run, {"statuses": dict.fromkeys(tests, "passed")})
    return check_files([check], suite=files, workspace=WORKSPACE)


def _config(task: MinedTask) -> dict[str, Any]:
    source = sorted(task.parts.solution)
    scope = ["/" + re.sub(r"([*?\[{\\])", r"\\\1", path) for path in source]
    metadata: dict[str, Any] = {
        "category": task.category,
        "may_edit": True,
        "sealed_history": True,
        "source": "history",
        "repository": task.environment.installation.repository,
        "commit": task.commit.id,
        "parent": task.commit.parents[0],
        "commit_date": task.commit.date,
        "difficulty": task.difficulty,
        "family": "import-error" if task.evidence.import_only else "history",
        "register": task.request_source,
        "scope": scope,
        "changed_lines": task.parts.changed_lines,
        "changed_files": len(task.parts.source),
        "fail_to_pass": len(task.evidence.fail_to_pass),
        "pass_to_pass": len(task.evidence.pass_to_pass),
        "import_error_only": task.evidence.import_only,
        "quarantined": list(task.evidence.flaky),
        "mutations_tried": task.tried_mutations,
        "mutations_noticed": task.tried_mutations - len(task.unnoticed_mutations),
        "mutations_unnoticed": list(task.unnoticed_mutations),
    }
    if task.log:
        metadata["log"] = task.log
    return {
        "schema_version": "1.4",
        "task": {"name": f"etude/{task.name}", "description": f"{task.category} in {metadata['repository']}"},
        "metadata": metadata,
        "agent": {"timeout_sec": 1800.0},
        "verifier": {"timeout_sec": 2 * VERIFIER_TIMEOUT_S},
        "environment": {"cpus": 1, "memory_mb": 2048, "network_mode": "no-network"},
    }


def _python_path(source: RepositorySource) -> str:
    return ":".join(WORKSPACE if root == "." else f"{WORKSPACE}/{root}" for root in source.roots)
