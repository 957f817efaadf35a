"""The event loop of the tool server: JSON lines in, JSON lines out, in the order in which results are ready.

Single-threaded. Quick requests run in the loop; slow ones run in a forked child with a deadline, so that no regular
expression can block anything else (a thread could not do that: matching holds the GIL). Forking is safe because there
are no threads. Cancelling a request kills its child.

Imports are most of the time until the first answer: what only some requests need is imported by them.
"""

from __future__ import annotations

import os
import select
import sys
import time

from etude.harness.toolserver.inside.paths import Refusal, ToolWorkspace
from etude.pod_stdlib import dumps, loads, suppress

TYPE_CHECKING = False  # importing typing would take a tenth of the start time
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Iterable
    from typing import Any

    from etude.harness.toolserver.inside.jobs import ShellJobs

    Cancel = Callable[[], None]
else:
    import _signal as signal  # the same functions, without the enumerations

MAX_REQUEST = 64 << 20  # bytes of a request line
MAX_RESPONSE = 12 << 20
MAX_MEMORY = 1 << 30  # bytes of address space of a child
QUICK_READ = 4 << 20  # bytes of a file that is read in the loop
LOAD_S = 0.02  # after which the remaining modules are imported between requests

# operation -> module and function; imported on first use
QUICK = {
    "read_file": ("reading", "read_file"),
    "list_dir": ("reading", "list_dir"),
    "search_replace": ("editing", "search_replace"),
    "write": ("editing", "write"),
    "delete_file": ("editing", "delete_file"),
}
SLOW = {
    "grep": ("grep", "grep"),
    "glob_file_search": ("listing", "glob_file_search"),
    "listing": ("listing", "listing"),
    "lints": ("lints", "lints"),
}
# tool -> modules that its operations need, if it is in neither table
OTHERS = {
    "run_terminal_cmd": ("jobs", "supervise"),
    "await": ("watch",),
    "read_lints": ("lints",),
    "codebase_search": ("listing",),
}
JOBS = {"run": "run", "await": "wait", "kill": "kill"}


