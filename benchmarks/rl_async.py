"""Compare asynchronous with synchronous reinforcement learning: the same model, prompts and number of samples.

    python benchmarks/rl_async.py --model base/nano --out runs/async --steps 10     # nano tasks, 64 sessions a step
    python benchmarks/rl_async.py --run runs/smollm2 --out runs/async --steps 10    # a run's own recipe and tasks

The two runs differ in `rl.max_staleness` and the `rl.prefetch_steps` that it allows. At 0 the rollouts of a step start
when every sampler has the weights of the step before, so that trainer and samplers alternate. The clock runs from the
moment the samplers are ready to the end of the last step, without loading models, and there are no evaluations. On a
GPU a small run before them compiles the kernels for both.
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
from etude.train.stages import initial_weights
from etude_nano.source import generate_nano

WARM_UP = ("rl.steps=1", "rl.groups_per_step=2", "rl.in_flight=16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", type=Path, help="directory of a model trained on the harness format")
    source.add_argument("--run", type=Path, help="a run whose stage rl is repeated, from the same weights")
    parser.add_argument("--out", type=Path, required=True, help="directory for the two runs")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument(
        "--staleness", type=int, help="of the asynchronous run; default: 8, or the value of the run's recipe"
    )
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    if arguments.steps < 2 or (arguments.staleness is not None and arguments.staleness < 1):
        parser.error("expected --steps of at least 2, and --staleness of at least 1")
    if (arguments.out / "state.json").exists():
        parser.error(f"--out {arguments.out} is itself a run; name a directory for the two runs")
    try:
        compare(arguments)
    except EtudeError as error:
        parser.error(str(error))
    except subprocess.CalledProcessError as error:  # the command has printed the reason
        sys.exit(error.returncode)


def compare(arguments: argparse.Namespace) -> None:
    table = (
        run_table(arguments.run, arguments.steps)
        if arguments.run
        else nano_table(arguments.out, arguments.model, arguments.steps)
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    recipe = arguments.out / "recipe.toml"
    recipe.write_text(tomli_w.dumps({"name": "async", "stages": ["rl"], "rl": table}))
    max_staleness = table["max_staleness"] if arguments.staleness is None else arguments.staleness
    if torch.cuda.is_available():
        run_rl(recipe, arguments.out / "first", [*arguments.overrides, *WARM_UP])
    rows = []
    for name, staleness in (("asynchronous", max_staleness), ("synchronous", 0)):
        prefetch = min(staleness, table.get("prefetch_steps", staleness / 2))
        own = [f"rl.max_staleness={staleness}", f"rl.prefetch_steps={prefetch}"]
        run_rl(
            recipe, arguments.out / name, [*own, *arguments.overrides] if staleness else [*arguments.overrides, *own]
        )
        rows.append((name, read_figures(arguments.out / name)))
    print(f"{'':14}{'seconds':>9}{'samples':>9}{'samples/s':>11}{'trainer waits':>15}{'samplers idle':>15}{'stale':>7}")
    for name, found in rows:
        print(
            f"{name:14}{found['seconds']:9.1f}{found['samples']:9d}{found['samples'] / found['seconds']:11.2f}"
            f"{found['waited']:15.0%}{found['idle']:15.0%}{found['staleness']:7.2f}"
        )
    print(f"ratio {rows[1][1]['seconds'] / rows[0][1]['seconds']:.2f}x")


def run_rl(recipe: Path, out: Path, overrides: list[str]) -> None:
    command = [sys.executable, "-m", "etude.cli", "rl", str(recipe), "--out", str(out)]
    subprocess.run([*command, *(word for each in overrides for word in ("--set", each))], check=True)


def run_table(path: Path, steps: int) -> dict[str, Any]:
    """Return the table `rl` of a run's recipe with the weights and tasks of that run, without evaluations."""
    run = Run.read(path)
    table: dict[str, Any] = tomllib.loads((path / "recipe.toml").read_text())["rl"]
    model = table.get("model") or str(initial_weights(run, "rl").path.resolve())
    tasks = str(task_directory(run, table["tasks"], "rl.tasks").resolve())
    return table | {"model": model, "tasks": tasks, "steps": steps, "checkpoint_every": steps}


def nano_table(out: Path, model: Path, steps: int) -> dict[str, Any]:
    """Generate nano tasks in `out`; return a table `rl` that trains on them."""
    generate_nano(out / "tasks", 8 * steps + 32, "train", 0, (1, 2, 3))
    return {
        "model": str(model.resolve()),
        "tasks": str(out.resolve() / "tasks"),
        "steps": steps,
        "group_size": 8,
        "groups_per_step": 8,
        "in_flight": 128,
        "prefetch_steps": 2,
        "max_staleness": 8,
        "workers": max(1, min(4, usable_cores() // 4)),
        "learning_rate": 1e-6,
        "precision": "bfloat16" if torch.cuda.is_available() else "float32",
        "length": 4096,
        "window": 2048,
        "checkpoint_every": steps,
        "checkpoint_rollouts_s": 0.0,
        "tool_set": {"tools": ["read_file", "search_replace", "run_terminal_cmd"], "short_system_prompt": True},
        "budget": {"turns": 10, "max_turn_tokens": 200},
        "summaries": {"mode": "off"},
    }


def read_figures(run: Path) -> dict[str, float]:
    """Return seconds, samples and idle shares from a run's metrics and facts."""
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
