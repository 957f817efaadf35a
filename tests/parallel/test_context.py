"""Context parallelism against one process: attention, the parts of a batch, and whole models, forward and backward."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import mesh_parity
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import settings as trials
from hypothesis import strategies as st
from mesh_parity import PACKED, UNEVEN, WHOLE, Case, parity, relative, rollout_batch
from ranks import Ranks, open_ranks
from torch import Tensor

from etude.errors import InputError
from etude.kernels.attention import attend
from etude.kernels.loss import IGNORE
from etude.model.communication import step_communication
from etude.model.config import ModelConfig
from etude.model.mtp import shifted
from etude.model.trainer_parts import TrainerSpec
from etude.parallel import context as context_module
from etude.parallel.context import ContextGroup, ContextShard
from etude.parallel.mesh import open_mesh
from etude.parallel.settings import ParallelSettings

CPU = torch.device("cpu")
TOLERANCE = 1e-5
FAMILIES = ("llama", "qwen3", "qwen3_moe", "deepseek_v3")
CP2, CP4 = ParallelSettings(dp_shard=2, cp=2), ParallelSettings(cp=4)


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with open_ranks(4) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with open_ranks(2) as ranks:
        yield ranks


def lively(family: str, **changes: Any) -> dict[str, Any]:
    from families import small_config  # it imports transformers, which the ranks do not need

    return small_config(family, initializer_range=0.2, **changes)


def by_pairs(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[tuple[int, ...], ...], scale: float) -> Tensor:
    """Attend in whole rows, from one mask of all (query, key) pairs."""
    groups = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    number = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths])
    seen = (number[:, :, None] == number[:, None]).tril()
    scores = torch.einsum("rqhd,rkhd->rhqk", q, k) * scale
    return torch.einsum("rhqk,rkhd->rqhd", scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1), v)


def attention_errors(
    settings: ParallelSettings, lengths: tuple[tuple[int, ...], ...], kv_heads: int, wrong: str = ""
) -> dict[str, float]:
    generator = torch.Generator().manual_seed(7)
    shape = len(lengths), sum(lengths[0])
    sizes = {"q": (4, 12), "k": (kv_heads, 12), "v": (kv_heads, 8), "upstream": (4, 8)}
    whole = {name: torch.randn(*shape, *size, generator=generator) for name, size in sizes.items()}
    upstream = whole.pop("upstream")
    leaves = [t.clone().requires_grad_() for t in whole.values()]
    expected = by_pairs(*leaves, lengths, 0.3)
    gradients = torch.autograd.grad(expected, leaves, upstream)
    with open_mesh(settings, CPU) as mesh:
        assert mesh is not None
        context = mesh.context
        assert context is not None
        shard = ContextShard.pack(lengths, context, CPU)
        q, k, v = (context.cut(t).requires_grad_() for t in whole.values())
        # permuted layouts, as models have them: collectives ignore strides
        permuted = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v)]
        out = attend(q, *shard.gather(*permuted), scale=0.3, documents=shard)
        own_upstream = context.cut(upstream)
        with breaking(wrong):
            found = torch.autograd.grad(out, (q, k, v), own_upstream)
        names = ("out", "dq", "dk", "dv")
        pairs = zip(names, (out, *found), (expected, *gradients), strict=True)
        return {name: relative(own, context.cut(want)) for name, own, want in pairs}


@contextmanager
def breaking(wrong: str) -> Iterator[None]:
    """Give the gather's backward a mistake that one could make."""
    right = ContextGroup._reduced
    mistakes: dict[str, tuple[object, str, Any]] = {
        "own gradient only": (ContextGroup, "_reduced", lambda self, parts: parts[self.rank].clone()),
        "mean": (ContextGroup, "_reduced", lambda self, parts: right(self, parts) / self.size),
        "strides": (ContextGroup, "_reduced", lambda self, p: right(self, p.transpose(2, 3).reshape(p.shape))),
        "order of chunks": (context_module, "_by_rank", lambda whole, size: torch.stack(whole.chunk(size, dim=1))),
    }
    with pytest.MonkeyPatch.context() as patch:
        if wrong:
            patch.setattr(*mistakes[wrong])
        yield


@pytest.mark.parametrize("settings", [CP2, CP4], ids=["cp2", "cp4"])
@pytest.mark.parametrize("lengths", [PACKED, WHOLE], ids=["packed", "whole"])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_attention_and_its_gradients_equal_one_process(
    four: Ranks, settings: ParallelSettings, lengths: tuple[tuple[int, ...], ...], kv_heads: int
) -> None:
    for errors in four.run(attention_errors, settings, lengths, kv_heads):
        assert max(errors.values()) < TOLERANCE, errors


