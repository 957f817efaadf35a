"""JSON over HTTP to a server that may be busy, restarting or gone, with timeouts and retries.

Sampling changes nothing on a server, so any request may be sent again. Failed connections, 429 and 503 are retried
after a delay that doubles, has jitter, and is not shorter than the server's Retry-After, up to `max_retry_after`. A
limiter, if there is one, spaces all requests of a client and holds them while the server asks for patience.
"""

import asyncio
import contextlib
import json as json_text
import os
import random
import ssl
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import certifi

from etude.errors import EtudeError
from etude.inference.clients.limiter import RequestLimiter, RequestTicket
from etude.inference.generate_protocol import InvalidResponse

RETRY_STATUSES = (429, 503)
# The connection failed before anything was returned.
CONNECTION_ERRORS = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError)
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")  # reached without a proxy
KEEPALIVE_S = 4.0  # for which a connection is kept; servers close it after five


class ServerError(EtudeError):
    """A server returned an error: its HTTP `status`, and its error `code` if it gave one."""

    def __init__(self, message: str, status: int, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class ServerUnreachable(EtudeError):
    """A server gave no response, after every attempt or within the timeout."""


@dataclass(frozen=True)
class RetryPolicy:
    """Timeouts in seconds, number of attempts, and the delay between them."""

    timeout: float = 1800.0  # of one attempt; a long completion on a busy server takes minutes
    connect_timeout: float = 10.0
    attempts: int = 8
    first_delay: float = 0.25
    max_delay: float = 15.0
    max_retry_after: float | None = None  # of a server's Retry-After; default: max_delay

    def delay(self, attempt: int, retry_after: float = 0.0) -> float:
        """Return the seconds before the next attempt: at least `retry_after`, as far as that is accepted."""
        grown = min(self.max_delay, self.first_delay * 2.0**attempt)
        most = self.max_delay if self.max_retry_after is None else self.max_retry_after
        return max(grown * random.uniform(0.5, 1.0), min(retry_after, most))


@dataclass(frozen=True)
class HttpResponse:
    """A server's response; `body` is empty until `read_body`."""

    status: int
    body: bytes
    raw: aiohttp.ClientResponse

    @property
    def text(self) -> str:
        return self.body.decode(errors="replace")


class Transport:
    """A pool of connections that share a token. Use it in one event loop."""

    def __init__(
        self,
        token: str = "",
        retry: RetryPolicy | None = None,
        limiter: RequestLimiter | None = None,
        *,
        unix_socket: str = "",  # through which all requests go, whatever the host of their URL
    ) -> None:
        self.retry, self.limiter, self.unix_socket = retry or RetryPolicy(), limiter, unix_socket
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        self._opened: aiohttp.ClientSession | None = None
        self._options: dict[str, dict[str, Any]] = {}

    @property
    def _session(self) -> aiohttp.ClientSession:
        """Return the session, opened on first use, because it belongs to a running loop."""
        if self._opened is None:
            timeouts = {"sock_connect": self.retry.connect_timeout, "sock_read": self.retry.timeout}
            options: dict[str, Any] = {"limit": 0, "keepalive_timeout": KEEPALIVE_S}
            unix = self.unix_socket
            self._opened = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(unix, **options) if unix else aiohttp.TCPConnector(**options),
                timeout=aiohttp.ClientTimeout(total=None, **timeouts),
                headers=self._headers,
            )
        return self._opened

    def _connection_options(self, url: str) -> dict[str, Any]:
        """Return the certificates to trust for a server and the proxy that the environment names."""
        if url not in self._options:
            parts = urlsplit(url)
            host, proxies, options = parts.hostname or "", getproxies(), dict[str, Any]()
            if parts.scheme == "https":  # a machine may have no certificates of its own
                options["ssl"] = ssl.create_default_context(cafile=os.environ.get("SSL_CERT_FILE") or certifi.where())
            if host not in LOOPBACK_HOSTS and not proxy_bypass(host):
                options["proxy"] = proxies.get(parts.scheme) or proxies.get("all")
            self._options[url] = options
        return self._options[url]

    async def close(self) -> None:
        if self._opened is not None:
            await self._opened.close()

    async def call(
        self,
        method: str,
        path: str,
        server: Callable[[], str],
        *,
        json: Any = None,
        content: bytes | None = None,
        params: dict[str, str] | None = None,
        ticket: RequestTicket | None = None,
        on_failure: Callable[[str, bool], None] = lambda url, busy: None,
    ) -> Any:
        """Return a server's JSON. `server` names one for each attempt; `on_failure` gets those that did not serve.

        The limiter counts the tokens of the ticket, which records how long the request was held back.
        """
        options: dict[str, Any] = {} if json is None else json_body(json)
        if content is not None:
            options = {"data": content, "headers": {"content-type": "application/octet-stream"}}
        options["params"] = params
        response, where = await self._request(method, path, server, on_failure, options, ticket)
        return parse_response(response, where)

    async def text(self, path: str, server: Callable[[], str], *, json: Any = None) -> str:
        """Return the text that a server returns to a GET, or to a POST of `json`."""
        method, options = ("GET", {}) if json is None else ("POST", json_body(json))
        response, where = await self._request(method, path, server, lambda url, busy: None, options)
        if response.status >= 400:
            raise error_from_response(response, where)
        return response.text

    async def lines(
        self,
        path: str,
        server: Callable[[], str],
        *,
        json: Any,
        ticket: RequestTicket | None = None,
        on_failure: Callable[[str, bool], None] = lambda url, busy: None,
    ) -> AsyncGenerator[bytes, None]:
        """Yield the lines of the response to a POST as they arrive. A response that has started is not retried."""
        response, where = await self._request("POST", path, server, on_failure, json_body(json), ticket, stream=True)
        try:
            if response.status >= 400:
                raise error_from_response(await read_body(response), where)
            rest = b""
            async for data in response.raw.content.iter_any():
                *lines, rest = (rest + data).split(b"\n")  # not splitlines: JSON may contain U+2028
                for line in lines:
                    yield line
            if rest:
                yield rest
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ServerUnreachable(f"{where}: the response broke off: {type(error).__name__}: {error}") from None
        finally:
            response.raw.close()  # a connection with an unread response cannot be reused

    async def _request(
        self,
        method: str,
        path: str,
        server: Callable[[], str],
        on_failure: Callable[[str, bool], None],
        options: dict[str, Any],
        ticket: RequestTicket | None = None,
        stream: bool = False,
    ) -> tuple[HttpResponse, str]:
        """Return a response whose status needs no retry, and its request; with `stream`, without its body."""
        attempt, ticket = 0, ticket or RequestTicket()
        while True:
            url, retry_after = server(), 0.0
            where = f"{method} {url}{path}"
            if self.limiter is not None:
                await self.limiter.acquire(ticket)
            try:
                all_options = {"allow_redirects": False, **self._connection_options(url), **options}
                raw = await self._session.request(method, f"{url}{path}", **all_options)
                response = HttpResponse(raw.status, b"", raw)
                if not stream or response.status in RETRY_STATUSES:
                    response = await read_body(response)
                if response.status not in RETRY_STATUSES:
                    return response, where
                on_failure(url, response.status == 429)
                problem: EtudeError = error_from_response(response, where)
                retry_after = read_retry_after(raw.headers.get("retry-after", ""))
            except aiohttp.SocketTimeoutError:
                raise ServerUnreachable(f"{where}: no response in {self.retry.timeout:g} s") from None
            except CONNECTION_ERRORS as error:
                on_failure(url, False)
                problem = ServerUnreachable(f"{where}: {describe_connection_error(error)}")
            except (aiohttp.ClientError, ValueError, OSError) as error:  # a bad URL, certificates that cannot be read
                raise ServerUnreachable(f"{where}: {type(error).__name__}: {error}") from None
            if self.limiter is not None:
                self.limiter.refuse(ticket)
            attempt += 1
            if attempt >= self.retry.attempts:
                raise problem
            delay = self.retry.delay(attempt - 1, retry_after)
            if self.limiter is not None and retry_after:
                self.limiter.hold(delay)
            with ticket.waiting():
                await asyncio.sleep(delay)


