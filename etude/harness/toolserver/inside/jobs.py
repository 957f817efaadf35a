"""The shell commands of a session as jobs: each has a number, a log and a supervisor process.

A command that does not end in time continues in the background. A restarted server finds jobs again by their files.
"""

from __future__ import annotations

import fcntl
import os
import time

from etude.harness.toolserver.inside import output, shell
from etude.harness.toolserver.inside.paths import Refusal, ToolWorkspace
from etude.pod_stdlib import loads, suppress

TYPE_CHECKING = False  # typing is slow to import
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable
    from typing import Any

    from etude.harness.toolserver.inside.server import ToolServerProcess

    Respond = Callable[[Callable[[], dict[str, Any]]], None]
else:
    import _signal as signal

POLL_S = 0.1  # interval for jobs of an earlier server, whose end is not reported to this one
KILL_S = 4.0  # to wait for a terminated job; it is killed by force after a second
MAX_LOGS = 256 << 20  # bytes of all logs together; beyond that, the oldest are removed


class ShellJob:
    """One started command."""

    def __init__(self, directory: str, number: int) -> None:
        self.number = number
        self.base = os.path.join(directory, str(number))
        self.log = self.base + ".log"
        self.pid = 0  # of the supervisor
        self.started_here = False  # by this server, to which its end is reported
        self.foreground = False
        self.shown = 0  # bytes of the log that the model has seen
        self.ended: dict[str, Any] | None = None
        self.waits: list[PendingWait] = []  # requests that wait for its end
        self.cwd_before = ""  # of the shell

    def size(self, at_end: bool = False) -> int:
        """Return the size of the log: now, or `at_end` of the command (its background processes may still print)."""
        return int(self.ended["size"]) if at_end and self.ended and "size" in self.ended else output.size_of(self.log)

    def refresh(self) -> None:
        """Read from its files whether it has ended; for jobs of an earlier server."""
        if self.started_here or self.ended is not None:
            return
        # checked first: the supervisor writes the other file before it releases the lock
        alive = is_locked(self.base + ".lock")
        try:
            with open(self.base + ".done", encoding="utf-8") as file:
                found = loads(file.read())
            self.ended = {**found, "code": int(found["code"]), "size": int(found["size"])}
        except (OSError, ValueError, KeyError, TypeError):
            self.ended = None if alive else {"lost": True}

    def mark_shown(self, end: int) -> None:
        """Remember how much of the log the model has seen."""
        self.shown = end
        with suppress(OSError), open(self.base + ".shown", "w") as file:
            file.write(str(self.shown))


