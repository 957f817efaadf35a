"""The nonlinear effort penalty: its slope is 1 at zero effort and falls as effort grows.

    C(x) = ((1 + k x)^(1 - q) - 1) / (k (1 - q))

x is a weighted sum of six quantities of a session. C(0) = 0 and the slope there is 1 for all k and q. q = 0 is a line,
q = 1 a logarithm, and for q > 1 the penalty saturates at 1 / (k (q - 1)).
"""

import math

from pydantic import Field

from etude.config import Settings
from etude.errors import InputError
from etude.harness.trace import Cost

NEAR = 1e-6  # of q to 1, or of k x to 0, where the formula loses its digits and its limit is exact to float64


def effort(x: float, k: float = 1.0, q: float = 1.0) -> float:
    """Return the penalty C(x) of `x` units of effort."""
    if not (x >= 0 and k >= 0 and math.isfinite(x) and math.isfinite(k) and math.isfinite(q)):
        raise InputError(f"effort({x}, k={k}, q={q}): expected finite numbers, x and k not negative")
    if k * x == 0:
        return x  # no effort, or the limit k -> 0, which is a line
    log_growth = math.log1p(k * x)
    # expm1(t) / t, whose limit for t -> 0 is 1, is the same formula without the cancellation near q = 1.
    t = (1 - q) * log_growth
    return log_growth / k * (math.expm1(t) / t if abs(t) > NEAR * NEAR else 1.0)


class EffortSettings(Settings):
    """Units of effort, and the curve of the penalty. Its weight in the reward is rewards.effort_spent."""

    thinking_token: float = Field(default=0.001, ge=0, description="effort units per thinking token")
    call_token: float = Field(default=0.001, ge=0, description="effort units per token of a tool call")
    output_token: float = Field(default=0.0002, ge=0, description="effort units per token of a tool result")
    final_token: float = Field(default=0.001, ge=0, description="effort units per token of a message")
    call: float = Field(default=0.1, ge=0, description="effort units per tool call")
    turn: float = Field(default=0.2, ge=0, description="effort units per turn")
    k: float = Field(default=1.0, ge=0, description="scale of the penalty curve: larger values bend it at less effort")
    q: float = Field(
        default=1.0, description="shape of the penalty curve: 0 is linear, 1 logarithmic, above 1 it saturates"
    )


def effort_units(cost: Cost, settings: EffortSettings) -> float:
    """Return the units of effort of a session. Commentary counts as message, summaries count as thinking."""
    return (
        settings.thinking_token * (cost.thinking + cost.summary)
        + settings.call_token * cost.call
        + settings.output_token * cost.output
        + settings.final_token * (cost.final + cost.commentary)
        + settings.call * cost.calls
        + settings.turn * cost.turns
    )
