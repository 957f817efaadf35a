"""A network between simulated hosts: requests to the run service over HTTP, and an object store.

Links have a latency and a rate. Packets of a partitioned pair of hosts are lost; so are some others. A request may be
handled twice, or long after its client has given it up or was killed. What the store was asked to write may be there
although its client was told otherwise.
"""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote, urlsplit

from sim_time import Host, Killed, SimLoop, SimProcess, Simulation

from etude.weights.object_store import ObjectStore

STORE = Host("store")
LATE_S = 25.0  # for which a request may wait in the server before it is handled
AWAY_S = 6.0  # until a request to an object store that is away fails


class Network:
    """Hosts, and the links between them."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation, self.rng = simulation, simulation.rng
        self.cut: dict[frozenset[str], float] = {}  # pairs of hosts that do not reach each other, and until when
        self.slow: dict[str, float] = {}  # factor of the latency of a host
        self.loss = self.repeats = self.late = 0.0  # probabilities, for a request
        self.server: Server | None = None
        self.connections = 0

    def reaches(self, one: Host, other: Host) -> bool:
        if one is other:
            return True
        return other.up and self.cut.get(frozenset((one.name, other.name)), 0.0) <= self.simulation.now

    def isolated(self, one: Host, other: Host, seconds: float) -> None:
        self.cut[frozenset((one.name, other.name))] = self.simulation.now + seconds

    def heal(self) -> None:
        self.cut.clear()
        self.slow.clear()
        self.loss = self.repeats = self.late = 0.0

    def latency(self, one: Host, other: Host) -> float:
        factor = max(self.slow.get(one.name, 1.0), self.slow.get(other.name, 1.0))
        return self.rng.uniform(0.0005, 0.003) * (0.1 if one is other else 1.0) * factor

    def happens(self, probability: float) -> bool:
        return probability > 0 and self.rng.random() < probability


# ------------------------------------------------------------------------------------------ HTTP


class Server:
    """A process that serves an ASGI application."""

    def __init__(self, network: Network, process: SimProcess, application: Any, loop: SimLoop) -> None:
        self.network, self.process, self.application, self.loop = network, process, application, loop
        self.exchanges: dict[Exchange, None] = {}  # in order
        network.server = self
        process.on_end.append(self.end)

    def end(self) -> None:
        """Reset all connections, as the kernel does for a process that has ended on a host that has not."""
        if self.network.server is self:
            self.network.server = None
        for exchange in list(self.exchanges):
            if self.process.host.up:
                exchange.answer(None)

    def handle(self, exchange: Exchange) -> None:
        """Handle a request that has arrived."""
        if self.process.alive:
            self.exchanges[exchange] = None
            self.loop.call_soon_threadsafe(lambda: self.loop.create_task(self._run(exchange)))

    async def _run(self, exchange: Exchange) -> None:
        parts: list[bytes] = []
        status = 0
        asked = False

        async def receive() -> dict[str, Any]:
            nonlocal asked
            if not asked:
                asked = True
                return {"type": "http.request", "body": exchange.content or b"", "more_body": False}
            exchange.watch(self.loop)
            while not exchange.left:
                await exchange.changed
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                parts.append(message.get("body", b""))

        await self.application(exchange.scope, receive, send)
        self.exchanges.pop(exchange, None)
        exchange.answer((status, b"".join(parts)))


class Exchange:
    """A request and what becomes of it."""

    def __init__(
        self, network: Network, client: SimProcess, server: Server, scope: dict[str, Any], content: bytes | None
    ):
        self.network, self.client, self.server, self.scope, self.content = network, client, server, scope, content
        self.response: tuple[int, bytes] | None = None
        self.reset = self.left = self.answered = False
        self.arrived = client.clock.condition()
        self.changed: asyncio.Future[None] | None = None

    def watch(self, loop: SimLoop) -> None:
        if self.changed is None:
            self.changed = loop.create_future()

    def send(self) -> None:
        """Put the request on its way, now and perhaps again."""
        network, simulation = self.network, self.network.simulation
        home = self.client.host is self.server.process.host
        delays = [network.latency(self.client.host, self.server.process.host)]
        if network.happens(network.late):
            delays[0] += network.rng.uniform(1.0, LATE_S)
        if network.happens(network.repeats):
            delays.append(network.rng.uniform(0.01, LATE_S))
        if (not home and network.happens(network.loss)) or not network.reaches(
            self.client.host, self.server.process.host
        ):
            delays = delays[1:]
        for delay in delays:
            simulation.later(delay, lambda: self.server.handle(self))

    def answer(self, response: tuple[int, bytes] | None) -> None:
        """Put the response on its way; None: the connection is reset."""
        network, home = self.network, self.client.host is self.server.process.host
        if self.answered:
            return
        lost = (not home and network.happens(network.loss)) or not network.reaches(
            self.server.process.host, self.client.host
        )
        if lost:
            return
        self.answered = True

        def arrive() -> None:
            self.response, self.reset = response, response is None
            self.arrived.notify_all()

        network.simulation.later(network.latency(self.server.process.host, self.client.host), arrive)

    def leave(self) -> None:
        """The client waits no longer."""
        self.left = True
        if self.changed is not None and self.server.process.alive:
            changed = self.changed
            self.server.loop.call_soon_threadsafe(lambda: changed.done() or changed.set_result(None))


class SimSocket:
    """As much of a socket as the client touches."""

    def __init__(self, connection: SimConnection) -> None:
        self.connection = connection

    def settimeout(self, seconds: float) -> None:
        pass

    def shutdown(self, how: int) -> None:
        self.connection.shut()

    def detach(self) -> int:
        return -1


class SimResponse:
    """A response that has arrived."""

    def __init__(self, status: int, body: bytes) -> None:
        self.status, self._body, self._read = status, body, False

    def read(self) -> bytes:
        self._read = True
        return self._body

    def isclosed(self) -> bool:
        return self._read


class SimConnection:
    """A connection of a client, as http.client has it."""

    def __init__(self, network: Network, process: SimProcess, port: int) -> None:
        self.network, self.process, self.port = network, process, port
        network.connections += 1
        self._number = network.connections
        self.sock: SimSocket | None = None
        self.timeout = 60.0
        self._server: Server | None = None
        self._exchange: Exchange | None = None

    def __hash__(self) -> int:  # so that sets of connections have the same order in every run
        return self._number

    def request(self, method: str, target: str, content: bytes | None, headers: dict[str, str]) -> None:
        if self.sock is None:
            self._connect()
        if self._server is None or not self._server.process.alive:
            raise ConnectionResetError("the connection was reset")
        parts = urlsplit(target)
        length = {} if content is None else {"content-length": str(len(content))}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": unquote(parts.path),
            "raw_path": parts.path.encode(),
            "root_path": "",
            "query_string": parts.query.encode(),
            "headers": [(name.encode(), value.encode()) for name, value in (headers | length).items()],
            "client": (self.process.host.name, 1),
            "server": (self._server.process.host.name, self.port),
        }
        self._exchange = Exchange(self.network, self.process, self._server, scope, content)
        self._exchange.send()

    def _connect(self) -> None:
        clock, network = self.process.clock, self.network
        server = network.server
        if server is None or not network.reaches(self.process.host, server.process.host):
            host_up = server is None
            clock.sleep(0.002 if host_up else self.timeout)
            raise ConnectionRefusedError("refused") if host_up else TimeoutError("timed out")
        self._server, self.sock = server, SimSocket(self)

    def getresponse(self) -> SimResponse:
        exchange = self._exchange
        assert exchange is not None
        try:
            with exchange.arrived:
                exchange.arrived.wait_for(lambda: exchange.response is not None or exchange.reset, self.timeout)
        finally:
            exchange.leave()
            self._exchange = None
        if exchange.reset:
            raise ConnectionResetError("the connection was reset")
        if exchange.response is None:
            raise TimeoutError("timed out")
        return SimResponse(*exchange.response)

    def shut(self) -> None:
        if self._exchange is not None:
            self._exchange.reset = True
            self._exchange.arrived.notify_all()

    def close(self) -> None:
        self.sock = self._server = None


def connect_from(network: Network, process: SimProcess) -> Callable[..., http.client.HTTPConnection]:
    """Return what opens the connections of a process."""
    return lambda host, port, context: SimConnection(network, process, port)  # type: ignore[return-value]


# ------------------------------------------------------------------------------------------ the object store


class Bucket:
    """The objects of a store, and how it fails."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.objects: dict[str, bytes] = {}
        self.errors = self.late = 0.0  # probabilities, for a request
        self.rate = 1e6  # bytes a second

    def write(self, name: str, data: bytes) -> None:
        self.objects[name] = data


