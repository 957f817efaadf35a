"""The terms every session is paid by: did it work, and what did it take."""

from etude.rewards.effort import EffortWeights, effort, units
from etude.rewards.reward import Graded, Part, term


@term
def correctness(graded: Graded) -> Part:
    """What the verifier says of the final state."""
    return Part(graded.grade.score, {"rewards": dict(graded.grade.rewards)})


@term
def effort_spent(graded: Graded) -> Part:
    """The nonlinear penalty on six quantities, by the weights in the task set's recipe."""
    weights = EffortWeights(**graded.trace.facts.get("effort", {}))
    spent = units(graded.trace.cost, weights)
    return Part(-effort(spent, weights.k, weights.q), {"units": spent})
