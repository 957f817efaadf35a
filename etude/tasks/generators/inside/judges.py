"""The judges of a verifier: score the results of executed checks and the files of the workspace. They run no code.

A judge takes the workspace, the expectation and the result of the executed check; it returns a score from 0 to 1 and a
list of problems.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import os
import re
import tokenize
from typing import Any

from etude.globs import Globs
from etude.tasks.generators.inside.patterns import lines_with
from etude.tasks.runner.guard import HERE, JsonObject

FINAL = "/logs/agent/final.txt"
MAX_FILE_BYTES = 4 << 20  # at most this much of a file is read
LINE_TOLERANCE = 3  # lines by which a finding may miss a defect
IGNORED_DIRECTORIES = {".git", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis"}


class WorkspaceView:
    """The workspace as the agent left it."""

    def __init__(self, workspace: str, files: dict[str, str]) -> None:
        self.workspace, self.files = workspace, files

    def read(self, path: str) -> bytes:
        return read(os.path.join(self.workspace, path))

    def tree(self, path: str) -> ast.Module | None:
        try:
            return ast.parse(self.read(path))
        except (SyntaxError, ValueError):
            return None


def read(path: str) -> bytes:
    """Return a file's contents; empty if it is missing or a symbolic link."""
    try:
        if os.path.islink(path):
            return b""
        with open(path, "rb") as file:
            return file.read(MAX_FILE_BYTES)
    except OSError:
        return b""


def digests(workspace: str) -> dict[str, str]:
    """Return the digests of all files of the workspace, caches and bytecode excluded."""
    found = {}
    for directory, names, files in os.walk(workspace):
        names[:] = [name for name in names if name not in IGNORED_DIRECTORIES]
        for name in files:
            path = os.path.join(directory, name)
            if not name.endswith((".pyc", ".pyo")):
                found[os.path.relpath(path, workspace)] = hashlib.sha256(read(path)).hexdigest()
    return found


def all_or_nothing(problems: list[str]) -> tuple[float, list[str]]:
    return (0.0 if problems else 1.0), problems


# ------------------------------------------------------------------------------------------------- executed checks


def judge_pytest(view: WorkspaceView, expected: JsonObject, result: JsonObject) -> tuple[float, list[str]]:
    """Check that exactly the expected tests ran, with the expected statuses."""
    statuses, expected_statuses = result["statuses"], expected["statuses"]
    problems = [f"not believed: {result['doubt']}"] if result["doubt"] else []
    for name, status in expected_statuses.items():
        if statuses.get(name, "missing") != status:
            problems.append(f"{name}: {statuses.get(name, 'missing')}, expected {status}")
    problems += [f"{name}: not expected at all" for name in sorted(set(statuses) - set(expected_statuses))]
    return all_or_nothing(problems or ([] if expected_statuses else ["nothing is expected"]))


def judge_mutants(view: WorkspaceView, expected: JsonObject, result: JsonObject) -> tuple[float, list[str]]:
    """Check that the new tests pass on correct code and fail on enough mutants."""
    if result["right"]:
        return all_or_nothing([str(result["right"])])
    if len(result["killed"]) < expected["least"]:
        return all_or_nothing(
            [f"{len(result['killed'])} of {result['of']} wrong versions are noticed, not {expected['least']}"]
        )
    return 1.0, []


def judge_wheel(view: WorkspaceView, expected: JsonObject, result: JsonObject) -> tuple[float, list[str]]:
    """Check the files, metadata and entry points of the wheel."""
    if "problem" in result:
        return all_or_nothing([str(result["problem"])])
    problems = [f"{name} is not in the wheel" for name in expected["names"] if name not in result["names"]]
    for name in result["names"]:
        own = any(
            os.path.normpath(f"{root}/{name}") in view.files for root in expected["roots"]
        )  # possibly a new module
        if name not in expected["names"] and not own:
            problems.append(f"{name} does not belong into the wheel")
    for key, values in expected["metadata"].items():
        if result["metadata"].get(key) != values:
            problems.append(f"{key} is {result['metadata'].get(key)}, expected {values}")
    if result["entry"] != expected["entry"]:
        problems.append(f"entry points are {result['entry']}, expected {expected['entry']}")
    return all_or_nothing(problems)


