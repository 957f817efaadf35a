"""How far a run is, in two lines: stages that are done, what was last heard of the one under way, who is at work."""

import time
from datetime import datetime
from pathlib import Path

from etude.files import holder
from etude.runs.run import Run


def standing(path: Path, now: float | None = None) -> list[str]:
    """Lines for people, of a run that may be going on."""
    run, now = Run.read(path), time.time() if now is None else now
    left = [stage for stage in run.recipe.stages if not run.stage_done(stage)]
    done = ", ".join(stage for stage in run.recipe.stages if stage not in left)
    if not left:
        return [f"{run.recipe.name}: {done} done; nothing is left to do"]
    parts = [f"{done} done"] if done else []
    parts.append(f"in {left[0]}{_heard(run, left[0], now)}")
    parts += [f"{', '.join(left[1:])} to come"] if left[1:] else []
    who = holder(run.path / "lock")
    work = f"{who} is at work on it" if who else "nobody is at work on it; `etude run` with --resume goes on"
    return [f"{run.recipe.name}: {'; '.join(parts)}", work]


def _heard(run: Run, stage: str, now: float) -> str:
    """The last step or artefact of a stage, and how long ago that was."""
    if records := run.metrics(stage):
        return f" (step {records[-1]['step']}, {_ago(now - records[-1]['time'])})"
    if made := [artefact for artefact in run.artefacts() if artefact.stage == stage]:
        return f" ({made[-1].name}, {_ago(now - datetime.fromisoformat(made[-1].created).timestamp())})"
    return ""


def _ago(seconds: float) -> str:
    for unit, size in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"
