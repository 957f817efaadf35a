"""Asynchronous against synchronous reinforcement learning: the same model, prompts and number of samples.

    python benchmarks/rl_async.py --model base/nano --out runs/async --steps 10     # nano tasks, 64 sessions a step
    python benchmarks/rl_async.py --run runs/smollm2 --out runs/async --steps 10    # a run's own recipe and tasks

The two runs differ in one number, `rl.max_staleness`. At 0 rollouts of a step begin when every sampler has the weights
of the step before, so that trainer and samplers take turns. The clock runs from the moment the samplers are ready to
the end of the last step; loading models is outside, and nothing is measured on the way. On a GPU a small run before
them compiles the kernels for both.
"""

import argparse
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import tomli_w
import torch

from etude.errors import EtudeError
from etude.rl.orchestrator import task_directory
from etude.runs.run import Run
from etude.system.cores import usable_cores
from etude.train.stages import origin_of
from etude_nano.source import generate_nano

WARM_UP = ("rl.steps=1", "rl.groups_per_step=2", "rl.in_flight=16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", type=Path, help="directory of a model that knows the harness")
    source.add_argument("--run", type=Path, help="a run whose stage rl this is, with the weights it began from")
    parser.add_argument("--out", type=Path, required=True, help="directory for the two runs")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--staleness", type=int, help="of the asynchronous run; else 8, or what the run's recipe says")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    asked = parser.parse_args()
    if asked.steps < 2 or (asked.staleness is not None and asked.staleness < 1):
        parser.error("expected --steps of at least 2, and --staleness of at least 1")
    if (asked.out / "state.json").exists():
        parser.error(f"--out {asked.out} is a run itself; name a directory for the two")
    try:
        compare(asked)
    except EtudeError as error:
        parser.error(str(error))
    except subprocess.CalledProcessError as error:  # it has said why
        sys.exit(error.returncode)


def compare(asked: argparse.Namespace) -> None:
    table = table_of(asked.run, asked.steps) if asked.run else small_table(asked.out, asked.model, asked.steps)
    asked.out.mkdir(parents=True, exist_ok=True)
    recipe = asked.out / "recipe.toml"
    recipe.write_text(tomli_w.dumps({"name": "async", "stages": ["rl"], "rl": table}))
    allowed = table["max_staleness"] if asked.staleness is None else asked.staleness
    if torch.cuda.is_available():
        play(recipe, asked.out / "first", [*asked.overrides, *WARM_UP])
    rows = []
    for name, staleness in (("asynchronous", allowed), ("synchronous", 0)):
        ahead = min(staleness, table.get("ahead", staleness / 2))
        own = [f"rl.max_staleness={staleness}", f"rl.ahead={ahead}"]
        play(recipe, asked.out / name, [*own, *asked.overrides] if staleness else [*asked.overrides, *own])
        rows.append((name, figures(asked.out / name)))
    print(f"{'':14}{'seconds':>9}{'samples':>9}{'samples/s':>11}{'trainer waits':>15}{'samplers idle':>15}{'stale':>7}")
    for name, found in rows:
        print(
            f"{name:14}{found['seconds']:9.1f}{found['samples']:9d}{found['samples'] / found['seconds']:11.2f}"
            f"{found['waited']:15.0%}{found['idle']:15.0%}{found['staleness']:7.2f}"
        )
    print(f"ratio {rows[1][1]['seconds'] / rows[0][1]['seconds']:.2f}x")


def play(recipe: Path, out: Path, overrides: list[str]) -> None:
    command = [sys.executable, "-m", "etude.cli", "rl", str(recipe), "--out", str(out)]
    subprocess.run([*command, *(word for each in overrides for word in ("--set", each))], check=True)


def table_of(path: Path, steps: int) -> dict[str, Any]:
    """The table `rl` of a run's recipe, with the weights and tasks it had there; nothing is measured on the way."""
    run = Run.read(path)
    table = tomllib.loads((path / "recipe.toml").read_text())["rl"]
    table.pop("evaluation", None)
    model = table.get("model") or str(origin_of(run, "rl").path.resolve())
    tasks = str(task_directory(run, table["tasks"], "rl.tasks").resolve())
    return table | {"model": model, "tasks": tasks, "steps": steps, "checkpoint_every": steps}


def small_table(out: Path, model: Path, steps: int) -> dict[str, Any]:
    """Nano tasks, made beside it."""
    generate_nano(out / "tasks", 8 * steps + 32, "train", 0, (1, 2, 3))
    return {
        "model": str(model.resolve()),
        "tasks": str(out.resolve() / "tasks"),
        "steps": steps,
        "group_size": 8,
        "groups_per_step": 8,
        "in_flight": 128,
        "ahead": 2,
        "max_staleness": 8,
        "workers": max(1, min(4, usable_cores() // 4)),
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
