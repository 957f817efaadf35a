"""Our side of the keeper: find it or start it, and ask.

One keeper serves all processes that use a state directory. It holds the lock file for as long as it lives, so there
is never a second one; who finds nobody at the socket and can take the lock, starts it.
"""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

import etude
from etude.errors import BusyError
from etude.files import take_lock
from etude.pods.guest import protocol
from etude.pods.guest.client import connect_unix, failure
from etude.pods.pod import PodError, PodGone
from etude.pods.runtime import zygote_protocol

START_S = 20.0
# We send blocking, and so does the keeper: a few hundred requests at once would fill the sockets both ways, and then
# neither would ever read again.
IN_FLIGHT = 64


class KeeperLine:
    """A connection to the keeper; starts one when there is none."""

    def __init__(self, state: Path, helper: Path | None) -> None:
        self.state, self.helper = state, helper
        self.sock: socket.socket | None = None
        self.splitter = protocol.Splitter()
        self.calls: dict[int, asyncio.Future[tuple[protocol.Fields, list[int]]]] = {}
        self.next_call = 0
        self.descriptors: list[int] = []
        self.fetching: set[int] = set()  # calls whose answer brings one
        self.opening = asyncio.Lock()
        self.room = asyncio.Semaphore(IN_FLIGHT)
        self.on_open: Callable[[], object] = lambda: None  # another keeper may answer than the last time

    async def ask(
        self, op: int, *fields: tuple[int, protocol.Value], descriptors: Sequence[int] = ()
    ) -> tuple[protocol.Fields, list[int]]:
        """One request; the fields of the answer and the descriptors that came with it."""
        async with self.room:
            return await self._exchange(op, fields, descriptors)

    async def _exchange(
        self, op: int, fields: Sequence[tuple[int, protocol.Value]], descriptors: Sequence[int]
    ) -> tuple[protocol.Fields, list[int]]:
        if self.sock is None:
            async with self.opening:
                if self.sock is None:
                    await self._open()
        assert self.sock is not None
        loop = asyncio.get_running_loop()
        self.next_call += 1
        call = self.next_call
        answer: asyncio.Future[tuple[protocol.Fields, list[int]]] = loop.create_future()
        self.calls[call] = answer
        if op == zygote_protocol.FETCH:
            self.fetching.add(call)
        # The keeper reads before it does anything else, so this never waits for long.
        data = protocol.frame(op, call, *fields)
        try:
            sent = socket.send_fds(self.sock, [data], list(descriptors))
            while sent < len(data):
                sent += self.sock.send(data[sent:])
        except OSError as error:
            del self.calls[call]
            self._lost()
            raise PodGone(f"the keeper of {self.state} is gone ({error.strerror})") from error
        try:
            return await answer
        finally:
            self.calls.pop(call, None)

    async def _open(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError):
                self.sock = connect_unix(str(self.state), zygote_protocol.SOCKET)
                break
            with contextlib.suppress(BusyError):
                start_keeper(self.state, self.helper)
            if time.monotonic() > deadline:
                raise PodError(
                    f"no keeper answers in {self.state} within {START_S:g} s; see {zygote_protocol.LOG} there"
                )
            await asyncio.sleep(0.005)
        self.on_open()
        # Blocking sends, non-blocking reads by the loop: requests are small and answered in order.
        asyncio.get_running_loop().add_reader(self.sock.fileno(), self._readable)

    def _readable(self) -> None:
        assert self.sock is not None
        try:
            data, fds, _, _ = socket.recv_fds(self.sock, 1 << 18, 16, socket.MSG_DONTWAIT)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data, fds = b"", []
        self.descriptors += fds
        if not data:
            self._lost()
            return
        for op, call, fields in self.splitter.feed(data):
            answer = self.calls.get(call)
            # Answers that are read together come with the descriptors of all of them, in order.
            given = [self.descriptors.pop(0)] if op == protocol.OK and call in self.fetching else []
            self.fetching.discard(call)
            if answer is None or answer.done():
                for fd in given:
                    os.close(fd)
            elif op == protocol.OK:
                answer.set_result((fields, given))
            else:
                answer.set_exception(PodError(str(failure(fields))))

    def _lost(self) -> None:
        self.close()
        for answer in self.calls.values():
            if not answer.done():
                answer.set_exception(PodGone(f"the keeper of {self.state} is gone, and every pod with it"))

    def close(self) -> None:
        if self.sock is not None:
            asyncio.get_running_loop().remove_reader(self.sock.fileno())
            self.sock.close()
            self.sock = None
            self.splitter = protocol.Splitter()
            for fd in self.descriptors:
                os.close(fd)
            self.descriptors.clear()
            self.fetching.clear()


def start_keeper(state: Path, helper: Path | None) -> None:
    """Start the keeper of `state`; BusyError when there is one."""
    lock = take_lock(state / zygote_protocol.LOCK, f"the pods of {state}")
    directory = os.open(state, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            (state / zygote_protocol.SOCKET).unlink()
        listener.bind(f"/proc/self/fd/{directory}/{zygote_protocol.SOCKET}")
        listener.listen(64)
        clean_mount_points(state)
        with (
            open(state / zygote_protocol.LOG, "ab") as log,
            keeper_program(helper, state, listener.fileno()) as (argv, program),
        ):
            keeper = subprocess.Popen(
                argv,
                stdin=program,
                stdout=log,
                stderr=log,
                cwd="/",
                env={"PATH": os.defpath, "PYTHONDONTWRITEBYTECODE": "1"},  # nothing of ours: pods are forked from it
                pass_fds=[listener.fileno(), lock],
                start_new_session=True,
            )
        # It outlives us or not; if not, somebody must take its exit status.
        threading.Thread(target=keeper.wait, daemon=True).start()
    finally:
        listener.close()
        os.close(directory)
        os.close(lock)


@contextlib.contextmanager
def keeper_program(helper: Path | None, state: Path, listener: int) -> Iterator[tuple[list[str], IO[bytes]]]:
    """The keeper as a command and its standard input.

    Pods can read the command line of their first process, so what names our directories comes by standard input:
    for the compiled keeper two lines, for Python the program itself.
    """
    root = str(Path(etude.__file__).parent.parent)
    arguments = f"{listener}\n{state}\n"
    code = (
        f"import sys; sys.path.append({root!r}); from etude.pods.runtime.zygote import main; "
        f"main({str(state)!r}, {listener})\n"
    )
    with tempfile.TemporaryFile() as file:
        file.write((arguments if helper else code).encode())
        file.seek(0)
        yield [str(helper)] if helper else [sys.executable, "-I", "-S", "-"], file


def clean_mount_points(state: Path) -> None:
    """Empty directories that a killed keeper's mounts were on; the mounts themselves went with it."""
    (state / zygote_protocol.STAGE).mkdir(mode=0o700, exist_ok=True)
    for name in (zygote_protocol.MEMORY, zygote_protocol.MAPPED):
        (state / name).mkdir(mode=0o700, exist_ok=True)
        for place in (state / name).iterdir():
            place.rmdir()
    (state / zygote_protocol.ROOT).mkdir(mode=0o755, exist_ok=True)
