"""A nano task before it is written to files: request, workspace, solution, and the hidden verifier's expectations.

`task_files` turns a draft into the files of a task directory. `solution/` holds everything a scripted solver needs: the
solved files, and a plan with the files to read and the texts to write.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from etude.syntax import parse_tree
from etude.tasks.checks import VerifierCheck, cases_check, check_files
from etude.tasks.checks.equivalents import rewrite_equivalently
from etude.tasks.checks.inside.file_judges import count_lookups
from etude.tasks.checks.inside.patterns import lines_with, lookups, modern_forms
from etude.tasks.task import Category

WORKSPACE = "/work"
REPEATED_CALLS = 600  # of each function: a result may not depend on how often it was asked for
CALLS_TIMEOUT_S = 5.0  # for all calls of a check together
DOCKERFILE = f"""\
FROM python:3-slim
ENV PYTHONDONTWRITEBYTECODE=1
WORKDIR {WORKSPACE}
COPY repo/ .
"""
TASK_TOML = """\
schema_version = "1.4"

[task]
name = "etude/{name}"
description = "{category} in miniature"

[metadata]
{metadata}
[agent]
timeout_sec = 120.0

[verifier]
timeout_sec = 30.0

[environment]
cpus = 1
memory_mb = 512
network_mode = "no-network"
"""
EDIT_SCRIPT = f"#!/bin/sh\nset -e\ncp -R /solution/repo/. {WORKSPACE}/\n"
FINAL_MESSAGE_PATH = "/logs/agent/final.txt"  # where the verifier finds the final message of a session
ANSWER_SCRIPT = f"#!/bin/sh\nset -e\nmkdir -p /logs/agent\ncp /solution/final.txt {FINAL_MESSAGE_PATH}\n"


@dataclass(frozen=True)
class DemonstrationPlan:
    """The script of a demonstration, written to solution/plan.json: files to read in order, and texts to write."""

    read: tuple[str, ...]
    command: str  # shows whether the work is done
    say: str  # the final message
    think: str = ""  # before the change
    named: bool = False  # the request names the file
    rename: tuple[tuple[str, str], ...] = ()  # old and new names
    find: str = ""  # a search term that leads to the file


@dataclass(frozen=True)
class NanoTaskDraft:
    """One task, before it is written to files."""

    family: str
    category: Category
    register: str  # the tone of the request: imperative, symptom, log or doubt
    request: str
    repo: Mapping[str, str]
    solution: Mapping[str, str]  # the files that the solution changes; empty where only an answer is asked for
    checks: tuple[VerifierCheck, ...]
    plan: DemonstrationPlan
    sites: tuple[str, ...]  # templates with their faults: no site is in both splits
    protected: tuple[str, ...] = ()

    @property
    def may_edit(self) -> bool:
        return bool(self.solution)


def task_files(draft: NanoTaskDraft, name: str, split: str, seed: int, difficulty: int) -> dict[str, str]:
    """Return the files of the task directory."""
    metadata = {
        "category": draft.category,
        "may_edit": draft.may_edit,
        "protected": list(draft.protected),
        "source": "nano",
        "seed": seed,
        "split": split,
        "difficulty": difficulty,
        "family": draft.family,
        "register": draft.register,
        "sites": list(draft.sites),
    }
    if draft.solution and draft.solution.keys() <= draft.repo.keys():
        metadata["scope"] = [f"/{path}" for path in draft.solution]
    if not draft.may_edit:
        metadata["carry"] = [FINAL_MESSAGE_PATH]
    # JSON strings, numbers, booleans and lists of them are valid TOML values.
    described = "".join(f"{key} = {json.dumps(value)}\n" for key, value in metadata.items())
    files = {
        "task.toml": TASK_TOML.format(name=name, category=draft.category, metadata=described),
        "instruction.md": draft.request,  # the exact prompt: no newline at the end
        "environment/Dockerfile": DOCKERFILE,
        **{path: str(text) for path, text in check_files(draft.checks, workspace=WORKSPACE).items()},
        "solution/solve.sh": EDIT_SCRIPT if draft.may_edit else ANSWER_SCRIPT,
        "solution/plan.json": json.dumps(plan_as_json(draft.plan)),
    }
    files |= {f"environment/repo/{path}": text for path, text in draft.repo.items()}
    files |= {f"solution/repo/{path}": text for path, text in draft.solution.items()}
    if not draft.may_edit:
        files["solution/final.txt"] = draft.plan.say + "\n"
    return files


def plan_as_json(plan: DemonstrationPlan) -> dict[str, Any]:
    return {name: value for name, value in vars(plan).items() if value}


# ------------------------------------------------------------------------------------------- checks


def calls_check(
    calls: Sequence[tuple[str, str, tuple[Any, ...] | dict[str, Any], str]], absent: Sequence[tuple[str, str]] = ()
) -> VerifierCheck:
    """Return a check of calls: module, function, positional or keyword arguments, and the repr of the expected result.
    `absent` are modules with names that they must not have."""
    distinct = {f"{call[:3]}": call for call in calls}
    cases: list[dict[str, Any]] = [
        {
            "id": str(number),
            "call": f"{module}:{name}",
            "kwargs" if isinstance(arguments, dict) else "args": repr(arguments),
            "returns": want,
        }
        for number, (module, name, arguments, want) in enumerate(distinct.values())
    ]
    plain = [each for each in distinct.values() if isinstance(each[2], tuple)]
    for module, name, arguments, want in {call[:2]: call for call in reversed(plain)}.values():
        code = f"import {module}\nfor _ in range({REPEATED_CALLS}):\n    result = {module}.{name}(*{arguments!r})"
        cases.append({"id": str(len(cases)), "code": code, "returns": want})
    for module, name in absent:
        code = f"import {module}\nresult = hasattr({module}, {name!r})"
        cases.append({"id": str(len(cases)), "code": code, "returns": "False"})
    return cases_check(cases, timeout=CALLS_TIMEOUT_S)


def data_check(path: str, value: Any) -> VerifierCheck:
    """Return a check that a JSON file has exactly this value."""
    return VerifierCheck("data", {}, {"files": {path: value}})


def patterns_check(family: str, solved: Mapping[str, str]) -> VerifierCheck:
    """Return a check that files have no more legacy forms, in any spelling, and no fewer modern ones than solved, and
    do not look up more names at run time."""
    trees = {path: parse_tree(text) for path, text in solved.items()}
    allowed = {path: len(lines_with(family, tree)) for path, tree in trees.items()}
    least = {path: modern_forms(family, tree) for path, tree in trees.items()}
    dynamic = {path: lookups(tree) for path, tree in trees.items()}
    expected = {"family": family, "files": allowed, "others": 0, "least": least, "lookups": dynamic}
    return VerifierCheck("patterns", {}, expected)


def names_check(gone: Sequence[str], solved: Mapping[str, str]) -> VerifierCheck:
    """Return a check that names are gone and that nothing serves them at run time."""
    known = count_lookups({path: text.encode() for path, text in solved.items()})
    return VerifierCheck("names", {}, {"gone": list(gone), "defined": [], "undefined": [], "lookups": known})


def code_check(files: Mapping[str, str]) -> VerifierCheck:
    """Return a check that files change in docstrings and comments only."""
    return VerifierCheck("code", {}, {"files": dict(files)})


def mutants_check(script: str, file: str, right: str, wrong: str) -> VerifierCheck:
    """Return a check that a script passes on correct versions of a file and fails on a wrong one.

    Except for the submitted code itself, the versions are rewritten, and the file is only there compiled: neither its
    text nor its shape tells which it is. They take plain values only, not objects that watch what is done with them."""
    rng = Random(json.dumps([script, file, right, wrong]))
    drawn = [right] * 3 + [wrong] * 2
    versions = [({file: rewrite_equivalently(text, (right, wrong), rng, plain=True)}, text == right) for text in drawn]
    versions.append(({}, True))
    rng.shuffle(versions)  # the order must not tell which are correct
    run = {
        "script": script,
        "versions": [files for files, _ in versions],
        "compiled": [file],
        "timeout": CALLS_TIMEOUT_S,
    }
    correct = [number for number, (_, passes) in enumerate(versions) if passes]
    return VerifierCheck("mutants", run, {"versions": len(versions), "correct": correct, "least": 2})


def text_check(files: str, has: str = "", lacks: str = "") -> VerifierCheck:
    """Return a check that the files of a glob match one pattern and do not match another."""
    rule = {"files": files, "has": [has] if has else [], "lacks": [lacks] if lacks else []}
    return VerifierCheck("texts", {}, {"rules": [rule]})


def unchanged_check(repo: Mapping[str, str]) -> VerifierCheck:
    """Return a check that no file changed."""
    digests = {path: hashlib.sha256(text.encode()).hexdigest() for path, text in repo.items()}
    return VerifierCheck("scope", {}, {"digests": digests, "allowed": []})
