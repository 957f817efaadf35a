"""Runs a task's hidden tests and writes the reward. Placed in tests/ as runner.py, beside guard.py.

    run.json        what to run, read first        expected.json   what must come of it, read when the child is dead
    suite/          files put at their places in the workspace before: the tests, as the task has them

    pytest   statuses come back on the guard's pipe. Beside the tests run others that must fail, so that a pytest
             which was made to call everything passed is found out
    cases    the child computes values and this process compares them: what is expected never enters the child

The reward is 1 when exactly the expected tests ran and each ended as expected, else 0.
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
    Broken,
    Message,
    Outcome,
    Send,
    guarded,
    lock_up,
    prepare,
    private_directory,
    remove,
    restore,
    settle,
    site_packages,
)

CANARIES = 2
SUITE = os.path.join(HERE, "suite")


# ------------------------------------------------------------------------------------------------- pytest


def run_pytest(spec: Message, workspace: str) -> tuple[dict[str, str], str, Outcome]:
    """Statuses by test id, and why they cannot be believed ("" if they can)."""
    place = private_directory("canaries")
    try:
        canaries = [_canary(place, number) for number in range(CANARIES)]
        options = _options(spec, workspace, place)
        tests = [canaries[0], *(os.path.join(workspace, test) for test in spec["run"]), *canaries[1:]]

        def work(send: Send) -> None:
            _pytest_child(send, [*options, *tests], roots_of(spec, workspace))

        env = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **env_of(spec, workspace)}
        outcome = guarded(work, timeout=spec.get("timeout", 120.0), cwd=workspace, env=env)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    statuses: dict[str, str] = {}
    doubt = ""
    for message in outcome.messages:
        if message["kind"] == "broken":
            raise Broken(str(message["why"]))
        if message["kind"] == "test":
            name, status = str(message["id"]), str(message["status"])
            if statuses.setdefault(name, status) != status:
                doubt = f"{name} was reported as {statuses[name]} and as {status}"
    names = {os.path.basename(path)[: -len(".py")] for path in canaries}
    sprung = {id: statuses.pop(id) for id in list(statuses) if id.rpartition("::")[2] in names}
    if outcome.timed_out:
        doubt = "the time was over"
    elif not any(message["kind"] == "end" for message in outcome.messages):
        doubt = f"the tests did not come to their end (exit code {outcome.status})"
    elif len(sprung) != CANARIES or set(sprung.values()) != {"failed"}:
        doubt = "a test that must fail did not: pytest is not what it was"
    return statuses, doubt, outcome


def _canary(place: str, number: int) -> str:
    """A test module like any other, whose only test fails."""
    word = "".join(chr(97 + byte % 26) for byte in os.urandom(12))
    value = int.from_bytes(os.urandom(3), "big")
    path = os.path.join(place, f"test_{word}.py")
    with open(path, "w") as file:
        file.write(f"def test_{word}():\n    value = {value}\n    assert value == {value + 1 + number}\n")
    return path


def _options(spec: Message, workspace: str, place: str) -> list[str]:
    """No configuration but the task's, no plugin that was not named, no cache."""
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


def remove_plants(workspace: str, run: list[str], placed: set[str]) -> list[str]:
    """Remove each conftest.py on the way to the tests that is not of the suite: pytest would load it unasked."""
    removed = []
    for test in run:
        parts = test.split("::")[0].split("/")
        for depth in range(len(parts)):
            inside = "/".join([*parts[:depth], "conftest.py"])
            if inside not in placed and remove(os.path.join(workspace, inside)):
                removed.append(inside)
    return removed


def _pytest_child(send: Send, arguments: list[str], roots: list[str]) -> None:
    """In the child: pytest from the image's own packages first, then the way to the workspace."""
    site_packages()
    try:
        import pytest
    except ImportError:
        send({"kind": "broken", "why": f"there is no pytest in this image ({sys.executable})"})
        return
    if any(os.path.abspath(pytest.__file__).startswith(root.rstrip("/") + "/") for root in roots):
        send({"kind": "broken", "why": f"pytest would come from the workspace ({pytest.__file__})"})
        return
    sys.path[:0] = roots
    _doubt_equals()
    pytest.main(arguments, plugins=[_reporter(pytest, send)])
    send({"kind": "end"})


