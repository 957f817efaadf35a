"""A nano task before it is files: what is asked, the workspace, what solves it, and what the hidden verifier wants.

`task_files` makes of it the files of a task directory. Whoever solves it by script finds what it needs in `solution/`:
the files as they should be, and a plan of what to read and what to say.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files as resources
from typing import Any

from etude.tasks.task import Category

WORKSPACE = "/work"
DOCKERFILE = f"""\
FROM python:3-slim
ENV PYTHONDONTWRITEBYTECODE=1
WORKDIR {WORKSPACE}
COPY repo/ .
"""
CONFIG = """\
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
TEST = (
    f"#!/bin/sh\n# Leaves 1 or 0 in /logs/verifier/reward.txt.\nexec python3 -I -S /tests/verify.py {WORKSPACE} /logs\n"
)
SOLVE = f"#!/bin/sh\nset -e\ncp -R /solution/repo/. {WORKSPACE}/\n"
FINAL = "/logs/agent/final.txt"  # where the final message of a session is before it is graded
SAY = f"#!/bin/sh\nset -e\nmkdir -p /logs/agent\ncp /solution/final.txt {FINAL}\n"


@dataclass(frozen=True)
class Plan:
    """What an expert goes by: the files that matter in the order it comes upon them, and the words it has for it."""

    read: tuple[str, ...]
    command: str  # that shows whether it is done
    say: str  # the final message
    think: str = ""  # before the change
    named: bool = False  # the request names the file
    rename: tuple[tuple[str, str], ...] = ()  # old and new names
    find: str = ""  # a word that leads there


@dataclass(frozen=True)
class Draft:
    """One task."""

    family: str
    category: Category
    register: str
    request: str
    repo: Mapping[str, str]
    solved: Mapping[str, str]  # the files that the solution changes; none where only an answer is asked for
    calls: tuple[tuple[str, str, tuple[Any, ...]], ...]  # module, function and arguments the verifier tries
    wants: Mapping[str, Any]  # what it expects; see inside/verify.py
    plan: Plan
    sites: tuple[str, ...]  # shapes, with what is wrong in them: no site is in both splits
    protected: tuple[str, ...] = ()

    @property
    def may_edit(self) -> bool:
        return bool(self.solved)


def task_files(draft: Draft, name: str, split: str, seed: int, difficulty: int) -> dict[str, str]:
    """The files of the task directory."""
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
    if not draft.may_edit:
        metadata["carry"] = [FINAL]
    # JSON's strings, numbers, booleans and lists of them are TOML's too.
    described = "".join(f"{key} = {json.dumps(value)}\n" for key, value in metadata.items())
    files = {
        "task.toml": CONFIG.format(name=name, category=draft.category, metadata=described),
        "instruction.md": draft.request,  # the prompt, to the byte: without an end of line
        "environment/Dockerfile": DOCKERFILE,
        "tests/test.sh": TEST,
        "tests/verify.py": verifier(),
        "tests/.seal": "",  # the verifier gives back what it finds here
        "tests/calls.json": json.dumps([list(call) for call in draft.calls]),
        "tests/wants.json": json.dumps(draft.wants),
        "solution/solve.sh": SOLVE if draft.may_edit else SAY,
        "solution/plan.json": json.dumps(plan_values(draft.plan)),
    }
    files |= {f"environment/repo/{path}": text for path, text in draft.repo.items()}
    files |= {f"solution/repo/{path}": text for path, text in draft.solved.items()}
    if not draft.may_edit:
        files["solution/final.txt"] = draft.plan.say + "\n"
    return files


def plan_values(plan: Plan) -> dict[str, Any]:
    return {name: value for name, value in vars(plan).items() if value}


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def unchanged(repo: Mapping[str, str]) -> dict[str, str]:
    """The workspace as the verifier compares it, where nothing may change."""
    return {path: digest(text) for path, text in repo.items()}


@cache
def verifier() -> str:
    return (resources("etude_nano") / "inside" / "verify.py").read_text(encoding="utf-8")
