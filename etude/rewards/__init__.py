"""Rewards: what a session is paid, term by term, and what is watched while a run goes on.

etude.rewards.effort(x, k, q)                     # the nonlinear penalty
etude.rewards.score(Graded(task, trace, grade), {"correctness": 1.0, "effort_spent": 0.05})
"""

from etude.rewards.effort import EffortWeights, effort, units
from etude.rewards.reward import GATES, TERMS, Graded, Part, Reward, gate, score, term

__all__ = ["GATES", "TERMS", "EffortWeights", "Graded", "Part", "Reward", "effort", "gate", "score", "term", "units"]
