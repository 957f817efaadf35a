"""Settings of an engine, and of the samplers of a run. Importing this loads no torch."""

from typing import ClassVar, Literal

from pydantic import Field

from etude.config import Settings
from etude.weights.settings import WeightSyncSettings

CachePolicy = Literal["keep", "recompute"]


class EngineOptions(Settings):
    """Size of the KV cache and of a step, and how they are used."""

    renamed_keys: ClassVar[dict[str, str]] = {
        "tokens": "kv_cache_tokens",
        "max_streams": "max_sequences",
        "budget": "max_step_tokens",
    }

    kv_cache_tokens: int = Field(default=65_536, ge=1, description="size of the KV cache in tokens")
    page_size: int = Field(default=16, ge=1, description="tokens of a page of the KV cache")
    max_sequences: int = Field(default=64, ge=1, description="maximum concurrent sequences")
    max_step_tokens: int = Field(default=512, ge=1, description="maximum tokens of one engine step")
    prefix_caching: bool = Field(default=True, description="sequences with the same prefix share pages")
    on_swap: CachePolicy = Field(
        default="keep", description="keep or recompute the KV cache of running sequences when new weights arrive"
    )
    drafts: int = Field(
        default=0, ge=0, description="tokens that the MTP layers draft for each verification; 0: no speculation"
    )
    burst: int = Field(
        default=16, ge=1, description="tokens decoded between two returns to the host, where graphs are captured"
    )
    invariant: bool = Field(default=False, description="results never depend on what else is in the batch; slower")


class SamplerSettings(EngineOptions):
    """The sampler processes, each with an engine of its own."""

    count: int = Field(default=1, ge=1, description="sampler processes, each with the whole model")
    device: str = Field(default="auto", description="cpu, cuda ...; auto: a GPU if there is one")
    threads: int = Field(default=0, ge=0, description="CPU threads; 0: torch's default")


class SamplerRunSettings(Settings):
    """The part of `[rl]` that sampler processes need."""

    precision: Literal["float32", "bfloat16"] = Field(
        default="float32", description="dtype of model weights and matrix products"
    )
    stall_s: float = Field(default=600.0, gt=0, description="seconds without progress after which the run stops")
    sampler: SamplerSettings = Field(default_factory=SamplerSettings)
    weights: WeightSyncSettings = Field(default_factory=WeightSyncSettings)
