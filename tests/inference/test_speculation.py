"""Speculation does not change the output: greedy tokens are equal, sampled ones equal in distribution."""

import itertools
from collections import Counter

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
    surprise,
    weights_of,
)

from etude.errors import InputError
from etude.inference.engine import Engine
from etude.inference.request import SequenceState
from etude.inference.sampling import Sampling
from etude.inference.settings import EngineOptions
from etude.model.checkpoint import checkpoint_views
from etude.model.mtp import MTP
from etude.model.transformer import Transformer, draw_weights

PROMPTS = prompts_of((3, 17, 40, 64, 2, 33))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "options", [{}, {"kv_cache_tokens": 200, "max_step_tokens": 32}], ids=["roomy", "short of pages"]
)
def test_greedy_tokens_with_drafts_are_those_without(family: str, options: dict) -> None:
    engine = engine_of(family, drafts=3, **options)
    sequences = [engine.submit(prompt, GREEDY)[0] for prompt in PROMPTS]
    finish(engine)
    assert bool(engine.scheduler.preemptions) == bool(options)
    assert engine.speculator is not None
    assert not engine.speculator.states
    for sequence in sequences:
        assert sequence.output == likeliest(family, 0, tuple(sequence.prompt), 20)
        assert gap(engine.model, sequence) < 1e-4
        if engine.model.config.moe:
            want = plain_routing(engine.model, sequence.prompt + sequence.output[:-1])
            assert torch.equal(torch.from_numpy(sequence.result().routing).long(), want)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.6}, {"top_p": 0.7}, {"top_k": 3}], ids=str)
def test_three_sampled_tokens_have_the_joint_distribution_of_the_model(sampling: dict) -> None:
    vocabulary, prompt, count = 6, [1, 4, 2, 2, 5], 2560
    model = weights_of("llama", 2, vocabulary, num_hidden_layers=1, tie_word_embeddings=False)
    engine = engine_of(
        "llama", drafts=2, model=model, max_sequences=256, kv_cache_tokens=8192, page_size=4, max_step_tokens=2048
    )
    groups = [engine.submit(prompt, Sampling(3, seed=10**6 * i, samples=512, **sampling)) for i in range(5)]
    sequences = list(itertools.chain(*groups))
    finish(engine)
    assert engine.speculator is not None
    assert engine.speculator.acceptance.accepted[0] > count / 10, "too few drafts are accepted to prove anything"
    paths = list(itertools.product(range(vocabulary), repeat=3))
    with torch.no_grad():
        logprobs = model(torch.tensor([prompt + list(path) for path in paths])).log_softmax(-1)[:, len(prompt) - 1 : -1]
    probabilities = _truncated(logprobs, **sampling).gather(2, torch.tensor(paths)[..., None])[..., 0]
    seen = Counter(tuple(sequence.output) for sequence in sequences)
    assert surprise([seen[path] for path in paths], (probabilities.prod(dim=1) * count).tolist()) < 4
    for sequence in sequences[:40]:
        row = paths.index(tuple(sequence.output))
        assert torch.allclose(torch.tensor(sequence.logprobs), probabilities[row].log(), atol=1e-4)


