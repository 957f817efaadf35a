"""The engine returns what the model computes (tokens, log-probabilities, experts), whatever the scheduler does."""

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from engines import (
    FAMILIES,
    GREEDY,
    engine_of,
    finish,
    gap,
    likeliest,
    model_of,
    plain_routing,
    prompts_of,
    weights_of,
)
from pydantic import ValidationError
from samplers import parrot

from etude.errors import InputError
from etude.harness.trace import Segment, SegmentBuilder
from etude.inference.engine import Engine
from etude.inference.request import SequenceState
from etude.inference.sampling import Sampling
from etude.inference.settings import EngineOptions
from etude.model.cache import KVCache
from etude.model.moe import Routing
from etude.model.transformer import Transformer

PROMPTS = prompts_of((3, 17, 40, 64, 1, 33))
SITUATIONS = {
    "plain": {},
    "chunks": {"max_step_tokens": 16, "prefix_caching": False},
    "short of pages": {"kv_cache_tokens": 200, "max_step_tokens": 32},
    "invariant": {"invariant": True},
}
EXPERTS = ("qwen3_moe", "deepseek_v3")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("situation", SITUATIONS)
def test_greedy_tokens_and_logprobs_are_those_of_the_plain_forward(family: str, situation: str) -> None:
    engine = engine_of(family, **SITUATIONS[situation])
    sequences = [engine.submit(prompt, GREEDY)[0] for prompt in PROMPTS]
    finish(engine)
    assert (engine.scheduler.preemptions > 0) == (situation == "short of pages")
    for sequence in sequences:
        assert sequence.output == likeliest(family, 0, tuple(sequence.prompt), 20)
        assert gap(engine.model, sequence) < 1e-4
        assert sequence.logprobs == [0.0] * 20
        assert sequence.ending == "length"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sharing", [True, False])
def test_samples_of_one_prompt_share_it_and_match_the_plain_forward(family: str, sharing: bool) -> None:
    engine = engine_of(family, prefix_caching=sharing, kv_cache_tokens=512)
    sequences = engine.submit(PROMPTS[2], Sampling(max_tokens=12, samples=6, seed=5))
    again = engine.submit(PROMPTS[2] + [7], Sampling(max_tokens=12, seed=5))
    finish(engine)
    assert len({tuple(sequence.output) for sequence in sequences}) > 3
    assert [sequence.cached for sequence in sequences] == ([0] + [32] * 5 if sharing else [0] * 6)
    for sequence in sequences + again:
        assert gap(engine.model, sequence) < 1e-4


def test_a_later_turn_of_a_session_prefills_only_new_tokens() -> None:
    engine = engine_of("llama")
    (first,) = engine.submit(PROMPTS[2], GREEDY)
    finish(engine)
    read = engine.prefill_tokens
    (second,) = engine.submit(first.prompt + first.output + [5, 6, 7], GREEDY)
    finish(engine)
    assert second.cached == 56  # of 40 + 20 + 3 tokens; the last output token was never computed
    assert engine.prefill_tokens - read == 7
    assert gap(engine.model, second) < 1e-4


@pytest.mark.parametrize("family", EXPERTS)
@pytest.mark.parametrize("situation", SITUATIONS)
def test_experts_returned_are_those_of_the_plain_forward(family: str, situation: str) -> None:
    engine = engine_of(family, **SITUATIONS[situation])
    sequences = [engine.submit(prompt, Sampling(max_tokens=14, seed=3, samples=2)) for prompt in [*PROMPTS, PROMPTS[3]]]
    finish(engine)
    for sequence in chain(*sequences):
        routing = sequence.result().routing
        assert routing is not None
        assert routing.dtype == np.uint8
        assert torch.equal(
            torch.from_numpy(routing).long(), plain_routing(engine.model, sequence.prompt + sequence.output[:-1])
        )


def test_many_experts_need_a_wider_type() -> None:
    changes = {"num_experts": 300, "num_experts_per_tok": 3, "num_hidden_layers": 1}
    engine = Engine(weights_of("qwen3_moe", 0, **changes), EngineOptions(kv_cache_tokens=128))
    (sequence,) = engine.submit([1, 2, 3], Sampling(max_tokens=3))
    finish(engine)
    routing = sequence.result().routing
    assert routing is not None
    assert routing.dtype == np.uint16
    assert torch.equal(
        torch.from_numpy(routing).long(), plain_routing(engine.model, sequence.prompt + sequence.output[:-1])
    )


