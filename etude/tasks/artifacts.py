"""Collect a task's artifacts from the agent's pod into one directory with a manifest."""

import asyncio
import json
from pathlib import Path

from etude.globs import Globs
from etude.pods.pod import Pod, PodFileError
from etude.tasks.environment import TaskEnvironment
from etude.tasks.task import Artifact, TaskStep


async def collect_artifacts(environment: TaskEnvironment, step: TaskStep | None, target: Path) -> None:
    """Copy the task's artifacts and /logs/artifacts into a new directory with a manifest.json."""
    task, pod = environment.task, environment.pod
    for hook in (*task.collect, *(step.collect if step else ())):
        await pod.exec(hook.command, cwd=environment.workspace, timeout=hook.timeout_s, user=hook.user)
    target.mkdir(parents=True)
    manifest = []
    artifacts = (Artifact("/logs/artifacts", "artifacts"), *task.artifacts, *(step.artifacts if step else ()))
    for number, entry in enumerate(artifacts):
        source = entry.source if entry.source.startswith("/") else f"{environment.workspace}/{entry.source}"
        name = entry.destination or source.rstrip("/").rpartition("/")[2]
        if not await _exists(pod, source):
            continue
        destination = target / name if not (target / name).exists() else target / f"{number}-{name}"
        destination.parent.mkdir(parents=True, exist_ok=True)
        await pod.download(source, destination)
        await asyncio.to_thread(_remove_excluded, destination, entry.exclude)
        manifest.append({"source": source, "destination": destination.relative_to(target).as_posix()})
    (target / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")


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
