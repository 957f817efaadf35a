"""Bursts of decoding, replayed by hand where no graph can be captured: the same streams as step by step."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from engines import engine_of, finish, prompts_of

from etude.inference import graphs
from etude.inference.engine import Engine
from etude.inference.graphs import NARROW, Decoder, Graph, table_width
from etude.inference.request import Stream
from etude.inference.sampling import Sampling

PROMPTS = prompts_of((3, 17, 40, 64, 1, 33))


class ByHand(Decoder):
    """Replays a step by running it; the page numbers are of the type that attention on a CPU reads."""

    def capture(self, graph: Graph) -> None:
        graph.tables = graph.tables.long()


def bursting(family: str, burst: int, **options: Any) -> Engine:
    engine = engine_of(family, **options)
    o = engine.options
    engine.decoder = ByHand(engine.model, engine.cache, pages=engine.pool.count, steps=burst, most=o.max_streams)
    engine.options = type(o)(**{**vars(o), "burst": burst})
    engine.scheduler.ahead = burst
    return engine


def play(engine: Engine, every: int) -> list[Stream]:
    """Prompts that arrive one after another, `every` steps apart, while others decode."""
    streams = []
    for number, prompt in enumerate(PROMPTS):
        streams += engine.submit(prompt, Sampling(max_tokens=20 + number, temperature=0.8, seed=number, samples=2))
        for _ in range(every):
            engine.step()
            engine.pool.check()
    finish(engine)
    return streams


def chosen(stream: Stream) -> npt.NDArray[np.unsignedinteger]:
    return np.concatenate(stream.routing) if stream.routing else np.zeros((0, 0), np.uint8)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("every", [0, 1, 3])
@pytest.mark.parametrize("tokens", [4096, 400])
@pytest.mark.parametrize("read", [0, 24, 8192])  # tokens of a step: by graphs none, some, or all that read
def test_streams_are_those_of_single_steps(
    family: str, every: int, tokens: int, read: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "READ", read)
    plain = play(engine_of(family, tokens=tokens, budget=64), every)
    burst = play(engine := bursting(family, 4, tokens=tokens, budget=64), every)
    assert [stream.made for stream in burst] == [stream.made for stream in plain]
    for one, other in zip(burst, plain, strict=True):
        assert one.raw_logprobs == pytest.approx(other.raw_logprobs, abs=1e-4)
        assert np.array_equal(chosen(one), chosen(other))
    assert engine.pool.held == 0


def test_an_engine_that_had_time_before_captures_nothing_while_it_works() -> None:
    plain = play(engine_of("llama", tokens=4096, budget=200), 1)
    engine = bursting("llama", 4, tokens=4096, budget=200)
    decoder = engine.decoder
    assert decoder is not None
    steps = sum(1 for _ in engine.warm())
    captured = len(decoder.graphs), len(decoder.readers)
    assert min(captured) > 1
    assert sum(captured) == steps
    assert [stream.made for stream in play(engine, 1)] == [stream.made for stream in plain]
    assert (len(decoder.graphs), len(decoder.readers)) == captured


def test_a_burst_follows_every_step_that_reads_unless_prompts_pile_up() -> None:
    engine = bursting("llama", 4, tokens=4096, budget=48)
    first = engine.submit(PROMPTS[1], Sampling(max_tokens=64, seed=1))[0]

    def grown() -> int:
        before = len(first.made)
        engine.step()
        return len(first.made) - before

    assert grown() == 1
    made = []
    for prompt in PROMPTS[:4]:  # one short prompt before every step
        engine.submit(prompt[:8], Sampling(max_tokens=2, seed=2))
        made.append(grown())
    assert made == [4, 1, 4, 1]
    engine.submit((PROMPTS[3] + PROMPTS[2])[103:3:-1], Sampling(max_tokens=2, seed=3))  # 100 tokens: three steps
    assert [grown() for _ in range(5)] == [4, 1, 1, 1, 4]
    finish(engine)


@pytest.mark.parametrize("size", [8, 16, 256])
def test_page_tables_are_as_wide_as_the_streams_at_hand_need(size: int) -> None:
    narrow = NARROW // size
    for pages, width in ((1, 1), (narrow, 1), (narrow + 1, 2), (2 * narrow, 2), (5 * narrow, 8), (8 * narrow + 1, 16)):
        assert table_width(pages, size) == width * narrow >= pages
