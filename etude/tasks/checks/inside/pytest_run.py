"""Observes a run of pytest on the submitted code: the status of every test, and how the run ended.

Tests and submitted code share an interpreter, so a status is what that interpreter chose to report. The judge adds
probes to a run, tests that must fail: a pytest that was patched to report success gives itself away by them.
"""

from __future__ import annotations

import os
import sys

from etude.pod_stdlib import suppress
from etude.tasks.checks.inside.guard import (
    VerifierBroken,
    child_env,
    import_roots,
    private_directory,
    remove,
    remove_tree,
    run_guarded,
    use_site_packages,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ast
    from typing import Any

    from etude.tasks.checks.inside.guard import JsonObject, Send


def observe_pytest(check: JsonObject, workspace: str) -> JsonObject:
    """Run the tests of a check with its probes among them and around them. Of the files in `shown` the disk has that
    text, and pytest runs the planted one."""
    planted, shown = check.pop("planted", {}), check.pop("shown", {})
    write_files({**planted, **shown}, workspace)  # no object that the submission can reach says which are planted
    check["loaded"] = {os.path.join(workspace, path): planted[path] for path in shown}
    for path in remove_foreign_conftests(workspace, check["run"], set(check.get("placed", []))):
        print(f"removed: {path}", file=sys.stderr)
    return run_pytest(check, check["run"], workspace)


def write_files(files: dict[str, str], workspace: str) -> None:
    """Put files into the workspace in place of those that are there."""
    for path, text in files.items():
        remove(os.path.join(workspace, path))
        with open(os.path.join(workspace, path), "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
            file.write(text)


def run_pytest(check: JsonObject, tests: list[str], workspace: str) -> JsonObject:
    """Return the statuses of tests and probes by id, the first contradiction, and how the run ended."""
    directory = private_directory("probes")
    try:
        probes = []
        for name, source in check.get("probes", {}).items():
            probes.append(os.path.join(directory, name))
            with open(probes[-1], "w") as file:
                file.write(source)
        # One line for each failure: a traceback with source costs a parse of the test file, and every false twin fails.
        options = [*pytest_options(check, workspace, directory), "--tb=line"]
        paths = [*probes[:1], *(os.path.join(workspace, test) for test in tests), *probes[1:]]

        def work(send: Send) -> None:
            roots, loaded = import_roots(check, workspace), check.get("loaded", {})
            _pytest_child(send, [*options, *paths], roots, check.get("reverse", False), loaded)

        env = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **child_env(check, workspace)}
        result = run_guarded(work, timeout=check.get("timeout", 120.0), cwd=workspace, env=env)
    finally:
        remove_tree(directory)
    statuses: dict[str, str] = {}
    contradiction = ""
    for message in result.messages:
        if message.get("kind") == "broken":
            raise VerifierBroken(str(message["why"]))
        if message.get("kind") == "test":
            name, status = str(message["id"]), str(message["status"])
            if statuses.setdefault(name, status) != status:
                contradiction = contradiction or name
    print(result.text[-6000:], file=sys.stderr)
    return {
        "statuses": statuses,
        "contradiction": contradiction,
        "ended": any(message.get("kind") == "end" for message in result.messages),
        "timed_out": result.timed_out,
        "exit": result.status,
        "text": result.text[-500:],
    }


def pytest_options(spec: JsonObject, workspace: str, directory: str) -> list[str]:
    """Return pytest options: the task's configuration only, named plugins only, no cache."""
    config = os.path.join(directory, "pytest.ini")
    with open(config, "w") as file:
        file.write("[pytest]\n")
        for key, value in spec.get("ini", {}).items():
            file.write(f"{key} = " + str(value).replace("\n", "\n    ") + "\n")
    options = ["-q", "--tb=short", "-p", "no:cacheprovider", "-c", config]
    options += [f"--rootdir={workspace}", f"--confcutdir={workspace}"]
    for plugin in spec.get("plugins", []):
        options += ["-p", plugin]
    return options + [str(argument) for argument in spec.get("arguments", [])]


def remove_foreign_conftests(workspace: str, run: list[str], placed: set[str]) -> list[str]:
    """Remove every conftest.py that pytest would load for the tests and that the task did not place there."""
    removed = []
    for test in run:
        parts = test.split("::")[0].split("/")
        for depth in range(len(parts)):
            inside = "/".join([*parts[:depth], "conftest.py"])
            if inside not in placed and remove(os.path.join(workspace, inside)):
                removed.append(inside)
    return removed


def _pytest_child(send: Send, arguments: list[str], roots: list[str], reverse: bool, loaded: dict[str, str]) -> None:
    """Run pytest in the child. pytest is imported from the image's packages before the workspace is on sys.path."""
    use_site_packages()
    try:
        import pytest
    except ImportError:
        send({"kind": "broken", "why": f"the image has no pytest ({sys.executable})"})
        return
    if any(os.path.abspath(pytest.__file__).startswith(root.rstrip("/") + "/") for root in roots):
        send({"kind": "broken", "why": f"pytest would be imported from the workspace ({pytest.__file__})"})
        return
    sys.path[:0] = roots
    _check_equality_operands()
    _load_from_memory(loaded)
    pytest.main(arguments, plugins=[_reporter(pytest, send, reverse)])
    send({"kind": "end"})


def _check_equality_operands() -> None:
    """Rewrite `a == b` in asserts to `check(a) == check(b)`, where check rejects objects that equal everything."""
    import ast
    import builtins

    from _pytest.assertion import rewrite

    name, original = f"_{os.urandom(8).hex()}", rewrite.rewrite_asserts
    setattr(builtins, name, reject_equal_to_all)

    def rewrite_asserts(module: ast.Module, *rest: Any, **more: Any) -> None:
        for node in ast.walk(module):
            for part in ast.walk(node.test) if isinstance(node, ast.Assert) else ():
                if isinstance(part, ast.Compare) and [type(op) for op in part.ops] == [ast.Eq]:
                    part.left, part.comparators[0] = (
                        _check_call(part.left, name),
                        _check_call(part.comparators[0], name),
                    )
        original(module, *rest, **more)

    rewrite.rewrite_asserts = rewrite_asserts  # type: ignore[assignment]


def _load_from_memory(sources: dict[str, str]) -> None:
    """Let pytest load some test files from these texts; what is on disk is for code that reads the tests."""
    import ast

    from _pytest.assertion import rewrite

    original = rewrite._rewrite_test

    def rewrite_test(path: Any, config: Any) -> Any:
        text = sources.get(str(path))
        if text is None:
            return original(path, config)
        source = text.encode("utf-8", "surrogateescape")
        tree = ast.parse(source, filename=str(path))
        rewrite.rewrite_asserts(tree, source, str(path), config)
        return b"", compile(tree, str(path), "exec", dont_inherit=True)  # the first is for the cache, which is off

    if sources:
        rewrite._rewrite_test = rewrite_test  # type: ignore[assignment]


def _check_call(value: ast.expr, name: str) -> ast.expr:
    import ast

    if isinstance(value, ast.Constant):
        return value
    call = ast.Call(ast.Name(name, ast.Load()), [value], [])
    return ast.fix_missing_locations(ast.copy_location(call, value))


def reject_equal_to_all(value: Any, depth: int = 0) -> Any:
    """Return the value; raise AssertionError if it, or an item of it, equals a newly made object."""
    kind = type(value)
    if kind in (int, float, str, bytes, bool, type(None)) or depth > 5:
        return value
    for item in value.values() if kind is dict else value if kind in (list, tuple, set, frozenset) else ():
        reject_equal_to_all(item, depth + 1)
    same = False
    with suppress(Exception):
        same = value == type("Unseen", (), {})()
    if same is True:
        raise AssertionError(f"a value of {kind.__name__} equals everything")
    return value


def _reporter(pytest: Any, send: Send, reverse: bool) -> Any:
    """Return the plugin that sends each test's status: passed only if no exception was raised, whatever reports say.
    With `reverse` the tests run in the opposite order."""

    class StatusReporter:
        def __init__(self) -> None:
            self.statuses: dict[str, str] = {}

        @pytest.hookimpl(trylast=True)  # type: ignore[untyped-decorator]
        def pytest_collection_modifyitems(self, items: list[Any]) -> None:
            if reverse:
                items.reverse()

        @pytest.hookimpl(hookwrapper=True, tryfirst=True)  # type: ignore[untyped-decorator]
        def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
            # a trace function of the submitted code can make a test jump over its asserts
            raised = call.excinfo is not None or sys.gettrace() is not None
            report = (yield).get_result()
            status = "failed" if raised and report.passed else str(report.outcome)
            if hasattr(report, "wasxfail"):
                status = "xfailed" if report.skipped else "xpassed"
            elif call.when != "call" and status == "failed":
                status = "error"
            if self.statuses.get(item.nodeid, "passed") == "passed":  # the worst of setup, call and teardown
                self.statuses[item.nodeid] = status

        @pytest.hookimpl(trylast=True)  # type: ignore[untyped-decorator]
        def pytest_runtest_logfinish(self, nodeid: str) -> None:
            send({"kind": "test", "id": nodeid, "status": self.statuses.pop(nodeid, "missing")})

    return StatusReporter()
