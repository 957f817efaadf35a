"""Run a job in a pod on this process's own streams or terminal until it ends."""

import asyncio
import codecs
import contextlib
import os
import select
import signal
import sys
import termios
import threading
import tty
from collections.abc import Iterator
from typing import Any

from etude.pods.pod import Command, ExecResult, Job, Pod, PodError
from etude.system.terminal import escape_control

# bash if the image has it, else sh.
SHELL: Command = ["/bin/sh", "-c", "command -v bash >/dev/null && exec bash; exec sh"]


def window_size() -> tuple[int, int]:
    """Return the rows and columns of this process's terminal."""
    size = os.get_terminal_size(1)  # not $COLUMNS, which is for programs that only print
    return size.lines, size.columns


async def forward(job: Job, *, stdin: bool, terminal: bool) -> ExecResult:
    """Copy a job's output to ours until it ends; with `stdin` our input to it, with `terminal` keys and window size."""
    if stdin:
        forward_stdin(job, asyncio.get_running_loop())
    with raw_terminal(job) if terminal else contextlib.nullcontext():
        decoders = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in ("stdout", "stderr")}
        async for stream, data in job.output():
            descriptor = 1 if stream == "stdout" else 2
            if not terminal and os.isatty(descriptor):  # a command without -t has no business with our terminal
                data = escape_control(decoders[stream].decode(data)).encode()
            await asyncio.to_thread(write_all, descriptor, data)
        return await job.wait()


async def run_on_streams(pod: Pod, command: Command, *, stdin: bool, terminal: bool, **options: Any) -> ExecResult:
    """Run a command in a pod on this process's streams, or on its terminal."""
    if terminal:
        rows, columns = window_size()
        env = dict(options.pop("env", None) or {})
        options["env"] = {"TERM": os.environ.get("TERM", "xterm"), **env}
        job = await pod.spawn(command, terminal=(rows, columns), **options)
    else:
        job = await pod.spawn(command, **options)
        if not stdin:
            await close_stdin(job)
    return await forward(job, stdin=stdin or terminal, terminal=terminal)


async def close_stdin(job: Job) -> None:
    """Close the job's standard input, unless the job has already ended."""
    with contextlib.suppress(PodError):
        await job.close_stdin()


def forward_stdin(job: Job, loop: asyncio.AbstractEventLoop) -> None:
    """Copy standard input to a job in a daemon thread, because a blocking read cannot be interrupted."""

    def copy() -> None:
        # The job or the loop may end first.
        with contextlib.suppress(PodError, OSError, RuntimeError, asyncio.CancelledError):
            while data := os.read(0, 1 << 16):
                asyncio.run_coroutine_threadsafe(job.write(data), loop).result()
            asyncio.run_coroutine_threadsafe(job.close_stdin(), loop).result()

    threading.Thread(target=copy, daemon=True).start()


@contextlib.contextmanager
def raw_terminal(job: Job) -> Iterator[None]:
    """Put the terminal into raw mode, so that keys go to the job, and forward changes of the window size."""
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()

    async def resize() -> None:
        with contextlib.suppress(PodError):
            await job.resize(*window_size())

    def on_resize() -> None:
        task = loop.create_task(resize())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    before = termios.tcgetattr(0)
    loop.add_signal_handler(signal.SIGWINCH, on_resize)
    try:
        tty.setraw(0)
        on_resize()  # the window may have changed since the job was started
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)
        loop.remove_signal_handler(signal.SIGWINCH)


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of `data` to a descriptor."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:  # another process made the terminal non-blocking
            select.select([], [descriptor], [])


def is_terminal() -> bool:
    """Whether standard input and output are a terminal."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()
