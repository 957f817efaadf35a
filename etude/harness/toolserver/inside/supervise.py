"""One process beside each command: keeps its log within bounds, ends it in time, and writes down how it ended.

It is not the tool server, so a command, and what a command leaves running, outlives the server: nobody's output breaks
because a session ended. It stays until nothing holds the command's output any more.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType

LOG_CAP = 64 << 20  # bytes of a log; of what comes after only the end is kept
LOG_TAIL = 64 << 10
UNSAVED = 8 << 10  # bytes that are told when there was no room for the log
READ = 64 << 10
GRACE_S = 1.0  # between asking a command to end and ending it
DRAIN = 1 << 20  # bytes taken at the end of a command that may be another's


class Log:
    """The output of one command in a file that cannot grow for ever."""

    def __init__(self, path: str) -> None:
        self.file = -1
        with contextlib.suppress(OSError):  # on a full disk there is no log
            self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self.written = 0
        self.dropped = 0
        self.tail = bytearray()  # of what is not in the file

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
        """The size of the log, after the end of what did not fit has been added."""
        if self.dropped > len(self.tail):
            mark = f"\n[... {self.dropped - len(self.tail):,} bytes were not kept ...]\n".encode()
            self.tail[:0] = mark
        with contextlib.suppress(OSError):
            count = os.write(self.file, self.tail)
            self.written += count
            del self.tail[:count]
        return self.written


def kill_session(leader: int, number: int) -> None:
    """Signal every process of a session: its first group, and those that a shell's job control made."""
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


class Supervisor:
    """The life of one command."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        self.asked_to_end = False
        self.timed_out = self.killed = False
        self.stop = time.monotonic() + plan["timeout_s"]  # when something has to be done: 0 is never
        self.asked = False  # it has been sent a signal that it may heed

    def run(self, status: int) -> None:
        """Start the command and stay with it; tell `status`, a pipe, how it ended."""
        ours, theirs = os.pipe()
        wake, waker = os.pipe()
        for fd in (ours, wake, waker):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGTERM, self._end)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # blocked since before we were forked
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # what is ignored would be so in the command too
        log = Log(self.plan["log"])
        try:
            process = subprocess.Popen(
                self.plan["argv"],
                stdin=subprocess.DEVNULL,
                stdout=theirs,
                stderr=theirs,
                env=self.plan["env"],
                cwd=self.plan["cwd"],
                start_new_session=True,
            )
        except OSError as error:
            self.tell(status, {"failed": f"{self.plan['argv'][0]}: {error.strerror}"})
            return
        os.close(theirs)
        poll = select.poll()
        poll.register(ours, select.POLLIN)
        poll.register(wake, select.POLLIN)
        open_ended, reported = True, False
        while open_ended or not reported:
            poll.poll(max(0.0, self.stop - time.monotonic()) * 1000 + 1 if self.stop else None)
            drain(wake, 4096)
            if open_ended and not self.take(ours, log):
                open_ended = False
                poll.unregister(ours)
            self.end_if_due(process.pid, reported)
            if not reported and process.poll() is not None:
                taken = 0
                while open_ended and taken < DRAIN and (data := drain(ours, READ)):
                    log.add(data)
                    taken += len(data)
                code = process.returncode
                ended: dict[str, Any] = {"code": code if code >= 0 else 128 - code, "size": log.finish()}
                if log.tail:
                    ended["unsaved"] = log.tail[-UNSAVED:].decode("utf-8", "replace")
                ended["limit_s"] = self.plan["timeout_s"]
                self.tell(status, {**ended, "timed_out": self.timed_out, "killed": self.killed})
                reported = True
                self.stop = self.stop if self.asked else 0.0  # what it leaves running may go on

    def _end(self, number: int, frame: FrameType | None) -> None:
        self.asked_to_end = True

    def end_if_due(self, leader: int, reported: bool) -> None:
        """Ask the command to end when its time is over or somebody wants it, and a little later end it."""
        due = self.stop and time.monotonic() > self.stop
        if not self.asked and (due or self.asked_to_end):
            self.asked = True
            self.killed, self.timed_out = self.asked_to_end, not self.asked_to_end
            self.stop = time.monotonic() + GRACE_S
            kill_session(leader, signal.SIGTERM)
        elif self.asked and due:
            kill_session(leader, signal.SIGKILL)
            self.stop = 0.0 if reported else time.monotonic() + GRACE_S

    def take(self, pipe: int, log: Log) -> bool:
        """Move what is in the pipe to the log; False when nobody can write to it any more."""
        try:
            data = os.read(pipe, READ)
        except BlockingIOError:
            return True
        log.add(data)
        return bool(data)

    def tell(self, status: int, facts: dict[str, Any]) -> None:
        """Write down how it ended, then say so."""
        text = json.dumps(facts).encode()
        with contextlib.suppress(OSError):  # a full disk: whoever listens is told all the same
            with open(self.plan["done"] + ".new", "wb") as file:
                file.write(text)
            os.rename(self.plan["done"] + ".new", self.plan["done"])
        with contextlib.suppress(OSError):  # the server is gone; the next one reads the file
            os.write(status, text + b"\n")
        os.close(status)


def drain(fd: int, most: int) -> bytes:
    """What can be read now."""
    try:
        return os.read(fd, most)
    except OSError:
        return b""
