"""Runs a task's hidden tests and writes the reward. Shipped in tests/ as runner.pyz.

    run.json        the tests to run
    expected.json   the expected results, read only after the child is dead
    suite/          the task's own tests, copied into the workspace first

    pytest   statuses come back through the guard's pipe. Canary tests that must fail run beside the others and expose
             a pytest that was patched to report everything as passed
    cases    the child computes values and this process compares them: expected values never enter the child

The reward is 1 if exactly the expected tests ran and each had the expected result, else 0.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import shutil
import sys
from typing import Any

from etude.tasks.runner.guard import (
    HERE,
    ChildResult,
    JsonObject,
    Send,
    VerifierBroken,
    prepare_workspace,
    private_directory,
    remove,
    restore_suite,
    restrict_verifier_files,
    run_guarded,
    use_site_packages,
    write_rewards,
)

CANARIES = 2
SUITE = os.path.join(HERE, "suite")


# ------------------------------------------------------------------------------------------------- pytest


def run_pytest(spec: JsonObject, workspace: str) -> tuple[dict[str, str], str, ChildResult]:
    """Return statuses by test id, and why they are not trusted ("" if they are)."""
    directory = private_directory("canaries")
    try:
        canaries = [_write_canary(directory, number) for number in range(CANARIES)]
        options = pytest_options(spec, workspace, directory)
        tests = [canaries[0], *(os.path.join(workspace, test) for test in spec["run"]), *canaries[1:]]

        def work(send: Send) -> None:
            _pytest_child(send, [*options, *tests], import_roots(spec, workspace))

        env = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **child_env(spec, workspace)}
        result = run_guarded(work, timeout=spec.get("timeout", 120.0), cwd=workspace, env=env)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    statuses: dict[str, str] = {}
    doubt = ""
    for message in result.messages:
        if message["kind"] == "broken":
            raise VerifierBroken(str(message["why"]))
        if message["kind"] == "test":
            name, status = str(message["id"]), str(message["status"])
            if statuses.setdefault(name, status) != status:
                doubt = f"{name} was reported as {statuses[name]} and as {status}"
    names = {os.path.basename(path)[: -len(".py")] for path in canaries}
    canary_statuses = {id: statuses.pop(id) for id in list(statuses) if id.rpartition("::")[2] in names}
    if result.timed_out:
        doubt = "the tests timed out"
    elif not any(message["kind"] == "end" for message in result.messages):
        doubt = f"the tests did not finish (exit code {result.status})"
    elif len(canary_statuses) != CANARIES or set(canary_statuses.values()) != {"failed"}:
        doubt = "a canary test that must fail did not: pytest was patched"
    return statuses, doubt, result


def _write_canary(directory: str, number: int) -> str:
    """Write a test module with an unremarkable name whose only test fails."""
    name = "".join(chr(97 + byte % 26) for byte in os.urandom(12))
    value = int.from_bytes(os.urandom(3), "big")
    path = os.path.join(directory, f"test_{name}.py")
    with open(path, "w") as file:
        file.write(f"def test_{name}():\n    value = {value}\n    assert value == {value + 1 + number}\n")
    return path


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


def remove_foreign_conftests(workspace: str, run: list[str], suite: set[str]) -> list[str]:
    """Remove every conftest.py that pytest would load for the tests and that is not in the suite."""
    removed = []
    for test in run:
        parts = test.split("::")[0].split("/")
        for depth in range(len(parts)):
            inside = "/".join([*parts[:depth], "conftest.py"])
            if inside not in suite and remove(os.path.join(workspace, inside)):
                removed.append(inside)
    return removed


def _pytest_child(send: Send, arguments: list[str], roots: list[str]) -> None:
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
    pytest.main(arguments, plugins=[_reporter(pytest, send)])
    send({"kind": "end"})


def _check_equality_operands() -> None:
    """Rewrite `a == b` in asserts to `check(a) == check(b)`, where check rejects objects that equal everything."""
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


def _check_call(value: ast.expr, name: str) -> ast.expr:
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
    with contextlib.suppress(Exception):
        same = value == type("Unseen", (), {})()
    if same is True:
        raise AssertionError(f"a value of {kind.__name__} equals everything")
    return value


def _reporter(pytest: Any, send: Send) -> Any:
    """Return the plugin that sends each test's status: passed only if no exception was raised, whatever reports say."""

    class StatusReporter:
        def __init__(self) -> None:
            self.statuses: dict[str, str] = {}

        @pytest.hookimpl(hookwrapper=True, tryfirst=True)  # type: ignore[untyped-decorator]
        def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
            # a trace function of the tested code can make a test jump over its asserts
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


