"""Packing does not change the gradient, and ranks get nearly equal work."""

import numpy as np
import pytest
import torch
from families import small_config
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.data.dealing import deal, sequence_cost
from etude.errors import InputError
from etude.harness.trace import Segment
from etude.model.config import ModelConfig
from etude.model.transformer import Transformer, initialize
from etude.rl.objective import PolicyGradient
from etude.rl.packing import TrainingSequence, fill_rows, pack, pack_planned, plan_packing


def config_of(family: str) -> ModelConfig:
    return ModelConfig.from_hugging_face(small_config(family))


def training_sequence(seed: int, size: int, config: ModelConfig, routed: bool = False) -> TrainingSequence:
    rng = np.random.default_rng(seed)
    sampled = rng.random(size) < 0.5
    sampled[0] = False
    routing = None
    if routed and config.moe:
        experts = [
            rng.permutation(config.moe.experts)[: config.moe.per_token]
            for _ in range((size - 1) * len(config.moe.layers))
        ]
        routing = np.array(experts, np.uint8).reshape(size - 1, len(config.moe.layers), config.moe.per_token)
    logprobs = np.where(sampled, -rng.random(size), 0).astype(np.float32)
    versions = np.where(sampled, 3, -1).astype(np.int32)
    segment = Segment(
        "start", rng.integers(0, 40, size).astype(np.uint32), sampled, logprobs, logprobs, versions, routing
    )
    advantages = rng.standard_normal(int(sampled.sum())).astype(np.float32)
    return TrainingSequence(segment, advantages, temperature=(0.5, 1.0, 2.0)[seed % 3])


def gradient(model: Transformer, batches: list) -> torch.Tensor:
    model.zero_grad()
    for batch in batches:
        PolicyGradient()(model, batch).loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize(("family", "routed"), [("llama", False), ("qwen3_moe", True), ("deepseek_v3", True)])
def test_packed_sequences_on_several_ranks_have_the_gradient_of_single_ones(family: str, routed: bool) -> None:
    config = config_of(family)
    model = initialize(config, seed=2)
    sequences = [training_sequence(seed, size, config, routed) for seed, size in enumerate((5, 17, 9, 3, 12, 20))]
    alone = [batch for one in sequences for batch in pack([one], config, length=64, rows=1, padding=0)]
    plan = plan_packing([len(one) for one in sequences], config, length=24, ranks=2)
    whole = dict(enumerate(sequences))
    by_rank = [pack_planned(plan, whole, config, rows=2, padding=0, rank=rank) for rank in range(2)]
    assert len(by_rank[0]) == len(by_rank[1])
    together = [batch for batches in by_rank for batch in batches]
    assert sum(batch.loss_tokens for batch in together) == sum(int(one.segment.sampled.sum()) for one in sequences)
    assert torch.allclose(gradient(model, together), gradient(model, alone), atol=2e-5)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 50), max_size=60), st.integers(1, 50))
def test_rows_hold_everything_once_and_no_more_than_fits(sizes: list[int], length: int) -> None:
    rows = fill_rows(sizes, length)
    assert sorted(index for row in rows for index in row) == list(range(len(sizes)))
    for row in rows:
        assert sum(sizes[index] for index in row) <= length or len(row) == 1
    # no two rows could have been one
    filled = sorted(sum(sizes[index] for index in row) for row in rows)
    assert len(filled) < 2 or filled[0] + filled[1] > length


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0.1, 100), max_size=60), st.integers(1, 8))
def test_ranks_have_equally_many_rows_and_nearly_equal_work(costs: list[float], ranks: int) -> None:
    assigned = deal(costs, ranks)
    assert sorted(index for rank in assigned for index in rank) == list(range(len(costs)))
    assert max(map(len, assigned)) <= -(-len(costs) // ranks)
    loads = [sum(costs[index] for index in rank) for rank in assigned]
    assert max(loads) - min(loads) <= max(costs, default=0) + 1e-9


def test_the_cost_of_long_sequences_is_quadratic() -> None:
    config = config_of("llama")
    assert sequence_cost(config, 20_000) > 2.5 * sequence_cost(config, 10_000)
    assert sequence_cost(config, 20) == pytest.approx(2 * sequence_cost(config, 10), rel=0.05)


def test_sequences_without_sampled_tokens_are_left_out() -> None:
    config = config_of("llama")
    unsampled = Segment(
        "start",
        np.arange(5, dtype=np.uint32),
        np.zeros(5, np.bool_),
        *(np.zeros(5, np.float32),) * 2,
        np.full(5, -1, np.int32),
    )
    left = TrainingSequence(unsampled, np.zeros(0, np.float32))
    assert pack([left], config, length=8, rows=1, padding=0) == []
    with pytest.raises(InputError, match="3 token advantages for 0 sampled tokens"):
        TrainingSequence(unsampled, np.zeros(3, np.float32))
