"""What adapters to other people's samplers share: what a reported log-probability means, and versions from outside.

Those servers report one log-probability for each token. Whether it is of the distribution that was drawn from or of the
model's own depends on the server; where the other cannot be known it is NaN, which no gradient survives unnoticed.
They also do not say which weights made which token: a sample that lived through a swap counts as of the older ones.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from etude.errors import InputError
from etude.inference.generate_protocol import BadAnswer
from etude.inference.policy import Weights
from etude.inference.request import Ending
from etude.inference.sampling import Sampling

Meaning = Literal["raw", "drawn"]


def both_logprobs(reported: Sequence[float], meaning: Meaning, sampling: Sampling) -> tuple[list[float], list[float]]:
    """Log-probabilities under the drawn and under the raw distribution, NaN where unknown."""
    unknown = [math.nan] * len(reported)
    own = sampling.plain and sampling.temperature == 1.0  # then both are the same
    if meaning == "raw":
        if sampling.temperature == 0.0:  # all the weight was on what was taken
            return [0.0] * len(reported), list(reported)
        return (list(reported) if own else unknown), list(reported)
    return list(reported), (list(reported) if own else unknown)


def readable_path(weights: Weights, what: str) -> str:
    if not isinstance(weights, str | Path):
        raise InputError(f"{what} loads weights from a checkpoint directory that it can read; give a path, not tensors")
    return str(Path(weights).absolute())


def ending_of(reason: Any, where: str) -> Ending:
    endings: dict[str, Ending] = {"stop": "stop", "length": "length", "abort": "cancelled"}
    if reason not in endings:
        raise BadAnswer(f"{where}: the finish reason is {reason!r}; expected one of {', '.join(endings)}")
    return endings[reason]
