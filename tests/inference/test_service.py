"""The engine's thread: nothing is lost, nothing is answered twice, nothing hangs, whatever is asked and whenever."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from samplers import tiny_engine, tiny_model, until

from etude.errors import InputError
from etude.inference.engine import Engine, EngineOptions
from etude.inference.request import Sample, Stream
from etude.inference.sampling import Sampling
from etude.inference.service import Draining, EngineBroken, EngineService, Piece, QueueFull, TooLong
from etude.model import save
from etude.model.checkpoint import views
from etude.model.generate import generate
from etude.model.mtp import initialize_mtp, save_mtp
from etude.model.transformer import Transformer

LONG = Sampling(max_tokens=1000)


def with_service(work: Callable[[EngineService], Awaitable[Any]], engine: Engine | None = None, **options: Any) -> Any:
    async def inside() -> Any:
        async with EngineService(engine or tiny_engine(), **options) as service:
            return await asyncio.wait_for(work(service), 60)

    return asyncio.run(inside())


def same_weights(one: Transformer, other: Transformer) -> bool:
    theirs = other.state_dict()
    return all(torch.equal(tensor, theirs[name]) for name, tensor in one.state_dict().items())


def test_a_sample_is_what_the_engine_alone_makes() -> None:
    sampling = Sampling(max_tokens=12, samples=3, seed=5)
    engine = tiny_engine()
    streams = engine.submit([1, 2, 3], sampling)
    while engine.step():
        pass
    alone = [stream.result() for stream in streams]
    together: list[Sample] = with_service(lambda service: service.sample([1, 2, 3], sampling))
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    assert [one.ending for one in together] == ["length"] * 3


def test_what_is_streamed_adds_up_to_the_sample() -> None:
    sampling = Sampling(max_tokens=20, samples=2, seed=3)

    async def work(service: EngineService) -> tuple[list[Piece], list[Sample]]:
        pieces = [piece async for piece in service.stream([4, 5, 6], sampling)]
        return pieces, await service.sample([4, 5, 6], sampling)

    pieces, samples = with_service(work)
    for index, sample in enumerate(samples):
        mine = [piece for piece in pieces if piece.index == index]
        assert [token for piece in mine for token in piece.tokens] == sample.tokens
        assert [number for piece in mine for number in piece.versions] == sample.versions
        assert [piece.ending for piece in mine if piece.ending] == [sample.ending]
    assert len(pieces) > 10  # as they come, not at the end


def test_cancelling_the_task_that_waits_frees_the_pages() -> None:
    async def work(service: EngineService) -> None:
        waiting = asyncio.create_task(service.sample([1, 2, 3], Sampling(max_tokens=1000, samples=4)))
        await until(lambda: service.stats().made_tokens > 20)
        assert service.engine.pool.held > 0
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await until(lambda: service.held == 0)
        assert service.engine.pool.held == 0
        assert service.stats().endings == {"cancelled": 4}
        service.engine.pool.check()

    with_service(work)


def test_a_cancel_between_two_steps_ends_a_stream_there_and_then() -> None:
    engine = tiny_engine(max_streams=2)
    told: list[tuple[int, list[int]]] = []
    streams = [
        engine.submit([1, 2, n], LONG, lambda stream, tokens: told.append((stream.number, tokens)))[0] for n in range(4)
    ]
    for _ in range(3):
        engine.step()
    told.clear()
    steps = engine.steps
    for stream in streams:  # two run, two wait
        engine.cancel(stream)
        engine.cancel(stream)
    assert [stream.ending for stream in streams] == ["cancelled"] * 4
    assert told == [(stream.number, []) for stream in streams]
    assert (engine.pool.held, engine.busy, engine.steps) == (0, False, steps)
    assert engine.step() is False


def test_a_paused_service_cancels_at_once() -> None:
    async def work(service: EngineService) -> None:
        generations = [await service.submit([1, 2, n], LONG, streaming=True) for n in range(3)]
        await until(lambda: service.stats().made_tokens > 10)
        await service.pause()
        steps = service.stats().steps
        for generation in generations[:2]:
            generation.cancel()
        await until(lambda: service.held == 1)
        for generation in generations[:2]:
            (sample,) = await generation.samples()
            assert sample.ending == "cancelled"
            assert sample.tokens
        generations[2].cancel()
        await until(lambda: service.held == 0)
        assert service.engine.pool.held == 0
        assert (service.state, service.stats().steps) == ("paused", steps)
        assert service.stats().endings == {"cancelled": 3}

    with_service(work)


def test_a_listener_that_raises_loses_its_own_stream_and_nobody_else_s(caplog: pytest.LogCaptureFixture) -> None:
    engine = tiny_engine()
    told: list[list[int]] = []

    def bad(stream: Stream, tokens: list[int]) -> None:
        told.append(tokens)
        if len(stream.made) > 3:
            raise ValueError("nobody is there")

    sampling = Sampling(max_tokens=20, seed=5)
    (alone,) = engine.submit([1, 2, 3], sampling)
    while engine.step():
        pass
    (lost,) = engine.submit([4, 5], sampling, bad)
    (other,) = engine.submit([1, 2, 3], sampling)
    while engine.step():
        engine.pool.check()
    assert (lost.ending, len(lost.made), told[-1]) == ("cancelled", 4, [])
    assert told.count([]) == 1
    assert (other.ending, other.made) == ("length", alone.made)
    assert engine.pool.held == 0
    assert f"the listener of stream {lost.number} failed; the stream is cancelled" in caplog.text
    assert "ValueError: nobody is there" in caplog.text


def test_leaving_a_stream_in_the_middle_cancels_it() -> None:
    async def work(service: EngineService) -> None:
        async with await service.submit([1, 2, 3], LONG, streaming=True) as generation:
            async for piece in generation.pieces():
                assert piece.tokens
                break
        await until(lambda: service.held == 0)
        assert service.engine.pool.held == 0

    with_service(work)


def test_a_full_queue_refuses_and_has_room_again_later() -> None:
    async def work(service: EngineService) -> None:
        await service.pause()
        tasks = [asyncio.create_task(service.sample([1], Sampling(max_tokens=3))) for _ in range(6)]
        await until(lambda: service.held == 6)
        with pytest.raises(QueueFull, match="6 samples run or wait, of at most 6"):
            await service.sample([1], Sampling(max_tokens=3))
        with pytest.raises(InputError, match="7 samples of one prompt"):  # waiting would not help
            await service.sample([1], Sampling(max_tokens=3, samples=7))
        await service.resume()
        assert len(await asyncio.gather(*tasks)) == 6
        assert len(await service.sample([1], Sampling(max_tokens=3, samples=6))) == 6
        assert service.stats().refused == 1

    with_service(work, tiny_engine(max_streams=2), max_waiting=4)


@pytest.mark.parametrize(
    ("prompt", "sampling", "error", "complaint"),
    [
        ([], Sampling(), InputError, "the prompt is empty"),
        ([1, 999], Sampling(), InputError, "token id 999 is not in the vocabulary"),
        ([1, -4], Sampling(), InputError, "token id -4"),
        ([1] * 100, Sampling(max_tokens=2000), TooLong, "100 prompt tokens and 2,000 new ones are more than the 2,048"),
    ],
)
def test_what_cannot_be_done_is_refused_and_leaves_nothing(
    prompt: list[int], sampling: Sampling, error: type[Exception], complaint: str
) -> None:
    async def work(service: EngineService) -> None:
        with pytest.raises(error, match=complaint):
            await service.sample(prompt, sampling)
        assert service.held == 0
        assert len(await service.sample([1], Sampling(max_tokens=2))) == 1

    with_service(work)


def test_a_pause_stands_still_and_goes_on_where_it_was() -> None:
    async def work(service: EngineService) -> Sample:
        running = asyncio.create_task(service.sample([1, 2], Sampling(max_tokens=60, seed=1)))
        await until(lambda: service.stats().made_tokens > 5)
        await service.pause()
        made = service.stats().made_tokens
        await asyncio.sleep(0.05)
        assert service.stats().made_tokens == made
        assert service.state == "paused"
        await service.resume()
        return (await running)[0]

    plain = with_service(lambda service: service.sample([1, 2], Sampling(max_tokens=60, seed=1)))[0]
    assert with_service(work).tokens == plain.tokens


def test_an_idle_service_does_not_spin() -> None:
    async def work(service: EngineService) -> None:
        await service.sample([1], Sampling(max_tokens=2))
        before = time.process_time()
        await asyncio.sleep(0.5)
        used = time.process_time() - before
        assert used < 0.1, f"{used:.3f} s of processor time while idle"

    with_service(work)


@pytest.mark.parametrize("on_swap", ["keep", "recompute"])
def test_new_weights_in_the_middle_change_the_versions_and_lose_nothing(on_swap: str, tmp_path: Path) -> None:
    engine = tiny_engine(on_swap=on_swap)
    other = tiny_model(seed=9)
    save(other, tmp_path / "other")

    async def work(service: EngineService) -> None:
        tasks = [asyncio.create_task(service.sample([1, 2, n], Sampling(max_tokens=80, seed=n))) for n in range(8)]
        await until(lambda: service.stats().made_tokens > 60)
        loaded = await service.load(tmp_path / "other", 1)
        assert (loaded.version, loaded.on_swap, loaded.in_flight) == (1, on_swap, 8)
        samples = [one for (one,) in await asyncio.gather(*tasks)]
        for sample in samples:
            assert len(sample.tokens) == 80
            assert sample.versions == sorted(sample.versions)
        assert {0, 1} == {version for sample in samples for version in sample.versions}
        (after,) = await service.sample([7, 7], Sampling(max_tokens=10, temperature=0.0))
        assert set(after.versions) == {1}
        assert service.stats().endings == {"length": 9}

    with_service(work, engine)
    assert same_weights(engine.model, other)


def test_weights_by_the_names_of_the_checkpoint_some_or_all() -> None:
    engine, other = tiny_engine(), tiny_model(seed=4)
    stored = {name: tensor.detach().clone() for name, tensor in views(other).items()}
    name = "model.layers.1.self_attn.k_proj.weight"

    async def work(service: EngineService) -> None:
        await service.load({name: stored[name]}, 1)
        assert torch.equal(views(engine.model)[name], stored[name])
        await service.load(stored, 2)
        assert service.version == 2
        for bad, complaint in (
            ({"model.nothing": stored[name]}, "model.nothing is not a tensor of this model"),
            ({name: stored[name][:1]}, "k_proj.weight is"),
        ):
            with pytest.raises(InputError, match=complaint):
                await service.load(bad, 3)
        assert service.version == 2
        assert service.state == "running"

    with_service(work, engine)
    assert same_weights(engine.model, other)


@pytest.mark.parametrize("brings", [True, False], ids=["with layers", "without"])
def test_a_directory_brings_its_layers_that_draft_if_it_has_any(brings: bool, tmp_path: Path) -> None:
    other = tiny_model(seed=9)
    save(other, tmp_path / "other")
    layers = initialize_mtp(other.config, 1, 2, torch.float32)
    if brings:
        save_mtp(layers, tmp_path / "other")
    mtp = initialize_mtp(other.config, 1, 1, torch.float32)
    options = EngineOptions(tokens=8192, page=8, max_streams=16, drafts=2)
    greedy = Sampling(max_tokens=30, temperature=0.0)

    async def work(service: EngineService) -> None:
        running = asyncio.create_task(service.sample([1, 2, 3], Sampling(max_tokens=200, temperature=0.0)))
        await until(lambda: service.stats().made_tokens > 5)
        await service.load(tmp_path / "other", 1)
        (sample,) = await running
        assert sample.versions == sorted(sample.versions)
        assert set(sample.versions) == {0, 1}
        (late,) = await service.sample([7, 7], greedy)
        assert late.tokens == list(generate(other, [7, 7], max_tokens=30))
        stats = service.stats()
        assert stats.draft_rounds > 0
        assert len(stats.accepted) == 2

    with_service(work, Engine(tiny_model(), options, mtp=mtp))
    same = [torch.equal(tensor, layers.state_dict()[name]) for name, tensor in mtp.state_dict().items()]
    assert all(same) == brings


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    save(tiny_model("qwen3"), tmp_path / "other")

    async def work(service: EngineService) -> None:
        with pytest.raises(InputError, match="a different model: family is 'qwen3', here 'llama'"):
            await service.load(tmp_path / "other", 1)
        with pytest.raises(InputError, match="not found"):
            await service.load(tmp_path / "nowhere", 1)
        assert service.version == 0

    with_service(work)


def test_loads_happen_in_the_order_they_were_asked_for(tmp_path: Path) -> None:
    save(tiny_model(seed=2), tmp_path / "slow")

    async def work(service: EngineService) -> None:
        tensors = dict(tiny_model(seed=3).state_dict())
        first = asyncio.create_task(service.load(tmp_path / "slow", 1))
        await asyncio.sleep(0)
        await asyncio.gather(first, service.load(tensors, 2))
        assert service.version == 2
        assert torch.equal(service.engine.model.embed.weight, tensors["embed.weight"])

    with_service(work)


def test_drain_finishes_what_runs_and_takes_nothing_new() -> None:
    async def work(service: EngineService) -> None:
        running = asyncio.create_task(service.sample([1], Sampling(max_tokens=100)))
        await until(lambda: service.stats().made_tokens > 3)
        draining = asyncio.create_task(service.drain())
        await asyncio.sleep(0)
        with pytest.raises(Draining):
            await service.sample([1], Sampling(max_tokens=2))
        await draining
        assert running.done() or len((await running)[0].tokens) == 100
        assert (service.state, service.held) == ("draining", 0)
        await service.resume()
        assert await service.sample([1], Sampling(max_tokens=2))

    with_service(work)


def test_latencies_are_counted_once_for_each_sample() -> None:
    async def work(service: EngineService) -> None:
        start = time.perf_counter()
        await service.sample([1, 2], Sampling(max_tokens=10, samples=3))
        await service.sample([1, 2], Sampling(max_tokens=1))  # has no token after its first
        took = time.perf_counter() - start
        generation = await service.submit([3], LONG)
        await until(lambda: sum(service.stats().first_token.counts) == 5)
        generation.cancel()
        await until(lambda: service.held == 0)
        first, each = service.stats().first_token, service.stats().output_token
        assert (sum(first.counts), sum(each.counts)) == (5, 3)
        assert 0 < each.total * 9 < 3 * took
        assert first.total > 0

    with_service(work)


def test_draining_a_paused_service_says_that_it_would_never_end() -> None:
    async def work(service: EngineService) -> None:
        await service.pause()
        with pytest.raises(InputError, match="resume it before draining"):
            await service.drain()

    with_service(work)


def test_an_exception_in_a_step_fails_everybody_and_never_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine()

    async def work(service: EngineService) -> None:
        tasks = [asyncio.create_task(service.sample([1], LONG)) for _ in range(5)]
        await until(lambda: service.stats().made_tokens > 10)

        def fail() -> bool:
            raise RuntimeError("CUDA error: out of luck")

        monkeypatch.setattr(engine, "step", fail)
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, EngineBroken)
            assert "CUDA error: out of luck" in str(outcome)
        assert service.state == "broken"
        for ask in (service.sample([1], LONG), service.load({}, 1), service.pause(), service.resume()):
            with pytest.raises(EngineBroken):
                await ask
        for _ in range(200):  # counted by the engine's thread, after whoever waits was told
            if service.stats().endings:
                break
            await asyncio.sleep(0.05)
        assert service.stats().endings == {"failed": 5}

    with_service(work, engine)


def test_closing_tells_whoever_waits() -> None:
    async def work() -> None:
        service = EngineService(tiny_engine())
        task = asyncio.create_task(service.sample([1], LONG))
        await until(lambda: service.held == 1)
        await service.close()
        with pytest.raises(EngineBroken, match="closed"):
            await task
        with pytest.raises(EngineBroken, match="closed"):
            await service.sample([1], LONG)

    asyncio.run(work())


def test_many_loops_may_ask_and_one_that_dies_leaves_nothing() -> None:
    service = EngineService(tiny_engine())
    found: list[list[Sample]] = []

    def ask() -> None:
        found.append(asyncio.run(service.sample([1, 2], Sampling(max_tokens=10, seed=7))))

    def die() -> None:
        loop = asyncio.new_event_loop()
        loop.create_task(service.sample([1], LONG))  # noqa: RUF006  abandoned on purpose
        loop.run_until_complete(asyncio.sleep(0.05))
        loop.close()

    threads = [threading.Thread(target=target) for target in (ask, ask, die, ask)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)

    async def finish() -> None:
        await until(lambda: service.held == 0)
        await service.close()

    asyncio.run(finish())
    assert len({tuple(samples[0].tokens) for samples in found}) == 1
    assert len(found) == 3
    assert service.engine.pool.held == 0


@pytest.mark.parametrize("seed", range(3))
def test_chaos_ends_every_request_once_and_leaks_no_page(seed: int) -> None:
    luck = random.Random(seed)
    engine = tiny_engine("qwen3_moe", tokens=512, max_streams=6, on_swap=luck.choice(("keep", "recompute")))
    weights = [dict(tiny_model("qwen3_moe", seed=n).state_dict()) for n in range(2)]
    ended = 0

    async def one(service: EngineService) -> None:
        nonlocal ended
        prompt = [luck.randrange(300) for _ in range(luck.randint(1, 60))]
        sampling = Sampling(max_tokens=luck.randint(1, 60), samples=luck.randint(1, 3), seed=luck.randrange(100))
        await asyncio.sleep(luck.random() * 0.5)
        try:
            samples = await asyncio.wait_for(service.sample(prompt, sampling), luck.choice((0.02, 0.2, 60)))
            for sample in samples:
                size = len(sample.tokens)
                assert (sample.ending, size) == ("length", sampling.max_tokens), f"seed {seed}"
                assert len(sample.versions) == len(sample.logprobs) == size
                assert sample.routing is not None
                assert len(sample.routing) == len(prompt) + size - 1, f"seed {seed}"
        except (TimeoutError, QueueFull):
            pass
        ended += 1

    async def meddle(service: EngineService) -> None:
        for version in range(1, 8):
            await asyncio.sleep(luck.random() * 0.1)
            await service.load(weights[version % 2], version)
            await service.pause()
            await service.resume()

    async def work(service: EngineService) -> None:
        await asyncio.gather(meddle(service), *(one(service) for _ in range(60)))
        await until(lambda: service.held == 0)
        assert ended == 60
        assert engine.pool.held == 0
        engine.pool.check()
        assert service.state == "running"

    with_service(work, engine, max_waiting=40)
