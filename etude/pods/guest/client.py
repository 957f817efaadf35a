"""The host side of the guest protocol: connections to a pod's guest init, and jobs that stream over one.

`Link` carries bytes (a UNIX socket here, a WebSocket to another host); `GuestClient` sends frames over one link. A pod
has one link for short calls and opens another for every streaming job, so that a slow reader slows only its own job.
"""

import asyncio
import contextlib
import os
import socket
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

from etude.pods.guest import protocol
from etude.pods.pod import (
    Command,
    ExecResult,
    Job,
    PodError,
    PodFileError,
    PodGone,
    ResourceUsage,
)

CONNECT_S = 30.0  # for a new pod's guest init to answer; it takes milliseconds unless the machine is overloaded
MAX_BUFFERED_OUTPUT = 8 << 20  # bytes of a job's output held for a slow reader
MAX_TIMEOUT_S = 1e9
MAX_COMMAND_SIZE = 1 << 20  # characters of argv and environment; the kernel allows 128 KiB for one string

Frame = tuple[int, protocol.Fields]


class Receiver(Protocol):
    """Callbacks of a link, as in asyncio.Protocol."""

    def data_received(self, data: bytes) -> None: ...
    def connection_lost(self) -> None: ...


class Link(ABC):
    """An ordered byte stream to a guest init."""

    @abstractmethod
    def start(self, receiver: Receiver) -> None: ...

    @abstractmethod
    def send(self, data: bytes) -> None:
        """Queue bytes without blocking."""

    @abstractmethod
    async def drain(self) -> None:
        """Wait until the send queue is short."""

    @abstractmethod
    def pause_reading(self, paused: bool) -> None:
        """Stop or resume reading, for backpressure."""

    @abstractmethod
    def close(self) -> None: ...

    descriptors: Sequence[int] = ()  # file descriptors received with HELLO


class SocketLink(Link):
    """A connected stream socket on this machine."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.loop = asyncio.get_running_loop()
        self.queue = bytearray()
        self.receiver: Receiver | None = None
        self.descriptors: list[int] = []
        self.drained: asyncio.Event | None = None
        self.first_read = True

    def start(self, receiver: Receiver) -> None:
        self.receiver = receiver
        self.loop.add_reader(self.sock.fileno(), self._readable)

    def _readable(self) -> None:
        assert self.receiver is not None
        try:
            if self.first_read:
                data, self.descriptors, _, _ = socket.recv_fds(self.sock, 1 << 18, 250)
                self.first_read = False
            else:
                data = self.sock.recv(1 << 18)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if data:
            self.receiver.data_received(data)
        else:
            self.close()
            self.receiver.connection_lost()

    def send(self, data: bytes) -> None:
        if self.sock.fileno() < 0:
            return
        if not self.queue:
            try:
                sent = self.sock.send(data)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError:
                return  # the reader reports the disconnect
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
        if self.drained is not None and len(self.queue) < protocol.CHUNK:
            self.drained.set()

    async def drain(self) -> None:
        while len(self.queue) > 4 * protocol.CHUNK and self.sock.fileno() >= 0:
            self.drained = asyncio.Event()
            await self.drained.wait()

    def pause_reading(self, paused: bool) -> None:
        if self.sock.fileno() < 0 or self.receiver is None:
            return
        if paused:
            self.loop.remove_reader(self.sock.fileno())
        else:
            self.loop.add_reader(self.sock.fileno(), self._readable)

    def close(self) -> None:
        if self.sock.fileno() < 0:
            return
        self.loop.remove_reader(self.sock.fileno())
        self.loop.remove_writer(self.sock.fileno())
        self.sock.close()
        if self.drained is not None:
            self.drained.set()


@contextlib.contextmanager
def _short_path(directory: Path, name: str) -> Iterator[str]:
    """Yield a path of a socket file below the kernel's limit of 108 bytes."""
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)


def connect_unix(directory: Path, name: str) -> socket.socket:
    """Connect to a socket file."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        with _short_path(directory, name) as path:
            sock.connect(path)
    except OSError:
        sock.close()
        raise
    return sock


def listen_unix(directory: Path, name: str) -> socket.socket:
    """Listen on a socket file, which replaces one of the same name."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        with _short_path(directory, name) as path:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            listener.bind(path)
        listener.listen(64)
    except OSError:
        listener.close()
        raise
    return listener


