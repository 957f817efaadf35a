"""HTTP/1 of the egress proxy: h11 parses and frames every message; this module says which messages are forwarded.

What h11 accepts although two servers could read it differently is refused before h11 sees it (`parse_head`). Errors
never repeat what was sent. A request and its response have h11 states of their own, so nothing after a message can pass
for a part of it.
"""

import re
from collections.abc import AsyncIterator, Iterable
from http import HTTPStatus

import h11

from etude.errors import InputError
from etude.pods.network.policy import ProtocolError, split_authority
from etude.pods.network.stream import BufferedStream

MAX_HEAD = 64 << 10
# fmt: off
HOP_BY_HOP = frozenset({
    b"connection", b"keep-alive", b"proxy-connection", b"proxy-authenticate", b"te", b"trailer", b"transfer-encoding",
    b"upgrade", b"expect",
})
# Never forwarded with a plain HTTP request: credentials that a program in a pod has must not travel in the clear.
SENSITIVE = frozenset({
    b"authorization", b"proxy-authorization", b"cookie", b"cookie2", b"x-api-key", b"api-key", b"x-auth-token",
    b"x-access-token", b"x-csrf-token", b"private-token", b"x-amz-security-token", b"x-goog-api-key",
})
# fmt: on
Head = h11.Request | h11.InformationalResponse | h11.Response


def parse_head(state: h11.Connection, data: bytes) -> Head:
    """Parse the head of the next message, including its empty line, and leave its body to `state`."""
    if not data.endswith(b"\r\n\r\n"):
        raise ProtocolError("the HTTP head has no end")
    if re.search(rb"[\x00-\x08\x0a-\x1f\x7f]", data.replace(b"\r\n", b"")):
        raise ProtocolError("a control character or a bare line feed in the HTTP head")
    if re.search(rb"\r\n[ \t]", data):
        raise ProtocolError("a folded header line")
    framing = re.findall(rb"\r\n(content-length:[^\r]*|transfer-encoding:)", data.lower())
    if len(framing) > 1 or any(b"," in line for line in framing):
        raise ProtocolError("more than one Content-Length or Transfer-Encoding")
    try:
        state.receive_data(data)
        head = state.next_event()
    except h11.RemoteProtocolError:
        raise ProtocolError("the head is not one of HTTP/1") from None
    if not isinstance(head, Head):
        raise ProtocolError("the head is not one of HTTP/1")
    if head.http_version not in (b"1.1", b"1.0") or (
        head.http_version == b"1.0" and framing == [b"transfer-encoding:"]
    ):
        raise ProtocolError("only HTTP/1.1, and HTTP/1.0 without Transfer-Encoding, are spoken here")
    return head


def parse_request(data: bytes) -> tuple[h11.Connection, h11.Request]:
    """Parse the head of a request; return it and the state in which its body is read and its response written."""
    state = h11.Connection(h11.SERVER, MAX_HEAD)
    head = parse_head(state, data)
    assert isinstance(head, h11.Request)
    return state, head


def values(head: Head, name: bytes) -> list[str]:
    """Return the values of a header."""
    return [value.decode("latin-1") for key, value in head.headers if key == name]


def tokens(head: Head, name: bytes) -> set[bytes]:
    """Return the comma-separated tokens of a header, in lower case."""
    return {token.strip().lower().encode("latin-1") for value in values(head, name) for token in value.split(",")}


def forwarded(head: Head, dropped: Iterable[bytes] = ()) -> list[tuple[bytes, bytes]]:
    """Return the headers to forward: not the hop-by-hop ones, not those that Connection names, not `dropped`."""
    # Connection must not remove headers that frame the message.
    without = HOP_BY_HOP | set(dropped) | (tokens(head, b"connection") - {b"content-length", b"host"})
    return [(name, value) for name, value in head.headers.raw_items() if name.lower() not in without]


def split_target(request: h11.Request, origin_port: int | None) -> tuple[str, int, str]:
    """Return host, port and path of a request.

    For a proxy (`origin_port` None) the target is an absolute `http://` URL, and Host must agree with it. On a socket
    that stands for the server it is a path, the host is in Host, and the port is the one connected to.
    """
    target, hosts = request.target.decode("ascii"), values(request, b"host")
    try:
        if origin_port is not None:
            if not target.startswith("/") and target != "*":
                raise ProtocolError("expected a path in the request line")
            if not hosts:
                raise ProtocolError("the request has no Host header, so its host is unknown")
            host, port = split_authority(hosts[0], origin_port)
            if port != origin_port:
                raise ProtocolError("the Host header names another port")
            return host, port, target
        if target[:7].lower() != "http://":
            raise ProtocolError("expected http://host/path in the request line (https goes through CONNECT)")
        location = re.split(r"[/?#]", target[7:], maxsplit=1)[0]
        host, port = split_authority(location, 80)
        if hosts and split_authority(hosts[0], 80) != (host, port):
            raise ProtocolError("the Host header and the URL name different hosts")
    except InputError:
        raise ProtocolError("the host in the request is not `host` or `host:port`") from None
    path = target[7 + len(location) :]
    return host, port, path if path.startswith("/") else "/" + path


def error_response(status: int, text: str) -> bytes:
    """Return a whole response that explains an error; the connection ends with it."""
    phrase = "Forbidden by the egress rules of this pod" if status == 403 else HTTPStatus(status).phrase
    body = (text + "\n").encode("utf-8", "replace")
    head = f"HTTP/1.1 {status} {phrase}\r\nContent-Type: text/plain; charset=utf-8\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


class HttpPeer:
    """The client or the server of one request: its stream, and the state of the messages on it."""

    def __init__(self, stream: BufferedStream, state: h11.Connection) -> None:
        self.stream, self.state = stream, state

    async def read_response(self) -> h11.Response:
        """Read the head of the server's response, skipping interim ones: the proxy answers Expect itself."""
        while True:
            head = parse_head(self.state, await self.stream.read_until(b"\r\n\r\n", MAX_HEAD))
            if isinstance(head, h11.Response):
                return head

    async def body(self) -> AsyncIterator[bytes]:
        """Yield the content of a body without its framing; afterwards the stream continues after the message."""
        try:
            while not isinstance(event := self.state.next_event(), h11.EndOfMessage):
                if isinstance(event, h11.Data):
                    yield bytes(event.data)
                else:
                    self.state.receive_data(await self.stream.read())
        except h11.RemoteProtocolError:
            raise ProtocolError("the body breaks its framing, or the connection ended in it") from None
        self.stream.buffer[:0] = self.state.trailing_data[0]

    def encode(self, event: h11.Event) -> bytes:
        """Return the bytes of the next part of the message to this peer."""
        return self.state.send(event) or b""
