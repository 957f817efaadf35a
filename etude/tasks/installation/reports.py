"""Read the statuses of tests from the reports of their runners. Pure functions over text.

Statuses are those of pytest: passed, failed, error, skipped, xfailed, xpassed. If a test is reported twice, the worse
status counts.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from etude.tasks.checks.inside.swe_log import parse_django

SEVERITY = {"passed": 0, "xfailed": 1, "xpassed": 1, "skipped": 2, "failed": 3, "error": 4}
UNITTEST = {"PASSED": "passed", "FAILED": "failed", "ERROR": "error", "SKIPPED": "skipped", "XFAIL": "xfailed"}
FRAMEWORKS = ("pytest", "unittest", "node", "tap", "jest", "mocha", "go", "cargo")
_TAP = re.compile(r"^(?P<indent> *)(?P<bad>not )?ok\b(?: \d+)?(?: -)? ?(?P<name>.*)$")


def read_statuses(framework: str, output: str, report: str = "") -> dict[str, str]:
    """Return test id -> status from the output of a run, or from the file of our reporter for pytest."""
    if framework == "pytest":
        return pytest_statuses(report)
    readers = {
        "unittest": lambda text: {id: UNITTEST[status] for id, status in parse_django(text).items()},
        "node": tap_statuses,
        "tap": tap_statuses,
        "jest": jest_statuses,
        "mocha": mocha_statuses,
        "go": go_statuses,
        "cargo": cargo_statuses,
    }
    return readers[framework](output)


def report_lines(report: str) -> list[Mapping[str, object]]:
    """Return the objects in a report of our pytest plugin; a line that was cut off is left out."""
    found: list[Mapping[str, object]] = []
    for line in report.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def pytest_statuses(report: str) -> dict[str, str]:
    """Return the statuses in a report of our pytest plugin."""
    found: dict[str, str] = {}
    for line in report_lines(report):
        if isinstance(line.get("id"), str) and line.get("status") in SEVERITY:
            record(found, str(line["id"]), str(line["status"]))
    return found


def tap_statuses(output: str) -> dict[str, str]:
    """Return the statuses in TAP, as of `node --test`: subtests are indented and named by the path to them."""
    found: dict[str, str] = {}
    names: list[str] = []  # of the enclosing tests, from `# Subtest: NAME`
    parents = set[str]()
    for line in output.splitlines():
        if start := re.match(r"^( *)# Subtest: (.*)$", line):
            depth = len(start[1]) // 4
            parents.update(" > ".join(names[:depth]) for _ in [0] if depth)
            names = [*names[:depth], start[2]]
        elif match := _TAP.match(line):
            depth = len(match["indent"]) // 4
            name, _, directive = re.sub(r"\\#", "\0", match["name"]).partition(" # ")
            name = name.replace("\0", "#").strip()
            path = " > ".join([*names[:depth], name])
            word = directive.strip().split(" ")[0].upper() if directive.strip() else ""
            status = "skipped" if word in ("SKIP", "TODO") else "failed" if match["bad"] else "passed"
            if name and path not in parents:
                record(found, path, status)
    return found


def jest_statuses(output: str) -> dict[str, str]:
    """Return the statuses in the JSON of `jest --json` and `vitest --reporter=json`."""
    value = _json_object(output, "testResults")
    names = {"passed": "passed", "failed": "failed", "pending": "skipped", "skipped": "skipped", "todo": "skipped"}
    found: dict[str, str] = {}
    for file in value.get("testResults", ()):
        top = str(file.get("name", ""))
        for test in file.get("assertionResults", ()):
            record(found, f"{top}::{test.get('fullName', '')}", names.get(str(test.get("status")), "error"))
        if file.get("status") == "failed" and not file.get("assertionResults"):
            record(found, top, "error")
    return found


def mocha_statuses(output: str) -> dict[str, str]:
    """Return the statuses in the JSON of `mocha --reporter json`."""
    value = _json_object(output, "stats")
    found: dict[str, str] = {}
    for key, status in (("passes", "passed"), ("failures", "failed"), ("pending", "skipped")):
        for test in value.get(key, ()):
            record(found, str(test.get("fullTitle", "")), status)
    return found


def go_statuses(output: str) -> dict[str, str]:
    """Return the statuses in the output of `go test -json`."""
    found: dict[str, str] = {}
    for line in report_lines(output):
        status = {"pass": "passed", "fail": "failed", "skip": "skipped"}.get(str(line.get("Action")))
        if status and line.get("Test"):
            record(found, f"{line.get('Package', '')}::{line['Test']}", status)
        elif status == "failed":
            record(found, str(line.get("Package", "")), "error" if line.get("FailedBuild") else "failed")
    return found


def cargo_statuses(output: str) -> dict[str, str]:
    """Return the statuses in the output of `cargo test`, each below the program it is in."""
    found: dict[str, str] = {}
    program = ""
    for line in output.splitlines():
        if start := re.match(r"\s+(?:Running|Doc-tests) (?:unittests )?(\S+)", line):
            program = start[1]
        elif match := re.match(r"test (\S.*?)(?: - should panic)? \.\.\. (ok|FAILED|ignored)", line):
            status = {"ok": "passed", "FAILED": "failed", "ignored": "skipped"}[match[2]]
            record(found, f"{program}::{match[1]}" if program else match[1], status)
    return found


def record(found: dict[str, str], name: str, status: str) -> None:
    """Record a status unless a worse one of the same test is known."""
    if name not in found or SEVERITY[status] > SEVERITY[found[name]]:
        found[name] = status


def _json_object(output: str, key: str) -> dict[str, Any]:
    """Return the JSON object with a key in text that other lines may surround."""
    decoder = json.JSONDecoder()
    for match in re.finditer(r"\{", output):
        try:
            value, _ = decoder.raw_decode(output, match.start())
        except ValueError:
            continue
        if isinstance(value, dict) and key in value:
            return value
    return {}
