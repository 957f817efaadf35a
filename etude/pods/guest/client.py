"""Our side of the wire: a connection to a pod's agent, and a pod whose commands and files go over it.

`Link` carries bytes (a UNIX socket here, a WebSocket to another host); `Agent` speaks frames over one link. A pod has
one link for short calls and opens another for every job that streams, so that a slow reader slows its own job only.
"""

import asyncio
import os
import socket
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Literal, Protocol

from etude.pods.guest import protocol as wire
from etude.pods.pod import (
    Command,
    ExecResult,
    Job,
    PodError,
    PodFileError,
    PodGone,
    ResourceUsage,
)

CONNECT_S = 30.0  # for a new pod's agent to answer; it takes milliseconds unless the machine is drowning
STREAM_ROOM = 8 << 20  # bytes of a job's output held for a reader that is slow
FOR_EVER_S = 1e9  # no timeout is longer
FIELD_ROOM = 1 << 17  # bytes of argv and environment; the kernel allows 128 KiB for one string anyway

Frame = tuple[int, wire.Fields]


class Receiver(Protocol):
    """What a link tells of: bytes, and its end."""

    def received(self, data: bytes) -> None: ...
    def lost(self) -> None: ...


class Link(ABC):
    """An ordered byte stream to an agent."""

    @abstractmethod
    def start(self, receiver: Receiver) -> None: ...

    @abstractmethod
    def send(self, data: bytes) -> None:
        """Queue bytes; never blocks."""

    @abstractmethod
    async def drain(self) -> None:
        """Wait until the queue is short."""

    @abstractmethod
    def hold(self, held: bool) -> None:
        """Stop or continue reading, for backpressure."""

    @abstractmethod
    def close(self) -> None: ...

    descriptors: Sequence[int] = ()  # that came with the greeting


class SocketLink(Link):
    """A connected stream socket on this machine."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.loop = asyncio.get_running_loop()
        self.queue = bytearray()
        self.receiver: Receiver | None = None
        self.descriptors: list[int] = []
        self.space: asyncio.Event | None = None
        self.first = True

    def start(self, receiver: Receiver) -> None:
        self.receiver = receiver
        self.loop.add_reader(self.sock.fileno(), self._readable)

    def _readable(self) -> None:
        assert self.receiver is not None
        try:
            if self.first:
                data, self.descriptors, _, _ = socket.recv_fds(self.sock, 1 << 18, 250)
                self.first = False
            else:
                data = self.sock.recv(1 << 18)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if data:
            self.receiver.received(data)
        else:
            self.close()
            self.receiver.lost()

    def send(self, data: bytes) -> None:
        if self.sock.fileno() < 0:
            return
        if not self.queue:
            try:
                sent = self.sock.send(data)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError:
                return  # the reader reports the end
            if sent == len(data):
                return
            data = data[sent:]
            self.loop.add_writer(self.sock.fileno(), self._writable)
        self.queue += data

    def _writable(self) -> None:
        try:
            del self.queue[: self.sock.send(self.queue)]
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.queue.clear()
        if not self.queue:
            self.loop.remove_writer(self.sock.fileno())
        if self.space is not None and len(self.queue) < wire.CHUNK:
            self.space.set()

    async def drain(self) -> None:
        while len(self.queue) > 4 * wire.CHUNK and self.sock.fileno() >= 0:
            self.space = asyncio.Event()
            await self.space.wait()

    def hold(self, held: bool) -> None:
        if self.sock.fileno() < 0 or self.receiver is None:
            return
        if held:
            self.loop.remove_reader(self.sock.fileno())
        else:
            self.loop.add_reader(self.sock.fileno(), self._readable)

    def close(self) -> None:
        if self.sock.fileno() < 0:
            return
        self.loop.remove_reader(self.sock.fileno())
        self.loop.remove_writer(self.sock.fileno())
        self.sock.close()
        if self.space is not None:
            self.space.set()


def connect_unix(directory: str, name: str) -> socket.socket:
    """Connect to a socket file whose path may be longer than the 108 bytes the kernel takes."""
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.connect(f"/proc/self/fd/{fd}/{name}")
    except OSError:
        sock.close()
        raise
    finally:
        os.close(fd)
    return sock


class Agent:
    """One connection to a pod's agent: requests out, frames back to whoever asked."""

    def __init__(self, link: Link, name: str) -> None:
        self.link, self.name = link, name
        self.splitter = wire.Splitter()
        self.calls: dict[int, Callable[[int, wire.Fields], None]] = {}
        self.next_call = 0
        self.gone: PodError | None = None
        self.workdir = "/"
        self.greeted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.on_lost: Callable[[], None] | None = None
        link.start(self)

    async def greeting(self, timeout: float = CONNECT_S) -> None:
        """Wait for the agent; PodError with its reason when the pod could not be made."""
        try:
            await asyncio.wait_for(self.greeted, timeout)
        except TimeoutError:
            self.link.close()
            raise PodError(f"pod {self.name}: its agent did not answer within {timeout:g} s") from None

    def received(self, data: bytes) -> None:
        try:
            for op, call, fields in self.splitter.feed(data):
                if call:
                    if handler := self.calls.get(call):
                        handler(op, fields)
                elif not self.greeted.done():
                    self._greet(op, fields)
        except wire.WireError as error:
            self.gone = PodError(f"pod {self.name}: {error}")
            self.link.close()
            self.lost()

    def _greet(self, op: int, fields: wire.Fields) -> None:
        version = wire.number(fields, wire.NUMBER)
        if op != wire.HELLO:
            reason = wire.data(fields, wire.DATA).decode("utf-8", "replace")
            self.greeted.set_exception(PodError(f"pod {self.name} could not be made: {reason}"))
        elif version != wire.VERSION:
            text = f"pod {self.name}: its agent speaks version {version} of the protocol, we speak {wire.VERSION}"
            self.greeted.set_exception(PodError(text))
        else:
            self.workdir = os.fsdecode(wire.data(fields, wire.PATH))
            self.greeted.set_result(None)

    def lost(self) -> None:
        self.gone = self.gone or PodGone(f"pod {self.name} is gone")
        if not self.greeted.done():
            self.greeted.set_exception(self.gone)
            self.greeted.exception()  # may never be awaited
        calls, self.calls = self.calls, {}
        for handler in calls.values():
            handler(-1, {})
        if self.on_lost is not None:
            self.on_lost()

    def open_call(self, handler: Callable[[int, wire.Fields], None]) -> int:
        """A number for a new call, whose answers go to `handler`; op -1 says the connection ended."""
        if self.gone is not None:
            raise self.gone
        self.next_call += 1
        self.calls[self.next_call] = handler
        return self.next_call

    async def ask(self, op: int, *fields: tuple[int, wire.Value]) -> list[Frame]:
        """One request; all frames of its answer, the last being OK. FAIL raises PodFileError."""
        done: asyncio.Future[list[Frame]] = asyncio.get_running_loop().create_future()
        frames: list[Frame] = []

        def take(answer: int, got: wire.Fields) -> None:
            if done.done():
                return
            if answer == -1:
                done.set_exception(self.gone or PodGone(f"pod {self.name} is gone"))
            elif answer == wire.FAIL:
                done.set_exception(failure(got))
            else:
                frames.append((answer, got))
                if answer == wire.OK:
                    done.set_result(frames)

        call = self.open_call(take)
        self.link.send(wire.frame(op, call, *fields))
        try:
            return await done
        finally:
            self.calls.pop(call, None)

    def close(self) -> None:
        self.on_lost = None
        self.link.close()
        self.lost()


