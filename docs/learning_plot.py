"""The learning curves of docs/rl.md: `python docs/learning_plot.py OUT.svg RUN_OR_METRICS...`, one for each seed.

Beside OUT.svg it leaves OUT.jsonl, the lines of metrics that the picture is made of.
"""

import json
import sys
from pathlib import Path

from etude.evaluation.plot import Axis, Bars, Line, Panel, draw

SETS = ("fresh", "unseen")


def main() -> None:
    out, *places = map(Path, sys.argv[1:])
    runs = [records(place) for place in places]
    rewards = [
        Line(f"seed {seed}", [r["step"] for r in run if "reward" in r], [r["solved"] for r in run if "reward" in r])
        for seed, run in enumerate(runs)
    ]
    panels = [Panel(Axis("step"), Axis("solved", low=0, high=1, percent=True), rewards, "Rollouts of each step")]
    for name in SETS:
        words = ("before", "after")
        bars = [
            Bars(
                word,
                [run[at][f"set/{name}/solved"] for run in map(measured, runs)],
                [max(0.0, run[at][f"set/{name}/solved_low"]) for run in map(measured, runs)],
                [run[at][f"set/{name}/solved_high"] for run in map(measured, runs)],
            )
            for at, word in zip((0, -1), words, strict=True)
        ]
        seeds = [f"seed {seed}" for seed in range(len(runs))]
        panels.append(
            Panel(Axis(""), Axis("solved", low=0, high=1, percent=True), bars, f"{name} tasks", categories=seeds)
        )
    title = "Reinforcement learning on two CPU cores"
    out.write_text(draw(panels, title=title, description="Success of rollouts by step, and before and after."))
    kept = [{**r, "seed": seed} for seed, run in enumerate(runs) for r in run]
    out.with_suffix(".jsonl").write_text("".join(json.dumps(r) + "\n" for r in kept))


def records(place: Path) -> list[dict]:
    lines = (place / "metrics.jsonl" if place.is_dir() else place).read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["stage"] == "rl"]


def measured(run: list[dict]) -> list[dict]:
    return [record for record in run if record.get("evaluation")]


if __name__ == "__main__":
    main()
