"""The advantage of each rollout of a group: a function of the group's rewards that a recipe chooses by name."""

from collections.abc import Callable, Sequence

import numpy as np

from etude.config import Registry
from etude.errors import InputError

EPSILON = 1e-6  # added to a standard deviation before dividing by it, as in GRPO


# A function of the rewards of one group, with its options as keyword-only parameters.
ADVANTAGES = Registry[Callable[..., Sequence[float]]]("group advantage")
group_advantage = ADVANTAGES.add  # decorator


@ADVANTAGES.register("group_mean")
def group_advantages(rewards: Sequence[float], *, divide_by_std: bool = False) -> list[float]:
    """Return the reward of each rollout minus the mean of its group."""
    if not rewards:
        raise InputError("advantages: a group has at least one rollout")
    if not np.isfinite(rewards).all():
        raise InputError(f"advantages: rewards {list(rewards)}; a rollout without a reward does not belong in a group")
    if min(rewards) == max(rewards):
        return [0.0] * len(rewards)  # exactly: the mean of equal numbers may be rounded
    values = np.asarray(rewards, np.float64)
    centered = values - values.mean()
    return [float(value) for value in (centered / (values.std(ddof=1) + EPSILON) if divide_by_std else centered)]
