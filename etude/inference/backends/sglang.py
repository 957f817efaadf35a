"""An SGLang server: token ids in and out through `/generate`, new weights from a directory.

It does not say which weights produced a token: those of a request that spans an update get the version that it began
with. Its log-probabilities are those at the temperature of the request, before top-k, top-p and min-p. With stop ids a
request also ends at the model's own end token, and seeds are used only with `--enable-deterministic-inference`.
"""

import asyncio
import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from etude.errors import EtudeError, InputError
from etude.inference.backends.client import ServerClient, WeightsInUse
from etude.inference.clients.transport import ServerError
from etude.inference.generate_protocol import InvalidResponse, member
from etude.inference.request import Completion
from etude.inference.sampling import Sampling


class SglangClient(ServerClient):
    """An SGLang server."""

    program: ClassVar[str] = "SGLang"
    advice: ClassVar[str] = "start it with --enable-metrics --sampling-defaults openai"

    async def check(self, precision: str) -> None:
        where = f"SGLang at {self.url}"
        try:
            model = await self._control.call("GET", "/model_info", lambda: self.url)
            server = await self._control.call("GET", "/server_info", lambda: self.url)
        except ServerError as error:
            raise InputError(f"{where}: {error}; expected a server of SGLang") from None
        own = self.config.source.get("model_type")
        if (found := member(model, "model_type", str, where)) != own:
            raise InputError(f"{where}: it serves a model of type {found!r}; this run's model is {own!r}")
        self.max_length = min(self.max_length, server.get("context_length") or self.max_length)
        if (dtype := str(server.get("dtype"))) != precision:
            raise InputError(f"{where} computes in {dtype}, but precision is {precision}: start it with that --dtype")
        if not server.get("enable_metrics"):
            raise InputError(f"{where} reports no metrics, by which a hang is found: {self.advice}")

    async def complete(
        self, tokens: Sequence[int], sampling: Sampling, weights: WeightsInUse, cache_key: str, routing: bool
    ) -> list[Completion]:
        """Send one request for each completion: with `n` the server would give all of them the same seed."""
        if sampling.temperature > 0 and not sampling.untruncated:
            raise InputError("SGLang reports no log-probabilities of a distribution cut by top_k, top_p or min_p")
        body: dict[str, Any] = {"input_ids": list(tokens), "return_logprob": True, "extra_key": cache_key}
        if weights.adapter:
            body["lora_path"] = weights.adapter
        if routing and self.config.moe:
            body["return_routed_experts"] = True
        seeds = range(sampling.seed, sampling.seed + sampling.samples)
        bodies = [{**body, "sampling_params": sampling_parameters(sampling, seed)} for seed in seeds]
        return list(await asyncio.gather(*(self._one(each, len(tokens), sampling, weights) for each in bodies)))

    async def _one(self, body: dict[str, Any], prompt: int, sampling: Sampling, weights: WeightsInUse) -> Completion:
        where = f"{self.url}/generate"
        response = await self._transport.call("POST", "/generate", lambda: self.url, json=body)
        meta = member(response, "meta_info", dict, where)
        output, reported = _tokens(meta, where)
        experts = None
        if "return_routed_experts" in body:
            experts = self._experts(member(meta, "routed_experts", str, where), prompt + len(output) - 1, where)
        cached = member(meta, "cached_tokens", int, where) if "cached_tokens" in meta else 0
        reason = member(meta, "finish_reason", dict, where).get("type")
        versions = [weights.version] * len(output)
        return self._completion(output, reported, versions, reason, sampling, experts, cached, where)

    def _experts(self, data: str, tokens: int, where: str) -> Any:
        """Decode SGLang's experts: base64 of int32 [tokens, MoE layers, experts per token]."""
        moe = self.config.moe
        assert moe is not None
        try:
            found = np.frombuffer(base64.b64decode(data, validate=True), np.int32)
            array = found.reshape(-1, len(moe.layers), moe.per_token)
        except ValueError as error:
            raise InvalidResponse(f"{where}: routed_experts cannot be read: {error}") from None
        return self._check_routing(array, tokens, where)

    async def load(self, directory: Path, version: int, recompute: bool) -> None:
        await self._post("/pause_generation", {"mode": "retract" if recompute else "in_place"})
        body = {"model_path": str(directory), "weight_version": str(version), "flush_cache": recompute}
        self._expect_success(await self._post("/update_weights_from_disk", body), "the weights")
        await self._post("/continue_generation", {})

    async def load_adapter(self, directory: Path, name: str) -> None:
        body = {"lora_name": name, "lora_path": str(directory)}
        self._expect_success(await self._post("/load_lora_adapter", body), "the adapter")

    async def unload_adapter(self, name: str) -> None:
        self._expect_success(await self._post("/unload_lora_adapter", {"lora_name": name}), "to unload an adapter")

    def _expect_success(self, answer: Any, what: str) -> None:
        if member(answer, "success", bool, self.url) is not True:
            raise EtudeError(f"{self.url}: SGLang refuses {what}: {answer.get('message') or answer}")

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        return await self._control.call("POST", path, lambda: self.url, json=body)

    async def progress(self) -> tuple[float, ...]:
        names = ("sglang:generation_tokens_total", "sglang:prompt_tokens_total", "sglang:num_used_tokens")
        return await self._counters(*names)


def sampling_parameters(sampling: Sampling, seed: int) -> dict[str, Any]:
    """Return SGLang's parameters; all of them, so that no default of the server or the model applies."""
    return {
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "sampling_seed": seed,
        "stop": list(sampling.stop_text),
        "stop_token_ids": sorted(sampling.stop),
        "ignore_eos": not sampling.stop,  # it would ignore the stop ids too
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }


def _tokens(meta: Any, where: str) -> tuple[list[int], list[float]]:
    output, reported = [], []
    for item in member(meta, "output_token_logprobs", list, where):
        if not isinstance(item, list) or len(item) < 2 or not isinstance(item[1], int):
            raise InvalidResponse(
                f"{where}: output_token_logprobs contains {item!r:.60}; expected [log-probability, token]"
            )
        if not isinstance(item[0], int | float):
            raise InvalidResponse(
                f"{where}: the log-probability of token {item[1]} is {item[0]!r:.60}; expected a number"
            )
        output.append(item[1])
        reported.append(float(item[0]))
    return output, reported
