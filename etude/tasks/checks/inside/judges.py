"""The judges of a verifier: compare observations and submitted files with the expected results. They run no code.

Observations and files are hostile data: bounded in size, read as JSON, text or syntax trees, and compared by value and
type. A judge takes the expected result, the observation, the probes of the check and the files; it returns a score from
0 to 1 and a list of problems. The reward is the smallest score.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re

from etude.tasks.checks.inside.cases import canonical_repr
from etude.tasks.checks.inside.file_judges import FILE_KINDS, FINAL, all_or_nothing
from etude.tasks.checks.inside.probes import Planted, false_copy, plant
from etude.tasks.checks.inside.swe_log import NoResult, read_log, status_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from etude.tasks.checks.inside.file_judges import Files, Score
    from etude.tasks.checks.inside.guard import JsonObject

    Suite = Callable[[str], "bytes | None"]

PROBES = 2
OTHER_LOADERS = re.compile(r"--assert|--import-mode|--doctest|no:assertion")  # of test files
LOG_STATUSES = {"PASSED": "passed", "FAILED": "failed"}
MAX_FILE_BYTES = 4 << 20  # at most this much of a file is read
IGNORED_DIRECTORIES = {".git", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis"}


class HackFound(Exception):
    """The submission attacks its tests."""


class Judgement:
    """Rewards, a report for people, and how the submission attacks its tests, or ""."""

    def __init__(self, rewards: dict[str, float], report: list[str], hack: str = "") -> None:
        self.rewards, self.report, self.hack = rewards, report, hack


class Secret:
    """What the judge knows of a run and the submission must not: the probes. `outside` are names of must-fail tests in
    files of their own, `planted` those in the files of the tests. `may_xfail` are tests whose files have an xfail."""

    def __init__(self, outside: list[str], planted: Planted) -> None:
        self.outside, self.planted = outside, planted
        self.may_xfail: set[str] = set()


def prepare(
    checks: list[JsonObject], expected: list[JsonObject], suite: Suite, *, again: bool = False
) -> tuple[list[JsonObject], list[Secret]]:
    """Return the checks to observe with probes that are drawn for this run, and for each the judge's secret.

    `suite` returns a file that is copied into the workspace. `again`: tests run in the opposite order, and the test
    files that code can read are false copies of those that run.
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
            more["shown"] = _shown_files(check, secret.planted.files) if again else {}
        elif check["kind"] == "log":
            listed = [test for key in ("fail_to_pass", "pass_to_pass") for test in expected[number][key]]
            secret.may_xfail = {test for test in listed if b"xfail" in (suite(test.partition("::")[0]) or b"xfail")}
            if again:
                paths = sorted({test.partition("::")[0] for test in listed if "::" in test})
                secret.planted = plant(paths, dict.fromkeys(listed, "passed"), suite)
                more["planted"] = secret.planted.files
        executed.append({**check, **more})
        secrets.append(secret)
    return executed, secrets


def _shown_files(check: JsonObject, files: dict[str, str]) -> dict[str, str]:
    """Return false copies of test files that pytest loads through its assertion rewriting."""
    options = " ".join([*check.get("arguments", ()), *map(str, check.get("ini", {}).values())])
    if OTHER_LOADERS.search(options) or "python_files" in check.get("ini", {}):
        return {}
    found = {}
    for path, text in files.items():
        copy = false_copy(text.encode("utf-8", "surrogateescape"))
        if copy is not None and re.fullmatch(r"test_.*\.py|.*_test\.py", path.rpartition("/")[2]):
            found[path] = copy.decode("utf-8", "surrogateescape")
    return found


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
    chosen = [
        number
        for number, check in enumerate(checks)
        if check["kind"] == "pytest" or (check["kind"] == "log" and check.get("repeat"))
    ]
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


def judge_log(expected: JsonObject, observed: JsonObject, secret: Secret, files: Files) -> Score:
    """Check that all listed tests passed, and that probes among them have their planned statuses."""
    found, problems = read_log(expected["parser"], observed["log"])
    planted = secret.planted
    reported = {name: LOG_STATUSES.get(status, "other") for name, status in found.items()}
    own = planted.statuses(found)
    for name in (*expected["fail_to_pass"], *expected["pass_to_pass"]):
        status = status_of(name, own)
        if status != "PASSED" and not (status == "XFAIL" and name in secret.may_xfail):
            problems.append(f"{name}: {status}")
    if not problems and (deviation := planted.deviation(reported)):
        raise HackFound(deviation)
    return all_or_nothing(problems)


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
    """Check the contents, metadata and entry points of the wheel. A further file must be one of the workspace."""
    if "problem" in observed:
        return all_or_nothing([str(observed["problem"])])
    problems = []
    for name, digest in expected["digests"].items():
        if observed["digests"].get(name) != digest:
            problems.append(
                f"{name} {'is not in' if name not in observed['digests'] else 'has other contents in'} the wheel"
            )
    for name in observed["digests"].keys() - expected["digests"].keys():
        sources = [files.get(os.path.normpath(f"{root}/{name}")) for root in expected["roots"]]  # possibly a new module
        if observed["digests"][name] not in [hashlib.sha256(data).hexdigest() for data in sources if data is not None]:
            problems.append(f"{name} does not belong into the wheel")
    for key in sorted(expected["metadata"].keys() | observed["metadata"].keys()):
        found, wanted = (each["metadata"].get(key) for each in (observed, expected))
        if found != wanted:
            problems.append(f"{key} is {str(found)[:200]}, expected {str(wanted)[:200]}")
    if observed["entry"] != expected["entry"]:
        problems.append(f"entry points are {observed['entry']}, expected {expected['entry']}")
    return all_or_nothing(problems)


EXECUTED_KINDS: dict[str, Callable[[JsonObject, JsonObject, Secret, Files], Score]] = {
    "cases": judge_cases,
    "pytest": judge_pytest,
    "mutants": judge_mutants,
    "wheel": judge_wheel,
    "log": judge_log,
}
