"""Pods on another machine: the client of `etude pods serve`.

Life goes over HTTP; commands and files over a WebSocket that carries the agent's own frames, so a remote pod is driven
by the very code that drives a local one. A pod has a lease that its client renews: whichever of the two machines
dies, nothing is left running for long. A line that breaks is made anew; only what was under way on it fails.
"""

import asyncio
import contextlib
import json
import math
import os
import secrets
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar
from urllib.parse import quote, urlsplit

import httpx
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus, WebSocketException

from etude.errors import EtudeError, InputError
from etude.pods.fleet import Fleet, HostGone
from etude.pods.guest import protocol
from etude.pods.guest.client import Agent, Link
from etude.pods.guest.guest_pod import AgentPod
from etude.pods.images.records import Image
from etude.pods.pod import (
    MAX_OUTPUT,
    Command,
    Event,
    ExecResult,
    Job,
    Pod,
    PodError,
    PodGone,
    Snapshot,
    SnapshotKind,
)
from etude.pods.remote import messages
from etude.pods.remote.websocket import WebSocketLink
from etude.pods.scheduling.router import HostReport

CONNECT_S = 10.0
ANSWER_S = 60.0
LONG_S = 1800.0  # for what moves or copies files
RETRIES = (0.1, 0.4)  # seconds between attempts of what can be asked twice
RECONNECT_S = 30.0  # at least, before a pod's line is given up

P = ParamSpec("P")
T = TypeVar("T")


