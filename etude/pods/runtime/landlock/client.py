"""The client of the landlock zygote: connects to it or starts it, and probes whether confinement works here.

One zygote serves all processes that use a state directory. Its guard holds the lock file until no process of any pod is
left, so a second one never starts while processes of the first remain.
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
from etude.pods.runtime.zygote_client import START_S, ZygoteClient

_LOAD = f"import sys; sys.path.append({str(Path(etude.__file__).parent.parent)!r})"
_PYTHON = [sys.executable, "-I", "-S", "-"]
_ENVIRONMENT = {"PATH": os.defpath, "PYTHONDONTWRITEBYTECODE": "1"}  # not our environment: pods are forked from it


class LandlockZygoteClient(ZygoteClient):
    """A connection to the landlock zygote; starts one when none is running."""

    def __init__(self, state: Path, backend: str) -> None:
        super().__init__(state, None)
        self.name = backend

    async def request(
        self, op: int, *fields: tuple[int, protocol.Value], descriptors: Sequence[int] = ()
    ) -> tuple[protocol.Fields, list[int]]:
        try:
            return await super().request(op, *fields, descriptors=descriptors)
        except PodGone:
            # It was ending, idle or killed, when we connected. Nothing it created is left, so repeating the request to
            # the next one is safe; but a killed zygote may have left the pod that KILL names.
            if op not in (zygote_protocol.STATUS, zygote_protocol.CREATE):
                raise
            return await super().request(op, *fields, descriptors=descriptors)

    async def _connect(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError):
                self.sock = connect_unix(str(self.state), f"{self.name}.sock")
                break
            with contextlib.suppress(BusyError):
                start_landlock_zygote(self.state, self.name)
            if time.monotonic() > deadline:
                raise PodError(f"no zygote answers in {self.state} within {START_S:g} s; see {self.name}.log there")
            await asyncio.sleep(0.005)
        asyncio.get_running_loop().add_reader(self.sock.fileno(), self._readable)


def start_landlock_zygote(state: Path, name: str) -> None:
    """Start the zygote of `state` for a backend; raise BusyError when one is running."""
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
        threading.Thread(target=process.wait, name=f"{name} zygote", daemon=True).start()  # no zombie if it ends first
    finally:
        listener.close()
        os.close(directory)
        os.close(lock)


def landlock_available(state: Path) -> tuple[bool, str]:
    """Test with a confined process whether `landlock` pods work here; return the result and the reason."""
    if not ruleset.abi():
        return False, "this kernel has no Landlock (it came with Linux 5.13), or does not let us use it"
    scratch = Path(tempfile.mkdtemp(prefix="probe-", dir=state))
    try:
        (scratch / "inside").write_text("inside")
        (scratch / "outside").write_text("outside")
        allowed = [path for path in SYSTEM_BINDS if os.path.exists(path)]
        filters = [
            seccomp_notify.build_filter(unix=False, egress=False, own_user=False).hex(),
            seccomp.build_filter("none").hex(),
        ]
        arguments = [str(scratch / "inside"), str(scratch / "outside"), allowed]
        code = (
            f"{_LOAD}; import json; from etude.pods.runtime.landlock.zygote import check_confinement; "
            f"inside, outside, allowed = {arguments!r}; "
            f"print(json.dumps(check_confinement(inside, outside, allowed, [bytes.fromhex(x) for x in {filters!r}])))"
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
        shutil.rmtree(scratch, ignore_errors=True)
    return (False, problem) if problem else (True, f"Landlock ABI {ruleset.abi()}: a forbidden file could not be read")
