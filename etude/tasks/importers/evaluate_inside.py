"""Grades an imported SWE task from what its test run prints. Placed in tests/ as evaluate.py; standard library only.

    eval.sh        prints `>>>>> Start Test Output`, runs the tests, prints `>>>>> End Test Output` and then
                   `>>>>> Test Exit Code: N`
    expected.json  fail_to_pass, pass_to_pass, the log's parser, and files to put into the workspace before

Resolved is: every listed test passed, and the exit code agrees with what was printed. A run in which no test reported
anything is rejected: there is no reward then. Ids count up to their first space, as the lists were made that way.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
START, END, CODE = (
    ">>>>> Start Test Output",
    ">>>>> End Test Output",
    re.compile(r"^>>>>> Test Exit Code: *(-?\d+) *$", re.M),
)
FAILED_BEFORE = (">>>>> Patch Apply Failed", ">>>>> Reset Failed", ">>>>> Tests Errored", ">>>>> Tests Timed Out")
STATUSES = ("PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL", "XPASS")
WORST = {"FAILED": 3, "ERROR": 3, "SKIPPED": 2, "XPASS": 1, "XFAIL": 1, "PASSED": 0}
DJANGO = {"ok": "PASSED", "OK": "PASSED", "FAIL": "FAILED", "ERROR": "ERROR", "skipped": "SKIPPED"}
DJANGO["expected failure"] = "XFAIL"
SYMPY = {"ok": "PASSED", "F": "FAILED", "E": "ERROR", "s": "SKIPPED", "f": "XFAIL"}


class Rejected(Exception):
    """The run says nothing about the patch."""


def region(log: str) -> tuple[str, int]:
    """The output of the tests, and the exit code that was recorded after it."""
    for marker in FAILED_BEFORE:
        if marker in log:
            raise Rejected(f"the log says {marker!r}")
    if START not in log or END not in log:
        raise Rejected("the tests did not run to their end: a marker is missing")
    inside = log.split(START, 1)[1].rpartition(END)[0]  # the last: tests may print one themselves
    codes = CODE.findall(log.rpartition(END)[2])
    if not codes:
        raise Rejected("no exit code was recorded")
    return inside, int(codes[-1])


def parse_pytest(text: str) -> dict[str, str]:
    """`PASSED id` of the summary, or `id PASSED` of the verbose listing; the worst word about a test counts."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) < 2:
            continue
        if words[0] in STATUSES:
            status, name = words[0], words[1]
            if status == "SKIPPED" and re.fullmatch(r"\[\d+\]", name):
                continue  # it names a place, not a test
        elif words[1] in STATUSES and ("::" in words[0] or words[0].endswith(".py")):
            status, name = words[1], words[0]
        elif words[-1] in STATUSES and "::" in words[0]:
            status, name = words[-1], words[0]
        else:
            continue
        note(found, name, status)
    return found


def parse_django(text: str) -> dict[str, str]:
    """`test_x (module.Class) ... ok`."""
    found: dict[str, str] = {}
    waiting = ""
    for line in text.splitlines():
        match = re.match(r"(\w+ \([\w.]+\))", line)
        waiting = match[1] if match else waiting
        end = re.search(r"\.\.\. (ok|OK|FAIL|ERROR|skipped|expected failure)\b", line) or re.match(
            r"(ok|FAIL|ERROR)$", line
        )
        if end and waiting:
            note(found, waiting, DJANGO[end[1]])
            waiting = ""
        failed = re.match(r"(FAIL|ERROR): (\w+ \([\w.]+\))", line)
        if failed:
            note(found, failed[2], DJANGO[failed[1]])
    return found


def parse_sympy(text: str) -> dict[str, str]:
    """`test_x ok`, and the headings of failures."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 2 and words[0].startswith("test_") and words[1] in SYMPY:
            note(found, words[0], SYMPY[words[1]])
        failed = re.match(r"_+ .*\.py:(test_\w+) _+$", line)
        if failed:
            note(found, failed[1], "FAILED")
    return found


def note(found: dict[str, str], name: str, status: str) -> None:
    if name not in found or WORST[status] > WORST[found[name]]:
        found[name] = status


PARSERS = {"pytest": parse_pytest, "django": parse_django, "sympy": parse_sympy}


def status_of(name: str, found: dict[str, str]) -> str:
    """A listed test's status; lists have ids cut off at their first space."""
    if name in found:
        return found[name]
    if name.split()[0] in found and "(" not in name:
        return found[name.split()[0]]
    cut = name.split(" ")[0]
    longer = [status for id, status in found.items() if id.split(" ")[0] == cut]
    return max(longer, key=lambda status: WORST[status]) if longer and "(" not in name else "MISSING"


def decide(log: str, expected: dict[str, Any]) -> dict[str, float]:
    """The rewards for a log. Rejected when it says nothing."""
    text, code = region(log)
    found = PARSERS[expected["parser"]](text)
    if not found:
        if code != 0:
            print(f"no test reported anything, and the exit code is {code}")
            return {"reward": 0.0, "fail_to_pass": 0.0, "pass_to_pass": 0.0}
        raise Rejected("no test reported anything")
    failing = [name for name, status in found.items() if status in ("FAILED", "ERROR")]
    agrees = bool(failing) == (code != 0)
    if not agrees:
        print(f"the exit code is {code}, but {len(failing)} tests are shown as failing: not believed")
    shares, wrong = {}, []
    for kind in ("fail_to_pass", "pass_to_pass"):
        names = expected[kind]
        bad = [name for name in names if status_of(name, found) not in ("PASSED", "XFAIL")]
        wrong += [f"{name}: {status_of(name, found)}" for name in bad]
        shares[kind] = 1.0 - len(bad) / len(names) if names else 1.0
    for line in wrong[:50]:
        print(line)
    return {"reward": float(not wrong and agrees), **shares}


def restore(workspace: str) -> None:
    """Put the task's own test files into the workspace, over whatever is there."""
    suite = os.path.join(HERE, "suite")
    for directory, _, files in os.walk(suite):
        for name in files:
            source = os.path.join(directory, name)
            target = os.path.join(workspace, os.path.relpath(source, suite))
            path = workspace
            for part in os.path.relpath(os.path.dirname(target), workspace).split("/"):
                path = os.path.normpath(os.path.join(path, part))
                if os.path.islink(path) or (os.path.lexists(path) and not os.path.isdir(path)):
                    os.unlink(path)  # never write through a link of theirs
                os.makedirs(path, exist_ok=True)
            if os.path.lexists(target):
                shutil.rmtree(target) if os.path.isdir(target) and not os.path.islink(target) else os.unlink(target)
            shutil.copy(source, target)


def main() -> int:
    with open(os.path.join(HERE, "expected.json")) as file:
        expected = json.load(file)
    restore(expected["workspace"])
    command = ["bash", os.path.join(HERE, "eval.sh")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=expected["workspace"]) as run:
        log = (run.stdout.read() if run.stdout else b"").decode("utf-8", "replace")
    print(log)
    try:
        rewards = decide(log, expected)
    except Rejected as why:
        print(f"rejected: {why}")
        return 1
    os.makedirs("/logs/verifier", exist_ok=True)
    with open("/logs/verifier/reward.json", "w") as file:
        json.dump(rewards, file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
