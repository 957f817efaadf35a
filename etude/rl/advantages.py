"""Token advantages, KL estimators, and the settings of the policy-gradient estimator.

The advantage of a rollout (`etude.rollouts.group_advantages`) is its reward minus the mean of its group: no division by
the standard deviation (which would inflate tiny differences of behaviour where all rollouts are correct), no length
normalisation, no masking of overlong rollouts. Each setting undoes one of these choices, for ablations.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, ClassVar, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, JsonValue, model_validator

from etude.config import Registry, Settings, check_options, registered
from etude.errors import InputError
from etude.rollouts.group_advantages import ADVANTAGES

Array = npt.NDArray[np.floating]
# Unbiased estimates of the divergence at sampled tokens, from the log-probabilities of the policy and the reference.
KL_FORMS = Registry[Callable[[Array, Array], Array]]("KL form")
kl_form = KL_FORMS.add  # decorator


class EstimatorSettings(Settings):
    """The policy-gradient estimator. The defaults are the report's choices; other values are for ablations."""

    renamed_keys: ClassVar[dict[str, str]] = {"correction": "max_importance_ratio"}

    advantage: Annotated[str, registered(ADVANTAGES)] = Field(
        default="group_mean",
        description="advantage of a rollout: group_mean (its reward minus the group's mean), or one of a plugin",
    )
    advantage_options: dict[str, JsonValue] = Field(default={}, description="options of the advantage")
    divide_by_std: bool = Field(default=False, description="divide advantages by the group's standard deviation")
    divide_by_length: bool = Field(default=False, description="divide a rollout's advantage by its sampled tokens")
    mask_overlong: bool = Field(default=False, description="do not train on truncated rollouts")
    kl: Annotated[str, registered(KL_FORMS, "none")] = Field(
        default="none",
        description="KL penalty in the reward: none, or the estimate of later tokens: k1, k3 (less variance near the "
        "reference, more far from it), or one of a plugin",
    )
    kl_weight: float = Field(default=0.0, ge=0, description="weight of the KL penalty")
    reference: str = Field(
        default="start", min_length=1, description="KL reference: a model directory, or start: the initial policy"
    )
    max_importance_ratio: float = Field(
        default=0.0, ge=0, description="weight tokens by the probability ratio trainer / sampler, at most this; 0: off"
    )
    replay: bool = Field(default=True, description="MoE: train with the experts that the sampler used (router replay)")
    plausibility: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="replay an expert only if its router score is at least this share of the lowest own choice",
    )

    @model_validator(mode="after")
    def _check_key_combinations(self) -> Self:
        check_options("advantage_options", ADVANTAGES[self.advantage], self.all_advantage_options)
        if (self.kl == "none") != (self.kl_weight == 0):
            raise ValueError("kl and kl_weight go together: give both or neither")
        if self.kl == "none" and self.reference != "start":
            raise ValueError("reference would not be used: there is no kl")
        if not self.replay and self.plausibility:
            raise ValueError("plausibility would not be used: replay is off")
        return self

    @property
    def all_advantage_options(self) -> dict[str, JsonValue]:
        """The keyword arguments of the advantage."""
        return {**({"divide_by_std": True} if self.divide_by_std else {}), **self.advantage_options}


@kl_form
def k1(logprobs: Array, reference: Array) -> Array:
    """Return log(p/r) of sampled tokens, an unbiased estimate of the KL divergence."""
    return logprobs - reference


@kl_form
def k3(logprobs: Array, reference: Array) -> Array:
    """Return r/p - 1 - log(r/p): the same mean as k1, never negative, but a larger variance far from the reference."""
    log_ratio = reference - logprobs
    return np.expm1(log_ratio) - log_ratio


def kl_penalties(form: Callable[[Array, Array], Array], logprobs: Array, reference: Array) -> Array:
    """Return the KL penalty of each sampled token of a rollout: its own log(p/r) and the estimates of later tokens.

    With these in the reward, the policy gradient is exactly that of KL(p || r) for any form whose mean, given the
    tokens before, is the divergence. A token's own estimate must be log(p/r): E[k3 grad log p] is grad KL(p || r) -
    grad KL(r || p), which vanishes near the reference. Earlier tokens are left out: a token cannot have changed them.
    """
    later = form(logprobs, reference).astype(np.float64)
    return k1(logprobs, reference) + np.append(np.cumsum(later[:0:-1])[::-1], np.zeros(min(1, len(later))))


def token_advantages(
    advantage: float,
    sampled: Sequence[int],
    *,
    penalties: Array | None = None,
    divide_by_length: bool = False,
) -> list[npt.NDArray[np.float32]]:
    """Return the advantage of each sampled token, segment by segment of one rollout.

    `sampled` has the number of sampled tokens of each segment. Every token of every segment, self-summaries included,
    gets the advantage of the whole chain, less its own of the `penalties`, which has one for each token of the chain.
    """
    total = sum(sampled)
    per_token = advantage / total if divide_by_length and total else advantage
    flat = np.full(total, per_token, np.float64)
    if penalties is not None:
        if len(penalties) != total:
            raise InputError(f"token_advantages: {len(penalties)} penalties for {total} sampled tokens")
        flat -= penalties
    return [part.astype(np.float32) for part in np.split(flat, np.cumsum(sampled)[:-1])]
