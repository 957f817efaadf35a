"""Observes the wheel that a submission builds."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import zipfile
from email.parser import Parser

from etude.tasks.checks.inside.guard import TESTER, can_switch_user, private_directory, run_guarded

TYPE_CHECKING = False
if TYPE_CHECKING:
    from etude.tasks.checks.inside.guard import JsonObject, Send

# Compared by their meaning, or different with every build.
UNSTABLE_FILES = (".dist-info/METADATA", ".dist-info/RECORD", ".dist-info/WHEEL", ".dist-info/entry_points.txt")


def observe_wheel(check: JsonObject, workspace: str) -> JsonObject:
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
        outcome = run_guarded(work, timeout=check.get("timeout", 120.0), cwd=copy, env={**env, **check.get("env", {})})
        print(outcome.text[-3000:], file=sys.stderr)
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
    """Return the digests of the files of a wheel, its metadata and entry points."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if not name.endswith((*UNSTABLE_FILES, "/"))]
            digests = {re.sub(r"^[^/]+(?=\.dist-info/)", "", name): _digest(archive, name) for name in sorted(names)}
            info = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            message = Parser().parsestr(archive.read(info).decode("utf-8", "replace"))
            entry_path = info.replace("METADATA", "entry_points.txt")
            text = archive.read(entry_path).decode() if entry_path in archive.namelist() else ""
    except (OSError, StopIteration, zipfile.BadZipFile, UnicodeError) as error:
        return {"problem": f"the wheel cannot be read ({type(error).__name__})"}
    metadata = {key: sorted(message.get_all(key) or []) for key in {*message.keys()} - {"Metadata-Version"}}
    metadata["Description"] = [*metadata.get("Description", ()), str(message.get_payload()).strip()]
    entry = sorted(line.strip() for line in text.splitlines() if line.strip())
    return {"digests": digests, "metadata": dict(sorted(metadata.items())), "entry": entry}


def _digest(archive: zipfile.ZipFile, name: str) -> str:
    return hashlib.sha256(archive.read(name)).hexdigest()
