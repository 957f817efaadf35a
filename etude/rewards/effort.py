"""The nonlinear effort penalty: on an easy task every extra step is felt, in a long one it is not.

    C(x) = ((1 + k x)^(1 - q) - 1) / (k (1 - q))

x is one weighted sum of six quantities of a session. C(0) = 0 and the slope there is 1 whatever k and q are; q = 0 is a
straight line, q = 1 is a logarithm, and above 1 it saturates at 1 / (k (q - 1)).
"""

import math
from dataclasses import dataclass, fields

from etude.errors import InputError
from etude.harness.trace import Cost

NEAR = 1e-6  # of q to 1, or of k x to 0, where the formula loses its digits and its limit is exact to float64


def effort(x: float, k: float = 1.0, q: float = 1.0) -> float:
    """The penalty for `x` units of effort."""
    if not (x >= 0 and k >= 0 and math.isfinite(x) and math.isfinite(k) and math.isfinite(q)):
        raise InputError(f"effort({x}, k={k}, q={q}): expected finite numbers, x and k not negative")
    if k * x == 0:
        return x  # nothing done, or k -> 0: the line
    grown = math.log1p(k * x)
    # expm1(t) / t, whose limit for t -> 0 is 1, is the same formula without the cancellation near q = 1
    t = (1 - q) * grown
    return grown / k * (math.expm1(t) / t if abs(t) > NEAR * NEAR else 1.0)


@dataclass(frozen=True)
class EffortWeights:
    """What one of each is worth in units of effort, and the curve. A token is about a thousandth of a call's pains."""

    thinking_token: float = 0.001
    call_token: float = 0.001
    output_token: float = 0.0002
    final_token: float = 0.001
    call: float = 0.1
    turn: float = 0.2
    k: float = 1.0
    q: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not math.isfinite(value) or (field.name != "q" and value < 0):
                raise InputError(f"effort: {field.name} is {value}; expected a finite number, not negative")


def units(cost: Cost, weights: EffortWeights) -> float:
    """The six quantities of a session as one. Text beside calls is message; summaries are thinking about the work."""
    return (
        weights.thinking_token * (cost.thinking + cost.summary)
        + weights.call_token * cost.call
        + weights.output_token * cost.output
        + weights.final_token * (cost.final + cost.commentary)
        + weights.call * cost.calls
        + weights.turn * cost.turns
    )
