"""Run tests of a repository in a pod, as its verifier will, and write a report.

    python3 run_tests SPEC.json REPORT.json

SPEC    the fields of the verifier's `run.json` (workspace, run, paths, ini, plugins, arguments, env, timeout), and
        optionally `measure`: directories for which to record which test executes which line
REPORT  tests: id -> status, seconds, and for a failure message, frames and text;
        lines: file -> line -> indices of tests in `order`, or their number if above MAX_TESTS_PER_LINE;
        early: file -> lines executed outside any test; seen: whether the run finished
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time

from etude.tasks.checks.inside.guard import (
    HERE,
    child_env,
    import_roots,
    prepare_workspace,
    private_directory,
    run_guarded,
    use_site_packages,
)
from etude.tasks.checks.inside.pytest_run import pytest_options

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from etude.tasks.checks.inside.guard import JsonObject, Send

MAX_FAILURE_CHARS = 6_000  # kept of a failure
MAX_TESTS_PER_LINE = 500  # above it only their number is kept: a line that most tests execute is not informative
COVERAGE_DIR = os.path.join(HERE, "packages")


def run(spec: JsonObject) -> JsonObject:
    workspace = spec["workspace"]
    directory = private_directory("trial")
    prepare_workspace(workspace)
    try:
        options = pytest_options(spec, workspace, directory)
        tests = [os.path.join(workspace, test) for test in spec["run"]]

        def work(send: Send) -> None:
            _child(send, [*options, *tests], import_roots(spec, workspace), spec.get("measure"))

        env = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **child_env(spec, workspace)}
        outcome = run_guarded(work, timeout=spec.get("timeout", 120.0), cwd=workspace, env=env)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    report: JsonObject = {"tests": {}, "order": [], "lines": {}, "early": {}, "seen": False}
    report["output"] = outcome.text[-MAX_FAILURE_CHARS:]
    report["timed_out"] = outcome.timed_out
    for message in outcome.messages:
        kind = message.pop("kind")
        if kind == "test":
            report["tests"][message.pop("id")] = message
        elif kind == "lines":
            report["lines"][message["file"]] = message["lines"]
            report["early"][message["file"]] = message["early"]
        elif kind == "order":
            report["order"] = message["tests"]
        else:
            report["seen"] = True
    return report


def _child(send: Send, arguments: list[str], roots: list[str], measured: list[str] | None) -> None:
    use_site_packages()
    import pytest

    cover: Any = None
    if measured:
        sys.path.append(COVERAGE_DIR)
        import coverage

        cover = coverage.Coverage(data_file=None, source=measured, config_file=False, messages=False)
        cover.start()
    sys.path[:0] = roots
    pytest.main(arguments, plugins=[_reporter(pytest, send, cover)])
    if cover is not None:
        cover.stop()
        _send_lines(send, cover.get_data())
    send({"kind": "end"})


def _send_lines(send: Send, data: Any) -> None:
    order = sorted(name for name in data.measured_contexts() if name)
    numbers = {name: number for number, name in enumerate(order)}
    send({"kind": "order", "tests": order})
    for file in data.measured_files():
        lines: dict[int, list[int] | int] = {}
        early = []
        for line, names in data.contexts_by_lineno(file).items():
            if "" in names:
                early.append(line)
            found = sorted(numbers[name] for name in set(names) if name)
            lines[line] = found if len(found) <= MAX_TESTS_PER_LINE else len(found)
        send({"kind": "lines", "file": file, "lines": lines, "early": early})


def _reporter(pytest: Any, send: Send, cover: Any) -> Any:
    class TestRunReporter:
        def __init__(self) -> None:
            self.found: dict[str, JsonObject] = {}
            self.started = 0.0

        def pytest_runtest_logstart(self, nodeid: str) -> None:
            self.started = time.monotonic()
            if cover is not None:
                cover.switch_context(nodeid)

        @pytest.hookimpl(hookwrapper=True, tryfirst=True)  # type: ignore[untyped-decorator]
        def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
            report = (yield).get_result()
            status = str(report.outcome)
            if hasattr(report, "wasxfail"):
                status = "xfailed" if report.skipped else "xpassed"
            elif call.when != "call" and status == "failed":
                status = "error"
            if self.found.get(item.nodeid, {"status": "passed"})["status"] == "passed":
                self.found[item.nodeid] = {"status": status, **_failure(report, call)}

        @pytest.hookimpl(trylast=True)  # type: ignore[untyped-decorator]
        def pytest_runtest_logfinish(self, nodeid: str) -> None:
            found = self.found.pop(nodeid, {"status": "missing"})
            if cover is not None:
                cover.switch_context("")
            send({"kind": "test", "id": nodeid, "seconds": round(time.monotonic() - self.started, 4), **found})

    return TestRunReporter()


def _failure(report: Any, call: Any) -> JsonObject:
    """Return message, frames and pytest's text of a failure; empty if the test did not fail."""
    if call.excinfo is None or report.outcome != "failed":
        return {}
    frames = [[str(entry.path), entry.lineno + 1, entry.name] for entry in call.excinfo.traceback]
    crash = getattr(report.longrepr, "reprcrash", None)
    message = str(crash.message) if crash is not None else call.excinfo.exconly()
    return {
        "message": message[:MAX_FAILURE_CHARS],
        "frames": frames[-40:],
        "text": str(report.longrepr)[:MAX_FAILURE_CHARS],
    }


def main() -> int:
    with open(sys.argv[1]) as file:
        spec = json.load(file)
    report = run(spec)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(sys.argv[2])
    with open(sys.argv[2], "w") as file:
        json.dump(report, file)
    return 0
