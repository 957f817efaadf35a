"""A policy behind one or several of our servers.

The turns of a session go to the same server, where their prefix is cached: the first in an order that depends on the
session and the servers alone, so that it needs no table and moves few sessions when a server comes or goes. A server
that does not answer is left alone for a while and the next in the order is asked.
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
from etude.inference.clients.transport import Patience, Transport
from etude.inference.generate_protocol import BadAnswer, member, sample_from_json, sampling_to_json
from etude.inference.policy import OneSample, Watch, Weights, check_single
from etude.inference.request import Sample
from etude.inference.sampling import Sampling

if TYPE_CHECKING:
    from torch import Tensor

GROWING = ("tokens", "logprobs", "raw_logprobs", "versions")  # what the pieces of a streamed sample add to
REST_S = 5.0  # that a server which did not answer is left alone


class Http(OneSample):
    """Samples from our servers at `urls`, all with one token. With `routing`, the experts of MoE models come along."""

    def __init__(
        self,
        urls: str | Sequence[str],
        token: str = "",
        *,
        routing: bool = True,
        patience: Patience | None = None,
        rest: float = REST_S,
    ) -> None:
        self.urls = [url.rstrip("/") for url in ([urls] if isinstance(urls, str) else urls)]
        if not self.urls:
            raise InputError("no server to ask; give at least one URL")
        self.routing, self.rest = routing, rest
        self._transport = Transport(token, patience)
        self._resting: dict[str, float] = {}  # until when
        self._asked: Counter[str] = Counter()  # requests in flight

    async def close(self) -> None:
        await self._transport.close()

    async def samples(self, tokens: Sequence[int], sampling: Sampling, *, session: str = "") -> list[Sample]:
        with self._asking(session) as (server, lost, asked):
            body = self._body(tokens, sampling)
            answer = await self._transport.call("POST", "/generate", server, json=body, lost=lost)
        where = f"{asked[-1]}/generate"
        found = [sample_from_json(item, where) for item in member(answer, "samples", list, where)]
        if len(found) != sampling.samples:
            raise BadAnswer(f"{where}: {len(found)} samples; asked for {sampling.samples}")
        return found

    async def watched(self, tokens: Sequence[int], sampling: Sampling, watch: Watch, *, session: str = "") -> Sample:
        check_single(sampling)
        whole: dict[str, Any] = {name: [] for name in GROWING}
        with self._asking(session) as (server, lost, asked):
            body = {**self._body(tokens, sampling), "stream": True}
            async with aclosing(self._transport.lines("/generate", server, json=body, lost=lost)) as lines:
                async for line in lines:
                    where = f"{asked[-1]}/generate"
                    piece = read_piece(line, where)
                    for name in GROWING:
                        whole[name] += member(piece, name, list, where)
                    whole |= {name: value for name, value in piece.items() if name not in whole}
                    watch(piece["tokens"])
        where = f"{asked[-1]}/generate"
        if "ending" not in whole:
            raise BadAnswer(f"{where}: the answer broke off after {len(whole['tokens'])} tokens")
        return sample_from_json(whole, where)

    def _body(self, tokens: Sequence[int], sampling: Sampling) -> dict[str, Any]:
        return {"tokens": list(tokens), "sampling": sampling_to_json(sampling), "routing": self.routing}

    @contextmanager
    def _asking(self, session: str) -> Iterator[tuple[Callable[[], str], Callable[[str, bool], None], list[str]]]:
        """Who is asked next, whom to leave alone, and who was asked: for as long as one request runs."""
        asked: list[str] = []

        def server() -> str:
            asked.append(self.server_of(session))
            self._asked[asked[-1]] += 1
            return asked[-1]

        def lost(url: str, busy: bool) -> None:
            if not busy:  # one that is only busy still has the session's cache
                self._resting[url] = time.monotonic() + self.rest

        try:
            yield server, lost, asked
        finally:
            self._asked.subtract(asked)

    def server_of(self, session: str) -> str:
        """Where a session's next turn goes; without a session, where the fewest of our requests are."""
        if session:
            order = sorted(self.urls, key=lambda url: hashlib.sha256(f"{session}\n{url}".encode()).digest())
        else:
            order = sorted(self.urls, key=lambda url: self._asked[url])
        now = time.monotonic()
        awake = [url for url in order if self._resting.get(url, 0.0) <= now]
        return (awake or sorted(order, key=lambda url: self._resting[url]))[0]

    async def load(self, weights: Weights, version: int) -> None:
        """New weights on every server; a path must be readable there. The error names the servers that failed."""
        body: dict[str, Any]
        if isinstance(weights, str | Path):
            body = {"json": {"path": str(weights), "version": version}}
        else:
            data = await asyncio.to_thread(pack_tensors, weights)
            body = {"content": data, "params": {"version": str(version)}}

        def put(url: str) -> Any:
            return self._transport.call("POST", "/weights", lambda: url, **body)

        done = await asyncio.gather(*map(put, self.urls), return_exceptions=True)
        failed = [error for error in done if isinstance(error, BaseException)]
        if len(failed) > 1:
            raise EtudeError("\n".join(map(str, failed)))
        if failed:
            raise failed[0]
        for url, answer in zip(self.urls, done, strict=True):
            if (found := member(answer, "version", int, f"{url}/weights")) != version:
                raise BadAnswer(f"{url}/weights: version {found} after loading version {version}")

    async def version(self) -> int:
        """The oldest of the servers' versions."""

        async def of(url: str) -> int:
            answer = await self._transport.call("GET", "/weights", lambda: url)
            found: int = member(answer, "version", int, f"{url}/weights")
            return found

        return min(await asyncio.gather(*map(of, self.urls)))


def read_piece(line: bytes, where: str) -> dict[str, Any]:
    """One line of a streamed sample."""
    try:
        piece = json.loads(line)
    except ValueError:
        raise BadAnswer(f"{where}: a line is not JSON: {line[:200]!r}") from None
    if isinstance(piece, dict) and isinstance(error := piece.get("error"), dict):
        raise EtudeError(f"{where}: {error.get('message')}")
    member(piece, "index", int, where)
    found: dict[str, Any] = piece
    return found


def pack_tensors(weights: "Mapping[str, Tensor]") -> bytes:
    from safetensors.torch import save

    return save({name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()})
