"""Verify a nano workspace: `verify.py WORKSPACE LOGS` writes LOGS/verifier/reward.txt, 1 or 0, and the seal beside it.

The agent's code runs in a child process: on a copy, as another user, under resource limits, and with only the calls to
make. It returns their results as text on a pipe; the expected results are read here, after the child has ended. So
printing, exiting early, planting modules or searching for the answers earns nothing: there are none to find, and the
results must be right. When not run as root, it cannot change the user and only the limits apply.

It starts for every session, and imports would take most of its time: nothing that imports `re` or `enum` (json, signal,
shutil, tempfile, contextlib) is loaded unless a rule needs it.
"""

from __future__ import annotations

import os
import resource
import select
import sys
import time

TYPE_CHECKING = False  # importing typing would take a third of the start time
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

CALLS_TIMEOUT_S = 5.0  # for all calls together
MEMORY_LIMIT = 512 << 20
MAX_RESULT_CHARS = 10_000
MAX_BYTES = 1 << 20  # of all results, and of a file of the workspace
UNPRIVILEGED_ID = 65534
SIGKILL = 9


def main() -> None:
    tests = os.path.dirname(os.path.abspath(__file__))
    workspace, logs = sys.argv[1:3]
    rewards = os.path.join(logs, "verifier")
    os.makedirs(rewards, exist_ok=True)
    for directory in (tests, rewards):
        os.chmod(directory, 0o700)  # the child runs as another user
    calls = parse_json(read(tests, "calls.json"))
    results = run_in_child(copy_workspace(workspace), lambda: [call_result(*call) for call in calls]) if calls else []
    expected = parse_json(read(tests, "wants.json"))
    problem = find_problem(results, expected, workspace, logs)
    print(problem or "passed")
    with open(os.path.join(rewards, "reward.txt"), "w") as file:
        file.write("0\n" if problem else "1\n")
    with open(os.path.join(rewards, "seal"), "w") as file:
        file.write(read(tests, ".seal"))


# ------------------------------------------------------------------------------------------- running the agent's code


def copy_workspace(workspace: str, changes: dict[str, str] | None = None) -> str:
    """Copy the workspace to a directory that every user may read; `changes` replaces files in the copy."""
    copy = os.path.join(os.environ.get("TMPDIR") or "/tmp", "nano-" + os.urandom(8).hex())
    os.mkdir(copy, 0o755)
    os.chmod(copy, 0o755)  # independent of the umask
    for path in list_files(workspace):
        target = os.path.join(copy, path)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(os.path.join(workspace, path), "rb") as source, open(target, "wb") as file:
            data = source.read()
            file.write(data)
        if b"import json" in data:  # the unprivileged user may not be able to read the standard library
            import json  # noqa: F401
    for path, text in (changes or {}).items():
        with open(os.path.join(copy, path), "w", encoding="utf-8") as file:
            file.write(text)
    return copy


def list_files(workspace: str) -> list[str]:
    """Return the regular files of a workspace, without bytecode and files that are too large."""
    found = []
    for directory, names, files in os.walk(workspace):
        names[:] = [name for name in names if name != "__pycache__"]
        for name in files:
            path = os.path.join(directory, name)
            if not os.path.islink(path) and os.path.isfile(path) and os.path.getsize(path) <= MAX_BYTES:
                found.append(os.path.relpath(path, workspace))
    return sorted(found)


