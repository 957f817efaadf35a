"""The client of a run service: requests that are sent again until it answers, a handshake, status reports, files.

A service may be restarted at any time; its address stays. Every request may therefore be sent twice, and the service
handles one that it has handled before as if it had not been. Each thread has a connection of its own.
"""

import contextlib
import http.client
import json
import os
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from etude import __version__
from etude.errors import EtudeError, InputError
from etude.runs.address import client_context, given_token, read_address, run_certificate, run_token
from etude.runs.layout import RunLayout
from etude.system.clock import MACHINE_CLOCK, Clock
from etude.system.processes import NODE_VARIABLE

PROTOCOL = 2  # of the requests; both sides must have the same
PROTOCOL_HEADER, RUN_HEADER = "etude-protocol", "etude-run"
PATIENCE_S = 600.0  # until a process gives up a service that does not answer
TIMEOUT_S = 60.0  # of one request, beside the time that it may wait in the service
LONG_POLL_S = 30.0  # for which the service holds back a request for changes
MIN_DELAY_S, MAX_DELAY_S = 0.1, 3.0  # between two attempts
DISK_FULL = 507
RETRIED = (502, 503, 504, DISK_FULL)
CHUNK = 1 << 20
Connect = Callable[[str, int, ssl.SSLContext | None], http.client.HTTPConnection]


class RunServiceUnavailable(EtudeError):
    """The run service did not answer in time."""


class RunServiceError(EtudeError):
    """The run service refused a request: the HTTP `status`, and a `code` for the kind of refusal."""

    def __init__(self, message: str, status: int, code: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True)
class RunInfo:
    """What a run service says of itself in the handshake."""

    run: str  # id of the run
    name: str  # of the run
    root: str  # directory of the run that its processes share
    directory: str  # of the run, on the machine of the service
    machine: str  # id of that machine, since it was started
    instance: str  # written to `RunLayout.instance`: a process that reads it there sees the same directory
    recipe: str  # its content
    plugin_files: Mapping[str, str]  # content by path
    stores: Mapping[str, str]  # URL of each object store; "": it is a directory ...
    directories: Mapping[str, str]  # ... on the machine of the service
    sampler_token: str


