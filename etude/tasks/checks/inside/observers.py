"""Observes the tests that a submission brings, and the log of a public set's own script.

It starts once for every version of the code that submitted tests are run on: what only some checks need is imported by
them, before any submitted code runs.
"""

from __future__ import annotations

import os
import sys

from etude.tasks.checks.inside.guard import (
    HERE,
    child_env,
    copy_file,
    import_roots,
    private_directory,
    run_guarded,
)
from etude.tasks.checks.inside.pytest_run import run_pytest, write_files

TYPE_CHECKING = False
if TYPE_CHECKING:
    from etude.tasks.checks.inside.guard import JsonObject, Send

MAX_LOG = 8 << 20  # bytes kept of the end of a log


# ------------------------------------------------------------------------------------------------- submitted tests


def observe_mutants(check: JsonObject, workspace: str) -> JsonObject:
    """Run submitted tests, a script or pytest files, on each version of the code: one version replaces some files.

    Which versions are correct is not known here. A test that compares source text fails on correct ones too.
    """
    script = check.get("script")
    tests = [script] if script else new_tests(check["known"], check["directories"], workspace)
    runs = []
    for version in check.pop("versions") if tests else []:
        with _ReplacedFiles(version, check.get("compiled", []), workspace):
            if script:
                runs.append(_run_script(check, script, workspace))
            else:
                runs.append(run_pytest(check, tests, workspace))
    return {"tests": tests, "runs": runs}


def new_tests(known: dict[str, str], directories: list[str], workspace: str) -> list[str]:
    """Return the test files that are new or changed."""
    import hashlib
    import re

    found = []
    for top in directories:
        for directory, names, files in os.walk(os.path.join(workspace, top)):
            names.sort()
            for name in sorted(files):
                path = os.path.relpath(os.path.join(directory, name), workspace)
                if re.fullmatch(r"test_.*\.py|.*_test\.py", name):
                    with open(os.path.join(workspace, path), "rb") as file:
                        if hashlib.sha256(file.read()).hexdigest() != known.get(path):
                            found.append(path)
    return found


def _run_script(check: JsonObject, script: str, workspace: str) -> JsonObject:
    """Return the exception that a script ends with: "" for none, no key if it ends the process."""

    def work(send: Send) -> None:
        sys.path[:0] = import_roots(check, workspace)
        try:
            with open(script, encoding="utf-8") as file:
                exec(compile(file.read(), script, "exec"), {"__name__": "__main__"})
        except BaseException as error:
            clean = isinstance(error, SystemExit) and not error.code
            send({"raised": "" if clean else type(error).__name__})
        else:
            send({"raised": ""})

    done = run_guarded(work, timeout=check.get("timeout", 10.0), cwd=workspace, env=child_env(check, workspace))
    return done.messages[0] if done.messages else {}


class _ReplacedFiles:
    """Context manager that temporarily replaces files of the workspace; of those in `compiled` only bytecode is there,
    beside the place of the source, where Python loads it too."""

    def __init__(self, version: dict[str, str], compiled: list[str], workspace: str) -> None:
        self.files = {os.path.join(workspace, path): version.pop(path) for path in list(version)}
        self.compiled = [os.path.join(workspace, path) for path in compiled]
        self.paths = list(dict.fromkeys([*self.files, *self.compiled]))
        self.backup = private_directory("kept")

    def __enter__(self) -> None:
        for number, path in enumerate(self.paths):
            copy_file(path, os.path.join(self.backup, str(number)))
        for path, text in self.files.items():
            with open(path, "wb") as file:
                file.write(text.encode("utf-8", "surrogateescape"))
        self.files.clear()  # no object that the tests can reach has the source
        if self.compiled:
            import importlib.util
            import marshal
        for path in self.compiled:
            with open(path, "rb") as file:
                code = compile(file.read(), path, "exec", dont_inherit=True)
            with open(f"{path}c", "wb") as file:
                file.write(importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(code))
            os.unlink(path)

    def __exit__(self, *_: object) -> None:
        for path in self.compiled:
            os.unlink(f"{path}c")
        for number, path in enumerate(self.paths):
            copy_file(os.path.join(self.backup, str(number)), path)
            os.unlink(os.path.join(self.backup, str(number)))
        os.rmdir(self.backup)


# ------------------------------------------------------------------------------------------------- logs


def observe_log(check: JsonObject, workspace: str) -> JsonObject:
    """Run the script of a public task set as its authors do, as our user; return its output. The second time the test
    files have probes."""
    import subprocess

    write_files(check.get("planted", {}), workspace)
    command = ["bash", os.path.join(HERE, check["script"])]
    log = b""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=workspace) as run:
        while run.stdout and (part := run.stdout.read(1 << 16)):
            log = (log + part)[-MAX_LOG:]
    text = log.decode("utf-8", "replace")
    print(text[-MAX_LOG // 16 :], file=sys.stderr)
    return {"log": text}