def failure(fields: wire.Fields) -> PodFileError:
    """The error a FAIL frame carries."""
    return PodFileError(wire.number(fields, wire.NUMBER), wire.data(fields, wire.DATA).decode("utf-8", "replace"))


def ended(fields: wire.Fields, stdout: bytes, stderr: bytes) -> ExecResult:
    """The result an EXITED frame and the output before it make."""
    flags = wire.number(fields, wire.FLAGS)
    return ExecResult(
        exit_code=wire.number(fields, wire.CODE),
        stdout_bytes=stdout,
        stderr_bytes=stderr,
        timed_out=bool(flags & wire.TIMED_OUT),
        truncated=bool(flags & wire.TRUNCATED),
        usage=ResourceUsage(
            wall_s=wire.number(fields, wire.TIME) / 1e6,
            user_s=wire.number(fields, wire.UTIME) / 1e6,
            system_s=wire.number(fields, wire.STIME) / 1e6,
            max_rss=wire.number(fields, wire.MAXRSS),
        ),
    )


def not_started(error: PodFileError, command: Command) -> ExecResult | None:
    """What a shell would have said of a program that is not there or cannot run; None for other failures."""
    name = command if isinstance(command, str) else command[0] if command else ""
    reasons = {2: (127, "not found"), 13: (126, "permission denied"), 8: (126, "cannot execute"), 7: (126, "too long")}
    if error.errno not in reasons:
        return None
    code, text = reasons[error.errno]
    return ExecResult(code, stderr_bytes=f"{name[:200]}: {text}\n".encode())


