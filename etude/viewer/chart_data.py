"""The data of a run's charts, from its metrics, downsampled where there is more than a chart can show."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from etude.evaluation.statistics import bootstrap_interval
from etude.viewer.catalogue import RolloutGroup
from etude.viewer.run_reader import JsonObject, as_number

MAX_POINTS = 240  # of a curve
MAX_STEPS = 600  # RL steps shown one by one; more are averaged in buckets
HIDDEN_METRICS = ("told", "busy_s", "made_tokens")  # counters of samplers


# ------------------------------------------------------------------------------------------- training on text


def training_curves(records: Iterable[JsonObject], order: Sequence[str]) -> list[JsonObject]:
    """Return the loss curve of every stage that has one, in the order of the pipeline."""
    stages: defaultdict[str, list[JsonObject]] = defaultdict(list)
    for record in records:
        if record.get("stage") != "rl" and as_number(record.get("tokens")) is not None:
            stages[str(record.get("stage"))].append(record)
    known = [*order, *(name for name in stages if name not in order)]
    return [curve for name in known if name in stages and (curve := training_curve(name, stages[name]))]


def training_curve(stage: str, records: Sequence[JsonObject]) -> JsonObject | None:
    """Return the curve of one stage; None if there is nothing to draw."""
    steps = [record for record in records if not record.get("evaluation")]
    metric = _curve_metric(stage, steps)
    if metric is None:
        return None
    pairs = [(as_number(record.get("tokens")), as_number(record.get(metric))) for record in steps]
    points = [(tokens, loss) for tokens, loss in pairs if tokens and loss is not None]
    if not points:
        return None
    held_out_key = "held_out_overlap" if metric.endswith("overlap") else "held_out_loss"
    held_out = [
        (as_number(record.get("tokens")), as_number(record.get(held_out_key)))
        for record in records
        if record.get("evaluation")
    ]
    last = steps[-1]
    rates = [rate for record in steps if (rate := as_number(record.get("tokens_per_second"))) is not None]
    times = [time for record in records if (time := as_number(record.get("time"))) is not None]
    return {
        "stage": stage,
        "measure": metric,
        "steps": len(steps),
        "tokens": as_number(last.get("tokens")),
        "rate": float(np.median(rates)) if rates else None,
        "seconds": max(times) - min(times) if times else None,
        "curve": downsample(points),
        "held_out": [[tokens, loss] for tokens, loss in held_out if tokens is not None and loss is not None],
        "by_position": _by_position(records),
    }


def _curve_metric(stage: str, steps: Sequence[JsonObject]) -> str | None:
    """Return the metric of a stage's curve: its loss or, if only draft (MTP) layers are trained, the acceptance rate of
    the first one, or its divergence in runs that did not log the rate."""
    names = {name for record in steps for name in record}
    drafts = [name for end in ("_overlap", "_kl", "_tv") for name in sorted(names) if name.endswith(end)]
    if drafts and (stage == "mtp" or "loss" not in names):
        return drafts[0]
    return "loss" if "loss" in names else None


def _by_position(records: Sequence[JsonObject]) -> list[list[float]]:
    """Return the first and the last held-out loss by position in the context window."""
    found = [losses for record in records if isinstance(losses := record.get("loss_by_position"), list) and losses]
    ends = [*found[:1], *found[1:][-1:]]
    return [[value for loss in losses if (value := as_number(loss)) is not None] for losses in ends]


def downsample(points: Sequence[tuple[float, float]]) -> JsonObject:
    """Return a curve over log x: the mean of the points in every bin, and of their running means."""
    low, high = math.log(points[0][0]), math.log(max(points[-1][0], points[0][0] * (1 + 1e-9)))
    bins: defaultdict[int, list[tuple[float, float, float]]] = defaultdict(list)
    for (x, y), smoothed in zip(points, _smoothed([y for _, y in points]), strict=True):
        position = (math.log(x) - low) / (high - low)
        bins[min(MAX_POINTS - 1, max(0, int(position * MAX_POINTS)))].append((x, y, smoothed))
    columns = [
        [sum(values) / len(inside) for values in zip(*inside, strict=True)] for _, inside in sorted(bins.items())
    ]
    names = ("x", "raw", "mean")
    return {name: [_round(column[at]) for column in columns] for at, name in enumerate(names)}


def _smoothed(values: Sequence[float]) -> list[float]:
    """Return running means over about the last tenth of the steps: a constant width on a logarithmic axis."""
    total = weight = 0.0
    found = []
    for at, value in enumerate(values):
        keep = at / (at + 10)
        total, weight = keep * total + value, keep * weight + 1
        found.append(total / weight)
    return found


# ------------------------------------------------------------------------------------------- reinforcement learning


def step_columns(records: Iterable[JsonObject], groups: Iterable[RolloutGroup]) -> JsonObject:
    """Return the metrics of all RL steps as columns, gaps as None; `each` is the number of steps per point."""
    lines = [record for record in records if record.get("stage") == "rl" and not record.get("evaluation")]
    lines = [line for line in lines if as_number(line.get("step")) is not None]
    bounds = reward_bounds(groups)
    lines = [{**line, **bounds.get(int(line["step"]), {})} for line in lines]
    names = sorted({name for line in lines for name, value in line.items() if as_number(value) is not None})
    names = [name for name in names if name.rpartition("/")[2] not in HIDDEN_METRICS]
    steps_per_point = max(1, math.ceil(len(lines) / MAX_STEPS))
    buckets = [lines[at : at + steps_per_point] for at in range(0, len(lines), steps_per_point)]
    columns = {name: [_bucket(name, bucket) for bucket in buckets] for name in names}
    alarms = [{"step": line["step"], "messages": line["alarms"]} for line in lines if line.get("alarms")]
    return {"columns": columns, "each": steps_per_point, "alarms": alarms[-20:]}


def _bucket(name: str, lines: Sequence[JsonObject]) -> float | None:
    if name in ("step", "time", "version"):
        return as_number(lines[-1].get(name))
    values = [value for line in lines if (value := as_number(line.get(name))) is not None]
    return _round(sum(values) / len(values)) if values else None


def reward_bounds(groups: Iterable[RolloutGroup]) -> dict[int, dict[str, float]]:
    """Return a bootstrap interval of each step's mean reward over groups: rollouts of one group are not independent."""
    means: defaultdict[int, list[float]] = defaultdict(list)
    for group in groups:
        totals = [row.total for row in group.rows if row.total is not None]
        if group.set == "training" and group.step is not None and totals:
            means[group.step].append(sum(totals) / len(totals))
    bounds = {step: _interval(tuple(values)) for step, values in means.items()}
    return {step: {"reward_low": both[0], "reward_high": both[1]} for step, both in bounds.items() if both}


