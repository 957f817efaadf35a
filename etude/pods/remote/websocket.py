"""A link to a pod's agent on another machine: its byte stream in the binary messages of a WebSocket."""

import asyncio
import contextlib
from collections import deque

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed, WebSocketException

from etude.pods.fleet import HostGone
from etude.pods.guest import protocol
from etude.pods.guest.client import Agent, Link, Receiver
from etude.pods.remote import messages

SEND_ROOM = 4 * protocol.CHUNK  # bytes queued before `drain` waits


class WebSocketLink(Link):
    """A byte stream to an agent, in binary messages."""

    def __init__(self, socket: ClientConnection, where: str) -> None:
        self.socket, self.where = socket, where
        self.receiver: Receiver | None = None
        self.queue: deque[bytes] = deque()
        self.queued = 0
        self.flowing, self.news, self.space = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.flowing.set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.closed = False

    def start(self, receiver: Receiver) -> None:
        self.receiver = receiver
        self.tasks = {asyncio.create_task(self._read()), asyncio.create_task(self._write())}

    async def _read(self) -> None:
        assert self.receiver is not None
        try:
            while True:
                await self.flowing.wait()
                data = await self.socket.recv(decode=False)
                self.receiver.received(data)
        except ConnectionClosed as closed:
            if not self.closed:
                self._lost(closed.rcvd.code if closed.rcvd else 1006)

    def _lost(self, code: int) -> None:
        self.close()
        if isinstance(self.receiver, Agent) and code != messages.TUNNEL_ENDED and self.receiver.gone is None:
            name = self.receiver.name
            self.receiver.gone = HostGone(f"pod {name}: the connection to {self.where} broke; what ran on it was ended")
        assert self.receiver is not None
        self.receiver.lost()

    async def _write(self) -> None:
        with contextlib.suppress(ConnectionClosed):  # the reader tells
            while True:
                while self.queue:
                    data = self.queue.popleft()
                    await self.socket.send(data)  # waits while the other side is slow
                    self.queued -= len(data)
                    if self.queued <= SEND_ROOM:
                        self.space.set()
                self.news.clear()
                await self.news.wait()

    def send(self, data: bytes) -> None:
        if not self.closed:
            self.queue.append(data)
            self.queued += len(data)
            self.news.set()

    async def drain(self) -> None:
        while self.queued > SEND_ROOM and not self.closed:
            self.space.clear()
            await self.space.wait()

    def hold(self, held: bool) -> None:
        if held:
            self.flowing.clear()
        else:
            self.flowing.set()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.space.set()
            asyncio.create_task(self._hang_up())  # noqa: RUF006  the connection's own tasks keep it alive

    async def _hang_up(self) -> None:
        with contextlib.suppress(TimeoutError, ConnectionClosed):  # what was sent before the end still goes
            async with asyncio.timeout(1):
                while self.queue:
                    await asyncio.sleep(0.005)
        with contextlib.suppress(WebSocketException, OSError):
            await self.socket.close()
        for task in self.tasks:
            task.cancel()
