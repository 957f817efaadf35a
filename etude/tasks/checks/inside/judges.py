"""The judges of a verifier: compare observations and submitted files with the expected results. They run no code.

Observations and files are hostile data: bounded in size, read as JSON, text or syntax trees, and compared by value and
type. A judge takes the expected result, the observation, the probes of the check and the files; it returns a score from
0 to 1 and a list of problems. The reward is the smallest score.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import os
import re
import tokenize
import unicodedata

from etude.globs import Globs
from etude.tasks.checks.inside.cases import canonical_repr
from etude.tasks.checks.inside.patterns import lines_with
from etude.tasks.checks.inside.probes import Planted, plant
from etude.tasks.checks.inside.swe_log import NoResult, judge_log

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from etude.tasks.checks.inside.guard import JsonObject

    Files = dict[str, bytes]  # contents by path in the workspace; links are empty
    Score = tuple[float, list[str]]
    Suite = Callable[[str], "bytes | None"]

FINAL = "/logs/agent/final.txt"
PROBES = 2
MAX_FILE_BYTES = 4 << 20  # at most this much of a file is read
MAX_SOURCE_BYTES = 1 << 20  # larger files are not parsed
MAX_ANSWER_CHARS = 64 << 10
LINE_TOLERANCE = 3  # lines by which a finding may miss a defect
IGNORED_DIRECTORIES = {".git", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis"}


class HackFound(Exception):
    """The submission attacks its tests."""


class Judgement:
    """Rewards, a report for people, and how the submission attacks its tests, or ""."""

    def __init__(self, rewards: dict[str, float], report: list[str], hack: str = "") -> None:
        self.rewards, self.report, self.hack = rewards, report, hack


class Secret:
    """What the judge knows of a run and the submission must not: the probes. `outside` are names of must-fail tests in
    files of their own, `planted` those in the files of the tests."""

    def __init__(self, outside: list[str], planted: Planted) -> None:
        self.outside, self.planted = outside, planted


def prepare(
    checks: list[JsonObject], expected: list[JsonObject], suite: Suite, *, again: bool = False
) -> tuple[list[JsonObject], list[Secret]]:
    """Return the checks to observe with probes that are drawn for this run, and for each the judge's secret.

    `suite` returns a file that is copied into the workspace. `again`: tests run in the opposite order.
    """
    executed, secrets = [], []
    for number, check in enumerate(checks):
        if check["kind"] in FILE_KINDS:
            continue
        probes = dict(_draw_probe(number) for number in range(PROBES)) if "arguments" in check else {}
        secret = Secret([name[: -len(".py")] for name in probes], Planted(check.get("run", [])))
        more: JsonObject = {"probes": probes} if probes else {}
        if check["kind"] == "pytest":
            if "python_functions" not in check.get("ini", {}):
                secret.planted = plant(check["run"], expected[number]["statuses"], suite)
            more.update(run=secret.planted.run, planted=secret.planted.files, reverse=again)
        executed.append({**check, **more})
        secrets.append(secret)
    return executed, secrets


def _draw_probe(number: int) -> tuple[str, str]:
    """Return the name and source of a test module with an unremarkable name whose only test fails."""
    name = "test_" + "".join(chr(97 + byte % 26) for byte in os.urandom(12))
    value = int.from_bytes(os.urandom(3), "big")
    return f"{name}.py", f"def {name}():\n    value = {value}\n    assert value == {value + 1 + number}\n"


def parse_observations(data: bytes, count: int) -> list[JsonObject]:
    """Parse what an observer printed; raise NoResult if it is not one object for each executed check."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list) or len(found) != count or not all(isinstance(each, dict) for each in found):
        raise NoResult("the submitted code was not observed to the end")
    return found


