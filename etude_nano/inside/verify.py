"""Grades a nano workspace: `verify.py WORKSPACE LOGS`. Writes LOGS/verifier/reward.txt, 1 or 0, and the seal beside it.

What the agent left is run in a child: on a copy, as another user, under limits, with nothing but the calls to try. It
gives back what the calls gave, as text on a pipe; what they should give is read here, after the child is gone. So
printing, exiting early, planting modules or looking for the answers earns nothing: there are none to be found, and what
comes back has to be right. Where we are not root there is no other user to be, and only the limits hold.

It is started for every session, and most of its time would be that of its imports: nothing is loaded that drags in `re`
or `enum` (json, signal, shutil, tempfile, contextlib) unless a rule needs it.
"""

from __future__ import annotations

import os
import resource
import select
import sys
import time

TYPE_CHECKING = False  # typing's own would cost a third of the start
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

SECONDS = 5.0  # for all calls
MEMORY = 512 << 20
LONGEST = 10_000  # characters of one result
MOST = 1 << 20  # bytes of all results, and of a file of the workspace
NOBODY = 65534
KILL = 9


def main() -> None:
    tests = os.path.dirname(os.path.abspath(__file__))
    workspace, logs = sys.argv[1:3]
    rewards = os.path.join(logs, "verifier")
    os.makedirs(rewards, exist_ok=True)
    for place in (tests, rewards):
        os.chmod(place, 0o700)  # the child is somebody else
    calls = parsed(read(tests, "calls.json"))
    given = tried(copy_of(workspace), lambda: [outcome(*call) for call in calls]) if calls else []
    wants = parsed(read(tests, "wants.json"))
    problem = judge(given, wants, workspace, logs)
    print(problem or "passed")
    with open(os.path.join(rewards, "reward.txt"), "w") as file:
        file.write("0\n" if problem else "1\n")
    with open(os.path.join(rewards, "seal"), "w") as file:
        file.write(read(tests, ".seal"))


# ------------------------------------------------------------------------------------------- running what was left


def copy_of(workspace: str, changes: dict[str, str] | None = None) -> str:
    """A copy of the workspace that anybody may read; `changes` are files that are other there."""
    copy = os.path.join(os.environ.get("TMPDIR") or "/tmp", "nano-" + os.urandom(8).hex())
    os.mkdir(copy, 0o755)
    os.chmod(copy, 0o755)  # whatever the umask
    for path in listed(workspace):
        target = os.path.join(copy, path)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(os.path.join(workspace, path), "rb") as source, open(target, "wb") as file:
            data = source.read()
            file.write(data)
        if b"import json" in data:  # as somebody else one may not be able to read Python's own library
            import json  # noqa: F401
    for path, text in (changes or {}).items():
        with open(os.path.join(copy, path), "w", encoding="utf-8") as file:
            file.write(text)
    return copy


def listed(workspace: str) -> list[str]:
    """The files of a workspace, but no bytecode, and nothing that is no file."""
    found = []
    for directory, names, files in os.walk(workspace):
        names[:] = [name for name in names if name != "__pycache__"]
        for name in files:
            path = os.path.join(directory, name)
            if not os.path.islink(path) and os.path.isfile(path) and os.path.getsize(path) <= MOST:
                found.append(os.path.relpath(path, workspace))
    return sorted(found)


def tried(copy: str, work: Callable[[], list[str]]) -> list[str]:
    """What `work` gives when a child does it in the copy; nothing if it comes to no end."""
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
    data, until = b"", time.monotonic() + SECONDS
    while len(data) <= MOST and select.select([reading], [], [], max(0.0, until - time.monotonic()))[0]:
        part = os.read(reading, 1 << 16)
        if not part:
            break
        data += part
    try:  # noqa: SIM105
        os.killpg(pid, KILL)
    except OSError:
        pass  # it has ended
    os.waitpid(pid, 0)
    os.close(reading)
    return data.decode("utf-8", "replace").split("\0")[1:]


