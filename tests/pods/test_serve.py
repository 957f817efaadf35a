"""Remote hosts through their client: a real server process on the loopback interface."""

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import patient_http
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from etude.errors import InputError
from etude.pods.host_client import HostGone, HostRefused
from etude.pods.pod import Limits, PodError, PodFileError, PodGone, Unsupported
from etude.pods.remote.client import RemoteHostClient, RemotePod
from tests.pods import serving
from tests.pods.needs import need
from tests.pods.serving import TOKEN, Server, open_client, server, with_client


@pytest.fixture(scope="module")
def host() -> Iterator[Server]:
    with server() as running:
        yield running


async def until(true: Callable[[], Any], seconds: float = 60.0) -> None:
    """Wait until a condition becomes true."""
    deadline = time.monotonic() + seconds
    while True:
        found = true()
        if await found if asyncio.iscoroutine(found) else found:
            return
        assert time.monotonic() < deadline, f"not true within {seconds:g} s"
        await asyncio.sleep(0.05)


def test_a_remote_pod_runs_commands_and_returns_their_results(host: Server) -> None:
    async def work(client: RemoteHostClient) -> None:
        pod = await client.create()
        done = await pod.exec("cat; echo $A >&2; exit 3", stdin=b"in", env={"A": "err"}, cwd="/tmp")
        assert (done.exit_code, done.stdout, done.stderr) == (3, "in", "err\n")
        assert (await pod.exec(["sleep", "9"], timeout=0.2)).timed_out
        assert (await pod.exec(["no-such-program"])).exit_code == 127
        assert (await pod.exec("head -c 3000000 /dev/zero", max_output=1000)).truncated
        assert (await pod.exec("wc -c", stdin=bytes(3 << 20))).stdout.strip() == str(3 << 20)
        assert (await pod.stats())["pids"] >= 1

    with_client(host, work)


def test_a_remote_pod_says_that_it_ran_out_of_memory(host: Server) -> None:
    need(limit="memory")

    async def work(client: RemoteHostClient) -> None:
        pod = await client.create(limits=Limits(memory=128 << 20))
        eater = ["python3", "-c", "b'x' * (512 << 20)"]
        assert (await pod.exec(eater)).out_of_memory
        job = await pod.spawn(eater)
        assert (await job.wait(20)).out_of_memory
        assert not (await pod.exec("exit 1")).out_of_memory
        with pytest.raises(PodError, match="can never start here"):
            await client.create(limits=Limits(memory=1 << 50))

    with_client(host, work)


def test_jobs_stream_take_input_signals_and_terminals(host: Server) -> None:
    async def work(client: RemoteHostClient) -> None:
        pod = await client.create()
        job = await pod.spawn("read line; echo got $line; echo bad >&2; exec sleep 60")
        await job.write(b"hello\n")
        seen: dict[str, bytes] = {}
        async for stream, data in job.output():
            seen[stream] = seen.get(stream, b"") + data
            if len(seen) == 2:
                await job.signal(15)
        assert seen == {"stdout": b"got hello\n", "stderr": b"bad\n"}
        assert (await job.wait()).exit_code == 143
        terminal = await pod.spawn(["sh", "-c", "read go; stty size"], terminal=(30, 90))
        await terminal.resize(40, 120)
        await terminal.write(b"\n")
        text = b"".join([data async for _, data in terminal.output()])
        assert b"40 120" in text

    with_client(host, work)


def test_a_slow_reader_blocks_only_its_own_job(host: Server) -> None:
    async def work(client: RemoteHostClient) -> None:
        pod = await client.create()
        size = 64 << 20
        job = await pod.spawn(["head", "-c", str(size), "/dev/zero"])
        got = 0
        async for _, data in job.output():
            if not got:
                await asyncio.sleep(0.5)  # the job writes far more than all buffers hold
                assert (await pod.exec("echo quick")).stdout == "quick\n"
            got += len(data)
        assert got == size

    with_client(host, work)