# ------------------------------------------------------------------------------------------------- new weights


def swapped(family: str, policy: str, steps: int, **options: object) -> tuple[Engine, list[SequenceState]]:
    engine = engine_of(family, 0, on_swap=policy, **options)
    sequences = [engine.submit(prompt, GREEDY)[0] for prompt in PROMPTS]
    for _ in range(steps):
        engine.step()
    engine.load(weights_of(family, 1).state_dict(), version=7)
    finish(engine)
    return engine, sequences


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "options", [{}, {"kv_cache_tokens": 200, "max_step_tokens": 32}], ids=["roomy", "short of pages"]
)
def test_after_a_swap_with_recompute_the_new_weights_have_computed_everything(family: str, options: dict) -> None:
    _, sequences = swapped(family, "recompute", 9, **options)
    for sequence in sequences:
        old = sequence.versions.count(0)
        assert sequence.versions == [0] * old + [7] * (20 - old)
        assert sequence.output[:old] == likeliest(family, 0, tuple(sequence.prompt), 20)[:old]
        if old < 20:
            after = likeliest(family, 1, tuple(sequence.prompt + sequence.output[:old]), 20 - old)
            assert sequence.output[old:] == after
            assert gap(weights_of(family, 1), sequence, old) < 1e-4
    assert any(0 < sequence.versions.count(0) < 20 for sequence in sequences)


@pytest.mark.parametrize("family", FAMILIES)
def test_after_a_swap_with_keep_new_weights_go_on_over_old_keys_and_values(family: str) -> None:
    _, sequences = swapped(family, "keep", 9)
    for sequence in sequences:
        old = sequence.versions.count(0)
        assert 0 < old < 20
        assert sequence.output == kept(family, sequence.prompt, old)


@torch.no_grad()
def kept(family: str, prompt: list[int], old: int, computed: int = 0) -> list[int]:
    """Decode greedily with one plain cache that holds `computed` tokens; after `old` tokens swap the weights."""
    model = model_of(family, 0)
    cache = KVCache(model.config, 1, len(prompt) + 20, torch.float32)
    if computed:
        model.hidden(torch.tensor([prompt[:computed]]), cache=cache)
    output, tokens = [], prompt[computed:]
    for index in range(20):
        if index == old:
            model.load_state_dict(weights_of(family, 1).state_dict())
        output.append(int(model.logits(model.hidden(torch.tensor([tokens]), cache=cache)[0, -1]).argmax()))
        tokens = output[-1:]
    return output


@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_sequences_that_start_after_a_swap_find_no_pages_of_older_weights(policy: str) -> None:
    engine = engine_of("llama", 0, on_swap=policy)
    (old,) = engine.submit(PROMPTS[3], GREEDY)
    for _ in range(5):
        engine.step()
    engine.load(weights_of("llama", 1).state_dict(), version=1)
    others = engine.submit(PROMPTS[3], Sampling(max_tokens=20, temperature=0.0, samples=3))
    finish(engine)
    (late,) = engine.submit(PROMPTS[3], GREEDY)
    finish(engine)
    assert old.ending == "length"
    for sequence in (*others, late):
        assert sequence.output == likeliest("llama", 1, tuple(PROMPTS[3]), 20)
        assert gap(engine.model, sequence) < 1e-4
    assert [sequence.cached > 0 for sequence in others[1:]] == [True, True]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("moment", ["between turns", "within a turn"])
def test_a_session_goes_on_over_its_own_keys_and_values_of_older_weights(family: str, moment: str) -> None:
    engine = engine_of(family, 0)
    ask = replace(GREEDY, since=0)
    (first,) = engine.submit(PROMPTS[2], ask)
    for _ in range(9):
        engine.step()
    if moment == "between turns":
        finish(engine)
    old = len(first.output)
    engine.load(weights_of(family, 1).state_dict(), version=1)
    finish(engine)
    whole = first.prompt + first.output
    read = engine.prefill_tokens
    (second,) = engine.submit([*whole, 5, 6, 7], ask)
    finish(engine)
    assert second.cached == 56  # of 40 + 20 + 3 tokens
    assert engine.prefill_tokens - read == 7
    assert second.output == kept(family, [*whole, 5, 6, 7], 0, computed=min(56, 40 + old - 1))
    assert second.versions == [1] * 20
    (other,) = engine.submit(second.prompt, GREEDY)  # without `since`: current weights only
    finish(engine)
    assert other.cached == 0
    assert other.output == likeliest(family, 1, tuple(second.prompt), 20)


