"""Settings of the samplers of a run."""

from typing import ClassVar, Literal

from pydantic import Field

from etude.config import Settings
from etude.weights.settings import WeightSyncSettings


class SamplerSettings(Settings):
    """The sampler processes, each with an engine of its own."""

    renamed_keys: ClassVar[dict[str, str]] = {
        "tokens": "kv_cache_tokens",
        "max_streams": "max_sequences",
        "budget": "max_step_tokens",
    }

    count: int = Field(default=1, ge=1, description="sampler processes, each with the whole model")
    device: str = Field(default="auto", description="cpu, cuda ...; auto: a GPU if there is one")
    kv_cache_tokens: int = Field(default=65_536, ge=1, description="size of the KV cache in tokens, per sampler")
    max_sequences: int = Field(default=64, ge=1, description="maximum concurrent sequences, per sampler")
    max_step_tokens: int = Field(default=512, ge=1, description="maximum tokens of one engine step")
    on_swap: Literal["keep", "recompute"] = Field(
        default="keep", description="keep or recompute the KV cache of running sequences when new weights arrive"
    )
    threads: int = Field(default=0, ge=0, description="CPU threads; 0: torch's default")


class SamplerRunSettings(Settings):
    """The part of `[rl]` that sampler processes need."""

    precision: Literal["float32", "bfloat16"] = Field(
        default="float32", description="dtype of model weights and matrix products"
    )
    stall_s: float = Field(default=600.0, gt=0, description="seconds without progress after which the run stops")
    sampler: SamplerSettings = Field(default_factory=SamplerSettings)
    weights: WeightSyncSettings = Field(default_factory=WeightSyncSettings)
