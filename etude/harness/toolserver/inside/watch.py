"""Waits for a log line that matches, in a process that can be killed: an expression may backtrack without end."""

from __future__ import annotations

import os
import re
import time

from etude.harness.toolserver.inside.paths import Refusal

TYPE_CHECKING = False  # typing is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable

    from etude.harness.toolserver.inside.server import ToolServerProcess

POLL_S = 0.05
MAX_LINE = 1 << 20  # bytes without a line break that are matched together


def watch(server: ToolServerProcess, log: str, start: int, pattern: str, matched: Callable[[], None]) -> int:
    """Call `matched` once when a line of the log after byte `start` matches; return the pid of the watcher to kill."""
    try:
        search = re.compile(pattern).search
    except (re.error, OverflowError, RecursionError) as error:
        raise Refusal("bad_arguments", f"the pattern is not a valid regular expression: {error}") from None

    def watch_log(pipe: int) -> None:
        rest = b""
        with open(log, "rb") as file:
            file.seek(start)
            while True:
                data = file.read(1 << 16)
                if not data:
                    time.sleep(POLL_S)
                    continue
                *lines, rest = (rest + data).split(b"\n")
                for line in (*lines, rest):
                    if search(line.decode("utf-8", "replace")):
                        os.write(pipe, b"1")
                        return
                rest = rest[-MAX_LINE:]

    return server.fork(watch_log, lambda data: matched() if data else None)
