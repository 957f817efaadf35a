"""The engine on CUDA: its kernels against plain torch, its graphs against the model's own forward."""

import pytest
import torch
from families import small_config

from etude.inference import graphs
from etude.inference.engine import Engine
from etude.inference.sampling import Sampling
from etude.inference.settings import EngineOptions
from etude.kernels import fused
from etude.kernels.draw import apply_temperature, draw_untruncated
from etude.kernels.paged import Blocks, _gathered, attend_blocks, attend_pages
from etude.model.config import ModelConfig
from etude.model.transformer import Transformer, initialize

pytestmark = pytest.mark.gpu


def model_of(family: str, dtype: torch.dtype, **changes: object) -> Transformer:
    return initialize(ModelConfig.from_hugging_face(small_config(family, **changes)), 0, dtype).to("cuda").eval()


def test_fused_kernels_round_as_plain_torch_does() -> None:
    torch.manual_seed(0)
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(3, 7, 576, device="cuda", dtype=dtype)
        weight = torch.rand(576, device="cuda", dtype=dtype) + 0.5
        q = torch.randn(3, 7, 9, 64, device="cuda", dtype=dtype)
        cos, sin = (torch.randn(3, 7, 1, 32, device="cuda").cos().to(dtype) for _ in range(2))
        plain = fused.rms_norm(x, weight, 1e-5), fused.swiglu(x), fused.rotate(q, cos, sin)
        with torch.no_grad():
            assert fused.uses_fused_kernels(x)
            quick = fused.rms_norm(x, weight, 1e-5), fused.swiglu(x), fused.rotate(q, cos, sin)
        for a, b in zip(plain, quick, strict=True):
            assert (a != b).float().mean() < (0.002 if dtype == torch.bfloat16 else 1)  # a sum in another order
            torch.testing.assert_close(a, b, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (8, 8, 32), (16, 2, 128)])
