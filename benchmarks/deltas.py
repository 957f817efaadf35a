"""Size of the weight deltas of training steps, the time to encode and apply them, and whether they are bit-identical.

    python benchmarks/deltas.py                               # 50 steps of a small model at three learning rates
    python benchmarks/deltas.py --learning-rates 1e-6         # one of them, under a minute
    python benchmarks/deltas.py --store runs/mine/rl/weights  # the versions that an RL run has published

The steps are those of RL: Etude's trainer and policy gradient, Adam without warm-up, groups of random rollouts with
random rewards, weights in bfloat16 rounded from float32 masters. How much a step changes depends on its size relative
to the weights, hardly on what is learned. Times are wall-clock, on all cores; as in a run, the older weights' digests
are known.
"""

import argparse
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from etude.kernels.loss import IGNORE
from etude.model.config import ModelConfig
from etude.model.transformer import initialize
from etude.rl.objective import PolicyGradient, RolloutBatch
from etude.rollouts.group_advantages import group_advantages
from etude.train.optim import AdamSettings
from etude.train.trainer import Trainer
from etude.weights.delta import apply_delta, delta_stats, encode_delta
from etude.weights.hashed import checksum, with_digests
from etude.weights.object_store import ObjectStore
from etude.weights.versions import BrokenChain, read_manifest, read_version, version_numbers

State = Mapping[str, Tensor]
MODEL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "initializer_range": 0.02,
}
GROUP, TOKENS = 4, 32  # rollouts of a step, and tokens of each


@dataclass(frozen=True)
class Measured:
    """The delta of one step, encoded and applied."""

    changed: float  # of the values
    delta: int  # bytes
    whole: int  # bytes of all values, uncompressed
    encode_s: float
    apply_s: float
    identical: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[1e-6, 3e-6, 1e-5])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--store", help="directory or URL of a run's weights, to measure instead")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.store:
        rows = {"the run's own": [measure(old, new) for old, new in published(ObjectStore(arguments.store))]}
    else:
        rates, steps = arguments.learning_rates, arguments.steps
        rows = {f"{rate:g}": [measure(old, new) for old, new in train(rate, steps)] for rate in rates}
    Console(width=120).print(table_of(rows))


def train(rate: float, steps: int) -> Iterator[tuple[State, State]]:
    """Yield the weights before and after every step."""
    torch.manual_seed(0)
    model = initialize(ModelConfig.from_hugging_face(MODEL), dtype=torch.float32)
    trainer = Trainer(model, AdamSettings(rate, weight_decay=0.0, round_to_bfloat16=True))
    old = published_weights(model)
    for _ in range(steps):
        trainer.step([rollouts(MODEL["vocab_size"])], PolicyGradient(), divisor=GROUP * TOKENS)
        new = published_weights(model)
        yield old, new
        old = new


def rollouts(vocabulary: int) -> RolloutBatch:
    """Return a group of random rollouts in which every token is sampled and has its rollout's advantage."""
    tokens = torch.randint(vocabulary, (GROUP, TOKENS))
    targets = torch.cat([tokens[:, 1:], torch.full((GROUP, 1), IGNORE)], 1)
    advantages = torch.tensor(group_advantages(torch.rand(GROUP).tolist()), dtype=torch.float32)[:, None].expand(
        GROUP, TOKENS
    )
    sampled = int((targets != IGNORE).sum())
    lengths = ((TOKENS,),) * GROUP
    zeros = torch.zeros(GROUP, TOKENS)
    given: dict[str, Any] = {"token_advantages": advantages, "sampler_logprobs": zeros, "sampler_versions": zeros.int()}
    return RolloutBatch(tokens, targets, lengths, (), sampled, **given)


def published_weights(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().to(torch.bfloat16, copy=True) for name, tensor in model.state_dict().items()}


def published(store: ObjectStore) -> Iterator[tuple[State, State]]:
    """Yield the weights before and after every delta that is still in the store."""
    have = None
    for number in version_numbers(store):
        try:
            parent = read_manifest(store, number).parent
            found = read_version(store, number, have if have is not None and parent == have[0].number else None)
        except BrokenChain as error:
            print(f"skipped: {error}")
            continue
        if have is not None and parent == have[0].number:
            yield have[1], found[1]
        have = found


def measure(old: State, new: State) -> Measured:
    old = with_digests(old)
    checksum(old)  # in a run, the step before has computed it
    start = time.perf_counter()
    delta = encode_delta(old, new)
    encoded = time.perf_counter()
    result = apply_delta(old, delta)
    applied = time.perf_counter()
    stats = delta_stats(delta)
    return Measured(
        stats.changed / stats.values,
        len(delta),
        sum(tensor.numel() * tensor.element_size() for tensor in new.values()),
        encoded - start,
        applied - encoded,
        checksum(result) == checksum(new),
    )


def table_of(rows: Mapping[str, list[Measured]]) -> Table:
    table = Table(title="weights as deltas, means over steps")
    for column in ("learning rate", "steps", "changed", "delta", "whole", "share", "encode", "apply", "bit-identical"):
        table.add_column(column, justify="right")
    for name, found in rows.items():
        if not found:
            table.add_row(name, "0")
            continue

        def mean(key: str, found: list[Measured] = found) -> float:
            return float(sum(getattr(each, key) for each in found) / len(found))

        whole = mean("whole")
        table.add_row(
            name,
            str(len(found)),
            f"{mean('changed'):.2%}",
            f"{mean('delta') / 1e6:.3f} MB",
            f"{whole / 1e6:.1f} MB",
            f"{mean('delta') / whole:.2%}",
            f"{mean('encode_s'):.2f} s, {whole / 1e6 / mean('encode_s'):.0f} MB/s",
            f"{mean('apply_s'):.2f} s, {whole / 1e6 / mean('apply_s'):.0f} MB/s",
            "yes" if all(each.identical for each in found) else "NO",
        )
    return table


if __name__ == "__main__":
    main()