# ------------------------------------------------------------------------------------------------- cases


def run_cases(spec: JsonObject, workspace: str) -> tuple[dict[str, JsonObject], ChildResult]:
    """Return the result of each case by id: a value as text, an exception, or a program's output."""
    timeout, env = spec.get("timeout", 20.0), child_env(spec, workspace)
    calls = [case for case in spec["cases"] if "run" not in case]
    found: dict[str, JsonObject] = {}
    result = ChildResult()
    if calls:
        roots = import_roots(spec, workspace)
        result = run_guarded(lambda send: _cases_child(send, calls, roots), timeout=timeout, cwd=workspace, env=env)
        for message in result.messages:
            found.setdefault(str(message["id"]), message)  # the first message counts
    for case in spec["cases"]:
        if "run" in case:
            found[case["id"]] = _run_program(case, timeout, workspace, env, result)
    return found, result


def _run_program(
    case: JsonObject, timeout: float, workspace: str, env: dict[str, str], shown: ChildResult
) -> JsonObject:
    def work(send: Send) -> None:
        os.execvp(case["run"][0], case["run"])

    stdin = case.get("stdin", "").encode()
    done = run_guarded(work, timeout=timeout, cwd=workspace, env=env, stdin=stdin, max_output=1 << 20)
    shown.errors += done.errors
    return {"printed": done.output.decode("utf-8", "replace"), "exit": None if done.timed_out else done.status}


def _cases_child(send: Send, cases: list[JsonObject], roots: list[str]) -> None:
    use_site_packages()
    sys.path[:0] = roots
    for case in cases:
        message: JsonObject = {"id": case["id"]}
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                message["value"] = canonical_repr(_value(case))
        except BaseException as error:  # SystemExit is a result too
            message["raised"] = [kind.__name__ for kind in type(error).__mro__]
            with contextlib.suppress(BaseException):
                message["words"] = str(error)[:2000]
        message["printed"] = printed.getvalue()
        send(message)


def _value(case: JsonObject) -> Any:
    """Return the value of a call, or of the variable `result` after running code."""
    if "code" in case:
        names: JsonObject = {"__name__": "case"}
        exec(compile(case["code"], "<case>", "exec"), names)
        return names.get("result")
    module, _, name = case["call"].partition(":")
    target: Any = __import__(module, fromlist=["_"])
    for part in name.split("."):
        target = getattr(target, part)
    return target(*ast.literal_eval(case.get("args", "()")), **ast.literal_eval(case.get("kwargs", "{}")))


def canonical_repr(value: Any, depth: int = 0) -> str:
    """Return the repr of a value of built-in types; other objects get a placeholder, so they equal nothing."""
    kind = type(value)
    if depth > 50:
        return "<deep>"
    if kind in (int, float, complex, str, bytes, bool, type(None)):
        return repr(value)
    if kind is list:
        return "[" + ", ".join(canonical_repr(item, depth + 1) for item in value) + "]"
    if kind is tuple:
        return "(" + "".join(canonical_repr(item, depth + 1) + ", " for item in value) + ")"
    if kind is dict:
        pairs = sorted(
            f"{canonical_repr(key, depth + 1)}: {canonical_repr(item, depth + 1)}" for key, item in value.items()
        )
        return "{" + ", ".join(pairs) + "}"
    if kind in (set, frozenset):
        return f"{kind.__name__}(" + ", ".join(sorted(canonical_repr(item, depth + 1) for item in value)) + ")"
    return f"<{kind.__name__}>"