@pytest.mark.parametrize("wrong", ["own gradient only", "mean", "order of chunks", "strides"])
def test_a_wrong_backward_of_the_gather_would_be_found(four: Ranks, wrong: str) -> None:
    """The forward and dq stay right, so that only dk and dv can tell."""
    for errors in four.run(attention_errors, CP4, PACKED, 2, wrong):
        assert errors["out"] < TOLERANCE
        assert errors["dq"] < TOLERANCE
        assert errors["dk"] > 0.1
        assert errors["dv"] > 0.1


@trials(max_examples=60, deadline=None)
@given(data=st.data(), size=st.integers(1, 4), chunk=st.integers(1, 4), seed=st.integers(0, 99))
def test_every_query_has_its_documents_keys_in_one_slice(data: st.DataObject, size: int, chunk: int, seed: int) -> None:
    """The chunks of all ranks are all tokens once, and a bottom-right mask in a chunk is the mask of the documents."""
    length = 2 * size * chunk
    cuts = sorted(data.draw(st.sets(st.integers(1, length - 1), max_size=4)) if length > 1 else [])
    lengths = tuple(b - a for a, b in itertools.pairwise([0, *cuts, length]))
    tokens = torch.arange(length)[None]
    seen: dict[int, list[int]] = {}
    for rank in range(size):
        context = ContextGroup(None, rank, size)  # type: ignore[arg-type]
        own, shard = context.cut(tokens)[0], ContextShard.pack([lengths], context, CPU)
        for part in shard.chunks:
            queries, keys = own[part.queries].tolist(), list(range(length))[part.keys]
            sizes = zip(part.query_lengths, part.key_lengths, strict=True)
            at, start = 0, 0
            for m, n in sizes:
                for i in range(m):
                    seen[queries[at + i]] = keys[start : start + n - m + i + 1]
                at, start = at + m, start + n
            assert (at, start) == (len(queries), len(keys))
            assert part.keys.stop <= shard.keys
        assert shard.positions[0].tolist() == [token - max(c for c in [0, *cuts] if c <= token) for token in own]
    starts = [max(c for c in [0, *cuts] if c <= token) for token in range(length)]
    assert seen == {token: list(range(starts[token], token + 1)) for token in range(length)}


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [PACKED, WHOLE], ids=["packed", "whole"])
def test_chunks_on_a_gpu_equal_all_pairs(lengths: tuple[tuple[int, ...], ...]) -> None:
    """The variable-length kernel aligns its causal mask at the bottom right, in the backward too."""
    generator = torch.Generator().manual_seed(3)
    shape = len(lengths), sum(lengths[0])
    q, k, v, upstream = (torch.randn(*shape, heads, 32, generator=generator) for heads in (4, 2, 2, 4))
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    expected = by_pairs(*leaves, lengths, 0.2)
    _, want_k, want_v = torch.autograd.grad(expected, leaves, upstream)
    keys, values = (t.to("cuda", torch.bfloat16).requires_grad_() for t in (k, v))
    for rank in range(4):
        context = ContextGroup(None, rank, 4)  # type: ignore[arg-type]
        shard = ContextShard.pack(lengths, context, torch.device("cuda"))
        own = context.cut(q).to("cuda", torch.bfloat16)
        out = attend(own, keys[:, : shard.keys], values[:, : shard.keys], scale=0.2, documents=shard)
        out.backward(context.cut(upstream).to("cuda", torch.bfloat16))
        assert relative(out.float().cpu(), context.cut(expected)) < 2e-2
    for found, want in ((keys.grad, want_k), (values.grad, want_v)):
        assert found is not None
        assert relative(found.float().cpu(), want) < 2e-2


def shifts(settings: ParallelSettings, offset: int) -> float:
    with open_mesh(settings, CPU) as mesh:
        assert mesh is not None
        assert mesh.context is not None
        whole = torch.randn(2, 24, 3, generator=torch.Generator().manual_seed(1))
        return relative(mesh.context.shifted(mesh.context.cut(whole), offset), mesh.context.cut(shifted(whole, offset)))


def test_shifted_tokens_come_from_other_ranks(four: Ranks) -> None:
    for offset in (1, 2, 3):
        assert max(four.run(shifts, CP4, offset)) == 0
    with pytest.raises(InputError, match="rows of 24 tokens over 4 context ranks are chunks of 3 tokens; expected at"):
        ContextGroup(None, 0, 4).shifted(torch.zeros(1, 6), 4)  # type: ignore[arg-type]


