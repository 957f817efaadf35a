"""The machine itself as a pod: no isolation, no image, no limits. For tools that a person approves call by call.

A guest init runs in a subprocess, in the given directory, with the caller's user and environment. Everything it starts
stays a descendant of that process and ends with it, even if it forks or detaches. Operations that need isolation
(snapshots, forks, diffs, other users) raise Unsupported.
"""

import asyncio
import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NoReturn

from etude.errors import InputError
from etude.pods.guest import protocol
from etude.pods.guest.client import GuestClient, Link, SocketLink, connect_unix, listen_unix
from etude.pods.guest.guest_pod import GuestPod
from etude.pods.pod import Egress, FileInfo, Limits, Pod, Snapshot, SnapshotKind, Unsupported
from etude.pods.runtime.backend import GUEST_SOCKET
from etude.pods.runtime.native.build import require_helper
from etude.pods.runtime.zygote_client import run_helper

END_S = 10.0  # for all descendants to end


class UnisolatedPod(GuestPod):
    """The machine itself, with one directory as its working directory. Created by `open_unisolated`."""

    image, limits, egress = "here", Limits(), Egress()

    def __init__(self, directory: Path, environment: Mapping[str, str], scratch: Path) -> None:
        super().__init__(f"here-{uuid.uuid4().hex[:12]}", environment, str(directory))
        self.scratch = scratch
        self.process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Start the guest init and attach to it, so that it ends with this process."""
        helper = await asyncio.to_thread(require_helper, self.scratch)
        with listen_unix(self.scratch, GUEST_SOCKET) as listener:
            self.process = run_helper(helper, listener, Path(self.workdir), "guest", self.environment)
        self.connection = GuestClient(await self.open_link(), self.id)
        await self.connection.wait_until_ready()
        await self.connection.request(protocol.OWN, (protocol.TIME, 0), (protocol.FLAGS, protocol.ATTACHED))
        self.record("created", {"image": self.image})

    async def open_link(self) -> Link:
        return SocketLink(connect_unix(self.scratch, GUEST_SOCKET))

    def _user(self, user: str | None) -> str | None:
        if user:
            _cannot(f"a command as another user ({user!r})")
        return None

    async def diff(self, paths: Sequence[str] = ("/",)) -> Mapping[str, FileInfo | None]:
        _cannot("a diff")

    async def snapshot(self, kind: SnapshotKind | None = None) -> Snapshot:
        _cannot("a snapshot")

    async def fork(self, n: int = 1, kind: SnapshotKind | None = None) -> Sequence[Pod]:
        _cannot("a fork")

    async def stats(self) -> Mapping[str, float]:
        ((_, fields),) = await self.guest.request(protocol.PROCESSES)
        return {"pids": float(protocol.number(fields, protocol.SIZE))}

    async def close(self) -> None:
        """End every process started here. Written files stay: they are the machine's own."""
        client, self.connection = self.connection, None
        if client is not None:
            client.close()  # the guest init ends with its owner
            self.record("closed", {})
        if self.process is not None:
            process, self.process = self.process, None
            try:
                await asyncio.to_thread(process.wait, END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                await asyncio.to_thread(process.wait)


def _cannot(what: str) -> NoReturn:
    raise Unsupported(f"{what} is not possible in an unisolated pod; use a pod of a fleet")


@asynccontextmanager
async def open_unisolated(directory: Path, *, hidden: Sequence[str] = ()) -> AsyncIterator[UnisolatedPod]:
    """Open the machine as a pod in `directory`, with our environment except the variables in `hidden`."""
    if not directory.is_dir():
        raise InputError(f"{directory}: not a directory")
    scratch = Path(tempfile.mkdtemp(prefix="etude-here-"))  # 0700: private to this user
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    pod = UnisolatedPod(directory.resolve(), {**environment, "TMPDIR": str(scratch)}, scratch)
    try:
        await pod.start()
        yield pod
    finally:
        await pod.close()
        await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)
