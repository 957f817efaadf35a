"""A shell that remembers, over any backend's `spawn`: one bash, commands through its standard input.

Each command is `eval`ed, then a mark with the exit code is printed on both streams. A mark is random, so no program
can forge one; a syntax error stays inside the eval; a command that will not stop is interrupted, then the shell is
started anew in the directory it was in.
"""

import asyncio
import secrets
import shlex
import signal
import time
from collections.abc import Mapping

from etude.pods.pod import MAX_OUTPUT, ExecResult, Job, Pod, PodError, Shell, Usage

GRACE_S = 2.0  # for an interrupted command to end before the shell is killed
START = "trap : INT\n"  # an interrupt ends the command (traps are reset in programs), not the shell


class BashShell(Shell):
    """A bash in a pod."""

    def __init__(self, pod: Pod, cwd: str | None, env: Mapping[str, str] | None) -> None:
        self.pod, self.cwd, self.env = pod, cwd, dict(env or {})
        self.job: Job | None = None
        self.turn = asyncio.Lock()
        self.streams: dict[str, bytearray] = {}
        self.reader: asyncio.Task[None] | None = None
        self.news = asyncio.Event()
        self.over = False

    async def start(self) -> None:
        """Start the bash; PodError when the pod has none."""
        self.job = await self.pod.spawn(["bash", "--noprofile", "--norc"], cwd=self.cwd, env=self.env)
        self.streams = {"stdout": bytearray(), "stderr": bytearray()}
        self.over = False
        self.reader = asyncio.create_task(self._read(self.job))
        await self.job.write(START.encode())

    async def _read(self, job: Job) -> None:
        async for stream, data in job.output():
            self.streams[stream] += data
            self.news.set()
        self.over = True
        self.news.set()

    async def run(self, command: str, timeout: float | None = None, max_output: int = MAX_OUTPUT) -> ExecResult:
        async with self.turn:
            if self.job is None or self.over:
                await self.start()
            assert self.job is not None
            mark = f"\x1e{secrets.token_hex(12)}"
            line = f"eval {shlex.quote(command)} </dev/null\n"
            end = f"printf '{mark}:%d:%s\\n' \"$?\" \"$PWD\"; printf '{mark}\\n' >&2\n"
            for buffer in self.streams.values():
                buffer.clear()
            started = time.monotonic()
            await self.job.write((line + end).encode())
            cut = {"stdout": 0, "stderr": 0}
            timed_out = not await self._until(mark, timeout, max_output, cut)
            if timed_out:
                await self._interrupt(mark, max_output, cut)
            return await self._result(mark, started, timed_out, max_output, cut)

    async def _until(self, mark: str, timeout: float | None, limit: int, cut: dict[str, int]) -> bool:
        """Wait for both marks, or for the end of the shell; False when time is over first."""
        deadline = None if timeout is None else time.monotonic() + timeout
        wanted = mark.encode()
        while not self.over:
            if all(wanted in buffer[-(1 << 13) :] for buffer in self.streams.values()):
                return True
            for name, buffer in self.streams.items():
                if len(buffer) > limit + (1 << 16):  # keep the beginning, and enough of the end to see the mark
                    surplus = len(buffer) - limit - (1 << 14)
                    del buffer[limit : limit + surplus]
                    cut[name] += surplus
            self.news.clear()
            left = None if deadline is None else deadline - time.monotonic()
            try:
                await asyncio.wait_for(self.news.wait(), left)
            except TimeoutError:
                return False
        return True

    async def _interrupt(self, mark: str, limit: int, cut: dict[str, int]) -> None:
        assert self.job is not None
        try:
            await self.job.signal(signal.SIGINT)
            if not await self._until(mark, GRACE_S, limit, cut):
                await self.job.signal(signal.SIGKILL)
                await self._until(mark, GRACE_S, limit, cut)
        except PodError:
            self.over = True

    async def _result(
        self, mark: str, started: float, timed_out: bool, limit: int, cut: dict[str, int]
    ) -> ExecResult:
        found = {}
        code = None
        for name, buffer in self.streams.items():
            text, seen, rest = bytes(buffer).rpartition(mark.encode())
            found[name] = text if seen else bytes(buffer)
            if seen and name == "stdout" and rest.startswith(b":"):
                number, _, where = rest[1:].partition(b":")
                code, self.cwd = int(number), where.rstrip(b"\n").decode("utf-8", "replace")
        if code is None:  # the command ended the shell
            assert self.job is not None
            code = 137 if timed_out else (await self.job.wait(GRACE_S)).exit_code
        truncated = any(cut.values()) or any(len(data) > limit for data in found.values())
        return ExecResult(
            exit_code=code,
            stdout_bytes=found["stdout"][:limit],
            stderr_bytes=found["stderr"][:limit],
            timed_out=timed_out,
            truncated=truncated,
            usage=Usage(wall_s=time.monotonic() - started),
        )

    async def close(self) -> None:
        if self.job is not None and not self.over:
            try:
                await self.job.signal(signal.SIGKILL)
            except PodError:
                return
        if self.reader is not None:
            self.reader.cancel()
