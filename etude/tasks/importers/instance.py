"""An instance (an issue of a repository with its tests) of any supported set, and its conversion to a Harbor task."""

import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from etude.errors import InputError
from etude.system.git import run_git
from etude.tasks.checks import VerifierCheck, check_files

WORKSPACE = "/testbed"
TIMEOUT_S = 1800.0
_PATH = re.compile(r"^\+\+\+ b/(.+?)\s*$|^--- a/(.+?)\s*$", re.MULTILINE)


@dataclass(frozen=True)
class Instance:
    """One instance. `bug` is a patch that introduces the bug; `gold` is a patch that solves the issue."""

    id: str
    source: str  # swebench, swe-smith, ...
    repo: str
    statement: str
    gold: str = ""
    bug: str = ""
    test_patch: str = ""
    fail_to_pass: tuple[str, ...] = ()
    pass_to_pass: tuple[str, ...] = ()
    base_commit: str = ""
    image: str = ""
    dockerfile: str = ""  # from the set, unmodified
    context: Mapping[str, bytes] = field(default_factory=dict)  # files of its build context
    eval_script: str = ""  # from the set, unmodified
    test_command: str = "pytest -rA"
    install: tuple[str, ...] = ()  # RUN lines for an installation from a clone
    python: str = ""
    parser: str = "pytest"
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def test_files(self) -> tuple[str, ...]:
        """Return the test files: those of the test patch, else those named by the test ids."""
        if self.test_patch:
            return patched_paths(self.test_patch)
        ids = (*self.fail_to_pass, *self.pass_to_pass)
        return tuple(sorted({id.split("::")[0] for id in ids if "::" in id}))


def patched_paths(patch: str) -> tuple[str, ...]:
    """Return the files that a patch changes."""
    found = {one or other for one, other in _PATH.findall(patch)} - {"/dev/null"}
    return tuple(sorted(path for path in found if not path.startswith("/") and ".." not in path.split("/")))


def parser_for(name: str) -> str:
    """Return the log parser of ours that replaces a set's own parser; raise InputError if there is none."""
    short_name = name.lower().removeprefix("parse_log_")
    if "django" in short_name:
        return "django"
    if "sympy" in short_name:
        return "sympy"
    pytest = ("pytest", "flask", "requests", "astropy", "xarray", "pylint", "scikit", "sphinx", "seaborn", "matplotlib")
    if not short_name or any(word in short_name for word in pytest):
        return "pytest"
    raise InputError(f"unknown log parser {name}; pytest, django and sympy are supported")


def task_files(instance: Instance, clone: Path | None) -> dict[str, str | bytes]:
    """Return the files of the task directory: a copy of the clone in environment/ if given, else the set's image."""
    files: dict[str, str | bytes] = {
        "task.toml": tomli_w.dumps(_config(instance)),
        "instruction.md": instance.statement.strip() + "\n",
    }
    if not instance.fail_to_pass:
        raise InputError("FAIL_TO_PASS is empty; expected at least one test that the solution makes pass")
    files |= _environment(instance, clone)
    files |= _tests(instance, clone)
    files |= _solution(instance)
    return files


def _config(instance: Instance) -> dict[str, Any]:
    return {
        "schema_version": "1.4",
        "task": {"name": f"{instance.source}/{instance.id}"},
        "metadata": {
            "category": "debugging",
            "source": instance.source,
            "repo": instance.repo,
            "protected": list(instance.test_files),
            "sealed_history": True,
            "base_commit": instance.base_commit,
            **instance.metadata,
        },
        "environment": {"network_mode": "no-network", "workdir": WORKSPACE},
        "verifier": {"timeout_sec": TIMEOUT_S},
    }


# ------------------------------------------------------------------------------------------------- environment


def _environment(instance: Instance, clone: Path | None) -> dict[str, str | bytes]:
    if clone is not None:
        tree = export_tree(clone, instance.base_commit, [instance.bug] if instance.bug else [])
        lines = [f"FROM python:{instance.python or '3'}-slim", f"WORKDIR {WORKSPACE}", f"COPY repo/ {WORKSPACE}/"]
        lines += [f"RUN {line}" for line in instance.install]
        found: dict[str, str | bytes] = {f"environment/repo/{path}": data for path, data in tree.items()}
        if "requirements" in instance.context:
            found["environment/requirements.txt"] = instance.context["requirements"]
            lines.insert(2, "COPY requirements.txt /requirements.txt\nRUN pip install -r /requirements.txt")
        return {**found, "environment/Dockerfile": "\n".join(lines) + "\n"}
    if instance.dockerfile:
        found = {"environment/Dockerfile": instance.dockerfile}
        return {**found, **{f"environment/{path}": data for path, data in instance.context.items()}}
    if not instance.image:
        raise InputError("has neither an image nor a Dockerfile; give a clone of its repository with --repositories")
    lines = [f"FROM {instance.image}", f"WORKDIR {WORKSPACE}"]
    found = {}
    if instance.bug:
        found["environment/bug.patch"] = instance.bug
        lines += ["COPY bug.patch /bug.patch", "RUN git apply /bug.patch && rm /bug.patch"]
    lines.append("RUN " + SINGLE_COMMIT)
    return {**found, "environment/Dockerfile": "\n".join(lines) + "\n"}


