"""Router replay and its plausibility filter on a small mixture of experts: how far the trainer is from the sampler.

Trainer and sampler disagree in three situations here. The sampler rounds to bfloat16. Or new weights reach it in the
middle of a sequence, and it keeps the keys and values of the old ones. Or it computes those anew: then the experts on
record for the earlier tokens are no longer those that made the later ones. Replay forces the experts on record upon the
trainer; the filter lets go of those whose score, in the trainer's own eyes, is below a fraction of its weakest choice.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from etude.data.packing import Batch
from etude.evaluation.plot import Axis, Bars, Line, Panel
from etude.harness.trace import Segment, Tape
from etude.inference.engine import CachePolicy, Engine, EngineOptions
from etude.inference.sampling import Sampling
from etude.kernels.loss import IGNORE, token_logprobs
from etude.model.moe import Routing
from etude.model.transformer import Transformer, initialize
from etude.rl.packing import Piece
from etude.system.progress import Report
from etude.train.objectives import next_token
from etude.train.optim import AdamSettings
from etude.train.trainer import Trainer
from studies.study import Finding, study
from studies.toy_policy import copy_of, tiny_config, whole_rows

WORDS = 64
CHOICES = np.array([0.55, 0.25, 0.15, 0.05])  # of the next word, after any two
ROUNDING, KEPT, ANEW = "rounding", "swap, cache kept", "swap, cache anew"
NONE, REPLAY, FILTERED = "no replay", "replay", "replay, filtered"


@dataclass(frozen=True)
class Settings:
    layers: int = 4
    experts: int = 16  # two for each token
    pretraining_steps: int = 120
    steps_behind: int = 16  # steps of training that a swap brings at once
    learning_rate: float = 1e-3  # of those
    sequences: int = 128
    prompt: int = 16  # tokens
    made: int = 48  # tokens; a swap comes after half of them
    plausibility: float = 0.9  # of the filter in the table
    sweep: tuple[float, ...] = (0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)


@study("replay")
def replay(seed: int, report: Report, settings: Settings | None = None) -> Finding:
    """Router replay off, on, and on with the plausibility filter: where is the trainer nearest to the sampler?"""
    s = settings or Settings()
    steps = s.pretraining_steps + s.steps_behind
    config = tiny_config(WORDS, layers=s.layers, experts=s.experts)
    older = Trainer(initialize(config, seed), AdamSettings(3e-3, weight_decay=0.0))
    read(older, s.pretraining_steps, seed, lambda step: report(step, steps, "reading"))
    newer = Trainer(copy_of(older.model), AdamSettings(s.learning_rate, weight_decay=0.0))
    read(newer, s.steps_behind, seed + 1, lambda step: report(s.pretraining_steps + step, steps, "moving on"))
    found = {}
    for name, model, segments in (
        (ROUNDING, older.model, sampled(older.model, None, "keep", s, seed)),
        (KEPT, newer.model, sampled(older.model, newer.model, "keep", s, seed)),
        (ANEW, newer.model, sampled(older.model, newer.model, "recompute", s, seed)),
    ):
        found[name] = {
            NONE: mismatch(model, segments, replayed=False),
            REPLAY: mismatch(model, segments),
            FILTERED: mismatch(model, segments, s.plausibility),
            "sweep": [mismatch(model, segments, ratio) for ratio in s.sweep],
        }
    return finding(found, s)


# ------------------------------------------------------------------------------------------------- the model


def read(trainer: Trainer, steps: int, seed: int, told: Callable[[int], None]) -> None:
    """Learn a language: without opinions, neither the words nor the experts would be anybody's choice."""
    luck = np.random.default_rng(seed)
    for step in range(steps):
        tokens = torch.from_numpy(language(luck, rows=32, length=48))
        targets = torch.cat((tokens[:, 1:], torch.full_like(tokens[:, :1], IGNORE)), dim=1)
        lengths = tuple((48,) for _ in tokens)
        trainer.step([Batch(tokens, targets, lengths, (), 32 * 47)], next_token)
        told(step + 1)


