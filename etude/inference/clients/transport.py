"""JSON over HTTP to a sampler that may be busy, restarting or gone: time-outs, and retries where they are safe.

Sampling changes nothing on a server, so any request may be sent again. Tried again are failed connections, 429 and 503,
after a pause that doubles, is never shorter than the server asked for, and is different for everybody.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

import httpx

from etude.errors import EtudeError
from etude.inference.wire import BadAnswer

BUSY = (429, 503)
# Nothing of the request was answered: the connection failed, not the work.
LOST = (httpx.ConnectError, httpx.ConnectTimeout, httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)


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


class Transport:
    """A pool of connections with one token. Use it in one event loop."""

    def __init__(self, token: str = "", patience: Patience | None = None) -> None:
        self.patience = patience or Patience()
        self._client = httpx.AsyncClient(
            headers={"authorization": f"Bearer {token}"} if token else {},
            timeout=httpx.Timeout(self.patience.timeout, connect=self.patience.connect),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
        )

    async def close(self) -> None:
        await self._client.aclose()

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
        headers = {"content-type": "application/octet-stream"} if content is not None else None
        given = {"json": json, "content": content, "params": params, "headers": headers}
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
        answer, where = await self._ask("POST", path, server, lost, {"json": json}, stream=True)
        try:
            if answer.status_code >= 400:
                await answer.aread()
                raise failure(answer, where)
            rest = b""
            async for data in answer.aiter_bytes():
                *whole, rest = (rest + data).split(b"\n")  # by no other sign: JSON may hold a U+2028 as it is
                for line in whole:
                    yield line
            if rest:
                yield rest
        except httpx.HTTPError as error:
            raise Unreachable(f"{where}: the answer broke off: {type(error).__name__}: {error}") from None
        finally:
            await answer.aclose()

    async def _ask(
        self,
        method: str,
        path: str,
        server: Callable[[], str],
        lost: Callable[[str, bool], None],
        given: dict[str, Any],
        stream: bool = False,
    ) -> tuple[httpx.Response, str]:
        """An answer that is not "busy", and who gave it; of a stream, its head."""
        attempt = 0
        while True:
            url, asked = server(), 0.0
            where = f"{method} {url}{path}"
            try:
                request = self._client.build_request(method, f"{url}{path}", **given)
                answer = await self._client.send(request, stream=stream)
                if answer.status_code not in BUSY:
                    return answer, where
                await answer.aread()
                await answer.aclose()
                lost(url, answer.status_code == 429)
                problem: EtudeError = failure(answer, where)
                with contextlib.suppress(ValueError):  # it may also be a date
                    asked = float(answer.headers.get("retry-after", 0))
            except LOST as error:
                lost(url, False)
                problem = Unreachable(f"{where}: {type(error).__name__}: {error}")
            except httpx.TimeoutException:
                raise Unreachable(f"{where}: no answer in {self.patience.timeout:g} s") from None
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                raise Unreachable(f"{where}: {type(error).__name__}: {error}") from None
            attempt += 1
            if attempt >= self.patience.attempts:
                raise problem
            await asyncio.sleep(self.patience.pause(attempt - 1, asked))


def read_answer(answer: httpx.Response, where: str) -> Any:
    if answer.status_code >= 400:
        raise failure(answer, where)
    if not answer.content:
        return {}
    try:
        return answer.json()
    except ValueError:
        raise BadAnswer(f"{where}: the answer is not JSON: {answer.text[:200]!r}") from None


def failure(answer: httpx.Response, where: str) -> ServerError:
    """An error answer in the server's own words, whatever shape they come in."""
    said, code = answer.text[:500], None
    with contextlib.suppress(ValueError):
        body = answer.json()
        error = body.get("error", body) if isinstance(body, dict) else body
        if isinstance(error, dict):
            said = str(error.get("message") or error.get("detail") or error)[:500]
            code = error.get("code") if isinstance(error.get("code"), str) else None
        elif isinstance(error, str):
            said = error[:500]
    return ServerError(f"{where}: {answer.status_code}: {said}", answer.status_code, code)
