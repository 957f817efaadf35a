"""A policy behind one or several Etude servers.

The turns of a session go to the same server, where their prefix is cached. It is chosen by rendezvous hashing of the
session and the server URLs, so no table is kept and few sessions move when a server comes or goes. A server that does
not respond is skipped for a while and the next in the order is used.
"""

import asyncio
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.errors import EtudeError, InputError
from etude.inference.clients.transport import RetryPolicy, Transport
from etude.inference.generate_protocol import InvalidResponse, completion_from_json, member, sampling_to_json
from etude.inference.known_routing import KnownRouting, Routing, RoutingCache
from etude.inference.policy import PolicyBase, TokenCallback, Weights, check_single
from etude.inference.request import Completion
from etude.inference.sampling import Sampling

if TYPE_CHECKING:
    from torch import Tensor

STREAMED_FIELDS = ("tokens", "logprobs", "raw_logprobs", "versions")  # lists that the lines of a stream extend
COOLDOWN_S = 5.0  # for which a server that did not respond is skipped


class HttpPolicy(PolicyBase):
    """Completes on the Etude servers at `urls`, with one token. With `routing`, MoE models return their experts."""

    def __init__(
        self,
        urls: str | Sequence[str],
        token: str = "",
        *,
        routing: bool = True,
        retry: RetryPolicy | None = None,
        cooldown: float = COOLDOWN_S,
        known: RoutingCache | None = None,  # shared with other policies that complete turns of the same sessions
    ) -> None:
        self.urls = [url.rstrip("/") for url in ([urls] if isinstance(urls, str) else urls)]
        if not self.urls:
            raise InputError("no server URL; give at least one")
        self.routing, self.cooldown = routing, cooldown
        self._transport = Transport(token, retry)
        self._known = RoutingCache() if known is None else known
        self._skipped_until: dict[str, float] = {}
        self._in_flight: Counter[str] = Counter()  # requests

    async def close(self) -> None:
        await self._transport.close()

    async def complete_many(self, tokens: Sequence[int], sampling: Sampling, *, session: str = "") -> list[Completion]:
        known = self._known.get(session)
        with self._routed(session) as (server, on_failure, used):
            body = self._body(tokens, sampling, known)
            response = await self._transport.call("POST", "/generate", server, json=body, on_failure=on_failure)
        where = f"{used[-1]}/generate"
        found = [completion_from_json(item, where, known) for item in member(response, "samples", list, where)]
        if len(found) != sampling.samples:
            raise InvalidResponse(f"{where}: {len(found)} completions; expected {sampling.samples}")
        self._known.put(session, found[0].routing)
        return found

    async def complete_streaming(
        self, tokens: Sequence[int], sampling: Sampling, on_tokens: TokenCallback, *, session: str = ""
    ) -> Completion:
        check_single(sampling)
        whole: dict[str, Any] = {name: [] for name in STREAMED_FIELDS}
        known = self._known.get(session)
        with self._routed(session) as (server, on_failure, used):
            body = {**self._body(tokens, sampling, known), "stream": True}
            async with aclosing(self._transport.lines("/generate", server, json=body, on_failure=on_failure)) as lines:
                async for line in lines:
                    where = f"{used[-1]}/generate"
                    delta = parse_stream_line(line, where)
                    for name in STREAMED_FIELDS:
                        whole[name] += member(delta, name, list, where)
                    whole |= {name: value for name, value in delta.items() if name not in whole}
                    on_tokens(delta["tokens"])
        where = f"{used[-1]}/generate"
        if "ending" not in whole:
            raise InvalidResponse(f"{where}: the response broke off after {len(whole['tokens'])} tokens")
        completion = completion_from_json(whole, where, known)
        self._known.put(session, completion.routing)
        return completion

    def _body(self, tokens: Sequence[int], sampling: Sampling, known: Routing | None) -> dict[str, Any]:
        body = {"tokens": list(tokens), "sampling": sampling_to_json(sampling), "routing": self.routing}
        return body if known is None else {**body, "known_routing": KnownRouting.of(known).model_dump()}

    @contextmanager
    def _routed(self, session: str) -> Iterator[tuple[Callable[[], str], Callable[[str, bool], None], list[str]]]:
        """Yield, for one request: a function that chooses a server, the failure callback, and the servers used."""
        used: list[str] = []

        def server() -> str:
            used.append(self.server_for(session))
            self._in_flight[used[-1]] += 1
            return used[-1]

        def on_failure(url: str, busy: bool) -> None:
            if not busy:  # one that is only busy still has the session's cache
                self._skipped_until[url] = time.monotonic() + self.cooldown

        try:
            yield server, on_failure, used
        finally:
            self._in_flight.subtract(used)

    def server_for(self, session: str) -> str:
        """Return the server for a session's next turn; without a session, the one with our fewest requests."""
        if session:
            order = sorted(self.urls, key=lambda url: hashlib.sha256(f"{session}\n{url}".encode()).digest())
        else:
            order = sorted(self.urls, key=lambda url: self._in_flight[url])
        now = time.monotonic()
        usable = [url for url in order if self._skipped_until.get(url, 0.0) <= now]
        return (usable or sorted(order, key=lambda url: self._skipped_until[url]))[0]

    async def load(self, weights: Weights, version: int) -> None:
        """Load weights on every server; a path must be readable there. The error names the servers that failed."""
        body: dict[str, Any]
        if isinstance(weights, str | Path):
            body = {"json": {"path": str(weights), "version": version}}
        else:
            data = await asyncio.to_thread(pack_tensors, weights)
            body = {"content": data, "params": {"version": str(version)}}

        def send(url: str) -> Any:
            return self._transport.call("POST", "/weights", lambda: url, **body)

        responses = await asyncio.gather(*map(send, self.urls), return_exceptions=True)
        failed = [error for error in responses if isinstance(error, BaseException)]
        if len(failed) > 1:
            raise EtudeError("\n".join(map(str, failed)))
        if failed:
            raise failed[0]
        for url, response in zip(self.urls, responses, strict=True):
            if (found := member(response, "version", int, f"{url}/weights")) != version:
                raise InvalidResponse(f"{url}/weights: version {found} after loading version {version}")

    async def version(self) -> int:
        """Return the oldest of the servers' versions."""

        async def version_of(url: str) -> int:
            response = await self._transport.call("GET", "/weights", lambda: url)
            found: int = member(response, "version", int, f"{url}/weights")
            return found

        return min(await asyncio.gather(*map(version_of, self.urls)))


def parse_stream_line(line: bytes, where: str) -> dict[str, Any]:
    """Return one line of a streamed completion."""
    try:
        delta = json.loads(line)
    except ValueError:
        raise InvalidResponse(f"{where}: a line is not JSON: {line[:200]!r}") from None
    if isinstance(delta, dict) and isinstance(error := delta.get("error"), dict):
        raise EtudeError(f"{where}: {error.get('message')}")
    member(delta, "index", int, where)
    found: dict[str, Any] = delta
    return found


def pack_tensors(weights: "Mapping[str, Tensor]") -> bytes:
    from safetensors.torch import save

    return save({name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()})
