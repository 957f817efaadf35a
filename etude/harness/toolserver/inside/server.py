"""The tool server's loop: requests come as lines of JSON, answers go out as such, in whatever order they are ready.

One thread. What is quick is done at once; what may take long, or for ever, is done by a forked child with a deadline,
so that no expression, however bad, stops anything else: threads could not do that, for matching holds Python's lock. A
fork is safe because there are no threads. A request is cancelled by ending whatever works on it.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import resource
import selectors
import signal
import sys
import time
import traceback
from importlib import import_module
from typing import TYPE_CHECKING, Any

from etude.harness.toolserver.inside.paths import Refusal, ToolWorkspace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from etude.harness.toolserver.inside.jobs import ShellJobs

    Cancel = Callable[[], None]

MAX_REQUEST = 64 << 20  # bytes of a line
MAX_ANSWER = 12 << 20
MAX_MEMORY = 1 << 30  # bytes of address space of a child
QUICK_READ = 4 << 20  # bytes of a file that is read at once
LOAD_S = 0.02  # after which the rest of the program is loaded, if there is time

# what does it -> module and function; imported when first asked for
QUICK = {
    "read_file": ("reading", "read_file"),
    "list_dir": ("reading", "list_dir"),
    "search_replace": ("editing", "search_replace"),
    "write": ("editing", "write"),
    "delete_file": ("editing", "delete_file"),
}
SLOW = {
    "grep": ("grep", "grep"),
    "glob_file_search": ("grep", "glob_file_search"),
    "listing": ("listing", "listing"),
    "contents": ("listing", "contents"),
    "lints": ("lints", "lints"),
}
LATER = ("reading", "editing", "jobs", "supervise", "grep", "listing", "lints", "watch")
JOBS = {"run": "run", "await": "wait", "kill": "kill"}


class ToolServerProcess:
    """Everything that is going on."""

    def __init__(self, workspace: ToolWorkspace, answers: int) -> None:
        self.workspace, self.answers = workspace, answers
        self.selector = selectors.DefaultSelector()
        self.timers: list[tuple[float, int, Callable[[], None]]] = []
        self.count = 0
        self.working: dict[int, Cancel] = {}  # request -> how to stop it
        self.all_jobs: ShellJobs | None = None

    # -- what its parts use

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Call it then."""
        self.count += 1
        heapq.heappush(self.timers, (when, self.count, call))

    def listen(self, fd: int, done: Callable[[bytes], None]) -> None:
        """Read a pipe to its end, then hand over what came."""
        os.set_blocking(fd, False)
        parts: list[bytes] = []

        def readable() -> None:
            try:
                data = os.read(fd, 1 << 18)
            except BlockingIOError:
                return
            parts.append(data)
            if not data or sum(map(len, parts)) > MAX_ANSWER:
                self.selector.unregister(fd)
                os.close(fd)
                done(b"".join(parts))

        self.selector.register(fd, selectors.EVENT_READ, readable)

    def fork(self, work: Callable[[int], None], done: Callable[[bytes], None], kept: int = -1) -> int:
        """Do it in a child, which may write to the pipe it is given; then hand over what it wrote.

        Of our descriptors it has none but `kept`, if that is given: then it is also to outlive us.
        """
        ours, theirs = os.pipe()
        try:
            pid = os.fork()
        except OSError:
            os.close(ours)
            os.close(theirs)
            raise
        if not pid:
            self._be_child(work, theirs, kept)
        os.close(theirs)
        if kept >= 0:  # here too, so that it is done before anybody ends our group
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)
        self.listen(ours, done)
        return pid

    def _be_child(self, work: Callable[[int], None], pipe: int, kept: int) -> None:
        code = 1
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            null = os.open("/dev/null", os.O_RDWR)
            os.dup2(null, 0)
            os.dup2(null, 1)
            close_others((pipe, kept))
            if kept >= 0:
                os.setpgid(0, 0)
                os.dup2(0, 2)
            work(pipe)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def kill(self, pid: int, number: int = signal.SIGKILL) -> None:
        """Signal a child; the kernel reaps it."""
        with contextlib.suppress(OSError):
            os.kill(pid, number)

    @property
    def jobs(self) -> ShellJobs:
        if self.all_jobs is None:
            from etude.harness.toolserver.inside.jobs import ShellJobs

            self.all_jobs = ShellJobs(self.workspace, self)
        return self.all_jobs

    def load(self) -> None:
        """Import what is not needed yet, a part at a time between requests: the file it comes from may be removed."""
        for module in LATER:
            name = f"etude.harness.toolserver.inside.{module}"
            if name not in sys.modules:
                import_module(name)
                self.at(time.monotonic() + 0.001, self.load)
                return

    # -- requests

    def serve(self, requests: int) -> None:
        """Until nobody can ask any more."""
        os.set_blocking(requests, False)
        buffer = bytearray()
        more = True

        def readable() -> None:
            nonlocal more
            data = os.read(requests, 1 << 18)
            more = bool(data)
            buffer.extend(data)
            if b"\n" in data:
                *lines, rest = bytes(buffer).split(b"\n")
                buffer[:] = rest
                for line in lines:
                    self.take(line)
            elif len(buffer) > MAX_REQUEST:
                raise SystemExit("a request is too long")

        self.selector.register(requests, selectors.EVENT_READ, readable)
        self.at(time.monotonic() + LOAD_S, self.load)
        while more:
            wait = max(0.0, self.timers[0][0] - time.monotonic()) if self.timers else None
            due = [key.data for key, _ in self.selector.select(wait)]
            while self.timers and self.timers[0][0] <= time.monotonic():
                due.append(heapq.heappop(self.timers)[2])
            for call in due:
                try:
                    call()
                except Exception:  # whatever it was for, the rest goes on; the caller's time limit answers
                    traceback.print_exc()

    def take(self, line: bytes) -> None:
        """Begin what a request asks for."""
        request = json.loads(line)
        if "cancel" in request:
            if cancel := self.working.pop(request["cancel"], None):
                cancel()
            return
        number, do, given = request["id"], request["do"], request["with"]
        try:
            if do in JOBS:
                self.working[number] = lambda: None
                cancel = getattr(self.jobs, JOBS[do])(given, lambda result: self.conclude(number, result))
                if number in self.working:
                    self.working[number] = cancel
            elif do in SLOW or (do == "read_file" and self.is_large(given)):
                self.delegate(number, do, given, float(request["limit_s"]))
            else:
                self.conclude(number, lambda: handler(QUICK, do)(self.workspace, given))
        except Exception as error:
            self.send(number, failure(error))

    def is_large(self, given: dict[str, Any]) -> bool:
        try:
            return os.stat(self.workspace.resolve(given["target_file"])).st_size > QUICK_READ
        except (OSError, Refusal):
            return False

    def delegate(self, number: int, do: str, given: dict[str, Any], limit_s: float) -> None:
        """Have a child do it, and kill the child when it takes too long."""
        work = handler({**QUICK, **SLOW}, do)

        def child(pipe: int) -> None:
            if do != "lints":  # which starts a program that takes as much as it likes
                resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
            try:
                body = {"ok": work(self.workspace, given)}
            except Exception as error:
                body = failure(error)
            data = json.dumps(body).encode()
            while data:
                data = data[os.write(pipe, data) :]

        def done(data: bytes) -> None:
            if self.working.pop(number, None) is None:
                return
            if len(data) > MAX_ANSWER or not data.endswith(b"}"):
                what = "gave more than can be carried" if len(data) > MAX_ANSWER else "ended before it was done"
                self.send(number, failure(Refusal("environment", f"the search {what}; narrow it")))
            else:
                self.write(b'{"id":%d,' % number + data[1:] + b"\n")

        def stop() -> None:
            if self.working.pop(number, None) is not None:
                self.kill(pid)
                text = f"it was not done after {limit_s:g} seconds; narrow it, or use a simpler expression"
                self.send(number, failure(Refusal("timeout", text)))

        pid = self.fork(child, done)
        self.working[number] = lambda: self.kill(pid)
        self.at(time.monotonic() + limit_s, stop)

    def conclude(self, number: int, result: Callable[[], dict[str, Any]]) -> None:
        """Answer with what `result` gives."""
        try:
            body = {"ok": result()}
        except Exception as error:
            body = failure(error)
        self.send(number, body)

    def send(self, number: int, body: dict[str, Any]) -> None:
        self.working.pop(number, None)
        self.write(json.dumps({"id": number, **body}).encode() + b"\n")

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self.answers, view) :]


