"""The rate of requests to an endpoint, and the time that a busy one asks for."""

import asyncio
import random
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

from etude.inference.clients.limiter import RequestLimiter, RequestTicket
from etude.inference.clients.transport import RetryPolicy, read_retry_after


class Clock:
    """A clock that only sleeping advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        target = self.now + seconds
        await asyncio.sleep(0)
        self.now = max(self.now, target)


def test_requests_are_spaced_evenly_also_when_many_wait() -> None:
    clock, sent = Clock(), list[float]()

    async def main() -> None:
        limiter = RequestLimiter(30, clock=clock, sleep=clock.sleep)

        async def ask() -> None:
            await limiter.acquire()
            sent.append(clock.now)

        await asyncio.gather(*(ask() for _ in range(5)))

    asyncio.run(main())
    assert sent == [100.0, 102.0, 104.0, 106.0, 108.0]


def test_a_server_that_asks_for_patience_holds_all_requests() -> None:
    clock, sent = Clock(), list[float]()

    async def main() -> None:
        limiter = RequestLimiter(60, clock=clock, sleep=clock.sleep)
        await limiter.acquire()
        waiting = asyncio.create_task(limiter.acquire())  # would be sent after a second
        await asyncio.sleep(0)
        limiter.hold(40)
        await waiting
        sent.append(clock.now)

    asyncio.run(main())
    assert sent == [140.0]


def test_no_minute_has_more_tokens_than_the_limit() -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng, clock, tickets = random.Random(seed), Clock(), list[RequestTicket]()

    async def main() -> None:
        limiter = RequestLimiter(tokens_per_minute=1000, clock=clock, sleep=clock.sleep)

        async def ask(tokens: int) -> None:
            ticket = RequestTicket(tokens)
            await limiter.acquire(ticket)
            tickets.append(ticket)
            if rng.random() < 0.2:  # the endpoint was busy: it is asked again
                limiter.refuse(ticket)
                await limiter.acquire(ticket)

        await asyncio.gather(*(ask(rng.randint(1, 600)) for _ in range(40)))

    asyncio.run(main())
    for first in tickets:
        minute = [each.tokens for each in tickets if first.sent_at <= each.sent_at < first.sent_at + 60]
        assert sum(minute) <= 1000
    total = sum(each.tokens for each in tickets)
    assert clock.now - 100 < 60 * (total / 500 + 1)  # at least half of the limit is used: pairs up to 600 fit


def test_tokens_that_a_reply_counted_replace_those_expected_and_a_large_request_is_sent_alone() -> None:
    clock, sent = Clock(), list[float]()

    async def main() -> None:
        limiter = RequestLimiter(tokens_per_minute=1000, clock=clock, sleep=clock.sleep)
        for expected, counted in ((900, 100), (900, 900), (5000, 5000), (1, 1)):
            ticket = RequestTicket(expected)
            await limiter.acquire(ticket)
            ticket.tokens = counted
            sent.append(clock.now)

    asyncio.run(main())
    assert sent == [100.0, 100.0, 160.0, 220.0]


def test_retry_after_is_a_number_or_a_date_and_is_accepted_up_to_a_limit() -> None:
    assert read_retry_after("7.5") == 7.5
    assert 100 < read_retry_after(format_datetime(datetime.now(UTC) + timedelta(minutes=5))) <= 300
    assert read_retry_after(format_datetime(datetime.now(UTC) - timedelta(hours=1))) == 0
    assert read_retry_after("") == read_retry_after("soon") == 0
    assert RetryPolicy().delay(0, 90.0) == 15.0  # within a cluster, a server is back soon or gone
    assert RetryPolicy(max_retry_after=600.0).delay(0, 90.0) == 90.0
    assert RetryPolicy(max_retry_after=600.0).delay(0, 9000.0) == 600.0
