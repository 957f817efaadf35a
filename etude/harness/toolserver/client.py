"""Client of the tool server in one pod: starts it, sends requests, restarts it if something in the pod ended it.

Responses are untrusted: lines are bounded and the shape of every response is checked. If the server dies, its pending
calls fail with an `environment` error; a lost pod is raised as it is.
"""

import asyncio
import contextlib
import errno
import itertools
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast, get_args

from etude.errors import EtudeError
from etude.harness.search.source import FileEntry
from etude.harness.tools.tool import ErrorClass, ToolError, ToolOutcome
from etude.pods.payload import START, pack
from etude.pods.pod import Job, Pod, PodError, PodFileError, PodGone
from etude.system.run_limited import run_limited

START_S = 60.0  # on an overloaded machine
LIMIT_S = 30.0  # of a request
GRACE_S = 10.0  # beyond the server's own time limit of a request
MAX_LINE = 16 << 20  # bytes of a response
MAX_TEXT = 200_000  # characters shown to a model
MAX_FACT = 4096  # characters of a fact
MAX_STRAYS = 1000  # responses without a request before the connection is closed
MAX_ERRORS = 4 << 10  # bytes of stderr kept for error messages
MAX_NOISE = 8 << 20  # bytes of stderr in total
MAX_FILE = 1 << 20  # bytes of a file whose contents are read

INSIDE = "etude.harness.toolserver.inside"

PROGRAM = (f"{INSIDE}.server:main", INSIDE, "etude.globs", "etude.pod_stdlib")
PYTHON = "python3"


def program() -> bytes:
    """Return the tool server, to be sent to its standard input."""
    return pack(*PROGRAM)


class ToolServerBug(EtudeError):
    """A defect in the tool server; the message contains its traceback."""


class ToolServerDied(EtudeError):
    """The server ended or violated the protocol."""


class ToolServerNotStarted(PodError):
    """The server ended before its first message."""


@dataclass(frozen=True)
class LaunchedToolServer:
    """A tool server that waits for its configuration."""

    connection: "_ServerConnection"


async def launch_tool_server(pod: Pod) -> LaunchedToolServer:
    """Start the process of a tool server.

    A warm pool prepares its pods with this: what the server is shown comes with the first request of a session.
    """
    try:
        job = await pod.spawn([PYTHON, "-I", "-S", "-c", START, "etude-tools"])
    except PodError as error:
        if isinstance(error.__cause__, PodFileError) and error.__cause__.errno == errno.ENOENT:
            message = f"image {pod.image!r} has no python3, which the tool server needs; install Python 3.8+"
            raise PodError(message) from error
        raise
    connection = _ServerConnection(job)
    with contextlib.suppress(ToolServerDied):  # it ended before reading; the reader has the reason
        await connection.write(program())
    return LaunchedToolServer(connection)


