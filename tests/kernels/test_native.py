"""The compiled kernels against plain torch, which runs wherever gradients are enabled."""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from etude.kernels import native
from etude.kernels.draw import DRAW, Drawn, draw_untruncated, uniform
from etude.kernels.fused import rms_norm, rotate, swiglu
from etude.kernels.paged import attend_pages, store_pages

REASON = native.unavailable_reason()
pytestmark = pytest.mark.skipif(REASON != "", reason=f"no compiled kernels: {REASON}")


def both(function: Callable[..., Tensor], *inputs: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Return the results of the compiled kernel and of torch."""
    with torch.enable_grad():
        plain = function(*inputs, **options).detach()
    with torch.no_grad():
        return function(*inputs, **options), plain


@pytest.mark.parametrize("shape", [(1, 1, 8), (1, 32, 192), (3, 7, 33), (1, 300, 576)])
def test_norm_gate_and_rotation_are_those_of_torch(shape: tuple[int, ...]) -> None:
    torch.manual_seed(sum(shape))
    x, weight = torch.randn(shape) * 5, torch.randn(shape[-1])
    for mine, plain in (both(rms_norm, x, weight, 1e-5), both(swiglu, torch.randn(*shape[:-1], 2 * shape[-1]) * 8)):
        assert torch.allclose(mine, plain, rtol=2e-6, atol=2e-6)
    angles = torch.randn(1, shape[1], 1, 8) * 50
    heads = torch.randn(1, shape[1], 5 * 16)[..., 16:64].unflatten(-1, (3, 16))  # a part of wider rows
    mine, plain = both(rotate, heads, angles.cos(), angles.sin())
    assert torch.allclose(mine, plain, rtol=1e-6, atol=1e-6)


def test_gates_far_from_zero_neither_overflow_nor_vanish() -> None:
    gate = torch.tensor([-200.0, -80.0, -1e-30, 0.0, 1e-30, 80.0, 200.0])
    mine, plain = both(swiglu, torch.cat((gate, torch.ones(7))))
    assert torch.allclose(mine, plain, rtol=2e-6, atol=1e-34)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "latent"), [(6, 3, 32, 0), (4, 4, 64, 0), (9, 3, 24, 0), (4, 1, 40, 32)]
)
def test_attention_over_pages_is_that_over_gathered_keys(heads: int, kv_heads: int, dim: int, latent: int) -> None:
    torch.manual_seed(heads * dim)
    page, pages, lengths = 4, 40, torch.tensor([1, 4, 5, 37, 16])
    keys = torch.randn(pages * page, kv_heads, dim) * 2
    values = keys[..., :latent] if latent else torch.randn(pages * page, kv_heads, dim)
    tables = torch.randint(pages, (5, 10))
    q = torch.randn(5, heads, dim)
    mine, plain = both(attend_pages, q, keys, values, tables, lengths, page, scale=dim**-0.5)
    assert mine.shape == (5, heads, latent or dim)
    assert torch.allclose(mine, plain, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        alone = [
            attend_pages(q[i : i + 1], keys, values, tables[i : i + 1], lengths[i : i + 1], page, scale=dim**-0.5)
            for i in range(5)
        ]
    assert torch.equal(torch.cat(alone), mine)  # bit for bit: a row does not see its neighbours


def test_new_keys_and_values_go_to_their_slots() -> None:
    wide = torch.randn(3, 10 * 8)
    k, v = wide[:, :16].unflatten(-1, (2, 8)), wide[:, 16:32].unflatten(-1, (2, 8))
    keys, values, slots = torch.zeros(20, 2, 8), torch.zeros(20, 2, 8), torch.tensor([7, 0, 19])
    with torch.no_grad():
        store_pages(k, v, keys, values, slots)
    assert torch.equal(keys[slots], k)
    assert torch.equal(values[slots], v)
    assert (keys.abs().sum((1, 2)) > 0).sum() == 3


@pytest.mark.parametrize("size", [1, 5, 64, 65, 4096])
def test_a_sampled_token_is_the_one_its_uniform_points_at(size: int) -> None:
    torch.manual_seed(size)
    n = 500
    logits = torch.randn(n, size) * 4
    logits[::7, 0] = float("-inf") if size > 1 else 0.0
    temperatures = torch.rand(n) * 1.5 + 0.2
    temperatures[::5], temperatures[1::5] = 0.0, 1.0
    seeds, positions = torch.arange(n), torch.arange(n) % 9
    with torch.no_grad():
        mine = draw_untruncated(logits, temperatures, seeds, positions)
    with torch.enable_grad():
        plain = Drawn(*(part.detach() for part in draw_untruncated(logits, temperatures, seeds, positions)))
    assert torch.allclose(mine.raw_logprobs, logits.log_softmax(-1).gather(1, mine.tokens[:, None])[:, 0], atol=2e-6)
    same = mine.tokens == plain.tokens
    assert same.float().mean() > 0.99  # the rest: a uniform on the edge between two tokens
    assert torch.allclose(mine.logprobs[same], plain.logprobs[same], atol=5e-6)
    probabilities = (logits.double() / temperatures.double().clamp(min=1e-9)[:, None]).softmax(-1)
    ends, target = probabilities.cumsum(-1).gather(1, mine.tokens[:, None])[:, 0], uniform(seeds, positions, DRAW)
    starts = ends - probabilities.gather(1, mine.tokens[:, None])[:, 0]
    sampled = temperatures > 0
    assert ((starts - 1e-5 <= target) & (target <= ends + 1e-5))[sampled].all()
    assert torch.equal(mine.tokens[~sampled], logits[~sampled].argmax(-1))
    assert (logits.gather(1, mine.tokens[:, None]) > -1e30).all()


def test_a_uniform_rounded_to_one_samples_a_token_with_probability() -> None:
    logits = torch.full((1, 200), float("-inf"))
    logits[0, 70] = logits[0, 130] = 0.0
    with torch.no_grad():
        library = native.native_kernels_for(logits)
    assert library is not None
    token, scores, scratch = torch.empty(1, dtype=torch.int64), torch.empty(2), torch.empty(200)
    temperatures, target = (
        torch.ones(1),
        torch.ones(1, dtype=torch.float64),
    )  # 1.0 itself is never drawn, but may be rounded to
    outputs = token.data_ptr(), scores.data_ptr(), scores[1:].data_ptr(), scratch.data_ptr()
    library.draw(logits.data_ptr(), temperatures.data_ptr(), target.data_ptr(), *outputs, 1, 200)
    assert token.item() == 130


def test_the_environment_variable_turns_them_off() -> None:
    code = "from etude.kernels import native; print(native.unavailable_reason())"
    env = os.environ | {native.SWITCH: "off"}
    said = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert said.strip() == f"{native.SWITCH}=off"
