"""Common parts of the vLLM and SGLang clients: the meaning of reported log-probabilities, weight paths, endings.

Those servers report one log-probability for each token. Whether it belongs to the distribution sampled from or to the
model's own depends on the server; the unknown one is NaN, so that a loss that uses it fails visibly. They also
do not report which weights produced a token: a completion that spans a weight swap gets the older version.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from etude.errors import InputError
from etude.inference.generate_protocol import InvalidResponse
from etude.inference.policy import Weights
from etude.inference.request import Ending
from etude.inference.sampling import Sampling

LogprobMeaning = Literal["raw", "drawn"]


def both_logprobs(
    reported: Sequence[float], meaning: LogprobMeaning, sampling: Sampling
) -> tuple[list[float], list[float]]:
    """Return log-probabilities under the sampled and under the raw distribution, NaN where unknown."""
    unknown = [math.nan] * len(reported)
    own = sampling.untruncated and sampling.temperature == 1.0  # then both are the same
    if meaning == "raw":
        if sampling.temperature == 0.0:  # the chosen token had probability 1
            return [0.0] * len(reported), list(reported)
        return (list(reported) if own else unknown), list(reported)
    return list(reported), (list(reported) if own else unknown)


def checkpoint_path(weights: Weights, server: str) -> str:
    if not isinstance(weights, str | Path):
        raise InputError(f"{server} loads weights from a checkpoint directory it can read; give a path, not tensors")
    return str(Path(weights).absolute())


def ending_of(reason: Any, where: str) -> Ending:
    endings: dict[str, Ending] = {"stop": "stop", "length": "length", "abort": "cancelled"}
    if reason not in endings:
        raise InvalidResponse(f"{where}: the finish reason is {reason!r}; expected one of {', '.join(endings)}")
    return endings[reason]
