"""The tasks of a run, for its pages: what is asked, the files, and what validation found of them.

A task is one that the run itself lists; its directory may lie elsewhere. Links in it are not followed.
"""

import os
from dataclasses import asdict, dataclass
from pathlib import Path

from etude.errors import InputError
from etude.runs.layout import Place
from etude.tasks.harbor import read_instruction, read_task, task_digest
from etude.viewer.run_reader import Complain, Facts, read_json
from etude.viewer.session_view import Cut

ARTEFACTS = "artefacts"  # of a run: where its stages put the tasks they make
MOST_FILES = 300
MOST_BYTES = 24 << 10  # of a file that is shown ...
MOST_BYTES_CUT = 8 << 10  # ... where texts are cut: the same long verifier stands beside every task
MOST_ALL = 400 << 10  # ... and of all of them


@dataclass(frozen=True)
class Known:
    """A task that a run lists."""

    name: str
    split: str  # training or held-out
    listed: str  # where it was when the run began
    run: Path

    @property
    def directory(self) -> Path:
        """Where it is; a run that was moved has taken the tasks it made along."""
        listed = Path(self.listed)
        if listed.is_dir() or ARTEFACTS not in listed.parts or ".." in listed.parts:
            return listed
        at = len(listed.parts) - listed.parts[::-1].index(ARTEFACTS)
        return self.run.joinpath(ARTEFACTS, *listed.parts[at:])

    @property
    def instruction(self) -> str:
        """What is asked; nothing when it cannot be read."""
        try:
            return read_instruction(self.directory / "instruction.md")
        except InputError:
            return ""


def known_tasks(place: Place, complain: Complain) -> dict[str, Known]:
    """The tasks of a run by name, those to learn from first."""
    lists = read_json(place.tasks, complain)
    found: dict[str, Known] = {}
    for key, split in (("train", "training"), ("held_out", "held-out")):
        entries = lists.get(key)
        for name, path in entries.items() if isinstance(entries, dict) else ():
            if isinstance(path, str):
                found.setdefault(name, Known(name, split, path, place.run))
    return found


def tell_task(known: Known, cut: Cut) -> Facts:
    """All that is known of a task beforehand."""
    try:
        task = read_task(known.directory)
    except InputError as error:
        return {"instruction": cut(known.instruction), "problem": str(error)}
    limits = {"agent, seconds": task.agent.timeout_s, "verifier, seconds": task.verifier.timeout_s}
    limits |= {"cpus": task.machine.cpus, "memory, MB": task.machine.memory_mb}
    return {
        "instruction": cut(task.instruction),
        "steps": [{"name": step.name, "instruction": cut(step.instruction)} for step in task.steps],
        "category": task.category,
        "metadata": {str(name): _said(value) for name, value in task.metadata.items()},
        "limits": {name: value for name, value in limits.items() if value is not None},
        "network": task.machine.network.mode,
        "files": tell_files(known.directory, MOST_BYTES_CUT if cut.text else MOST_BYTES),
        "validation": tell_validation(known.directory),
    }


def _said(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(_said, value)) if isinstance(value, list) else str(value)


def tell_files(top: Path, most: int = MOST_BYTES) -> list[Facts]:
    """The files of a task, those that are short with their text."""
    told: list[Facts] = []
    left = MOST_ALL
    for directory, names, files in os.walk(top):
        names.sort()
        for name in sorted(files):
            path = Path(directory, name)
            if path.is_symlink() or not path.is_file():
                continue
            shown: Facts = {"path": path.relative_to(top).as_posix()}
            try:
                shown["size"] = path.stat().st_size
                data = path.read_bytes() if shown["size"] <= min(most, left) else None
            except OSError as error:
                told.append(shown | {"problem": error.strerror})
                continue
            if data is not None and b"\0" not in data:
                left -= len(data)
                shown["text"] = data.decode("utf-8", "replace")
            told.append(shown)
            if len(told) == MOST_FILES:
                return [*told, {"path": "...", "problem": f"only the first {MOST_FILES} files are listed"}]
    return told


def tell_validation(directory: Path) -> Facts | None:
    """What `etude tasks validate` found of this very task, if it was asked on this machine."""
    from etude.tasks.validate import REASONS, Shelf, default_shelf  # brings the pods along

    try:
        report = Shelf(default_shelf()).recall(task_digest(directory))
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
