"""Runs tests of a repository in a pod, the way its verifier will run them, and writes down what each came to.

    python3 trial.py SPEC.json REPORT.json

SPEC    as `run.json` of the verifier has it (workspace, run, paths, ini, plugins, arguments, env, timeout), and with
        `measure` (the directories to watch) which test runs which lines
REPORT  tests: id -> status, seconds, and for one that failed its message, its frames and its text;
        lines: file -> line -> numbers of the tests in `order`, or how many where they are too many to tell;
        early: file -> lines that ran before the tests; seen: whether the run came to its end
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from typing import Any

from etude.tasks.runner.guard import Message, Send, guarded, prepare, private_directory, site_packages
from etude.tasks.runner.inside import env_of, roots_of

LONGEST = 6_000  # characters of a failure that are kept
MOST = 500  # tests of one line that are named; what all of them run tells nothing apart
COVERAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "packages")


def run(spec: Message) -> Message:
    workspace = spec["workspace"]
    place = private_directory("trial")
    prepare(workspace)
    try:
        options = pytest_options(spec, workspace, place)
        tests = [os.path.join(workspace, test) for test in spec["run"]]

        def work(send: Send) -> None:
            _child(send, [*options, *tests], roots_of(spec, workspace), spec.get("measure"))

        env = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **env_of(spec, workspace)}
        outcome = guarded(work, timeout=spec.get("timeout", 120.0), cwd=workspace, env=env)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    report: Message = {"tests": {}, "order": [], "lines": {}, "early": {}, "seen": False}
    report["output"] = outcome.text[-LONGEST:]
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


def pytest_options(spec: Message, workspace: str, place: str) -> list[str]:
    """The verifier's own: no configuration but the task's, no plugin that was not named, no cache."""
    config = os.path.join(place, "pytest.ini")
    with open(config, "w") as file:
        file.write("[pytest]\n")
        for key, value in spec.get("ini", {}).items():
            file.write(f"{key} = " + str(value).replace("\n", "\n    ") + "\n")
    options = ["-q", "--tb=short", "-p", "no:cacheprovider", "-c", config]
    options += [f"--rootdir={workspace}", f"--confcutdir={workspace}"]
    for plugin in spec.get("plugins", []):
        options += ["-p", plugin]
    return options + [str(argument) for argument in spec.get("arguments", [])]


def _child(send: Send, arguments: list[str], roots: list[str], measured: list[str] | None) -> None:
    site_packages()
    import pytest

    cover: Any = None
    if measured:
        sys.path.append(COVERAGE)
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
            lines[line] = found if len(found) <= MOST else len(found)
        send({"kind": "lines", "file": file, "lines": lines, "early": early})


def _reporter(pytest: Any, send: Send, cover: Any) -> Any:
    class Reporter:
        def __init__(self) -> None:
            self.found: dict[str, Message] = {}
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

    return Reporter()


def _failure(report: Any, call: Any) -> Message:
    """What a failure says: the exception, the functions it went through, and pytest's own words."""
    if call.excinfo is None or report.outcome != "failed":
        return {}
    frames = [[str(entry.path), entry.lineno + 1, entry.name] for entry in call.excinfo.traceback]
    crash = getattr(report.longrepr, "reprcrash", None)
    message = str(crash.message) if crash is not None else call.excinfo.exconly()
    return {"message": message[:LONGEST], "frames": frames[-40:], "text": str(report.longrepr)[:LONGEST]}


def main() -> int:
    with open(sys.argv[1]) as file:
        spec = json.load(file)
    report = run(spec)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(sys.argv[2])
    with open(sys.argv[2], "w") as file:
        json.dump(report, file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