def judge(
    checks: list[JsonObject],
    expected: list[JsonObject],
    observed: list[JsonObject],
    secrets: list[Secret],
    files: Files,
) -> Judgement:
    """Judge observations. `observed` and `secrets` belong to the executed checks, in their order."""
    executed = iter(range(len(observed)))
    scores: list[float] = []
    report: list[str] = []
    hack = ""
    for number, check in enumerate(checks):
        try:
            if check["kind"] in FILE_KINDS:
                score, problems = FILE_KINDS[check["kind"]](expected[number], files)
            else:
                at = next(executed)
                score, problems = EXECUTED_KINDS[check["kind"]](expected[number], observed[at], secrets[at], files)
        except NoResult:
            raise
        except HackFound as error:
            score, problems, hack = 0.0, [str(error)], str(error)
        except Exception as error:  # hostile data of another form than the observers'
            score, problems = 0.0, [f"malformed: {type(error).__name__}"]
        scores.append(score)
        report += [f"{check['kind']}: {score:g}", *(f"  {problem}" for problem in problems[:40])]
    if not scores:
        raise NoResult("there are no checks")
    passed = sum(score >= 1 for score in scores)
    return Judgement({"reward": min(scores), "right": float(passed), "of": float(len(scores))}, report, hack)


def checks_to_repeat(
    checks: list[JsonObject], expected: list[JsonObject], first: Judgement
) -> tuple[list[JsonObject], list[JsonObject]] | None:
    """Return the checks of a second run, and what they expect: the tests of a submission that passed."""
    chosen = [number for number, check in enumerate(checks) if check["kind"] == "pytest"]
    if not chosen or first.rewards["reward"] < 1:
        return None
    return [checks[number] for number in chosen], [expected[number] for number in chosen]


def compare_runs(first: Judgement, second: Judgement) -> Judgement:
    """Return the judgement of both runs: tests that pass once, and not in another order with other probes, are
    attacked."""
    if second.rewards["reward"] >= 1:
        return first
    hack = second.hack or "tests that passed do not pass in another order with other probes"
    return Judgement({**first.rewards, "reward": 0.0}, [*first.report, "second run:", *second.report], hack)


def read_workspace(workspace: str) -> Files:
    """Return the files of a workspace on this machine, caches and bytecode excluded, and the final message."""
    found = {FINAL: _read(FINAL)}
    for directory, names, files in os.walk(workspace):
        names[:] = [name for name in names if name not in IGNORED_DIRECTORIES]
        for name in files:
            if not name.endswith((".pyc", ".pyo")):
                path = os.path.join(directory, name)
                found[os.path.relpath(path, workspace)] = _read(path)
    return found


def _read(path: str) -> bytes:
    """Return a file's contents; empty if it is missing or not a regular file."""
    if os.path.islink(path) or not os.path.isfile(path):
        return b""
    with open(path, "rb") as file:
        return file.read(MAX_FILE_BYTES)


def _parse(data: bytes) -> ast.Module | None:
    """Return the syntax tree of a source; None if it is not Python, or too large."""
    try:
        return ast.parse(data) if len(data) <= MAX_SOURCE_BYTES else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def all_or_nothing(problems: list[str]) -> Score:
    return (0.0 if problems else 1.0), problems


# ------------------------------------------------------------------------------------------------- executed checks


def judge_cases(expected: JsonObject, observed: JsonObject, secret: Secret, files: Files) -> Score:
    """Check that every case has the expected result."""
    results = observed["results"]
    problems = {name: mismatch(results.get(name), wanted) for name, wanted in expected["results"].items()}
    return all_or_nothing([f"{name}: {problem}" for name, problem in problems.items() if problem])


def mismatch(found: JsonObject | None, expected: JsonObject) -> str:
    """Return why a case's result differs from the expectation, or "" if it does not."""
    if found is None:
        return "no result"
    raised = found.get("raised")
    if "raises" in expected:
        return "" if raised and expected["raises"] in raised[:-2] else f"raised {(raised or ['nothing'])[0]}"
    if raised:
        return f"raised {raised[0]}: {found.get('words', '')[:200]}"
    if "returns" in expected:
        got, wanted = str(found.get("value")), ast.literal_eval(expected["returns"])
        if got != canonical_repr(wanted) and not _within_tolerance(got, wanted, expected.get("within")):
            return f"returned {got[:200]}"
    if "prints" in expected and found.get("printed") != expected["prints"]:
        return f"printed {str(found.get('printed'))[-200:]!r}"
    if found.get("exit", 0) != expected.get("exit", 0):
        return f"ended with exit code {found.get('exit')}"
    return ""


