"""The same network on a GPU: float32 equals the CPU, bfloat16 makes its choices, packed and cached included."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, random_tokens, small_config

from etude.model import Documents, KVCache, ModelConfig, Routing, Transformer, compile_blocks, initialize

pytestmark = pytest.mark.gpu


def fresh(family: str, dtype: torch.dtype = torch.float32) -> Transformer:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "vocab_size": 128}
    wide = {"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "kv_lora_rank": 32, "q_lora_rank": 32}
    heads = {"head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape = {**sizes, **wide, "num_attention_heads": 4} if family == "deepseek_v3" else {**sizes, **heads}
    config = ModelConfig.from_hugging_face(small_config(family, **shape, initializer_range=0.1))
    return initialize(config, seed=0, dtype=dtype)


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_on_the_gpu_equals_the_cpu(family: str) -> None:
    model = fresh(family)
    tokens = random_tokens({"vocab_size": 128}, 2, 48)
    packing = [[20, 28], [1, 47]]
    with torch.no_grad():
        whole, packed = model(tokens), model(tokens, documents=Documents.pack(packing))
        model.cuda()
        torch.testing.assert_close(model(tokens.cuda()).cpu(), whole, atol=1e-4, rtol=0)
        got = model(tokens.cuda(), documents=Documents.pack(packing, "cuda")).cpu()
        torch.testing.assert_close(got, packed, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_packed_and_cached_equal_whole(family: str) -> None:
    model = fresh(family, torch.bfloat16).cuda()
    tokens = random_tokens({"vocab_size": 128}, 2, 48).cuda()
    cache = KVCache(model.config, rows=2, length=48, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        whole = model(tokens)
        cached = torch.cat([model(piece, cache=cache) for piece in tokens.split([30, 1, 17], dim=1)], dim=1)
        packed = model(tokens, documents=Documents.pack([[20, 28]] * 2, "cuda"))
        alone = torch.cat([model(piece) for piece in tokens.split([20, 28], dim=1)], dim=1)
    spread = whole.float().std()
    assert (cached.float() - whole.float()).abs().mean() < 0.02 * spread
    assert (packed.float() - alone.float()).abs().mean() < 0.02 * spread


@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_blocks_train_like_plain_ones(family: str) -> None:
    plain, compiled = fresh(family, torch.bfloat16).cuda(), compile_blocks(fresh(family, torch.bfloat16).cuda())
    tokens = random_tokens({"vocab_size": 128}, 2, 64).cuda()
    documents = Documents.pack([[30, 34]] * 2, "cuda")
    # One rounding apart, a router may choose another expert; replay keeps the two on the same path.
    own = Routing() if plain.config.moe else None
    plain(tokens, documents=documents, routing=own).float().logsumexp(-1).mean().backward()
    replay = Routing(own.chosen) if own else None
    compiled(tokens, documents=documents, routing=replay).float().logsumexp(-1).mean().backward()
    for (name, a), b in zip(plain.named_parameters(), compiled.parameters(), strict=True):
        assert a.grad is not None, name
        assert b.grad is not None, name
        assert (a.grad - b.grad).float().norm() <= 0.05 * a.grad.float().norm() + 1e-6, name


def test_replaying_the_routers_choice_changes_no_bit_on_a_gpu() -> None:
    model = fresh("deepseek_v3", torch.bfloat16).cuda()
    tokens = random_tokens({"vocab_size": 128}, 2, 48).cuda()
    own = Routing()
    plain = model(tokens, routing=own)
    assert own.chosen is not None
    assert torch.equal(model(tokens, routing=Routing(own.chosen.to(torch.int16), plausibility=0.9)), plain)