def test_attention_over_pages_is_attention(heads: int, kv_heads: int, dim: int, exact: bool) -> None:
    torch.manual_seed(0)
    size, pages, n = 16, 400, 40
    keys, values = (torch.randn(pages * size, kv_heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn(n, heads, dim, device="cuda", dtype=torch.bfloat16)
    tables = torch.randint(0, pages, (n, 60), device="cuda", dtype=torch.int32)
    lengths = torch.randint(1, 60 * size, (n,), device="cuda")
    scale = dim**-0.5
    got = attend_pages(q, keys, values, tables, lengths, size, scale=scale, exact=exact)
    wide = _gathered(q.float(), keys.float(), values.float(), tables.long(), lengths, size, scale)
    torch.testing.assert_close(got.float(), wide, rtol=2e-2, atol=1e-2)
    if exact:
        alone = attend_pages(q[7:8], keys, values, tables[7:8], lengths[7:8], size, scale=scale, exact=True)
        assert torch.equal(alone, got[7:8])


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (8, 8, 32), (16, 2, 128), (32, 1, 64), (8, 4, 256)])
def test_prefill_and_decoding_in_one_step_is_attention(heads: int, kv_heads: int, dim: int) -> None:
    torch.manual_seed(0)
    size, pages, width = 16, 400, 100
    keys, values = (torch.randn(pages * size, kv_heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    tables = torch.randint(0, pages, (12, width), device="cuda", dtype=torch.int32)
    lengths = torch.tensor([1, 700, 16, 1600, *[0] * 8], device="cuda")
    queries, rows, first = Blocks.queries_of(heads, kv_heads), [], 4
    for sequence, (place, count) in enumerate(((0, 1), (0, 300), (37, 64), (1000, 600), (1599, 1)), 4):
        rows += Blocks.split(sequence, first, count, place, queries)
        first += count
    blocks = Blocks(torch.tensor([*rows, *[(0, 0, 0, 0)] * 9], device="cuda", dtype=torch.int32), queries)
    q = torch.randn(first + 17, heads, dim, device="cuda", dtype=torch.bfloat16)
    got = attend_blocks(q, keys, values, tables, lengths, blocks, size, scale=dim**-0.5)
    wide = q.float(), keys.float(), values.float()  # float32: no kernel takes it
    want = attend_blocks(*wide, tables, lengths, blocks, size, scale=dim**-0.5)
    torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=1e-2)
    assert not got[first:].any()


def test_drawing_follows_the_distribution_and_the_seed() -> None:
    torch.manual_seed(0)
    n, size = 200_000, 50
    logits = torch.randn(1, size, device="cuda").expand(n, size).contiguous()
    temperature = torch.full((n,), 0.7, device="cuda")
    seeds, positions = torch.arange(n, device="cuda"), torch.zeros(n, dtype=torch.int64, device="cuda")
    drawn = draw_untruncated(logits, temperature, seeds, positions)
    want = apply_temperature(logits[:1].log_softmax(-1), temperature[:1])[0].double()
    counts = torch.bincount(drawn.tokens, minlength=size).double()
    chi_square = ((counts - n * want) ** 2 / (n * want)).sum()
    assert chi_square < 100, float(chi_square)  # 49 degrees of freedom: 1 in 30,000
    torch.testing.assert_close(drawn.logprobs, want.log().float()[drawn.tokens], rtol=1e-4, atol=1e-4)
    raw = logits[0].log_softmax(-1)
    torch.testing.assert_close(drawn.raw_logprobs, raw[drawn.tokens], rtol=1e-4, atol=1e-4)
    again = draw_untruncated(logits[5:9], temperature[5:9], seeds[5:9], positions[5:9])
    assert torch.equal(again.tokens, drawn.tokens[5:9])
    greedy = draw_untruncated(logits, torch.zeros(n, device="cuda"), seeds, positions)
    assert (greedy.tokens == logits[0].argmax()).all()


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("read", [0, 40, 8192])  # of the mixed steps, graphs run none, some or all
@pytest.mark.parametrize("budget", [64, 512])
def test_the_engine_agrees_with_the_models_own_forward(
    family: str, dtype: torch.dtype, read: int, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "MAX_GRAPH_TOKENS", read)
    model = model_of(family, dtype, max_position_embeddings=512)
    options = EngineOptions(kv_cache_tokens=2048, page_size=8, max_sequences=16, max_step_tokens=budget, burst=4)
    engine = Engine(model, options)
    warmed_up = 0
    if budget == 512:  # all graphs are captured before the weights come
        warmed_up = sum(1 for _ in engine.warm_up())
        engine.load({name: weight.clone() for name, weight in model.state_dict().items()}, 1)
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(0, model.config.vocab_size, (n,), generator=generator).tolist() for n in (3, 17, 40, 64, 1, 200)
    ]
    sequences = [engine.submit(prompt, Sampling(max_tokens=24, seed=7))[0] for prompt in prompts]
    while engine.step():
        engine.pool.check_invariants()
    assert engine.pool.held == 0
    if warmed_up and engine.graph_runner:
        assert len(engine.graph_runner.decode_graphs) + len(engine.graph_runner.mixed_graphs) == warmed_up
    for sequence in sequences:
        assert len(sequence.output) == 24
        with torch.no_grad():
            logits = model(torch.tensor([sequence.prompt + sequence.output], device="cuda"))[0].float().log_softmax(-1)
        want = [float(logits[len(sequence.prompt) - 1 + i, token]) for i, token in enumerate(sequence.output)]
        gap = max(abs(a - b) for a, b in zip(want, sequence.raw_logprobs, strict=True))
        assert gap < (1e-3 if dtype == torch.float32 else 0.15), gap


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_alone_or_in_a_batch_a_sequence_is_the_same_to_the_last_bit(family: str) -> None:
    model = model_of(family, torch.bfloat16)
    generator = torch.Generator().manual_seed(2)
    sizes = (50, 3, 70, 33, 100)
    prompts = [torch.randint(0, model.config.vocab_size, (n,), generator=generator).tolist() for n in sizes]

    def play(chosen: list[int]) -> dict[int, tuple[list[int], list[float], list[float]]]:
        options = EngineOptions(
            kv_cache_tokens=8192, page_size=16, max_sequences=8, max_step_tokens=512, burst=4, invariant=True
        )
        engine = Engine(model, options)
        sequences = {i: engine.submit(prompts[i], Sampling(max_tokens=24, seed=i))[0] for i in chosen}
        while engine.step():
            engine.pool.check_invariants()
        return {i: (s.output, s.logprobs, s.raw_logprobs) for i, s in sequences.items()}

    together = play([4, 2, 0, 1, 3])
    for i in range(len(prompts)):
        assert play([i])[i] == together[i]
