"""The curves of docs/rl.md on a GPU: `python docs/held_out_plot.py OUT.svg LABEL=RUN_OR_METRICS...`, one for each run.

Beside OUT.svg it leaves OUT.jsonl, the lines of metrics that the picture is made of, without what they say of parts.
"""

import json
import sys
from pathlib import Path

from etude.evaluation.plot import Axis, Line, Panel, draw

BEST = "best/16"
LEFT_OUT = (
    "category/",
    "reward/",
    "errors/",
    "habit/",
    "tokens/",
    "seconds/",
    "ending/",
    "sampler-",
    "best_score/",
    "set/",
)


def main() -> None:
    out, places = Path(sys.argv[1]), dict(word.split("=", 1) for word in sys.argv[2:])
    runs = {label: records(Path(place)) for label, place in places.items()}
    rollouts = [line(label, run, "solved", evaluation=False) for label, run in runs.items()]
    average = [line(label, run, "solved") for label, run in runs.items()]
    best = [line(label, run, BEST) for label, run in runs.items()]
    success = Axis("solved", low=0, high=1, percent=True)
    panels = [
        Panel(Axis("step"), success, rollouts, "Rollouts of each step"),
        Panel(Axis("step"), success, average, "Held-out tasks, average"),
        Panel(Axis("step"), success, best, "Held-out tasks, best of 16"),
    ]
    title = "Reinforcement learning of SmolLM2-135M on one GPU"
    out.write_text(draw(panels, title=title, description="Success of rollouts by step, and on held-out tasks."))
    kept = [{"run": label, **short(record)} for label, run in runs.items() for record in run]
    out.with_suffix(".jsonl").write_text("".join(json.dumps(record) + "\n" for record in kept))


def records(place: Path) -> list[dict]:
    lines = (place / "metrics.jsonl" if place.is_dir() else place).read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["stage"] == "rl"]


def line(label: str, run: list[dict], key: str, evaluation: bool = True) -> Line:
    found = [record for record in run if bool(record.get("evaluation")) == evaluation]
    steps, values = [record["step"] for record in found], [record[key] for record in found]
    if not evaluation:
        return Line(label, steps, values)
    bounds = ([max(0.0, record[f"{key}_{side}"]) for record in found] for side in ("low", "high"))
    return Line(label, steps, values, *bounds, style="both")


def short(record: dict) -> dict:
    kept = {key: value for key, value in record.items() if not key.startswith(LEFT_OUT) and key != "alarms"}
    return {key: round(value, 5) if isinstance(value, float) else value for key, value in kept.items()}


if __name__ == "__main__":
    main()
