"""Checks: what the verifiers of our tasks consist of, and the files that put them into `tests/` of a task.

A check has inputs, with which submitted code is observed, and an expected result, which is compared with the
observation. `inside/` is the verifier's program; `in_pods.py` runs its two halves apart. docs/tasks.md lists the kinds
of checks, attacks that they withstand (tested in tests/tasks/test_cheating.py) and some that `pytest` does not.
"""

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from etude.pods.payload import pack, source_files
from etude.tasks.checks.inside.program import FORMAT
from etude.tasks.checks.inside.statements import denials, number_texts

__all__ = [
    "PROGRAM",
    "VerifierCheck",
    "cases_check",
    "cases_files",
    "check_files",
    "lines_check",
    "observer_program",
    "pytest_files",
    "python_command",
]
MORE_LINES = 2  # that a change to some lines may add

INSIDE = "etude.tasks.checks.inside"
PROGRAM = (f"{INSIDE}.program:main", INSIDE, "etude.globs", "etude.pod_stdlib", "etude.syntax")
# kind of check -> modules that observe it, if they are not those of submitted tests
MODULES = {"cases": {"cases"}, "pytest": {"pytest_run"}, "wheel": {"wheels"}}


def observer_program(checks: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the half of the program that observes, with what checks of these kinds need."""
    modules = {"guard"}
    for check in checks:
        modules |= MODULES.get(check["kind"], {"observers", "pytest_run"})
    return pack(f"{INSIDE}.program:main", "etude.pod_stdlib", *(f"{INSIDE}.{module}" for module in sorted(modules)))


@dataclass(frozen=True)
class VerifierCheck:
    """One check of a verifier. Submitted code may see `run`, never `expected`. The kinds are those of `judges.py`."""

    kind: str
    run: Mapping[str, Any] = field(default_factory=dict)
    expected: Mapping[str, Any] = field(default_factory=dict)


def check_files(
    checks: Sequence[VerifierCheck], *, suite: Mapping[str, str | bytes] | None = None, workspace: str = "/work"
) -> dict[str, str | bytes]:
    """Return a `tests/` directory with these checks. `suite` (tests and their helpers) is copied into the workspace
    before submitted code runs."""
    inputs = [{"kind": check.kind, **check.run} for check in checks]
    return {
        "tests/test.sh": f"#!/bin/sh\nexec {python_command(inputs)} /tests/verifier\n",
        "tests/checks.json": json.dumps({"format": FORMAT, "workspace": workspace, "checks": inputs}) + "\n",
        "tests/expected.json": json.dumps([dict(check.expected) for check in checks]) + "\n",
        **{f"tests/verifier/{path}": text for path, text in source_files(*PROGRAM).items()},
        **{f"tests/suite/{path}": data for path, data in (suite or {}).items()},
    }


def python_command(checks: Sequence[Mapping[str, Any]]) -> str:
    """Return the shell command that starts the verifier: no variable of the image decides which code Python loads.

    The script of a public set needs the image's variables; nothing else of the image's environment is kept for others.
    """
    if any(check["kind"] == "log" for check in checks):
        return "python3 -I -S -B"
    return 'env -i PATH="$PATH" HOME=/root LANG=C.UTF-8 PYTHONHASHSEED=0 python3 -s -S -B'


def cases_check(
    cases: Sequence[Mapping[str, Any]],
    *,
    paths: Sequence[str] = (".",),
    env: Mapping[str, str] | None = None,
    timeout: float = 20.0,
) -> VerifierCheck:
    """Return a check of computed values. Each case has an `id`, an action and an expectation.

        action        call="module:name", args="(1, 2)", kwargs="{}"   or  code="...; result = ..."
                      or  run=["python3", "x.py"], stdin=""
        expectation   returns="[1, 2]" (and within=1e-9), raises="ValueError", prints="...\\n", exit=0

    Values are Python literals as text. Only built-in types compare equal, and only if the type is exactly the same.
    """
    expectation_keys = ("returns", "within", "raises", "prints", "exit")
    actions = [{key: value for key, value in case.items() if key not in expectation_keys} for case in cases]
    results = {case["id"]: {key: value for key, value in case.items() if key in expectation_keys} for case in cases}
    run = {"cases": actions, "paths": list(paths), "env": dict(env or {}), "timeout": timeout}
    return VerifierCheck("cases", run, {"results": results})


def lines_check(path: str, before: str, after: str, *, prose: bool = False) -> VerifierCheck:
    """Return a check that a file keeps the lines which the solution keeps, and has the words of those it changes.

    `prose`: a reader believes the text, so that it may gain neither denials nor numbers."""
    old, new = ([line.strip() for line in text.splitlines() if line.strip()] for text in (before, after))
    blocks = difflib.SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
    places = {number for block in blocks for number in range(block.b, block.b + block.size)}
    changed = [line for number, line in enumerate(new) if number not in places]
    rule: dict[str, Any] = {
        "kept": [new[number] for number in sorted(places)],
        "more": len(changed) + MORE_LINES,
        "words": re.findall(r"\w+", " ".join(new)),
    }
    if prose:
        rule["denials"] = max(denials(before), denials(after))
        rule["numbers"] = sorted({*number_texts(before), *number_texts(after)})
    return VerifierCheck("lines", {}, {"files": {path: rule}})


def cases_files(
    cases: Sequence[Mapping[str, Any]],
    *,
    suite: Mapping[str, str | bytes] | None = None,
    workspace: str = "/work",
    **run: Any,
) -> dict[str, str | bytes]:
    """Return a `tests/` directory with one check of computed values; `run` as in `cases_check`."""
    return check_files([cases_check(cases, **run)], suite=suite, workspace=workspace)


def pytest_files(
    run: Sequence[str],
    expected: Mapping[str, str],
    suite: Mapping[str, str | bytes],
    *,
    workspace: str = "/work",
    paths: Sequence[str] = (".",),
    ini: Mapping[str, str] | None = None,
    plugins: Sequence[str] = (),
    arguments: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    timeout: float = 120.0,
    exact: bool = True,
) -> dict[str, str | bytes]:
    """Return a `tests/` directory that runs pytest on `run` (paths or test ids, relative to the workspace).

    `expected` maps test ids to required statuses (passed, failed, skipped, error, xfailed, xpassed); with `exact` no
    other test may run. `suite` (the tests and their helpers) is copied into the workspace first. A conftest.py that
    pytest would load and that is not in the suite is removed. `ini` is pytest's entire configuration.
    """
    spec = {
        "run": list(run),
        "paths": list(paths),
        "ini": dict(ini or {}),
        "plugins": list(plugins),
        "arguments": list(arguments),
        "env": dict(env or {}),
        "timeout": timeout,
        "placed": sorted(suite),
    }
    check = VerifierCheck("pytest", spec, {"statuses": dict(expected), "exact": exact})
    return check_files([check], suite=suite, workspace=workspace)
