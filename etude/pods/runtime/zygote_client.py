"""The client of the zygote: connects to it, starts it if none is running, and sends requests.

One zygote serves all processes that use a state directory. It holds the lock file as long as it or a process of its
pods lives, so there is never a second one; a client that cannot connect and can take the lock starts it.
"""

import asyncio
import contextlib
import errno
import os
import resource
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from etude.errors import BusyError
from etude.files import take_lock
from etude.pods.guest import protocol
from etude.pods.guest.client import connect_unix, decode_failure, listen_unix
from etude.pods.pod import PodError, PodGone
from etude.pods.runtime import zygote_protocol

START_S = 20.0
# Both sides send blocking: a few hundred requests at once would fill the sockets in both directions, and then
# neither side would ever read again.
MAX_IN_FLIGHT = 64


Mode = Literal["namespaces", "processes", "guest"]  # of the helper: zygote.c describes them


class ZygoteClient:
    """A connection to the zygote; starts one when there is none."""

    def __init__(self, state: Path, helper: Path, name: str, mode: Mode) -> None:
        self.state, self.helper, self.name, self.mode = state, helper, name, mode
        self.sock: socket.socket | None = None
        self.decoder = protocol.FrameDecoder()
        self.calls: dict[int, asyncio.Future[tuple[protocol.Fields, list[int]]]] = {}
        self.next_call = 0
        self.descriptors: list[int] = []
        self.fetching: set[int] = set()  # calls whose reply brings a descriptor
        self.connect_lock = asyncio.Lock()
        self.in_flight = asyncio.Semaphore(MAX_IN_FLIGHT)

    async def request(
        self, op: int, *fields: tuple[int, protocol.Value], descriptors: Sequence[int] = ()
    ) -> tuple[protocol.Fields, list[int]]:
        """Send one request; return the reply's fields and descriptors."""
        async with self.in_flight:
            return await self._send_request(op, fields, descriptors)

    async def _send_request(
        self, op: int, fields: Sequence[tuple[int, protocol.Value]], descriptors: Sequence[int]
    ) -> tuple[protocol.Fields, list[int]]:
        if self.sock is None:
            async with self.connect_lock:
                if self.sock is None:
                    await self._connect()
        assert self.sock is not None
        loop = asyncio.get_running_loop()
        self.next_call += 1
        call = self.next_call
        reply: asyncio.Future[tuple[protocol.Fields, list[int]]] = loop.create_future()
        self.calls[call] = reply
        if op == zygote_protocol.FETCH:
            self.fetching.add(call)
        # The zygote reads before it does anything else, so this does not block for long.
        data = protocol.frame(op, call, *fields)
        try:
            sent = self._send_first(data, list(descriptors))
            while sent < len(data):
                sent += self.sock.send(data[sent:])
        except OSError as error:
            del self.calls[call]
            self._disconnected()
            raise PodGone(f"the zygote of {self.state} has ended ({error.strerror})") from error
        try:
            return await reply
        finally:
            self.calls.pop(call, None)

    def _send_first(self, data: bytes, descriptors: list[int]) -> int:
        """Send the first part of a request with its descriptors; return the number of bytes sent."""
        assert self.sock is not None
        try:
            return socket.send_fds(self.sock, [data], descriptors)
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:
                raise
        # A pod of our user has as many descriptors in flight as its limit of open files allows, which is half of ours.
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        return socket.send_fds(self.sock, [data], descriptors)

    async def _connect(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError):
                self.sock = connect_unix(self.state, f"{self.name}.sock")
                break
            with contextlib.suppress(BusyError):
                start_zygote(self.state, self.helper, self.name, self.mode)
            if time.monotonic() > deadline:
                raise PodError(f"no zygote answers in {self.state} within {START_S:g} s; see {self.name}.log there")
            await asyncio.sleep(0.005)
        # Blocking sends, non-blocking reads by the event loop: requests are small and answered in order.
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
            self._disconnected()
            return
        for op, call, fields in self.decoder.feed(data):
            reply = self.calls.get(call)
            # Replies that are read together come with the descriptors of all of them, in order.
            received = [self.descriptors.pop(0)] if op == protocol.OK and call in self.fetching else []
            self.fetching.discard(call)
            if reply is None or reply.done():
                for fd in received:
                    os.close(fd)
            elif op == protocol.OK:
                reply.set_result((fields, received))
            else:
                reply.set_exception(PodError(str(decode_failure(fields))))

    def _disconnected(self) -> None:
        self.close()
        for reply in self.calls.values():
            if not reply.done():
                reply.set_exception(PodGone(f"the zygote of {self.state} has ended, and every pod with it"))

    def close(self) -> None:
        if self.sock is not None:
            asyncio.get_running_loop().remove_reader(self.sock.fileno())
            self.sock.close()
            self.sock = None
            self.decoder = protocol.FrameDecoder()
            for fd in self.descriptors:
                os.close(fd)
            self.descriptors.clear()
            self.fetching.clear()


def start_zygote(state: Path, helper: Path, name: str, mode: Mode) -> None:
    """Start a zygote of `state`; raise BusyError when it is running."""
    lock = take_lock(state / f"{name}.lock", f"the pods of {state}")
    try:
        if mode == "namespaces":
            prepare_mount_points(state)
        with listen_unix(state, f"{name}.sock") as listener, open(state / f"{name}.log", "ab") as log:
            environment = {"PATH": os.defpath}  # not our environment: pods are forked from it
            zygote = run_helper(helper, listener, state, mode, environment, stdout=log, stderr=log, keep=[lock])
        threading.Thread(target=zygote.wait, daemon=True).start()  # it may end before us: reap it then
    finally:
        os.close(lock)


def run_helper(
    helper: Path,
    listener: socket.socket,
    directory: Path,
    mode: Mode,
    environment: Mapping[str, str],
    *,
    keep: Sequence[int] = (),
    **options: Any,
) -> "subprocess.Popen[bytes]":
    """Start the helper on a listening socket, in a session of its own."""
    with tempfile.TemporaryFile() as arguments:  # not on its command line, which pods can read
        arguments.write(os.fsencode(f"{listener.fileno()}\n{directory}\n{mode}\n"))
        arguments.seek(0)
        return subprocess.Popen(
            [helper],
            stdin=arguments,
            cwd="/",
            env=environment,
            pass_fds=[listener.fileno(), *keep],
            start_new_session=True,
            **options,
        )


def prepare_mount_points(state: Path) -> None:
    """Create the mount points, without those of a killed zygote; its mounts disappeared with its mount namespace."""
    (state / zygote_protocol.STAGE).mkdir(mode=0o700, exist_ok=True)
    (state / zygote_protocol.MEMORY).mkdir(mode=0o700, exist_ok=True)
    for mount_point in (state / zygote_protocol.MEMORY).iterdir():
        mount_point.rmdir()
    (state / zygote_protocol.ROOT).mkdir(mode=0o755, exist_ok=True)
