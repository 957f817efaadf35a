"""The checks that run code of the workspace, each in a guarded child. What must come of it is not known here."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import zipfile
from email.parser import Parser

from etude.tasks.runner.guard import HERE, TESTER, Message, Send, can_switch, guarded, private_directory
from etude.tasks.runner.inside import remove_plants, run_pytest

METADATA = ("Name", "Version", "Requires-Python", "Requires-Dist", "Provides-Extra")


def pytest(spec: Message, workspace: str) -> Message:
    """Run tests: their statuses, and why these cannot be believed."""
    for plant in remove_plants(workspace, spec["run"], set(spec["placed"])):
        print(f"removed: {plant}")
    statuses, doubt, outcome = run_pytest(spec, workspace)
    print(outcome.text[-6000:])
    return {"statuses": statuses, "doubt": doubt}


# ------------------------------------------------------------------------------------------------- written tests


def mutants(spec: Message, workspace: str) -> Message:
    """Run the tests that were written: on the code as it is, on copies of it that mean the same, and on wrong ones.

    A test that compares the source with what it was would fail on wrong code too; it fails on the copies that mean the
    same, and earns nothing.
    """
    written = new_tests(spec["known"], spec["directories"], workspace)
    if not written:
        return {"written": [], "right": "no test was added", "killed": [], "of": spec["count"]}
    spec = {**spec, "run": written}
    problem = _passes(spec, workspace)
    if not problem:
        for name in sorted(os.listdir(os.path.join(HERE, "equal"))):
            with _Replaced(os.path.join(HERE, "equal", name), workspace):
                problem = problem or (_passes(spec, workspace) and "fails on code that means the same")
    killed = []
    if not problem:
        for number in range(spec["count"]):
            with _Replaced(os.path.join(HERE, "mutants", str(number)), workspace):
                if _passes(spec, workspace):
                    killed.append(number)
    return {"written": written, "right": problem, "killed": killed, "of": spec["count"]}


def new_tests(known: dict[str, str], directories: list[str], workspace: str) -> list[str]:
    """Test files that are not as they were, or were not there."""
    found = []
    for top in directories:
        for directory, names, files in os.walk(os.path.join(workspace, top)):
            names.sort()
            for name in sorted(files):
                path = os.path.relpath(os.path.join(directory, name), workspace)
                if re.fullmatch(r"test_.*\.py|.*_test\.py", name) and digest(workspace, path) != known.get(path):
                    found.append(path)
    return found


def _passes(spec: Message, workspace: str) -> str:
    """Why tests do not all pass; "" if they do."""
    statuses, doubt, outcome = run_pytest(spec, workspace)
    bad = sorted(name for name, status in statuses.items() if status not in ("passed", "skipped", "xfailed"))
    if bad or doubt:
        return f"{doubt or 'tests fail'}: {', '.join(bad[:5])}"
    # a file that cannot be imported reports no test of its own
    files = {name.partition("::")[0] for name in statuses}
    missing = [path for path in spec["run"] if path not in files]
    if missing:
        return f"nothing ran in {', '.join(missing)}: {outcome.text[-500:]}"
    return "" if "passed" in statuses.values() else "no test passes"


class _Replaced:
    """Files of the workspace are others for a while."""

    def __init__(self, place: str, workspace: str) -> None:
        self.place, self.workspace = place, workspace
        self.kept = private_directory("kept")

    def files(self) -> list[str]:
        found = []
        for directory, _, files in os.walk(self.place):
            found += [os.path.relpath(os.path.join(directory, name), self.place) for name in files]
        return sorted(found)

    def __enter__(self) -> None:
        for number, path in enumerate(self.files()):
            shutil.copyfile(os.path.join(self.workspace, path), os.path.join(self.kept, str(number)))
            shutil.copyfile(os.path.join(self.place, path), os.path.join(self.workspace, path))

    def __exit__(self, *_: object) -> None:
        for number, path in enumerate(self.files()):
            shutil.copyfile(os.path.join(self.kept, str(number)), os.path.join(self.workspace, path))
        shutil.rmtree(self.kept)


def digest(workspace: str, path: str) -> str:
    with open(os.path.join(workspace, path), "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


# ------------------------------------------------------------------------------------------------- packaging


def wheel(spec: Message, workspace: str) -> Message:
    """Build the workspace's wheel in a copy: its files and its metadata, or what went wrong."""
    place = private_directory("build", owner=TESTER)
    copy, out = os.path.join(place, "source"), os.path.join(place, "wheels")
    try:
        shutil.copytree(workspace, copy, symlinks=True, ignore=shutil.ignore_patterns(".git", "__pycache__"))
        os.mkdir(out)
        _give(place)
        command = ["python3", "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-q", "-w", out]

        def work(send: Send) -> None:
            os.execvp(command[0], [*command, copy])

        env = {"PYTHONDONTWRITEBYTECODE": "1", "PIP_NO_CACHE_DIR": "1", "SOURCE_DATE_EPOCH": "1600000000"}
        outcome = guarded(work, timeout=spec.get("timeout", 120.0), cwd=copy, env={**env, **spec.get("env", {})})
        print(outcome.text[-3000:])
        built = sorted(name for name in os.listdir(out) if name.endswith(".whl"))
        if outcome.timed_out or outcome.status != 0 or len(built) != 1:
            return {"problem": f"the wheel is not built (exit code {outcome.status})"}
        return wheel_facts(os.path.join(out, built[0]))
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _give(place: str) -> None:
    if not can_switch():
        return
    for directory, names, files in os.walk(place):
        for name in [".", *names, *files]:
            os.chown(os.path.join(directory, name), TESTER, TESTER, follow_symlinks=False)


def wheel_facts(path: str) -> Message:
    """What is in a wheel: names of files, metadata, entry points."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = sorted(name for name in archive.namelist() if ".dist-info/" not in name)
            info = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            message = Parser().parsestr(archive.read(info).decode("utf-8", "replace"))
            entry = info.replace("METADATA", "entry_points.txt")
            text = archive.read(entry).decode() if entry in archive.namelist() else ""
    except (OSError, StopIteration, zipfile.BadZipFile, UnicodeError) as error:
        return {"problem": f"the wheel cannot be read ({type(error).__name__})"}
    metadata = {key: sorted(message.get_all(key) or []) for key in METADATA}
    return {
        "names": names,
        "metadata": metadata,
        "entry": sorted(line.strip() for line in text.splitlines() if line.strip()),
    }
