"""A vLLM server, from version 0.32: token ids in and out through `/inference/v1/generate`, with weight versions.

Weights are reloaded from a directory while requests are paused. The server labels the tokens of every step with the
version that we name after a reload, so each token's version is exact.
"""

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from etude.errors import InputError
from etude.inference.backends.client import ServerClient, WeightsInUse, same_architecture
from etude.inference.clients.transport import ServerError
from etude.inference.generate_protocol import InvalidResponse, member, numbers
from etude.inference.request import Completion
from etude.inference.sampling import Sampling
from etude.model.config import ModelConfig

GENERATE = "/inference/v1/generate"


class VllmClient(ServerClient):
    """A vLLM server."""

    program: ClassVar[str] = "vLLM"
    advice: ClassVar[str] = (
        "start vLLM 0.32 or newer with VLLM_SERVER_DEV_MODE=1 and the options --enable-scale-out "
        "--logprobs-mode processed_logprobs"
    )

    seeds = True

    async def check(self, precision: str) -> None:
        where = f"vLLM at {self.url}"
        try:
            info = await self._control.call("GET", "/server_info", lambda: self.url, params={"config_format": "json"})
        except ServerError as error:
            raise InputError(f"{where}: {error}; {self.advice}") from None
        config = member(info, "vllm_config", dict, where)
        model = member(config, "model_config", dict, where)
        self.max_length = min(self.max_length, member(model, "max_model_len", int, where))
        # Its CPU build (0.32) ends when a request with a seed is prefilled in several steps.
        self.seeds = member(member(config, "device_config", dict, where), "device", str, where) != "cpu"
        if (mode := model.get("logprobs_mode")) != "processed_logprobs":
            raise InputError(f"{where} reports {mode}; start it with --logprobs-mode processed_logprobs")
        if (dtype := str(model.get("dtype")).removeprefix("torch.")) != precision:
            raise InputError(f"{where} computes in {dtype}, but precision is {precision}: start it with that --dtype")
        directory = Path(str(model.get("model")))
        if (directory / "config.json").is_file():  # else the first weights that it loads will show
            same_architecture(self.config, ModelConfig.load(directory), where)

    async def complete(
        self, tokens: Sequence[int], sampling: Sampling, weights: WeightsInUse, cache_key: str, routing: bool
    ) -> list[Completion]:
        where = f"{self.url}{GENERATE}"
        body: dict[str, Any] = {
            "token_ids": list(tokens),
            "sampling_params": sampling_parameters(sampling) | ({} if self.seeds else {"seed": None}),
            "cache_salt": cache_key,
            **({"model": weights.adapter} if weights.adapter else {}),
        }
        response = await self._transport.call("POST", GENERATE, lambda: self.url, json=body)
        choices = member(response, "choices", list, where)
        if len(choices) != body["sampling_params"]["n"]:
            raise InvalidResponse(f"{where}: {len(choices)} choices; expected {body['sampling_params']['n']}")
        choices = sorted(choices, key=lambda choice: int(member(choice, "index", int, where)))
        details = (response.get("usage") or {}).get("prompt_tokens_details") or {}
        cached = int(details.get("cached_tokens") or 0)
        found = [self._choice(choice, len(tokens), sampling, weights, cached, routing, where) for choice in choices]
        return found if len(found) == sampling.samples else found * sampling.samples

    def _choice(
        self,
        choice: Any,
        prompt: int,
        sampling: Sampling,
        weights: WeightsInUse,
        cached: int,
        routing: bool,
        where: str,
    ) -> Completion:
        output = numbers(choice, "token_ids", int, where)
        content = member(member(choice, "logprobs", dict, where), "content", list, where)
        reported = [float(member(item, "logprob", float, where)) for item in content]
        if [member(item, "token_id", int, where) for item in content] != output:
            raise InvalidResponse(f"{where}: the log-probabilities are not those of the {len(output)} tokens")
        if weights.adapter or weights.version < 0:  # a request keeps the adapter that it began with
            versions = [weights.version] * len(output)
        else:
            versions = token_versions(choice, len(output), where)
        experts = None
        if routing and self.config.moe:
            array = read_array(member(choice, "routed_experts", str, where), where)
            experts = self._check_routing(array, prompt + len(output) - 1, where)
        reason = choice.get("finish_reason")
        return self._completion(output, reported, versions, reason, sampling, experts, cached, where)

    async def load(self, directory: Path, version: int, recompute: bool) -> None:
        await self._post("/pause", params={"mode": "keep", "clear_cache": str(recompute).lower()})
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
        await self._post("/collective_rpc", json=reload)
        await self._post("/update_weight_version", json={"new_version": str(version)})
        await self._post("/resume")

    async def load_adapter(self, directory: Path, name: str) -> None:
        await self._adapter("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(directory)})

    async def unload_adapter(self, name: str) -> None:
        await self._adapter("/v1/unload_lora_adapter", {"lora_name": name})

    async def _adapter(self, path: str, body: dict[str, str]) -> None:
        await self._control.text(path, lambda: self.url, json=body)  # the answer is a sentence

    async def _post(self, path: str, **options: Any) -> Any:
        return await self._control.call("POST", path, lambda: self.url, **options)

    async def progress(self) -> tuple[float, ...]:
        return await self._counters("vllm:generation_tokens_total", "vllm:prompt_tokens_total")


def sampling_parameters(sampling: Sampling) -> dict[str, Any]:
    """Return vLLM's parameters; all of them, so that no default of the server or the model applies."""
    return {
        "n": sampling.samples if sampling.temperature > 0 else 1,  # it refuses several, which would be the same
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "seed": sampling.seed,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "stop": list(sampling.stop_text),
        "stop_token_ids": sorted(sampling.stop),
        "ignore_eos": True,  # only stop_token_ids end a completion
        "detokenize": bool(sampling.stop_text),
        "logprobs": 0,  # of the sampled token, none beside it
    }


def token_versions(choice: Any, count: int, where: str) -> list[int]:
    """Return the weight version of each token, from spans of tokens with the same one."""
    found: list[int] = []
    for span in member(choice, "weight_versions", list, where):
        label, end = member(span, "version", str, where), member(span, "end", int, where)
        if not label.isdecimal() or member(span, "start", int, where) != len(found) or end < len(found):
            raise InvalidResponse(
                f"{where}: weight_versions contains {span!r:.80}; expected our version and its tokens"
            )
        found += [int(label)] * (end - len(found))
    if len(found) != count:
        raise InvalidResponse(f"{where}: weight_versions covers {len(found)} of {count} tokens")
    return found


def read_array(data: str, where: str) -> Any:
    """Decode vLLM's experts: base64 of a .npy file."""
    try:
        return np.load(io.BytesIO(base64.b64decode(data, validate=True)), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise InvalidResponse(f"{where}: routed_experts cannot be read: {error}") from None
