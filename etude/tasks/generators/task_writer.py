"""From a draft to the files of a Harbor task directory."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import tomli_w

from etude.tasks.environment import FINAL
from etude.tasks.generators.candidate import Check, Draft, Unfit, overlaid
from etude.tasks.generators.code import mentions
from etude.tasks.generators.executor import INSIDE, RUNNER, WORKSPACE, dockerfile, placed, run_spec
from etude.tasks.generators.repository import Repository
from etude.tasks.generators.single_commit_repo import sealed_git
from etude.tasks.runner import guard_files

TEST_SH = """#!/bin/sh
exec env -i PATH="$PATH" HOME=/root LANG=C.UTF-8 PYTHONHASHSEED=0 python3 -B -s -S /tests/checks.py
"""
GRADING_S = 300.0
Files = dict[str, str | bytes]


def task_files(repository: Repository, draft: Draft, name: str, source: str, seed: int) -> Files:
    """The files of one task."""
    for word in draft.secret:
        if mentions(draft.request, word):
            raise Unfit("names-site", f"the request has {word}")
    workspace = overlaid(repository.files, draft.workspace)
    head = workspace if draft.head is None else overlaid(repository.files, draft.head)
    files: Files = {
        "task.toml": task_toml(repository, draft, name, source, seed),
        "instruction.md": draft.request.strip() + "\n",
        "environment/Dockerfile": dockerfile(repository.source, repository.wheels) + f"COPY repo/ {WORKSPACE}/\n",
        **{f"environment/packages/{wheel}": data for wheel, data in repository.wheels.items()},
        **{f"environment/repo/{path}": data for path, data in workspace.items()},
        **{f"environment/repo/.git/{path}": data for path, data in sealed_git(head).items()},
        **solution_files(draft),
        **verifier_files(draft),
    }
    return files


def task_toml(repository: Repository, draft: Draft, name: str, source: str, seed: int) -> str:
    metadata: dict[str, Any] = {
        "category": draft.category,
        "may_edit": draft.may_edit,
        "protected": list(draft.protected),
        "source": source,
        "repository": repository.label,
        "seed": seed,
        "difficulty": draft.difficulty,
        "family": draft.family,
        "register": draft.register,
        **draft.facts,
    }
    if draft.answer:
        metadata["carry"] = [FINAL]
    table = {
        "schema_version": "1.4",
        "task": {"name": f"etude/{name}", "description": f"{draft.category} in {repository.label}"},
        "metadata": metadata,
        "agent": {"timeout_sec": 1800.0},
        "verifier": {"timeout_sec": GRADING_S},
        "environment": {"cpus": 1, "memory_mb": 2048, "network_mode": "no-network"},
    }
    return tomli_w.dumps(table)


def solution_files(draft: Draft) -> Files:
    """solve.sh, and the files it puts in place."""
    lines = ["#!/bin/sh", "set -e", f"cd {WORKSPACE}"]
    gone = sorted(path for path, data in draft.solved.items() if data is None)
    lines += [f"rm -f -- {_quoted(path)}" for path in gone]
    put = {path: data for path, data in draft.solved.items() if data is not None}
    if put:
        lines.append("cp -R /solution/repo/. .")
    if draft.answer:
        lines += [f"mkdir -p {FINAL.rpartition('/')[0]}", f"cp /solution/final.txt {FINAL}"]
    files: Files = {"solution/solve.sh": "\n".join(lines) + "\n"}
    if draft.answer:
        files["solution/final.txt"] = draft.answer + "\n"
    return {**files, **{f"solution/repo/{path}": data for path, data in put.items()}}


def _quoted(path: str) -> str:
    return "'" + path.replace("'", "'\\''") + "'"


def verifier_files(draft: Draft) -> Files:
    programs = {"etude_runner.py": RUNNER / "inside.py", "checks.py": INSIDE / "checks.py"}
    programs |= {f"etude_{name}.py": INSIDE / f"{name}.py" for name in ("looking", "running", "patterns")}
    given = {"workspace": WORKSPACE, "checks": [{"kind": check.kind, **check.run} for check in draft.checks]}
    return {
        **guard_files(),
        "tests/test.sh": TEST_SH,
        **{f"tests/{name}": placed(path) for name, path in programs.items()},
        "tests/checks.json": json.dumps(given, indent=1) + "\n",
        "tests/expected.json": json.dumps([dict(check.expected) for check in draft.checks], indent=1) + "\n",
        **{f"tests/suite/{path}": data for path, data in draft.suite.items()},
        **{f"tests/{path}": data for path, data in draft.hidden.items()},
    }


# ------------------------------------------------------------------------------------------------- checks


def pytest_check(
    repository: Repository, tests: list[str], suite: Mapping[str, bytes], statuses: Mapping[str, str] | None = None
) -> Check:
    """Exactly these tests run, and pass (or end as said)."""
    seconds = 30.0 + 10 * repository.time_of(tests)
    run = {**run_spec(repository.source, repository.plugins, tests, min(240.0, seconds)), "placed": sorted(suite)}
    return Check("pytest", run, {"statuses": dict(statuses or dict.fromkeys(tests, "passed"))})


def suite_of(repository: Repository, changes: Mapping[str, bytes | None] | None = None) -> dict[str, bytes]:
    """The tests with everything they need, as they should be when the task is done."""
    files = {path: data for path, data in repository.files.items() if repository.source.is_test_path(path)}
    return overlaid(
        files, {path: data for path, data in (changes or {}).items() if repository.source.is_test_path(path)}
    )


def protected_globs(repository: Repository) -> tuple[str, ...]:
    """The tests, which no agent has to change unless it is asked to."""
    source = repository.source
    single = [path for path in source.tests if not any(path.startswith(f"{top}/") for top in source.test_directories)]
    return (*(f"{directory}/**" for directory in source.test_directories), *single, "conftest.py")


def scope_check(files: Mapping[str, bytes], allowed: tuple[str, ...]) -> Check:
    """No file changes but those that globs allow."""
    digests = {path: hashlib.sha256(data).hexdigest() for path, data in files.items()}
    return Check("scope", {}, {"digests": digests, "allowed": list(allowed)})