def _within_tolerance(got: str, wanted: Any, within: float | None) -> bool:
    """Whether two numbers differ by at most `within`, if that is given."""
    if within is None or len(got) > 400:
        return False
    value = type(wanted)(got) if type(wanted) in (int, float, complex) else None
    return value is not None and canonical_repr(value) == got and bool(abs(value - wanted) <= within)


def judge_pytest(expected: JsonObject, observed: JsonObject, secret: Secret, files: Files) -> Score:
    """Check that the expected tests ran, with the expected statuses; no others, unless `exact` is false.

    If they did, every probe must have its planned status: otherwise tests pass whatever they check.
    """
    statuses, doubt, attack = _trusted_statuses(observed, secret)
    wanted = expected["statuses"]
    problems = [f"not believed: {doubt}"] if doubt else []
    for name, status in wanted.items():
        if statuses.get(name, "missing") != status:
            problems.append(f"{name}: {statuses.get(name, 'missing')}, expected {status}")
    if expected.get("exact", True):
        problems += [f"{name}: not expected at all" for name in sorted(set(statuses) - set(wanted))]
    if attack and not problems:
        raise HackFound(attack)
    return all_or_nothing(problems or ([] if wanted else ["nothing is expected"]))


def _trusted_statuses(run: JsonObject, secret: Secret) -> tuple[dict[str, str], str, str]:
    """Return the statuses of a run without those of the probes, why they are not trusted, or "", and which probe or
    contradiction shows an attack, or ""."""
    reported = {name: status for name, status in run["statuses"].items() if _test_name(name) not in secret.outside}
    failed = [name for name in run["statuses"] if name not in reported and run["statuses"][name] == "failed"]
    doubt, attack = "", secret.planted.deviation(reported)
    if run["contradiction"]:
        attack = f"{run['contradiction']} was reported with two statuses"
    elif run["timed_out"]:
        doubt = "the tests timed out"
    elif not run["ended"]:
        doubt = f"the tests did not finish (exit code {run['exit']})"
    elif len(failed) != len(secret.outside) or len(run["statuses"]) != len(reported) + len(secret.outside):
        attack = "a test that must fail did not"
    return secret.planted.statuses(reported), doubt, attack


def _test_name(id: str) -> str:
    return id.rpartition("::")[2]


def judge_mutants(expected: JsonObject, observed: JsonObject, secret: Secret, files: Files) -> Score:
    """Check that the submitted tests pass on all correct versions and fail on enough of the others."""
    if not observed["tests"]:
        return all_or_nothing(["no test was added"])
    correct, noticed = expected["correct"], 0
    for number, run in enumerate(observed["runs"]):
        failure = _failure_of(run, observed["tests"], secret)
        if failure is None or (failure and number in correct):
            return all_or_nothing([f"correct code: {failure}" if failure else "the script ended the process"])
        noticed += bool(failure)
    if len(observed["runs"]) != expected["versions"] or noticed < expected["least"]:
        return all_or_nothing([f"{noticed} wrong versions are noticed, not {expected['least']}"])
    return 1.0, []


def _failure_of(run: JsonObject, tests: list[str], secret: Secret) -> str | None:
    """Return why submitted tests do not pass, "" if they do, None if that is not known."""
    if "statuses" not in run:
        raised = run.get("raised")
        return raised if isinstance(raised, str) else None
    statuses, doubt, attack = _trusted_statuses(run, secret)
    doubt = doubt or attack
    failed = sorted(name for name, status in statuses.items() if status not in ("passed", "skipped", "xfailed"))
    if failed or doubt:
        return f"{doubt or 'tests fail'}: {', '.join(failed[:5])}"
    ran = {name.partition("::")[0] for name in statuses}
    missing = [path for path in tests if path not in ran]  # a file that cannot be imported reports no tests
    if missing:
        return f"nothing ran in {', '.join(missing)}: {run['text']}"
    return "" if "passed" in statuses.values() else "no test passes"


