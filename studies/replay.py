"""Router replay and its plausibility filter on a small mixture of experts: how far the trainer is from the sampler.

Trainer and sampler differ in three situations: the sampler rounds to bfloat16; new weights reach it in the middle of a
sequence and it keeps the KV cache of the old ones; or it recomputes the cache, and records the experts of earlier
tokens anew. Replay forces the recorded experts on the trainer. The filter drops those whose gate score in the trainer
is below a fraction of the trainer's own weakest choice.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from etude.data.packing import Batch
from etude.evaluation.plot import Axis, Bars, Line, Panel
from etude.harness.trace import Segment, SegmentBuilder
from etude.inference.engine import Engine
from etude.inference.sampling import Sampling
from etude.inference.settings import CachePolicy, EngineOptions
from etude.kernels.loss import IGNORE, token_logprobs
from etude.model.moe import Routing
from etude.model.transformer import Transformer, initialize
from etude.rl.packing import TrainingSequence
from etude.system.progress import ProgressCallback
from etude.train.objectives import next_token
from etude.train.optim import AdamSettings
from etude.train.trainer import Trainer
from studies.study import StudyResult, study
from studies.toy_policy import copy_model, one_sequence_per_row, toy_config

VOCABULARY = 64
SUCCESSORS = np.array([0.55, 0.25, 0.15, 0.05])  # probabilities of the four tokens that may follow any two
ROUNDING, CACHE_KEPT, CACHE_RECOMPUTED = "rounding", "swap, cache kept", "swap, cache anew"
NO_REPLAY, REPLAY, FILTERED = "no replay", "replay", "replay, filtered"


@dataclass(frozen=True)
class ReplaySettings:
    layers: int = 4
    experts: int = 16  # two for each token
    pretraining_steps: int = 120
    steps_behind: int = 16  # training steps that a weight swap brings at once
    learning_rate: float = 1e-3  # of those
    sequences: int = 128
    prompt: int = 16  # tokens
    new_tokens: int = 48  # a swap comes after half of them
    plausibility: float = 0.9  # of the filter in the table
    sweep: tuple[float, ...] = (0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)


@study("replay")
def replay(seed: int, progress: ProgressCallback, settings: ReplaySettings | None = None) -> StudyResult:
    """Router replay off, on, and on with the plausibility filter: where is the trainer nearest to the sampler?"""
    s = settings or ReplaySettings()
    steps = s.pretraining_steps + s.steps_behind
    config = toy_config(VOCABULARY, layers=s.layers, experts=s.experts)
    older = Trainer(initialize(config, seed), AdamSettings(3e-3, weight_decay=0.0))
    pretrain(older, s.pretraining_steps, seed, lambda step: progress(step, steps, "older weights"))
    newer = Trainer(copy_model(older.model), AdamSettings(s.learning_rate, weight_decay=0.0))
    pretrain(newer, s.steps_behind, seed + 1, lambda step: progress(s.pretraining_steps + step, steps, "newer weights"))
    mismatches = {}
    for name, model, segments in (
        (ROUNDING, older.model, sample(older.model, None, "keep", s, seed)),
        (CACHE_KEPT, newer.model, sample(older.model, newer.model, "keep", s, seed)),
        (CACHE_RECOMPUTED, newer.model, sample(older.model, newer.model, "recompute", s, seed)),
    ):
        mismatches[name] = {
            NO_REPLAY: mismatch(model, segments, replayed=False),
            REPLAY: mismatch(model, segments),
            FILTERED: mismatch(model, segments, s.plausibility),
            "sweep": [mismatch(model, segments, ratio) for ratio in s.sweep],
        }
    return build_result(mismatches, s)


# ------------------------------------------------------------------------------------------------- model


def pretrain(trainer: Trainer, steps: int, seed: int, progress: Callable[[int], None]) -> None:
    """Train on the synthetic language, so that tokens and experts are confident choices."""
    rng = np.random.default_rng(seed)
    for step in range(steps):
        tokens = torch.from_numpy(draw_text(rng, rows=32, length=48))
        targets = torch.cat((tokens[:, 1:], torch.full_like(tokens[:, :1], IGNORE)), dim=1)
        lengths = tuple((48,) for _ in tokens)
        trainer.step([Batch(tokens, targets, lengths, (), 32 * 47)], next_token)
        progress(step + 1)


def draw_text(rng: np.random.Generator, rows: int, length: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Draw text in which the last two tokens allow four successors; the language is the same for every seed."""
    following = np.random.default_rng(5).integers(VOCABULARY, size=(8, VOCABULARY, len(SUCCESSORS)))
    text = rng.integers(VOCABULARY, size=(rows, length))
    for at in range(2, length):
        choice = rng.choice(len(SUCCESSORS), size=rows, p=SUCCESSORS)
        text[:, at] = following[text[:, at - 2] % 8, text[:, at - 1], choice]
    return text


