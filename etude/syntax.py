"""Parses Python sources: the only way to a syntax tree in a process whose other threads may be parsing, too.

Standard library only and no syntax newer than Python 3.8: it also runs in pods.
"""

from __future__ import annotations

import ast
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_LOCK = threading.Lock()


def parse_tree(source: str | bytes, path: str = "<unknown>", mode: str = "exec") -> Any:
    """Call `ast.parse` under a lock: before Python 3.13 its recursion counter is shared by all threads, and concurrent
    calls raise SystemError. The result is an ast.Module, or an ast.Expression with the mode "eval"."""
    with _LOCK:
        return ast.parse(source, path, mode)


def literal_value(text: str) -> Any:
    """Return the value of a Python literal, as `ast.literal_eval` does, which parses text without the lock."""
    return ast.literal_eval(parse_tree(text.lstrip(" \t"), mode="eval"))
