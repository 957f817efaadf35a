"""The report's figure of the effort penalty: C(x) = ((1 + k x)^(1 - q) - 1) / (k (1 - q)) for several k and q.

Given a run, its sessions are marked on the curve of its own recipe, and what their effort consists of stands beside.
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
from etude.rewards.effort import EffortWeights, effort, units
from etude.rl.settings import effort_of
from etude.rollouts.queue import Slots
from etude.runs.layout import place_and_section
from etude.system.progress import Report
from studies.study import Finding, study

# What a session's effort is made of, in the words of the report. Text beside calls is message, summaries are thinking.
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
)  # of the weights, in that order
DECILES = tuple(range(10, 100, 10))


@dataclass(frozen=True)
class Settings:
    qs: tuple[float, ...] = (0.0, 0.5, 1.0, 2.0)  # at the first of the ks
    ks: tuple[float, ...] = (1.0, 0.1, 10.0)  # at q = 1
    longest: float = 8.0  # units of effort that are shown, or as many as the run has
    points: int = 81


@dataclass(frozen=True)
class Sessions:
    """The rollouts that a run was trained on."""

    name: str
    weights: EffortWeights
    counts: bool  # whether the run's reward had the penalty in it
    costs: Sequence[Cost]
    solved: Sequence[bool]

    @property
    def units(self) -> list[float]:
        return [units(cost, self.weights) for cost in self.costs]

    def deciles(self) -> list[float]:
        return [float(value) for value in np.percentile(self.units, DECILES)]


@study("fig6")
def fig6(seed: int, report: Report, settings: Settings | None = None, run: Path | None = None) -> Finding:
    """The effort penalty: how does it bend, and where on it do sessions lie?"""
    s = settings or Settings()
    sessions = sessions_of(run) if run is not None else None
    report(1, 1)
    longest = max(s.longest, max(sessions.units)) if sessions else s.longest
    x: list[float] = np.linspace(0, longest, s.points).tolist()
    pairs = dict.fromkeys([*((s.ks[0], q) for q in s.qs), *((k, 1.0) for k in s.ks)])
    curves = {pair: [effort(each, *pair) for each in x] for pair in pairs}
    turn = (sessions.weights if sessions else EffortWeights()).turn
    data: dict[str, Any] = {
        "x": x,
        "curves": [{"k": k, "q": q, "penalty": values} for (k, q), values in curves.items()],
    }
    return Finding(
        title="The effort penalty",
        conclusion="; ".join([said_of_curves(s, turn), *([said_of_sessions(sessions)] if sessions else [])]) + ".",
        columns=("k, q", "C(1)", "C(10)", "C(100)", *(f"one more turn after {x} units" for x in (1, 10, 100))),
        rows=[_row(k, q, turn) for k, q in curves],
        panels=panels(s, x, curves, turn, sessions),
        data=data | (data_of(sessions) if sessions else {}),
        settings=s,
    )


def sessions_of(run: Path) -> Sessions:
    """What every rollout took that the run was trained on."""
    place, section, recipe = place_and_section(run)
    if not place.slots.exists():
        raise InputError(f"{run}: there are no rollouts yet; name a run that has begun its stage rl")
    with closing(Slots.look(place.slots)) as slots:
        rewards = slots.trained_rewards(slots.last_step(), 1 << 40)
    if not rewards:
        raise InputError(f"{run}: no rollout has been trained on yet; wait for its first step")
    costs = [Cost(**reward["cost"]) for reward in rewards]
    solved = [bool(reward["solved"]) for reward in rewards]
    return Sessions(recipe.name, effort_of(section), bool(section.rewards.get("effort_spent")), costs, solved)


def price(x: float, k: float, q: float, more: float) -> float:
    """What a little more effort costs a session that has taken x already."""
    return effort(x + more, k, q) - effort(x, k, q)


def said_of_curves(s: Settings, turn: float) -> str:
    k, bent = s.ks[0], max(s.qs)
    words = (
        f"At k = {k:g} and q = 1, one more turn ({turn:g} units) costs {price(0, k, 1, turn):.3f} at the start, "
        f"{price(1, k, 1, turn):.3f} after 1 unit and {price(100, k, 1, turn):.4f} after 100, where the straight line "
        f"(q = 0) takes {turn:g} each time"
    )
    return f"{words}, and q = {bent:g} takes no more than {1 / (k * (bent - 1)):g} in all" if bent > 1 else words


def said_of_sessions(sessions: Sessions) -> str:
    low, middle, high = (sessions.deciles()[place] for place in (0, 4, 8))
    k, q, turn = sessions.weights.k, sessions.weights.q, sessions.weights.turn
    counted = "" if sessions.counts else ", though its reward did not count them"
    return (
        f"the {len(sessions.costs):,} sessions of {sessions.name} took {middle:.2f} units in the middle and "
        f"{low:.2f} to {high:.2f} without the outer tenths{counted}, and from there one more turn costs "
        f"{price(low, k, q, turn):.3f} to {price(high, k, q, turn):.3f}"
    )


def consists_of(sessions: Sessions, solved: bool | None = None) -> dict[str, float]:
    """Mean units of each quantity: over all sessions, or over those that solved their task, or that did not."""
    chosen = [cost for cost, right in zip(sessions.costs, sessions.solved, strict=True) if solved in (None, right)]
    per_one = [getattr(sessions.weights, field) for field in FIELDS]
    return {
        name: weight * float(np.mean([count(cost) for cost in chosen])) if chosen else 0.0
        for weight, (name, count) in zip(per_one, QUANTITIES.items(), strict=True)
    }


def data_of(sessions: Sessions) -> dict[str, Any]:
    quantities = {
        name: dict(zip(("10%", "50%", "90%"), np.percentile(values, (10, 50, 90)).tolist(), strict=True))
        for name, values in ((name, [count(cost) for cost in sessions.costs]) for name, count in QUANTITIES.items())
    }
    return {
        "run": {
            "name": sessions.name,
            "penalty_counted": sessions.counts,
            "weights": vars(sessions.weights),
            "sessions": len(sessions.costs),
            "quantities": quantities,
            "mean_units": {
                "solved": consists_of(sessions, True),
                "not_solved": consists_of(sessions, False),
            },
            "deciles_of_units": dict(zip(map(str, DECILES), sessions.deciles(), strict=True)),
            "units": sessions.units,
            "solved": [int(each) for each in sessions.solved],
        }
    }


def _row(k: float, q: float, turn: float) -> tuple[str, ...]:
    values = (f"{effort(x, k, q):.3f}" for x in (1, 10, 100))
    return f"{k:g}, {q:g}", *values, *(f"{price(x, k, q, turn):.4f}" for x in (1, 10, 100))


# ------------------------------------------------------------------------------------------------- the picture


def panels(
    s: Settings,
    x: Sequence[float],
    curves: Mapping[tuple[float, float], Sequence[float]],
    turn: float,
    sessions: Sessions | None,
) -> list[Panel]:
    axis, first = Axis("effort x, units"), s.ks[0]
    marks = [Mark(sessions.deciles()[4], "median session")] if sessions else []
    by_q = [Line(f"q = {q:g}", x, curves[first, q]) for q in s.qs]
    by_k = [Line(f"k = {k:g}", x, curves[k, 1.0]) for k in sorted(s.ks)]
    wide: list[float] = np.geomspace(0.1, 100, 49).tolist()
    prices = [Line(f"q = {q:g}", wide, [price(each, first, q, turn) for each in wide]) for q in s.qs]
    drawn = [on_its_curve(sessions)] if sessions else []
    found = [
        Panel(axis, Axis("penalty C(x)", low=0), [*by_q, *drawn], title=f"How much it bends (k = {first:g})"),
        Panel(axis, Axis("penalty C(x)", low=0), by_k, title="How soon it bends (q = 1)", marks=marks),
        Panel(
            Axis("effort so far, units", log=True),
            Axis("penalty for it", low=0),
            prices,
            title=f"One more turn ({turn:g} units, k = {first:g})",
            marks=marks,
        ),
    ]
    return [*found, made_of(sessions)] if sessions else found


def on_its_curve(sessions: Sessions) -> Line:
    """Where each tenth of the sessions ends."""
    k, q, deciles = sessions.weights.k, sessions.weights.q, sessions.deciles()
    label = f"tenths of {sessions.name}, k = {k:g}, q = {q:g}"
    return Line(label, deciles, [effort(each, k, q) for each in deciles], style="points", colour=6)


def made_of(sessions: Sessions) -> Panel:
    parts = consists_of(sessions)
    words = [name.replace(" ", "\n") for name in parts]
    bars = [Bars("", list(parts.values()))]
    return Panel(Axis(""), Axis("units of a session", low=0), bars, title="What effort consists of", categories=words)