class ToolServer:
    """The tool server of a pod."""

    def __init__(self, pod: Pod, root: str = "", names: Mapping[str, str] | None = None) -> None:
        self.pod, self.root = pod, root or pod.workdir
        self.names = dict(names or {})
        self.state = ""  # the server's state directory in the pod
        self.starts = 0
        self.seconds = 0.0  # in which at least one request was active
        self._active = 0
        self._active_since = 0.0
        self._connection: _ServerConnection | None = None
        self._starting = asyncio.Lock()

    # -- lifetime

    async def start(self) -> "_ServerConnection":
        """Return the connection to the running server; start it if necessary."""
        async with self._starting:
            if self._connection is not None and self._connection.closed is None:
                return self._connection
            launched, self.pod.prepared = self.pod.prepared, None
            if not isinstance(launched, LaunchedToolServer) or launched.connection.closed is not None:
                launched = await launch_tool_server(self.pod)
            connection = self._connection = launched.connection
            config = json.dumps({"root": self.root, "state": self.state, "names": self.names})
            try:
                hello = await connection.hello(config, START_S)
            except ToolServerDied as error:
                self._connection = None
                raise ToolServerNotStarted(f"pod {self.pod.id}: the tool server did not start: {error}") from None
            except BaseException:
                self._connection = None
                await connection.kill()
                raise
            self.root, self.state = str(hello.get("root", self.root)), str(hello.get("state", self.state))
            self.starts += 1
            return connection

    async def stop(self) -> None:
        """Stop the server. Jobs keep running; the next request restarts it. A snapshot of an idle pod costs nothing."""
        async with self._starting:
            connection, self._connection = self._connection, None
            if connection is not None:
                await connection.kill()

    # -- requests

    async def call(self, operation: str, arguments: Mapping[str, Any], limit_s: float = LIMIT_S) -> ToolOutcome:
        """Send a request whose result is text for the model; return it as an outcome."""
        return outcome_of(await self.request(operation, arguments, limit_s))

    async def request(self, operation: str, arguments: Mapping[str, Any], limit_s: float = LIMIT_S) -> dict[str, Any]:
        """Send a request and return its result; `limit_s` limits the work itself. Raise ToolError if it fails."""
        with self._measured():
            connection = await self._restarted()
            try:
                response = await connection.exchange(operation, arguments, limit_s)
            except TimeoutError:
                await connection.kill()
                text = f"the tool server did not answer within {limit_s + GRACE_S:g} s and was started again"
                raise ToolError("timeout", f"{text}; whether the call did anything is not known") from None
            except (ToolServerDied, PodGone) as error:
                if isinstance(error, PodGone) and not await self._pod_is_alive():
                    raise
                await connection.kill()
                text = f"the tool server stopped while the call ran ({error}) and is started again"
                raise ToolError("environment", f"{text}; whether the call did anything is not known") from None
            if "error" in response:
                raise _failure(response["error"])
            result = response.get("ok")
            if not isinstance(result, dict):
                await connection.kill()
                wrong = "the tool server gave an answer that makes no sense and was started again"
                raise ToolError("environment", wrong)
            return result

    @contextmanager
    def _measured(self) -> Iterator[None]:
        """Add the time of the block to `seconds`, once for requests that overlap."""
        self._active += 1
        if self._active == 1:
            self._active_since = time.monotonic()
        try:
            yield
        finally:
            self._active -= 1
            if not self._active:
                self.seconds += time.monotonic() - self._active_since

    async def _restarted(self) -> "_ServerConnection":
        """Return the running server. One that ran before and cannot be started now is the environment's fault."""
        try:
            return await self.start()
        except PodGone:
            raise
        except PodError as error:  # such as a process limit
            in_pod = isinstance(error, (ToolServerNotStarted, PodFileError)) or isinstance(
                error.__cause__, PodFileError
            )
            if not in_pod or not self.starts:
                raise
            raise ToolError("environment", f"the tool server cannot be started again: {error}") from error

    async def _pod_is_alive(self) -> bool:
        """Return whether only the connection broke, as when the pod's files are sealed for a snapshot."""
        try:
            await self.pod.stat("/")
        except PodError:
            return False
        return True

    async def listing(self) -> list[FileEntry]:
        """Return the text files that .gitignore does not exclude, up to a megabyte each (`FileSource`)."""
        found = await self.request("listing", {}, 120.0)
        try:
            return [FileEntry(str(path), int(size), str(digest)) for path, size, digest in found["files"]]
        except (KeyError, TypeError, ValueError):
            raise ToolError("environment", "the tool server gave a list of files that cannot be read") from None

    async def contents(self, paths: Sequence[str]) -> dict[str, bytes]:
        """Return files of the workspace by path; unreadable ones are left out."""
        found: dict[str, bytes] = {}

        async def read(path: str) -> None:
            with contextlib.suppress(PodFileError):
                found[path] = await self.pod.read(f"{self.root}/{path}", length=MAX_FILE)

        await run_limited(read(path) for path in paths)
        return found


def _failure(error: Any) -> EtudeError:
    if not isinstance(error, dict) or error.get("kind") not in get_args(ErrorClass):
        return ToolError("environment", "the tool server gave an error that makes no sense")
    if error["kind"] == "bug":
        return ToolServerBug(f"{error.get('message')}\n{error.get('trace')}")
    return ToolError(cast(ErrorClass, error["kind"]), sanitize_text(str(error.get("message"))))


def sanitize_text(text: str) -> str:
    """Return text that can be encoded in UTF-8, cut to MAX_TEXT characters."""
    if len(text) > MAX_TEXT:
        text = f"{text[:MAX_TEXT]}\n[cut: {len(text) - MAX_TEXT:,} more characters]"
    return text.encode("utf-8", "replace").decode()


def outcome_of(result: Mapping[str, Any]) -> ToolOutcome:
    """Convert a result of the tool server to an outcome, validating its shape: a pod is not trusted."""
    text, facts = result.get("text"), result.get("facts", {})
    if not isinstance(text, str) or not isinstance(facts, dict):
        raise ToolError("environment", "the tool server gave an answer that makes no sense")
    return ToolOutcome(
        sanitize_text(text), facts={str(key): value for key, value in facts.items() if _is_storable(value)}
    )