def test_a_batch_is_cut_with_all_its_fields_and_padded() -> None:
    batch = rollout_batch(Case(lively("qwen3_moe"), lengths=UNEVEN, replay=True))
    parts = [batch.for_context(ContextGroup(None, rank, 4)) for rank in range(4)]  # type: ignore[arg-type]
    assert parts[0].tokens.shape == (4, 6)
    assert all(part.lengths[1] == (22, 2) and part.row_loss_tokens == batch.loss_tokens for part in parts)
    assert sum(part.loss_tokens for part in parts) == batch.loss_tokens
    for name, padding in batch.TOKEN_FIELDS.items():
        of_ranks = [getattr(part, name) for part in parts]
        whole = torch.cat([t[:, :3] for t in of_ranks] + [t[:, 3:] for t in of_ranks[::-1]], dim=1)
        assert bool((whole[:, 22:] == padding).all())
        if name != "counted":
            assert torch.equal(whole[:, :22], getattr(batch, name))
        else:
            last = (batch.targets != IGNORE).int().cumsum(1).argmax(1)
            assert whole.sum(1).tolist() == (last + 1).tolist()
    assert batch.for_context(None) is batch


def test_a_row_that_does_not_divide_is_refused() -> None:
    context = ContextGroup(None, 0, 4)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="over 4 ranks cuts a row into 8 equal chunks; a row of 22 tokens does not"):
        context.cut(torch.zeros(1, 22))


def received(settings: ParallelSettings, config: dict[str, Any], recompute: bool) -> int:
    """Return the bytes that one rank gets from others in a forward and a backward, counted in the collectives."""
    count = 0
    gather, reduce = dist.all_gather_into_tensor, dist.reduce_scatter_tensor

    def counting(collective: Any, whole: int) -> Any:
        def call(*tensors: Tensor, group: dist.ProcessGroup) -> None:
            nonlocal count
            count += tensors[whole].nbytes * (group.size() - 1) // group.size()
            collective(*tensors, group=group)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather_into_tensor", counting(gather, 0))
        patch.setattr(dist, "reduce_scatter_tensor", counting(reduce, 1))
        with open_mesh(settings, CPU) as mesh:
            assert mesh is not None
            case = Case(config, lengths=((24,),), recompute=recompute)
            found = {name: module.bfloat16() for name, module in mesh_parity.modules(case).items()}
            mesh_parity.backward(found, rollout_batch(case).for_context(mesh.context), case, 1)
    return count


def test_the_communication_volume_is_what_the_collectives_move(four: Ranks) -> None:
    for family in ("qwen3", "deepseek_v3"):
        for recompute in (False, True):
            config = ModelConfig.from_hugging_face(lively(family))
            expected = step_communication(config, TrainerSpec(24, parallel=CP4, recompute=recompute)).context
            assert four.run(received, CP4, lively(family), recompute) == [expected] * 4


# One of each family; the product is slow.
FAST = [
    (CP2, Case({}, seed=1), "llama"),
    (CP4, Case({}, UNEVEN, "policy_gradient", recompute=True), "qwen3"),
    (CP2, Case({}, UNEVEN, "policy_gradient", replay=True, balance=0.3), "qwen3_moe"),
    (CP4, Case({}, WHOLE, "mtp", recompute=True), "deepseek_v3"),
    (CP4, Case({}, PACKED, "mtp", idle_targets=True), "llama"),
]


def check(ranks: Ranks, settings: ParallelSettings, case: Case) -> None:
    for errors in ranks.run(parity, settings, case):
        worst = max(errors, key=lambda name: errors[name])
        assert errors[worst] < TOLERANCE, (worst, errors[worst], case)


@pytest.mark.parametrize(("settings", "case", "family"), FAST, ids=lambda each: each if isinstance(each, str) else "")
def test_a_model_equals_one_process(four: Ranks, settings: ParallelSettings, case: Case, family: str) -> None:
    check(four, settings, replace(case, config=lively(family)))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths", [PACKED, WHOLE, UNEVEN], ids=["packed", "whole", "uneven"])
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_the_product_of_meshes_and_options_equals_one_process(
    two: Ranks, four: Ranks, family: str, lengths: tuple[tuple[int, ...], ...], recompute: bool
) -> None:
    case = Case(lively(family), lengths, recompute=recompute, seed=3)
    experts = "num_experts_per_tok" in case.config
    options = [case, replace(case, objective="mtp"), replace(case, lora=True, idle_targets=True)]
    options += [replace(case, objective="policy_gradient", replay=experts, balance=0.3 if experts else 0.0)]
    for option in options:
        check(two, ParallelSettings(cp=2), option)
        for settings in (CP2, CP4, ParallelSettings(dp_replicate=2, cp=2)):
            check(four, settings, option)
            if experts:
                check(four, settings.model_copy(update={"ep": 2}), option)