# Replaces the history, which may contain the solution, by a single commit.
SINGLE_COMMIT = (
    "rm -rf .git && git init -q && git add -A && git -c user.name=task -c user.email=task@localhost commit -q -m start"
)


def export_tree(clone: Path, commit: str, patches: Sequence[str]) -> dict[str, bytes]:
    """Return the files of a clone at a commit, with patches applied."""
    if commit.startswith("-"):
        raise InputError(f"{clone}: {commit!r} is not a commit")  # git would take it for an option
    with tempfile.TemporaryDirectory(prefix="etude-export-") as directory:
        top = Path(directory)
        packed = run_git(clone, "archive", "--format=tar", commit or "HEAD")
        subprocess.run(["tar", "-x"], cwd=top, input=packed, check=True)
        for patch in patches:
            apply_patch(top, patch)
        paths = [path for path in sorted(top.rglob("*")) if path.is_file() and not path.is_symlink()]
        return {path.relative_to(top).as_posix(): path.read_bytes() for path in paths}


def apply_patch(top: Path, patch: str) -> None:
    """Apply a patch to a directory that is not a repository; git refuses paths that leave it."""
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(top.parent), "GIT_CONFIG_GLOBAL": "/dev/null"}
    command = ["git", "apply", "--whitespace=nowarn", "-"]
    text = patch if patch.endswith("\n") else patch + "\n"
    done = subprocess.run(command, cwd=top, input=text.encode(), capture_output=True, env=environment)
    if done.returncode != 0:
        raise InputError(f"the patch does not apply: {done.stderr.decode('utf-8', 'replace').strip()[:300]}")


# ------------------------------------------------------------------------------------------------- tests, solution


def _tests(instance: Instance, clone: Path | None) -> dict[str, str | bytes]:
    """Return the check, eval.sh, and the test files or test patch."""
    expected = {
        "parser": instance.parser,
        "fail_to_pass": list(instance.fail_to_pass),
        "pass_to_pass": list(instance.pass_to_pass),
    }
    # Probes among the tests fail, and their statuses must be printed.
    repeat = not instance.eval_script and instance.parser == "pytest" and _prints_all(instance.test_command)
    run = {"script": "eval.sh", "repeat": repeat}
    found = check_files([VerifierCheck("log", run, expected)], workspace=WORKSPACE)
    if instance.eval_script:
        return {**found, "tests/eval.sh": instance.eval_script}
    if clone is not None:
        tree = export_tree(clone, instance.base_commit, [instance.test_patch] if instance.test_patch else [])
        found |= {f"tests/suite/{path}": tree[path] for path in instance.test_files if path in tree}
        prepare = ""
    else:
        prepare = ""
        if instance.test_patch:
            found["tests/test.patch"] = instance.test_patch
            listed = " ".join(f"'{path}'" for path in instance.test_files)
            prepare = (
                f"git checkout -q HEAD -- {listed} 2>/dev/null\n"
                "git apply --whitespace=nowarn /tests/test.patch || echo '>>>>> Patch Apply Failed'\n"
            )
    targets = "" if instance.metadata.get("whole_suite") else " ".join(f"'{path}'" for path in instance.test_files)
    script = (
        f"cd {WORKSPACE}\n{prepare}echo '>>>>> Start Test Output'\n{instance.test_command} {targets}\ncode=$?\n"
        "echo '>>>>> End Test Output'\necho \">>>>> Test Exit Code: $code\"\n"
    )
    return {**found, "tests/eval.sh": script}


def _prints_all(command: str) -> bool:
    """Return whether a command of pytest runs all tests and prints the status of each."""
    ends_early = re.search(r"(^|\s)(-\w*x\b|--exitfirst|--maxfail|-k\b|-m\b(?! pytest)|--lf|--ff|--deselect)", command)
    return not ends_early and re.search(r"(^|\s)(-r\w*A|-\w*v|--verbose)\b", command) is not None


def _solution(instance: Instance) -> dict[str, str | bytes]:
    if instance.bug:
        apply, patch = "git apply -R --whitespace=nowarn", instance.bug
    elif instance.gold:
        apply, patch = "git apply --whitespace=nowarn", instance.gold
    else:
        return {}
    script = f"#!/bin/sh\nset -e\ncd {WORKSPACE}\n{apply} /solution/gold.patch\n"
    return {"solution/solve.sh": script, "solution/gold.patch": patch if patch.endswith("\n") else patch + "\n"}
