"""The rate of requests to an endpoint, by requests and by tokens a minute."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

WINDOW_S = 60.0  # the minute of tokens_per_minute


@dataclass
class RequestTicket:
    """One request: the tokens that it is expected to take, later those that it took, and how long it was held back."""

    tokens: int = 0
    sent_at: float = 0.0
    _waited_s: float = 0.0
    _waiting_since: float | None = None

    @property
    def waited_s(self) -> float:
        """Seconds for which a rate limit or a busy endpoint held it back, until now."""
        return self._waited_s + (0.0 if self._waiting_since is None else time.monotonic() - self._waiting_since)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        self._waiting_since = time.monotonic()
        try:
            yield
        finally:
            self._waited_s, self._waiting_since = self.waited_s, None


class RequestLimiter:
    """Limits the requests to one endpoint, retries included, and the tokens of those sent within any minute.

    Requests are spaced evenly and sent in the order in which they were made. A request with more tokens than a minute
    may have is sent when no other was sent for a minute.
    """

    def __init__(
        self,
        per_minute: float | None = None,
        tokens_per_minute: float | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.interval, self.tokens_per_minute = 60.0 / per_minute if per_minute else 0.0, tokens_per_minute
        self._clock, self._sleep, self._turn = clock, sleep, asyncio.Lock()
        self._next_at = self._held_until = 0.0
        self._sent: deque[RequestTicket] = deque()

    async def acquire(self, ticket: RequestTicket | None = None) -> None:
        """Wait until a request may be sent."""
        ticket = ticket or RequestTicket()
        with ticket.waiting():
            await self._acquire(ticket)

    async def _acquire(self, ticket: RequestTicket) -> None:
        async with self._turn:  # a lock is given to those who wait in their order
            while (wait := self._sendable_at(ticket.tokens) - self._clock()) > 0:
                await self._sleep(wait)
            ticket.sent_at = self._clock()
            self._next_at = ticket.sent_at + self.interval
            if self.tokens_per_minute is not None:
                self._sent.append(ticket)

    def refuse(self, ticket: RequestTicket) -> None:
        """Take back the tokens of a request that the endpoint did not serve."""
        self._sent = deque(each for each in self._sent if each is not ticket)

    def hold(self, seconds: float) -> None:
        """Send no request for so long."""
        self._held_until = max(self._held_until, self._clock() + seconds)

    def _sendable_at(self, tokens: int) -> float:
        at = max(self._next_at, self._held_until)
        if self.tokens_per_minute is None:
            return at
        while self._sent and self._sent[0].sent_at <= self._clock() - WINDOW_S:
            self._sent.popleft()
        used = sum(each.tokens for each in self._sent)
        for each in self._sent:
            if used + tokens <= self.tokens_per_minute:
                break
            at, used = max(at, each.sent_at + WINDOW_S), used - each.tokens
        return at
