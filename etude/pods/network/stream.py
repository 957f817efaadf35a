"""One end of a connection through the egress proxy."""

import asyncio
import socket
import struct
from contextlib import suppress
from typing import Literal, Self

from etude.pods.network import policy
from etude.pods.network.connect import CHUNK
from etude.pods.network.policy import ProtocolError

LINGER_S = 1.0  # how long a close waits for the peer to receive the last bytes


class BufferedStream:
    """One end of a connection with a read buffer. As a context manager, an exception aborts the connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer, self.buffer = reader, writer, bytearray()

    async def fill(self) -> bool:
        """Read once into the buffer; return False at the end of the stream."""
        data = await self.reader.read(CHUNK)
        self.buffer += data
        return bool(data)

    async def read(self, max_bytes: int = CHUNK) -> bytes:
        if not self.buffer:
            return await self.reader.read(min(max_bytes, CHUNK))
        data = bytes(self.buffer[:max_bytes])
        del self.buffer[:max_bytes]
        return data

    async def read_until(self, mark: bytes, limit: int) -> bytes:
        """Read up to and including `mark`; more than `limit` bytes are an error."""
        start = 0
        while (at := self.buffer.find(mark, start, limit)) < 0:
            if len(self.buffer) >= limit:
                raise ProtocolError("a head or line is too long")
            start = max(0, len(self.buffer) - len(mark) + 1)
            if not await self.fill():
                raise ProtocolError("the connection ended in the middle of a message")
        return await self.read(at + len(mark))

    async def detect_protocol(self) -> Literal["tls", "http", "other"]:
        """Return the protocol of the first bytes without consuming them."""
        while (kind := policy.protocol_of(bytes(self.buffer))) is None:
            if not await self.fill():
                return "other"
        return kind

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    def write_eof(self) -> None:
        """Close the writing side; reading goes on."""
        with suppress(OSError):  # no longer connected
            self.writer.write_eof()

    def abort(self) -> None:
        """Reset the connection, so that a partial message does not look complete to the peer."""
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
