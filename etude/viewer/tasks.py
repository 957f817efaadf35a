"""The tasks of a run for its pages: instruction, files, and validation result.

Only tasks that the run itself lists are shown; their directories may be outside the run. Symlinks are not followed.
"""

import os
from dataclasses import asdict, dataclass
from pathlib import Path

from etude.errors import InputError
from etude.runs.layout import RunLayout
from etude.tasks.harbor import read_instruction, read_task, task_digest
from etude.viewer.run_reader import JsonObject, ReportProblem, read_json
from etude.viewer.session_view import TextLimit

ARTEFACTS = "artefacts"  # directory of a run for tasks that its stages generate
MAX_FILES = 300
MAX_FILE_BYTES = 24 << 10  # larger files are listed without their text
MAX_FILE_BYTES_LIMITED = 8 << 10  # the same in reports, where every task repeats the same long verifier
MAX_TOTAL_BYTES = 400 << 10  # of all texts of a task


@dataclass(frozen=True)
class ListedTask:
    """A task that a run lists."""

    name: str
    split: str  # training or held-out
    recorded_path: str  # its directory when the run started
    run: Path

    @property
    def directory(self) -> Path:
        """The task's directory. If the run was moved, tasks that it generated moved with it."""
        listed = Path(self.recorded_path)
        if listed.is_dir() or ARTEFACTS not in listed.parts or ".." in listed.parts:
            return listed
        at = len(listed.parts) - listed.parts[::-1].index(ARTEFACTS)
        return self.run.joinpath(ARTEFACTS, *listed.parts[at:])

    @property
    def instruction(self) -> str:
        """The instruction; "" if it cannot be read."""
        try:
            return read_instruction(self.directory / "instruction.md")
        except InputError:
            return ""


def read_listed_tasks(layout: RunLayout, report_problem: ReportProblem) -> dict[str, ListedTask]:
    """Return the tasks that a run lists by name, training tasks first."""
    lists = read_json(layout.tasks, report_problem)
    found: dict[str, ListedTask] = {}
    for key, split in (("train", "training"), ("held_out", "held-out")):
        entries = lists.get(key)
        for name, path in entries.items() if isinstance(entries, dict) else ():
            if isinstance(path, str):
                found.setdefault(name, ListedTask(name, split, path, layout.run))
    return found


def describe_task(listed: ListedTask, text_limit: TextLimit) -> JsonObject:
    """Return the instruction, settings, files and validation result of a task."""
    try:
        task = read_task(listed.directory)
    except InputError as error:
        return {"instruction": text_limit(listed.instruction), "problem": str(error)}
    limits = {"agent, seconds": task.agent.timeout_s, "verifier, seconds": task.verifier.timeout_s}
    limits |= {"cpus": task.machine.cpus, "memory, MB": task.machine.memory_mb}
    return {
        "instruction": text_limit(task.instruction),
        "steps": [{"name": step.name, "instruction": text_limit(step.instruction)} for step in task.steps],
        "category": task.category,
        "metadata": {str(name): _format_value(value) for name, value in task.metadata.items()},
        "limits": {name: value for name, value in limits.items() if value is not None},
        "network": task.machine.network.mode,
        "files": describe_files(listed.directory, MAX_FILE_BYTES_LIMITED if text_limit.characters else MAX_FILE_BYTES),
        "validation": read_validation(listed.directory),
    }


def _format_value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(_format_value, value)) if isinstance(value, list) else str(value)


def describe_files(top: Path, max_bytes: int = MAX_FILE_BYTES) -> list[JsonObject]:
    """Return the files of a task, short ones with their text."""
    found: list[JsonObject] = []
    left = MAX_TOTAL_BYTES
    for directory, names, files in os.walk(top):
        names.sort()
        for name in sorted(files):
            path = Path(directory, name)
            if path.is_symlink() or not path.is_file():
                continue
            shown: JsonObject = {"path": path.relative_to(top).as_posix()}
            try:
                shown["size"] = path.stat().st_size
                data = path.read_bytes() if shown["size"] <= min(max_bytes, left) else None
            except OSError as error:
                found.append(shown | {"problem": error.strerror})
                continue
            if data is not None and b"\0" not in data:
                left -= len(data)
                shown["text"] = data.decode("utf-8", "replace")
            found.append(shown)
            if len(found) == MAX_FILES:
                return [*found, {"path": "...", "problem": f"only the first {MAX_FILES} files are listed"}]
    return found


def read_validation(directory: Path) -> JsonObject | None:
    """Return the cached result of `etude tasks validate` for this version of the task, if there is one."""
    from etude.tasks.validate import REASONS, ValidationCache, default_validation_cache  # imports pods

    try:
        report = ValidationCache(default_validation_cache()).load(task_digest(directory))
    except OSError:
        return None
    if report is None:
        return None
    return {
        "admitted": report.admitted,
        "scores": {name: list(scores) for name, scores in report.scores.items()},
        "changed": list(report.changed),
        "seconds": report.seconds,
        "reasons": [asdict(reason) | {"means": REASONS.get(reason.code, "")} for reason in report.reasons],
    }
