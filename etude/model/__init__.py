"""The transformer and its Hugging Face checkpoints.

    model = etude.model.load(directory)  # Transformer: model(tokens) -> logits, model.hidden(tokens) -> hidden states
    etude.model.save(model, directory)

Names are imported on first use, so that reading a config (`etude.model.config`) needs no torch.
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude.kernels.attention import Documents as Documents
    from etude.model.cache import KVCache as KVCache
    from etude.model.checkpoint import load as load
    from etude.model.checkpoint import save as save
    from etude.model.config import ConfigReader as ConfigReader
    from etude.model.config import ModelConfig as ModelConfig
    from etude.model.config import common_keys as common_keys
    from etude.model.config import family as family
    from etude.model.config import read_head_dim as read_head_dim
    from etude.model.config import read_rope as read_rope
    from etude.model.moe import Routing as Routing
    from etude.model.transformer import Transformer as Transformer
    from etude.model.transformer import compile_blocks as compile_blocks
    from etude.model.transformer import initialize as initialize

__getattr__ = lazy_exports(__name__)