def mismatch(message: JsonObject | None, expected: JsonObject) -> str:
    """Return why a case's result differs from the expectation, or "" if it does not."""
    if message is None:
        return "no result"
    raised = message.get("raised")
    if "raises" in expected:
        return "" if raised and expected["raises"] in raised[:-2] else f"raised {(raised or ['nothing'])[0]}"
    if raised:
        return f"raised {raised[0]}: {message.get('words', '')[:200]}"
    if "returns" in expected:
        got, wanted = str(message.get("value")), ast.literal_eval(expected["returns"])
        if got != canonical_repr(wanted) and not _within_tolerance(got, wanted, expected.get("within")):
            return f"returned {got[:200]}"
    if "prints" in expected and message.get("printed") != expected["prints"]:
        return f"printed {str(message.get('printed'))[-200:]!r}"
    if message.get("exit", 0) != expected.get("exit", 0):
        return f"ended with exit code {message.get('exit')}"
    return ""


def _within_tolerance(got: str, wanted: Any, within: float | None) -> bool:
    """Whether two numbers differ by at most `within`, if that is given."""
    try:
        value = ast.literal_eval(got)
    except (ValueError, SyntaxError):
        return False
    return within is not None and type(value) is type(wanted) and abs(value - wanted) <= within


# ------------------------------------------------------------------------------------------------- main


def import_roots(spec: JsonObject, workspace: str) -> list[str]:
    """Return the directories of the workspace from which modules are imported."""
    return [os.path.normpath(os.path.join(workspace, path)) for path in spec.get("paths", ["."])]


def child_env(spec: JsonObject, workspace: str) -> dict[str, str]:
    """Return the child's environment. PYTHON* is for programs that tests start: the child itself does not read it."""
    defaults = {
        "PYTHONPATH": ":".join(import_roots(spec, workspace)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
    }
    return {**defaults, **spec.get("env", {})}


def run_tests(spec: JsonObject, workspace: str) -> tuple[dict[str, str], dict[str, str], str, ChildResult]:
    """Run the tests; return statuses, expected statuses, why they are not trusted, and the child's result."""
    suite = restore_suite(SUITE, workspace)
    prepare_workspace(workspace)
    doubt = ""
    if spec["kind"] == "pytest":
        for path in remove_foreign_conftests(workspace, spec["run"], suite):
            print(f"removed: {path}")
        statuses, doubt, result = run_pytest(spec, workspace)
    elif spec["kind"] == "cases":
        found, result = run_cases(spec, workspace)
    else:
        raise VerifierBroken(f"run.json: kind is {spec['kind']!r}; expected pytest or cases")
    with open(os.path.join(HERE, "expected.json")) as file:  # not earlier: the child was a fork of this process
        expected = json.load(file)
    if spec["kind"] == "cases":
        statuses = {name: mismatch(found.get(name), wanted) or "passed" for name, wanted in expected.items()}
        expected = dict.fromkeys(expected, "passed")
    return statuses, expected, doubt, result


def main() -> int:
    seal = restrict_verifier_files()
    with open(os.path.join(HERE, "run.json")) as file:
        spec = json.load(file)
    try:
        statuses, expected, doubt, result = run_tests(spec, spec.get("workspace", "/work"))
    except VerifierBroken as error:
        print(f"verifier: {error}")
        return 1
    print(result.text)
    wrong = {name: statuses.get(name, "missing") for name, status in expected.items() if statuses.get(name) != status}
    extra = sorted(set(statuses) - set(expected)) if spec.get("exact", True) else []
    for name, status in wrong.items():
        print(f"{name}: {status}, expected {expected[name]}")
    for name in extra:
        print(f"{name}: {statuses[name]}, not expected to run")
    if doubt:
        print(f"results not trusted: {doubt}")
    passed = bool(expected) and not wrong and not extra and not doubt
    rewards = {"reward": float(passed), "right": float(len(expected) - len(wrong)), "of": float(len(expected))}
    write_rewards(rewards, seal, {"doubt": doubt, "statuses": statuses, "wrong": wrong, "extra": extra})
    return 0
