"""What a verifier concludes: from what checks gave, and from the files of the workspace as they are. Runs nothing.

A judge takes what was seen, what was expected and what running gave; it returns a score from 0 to 1, and problems.
"""

from __future__ import annotations

import ast
import fnmatch
import hashlib
import io
import json
import os
import re
import tokenize
from typing import Any

from etude.tasks.generators.inside.patterns import lines_with
from etude.tasks.runner.guard import HERE, Message

FINAL = "/logs/agent/final.txt"
LARGEST = 4 << 20  # bytes of a file that is looked at
NEAR = 3  # lines that a finding may be off
SKIPPED = {".git", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis"}


class Seen:
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
    """A file's contents; nothing where there is none, or a link."""
    try:
        if os.path.islink(path):
            return b""
        with open(path, "rb") as file:
            return file.read(LARGEST)
    except OSError:
        return b""


def digests(workspace: str) -> dict[str, str]:
    """Every file of the workspace, without what running leaves behind."""
    found = {}
    for directory, names, files in os.walk(workspace):
        names[:] = [name for name in names if name not in SKIPPED]
        for name in files:
            path = os.path.join(directory, name)
            if not name.endswith((".pyc", ".pyo")):
                found[os.path.relpath(path, workspace)] = hashlib.sha256(read(path)).hexdigest()
    return found


def passed(problems: list[str]) -> tuple[float, list[str]]:
    return (0.0 if problems else 1.0), problems


# ------------------------------------------------------------------------------------------------- what ran


def judge_pytest(seen: Seen, wanted: Message, result: Message) -> tuple[float, list[str]]:
    """Exactly the expected tests ran and ended as expected."""
    statuses, expected = result["statuses"], wanted["statuses"]
    problems = [f"not believed: {result['doubt']}"] if result["doubt"] else []
    for name, status in expected.items():
        if statuses.get(name, "missing") != status:
            problems.append(f"{name}: {statuses.get(name, 'missing')}, expected {status}")
    problems += [f"{name}: not expected at all" for name in sorted(set(statuses) - set(expected))]
    return passed(problems or ([] if expected else ["nothing is expected"]))


def judge_mutants(seen: Seen, wanted: Message, result: Message) -> tuple[float, list[str]]:
    """Written tests pass on what is right and fail on enough of what is wrong."""
    if result["right"]:
        return passed([str(result["right"])])
    if len(result["killed"]) < wanted["least"]:
        return passed([f"{len(result['killed'])} of {result['of']} wrong versions are noticed, not {wanted['least']}"])
    return 1.0, []


def judge_wheel(seen: Seen, wanted: Message, result: Message) -> tuple[float, list[str]]:
    """The wheel has the files and says of itself what it should."""
    if "problem" in result:
        return passed([str(result["problem"])])
    problems = [f"{name} is not in the wheel" for name in wanted["names"] if name not in result["names"]]
    for name in result["names"]:
        own = any(os.path.normpath(f"{root}/{name}") in seen.files for root in wanted["roots"])  # a new module, maybe
        if name not in wanted["names"] and not own:
            problems.append(f"{name} does not belong into the wheel")
    for key, values in wanted["metadata"].items():
        if result["metadata"].get(key) != values:
            problems.append(f"{key} is {result['metadata'].get(key)}, expected {values}")
    if result["entry"] != wanted["entry"]:
        problems.append(f"entry points are {result['entry']}, expected {wanted['entry']}")
    return passed(problems)


# ------------------------------------------------------------------------------------------------- code


def judge_names(seen: Seen, wanted: Message, result: Message) -> tuple[float, list[str]]:
    """Names that must be gone are, and those that must be defined are where they should be, once."""
    problems = []
    for path in seen.files:
        if not path.endswith((".py", ".pyi")):
            continue
        left = _names(seen.read(path)) & set(wanted["gone"])
        excused = wanted.get("excused", {})
        problems += [f"{path} still has the name {name}" for name in sorted(left) if path not in excused.get(name, [])]
    for path, name in wanted["defined"]:
        if name not in _defined(seen.tree(path)):
            problems.append(f"{path} does not define {name}")
    for path, name in wanted["undefined"]:
        if name in _defined(seen.tree(path)):
            problems.append(f"{path} still defines {name}")
    return passed(problems)


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
    """Functions and classes at any depth, by qualified name; parameters as `function(name)`."""
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


def judge_code(seen: Seen, wanted: Message, result: Message) -> tuple[float, list[str]]:
    """Code is what it was: nothing but docstrings and comments differs."""
    problems = []
    for path in wanted["files"]:
        tree = seen.tree(path)
        original = ast.parse(read(os.path.join(HERE, "original", path)))
        if tree is None or _meaning(tree) != _meaning(original):
            problems.append(f"{path}: its code was changed")
    return passed(problems)


def _meaning(tree: ast.AST) -> str:
    """A tree without docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and _docstring(node):
            node.body = node.body[1:]
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            node.body = [each for each in node.body if not isinstance(each, ast.Pass)]  # left where a docstring stood
    return ast.dump(tree)


def _docstring(node: Any) -> str:
    return ast.get_docstring(node, clean=True) or ""


def judge_docstrings(seen: Seen, wanted: Message, result: Message) -> tuple[float, list[str]]:
    """Each function says what it takes and raises; none says it with words that are wrong."""
    problems, said = [], set[str]()
    for item in wanted["items"]:
        name, text = f"{item['file']}: {item['name']}", _docstring_of(seen.tree(item["file"]), item["name"])
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
    return passed(problems)


def _docstring_of(tree: ast.AST | None, name: str) -> str:
    node = tree
    for part in name.split("."):
        inner = list(ast.iter_child_nodes(node)) if node is not None else []
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        node = next((each for each in inner if isinstance(each, kinds) and each.name == part), None)
    return _docstring(node) if node is not None else ""


def _mentions(text: str, word: str) -> bool:
    return re.search(rf"(?<![A-Za-z0-9_]){re.escape(word)}(?![A-Za-z0-9_])", text) is not None


def judge_scope(seen: Seen, wanted: Message, result: Message) -> tuple[float, list[str]]:
    """Nothing changed but what may."""
    known: dict[str, str] = wanted["digests"]
    changed = [path for path in {*known, *seen.files} if known.get(path) != seen.files.get(path)]
    return passed(
        [
            f"{path} was changed"
            for path in sorted(changed)
            if not any(fnmatch.fnmatch(path, glob) for glob in wanted["allowed"])
        ]
    )


def judge_patterns(seen: Seen, wanted: Message, result: Message) -> tuple[float, list[str]]:
    """The old way of writing is gone; so much of it may stay as there was before."""
    problems = []
    for path, most in wanted["files"].items():
        try:
            lines = lines_with(wanted["family"], seen.read(path))
        except (SyntaxError, ValueError):
            problems.append(f"{path} is no Python")
            continue
        if len(lines) > most:
            problems.append(f"{path}: lines {', '.join(map(str, lines[:10]))}, and {most} may stay")
        if not seen.read(path).strip():
            problems.append(f"{path} is not there")
    return passed(problems)


# ------------------------------------------------------------------------------------------------- words


def judge_findings(seen: Seen, wanted: Message, result: Message) -> tuple[float, list[str]]:
    """A review's findings against the planted defects: F1, a finding being right within a few lines."""
    try:
        found = json.loads(seen.read(wanted["file"]))
        found = found.get("findings", []) if isinstance(found, dict) else found
        places = [(os.path.normpath(str(each["file"]).lstrip("/")), int(each["line"])) for each in found]
    except (ValueError, TypeError, KeyError, AttributeError):
        return 0.0, [f"{wanted['file']}: expected a list of objects with file and line"]
    planted = wanted["planted"]
    hit = {number for number, each in enumerate(planted) if any(_matches(place, each) for place in places)}
    false = [place for place in places if not any(_matches(place, each) for each in planted)]
    problems = [f"not found: {each['file']}:{each['first']}" for n, each in enumerate(planted) if n not in hit]
    problems += [f"not a defect: {file}:{line}" for file, line in false]
    total = len(planted) + len(hit) + len(false)
    return (2 * len(hit) / total if total else 0.0), problems


def _matches(place: tuple[str, int], planted: Message) -> bool:
    file, line = place
    same: bool = file == planted["file"] or file.endswith("/" + planted["file"]) or file == "work/" + planted["file"]
    return same and bool(planted["first"] - NEAR <= line <= planted["last"] + NEAR)


def judge_answer(seen: Seen, wanted: Message, result: Message) -> tuple[float, list[str]]:
    """The final message: it, or its last line, is the answer; or it says what it must, and not what it must not."""
    text = read(FINAL).decode("utf-8", "replace").strip()
    if not text:
        return passed(["there is no answer"])
    if "says" in wanted:
        wrong = re.search(wanted["not"], text, re.IGNORECASE) or not re.search(wanted["says"], text, re.IGNORECASE)
        return passed(["the answer is not what it should be"] if wrong else [])
    given = {_plain(text), _plain(text.splitlines()[-1])}
    return passed([] if given & {_plain(each) for each in wanted["accepted"]} else [f"answered {text[-200:]!r}"])


def _plain(text: str) -> str:
    """Without quotes, backticks, and how a sentence begins and ends."""
    text = re.sub(
        r"^(the )?(answer|default|value|result|it)( is| returns)?:?\s+", "", text.strip(), flags=re.IGNORECASE
    )
    return re.sub(r"\s+", " ", text.strip().rstrip(".").strip("`'\" ")).lower()
