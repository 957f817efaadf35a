"""Write a draft as the files of a Harbor task directory."""

import hashlib
import re
from collections.abc import Mapping
from typing import Any

import tomli_w

from etude.tasks.checks import VerifierCheck, check_files
from etude.tasks.environment import FINAL_MESSAGE
from etude.tasks.generators.candidate import CandidateRejected, TaskDraft, apply_changes
from etude.tasks.generators.code import mentions
from etude.tasks.generators.executor import WORKSPACE, dockerfile, run_spec
from etude.tasks.generators.repository import Repository
from etude.tasks.generators.single_commit_repo import single_commit_git_dir

VERIFIER_TIMEOUT_S = 300.0
TaskFiles = dict[str, str | bytes]


def task_files(repository: Repository, draft: TaskDraft, name: str, source: str, seed: int) -> TaskFiles:
    """Return the files of one task; raise CandidateRejected if the request mentions a forbidden word."""
    for word in draft.forbidden_words:
        if mentions(draft.request, word):
            raise CandidateRejected("names-site", f"the request mentions {word}")
    workspace = apply_changes(repository.files, draft.workspace)
    committed = workspace if draft.committed is None else apply_changes(repository.files, draft.committed)
    files: TaskFiles = {
        "task.toml": task_toml(repository, draft, name, source, seed),
        "instruction.md": draft.request.strip() + "\n",
        "environment/Dockerfile": dockerfile(repository.source, repository.wheels) + f"COPY repo/ {WORKSPACE}/\n",
        **{f"environment/packages/{wheel}": data for wheel, data in repository.wheels.items()},
        **{f"environment/repo/{path}": data for path, data in workspace.items()},
        **{f"environment/repo/.git/{path}": data for path, data in single_commit_git_dir(committed).items()},
        **solution_files(draft),
        **check_files(draft.checks, suite=draft.suite, workspace=WORKSPACE),
    }
    return files


def task_toml(repository: Repository, draft: TaskDraft, name: str, source: str, seed: int) -> str:
    metadata: dict[str, Any] = {
        "category": draft.category,
        "may_edit": draft.may_edit,
        "protected": list(draft.protected),
        "sealed_history": True,
        "source": source,
        "repository": repository.label,
        "seed": seed,
        "difficulty": draft.difficulty,
        "family": draft.family,
        "register": draft.register,
        **draft.metadata,
    }
    if draft.solution and draft.solution.keys() <= repository.files.keys():
        metadata["scope"] = ["/" + re.sub(r"([*?\[{\\])", r"\\\1", path) for path in sorted(draft.solution)]
    if draft.answer:
        metadata["carry"] = [FINAL_MESSAGE]
    table = {
        "schema_version": "1.4",
        "task": {"name": f"etude/{name}", "description": f"{draft.category} in {repository.label}"},
        "metadata": metadata,
        "agent": {"timeout_sec": 1800.0},
        "verifier": {"timeout_sec": VERIFIER_TIMEOUT_S},
        "environment": {"cpus": 1, "memory_mb": 2048, "network_mode": "no-network"},
    }
    return tomli_w.dumps(table)


def solution_files(draft: TaskDraft) -> TaskFiles:
    """Return solve.sh and the files it copies into the workspace."""
    return solution_script(draft.solution, draft.answer)


def solution_script(solution: Mapping[str, bytes | None], answer: str = "") -> TaskFiles:
    """Return solve.sh, which makes these changes to the workspace and leaves the answer, and the files it copies."""
    lines = ["#!/bin/sh", "set -e", f"cd {WORKSPACE}"]
    removed = sorted(path for path, data in solution.items() if data is None)
    lines += [f"rm -f -- {shell_quoted(path)}" for path in removed]
    copied = {path: data for path, data in solution.items() if data is not None}
    if copied:
        lines.append("cp -R /solution/repo/. .")
    if answer:
        lines += [f"mkdir -p {FINAL_MESSAGE.rpartition('/')[0]}", f"cp /solution/final.txt {FINAL_MESSAGE}"]
    files: TaskFiles = {"solution/solve.sh": "\n".join(lines) + "\n"}
    if answer:
        files["solution/final.txt"] = answer + "\n"
    return {**files, **{f"solution/repo/{path}": data for path, data in copied.items()}}


def shell_quoted(path: str) -> str:
    return "'" + path.replace("'", "'\\''") + "'"


# ------------------------------------------------------------------------------------------------- checks


def pytest_check(
    repository: Repository, tests: list[str], suite: Mapping[str, bytes], statuses: Mapping[str, str] | None = None
) -> VerifierCheck:
    """Return a check that exactly these tests run and pass, or end with the given statuses."""
    seconds = 30.0 + 10 * repository.total_duration(tests)
    run = {**run_spec(repository.source, repository.plugins, tests, min(240.0, seconds)), "placed": sorted(suite)}
    return VerifierCheck("pytest", run, {"statuses": dict(statuses or dict.fromkeys(tests, "passed"))})


def suite_files(repository: Repository, changes: Mapping[str, bytes | None] | None = None) -> dict[str, bytes]:
    """Return the test files and their helpers as they must be once the task is solved."""
    files = {path: data for path, data in repository.files.items() if repository.source.is_test_path(path)}
    return apply_changes(
        files, {path: data for path, data in (changes or {}).items() if repository.source.is_test_path(path)}
    )


def protected_globs(repository: Repository) -> tuple[str, ...]:
    """Return globs of the test files, which an agent must not change unless asked to."""
    source = repository.source
    single = [path for path in source.tests if not any(path.startswith(f"{top}/") for top in source.test_directories)]
    return (*(f"{directory}/**" for directory in source.test_directories), *single, "conftest.py")


def scope_check(files: Mapping[str, bytes], allowed: tuple[str, ...]) -> VerifierCheck:
    """Return a check that only files matching the allowed globs changed."""
    digests = {path: hashlib.sha256(data).hexdigest() for path, data in files.items()}
    return VerifierCheck("scope", {}, {"digests": digests, "allowed": list(allowed)})
