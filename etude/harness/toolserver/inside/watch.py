"""Waiting for a line of a log to match, in a process that can be killed: an expression may run for ever."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from etude.harness.toolserver.inside.regex import compile_pattern

if TYPE_CHECKING:
    from collections.abc import Callable

    from etude.harness.toolserver.inside.server import ToolServerProcess

EVERY_S = 0.05
MAX_LINE = 1 << 20  # bytes without a line break that are looked at together


def watch(server: ToolServerProcess, log: str, start: int, pattern: str, matched: Callable[[], None]) -> int:
    """Call `matched` once a line of the log, from byte `start` on, matches. The process that looks; kill it after."""
    search = compile_pattern(pattern, ignore_case=False, multiline=False).search

    def look(told: int) -> None:
        rest = b""
        with open(log, "rb") as file:
            file.seek(start)
            while True:
                data = file.read(1 << 16)
                if not data:
                    time.sleep(EVERY_S)
                    continue
                *lines, rest = (rest + data).split(b"\n")
                for line in (*lines, rest):
                    if search(line.decode("utf-8", "replace")):
                        os.write(told, b"1")
                        return
                rest = rest[-MAX_LINE:]

    return server.fork(look, lambda data: matched() if data else None)
