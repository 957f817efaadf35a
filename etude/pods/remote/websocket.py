"""A link to the guest init of a remote pod: the byte stream travels in the binary messages of a WebSocket."""

import asyncio
import contextlib

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed, WebSocketException

from etude.pods.guest import protocol
from etude.pods.guest.client import GuestClient, Link, Receiver
from etude.pods.host_client import HostGone
from etude.pods.remote import messages

MAX_QUEUED = 4 * protocol.CHUNK  # bytes queued before `drain` waits


class WebSocketLink(Link):
    """A byte stream to the guest init, in binary messages."""

    def __init__(self, socket: ClientConnection, url: str) -> None:
        self.socket, self.url = socket, url
        self.receiver: Receiver | None = None
        self.queue: asyncio.Queue[bytes] = asyncio.Queue()
        self.queued = 0  # bytes
        self.reading, self.has_space = asyncio.Event(), asyncio.Event()
        self.reading.set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.closed = False

    def start(self, receiver: Receiver) -> None:
        self.receiver = receiver
        self.tasks = {asyncio.create_task(self._read()), asyncio.create_task(self._write())}

    async def _read(self) -> None:
        assert self.receiver is not None
        try:
            while True:
                await self.reading.wait()
                data = await self.socket.recv(decode=False)
                self.receiver.data_received(data)
        except ConnectionClosed as closed:
            if not self.closed:
                self._disconnected(closed.rcvd.code if closed.rcvd else 1006)

    def _disconnected(self, code: int) -> None:
        self.close()
        if (
            isinstance(self.receiver, GuestClient)
            and code != messages.TUNNEL_ENDED
            and self.receiver.closed_error is None
        ):
            pod = self.receiver.name
            self.receiver.closed_error = HostGone(
                f"pod {pod}: the connection to {self.url} broke; the commands that ran on it were ended"
            )
        assert self.receiver is not None
        self.receiver.connection_lost()

    async def _write(self) -> None:
        with contextlib.suppress(ConnectionClosed):  # the reader reports it
            while True:
                data = await self.queue.get()
                await self.socket.send(data)  # waits while the peer is slow
                self.queue.task_done()
                self.queued -= len(data)
                if self.queued <= MAX_QUEUED:
                    self.has_space.set()

    def send(self, data: bytes) -> None:
        if not self.closed:
            self.queue.put_nowait(data)
            self.queued += len(data)

    async def drain(self) -> None:
        while self.queued > MAX_QUEUED and not self.closed:
            self.has_space.clear()
            await self.has_space.wait()

    def pause_reading(self, paused: bool) -> None:
        if paused:
            self.reading.clear()
        else:
            self.reading.set()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.has_space.set()
            asyncio.create_task(self._close_socket())  # noqa: RUF006  the connection's own tasks keep it alive

    async def _close_socket(self) -> None:
        with contextlib.suppress(TimeoutError):  # data queued before the close is still sent
            await asyncio.wait_for(self.queue.join(), 1)
        with contextlib.suppress(WebSocketException, OSError):
            await self.socket.close()
        for task in self.tasks:
            task.cancel()