def close_others(kept: Iterable[int]) -> None:
    """Close every descriptor but the standard ones and `kept`."""
    try:
        found = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        found = list(range(3, 1024))
    for fd in found:
        if fd > 2 and fd not in kept:
            with contextlib.suppress(OSError):
                os.close(fd)


def handler(table: dict[str, tuple[str, str]], do: str) -> Callable[[ToolWorkspace, dict[str, Any]], dict[str, Any]]:
    """The function that does it."""
    module, name = table[do]
    function: Callable[[ToolWorkspace, dict[str, Any]], dict[str, Any]]
    function = getattr(import_module(f"etude.harness.toolserver.inside.{module}"), name)
    return function


def failure(error: Exception) -> dict[str, Any]:
    """An error as an answer: what the model may read, or a bug of ours with where it is."""
    if isinstance(error, Refusal):
        return {"error": {"kind": error.kind, "message": str(error)}}
    if isinstance(error, MemoryError):
        return {"error": {"kind": "environment", "message": "it needs more memory than there is; narrow it"}}
    if isinstance(error, OSError):
        return {"error": {"kind": "environment", "message": str(error.strerror or error).lower()}}
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return {"error": {"kind": "bug", "message": f"{type(error).__name__}: {error}", "trace": trace[-4000:]}}


def main() -> None:
    """Start: the first line we are given says where we work, the first we write that we do.

    Nothing of it is in our command line: a `pkill -f` of whatever a session is about must not find us.
    """
    answers = os.dup(1)
    requests = os.dup(0)
    with open(requests, "rb", buffering=0, closefd=False) as first:
        plan = json.loads(first.readline())
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.dup2(2, 1)  # whatever prints by mistake does not speak for us
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as file:
        file.write("etude-tools")  # not among what `pkill python` means
    if not os.path.isdir(plan["root"]):
        raise SystemExit(f"the workspace {plan['root']} is not a directory")
    workspace = ToolWorkspace(plan["root"], plan["state"], plan["names"])
    os.chdir("/")  # wherever we stand cannot be removed
    server = ToolServerProcess(workspace, answers)
    version = ".".join(map(str, sys.version_info[:3]))
    server.write(json.dumps({"hello": {"root": workspace.root, "python": version}}).encode() + b"\n")
    server.serve(requests)
