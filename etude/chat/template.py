"""Render chat templates, which come with checkpoints and are third-party code: sandboxed, and bounded in time."""

import contextlib
import ctypes
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from etude.errors import InputError

RENDER_S = 30.0  # a chat of a million tokens takes about a second
POLL_S, AGAIN_S = 0.1, 5.0
MAX_PRODUCT = 1 << 24  # bits of a number, items of a sequence


class _TimeOver(BaseException):
    """Rendering took too long; not an Exception, which jinja would catch."""


def render_template(source: str, values: Mapping[str, Any]) -> str:
    """Return a chat template rendered with these variables; InputError if it fails or takes longer than RENDER_S."""
    template = _compile_template(source)
    try:
        try:
            _watchdog.start(RENDER_S)
            return template.render(values)
        finally:
            _watchdog.end()
    except _TimeOver:
        _watchdog.end()  # it may have been raised inside the call above
        raise InputError(f"the chat template failed: it took more than {RENDER_S:g} s") from None
    except Exception as error:  # templates may raise anything
        raise InputError(f"the chat template failed: {error}") from error


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks model output for trainers that build a loss mask from it; renders as its body."""

    tags = {"generation"}  # noqa: RUF012  jinja reads it from the class

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox of transformers, without huge products: a single operation cannot be interrupted."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if _product_size(operator, left, right) > MAX_PRODUCT:
            raise jinja2.TemplateError(f"the result of {operator} is too large")
        return super().call_binop(context, operator, left, right)


def _product_size(operator: str, left: Any, right: Any) -> int:
    """Return about how many bits or items a product or power has."""
    if isinstance(left, int) and isinstance(right, int):
        return left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
    sequence, times = (right, left) if isinstance(left, int) else (left, right)
    return len(sequence) * times if hasattr(sequence, "__len__") and isinstance(times, int) else 0


class _Watchdog:
    """Raises `_TimeOver` in threads whose time is over; a signal would reach the main thread only."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.deadlines: dict[int, float] = {}  # by thread
        self.interrupted: set[int] = set()  # threads that an exception was sent to
        self.lock, self.active = threading.Lock(), threading.Event()
        self.thread: threading.Thread | None = None

    def start(self, seconds: float) -> None:
        with self.lock:
            self.deadlines[threading.get_ident()] = time.monotonic() + seconds
            self.active.set()
            if self.thread is None:
                self.thread = threading.Thread(target=self._watch, daemon=True)
                self.thread.start()

    def end(self) -> None:
        thread = threading.get_ident()
        with self.lock:
            self.deadlines.pop(thread, None)
            if thread not in self.interrupted:
                return
            self.interrupted.remove(thread)
        # The exception may not have arrived yet. Another one replaces it and arrives here. Taking it back instead would
        # leave CPython checking for exceptions at every jump, and hanging under a profiler.
        with contextlib.suppress(_TimeOver):
            _interrupt(thread, _TimeOver)
            while True:
                pass

    def _watch(self) -> None:
        while self.active.wait():
            time.sleep(POLL_S)
            with self.lock:
                now = time.monotonic()
                for thread, deadline in self.deadlines.items():
                    if now > deadline:
                        _interrupt(thread, _TimeOver)
                        self.interrupted.add(thread)
                        self.deadlines[thread] = now + AGAIN_S  # the code may have caught the exception
                if not self.deadlines:
                    self.active.clear()


def _interrupt(thread: int, error: type[BaseException]) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


_watchdog = _Watchdog()
os.register_at_fork(after_in_child=_watchdog.reset)  # a child has neither the thread nor its locks


@lru_cache(maxsize=32)
def _compile_template(source: str) -> jinja2.Template:
    """Compile in the sandboxed environment that published templates are written for: that of transformers."""
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    functions: dict[str, Callable[[str], str]] = {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
    }
    environment.globals.update(functions)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise InputError(f"the chat template is not valid: {error}") from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes < and > for HTML, which would change tool descriptions.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