_INTERVAL_CACHE: dict[tuple[float, ...], tuple[float, float] | None] = {}


def _interval(values: tuple[float, ...]) -> tuple[float, float] | None:
    """Return the bootstrap interval, cached: steps do not change, and an open page asks every few seconds."""
    if values not in _INTERVAL_CACHE:
        if len(_INTERVAL_CACHE) > 20_000:
            _INTERVAL_CACHE.clear()
        _INTERVAL_CACHE[values] = bootstrap_interval(np.array(values), resamples=500)
    return _INTERVAL_CACHE[values]


def evaluations(records: Iterable[JsonObject]) -> list[JsonObject]:
    """Return the validations in the order of their steps."""
    return _evaluations(records).get("", [])


def benchmarks(records: Iterable[JsonObject]) -> dict[str, list[JsonObject]]:
    """Return the evaluations on further task sets by the name of the set, in the order of their steps."""
    return {name: found for name, found in sorted(_evaluations(records).items()) if name}


def _evaluations(records: Iterable[JsonObject]) -> dict[str, list[JsonObject]]:
    """Return the evaluations during RL by the benchmark that they are of; "": validation."""
    sets: defaultdict[str, dict[int, JsonObject]] = defaultdict(dict)
    for record in records:
        step = as_number(record.get("step"))
        if record.get("stage") == "rl" and record.get("evaluation") and step is not None:
            numbers = {name: as_number(value) for name, value in record.items()}
            rounded = {name: _round(value) for name, value in numbers.items() if value is not None}
            sets[str(record.get("benchmark", ""))][int(step)] = rounded
    return {name: [found[step] for step in sorted(found)] for name, found in sets.items()}


def _round(value: float) -> float:
    """Round to six digits, more than a chart can show."""
    return float(f"{value:.6g}") if abs(value) < 1e6 else value


def task_histories(groups: Iterable[RolloutGroup]) -> dict[str, list[JsonObject]]:
    """Return the groups of every task with their results, oldest first."""
    found: defaultdict[str, list[JsonObject]] = defaultdict(list)
    for group in groups:
        solved = [row.solved for row in group.rows if row.solved is not None]
        totals = [row.total for row in group.rows if row.total is not None]
        found[group.task].append(
            {
                "set": group.set,
                "group": group.progress.id,
                "step": group.step,
                "size": group.progress.size,
                "ready": group.progress.ready,
                "dropped": group.progress.dropped,
                "solved": sum(solved) if solved else (0 if group.rows else None),
                "reward": sum(totals) / len(totals) if totals else None,
            }
        )
    return {task: sorted(history, key=_step_order) for task, history in found.items()}


def _step_order(entry: Mapping[str, object]) -> tuple[bool, float]:
    step = as_number(entry["step"])
    return (step is None, step or 0.0)
