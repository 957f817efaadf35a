"""A server as a child of the sampler process: started, watched, and ended with everything that it started."""

import contextlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from etude.errors import InputError

STOP_S = 6.0  # for the guard to end the server; it does so also when this process has ended before
USAGE_ERROR = 2  # exit code of a program that does not understand its options


class ChildServer:
    """A command under a guard (`guard.py`), which also removes `directory` at the end; without a command, only that."""

    def __init__(self, program: str, directory: Path, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.program, self.command = program, command
        guard = [sys.executable, "-m", "etude.inference.backends.guard", str(directory), *command]
        self._guard = subprocess.Popen(guard, stdin=subprocess.PIPE, env=dict(environment), start_new_session=True)

    def problem(self) -> str:
        """Return how the server has ended; "" while it runs. A usage error is an InputError."""
        code = self._guard.poll()
        if code is None:
            return ""
        if code == USAGE_ERROR:
            raise InputError(
                f"{self.program} does not start: its own message is above in this log (rl.sampler.server_python, "
                f"server_arguments); the command was: {' '.join(self.command)}"
            )
        ended = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"the server ended with {ended}; its own messages are in this log"

    def stop(self) -> None:
        """End the server and remove its directory."""
        assert self._guard.stdin is not None
        with contextlib.suppress(OSError):
            self._guard.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guard.wait(STOP_S)
