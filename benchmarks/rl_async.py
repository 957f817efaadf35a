"""Asynchronous against synchronous reinforcement learning: the same recipe, model, prompts and number of samples.

    python benchmarks/rl_async.py recipes/smollm2-rl.toml --out /tmp/async --set rl.steps=12

The two runs differ in one number: `rl.max_staleness`. At 0 rollouts of a step begin when every sampler has the weights
of the step before, so that trainer and samplers take turns. The clock runs from the moment the samplers are ready to
the end of the last step; loading models and measuring are outside.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="directory for the two runs")
    parser.add_argument("--staleness", type=int, default=2, help="of the asynchronous run")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    asked = parser.parse_args()
    rows = []
    for name, staleness in (("synchronous", 0), ("asynchronous", asked.staleness)):
        overrides = [f"rl.max_staleness={staleness}", *asked.overrides]
        command = [sys.executable, "-m", "etude.cli", "rl", str(asked.recipe), "--out", str(asked.out / name)]
        subprocess.run([*command, *(word for each in overrides for word in ("--set", each))], check=True)
        rows.append((name, figures(asked.out / name)))
    print(f"{'':14}{'seconds':>9}{'samples':>9}{'samples/s':>11}{'trainer waits':>15}{'samplers idle':>15}{'stale':>7}")
    for name, found in rows:
        print(
            f"{name:14}{found['seconds']:9.1f}{found['samples']:9d}{found['samples'] / found['seconds']:11.2f}"
            f"{found['waited']:15.0%}{found['idle']:15.0%}{found['staleness']:7.2f}"
        )
    print(f"ratio {rows[0][1]['seconds'] / rows[1][1]['seconds']:.2f}x")


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
