"""Bursts of decoding, run eagerly where no graph can be captured: the same sequences as step by step."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from engines import engine_of, finish, prompts_of

from etude.inference import graphs
from etude.inference.engine import Engine
from etude.inference.graphs import MIN_TABLE_TOKENS, CudaGraphRunner, DecodeGraph, table_width
from etude.inference.request import SequenceState
from etude.inference.sampling import Sampling

PROMPTS = prompts_of((3, 17, 40, 64, 1, 33))


class EagerRunner(CudaGraphRunner):
    """Replays a step by running it; page numbers have the type that attention on a CPU reads."""

    def capture(self, graph: DecodeGraph) -> None:
        graph.tables = graph.tables.long()


def bursting(family: str, burst: int, **options: Any) -> Engine:
    engine = engine_of(family, **options)
    o = engine.options
    sizes = {"pages": engine.pool.count, "steps": burst, "max_sequences": o.max_sequences}
    engine.graph_runner = EagerRunner(engine.model, engine.cache, **sizes)
    engine.options = type(o)(**{**vars(o), "burst": burst})
    engine.scheduler.lookahead = burst
    return engine


def play(engine: Engine, every: int) -> list[SequenceState]:
    """Submit prompts one after another, `every` steps apart, while others decode."""
    sequences = []
    for number, prompt in enumerate(PROMPTS):
        sequences += engine.submit(prompt, Sampling(max_tokens=20 + number, temperature=0.8, seed=number, samples=2))
        for _ in range(every):
            engine.step()
            engine.pool.check_invariants()
    finish(engine)
    return sequences


def chosen(sequence: SequenceState) -> npt.NDArray[np.unsignedinteger]:
    return np.concatenate(sequence.routing) if sequence.routing else np.zeros((0, 0), np.uint8)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("every", [0, 1, 3])
@pytest.mark.parametrize("tokens", [4096, 400])
@pytest.mark.parametrize("read", [0, 24, 8192])  # of the mixed steps, graphs run none, some or all
def test_sequences_are_those_of_single_steps(
    family: str, every: int, tokens: int, read: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "MAX_GRAPH_TOKENS", read)
    plain = play(engine_of(family, kv_cache_tokens=tokens, max_step_tokens=64), every)
    burst = play(engine := bursting(family, 4, kv_cache_tokens=tokens, max_step_tokens=64), every)
    assert [sequence.output for sequence in burst] == [sequence.output for sequence in plain]
    for one, other in zip(burst, plain, strict=True):
        assert one.raw_logprobs == pytest.approx(other.raw_logprobs, abs=1e-4)
        assert np.array_equal(chosen(one), chosen(other))
    assert engine.pool.held == 0


def test_a_warmed_up_engine_captures_nothing_while_it_works() -> None:
    plain = play(engine_of("llama", kv_cache_tokens=4096, max_step_tokens=200), 1)
    engine = bursting("llama", 4, kv_cache_tokens=4096, max_step_tokens=200)
    runner = engine.graph_runner
    assert runner is not None
    steps = sum(1 for _ in engine.warm_up())
    captured = len(runner.decode_graphs), len(runner.mixed_graphs)
    assert min(captured) > 1
    assert sum(captured) == steps
    assert [sequence.output for sequence in play(engine, 1)] == [sequence.output for sequence in plain]
    assert (len(runner.decode_graphs), len(runner.mixed_graphs)) == captured


def test_a_burst_follows_every_step_with_prefill_unless_prompts_pile_up() -> None:
    engine = bursting("llama", 4, kv_cache_tokens=4096, max_step_tokens=48)
    first = engine.submit(PROMPTS[1], Sampling(max_tokens=64, seed=1))[0]

    def grown() -> int:
        before = len(first.output)
        engine.step()
        return len(first.output) - before

    assert grown() == 1
    grew = []
    for prompt in PROMPTS[:4]:  # one short prompt before every step
        engine.submit(prompt[:8], Sampling(max_tokens=2, seed=2))
        grew.append(grown())
    assert grew == [4, 1, 4, 1]
    engine.submit((PROMPTS[3] + PROMPTS[2])[103:3:-1], Sampling(max_tokens=2, seed=3))  # 100 tokens: three steps
    assert [grown() for _ in range(5)] == [4, 1, 1, 1, 4]
    finish(engine)


@pytest.mark.parametrize("size", [8, 16, 256])
def test_page_tables_are_as_wide_as_the_sequences_need(size: int) -> None:
    narrow = MIN_TABLE_TOKENS // size
    for pages, width in ((1, 1), (narrow, 1), (narrow + 1, 2), (2 * narrow, 2), (5 * narrow, 8), (8 * narrow + 1, 16)):
        assert table_width(pages, size) == width * narrow >= pages
