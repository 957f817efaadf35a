"""A guard process: runs a command in a process group of its own, and ends that group when its standard input closes.

    python -m etude.inference.backends.guard DIRECTORY [COMMAND ...]

A server such as vLLM is several processes, some of which outlive their parent, and a sampler process may be killed at
any time. The guard holds the other end of a pipe from the sampler: it notices every end of it, ends the server and
removes its directory of weights. Without a command it only does the latter. Its exit code is that of the command.
"""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

GRACE_S = 3.0  # for the command to end after SIGTERM; what is left of its group is then killed
POLL_S = 0.5


def main(arguments: Sequence[str]) -> int:
    directory, command = arguments[0], arguments[1:]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # only the pipe counts
    try:
        return _run(command) if command else _wait(None)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _run(command: Sequence[str]) -> int:
    try:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        return 2
    try:
        code = _wait(server)
        if server.poll() is None:
            server.terminate()
            deadline = time.monotonic() + GRACE_S
            while server.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
        return code
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(server.pid, signal.SIGKILL)


def _wait(server: "subprocess.Popen[bytes] | None") -> int:
    """Return when standard input is closed, or with the exit code of the server when it has ended."""
    while server is None or server.poll() is None:
        readable, _, _ = select.select([0], [], [], POLL_S)
        if readable and not os.read(0, 1):
            return 0
    return server.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
