"""A pod whose commands and files go through a guest client; a backend adds the pod's lifecycle."""

import asyncio
import contextlib
import os
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from etude.pods.guest import protocol, transfer
from etude.pods.guest.client import GuestClient, Link, StreamJob, decode_exit, decode_failure, not_started, spawn_fields
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
)

MAX_READ = 1 << 30  # bytes that `read` returns without an explicit length
EVENTS_KEPT = 10_000  # per pod; a program that loops on refused connections must not fill our memory


class GuestPod(Pod):
    """The part of a pod that is the same on every backend."""

    def __init__(self, id: str, environment: Mapping[str, str], workdir: str, user: str = "") -> None:
        self.id, self.environment, self.workdir, self.user = id, dict(environment), workdir, user
        self.connection: GuestClient | None = None
        self.history: list[Event] = []
        self.restarting: asyncio.Future[None] | None = None  # being started again after it was sealed for a fork

    @abstractmethod
    async def open_link(self) -> Link:
        """Open a new connection to the guest init."""

    def memory_ran_out(self) -> bool:
        """Return whether the kernel has OOM-killed a process since the last call."""
        return False

    # ------------------------------------------------------------------------------------------- commands

    async def ready(self) -> GuestClient:
        """Return the guest client, once the pod runs again after a fork."""
        if self.restarting is not None and self.restarting is not asyncio.current_task():  # which has just started it
            await asyncio.shield(self.restarting)
        return self.guest

    @property
    def guest(self) -> GuestClient:
        """The guest client; raises PodGone once the pod is closed."""
        if self.connection is None:
            raise PodGone(f"pod {self.id} is closed")
        return self.connection

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
        client = await self.ready()
        done: asyncio.Future[ExecResult] = asyncio.get_running_loop().create_future()
        out: dict[int, list[bytes]] = {protocol.OUT: [], protocol.ERR: []}

        room = dict.fromkeys(out, max_output)

        def on_frame(op: int, got: protocol.Fields) -> None:
            if done.done():
                return
            if op in out:
                # The guest init truncates already; do not rely on it for our own memory.
                data = protocol.data(got, protocol.DATA)[: room[op]]
                room[op] -= len(data)
                out[op].append(data)
            elif op == protocol.EXITED:
                done.set_result(decode_exit(got, b"".join(out[protocol.OUT]), b"".join(out[protocol.ERR])))
            elif op == protocol.FAIL:
                done.set_exception(decode_failure(got))
            elif op == -1:
                done.set_exception(client.closed_error or PodGone(f"pod {self.id} is gone"))

        call = client.open_call(on_frame)
        client.link.send(protocol.frame(protocol.SPAWN, call, *fields))
        try:
            return self._record_exit(await done)
        except PodFileError as error:
            if (result := not_started(error, command)) is not None:
                return result
            raise
        except asyncio.CancelledError:
            self._abandon(client, call)
            raise
        finally:
            client.calls.pop(call, None)

    def _abandon(self, client: GuestClient, call: int) -> None:
        """Kill a cancelled command without waiting for the reply."""
        if client.closed_error is None:
            client.next_call += 1
            fields = ((protocol.JOB, call), (protocol.NUMBER, 9))
            client.link.send(protocol.frame(protocol.SIGNAL, client.next_call, *fields))

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
        """Run a command whose input does not fit in one frame, by streaming it."""
        try:
            job = await self._spawn(command, cwd, env, timeout, user, None)
        except PodFileError as error:
            if (failed := not_started(error, command)) is not None:
                return failed
            raise

        async def send_input() -> None:
            with contextlib.suppress(PodError):  # the command ended, or closed its input
                await job.write(stdin)
                await job.close_stdin()

        sending = asyncio.create_task(send_input())
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
            sending.cancel()
        stdout, stderr = bytes(kept["stdout"]), bytes(kept["stderr"])
        return replace(result, stdout_bytes=stdout, stderr_bytes=stderr, truncated=truncated)

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
        await self.ready()  # raises for a closed pod before connecting
        client = GuestClient(await self.open_link(), self.id)
        try:
            await client.wait_until_ready()
            for descriptor in client.link.descriptors:
                os.close(descriptor)
            job = StreamJob(client, self._record_exit)
            client.link.send(protocol.frame(protocol.SPAWN, job.call, *fields))
            await job.started
        except BaseException:
            client.close()
            raise
        return job

    def _user(self, user: str | None) -> str | None:
        return user if user is not None else self.user or None

    def _record_exit(self, result: ExecResult) -> ExecResult:
        """Add what only the host can see, the OOM kill, and record the events."""
        if result.exit_code and self.memory_ran_out():
            result = replace(result, out_of_memory=True)
            self.record("out-of-memory", {"exit_code": result.exit_code})
        self.record("exit", {"exit_code": result.exit_code, "timed_out": result.timed_out})
        return result

    # ------------------------------------------------------------------------------------------- files

    async def read(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        parts: list[bytes] = []
        left = MAX_READ + 1 if length is None else length
        while left > 0:
            want = min(left, 4 * protocol.CHUNK)
            fields = ((protocol.PATH, os.fsencode(path)), (protocol.OFFSET, offset), (protocol.LIMIT, want))
            *frames, (_, end) = await (await self.ready()).request(protocol.READ, *fields)
            if length is None and protocol.number(end, protocol.SIZE) - offset > left:
                left = 0  # a sparse file can claim any size
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
            await (await self.ready()).request(protocol.WRITE, *fields)
            if at >= len(content):
                return

    async def list(self, path: str = ".") -> Listing:
        *entries, _ = await (await self.ready()).request(protocol.LIST, (protocol.PATH, os.fsencode(path)))
        return [_file_info(found) for _, found in entries]

    async def stat(self, path: str) -> FileInfo:
        entry, _ = await (await self.ready()).request(protocol.STAT, (protocol.PATH, os.fsencode(path)))
        return _file_info(entry[1])

    async def remove(self, path: str) -> None:
        await (await self.ready()).request(protocol.REMOVE, (protocol.PATH, os.fsencode(path)))

    async def make_directory(self, path: str, mode: int = 0o755) -> None:
        await (await self.ready()).request(protocol.MKDIR, (protocol.PATH, os.fsencode(path)), (protocol.MODE, mode))

    async def symlink(self, target: str, path: str) -> None:
        await (await self.ready()).request(
            protocol.SYMLINK, (protocol.PATH, os.fsencode(path)), (protocol.DATA, os.fsencode(target))
        )

    async def upload(self, source: Path, path: str) -> None:
        await transfer.upload(self, source, path)

    async def download(self, path: str, target: Path) -> None:
        await transfer.download(self, path, target)

    # ------------------------------------------------------------------------------------------- events

    def record(self, kind: str, facts: Mapping[str, Any]) -> None:
        """Append an event to the pod's history."""
        if len(self.history) < EVENTS_KEPT:
            self.history.append(Event(time.time(), kind, facts))

    def events(self) -> Sequence[Event]:
        return tuple(self.history)


def _file_info(fields: protocol.Fields) -> FileInfo:
    return FileInfo(
        name=os.fsdecode(protocol.data(fields, protocol.PATH)),
        kind=cast(Any, protocol.KINDS.get(protocol.data(fields, protocol.KIND), "other")),
        size=protocol.number(fields, protocol.SIZE),
        mode=protocol.number(fields, protocol.MODE),
        modified=protocol.number(fields, protocol.MTIME) / 1e9,
        target=os.fsdecode(protocol.data(fields, protocol.TARGET)),
    )