def _is_storable(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= MAX_FACT and sanitize_text(value) == value
    return value is None or isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))


class _ServerConnection:
    """One run of the server: its process, and the pending requests."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.closed: ToolServerDied | PodError | None = None
        self.stderr = bytearray()
        self.stderr_bytes = self.strays = 0
        self.pending: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.numbers = itertools.count(1)
        self.writing = asyncio.Lock()  # a long line is written in parts
        self.pending[0] = asyncio.get_running_loop().create_future()  # the hello message
        self.reader = asyncio.create_task(self._read())

    async def hello(self, config: str, timeout: float) -> dict[str, Any]:
        """Send the configuration and wait for the hello message."""
        try:
            with contextlib.suppress(ToolServerDied):  # it ended before reading; the reader has the reason
                await self.write(config.encode() + b"\n")
            response = await asyncio.wait_for(self.pending[0], timeout)
        except TimeoutError:
            await self.kill()
            raise ToolServerDied(f"it said nothing for {timeout:g} s") from None
        hello = response.get("hello")
        return hello if isinstance(hello, dict) else {}

    async def exchange(self, operation: str, arguments: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """Send one request line and wait for its response."""
        number = next(self.numbers)
        line = json.dumps({"id": number, "do": operation, "with": arguments, "limit_s": limit_s}) + "\n"
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.pending[number] = future
        written = False
        try:
            async with asyncio.timeout(limit_s + GRACE_S):
                await self.write(line.encode())
                written = True
                return await future
        except asyncio.CancelledError:
            if written:
                with contextlib.suppress(EtudeError):
                    await self.write(json.dumps({"cancel": number}).encode() + b"\n")
            else:
                await self.kill()  # it received half a line
            raise
        finally:
            self.pending.pop(number, None)

    async def write(self, data: bytes) -> None:
        try:
            async with self.writing:
                if self.closed is None:
                    await self.job.write(data)
                    return
        except PodGone:
            raise
        except PodError as error:  # the process ended or closed its input
            self.closed = self.closed or ToolServerDied(str(error))
        assert self.closed is not None
        raise self.closed

    async def _read(self) -> None:
        buffer = bytearray()
        reason: ToolServerDied | PodError = ToolServerDied("it ended")
        try:
            async for stream, data in self.job.output():
                if stream == "stderr":
                    self.stderr_bytes += len(data)
                    if self.stderr_bytes > MAX_NOISE:
                        raise ToolServerDied("it prints without end")
                    self.stderr += data
                    del self.stderr[:-MAX_ERRORS]
                    continue
                buffer += data
                if b"\n" in data:
                    *lines, rest = bytes(buffer).split(b"\n")
                    buffer[:] = rest
                    for line in lines:
                        self._receive(line)
                elif len(buffer) > MAX_LINE:
                    raise ToolServerDied("it gave more than can be carried")
            result = await self.job.wait()
            printed = self.stderr.decode("utf-8", "replace").strip()
            last = printed.splitlines()[-1] if printed else f"exit code {result.exit_code}"
            reason = ToolServerDied(last[:300])
        except (ToolServerDied, PodError) as error:
            reason = error
        except (ValueError, RecursionError):  # not JSON
            reason = ToolServerDied("it does not speak as it should")
        self._close(reason)
        with contextlib.suppress(PodError):
            await self.job.signal(9)  # a faulty server may keep writing

    def _receive(self, line: bytes) -> None:
        response = json.loads(line)
        if not isinstance(response, dict):
            raise ToolServerDied("it does not speak as it should")
        number = response.get("id", 0)
        future = self.pending.get(number) if isinstance(number, int) else None
        if future is not None and not future.done():
            future.set_result(response)
        else:
            self.strays += 1
            if self.strays > MAX_STRAYS:
                raise ToolServerDied("it speaks without being asked")

    def _close(self, reason: "ToolServerDied | PodError") -> None:
        self.closed = self.closed or reason
        for future in self.pending.values():
            if not future.done():
                future.set_exception(reason)
                future.exception()  # may never be awaited

    async def kill(self) -> None:
        """Kill the server and wait briefly for its end."""
        self._close(ToolServerDied("it was ended"))
        with contextlib.suppress(PodError, TimeoutError):
            if not isinstance(self.closed, PodGone):
                await self.job.signal(9)
                await self.job.wait(GRACE_S)
        self.reader.cancel()