def _truncated(logprobs: torch.Tensor, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> torch.Tensor:
    probabilities = (logprobs / temperature).softmax(-1)
    order = probabilities.argsort(dim=-1, descending=True)
    kept = torch.zeros_like(probabilities, dtype=torch.bool)
    for at in itertools.product(*map(range, probabilities.shape[:-1])):
        mass = 0.0
        for rank, token in enumerate(order[at].tolist()):
            if mass < top_p and (not top_k or rank < top_k):
                kept[(*at, token)] = True
            mass += probabilities[(*at, token)].item()
    probabilities = probabilities * kept
    return probabilities / probabilities.sum(-1, keepdim=True)


def test_counters_add_up_to_the_output_tokens() -> None:
    engine = engine_of("llama", drafts=2)
    sequences = [engine.submit(prompt, Sampling(max_tokens=40, seed=1, temperature=0.3))[0] for prompt in PROMPTS]
    finish(engine)
    assert engine.speculator is not None
    acceptance = engine.speculator.acceptance
    assert acceptance.accepted == sorted(acceptance.accepted, reverse=True)
    verified = acceptance.rounds + sum(acceptance.accepted)
    output = sum(len(sequence.output) - 1 for sequence in sequences)  # the first of each comes from its prompt
    assert output <= verified <= output + 2 * len(sequences)  # the last round of a sequence may overshoot
    assert acceptance.length == pytest.approx(verified / acceptance.rounds)


def test_max_tokens_and_stop_tokens_hold_inside_a_verified_run() -> None:
    free = likeliest("llama", 0, tuple(PROMPTS[1]), 20)
    for most in range(1, 7):
        engine = engine_of("llama", drafts=3)
        (sequence,) = engine.submit(PROMPTS[1], Sampling(max_tokens=most, temperature=0.0))
        finish(engine)
        assert sequence.output == free[:most]
    engine = engine_of("llama", drafts=3)
    (sequence,) = engine.submit(PROMPTS[1], Sampling(max_tokens=20, temperature=0.0, stop=frozenset({free[4]})))
    finish(engine)
    assert sequence.output == free[: free.index(free[4]) + 1]


@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_a_swap_in_the_middle_of_speculation_loses_nothing(policy: str) -> None:
    engine = engine_of("llama", drafts=2, on_swap=policy, kv_cache_tokens=200, max_step_tokens=32)
    sequences = [engine.submit(prompt, GREEDY)[0] for prompt in PROMPTS]
    for _ in range(8):
        engine.step()
    engine.load(weights_of("llama", 1).state_dict(), version=1)
    finish(engine)
    for sequence in sequences:
        old = sequence.versions.count(0)
        assert sequence.output[:old] == likeliest("llama", 0, tuple(sequence.prompt), 20)[:old]
        if policy == "recompute" and old < 20:
            assert sequence.output[old:] == likeliest(
                "llama", 1, tuple(sequence.prompt + sequence.output[:old]), 20 - old
            )


def other_layers(model: Transformer) -> MTP:
    mtp = MTP(model.config)
    draw_weights(mtp, 0.15, 8)
    return mtp


def swapped_after(engine: Engine, prompt: list[int], count: int, weights: dict[str, torch.Tensor]) -> SequenceState:
    """Return a greedy sequence for which the weights change as soon as it has `count` tokens or more."""
    (sequence,) = engine.submit(prompt, GREEDY)
    while len(sequence.output) < count:
        engine.step()
    engine.load(weights, version=1)
    finish(engine)
    return sequence


@pytest.mark.parametrize(
    ("family", "policy", "brings", "names"),
    [
        ("llama", "keep", True, "ours"),
        ("llama", "keep", False, "checkpoint"),
        ("llama", "recompute", True, "checkpoint"),
        ("llama", "recompute", False, "ours"),
        ("deepseek_v3", "keep", True, "checkpoint"),
        ("qwen3_moe", "recompute", False, "ours"),
    ],
)
def test_after_a_swap_greedy_tokens_are_those_without_drafts_with_old_or_new_mtp_layers(
    family: str, policy: str, brings: bool, names: str
) -> None:
    other = weights_of(family, 1)
    weights = {**(other.state_dict() if names == "ours" else checkpoint_views(other))}
    layers = other_layers(other).state_dict()
    if brings:
        weights |= {f"mtp.{name}": tensor for name, tensor in layers.items()}
    for prompt in PROMPTS[:2]:
        drafting = engine_of(family, drafts=3, on_swap=policy)
        sequence = swapped_after(drafting, prompt, 5, weights)
        old = sequence.versions.count(0)
        plain = swapped_after(engine_of(family, on_swap=policy), prompt, old, dict(other.state_dict()))
        assert 5 <= old < 20
        assert (sequence.output, sequence.versions) == (plain.output, plain.versions)
        assert drafting.mtp is not None
        changed = [torch.equal(tensor, layers[name]) for name, tensor in drafting.mtp.state_dict().items()]
        assert all(changed) == brings
        (late,) = drafting.submit(prompt, GREEDY)
        finish(drafting)
        assert late.output == likeliest(family, 1, tuple(prompt), 20)


def test_mtp_layers_that_do_not_fit_change_nothing() -> None:
    engine, other = engine_of("llama", drafts=2), weights_of("llama", 1)
    layers = {f"mtp.{name}": tensor for name, tensor in other_layers(other).state_dict().items()}
    name = "mtp.layers.0.project.weight"
    before = [tensor.clone() for tensor in (*engine.model.parameters(), *engine.mtp.parameters())]
    for bad, complaint in (
        ({name: layers[name][:1]}, f"{name} is"),
        ({name.replace("0", "1"): layers[name]}, "mtp.layers.1.project.weight is not a tensor of this model$"),
        ({name: layers[name].long()}, "expected float32 or bfloat16"),
    ):
        with pytest.raises(InputError, match=complaint):
            engine.load({**other.state_dict(), **layers, **bad}, 1)
    after = (*engine.model.parameters(), *engine.mtp.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    with pytest.raises(InputError, match="does not speculate: leave MTP layers out"):
        engine_of("llama").load(layers, 1)


def test_a_preempted_sequence_whose_pages_are_all_still_cached_drafts_again() -> None:
    """Its prefix is found up to the last token, but a token must be computed to get a state to draft from."""
    engine = engine_of("llama", drafts=2, page_size=4)
    (sequence,) = engine.submit(PROMPTS[0], GREEDY)
    while sequence.ending is None:
        engine.step()
        if sequence.ending is None and sequence.output:
            engine.scheduler.preempt(sequence)
    assert sequence.preempted > 4
    assert sequence.output == likeliest("llama", 0, tuple(PROMPTS[0]), 20)


def test_drafts_need_a_model_with_mtp_layers() -> None:
    with pytest.raises(InputError, match="MTP"):
        Engine(model_of("llama"), EngineOptions(drafts=2))