def _doubt_equals() -> None:
    """In asserts of tests, `a == b` becomes `check(a) == check(b)`: what equals anything at all is equal to nothing."""
    import builtins

    from _pytest.assertion import rewrite

    name, original = f"_{os.urandom(8).hex()}", rewrite.rewrite_asserts
    setattr(builtins, name, discerning)

    def rewrite_asserts(module: ast.Module, *rest: Any, **more: Any) -> None:
        for node in ast.walk(module):
            for part in ast.walk(node.test) if isinstance(node, ast.Assert) else ():
                if isinstance(part, ast.Compare) and [type(op) for op in part.ops] == [ast.Eq]:
                    part.left, part.comparators[0] = _checked(part.left, name), _checked(part.comparators[0], name)
        original(module, *rest, **more)

    rewrite.rewrite_asserts = rewrite_asserts  # type: ignore[assignment]


def _checked(value: ast.expr, name: str) -> ast.expr:
    if isinstance(value, ast.Constant):
        return value
    call = ast.Call(ast.Name(name, ast.Load()), [value], [])
    return ast.fix_missing_locations(ast.copy_location(call, value))


def discerning(value: Any, depth: int = 0) -> Any:
    """The value, unless it, or something in it, says that it equals an object nobody has seen before."""
    kind = type(value)
    if kind in (int, float, str, bytes, bool, type(None)) or depth > 5:
        return value
    for item in value.values() if kind is dict else value if kind in (list, tuple, set, frozenset) else ():
        discerning(item, depth + 1)
    same = False
    with contextlib.suppress(Exception):
        same = value == type("Unseen", (), {})()
    if same is True:
        raise AssertionError(f"a value of {kind.__name__} equals everything")
    return value


def _reporter(pytest: Any, send: Send) -> Any:
    """The plugin that tells each test's status: passed only where no exception was seen, whatever a report says."""

    class Reporter:
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

    return Reporter()


# ------------------------------------------------------------------------------------------------- cases


def run_cases(spec: Message, workspace: str) -> tuple[dict[str, Message], Outcome]:
    """What each case came to, by its id: a value in writing, an exception, or what a program printed."""
    timeout, env = spec.get("timeout", 20.0), env_of(spec, workspace)
    calls = [case for case in spec["cases"] if "run" not in case]
    found: dict[str, Message] = {}
    outcome = Outcome()
    if calls:
        roots = roots_of(spec, workspace)
        outcome = guarded(lambda send: _cases_child(send, calls, roots), timeout=timeout, cwd=workspace, env=env)
        for message in outcome.messages:
            found.setdefault(str(message["id"]), message)  # the first word counts
    for case in spec["cases"]:
        if "run" in case:
            found[case["id"]] = _run_program(case, timeout, workspace, env, outcome)
    return found, outcome


def _run_program(case: Message, timeout: float, workspace: str, env: dict[str, str], shown: Outcome) -> Message:
    def work(send: Send) -> None:
        os.execvp(case["run"][0], case["run"])

    stdin = case.get("stdin", "").encode()
    done = guarded(work, timeout=timeout, cwd=workspace, env=env, stdin=stdin, most=1 << 20)
    shown.errors += done.errors
    return {"printed": done.output.decode("utf-8", "replace"), "exit": None if done.timed_out else done.status}


def _cases_child(send: Send, cases: list[Message], roots: list[str]) -> None:
    site_packages()
    sys.path[:0] = roots
    for case in cases:
        message: Message = {"id": case["id"]}
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                message["value"] = written(_value(case))
        except BaseException as error:  # SystemExit too is an answer
            message["raised"] = [kind.__name__ for kind in type(error).__mro__]
            with contextlib.suppress(BaseException):
                message["words"] = str(error)[:2000]
        message["printed"] = printed.getvalue()
        send(message)


def _value(case: Message) -> Any:
    """What a call gives, or the name `result` after some code."""
    if "code" in case:
        names: Message = {"__name__": "case"}
        exec(compile(case["code"], "<case>", "exec"), names)
        return names.get("result")
    module, _, name = case["call"].partition(":")
    target: Any = __import__(module, fromlist=["_"])
    for part in name.split("."):
        target = getattr(target, part)
    return target(*ast.literal_eval(case.get("args", "()")), **ast.literal_eval(case.get("kwargs", "{}")))


