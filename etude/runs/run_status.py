"""The progress of a run in two lines: finished stages, the latest event of the current one, and the active process."""

import time
from datetime import datetime
from pathlib import Path

from etude.files import lock_holder
from etude.runs.run import Run


def run_status(path: Path, now: float | None = None) -> list[str]:
    """Return the progress of a run, which may be active, as lines to print."""
    run, now = Run.read(path), time.time() if now is None else now
    name, stages = run.settings.name, run.settings.stages
    left = [stage for stage in stages if not run.stage_done(stage)]
    done = ", ".join(stage for stage in stages if stage not in left)
    if not left:
        return [f"{name}: {done} done; nothing is left to do"]
    parts = [f"{done} done"] if done else []
    parts.append(f"in {left[0]}{_latest_event(run, left[0], now)}")
    parts += [f"{', '.join(left[1:])} to come"] if left[1:] else []
    holder = lock_holder(run.layout.lock)
    activity = f"running: {holder}" if holder else "not running; `etude run` with --resume continues it"
    return [f"{name}: {'; '.join(parts)}", activity]


def _latest_event(run: Run, stage: str, now: float) -> str:
    """Return the last step or artefact of a stage, and its age."""
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