class ToolServerProcess:
    """The state of the event loop."""

    def __init__(self, workspace: ToolWorkspace, responses: int) -> None:
        self.workspace, self.responses = workspace, responses
        self.poll = select.poll()
        self.readers: dict[int, Callable[[], None]] = {}  # descriptor -> what reads it
        self.timers: list[tuple[float, int, Callable[[], None]]] = []  # sorted
        self.count = 0
        self.active: dict[int, Cancel] = {}  # request -> its cancel function
        self._jobs: ShellJobs | None = None

    # -- event loop

    def call_at(self, when: float, call: Callable[[], None]) -> None:
        """Run `call` at a monotonic time."""
        self.count += 1
        self.timers.append((when, self.count, call))
        self.timers.sort()

    def read_to_end(self, fd: int, done: Callable[[bytes], None]) -> None:
        """Read a pipe to its end, then pass its data to `done`."""
        os.set_blocking(fd, False)
        parts: list[bytes] = []

        def readable() -> None:
            try:
                data = os.read(fd, 1 << 18)
            except BlockingIOError:
                return
            parts.append(data)
            if not data or sum(map(len, parts)) > MAX_RESPONSE:
                self.poll.unregister(fd)
                del self.readers[fd]
                os.close(fd)
                done(b"".join(parts))

        self.read_with(fd, readable)

    def read_with(self, fd: int, readable: Callable[[], None]) -> None:
        """Call `readable` whenever a descriptor has data or is closed."""
        self.readers[fd] = readable
        self.poll.register(fd, select.POLLIN)

    def fork(self, work: Callable[[int], None], done: Callable[[bytes], None], kept_fd: int = -1) -> int:
        """Run `work` in a child process with a pipe to write to; then pass what it wrote to `done`.

        The child keeps no other descriptor but `kept_fd`. If one is given, the child outlives the server.
        """
        parent_end, child_end = os.pipe()
        try:
            pid = os.fork()
        except OSError:
            os.close(parent_end)
            os.close(child_end)
            raise
        if not pid:
            self._run_child(work, child_end, kept_fd)
        os.close(child_end)
        if kept_fd >= 0:  # in the parent too, so that it happens before our process group can be killed
            with suppress(OSError):
                os.setpgid(pid, pid)
        self.read_to_end(parent_end, done)
        return pid

    def _run_child(self, work: Callable[[int], None], pipe: int, kept_fd: int) -> None:
        code = 1
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            null = os.open("/dev/null", os.O_RDWR)
            os.dup2(null, 0)
            os.dup2(null, 1)
            close_others((pipe, kept_fd))
            if kept_fd >= 0:
                os.setpgid(0, 0)
                os.dup2(0, 2)
            work(pipe)
            code = 0
        except BaseException:
            print_exception()
        finally:
            os._exit(code)

    def kill(self, pid: int, number: int = signal.SIGKILL) -> None:
        """Signal a child; the kernel reaps it."""
        with suppress(OSError):
            os.kill(pid, number)

    def handle_events(self) -> None:
        """Wait for data or the next timer, and handle all that are due."""
        wait = max(0.0, self.timers[0][0] - time.monotonic()) * 1000 + 1 if self.timers else None
        due = [self.readers[fd] for fd, _ in self.poll.poll(wait)]
        while self.timers and self.timers[0][0] <= time.monotonic():
            due.append(self.timers.pop(0)[2])
        for call in due:
            try:
                call()
            except Exception:  # other requests continue; this one ends with the client's time limit
                print_exception()

    @property
    def jobs(self) -> ShellJobs:
        if self._jobs is None:
            from etude.harness.toolserver.inside.jobs import ShellJobs

            self._jobs = ShellJobs(self.workspace, self)
        return self._jobs

    def load(self) -> None:
        """Import the modules of the session's tools one by one between requests."""
        tables = {**QUICK, **SLOW}
        for tool in self.workspace.names:
            for module in OTHERS.get(tool, tables.get(tool, ())[:1]):
                name = f"etude.harness.toolserver.inside.{module}"
                if name not in sys.modules:
                    __import__(name)
                    self.call_at(time.monotonic() + 0.001, self.load)
                    return

    # -- requests

    def serve(self, requests: int) -> None:
        """Serve until the request pipe closes."""
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
                    self.handle(line)
            elif len(buffer) > MAX_REQUEST:
                raise SystemExit("a request is too long")

        self.read_with(requests, readable)
        self.call_at(time.monotonic() + LOAD_S, self.load)
        while more:
            self.handle_events()

    def handle(self, line: bytes) -> None:
        """Start a request."""
        request = loads(line)
        if "cancel" in request:
            if cancel := self.active.pop(request["cancel"], None):
                cancel()
            return
        number, operation, arguments = request["id"], request["do"], request["with"]
        try:
            if operation in JOBS:
                self.active[number] = lambda: None
                cancel = getattr(self.jobs, JOBS[operation])(arguments, lambda result: self.respond(number, result))
                if number in self.active:
                    self.active[number] = cancel
            elif operation in SLOW or (operation == "read_file" and self.is_large(arguments)):
                self.run_in_child(number, operation, arguments, float(request["limit_s"]))
            else:
                self.respond(number, lambda: handler(QUICK, operation)(self.workspace, arguments))
        except Exception as error:
            self.send(number, failure(error))

    def is_large(self, arguments: dict[str, Any]) -> bool:
        try:
            return os.stat(self.workspace.resolve(arguments["target_file"])).st_size > QUICK_READ
        except (OSError, Refusal):
            return False

    def run_in_child(self, number: int, operation: str, arguments: dict[str, Any], limit_s: float) -> None:
        """Run the operation in a child process, and kill the child at the time limit."""
        work = handler({**QUICK, **SLOW}, operation)

        def child(pipe: int) -> None:
            import resource

            if operation != "lints":  # which starts ruff, whose address space is not limited
                resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
            seconds = int(limit_s) + 1  # of the programs that it starts too, which are not killed with it
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
            try:
                body = {"ok": work(self.workspace, arguments)}
            except Exception as error:
                body = failure(error)
            data = dumps(body).encode()
            while data:
                data = data[os.write(pipe, data) :]

        def done(data: bytes) -> None:
            if self.active.pop(number, None) is None:
                return
            if len(data) > MAX_RESPONSE or not data.endswith(b"}"):
                what = "gave more than can be carried" if len(data) > MAX_RESPONSE else "ended before it was done"
                self.send(number, failure(Refusal("environment", f"the search {what}; narrow it")))
            else:
                self.write(b'{"id":%d,' % number + data[1:] + b"\n")

        def stop() -> None:
            if self.active.pop(number, None) is not None:
                self.kill(pid)
                text = f"it was not done after {limit_s:g} seconds; narrow it, or use a simpler expression"
                self.send(number, failure(Refusal("timeout", text)))

        pid = self.fork(child, done)
        self.active[number] = lambda: self.kill(pid)
        self.call_at(time.monotonic() + limit_s, stop)

    def respond(self, number: int, result: Callable[[], dict[str, Any]]) -> None:
        """Send the return value of `result`, or its error."""
        try:
            body = {"ok": result()}
        except Exception as error:
            body = failure(error)
        self.send(number, body)

    def send(self, number: int, body: dict[str, Any]) -> None:
        self.active.pop(number, None)
        self.write(dumps({"id": number, **body}).encode() + b"\n")

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self.responses, view) :]