def test_two_sessions_of_a_group_that_began_with_different_weights_share_no_pages() -> None:
    engine = engine_of("llama", 0)
    (early,) = engine.submit(PROMPTS[2], GREEDY)
    finish(engine)
    engine.load(weights_of("llama", 1).state_dict(), version=1)
    (late,) = engine.submit(PROMPTS[2], GREEDY)
    finish(engine)
    assert (early.versions[0], late.versions[0]) == (0, 1)
    turns = [[*first.prompt, *first.output, 5, 6, 7] for first in (early, late)]
    second = [engine.submit(turn, replace(GREEDY, since=since))[0] for since, turn in enumerate(turns)]
    finish(engine)
    assert [sequence.cached for sequence in second] == [56, 56]
    assert second[0].output == kept("llama", turns[0], 0, computed=56)
    assert second[1].output == likeliest("llama", 1, tuple(turns[1]), 20)


def test_a_session_whose_version_was_skipped_uses_pages_of_the_next() -> None:
    engine = engine_of("llama")
    engine.load(weights_of("llama", 1).state_dict(), version=5)
    for expected in (0, 32):
        (sequence,) = engine.submit(PROMPTS[2], replace(GREEDY, since=3))
        finish(engine)
        assert sequence.cached == expected
    engine.load(weights_of("llama", 0).state_dict(), version=5)  # the same number for other weights
    (sequence,) = engine.submit(PROMPTS[2], replace(GREEDY, since=3))
    finish(engine)
    assert sequence.cached == 0
    assert sequence.output == likeliest("llama", 0, tuple(PROMPTS[2]), 20)


@pytest.mark.parametrize("options", [{"on_swap": "recompute"}, {"invariant": True}], ids=["recompute", "invariant"])
def test_with_recompute_or_invariant_a_session_uses_current_weights_only(options: dict) -> None:
    engine = engine_of("llama", **options)
    (first,) = engine.submit(PROMPTS[2], replace(GREEDY, since=0))
    finish(engine)
    engine.load(weights_of("llama", 1).state_dict(), version=1)
    (second,) = engine.submit([*first.prompt, *first.output], replace(GREEDY, since=0))
    finish(engine)
    assert second.cached == 0
    assert second.output == likeliest("llama", 1, tuple(second.prompt), 20)


def replayed_gap(model: Transformer, segment: Segment, version: int) -> float:
    """Return the largest difference to the log-probabilities of a forward that replays the recorded experts, over the
    tokens of one version."""
    assert segment.routing is not None
    tokens = torch.from_numpy(segment.tokens.astype(np.int64))[None]
    routing = torch.full((1, len(segment), *segment.routing.shape[1:]), -1)
    routing[0, : len(segment.routing)] = torch.from_numpy(segment.routing.astype(np.int64))
    with torch.no_grad():
        hidden = model.hidden(tokens, routing=Routing(routing))
        logprobs = model.logits(hidden).log_softmax(-1)[0, :-1].gather(1, tokens[0, 1:, None])[:, 0]
    counted = segment.versions[1:] == version
    assert counted.any()
    return float(np.abs(logprobs.numpy() - segment.raw_logprobs[1:])[counted].max())


def add_turn(builder: SegmentBuilder, sequence: SequenceState) -> None:
    done = sequence.result()
    builder.append_sampled(done.tokens, done.logprobs, done.raw_logprobs, done.versions)
    builder.set_routing(done.routing)


