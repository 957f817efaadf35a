"""Our line to the tool server of one pod: starts it, asks it, starts it again when something in the pod has ended it.

What comes back is a stranger's: lines are bounded, answers are checked to have the shape they should. A server that
dies fails the calls that were with it, as something that happened in the environment; a pod that is gone is not that,
and is raised as it is.
"""

import asyncio
import base64
import contextlib
import itertools
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast, get_args

from etude.errors import EtudeError
from etude.harness.tools.tool import ErrorClass, ToolError
from etude.harness.toolserver.bundle import digest, pack
from etude.pods.pod import Job, Pod, PodError, PodFileError, PodGone

START_S = 60.0  # on a machine that is drowning
GRACE_S = 10.0  # beyond what the server itself allows a request
MAX_LINE = 16 << 20  # bytes of an answer
MAX_TEXT = 200_000  # characters that a model may be given to read
MAX_STRAYS = 1000  # answers that nobody waits for, before it is taken to be spamming us
MAX_ERRORS = 4 << 10  # bytes of what the server printed before it died
MAX_NOISE = 8 << 20  # bytes that it may print at all
BATCH = 2 << 20  # bytes of files fetched at once

# Writes the server beside the state that is to outlive it; says where, and whether Python is there.
INSTALL = """\
umask 077; d="${TMPDIR:-/tmp}/.etude"; f="$d/server-%s.pyz"
mkdir -p "$d" && cat > "$f.new" && mv -f "$f.new" "$f" || exit 3
command -v python3 >/dev/null || exit 4
printf '%%s\\n' "$d"
"""


class ServerBug(EtudeError):
    """Something in the tool server failed that should not; the message holds its traceback."""


class ServerDied(EtudeError):
    """The server is not there any more, or does not speak as it should."""


class NotStarted(PodError):
    """The server ended before it said anything."""