def test_files_and_trees_go_both_ways(host: Server, tmp_path: Path) -> None:
    async def work(client: RemoteHostClient) -> None:
        pod = await client.create()
        big = os.urandom(12 << 20)
        await pod.write("deep/er/big", big, mode=0o750)
        assert await pod.read("deep/er/big") == big
        assert await pod.read("deep/er/big", offset=5 << 20, length=10) == big[5 << 20 :][:10]
        assert (await pod.stat("deep/er/big")).mode == 0o750
        await pod.symlink("big", "deep/er/bytes-\udcff")
        changes = await pod.diff()
        assert {
            path: info and (info.kind, info.size) for path, info in changes.items() if info and info.kind == "file"
        } == {f"{pod.workdir}/deep/er/big": ("file", len(big))}
        assert changes[f"{pod.workdir}/deep/er/bytes-\udcff"] == await pod.stat("deep/er/bytes-\udcff")
        assert await pod.diff([f"{pod.workdir}/deep/er"]) == {
            path: info for path, info in changes.items() if path.startswith(f"{pod.workdir}/deep/er")
        }
        assert await pod.diff(["/home"]) == {}
        source = tmp_path / "tree"
        (source / "sub").mkdir(parents=True)
        for n in range(40):
            (source / "sub" / f"{n}").write_text(f"{n}")
        (source / "link").symlink_to("sub/1")
        await pod.upload(source, "tree")
        await pod.download("tree", tmp_path / "back")
        assert {p.name: p.read_text() for p in (tmp_path / "back" / "sub").iterdir()} == {
            f"{n}": f"{n}" for n in range(40)
        }
        assert os.readlink(tmp_path / "back" / "link") == "sub/1"
        await pod.make_directory("made")
        assert [entry.name for entry in await pod.list()] == ["deep", "made", "tree"]
        await pod.remove("tree")
        with pytest.raises(PodFileError) as missing:
            await pod.read("tree/link")
        assert missing.value.errno == 2

    with_client(host, work)


def test_snapshots_forks_and_events(host: Server) -> None:
    need(snapshot="fs-live")

    async def work(client: RemoteHostClient) -> None:
        pod = await client.create()
        await pod.write("a", "1")
        snapshot = await pod.snapshot("fs")
        await pod.write("a", "2")  # on a new connection, because `fs` restarts the pod
        job = await pod.spawn("echo kept > b; sleep 60")
        live, children = await pod.snapshot(), await pod.fork(2)
        assert live.kind == "fs-live"
        old = await client.create(snapshot)
        assert [await each.read("a") for each in (old, *children)] == [b"1", b"2", b"2"]
        assert [await each.exec("cat b") for each in children][1].stdout == "kept\n"
        await job.signal(9)
        assert (await job.wait(10)).exit_code == 137
        await pod.close()
        await pod.close()
        kinds = [event.kind for event in pod.events()]
        for kind in ("created", "snapshot", "exit", "closed"):
            assert kind in kinds, kinds
        with pytest.raises(PodGone):
            await pod.exec("true")
        assert {each.id for each in await client.snapshots()} >= {snapshot.id, live.id}
        for each in (snapshot, live):
            await client.remove_snapshot(each.id)

    with_client(host, work)


