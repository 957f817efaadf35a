"""The judges of submitted files: syntax trees, texts, data and the final message. They run no code.

Files are hostile data: bounded in size, and read as JSON, text or syntax trees. A judge takes the expected result and
the files; it returns a score from 0 to 1 and a list of problems.
"""

from __future__ import annotations

import ast
import collections
import hashlib
import io
import json
import os
import re
import tokenize
import unicodedata

from etude.globs import Globs
from etude.syntax import parse_tree
from etude.tasks.checks.inside.cases import canonical_repr
from etude.tasks.checks.inside.patterns import TEST_PATH, lines_with, lookups, modern_forms
from etude.tasks.checks.inside.statements import (
    claims,
    denials,
    introduces_denial,
    number_texts,
    states_name,
    states_number,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from etude.tasks.checks.inside.guard import JsonObject

    Files = dict[str, bytes]  # contents by path in the workspace; links are empty
    Score = tuple[float, list[str]]

FINAL = "/logs/agent/final.txt"
MAX_SOURCE_BYTES = 1 << 20  # larger files are not parsed
MAX_ANSWER_CHARS = 64 << 10
MAX_FINDINGS = 4  # for each defect; more are a list of lines
LINE_TOLERANCE = 3  # lines by which a finding may miss a defect


def _parse(data: bytes) -> ast.Module | None:
    """Return the syntax tree of a source; None if it is not Python, or too large."""
    try:
        return parse_tree(data) if len(data) <= MAX_SOURCE_BYTES else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def all_or_nothing(problems: list[str]) -> Score:
    return (0.0 if problems else 1.0), problems


# ------------------------------------------------------------------------------------------------- code


def judge_names(expected: JsonObject, files: Files) -> Score:
    """Check that removed names are absent and that names are defined, or not, where expected. Outside of tests there
    are at most `lookups` of names at run time: one more could serve a removed name."""
    problems = []
    if "lookups" in expected:
        found = count_lookups(files)
        if found > expected["lookups"]:
            problems.append(
                f"names are looked up at run time in {found} places, expected at most {expected['lookups']}"
            )
    for path in files:
        if not path.endswith((".py", ".pyi")):
            continue
        left = _names(files[path]) & set(expected["gone"])
        excused = expected.get("excused", {})
        problems += [f"{path} still has the name {name}" for name in sorted(left) if path not in excused.get(name, [])]
    for path, name in expected["defined"]:
        if name not in _defined(_parse(files.get(path, b""))):
            problems.append(f"{path} does not define {name}")
    for path, name in expected["undefined"]:
        if name in _defined(_parse(files.get(path, b""))):
            problems.append(f"{path} still defines {name}")
    return all_or_nothing(problems)


def count_lookups(files: Files) -> int:
    """Return how often the code outside of tests looks up names at run time."""
    sources = [data for path, data in files.items() if path.endswith(".py") and not TEST_PATH.search(path)]
    return sum(lookups(tree) for tree in map(_parse, sources) if tree is not None)


def _names(data: bytes) -> set[str]:
    found = set()
    try:
        for token in tokenize.tokenize(io.BytesIO(data).readline):
            if token.type == tokenize.NAME:
                found.add(unicodedata.normalize("NFKC", token.string))
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


def judge_code(expected: JsonObject, files: Files) -> Score:
    """Check that the code differs from the original only in docstrings and comments."""
    problems = []
    for path, original in expected["files"].items():
        tree = _parse(files[path]) if path in files else None
        before = parse_tree(original.encode("utf-8", "surrogateescape"))
        if tree is None or _dump_without_docstrings(tree) != _dump_without_docstrings(before):
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


def judge_docstrings(expected: JsonObject, files: Files) -> Score:
    """Check that each docstring mentions the expected parameters and exceptions and no wrong names."""
    problems: list[str] = []
    said: set[str] = set()
    for item in expected["items"]:
        name = f"{item['file']}: {item['name']}"
        text = _docstring_of(_parse(files.get(item["file"], b"")), item["name"])
        if not text:
            problems.append(f"{name} has no docstring")
            continue
        if len(docstring_words(text, item["has"])) < item["words"]:
            problems.append(f"{name}: its docstring says next to nothing")
        problems += [f"{name}: {word} is not described" for word in item["has"] if not _mentions(text, word)]
        problems += [f"{name}: {word} is still there" for word in item.get("lacks", []) if _mentions(text, word)]
        if re.search(r"\b(TODO|FIXME|XXX)\b", text):
            problems.append(f"{name}: its docstring is not finished")
        if text in said:
            problems.append(f"{name}: another function has the very same docstring")
        said.add(text)
    return all_or_nothing(problems)


def docstring_words(text: str, names: list[str]) -> set[str]:
    """Return the different words of a docstring that are neither names that it describes nor words of its layout."""
    layout = {"param", "params", "parameters", "arg", "args", "return", "returns", "raise", "raises", "type", "rtype"}
    return {word.lower() for word in re.findall(r"[A-Za-z]{2,}", text) if word not in names} - layout


def _docstring_of(tree: ast.AST | None, name: str) -> str:
    node = tree
    for part in name.split("."):
        inner = list(ast.iter_child_nodes(node)) if node is not None else []
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        node = next((each for each in inner if isinstance(each, kinds) and each.name == part), None)
    return _docstring(node) if node is not None else ""


def _mentions(text: str, word: str) -> bool:
    return re.search(rf"(?<![A-Za-z0-9_]){re.escape(word)}(?![A-Za-z0-9_])", text) is not None


def judge_scope(expected: JsonObject, files: Files) -> Score:
    """Check that only allowed files changed. With `new`, other files may be added."""
    known: dict[str, str] = expected["digests"]
    now = {path: hashlib.sha256(data).hexdigest() for path, data in files.items() if not path.startswith("/")}
    changed = [path for path in {*known, *now} if known.get(path) != now.get(path)]
    if expected.get("new"):
        changed = [path for path in changed if path in known]
    allowed = Globs(expected["allowed"])
    return all_or_nothing([f"{path} was changed" for path in sorted(changed) if not allowed.matches(path)])


def judge_patterns(expected: JsonObject, files: Files) -> Score:
    """Check that no more legacy patterns remain than `files` allows, or `others` in Python files that it lacks, that
    each file of `least` has at least so many modern forms, and each of `lookups` at most so many lookups of names at
    run time."""
    problems = []
    others = [path for path in files if path.endswith(".py")] if "others" in expected else []
    for path in sorted({*expected["files"], *others}):
        allowed = expected["files"].get(path, expected.get("others"))
        tree = _parse(files.get(path, b""))
        lines = lines_with(expected["family"], tree) if tree else []
        if tree is None:
            problems.append(f"{path} is no Python")
        elif len(lines) > allowed:
            problems.append(f"{path}: lines {', '.join(map(str, lines[:10]))}, and {allowed} may stay")
        if path in expected["files"] and not files.get(path, b"").strip():
            problems.append(f"{path} is not there")
    for path, least in expected.get("least", {}).items():
        tree = _parse(files.get(path, b""))
        found = modern_forms(expected["family"], tree) if tree is not None else 0
        if found < least:
            problems.append(f"{path}: has {found} modern forms, expected at least {least}")
    known = expected.get("lookups", {})
    for path in {*known, *others} if "lookups" in expected else ():
        tree = _parse(files.get(path, b""))
        found = lookups(tree) if tree is not None else 0
        if found > known.get(path, 0):
            problems.append(f"{path}: looks up {found} names at run time, expected at most {known.get(path, 0)}")
    return all_or_nothing(problems)


def judge_data(expected: JsonObject, files: Files) -> Score:
    """Check that JSON files have exactly the expected values."""
    problems = []
    for path, wanted in expected["files"].items():
        try:
            found = canonical_repr(json.loads(files.get(path, b"")))
        except (ValueError, RecursionError):
            found = "not JSON"
        if found != canonical_repr(wanted):
            problems.append(f"{path} has {found[:200]}")
    return all_or_nothing(problems)


def judge_lines(expected: JsonObject, files: Files) -> Score:
    """Check that files keep their other lines, in order, gain at most `more`, and have the expected words in them.
    Blank lines do not count. A text with `denials` has no more words of denial, and no other numbers than `numbers`:
    it does not take back what it says."""
    problems = []
    for path, rule in expected["files"].items():
        lines = [line.strip() for line in _text_of(path, files.get(path, b"")).splitlines() if line.strip()]
        rest = iter(lines)
        missing = next((line for line in rule["kept"] if line not in rest), None)
        if missing is not None:
            problems.append(f"{path} lacks the line {missing[:80]!r}")
        elif len(lines) > len(rule["kept"]) + rule["more"]:
            problems.append(f"{path} has {len(lines) - len(rule['kept'])} other lines, expected at most {rule['more']}")
        have = collections.Counter(re.findall(r"\w+", " ".join(lines)))
        lost = collections.Counter(rule["words"]) - have
        problems += [f"{path} lacks the word {word}" for word in sorted(lost)[:5]]
        if "denials" in rule:
            others = set(number_texts("\n".join(lines))) - set(rule["numbers"])
            problems += [f"{path} has the number {number[:20]}" for number in sorted(others)[:5]]
            if denials("\n".join(lines)) > rule["denials"]:
                problems.append(f"{path} denies what it says")
    return all_or_nothing(problems)


def judge_texts(expected: JsonObject, files: Files) -> Score:
    """Check that the files of each glob match all of some regular expressions and none of others."""
    problems = []
    for rule in expected["rules"]:
        chosen = Globs([rule["files"]])
        texts = {path: _text_of(path, data) for path, data in files.items() if chosen.matches(path)}
        if not texts:
            problems.append(f"there is no {rule['files']}")
        for path, text in texts.items():
            right = all(re.search(each, text) for each in rule.get("has", []))
            if not right or any(re.search(each, text) for each in rule.get("lacks", [])):
                problems.append(f"{path} does not have the expected text")
    return all_or_nothing(problems)


def _text_of(path: str, data: bytes) -> str:
    """Return the text of a file: of code with the letters that Python takes for the same made one, of a document
    without comments, which are not shown."""
    text = data.decode("utf-8", "replace")
    if path.endswith((".md", ".html")):
        return re.sub(r"<!--.*?(-->|\Z)|^\[[^\]]*\]: *# .*$", "", text, flags=re.DOTALL | re.MULTILINE)
    return unicodedata.normalize("NFKC", text) if path.endswith((".py", ".pyi")) else text


# ------------------------------------------------------------------------------------------------- findings and answers


def judge_findings(expected: JsonObject, files: Files) -> Score:
    """Score findings against the planted defects by F1; a finding matches within LINE_TOLERANCE lines."""
    try:
        found = json.loads(files.get(expected["file"], b""))
        found = found.get("findings", []) if isinstance(found, dict) else found
        places = [(os.path.normpath(str(each["file"]).lstrip("/")), int(each["line"])) for each in found]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return 0.0, [f"{expected['file']}: expected a list of objects with file and line"]
    planted = expected["planted"]
    if len(places) > MAX_FINDINGS * len(planted):
        return 0.0, [f"{len(places)} findings are no review"]
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


def judge_answer(expected: JsonObject, files: Files) -> Score:
    """Check the final message. It states exactly one of several names, or one number that was not given; or it claims
    what `says` matches and does not match `not`; or it, or its last line, is an accepted answer. A message that denies
    the right answer, bounds it or leaves it open is wrong. `faulty`: the question is what is wrong."""
    text = files.get(FINAL, b"").decode("utf-8", "replace")[:MAX_ANSWER_CHARS].strip()
    if not text:
        return all_or_nothing(["there is no answer"])
    if "one_of" in expected:
        right = [name for name in expected["one_of"] if _mentions(text, name)] == [expected["is"]]
        right = right and states_name(text, expected["is"], faulty=expected.get("faulty", False))
    elif "number" in expected:
        right = states_number(text, expected["number"], expected["given"], faulty=expected.get("faulty", False))
    elif "says" in expected:
        right = claims(text, expected["says"]) and not re.search(expected["not"], text, re.IGNORECASE)
    else:
        accepted = {_normalize(each) for each in expected["accepted"]}
        *lines, last = [line for line in text.splitlines() if line.strip()]
        right = _normalize(text) in accepted
        right = right or (_normalize(last) in accepted and not (lines and introduces_denial(lines[-1])))
    return all_or_nothing([] if right else [f"answered {text[-200:]!r}"])


def _normalize(text: str) -> str:
    """Strip quotes, backticks, a leading phrase and the final period; lower the case."""
    text = re.sub(
        r"^(the )?(answer|default|value|result|it)( is| returns)?:?\s+", "", text.strip(), flags=re.IGNORECASE
    )
    return re.sub(r"\s+", " ", text.strip().rstrip(".").strip("`'\" ")).lower()


FILE_KINDS: dict[str, Callable[[JsonObject, Files], Score]] = {
    "names": judge_names,
    "code": judge_code,
    "docstrings": judge_docstrings,
    "scope": judge_scope,
    "patterns": judge_patterns,
    "texts": judge_texts,
    "data": judge_data,
    "lines": judge_lines,
    "findings": judge_findings,
    "answer": judge_answer,
}
