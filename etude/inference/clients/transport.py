"""JSON over HTTP to a sampler that may be busy, restarting or gone: time-outs, and retries where they are safe.

Sampling changes nothing on a server, so any request may be sent again. Tried again are failed connections, 429 and 503,
after a pause that doubles, is never shorter than the server asked for, and is different for everybody.
"""

import asyncio
import contextlib
import json as json_text
import os
import random
import ssl
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import certifi

from etude.errors import EtudeError
from etude.inference.generate_protocol import BadAnswer

BUSY = (429, 503)
# Nothing of the request was answered: the connection failed, not the work.
LOST = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError)
HERE = ("127.0.0.1", "localhost", "::1")  # reached without a proxy
KEPT_S = 4.0  # that a connection is kept for the next request: less than servers do, who close it after five


class ServerError(EtudeError):
    """A server refused or failed; `status` is what it said, `code` the error code if it gave one."""

    def __init__(self, message: str, status: int, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Unreachable(EtudeError):
    """No answer, after every attempt or in the time that was given."""


@dataclass(frozen=True)
class Patience:
    """How long to wait and how often to try."""

    timeout: float = 1800.0  # seconds for one attempt; a long sample on a busy server takes minutes
    connect: float = 10.0
    attempts: int = 8
    first_pause: float = 0.25
    longest_pause: float = 15.0

    def pause(self, attempt: int, asked: float = 0.0) -> float:
        """Seconds before the next attempt: at least what the server asked for, at most the longest."""
        grown = min(self.longest_pause, self.first_pause * 2.0**attempt)
        return min(max(grown * random.uniform(0.5, 1.0), asked), self.longest_pause)


@dataclass(frozen=True)
class Answer:
    """What a server said; `body` is empty until it is `finished`."""

    status: int
    body: bytes
    whole: aiohttp.ClientResponse

    @property
    def text(self) -> str:
        return self.body.decode(errors="replace")


class Transport:
    """A pool of connections with one token. Use it in one event loop."""

    def __init__(self, token: str = "", patience: Patience | None = None) -> None:
        self.patience = patience or Patience()
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        self._open: aiohttp.ClientSession | None = None
        self._ways: dict[str, dict[str, Any]] = {}

    @property
    def _session(self) -> aiohttp.ClientSession:
        """Made when first used, because it belongs to a running loop."""
        if self._open is None:
            waits = {"sock_connect": self.patience.connect, "sock_read": self.patience.timeout}
            self._open = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_S),
                timeout=aiohttp.ClientTimeout(total=None, **waits),
                headers=self._headers,
            )
        return self._open

    def _way(self, url: str) -> dict[str, Any]:
        """How a server is reached: whose word is taken for who it is, and the proxy that the environment names."""
        if url not in self._ways:
            parts = urlsplit(url)
            host, proxies, way = parts.hostname or "", getproxies(), dict[str, Any]()
            if parts.scheme == "https":  # a machine may have no certificates of its own
                way["ssl"] = ssl.create_default_context(cafile=os.environ.get("SSL_CERT_FILE") or certifi.where())
            if host not in HERE and not proxy_bypass(host):
                way["proxy"] = proxies.get(parts.scheme) or proxies.get("all")
            self._ways[url] = way
        return self._ways[url]

    async def close(self) -> None:
        if self._open is not None:
            await self._open.close()

    async def call(
        self,
        method: str,
        path: str,
        server: Callable[[], str],
        *,
        json: Any = None,
        content: bytes | None = None,
        params: dict[str, str] | None = None,
        lost: Callable[[str, bool], None] = lambda url, busy: None,
    ) -> Any:
        """The JSON that a server answers. `server` names one for each attempt; `lost` hears which did not serve."""
        given: dict[str, Any] = {} if json is None else with_json(json)
        if content is not None:
            given = {"data": content, "headers": {"content-type": "application/octet-stream"}}
        given["params"] = params
        answer, where = await self._ask(method, path, server, lost, given)
        return read_answer(answer, where)

    async def lines(
        self,
        path: str,
        server: Callable[[], str],
        *,
        json: Any,
        lost: Callable[[str, bool], None] = lambda url, busy: None,
    ) -> AsyncGenerator[bytes, None]:
        """What a server answers to a POST, line by line as it comes. Once it has begun it is not asked for again."""
        answer, where = await self._ask("POST", path, server, lost, with_json(json), stream=True)
        try:
            if answer.status >= 400:
                raise failure(await finished(answer), where)
            rest = b""
            async for data in answer.whole.content.iter_any():
                *whole, rest = (rest + data).split(b"\n")  # by no other sign: JSON may hold a U+2028 as it is
                for line in whole:
                    yield line
            if rest:
                yield rest
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Unreachable(f"{where}: the answer broke off: {type(error).__name__}: {error}") from None
        finally:
            answer.whole.close()  # a stream that was left unread is worth no connection

    async def _ask(
        self,
        method: str,
        path: str,
        server: Callable[[], str],
        lost: Callable[[str, bool], None],
        given: dict[str, Any],
        stream: bool = False,
    ) -> tuple[Answer, str]:
        """An answer that is not "busy", and who gave it; of a stream, its head."""
        attempt = 0
        while True:
            url, asked = server(), 0.0
            where = f"{method} {url}{path}"
            try:
                options = {"allow_redirects": False, **self._way(url), **given}
                whole = await self._session.request(method, f"{url}{path}", **options)
                answer = Answer(whole.status, b"", whole)
                if not stream or answer.status in BUSY:
                    answer = await finished(answer)
                if answer.status not in BUSY:
                    return answer, where
                lost(url, answer.status == 429)
                problem: EtudeError = failure(answer, where)
                with contextlib.suppress(ValueError):  # it may also be a date
                    asked = float(whole.headers.get("retry-after", 0))
            except aiohttp.SocketTimeoutError:
                raise Unreachable(f"{where}: no answer in {self.patience.timeout:g} s") from None
            except LOST as error:
                lost(url, False)
                problem = Unreachable(f"{where}: {trouble(error)}")
            except (aiohttp.ClientError, ValueError, OSError) as error:  # a bad URL, certificates that cannot be read
                raise Unreachable(f"{where}: {type(error).__name__}: {error}") from None
            attempt += 1
            if attempt >= self.patience.attempts:
                raise problem
            await asyncio.sleep(self.patience.pause(attempt - 1, asked))


