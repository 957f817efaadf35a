"""The report's figure of the effort penalty: C(x) = ((1 + k x)^(1 - q) - 1) / (k (1 - q)) for several k and q.

Given a run, its sessions are marked on the curve of its own recipe, and their effort is broken down by quantity.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from etude.errors import InputError
from etude.evaluation.plot import Axis, Bars, Line, Mark, Panel
from etude.harness.trace import Cost
from etude.rewards.effort import EffortSettings, effort, effort_units
from etude.rl.settings import open_rl_run
from etude.rollouts.queue import RolloutQueue
from etude.runs.run import Run
from etude.system.progress import ProgressCallback
from studies.study import StudyResult, study

# The quantities of a session's effort, as the report names them. Text next to calls counts as message, summaries as
# thinking.
QUANTITIES: Mapping[str, Callable[[Cost], int]] = {
    "thinking tokens": lambda cost: cost.thinking + cost.summary,
    "call tokens": lambda cost: cost.call,
    "output tokens": lambda cost: cost.output,
    "message tokens": lambda cost: cost.final + cost.commentary,
    "calls": lambda cost: cost.calls,
    "turns": lambda cost: cost.turns,
}
FIELDS = (
    "thinking_token",
    "call_token",
    "output_token",
    "final_token",
    "call",
    "turn",
)  # their weights in EffortSettings, in the same order
DECILES = tuple(range(10, 100, 10))


@dataclass(frozen=True)
class Fig6Settings:
    qs: tuple[float, ...] = (0.0, 0.5, 1.0, 2.0)  # at the first of the ks
    ks: tuple[float, ...] = (1.0, 0.1, 10.0)  # at q = 1
    max_units: float = 8.0  # end of the effort axis; a run with more extends it
    points: int = 81


@dataclass(frozen=True)
class TrainedSessions:
    """The rollouts that a run was trained on."""

    name: str
    weights: EffortSettings
    penalized: bool  # whether the run's reward included the penalty
    costs: Sequence[Cost]
    solved: Sequence[bool]

    @property
    def units(self) -> list[float]:
        return [effort_units(cost, self.weights) for cost in self.costs]

    def deciles(self) -> list[float]:
        return [float(value) for value in np.percentile(self.units, DECILES)]


@study("fig6")
def fig6(
    seed: int, progress: ProgressCallback, settings: Fig6Settings | None = None, run: Path | None = None
) -> StudyResult:
    """The effort penalty: how does it bend, and where on it do sessions lie?"""
    s = settings or Fig6Settings()
    sessions = read_sessions(run) if run is not None else None
    progress(1, 1)
    max_units = max(s.max_units, max(sessions.units)) if sessions else s.max_units
    x: list[float] = np.linspace(0, max_units, s.points).tolist()
    pairs = dict.fromkeys([*((s.ks[0], q) for q in s.qs), *((k, 1.0) for k in s.ks)])
    curves = {pair: [effort(each, *pair) for each in x] for pair in pairs}
    turn = (sessions.weights if sessions else EffortSettings()).turn
    data: dict[str, Any] = {
        "x": x,
        "curves": [{"k": k, "q": q, "penalty": values} for (k, q), values in curves.items()],
    }
    return StudyResult(
        title="The effort penalty",
        conclusion="; ".join([describe_curves(s, turn), *([describe_sessions(sessions)] if sessions else [])]) + ".",
        columns=("k, q", "C(1)", "C(10)", "C(100)", *(f"one more turn after {x} units" for x in (1, 10, 100))),
        rows=[_row(k, q, turn) for k, q in curves],
        panels=panels(s, x, curves, turn, sessions),
        data=data | (session_data(sessions) if sessions else {}),
        settings=s,
    )


def read_sessions(run: Path) -> TrainedSessions:
    """Return the cost and outcome of every rollout that the run was trained on."""
    layout, settings = open_rl_run(run)
    if not layout.slots.exists():
        raise InputError(f"{run}: there are no rollouts yet; name a run that has started its stage rl")
    with closing(RolloutQueue.open_read_only(layout.slots)) as queue:
        rewards = queue.trained_rewards(queue.last_step(), 1 << 40)
    if not rewards:
        raise InputError(f"{run}: no rollout has been trained on yet; wait for its first step")
    costs = [Cost(**reward["cost"]) for reward in rewards]
    solved = [bool(reward["solved"]) for reward in rewards]
    penalized = bool(settings.rewards.get("effort_spent"))
    return TrainedSessions(Run.read(run).settings.name, settings.effort, penalized, costs, solved)


def marginal_penalty(x: float, k: float, q: float, more: float) -> float:
    """Return the penalty for `more` units after x units."""
    return effort(x + more, k, q) - effort(x, k, q)


def describe_curves(s: Fig6Settings, turn: float) -> str:
    k, max_q = s.ks[0], max(s.qs)
    text = (
        f"At k = {k:g} and q = 1, one more turn ({turn:g} units) costs {marginal_penalty(0, k, 1, turn):.3f} at the "
        f"start, {marginal_penalty(1, k, 1, turn):.3f} after 1 unit and {marginal_penalty(100, k, 1, turn):.4f} after "
        f"100, where the linear penalty (q = 0) costs {turn:g} each time"
    )
    return f"{text}, and q = {max_q:g} costs at most {1 / (k * (max_q - 1)):g} in total" if max_q > 1 else text


def describe_sessions(sessions: TrainedSessions) -> str:
    low, median, high = (sessions.deciles()[index] for index in (0, 4, 8))
    k, q, turn = sessions.weights.k, sessions.weights.q, sessions.weights.turn
    unpenalized = "" if sessions.penalized else ", which its reward did not penalize"
    return (
        f"the {len(sessions.costs):,} sessions of {sessions.name} took {median:.2f} units (median; 10th to 90th "
        f"percentile {low:.2f} to {high:.2f}){unpenalized}, and one more turn at those percentiles costs "
        f"{marginal_penalty(low, k, q, turn):.3f} to {marginal_penalty(high, k, q, turn):.3f}"
    )


def mean_units(sessions: TrainedSessions, solved: bool | None = None) -> dict[str, float]:
    """Return the mean units of each quantity over all sessions, or over those that solved their task or did not."""
    chosen = [cost for cost, right in zip(sessions.costs, sessions.solved, strict=True) if solved in (None, right)]
    weights = [getattr(sessions.weights, field) for field in FIELDS]
    return {
        name: weight * float(np.mean([count(cost) for cost in chosen])) if chosen else 0.0
        for weight, (name, count) in zip(weights, QUANTITIES.items(), strict=True)
    }


def session_data(sessions: TrainedSessions) -> dict[str, Any]:
    quantities = {
        name: dict(zip(("10%", "50%", "90%"), np.percentile(values, (10, 50, 90)).tolist(), strict=True))
        for name, values in ((name, [count(cost) for cost in sessions.costs]) for name, count in QUANTITIES.items())
    }
    return {
        "run": {
            "name": sessions.name,
            "penalty_counted": sessions.penalized,
            "weights": vars(sessions.weights),
            "sessions": len(sessions.costs),
            "quantities": quantities,
            "mean_units": {
                "solved": mean_units(sessions, True),
                "not_solved": mean_units(sessions, False),
            },
            "deciles_of_units": dict(zip(map(str, DECILES), sessions.deciles(), strict=True)),
            "units": sessions.units,
            "solved": [int(each) for each in sessions.solved],
        }
    }


def _row(k: float, q: float, turn: float) -> tuple[str, ...]:
    values = (f"{effort(x, k, q):.3f}" for x in (1, 10, 100))
    return f"{k:g}, {q:g}", *values, *(f"{marginal_penalty(x, k, q, turn):.4f}" for x in (1, 10, 100))


# ------------------------------------------------------------------------------------------------- plot


def panels(
    s: Fig6Settings,
    x: Sequence[float],
    curves: Mapping[tuple[float, float], Sequence[float]],
    turn: float,
    sessions: TrainedSessions | None,
) -> list[Panel]:
    axis, first = Axis("effort x, units"), s.ks[0]
    marks = [Mark(sessions.deciles()[4], "median session")] if sessions else []
    by_q = [Line(f"q = {q:g}", x, curves[first, q]) for q in s.qs]
    by_k = [Line(f"k = {k:g}", x, curves[k, 1.0]) for k in sorted(s.ks)]
    wide: list[float] = np.geomspace(0.1, 100, 49).tolist()
    marginal = [Line(f"q = {q:g}", wide, [marginal_penalty(each, first, q, turn) for each in wide]) for q in s.qs]
    deciles = [decile_points(sessions)] if sessions else []
    found = [
        Panel(axis, Axis("penalty C(x)", low=0), [*by_q, *deciles], title=f"How much it bends (k = {first:g})"),
        Panel(axis, Axis("penalty C(x)", low=0), by_k, title="How soon it bends (q = 1)", marks=marks),
        Panel(
            Axis("effort so far, units", log=True),
            Axis("penalty for it", low=0),
            marginal,
            title=f"One more turn ({turn:g} units, k = {first:g})",
            marks=marks,
        ),
    ]
    return [*found, breakdown(sessions)] if sessions else found


def decile_points(sessions: TrainedSessions) -> Line:
    """Return the deciles of the sessions on the curve of their run."""
    k, q, deciles = sessions.weights.k, sessions.weights.q, sessions.deciles()
    label = f"deciles of {sessions.name}, k = {k:g}, q = {q:g}"
    return Line(label, deciles, [effort(each, k, q) for each in deciles], style="points", colour=6)


def breakdown(sessions: TrainedSessions) -> Panel:
    parts = mean_units(sessions)
    labels = [name.replace(" ", "\n") for name in parts]
    bars = [Bars("", list(parts.values()))]
    return Panel(Axis(""), Axis("units of a session", low=0), bars, title="Effort by quantity", categories=labels)


if __name__ == "__main__":
    from studies.cli import main

    main("fig6")
