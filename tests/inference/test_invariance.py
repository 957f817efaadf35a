"""In the invariant mode a sequence's numbers are equal, to the last bit, alone or in any batch."""

import random

import pytest
from engines import FAMILIES, mtp_of, prompts_of, weights_of

from etude.inference import engine as engine_module
from etude.inference.engine import Engine
from etude.inference.request import SequenceState
from etude.inference.sampling import Sampling
from etude.inference.settings import EngineOptions

PROMPTS = prompts_of((50, 3, 70, 33))
PROMPTS.append([*PROMPTS[0][:40], 1, 2, 3])  # begins like the first


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "INVARIANT_CHUNK", 32)


def engine_of(family: str, tokens: int, drafts: int, prefix_caching: bool = True) -> Engine:
    model = weights_of(family)
    options = EngineOptions(
        kv_cache_tokens=tokens,
        page_size=8,
        max_sequences=12,
        max_step_tokens=64,
        invariant=True,
        drafts=drafts,
        prefix_caching=prefix_caching,
    )
    return Engine(model, options, mtp=mtp_of(model) if drafts else None)


def sampling(index: int, **changes: int) -> Sampling:
    return Sampling(max_tokens=14, seed=index, top_p=0.9 if index % 2 else 1.0, **changes)


def numbers(sequence: SequenceState) -> tuple[object, ...]:
    routing = sequence.result().routing
    return sequence.output, sequence.logprobs, sequence.raw_logprobs, None if routing is None else routing.tolist()


def alone(family: str, prompt: list[int], how: Sampling, drafts: int) -> tuple[object, ...]:
    engine = engine_of(family, 4096, drafts)
    (sequence,) = engine.submit(prompt, how)
    while engine.step():
        pass
    return numbers(sequence)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("drafts", [0, 2])
def test_a_sequence_is_the_same_to_the_last_bit_alone_and_in_any_batch(family: str, drafts: int) -> None:
    want = [alone(family, prompt, sampling(index), drafts) for index, prompt in enumerate(PROMPTS)]
    samples = [alone(family, PROMPTS[2], Sampling(max_tokens=14, seed=70 + i), drafts) for i in range(3)]
    for seed in range(2):
        rng = random.Random(seed)
        engine = engine_of(family, rng.choice((512, 1024)), drafts, prefix_caching=bool(seed))
        order = list(range(len(PROMPTS))) * 2
        rng.shuffle(order)
        asked: list[tuple[tuple[object, ...], SequenceState]] = []
        for turn, index in enumerate(order):
            asked.append((want[index], engine.submit(PROMPTS[index], sampling(index))[0]))
            if turn == 3:
                group = engine.submit(PROMPTS[2], Sampling(max_tokens=14, seed=70, samples=3))
                asked += zip(samples, group, strict=True)
            for _ in range(rng.randrange(5)):
                engine.step()
        while engine.step():
            engine.pool.check_invariants()
        assert engine.scheduler.preemptions == 0
        different = [sequence.number for expected, sequence in asked if numbers(sequence) != expected]
        assert not different, f"seed {seed}: {len(different)} of {len(asked)} sequences differ"
