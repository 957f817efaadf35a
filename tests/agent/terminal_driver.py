"""Drives a program on a pseudo-terminal: starts it, waits for output, types."""

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07|\r")
PATIENCE_S = 60.0


class TerminalDriver:
    """Types into a program and waits for its output."""

    def __init__(self, process: "subprocess.Popen[bytes]", master: int) -> None:
        self.process, self.master = process, master
        self.raw = b""
        self.read_upto = 0  # end of the last expected text

    @property
    def seen(self) -> str:
        """All output so far, without escape sequences."""
        return ESCAPES.sub("", self.raw.decode("utf-8", "replace"))

    def expect(self, text: str, seconds: float = PATIENCE_S) -> str:
        """Wait for `text` after the last expected text; return the output between them."""
        deadline = time.monotonic() + seconds
        while (at := self.seen.find(text, self.read_upto)) < 0:
            if time.monotonic() > deadline or not self._more(deadline):
                raise AssertionError(f"waited for {text!r} after {self.read_upto}; saw:\n{self.seen}")
        before = self.seen[self.read_upto : at]
        self.read_upto = at + len(text)
        return before

    def type(self, text: str) -> None:
        os.write(self.master, f"{text}\n".encode())

    def interrupt(self) -> None:
        """Press Ctrl-C after a pause: one that arrives while `input` is starting is noticed only with the next key."""
        time.sleep(0.3)
        os.write(self.master, b"\x03")

    def end(self) -> None:
        """Press Ctrl-D."""
        os.write(self.master, b"\x04")

    def wait(self, seconds: float = PATIENCE_S) -> int:
        """Wait for the program to end; return its exit code."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < deadline:
            self._more(time.monotonic() + 0.2)
        while self._more(time.monotonic() + 0.2):
            pass
        assert self.process.poll() is not None, f"the program did not end; saw:\n{self.seen}"
        return self.process.returncode

    def _more(self, deadline: float) -> bool:
        ready, _, _ = select.select([self.master], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return False
        try:
            data = os.read(self.master, 1 << 16)
        except OSError:  # the other end is closed
            return False
        self.raw += data
        return bool(data)


@contextlib.contextmanager
def open_terminal(
    command: Sequence[str], cwd: Path, env: Mapping[str, str], rows: int = 40, columns: int = 110
) -> Iterator[TerminalDriver]:
    """Start a program on a new pseudo-terminal."""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (rows, columns))

    def take_terminal() -> None:
        os.setsid()
        os.close(os.open(os.ttyname(0), os.O_RDWR))  # the first terminal opened becomes the controlling one

    process = subprocess.Popen(
        command,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        cwd=cwd,
        env={**env, "TERM": "xterm"},
        preexec_fn=take_terminal,
    )
    os.close(slave)
    try:
        yield TerminalDriver(process, master)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
        os.close(master)
