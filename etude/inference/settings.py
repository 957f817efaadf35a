"""Settings of an engine, and of the samplers of a run. Importing this loads no torch."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from etude.config import AbsolutePath, Settings
from etude.inference.backends.launch import PROGRAMS
from etude.weights.settings import WeightSyncSettings

CachePolicy = Literal["keep", "recompute"]
BackendName = Literal["etude", "vllm", "sglang"]
SamplerPurpose = Literal["training", "evaluation"]
TRAINING: SamplerPurpose = "training"
EVALUATION: SamplerPurpose = "evaluation"  # such a sampler takes no training requests
LOOPBACK = ("127.0.0.1", "localhost", "::1")


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


def _check_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
        raise ValueError(f"{url!r} is not the address of a server, such as http://10.0.0.5:8000")
    return url.rstrip("/")


ServerUrl = Annotated[str, AfterValidator(_check_url)]


class SamplerSettings(EngineOptions):
    """The sampler processes, each with an engine of its own: Etude's, or a server of vLLM or SGLang."""

    count: int = Field(default=1, ge=1, description="sampler processes, each with the whole model")
    device: str = Field(
        default="auto",
        description="cpu, cuda:1 ...; auto: GPUs, tensor_parallel for each, from the first that the trainer leaves",
    )
    threads: int = Field(default=0, ge=0, description="CPU threads; 0: torch's default")
    backend: BackendName = Field(
        default="etude", description="what samples: Etude's engine, or a server of vLLM or SGLang for each sampler"
    )
    urls: tuple[ServerUrl, ...] = Field(
        default=(), strict=False, description="servers that run already, one for each sampler; default: started here"
    )
    weights_directory: AbsolutePath | None = Field(
        default=None,
        description="directory for new weights that the servers at `urls` can read too; default: a temporary one",
    )
    server_python: AbsolutePath | None = Field(
        default=None, description="Python interpreter that has vLLM or SGLang; default: the one that runs Etude"
    )
    server_arguments: tuple[str, ...] = Field(
        default=(), strict=False, description="further options of the server that is started"
    )
    tensor_parallel: int = Field(default=1, ge=1, description="GPUs of each server that is started")
    memory_fraction: float | None = Field(
        default=None, gt=0, le=1, description="share of a GPU's memory for a server; default: the server's own"
    )

    # Keys that another kind of sampler would ignore.
    engine_keys: ClassVar[tuple[str, ...]] = (
        *("kv_cache_tokens", "page_size", "max_step_tokens", "prefix_caching", "drafts", "burst", "invariant"),
    )
    launch_keys: ClassVar[tuple[str, ...]] = (
        *("server_python", "server_arguments", "tensor_parallel", "memory_fraction"),
    )

    @model_validator(mode="before")
    @classmethod
    def _one_sampler_for_each_url(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("urls"), list | tuple) and data["urls"]:
            return {"count": len(data["urls"]), **data}
        return data

    @model_validator(mode="after")
    def _every_key_is_used(self) -> Self:
        if unused := next(self._unused_keys(), None):
            raise ValueError(f"{unused[0]} would not be used: {unused[1]}")
        if self.urls and self.count != len(self.urls):
            raise ValueError(f"count = {self.count}, but urls has {len(self.urls)}: leave count out")
        if len(set(self.urls)) < len(self.urls):
            raise ValueError("urls names a server twice; each sampler loads weights into a server of its own")
        if self.urls and self.weights_directory is None:
            far = [url for url in self.urls if urlsplit(url).hostname not in LOOPBACK]
            if far:
                raise ValueError(
                    f"weights_directory is needed: {far[0]} may be on another machine and reads new weights from a "
                    "directory; name one that both machines have"
                )
        if self.tensor_parallel > 1 and self.device not in ("auto", "cuda"):
            raise ValueError(f'tensor_parallel = {self.tensor_parallel} needs device = "auto", not "{self.device}"')
        if self.backend != "etude":
            PROGRAMS[self.backend].check_arguments(self.server_arguments)
        return self

    def _unused_keys(self) -> Iterator[tuple[str, str]]:
        """Yield keys that differ from their default and would be ignored, and why."""
        backend = f'backend is "{self.backend}"'
        if self.backend == "etude":
            unused = [((*self.launch_keys, "urls", "weights_directory"), backend)]
        else:
            advice = f"{backend}; give its own option in server_arguments"
            unused = [(self.engine_keys, backend if self.urls else advice)]
        if self.urls:
            unused.append(
                ((*self.launch_keys, "device", "threads", "max_sequences"), "the servers at urls run already")
            )
        elif self.backend != "etude":
            unused.append((("weights_directory",), "the servers are started here, and read a directory of their own"))
        for keys, why in unused:
            yield from ((key, why) for key in keys if getattr(self, key) != type(self).model_fields[key].default)


class SamplerRunSettings(Settings):
    """The part of `[rl]` that sampler processes need."""

    precision: Literal["float32", "bfloat16"] = Field(
        default="float32", description="dtype of model weights and matrix products"
    )
    stall_s: float = Field(default=600.0, gt=0, description="seconds without progress after which the run stops")
    sampler: SamplerSettings = Field(default_factory=SamplerSettings)
    weights: WeightSyncSettings = Field(default_factory=WeightSyncSettings)
