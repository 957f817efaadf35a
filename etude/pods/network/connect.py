"""Connect to the destination of an allowed connection: resolve once, check the addresses, connect to one of them.

A name that resolves to this machine or a private network is refused even if a rule allows the name; only a rule for
that very address can allow it. Otherwise the owner of a name could reach every service behind the firewall.
"""

import asyncio
import base64
import errno
import socket
from collections.abc import Awaitable, Callable, Sequence
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies_environment, proxy_bypass

import aiohappyeyeballs
import h11

from etude.errors import InputError
from etude.pods.network import http, policy
from etude.pods.network.policy import EgressRule, ProtocolError

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[str, int, EgressRule], Awaitable[Connection]]
Resolver = Callable[[str, int], Awaitable[Sequence[str]]]

CHUNK = 1 << 16  # bytes in one read; at most about four of these are held per direction of a connection
NEXT_ADDRESS_S = 0.25  # delay before the next address of a name is tried in parallel (RFC 8305)
FROM_ENVIRONMENT = "environment"


class EgressRefused(Exception):
    """The egress policy refuses the connection. The text goes into the record and to the client."""


class UpstreamUnreachable(Exception):
    """The connection is allowed but failed, or the server's answer is invalid; `status` is for an HTTP client."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


async def system_resolver(host: str, port: int) -> list[str]:
    """Resolve a name with this machine's resolver and return its addresses."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(info[4][0]) for info in found))


class Connector:
    """Connects to an allowed host: directly, or through the HTTP proxy that this machine itself has to use."""

    def __init__(self, private_ok: bool, resolver: Resolver | None, upstream_proxy: str) -> None:
        self._private_ok, self._resolver = private_ok, resolver or system_resolver
        self._proxies = getproxies_environment()  # its no_proxy applies to an explicit proxy too
        if upstream_proxy == FROM_ENVIRONMENT:
            upstream_proxy = self._proxies.get("https") or self._proxies.get("http") or ""
        if upstream_proxy and "://" not in upstream_proxy:
            upstream_proxy = "http://" + upstream_proxy
        self._proxy = urlsplit(upstream_proxy) if upstream_proxy else None
        if self._proxy and (self._proxy.scheme != "http" or not self._proxy.hostname):
            raise InputError(f"upstream proxy: scheme {self._proxy.scheme!r}; expected http://host:port")

    async def __call__(self, host: str, port: int, rule: EgressRule) -> Connection:
        direct = self._proxy is None or proxy_bypass(policy.authority(host, port), self._proxies)
        if rule.literal:
            addresses = [host]
        else:
            try:
                addresses = await self._resolve(host, port)
            except OSError:
                if direct:
                    raise
                addresses = []  # a machine behind a proxy often cannot resolve outside names: the proxy resolves them
        if direct:
            return await _connect_to_first(addresses, port)
        return await self._through_proxy(policy.authority(host, port))

    async def _resolve(self, host: str, port: int) -> list[str]:
        found = list(await self._resolver(host, port))
        allowed = [address for address in found if not policy.forbidden_address(address, self._private_ok)]
        if found and not allowed:
            reason = policy.forbidden_address(found[0], self._private_ok)
            remedy = "Egress(private=True)" if "private" in reason else "a rule for the address itself"
            raise EgressRefused(f"{host} resolves to {found[0]}, {reason}; only {remedy} can allow that")
        if not found:
            raise OSError(errno.EHOSTUNREACH, "the name has no address")
        return allowed

    async def _through_proxy(self, authority: str) -> Connection:
        assert self._proxy is not None
        reader, writer = await asyncio.open_connection(
            self._proxy.hostname, self._proxy.port or 80, limit=http.MAX_HEAD
        )
        headers = [("Host", authority)]
        if self._proxy.username is not None:
            login = f"{unquote(self._proxy.username)}:{unquote(self._proxy.password or '')}"
            headers.append(("Proxy-Authorization", "Basic " + base64.b64encode(login.encode()).decode()))
        state = h11.Connection(h11.CLIENT, http.MAX_HEAD)
        connected = False
        try:
            writer.write(state.send(h11.Request(method="CONNECT", target=authority, headers=headers)) or b"")
            head = http.parse_head(state, await reader.readuntil(b"\r\n\r\n"))
            assert not isinstance(head, h11.Request)
            if head.status_code // 100 != 2:
                raise UpstreamUnreachable(502, f"the upstream proxy answered {head.status_code}")
            connected = True
            return reader, writer
        except (EOFError, asyncio.LimitOverrunError, ProtocolError):
            raise UpstreamUnreachable(502, "the upstream proxy did not answer in HTTP") from None
        finally:
            if not connected:
                writer.transport.abort()


async def _connect_to_first(addresses: Sequence[str], port: int) -> Connection:
    """Connect to the first address that answers, starting each attempt NEXT_ADDRESS_S after the one before."""
    targets = [
        (socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, port))
        for address in addresses
    ]
    sock = await aiohappyeyeballs.start_connection(targets, happy_eyeballs_delay=NEXT_ADDRESS_S)
    try:
        return await asyncio.open_connection(sock=sock, limit=CHUNK)
    except BaseException:
        sock.close()
        raise