class GuestClient:
    """One connection to a pod's guest init: sends requests and passes each reply frame to its caller's handler."""

    def __init__(self, link: Link, name: str, find_reason: Callable[[], str] | None = None) -> None:
        self.link, self.name = link, name
        self.find_reason = find_reason  # returns why the pod ended, if that is known
        self.decoder = protocol.FrameDecoder()
        self.calls: dict[int, Callable[[int, protocol.Fields], None]] = {}
        self.next_call = 0
        self.closed_error: PodError | None = None
        self.workdir = "/"
        self.hello: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.on_disconnect: Callable[[], None] | None = None
        link.start(self)

    async def wait_until_ready(self, timeout: float = CONNECT_S) -> None:
        """Wait for HELLO; raise PodError with the reason when the pod could not be created."""
        try:
            await asyncio.wait_for(self.hello, timeout)
        except TimeoutError:
            self.link.close()
            raise PodError(f"pod {self.name}: the guest init did not answer within {timeout:g} s") from None

    def data_received(self, data: bytes) -> None:
        try:
            for op, call, fields in self.decoder.feed(data):
                if call:
                    if handler := self.calls.get(call):
                        handler(op, fields)
                elif not self.hello.done():
                    self._on_hello(op, fields)
        except protocol.WireError as error:
            self.closed_error = PodError(f"pod {self.name}: {error}")
            self.link.close()
            self.connection_lost()

    def _on_hello(self, op: int, fields: protocol.Fields) -> None:
        version = protocol.number(fields, protocol.NUMBER)
        if op != protocol.HELLO:
            reason = protocol.data(fields, protocol.DATA).decode("utf-8", "replace")
            self.hello.set_exception(PodError(f"pod {self.name} could not be created: {reason}"))
        elif version != protocol.VERSION:
            text = f"pod {self.name}: its guest init has protocol version {version}, expected {protocol.VERSION}"
            self.hello.set_exception(PodError(text))
        else:
            self.workdir = os.fsdecode(protocol.data(fields, protocol.PATH))
            self.hello.set_result(None)

    def connection_lost(self) -> None:
        if self.closed_error is None:
            reason = self.find_reason() if self.find_reason is not None else ""
            self.closed_error = PodGone(f"pod {self.name} is gone{reason and f': {reason}'}")
        if not self.hello.done():
            self.hello.set_exception(self.closed_error)
            self.hello.exception()  # may never be awaited
        calls, self.calls = self.calls, {}
        for handler in calls.values():
            handler(-1, {})
        if self.on_disconnect is not None:
            self.on_disconnect()

    def open_call(self, handler: Callable[[int, protocol.Fields], None]) -> int:
        """Return the number of a new call whose reply frames go to `handler`; op -1 means the connection ended."""
        if self.closed_error is not None:
            raise self.closed_error
        self.next_call += 1
        self.calls[self.next_call] = handler
        return self.next_call

    async def request(self, op: int, *fields: tuple[int, protocol.Value]) -> list[Frame]:
        """Send one request and return all frames of the reply, the last being OK. FAIL raises PodFileError."""
        done: asyncio.Future[list[Frame]] = asyncio.get_running_loop().create_future()
        frames: list[Frame] = []

        def on_frame(op: int, got: protocol.Fields) -> None:
            if done.done():
                return
            if op == -1:
                done.set_exception(self.closed_error or PodGone(f"pod {self.name} is gone"))
            elif op == protocol.FAIL:
                done.set_exception(decode_failure(got))
            else:
                frames.append((op, got))
                if op == protocol.OK:
                    done.set_result(frames)

        call = self.open_call(on_frame)
        self.link.send(protocol.frame(op, call, *fields))
        try:
            return await done
        finally:
            self.calls.pop(call, None)

    def close(self) -> None:
        self.on_disconnect = None
        self.link.close()
        self.connection_lost()


def decode_failure(fields: protocol.Fields) -> PodFileError:
    """Return the error in a FAIL frame."""
    return PodFileError(
        protocol.number(fields, protocol.NUMBER), protocol.data(fields, protocol.DATA).decode("utf-8", "replace")
    )


def decode_exit(fields: protocol.Fields, stdout: bytes, stderr: bytes) -> ExecResult:
    """Return the result from an EXITED frame and the output received before it."""
    flags = protocol.number(fields, protocol.FLAGS)
    return ExecResult(
        exit_code=protocol.number(fields, protocol.CODE),
        stdout_bytes=stdout,
        stderr_bytes=stderr,
        timed_out=bool(flags & protocol.TIMED_OUT),
        truncated=bool(flags & protocol.TRUNCATED),
        usage=ResourceUsage(
            wall_s=protocol.number(fields, protocol.TIME) / 1e6,
            user_s=protocol.number(fields, protocol.UTIME) / 1e6,
            system_s=protocol.number(fields, protocol.STIME) / 1e6,
            max_rss=protocol.number(fields, protocol.MAXRSS),
        ),
    )


def not_started(error: PodFileError, command: Command) -> ExecResult | None:
    """Return the result a shell would give for a program that is missing or cannot run; None for other failures."""
    name = command if isinstance(command, str) else command[0] if command else ""
    reasons = {2: (127, "not found"), 13: (126, "permission denied"), 8: (126, "cannot execute"), 7: (126, "too long")}
    if error.errno not in reasons:
        return None
    code, text = reasons[error.errno]
    return ExecResult(code, stderr_bytes=f"{name[:200]}: {text}\n".encode())


