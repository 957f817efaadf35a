"""The network and its checkpoints: `load`, `save`, and `model(tokens) -> logits`."""

from etude.kernels.attention import Documents
from etude.model.cache import KVCache
from etude.model.checkpoint import load, save
from etude.model.config import ModelConfig
from etude.model.moe import Routing
from etude.model.transformer import Transformer, compile_blocks, initialize

__all__ = [
    "Documents",
    "KVCache",
    "ModelConfig",
    "Routing",
    "Transformer",
    "compile_blocks",
    "initialize",
    "load",
    "save",
]