def run_in_child(copy: str, work: Callable[[], list[str]]) -> list[str]:
    """Return the results of `work` in a confined child process; an empty list if it does not end in time."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            confine(copy, writing)
            data = b"".join(b"\0" + text.encode("utf-8", "backslashreplace") for text in work())
            while data:
                data = data[os.write(writing, data) :]
        finally:
            os._exit(0)
    os.close(writing)
    data, deadline = b"", time.monotonic() + CALLS_TIMEOUT_S
    while len(data) <= MAX_BYTES and select.select([reading], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = os.read(reading, 1 << 16)
        if not part:
            break
        data += part
    try:  # noqa: SIM105
        os.killpg(pid, SIGKILL)
    except OSError:
        pass  # it has ended
    os.waitpid(pid, 0)
    os.close(reading)
    return data.decode("utf-8", "replace").split("\0")[1:]


def confine(copy: str, kept: int) -> None:
    """Drop privileges, chdir to the copy, set resource limits, and close all descriptors except `kept`."""
    null = os.open("/dev/null", os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.closerange(3, kept)
    os.closerange(kept + 1, 1024)
    os.chdir(copy)
    for limit, value in ((resource.RLIMIT_CPU, 5), (resource.RLIMIT_AS, MEMORY_LIMIT), (resource.RLIMIT_FSIZE, 0)):
        resource.setrlimit(limit, (value, value))
    if os.getuid() == 0:
        try:  # noqa: SIM105
            os.setgroups([])
        except PermissionError:
            pass  # a user namespace may not allow it
        os.setgid(UNPRIVILEGED_ID)
        os.setuid(UNPRIVILEGED_ID)
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    sys.dont_write_bytecode = True
    sys.argv = [""]
    sys.path.insert(0, copy)


def call_result(module: str, name: str, arguments: list[Any]) -> str:
    """Return the repr of the result of a call, or the name of the exception it raises."""
    try:
        return repr(getattr(__import__(module), name)(*arguments))[:MAX_RESULT_CHARS]
    except BaseException as error:
        return "raises " + type(error).__name__


def run_script(path: str) -> str:
    """Run a script and return "ok" or the name of the exception it raises."""
    try:
        with open(path, encoding="utf-8") as file:
            exec(compile(file.read(), path, "exec"), {"__name__": "__main__"})
    except SystemExit as error:
        return "SystemExit" if error.code else "ok"
    except BaseException as error:
        return type(error).__name__
    return "ok"


class JsonScannerOptions:
    """The options of json.loads, for the C scanner that needs no imports."""

    strict, object_hook, object_pairs_hook, parse_float, parse_int, parse_constant = True, None, None, float, int, float


def parse_json(text: str) -> Any:
    """Parse a JSON file of the task without importing json."""
    try:
        from _json import make_scanner
    except ImportError:  # not CPython
        import json

        return json.loads(text)
    return make_scanner(JsonScannerOptions)(text, 0)[0]  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------- comparing


def find_problem(results: list[str], expected: dict[str, Any], workspace: str, logs: str) -> str:
    """Return the first problem; an empty string if everything is as expected."""
    if results != expected.get("calls", []):
        return "the calls do not return the expected results"
    for name, rule in RULES.items():
        if name in expected and (problem := rule(expected[name], workspace, logs)):
            return problem
    return ""


def check_unchanged(wanted: dict[str, str], workspace: str, logs: str) -> str:
    """Check that nothing was changed, added or removed."""
    import hashlib

    found = {}
    for path in list_files(workspace):
        with open(os.path.join(workspace, path), "rb") as file:
            found[path] = hashlib.sha256(file.read()).hexdigest()
    return "" if found == wanted else "the workspace was changed"


def check_gone(names: list[str], workspace: str, logs: str) -> str:
    """Check that none of the names is left in the code."""
    import re

    for path, text in sources(workspace):
        for name in names:
            if re.search(r"\b" + name + r"\b", text):
                return f"{name} is still in {path}"
    return ""


def check_texts(rules: list[list[Any]], workspace: str, logs: str) -> str:
    """Check that files match all of some expressions and none of others."""
    import re

    for path, must, must_not in rules:
        text = read(workspace, path)
        if not all(re.search(each, text) for each in must) or any(re.search(each, text) for each in must_not):
            return f"{path} does not have the expected text"
    return ""


def check_code(files: dict[str, str], workspace: str, logs: str) -> str:
    """Check that the code of files did not change, apart from docstrings and comments."""
    for path, before in files.items():
        try:
            same = without_docstrings(read(workspace, path)) == without_docstrings(before)
        except SyntaxError:
            same = False
        if not same:
            return f"the code of {path} was changed"
    return ""


def without_docstrings(text: str) -> str:
    """Return a source without its docstrings, in a form to compare."""
    import ast

    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = node.body if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)) else []
        if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            body[:1] = [ast.Pass()]
    return ast.dump(tree)


def check_old_syntax(kind: str, workspace: str, logs: str) -> str:
    """Check that no old syntax of a kind is left."""
    import ast

    def is_text(node: ast.AST) -> bool:
        return isinstance(node, ast.Constant) and isinstance(node.value, str)

    def old(node: ast.AST) -> bool:
        if kind == "fstring":
            percent = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and is_text(node.left)
            called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format"
            return percent or called
        if not isinstance(node, ast.Compare) or not isinstance(node.ops[0], (ast.Eq, ast.NotEq)):
            return False
        sides = [node.left, *node.comparators]
        if kind == "none":
            return any(isinstance(side, ast.Constant) and side.value is None for side in sides)
        return any(isinstance(side, ast.Call) and getattr(side.func, "id", "") == "type" for side in sides)

    for path, text in sources(workspace):
        try:
            tree = ast.parse(text)
        except SyntaxError:
            return f"{path} is not Python"
        if any(old(node) for node in ast.walk(tree)):
            return f"{path} still has the old syntax"
    return ""


def check_variants(rule: dict[str, Any], workspace: str, logs: str) -> str:
    """Check that the agent's check passes on correct variants and fails on every mutant."""
    for changes, passes in rule["programs"]:
        ended = run_in_child(copy_workspace(workspace, changes), lambda: [run_script(rule["script"])])
        if not ended or (ended == ["ok"]) != passes:
            return "the check fails on correct code" if passes else "the check passes on faulty code"
    return ""


def check_final(rule: dict[str, Any], workspace: str, logs: str) -> str:
    """Check the agent's final message."""
    import re

    text = read(logs, "agent/final.txt")
    if "one_of" in rule:
        named = [each for each in rule["one_of"] if re.search(r"(?<!\w)" + re.escape(each) + r"(?!\w)", text)]
        return "" if named == [rule["is"]] else "the answer does not name exactly the expected one"
    if "number" in rule:
        said = {int(each) for each in re.findall(r"-?\d+", text)} - set(rule["given"])
        return "" if said == {rule["number"]} else "the answer is not the expected number"
    wrong = re.search(rule["not"], text, re.IGNORECASE) or not re.search(rule["says"], text, re.IGNORECASE)
    return "the answer does not match the expected one" if wrong else ""


def sources(workspace: str) -> Iterator[tuple[str, str]]:
    return ((path, read(workspace, path)) for path in list_files(workspace) if path.endswith(".py"))


def read(directory: str, path: str) -> str:
    """Return the text of a file; an empty string if there is none."""
    try:
        with open(os.path.join(directory, path), encoding="utf-8", errors="replace") as file:
            return file.read(MAX_BYTES)
    except OSError:
        return ""


RULES: dict[str, Callable[[Any, str, str], str]] = {
    "unchanged": check_unchanged,
    "gone": check_gone,
    "texts": check_texts,
    "code": check_code,
    "old_ways": check_old_syntax,
    "variants": check_variants,
    "final": check_final,
}


if __name__ == "__main__":
    main()
