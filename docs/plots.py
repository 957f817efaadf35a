"""Draw the plots of docs/pretraining.md from the metrics of a run: `python docs/plots.py METRICS.jsonl OUT_PREFIX`.

This script needs matplotlib; no other code of the project does.
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

BLUE, RED, GREY = "#3566a8", "#c0504d", "#999999"


def main() -> None:
    records = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    prefix = sys.argv[2]
    loss_against_tokens(records, f"{prefix}-loss.svg")
    loss_by_position(records, f"{prefix}-positions.svg")


def loss_against_tokens(records: list[dict], out: str) -> None:
    steps = [r for r in records if r["stage"] == "pretrain" and "loss" in r]
    scores = [r for r in records if r["stage"] == "pretrain" and r.get("evaluation") and r["tokens"]]
    figure, axes = plt.subplots(figsize=(7, 3.6))
    axes.plot([r["tokens"] for r in steps], smooth([r["loss"] for r in steps]), color=GREY, lw=1, label="training loss")
    axes.plot([r["tokens"] for r in scores], [r["held_out_loss"] for r in scores], "o-", color=BLUE, label="held out")
    axes.set(xscale="log", xlabel="tokens", ylabel="nats per token", xlim=(2e6, None))
    ticks = [2e6, 5e6, 1e7, 2e7, 5e7]
    axes.set_xticks(ticks, [f"{tick / 1e6:g}M" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.legend(frameon=False)
    finish(figure, axes, out)


def loss_by_position(records: list[dict], out: str) -> None:
    scores = [r for r in records if r["stage"] == "extend" and r.get("loss_by_position")]
    figure, axes = plt.subplots(figsize=(7, 3.2))
    for record, color, label in ((scores[0], GREY, "before"), (scores[-1], RED, "after extend")):
        values = record["loss_by_position"]
        positions = [32 * (i + 0.5) / len(values) for i in range(len(values))]
        axes.plot(positions, values, "o-", color=color, label=label)
    axes.set(xlabel="position in the document, thousand tokens", ylabel="nats per token")
    axes.legend(frameon=False)
    finish(figure, axes, out)


def smooth(values: list[float], width: int = 25) -> list[float]:
    return [sum(values[max(0, i - width) : i + 1]) / len(values[max(0, i - width) : i + 1]) for i in range(len(values))]


def finish(figure, axes, out: str) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    main()
