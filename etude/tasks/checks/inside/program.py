"""The verifier of all tasks made here. Its halves run in different processes, on one machine or on two.

    observe   runs submitted code on the inputs of the checks and prints what it saw as JSON. It has no expected result,
              and none of its memory, files or pipes is kept from the submission where users cannot be separated
    judge     compares the observations and the submitted files with the expected results. It runs no submitted code

Etude observes in the clean pod and judges on the host (`etude.tasks.checks.in_pods`). Any other runner of Harbor tasks
starts this program as root: it judges, observes in a child process, whose own children are another user, and writes the
reward. Files beside the program:

    checks.json     the workspace, and the checks in order: kind and inputs
    expected.json   the expected result of each check
    suite/          files copied into the workspace first
"""

from __future__ import annotations

import os
import sys

from etude import pod_stdlib
from etude.tasks.checks.inside.guard import HERE, PROGRAM, VerifierBroken, prepare_workspace, remove, restore_suite

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from etude.tasks.checks.inside.guard import JsonObject

FORMAT = 2
LOGS = "/logs/verifier"


def main() -> int:
    return observe_main() if sys.argv[1:] == ["observe"] else judge_main()


# ------------------------------------------------------------------------------------------------- observe


def observe_main() -> int:
    """Read checks from standard input, print their observations; what people read goes to standard error."""
    spec, out = pod_stdlib.loads(sys.stdin.read()), os.dup(1)
    os.dup2(2, 1)
    workspace = spec["workspace"]
    restore_suite(os.path.join(HERE, "suite"), workspace)
    prepare_workspace(workspace)
    try:
        found = [observer(check["kind"])(check, workspace) for check in spec["checks"]]
    except VerifierBroken as error:
        print(f"verifier: {error}", file=sys.stderr)
        return 1
    with open(out, "w", encoding="utf-8") as file:
        file.write(pod_stdlib.dumps(found))
    return 0


def observer(kind: str) -> Callable[[JsonObject, str], JsonObject]:
    """Return the function that observes a kind of check. Only its own module is imported."""
    if kind == "cases":
        from etude.tasks.checks.inside.cases import observe_cases

        return observe_cases
    if kind == "pytest":
        from etude.tasks.checks.inside.pytest_run import observe_pytest

        return observe_pytest
    if kind == "wheel":
        from etude.tasks.checks.inside.wheels import observe_wheel

        return observe_wheel
    from etude.tasks.checks.inside import observers

    found: Callable[[JsonObject, str], JsonObject] = getattr(observers, f"observe_{kind}")
    return found


# ------------------------------------------------------------------------------------------------- judge


def judge_main() -> int:
    """Do both halves on this machine and write the reward."""
    import subprocess

    from etude.tasks.checks.inside import judges
    from etude.tasks.checks.inside.swe_log import NoResult

    os.makedirs(LOGS, exist_ok=True)
    for directory in (HERE, LOGS):
        os.chmod(directory, 0o700)
    spec, expected = load("checks.json"), load("expected.json")
    files = judges.read_workspace(spec["workspace"])  # before anything is copied or run there
    flags = ["-I"] if sys.flags.isolated else ["-s"]
    command = [sys.executable, *flags, "-S", "-B", PROGRAM, "observe"]

    def run(checks: list[JsonObject], expected: list[JsonObject], again: bool = False) -> judges.Judgement:
        executed, secrets = judges.prepare(checks, expected, read_suite, again=again)
        given = pod_stdlib.dumps({**spec, "checks": executed}).encode()
        done = subprocess.run(command, input=given, stdout=subprocess.PIPE) if executed else None
        observed = judges.parse_observations(done.stdout if done else b"[]", len(executed))
        return judges.judge(checks, expected, observed, secrets, files)

    try:
        result = run(spec["checks"], expected)
        if again := judges.checks_to_repeat(spec["checks"], expected, result):
            result = judges.compare_runs(result, run(*again, again=True))
    except NoResult as error:
        print(f"no reward: {error}")
        return 1
    print("\n".join(result.report))
    path = os.path.join(LOGS, "reward.json")
    remove(path)
    with open(path, "w") as file:
        file.write(pod_stdlib.dumps(result.rewards))
    return 0


def read_suite(path: str) -> bytes | None:
    """Return a file of the suite; None if it has none of that name."""
    try:
        with open(os.path.join(HERE, "suite", path), "rb") as file:
            return file.read()
    except OSError:
        return None


def load(name: str) -> Any:
    with open(os.path.join(HERE, name), encoding="utf-8") as file:
        return pod_stdlib.loads(file.read())
