"""Mismatch of the trainer's and the sampler's log-probabilities of the same tokens, with and without router replay.

    python benchmarks/mismatch.py                  # on a GPU if there is one, else on the CPU
    python benchmarks/mismatch.py --requests 200

The sampler computes tokens in batches, prefill chunks and shared pages; the trainer computes prompt and completion as
packed documents in one forward with gradients. Both use the same model code, so the rest is the order of summation and,
with experts, routing choices that such a difference changes. Weights are random and larger than usual: at a usual
initialisation all tokens are equally likely and every difference vanishes.
"""

import argparse
import random
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from etude.inference.engine import Engine
from etude.inference.request import SequenceState
from etude.inference.sampling import Sampling
from etude.inference.settings import EngineOptions
from etude.kernels.attention import Documents
from etude.kernels.loss import IGNORE, token_logprobs
from etude.model.config import ModelConfig
from etude.model.moe import Routing
from etude.model.transformer import Transformer, draw_weights

COMMON: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "norm_topk_prob": True}
MODELS = {
    "dense": {"model_type": "llama", **COMMON},
    "experts": {"model_type": "qwen3_moe", **COMMON, **EXPERTS},
}
WIDTH = 0.08  # of the weights: the likeliest of 4,096 tokens then has a probability of a few percent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--new-tokens", type=int, default=64)
    arguments = parser.parse_args()
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    table = Table(title=f"|log p of trainer - log p of sampler| on {device}")
    for column in ("model", "precision", "router replay", "mean", "p99", "largest", "experts that differ"):
        table.add_column(column, justify="left" if column in ("model", "precision", "router replay") else "right")
    tokens = 0
    for name, source in MODELS.items():
        for dtype in (torch.float32, torch.bfloat16):
            model = Transformer(ModelConfig.from_hugging_face(source)).eval()
            draw_weights(model, WIDTH, seed=0)
            model = model.to(device=arguments.device, dtype=dtype)
            sequences = sample(model, arguments.requests, arguments.new_tokens)
            tokens = sum(len(sequence.output) for sequence in sequences)
            for replay in (False, True) if model.config.moe else (False,):
                gaps, differing = compare(model, sequences, replay)
                label = ("yes" if replay else "no") if model.config.moe else ""
                numbers = (f"{gaps.mean():.1e}", f"{gaps.quantile(0.99):.1e}", f"{gaps.max():.1e}")
                share = f"{differing:.3%}" if model.config.moe else ""
                table.add_row(name, str(dtype).removeprefix("torch."), label, *numbers, share)
    Console(width=120).print(table)
    print(
        f"{tokens:,} sampled tokens in each row, of a 6-layer model with random weights: the sampler's "
        f"log-probabilities against those of the trainer's packed forward, on {device}."
    )


def sample(model: Transformer, requests: int, new_tokens: int) -> list[SequenceState]:
    """Return sequences of a busy engine: prefill chunks mixed with decoding, shared prefixes."""
    rng = random.Random(0)
    options = EngineOptions(kv_cache_tokens=16_384, max_sequences=max(2, requests // 2), max_step_tokens=256)
    engine = Engine(model, options)
    stem = [rng.randrange(4096) for _ in range(64)]
    sequences = []
    for seed in range(requests):
        start = stem[: rng.choice((0, 32, 64))]
        prompt = start + [rng.randrange(4096) for _ in range(rng.randint(8, 100))]
        sequences += engine.submit(prompt, Sampling(max_tokens=new_tokens, seed=seed))
    while engine.step():
        pass
    return sequences


def compare(model: Transformer, sequences: list[SequenceState], replay: bool) -> tuple[Tensor, float]:
    """Return the differences of all sampled tokens, and the share of (token, layer) pairs with other experts."""
    device = model.head_weight.device
    rows = [sequence.prompt + sequence.output for sequence in sequences]
    tokens = torch.tensor([token for row in rows for token in row], device=device)[None]
    documents = Documents.pack([[len(row) for row in rows]], device)
    routing, theirs = None, None
    if model.config.moe:
        theirs = torch.cat([experts_of(sequence) for sequence in sequences])[None]
        routing = Routing(theirs) if replay else Routing()
    hidden = model.hidden(tokens, documents=documents, routing=routing)  # gradients on, as when training
    logprobs = token_logprobs(hidden[0], model.head_weight, targets_of(sequences).to(device)).detach()
    sampled = torch.tensor([number for sequence in sequences for number in sequence.raw_logprobs], device=device)
    gaps = (logprobs[targets_of(sequences).to(device) != IGNORE] - sampled).abs()
    differing = 0.0
    if routing is not None and theirs is not None and routing.chosen is not None:
        known = theirs >= 0
        wrong = (routing.chosen.cpu() != theirs).any(dim=-1) & known.any(dim=-1)
        differing = float(wrong.sum() / known.any(dim=-1).sum())
    return gaps.cpu(), differing


def experts_of(sequence: SequenceState) -> Tensor:
    """Return the experts of every token; the last one, which the sampler never computed, is left to the router."""
    found = sequence.result().routing
    assert found is not None
    routing = torch.from_numpy(found).long()
    return torch.cat((routing, torch.full_like(routing[:1], -1)))


def targets_of(sequences: list[SequenceState]) -> Tensor:
    """Return the target of each position: sampled tokens only."""
    targets = []
    for sequence in sequences:
        targets += [IGNORE] * (len(sequence.prompt) - 1) + sequence.output + [IGNORE]
    return torch.tensor(targets)


if __name__ == "__main__":
    main()
