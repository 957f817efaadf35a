"""The four uses of one forward: packed equals separate, cached equals whole, replay follows its definition."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, random_tokens, small_config
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.errors import InputError
from etude.model import Documents, KVCache, ModelConfig, Routing, Transformer, initialize
from etude.model.moe import filter_replay

MOE = ("qwen3_moe", "deepseek_v3")


def fresh(family: str, seed: int = 0, **changes: object) -> Transformer:
    config = small_config(family, initializer_range=0.2, **changes)
    model = initialize(ModelConfig.from_hugging_face(config), seed=seed)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("router.bias"):
                buffer.normal_(std=0.1, generator=torch.Generator().manual_seed(seed))
    return model


def tokens_for(model: Transformer, rows: int, count: int, seed: int = 0) -> torch.Tensor:
    return random_tokens({"vocab_size": model.config.vocab_size}, rows, count, seed)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=8, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=3), seed=st.integers(0, 99)
)
def test_packed_documents_equal_separate_ones(family: str, rows: list[list[int]], seed: int) -> None:
    model = fresh(family, seed)
    width = max(map(sum, rows))
    rows = [[*row, width - sum(row)] if sum(row) < width else row for row in rows]
    tokens = tokens_for(model, len(rows), width, seed)
    with torch.no_grad():
        packed = model(tokens, documents=Documents.pack(rows))
        alone = [model(doc[None])[0] for row, t in zip(rows, tokens, strict=True) for doc in t.split(row)]
    torch.testing.assert_close(packed.flatten(0, 1), torch.cat(alone), atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_gradient_crosses_between_documents(family: str) -> None:
    model = fresh(family)
    tokens = tokens_for(model, 1, 12)
    seen: list[torch.Tensor] = []

    def keep(_module: object, _inputs: object, out: torch.Tensor) -> None:
        out.retain_grad()
        seen.append(out)

    model.embed.register_forward_hook(keep)
    model(tokens, documents=Documents.pack([[5, 7]]))[0, 5:].sum().backward()
    gradient = seen[0].grad
    assert gradient is not None
    assert gradient[0, :5].abs().max() == 0
    assert gradient[0, 5:].abs().min(dim=-1).values.max() > 0


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=8, deadline=None)
@given(cuts=st.lists(st.integers(1, 7), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_cached_equals_uncached(family: str, cuts: list[int], seed: int) -> None:
    model = fresh(family, seed)
    tokens = tokens_for(model, 3, sum(cuts), seed)
    cache = KVCache(model.config, rows=3, length=sum(cuts), dtype=torch.float32)
    with torch.no_grad():
        pieces = [model(piece, cache=cache) for piece in tokens.split(cuts, dim=1)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), model(tokens), atol=1e-5, rtol=0)


def test_a_latent_cache_holds_latents() -> None:
    model = fresh("deepseek_v3")
    latent = model.config.latent
    assert latent is not None
    cache = KVCache(model.config, rows=1, length=8, dtype=torch.float32)
    assert cache.keys[0].shape == (1, 8, 1, latent.kv_rank + latent.rope_dim)
    assert cache.values[0].numel() == 0


@pytest.mark.parametrize("family", MOE)
@settings(max_examples=10, deadline=None)
@given(ratio=st.sampled_from([0.0, 0.5, 1.0]), shuffle=st.booleans(), seed=st.integers(0, 99))
def test_replaying_the_routers_choice_changes_no_bit(family: str, ratio: float, shuffle: bool, seed: int) -> None:
    model = fresh(family, seed)
    tokens = tokens_for(model, 2, 11, seed)
    recorded = Routing()
    plain = model(tokens, routing=recorded)
    assert torch.equal(plain, model(tokens))
    chosen = recorded.chosen
    assert chosen is not None
    given_ids = chosen.flip(-1) if shuffle else chosen
    replayed = Routing(given_ids.to(torch.int16), plausibility=ratio)
    assert torch.equal(model(tokens, routing=replayed), plain)
    assert replayed.chosen is not None
    assert torch.equal(replayed.chosen, chosen)


@pytest.mark.parametrize("family", MOE)
def test_replay_overrides_some_tokens_and_leaves_the_others(family: str) -> None:
    model = fresh(family)
    tokens = tokens_for(model, 1, 6)
    own = Routing()
    model(tokens, routing=own)
    assert own.chosen is not None
    replay = torch.full_like(own.chosen, -1)
    replay[0, 4] = torch.tensor([0, 1, 2])
    forced = Routing(replay)
    model(tokens, routing=forced)
    assert forced.chosen is not None
    assert torch.equal(forced.chosen[0, :4], own.chosen[0, :4])
    assert (forced.chosen[0, 4] == torch.tensor([0, 1, 2])).all()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_plausibility_filter_equals_its_definition(data: st.DataObject) -> None:
    """The reference applies the rule expert by expert."""
    experts, k = data.draw(st.integers(4, 9)), data.draw(st.integers(1, 4))
    ratio = data.draw(st.sampled_from([0.0, 0.3, 0.8, 1.0]))
    scores = torch.rand(5, experts, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 999))))
    replay = torch.tensor(
        data.draw(st.lists(st.lists(st.integers(-1, experts - 1), min_size=k, max_size=k), min_size=5, max_size=5))
    )
    own = scores.topk(k).indices
    got = filter_replay(scores, own, replay, ratio)
    for row in range(5):
        weakest = min(scores[row, e].item() for e in own[row].tolist())
        kept = {e for e in replay[row].tolist() if e >= 0 and scores[row, e] >= torch.tensor(ratio) * weakest}
        for candidate in own[row].tolist():
            if len(kept) < k:
                kept.add(candidate)
        assert set(got[row].tolist()) == kept


@pytest.mark.parametrize("family", MOE)
def test_gradients_reach_the_router_through_a_replay(family: str) -> None:
    model = fresh(family)
    tokens = tokens_for(model, 2, 9)
    own = Routing()
    model(tokens, routing=own)
    assert own.chosen is not None
    model(tokens, routing=Routing((own.chosen + 1) % 8)).logsumexp(-1).sum().backward()
    routers = [p for name, p in model.named_parameters() if name.endswith("router.weight")]
    assert routers
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in routers)


def test_wrong_arguments_are_errors() -> None:
    dense, moe = fresh("llama"), fresh("qwen3_moe")
    tokens = tokens_for(moe, 1, 5)
    with pytest.raises(InputError, match="no routing"):
        dense(tokens, routing=Routing())
    with pytest.raises(InputError, match=r"shape \[1, 4, 3, 3\].*\[1, 5, 3, 3\]"):
        moe(tokens, routing=Routing(torch.zeros(1, 4, 3, 3, dtype=torch.int64)))
    stray = torch.zeros(1, 5, 3, 3, dtype=torch.int64)
    stray[0, 0, 0, 0] = 8
    with pytest.raises(InputError, match=r"span 0\.\.8; expected -1\.\.7"):
        moe(tokens, routing=Routing(stray))
    with pytest.raises(InputError, match="plausibility"):
        Routing(plausibility=1.5)
    with pytest.raises(InputError, match="do not fit"):
        dense(tokens, cache=KVCache(dense.config, 1, 4, torch.float32))
    with pytest.raises(InputError, match="cannot be combined"):
        dense(tokens, documents=Documents.pack([[5]]), cache=KVCache(dense.config, 1, 9, torch.float32))
    with pytest.raises(InputError, match="fill rows"):
        dense(tokens, documents=Documents.pack([[4]]))
    with pytest.raises(InputError, match="one length"):
        Documents.pack([[4], [5]])


def test_a_cache_needs_as_many_rows_as_the_tokens() -> None:
    for family in FAMILIES:
        model = fresh(family)
        cache = KVCache(model.config, 2, 9, torch.float32)
        with pytest.raises(InputError, match="2 rows; the tokens have 1"):
            model(tokens_for(model, 1, 3), cache=cache)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_tokens_give_no_logits(family: str) -> None:
    model = fresh(family)
    assert model(torch.zeros(2, 0, dtype=torch.int64)).shape == (2, 0, 61)


def test_invalid_replayed_ids_are_left_to_the_router() -> None:
    scores = torch.rand(4, 6, generator=torch.Generator().manual_seed(0))
    own = scores.topk(2).indices
    strays = torch.tensor([[9, -5], [6, 6], [-1, 99], [-2, 7]])
    assert torch.equal(filter_replay(scores, own, strays, 0.0).sort().values, own.sort().values)


def test_a_model_cast_to_bfloat16_keeps_its_angles_and_its_router_bias() -> None:
    model = fresh("deepseek_v3")
    before = {n: b.clone() for n, b in model.named_buffers()}
    model.to(torch.bfloat16)
    for name, buffer in model.named_buffers():
        assert buffer.dtype == torch.float32
        assert torch.equal(buffer, before[name])
