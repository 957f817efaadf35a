"""How often each task set was scored in a run: one line in `scorings.jsonl` for each model and set.

A line is written before the first session of a scoring starts. A scoring that is interrupted and continued is one; the
file is never rewritten, so repeating an evaluation in the same run directory, with any recipe, counts again.
"""

import json
import time
from collections import Counter
from typing import Any

from etude.runs.layout import RunLayout
from etude.runs.run import Run


def record_scoring(run: Run, task_set: str, model: str, key: str) -> None:
    """Record that a model is scored on a task set; `key` identifies the scoring: continuing it is not another."""
    if any(line["set"] == task_set and line["key"] == key for line in read_scorings(run.layout)):
        return
    line = {"time": round(time.time(), 3), "set": task_set, "model": model, "key": key}
    with run.layout.scorings.open("ab+") as file:
        file.seek(max(0, file.tell() - 1))
        torn = file.read() not in (b"", b"\n")
        file.write(b"\n" * torn + json.dumps(line).encode() + b"\n")


def read_scorings(layout: RunLayout) -> list[dict[str, Any]]:
    """Return all scorings, oldest first; a line that a kill has torn was followed by no session."""
    text = layout.scorings.read_text(encoding="utf-8") if layout.scorings.exists() else ""
    found = []
    for line in text.splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def count_scorings(layout: RunLayout) -> dict[str, int]:
    """Return how often each task set was scored, by the stage `control` too."""
    lines = [*read_scorings(layout), *read_scorings(RunLayout(layout.control))]
    return dict(Counter(str(line["set"]) for line in lines))
