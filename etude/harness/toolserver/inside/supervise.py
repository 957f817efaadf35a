"""The supervisor process of one command: limits its log, enforces its timeout and records its exit.

It is separate from the tool server, so a command and its background processes outlive the server and never get a
broken pipe when a session ends. It exits when no process holds the command's output any more.
"""

from __future__ import annotations

import os
import select
import time

from etude.pod_stdlib import dumps, suppress

TYPE_CHECKING = False  # typing is slow to import
if TYPE_CHECKING:
    import signal
    from types import FrameType
    from typing import Any
else:
    import _signal as signal

LOG_CAP = 64 << 20  # bytes of a log; beyond that only the end is kept
LOG_TAIL = 64 << 10
UNSAVED = 8 << 10  # bytes reported when the disk had no room for the log
READ = 64 << 10
GRACE_S = 1.0  # between SIGTERM and SIGKILL
DRAIN = 1 << 20  # bytes read after the exit; background processes may print more


class Log:
    """The output of one command in a file of bounded size."""

    def __init__(self, path: str) -> None:
        self.file = -1
        with suppress(OSError):  # a full disk: no log
            self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self.written = 0
        self.dropped = 0
        self.tail = bytearray()  # of the output that is not in the file

    def add(self, data: bytes) -> None:
        room = 0 if self.dropped else LOG_CAP - self.written
        kept = data[:room]
        while kept:
            try:
                count = os.write(self.file, kept)
            except OSError:  # the disk is full
                break
            self.written += count
            kept = kept[count:]
        rest = kept + data[room:]
        if rest:
            self.dropped += len(rest)
            self.tail += rest
            del self.tail[:-LOG_TAIL]

    def finish(self) -> int:
        """Append the end of the output that did not fit; return the size of the log."""
        if self.dropped > len(self.tail):
            mark = f"\n[... {self.dropped - len(self.tail):,} bytes were not kept ...]\n".encode()
            self.tail[:0] = mark
        with suppress(OSError):
            count = os.write(self.file, self.tail)
            self.written += count
            del self.tail[:count]
        return self.written


def kill_session(leader: int, number: int) -> None:
    """Signal all process groups of a session: that of the leader, and those made by a shell's job control."""
    groups = {leader}
    for name in _listed("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
                if int(fields[3]) == leader:
                    groups.add(int(fields[2]))
            except (OSError, ValueError, IndexError):
                continue
    for group in groups:
        try:
            os.killpg(group, number)
        except OSError:
            continue


def _listed(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def start_in_session(argv: list[str], env: dict[str, str], cwd: str, output: int) -> int:
    """Start a program in a session of its own, with no input and with both outputs to a descriptor; return its pid.

    Every other descriptor of ours is closed in it, and signals that Python ignores have their default effect.
    """
    os.chdir(cwd)
    try:
        actions = [(os.POSIX_SPAWN_DUP2, output, 1), (os.POSIX_SPAWN_DUP2, output, 2)]
        defaults = [signal.SIGPIPE, signal.SIGXFSZ]
        try:
            return os.posix_spawnp(argv[0], argv, env, file_actions=actions, setsid=True, setsigdef=defaults)
        except NotImplementedError:  # a C library without POSIX_SPAWN_SETSID
            import subprocess

            options: Any = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output, "start_new_session": True}
            return subprocess.Popen(argv, env=env, **options).pid
    finally:
        os.chdir("/")  # the directory may be removed while the command runs


def exit_code(status: int) -> int:
    """Return the exit code that a shell would give for a status of `waitpid`."""
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


class Supervisor:
    """Runs and watches one command."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.end_requested = False
        self.timed_out = self.killed = False
        self.stop = time.monotonic() + spec["timeout_s"]  # time of the next signal; 0: none
        self.signalled = False  # SIGTERM was sent

    def run(self, status: int) -> None:
        """Run the command to its end and report to `status`, a pipe."""
        output, child_output = os.pipe()
        wake, waker = os.pipe()
        for fd in (output, wake, waker):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGTERM, self._end)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # blocked before the fork
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # an ignored signal would be ignored in the command too
        log = Log(self.spec["log"])
        try:
            pid = start_in_session(self.spec["argv"], self.spec["env"], self.spec["cwd"], child_output)
        except OSError as error:
            self.report(status, {"failed": f"{self.spec['argv'][0]}: {error.strerror}"})
            return
        os.close(child_output)
        poll = select.poll()
        poll.register(output, select.POLLIN)
        poll.register(wake, select.POLLIN)
        open_ended, reported = True, False
        while open_ended or not reported:
            poll.poll(max(0.0, self.stop - time.monotonic()) * 1000 + 1 if self.stop else None)
            drain(wake, 4096)
            if open_ended and not self.copy_output(output, log):
                open_ended = False
                poll.unregister(output)
            self.end_if_due(pid, reported)
            if not reported and (status_of := os.waitpid(pid, os.WNOHANG))[0]:
                taken = 0
                while open_ended and taken < DRAIN and (data := drain(output, READ)):
                    log.add(data)
                    taken += len(data)
                ended: dict[str, Any] = {"code": exit_code(status_of[1]), "size": log.finish()}
                if log.tail:
                    ended["unsaved"] = log.tail[-UNSAVED:].decode("utf-8", "replace")
                ended["limit_s"] = self.spec["timeout_s"]
                self.report(status, {**ended, "timed_out": self.timed_out, "killed": self.killed})
                reported = True
                self.stop = self.stop if self.signalled else 0.0  # its background processes may continue

    def _end(self, number: int, frame: FrameType | None) -> None:
        self.end_requested = True

    def end_if_due(self, leader: int, reported: bool) -> None:
        """Send SIGTERM at the timeout or on request, and SIGKILL after a grace period."""
        due = self.stop and time.monotonic() > self.stop
        if not self.signalled and (due or self.end_requested):
            self.signalled = True
            self.killed, self.timed_out = self.end_requested, not self.end_requested
            self.stop = time.monotonic() + GRACE_S
            kill_session(leader, signal.SIGTERM)
        elif self.signalled and due:
            kill_session(leader, signal.SIGKILL)
            self.stop = 0.0 if reported else time.monotonic() + GRACE_S

    def copy_output(self, pipe: int, log: Log) -> bool:
        """Copy available output to the log; return False when all writers have closed the pipe."""
        try:
            data = os.read(pipe, READ)
        except BlockingIOError:
            return True
        log.add(data)
        return bool(data)

    def report(self, status: int, facts: dict[str, Any]) -> None:
        """Write the exit report to a file and to the status pipe."""
        text = dumps(facts).encode()
        with suppress(OSError):  # a full disk: the pipe still gets the report
            with open(self.spec["done"] + ".new", "wb") as file:
                file.write(text)
            os.rename(self.spec["done"] + ".new", self.spec["done"])
        with suppress(OSError):  # the server is gone; the next server reads the file
            os.write(status, text + b"\n")
        os.close(status)


def drain(fd: int, size: int) -> bytes:
    """Read what is available now."""
    try:
        return os.read(fd, size)
    except OSError:
        return b""
