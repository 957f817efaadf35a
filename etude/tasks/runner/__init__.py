"""The verifier of our own tasks: what a generator puts into `tests/` so that only right code is paid.

`verifier_files` gives those files; `guard.py` and `inside.py` are the programs, and run in the pod. What they withstand
is in docs/tasks.md; tests/tasks/test_cheating.py shows it.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

# nothing of the image's environment but PATH: a variable must not decide what Python loads
TEST_SH = """#!/bin/sh
exec env -i PATH="$PATH" HOME=/root LANG=C.UTF-8 PYTHONHASHSEED=0 python3 -B -s -S /tests/runner.py
"""


def guard_files() -> dict[str, str]:
    """`tests/guard.py` alone, for a verifier of another kind; and the placeholder that asks the grader for a seal."""
    return {"tests/guard.py": (HERE / "guard.py").read_text(), "tests/.seal": "sealed\n"}


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
    """The files of `tests/` that run pytest on `run` (paths or ids, from the workspace).

    `expected` is every test id with the status it must have (passed, failed, skipped, error, xfailed, xpassed); with
    `exact` there may be no other. `suite` is put into the workspace before: the tests and what they need. Every
    conftest.py on the way to a test that is not of the suite is removed. `ini` is the whole of pytest's configuration.
    """
    spec = {
        "kind": "pytest",
        "workspace": workspace,
        "run": list(run),
        "paths": list(paths),
        "ini": dict(ini or {}),
        "plugins": list(plugins),
        "arguments": list(arguments),
        "env": dict(env or {}),
        "timeout": timeout,
        "exact": exact,
    }
    return _files(spec, dict(expected), suite)


def cases_files(
    cases: Sequence[Mapping[str, Any]],
    *,
    suite: Mapping[str, str | bytes] | None = None,
    workspace: str = "/work",
    paths: Sequence[str] = (".",),
    env: Mapping[str, str] | None = None,
    timeout: float = 20.0,
) -> dict[str, str | bytes]:
    """The files of `tests/` that compare what code computes. Each case has an `id`, a way and an end.

        way   call="module:name", args="(1, 2)", kwargs="{}"   or  code="...; result = ..."
              or  run=["python3", "x.py"], stdin=""
        end   returns="[1, 2]" (and within=1e-9), raises="ValueError", prints="...\\n", exit=0

    Python literals are written as text. Only plain values compare equal, and of exactly their type.
    """
    ends = ("returns", "within", "raises", "prints", "exit")
    asked = [{key: value for key, value in case.items() if key not in ends} for case in cases]
    expected = {case["id"]: {key: value for key, value in case.items() if key in ends} for case in cases}
    spec = {
        "kind": "cases",
        "workspace": workspace,
        "cases": asked,
        "paths": list(paths),
        "env": dict(env or {}),
        "timeout": timeout,
    }
    return _files(spec, expected, suite or {})


def _files(spec: Mapping[str, Any], expected: Mapping[str, Any], suite: Mapping[str, str | bytes]) -> dict[str, Any]:
    runner = (HERE / "inside.py").read_text().replace("from etude.tasks.runner.guard import", "from guard import")
    return {
        **guard_files(),
        "tests/test.sh": TEST_SH,
        "tests/runner.py": runner,
        "tests/run.json": json.dumps(spec, indent=1) + "\n",
        "tests/expected.json": json.dumps(expected, indent=1) + "\n",
        **{f"tests/suite/{path}": data for path, data in suite.items()},
    }