def close_others(kept: Iterable[int]) -> None:
    """Close every descriptor but the standard ones and `kept`."""
    try:
        found = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        found = list(range(3, 1024))
    for fd in found:
        if fd > 2 and fd not in kept:
            with suppress(OSError):
                os.close(fd)


def print_exception() -> None:
    import traceback

    traceback.print_exc()


def handler(
    table: dict[str, tuple[str, str]], operation: str
) -> Callable[[ToolWorkspace, dict[str, Any]], dict[str, Any]]:
    """Return the function that implements an operation."""
    module, name = table[operation]
    function: Callable[[ToolWorkspace, dict[str, Any]], dict[str, Any]]
    function = getattr(__import__(f"etude.harness.toolserver.inside.{module}", fromlist=["_"]), name)
    return function


def failure(error: Exception) -> dict[str, Any]:
    """Return an error as a response: a message for the model, or a bug with its traceback."""
    if isinstance(error, Refusal):
        return {"error": {"kind": error.kind, "message": str(error)}}
    if isinstance(error, MemoryError):
        return {"error": {"kind": "environment", "message": "it needs more memory than there is; narrow it"}}
    if isinstance(error, ImportError):  # a session can remove the standard library
        return {"error": {"kind": "environment", "message": f"the python3 of this machine is damaged: {error}"}}
    if isinstance(error, OSError):
        return {"error": {"kind": "environment", "message": str(error.strerror or error).lower()}}
    import traceback

    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return {"error": {"kind": "bug", "message": f"{type(error).__name__}: {error}", "trace": trace[-4000:]}}


def state_directory() -> str:
    """Return the directory of what the server keeps for a restart: outside the workspace, for its user only."""
    directory = os.path.join(os.environ.get("TMPDIR") or "/tmp", ".etude")
    before = os.umask(0o077)
    try:
        os.makedirs(directory, exist_ok=True)
    except OSError as error:
        raise SystemExit(f"its directory {directory} cannot be made: {error.strerror}") from None
    finally:
        os.umask(before)
    return directory


def main() -> None:
    """Start the server: read the configuration, the next line of stdin, write the hello message, serve.

    The configuration is not in the command line: a `pkill -f` in a session must not match the server.
    """
    responses = os.dup(1)
    requests = os.dup(0)
    config = loads(sys.stdin.buffer.readline())  # behind the program; further requests come after the hello message
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.dup2(2, 1)  # stray prints go to stderr, not into the protocol
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps children
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(OSError), open("/proc/self/comm", "w") as file:
        file.write("etude-tools")  # so that `pkill python` does not match
    if not os.path.isdir(config["root"]):
        raise SystemExit(f"the workspace {config['root']} is not a directory")
    workspace = ToolWorkspace(config["root"], config["state"] or state_directory(), config["names"])
    os.chdir("/")  # the current directory must not be one that can be removed
    server = ToolServerProcess(workspace, responses)
    version = ".".join(map(str, sys.version_info[:3]))
    hello = {"root": workspace.root, "state": workspace.state, "python": version}
    server.write(dumps({"hello": hello}).encode() + b"\n")
    server.serve(requests)
