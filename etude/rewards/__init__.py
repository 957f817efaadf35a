"""Rewards of verified trials: weighted terms, gates against cheating, and monitors of behaviour.

    reward = score(VerifiedTrial(task, trace, verifier_result), {"correctness": 1.0, "effort_spent": 0.05})

Infrastructure failures have no reward; they are exceptions of the trial. `@term`, `@grader` and `@gate` register more.
"""

from etude.rewards.effort import effort
from etude.rewards.reward import (
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
    "TERMS",
    "Reward",
    "TermResult",
    "VerifiedTrial",
    "effort",
    "gate",
    "grade",
    "grader",
    "score",
    "term",
]