def trouble(error: Exception) -> str:
    """What became of a connection, in words."""
    if isinstance(error, aiohttp.ClientConnectorError):
        cause = error.os_error
        why = os.strerror(cause.errno) if cause.errno and cause.errno > 0 else cause.strerror or cause
        return f"no connection: {why}"
    return f"{type(error).__name__}: {error}"


async def finished(answer: Answer) -> Answer:
    async with answer.whole:
        return Answer(answer.status, await answer.whole.read(), answer.whole)


def with_json(value: Any) -> dict[str, Any]:
    text = json_text.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return {"data": text.encode(), "headers": {"content-type": "application/json"}}


def read_answer(answer: Answer, where: str) -> Any:
    if answer.status >= 400:
        raise failure(answer, where)
    if not answer.body:
        return {}
    try:
        return json_text.loads(answer.body)
    except ValueError:
        raise BadAnswer(f"{where}: the answer is not JSON: {answer.text[:200]!r}") from None


def failure(answer: Answer, where: str) -> ServerError:
    """An error answer in the server's own words, whatever shape they come in."""
    said, code = answer.text[:500], None
    with contextlib.suppress(ValueError):
        body = json_text.loads(answer.body)
        error = body.get("error", body) if isinstance(body, dict) else body
        if isinstance(error, dict):
            said = str(error.get("message") or error.get("detail") or error)[:500]
            code = error.get("code") if isinstance(error.get("code"), str) else None
        elif isinstance(error, str):
            said = error[:500]
    return ServerError(f"{where}: {answer.status}: {said}", answer.status, code)