class RunClient:
    """A client of one run service. Threads may share it."""

    def __init__(
        self,
        url: str,
        token: str,
        *,
        certificate: str = "",
        patience_s: float = PATIENCE_S,
        timeout_s: float = TIMEOUT_S,
        on_problem: Callable[[str], None] = lambda problem: None,
        clock: Clock = MACHINE_CLOCK,
        connect: Connect | None = None,
    ) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            port = 0
        if parts.scheme not in ("http", "https") or not parts.hostname or not port:
            raise InputError(f"--service {url}: expected a URL such as http://HOST:PORT")
        self.url, self.patience_s, self.timeout_s, self.on_problem = url.rstrip("/"), patience_s, timeout_s, on_problem
        self.clock, self._connect = clock, connect or open_connection
        self.run = ""  # id of the run, once known
        self.problem = ""  # why the last attempt failed
        self._host, self._port, self._path = parts.hostname, port, parts.path.rstrip("/")
        self._context: ssl.SSLContext | None = client_context(certificate) if parts.scheme == "https" else None
        self._headers = {"authorization": f"Bearer {token}", PROTOCOL_HEADER: str(PROTOCOL)}
        self._local = threading.local()
        self._connections: set[http.client.HTTPConnection] = set()
        self._busy: set[http.client.HTTPConnection] = set()  # with a request in progress
        self._closed = clock.event()

    @classmethod
    def of_environment(cls, url: str, **options: Any) -> "RunClient":
        """Return the client of a process that was given the URL, and the token in its environment."""
        return cls(url, given_token(), **options)

    @classmethod
    def beside(cls, layout: RunLayout, **options: Any) -> "RunClient":
        """Return the client of a process that has the run directory; InputError if no service was started there."""
        address = read_address(layout)
        if address is None:
            raise InputError(f"{layout.root}: no run service was started here")
        return cls(address.url, run_token(layout), certificate=run_certificate(layout), **options)

    def twin(self, **options: Any) -> "RunClient":
        """Return a client of the same service with connections of its own, which can be closed separately."""
        other = RunClient.__new__(RunClient)
        other.__dict__.update(self.__dict__, **options)
        other._local, other._connections, other._busy = threading.local(), set(), set()
        other._closed = self.clock.event()
        return other

    def close(self) -> None:
        """Close all connections, also those that other threads wait on: their requests fail."""
        self._closed.set()
        for connection in list(self._connections):
            with contextlib.suppress(OSError, AttributeError):  # AttributeError: its thread closes it now
                connection.sock.shutdown(socket.SHUT_RDWR)
            if connection not in self._busy:
                self._drop(connection)

    def own_address(self) -> str:
        """Return the address of this machine from which the service is reached: where others may reach it too."""
        try:
            family, kind, _, _, address = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(address)  # sends nothing
                return str(probe.getsockname()[0])
        except OSError as error:
            raise RunServiceUnavailable(f"{self.url}: {error}") from None

    # ------------------------------------------------------------------------------------------ requests

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        wait_s: float = 0.0,
        patience_s: float | None = None,
        query: Mapping[str, str] | None = None,
    ) -> Any:
        """Return the JSON of a response. `wait_s` is how long the service may hold the request back."""
        content = None if body is None else json.dumps(body, default=vars, separators=(",", ":")).encode()
        data = self.send(method, path, content, wait_s=wait_s, patience_s=patience_s, query=query)
        return json.loads(data) if data else None

    def send(
        self,
        method: str,
        path: str,
        content: bytes | None = None,
        *,
        content_type: str = "application/json",
        wait_s: float = 0.0,
        patience_s: float | None = None,
        query: Mapping[str, str] | None = None,
    ) -> bytes:
        """Return the body of a response; the request is sent again until the service answers."""
        patience = self.patience_s if patience_s is None else patience_s
        started, delay, reused = self.clock.monotonic(), MIN_DELAY_S, True
        while True:
            try:
                with self._exchange(method, path, content, content_type, wait_s, query) as response:
                    return response.read()
            except _Retry as retry:
                if self._closed.is_set():
                    raise RunServiceUnavailable(f"{self.url}: the client was closed") from None
                if retry.reused and reused:  # the service had closed an idle connection: no reason to wait
                    reused = False
                    continue
                self._report(str(retry))
                if self.clock.monotonic() - started >= patience:
                    waited = f" for {patience:.0f} s" if patience else ""
                    raise RunServiceUnavailable(f"the run service did not answer{waited}: {retry}") from None
            self._closed.wait(delay * random.uniform(0.5, 1.0))
            delay = min(MAX_DELAY_S, 2 * delay)

    @contextmanager
    def stream(self, path: str, query: Mapping[str, str]) -> Iterator[http.client.HTTPResponse]:
        """Give a response to read from; it is not asked for again if it breaks off."""
        try:
            with self._exchange("GET", path, None, "", 0.0, query) as response:
                yield response
        except _Retry as retry:
            raise RunServiceUnavailable(str(retry)) from None

    @contextmanager
    def _exchange(
        self,
        method: str,
        path: str,
        content: bytes | None,
        content_type: str,
        wait_s: float,
        query: Mapping[str, str] | None,
    ) -> Iterator[http.client.HTTPResponse]:
        """Send a request on this thread's connection and give the response; _Retry if there is none."""
        connection, reused = self._connection()
        self._busy.add(connection)
        headers = self._headers | ({RUN_HEADER: self.run} if self.run else {})
        if content is not None:
            headers |= {"content-type": content_type}
        target = f"{self._path}{quote(path)}" + (f"?{urlencode(query)}" if query else "")
        where = f"{method} {self.url}{path}"
        try:
            connection.timeout = self.timeout_s + wait_s
            if connection.sock is not None:
                connection.sock.settimeout(self.timeout_s + wait_s)
            connection.request(method, target, content, headers)
            response = connection.getresponse()
            if response.status >= 400:
                self._refused(response.status, response.read(), where)
            self._report("")
            yield response
            if not response.isclosed():  # not read to its end
                self._drop(connection)
        except _Retry:
            raise
        except ssl.SSLCertVerificationError as error:
            self._drop(connection)
            raise InputError(
                f"{self.url}: its certificate is not trusted: {error.verify_message}; ${{ETUDE_RUN_CERTIFICATE}} may "
                "hold the certificates to trust"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            self._drop(connection)
            raise _Retry(f"{where}: {_describe(error)}", reused and not isinstance(error, TimeoutError)) from None
        except BaseException:
            self._drop(connection)
            raise
        finally:
            self._busy.discard(connection)
            if self._closed.is_set():
                self._drop(connection)

    def _refused(self, status: int, body: bytes, where: str) -> None:
        """Raise the error that a response stands for."""
        message, code = body.decode(errors="replace")[:500] or f"status {status}", ""
        with contextlib.suppress(ValueError, TypeError, KeyError):
            error = json.loads(body)["error"]
            message, code = str(error["message"]), str(error["code"])
        if status in RETRIED:
            raise _Retry(message if code else f"{where}: {status}: {message}", False)
        if status == 401:
            raise InputError(
                f"{self.url}: the token is wrong, or the run service of another run answers there: {message}"
            )
        if code in ("input", "protocol", "run"):
            raise InputError(message)
        raise RunServiceError(message if code else f"{where}: {status}: {message}", status, code)

    def _connection(self) -> tuple[http.client.HTTPConnection, bool]:
        """Return this thread's connection, and whether it was used before."""
        known: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        if known is not None and known.sock is not None:
            return known, True
        if self._closed.is_set():
            raise RunServiceUnavailable(f"{self.url}: the client was closed")
        opened = self._connect(self._host, self._port, self._context)
        self._local.connection = opened
        self._connections.add(opened)
        return opened, False

    def _drop(self, connection: http.client.HTTPConnection) -> None:
        """Close a connection, even if an unread response still refers to its socket."""
        sock = connection.sock
        connection.close()
        self._connections.discard(connection)
        if sock is not None and (file := sock.detach()) >= 0:
            os.close(file)

    def _report(self, problem: str) -> None:
        if problem != self.problem:
            self.problem = problem
            self.on_problem(problem)

    # ------------------------------------------------------------------------------------------ the handshake

    def connect(self) -> RunInfo:
        """Return what the service says of itself; from now on every request must reach the same run."""
        info = RunInfo(**self.call("GET", "/run"))
        self.run = info.run
        return info

    def check_beside(self, layout: RunLayout) -> None:
        """Connect; RunServiceUnavailable if the service has another run directory, of which this one is a copy."""
        info = self.connect()
        if os.path.realpath(info.directory) != os.path.realpath(layout.run):
            raise RunServiceUnavailable(f"{self.url} is the run service of {info.directory}")

    # ------------------------------------------------------------------------------------------ status

    def report_status(self, name: str, **facts: Any) -> dict[str, Any] | None:
        """Report the status of the service `name`: a `state`, what it is `waiting_for`, and figures.

        Returns the lease of a sampler that has one (`etude.rollouts.leases`).
        """
        found: dict[str, Any] | None = self.call("POST", f"/status/{name}", status_facts(**facts))
        return found

    def statuses(self) -> dict[str, dict[str, Any]]:
        """Return the last status of every service by name; `age_s` is how long ago it arrived."""
        found: dict[str, dict[str, Any]] = self.call("GET", "/status")
        return found


def status_facts(**facts: Any) -> dict[str, Any]:
    """Return a status: a `state`, what the service is `waiting_for`, which program runs where, and figures."""
    host = os.environ.get(NODE_VARIABLE) or socket.gethostname()
    program = {"pid": os.getpid(), "host": host, "etude": __version__, "cpu_s": round(time.process_time(), 3)}
    return {**program, "state": "working", "waiting_for": "", **facts}


class _Retry(Exception):
    """The request may be sent again; `reused` if that may be because the connection had been idle."""

    def __init__(self, problem: str, reused: bool) -> None:
        super().__init__(problem)
        self.reused = reused


class _Connection(http.client.HTTPConnection):
    def connect(self) -> None:
        super().connect()
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class _SecureConnection(http.client.HTTPSConnection):
    def connect(self) -> None:
        super().connect()
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def open_connection(host: str, port: int, context: ssl.SSLContext | None) -> http.client.HTTPConnection:
    """Return a connection, which is made with its first request."""
    return _Connection(host, port) if context is None else _SecureConnection(host, port, context=context)


def _describe(error: Exception) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "no connection: Connection refused"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