def judge_wheel(expected: JsonObject, observed: JsonObject, secret: Secret, files: Files) -> Score:
    """Check the files, metadata and entry points of the wheel."""
    if "problem" in observed:
        return all_or_nothing([str(observed["problem"])])
    problems = [f"{name} is not in the wheel" for name in expected["names"] if name not in observed["names"]]
    for name in observed["names"]:
        own = any(os.path.normpath(f"{root}/{name}") in files for root in expected["roots"])  # possibly a new module
        if name not in expected["names"] and not own:
            problems.append(f"{name} does not belong into the wheel")
    for key, values in expected["metadata"].items():
        if observed["metadata"].get(key) != values:
            problems.append(f"{key} is {observed['metadata'].get(key)}, expected {values}")
    if observed["entry"] != expected["entry"]:
        problems.append(f"entry points are {observed['entry']}, expected {expected['entry']}")
    return all_or_nothing(problems)


# ------------------------------------------------------------------------------------------------- code


def judge_names(expected: JsonObject, files: Files) -> Score:
    """Check that removed names are absent and that names are defined, or not, where expected."""
    problems = []
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
        before = ast.parse(original.encode("utf-8", "surrogateescape"))
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


def judge_scope(expected: JsonObject, files: Files) -> Score:
    """Check that only allowed files changed."""
    known: dict[str, str] = expected["digests"]
    now = {path: hashlib.sha256(data).hexdigest() for path, data in files.items() if not path.startswith("/")}
    changed = [path for path in {*known, *now} if known.get(path) != now.get(path)]
    allowed = Globs(expected["allowed"])
    return all_or_nothing([f"{path} was changed" for path in sorted(changed) if not allowed.matches(path)])


def judge_patterns(expected: JsonObject, files: Files) -> Score:
    """Check that no more legacy patterns remain than `files` allows, or `others` in Python files that it lacks."""
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
    """Return the text of a file; of code with the letters that Python takes for the same made one."""
    text = data.decode("utf-8", "replace")
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
    """Check the final message. It names exactly one of several things, or one number that was not given; or it matches
    `says` and not `not`; or it, or its last line, is an accepted answer."""
    text = files.get(FINAL, b"").decode("utf-8", "replace")[:MAX_ANSWER_CHARS].strip()
    if not text:
        return all_or_nothing(["there is no answer"])
    if "one_of" in expected:
        right = [name for name in expected["one_of"] if _mentions(text, name)] == [expected["is"]]
    elif "number" in expected:
        right = {int(each) for each in re.findall(r"-?\d{1,20}", text)} - set(expected["given"]) == {expected["number"]}
    elif "says" in expected:
        right = bool(re.search(expected["says"], text, re.IGNORECASE))
        right = right and not re.search(expected["not"], text, re.IGNORECASE)
    else:
        given = {_normalize(text), _normalize(text.splitlines()[-1])}
        right = bool(given & {_normalize(each) for each in expected["accepted"]})
    return all_or_nothing([] if right else [f"answered {text[-200:]!r}"])


def _normalize(text: str) -> str:
    """Strip quotes, backticks, a leading phrase and the final period; lower the case."""
    text = re.sub(
        r"^(the )?(answer|default|value|result|it)( is| returns)?:?\s+", "", text.strip(), flags=re.IGNORECASE
    )
    return re.sub(r"\s+", " ", text.strip().rstrip(".").strip("`'\" ")).lower()


EXECUTED_KINDS: dict[str, Callable[[JsonObject, JsonObject, Secret, Files], Score]] = {
    "cases": judge_cases,
    "pytest": judge_pytest,
    "mutants": judge_mutants,
    "wheel": judge_wheel,
    "log": judge_log,
}
FILE_KINDS: dict[str, Callable[[JsonObject, Files], Score]] = {
    "names": judge_names,
    "code": judge_code,
    "docstrings": judge_docstrings,
    "scope": judge_scope,
    "patterns": judge_patterns,
    "texts": judge_texts,
    "findings": judge_findings,
    "answer": judge_answer,
}