@pytest.mark.parametrize("family", EXPERTS)
def test_replay_of_recomputed_experts_gives_the_log_probabilities_of_new_tokens(family: str) -> None:
    _, sequences = swapped(family, "recompute", 9)
    running = [sequence for sequence in sequences if sequence.versions[-1] == 7]
    assert any(sequence.versions[0] == 0 for sequence in running)
    for sequence in running:
        builder = SegmentBuilder("start", sequence.prompt)
        add_turn(builder, sequence)
        assert replayed_gap(weights_of(family, 1), builder.segment(), 7) < 1e-4
        routing = torch.from_numpy(sequence.result().routing).long()
        assert torch.equal(routing, plain_routing(weights_of(family, 1), sequence.prompt + sequence.output[:-1]))


@pytest.mark.parametrize("family", EXPERTS)
def test_replay_agrees_for_a_turn_after_a_swap_with_recompute(family: str) -> None:
    engine = engine_of(family, 0, on_swap="recompute")
    builder = SegmentBuilder("start", PROMPTS[2])
    for version in (0, 1):
        engine.load(weights_of(family, version).state_dict(), version)
        (sequence,) = engine.submit(builder.tokens, replace(GREEDY, since=0))
        finish(engine)
        add_turn(builder, sequence)
    segment = builder.segment()
    assert {*segment.versions.tolist()} == {-1, 0, 1}
    assert replayed_gap(weights_of(family, 1), segment, 1) < 1e-4


@pytest.mark.parametrize("family", EXPERTS)
def test_replay_agrees_for_a_sequence_preempted_after_a_swap_with_keep(family: str) -> None:
    engine = engine_of(family, 0, on_swap="keep", prefix_caching=False)
    (sequence,) = engine.submit(PROMPTS[2], GREEDY)
    for _ in range(9):
        engine.step()
    engine.load(weights_of(family, 1).state_dict(), version=1)
    engine.scheduler.preempt(sequence)
    finish(engine)
    builder = SegmentBuilder("start", sequence.prompt)
    add_turn(builder, sequence)
    assert replayed_gap(weights_of(family, 1), builder.segment(), 1) < 1e-4


def test_weights_that_do_not_fit_change_nothing() -> None:
    engine = engine_of("llama")
    before = {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}
    good = "norm.weight", torch.zeros_like(before["norm.weight"])
    with pytest.raises(InputError, match="nonsense is not a tensor"):
        engine.load({good[0]: good[1], "nonsense": torch.zeros(1)}, 1)
    with pytest.raises(InputError, match="expected"):
        engine.load({good[0]: good[1], "embed.weight": torch.zeros(1)}, 1)
    assert engine.version == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.model.state_dict().items())


def test_weights_changed_in_place_outside_the_engine_are_used() -> None:
    engine = engine_of("llama")
    engine.model.load_state_dict(weights_of("llama", 1).state_dict())
    sequences = [engine.submit(prompt, GREEDY)[0] for prompt in PROMPTS]
    finish(engine)
    assert [sequence.output for sequence in sequences] == [
        likeliest("llama", 1, tuple(prompt), 20) for prompt in PROMPTS
    ]


# ------------------------------------------------------------------------------------------------- endings


def test_a_stop_token_ends_a_completion_and_belongs_to_it() -> None:
    free = likeliest("llama", 0, tuple(PROMPTS[1]), 20)
    engine = engine_of("llama")
    (sequence,) = engine.submit(PROMPTS[1], Sampling(max_tokens=20, temperature=0.0, stop=frozenset({free[6], 60})))
    finish(engine)
    assert sequence.output == free[: free.index(free[6]) + 1]
    assert sequence.ending == "stop"


@pytest.mark.parametrize(("stop", "pieces"), [("cd", 2), ("de", 3), ("bcde", 3), ("f", 3), ("zz", 5)])
def test_a_stop_text_ends_a_completion_where_it_is_complete_even_across_tokens(stop: str, pieces: int) -> None:
    engine = parrot("ab", "cd", "ef", "gh", "ij", end=False)
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    prompt = tokenizer.encode(tokenizer.render([{"role": "user", "content": "x"}]), special=True)
    (sequence,) = engine.submit(prompt, Sampling(max_tokens=5, temperature=0.0, stop_text=("nothing", stop)))
    finish(engine)
    assert tokenizer.decode(sequence.output) == "abcdefghij"[: 2 * pieces]
    assert sequence.ending == ("stop" if pieces < 5 else "length")