def spawn_fields(
    command: Command, cwd: str | None, env: Mapping[str, str], user: str | None, timeout: float | None
) -> list[tuple[int, wire.Value]]:
    """The fields of SPAWN that every command has."""
    argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
    if not argv or not all(isinstance(a, str) for a in argv):
        raise PodError(f"a command is a string or a non-empty list of strings, not {command!r}")
    texts = [*argv, *env, *env.values(), cwd or "", user or ""]
    if any("\0" in text for text in texts):
        raise PodError("a command, its directory and its variables may not contain NUL characters")
    if sum(map(len, texts)) > FIELD_ROOM * 8:
        raise PodError(f"a command and its variables may be {FIELD_ROOM * 8:,} characters; write a file instead")
    found: list[tuple[int, wire.Value]] = [(wire.ARG, os.fsencode(a)) for a in argv]
    found += [(wire.ENV, os.fsencode(f"{key}={value}")) for key, value in env.items()]
    if cwd:
        found.append((wire.CWD, os.fsencode(cwd)))
    if user:
        found.append((wire.USER, os.fsencode(user)))
    if timeout is not None:
        if not timeout < FOR_EVER_S:
            raise PodError(f"a command's timeout is {timeout!r}; expected seconds, or None for no limit")
        found.append((wire.TIME, max(1, round(timeout * 1000))))
    return found


class StreamJob(Job):
    """A job on a connection of its own."""

    def __init__(self, agent: Agent, report: Callable[[ExecResult], ExecResult]) -> None:
        self.agent = agent
        self.report = report
        loop = asyncio.get_running_loop()
        self.started: asyncio.Future[int] = loop.create_future()
        self.result: asyncio.Future[ExecResult] = loop.create_future()
        self.chunks: deque[tuple[Literal["stdout", "stderr"], bytes]] = deque()
        self.held_bytes = 0
        self.reading = False
        self.news = asyncio.Event()
        self.call = agent.open_call(self._take)

    def _take(self, op: int, fields: wire.Fields) -> None:
        if op in (wire.OUT, wire.ERR):
            data = wire.data(fields, wire.DATA)
            self.chunks.append(("stdout" if op == wire.OUT else "stderr", data))
            self.held_bytes += len(data)
            if self.held_bytes > STREAM_ROOM and self.reading:
                self.agent.link.hold(True)
            while self.held_bytes > STREAM_ROOM and not self.reading:
                self.held_bytes -= len(self.chunks.popleft()[1])  # nobody reads: the newest output is kept
        elif op == wire.STARTED:
            if not self.started.done():  # who asked may have been cancelled
                self.started.set_result(wire.number(fields, wire.PID))
        else:
            self._finish(op, fields)
        self.news.set()

    def _finish(self, op: int, fields: wire.Fields) -> None:
        error: PodError = failure(fields) if op == wire.FAIL else self.agent.gone or PodGone("the pod is gone")
        for future in (self.started, self.result):
            if future.done():
                continue
            if op == wire.EXITED and future is self.result:
                self.result.set_result(self.report(ended(fields, b"", b"")))
            else:
                future.set_exception(error)
                future.exception()  # may never be awaited
        if op != -1:
            self.agent.calls.pop(self.call, None)
            asyncio.get_running_loop().call_soon(self.agent.close)

    async def output(self) -> AsyncIterator[tuple[Literal["stdout", "stderr"], bytes]]:
        self.reading = True
        try:
            while True:
                while self.chunks:
                    chunk = self.chunks.popleft()
                    full = self.held_bytes > STREAM_ROOM
                    self.held_bytes -= len(chunk[1])
                    if full and self.held_bytes <= STREAM_ROOM:
                        self.agent.link.hold(False)
                    yield chunk
                if self.result.done():
                    return
                self.news.clear()
                await self.news.wait()
        finally:  # who stops reading in the middle does not stop the job
            self.reading = False
            self.agent.link.hold(False)

    def abandon(self) -> None:
        """Nobody waits for it any more: the agent kills a job whose connection ends."""
        self.agent.close()

    async def _ask(self, op: int, *fields: tuple[int, wire.Value]) -> None:
        if self.result.done() and not self.result.exception():
            raise PodFileError(3, "the command has ended")  # ESRCH; its connection has ended with it
        await self.agent.ask(op, (wire.JOB, self.call), *fields)

    async def write(self, data: bytes) -> None:
        for at in range(0, len(data), wire.CHUNK):
            await self._ask(wire.INPUT, (wire.DATA, data[at : at + wire.CHUNK]))

    async def close_stdin(self) -> None:
        await self._ask(wire.INPUT, (wire.FLAGS, wire.END))

    async def signal(self, number: int) -> None:
        await self._ask(wire.SIGNAL, (wire.NUMBER, number))

    async def resize(self, rows: int, columns: int) -> None:
        await self._ask(wire.RESIZE, (wire.ROWS, rows), (wire.COLS, columns))

    async def wait(self, timeout: float | None = None) -> ExecResult:
        return await asyncio.wait_for(asyncio.shield(self.result), timeout)
