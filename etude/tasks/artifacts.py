"""What a task says to collect from its pod after the agent, in one directory with a manifest."""

import asyncio
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from etude.pods.pod import Pod, PodFileError
from etude.tasks.environment import Ground
from etude.tasks.schema import Table, read_artifacts
from etude.tasks.task import Task, TaskStep
from etude.tasks.workspace import Globs


async def collect(ground: Ground, step: TaskStep | None, target: Path) -> None:
    """Copy what a task says to collect, and /logs/artifacts, into a new directory with a manifest.json."""
    task, pod = ground.task, ground.pod
    await _run_hooks(ground, step)
    target.mkdir(parents=True)
    entries = [{"source": "/logs/artifacts", "destination": "artifacts", "exclude": ()}]
    entries += [dict(entry) for entry in (*task.artifacts, *_step_artifacts(task, step))]
    manifest = []
    for number, entry in enumerate(entries):
        source = str(entry["source"])
        source = source if source.startswith("/") else f"{ground.workspace}/{source}"
        name = str(entry.get("destination") or source.rstrip("/").rpartition("/")[2])
        if not await _there(pod, source):
            continue
        place = target / name if not (target / name).exists() else target / f"{number}-{name}"
        place.parent.mkdir(parents=True, exist_ok=True)
        await pod.download(source, place)
        await asyncio.to_thread(_leave_out, place, tuple(map(str, entry["exclude"])))
        manifest.append({"source": source, "destination": place.relative_to(target).as_posix()})
    (target / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")


def _step_artifacts(task: Task, step: TaskStep | None) -> tuple[Mapping[str, Any], ...]:
    where = f"{task.directory}/task.toml: steps"
    return tuple(entry for table in _step_tables(task, step) for entry in read_artifacts(Table(table, where)))


def _step_tables(task: Task, step: TaskStep | None) -> Iterator[Mapping[str, Any]]:
    """What task.toml says of a step."""
    yield from (table for table in task.config.get("steps", []) if step is not None and table["name"] == step.name)


async def _run_hooks(ground: Ground, step: TaskStep | None) -> None:
    """The commands of [[verifier.collect]], before anything is collected."""
    tables = [ground.task.config.get("verifier", {})]
    tables += [table.get("verifier", {}) for table in _step_tables(ground.task, step)]
    for table in tables:
        for hook in table.get("collect", []):
            user = str(hook["user"]) if "user" in hook else None
            timeout = float(hook.get("timeout_sec", 60.0))
            await ground.pod.exec(hook["command"], cwd=ground.workspace, timeout=timeout, user=user)


async def _there(pod: Pod, path: str) -> bool:
    try:
        return (await pod.stat(path)).kind != "other"
    except PodFileError:
        return False


def _leave_out(place: Path, patterns: tuple[str, ...]) -> None:
    """Remove what `exclude` names from a collected tree."""
    if not patterns or not place.is_dir():
        return
    globs = Globs(patterns)
    for path in sorted(place.rglob("*"), reverse=True):
        if globs.cover(path.relative_to(place).as_posix()):
            if path.is_dir() and not path.is_symlink():
                if not any(path.iterdir()):
                    path.rmdir()
            else:
                path.unlink()
