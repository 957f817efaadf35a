"""Linter errors of Python files, by ruff or, without it, by the compiler; new ones are marked.

An error is new if it was not there before the first edit: in the saved original, or in the last commit for a file that
was changed by a command. Errors are matched by message and line text, because line numbers shift.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import warnings

from etude.harness.toolserver.inside.editing import originals
from etude.harness.toolserver.inside.ignore import files_below
from etude.harness.toolserver.inside.paths import Refusal, ToolWorkspace, lent_program, quote_name, refusal_for

MAX_SHOWN = 100
MAX_FILES = 200
MAX_FILE = 1 << 20
PROGRAM_S = 30.0
# A project's configuration may enable fixes; linting must not change files.
RUFF = ("check", "--no-cache", "--no-fix", "--no-fix-only", "--exit-zero", "--quiet", "--output-format", "json")

TYPE_CHECKING = False  # typing is slow to import
if TYPE_CHECKING:
    from typing import Any

    Problem = tuple[int, int, str, str]  # line, column, code, message


def lints(workspace: ToolWorkspace, arguments: dict[str, Any]) -> dict[str, Any]:
    """Lint the given files, or the edited ones. `need` in the result asks the host to upload ruff."""
    before = originals(workspace)
    files = _chosen(workspace, arguments.get("paths") or [], before)
    if not files:
        return {"text": "No Python files have been edited; name the files to check.", "facts": {"problems": 0}}
    program = shutil.which("ruff") or lent_program(workspace, "ruff")
    if program is None and not arguments.get("without_ruff"):
        return {"need": "ruff"}
    checker = Checker(workspace, program)
    found = checker.problems({name: _contents(workspace, name) for name in files})
    rows: list[tuple[bool, str, Problem]] = []
    unknown = []
    for name in files:
        if not found.get(name):
            continue
        old = before[name] if before.get(name) is not None else committed(workspace, name)
        if old is None:
            unknown.append(name)
        known = [] if old is None else _texts(checker.problems({name: old}).get(name, []), old)
        now = _contents(workspace, name)
        for problem, text in zip_texts(found[name], now):
            new = old is not None and text not in known
            if text in known:
                known.remove(text)
            rows.append((new, name, problem))
    return {"text": _format(rows, files, checker.notes, unknown), "facts": _facts(rows, files)}


def _chosen(workspace: ToolWorkspace, paths: list[str], before: dict[str, bytes | None]) -> list[str]:
    if not paths:
        return [name for name in before if _is_python(name) and os.path.isfile(os.path.join(workspace.root, name))]
    found: list[str] = []
    for text in paths:
        path = workspace.resolve(text)
        if os.path.isdir(path):
            below = files_below(os.path.normpath(path), workspace.root, hidden=False)
            found += [workspace.relative(each) for each in below if _is_python(each)]
        elif not os.path.isfile(path):
            raise refusal_for(workspace, path, FileNotFoundError(2, "no such file"))
        elif _is_python(path):
            found.append(workspace.relative(path))
        else:
            raise Refusal("environment", f"{workspace.display(path)}: only Python files can be checked here")
    return sorted(set(found))[:MAX_FILES]


def _is_python(name: str) -> bool:
    return name.endswith((".py", ".pyi"))


def _contents(workspace: ToolWorkspace, name: str) -> bytes:
    try:
        with open(os.path.join(workspace.root, name), "rb") as file:
            return file.read(MAX_FILE)
    except OSError:
        return b""


class Checker:
    """Runs ruff, or the compiler where ruff cannot run; `notes` says which checks are missing."""

    def __init__(self, workspace: ToolWorkspace, program: str | None) -> None:
        self.workspace, self.program = workspace, program
        self.isolated: list[str] = []
        self.notes: list[str] = []
        if program is None:
            self.note("ruff is not available here: only syntax errors are found")

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def problems(self, files: dict[str, bytes]) -> dict[str, list[Problem]]:
        """Return the problems of each file, sorted by line."""
        return {name: sorted(self.check(name, data)) for name, data in files.items()}

    def check(self, name: str, data: bytes) -> list[Problem]:
        if self.program is not None:
            found, reason = self.ruff(name, data)
            if found is None and not self.isolated:
                self.isolated = ["--isolated"]
                self.note(f"the project's ruff configuration could not be used ({reason}): default rules")
                found, reason = self.ruff(name, data)
            if found is not None:
                return found
            self.program = None
            self.note(f"ruff could not run ({reason}): only syntax errors are found")
        return syntax_errors(name, data)

    def ruff(self, name: str, data: bytes) -> tuple[list[Problem] | None, str]:
        """Lint a text as if it were the file's content; return the problems, or None and the reason of a failure."""
        assert self.program is not None
        path = os.path.join(self.workspace.root, name)
        command = [self.program, *RUFF, *self.isolated, "--stdin-filename", path, "-"]
        try:
            done = subprocess.run(
                command, input=data, capture_output=True, timeout=PROGRAM_S, cwd=self.workspace.root, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return None, type(error).__name__
        try:
            return [
                (
                    int(row["location"]["row"]),
                    int(row["location"]["column"]),
                    str(row.get("code") or "syntax"),
                    str(row["message"]).split("\n")[0][:300],
                )
                for row in json.loads(done.stdout)
            ], ""
        except (ValueError, KeyError, TypeError):
            errors = done.stderr.decode("utf-8", "replace").strip().splitlines()
            return None, errors[-1].strip()[:200] if errors else f"exit code {done.returncode}"


def syntax_errors(name: str, data: bytes) -> list[Problem]:
    """Return the first syntax error, if there is one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compile(data, name, "exec", dont_inherit=True)
        except SyntaxError as error:
            return [(error.lineno or 1, error.offset or 1, "syntax", str(error.msg))]
        except (ValueError, RecursionError, MemoryError, OverflowError) as error:
            return [(1, 1, "syntax", str(error) or type(error).__name__)]
    return []


def committed(workspace: ToolWorkspace, name: str) -> bytes | None:
    """Return the file in the last commit, empty if it is not in it, None if there is no commit."""
    git = shutil.which("git")
    if git is None:
        return None
    directory, base = os.path.split(os.path.join(workspace.root, name))
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "GIT_CONFIG_NOSYSTEM": "1"}
    # a partial clone would fetch missing objects, through any program it configures
    environment["GIT_ALLOW_PROTOCOL"] = "none"
    start = [git, "-c", "core.fsmonitor=false", "-C", directory]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        command = [*start, "cat-file", "blob", f"HEAD:./{base}"]
        done = subprocess.run(command, env=environment, capture_output=True, timeout=PROGRAM_S, check=False)
        if done.returncode == 0:
            return done.stdout
        command = [*start, "rev-parse", "--quiet", "--verify", "HEAD^{commit}"]
        done = subprocess.run(command, env=environment, capture_output=True, timeout=PROGRAM_S, check=False)
        return b"" if done.returncode == 0 else None
    return None


def zip_texts(problems: list[Problem], data: bytes) -> list[tuple[Problem, tuple[str, str, bytes]]]:
    """Pair each problem with its code, message and line text."""
    lines = data.split(b"\n")
    return [(p, (p[2], p[3], lines[p[0] - 1].strip() if 0 < p[0] <= len(lines) else b"")) for p in problems]


def _texts(problems: list[Problem], data: bytes) -> list[tuple[str, str, bytes]]:
    return [text for _, text in zip_texts(problems, data)]


def _format(rows: list[tuple[bool, str, Problem]], files: list[str], notes: list[str], unknown: list[str]) -> str:
    lines: list[str] = []
    chosen = (
        rows if len(rows) <= MAX_SHOWN else [*(r for r in rows if r[0]), *(r for r in rows if not r[0])][:MAX_SHOWN]
    )
    for name in files:
        if mine := sorted((problem, new) for new, other, problem in chosen if other == name):
            lines.append(quote_name(name))
            lines += [f"  {p[0]}:{p[1]} {p[2]} {p[3]}{' (new)' if new else ''}" for p, new in mine]
    count = f"{len(files)} file{'s' if len(files) != 1 else ''}"
    if not rows:
        lines.append(f"No problems in {count}.")
    else:
        new = sum(row[0] for row in rows)
        shown = f", {len(chosen)} of them shown" if len(chosen) < len(rows) else ""
        lines.append(f"[{len(rows)} problem{'s' if len(rows) != 1 else ''} in {count}, {new} new{shown}]")
    if unknown:
        lines.append("[there is no earlier state to compare with, so none is marked as new]")
    return "\n".join(lines + [f"[{note}]" for note in notes])


def _facts(rows: list[tuple[bool, str, Problem]], files: list[str]) -> dict[str, Any]:
    return {"problems": len(rows), "new": sum(row[0] for row in rows), "files": len(files)}
