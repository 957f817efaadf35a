"""Verifier of imported SWE tasks: computes rewards from the log of the test run. Standard library only.

This file is placed in tests/ as evaluate.py, beside:

    eval.sh        prints `>>>>> Start Test Output`, runs the tests, prints `>>>>> End Test Output` and then
                   `>>>>> Test Exit Code: N`
    expected.json  fail_to_pass, pass_to_pass, the name of the log parser, the workspace
    suite/         test files to restore in the workspace before the run

The reward is 1 if every listed test passed and the exit code agrees with the log. A log without any test result gives
no reward. Test ids are compared up to their first space, because the sets' lists are cut off there.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from typing import Any

HERE = os.path.dirname(os.path.abspath(sys.argv[0]))
START, END, CODE = (
    ">>>>> Start Test Output",
    ">>>>> End Test Output",
    re.compile(r"^>>>>> Test Exit Code: *(-?\d+) *$", re.M),
)
FAILURE_MARKERS = (">>>>> Patch Apply Failed", ">>>>> Reset Failed", ">>>>> Tests Errored", ">>>>> Tests Timed Out")
STATUSES = ("PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL", "XPASS")
SEVERITY = {"FAILED": 3, "ERROR": 3, "SKIPPED": 2, "XPASS": 1, "XFAIL": 1, "PASSED": 0}
DJANGO = {"ok": "PASSED", "OK": "PASSED", "FAIL": "FAILED", "ERROR": "ERROR", "skipped": "SKIPPED"}
DJANGO["expected failure"] = "XFAIL"
SYMPY = {"ok": "PASSED", "F": "FAILED", "E": "ERROR", "s": "SKIPPED", "f": "XFAIL"}


class NoTestResult(Exception):
    """The log has no test results, so there is no reward."""


def test_output(log: str) -> tuple[str, int]:
    """Return the output of the tests and the exit code recorded after it."""
    for marker in FAILURE_MARKERS:
        if marker in log:
            raise NoTestResult(f"the log contains {marker!r}")
    if START not in log or END not in log:
        raise NoTestResult("the tests did not finish: a marker is missing")
    inside = log.split(START, 1)[1].rpartition(END)[0]  # up to the last marker: tests may print one themselves
    codes = CODE.findall(log.rpartition(END)[2])
    if not codes:
        raise NoTestResult("no exit code was recorded")
    return inside, int(codes[-1])


def parse_pytest(text: str) -> dict[str, str]:
    """Parse `PASSED id` of pytest's summary or `id PASSED` of its verbose output; the worst status of a test counts."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) < 2:
            continue
        if words[0] in STATUSES:
            status, name = words[0], words[1]
            if status == "SKIPPED" and re.fullmatch(r"\[\d+\]", name):
                continue  # followed by a file and line, not by a test id
        elif words[1] in STATUSES and ("::" in words[0] or words[0].endswith(".py")):
            status, name = words[1], words[0]
        elif words[-1] in STATUSES and "::" in words[0]:
            status, name = words[-1], words[0]
        else:
            continue
        record_status(found, name, status)
    return found


def parse_django(text: str) -> dict[str, str]:
    """Parse `test_x (module.Class) ... ok`."""
    found: dict[str, str] = {}
    current = ""
    for line in text.splitlines():
        match = re.match(r"(\w+ \([\w.]+\))", line)
        current = match[1] if match else current
        end = re.search(r"\.\.\. (ok|OK|FAIL|ERROR|skipped|expected failure)\b", line) or re.match(
            r"(ok|FAIL|ERROR)$", line
        )
        if end and current:
            record_status(found, current, DJANGO[end[1]])
            current = ""
        failed = re.match(r"(FAIL|ERROR): (\w+ \([\w.]+\))", line)
        if failed:
            record_status(found, failed[2], DJANGO[failed[1]])
    return found


def parse_sympy(text: str) -> dict[str, str]:
    """Parse `test_x ok` and the headings of failures."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 2 and words[0].startswith("test_") and words[1] in SYMPY:
            record_status(found, words[0], SYMPY[words[1]])
        failed = re.match(r"_+ .*\.py:(test_\w+) _+$", line)
        if failed:
            record_status(found, failed[1], "FAILED")
    return found


def record_status(found: dict[str, str], name: str, status: str) -> None:
    if name not in found or SEVERITY[status] > SEVERITY[found[name]]:
        found[name] = status


PARSERS = {"pytest": parse_pytest, "django": parse_django, "sympy": parse_sympy}


def status_of(name: str, found: dict[str, str]) -> str:
    """Return the status of a listed test, whose id may be cut off at its first space."""
    if name in found:
        return found[name]
    if name.split()[0] in found and "(" not in name:
        return found[name.split()[0]]
    cut = name.split(" ")[0]
    longer = [status for id, status in found.items() if id.split(" ")[0] == cut]
    return max(longer, key=lambda status: SEVERITY[status]) if longer and "(" not in name else "MISSING"


def compute_rewards(log: str, expected: dict[str, Any]) -> dict[str, float]:
    """Return the rewards for a log; raise NoTestResult if it has no test results."""
    text, code = test_output(log)
    found = PARSERS[expected["parser"]](text)
    if not found:
        if code != 0:
            print(f"no test reported a result, and the exit code is {code}")
            return {"reward": 0.0, "fail_to_pass": 0.0, "pass_to_pass": 0.0}
        raise NoTestResult("no test reported a result")
    failing = [name for name, status in found.items() if status in ("FAILED", "ERROR")]
    agrees = bool(failing) == (code != 0)
    if not agrees:
        print(f"inconsistent: the exit code is {code}, but {len(failing)} tests are shown as failing")
    shares, wrong = {}, []
    for kind in ("fail_to_pass", "pass_to_pass"):
        names = expected[kind]
        bad = [name for name in names if status_of(name, found) not in ("PASSED", "XFAIL")]
        wrong += [f"{name}: {status_of(name, found)}" for name in bad]
        shares[kind] = 1.0 - len(bad) / len(names) if names else 1.0
    for line in wrong[:50]:
        print(line)
    return {"reward": float(not wrong and agrees), **shares}


def restore_suite(workspace: str) -> None:
    """Copy the task's own test files into the workspace, replacing files, directories and links in their way."""
    suite = os.path.join(HERE, "suite")
    for directory, _, files in os.walk(suite):
        for name in files:
            source = os.path.join(directory, name)
            target = os.path.join(workspace, os.path.relpath(source, suite))
            path = workspace
            for part in os.path.relpath(os.path.dirname(target), workspace).split("/"):
                path = os.path.normpath(os.path.join(path, part))
                if os.path.islink(path) or (os.path.lexists(path) and not os.path.isdir(path)):
                    os.unlink(path)  # never write through a link made by the agent
                os.makedirs(path, exist_ok=True)
            if os.path.lexists(target):
                shutil.rmtree(target) if os.path.isdir(target) and not os.path.islink(target) else os.unlink(target)
            shutil.copy(source, target)


def main() -> int:
    with open(os.path.join(HERE, "expected.json")) as file:
        expected = json.load(file)
    restore_suite(expected["workspace"])
    command = ["bash", os.path.join(HERE, "eval.sh")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=expected["workspace"]) as run:
        log = (run.stdout.read() if run.stdout else b"").decode("utf-8", "replace")
    print(log)
    try:
        rewards = compute_rewards(log, expected)
    except NoTestResult as error:
        print(f"no reward: {error}")
        return 1
    os.makedirs("/logs/verifier", exist_ok=True)
    with open("/logs/verifier/reward.json", "w") as file:
        json.dump(rewards, file)
    return 0