def sample(
    older: Transformer, newer: Transformer | None, on_swap: CachePolicy, s: ReplaySettings, seed: int
) -> list[Segment]:
    """Sample from a bfloat16 engine, recording experts; weights change to `newer`, if given, half-way."""
    options = EngineOptions(
        kv_cache_tokens=2 * s.sequences * (s.prompt + s.new_tokens), max_sequences=s.sequences, on_swap=on_swap
    )
    engine = Engine(copy_model(older).to(torch.bfloat16), options)
    prompts = draw_text(np.random.default_rng(seed + 2), s.sequences, s.prompt)
    sequences = [
        sequence
        for number, prompt in enumerate(prompts)
        for sequence in engine.submit(
            prompt.tolist(), Sampling(max_tokens=s.new_tokens, seed=seed * s.sequences + number)
        )
    ]
    while min(len(sequence.output) for sequence in sequences) < s.new_tokens // 2:
        engine.step()
    if newer is not None:
        engine.load({name: value.to(torch.bfloat16) for name, value in newer.state_dict().items()}, 1)
    while engine.step():
        pass
    segments = []
    for sequence in sequences:
        builder, completion = SegmentBuilder("start", sequence.prompt), sequence.result()
        builder.append_sampled(completion.tokens, completion.logprobs, completion.raw_logprobs, completion.versions)
        builder.set_routing(completion.routing)
        segments.append(builder.segment())
    return segments


def mismatch(
    model: Transformer, segments: Sequence[Segment], plausibility: float = 0.0, *, replayed: bool = True
) -> dict[str, float]:
    """Return |log p of trainer - log p of sampler| on tokens of the newest weights, and the share of other experts."""
    newest = max(int(segment.versions.max()) for segment in segments)
    sequences = [TrainingSequence(segment, np.zeros(int(segment.sampled.sum()), np.float32)) for segment in segments]
    (batch,) = one_sequence_per_row(sequences, model.config)
    assert batch.routing is not None
    routing = Routing(batch.routing if replayed else None, plausibility)
    with torch.inference_mode():
        hidden = model.hidden(batch.tokens, routing=routing).flatten(0, 1)
        logprobs = token_logprobs(hidden, model.head_weight, batch.targets.flatten())
    versions = np.stack([np.append(segment.versions[1:], -1) for segment in segments])
    counted = torch.from_numpy(versions == newest).flatten()
    gaps = (logprobs - batch.sampler_logprobs.flatten())[counted].abs()
    recorded = (batch.routing >= 0).any(-1)
    assert routing.chosen is not None
    differing = (routing.chosen != batch.routing).any(-1) & recorded
    return {
        "mean": float(gaps.mean()),
        "p99": float(gaps.quantile(0.99)),
        "largest": float(gaps.max()),
        "differing": float(differing.sum() / recorded.sum()),
    }


# ------------------------------------------------------------------------------------------------- plot


def build_result(mismatches: Mapping[str, Mapping[str, Any]], s: ReplaySettings) -> StudyResult:
    modes = (NO_REPLAY, REPLAY, FILTERED)

    def p99(name: str) -> str:
        one, two, three = (mismatches[name][mode]["p99"] for mode in modes)
        return f"{one:.3f}, {two:.3f} and {three:.3f}"

    return StudyResult(
        title="Router replay and its filter on a mixture of experts",
        conclusion=(
            f"p99 of |log p of trainer - log p of sampler| without replay, with it, and filtered at "
            f"{s.plausibility:g}: {p99(ROUNDING)} for bfloat16 rounding alone; {p99(CACHE_KEPT)} where weights change "
            f"in mid-sequence and the KV cache is kept; {p99(CACHE_RECOMPUTED)} where it is recomputed."
        ),
        columns=("trainer and sampler differ by", "mode", "mean", "p99", "largest", "experts that differ"),
        rows=[
            (name, mode, f"{at['mean']:.4f}", f"{at['p99']:.4f}", f"{at['largest']:.3f}", f"{at['differing']:.2%}")
            for name, by_mode in mismatches.items()
            for mode in modes
            for at in [by_mode[mode]]
        ],
        panels=[
            Panel(
                Axis(""),
                Axis("p99 mismatch, nats", log=True),
                [Bars(mode, [by_mode[mode]["p99"] for by_mode in mismatches.values()]) for mode in modes],
                title="Trainer against sampler",
                categories=[name.replace(", ", ",\n") for name in mismatches],
            ),
            Panel(
                Axis("plausibility threshold of the filter"),
                Axis("p99 mismatch, nats", log=True),
                [
                    Line(name, s.sweep, [at["p99"] for at in by_mode["sweep"]], style="both")
                    for name, by_mode in mismatches.items()
                ],
                title="From full replay (0) to none (1)",
            ),
        ],
        data={"sweep": list(s.sweep), "mismatch": mismatches},
        settings=s,
    )


if __name__ == "__main__":
    from studies.cli import main

    main("replay")
