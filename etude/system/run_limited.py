"""Run many coroutines, a limited number at a time."""

import asyncio
from collections.abc import Coroutine, Iterable
from itertools import islice
from typing import Any, TypeVar

T = TypeVar("T")


async def run_limited(work: Iterable[Coroutine[Any, Any, T]], limit: int = 32) -> list[T]:
    """Return the results of coroutines in order, awaiting `limit` at a time; the first failure cancels the rest.

    A generator is consumed as the work proceeds.
    """
    pending = enumerate(work)
    first = list(islice(pending, limit))
    results: dict[int, T] = {}

    async def run(number: int, each: Coroutine[Any, Any, T]) -> None:
        results[number] = await each
        for number, each in pending:
            results[number] = await each

    workers = [asyncio.create_task(run(number, each)) for number, each in first]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        for _, each in first:
            each.close()  # of a worker that was cancelled before it began
    return [results[number] for number in range(len(results))]
