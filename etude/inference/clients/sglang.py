"""A policy behind an SGLang server: token ids in and out through `/generate`, new weights from a directory.

SGLang reports log-probabilities at the temperature of the request, before top-k, top-p and min-p. With stop ids it also
ends at the model's own end token, and it uses seeds only with `--enable-deterministic-inference`.
"""

import asyncio
import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from etude.inference.clients.third_party import ThirdPartyPolicy, both_logprobs, checkpoint_path, ending_of
from etude.inference.clients.vllm import smallest_unsigned
from etude.inference.generate_protocol import InvalidResponse, member
from etude.inference.policy import Weights
from etude.inference.request import Completion
from etude.inference.sampling import Sampling


class SglangPolicy(ThirdPartyPolicy):
    """Completes on the SGLang server at `url`. Give `routing` (moe layers, experts per token) to get the experts."""

    def __init__(self, url: str, token: str = "", *, routing: tuple[int, int] | None = None, **common: Any) -> None:
        super().__init__(url, token, **common)
        self.routing = routing

    async def complete_many(self, tokens: Sequence[int], sampling: Sampling, *, session: str = "") -> list[Completion]:
        """Send one request for each completion: with `n` the server would give all of them the same seed."""
        seeds = range(sampling.seed, sampling.seed + sampling.samples)
        return list(await asyncio.gather(*(self._one(tokens, sampling, seed) for seed in seeds)))

    async def _one(self, tokens: Sequence[int], sampling: Sampling, seed: int) -> Completion:
        version = self._version
        where = f"{self.url}/generate"
        parameters = {
            "max_new_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "sampling_seed": seed,
            "stop": list(sampling.stop_text),
            "stop_token_ids": sorted(sampling.stop),
            "ignore_eos": not sampling.stop,  # it would ignore the stop ids too
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
        body: dict[str, Any] = {"input_ids": list(tokens), "sampling_params": parameters, "return_logprob": True}
        if self.routing is not None:
            body["return_routed_experts"] = True
        response = await self._call("POST", "/generate", json=body)
        meta = member(response, "meta_info", dict, where)
        output, reported = self._tokens(meta, where)
        ending = ending_of(member(member(meta, "finish_reason", dict, where), "type", str, where), where)
        greedy = sampling.temperature == 0.0  # it then reports them at temperature 1
        drawn, raw = both_logprobs(reported, "raw" if greedy or not sampling.untruncated else "drawn", sampling)
        if not greedy and not sampling.untruncated and sampling.temperature != 1.0:
            raw = drawn  # it reports neither distribution: unknown
        routing = None
        if self.routing is not None:
            data = member(meta, "routed_experts", str, where)
            routing = read_routing(data, len(tokens) + len(output) - 1, self.routing, where)
        cached = member(meta, "cached_tokens", int, where) if "cached_tokens" in meta else 0
        return Completion(output, drawn, raw, [version] * len(output), ending, routing, cached)

    def _tokens(self, meta: Any, where: str) -> tuple[list[int], list[float]]:
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

    async def load(self, weights: Weights, version: int) -> None:
        """Reload from a directory. Running requests keep their cache, or are retracted and recomputed."""
        path, keep = checkpoint_path(weights, "SGLang"), self.on_swap == "keep"
        await self._call("POST", "/pause_generation", json={"mode": "in_place" if keep else "retract"})
        try:
            body = {"model_path": path, "weight_version": str(version), "flush_cache": not keep}
            response = await self._call("POST", "/update_weights_from_disk", json=body)
            if member(response, "success", bool, f"{self.url}/update_weights_from_disk") is not True:
                raise InvalidResponse(f"{self.url}/update_weights_from_disk: {response.get('message')}")
            self._version = version
        finally:
            await self._call("POST", "/continue_generation", json={})


def read_routing(data: str, tokens: int, shape: tuple[int, int], where: str) -> npt.NDArray[np.unsignedinteger[Any]]:
    """Decode SGLang's experts: base64 of int32 [tokens, layers, experts per token]."""
    try:
        array = np.frombuffer(base64.b64decode(data, validate=True), np.int32).reshape(tokens, *shape)
    except ValueError as error:
        raise InvalidResponse(f"{where}: routed_experts is not [{tokens}, {shape[0]}, {shape[1]}]: {error}") from None
    return smallest_unsigned(array)
