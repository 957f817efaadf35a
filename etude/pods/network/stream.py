"""One end of a connection through the gate, and bodies passed from one end to another."""

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Literal, Self

from etude.pods.network import policy
from etude.pods.network.connect import CHUNK
from etude.pods.network.policy import CHUNKED, UNTIL_CLOSE, ProtocolError

LINGER_S = 1.0  # for the other side to take the last bytes


class UpstreamClosed(Exception):
    """The server does not take more of a request; its answer may be there already."""


class BufferedStream:
    """One end of a connection, with what was read ahead of its use. Left by an exception, it is cut off."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer, self.ahead = reader, writer, bytearray()

    async def fill(self) -> bool:
        """Read ahead once more; False at the end."""
        data = await self.reader.read(CHUNK)
        self.ahead += data
        return bool(data)

    async def read(self, most: int = CHUNK) -> bytes:
        if not self.ahead:
            return await self.reader.read(min(most, CHUNK))
        data = bytes(self.ahead[:most])
        del self.ahead[:most]
        return data

    async def until(self, mark: bytes, limit: int) -> bytes:
        """Everything up to and with `mark`, at most `limit` bytes of it."""
        start = 0
        while (at := self.ahead.find(mark, start, limit)) < 0:
            if len(self.ahead) >= limit:
                raise ProtocolError("a head or line is too long")
            start = max(0, len(self.ahead) - len(mark) + 1)
            if not await self.fill():
                raise ProtocolError("the connection ended in the middle of a message")
        return await self.read(at + len(mark))

    async def sniff(self) -> Literal["tls", "http", "other"]:
        """What the first bytes are; they stay to be read."""
        while (kind := policy.protocol_of(bytes(self.ahead))) is None:
            if not await self.fill():
                return "other"
        return kind

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    def end(self) -> None:
        """No more will be written; reading goes on."""
        with suppress(OSError):  # not connected any more
            self.writer.write_eof()

    def abort(self) -> None:
        """Cut off with a reset, so that what was passed on so far does not look complete."""
        with suppress(OSError):  # closed already
            sock = self.writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, *rest: object) -> None:
        with suppress(OSError, TimeoutError):
            if kind is None:
                self.writer.close()
                async with asyncio.timeout(LINGER_S):
                    await self.writer.wait_closed()
        self.abort()


async def relay_body(source: BufferedStream, length: int, send: Callable[[bytes], Awaitable[None]]) -> None:
    """Pass on the content of a body, without its framing, piece by piece."""
    if length == UNTIL_CLOSE:
        while data := await source.read():
            await send(data)
    elif length == CHUNKED:
        while size := policy.parse_chunk_size(await source.until(b"\r\n", 4096)):
            await relay_body(source, size, send)
            await source.until(b"\r\n", 2)
        for _ in range(100):  # trailers are read and dropped
            if await source.until(b"\r\n", 4096) == b"\r\n":
                return
        raise ProtocolError("too many trailers")
    else:
        while length:
            data = await source.read(min(length, CHUNK))
            if not data:
                raise ProtocolError("the connection ended in the middle of a body")
            length -= len(data)
            await send(data)
