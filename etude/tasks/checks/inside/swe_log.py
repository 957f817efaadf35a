"""Judges the log of a public set's own test script (SWE-bench and its relatives) with the parsers of those sets.

The script prints `>>>>> Start Test Output`, the output of the tests, `>>>>> End Test Output` and then
`>>>>> Test Exit Code: N`. The score is 1 if every listed test passed and the exit code agrees with the log; a skipped
test did not pass. A log without any test result gives no reward. Test ids are compared up to their first space, because
the sets' lists are cut off there.
"""

from __future__ import annotations

import re

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


class NoResult(Exception):
    """There is no reward: the submitted code was not observed as the check requires."""


def test_output(log: str) -> tuple[str, int]:
    """Return the output of the tests and the exit code recorded after it."""
    for marker in FAILURE_MARKERS:
        if marker in log:
            raise NoResult(f"the log contains {marker!r}")
    if START not in log or END not in log:
        raise NoResult("the tests did not finish: a marker is missing")
    inside = log.split(START, 1)[1].rpartition(END)[0]  # up to the last marker: tests may print one themselves
    codes = CODE.findall(log.rpartition(END)[2])
    if not codes:
        raise NoResult("no exit code was recorded")
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


def read_log(parser: str, log: str) -> tuple[dict[str, str], list[str]]:
    """Return the statuses of all tests, and a problem if the exit code contradicts them; raise NoResult if the log has
    no test results although the tests succeeded."""
    text, code = test_output(log)
    found = PARSERS[parser](text)
    if not found:
        if code != 0:
            return found, [f"no test reported a result, and the exit code is {code}"]
        raise NoResult("no test reported a result")
    failing = [name for name, status in found.items() if status in ("FAILED", "ERROR")]
    if bool(failing) != (code != 0):
        return found, [f"inconsistent: the exit code is {code}, but {len(failing)} tests are shown as failing"]
    return found, []
