"""Does a server sample from the weights that it was given? It completes a prompt, and our forward scores the tokens.

The forward is the trainer's code, in float32, one block in memory at a time. The log-probabilities that the server
reports are compared with those of the distribution it was to sample from: at the temperature of the request, which is
not 1, so that a server that reports them before temperature is told apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from etude.errors import InputError
from etude.inference.backends.weight_files import TensorReader
from etude.inference.request import Completion
from etude.inference.sampling import Sampling
from etude.kernels.linear import linear
from etude.model.attention import Rope
from etude.model.checkpoint import block_views
from etude.model.config import ModelConfig
from etude.model.layers import RMSNorm
from etude.model.transformer import Block
from etude.model.untied import head_names

PROMPT = "def add(a, b):\n    return a + b\n\n\ndef"
SAMPLING = Sampling(max_tokens=64, temperature=0.7, seed=1)
# Mean difference in nats. Servers in float32 agree to about 1e-5, in bfloat16 to about 0.02; with other weights, or
# with one stale matrix, whole nats are usual.
MAX_DIFFERENCE = {"float32": 0.01, "bfloat16": 0.25}


@dataclass(frozen=True)
class Agreement:
    """Mean differences of reported and computed log-probabilities."""

    difference: float
    raw_difference: float  # from those of the model's own distribution, at temperature 1
    limit: float

    @property
    def good(self) -> bool:
        return self.difference <= self.limit


def compare(
    config: ModelConfig, read: TensorReader, prompt: Sequence[int], completion: Completion, precision: str
) -> Agreement:
    """Compare a completion sampled with `SAMPLING` with the forward of the weights that `read` returns."""
    if not completion.tokens:
        raise InputError("the server completed the probe's prompt with no tokens")
    tokens = torch.tensor([*prompt, *completion.tokens])
    logits = reference_logits(config, read, tokens[:-1])[len(prompt) - 1 :]
    chosen, reported = tokens[len(prompt) :, None], torch.tensor(completion.logprobs)

    def difference(temperature: float) -> float:
        expected = (logits / temperature).log_softmax(-1).gather(1, chosen)[:, 0]
        return float((expected - reported).abs().mean())

    return Agreement(difference(SAMPLING.temperature), difference(1.0), MAX_DIFFERENCE[precision])


@torch.no_grad()
def reference_logits(config: ModelConfig, read: TensorReader, tokens: Tensor) -> Tensor:
    """Return the logits [tokens, vocabulary] of a model in float32, whose tensors `read` returns by checkpoint name."""
    head, embedding = head_names(config)
    x = read(embedding)[tokens].float()[None]
    rotation = Rope(config.rope)(torch.arange(len(tokens))[None], torch.float32)
    for layer in range(config.layers):
        with torch.device("meta"):
            block = Block(config, layer)
        block = block.to_empty(device="cpu").float()
        for name, view in block_views(block, config, layer).items():
            view.copy_(read(name))
        x, _, _ = block(x, rotation)
    norm = RMSNorm(config.hidden_size, config.norm_eps)
    norm.weight.copy_(read(f"{config.tensor_prefix}model.norm.weight"))
    return linear(norm(x)[0], read(embedding if config.tied else head).float())
