"""The transformer and its Hugging Face checkpoints.

    model = etude.model.load(directory)  # Transformer: model(tokens) -> logits, model.hidden(tokens) -> hidden states
    etude.model.save(model, directory)

Names are imported on first use, so that reading a config (`etude.model.config`) needs no torch.
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude.kernels.attention import Documents
    from etude.model.cache import KVCache
    from etude.model.checkpoint import load, save
    from etude.model.config import ConfigReader, ModelConfig, common_keys, family, read_head_dim, read_rope
    from etude.model.moe import Routing
    from etude.model.transformer import Transformer, compile_blocks, initialize

_MODULES = {  # imported when first used
    "ConfigReader": "etude.model.config",
    "Documents": "etude.kernels.attention",
    "KVCache": "etude.model.cache",
    "ModelConfig": "etude.model.config",
    "Routing": "etude.model.moe",
    "Transformer": "etude.model.transformer",
    "common_keys": "etude.model.config",
    "compile_blocks": "etude.model.transformer",
    "family": "etude.model.config",
    "initialize": "etude.model.transformer",
    "load": "etude.model.checkpoint",
    "read_head_dim": "etude.model.config",
    "read_rope": "etude.model.config",
    "save": "etude.model.checkpoint",
}
__all__ = [
    "ConfigReader",
    "Documents",
    "KVCache",
    "ModelConfig",
    "Routing",
    "Transformer",
    "common_keys",
    "compile_blocks",
    "family",
    "initialize",
    "load",
    "read_head_dim",
    "read_rope",
    "save",
]
__getattr__ = lazy_exports(__name__, _MODULES)