class ToolServer:
    """The tool server of a pod."""

    def __init__(self, pod: Pod, root: str = "", names: Mapping[str, str] | None = None) -> None:
        self.pod, self.root = pod, root or pod.workdir
        self.names = dict(names or {})
        self.state = ""  # the server's own directory in the pod
        self.starts = 0
        self.seconds = 0.0  # that the pod was busy with requests
        self._busy = 0
        self._since = 0.0
        self._line: _Line | None = None
        self._starting = asyncio.Lock()

    # -- its life

    async def start(self) -> "_Line":
        """The line to a server that answers."""
        async with self._starting:
            if self._line is not None and self._line.over is None:
                return self._line
            if not self.state:
                await self._install()
            plan = json.dumps({"root": self.root, "state": self.state, "names": self.names})
            job = await self.pod.spawn(["python3", "-I", "-S", f"{self.state}/server-{digest()}.pyz"])
            self._line = line = _Line(job)
            try:
                hello = await line.hello(plan, START_S)
            except ServerDied as error:
                self._line = None
                self.state = ""  # install it anew next time: somebody may have damaged it
                raise NotStarted(f"pod {self.pod.id}: the tool server did not start: {error}") from None
            except BaseException:
                self._line = None
                await line.kill()
                raise
            self.root = str(hello.get("root", self.root))
            self.starts += 1
            return line

    async def _install(self) -> None:
        done = await self.pod.exec(["sh", "-c", INSTALL % digest()], stdin=pack(), timeout=START_S)
        if done.exit_code == 4:
            raise PodError(f"image {self.pod.image!r} has no python3, which the tool server needs; install Python 3.8+")
        where = done.stdout.strip()
        if not done.ok or not where.startswith("/"):
            what = (done.stderr.strip() or f"exit code {done.exit_code}")[-MAX_ERRORS:]
            raise PodError(f"pod {self.pod.id}: the tool server could not be written to a temporary directory: {what}")
        self.state = where

    async def stop(self) -> None:
        """End the server. Jobs go on; the next request starts another. A pod at rest is snapshotted at no cost."""
        async with self._starting:
            line, self._line = self._line, None
            if line is not None:
                await line.kill()

    # -- asking

    async def ask(self, do: str, given: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """Have it do something; `limit_s` is what the work itself may take. ToolError says what went wrong."""
        self._busy += 1
        if self._busy == 1:
            self._since = time.monotonic()
        try:
            return await self._ask(do, given, limit_s)
        finally:
            self._busy -= 1
            if not self._busy:
                self.seconds += time.monotonic() - self._since

    async def _ask(self, do: str, given: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        try:
            line = await self.start()
        except PodGone:
            raise
        except PodError as error:
            # One that ran before and cannot be started now is the environment's doing: no room for a process, say.
            ours = isinstance(error, (NotStarted, PodFileError)) or isinstance(error.__cause__, PodFileError)
            if not ours or not self.starts:
                raise
            raise ToolError("environment", f"the tool server cannot be started again: {error}") from error
        try:
            answer = await line.ask(do, given, limit_s)
        except TimeoutError:
            await line.kill()
            text = f"the tool server did not answer within {limit_s + GRACE_S:g} s and was started again"
            raise ToolError("timeout", f"{text}; whether the call did anything is not known") from None
        except (ServerDied, PodGone) as error:
            if isinstance(error, PodGone) and not await self._pod_lives():
                raise
            await line.kill()
            text = f"the tool server stopped while the call ran ({error}) and is started again"
            raise ToolError("environment", f"{text}; whether the call did anything is not known") from None
        if "error" in answer:
            raise _failure(answer["error"])
        result = answer.get("ok")
        if not isinstance(result, dict):
            await line.kill()
            raise ToolError("environment", "the tool server gave an answer that makes no sense and was started again")
        return result

    async def _pod_lives(self) -> bool:
        """Whether it was only the server's line that broke, as when somebody seals the pod's files for a snapshot."""
        try:
            await self.pod.stat("/")
        except PodError:
            return False
        return True

    async def contents(self, paths: Sequence[str]) -> dict[str, bytes]:
        """Files of the workspace by path; those that cannot be read any more are left out."""
        found: dict[str, bytes] = {}
        wanted = list(paths)
        while wanted:
            result = await self.ask("contents", {"paths": wanted, "most": BATCH}, 60.0)
            try:
                taken = min(max(1, int(result["taken"])), len(wanted))
                files = {
                    path: base64.b64decode(result["files"][path]) for path in wanted[:taken] if path in result["files"]
                }
            except (KeyError, TypeError, ValueError, AttributeError):
                raise ToolError("environment", "the tool server gave files that cannot be read") from None
            found |= files
            wanted = wanted[taken:]
        return found


def _failure(error: Any) -> EtudeError:
    if not isinstance(error, dict) or error.get("kind") not in get_args(ErrorClass):
        return ToolError("environment", "the tool server gave an error that makes no sense")
    if error["kind"] == "bug":
        return ServerBug(f"{error.get('message')}\n{error.get('trace')}")
    return ToolError(cast(ErrorClass, error["kind"]), readable(str(error.get("message"))))


def readable(text: str) -> str:
    """Text that can be encoded, and is not endless."""
    if len(text) > MAX_TEXT:
        text = f"{text[:MAX_TEXT]}\n[cut: {len(text) - MAX_TEXT:,} more characters]"
    return text.encode("utf-8", "replace").decode()


class _Line:
    """One run of the server: its job, and who waits for which answer."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.over: ServerDied | PodError | None = None
        self.errors = bytearray()
        self.noise = self.strays = 0
        self.waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.numbers = itertools.count(1)
        self.writing = asyncio.Lock()  # a long line goes in parts, and nothing may come between
        self.waiting[0] = asyncio.get_running_loop().create_future()  # its greeting
        self.reader = asyncio.create_task(self._read())

    async def hello(self, plan: str, timeout: float) -> dict[str, Any]:
        """Tell it where to work, and wait until it does."""
        try:
            with contextlib.suppress(ServerDied):  # it ended before it read that; the reader knows why
                await self._write(plan.encode() + b"\n")
            answer = await asyncio.wait_for(self.waiting[0], timeout)
        except TimeoutError:
            await self.kill()
            raise ServerDied(f"it said nothing for {timeout:g} s") from None
        hello = answer.get("hello")
        return hello if isinstance(hello, dict) else {}

    async def ask(self, do: str, given: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        number = next(self.numbers)
        line = json.dumps({"id": number, "do": do, "with": given, "limit_s": limit_s}) + "\n"
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.waiting[number] = future
        written = False
        try:
            async with asyncio.timeout(limit_s + GRACE_S):
                await self._write(line.encode())
                written = True
                return await future
        except asyncio.CancelledError:
            if written:
                with contextlib.suppress(EtudeError):
                    await self._write(json.dumps({"cancel": number}).encode() + b"\n")
            else:
                await self.kill()  # half a line is with it
            raise
        finally:
            self.waiting.pop(number, None)

    async def _write(self, data: bytes) -> None:
        try:
            async with self.writing:
                if self.over is None:
                    await self.job.write(data)
                    return
        except PodGone:
            raise
        except PodError as error:  # it has ended, or closed its input
            self.over = self.over or ServerDied(str(error))
        assert self.over is not None
        raise self.over

    async def _read(self) -> None:
        buffer = bytearray()
        reason: ServerDied | PodError = ServerDied("it ended")
        try:
            async for stream, data in self.job.output():
                if stream == "stderr":
                    self.noise += len(data)
                    if self.noise > MAX_NOISE:
                        raise ServerDied("it prints without end")
                    self.errors += data
                    del self.errors[:-MAX_ERRORS]
                    continue
                buffer += data
                if b"\n" in data:
                    *lines, rest = bytes(buffer).split(b"\n")
                    buffer[:] = rest
                    for line in lines:
                        self._take(line)
                elif len(buffer) > MAX_LINE:
                    raise ServerDied("it gave more than can be carried")
            result = await self.job.wait()
            said = self.errors.decode("utf-8", "replace").strip()
            last = said.splitlines()[-1] if said else f"exit code {result.exit_code}"
            reason = ServerDied(last[:300])
        except (ServerDied, PodError) as error:
            reason = error
        except (ValueError, RecursionError):  # not JSON
            reason = ServerDied("it does not speak as it should")
        self._end(reason)
        with contextlib.suppress(PodError):
            await self.job.signal(9)  # one that went wrong may go on talking

    def _take(self, line: bytes) -> None:
        answer = json.loads(line)
        if not isinstance(answer, dict):
            raise ServerDied("it does not speak as it should")
        number = answer.get("id", 0)
        future = self.waiting.get(number) if isinstance(number, int) else None
        if future is not None and not future.done():
            future.set_result(answer)
        else:
            self.strays += 1
            if self.strays > MAX_STRAYS:
                raise ServerDied("it speaks without being asked")

    def _end(self, reason: "ServerDied | PodError") -> None:
        self.over = self.over or reason
        for future in self.waiting.values():
            if not future.done():
                future.set_exception(reason)
                future.exception()  # may never be awaited

    async def kill(self) -> None:
        """End it, and do not wait for long."""
        self._end(ServerDied("it was ended"))
        with contextlib.suppress(PodError, TimeoutError):
            if not isinstance(self.over, PodGone):
                await self.job.signal(9)
                await self.job.wait(GRACE_S)
        self.reader.cancel()
