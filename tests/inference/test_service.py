"""EngineService: no request is lost, answered twice or left hanging, under any order of calls."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from samplers import tiny_engine, tiny_model, until

from etude.errors import InputError
from etude.inference.engine import Engine
from etude.inference.request import Completion, SequenceState
from etude.inference.sampling import Sampling
from etude.inference.service import (
    CompletionDelta,
    ContextLengthExceeded,
    Draining,
    EngineBroken,
    EngineService,
    QueueFull,
)
from etude.inference.settings import EngineOptions
from etude.inference.weight_update import read_weights
from etude.model import save
from etude.model.checkpoint import checkpoint_views
from etude.model.generate import generate
from etude.model.mtp import initialize_mtp, save_mtp
from etude.model.transformer import Transformer

LONG = Sampling(max_tokens=1000)
MANY = 800  # tokens of a request that is still running when new weights arrive, also on a busy machine


def with_service(work: Callable[[EngineService], Awaitable[Any]], engine: Engine | None = None, **options: Any) -> Any:
    async def inside() -> Any:
        async with EngineService(engine or tiny_engine(), **options) as service:
            return await asyncio.wait_for(work(service), 120)

    return asyncio.run(inside())


def same_weights(one: Transformer, other: Transformer) -> bool:
    theirs = other.state_dict()
    return all(torch.equal(tensor, theirs[name]) for name, tensor in one.state_dict().items())


def test_a_completion_is_that_of_the_engine_alone() -> None:
    sampling = Sampling(max_tokens=12, samples=3, seed=5)
    engine = tiny_engine()
    sequences = engine.submit([1, 2, 3], sampling)
    while engine.step():
        pass
    alone = [sequence.result() for sequence in sequences]
    together: list[Completion] = with_service(lambda service: service.complete_many([1, 2, 3], sampling))
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    assert [one.ending for one in together] == ["length"] * 3


def test_streamed_deltas_add_up_to_the_completion() -> None:
    sampling = Sampling(max_tokens=20, samples=2, seed=3)

    async def work(service: EngineService) -> tuple[list[CompletionDelta], list[Completion]]:
        deltas = [delta async for delta in service.stream([4, 5, 6], sampling)]
        return deltas, await service.complete_many([4, 5, 6], sampling)

    deltas, completions = with_service(work)
    for index, completion in enumerate(completions):
        mine = [delta for delta in deltas if delta.index == index]
        assert [token for delta in mine for token in delta.tokens] == completion.tokens
        assert [number for delta in mine for number in delta.versions] == completion.versions
        assert [delta.ending for delta in mine if delta.ending] == [completion.ending]
    assert len(deltas) > 10  # as they come, not at the end


def test_cancelling_the_task_that_waits_frees_the_pages() -> None:
    async def work(service: EngineService) -> None:
        waiting = asyncio.create_task(service.complete_many([1, 2, 3], Sampling(max_tokens=1000, samples=4)))
        await until(lambda: service.stats().output_tokens > 20)
        assert service.engine.pool.held > 0
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await until(lambda: service.open_sequences == 0)
        assert service.engine.pool.held == 0
        assert service.stats().endings == {"cancelled": 4}
        service.engine.pool.check_invariants()

    with_service(work)


def test_a_cancel_between_two_steps_ends_a_sequence_at_once() -> None:
    engine = tiny_engine(max_sequences=2)
    received: list[tuple[int, list[int]]] = []
    sequences = [
        engine.submit([1, 2, n], LONG, lambda sequence, tokens: received.append((sequence.number, tokens)))[0]
        for n in range(4)
    ]
    for _ in range(3):
        engine.step()
    received.clear()
    steps = engine.steps
    for sequence in sequences:  # two run, two wait
        engine.cancel(sequence)
        engine.cancel(sequence)
    assert [sequence.ending for sequence in sequences] == ["cancelled"] * 4
    assert received == [(sequence.number, []) for sequence in sequences]
    assert (engine.pool.held, engine.busy, engine.steps) == (0, False, steps)
    assert engine.step() is False


def test_a_paused_service_cancels_at_once() -> None:
    async def work(service: EngineService) -> None:
        generations = [await service.submit([1, 2, n], LONG, streaming=True) for n in range(3)]
        await until(lambda: service.stats().output_tokens > 10)
        await service.pause()
        steps = service.stats().steps
        for generation in generations[:2]:
            generation.cancel()
        await until(lambda: service.open_sequences == 1)
        for generation in generations[:2]:
            (completion,) = await generation.completions()
            assert completion.ending == "cancelled"
            assert completion.tokens
        generations[2].cancel()
        await until(lambda: service.open_sequences == 0)
        assert service.engine.pool.held == 0
        assert (service.state, service.stats().steps) == ("paused", steps)
        assert service.stats().endings == {"cancelled": 3}

    with_service(work)


def test_a_listener_that_raises_loses_only_its_own_sequence(caplog: pytest.LogCaptureFixture) -> None:
    engine = tiny_engine()
    received: list[list[int]] = []

    def bad(sequence: SequenceState, tokens: list[int]) -> None:
        received.append(tokens)
        if len(sequence.output) > 3:
            raise ValueError("a bad listener")

    sampling = Sampling(max_tokens=20, seed=5)
    (alone,) = engine.submit([1, 2, 3], sampling)
    while engine.step():
        pass
    (lost,) = engine.submit([4, 5], sampling, bad)
    (other,) = engine.submit([1, 2, 3], sampling)
    while engine.step():
        engine.pool.check_invariants()
    assert (lost.ending, len(lost.output), received[-1]) == ("cancelled", 4, [])
    assert received.count([]) == 1
    assert (other.ending, other.output) == ("length", alone.output)
    assert engine.pool.held == 0
    assert f"the listener of sequence {lost.number} failed; the sequence is cancelled" in caplog.text
    assert "ValueError: a bad listener" in caplog.text


def test_leaving_a_stream_in_the_middle_cancels_it() -> None:
    async def work(service: EngineService) -> None:
        async with await service.submit([1, 2, 3], LONG, streaming=True) as generation:
            async for delta in generation.deltas():
                assert delta.tokens
                break
        await until(lambda: service.open_sequences == 0)
        assert service.engine.pool.held == 0

    with_service(work)


def test_a_full_queue_refuses_and_has_room_again_later() -> None:
    async def work(service: EngineService) -> None:
        await service.pause()
        tasks = [asyncio.create_task(service.complete_many([1], Sampling(max_tokens=3))) for _ in range(6)]
        await until(lambda: service.open_sequences == 6)
        with pytest.raises(QueueFull, match="6 sequences run or wait, of at most 6"):
            await service.complete_many([1], Sampling(max_tokens=3))
        with pytest.raises(InputError, match="7 completions of one prompt"):  # waiting would not help
            await service.complete_many([1], Sampling(max_tokens=3, samples=7))
        await service.resume()
        assert len(await asyncio.gather(*tasks)) == 6
        assert len(await service.complete_many([1], Sampling(max_tokens=3, samples=6))) == 6
        assert service.stats().refused == 1

    with_service(work, tiny_engine(max_sequences=2), max_waiting=4)


@pytest.mark.parametrize(
    ("prompt", "sampling", "error", "complaint"),
    [
        ([], Sampling(), InputError, "the prompt is empty"),
        ([1, 999], Sampling(), InputError, "token id 999 is not in the vocabulary"),
        ([1, -4], Sampling(), InputError, "token id -4"),
        (
            [1] * 100,
            Sampling(max_tokens=2000),
            ContextLengthExceeded,
            "maximum context length is 2048 tokens, but the prompt has 100 and max_tokens is 2000",
        ),
    ],
)
def test_an_invalid_request_is_refused_and_leaves_nothing(
    prompt: list[int], sampling: Sampling, error: type[Exception], complaint: str
) -> None:
    async def work(service: EngineService) -> None:
        with pytest.raises(error, match=complaint):
            await service.complete_many(prompt, sampling)
        assert service.open_sequences == 0
        assert len(await service.complete_many([1], Sampling(max_tokens=2))) == 1

    with_service(work)


def test_a_pause_stands_still_and_goes_on_where_it_was() -> None:
    async def work(service: EngineService) -> Completion:
        running = asyncio.create_task(service.complete_many([1, 2], Sampling(max_tokens=60, seed=1)))
        await until(lambda: service.stats().output_tokens > 5)
        await service.pause()
        made = service.stats().output_tokens
        await asyncio.sleep(0.05)
        assert service.stats().output_tokens == made
        assert service.state == "paused"
        await service.resume()
        return (await running)[0]

    plain = with_service(lambda service: service.complete_many([1, 2], Sampling(max_tokens=60, seed=1)))[0]
    assert with_service(work).tokens == plain.tokens


def test_an_idle_service_does_not_spin() -> None:
    async def work(service: EngineService) -> None:
        rounds, run_commands = 0, service._run_commands

        def count() -> None:
            nonlocal rounds
            rounds += 1
            run_commands()

        service._run_commands = count  # type: ignore[method-assign]
        await service.complete_many([1], Sampling(max_tokens=2))
        busy = rounds
        await asyncio.sleep(0.3)
        assert 0 < busy <= rounds <= busy + 2, f"{rounds - busy} rounds of its loop while idle"

    with_service(work)


@pytest.mark.parametrize("on_swap", ["keep", "recompute"])
def test_new_weights_in_the_middle_change_the_versions_and_lose_nothing(on_swap: str, tmp_path: Path) -> None:
    engine = tiny_engine(on_swap=on_swap)
    other = tiny_model(seed=9)
    save(other, tmp_path / "other")
    read_weights(tmp_path / "other", engine.model)  # the first call imports modules for a second

    async def work(service: EngineService) -> None:
        tasks = [
            asyncio.create_task(service.complete_many([1, 2, n], Sampling(max_tokens=MANY, seed=n))) for n in range(8)
        ]
        await until(lambda: service.stats().output_tokens > 60)
        loaded = await service.load(tmp_path / "other", 1)
        assert (loaded.version, loaded.on_swap, loaded.in_flight) == (1, on_swap, 8)
        completions = [one for (one,) in await asyncio.gather(*tasks)]
        for completion in completions:
            assert len(completion.tokens) == MANY
            assert completion.versions == sorted(completion.versions)
        assert {0, 1} == {version for completion in completions for version in completion.versions}
        (after,) = await service.complete_many([7, 7], Sampling(max_tokens=10, temperature=0.0))
        assert set(after.versions) == {1}
        assert service.stats().endings == {"length": 9}

    with_service(work, engine)
    assert same_weights(engine.model, other)


def test_weights_by_the_names_of_the_checkpoint_some_or_all() -> None:
    engine, other = tiny_engine(), tiny_model(seed=4)
    stored = {name: tensor.detach().clone() for name, tensor in checkpoint_views(other).items()}
    name = "model.layers.1.self_attn.k_proj.weight"

    async def work(service: EngineService) -> None:
        await service.load({name: stored[name]}, 1)
        assert torch.equal(checkpoint_views(engine.model)[name], stored[name])
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
def test_a_checkpoint_directory_replaces_mtp_layers_if_it_has_any(brings: bool, tmp_path: Path) -> None:
    other = tiny_model(seed=9)
    save(other, tmp_path / "other")
    layers = initialize_mtp(other.config, 1, 2, torch.float32)
    if brings:
        save_mtp(layers.state_dict(), len(layers.layers), tmp_path / "other")
    mtp = initialize_mtp(other.config, 1, 1, torch.float32)
    options = EngineOptions(kv_cache_tokens=8192, page_size=8, max_sequences=16, drafts=2)
    greedy = Sampling(max_tokens=30, temperature=0.0)

    async def work(service: EngineService) -> None:
        running = asyncio.create_task(service.complete_many([1, 2, 3], Sampling(max_tokens=200, temperature=0.0)))
        await until(lambda: service.stats().output_tokens > 5)
        await service.load(tmp_path / "other", 1)
        (completion,) = await running
        assert completion.versions == sorted(completion.versions)
        assert set(completion.versions) == {0, 1}
        (late,) = await service.complete_many([7, 7], greedy)
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
        with pytest.raises(InputError, match="a different model: family is 'qwen3', expected 'llama'"):
            await service.load(tmp_path / "other", 1)
        with pytest.raises(InputError, match="not found"):
            await service.load(tmp_path / "nowhere", 1)
        assert service.version == 0

    with_service(work)


def test_loads_happen_in_the_order_of_the_calls(tmp_path: Path) -> None:
    save(tiny_model(seed=2), tmp_path / "slow")

    async def work(service: EngineService) -> None:
        tensors = dict(tiny_model(seed=3).state_dict())
        first = asyncio.create_task(service.load(tmp_path / "slow", 1))
        await asyncio.sleep(0)
        await asyncio.gather(first, service.load(tensors, 2))
        assert service.version == 2
        assert torch.equal(service.engine.model.embed.weight, tensors["embed.weight"])

    with_service(work)


def test_drain_finishes_running_requests_and_refuses_new_ones() -> None:
    async def work(service: EngineService) -> None:
        running = asyncio.create_task(service.complete_many([1], Sampling(max_tokens=100)))
        await until(lambda: service.stats().output_tokens > 3)
        draining = asyncio.create_task(service.drain())
        await asyncio.sleep(0)
        with pytest.raises(Draining):
            await service.complete_many([1], Sampling(max_tokens=2))
        await draining
        assert running.done() or len((await running)[0].tokens) == 100
        assert (service.state, service.open_sequences) == ("draining", 0)
        await service.resume()
        assert await service.complete_many([1], Sampling(max_tokens=2))

    with_service(work)


def test_latencies_are_counted_once_for_each_sequence() -> None:
    async def work(service: EngineService) -> None:
        await service.complete_many([1, 2], Sampling(max_tokens=10, samples=3))
        await service.complete_many([1, 2], Sampling(max_tokens=1))  # has no token after its first
        generation = await service.submit([3], LONG)
        await until(lambda: sum(service.stats().first_token.counts) == 5)
        generation.cancel()
        await until(lambda: service.open_sequences == 0)
        first, each = service.stats().first_token, service.stats().output_token
        assert (sum(first.counts), sum(each.counts)) == (5, 3)
        assert each.total > 0
        assert first.total > 0

    with_service(work)


def test_draining_a_paused_service_is_an_error() -> None:
    async def work(service: EngineService) -> None:
        await service.pause()
        with pytest.raises(InputError, match="resume it before draining"):
            await service.drain()

    with_service(work)


def test_an_exception_in_a_step_fails_every_request_and_never_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine()

    async def work(service: EngineService) -> None:
        tasks = [asyncio.create_task(service.complete_many([1], LONG)) for _ in range(5)]
        await until(lambda: service.stats().output_tokens > 10)

        def fail() -> bool:
            raise RuntimeError("CUDA error: out of memory")

        monkeypatch.setattr(engine, "step", fail)
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, EngineBroken)
            assert "CUDA error: out of memory" in str(outcome)
        assert service.state == "broken"
        for ask in (service.complete_many([1], LONG), service.load({}, 1), service.pause(), service.resume()):
            with pytest.raises(EngineBroken):
                await ask
        for _ in range(200):  # counted by the engine's thread, after the callers were notified
            if service.stats().endings:
                break
            await asyncio.sleep(0.05)
        assert service.stats().endings == {"failed": 5}

    with_service(work, engine)


def test_closing_fails_waiting_requests() -> None:
    async def work() -> None:
        service = EngineService(tiny_engine())
        task = asyncio.create_task(service.complete_many([1], LONG))
        await until(lambda: service.open_sequences == 1)
        await service.close()
        with pytest.raises(EngineBroken, match="closed"):
            await task
        with pytest.raises(EngineBroken, match="closed"):
            await service.complete_many([1], LONG)

    asyncio.run(work())


def test_many_event_loops_may_submit_and_one_that_closes_leaves_nothing() -> None:
    service = EngineService(tiny_engine())
    found: list[list[Completion]] = []

    def ask() -> None:
        found.append(asyncio.run(service.complete_many([1, 2], Sampling(max_tokens=10, seed=7))))

    def die() -> None:
        loop = asyncio.new_event_loop()
        loop.create_task(service.complete_many([1], LONG))  # noqa: RUF006  abandoned on purpose
        loop.run_until_complete(asyncio.sleep(0.05))
        loop.close()

    threads = [threading.Thread(target=target) for target in (ask, ask, die, ask)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)

    async def finish() -> None:
        await until(lambda: service.open_sequences == 0)
        await service.close()

    asyncio.run(finish())
    assert len({tuple(completions[0].tokens) for completions in found}) == 1
    assert len(found) == 3
    assert service.engine.pool.held == 0


@pytest.mark.parametrize("seed", range(3))
def test_chaos_ends_every_request_once_and_leaks_no_page(seed: int) -> None:
    rng = random.Random(seed)
    engine = tiny_engine("qwen3_moe", kv_cache_tokens=512, max_sequences=6, on_swap=rng.choice(("keep", "recompute")))
    weights = [dict(tiny_model("qwen3_moe", seed=n).state_dict()) for n in range(2)]
    ended = 0

    async def one(service: EngineService) -> None:
        nonlocal ended
        prompt = [rng.randrange(300) for _ in range(rng.randint(1, 60))]
        sampling = Sampling(max_tokens=rng.randint(1, 60), samples=rng.randint(1, 3), seed=rng.randrange(100))
        await asyncio.sleep(rng.random() * 0.5)
        try:
            completions = await asyncio.wait_for(service.complete_many(prompt, sampling), rng.choice((0.02, 0.2, 60)))
            for completion in completions:
                size = len(completion.tokens)
                assert (completion.ending, size) == ("length", sampling.max_tokens), f"seed {seed}"
                assert len(completion.versions) == len(completion.logprobs) == size
                assert completion.routing is not None
                assert len(completion.routing) == len(prompt) + size - 1, f"seed {seed}"
        except (TimeoutError, QueueFull):
            pass
        ended += 1

    async def meddle(service: EngineService) -> None:
        for version in range(1, 8):
            await asyncio.sleep(rng.random() * 0.1)
            await service.load(weights[version % 2], version)
            await service.pause()
            await service.resume()

    async def work(service: EngineService) -> None:
        await asyncio.gather(meddle(service), *(one(service) for _ in range(60)))
        await until(lambda: service.open_sequences == 0)
        assert ended == 60
        assert engine.pool.held == 0
        engine.pool.check_invariants()
        assert service.state == "running"

    with_service(work, engine, max_waiting=40)
