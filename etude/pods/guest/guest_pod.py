"""A pod whose commands and files go through an agent; what remains for a backend is the pod's life."""

import asyncio
import contextlib
import os
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from etude.pods.guest import protocol, transfer
from etude.pods.guest.client import Agent, Link, StreamJob, ended, failure, not_started, spawn_fields
from etude.pods.guest.shell import BashShell
from etude.pods.pod import (
    MAX_OUTPUT,
    Command,
    Event,
    ExecResult,
    FileInfo,
    Job,
    Listing,
    Pod,
    PodError,
    PodFileError,
    PodGone,
    Shell,
)

MAX_READ = 1 << 30  # bytes of a file that `read` gives at once unless told how many
EVENTS_KEPT = 10_000  # of one pod; a program that loops on refused connections must not fill our memory


class AgentPod(Pod):
    """The half of a pod that is the same on every backend."""

    def __init__(self, id: str, environment: Mapping[str, str], workdir: str, user: str = "") -> None:
        self.id, self.environment, self.workdir, self.user = id, dict(environment), workdir, user
        self.agent: Agent | None = None
        self.history: list[Event] = []
        self.going_on: asyncio.Future[None] | None = None  # it was sealed for a fork and is being started again

    @abstractmethod
    async def open_link(self) -> Link:
        """A new connection to the agent."""

    def memory_ran_out(self) -> bool:
        """Whether the kernel killed something for memory since the last time this was asked."""
        return False

    # ------------------------------------------------------------------------------------------- commands

    async def ready(self) -> Agent:
        """The line to the agent, once the pod goes on after a fork."""
        if self.going_on is not None:
            await asyncio.shield(self.going_on)
        return self.line

    @property
    def line(self) -> Agent:
        if self.agent is None:
            raise PodGone(f"pod {self.id} is closed")
        return self.agent

    async def exec(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout: float | None = None,
        max_output: int = MAX_OUTPUT,
        user: str | None = None,
    ) -> ExecResult:
        fields = spawn_fields(command, cwd, {**self.environment, **(env or {})}, self._user(user), timeout)
        if max_output < 1:
            raise PodError(f"max_output is {max_output}; expected at least 1")
        if len(stdin) > protocol.CHUNK:
            return await self._exec_large(command, stdin, cwd, env, timeout, max_output, user)
        fields += [(protocol.DATA, stdin), (protocol.LIMIT, max_output)]
        agent = await self.ready()
        done: asyncio.Future[ExecResult] = asyncio.get_running_loop().create_future()
        out: dict[int, list[bytes]] = {protocol.OUT: [], protocol.ERR: []}

        room = dict.fromkeys(out, max_output)

        def take(op: int, got: protocol.Fields) -> None:
            if done.done():
                return
            if op in out:
                data = protocol.data(got, protocol.DATA)[
                    : room[op]
                ]  # the agent cuts; were it to lie, our memory is ours
                room[op] -= len(data)
                out[op].append(data)
            elif op == protocol.EXITED:
                done.set_result(ended(got, b"".join(out[protocol.OUT]), b"".join(out[protocol.ERR])))
            elif op == protocol.FAIL:
                done.set_exception(failure(got))
            elif op == -1:
                done.set_exception(agent.gone or PodGone(f"pod {self.id} is gone"))

        call = agent.open_call(take)
        agent.link.send(protocol.frame(protocol.SPAWN, call, *fields))
        try:
            return self._finished(await done)
        except PodFileError as error:
            if (result := not_started(error, command)) is not None:
                return result
            raise
        except asyncio.CancelledError:
            self._abandon(agent, call)
            raise
        finally:
            agent.calls.pop(call, None)

    def _abandon(self, agent: Agent, call: int) -> None:
        """Nobody waits for the command any more: end it, and do not wait for that either."""
        if agent.gone is None:
            agent.next_call += 1
            fields = ((protocol.JOB, call), (protocol.NUMBER, 9))
            agent.link.send(protocol.frame(protocol.SIGNAL, agent.next_call, *fields))

    async def _exec_large(
        self,
        command: Command,
        stdin: bytes,
        cwd: str | None,
        env: Mapping[str, str] | None,
        timeout: float | None,
        max_output: int,
        user: str | None,
    ) -> ExecResult:
        """Input that does not fit in one frame is streamed."""
        try:
            job = await self._spawn(command, cwd, env, timeout, user, None)
        except PodFileError as error:
            if (failed := not_started(error, command)) is not None:
                return failed
            raise

        async def give() -> None:
            with contextlib.suppress(PodError):  # it ended, or closed its input
                await job.write(stdin)
                await job.close_stdin()

        giving = asyncio.create_task(give())
        kept: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        truncated = False
        try:
            async for stream, data in job.output():
                room = max_output - len(kept[stream])
                truncated = truncated or len(data) > room
                kept[stream] += data[: max(0, room)]
            result = await job.wait()
        except asyncio.CancelledError:
            job.abandon()
            raise
        finally:
            giving.cancel()
        return ExecResult(
            result.exit_code,
            bytes(kept["stdout"]),
            bytes(kept["stderr"]),
            result.timed_out,
            result.out_of_memory,
            truncated,
            result.usage,
        )

    async def spawn(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        user: str | None = None,
        terminal: tuple[int, int] | None = None,
    ) -> Job:
        try:
            return await self._spawn(command, cwd, env, timeout, user, terminal)
        except PodFileError as error:
            result = not_started(error, command)
            raise PodError(result.stderr.strip() if result else str(error)) from error

    async def _spawn(
        self,
        command: Command,
        cwd: str | None,
        env: Mapping[str, str] | None,
        timeout: float | None,
        user: str | None,
        terminal: tuple[int, int] | None,
    ) -> StreamJob:
        fields = spawn_fields(command, cwd, {**self.environment, **(env or {})}, self._user(user), timeout)
        if terminal is not None:
            fields += [(protocol.ROWS, terminal[0]), (protocol.COLS, terminal[1])]
        fields.append((protocol.FLAGS, protocol.KEEP_STDIN))
        await self.ready()  # closed: say so before connecting
        agent = Agent(await self.open_link(), self.id)
        try:
            await agent.greeting()
            for descriptor in agent.link.descriptors:
                os.close(descriptor)
            job = StreamJob(agent, self._finished)
            agent.link.send(protocol.frame(protocol.SPAWN, job.call, *fields))
            await job.started
        except BaseException:
            agent.close()
            raise
        return job

    def _user(self, user: str | None) -> str | None:
        return user if user is not None else self.user or None

    def _finished(self, result: ExecResult) -> ExecResult:
        """Add what only the host can see, and tell the log."""
        if result.exit_code and self.memory_ran_out():
            result = ExecResult(
                result.exit_code,
                result.stdout_bytes,
                result.stderr_bytes,
                result.timed_out,
                True,
                result.truncated,
                result.usage,
            )
            self.record("out-of-memory", {"exit_code": result.exit_code})
        self.record("exit", {"exit_code": result.exit_code, "timed_out": result.timed_out})
        return result

    async def shell(self, *, cwd: str | None = None, env: Mapping[str, str] | None = None) -> Shell:
        shell = BashShell(self, cwd, env)
        await shell.start()
        return shell

    # ------------------------------------------------------------------------------------------- files

    async def read(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        parts: list[bytes] = []
        left = MAX_READ + 1 if length is None else length
        while left > 0:
            want = min(left, 4 * protocol.CHUNK)
            fields = ((protocol.PATH, os.fsencode(path)), (protocol.OFFSET, offset), (protocol.LIMIT, want))
            *frames, (_, end) = await (await self.ready()).ask(protocol.READ, *fields)
            if length is None and protocol.number(end, protocol.SIZE) - offset > left:
                left = 0  # with a hole a file can claim to be as large as it likes
                break
            parts += (found := [protocol.data(got, protocol.DATA) for _, got in frames])
            got = sum(map(len, found))
            offset, left = offset + got, left - got
            if got < want:
                break
        if length is None and left <= 0:
            raise PodError(f"{path}: is over {MAX_READ:,} bytes; read it in parts, by offset and length")
        return b"".join(parts)

    async def write(self, path: str, data: bytes | str, *, mode: int | None = None, append: bool = False) -> None:
        content = data.encode() if isinstance(data, str) else data
        at = 0
        while True:
            part = content[at : at + protocol.CHUNK]
            flags = protocol.APPEND if append else protocol.TRUNCATE if at == 0 else 0
            fields: list[tuple[int, protocol.Value]] = [
                (protocol.PATH, os.fsencode(path)),
                (protocol.OFFSET, at),
                (protocol.FLAGS, flags),
                (protocol.DATA, part),
            ]
            at += len(part)
            if mode is not None and at >= len(content):  # last: with mode 0400 a second part could not be written
                fields.append((protocol.MODE, mode))
            await (await self.ready()).ask(protocol.WRITE, *fields)
            if at >= len(content):
                return

    async def list(self, path: str = ".") -> Listing:
        *entries, _ = await (await self.ready()).ask(protocol.LIST, (protocol.PATH, os.fsencode(path)))
        return [_info(found) for _, found in entries]

    async def stat(self, path: str) -> FileInfo:
        entry, _ = await (await self.ready()).ask(protocol.STAT, (protocol.PATH, os.fsencode(path)))
        return _info(entry[1])

    async def remove(self, path: str) -> None:
        await (await self.ready()).ask(protocol.REMOVE, (protocol.PATH, os.fsencode(path)))

    async def make_directory(self, path: str, mode: int = 0o755) -> None:
        await (await self.ready()).ask(protocol.MKDIR, (protocol.PATH, os.fsencode(path)), (protocol.MODE, mode))

    async def _make_link(self, path: str, target: str) -> None:
        await (await self.ready()).ask(
            protocol.SYMLINK, (protocol.PATH, os.fsencode(path)), (protocol.DATA, os.fsencode(target))
        )

    async def upload(self, source: Path, path: str) -> None:
        await transfer.upload(self, self._make_link, source, path)

    async def download(self, path: str, target: Path) -> None:
        await transfer.download(self, path, target)

    # ------------------------------------------------------------------------------------------- the log

    def record(self, kind: str, facts: Mapping[str, Any]) -> None:
        """Add an event."""
        if len(self.history) < EVENTS_KEPT:
            self.history.append(Event(time.time(), kind, facts))

    def events(self) -> Sequence[Event]:
        return tuple(self.history)


def _info(fields: protocol.Fields) -> FileInfo:
    return FileInfo(
        name=os.fsdecode(protocol.data(fields, protocol.PATH)),
        kind=cast(Any, protocol.KINDS.get(protocol.data(fields, protocol.KIND), "other")),
        size=protocol.number(fields, protocol.SIZE),
        mode=protocol.number(fields, protocol.MODE),
        modified=protocol.number(fields, protocol.MTIME) / 1e9,
        target=os.fsdecode(protocol.data(fields, protocol.TARGET)),
    )
