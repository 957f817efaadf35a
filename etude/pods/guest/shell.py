"""A shell that remembers, over any backend's `spawn`: one bash, commands through its standard input.

Each command is `eval`ed, then a mark with the exit code is printed on both streams. A mark is random, so no program
prints one by chance; a syntax error stays inside the eval; a command that will not stop is interrupted, then the shell
is started anew in the directory it was in. What arrives is kept up to the limit and only while a command runs: a
program left in the background can neither hide the mark nor fill our memory.
"""

import asyncio
import secrets
import shlex
import signal
import time
from collections.abc import Mapping

from etude.pods.pod import MAX_OUTPUT, ExecResult, Job, Pod, PodError, ResourceUsage, Shell

GRACE_S = 2.0  # for an interrupted command to end before the shell is killed
START = "trap : INT\n"  # an interrupt ends the command (traps are reset in programs), not the shell
MARK_ROOM = 1 << 14  # bytes that a mark with its directory may take


class Capture:
    """One stream of one command: its first `limit` bytes, and what its mark says."""

    def __init__(self, mark: str, limit: int) -> None:
        self.mark, self.limit = mark.encode(), limit
        self.kept = bytearray()
        self.last = bytearray()  # the newest bytes, in which the mark may be beginning
        self.size = 0
        self.note: bytes | None = None  # what follows the mark

    def add(self, data: bytes) -> None:
        if self.note is not None:
            return  # after its end: somebody else's
        self.last += data
        if (at := self.last.find(self.mark)) >= 0:
            self._take(at)
            end = self.last.find(b"\0")
            if end < 0 and len(self.last) < MARK_ROOM:
                return
            self.note = bytes(self.last[len(self.mark) : max(0, end)])
        elif (surplus := len(self.last) - len(self.mark)) > 0:
            self._take(surplus)

    def _take(self, count: int) -> None:
        self.kept += self.last[: min(count, max(0, self.limit - len(self.kept)))]
        self.size += count
        del self.last[:count]

    def finish(self) -> None:
        """There will be no mark: all that came is output."""
        if self.note is None:
            self._take(len(self.last))


class BashShell(Shell):
    """A bash in a pod."""

    def __init__(self, pod: Pod, cwd: str | None, env: Mapping[str, str] | None) -> None:
        self.pod, self.cwd, self.env = pod, cwd, dict(env or {})
        self.job: Job | None = None
        self.turn = asyncio.Lock()
        self.streams: dict[str, Capture] = {}  # of the command that runs now
        self.reader: asyncio.Task[None] | None = None
        self.news = asyncio.Event()
        self.over = False

    async def start(self) -> None:
        """Start the bash; PodError when the pod has none."""
        self.job = await self.pod.spawn(["bash", "--noprofile", "--norc"], cwd=self.cwd, env=self.env)
        self.over = False
        self.reader = asyncio.create_task(self._read(self.job))
        try:
            await self.job.write(START.encode())
        except BaseException:
            self._abandon()
            raise

    async def _read(self, job: Job) -> None:
        async for stream, data in job.output():
            if job is self.job and (capture := self.streams.get(stream)):
                capture.add(data)
                self.news.set()
        if job is self.job:
            self.over = True
            self.news.set()

    async def run(self, command: str, timeout: float | None = None, max_output: int = MAX_OUTPUT) -> ExecResult:
        async with self.turn:
            if self.job is None or self.over:
                await self.start()
            assert self.job is not None
            mark = f"\x1e{secrets.token_hex(12)}"
            line = f"eval {shlex.quote(command)} </dev/null\n"
            end = f"printf '{mark}%d:%s\\0' \"$?\" \"$PWD\"; printf '{mark}\\0' >&2\n"
            self.streams = {name: Capture(mark, max_output) for name in ("stdout", "stderr")}
            started = time.monotonic()
            try:
                await self.job.write((line + end).encode("utf-8", "surrogateescape"))
                timed_out = not await self._until(timeout)
                if timed_out:
                    await self._interrupt()
                return await self._result(started, timed_out)
            except asyncio.CancelledError:
                self._abandon()
                raise
            finally:
                self.streams = {}

    async def _until(self, timeout: float | None) -> bool:
        """Wait for both marks, or for the end of the shell; False when time is over first."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.over and any(capture.note is None for capture in self.streams.values()):
            self.news.clear()
            left = None if deadline is None else deadline - time.monotonic()
            try:
                await asyncio.wait_for(self.news.wait(), left)
            except TimeoutError:
                return False
        return True

    async def _interrupt(self) -> None:
        assert self.job is not None
        try:
            await self.job.signal(signal.SIGINT)
            if not await self._until(GRACE_S):
                await self.job.signal(signal.SIGKILL)
                await self._until(GRACE_S)
        except PodError:
            self.over = True

    async def _result(self, started: float, timed_out: bool) -> ExecResult:
        out, err = self.streams["stdout"], self.streams["stderr"]
        for capture in (out, err):
            capture.finish()
        if out.note:
            number, _, where = out.note.partition(b":")
            code, self.cwd = int(number), where.decode("utf-8", "surrogateescape")
        else:  # the command ended the shell
            assert self.job is not None
            code = 137 if timed_out else (await self.job.wait(GRACE_S)).exit_code
        return ExecResult(
            exit_code=code,
            stdout_bytes=bytes(out.kept),
            stderr_bytes=bytes(err.kept),
            timed_out=timed_out,
            truncated=any(capture.size > len(capture.kept) for capture in (out, err)),
            usage=ResourceUsage(wall_s=time.monotonic() - started),
        )

    def _abandon(self) -> None:
        """Nobody waits for the command any more: end it with its shell; the next command starts another."""
        self._killing = asyncio.create_task(self._kill(self.job))
        self.job = None

    async def _kill(self, job: Job | None) -> None:
        try:
            if job is not None:
                await job.signal(signal.SIGKILL)
        except PodError:
            return  # it is gone already

    async def close(self) -> None:
        if not self.over:
            await self._kill(self.job)
        if self.reader is not None:
            self.reader.cancel()