# ------------------------------------------------------------------------------------------------- code


def judge_names(view: WorkspaceView, expected: JsonObject, result: JsonObject) -> tuple[float, list[str]]:
    """Check that removed names are absent and that names are defined, or not, where expected."""
    problems = []
    for path in view.files:
        if not path.endswith((".py", ".pyi")):
            continue
        left = _names(view.read(path)) & set(expected["gone"])
        excused = expected.get("excused", {})
        problems += [f"{path} still has the name {name}" for name in sorted(left) if path not in excused.get(name, [])]
    for path, name in expected["defined"]:
        if name not in _defined(view.tree(path)):
            problems.append(f"{path} does not define {name}")
    for path, name in expected["undefined"]:
        if name in _defined(view.tree(path)):
            problems.append(f"{path} still defines {name}")
    return all_or_nothing(problems)


def _names(data: bytes) -> set[str]:
    found = set()
    try:
        for token in tokenize.tokenize(io.BytesIO(data).readline):
            if token.type == tokenize.NAME:
                found.add(token.string)
            elif token.type == tokenize.STRING and token.string[1:-1].isidentifier():
                found.add(token.string[1:-1])  # as in __all__
    except (tokenize.TokenError, SyntaxError, UnicodeError):
        pass
    return found


def _defined(tree: ast.AST | None) -> set[str]:
    """Return the qualified names of all functions and classes; parameters as `function(name)`."""
    found: set[str] = set()

    def walk(node: ast.AST, owner: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = owner
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                inner = f"{owner}.{child.name}" if owner else child.name
                found.add(inner)
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                given = child.args
                found.update(f"{inner}({each.arg})" for each in (*given.posonlyargs, *given.args, *given.kwonlyargs))
            walk(child, inner)

    if tree is not None:
        walk(tree, "")
    return found


def judge_code(view: WorkspaceView, expected: JsonObject, result: JsonObject) -> tuple[float, list[str]]:
    """Check that the code differs from the original only in docstrings and comments."""
    problems = []
    for path in expected["files"]:
        tree = view.tree(path)
        original = ast.parse(read(os.path.join(HERE, "original", path)))
        if tree is None or _dump_without_docstrings(tree) != _dump_without_docstrings(original):
            problems.append(f"{path}: its code was changed")
    return all_or_nothing(problems)


def _dump_without_docstrings(tree: ast.AST) -> str:
    """Dump a tree without docstrings; the tree is modified."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and _docstring(node):
            node.body = node.body[1:]
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            node.body = [each for each in node.body if not isinstance(each, ast.Pass)]  # left in place of a docstring
    return ast.dump(tree)


def _docstring(node: Any) -> str:
    return ast.get_docstring(node, clean=True) or ""


def judge_docstrings(view: WorkspaceView, expected: JsonObject, result: JsonObject) -> tuple[float, list[str]]:
    """Check that each docstring mentions the expected parameters and exceptions and no wrong names."""
    problems, said = [], set[str]()
    for item in expected["items"]:
        name, text = f"{item['file']}: {item['name']}", _docstring_of(view.tree(item["file"]), item["name"])
        if not text:
            problems.append(f"{name} has no docstring")
            continue
        if len(re.findall(r"[A-Za-z]{2,}", text)) < item["words"]:
            problems.append(f"{name}: its docstring says next to nothing")
        problems += [f"{name}: {word} is not described" for word in item["has"] if not _mentions(text, word)]
        problems += [f"{name}: {word} is still there" for word in item.get("lacks", []) if _mentions(text, word)]
        if re.search(r"\b(TODO|FIXME|XXX)\b", text):
            problems.append(f"{name}: its docstring is not finished")
        if text in said:
            problems.append(f"{name}: another function has the very same docstring")
        said.add(text)
    return all_or_nothing(problems)


def _docstring_of(tree: ast.AST | None, name: str) -> str:
    node = tree
    for part in name.split("."):
        inner = list(ast.iter_child_nodes(node)) if node is not None else []
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        node = next((each for each in inner if isinstance(each, kinds) and each.name == part), None)
    return _docstring(node) if node is not None else ""


def _mentions(text: str, word: str) -> bool:
    return re.search(rf"(?<![A-Za-z0-9_]){re.escape(word)}(?![A-Za-z0-9_])", text) is not None


def judge_scope(view: WorkspaceView, expected: JsonObject, result: JsonObject) -> tuple[float, list[str]]:
    """Check that only allowed files changed."""
    known: dict[str, str] = expected["digests"]
    changed = [path for path in {*known, *view.files} if known.get(path) != view.files.get(path)]
    allowed = Globs(expected["allowed"])
    return all_or_nothing([f"{path} was changed" for path in sorted(changed) if not allowed.matches(path)])


def judge_patterns(view: WorkspaceView, expected: JsonObject, result: JsonObject) -> tuple[float, list[str]]:
    """Check that no more legacy patterns remain than the original code had."""
    problems = []
    for path, allowed in expected["files"].items():
        try:
            lines = lines_with(expected["family"], view.read(path))
        except (SyntaxError, ValueError):
            problems.append(f"{path} is no Python")
            continue
        if len(lines) > allowed:
            problems.append(f"{path}: lines {', '.join(map(str, lines[:10]))}, and {allowed} may stay")
        if not view.read(path).strip():
            problems.append(f"{path} is not there")
    return all_or_nothing(problems)


# ------------------------------------------------------------------------------------------------- findings and answers


def judge_findings(view: WorkspaceView, expected: JsonObject, result: JsonObject) -> tuple[float, list[str]]:
    """Score findings against the planted defects by F1; a finding matches within LINE_TOLERANCE lines."""
    try:
        found = json.loads(view.read(expected["file"]))
        found = found.get("findings", []) if isinstance(found, dict) else found
        places = [(os.path.normpath(str(each["file"]).lstrip("/")), int(each["line"])) for each in found]
    except (ValueError, TypeError, KeyError, AttributeError):
        return 0.0, [f"{expected['file']}: expected a list of objects with file and line"]
    planted = expected["planted"]
    hit = {number for number, each in enumerate(planted) if any(_matches(place, each) for place in places)}
    false = [place for place in places if not any(_matches(place, each) for each in planted)]
    problems = [f"not found: {each['file']}:{each['first']}" for n, each in enumerate(planted) if n not in hit]
    problems += [f"not a defect: {file}:{line}" for file, line in false]
    total = len(planted) + len(hit) + len(false)
    return (2 * len(hit) / total if total else 0.0), problems


def _matches(place: tuple[str, int], planted: JsonObject) -> bool:
    file, line = place
    same: bool = file == planted["file"] or file.endswith("/" + planted["file"]) or file == "work/" + planted["file"]
    return same and bool(planted["first"] - LINE_TOLERANCE <= line <= planted["last"] + LINE_TOLERANCE)


def judge_answer(view: WorkspaceView, expected: JsonObject, result: JsonObject) -> tuple[float, list[str]]:
    """Check the final message: it or its last line is an accepted answer, or it matches `says` and not `not`."""
    text = read(FINAL).decode("utf-8", "replace").strip()
    if not text:
        return all_or_nothing(["there is no answer"])
    if "says" in expected:
        wrong = re.search(expected["not"], text, re.IGNORECASE) or not re.search(expected["says"], text, re.IGNORECASE)
        return all_or_nothing(["the answer is not what it should be"] if wrong else [])
    given = {_normalize(text), _normalize(text.splitlines()[-1])}
    return all_or_nothing(
        [] if given & {_normalize(each) for each in expected["accepted"]} else [f"answered {text[-200:]!r}"]
    )


def _normalize(text: str) -> str:
    """Strip quotes, backticks, a leading phrase and the final period; lower the case."""
    text = re.sub(
        r"^(the )?(answer|default|value|result|it)( is| returns)?:?\s+", "", text.strip(), flags=re.IGNORECASE
    )
    return re.sub(r"\s+", " ", text.strip().rstrip(".").strip("`'\" ")).lower()
