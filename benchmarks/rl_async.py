"""Asynchronous against synchronous reinforcement learning: the same model, prompts and number of samples.

    python benchmarks/rl_async.py --model base/nano --out runs/async --steps 10

The two runs differ in one number, `rl.max_staleness`. At 0 rollouts of a step begin when every sampler has the weights
of the step before, so that trainer and samplers take turns. The clock runs from the moment the samplers are ready to
the end of the last step; loading models is outside, and nothing is measured on the way.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import tomli_w
import torch

from etude.tasks.nano.source import generate_nano


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="directory of a model that knows the harness")
    parser.add_argument("--out", type=Path, required=True, help="directory for the two runs")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--staleness", type=int, default=2, help="of the asynchronous run")
    parser.add_argument(
        "--in-flight", type=int, default=96, help="rollouts at once; more than these would grow too old"
    )
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    asked = parser.parse_args()
    recipe = write_recipe(asked.out, asked.model, asked.steps, asked.in_flight)
    rows = []
    # the asynchronous one first: whoever is first compiles the kernels
    for name, staleness in (("asynchronous", asked.staleness), ("synchronous", 0)):
        overrides = [f"rl.max_staleness={staleness}", *asked.overrides]
        command = [sys.executable, "-m", "etude.cli", "rl", str(recipe), "--out", str(asked.out / name)]
        subprocess.run([*command, *(word for each in overrides for word in ("--set", each))], check=True)
        rows.append((name, figures(asked.out / name)))
    print(f"{'':14}{'seconds':>9}{'samples':>9}{'samples/s':>11}{'trainer waits':>15}{'samplers idle':>15}{'stale':>7}")
    for name, found in rows:
        print(
            f"{name:14}{found['seconds']:9.1f}{found['samples']:9d}{found['samples'] / found['seconds']:11.2f}"
            f"{found['waited']:15.0%}{found['idle']:15.0%}{found['staleness']:7.2f}"
        )
    print(f"ratio {rows[1][1]['seconds'] / rows[0][1]['seconds']:.2f}x")


def write_recipe(out: Path, model: Path, steps: int, in_flight: int) -> Path:
    """A recipe of one stage, and its tasks beside it."""
    rl = {
        "model": str(model.resolve()),
        "tasks": str(out.resolve() / "tasks"),
        "steps": steps,
        "group_size": 8,
        "groups_per_step": 8,
        "in_flight": in_flight,
        "workers": max(1, min(4, (os.cpu_count() or 1) // 4)),
        "learning_rate": 1e-6,
        "precision": "bfloat16" if torch.cuda.is_available() else "float32",
        "length": 4096,
        "window": 2048,
        "checkpoint_every": steps,
        "checkpoint_rollouts_s": 0.0,
        "environment": {"tools": ["read_file", "search_replace", "run_terminal_cmd"], "brief": True},
        "budget": {"turns": 10, "answer": 200},
        "summaries": {"mode": "off"},
    }
    generate_nano(out / "tasks", 8 * steps + 32, "train", 0, (1, 2, 3))
    (out / "recipe.toml").write_text(tomli_w.dumps({"name": "async", "stages": ["rl"], "rl": rl}))
    return out / "recipe.toml"


def figures(run: Path) -> dict[str, float]:
    """What a run's own metrics say."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["stage"] == "rl" and not line.get("evaluation")]
    facts = json.loads((run / "state.json").read_text())["stages"]["rl"]["facts"]
    return {
        "seconds": steps[-1]["time"] - facts["began"],
        "samples": sum(line["rollouts"] for line in steps),
        "waited": sum(line["waited_s"] for line in steps) / sum(line["wall_s"] for line in steps),
        "idle": facts.get("samplers_idle_share", float("nan")),
        "staleness": sum(line.get("staleness", 0.0) for line in steps) / len(steps),
    }


if __name__ == "__main__":
    main()