def test_a_connection_that_a_restarting_pod_ends_is_not_the_end_of_the_pod(
    host: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, early = RemotePod._connect, []

    async def connect_too_early(self: RemotePod) -> None:
        if len(early) < 2:
            early.append(self.id)
            raise PodGone(f"pod {self.id} is gone")
        await plain(self)

    async def work(client: RemoteHostClient) -> None:
        pod = await client.create()
        monkeypatch.setattr(RemotePod, "_connect", connect_too_early)
        snapshot = await pod.snapshot("fs")
        assert (await pod.exec("echo on")).stdout == "on\n"
        assert early == [pod.id] * 2
        await client.remove_snapshot(snapshot.id)

    with_client(host, work)


def test_errors_have_the_same_class_as_on_the_host(host: Server) -> None:
    async def work(client: RemoteHostClient) -> None:
        with pytest.raises(InputError, match="no image or snapshot 'nope'"):
            await client.create("nope")
        pod = await client.create()
        with pytest.raises(Unsupported, match="memory"):
            await pod.snapshot("full")
        with pytest.raises(InputError, match="no pod ffffffffffff"):
            await client.find("ffffffffffff")
        with pytest.raises(InputError, match="no image and no snapshot"):
            await client.export("snap-none", Path("/nonexistent/file"))

    with_client(host, work)


def test_a_host_has_metrics(host: Server) -> None:
    async def work(client: RemoteHostClient) -> None:
        pod = await client.create()
        url, headers = f"{host.url}/v1/metrics", {"authorization": f"Bearer {TOKEN}"}
        while True:  # one report serves all clients for half a second
            found = await asyncio.to_thread(patient_http.get, url, headers=headers, trust_env=False)
            values = dict(line.rsplit(" ", 1) for line in found.text.splitlines() if not line.startswith("#"))
            if values["etude_pods_pods"] == "1":
                break
        await pod.close()
        assert float(values["etude_pods_memory_free_bytes"]) > 1 << 20
        assert values["etude_pods_draining"] == "0"

    with_client(host, work)
    assert patient_http.get(f"{host.url}/v1/metrics", trust_env=False).status_code == 401


def test_a_wrong_token_is_refused_and_unknown_fields_are_named(host: Server) -> None:
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {TOKEN}"}):
        for path in ("/v1/report", "/v1/pods/x/agent", "/nothing"):
            assert patient_http.get(host.url + path, headers=headers, trust_env=False).status_code == 401
    with pytest.raises(HostRefused, match="refuses our token"):
        asyncio.run(open_client(host.url, token="wrong"))
    with pytest.raises(HostGone, match="does not answer"):
        asyncio.run(open_client("http://127.0.0.1:9"))

    def post(body: Any) -> tuple[int, dict[str, str]]:
        headers = {"authorization": f"Bearer {TOKEN}"}
        answer = patient_http.post(f"{host.url}/v1/pods", json=body, headers=headers, trust_env=False)
        return answer.status_code, answer.json()

    for body, message in (
        ({"imagge": "host"}, "create: imagge is not a field"),
        ({"limits": {"memroy": 1}}, "create: limits.memroy is not a field"),
        ({"limits": {"memory": "1G"}}, "create: limits.memory is '1G'; Input should be a valid integer"),
        ({"limits": {"memory": -1}}, "limits: memory is -1; expected a positive number"),
        ({"storage": "tape"}, "create: storage is 'tape'; Input should be 'memory' or 'disk'"),
        ({"lease": 0}, "create: a pod without a lease needs a ttl"),
        ([], "create: Input should be an object"),
        ({"image": "x" * (2 << 20)}, "over"),
    ):
        status, answer = post(body)
        assert (status, answer["kind"]) == (400, "InputError")
        assert message in answer["error"]


def test_a_cancelled_creation_leaves_no_pod() -> None:
    async def work(client: RemoteHostClient) -> None:
        pod = await client.create()
        waiting = asyncio.create_task(client.create())  # --max-pods is 1
        await asyncio.sleep(0.3)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        with pytest.raises(PodError, match="not admitted within"):
            await client.create(timeout=0.3)
        await pod.close()
        again = await client.create()  # the cancelled one would hold the only place
        assert [each.id for each in await client.pods()] == [again.id]
        await again.close()

    with server("--max-pods", "1") as running:
        with_client(running, work)


def test_a_pod_whose_client_died_ends_within_its_lease(host: Server) -> None:
    async def work(client: RemoteHostClient) -> None:
        kept, lost = await client.create(), await client.create()
        assert lost.renewing is not None
        lost.renewing.cancel()  # as if the client had been killed
        await until(lambda: gone(client, lost.id))
        assert (await kept.exec("echo fine")).stdout == "fine\n"
        with pytest.raises(PodGone):
            await lost.exec("true")
        brief = await client.create(ttl=1.0)
        await until(lambda: gone(client, brief.id))

    with_client(host, work, lease_s=4.0)


async def gone(client: RemoteHostClient, id: str) -> bool:
    return id not in [pod.id for pod in await client.pods()]


def test_killing_the_server_loses_no_pod_and_its_client_reconnects() -> None:
    async def work(running: Server) -> None:
        client = await open_client(running.url)
        pod = await client.create()
        await pod.write("a", "before")
        await pod.exec("sleep 300 </dev/null >/dev/null 2>&1 & echo $! > pid")
        under_way = asyncio.create_task(pod.exec("touch begun; sleep 600"))
        while not (await pod.exec("test -e begun")).ok:
            await asyncio.sleep(0.02)
        await asyncio.to_thread(running.end, 9)
        with pytest.raises(HostGone, match="broke"):
            await under_way
        reading = asyncio.create_task(pod.read("a"))  # waits for the connection
        await asyncio.sleep(0.3)
        await asyncio.to_thread(running.start)
        assert await reading == b"before"
        assert (await pod.exec("kill -0 $(cat pid) && echo alive")).stdout == "alive\n"
        assert await asyncio.to_thread(running.end) == 0  # SIGTERM leaves the pods too
        await asyncio.to_thread(running.start)
        assert (await pod.exec("cat a")).stdout == "before"
        await pod.close()
        assert await client.pods() == []
        await client.close()

    with server() as running:
        asyncio.run(work(running))


def test_serve_with_close_closes_every_pod() -> None:
    with server("--close", "--warm", "host=1") as running:

        async def work() -> None:
            client = await open_client(running.url)
            await client.create(detached=True, ttl=100)
            assert await asyncio.to_thread(running.end) == 0
            await client.http.aclose()

        asyncio.run(work())
        assert list((running.state / "pods").iterdir()) == []


# ------------------------------------------------------------------------------------------- web pages, tokens


def test_without_a_token_no_web_page_gets_a_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "ENVIRONMENT", {**serving.ENVIRONMENT, "ETUDE_PODS_TOKEN": ""})
    with server("--no-token") as running:

        async def work(client: RemoteHostClient) -> None:
            pod = await client.create()
            evil = "http://evil.example"
            kind, text = {"content-type": "application/json"}, {"content-type": "text/plain"}
            rebound = {"host": "rebind.example"}
            async with patient_http.open_client(base_url=f"{running.url}/v1") as web:
                for headers in (text, {**text, "origin": evil}, {"origin": evil}, rebound):
                    response = await web.post("/pods", content=b"{}", headers=kind | headers)
                    assert response.is_client_error, headers
                    assert response.json()["kind"] == "InputError"
                assert (await web.get("/pods", headers=rebound)).status_code == 421
                assert [found["id"] for found in (await web.get("/pods")).json()] == [pod.id]
            tunnel = f"{running.url.replace('http', 'ws')}/v1/pods/{pod.id}/agent"
            for options in ({"origin": evil}, {"additional_headers": {"sec-fetch-site": "cross-site"}}):
                with pytest.raises(InvalidStatus, match="403"):
                    await connect(tunnel, **options)  # type: ignore[arg-type]

        with_client(running, work)


def test_a_server_makes_a_token_and_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "ENVIRONMENT", {**serving.ENVIRONMENT, "ETUDE_PODS_TOKEN": ""})
    with server() as running:
        token = (running.state / "serve-token").read_text()
        assert patient_http.get(f"{running.url}/v1/pods").status_code == 401
        running.end()
        running.start()
        known = {"authorization": f"Bearer {token}"}
        assert patient_http.get(f"{running.url}/v1/pods", headers=known).json() == []
