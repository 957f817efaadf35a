"""Random requests, cancellations, weight swaps and too few pages: every sequence ends once and nothing leaks."""

import random
from itertools import chain
from typing import Any

import pytest
import torch
from engines import mtp_of, weights_of

from etude.errors import InputError
from etude.inference.engine import Engine
from etude.inference.request import SequenceState
from etude.inference.sampling import Sampling
from etude.inference.settings import EngineOptions
from etude.model.transformer import Transformer

FAMILIES = ("llama", "qwen3_moe", "deepseek_v3")


class Chaos:
    """An engine under a random load that follows from the seed."""

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
            kv_cache_tokens=4 * rng.randint(14, 40),
            page_size=4,
            max_sequences=rng.randint(1, 9),
            max_step_tokens=rng.choice((1, 7, 32)),
            prefix_caching=rng.random() < 0.8,
            on_swap=rng.choice(("keep", "recompute")),
            drafts=drafts,
            invariant=invariant,
        )
        print(f"chaos seed {seed}: {family}, {options}")
        self.engine = Engine(model, options, mtp=mtp_of(model) if drafts else None)
        self.received: dict[SequenceState, list[list[int]]] = {}
        self.stems = [[rng.randrange(23) for _ in range(20)] for _ in range(3)]
        self.refused = 0

    def listen(self, sequence: SequenceState, tokens: list[int]) -> None:
        self.received.setdefault(sequence, []).append(list(tokens))
        if self.rng.random() < 0.01 and self.received:
            self.engine.cancel(self.rng.choice(list(self.received)))

    def submit(self) -> None:
        rng = self.rng
        prompt = rng.choice(self.stems)[: rng.randint(1, 20)] + [rng.randrange(23) for _ in range(rng.randint(0, 6))]
        ways: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"top_p": 0.8}, {"top_k": 3, "min_p": 0.05}]
        stop = frozenset(rng.sample(range(23), rng.choice((0, 0, 2))))
        samples = rng.choice((1, 1, 1, 4))
        most = rng.choice((1, 4, 12, 200))
        since = rng.choice((None, None, rng.randrange(self.engine.version + 2)))
        seed = rng.randrange(2**40)
        sampling = Sampling(most, seed=seed, samples=samples, stop=stop, since=since, **rng.choice(ways))
        try:
            for sequence in self.engine.submit(prompt, sampling, self.listen):
                self.received[sequence] = []
        except InputError:  # two hundred tokens rarely fit
            self.refused += 1

    def step(self, submitting: bool) -> None:
        rng, engine = self.rng, self.engine
        if submitting and len(engine.scheduler.waiting) < 12 and rng.random() < 0.6:
            self.submit()
        if self.received and rng.random() < 0.05:
            engine.cancel(rng.choice(list(self.received)))
        if rng.random() < 0.02:
            engine.load(self.versions[(engine.version + 1) % 2].state_dict(), engine.version + 1)
        if engine.scheduler.running and rng.random() < 0.02:
            engine.scheduler.preempt(rng.choice(engine.scheduler.running))
        engine.step()
        engine.pool.check_invariants()
        for sequence in [sequence for sequence in self.received if sequence.ending is not None]:
            self.check(sequence, self.received.pop(sequence))

    def check(self, sequence: SequenceState, received: list[list[int]]) -> None:
        completion = sequence.result()
        assert received.count([]) == 1
        assert received[-1] == []
        assert list(chain(*received)) == completion.tokens
        count = len(completion.tokens)
        assert len(completion.logprobs) == len(completion.raw_logprobs) == len(completion.versions) == count
        assert completion.versions == sorted(completion.versions)
        assert all(number <= 0 for number in (*completion.logprobs, *completion.raw_logprobs))
        most, stop = sequence.sampling.max_tokens, sequence.sampling.stop
        assert count <= most
        assert not set(completion.tokens[:-1]) & stop
        if completion.ending == "length":
            assert count == most
        elif completion.ending == "stop":
            assert completion.tokens[-1] in stop
        if self.engine.routing_by_slot is not None and completion.ending != "cancelled":
            assert completion.routing is not None
            assert len(completion.routing) == len(sequence.prompt) + count - 1
        assert not sequence.pages

    def finish(self) -> None:
        """Run to the end and check that nothing is left."""
        while self.engine.busy:
            self.step(submitting=False)
        assert not self.received
        assert self.engine.pool.held == 0
        assert self.engine.speculator is None or not self.engine.speculator.states


def run_chaos(seed: int, requests: int) -> int:
    chaos = Chaos(seed)
    submitted = 0
    try:
        while submitted < requests:
            before = len(chaos.received)
            chaos.step(submitting=True)
            submitted += max(0, len(chaos.received) - before)
        chaos.finish()
    except Exception as problem:
        raise AssertionError(f"chaos seed {seed}: {problem!r}") from problem
    return chaos.engine.scheduler.preemptions


@pytest.mark.parametrize("seed", range(8))
def test_every_sequence_ends_exactly_once_and_no_page_is_lost(seed: int) -> None:
    run_chaos(seed, 60)


@pytest.mark.slow
def test_thousands_of_random_requests_leave_nothing_behind() -> None:
    first = int(torch.randint(2**31, ()))
    preemptions = sum(run_chaos(first + turn, 250) for turn in range(40))
    assert preemptions > 100