def written(value: Any, depth: int = 0) -> str:
    """A value as Python writes it, of the plain types only: an object that claims to equal everything has no form."""
    kind = type(value)
    if depth > 50:
        return "<deep>"
    if kind in (int, float, complex, str, bytes, bool, type(None)):
        return repr(value)
    if kind is list:
        return "[" + ", ".join(written(item, depth + 1) for item in value) + "]"
    if kind is tuple:
        return "(" + "".join(written(item, depth + 1) + ", " for item in value) + ")"
    if kind is dict:
        pairs = sorted(f"{written(key, depth + 1)}: {written(item, depth + 1)}" for key, item in value.items())
        return "{" + ", ".join(pairs) + "}"
    if kind in (set, frozenset):
        return f"{kind.__name__}(" + ", ".join(sorted(written(item, depth + 1) for item in value)) + ")"
    return f"<{kind.__name__}>"


def disagreement(message: Message | None, expected: Message) -> str:
    """Why what a case came to is not what was expected; "" when it is."""
    if message is None:
        return "there is no result"
    raised = message.get("raised")
    if "raises" in expected:
        return "" if raised and expected["raises"] in raised[:-2] else f"raised {(raised or ['nothing'])[0]}"
    if raised:
        return f"raised {raised[0]}: {message.get('words', '')[:200]}"
    if "returns" in expected:
        got, wanted = str(message.get("value")), ast.literal_eval(expected["returns"])
        if got != written(wanted) and not _close(got, wanted, expected.get("within")):
            return f"returned {got[:200]}"
    if "prints" in expected and message.get("printed") != expected["prints"]:
        return f"printed {str(message.get('printed'))[-200:]!r}"
    if message.get("exit", 0) != expected.get("exit", 0):
        return f"ended with exit code {message.get('exit')}"
    return ""


def _close(got: str, wanted: Any, within: float | None) -> bool:
    """Whether two numbers are near enough, where that was allowed."""
    try:
        value = ast.literal_eval(got)
    except (ValueError, SyntaxError):
        return False
    return within is not None and type(value) is type(wanted) and abs(value - wanted) <= within


# ------------------------------------------------------------------------------------------------- the whole


def roots_of(spec: Message, workspace: str) -> list[str]:
    """Where the workspace's modules are imported from."""
    return [os.path.normpath(os.path.join(workspace, path)) for path in spec.get("paths", ["."])]


def env_of(spec: Message, workspace: str) -> dict[str, str]:
    """The child's environment. PYTHON... is for programs that tests start: the child itself reads none of it."""
    plain = {"PYTHONPATH": ":".join(roots_of(spec, workspace)), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"}
    return {**plain, **spec.get("env", {})}


def judge(spec: Message, workspace: str) -> tuple[dict[str, str], dict[str, str], str, Outcome]:
    """Run the tests: statuses, expected statuses, doubt, and the child's words."""
    placed = restore(SUITE, workspace)
    prepare(workspace)
    doubt = ""
    if spec["kind"] == "pytest":
        for plant in remove_plants(workspace, spec["run"], placed):
            print(f"removed: {plant}")
        statuses, doubt, outcome = run_pytest(spec, workspace)
    elif spec["kind"] == "cases":
        found, outcome = run_cases(spec, workspace)
    else:
        raise Broken(f"run.json: kind is {spec['kind']!r}; expected pytest or cases")
    with open(os.path.join(HERE, "expected.json")) as file:  # not before: the child was a copy of this process
        expected = json.load(file)
    if spec["kind"] == "cases":
        statuses = {name: disagreement(found.get(name), wanted) or "passed" for name, wanted in expected.items()}
        expected = dict.fromkeys(expected, "passed")
    return statuses, expected, doubt, outcome


def main() -> int:
    seal = lock_up()
    with open(os.path.join(HERE, "run.json")) as file:
        spec = json.load(file)
    try:
        statuses, expected, doubt, outcome = judge(spec, spec.get("workspace", "/work"))
    except Broken as error:
        print(f"verifier: {error}")
        return 1
    print(outcome.text)
    wrong = {name: statuses.get(name, "missing") for name, status in expected.items() if statuses.get(name) != status}
    extra = sorted(set(statuses) - set(expected)) if spec.get("exact", True) else []
    for name, status in wrong.items():
        print(f"{name}: {status}, expected {expected[name]}")
    for name in extra:
        print(f"{name}: {statuses[name]}, not expected at all")
    if doubt:
        print(f"not believed: {doubt}")
    passed = bool(expected) and not wrong and not extra and not doubt
    rewards = {"reward": float(passed), "right": float(len(expected) - len(wrong)), "of": float(len(expected))}
    settle(rewards, seal, {"doubt": doubt, "statuses": statuses, "wrong": wrong, "extra": extra})
    return 0


if __name__ == "__main__":
    sys.exit(main())
