"""Rewards of verified trials: weighted terms, gates against cheating, and monitors of behaviour.

    reward = score(VerifiedTrial(task, trace, verifier_result), {"correctness": 1.0, "effort_spent": 0.05})

Infrastructure failures have no reward; they are exceptions of the trial. `@term`, `@grader` and `@gate` register more.
"""

from etude.rewards.effort import EffortSettings, effort, effort_units
from etude.rewards.live_weights import LiveWeights
from etude.rewards.monitors import MONITORS, behaviour_rates, monitor_readings
from etude.rewards.reward import (
    GATES,
    GRADERS,
    TERMS,
    Reward,
    TermResult,
    VerifiedTrial,
    gate,
    grade,
    grader,
    score,
    term,
)

__all__ = [
    "GATES",
    "GRADERS",
    "MONITORS",
    "TERMS",
    "EffortSettings",
    "LiveWeights",
    "Reward",
    "TermResult",
    "VerifiedTrial",
    "behaviour_rates",
    "effort",
    "effort_units",
    "gate",
    "grade",
    "grader",
    "monitor_readings",
    "score",
    "term",
]
