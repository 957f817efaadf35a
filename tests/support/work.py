"""Measures and limits of work without a clock that a busy machine changes."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def count_calls(work: Callable[[], Any]) -> int:
    """Return how many functions, of Python and of C, a piece of work calls in this thread."""
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


@contextmanager
def ends(seconds: int = 120) -> Iterator[None]:
    """Raise TimeoutError if the block hangs: for work that would take hours or years if it were done wrongly."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"it does not end: still running after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
