"""The verifier that task generators put into `tests/`, hardened against code that attacks the verifier itself.

`pytest_files` and `cases_files` return its files; `guard.py` and `inside.py` are the program that runs in the pod.
docs/tasks.md lists attacks that it withstands (tested in tests/tasks/test_cheating.py) and some that it does not.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from etude.pods.payload import pack

__all__ = ["VERIFIER_SH", "cases_files", "pytest_files"]

# Only PATH is kept of the image's environment: a variable must not decide which code Python loads.
VERIFIER_SH = """#!/bin/sh
exec env -i PATH="$PATH" HOME=/root LANG=C.UTF-8 PYTHONHASHSEED=0 python3 -B -s -S /tests/{program}
"""


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
    """Return a `tests/` directory that compares computed values. Each case has an `id`, an action and an expectation.

        action        call="module:name", args="(1, 2)", kwargs="{}"   or  code="...; result = ..."
                      or  run=["python3", "x.py"], stdin=""
        expectation   returns="[1, 2]" (and within=1e-9), raises="ValueError", prints="...\\n", exit=0

    Values are Python literals as text. Only built-in types compare equal, and only if the type is exactly the same.
    """
    expectation_keys = ("returns", "within", "raises", "prints", "exit")
    actions = [{key: value for key, value in case.items() if key not in expectation_keys} for case in cases]
    expected = {case["id"]: {key: value for key, value in case.items() if key in expectation_keys} for case in cases}
    spec = {
        "kind": "cases",
        "workspace": workspace,
        "cases": actions,
        "paths": list(paths),
        "env": dict(env or {}),
        "timeout": timeout,
    }
    return _files(spec, expected, suite or {})


def _files(spec: Mapping[str, Any], expected: Mapping[str, Any], suite: Mapping[str, str | bytes]) -> dict[str, Any]:
    program = pack("etude.tasks.runner.inside:main", "etude.tasks.runner.guard", bytecode=False)
    return {
        "tests/.seal": "sealed\n",  # requests a seal
        "tests/test.sh": VERIFIER_SH.format(program="runner.pyz"),
        "tests/runner.pyz": program.data,
        "tests/run.json": json.dumps(spec, indent=1) + "\n",
        "tests/expected.json": json.dumps(expected, indent=1) + "\n",
        **{f"tests/suite/{path}": data for path, data in suite.items()},
    }
