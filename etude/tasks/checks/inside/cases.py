"""Observes results of calls and output of programs. Small imports only: it starts for most verifications."""

from __future__ import annotations

import io
import os
import sys

from etude.pod_stdlib import suppress
from etude.tasks.checks.inside.guard import (
    child_env,
    import_roots,
    run_guarded,
    use_site_packages,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from etude.tasks.checks.inside.guard import JsonObject, Send


def observe_cases(check: JsonObject, workspace: str) -> JsonObject:
    """Return the result of each case by id: a value as text, an exception, or a program's output."""
    timeout, env = check.get("timeout", 20.0), child_env(check, workspace)
    calls = [case for case in check["cases"] if "run" not in case]
    results: dict[str, JsonObject] = {}
    if calls:
        roots = import_roots(check, workspace)
        done = run_guarded(lambda send: _cases_child(send, calls, roots), timeout=timeout, cwd=workspace, env=env)
        print(done.text, file=sys.stderr)
        for message in done.messages:
            results.setdefault(str(message.pop("id", "")), message)  # the first message counts
    for case in check["cases"]:
        if "run" in case:
            results[case["id"]] = _run_program(case, timeout, workspace, env)
    return {"results": results}


def _run_program(case: JsonObject, timeout: float, workspace: str, env: dict[str, str]) -> JsonObject:
    def work(send: Send) -> None:
        os.execvp(case["run"][0], case["run"])

    stdin = case.get("stdin", "").encode()
    done = run_guarded(work, timeout=timeout, cwd=workspace, env=env, stdin=stdin, max_output=1 << 20)
    print(done.errors.decode("utf-8", "replace"), file=sys.stderr)
    return {"printed": done.output.decode("utf-8", "replace"), "exit": None if done.timed_out else done.status}


def _cases_child(send: Send, cases: list[JsonObject], roots: list[str]) -> None:
    use_site_packages()
    sys.path[:0] = roots
    for case in cases:
        message: JsonObject = {"id": case["id"]}
        printed = io.StringIO()
        stdout, sys.stdout = sys.stdout, printed
        try:
            try:
                message["value"] = canonical_repr(_value(case))
            finally:
                sys.stdout = stdout
        except BaseException as error:  # SystemExit is a result too
            message["raised"] = [kind.__name__ for kind in type(error).__mro__]
            with suppress(BaseException):
                message["words"] = str(error)[:2000]
        message["printed"] = printed.getvalue()
        send(message)


def _value(case: JsonObject) -> Any:
    """Return the value of a call, or of the variable `result` after running code. Arguments are the task's own."""
    if "code" in case:
        names: JsonObject = {"__name__": "case"}
        exec(compile(case["code"], "<case>", "exec"), names)
        return names.get("result")
    module, _, name = case["call"].partition(":")
    target: Any = __import__(module, fromlist=["_"])
    for part in name.split("."):
        target = getattr(target, part)
    return target(*eval(case.get("args", "()"), {}), **eval(case.get("kwargs", "{}"), {}))


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
