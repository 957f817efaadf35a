"""Collect a task's artifacts from the agent's pod into one directory with a manifest."""

import asyncio
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from etude.globs import Globs
from etude.pods.pod import Pod, PodFileError
from etude.tasks.environment import TaskEnvironment
from etude.tasks.schema import TomlTable, read_artifacts
from etude.tasks.task import Task, TaskStep


async def collect_artifacts(environment: TaskEnvironment, step: TaskStep | None, target: Path) -> None:
    """Copy the task's artifacts and /logs/artifacts into a new directory with a manifest.json."""
    task, pod = environment.task, environment.pod
    await _run_hooks(environment, step)
    target.mkdir(parents=True)
    entries = [{"source": "/logs/artifacts", "destination": "artifacts", "exclude": ()}]
    entries += [dict(entry) for entry in (*task.artifacts, *_step_artifacts(task, step))]
    manifest = []
    for number, entry in enumerate(entries):
        source = str(entry["source"])
        source = source if source.startswith("/") else f"{environment.workspace}/{source}"
        name = str(entry.get("destination") or source.rstrip("/").rpartition("/")[2])
        if not await _exists(pod, source):
            continue
        destination = target / name if not (target / name).exists() else target / f"{number}-{name}"
        destination.parent.mkdir(parents=True, exist_ok=True)
        await pod.download(source, destination)
        await asyncio.to_thread(_remove_excluded, destination, tuple(map(str, entry["exclude"])))
        manifest.append({"source": source, "destination": destination.relative_to(target).as_posix()})
    (target / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")


def _step_artifacts(task: Task, step: TaskStep | None) -> tuple[Mapping[str, Any], ...]:
    where = f"{task.directory}/task.toml: steps"
    return tuple(entry for table in _step_tables(task, step) for entry in read_artifacts(TomlTable(table, where)))


def _step_tables(task: Task, step: TaskStep | None) -> Iterator[Mapping[str, Any]]:
    """Yield the step's table of task.toml, if there is a step."""
    yield from (table for table in task.config.get("steps", []) if step is not None and table["name"] == step.name)


async def _run_hooks(environment: TaskEnvironment, step: TaskStep | None) -> None:
    """Run the [[verifier.collect]] commands, which precede the collection."""
    tables = [environment.task.config.get("verifier", {})]
    tables += [table.get("verifier", {}) for table in _step_tables(environment.task, step)]
    for table in tables:
        for hook in table.get("collect", []):
            user = str(hook["user"]) if "user" in hook else None
            timeout = float(hook.get("timeout_sec", 60.0))
            await environment.pod.exec(hook["command"], cwd=environment.workspace, timeout=timeout, user=user)


async def _exists(pod: Pod, path: str) -> bool:
    try:
        return (await pod.stat(path)).kind != "other"
    except PodFileError:
        return False


def _remove_excluded(directory: Path, patterns: tuple[str, ...]) -> None:
    """Remove the files that match `exclude` patterns from a collected directory."""
    if not patterns or not directory.is_dir():
        return
    globs = Globs(patterns)
    for path in sorted(directory.rglob("*"), reverse=True):
        if globs.matches(path.relative_to(directory).as_posix()):
            if path.is_dir() and not path.is_symlink():
                if not any(path.iterdir()):
                    path.rmdir()
            else:
                path.unlink()
