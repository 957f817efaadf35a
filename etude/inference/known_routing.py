"""Routing that a client has from earlier turns of a session, so that each token's travels once.

A request says how many tokens' routing the client has, with a digest. If the server's routing of these tokens is the
same, it returns the rest only; if not (other weights may have recomputed it), all.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import Field

from etude.config import Settings

Routing = npt.NDArray[np.unsignedinteger[Any]]
MAX_BYTES = 1 << 30  # that a client keeps; the oldest sessions' routing is sent whole again


class KnownRouting(Settings):
    """What a client has."""

    tokens: int = Field(ge=1)
    digest: str

    @classmethod
    def of(cls, routing: Routing) -> KnownRouting:
        return cls(tokens=len(routing), digest=routing_digest(routing))

    def count(self, routing: Routing) -> int:
        """Return how many leading tokens of the routing need not be sent."""
        return self.tokens if self.digest == routing_digest(routing[: self.tokens]) else 0


def routing_digest(routing: Routing) -> str:
    found = hashlib.blake2b(f"{routing.dtype}{routing.shape}".encode(), digest_size=16)
    found.update(np.ascontiguousarray(routing).data)
    return found.hexdigest()


class RoutingCache:
    """The newest routing of each session, the least recently used ones dropped."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes, self.bytes = max_bytes, 0
        self._sessions: OrderedDict[str, Routing] = OrderedDict()

    def get(self, session: str) -> Routing | None:
        return self._sessions.get(session)

    def put(self, session: str, routing: Routing | None) -> None:
        if (old := self._sessions.pop(session, None)) is not None:
            self.bytes -= old.nbytes
        if routing is not None and session:
            self._sessions[session] = routing
            self.bytes += routing.nbytes
        while self.bytes > self.max_bytes:
            self.bytes -= self._sessions.popitem(last=False)[1].nbytes
