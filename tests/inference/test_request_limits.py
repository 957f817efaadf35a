"""The rate of requests to an endpoint, and the time that a busy one asks for."""

import asyncio
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from etude.errors import EtudeError
from etude.inference.clients.transport import RequestLimiter, RetryPolicy, read_retry_after


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


def test_a_check_refuses_requests() -> None:
    def refuse() -> None:
        raise EtudeError("enough")

    with pytest.raises(EtudeError, match="enough"):
        asyncio.run(RequestLimiter(check=refuse).acquire())


def test_retry_after_is_a_number_or_a_date_and_is_accepted_up_to_a_limit() -> None:
    assert read_retry_after("7.5") == 7.5
    assert 100 < read_retry_after(format_datetime(datetime.now(UTC) + timedelta(minutes=5))) <= 300
    assert read_retry_after(format_datetime(datetime.now(UTC) - timedelta(hours=1))) == 0
    assert read_retry_after("") == read_retry_after("soon") == 0
    assert RetryPolicy().delay(0, 90.0) == 15.0  # within a cluster, a server is back soon or gone
    assert RetryPolicy(max_retry_after=600.0).delay(0, 90.0) == 90.0
    assert RetryPolicy(max_retry_after=600.0).delay(0, 9000.0) == 600.0