def confine(copy: str, kept: int) -> None:
    """Be somebody else, in the copy, with little of everything."""
    null = os.open("/dev/null", os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.closerange(3, kept)
    os.closerange(kept + 1, 1024)
    os.chdir(copy)
    for limit, most in ((resource.RLIMIT_CPU, 5), (resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_FSIZE, 0)):
        resource.setrlimit(limit, (most, most))
    if os.getuid() == 0:
        try:  # noqa: SIM105
            os.setgroups([])
        except PermissionError:
            pass  # a user namespace may not allow it
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    sys.dont_write_bytecode = True
    sys.argv = [""]
    sys.path.insert(0, copy)


def outcome(module: str, name: str, arguments: list[Any]) -> str:
    """What a call gives, as text."""
    try:
        return repr(getattr(__import__(module), name)(*arguments))[:LONGEST]
    except BaseException as error:
        return "raises " + type(error).__name__


def run_script(path: str) -> str:
    """How a script ends: "ok", or the name of what it raises."""
    try:
        with open(path, encoding="utf-8") as file:
            exec(compile(file.read(), path, "exec"), {"__name__": "__main__"})
    except SystemExit as error:
        return "SystemExit" if error.code else "ok"
    except BaseException as error:
        return type(error).__name__
    return "ok"


class Reading:
    """How json.loads reads, for the part of it that needs no imports."""

    strict, object_hook, object_pairs_hook, parse_float, parse_int, parse_constant = True, None, None, float, int, float


def parsed(text: str) -> Any:
    """json.loads, of files of ours."""
    try:
        from _json import make_scanner
    except ImportError:  # not CPython
        import json

        return json.loads(text)
    return make_scanner(Reading)(text, 0)[0]  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------- judging


def judge(given: list[str], wants: dict[str, Any], workspace: str, logs: str) -> str:
    """What is wrong; nothing if all is as it should be."""
    if given != wants.get("calls", []):
        return "the calls do not give what they should"
    for name, rule in RULES.items():
        if name in wants and (problem := rule(wants[name], workspace, logs)):
            return problem
    return ""


def check_unchanged(wanted: dict[str, str], workspace: str, logs: str) -> str:
    """Nothing was changed, added or removed."""
    import hashlib

    found = {}
    for path in listed(workspace):
        with open(os.path.join(workspace, path), "rb") as file:
            found[path] = hashlib.sha256(file.read()).hexdigest()
    return "" if found == wanted else "the workspace was changed"


def check_gone(names: list[str], workspace: str, logs: str) -> str:
    """None of the names is in the code any more."""
    import re

    for path, text in sources(workspace):
        for name in names:
            if re.search(r"\b" + name + r"\b", text):
                return f"{name} is still in {path}"
    return ""


def check_texts(rules: list[list[Any]], workspace: str, logs: str) -> str:
    """Files that must match some expressions and none of others."""
    import re

    for path, must, must_not in rules:
        text = read(workspace, path)
        if not all(re.search(each, text) for each in must) or any(re.search(each, text) for each in must_not):
            return f"{path} does not say what it should"
    return ""


def check_code(files: dict[str, str], workspace: str, logs: str) -> str:
    """The code of files is what it was, docstrings and comments aside."""
    for path, before in files.items():
        try:
            same = bare(read(workspace, path)) == bare(before)
        except SyntaxError:
            same = False
        if not same:
            return f"the code of {path} is not what it was"
    return ""


def bare(text: str) -> str:
    """A source without its docstrings, in a form to compare."""
    import ast

    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = node.body if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)) else []
        if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            body[:1] = [ast.Pass()]
    return ast.dump(tree)


def check_old_ways(kind: str, workspace: str, logs: str) -> str:
    """An old way of writing is nowhere any more."""
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
            return f"{path} has the old way"
    return ""


def check_variants(plan: dict[str, Any], workspace: str, logs: str) -> str:
    """The agent's check passes where it should and fails on every mutant."""
    for changes, passes in plan["programs"]:
        ended = tried(copy_of(workspace, changes), lambda: [run_script(plan["script"])])
        if not ended or (ended == ["ok"]) != passes:
            return "the check fails on code that is right" if passes else "the check passes on code that is wrong"
    return ""


def check_final(rule: dict[str, Any], workspace: str, logs: str) -> str:
    """What the agent said at the end."""
    import re

    text = read(logs, "agent/final.txt")
    if "one_of" in rule:
        named = [each for each in rule["one_of"] if re.search(r"(?<!\w)" + re.escape(each) + r"(?!\w)", text)]
        return "" if named == [rule["is"]] else "the answer does not name the one that is asked for"
    if "number" in rule:
        said = {int(each) for each in re.findall(r"-?\d+", text)} - set(rule["given"])
        return "" if said == {rule["number"]} else "the answer is not the number"
    wrong = re.search(rule["not"], text, re.IGNORECASE) or not re.search(rule["says"], text, re.IGNORECASE)
    return "the answer is not what it should be" if wrong else ""


def sources(workspace: str) -> Iterator[tuple[str, str]]:
    return ((path, read(workspace, path)) for path in listed(workspace) if path.endswith(".py"))


def read(directory: str, path: str) -> str:
    """The text of a file; nothing if there is none."""
    try:
        with open(os.path.join(directory, path), encoding="utf-8", errors="replace") as file:
            return file.read(MOST)
    except OSError:
        return ""


RULES: dict[str, Callable[[Any, str, str], str]] = {
    "unchanged": check_unchanged,
    "gone": check_gone,
    "texts": check_texts,
    "code": check_code,
    "old_ways": check_old_ways,
    "variants": check_variants,
    "final": check_final,
}


if __name__ == "__main__":
    main()