def is_locked(path: str) -> bool:
    """Return whether a living process in this pod, the supervisor of a job, holds the lock."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False


class ShellJobs:
    """All jobs, and the state of the shell they share."""

    def __init__(self, workspace: ToolWorkspace, server: ToolServerProcess) -> None:
        self.workspace, self.server = workspace, server
        self.directory = os.path.join(workspace.state, "jobs")
        os.makedirs(self.directory, mode=0o700, exist_ok=True)
        self.shell = shell.ShellState(workspace.root, workspace.state)
        numbers = [int(name.split(".")[0]) for name in os.listdir(self.directory) if name.split(".")[0].isdigit()]
        self.last = max(numbers, default=0)
        self.jobs: dict[int, ShellJob] = {}

    # -- starting

    def run(self, arguments: dict[str, Any], respond: Respond) -> Callable[[], None]:
        """Start a command and respond when it ends or after `block_s`; return its cancel function."""
        if reason := shell.missing_reason():
            raise Refusal("environment", reason)
        os.makedirs(self.directory, mode=0o700, exist_ok=True)
        self.prune_logs()
        job, lock = self.create()
        block_s = float(arguments["block_s"])
        job.foreground = block_s > 0
        job.cwd_before = self.shell.directory()
        self.start(job, lock, arguments["command"], float(arguments["timeout_s"]))
        if not job.foreground:
            respond(lambda: self.report(job, "run"))
            return lambda: None
        return PendingWait(self, job, "run", respond).start(block_s)

    def create(self) -> tuple[ShellJob, int]:
        """Create a job with the next free number, and its lock; another server may use the directory too."""
        while True:
            self.last += 1
            job = ShellJob(self.directory, self.last)
            with suppress(FileExistsError):
                lock = os.open(job.base + ".lock", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                fcntl.flock(lock, fcntl.LOCK_EX)
                self.jobs[self.last] = job
                return job, lock

    def start(self, job: ShellJob, lock: int, command: str, timeout_s: float) -> None:
        """Fork the supervisor, which holds the lock while it lives, and read its report."""
        from etude.harness.toolserver.inside.supervise import Supervisor

        argv, environment = self.shell.command(job.base + ".state", command)
        spec = {"argv": argv, "env": environment, "cwd": job.cwd_before, "log": job.log, "done": job.base + ".done"}
        supervisor = Supervisor({**spec, "timeout_s": timeout_s})
        # The job may be terminated before its supervisor handles signals: until then SIGTERM stays blocked.
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            job.pid = self.server.fork(supervisor.run, lambda data: self.on_supervisor_exit(job, data), lock)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)
            os.close(lock)
        job.started_here = True
        with suppress(OSError), open(job.base + ".pid", "w") as file:
            file.write(str(job.pid))

    def prune_logs(self) -> None:
        """Remove the oldest logs when all together are too large."""
        numbers = sorted(int(name[:-4]) for name in os.listdir(self.directory) if name.endswith(".log"))
        sizes = {number: output.size_of(os.path.join(self.directory, f"{number}.log")) for number in numbers}
        total = sum(sizes.values())
        for number, size in sizes.items():
            if total <= MAX_LOGS:
                return
            with suppress(OSError):
                os.unlink(os.path.join(self.directory, f"{number}.log"))
                total -= size

    def on_supervisor_exit(self, job: ShellJob, data: bytes) -> None:
        """Store how the command ended as reported by the supervisor, or that the supervisor was killed."""
        try:
            job.ended = loads(data) if data else {"lost": True}
        except ValueError:
            job.ended = {"lost": True}
        if job.foreground and "code" in (job.ended or {}):
            self.shell.adopt(job.base + ".state")
        shell.remove_state(job.base + ".state")
        for waiting in list(job.waits):
            waiting.check()

    # -- wait and kill

    def find(self, arguments: dict[str, Any]) -> ShellJob:
        """Return the job with the requested number."""
        text = str(arguments["job_id"]).strip()
        number = int(text) if text.isdigit() and len(text) < 10 else 0
        if number in self.jobs:
            return self.jobs[number]
        if not 0 < number <= self.last:
            known = f"jobs 1 to {self.last} have been started" if self.last else "no job has been started yet"
            raise Refusal("environment", f"there is no job {text[:50]!r}; {known}")
        job = self.jobs[number] = ShellJob(self.directory, number)
        with suppress(OSError, ValueError), open(job.base + ".shown") as file:
            job.shown = int(file.read(20))
        with suppress(OSError, ValueError), open(job.base + ".pid") as file:
            job.pid = int(file.read(20))
        return job

    def wait(self, arguments: dict[str, Any], respond: Respond) -> Callable[[], None]:
        """Respond when the job ends, prints a line that matches `pattern`, or `block_s` have passed."""
        waiting = PendingWait(self, self.find(arguments), "await", respond)
        waiting.job.refresh()
        if (pattern := arguments.get("pattern")) and waiting.job.ended is None:
            from etude.harness.toolserver.inside.watch import watch

            log, shown = waiting.job.log, waiting.job.shown
            waiting.watcher = watch(self.server, log, shown, pattern, lambda: waiting.finish(matched=True))
        return waiting.start(float(arguments["block_s"]))

    def kill(self, arguments: dict[str, Any], respond: Respond) -> Callable[[], None]:
        """End a job with all its processes."""
        job = self.find(arguments)
        self.terminate(job)
        return PendingWait(self, job, "kill", respond).start(KILL_S)

    def terminate(self, job: ShellJob) -> None:
        """Signal the supervisor to end the job, if it lives: the lock shows that the pid is still its own."""
        if job.pid and is_locked(job.base + ".lock"):
            self.server.kill(job.pid, signal.SIGTERM)

    # -- reports

    def report(self, job: ShellJob, verb: str, matched: bool = False) -> dict[str, Any]:
        """Return the current state of a job as text for the model, and its facts."""
        job.refresh()
        running = job.ended is None
        where = self.shell.directory()
        facts: dict[str, Any] = {"job": str(job.number), "log": job.log, "running": running, "matched": matched}
        text, cut = ("", False)
        if verb != "run" or job.foreground:
            end = job.size(at_end=verb == "run")
            text, cut = output.excerpt(job.log, min(job.shown, end), end, job.log)
            job.mark_shown(end)
            text += (job.ended or {}).pop("unsaved", "")
        notes = []
        if running:
            job.foreground = False  # from now on it does not change the shell state
            notes.append(self.describe_running(job, verb, matched))
        else:
            assert job.ended is not None
            facts.update((key, job.ended[key]) for key in ("timed_out", "killed", "lost", "failed") if key in job.ended)
            facts["exit_code"] = job.ended.get("code")
            notes.append(self.describe_end(job.ended, bool(text), verb))
        if verb == "run" and not running and where != job.cwd_before:
            notes.append(f"[the shell is now in {self.workspace.display(where)}]")
        if text and not text.endswith("\n"):
            text += "\n"
        return {"text": text + "\n".join(notes), "facts": {**facts, "cut": cut, "cwd": self.workspace.display(where)}}

    def describe_running(self, job: ShellJob, verb: str, matched: bool) -> str:
        if matched:
            return f"[the pattern was found; job {job.number} is still running]"
        if verb != "run":
            return f"[job {job.number} is still running]"
        names = self.workspace.names
        ways = [f"{verb} with {names[tool]}" for verb, tool in (("Wait", "await"), ("end it", "kill")) if tool in names]
        how = f" {', '.join(ways)}." if ways else ""
        return f"[running in the background as job {job.number}; its output goes to {job.log}.{how}]"

    def describe_end(self, ended: dict[str, Any], printed: bool, verb: str) -> str:
        if "failed" in ended:
            return f"[the command could not be started: {ended['failed']}]"
        if ended.get("lost"):
            return (
                "[it was cut off: the machine it ran on, or what watched over it, is gone; its exit code is not known]"
            )
        text = shell.describe(int(ended["code"]))
        if ended.get("timed_out"):
            return f"[killed: it ran longer than {ended.get('limit_s', 0):g} seconds; {text}]"
        if ended.get("killed"):
            return f"[ended on request; {text}]"
        nothing = ", no output" if verb == "run" else ", no new output"
        return f"[{text}{'' if printed else nothing}]"


class PendingWait:
    """A request that is answered once: when the job has ended, when `finish` is called, or after a time limit."""

    def __init__(self, jobs: ShellJobs, job: ShellJob, verb: str, respond: Respond) -> None:
        self.jobs, self.job, self.verb, self.respond = jobs, job, verb, respond
        self.watcher = 0  # pid of the process that waits for a pattern
        self.finished = False

    def start(self, block_s: float) -> Callable[[], None]:
        """Wait for at most `block_s`; return the cancel function of the request."""
        self.job.waits.append(self)
        self.jobs.server.call_at(time.monotonic() + block_s, self.finish)
        self.check()
        return self.cancel

    def check(self) -> None:
        """Finish if the job has ended; look again soon if that is not reported to this server."""
        if self.finished:
            return
        self.job.refresh()
        left = self.verb == "kill" and is_locked(self.job.base + ".lock")  # its background processes, for one
        if self.job.ended is not None and not left:
            self.finish()
        elif self.job.ended is not None or not self.job.started_here:
            self.jobs.server.call_at(time.monotonic() + POLL_S, self.check)

    def finish(self, matched: bool = False) -> None:
        if not self.finished:
            self.stop()
            self.respond(lambda: self.jobs.report(self.job, self.verb, matched))

    def cancel(self) -> None:
        """Give up the request: a command that it started ends too."""
        if not self.finished:
            self.stop()
            if self.verb == "run":
                self.jobs.terminate(self.job)

    def stop(self) -> None:
        self.finished = True
        self.job.waits.remove(self)
        if self.watcher:
            self.jobs.server.kill(self.watcher)
