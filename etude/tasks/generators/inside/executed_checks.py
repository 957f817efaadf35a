"""The checks that run code of the workspace, each in a guarded child process. Expectations are not known here."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import zipfile
from email.parser import Parser

from etude.tasks.runner.guard import HERE, TESTER, JsonObject, Send, can_switch_user, private_directory, run_guarded
from etude.tasks.runner.inside import remove_foreign_conftests, run_pytest

METADATA_FIELDS = ("Name", "Version", "Requires-Python", "Requires-Dist", "Provides-Extra")


def pytest(spec: JsonObject, workspace: str) -> JsonObject:
    """Run tests; return their statuses and, if the run is not trustworthy, the reason."""
    for removed in remove_foreign_conftests(workspace, spec["run"], set(spec["placed"])):
        print(f"removed: {removed}")
    statuses, doubt, outcome = run_pytest(spec, workspace)
    print(outcome.text[-6000:])
    return {"statuses": statuses, "doubt": doubt}


# ------------------------------------------------------------------------------------------------- new tests


def mutants(spec: JsonObject, workspace: str) -> JsonObject:
    """Run the tests that the agent wrote on the original code, on equivalent versions and on mutants.

    A test that compares source text would fail on mutants too, but it also fails on equivalent versions and scores 0.
    """
    written = new_tests(spec["known"], spec["directories"], workspace)
    if not written:
        return {"written": [], "right": "no test was added", "killed": [], "of": spec["count"]}
    spec = {**spec, "run": written}
    problem = _failure_of(spec, workspace)
    if not problem:
        for name in sorted(os.listdir(os.path.join(HERE, "equal"))):
            with _ReplacedFiles(os.path.join(HERE, "equal", name), workspace):
                problem = problem or (_failure_of(spec, workspace) and "fails on code that means the same")
    killed = []
    if not problem:
        for number in range(spec["count"]):
            with _ReplacedFiles(os.path.join(HERE, "mutants", str(number)), workspace):
                if _failure_of(spec, workspace):
                    killed.append(number)
    return {"written": written, "right": problem, "killed": killed, "of": spec["count"]}


def new_tests(known: dict[str, str], directories: list[str], workspace: str) -> list[str]:
    """Return the test files that are new or changed."""
    found = []
    for top in directories:
        for directory, names, files in os.walk(os.path.join(workspace, top)):
            names.sort()
            for name in sorted(files):
                path = os.path.relpath(os.path.join(directory, name), workspace)
                if re.fullmatch(r"test_.*\.py|.*_test\.py", name) and digest(workspace, path) != known.get(path):
                    found.append(path)
    return found


def _failure_of(spec: JsonObject, workspace: str) -> str:
    """Return why the tests do not all pass; "" if they do."""
    statuses, doubt, outcome = run_pytest(spec, workspace)
    failed = sorted(name for name, status in statuses.items() if status not in ("passed", "skipped", "xfailed"))
    if failed or doubt:
        return f"{doubt or 'tests fail'}: {', '.join(failed[:5])}"
    # a file that cannot be imported reports no tests
    files = {name.partition("::")[0] for name in statuses}
    missing = [path for path in spec["run"] if path not in files]
    if missing:
        return f"nothing ran in {', '.join(missing)}: {outcome.text[-500:]}"
    return "" if "passed" in statuses.values() else "no test passes"


class _ReplacedFiles:
    """Context manager that temporarily replaces files of the workspace."""

    def __init__(self, directory: str, workspace: str) -> None:
        self.directory, self.workspace = directory, workspace
        self.backup = private_directory("kept")

    def files(self) -> list[str]:
        found = []
        for directory, _, files in os.walk(self.directory):
            found += [os.path.relpath(os.path.join(directory, name), self.directory) for name in files]
        return sorted(found)

    def __enter__(self) -> None:
        for number, path in enumerate(self.files()):
            shutil.copyfile(os.path.join(self.workspace, path), os.path.join(self.backup, str(number)))
            shutil.copyfile(os.path.join(self.directory, path), os.path.join(self.workspace, path))

    def __exit__(self, *_: object) -> None:
        for number, path in enumerate(self.files()):
            shutil.copyfile(os.path.join(self.backup, str(number)), os.path.join(self.workspace, path))
        shutil.rmtree(self.backup)


def digest(workspace: str, path: str) -> str:
    with open(os.path.join(workspace, path), "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


# ------------------------------------------------------------------------------------------------- packaging


def wheel(spec: JsonObject, workspace: str) -> JsonObject:
    """Build the wheel in a copy of the workspace; return its files and metadata, or the problem."""
    directory = private_directory("build", owner=TESTER)
    copy, out = os.path.join(directory, "source"), os.path.join(directory, "wheels")
    try:
        shutil.copytree(workspace, copy, symlinks=True, ignore=shutil.ignore_patterns(".git", "__pycache__"))
        os.mkdir(out)
        _chown_to_tester(directory)
        command = ["python3", "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-q", "-w", out]

        def work(send: Send) -> None:
            os.execvp(command[0], [*command, copy])

        env = {"PYTHONDONTWRITEBYTECODE": "1", "PIP_NO_CACHE_DIR": "1", "SOURCE_DATE_EPOCH": "1600000000"}
        outcome = run_guarded(work, timeout=spec.get("timeout", 120.0), cwd=copy, env={**env, **spec.get("env", {})})
        print(outcome.text[-3000:])
        built = sorted(name for name in os.listdir(out) if name.endswith(".whl"))
        if outcome.timed_out or outcome.status != 0 or len(built) != 1:
            return {"problem": f"the wheel is not built (exit code {outcome.status})"}
        return wheel_contents(os.path.join(out, built[0]))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _chown_to_tester(top: str) -> None:
    if not can_switch_user():
        return
    for directory, names, files in os.walk(top):
        for name in [".", *names, *files]:
            os.chown(os.path.join(directory, name), TESTER, TESTER, follow_symlinks=False)


def wheel_contents(path: str) -> JsonObject:
    """Return the file names, metadata and entry points of a wheel."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = sorted(name for name in archive.namelist() if ".dist-info/" not in name)
            info = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            message = Parser().parsestr(archive.read(info).decode("utf-8", "replace"))
            entry_path = info.replace("METADATA", "entry_points.txt")
            text = archive.read(entry_path).decode() if entry_path in archive.namelist() else ""
    except (OSError, StopIteration, zipfile.BadZipFile, UnicodeError) as error:
        return {"problem": f"the wheel cannot be read ({type(error).__name__})"}
    metadata = {key: sorted(message.get_all(key) or []) for key in METADATA_FIELDS}
    return {
        "names": names,
        "metadata": metadata,
        "entry": sorted(line.strip() for line in text.splitlines() if line.strip()),
    }
