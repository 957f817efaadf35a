"""This very machine as a pod: no isolation, no image, no limits. For tools that a person approves call by call.

It is an agent like any other, in a process of its own that stands in the given directory with the caller's user and
environment. Everything it starts stays below that process and ends with it, whatever it forks or detaches. What needs
a machine of one's own (snapshots, forks, pausing, other users) raises Unsupported.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NoReturn

from etude.errors import InputError
from etude.pods.guest import protocol
from etude.pods.guest.client import Agent, Link, SocketLink, connect_unix
from etude.pods.guest.guest_pod import AgentPod
from etude.pods.guest.init import Agent as Serving
from etude.pods.guest.processes import kill_everything, other_processes
from etude.pods.pod import Egress, Limits, Pod, Snapshot, SnapshotKind, Unsupported
from etude.pods.runtime import linux
from etude.pods.runtime.landlock.backend import AGENT_SOCKET, listen_unix

START = "from etude.pods.runtime.unisolated import serve; serve()"
END_S = 10.0  # for everything it started to be gone


class HerePod(AgentPod):
    """The machine itself, from one directory on. Made by `open_here`."""

    image, limits, egress = "here", Limits(), Egress()

    def __init__(self, directory: Path, environment: Mapping[str, str], scratch: Path) -> None:
        super().__init__(f"here-{uuid.uuid4().hex[:12]}", environment, str(directory))
        self.scratch = scratch
        self.process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Start the agent and own it: it ends when we do."""
        with listen_unix(self.scratch) as listener:
            # -P, and a directory that is not the workspace: nothing that lies about there may be imported.
            command = [sys.executable, "-P", "-c", START, str(listener.fileno()), self.workdir]
            self.process = subprocess.Popen(
                command,
                pass_fds=[listener.fileno()],
                cwd="/",
                env=self.environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.agent = Agent(await self.open_link(), self.id)
        await self.agent.greeting()
        await self.agent.ask(protocol.OWN, (protocol.TIME, 0), (protocol.FLAGS, protocol.ATTACHED))
        self.record("created", {"image": self.image})

    async def open_link(self) -> Link:
        return SocketLink(connect_unix(str(self.scratch), AGENT_SOCKET))

    def _user(self, user: str | None) -> str | None:
        if user:
            _cannot(f"a command as another user ({user!r})")
        return None

    async def pause(self) -> None:
        _cannot("pausing")

    async def resume(self) -> None:
        _cannot("pausing")

    async def snapshot(self, kind: SnapshotKind | None = None) -> Snapshot:
        _cannot("a snapshot")

    async def fork(self, n: int = 1, kind: SnapshotKind | None = None) -> Sequence[Pod]:
        _cannot("a fork")

    async def stats(self) -> Mapping[str, float]:
        ((_, fields),) = await self.line.ask(protocol.PROCESSES)
        return {"pids": float(protocol.number(fields, protocol.SIZE))}

    async def close(self) -> None:
        """End everything that was started here. What was written stays: it is the machine's own."""
        agent, self.agent = self.agent, None
        if agent is not None:
            agent.close()  # the agent ends with its owner
            self.record("closed", {})
        if self.process is not None:
            process, self.process = self.process, None
            try:
                await asyncio.to_thread(process.wait, END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                await asyncio.to_thread(process.wait)


def _cannot(what: str) -> NoReturn:
    raise Unsupported(f"{what} is not possible on this machine itself; work in a pod of a fleet")


@asynccontextmanager
async def open_here(directory: Path, *, hidden: Sequence[str] = ()) -> AsyncIterator[HerePod]:
    """The machine from `directory` on, with our environment but for the variables in `hidden`."""
    if not directory.is_dir():
        raise InputError(f"{directory}: not a directory")
    scratch = Path(tempfile.mkdtemp(prefix="etude-here-"))  # 0700: what tools keep beside the work is nobody else's
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    pod = HerePod(directory.resolve(), {**environment, "TMPDIR": str(scratch)}, scratch)
    try:
        await pod.start()
        yield pod
    finally:
        await pod.close()
        await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)


def serve() -> None:
    """The agent's process: serve until the owner goes, then end all that is below."""
    listener, directory = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
    listener.set_inheritable(False)
    # In a session of our own no Ctrl-C reaches us; what is ignored here would be ignored in every command.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if linux.SUPPORTED:
        linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    os.chdir(directory)
    agent = Serving(listener, (), directory, mark_children=False)
    try:
        agent.serve()
    finally:
        for _ in range(1000):  # one sweep can miss a fork in flight
            if not other_processes():
                break
            kill_everything()
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, os.WNOHANG)