def language(luck: np.random.Generator, rows: int, length: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Text in which the last two words leave four to choose from; the same language for every seed."""
    following = np.random.default_rng(5).integers(WORDS, size=(8, WORDS, len(CHOICES)))
    text = luck.integers(WORDS, size=(rows, length))
    for at in range(2, length):
        text[:, at] = following[text[:, at - 2] % 8, text[:, at - 1], luck.choice(len(CHOICES), size=rows, p=CHOICES)]
    return text


def sampled(
    older: Transformer, newer: Transformer | None, on_swap: CachePolicy, s: Settings, seed: int
) -> list[Segment]:
    """Sequences of a bfloat16 engine with the experts it chose; with `newer`, those weights come half-way."""
    options = EngineOptions(tokens=2 * s.sequences * (s.prompt + s.made), max_streams=s.sequences, on_swap=on_swap)
    engine = Engine(copy_of(older).to(torch.bfloat16), options)
    prompts = language(np.random.default_rng(seed + 2), s.sequences, s.prompt)
    streams = [
        stream
        for number, prompt in enumerate(prompts)
        for stream in engine.submit(prompt.tolist(), Sampling(max_tokens=s.made, seed=seed * s.sequences + number))
    ]
    while min(len(stream.made) for stream in streams) < s.made // 2:
        engine.step()
    if newer is not None:
        engine.load({name: value.to(torch.bfloat16) for name, value in newer.state_dict().items()}, 1)
    while engine.step():
        pass
    found = []
    for stream in streams:
        tape, sample = Tape("start", stream.prompt), stream.result()
        tape.make(sample.tokens, sample.logprobs, sample.raw_logprobs, sample.versions)
        tape.route(sample.routing)
        found.append(tape.segment())
    return found


def mismatch(
    model: Transformer, segments: Sequence[Segment], plausibility: float = 0.0, *, replayed: bool = True
) -> dict[str, float]:
    """|log p of trainer - of sampler| on tokens of the trainer's weights, and how many choices of experts differ."""
    newest = max(int(segment.versions.max()) for segment in segments)
    pieces = [Piece(segment, np.zeros(int(segment.made.sum()), np.float32)) for segment in segments]
    (batch,) = whole_rows(pieces, model.config)
    assert batch.routing is not None
    routing = Routing(batch.routing if replayed else None, plausibility)
    with torch.inference_mode():
        hidden = model.hidden(batch.tokens, routing=routing).flatten(0, 1)
        seen = token_logprobs(hidden, model.head_weight, batch.targets.flatten())
    versions = np.stack([np.append(segment.versions[1:], -1) for segment in segments])
    counted = torch.from_numpy(versions == newest).flatten()
    gaps = (seen - batch.sampler.flatten())[counted].abs()
    known = (batch.routing >= 0).any(-1)
    assert routing.chosen is not None
    other = (routing.chosen != batch.routing).any(-1) & known
    return {
        "mean": float(gaps.mean()),
        "p99": float(gaps.quantile(0.99)),
        "largest": float(gaps.max()),
        "differing": float(other.sum() / known.sum()),
    }


# ------------------------------------------------------------------------------------------------- the picture


def finding(found: Mapping[str, Mapping[str, Any]], s: Settings) -> Finding:
    ways = (NONE, REPLAY, FILTERED)

    def p99(name: str) -> str:
        one, two, three = (found[name][way]["p99"] for way in ways)
        return f"{one:.3f}, {two:.3f} and {three:.3f}"

    return Finding(
        title="Router replay and its filter on a mixture of experts",
        conclusion=(
            f"p99 of |log p of trainer - of sampler| without replay, with it, and filtered at {s.plausibility:g}: "
            f"{p99(ROUNDING)} for bfloat16 rounding alone; {p99(KEPT)} where weights change in mid-sequence and the "
            f"cache is kept; {p99(ANEW)} where it is computed anew, so that the record is out of date."
        ),
        columns=("trainer and sampler differ by", "way", "mean", "p99", "largest", "experts that differ"),
        rows=[
            (name, way, f"{at['mean']:.4f}", f"{at['p99']:.4f}", f"{at['largest']:.3f}", f"{at['differing']:.2%}")
            for name, each in found.items()
            for way in ways
            for at in [each[way]]
        ],
        panels=[
            Panel(
                Axis(""),
                Axis("p99 mismatch, nats", log=True),
                [Bars(way, [each[way]["p99"] for each in found.values()]) for way in ways],
                title="Trainer against sampler",
                categories=[name.replace(", ", ",\n") for name in found],
            ),
            Panel(
                Axis("plausibility that the filter asks for"),
                Axis("p99 mismatch, nats", log=True),
                [
                    Line(name, s.sweep, [at["p99"] for at in each["sweep"]], style="both")
                    for name, each in found.items()
                ],
                title="From replay (0) to none (1)",
            ),
        ],
        data={"sweep": list(s.sweep), "mismatch": found},
        settings=s,
    )
