"""The time of a process, and what waits for it: sleeping, conditions, events and threads.

What a simulation drives is given its clock; everything else has that of the machine.
"""

import threading
import time
from collections.abc import Callable


class Clock:
    """The clock of this machine. That of a simulation has the same methods, and time of its own."""

    def time(self) -> float:
        """Return the seconds since 1970, as this machine has them."""
        return time.time()

    def monotonic(self) -> float:
        """Return seconds that never go back."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def condition(self) -> threading.Condition:
        return threading.Condition()

    def event(self) -> threading.Event:
        return threading.Event()

    def start_thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        """Start a thread that ends with the process."""
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread


MACHINE_CLOCK = Clock()