def spawn_fields(
    command: Command, cwd: str | None, env: Mapping[str, str], user: str | None, timeout: float | None
) -> list[tuple[int, protocol.Value]]:
    """Return the fields of SPAWN that every command has."""
    argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
    if not argv or not all(isinstance(a, str) for a in argv):
        raise PodError(f"a command is a string or a non-empty list of strings, not {command!r}")
    texts = [*argv, *env, *env.values(), cwd or "", user or ""]
    if any("\0" in text for text in texts):
        raise PodError("a command, its directory and its variables may not contain NUL characters")
    if sum(map(len, texts)) > MAX_COMMAND_SIZE:
        raise PodError(f"a command and its variables may be {MAX_COMMAND_SIZE:,} characters; write a file instead")
    fields: list[tuple[int, protocol.Value]] = [(protocol.ARG, os.fsencode(a)) for a in argv]
    fields += [(protocol.ENV, os.fsencode(f"{key}={value}")) for key, value in env.items()]
    if cwd:
        fields.append((protocol.CWD, os.fsencode(cwd)))
    if user:
        fields.append((protocol.USER, os.fsencode(user)))
    if timeout is not None:
        if not timeout < MAX_TIMEOUT_S:
            raise PodError(f"a command's timeout is {timeout!r}; expected seconds, or None for no limit")
        fields.append((protocol.TIME, max(1, round(timeout * 1000))))
    return fields


class StreamJob(Job):
    """A job on its own connection; `on_result` may amend its result."""

    def __init__(self, client: GuestClient, on_result: Callable[[ExecResult], ExecResult]) -> None:
        self.client = client
        self.on_result = on_result
        loop = asyncio.get_running_loop()
        self.started: asyncio.Future[int] = loop.create_future()
        self.result: asyncio.Future[ExecResult] = loop.create_future()
        self.chunks: deque[tuple[Literal["stdout", "stderr"], bytes]] = deque()
        self.buffered_bytes = 0
        self.reading = False
        self.changed = asyncio.Event()
        self.call = client.open_call(self._on_frame)

    def _on_frame(self, op: int, fields: protocol.Fields) -> None:
        if op in (protocol.OUT, protocol.ERR):
            data = protocol.data(fields, protocol.DATA)
            self.chunks.append(("stdout" if op == protocol.OUT else "stderr", data))
            self.buffered_bytes += len(data)
            if self.buffered_bytes > MAX_BUFFERED_OUTPUT and self.reading:
                self.client.link.pause_reading(True)
            while self.buffered_bytes > MAX_BUFFERED_OUTPUT and not self.reading:
                self.buffered_bytes -= len(self.chunks.popleft()[1])  # no reader: keep the newest
        elif op == protocol.STARTED:
            if not self.started.done():  # the caller may have been cancelled
                self.started.set_result(protocol.number(fields, protocol.PID))
        else:
            self._finish(op, fields)
        self.changed.set()

    def _finish(self, op: int, fields: protocol.Fields) -> None:
        error: PodError = (
            decode_failure(fields) if op == protocol.FAIL else self.client.closed_error or PodGone("the pod is gone")
        )
        for future in (self.started, self.result):
            if future.done():
                continue
            if op == protocol.EXITED and future is self.result:
                self.result.set_result(self.on_result(decode_exit(fields, b"", b"")))
            else:
                future.set_exception(error)
                future.exception()  # may never be awaited
        if op != -1:
            self.client.calls.pop(self.call, None)
            asyncio.get_running_loop().call_soon(self.client.close)

    async def output(self) -> AsyncIterator[tuple[Literal["stdout", "stderr"], bytes]]:
        self.reading = True
        try:
            while True:
                while self.chunks:
                    chunk = self.chunks.popleft()
                    full = self.buffered_bytes > MAX_BUFFERED_OUTPUT
                    self.buffered_bytes -= len(chunk[1])
                    if full and self.buffered_bytes <= MAX_BUFFERED_OUTPUT:
                        self.client.link.pause_reading(False)
                    yield chunk
                if self.result.done():
                    return
                self.changed.clear()
                await self.changed.wait()
        finally:  # a reader that stops early does not stop the job
            self.reading = False
            self.client.link.pause_reading(False)

    def abandon(self) -> None:
        """Kill the job by closing its connection."""
        self.client.close()

    async def _request(self, op: int, *fields: tuple[int, protocol.Value]) -> None:
        if self.result.done() and not self.result.exception():
            raise PodFileError(3, "the command has ended")  # ESRCH; its connection has ended with it
        await self.client.request(op, (protocol.JOB, self.call), *fields)

    async def write(self, data: bytes) -> None:
        for at in range(0, len(data), protocol.CHUNK):
            await self._request(protocol.INPUT, (protocol.DATA, data[at : at + protocol.CHUNK]))

    async def close_stdin(self) -> None:
        await self._request(protocol.INPUT, (protocol.FLAGS, protocol.END))

    async def signal(self, number: int) -> None:
        await self._request(protocol.SIGNAL, (protocol.NUMBER, number))

    async def resize(self, rows: int, columns: int) -> None:
        await self._request(protocol.RESIZE, (protocol.ROWS, rows), (protocol.COLS, columns))

    async def wait(self, timeout: float | None = None) -> ExecResult:
        return await asyncio.wait_for(asyncio.shield(self.result), timeout)
