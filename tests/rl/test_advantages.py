"""Properties of the advantages and of the KL estimators."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from etude.errors import InputError
from etude.rl.advantages import KL_FORMS, EstimatorSettings, k1, k3, kl_penalties, token_advantages
from etude.rollouts.group_advantages import group_advantages

REWARDS = st.lists(st.floats(-10, 10), min_size=1, max_size=16)


@given(REWARDS)
def test_an_advantage_is_the_reward_minus_the_groups_mean(rewards: list[float]) -> None:
    found = group_advantages(rewards)
    assert found == pytest.approx([reward - sum(rewards) / len(rewards) for reward in rewards], abs=1e-9)
    assert sum(found) == pytest.approx(0, abs=1e-9)


@given(st.floats(-1e6, 1e6), st.integers(1, 64))
def test_equal_rewards_have_advantage_exactly_zero(reward: float, size: int) -> None:
    assert group_advantages([reward] * size) == [0.0] * size
    assert group_advantages([reward] * size, divide_by_std=True) == [0.0] * size


@given(REWARDS, st.randoms())
def test_permuting_a_group_permutes_its_advantages(rewards: list[float], rng: random.Random) -> None:
    order = list(range(len(rewards)))
    rng.shuffle(order)
    found = group_advantages(rewards)
    assert group_advantages([rewards[i] for i in order]) == pytest.approx([found[i] for i in order], abs=1e-9)


def test_dividing_by_the_standard_deviation_inflates_tiny_differences() -> None:
    rewards = [1.0, 1.0, 1.0, 0.999]  # all solved; one used a little more effort
    assert max(map(abs, group_advantages(rewards))) < 0.001
    assert max(map(abs, group_advantages(rewards, divide_by_std=True))) > 1


@pytest.mark.parametrize("rewards", [[], [math.nan, 1.0], [math.inf]])
def test_a_rollout_without_a_reward_is_in_no_group(rewards: list[float]) -> None:
    with pytest.raises(InputError, match="advantages"):
        group_advantages(rewards)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.floats(-2, 2), st.floats(0, 1), st.integers(0, 1000))
def test_splitting_a_rollout_into_segments_changes_no_token_advantage(
    sampled: list[int], advantage: float, weight: float, seed: int
) -> None:
    total = sum(sampled)
    penalties = weight * np.random.default_rng(seed).standard_normal(total)
    whole = token_advantages(advantage, [total], penalties=penalties)[0]
    parts = token_advantages(advantage, sampled, penalties=penalties)
    assert [len(part) for part in parts] == sampled
    assert np.allclose(np.concatenate(parts), whole, atol=1e-5)


def test_every_token_of_a_chain_has_the_final_advantage_summaries_included() -> None:
    first, second = token_advantages(0.75, [3, 2])
    assert first.tolist() == [0.75] * 3
    assert second.tolist() == [0.75] * 2
    assert token_advantages(0.75, [3, 2], divide_by_length=True)[1].tolist() == pytest.approx([0.15] * 2)


# ------------------------------------------------------------------------------------------------- KL estimators


def gaussian_estimates(divergence: float, draws: int = 400_000) -> tuple[np.ndarray, np.ndarray]:
    """Return k1 and k3 of samples of N(0, 1) against N(d, 1), whose divergence is d^2 / 2."""
    shift = math.sqrt(2 * divergence)
    x = np.random.default_rng(0).standard_normal(draws)
    p, r = -(x**2) / 2, -((x - shift) ** 2) / 2
    return k1(p, r), k3(p, r)


@pytest.mark.parametrize("divergence", [0.05, 0.3, 0.628])
def test_the_variances_match_their_closed_forms(divergence: float) -> None:
    one, three = gaussian_estimates(divergence)
    assert one.mean() == pytest.approx(divergence, abs=0.01)
    assert three.mean() == pytest.approx(divergence, abs=0.01)
    assert three.min() >= 0
    assert one.var() == pytest.approx(2 * divergence, rel=0.02)
    assert three.var() == pytest.approx(math.exp(2 * divergence) - 1 - 2 * divergence, rel=0.08)


def test_the_variances_cross_at_0_628() -> None:
    def gap(divergence: float) -> float:
        return (math.exp(2 * divergence) - 1 - 2 * divergence) - 2 * divergence

    assert gap(0.627) < 0 < gap(0.6285)
    (one, three), (far_one, far_three) = gaussian_estimates(0.3), gaussian_estimates(1.2)
    assert three.var() < one.var()
    assert far_three.var() > far_one.var()


@pytest.mark.parametrize("form", list(KL_FORMS))
def test_a_penalty_is_the_own_log_ratio_and_the_estimates_of_all_later_tokens(form: str) -> None:
    rng = np.random.default_rng(0)
    for size in (0, 1, 2, 7):
        logprobs, reference = -rng.random(size), -rng.random(size)
        estimates = KL_FORMS[form](logprobs, reference)
        expected = [logprobs[t] - reference[t] + estimates[t + 1 :].sum() for t in range(size)]
        np.testing.assert_allclose(kl_penalties(KL_FORMS[form], logprobs, reference), expected, atol=1e-12)


@pytest.mark.parametrize(
    "wrong", [{"kl": "k1"}, {"kl_weight": 0.1}, {"kl": "k1", "kl_weight": -1}, {"max_importance_ratio": -1}]
)
def test_contradictory_estimator_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=r"kl_weight|max_importance_ratio"):
        EstimatorSettings(**wrong)  # type: ignore[arg-type]
