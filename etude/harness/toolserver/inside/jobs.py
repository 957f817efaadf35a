"""The commands of a session: each is a job with a number and a log, waited for as long as the caller cares to.

A job that is not over in time goes on in the background. ShellJobs are found again from their files by the next server.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import time
from typing import TYPE_CHECKING, Any

from etude.harness.toolserver.inside import output, shell
from etude.harness.toolserver.inside.paths import Refusal, ToolWorkspace

if TYPE_CHECKING:
    from collections.abc import Callable

    from etude.harness.toolserver.inside.server import ToolServerProcess

    Answer = Callable[[Callable[[], dict[str, Any]]], None]

LOOK_AGAIN_S = 0.1  # at a job of an earlier server, of whose end nobody tells us
KILL_S = 4.0  # for a job to be gone that was told to end, by force after a second
MAX_LOGS = 256 << 20  # bytes of all logs together; then those of the oldest jobs go


class ShellJob:
    """One command that was started."""

    def __init__(self, directory: str, number: int) -> None:
        self.number = number
        self.base = os.path.join(directory, str(number))
        self.log = self.base + ".log"
        self.pid = 0  # of its supervisor
        self.ours = False  # started by this server, which is told of its end
        self.foreground = False
        self.shown = 0  # bytes of the log that the model has seen
        self.ended: dict[str, Any] | None = None
        self.waiting: list[Callable[[], None]] = []  # to be told of its end
        self.kept = ""  # where the shell was before it

    def size(self, at_end: bool = False) -> int:
        """Bytes of the log: now, or when the command itself was over, whatever it left running has printed since."""
        return int(self.ended["size"]) if at_end and self.ended and "size" in self.ended else output.size_of(self.log)

    def look(self) -> None:
        """Learn from its files whether it is over; for jobs of an earlier server."""
        if self.ours or self.ended is not None:
            return
        alive = held(self.base + ".lock")  # first: who lets go of it has written the other file before
        try:
            with open(self.base + ".done", encoding="utf-8") as file:
                found = json.load(file)
            self.ended = {**found, "code": int(found["code"]), "size": int(found["size"])}
        except (OSError, ValueError, KeyError, TypeError):
            self.ended = None if alive else {"lost": True}

    def note_shown(self, end: int) -> None:
        """Remember how much of the log was shown."""
        self.shown = end
        with contextlib.suppress(OSError), open(self.base + ".shown", "w") as file:
            file.write(str(self.shown))


def held(path: str) -> bool:
    """Whether a living process holds the lock: the supervisor of a job, in this very pod."""
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
    """All of them, and the shell they share."""

    def __init__(self, workspace: ToolWorkspace, server: ToolServerProcess) -> None:
        self.workspace, self.server = workspace, server
        self.directory = os.path.join(workspace.state, "jobs")
        os.makedirs(self.directory, mode=0o700, exist_ok=True)
        self.shell = shell.ShellState(workspace.root, workspace.state)
        numbers = [int(name.split(".")[0]) for name in os.listdir(self.directory) if name.split(".")[0].isdigit()]
        self.last = max(numbers, default=0)
        self.jobs: dict[int, ShellJob] = {}

    # -- starting

    def run(self, given: dict[str, Any], answer: Answer) -> Callable[[], None]:
        """Start a command and answer when it is over, or after `block_s`; what is returned ends it."""
        if reason := shell.missing():
            raise Refusal("environment", reason)
        os.makedirs(self.directory, mode=0o700, exist_ok=True)
        self.make_room()
        job, lock = self.new()
        block_s = float(given["block_s"])
        job.foreground = block_s > 0
        job.kept = self.shell.directory()
        self.start(job, lock, given["command"], float(given["timeout_s"]))
        if not job.foreground:
            answer(lambda: self.report(job, "run"))
            return lambda: None
        waiting = PendingWait(self, job, block_s, lambda reason: answer(lambda: self.report(job, "run")))

        def cancel() -> None:
            waiting.over("cancelled", silent=True)
            self.end(job)

        return cancel

    def new(self) -> tuple[ShellJob, int]:
        """A job with the next number that is free, and its lock: another server may use this directory too."""
        while True:
            self.last += 1
            job = ShellJob(self.directory, self.last)
            with contextlib.suppress(FileExistsError):
                lock = os.open(job.base + ".lock", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                fcntl.flock(lock, fcntl.LOCK_EX)
                self.jobs[self.last] = job
                return job, lock

    def start(self, job: ShellJob, lock: int, command: str, timeout_s: float) -> None:
        """Fork the supervisor, which holds the lock while it lives, and listen to it."""
        from etude.harness.toolserver.inside.supervise import Supervisor

        argv, environment = self.shell.command(job.base + ".state", command)
        plan = {"argv": argv, "env": environment, "cwd": job.kept, "log": job.log, "done": job.base + ".done"}
        supervisor = Supervisor({**plan, "timeout_s": timeout_s})
        # Somebody may end the job before its supervisor can hear it: until then the signal waits.
        known = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            job.pid = self.server.fork(supervisor.run, lambda data: self.heard(job, data), lock)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, known)
            os.close(lock)
        job.ours = True
        with contextlib.suppress(OSError), open(job.base + ".pid", "w") as file:
            file.write(str(job.pid))

    def make_room(self) -> None:
        """Remove the logs of the oldest jobs when all together are too large."""
        numbers = sorted(int(name[:-4]) for name in os.listdir(self.directory) if name.endswith(".log"))
        sizes = {number: output.size_of(os.path.join(self.directory, f"{number}.log")) for number in numbers}
        total = sum(sizes.values())
        for number, size in sizes.items():
            if total <= MAX_LOGS:
                return
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self.directory, f"{number}.log"))
                total -= size

    def heard(self, job: ShellJob, data: bytes) -> None:
        """The supervisor said how it ended, or was killed before it could."""
        try:
            job.ended = json.loads(data) if data else {"lost": True}
        except ValueError:
            job.ended = {"lost": True}
        if job.foreground and "code" in (job.ended or {}):
            self.shell.take(job.base + ".state")
        shell.forget(job.base + ".state")
        for each in list(job.waiting):
            each()

    # -- waiting and ending

    def find(self, given: dict[str, Any]) -> ShellJob:
        """The job that is meant."""
        text = str(given["job_id"]).strip()
        number = int(text) if text.isdigit() and len(text) < 10 else 0
        if number in self.jobs:
            return self.jobs[number]
        if not 0 < number <= self.last:
            known = f"jobs 1 to {self.last} have been started" if self.last else "no job has been started yet"
            raise Refusal("environment", f"there is no job {text[:50]!r}; {known}")
        job = self.jobs[number] = ShellJob(self.directory, number)
        with contextlib.suppress(OSError, ValueError), open(job.base + ".shown") as file:
            job.shown = int(file.read(20))
        with contextlib.suppress(OSError, ValueError), open(job.base + ".pid") as file:
            job.pid = int(file.read(20))
        return job

    def wait(self, given: dict[str, Any], answer: Answer) -> Callable[[], None]:
        """Answer when the job is over, has printed what `pattern` matches, or `block_s` have passed."""
        job = self.find(given)
        job.look()
        if job.ended is not None:
            answer(lambda: self.report(job, "await"))
            return lambda: None
        watcher = 0
        if pattern := given.get("pattern"):
            from etude.harness.toolserver.inside.watch import watch

            watcher = watch(self.server, job.log, job.shown, pattern, lambda: waiting.over("matched"))

        def done(reason: str) -> None:
            if watcher:
                self.server.kill(watcher)
            answer(lambda: self.report(job, "await", matched=reason == "matched"))

        waiting = PendingWait(self, job, float(given["block_s"]), done)

        def cancel() -> None:
            waiting.over("cancelled", silent=True)
            if watcher:
                self.server.kill(watcher)

        return cancel

    def kill(self, given: dict[str, Any], answer: Answer) -> Callable[[], None]:
        """End a job with all its processes."""
        job = self.find(given)
        job.look()
        if job.ended is not None and not held(job.base + ".lock"):
            answer(lambda: self.report(job, "kill"))
            return lambda: None
        self.end(job)
        if job.ended is None:
            waiting = PendingWait(self, job, KILL_S, lambda reason: answer(lambda: self.report(job, "kill")))
            return lambda: waiting.over("cancelled", silent=True)
        until = time.monotonic() + KILL_S

        def look() -> None:  # it is over, but not all that it left running
            if held(job.base + ".lock") and time.monotonic() < until:
                self.server.at(time.monotonic() + LOOK_AGAIN_S, look)
            else:
                answer(lambda: self.report(job, "kill"))

        look()
        return lambda: None

    def end(self, job: ShellJob) -> None:
        """Have the supervisor end it, if there is one: the lock tells that the number is still its own."""
        if job.pid and held(job.base + ".lock"):
            self.server.kill(job.pid, signal.SIGTERM)

    # -- telling

    def report(self, job: ShellJob, verb: str, matched: bool = False) -> dict[str, Any]:
        """What the model reads of a job now, and the facts of it."""
        job.look()
        running = job.ended is None
        where = self.shell.directory()
        facts: dict[str, Any] = {"job": str(job.number), "log": job.log, "running": running, "matched": matched}
        text, cut = ("", False)
        if verb != "run" or job.foreground:
            end = job.size(at_end=verb == "run")
            text, cut = output.excerpt(job.log, min(job.shown, end), end, job.log)
            job.note_shown(end)
            text += (job.ended or {}).pop("unsaved", "")
        notes = []
        if running:
            job.foreground = False  # from now on it does not touch the shell any more
            notes.append(self.still_running(job, verb, matched))
        else:
            assert job.ended is not None
            facts.update((key, job.ended[key]) for key in ("timed_out", "killed", "lost", "failed") if key in job.ended)
            facts["exit_code"] = job.ended.get("code")
            notes.append(self.how_it_ended(job.ended, bool(text), verb))
        if verb == "run" and not running and where != job.kept:
            notes.append(f"[the shell is now in {self.workspace.shown(where)}]")
        if text and not text.endswith("\n"):
            text += "\n"
        return {"text": text + "\n".join(notes), "facts": {**facts, "cut": cut, "cwd": self.workspace.shown(where)}}

    def still_running(self, job: ShellJob, verb: str, matched: bool) -> str:
        if matched:
            return f"[the pattern was found; job {job.number} is still running]"
        if verb != "run":
            return f"[job {job.number} is still running]"
        names = self.workspace.names
        ways = [f"{verb} with {names[tool]}" for verb, tool in (("Wait", "await"), ("end it", "kill")) if tool in names]
        how = f" {', '.join(ways)}." if ways else ""
        return f"[running in the background as job {job.number}; its output goes to {job.log}.{how}]"

    def how_it_ended(self, ended: dict[str, Any], printed: bool, verb: str) -> str:
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
    """Somebody waits for a job: until it ends, the time is over, or something else happens first. Told once."""

    def __init__(self, jobs: ShellJobs, job: ShellJob, block_s: float, done: Callable[[str], None]) -> None:
        self.jobs, self.job, self.done = jobs, job, done
        self.until = time.monotonic() + block_s
        self.told = False
        job.waiting.append(self.look)
        jobs.server.at(self.until, self.time_over)
        if not job.ours:
            self.look_again()

    def look(self) -> None:
        if self.job.ended is not None:
            self.over("ended")

    def look_again(self) -> None:
        if not self.told:
            self.job.look()
            self.look()
            self.jobs.server.at(time.monotonic() + LOOK_AGAIN_S, self.look_again)

    def time_over(self) -> None:
        self.over("time")

    def over(self, reason: str, silent: bool = False) -> None:
        if self.told:
            return
        self.told = True
        self.job.waiting.remove(self.look)
        if not silent:
            self.done(reason)