class RemoteHostClient:
    """A host behind HTTP, as the fleet sees it. Made by `open`; closing it closes the pods it made."""

    def __init__(self, url: str, token: str, lease: float = messages.LEASE_S) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise InputError(f"host {url!r}: expected the address of `etude pods serve`, such as http://127.0.0.1:7741")
        self.url, self.name, self.lease = url.rstrip("/"), url, lease
        self.headers = {"authorization": f"Bearer {token}"} if token else {}
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        # No proxies of the environment: hosts are ours, and a token is nobody else's business.
        self.http = httpx.AsyncClient(
            base_url=f"{self.url}/v1",
            headers=self.headers,
            timeout=httpx.Timeout(ANSWER_S, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            verify=self.tls or False,
            trust_env=False,
        )
        self.pods: dict[str, RemotePod] = {}
        self.fleet: Fleet | None = None
        self.tasks: set[asyncio.Task[Any]] = set()

    @classmethod
    async def open(
        cls, url: str, token: str, *, lease: float = messages.LEASE_S, required: bool = True
    ) -> "RemoteHostClient":
        """Meet a host. One that is not `required` may be silent for now; a wrong token is an error at once."""
        door = cls(url, token, lease)
        try:
            door.name = (await door.report()).host
        except HostGone:
            if required:
                await door.http.aclose()
                raise
        except EtudeError:
            await door.http.aclose()
            raise
        return door

    async def close(self) -> None:
        await asyncio.gather(*(pod.close() for pod in list(self.pods.values())), return_exceptions=True)
        if self.tasks:
            await asyncio.wait(self.tasks, timeout=5)
        await self.http.aclose()

    async def ask(self, method: str, path: str, *, again: bool = True, long: bool = False, **options: Any) -> Any:
        """One request and its JSON answer; `again` for what may be asked twice. HostGone when nobody answers."""
        if long:
            options["timeout"] = httpx.Timeout(LONG_S, connect=CONNECT_S)
        for pause in (*(RETRIES if again else ()), None):
            try:
                answer = await self.http.request(method, path, **options)
                break
            except (httpx.HTTPError, OSError) as error:
                if pause is None:
                    raise self._silent(error) from error
                await asyncio.sleep(pause)
        if answer.is_error:
            raise messages.error_from_json(answer.status_code, _json(answer.content), self.url)
        return answer.json()

    def _silent(self, error: Exception) -> HostGone:
        return HostGone(f"host {self.url} does not answer: {str(error) or type(error).__name__}")

    def later(self, work: Coroutine[Any, Any, Any]) -> None:
        """Do it in the background; closing the door waits for it a little."""
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    # ------------------------------------------------------------------------------------------- pods

    async def report(self) -> HostReport:
        return HostReport.from_wire(await self.ask("GET", "/report", again=False))

    async def create(
        self,
        image: str | Image | Snapshot = "host",
        *,
        key: str = "",
        lease: float | None = None,
        timeout: float | None = None,
        **options: Any,
    ) -> "RemotePod":
        """A new pod there, with the options of `Fleet.create`. Asking twice with a key gives the same pod, so there
        always is one, and an answer that is lost costs nothing.
        """
        name = image if isinstance(image, str) else image.id
        given = self.lease if lease is None else lease
        chosen = key or f"auto-{secrets.token_hex(12)}"
        ask = messages.CreateAsk(name, key=chosen, lease=given, timeout=timeout, **options)
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while "waiting" in (made := await self.ask("POST", "/pods", json=ask.to_json())):
                left = None if deadline is None else max(0.01, deadline - time.monotonic())
                ask = replace(ask, timeout=left)
            return await self._begin(made, renews=given > 0)
        except asyncio.CancelledError:
            if not key:  # nobody else can want it
                self.later(self._forget(chosen))
            raise

    async def _forget(self, key: str) -> None:
        with contextlib.suppress(EtudeError):  # if this is lost too, the lease ends it
            await self.ask("DELETE", "/pods", params={"key": key})

    async def _begin(self, described: Mapping[str, Any], renews: bool) -> "RemotePod":
        pod = RemotePod(self, described, renews)
        self.pods[pod.id] = pod
        try:
            await pod.connect()
        except BaseException:
            await pod.close()
            raise
        return pod

    async def attach(self, id: str) -> "RemotePod":
        """A pod that runs there, by its id or the beginning of it. It is another's: we do not keep it alive."""
        pod = RemotePod(self, await self.ask("GET", f"/pods/{quote(id, safe='')}"), renews=False)
        await pod.connect()
        return pod

    async def list_pods(self) -> list[dict[str, Any]]:
        return list(await self.ask("GET", "/pods"))

    async def adopt_children(self, found: Sequence[Mapping[str, Any]], renews: bool) -> "list[RemotePod]":
        """Connect to pods that were just forked; all of them, or none is left."""
        made = await asyncio.gather(*(self._begin(each, renews) for each in found), return_exceptions=True)
        if failed := [each for each in made if isinstance(each, BaseException)]:
            await asyncio.gather(*(pod.close() for pod in made if isinstance(pod, RemotePod)))
            raise failed[0]
        return [pod for pod in made if isinstance(pod, RemotePod)]

    async def open_link(self, id: str) -> WebSocketLink:
        """A new connection to a pod's agent."""
        address = f"ws{self.url.removeprefix('http')}/v1/pods/{id}/agent"
        try:
            socket = await connect(
                address,
                additional_headers=self.headers,
                ssl=self.tls,
                proxy=None,
                compression=None,
                max_size=2 * protocol.MAX_FRAME,
                ping_timeout=60,
                open_timeout=CONNECT_S,
                close_timeout=1,
            )
        except InvalidStatus as refused:
            body = _json(bytes(refused.response.body or b""))
            raise messages.error_from_json(refused.response.status_code, body, self.url) from None
        except (OSError, TimeoutError, WebSocketException) as error:
            raise self._silent(error) from error
        return WebSocketLink(socket, self.url)

    # ------------------------------------------------------------------------------------------- files

    async def snapshots(self) -> list[Snapshot]:
        return [messages.snapshot_from_json(plain) for plain in await self.ask("GET", "/snapshots")]

    async def images(self) -> list[dict[str, Any]]:
        return list(await self.ask("GET", "/images"))

    async def export(self, snapshot: str, file: Path) -> None:
        part = file.with_name(f".{file.name}.{secrets.token_hex(4)}.part")
        timeout = httpx.Timeout(LONG_S, connect=CONNECT_S)
        try:
            async with self.http.stream("GET", f"/snapshots/{quote(snapshot)}", timeout=timeout) as answer:
                if answer.is_error:
                    raise messages.error_from_json(answer.status_code, _json(await answer.aread()), self.url)
                with open(part, "xb") as out:
                    async for chunk in answer.aiter_bytes(1 << 20):
                        await asyncio.to_thread(out.write, chunk)
            os.rename(part, file)
        except httpx.HTTPError as error:
            raise self._silent(error) from error
        finally:
            part.unlink(missing_ok=True)

    async def import_(self, file: Path) -> str:
        if not file.is_file():
            raise InputError(f"{file}: there is no such file")
        headers = {"content-length": str(file.stat().st_size)}
        answer = await self.ask("PUT", "/images", again=False, long=True, content=_pieces(file), headers=headers)
        return str(answer["id"])

    async def persist(self, id: str) -> Snapshot:
        """Have the host copy to disk what a snapshot holds in memory."""
        return messages.snapshot_from_json(
            await self.ask("POST", f"/snapshots/{quote(id, safe='')}/persist", long=True)
        )

    async def remove_snapshot(self, id: str) -> None:
        await self.ask("DELETE", f"/snapshots/{quote(id)}")


async def _pieces(file: Path) -> AsyncIterator[bytes]:
    with open(file, "rb") as source:
        while chunk := await asyncio.to_thread(source.read, 1 << 20):
            yield chunk


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return None


class RemoteJob(Job):
    """A job whose end is looked at by the host too: only that sees why the kernel killed something."""

    def __init__(self, job: Job, looked: Callable[[ExecResult], Awaitable[ExecResult]]) -> None:
        self.job, self.looked = job, looked
        self.result: asyncio.Task[ExecResult] | None = None

    def output(self) -> AsyncIterator[tuple[Literal["stdout", "stderr"], bytes]]:
        return self.job.output()

    async def write(self, data: bytes) -> None:
        await self.job.write(data)

    async def close_stdin(self) -> None:
        await self.job.close_stdin()

    async def signal(self, number: int) -> None:
        await self.job.signal(number)

    async def resize(self, rows: int, columns: int) -> None:
        await self.job.resize(rows, columns)

    async def wait(self, timeout: float | None = None) -> ExecResult:
        async def end() -> ExecResult:
            return await self.looked(await self.job.wait())

        if self.result is None:
            self.result = asyncio.create_task(end())
        return await asyncio.wait_for(asyncio.shield(self.result), timeout)


def on_line(
    call: Callable[Concatenate[AgentPod, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate["RemotePod", P], Coroutine[Any, Any, T]]:
    """The same call, once the pod's line is there (again)."""

    async def connected(self: "RemotePod", /, *args: P.args, **kwargs: P.kwargs) -> T:
        await self.connected()
        return await call(self, *args, **kwargs)

    return connected


class RemotePod(AgentPod):
    """A pod on another machine. With `renews` it is ours to keep alive, and ends when we do not."""

    def __init__(self, door: RemoteHostClient, described: Mapping[str, Any], renews: bool) -> None:
        super().__init__(described["id"], described["environment"], described["workdir"], described["user"])
        self.door, self.described, self.renews = door, dict(described), renews
        self.image = described["image"]
        self.limits = messages.limits_from_json(described["limits"])
        self.egress = messages.egress_from_json(described["egress"])
        self.lease = float(described["lease"])
        left = described["remaining"]
        self.ends = math.inf if left is None else time.monotonic() + left  # by our clock, which nobody sets
        self.fetched: list[Event] = []
        self.mark: dict[str, str] = {}  # how far the host's events have been read
        self.over: PodError | None = None
        self.making: asyncio.Task[None] | None = None
        self.renewing: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------------------------------- the line

    async def open_link(self) -> Link:
        return await self.door.open_link(self.id)

    async def connect(self) -> None:
        """Connect for the first time, and keep the pod alive from now on if that is ours to do."""
        await self._connect()
        if self.renews and self.lease:
            self.renewing = asyncio.create_task(self._renew_for_ever())

    async def _connect(self) -> None:
        agent = Agent(await self.open_link(), self.id)
        await agent.greeting(CONNECT_S)
        if self.over is not None:
            agent.close()
            raise self.over
        agent.on_lost = self._lost
        self.agent = agent
        self._renew()

    def _lost(self) -> None:
        if self.over is None and self.renews:  # at once, not when next needed: the lease goes on
            self._make()

    def _make(self) -> "asyncio.Task[None]":
        if self.making is None or self.making.done():
            self.making = asyncio.create_task(self._reconnect())
            self.making.add_done_callback(lambda task: task.cancelled() or task.exception())  # told to who asks
        return self.making

    async def connected(self) -> None:
        """Wait until there is a line; PodGone when the pod has ended, HostGone when its host stays silent."""
        if self.over is not None:
            raise self.over
        if self.agent is None or self.agent.gone is not None:
            await asyncio.shield(self._make())

    async def _reconnect(self) -> None:
        deadline, pause = time.monotonic() + max(self.lease, RECONNECT_S), 0.02
        while True:
            try:
                return await self._connect()
            except PodGone as error:
                if self.over is None:
                    self._end(error)
                    self.record("gone", {"reason": str(error)})
                raise
            except PodError:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(pause)
            pause = min(1.0, pause * 1.5)

    def _end(self, why: PodError) -> None:
        self.over = self.over or why
        self.door.pods.pop(self.id, None)
        for task in (self.renewing, self.making):
            if task is not None and task is not asyncio.current_task():
                task.cancel()
        if self.agent is not None:
            agent, self.agent = self.agent, None
            agent.close()

    def _renew(self) -> None:
        """Tell the agent how long we want it for. Nobody waits for the answer: a paused pod gives none."""
        if not self.renews or not self.lease or self.agent is None or self.agent.gone is not None:
            return
        granted = max(0.001, min(self.lease, self.ends - time.monotonic()))
        self.agent.next_call += 1
        fields = ((protocol.TIME, math.ceil(granted * 1000)), (protocol.FLAGS, 0))
        self.agent.link.send(protocol.frame(protocol.OWN, self.agent.next_call, *fields))

    async def _renew_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self.lease / 3)
            self._renew()
            with contextlib.suppress(EtudeError):
                await self.refresh()

    def release(self) -> None:
        """Let go of the pod without closing it: one that is ours ends with its lease."""
        self._end(PodGone(f"pod {self.id} was let go of"))

    # ------------------------------------------------------------------------------------------- commands and files

    read = on_line(AgentPod.read)
    write = on_line(AgentPod.write)
    list = on_line(AgentPod.list)
    stat = on_line(AgentPod.stat)
    remove = on_line(AgentPod.remove)
    make_directory = on_line(AgentPod.make_directory)
    _make_link = on_line(AgentPod._make_link)

    async def exec(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout: float | None = None,
        max_output: int = MAX_OUTPUT,
        user: str | None = None,
    ) -> ExecResult:
        await self.connected()
        result = await super().exec(
            command, cwd=cwd, env=env, stdin=stdin, timeout=timeout, max_output=max_output, user=user
        )
        return await self._looked(result)

    async def spawn(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        user: str | None = None,
        terminal: tuple[int, int] | None = None,
    ) -> Job:
        await self.connected()
        job = await super().spawn(command, cwd=cwd, env=env, timeout=timeout, user=user, terminal=terminal)
        return RemoteJob(job, self._looked)

    async def _looked(self, result: ExecResult) -> ExecResult:
        """Ask the host whether memory ran out, when a command failed in a pod that has a limit on it."""
        if result.exit_code == 0 or result.out_of_memory or self.limits.memory is None:
            return result
        with contextlib.suppress(EtudeError):  # the command's own result matters more
            if (await self._ask("POST", "memory"))["ran_out"]:
                self.record("out-of-memory", {"exit_code": result.exit_code})
                return replace(result, out_of_memory=True)
        return result

    # ------------------------------------------------------------------------------------------- life

    async def _ask(self, method: str, verb: str, **options: Any) -> Any:
        if self.over is not None:
            raise self.over
        return await self.door.ask(method, f"/pods/{self.id}/{verb}".rstrip("/"), **options)

    async def pause(self) -> None:
        await self._ask("POST", "pause")

    async def resume(self) -> None:
        await self._ask("POST", "resume")
        self._renew()

    async def snapshot(self, kind: SnapshotKind | None = None) -> Snapshot:
        plain = await self._ask("POST", "snapshot", again=False, long=True, json={"kind": kind})
        await self._settle()
        return messages.snapshot_from_json(plain)

    async def fork(self, n: int = 1, kind: SnapshotKind | None = None) -> Sequence[Pod]:
        fleet = self.door.fleet
        if fleet is not None and len(fleet.doors) > 1 and self.id in fleet.homes:
            return await fleet.fork(self, n, kind)
        found = await self._ask("POST", "fork", again=False, long=True, json={"n": n, "kind": kind})
        children, _ = await asyncio.gather(self.door.adopt_children(found, self.renews), self._settle())
        return children

    async def _settle(self) -> None:
        """After what may have started the pod anew: have a line that leads to it as it is now."""
        with contextlib.suppress(PodError):
            await self.line.ask(protocol.PING)
        await self.connected()
        with contextlib.suppress(EtudeError):
            await self.refresh()

    async def close(self) -> None:
        if self.over is not None:
            return
        self._end(PodGone(f"pod {self.id} is closed"))
        try:
            self._take_events(await self.door.ask("DELETE", f"/pods/{self.id}", params=self.mark))
        except HostGone:
            if not self.lease:
                raise
            self.record("unreachable", {"ends_within_s": self.lease})  # nobody renews it any more

    async def stats(self) -> Mapping[str, float]:
        return dict((await self._ask("GET", ""))["stats"])

    # ------------------------------------------------------------------------------------------- the log

    async def refresh(self) -> None:
        """Fetch the events that the host has recorded since the last time."""
        self._take_events(await self._ask("GET", "events", params=self.mark))

    def _take_events(self, answer: Mapping[str, Any]) -> None:
        self.fetched += map(messages.event_from_json, answer["events"])
        self.mark = {"after": str(answer["next"]), "of": str(answer["of"])}

    def events(self) -> Sequence[Event]:
        """What happened here and, as of the last look, on the host: taken at every renewal, snapshot and the end."""
        return tuple(sorted((*self.history, *self.fetched), key=lambda event: event.time))
