"""How much better than its group a rollout did, and what each of its tokens is worth.

A group is the rollouts of one prompt. The advantage is the reward minus the group's mean: no division by the standard
deviation (it would blow tiny differences of behaviour up where all rollouts are right), no length normalisation, no
masking of overlong rollouts. The options are for study: each undoes one of those choices.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from etude.errors import InputError

KLForm = Literal["none", "k1", "k3"]
EPSILON = 1e-6  # of a standard deviation that is divided by; GRPO's


@dataclass(frozen=True)
class Estimator:
    """The report's choices are the defaults."""

    divide_by_std: bool = False
    divide_by_length: bool = False  # each rollout by its own tokens, instead of all by one constant
    mask_overlong: bool = False  # rollouts that were cut off count for nothing, instead of being kept
    kl: KLForm = "none"
    kl_weight: float = 0.0
    correction: float = 0.0  # the largest importance ratio of trainer to sampler; 0: none is applied

    def __post_init__(self) -> None:
        if self.kl_weight < 0 or self.correction < 0 or (self.kl != "none") != (self.kl_weight > 0):
            raise InputError(f"estimator: {self}; expected weights not below 0, and a kl_weight exactly with a kl")


def advantages(rewards: Sequence[float], *, divide_by_std: bool = False) -> list[float]:
    """Reward minus the mean of the group."""
    if not rewards:
        raise InputError("advantages: a group has at least one rollout")
    if not np.isfinite(rewards).all():
        raise InputError(f"advantages: rewards {list(rewards)}; a rollout without a reward does not belong in a group")
    if min(rewards) == max(rewards):
        return [0.0] * len(rewards)  # exactly: the mean of equal numbers may be rounded
    values = np.asarray(rewards, np.float64)
    above = values - values.mean()
    return [float(value) for value in (above / (values.std(ddof=1) + EPSILON) if divide_by_std else above)]


def k1(logprobs: npt.NDArray[np.floating], reference: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
    """log p / r of sampled tokens: its mean is the divergence. Its own gradient has mean zero, so it is no loss:
    it belongs in the reward, where the score function gives the divergence's true gradient."""
    return logprobs - reference


def k3(logprobs: npt.NDArray[np.floating], reference: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
    """r/p - 1 - log r/p: the same mean, never negative, and for far distributions a far larger variance."""
    log_ratio = reference - logprobs
    return np.expm1(log_ratio) - log_ratio


def worths(
    advantage: float,
    made: Sequence[int],
    *,
    kl: Sequence[npt.NDArray[np.floating]] | None = None,
    kl_weight: float = 0.0,
    divide_by_length: bool = False,
) -> list[npt.NDArray[np.float32]]:
    """What each token the model made is worth, segment by segment of one rollout.

    The advantage of the whole chain is on every token of every segment, summaries included. `kl` are the estimates
    of each segment's made tokens; a token answers for its own and all that came after it, in later segments too:
    earlier ones it cannot have changed, and leaving them out changes no mean.
    """
    total = sum(made)
    share = advantage / total if divide_by_length and total else advantage
    flat = np.full(total, share, np.float64)
    if kl is not None and kl_weight:
        joined = np.concatenate([np.asarray(part, np.float64) for part in kl]) if total else np.zeros(0)
        if len(joined) != total:
            raise InputError(f"worths: {len(joined)} estimates of the divergence for {total} made tokens")
        flat -= kl_weight * np.cumsum(joined[::-1])[::-1]
    return [part.astype(np.float32) for part in np.split(flat, np.cumsum(made)[:-1])]
