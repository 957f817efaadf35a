"""Everything at once, at random: requests, cancels, swaps, too few pages. Every stream ends once; nothing is left."""

import random
from itertools import chain
from typing import Any

import pytest
import torch
from engines import mtp_of, weights_of

from etude.errors import InputError
from etude.inference.engine import Engine, EngineOptions
from etude.inference.request import Stream
from etude.inference.sampling import Sampling
from etude.model.transformer import Transformer

FAMILIES = ("llama", "qwen3_moe", "deepseek_v3")


class Chaos:
    """An engine and whoever torments it; everything follows from the seed."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.seed = seed
        family = rng.choice(FAMILIES)
        self.versions = [weights_of(family, each, 23, num_hidden_layers=2) for each in (0, 1)]
        model = Transformer(self.versions[0].config).eval()
        model.load_state_dict(self.versions[0].state_dict())
        invariant = rng.random() < 0.15
        drafts = rng.choice((0, 0, 2))
        options = EngineOptions(
            tokens=4 * rng.randint(14, 40),
            page=4,
            max_streams=rng.randint(1, 9),
            budget=rng.choice((1, 7, 32)),
            sharing=rng.random() < 0.8,
            on_swap=rng.choice(("keep", "recompute")),
            drafts=drafts,
            invariant=invariant,
        )
        print(f"chaos seed {seed}: {family}, {options}")
        self.engine = Engine(model, options, mtp=mtp_of(model) if drafts else None)
        self.heard: dict[Stream, list[list[int]]] = {}
        self.stems = [[rng.randrange(23) for _ in range(20)] for _ in range(3)]
        self.refused = 0

    def listen(self, stream: Stream, tokens: list[int]) -> None:
        self.heard.setdefault(stream, []).append(list(tokens))
        if self.rng.random() < 0.01 and self.heard:
            self.engine.cancel(self.rng.choice(list(self.heard)))

    def ask(self) -> None:
        rng = self.rng
        prompt = rng.choice(self.stems)[: rng.randint(1, 20)] + [rng.randrange(23) for _ in range(rng.randint(0, 6))]
        ways: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"top_p": 0.8}, {"top_k": 3, "min_p": 0.05}]
        stop = frozenset(rng.sample(range(23), rng.choice((0, 0, 2))))
        samples = rng.choice((1, 1, 1, 4))
        most = rng.choice((1, 4, 12, 200))
        since = rng.choice((None, None, rng.randrange(self.engine.version + 2)))
        luck = rng.randrange(2**40)
        sampling = Sampling(most, seed=luck, samples=samples, stop=stop, since=since, **rng.choice(ways))
        try:
            for stream in self.engine.submit(prompt, sampling, self.listen):
                self.heard[stream] = []
        except InputError:  # two hundred tokens rarely fit
            self.refused += 1

    def step(self, asking: bool) -> None:
        rng, engine = self.rng, self.engine
        if asking and len(engine.scheduler.waiting) < 12 and rng.random() < 0.6:
            self.ask()
        if self.heard and rng.random() < 0.05:
            engine.cancel(rng.choice(list(self.heard)))
        if rng.random() < 0.02:
            engine.load(self.versions[(engine.version + 1) % 2].state_dict(), engine.version + 1)
        if engine.scheduler.running and rng.random() < 0.02:
            engine.scheduler.preempt(rng.choice(engine.scheduler.running))
        engine.step()
        engine.pool.check()
        for stream in [stream for stream in self.heard if stream.ending is not None]:
            self.check(stream, self.heard.pop(stream))

    def check(self, stream: Stream, told: list[list[int]]) -> None:
        sample = stream.result()
        assert told.count([]) == 1
        assert told[-1] == []
        assert list(chain(*told)) == sample.tokens
        count = len(sample.tokens)
        assert len(sample.logprobs) == len(sample.raw_logprobs) == len(sample.versions) == count
        assert sample.versions == sorted(sample.versions)
        assert all(number <= 0 for number in (*sample.logprobs, *sample.raw_logprobs))
        most, stop = stream.sampling.max_tokens, stream.sampling.stop
        assert count <= most
        assert not set(sample.tokens[:-1]) & stop
        if sample.ending == "length":
            assert count == most
        elif sample.ending == "stop":
            assert sample.tokens[-1] in stop
        if self.engine.routes is not None and sample.ending != "cancelled":
            assert sample.routing is not None
            assert len(sample.routing) == len(stream.prompt) + count - 1
        assert not stream.pages

    def rest(self) -> None:
        """Nothing is left when everybody has gone."""
        while self.engine.busy:
            self.step(asking=False)
        assert not self.heard
        assert self.engine.pool.held == 0
        assert self.engine.speculator is None or not self.engine.speculator.states


def torment(seed: int, requests: int) -> int:
    chaos = Chaos(seed)
    asked = 0
    try:
        while asked < requests:
            before = len(chaos.heard)
            chaos.step(asking=True)
            asked += max(0, len(chaos.heard) - before)
        chaos.rest()
    except Exception as problem:
        raise AssertionError(f"chaos seed {seed}: {problem!r}") from problem
    return chaos.engine.scheduler.preemptions


@pytest.mark.parametrize("seed", range(8))
def test_every_stream_ends_exactly_once_and_no_page_is_lost(seed: int) -> None:
    torment(seed, 60)


@pytest.mark.slow
def test_thousands_of_random_requests_leave_nothing_behind() -> None:
    first = int(torch.randint(2**31, ()))
    preemptions = sum(torment(first + turn, 250) for turn in range(40))
    assert preemptions > 100
