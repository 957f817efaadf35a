"""The numbers behind a run's charts, from its lines of metrics: thinned where there are more than a chart can show."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from etude.evaluation.held_out import interval
from etude.viewer.catalogue import Group
from etude.viewer.run_reader import Facts, number

POINTS = 240  # of a curve
STEPS = 600  # of reinforcement learning shown one by one; of more, means of neighbours
NOT_SHOWN = ("told", "busy_s", "made_tokens")  # of a sampler: they only ever grow


# ------------------------------------------------------------------------------------------- training on text


def training_curves(records: Iterable[Facts], order: Sequence[str]) -> list[Facts]:
    """Loss against tokens of every stage that has one, in the order of the pipeline."""
    stages: defaultdict[str, list[Facts]] = defaultdict(list)
    for record in records:
        if record.get("stage") != "rl" and number(record.get("tokens")) is not None:
            stages[str(record.get("stage"))].append(record)
    known = [*order, *(name for name in stages if name not in order)]
    return [curve for name in known if name in stages and (curve := training_curve(name, stages[name]))]


def training_curve(stage: str, records: Sequence[Facts]) -> Facts | None:
    """One stage; None when nothing of it can be drawn."""
    steps = [record for record in records if not record.get("evaluation")]
    measure = _measure(stage, steps)
    if measure is None:
        return None
    pairs = [(number(record.get("tokens")), number(record.get(measure))) for record in steps]
    points = [(tokens, loss) for tokens, loss in pairs if tokens and loss is not None]
    if not points:
        return None
    tested = "held_out_overlap" if measure.endswith("overlap") else "held_out_loss"
    held_out = [
        (number(record.get("tokens")), number(record.get(tested))) for record in records if record.get("evaluation")
    ]
    last = steps[-1]
    rates = [rate for record in steps if (rate := number(record.get("tokens_per_second"))) is not None]
    times = [time for record in records if (time := number(record.get("time"))) is not None]
    return {
        "stage": stage,
        "measure": measure,
        "steps": len(steps),
        "tokens": number(last.get("tokens")),
        "rate": float(np.median(rates)) if rates else None,
        "seconds": max(times) - min(times) if times else None,
        "curve": thin(points),
        "held_out": [[tokens, loss] for tokens, loss in held_out if tokens is not None and loss is not None],
        "by_position": _by_position(records),
    }


def _measure(stage: str, steps: Sequence[Facts]) -> str | None:
    """What a stage changes: its loss or, where only the layers that draft are trained, how often a draft of the first
    would be accepted; their divergence where that was not kept."""
    names = {name for record in steps for name in record}
    drafts = [name for end in ("_overlap", "_kl", "_tv") for name in sorted(names) if name.endswith(end)]
    if drafts and (stage == "mtp" or "loss" not in names):
        return drafts[0]
    return "loss" if "loss" in names else None


def _by_position(records: Sequence[Facts]) -> list[list[float]]:
    """The loss by place in the window as it was measured first, and last if that was another time."""
    found = [each for record in records if isinstance(each := record.get("loss_by_position"), list) and each]
    ends = [*found[:1], *found[1:][-1:]]
    return [[value for each in end if (value := number(each)) is not None] for end in ends]


def thin(points: Sequence[tuple[float, float]]) -> Facts:
    """A curve over log x: the points of every bin together, and a mean over the steps before that moves along."""
    low, high = math.log(points[0][0]), math.log(max(points[-1][0], points[0][0] * (1 + 1e-9)))
    bins: defaultdict[int, list[tuple[float, float, float]]] = defaultdict(list)
    for (x, y), calm in zip(points, _calmed([y for _, y in points]), strict=True):
        place = (math.log(x) - low) / (high - low)
        bins[min(POINTS - 1, max(0, int(place * POINTS)))].append((x, y, calm))
    columns = [[sum(each) / len(inside) for each in zip(*inside, strict=True)] for _, inside in sorted(bins.items())]
    names = ("x", "raw", "mean")
    return {name: [_short(column[at]) for column in columns] for at, name in enumerate(names)}


def _calmed(values: Sequence[float]) -> list[float]:
    """A mean of the last tenth or so of the steps taken: over the logarithm of steps it is always as wide."""
    total = weight = 0.0
    found = []
    for at, value in enumerate(values):
        keep = at / (at + 10)
        total, weight = keep * total + value, keep * weight + 1
        found.append(total / weight)
    return found


# ------------------------------------------------------------------------------------------- reinforcement learning


def step_columns(records: Iterable[Facts], groups: Iterable[Group]) -> Facts:
    """Every number of every step, column by column; gaps are None. `each` says how many steps a point stands for."""
    lines = [record for record in records if record.get("stage") == "rl" and not record.get("evaluation")]
    lines = [line for line in lines if number(line.get("step")) is not None]
    bounds = reward_bounds(groups)
    lines = [{**line, **bounds.get(int(line["step"]), {})} for line in lines]
    names = sorted({name for line in lines for name, value in line.items() if number(value) is not None})
    names = [name for name in names if name.rpartition("/")[2] not in NOT_SHOWN]
    each = max(1, math.ceil(len(lines) / STEPS))
    buckets = [lines[at : at + each] for at in range(0, len(lines), each)]
    columns = {name: [_bucket(name, bucket) for bucket in buckets] for name in names}
    alarms = [{"step": line["step"], "says": line["alarms"]} for line in lines if line.get("alarms")]
    return {"columns": columns, "each": each, "alarms": alarms[-20:]}


def _bucket(name: str, lines: Sequence[Facts]) -> float | None:
    if name in ("step", "time", "version"):
        return number(lines[-1].get(name))
    values = [value for line in lines if (value := number(line.get(name))) is not None]
    return _short(sum(values) / len(values)) if values else None


def reward_bounds(groups: Iterable[Group]) -> dict[int, dict[str, float]]:
    """Where the mean reward of each step lies, by drawing its groups anew: rollouts of one are not independent."""
    means: defaultdict[int, list[float]] = defaultdict(list)
    for group in groups:
        totals = [row.total for row in group.rows if row.total is not None]
        if group.set == "training" and group.step is not None and totals:
            means[group.step].append(sum(totals) / len(totals))
    bounds = {step: _interval(tuple(values)) for step, values in means.items()}
    return {step: {"reward_low": both[0], "reward_high": both[1]} for step, both in bounds.items() if both}


_INTERVALS: dict[tuple[float, ...], tuple[float, float] | None] = {}


def _interval(values: tuple[float, ...]) -> tuple[float, float] | None:
    """Remembered: steps do not change, and a page that is watched asks every few seconds."""
    if values not in _INTERVALS:
        if len(_INTERVALS) > 20_000:
            _INTERVALS.clear()
        _INTERVALS[values] = interval(np.array(values), draws=500)
    return _INTERVALS[values]


def evaluations(records: Iterable[Facts]) -> list[Facts]:
    """The measurements on held-out tasks, by step: their numbers."""
    found: dict[int, Facts] = {}
    for record in records:
        step = number(record.get("step"))
        if record.get("stage") == "rl" and record.get("evaluation") and step is not None:
            numbers = {name: number(value) for name, value in record.items()}
            found[int(step)] = {name: _short(value) for name, value in numbers.items() if value is not None}
    return [found[step] for step in sorted(found)]


def _short(value: float) -> float:
    """Six digits are more than a chart can show."""
    return float(f"{value:.6g}") if abs(value) < 1e6 else value


def solve_rates(groups: Iterable[Group]) -> dict[str, list[Facts]]:
    """How every task went over time: one entry for each time it was tried, oldest first."""
    found: defaultdict[str, list[Facts]] = defaultdict(list)
    for group in groups:
        solved = [row.solved for row in group.rows if row.solved is not None]
        totals = [row.total for row in group.rows if row.total is not None]
        found[group.task].append(
            {
                "set": group.set,
                "group": group.standing.id,
                "step": group.step,
                "size": group.standing.size,
                "ready": group.standing.ready,
                "dropped": group.standing.dropped,
                "solved": sum(solved) if solved else (0 if group.rows else None),
                "reward": sum(totals) / len(totals) if totals else None,
            }
        )
    return {task: sorted(tries, key=_when) for task, tries in found.items()}


def _when(tried: Mapping[str, object]) -> tuple[bool, float]:
    step = number(tried["step"])
    return (step is None, step or 0.0)