def read_retry_after(text: str) -> float:
    """Return the seconds of a Retry-After header, which is a number or a date; 0 if it is neither."""
    with contextlib.suppress(ValueError):
        return max(0.0, float(text))
    with contextlib.suppress(ValueError):
        return max(0.0, (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds())
    return 0.0


def describe_connection_error(error: Exception) -> str:
    """Return the reason of a connection error as text."""
    if isinstance(error, aiohttp.ClientConnectorError):
        cause = error.os_error
        reason = os.strerror(cause.errno) if cause.errno and cause.errno > 0 else cause.strerror or cause
        return f"no connection: {reason}"
    return f"{type(error).__name__}: {error}"


async def read_body(response: HttpResponse) -> HttpResponse:
    async with response.raw:
        return HttpResponse(response.status, await response.raw.read(), response.raw)


def json_body(value: Any) -> dict[str, Any]:
    text = json_text.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return {"data": text.encode(), "headers": {"content-type": "application/json"}}


def parse_response(response: HttpResponse, where: str) -> Any:
    if response.status >= 400:
        raise error_from_response(response, where)
    if not response.body:
        return {}
    try:
        return json_text.loads(response.body)
    except ValueError:
        raise InvalidResponse(f"{where}: the response is not JSON: {response.text[:200]!r}") from None


def error_from_response(response: HttpResponse, where: str) -> ServerError:
    """Return the error with the server's own message, in any of the common formats."""
    message, code = response.text[:500], None
    with contextlib.suppress(ValueError):
        body = json_text.loads(response.body)
        error = body.get("error", body) if isinstance(body, dict) else body
        if isinstance(error, dict):
            message = str(error.get("message") or error.get("detail") or error)[:500]
            code = error.get("code") if isinstance(error.get("code"), str) else None
        elif isinstance(error, str):
            message = error[:500]
    return ServerError(f"{where}: {response.status}: {message}", response.status, code)
