"""Many coroutines, a limited number at a time."""

import asyncio
import gc
import warnings
from collections.abc import Iterator

import pytest

from etude.system.run_limited import run_limited


def test_results_come_in_order_with_at_most_the_limit_running() -> None:
    running, most = 0, 0

    async def work(number: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return number

    assert asyncio.run(run_limited((work(number) for number in range(10)), limit=3)) == list(range(10))
    assert most == 3


def test_only_as_many_tasks_are_started_as_there_is_work() -> None:
    async def tasks() -> int:
        return len(asyncio.all_tasks())

    async def count() -> list[int]:
        return await run_limited(tasks() for _ in range(2))

    found = asyncio.run(count())
    assert max(found) == 3  # with the task that awaits them
    assert asyncio.run(run_limited(())) == []


def test_a_failure_cancels_the_rest_and_draws_no_more_work() -> None:
    drawn: list[int] = []

    async def work(number: int) -> None:
        if number == 0:
            raise ValueError("the first")
        await asyncio.sleep(3600)

    def draw() -> Iterator:
        for number in range(10):
            drawn.append(number)
            yield work(number)

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # also of a coroutine that is never awaited
        with pytest.raises(ValueError, match="the first"):
            asyncio.run(run_limited(draw(), limit=3))
        gc.collect()
    assert drawn == [0, 1, 2]
