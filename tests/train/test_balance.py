"""Balancing experts: routing that collapses without it does not with it, and the parts against brute force."""

from pathlib import Path
from typing import Any

import pytest
import torch

from etude.data.packing import Batch
from etude.errors import InputError
from etude.kernels.loss import IGNORE
from etude.model import load, save
from etude.model.config import ModelConfig
from etude.model.moe import MoE, Routing
from etude.model.transformer import Transformer, initialize
from etude.train.balance import balance_loss, check_balance, counted_tokens, expert_loads
from etude.train.objectives import next_token
from etude.train.optim import AdamSettings
from etude.train.settings import BalanceSettings
from etude.train.trainer import StepResult, Trainer

COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": True,
    "rope_theta": 1e4,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.08,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}
SOFTMAX = {**COMMON, "model_type": "qwen3_moe", "num_experts": 8, "decoder_sparse_step": 1, "mlp_only_layers": []}
SIGMOID = {
    **COMMON,
    "model_type": "deepseek_v3",
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 0,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
OFF = BalanceSettings(bias_rate=0.0)


def model_of(config: dict[str, Any], dtype: torch.dtype = torch.float32) -> Transformer:
    return initialize(ModelConfig.from_hugging_face(config), dtype=dtype)


def batch_of(generator: torch.Generator, rows: int = 4) -> Batch:
    tokens = (torch.randint(64, (rows, 1), generator=generator) + 3 * torch.arange(33)) % 64
    return Batch(tokens[:, :-1], tokens[:, 1:], tuple((32,) for _ in range(rows)), (), rows * 32)


def train(config: dict[str, Any], balance: BalanceSettings, steps: int = 60) -> StepResult:
    """Train a model whose embeddings share a direction, as in real models: all tokens prefer the same experts."""
    model, generator = model_of(config), torch.Generator().manual_seed(0)
    with torch.no_grad():
        model.embed.weight += 0.3 * torch.randn(32, generator=generator)
    trainer = Trainer(model, AdamSettings(learning_rate=1e-3, weight_decay=0.0), balance=balance)
    for _ in range(steps):
        result = trainer.step([batch_of(generator)], next_token)
    return result


@pytest.mark.parametrize(
    ("config", "balance"), [(SOFTMAX, BalanceSettings(loss_weight=0.1)), (SIGMOID, BalanceSettings(bias_rate=0.01))]
)
def test_routing_collapses_without_balancing_and_not_with_it(config: dict[str, Any], balance: BalanceSettings) -> None:
    collapsed, balanced = train(config, OFF).metrics, train(config, balance).metrics
    assert collapsed["expert_load_max"] > 3.5  # of 4: two of eight experts do nearly everything
    assert collapsed["expert_entropy"] < 0.7
    assert balanced["expert_load_max"] < 2.5
    assert balanced["expert_entropy"] > 0.85
    assert balanced["experts_unused"] == 0
    assert balanced["loss"] < collapsed["loss"]


def test_loads_and_loss_equal_a_count_token_by_token() -> None:
    generator = torch.Generator().manual_seed(1)
    chosen = torch.stack([torch.randperm(5, generator=generator)[:2] for _ in range(2 * 7 * 3)]).view(2, 7, 3, 2)
    routing = Routing(keep_scores=True)
    routing.chosen, routing.scores = chosen, torch.rand(2, 7, 3, 5, generator=generator)
    targets = torch.full((2, 7), IGNORE)
    targets[0, 1], targets[0, 4], targets[1, 6] = 3, 3, 3  # two tokens of the first row are padding
    batch = Batch(torch.zeros(2, 7, dtype=torch.int64), targets, ((5, 2), (7,)), (), 3)
    counted = counted_tokens(batch)
    used = [(row, token) for row in range(2) for token in range(7) if not (row == 0 and token > 4)]
    assert counted.nonzero().tolist() == [list(each) for each in used]
    loads, expected = expert_loads(routing, counted, 5), 0.0
    for layer in range(3):
        count = [sum(expert in chosen[row, token, layer] for row, token in used) for expert in range(5)]
        assert loads[layer].tolist() == count
        shares = [each / sum(count) for each in count]
        for expert in range(5):
            scores = [
                routing.scores[row, token, layer] / routing.scores[row, token, layer].sum() for row, token in used
            ]
            mean = sum(float(score[expert]) for score in scores) / len(used)
            expected += 5 * shares[expert] * mean / 3
    assert float(balance_loss(routing, counted, loads)) == pytest.approx(expected, rel=1e-5)


def test_the_bias_moves_by_the_rate_towards_equal_loads_and_stays_float32(tmp_path: Path) -> None:
    model, generator = model_of(SIGMOID, torch.bfloat16), torch.Generator().manual_seed(2)
    moe = model.blocks[0].mlp
    assert isinstance(moe, MoE)
    moe.router.bias += 8.0  # neighbouring bfloat16 numbers are 0.06 apart here
    before, batch = moe.router.bias.clone(), batch_of(generator)
    routing = Routing()
    model.hidden(batch.tokens, routing=routing)
    load_of_first = expert_loads(routing, counted_tokens(batch), 8)[0].float()
    Trainer(model, AdamSettings(), balance=BalanceSettings(bias_rate=0.001)).step([batch], next_token)
    expected = before + 0.001 * torch.sign(load_of_first.mean() - load_of_first)
    assert moe.router.bias.dtype == torch.float32
    assert torch.equal(moe.router.bias, expected)
    save(model, tmp_path / "saved")
    loaded = load(tmp_path / "saved").blocks[0].mlp
    assert isinstance(loaded, MoE)
    assert torch.equal(loaded.router.bias, expected)


@pytest.mark.parametrize("config", [SOFTMAX, SIGMOID])
def test_recomputed_activations_and_micro_batches_give_the_same_step(config: dict[str, Any]) -> None:
    results = []
    for recompute, parts in ((False, 1), (True, 1), (False, 2)):
        model, generator = model_of(config), torch.Generator().manual_seed(3)
        model.recompute = recompute
        trainer = Trainer(model, AdamSettings(), balance=BalanceSettings(loss_weight=0.0 if parts > 1 else 0.1))
        whole = batch_of(generator, 4)
        rows = 4 // parts
        batches = [
            Batch(whole.tokens[at : at + rows], whole.targets[at : at + rows], whole.lengths[:rows], (), rows * 32)
            for at in range(0, 4, rows)
        ]
        results.append((trainer.step(batches, next_token), [p.detach().clone() for p in model.parameters()]))
    (plain, weights), (recomputed, same), (split, _) = results
    assert recomputed.metrics == plain.metrics
    assert all(torch.equal(a, b) for a, b in zip(weights, same, strict=True))
    for name in ("expert_load_max", "experts_unused", "expert_entropy"):
        assert split.metrics[name] == pytest.approx(plain.metrics[name])


def test_keys_without_an_effect_are_refused() -> None:
    dense = ModelConfig.from_hugging_face({**COMMON, "model_type": "qwen3"})
    softmax, sigmoid = (ModelConfig.from_hugging_face(config) for config in (SOFTMAX, SIGMOID))
    rate, weight = BalanceSettings(bias_rate=0.01), BalanceSettings(loss_weight=0.1)
    for config in (dense, softmax):
        with pytest.raises(InputError, match=r"sft\.balance\.bias_rate would not be used: the model has no routers"):
            check_balance(rate, config, "sft")
    with pytest.raises(InputError, match=r"rl\.balance\.loss_weight would not be used: the model has no experts"):
        check_balance(weight, dense, "rl")
    with pytest.raises(InputError, match=r"mtp\.balance would not be used"):
        check_balance(rate, sigmoid, "mtp")
    for config in (dense, softmax, sigmoid):
        check_balance(BalanceSettings(), config, "sft")
    check_balance(rate, sigmoid, "sft")
    check_balance(weight, softmax, "sft")
