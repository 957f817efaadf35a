"""Rewards of verified trials: weighted terms, gates against cheating, and monitors of behaviour.

    reward = score(VerifiedTrial(task, trace, verifier_result), {"correctness": 1.0, "effort_spent": 0.05})

Infrastructure failures have no reward; they are exceptions of the trial. `@term` and `@gate` register further ones.
"""

from etude.rewards.effort import EffortSettings, effort, effort_units
from etude.rewards.live_weights import LiveWeights
from etude.rewards.monitors import MONITORS, MonitorSet, behaviour_rates
from etude.rewards.reward import GATES, TERMS, Reward, TermResult, VerifiedTrial, gate, score, term

__all__ = [
    "GATES",
    "MONITORS",
    "TERMS",
    "EffortSettings",
    "LiveWeights",
    "MonitorSet",
    "Reward",
    "TermResult",
    "VerifiedTrial",
    "behaviour_rates",
    "effort",
    "effort_units",
    "gate",
    "score",
    "term",
]
