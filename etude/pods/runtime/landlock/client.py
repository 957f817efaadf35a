"""Our side of the warden: find it or start it, ask it, and try beforehand whether its walls would hold here.

One warden serves all processes that use a state directory. Its guard holds the lock file until no process of any pod is
left, so a second one never starts beside what a first one left.
"""

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import etude
from etude.errors import BusyError
from etude.files import take_lock
from etude.pods.guest import protocol
from etude.pods.guest.client import connect_unix
from etude.pods.images.records import SYSTEM_BINDS
from etude.pods.pod import PodError, PodGone
from etude.pods.runtime import seccomp, zygote_protocol
from etude.pods.runtime.landlock import ruleset, seccomp_notify
from etude.pods.runtime.zygote_client import START_S, KeeperLine

_LOAD = f"import sys; sys.path.append({str(Path(etude.__file__).parent.parent)!r})"
_PYTHON = [sys.executable, "-I", "-S", "-"]
_ENVIRONMENT = {"PATH": os.defpath, "PYTHONDONTWRITEBYTECODE": "1"}  # nothing of ours: pods are forked from it


class WardenLine(KeeperLine):
    """A connection to the warden; starts one when there is none."""

    def __init__(self, state: Path, backend: str) -> None:
        super().__init__(state, None)
        self.name = backend

    async def ask(
        self, op: int, *fields: tuple[int, protocol.Value], descriptors: Sequence[int] = ()
    ) -> tuple[protocol.Fields, list[int]]:
        try:
            return await super().ask(op, *fields, descriptors=descriptors)
        except PodGone:
            # It was about to end, idle or killed, when we came. Nothing of what it made is left, so asking the next
            # one is not asking twice; but a pod that was to be killed may have been left by one that was killed.
            if op not in (zygote_protocol.STATUS, zygote_protocol.CREATE):
                raise
            return await super().ask(op, *fields, descriptors=descriptors)

    async def _open(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError):
                self.sock = connect_unix(str(self.state), f"{self.name}.sock")
                break
            with contextlib.suppress(BusyError):
                start_warden(self.state, self.name)
            if time.monotonic() > deadline:
                raise PodError(f"no warden answers in {self.state} within {START_S:g} s; see {self.name}.log there")
            await asyncio.sleep(0.005)
        asyncio.get_running_loop().add_reader(self.sock.fileno(), self._readable)


def start_warden(state: Path, name: str) -> None:
    """Start the warden of `state` for a backend; BusyError when there is one."""
    lock = take_lock(state / f"{name}.lock", f"the {name} pods of {state}")
    directory = os.open(state, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            (state / f"{name}.sock").unlink()
        listener.bind(f"/proc/self/fd/{directory}/{name}.sock")
        listener.listen(64)
        with open(state / f"{name}.log", "ab") as log, tempfile.TemporaryFile() as program:
            program.write(
                f"{_LOAD}; from etude.pods.runtime.landlock.zygote import main; "
                f"main({str(state)!r}, {listener.fileno()})\n".encode()
            )
            program.seek(0)
            process = subprocess.Popen(
                _PYTHON,
                stdin=program,
                stdout=log,
                stderr=log,
                cwd="/",
                env=_ENVIRONMENT,
                pass_fds=[listener.fileno(), lock],
                start_new_session=True,
            )
        threading.Thread(target=process.wait, name=f"{name} warden", daemon=True).start()  # no zombie if it ends first
    finally:
        listener.close()
        os.close(directory)
        os.close(lock)


def landlock_available(state: Path) -> tuple[bool, str]:
    """Whether `landlock` pods can be made here; tried for real by a process that locks itself in. Why not, in words."""
    if not ruleset.abi():
        return False, "this kernel has no Landlock (it came with Linux 5.13), or does not let us use it"
    place = Path(tempfile.mkdtemp(prefix="probe-", dir=state))
    try:
        (place / "inside").write_text("inside")
        (place / "outside").write_text("outside")
        allowed = [path for path in SYSTEM_BINDS if os.path.exists(path)]
        filters = [seccomp_notify.build(unix=False, carry=False, alone=False).hex(), seccomp.build_filter("none").hex()]
        arguments = [str(place / "inside"), str(place / "outside"), allowed]
        code = (
            f"{_LOAD}; import json; from etude.pods.runtime.landlock.zygote import check; "
            f"inside, outside, allowed = {arguments!r}; "
            f"print(json.dumps(check(inside, outside, allowed, [bytes.fromhex(one) for one in {filters!r}])))"
        )
        done = subprocess.run(
            _PYTHON, input=code, capture_output=True, text=True, env=_ENVIRONMENT, cwd="/", timeout=20
        )
        problem = (
            json.loads(done.stdout) if done.returncode == 0 else done.stderr.strip()[-300:] or "the probe was killed"
        )
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        problem = str(error)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return (False, problem) if problem else (True, f"Landlock ABI {ruleset.abi()}: a forbidden file could not be read")
