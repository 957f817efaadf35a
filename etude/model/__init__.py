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
    from etude.model.config import ModelConfig
    from etude.model.moe import Routing
    from etude.model.transformer import Transformer, compile_blocks, initialize

_MODULES = {  # imported when first used
    "Documents": "etude.kernels.attention",
    "KVCache": "etude.model.cache",
    "ModelConfig": "etude.model.config",
    "Routing": "etude.model.moe",
    "Transformer": "etude.model.transformer",
    "compile_blocks": "etude.model.transformer",
    "initialize": "etude.model.transformer",
    "load": "etude.model.checkpoint",
    "save": "etude.model.checkpoint",
}
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
__getattr__ = lazy_exports(__name__, _MODULES)