def test_samples_of_one_prompt_each_stop_by_themselves() -> None:
    engine = engine_of("llama")
    sequences = engine.submit(PROMPTS[0], Sampling(max_tokens=40, samples=8, seed=3, stop=frozenset(range(8))))
    finish(engine)
    assert len({len(sequence.output) for sequence in sequences}) > 2
    for sequence in sequences:
        assert all(token >= 8 for token in sequence.output[:-1])
        assert (sequence.ending == "stop") == (sequence.output[-1] < 8)


def test_bad_requests_are_refused_before_they_are_queued() -> None:
    engine = engine_of("llama", kv_cache_tokens=64)
    bad = [
        ([], Sampling(), "empty"),
        ([61], Sampling(), "token id 61"),
        ([3, -1], Sampling(), "token id -1"),
        ([1] * 100, Sampling(max_tokens=29), "exceed the model's 128"),
        ([1] * 40, Sampling(max_tokens=24), "the KV cache holds 64"),
        ([1], Sampling(max_tokens=4, stop_text=("a",)), "tokenizer"),
    ]
    for prompt, sampling, reason in bad:
        with pytest.raises(InputError, match=reason):
            engine.submit(prompt, sampling)
    assert not engine.busy
    (fits,) = engine.submit([1] * 40, Sampling(max_tokens=23))
    finish(engine)
    assert len(fits.output) == 23


def test_engine_options_that_could_never_run_are_refused() -> None:
    for wrong in (
        {"max_step_tokens": 0},
        {"max_sequences": 0},
        {"page_size": 0},
        {"kv_cache_tokens": 0},
        {"drafts": -1},
        {"burst": 0},
    ):
        with pytest.raises(ValidationError, match=next(iter(wrong))):
            EngineOptions(**wrong)


def test_pages_longer_than_a_prefill_chunk_do_not_switch_invariance_off() -> None:
    engine = engine_of("llama", page_size=512, kv_cache_tokens=4096, invariant=True)
    assert engine.scheduler.fixed_chunk == 512


# ------------------------------------------------------------------------------------------------- cancelling


def test_a_listener_gets_every_token_once_and_the_end_once_cancelled_or_not() -> None:
    engine = engine_of("llama", max_sequences=3)
    calls: list[tuple[SequenceState, list[int]]] = []

    def listener(sequence: SequenceState, tokens: list[int]) -> None:
        calls.append((sequence, list(tokens)))

    sequences = [engine.submit(prompt, Sampling(max_tokens=9), listener)[0] for prompt in PROMPTS]
    for _ in range(4):
        engine.step()
    running, waiting = engine.scheduler.running[0], engine.scheduler.waiting[-1]
    for sequence in (running, waiting, running):
        engine.cancel(sequence)
    finish(engine)
    engine.cancel(running)
    engine.step()
    for sequence in sequences:
        received = [tokens for each, tokens in calls if each is sequence]
        assert received[-1] == []
        assert received.count([]) == 1
        assert list(chain(*received)) == sequence.output
        assert sequence.ending == ("cancelled" if sequence in (running, waiting) else "length")


def test_a_listener_may_cancel_from_inside_a_step() -> None:
    engine = engine_of("llama")
    sequences: list[SequenceState] = []

    def impatient(sequence: SequenceState, tokens: list[int]) -> None:
        if len(sequence.output) == 3 and tokens:
            for each in sequences:
                engine.cancel(each)

    sequences += engine.submit(PROMPTS[0], Sampling(max_tokens=30, samples=4), impatient)
    finish(engine)
    assert [sequence.ending for sequence in sequences] == ["cancelled"] * 4
    assert max(len(sequence.output) for sequence in sequences) == 3


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_when_the_leader_is_cancelled_another_sequence_prefills_the_prompt_once(steps: int) -> None:
    engine = engine_of("llama", max_step_tokens=16)
    sequences = engine.submit(PROMPTS[3], Sampling(max_tokens=6, samples=5, seed=2))
    for _ in range(steps):
        engine.step()
    engine.cancel(sequences[0])
    finish(engine)
    assert [sequence.ending for sequence in sequences] == ["cancelled"] + ["length"] * 4
    assert engine.prefill_tokens <= 16 * steps + 64 + 4 * 8  # and not five times 64
    for sequence in sequences[1:]:
        assert gap(engine.model, sequence) < 1e-4
