"""A job in a pod, joined to this process's own streams or terminal until it ends."""

import asyncio
import contextlib
import os
import select
import signal
import sys
import termios
import threading
import tty
from collections.abc import Iterator

from etude.pods.pod import Command, ExecResult, Job, Pod, PodError

# The better shell of those an image may have.
SHELL: Command = ["/bin/sh", "-c", "command -v bash >/dev/null && exec bash; exec sh"]


def size() -> tuple[int, int]:
    """Rows and columns of our terminal."""
    found = os.get_terminal_size(1)  # not what COLUMNS says: that is for programs that only print
    return found.lines, found.columns


async def join(job: Job, *, stdin: bool, terminal: bool) -> ExecResult:
    """Pass on what it writes as it comes and, with `stdin`, what we are given; with `terminal` keys and size too."""
    if stdin:
        feed(job, asyncio.get_running_loop())
    with raw_terminal(job) if terminal else contextlib.nullcontext():
        async for stream, data in job.output():
            await asyncio.to_thread(write_all, 1 if stream == "stdout" else 2, data)
        return await job.wait()


async def run_joined(pod: Pod, command: Command, *, stdin: bool, terminal: bool, **options: object) -> ExecResult:
    """Run a command in a pod with our streams, or on a terminal that is ours."""
    if terminal:
        rows, columns = size()
        given = dict(options.pop("env", None) or {})  # type: ignore[call-overload]
        options["env"] = {"TERM": os.environ.get("TERM", "xterm"), **given}
        job = await pod.pty(command, rows=rows, columns=columns, **options)
    else:
        job = await pod.spawn(command, **options)  # type: ignore[arg-type]
        if not stdin:
            await close_quietly(job)
    return await join(job, stdin=stdin or terminal, terminal=terminal)


async def close_quietly(job: Job) -> None:
    """End of input, unless the job has ended before."""
    with contextlib.suppress(PodError):
        await job.close_stdin()


def feed(job: Job, loop: asyncio.AbstractEventLoop) -> None:
    """Read our standard input in a thread that may be left behind: nothing can interrupt a read."""

    def pump() -> None:
        # The job or the loop ends first, as often as not.
        with contextlib.suppress(PodError, OSError, RuntimeError, asyncio.CancelledError):
            while data := os.read(0, 1 << 16):
                asyncio.run_coroutine_threadsafe(job.write(data), loop).result()
            asyncio.run_coroutine_threadsafe(job.close_stdin(), loop).result()

    threading.Thread(target=pump, daemon=True).start()


@contextlib.contextmanager
def raw_terminal(job: Job) -> Iterator[None]:
    """Keys go to the job as they are, and it learns of every change of the window."""
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()

    async def tell() -> None:
        with contextlib.suppress(PodError):
            await job.resize(*size())

    def changed() -> None:
        task = loop.create_task(tell())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    before = termios.tcgetattr(0)
    loop.add_signal_handler(signal.SIGWINCH, changed)
    try:
        tty.setraw(0)
        changed()  # the window may have changed since the job was asked for
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)
        loop.remove_signal_handler(signal.SIGWINCH)


def write_all(descriptor: int, data: bytes) -> None:
    """Write to a stream of ours, all of it."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:  # a terminal that somebody else made non-blocking
            select.select([], [descriptor], [])


def is_terminal() -> bool:
    """Whether somebody sits in front of us."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()