class SimStore(ObjectStore):
    """An object store as a process sees it."""

    def __init__(self, bucket: Bucket, process: SimProcess, url: str) -> None:
        self.bucket, self.process, self.url, self.directory = bucket, process, url, None
        self.network, self.rng = bucket.network, bucket.network.rng

    def put(self, name: str, data: bytes) -> None:
        bucket, late = self.bucket, self.rng.uniform(0.5, LATE_S)
        try:
            self._travel(len(data))
        except Killed:  # what was sent may still be written
            if self.rng.random() < 0.5:
                bucket.write(name, data)
            raise
        except OSError:
            if self.network.happens(bucket.late):
                self.network.simulation.later(late, lambda: bucket.write(name, data))
            raise
        bucket.write(name, data)
        self._travel(0)

    def get(self, name: str) -> bytes | None:
        self._travel(0)
        found = self.bucket.objects.get(name)
        self._travel(len(found or b""))
        return found

    def names(self, prefix: str) -> list[str]:
        self._travel(0)
        start = f"{prefix}/"
        below = {name.removeprefix(start).partition("/")[0] for name in self.bucket.objects if name.startswith(start)}
        self._travel(0)
        return sorted(below)

    def remove(self, prefix: str) -> None:
        found = [name for name in self.bucket.objects if name == prefix or name.startswith(f"{prefix}/")]
        for name in found:
            self._travel(0)
            self.bucket.objects.pop(name, None)

    def _travel(self, size: int) -> None:
        """Take the time of one way; OSError if it does not arrive."""
        network, clock = self.network, self.process.clock
        if not network.reaches(self.process.host, STORE) or network.happens(self.bucket.errors):
            clock.sleep(self.rng.uniform(0.1, AWAY_S))
            raise OSError(f"{self.url}: timed out")
        clock.sleep(network.latency(self.process.host, STORE) + size / self.bucket.rate)
