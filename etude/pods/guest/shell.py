"""A persistent shell over any backend's `spawn`: one bash that receives commands through its standard input.

Each command is `eval`ed, then a marker with the exit code is printed on both streams. A marker is random, so no program
prints one by chance; a syntax error stays inside the eval; a command that does not stop is interrupted, then the shell
is restarted in its last directory. Output is kept up to the limit and only while a command runs, so a background
program can neither hide the marker nor fill our memory.
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
MAX_MARKER_SIZE = 1 << 14  # bytes of a marker with its directory


class Capture:
    """One stream of one command: its first `limit` bytes, and the text after its marker."""

    def __init__(self, marker: str, limit: int) -> None:
        self.marker, self.limit = marker.encode(), limit
        self.kept = bytearray()
        self.pending = bytearray()  # the newest bytes, which may contain the start of the marker
        self.size = 0
        self.trailer: bytes | None = None  # the bytes between the marker and its NUL

    def add(self, data: bytes) -> None:
        if self.trailer is not None:
            return  # output of a background program after the command's end
        self.pending += data
        if (at := self.pending.find(self.marker)) >= 0:
            self._take(at)
            end = self.pending.find(b"\0")
            if end < 0 and len(self.pending) < MAX_MARKER_SIZE:
                return
            self.trailer = bytes(self.pending[len(self.marker) : max(0, end)])
        elif (surplus := len(self.pending) - len(self.marker)) > 0:
            self._take(surplus)

    def _take(self, count: int) -> None:
        self.kept += self.pending[: min(count, max(0, self.limit - len(self.kept)))]
        self.size += count
        del self.pending[:count]

    def finish(self) -> None:
        """Count all pending bytes as output, because no marker will come."""
        if self.trailer is None:
            self._take(len(self.pending))


class BashShell(Shell):
    """A persistent bash in a pod."""

    def __init__(self, pod: Pod, cwd: str | None, env: Mapping[str, str] | None) -> None:
        self.pod, self.cwd, self.env = pod, cwd, dict(env or {})
        self.job: Job | None = None
        self.lock = asyncio.Lock()
        self.streams: dict[str, Capture] = {}  # of the running command
        self.reader: asyncio.Task[None] | None = None
        self.changed = asyncio.Event()
        self.ended = False

    async def start(self) -> None:
        """Start bash; raise PodError when the pod has none."""
        self.job = await self.pod.spawn(["bash", "--noprofile", "--norc"], cwd=self.cwd, env=self.env)
        self.ended = False
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
                self.changed.set()
        if job is self.job:
            self.ended = True
            self.changed.set()

    async def run(self, command: str, timeout: float | None = None, max_output: int = MAX_OUTPUT) -> ExecResult:
        async with self.lock:
            if self.job is None or self.ended:
                await self.start()
            assert self.job is not None
            marker = f"\x1e{secrets.token_hex(12)}"
            line = f"eval {shlex.quote(command)} </dev/null\n"
            end = f"printf '{marker}%d:%s\\0' \"$?\" \"$PWD\"; printf '{marker}\\0' >&2\n"
            self.streams = {name: Capture(marker, max_output) for name in ("stdout", "stderr")}
            started = time.monotonic()
            try:
                await self.job.write((line + end).encode("utf-8", "surrogateescape"))
                timed_out = not await self._wait_for_markers(timeout)
                if timed_out:
                    await self._interrupt()
                return await self._result(started, timed_out)
            except asyncio.CancelledError:
                self._abandon()
                raise
            finally:
                self.streams = {}

    async def _wait_for_markers(self, timeout: float | None) -> bool:
        """Wait for both markers or for the end of the shell; return False on timeout."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.ended and any(capture.trailer is None for capture in self.streams.values()):
            self.changed.clear()
            left = None if deadline is None else deadline - time.monotonic()
            try:
                await asyncio.wait_for(self.changed.wait(), left)
            except TimeoutError:
                return False
        return True

    async def _interrupt(self) -> None:
        assert self.job is not None
        try:
            await self.job.signal(signal.SIGINT)
            if not await self._wait_for_markers(GRACE_S):
                await self.job.signal(signal.SIGKILL)
                await self._wait_for_markers(GRACE_S)
        except PodError:
            self.ended = True

    async def _result(self, started: float, timed_out: bool) -> ExecResult:
        out, err = self.streams["stdout"], self.streams["stderr"]
        for capture in (out, err):
            capture.finish()
        if out.trailer:
            number, _, where = out.trailer.partition(b":")
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
        """Kill a cancelled command together with its shell; the next command starts another shell."""
        self._killing = asyncio.create_task(self._kill(self.job))
        self.job = None

    async def _kill(self, job: Job | None) -> None:
        try:
            if job is not None:
                await job.signal(signal.SIGKILL)
        except PodError:
            return  # it has already ended

    async def close(self) -> None:
        if not self.ended:
            await self._kill(self.job)
        if self.reader is not None:
            self.reader.cancel()
