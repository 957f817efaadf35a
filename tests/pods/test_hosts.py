"""A fleet over several hosts: real `etude pods serve` processes on the loopback interface, each with its own store."""

import asyncio
import contextlib
import logging
import os
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from etude.errors import InputError
from etude.pods.fleet import Fleet, open_fleet
from etude.pods.host_client import HostGone, HostRefused
from etude.pods.images import transfer
from etude.pods.images.builder import LayerBuilder
from etude.pods.images.dockerfile import build
from etude.pods.images.records import Image
from etude.pods.images.store import Store
from etude.pods.pod import Pod, PodError
from etude.pods.remote.client import RemoteHostClient, RemotePod
from etude.pods.settings import PodSettings
from tests.pods.serving import Server, open_client, server, settings_of, wait_until_empty

LEASE_S = 3.0
SIZE = 3 << 20


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Server, ...]]:
    with server("--max-pods", "3") as first, server() as second:
        yield first, second


@contextlib.asynccontextmanager
async def fleet_of(*urls: str, state: Path, **options: Any) -> AsyncIterator[Fleet]:
    async with asyncio.timeout(300), open_fleet(pods=settings_of(*urls, lease_s=LEASE_S), state=state, **options) as it:
        yield it


def in_fleet(servers: tuple[Server, ...], state: Path, work: Callable[[Fleet], Awaitable[None]]) -> None:
    async def inside() -> None:
        async with fleet_of(*(each.url for each in servers), state=state) as fleet:
            await work(fleet)

    asyncio.run(inside())


def url_of(pod: Pod) -> str:
    assert isinstance(pod, RemotePod)
    return pod.client.url


def layered_image(store: Store, base: Image, content: bytes) -> Image:
    """Return an image with one more layer than its base: a file."""

    def fill(made: Path) -> None:
        (made / "srv").mkdir()
        (made / "srv/file").write_bytes(content)

    return base.with_(layers=(*base.layers, store.add_layer(fill)))


def sent_to(fleet: Fleet, url: str) -> int:
    return fleet.distribution.sent[fleet.clients[url]]


async def until(true: Callable[[], bool]) -> None:
    while not true():  # the fleet has a time limit
        await asyncio.sleep(0.05)


# ------------------------------------------------------------------------------------------- images


def test_an_image_that_no_host_has_is_sent_to_each_host_once(hosts: tuple[Server, ...], tmp_path: Path) -> None:
    async def work(fleet: Fleet) -> None:
        image = layered_image(fleet.store, await fleet.resolve("host"), os.urandom(SIZE))
        pods = await asyncio.gather(*(fleet.create(image) for _ in range(7)))  # the first host takes three
        assert {(await pod.exec("stat -c %s /srv/file")).stdout.strip() for pod in pods} == {str(SIZE)}
        assert {url_of(pod) for pod in pods} == set(fleet.clients)
        for url in fleet.clients:
            assert SIZE < sent_to(fleet, url) < 2 * SIZE, "one transfer, for all pods there"
        await asyncio.gather(*(pod.close() for pod in pods))
        before = dict(fleet.distribution.sent)
        changed = image.with_(env={**image.env, "A": "b"}, workdir="/srv")
        async with await fleet.create(changed) as pod:
            assert (await pod.exec("pwd; echo $A")).stdout == "/srv\nb\n"
        fleet.distribution.known.clear()
        async with await fleet.create(image):
            assert dict(fleet.distribution.sent) == before

    in_fleet(hosts, tmp_path, work)


def test_a_named_image_is_found_here_and_on_hosts_and_must_be_the_same(
    hosts: tuple[Server, ...], tmp_path: Path
) -> None:
    async def work(fleet: Fleet) -> None:
        base = await fleet.resolve("host")
        await fleet.keep_image(layered_image(fleet.store, base, b"here").named("local-name"))
        async with await fleet.create("local-name") as pod:
            assert await pod.read("/srv/file") == b"here"
        with pytest.raises(InputError, match=r"there is no image 'nothing' on this machine or on the pod hosts"):
            await fleet.create("nothing")
        for each, content in zip(hosts, (b"one", b"two"), strict=True):
            store = Store(each.state / "store")
            store.add_image(layered_image(store, Image.of(()), content).named("differs"))
        with pytest.raises(InputError, match=rf"'differs' is not the same everywhere: \w+ on {hosts[0].url}; \w+ on"):
            await fleet.create("differs")

    in_fleet(hosts, tmp_path, work)


def test_a_host_that_lost_its_layers_gets_them_again(hosts: tuple[Server, ...], tmp_path: Path) -> None:
    async def work(fleet: Fleet) -> None:
        image = layered_image(fleet.store, await fleet.resolve("host"), os.urandom(1000))
        async with await fleet.create(image):
            pass
        store = Store(hosts[1].state / "store")
        store.discard_layers(image.layers[-1:])
        assert store.missing([image.layers[-1].id])
        async with await fleet.create(image) as pod:
            assert (await pod.exec("wc -c < /srv/file")).stdout.strip() == "1000"

    in_fleet(hosts[1:], tmp_path, work)


def test_a_transfer_that_is_cut_is_continued(
    hosts: tuple[Server, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "PART", 1 << 18)
    offsets: list[int] = []
    plain = RemoteHostClient.request

    async def cut(self: RemoteHostClient, method: str, path: str, **options: Any) -> bytes:
        if path.endswith("/part"):
            offsets.append(options["params"]["offset"])
            if len(offsets) == 6:
                raise HostRefused("the connection was cut")
        return await plain(self, method, path, **options)

    monkeypatch.setattr(RemoteHostClient, "request", cut)

    async def work(fleet: Fleet) -> None:
        image = layered_image(fleet.store, await fleet.resolve("host"), os.urandom(SIZE))
        async with await fleet.create(image, timeout=60) as pod:
            assert (await pod.exec("wc -c < /srv/file")).stdout.strip() == str(SIZE)

    in_fleet(hosts[1:], tmp_path, work)
    again = [offset for offset in set(offsets) if offsets.count(offset) > 1]
    assert again == [offsets[5]], "only the part that was cut is sent again"


DOCKERFILE = """
FROM host AS made
WORKDIR /made
COPY words.txt .
RUN tr a-z A-Z < words.txt > loud.txt
FROM host
ENV GREETING=hello
COPY --from=made /made /result
ADD archive.tar /unpacked
COPY <<END /result/here
document
END
WORKDIR /result
RUN cat loud.txt here > both && rm here && echo $GREETING > greeting && touch owner && chown 33 owner
"""


def write_context(directory: Path, text: str = DOCKERFILE) -> Path:
    directory.mkdir()
    (directory / "words.txt").write_text("quiet\n")
    (directory / "inside").write_text("inside")
    subprocess.run(["tar", "cf", "archive.tar", "inside"], cwd=directory, check=True)
    (directory / "Dockerfile").write_text(text)
    return directory


async def build_in(fleet: Fleet, context: Path) -> Image:
    async def work(builder: LayerBuilder) -> Image:
        return await build(builder, context / "Dockerfile", context, {"host": await fleet.resolve("host")})

    return await fleet.build((context / "Dockerfile").read_text(), work)


def test_a_dockerfile_is_built_on_a_host_and_its_image_has_the_same_digest_as_here(
    hosts: tuple[Server, ...], tmp_path: Path
) -> None:
    context = write_context(tmp_path / "context")
    urls = [each.url for each in hosts]

    async def check(pod: Pod) -> None:
        done = await pod.exec("cat both greeting /unpacked/inside; stat -c %u owner; ls; pwd")
        listed = "both\ngreeting\nloud.txt\nowner\nwords.txt"
        assert done.stdout == f"QUIET\ndocument\nhello\ninside33\n{listed}\n/result\n", done

    async def work() -> None:
        async with fleet_of(*urls, state=tmp_path / "a") as fleet:
            made = await build_in(fleet, context)
            for client in fleet.clients.values():
                await fleet.distribution.bring_image(made, client)
                async with await client.create(made) as pod:
                    await check(pod)
        async with open_fleet("namespace", state=tmp_path / "here") as here:
            assert await build_in(here, context) == made, "equal Dockerfiles have equal digests"
            await check(await here.create(made))
            assert here.local is not None
        await here.local.backend.shutdown()

    asyncio.run(work())


def test_equal_run_steps_of_several_clients_run_once(hosts: tuple[Server, ...], tmp_path: Path) -> None:
    text = "FROM host\nRUN sleep 1; head -c 16 /dev/urandom | od -An -tx1 > /srv/random\n"
    contexts = [write_context(tmp_path / name, text) for name in ("a", "b", "c")]

    async def one(context: Path, state: Path) -> Image:
        async with fleet_of(*(each.url for each in hosts), state=state) as fleet:
            return await build_in(fleet, context)

    async def work() -> None:
        made = await asyncio.gather(*(one(each, each / "state") for each in contexts))
        assert len({image.id for image in made}) == 1, "the random bytes are those of one build"
        assert await one(contexts[0], tmp_path / "later") == made[0]

    asyncio.run(work())


def test_a_failed_run_names_its_line(hosts: tuple[Server, ...], tmp_path: Path) -> None:
    context = write_context(tmp_path / "context", "FROM host\nRUN echo no >&2; exit 3\n")

    async def work(fleet: Fleet) -> None:
        with pytest.raises(PodError, match=r"Dockerfile:2: RUN failed with exit code 3:\nno"):
            await build_in(fleet, context)

    in_fleet(hosts, tmp_path / "state", work)


# ------------------------------------------------------------------------------------------- snapshots, pools


async def move_snapshots(fleet: Fleet, first: str, second: str) -> None:
    one = fleet.clients[first]
    assert isinstance(one, RemoteHostClient)
    async with await one.create() as pod:
        await pod.write("a", "travels")
        snapshot = await pod.snapshot()
        assert await fleet.snapshots() == {snapshot.id}
        children = await pod.fork(4)  # the first host takes three pods
        assert [await child.read("a") for child in children] == [b"travels"] * 4
        assert second in map(url_of, children)
        await asyncio.gather(*(child.close() for child in children))
    await fleet.persist(snapshot.id)
    await until(lambda: fleet.watch.states[first][0] == "")
    async with await fleet.create(snapshot) as restored:
        assert url_of(restored) == first, "a snapshot stays with its files"
        assert await restored.read("a") == b"travels"
    await one.drain(True)
    await until(lambda: fleet.watch.states[first][0] == "draining")
    async with await fleet.create(snapshot) as moved:
        assert url_of(moved) == second
        assert await moved.read("a") == b"travels"
        await moved.write("a", "changed")
        again = await moved.snapshot()
    await one.drain(False)
    await fleet.distribution.bring_snapshot(again.id, one)
    async with await one.create(again) as back:
        assert await back.read("a") == b"changed"
    for each in (snapshot, again):
        await fleet.remove_snapshot(each.id)
    assert await fleet.snapshots() == set()


def test_snapshots_and_forks_go_to_other_hosts(hosts: tuple[Server, ...], tmp_path: Path) -> None:
    first, second = (each.url for each in hosts)

    async def work() -> None:
        async with fleet_of(first, second, state=tmp_path, owner="a run") as fleet:
            await move_snapshots(fleet, first, second)

    asyncio.run(work())


def test_snapshots_belong_to_a_run_and_are_removed_some_time_after_it(
    hosts: tuple[Server, ...], tmp_path: Path
) -> None:
    async def work() -> None:
        one = fleet_of(hosts[1].url, state=tmp_path / "a", owner="one")
        other = fleet_of(hosts[1].url, state=tmp_path / "b", owner="other")
        async with one as one_fleet, other as other_fleet:
            async with await one_fleet.create() as pod:
                taken = await pod.snapshot()
            assert await one_fleet.snapshots() == {taken.id}
            assert await other_fleet.snapshots() == set()
        store = Store(hosts[1].state / "store")
        record = store.snapshot(taken.id)
        assert (record.owner, record.lease) == ("one", 24 * 3600.0)
        assert store.expired_snapshots() == []
        two_days_ago = time.time() - 2 * 24 * 3600
        os.utime(store.root / "snapshots" / f"{taken.id}.json", (two_days_ago, two_days_ago))
        assert store.expired_snapshots() in ([taken.id], [])  # the host may have removed it already
        store.remove_snapshot(taken.id)

    asyncio.run(work())


def test_warm_pods_wait_on_the_hosts(hosts: tuple[Server, ...], tmp_path: Path) -> None:
    prepared: list[str] = []

    async def prepare(pod: Pod) -> str:
        prepared.append(pod.id)
        await pod.write("prepared", "yes")
        return f"tools of {pod.id}"

    async def work(fleet: Fleet) -> None:
        image = (await fleet.resolve("host")).with_(env={"A": "b"})
        await fleet.pool(image, 2, prepare=prepare)
        (pool,) = fleet.pools.values()
        await until(lambda: len(pool.ready) == 2)
        waiting = [pod.id for pod in pool.ready]
        async with await fleet.create(image, prepare=prepare) as pod:
            assert pod.id == waiting[0]
            assert pod.prepared == f"tools of {pod.id}"
            assert await pod.read("prepared") == b"yes"
        async with await fleet.create(image) as other:
            assert other.id not in prepared
        await fleet.pool(image, 0, prepare=prepare)
        assert fleet.pools == {}

    in_fleet(hosts, tmp_path, work)


# ------------------------------------------------------------------------------------------- hosts that fail


class OldRelease(BaseHTTPRequestHandler):
    """Answers as a host of an earlier release."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"host": "old", "version": 1}')

    def log_message(self, format: str, *arguments: object) -> None:
        pass


def test_hosts_that_cannot_be_used_are_left_out_with_one_line_each(
    hosts: tuple[Server, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good, twice = hosts[1].url, hosts[1].url.replace("127.0.0.1", "localhost")

    async def work(old: str) -> None:
        async with fleet_of(good, "http://127.0.0.1:9", old, twice, state=tmp_path) as fleet:
            async with await fleet.create() as pod:
                assert url_of(pod) in (good, twice)
            lines = [record.getMessage() for record in caplog.records if record.name == "etude.pods"]
            assert len(lines) == 3, lines
            for words in ("127.0.0.1:9 does not answer", "runs another release", "is the same as"):
                assert sum(words in line for line in lines) == 1, lines
            assert all(line.endswith("other hosts take its work") for line in lines)
        for wrong in (settings_of(good, token="a wrong token"), settings_of("http://127.0.0.1:9")):
            with pytest.raises(HostGone, match=r"(?s)no pod host can be used:.*(refuses our token|does not answer)"):
                async with open_fleet(pods=wrong, state=tmp_path):
                    pass

    with caplog.at_level(logging.WARNING), ThreadingHTTPServer(("127.0.0.1", 0), OldRelease) as old:
        threading.Thread(target=old.serve_forever, daemon=True).start()
        asyncio.run(work(f"http://127.0.0.1:{old.server_port}"))
        old.shutdown()


def test_with_the_strong_option_a_weaker_host_is_refused(
    hosts: tuple[Server, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = RemoteHostClient.report

    async def weak(self: RemoteHostClient) -> Any:
        return replace(await plain(self), lacks=("namespaces",))

    async def nothing(fleet: Fleet) -> None:
        pass

    monkeypatch.setenv("ETUDE_POD_ISOLATION", "strong")
    in_fleet(hosts[1:], tmp_path, nothing)
    monkeypatch.setattr(RemoteHostClient, "report", weak)
    with pytest.raises(HostRefused, match="isolates pods without namespaces, which ETUDE_POD_ISOLATION=strong refuses"):
        in_fleet(hosts[1:], tmp_path, nothing)


def test_a_certificate_must_be_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=private"]
    extra = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "host.pem"]
    subprocess.run([*new, *extra], cwd=tmp_path, check=True, capture_output=True)
    files = tmp_path / "host.pem", tmp_path / "key.pem"

    async def work(url: str) -> None:
        trusted = settings_of(url, certificate=files[0])
        async with open_fleet(pods=trusted, state=tmp_path / "state") as fleet, await fleet.create() as pod:
            assert (await pod.exec("echo over TLS")).stdout == "over TLS\n"
        with pytest.raises(HostRefused, match=r"its certificate is not trusted \(self-signed certificate\); name"):
            async with open_fleet(pods=settings_of(url), state=tmp_path / "state"):
                pass
        with pytest.raises(HostGone, match="does not answer"):
            async with open_fleet(pods=settings_of(url.replace("https:", "http:")), state=tmp_path / "state"):
                pass
        monkeypatch.setenv("ETUDE_PODS_CERTIFICATE", str(files[0]))
        await (await open_client(url)).close()

    with server("--certificate", str(files[0]), "--key", str(files[1])) as running:
        assert running.url.startswith("https://")
        asyncio.run(work(running.url))


def test_settings_are_checked(tmp_path: Path) -> None:
    assert PodSettings(hosts=("https://a:1/",)).hosts == ("https://a:1",)
    for values, message in (
        ({"hosts": ["a:1"]}, "is not the address of"),
        ({"hosts": ["http://user:secret@a:1"]}, "is not the address of"),
        ({"hosts": ["http://a:1", "http://a:1/"]}, "is given twice"),
        ({"lease_s": 9.0}, "lease_s would not be used"),
    ):
        with pytest.raises(ValueError, match=message):
            PodSettings(**values)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="cannot be read"):
        PodSettings(hosts=("http://a:1",), token_file=tmp_path / "none").token()
    with pytest.raises(InputError, match="expected a PEM file"):
        PodSettings(hosts=("http://a:1",), certificate=Path(__file__)).tls()


async def kill_and_restart(fleet: Fleet, first: Server, second: Server) -> None:
    lost = await fleet.clients[first.url].create()
    making = [asyncio.create_task(fleet.create(timeout=60)) for _ in range(6)]
    await asyncio.sleep(0.03)
    await asyncio.to_thread(first.end, 9)
    made = [*await asyncio.gather(*making), await fleet.create(timeout=60)]
    there = [pod for pod in made if url_of(pod) == second.url]
    assert made[-1] in there
    assert all([(await pod.exec("echo ok")).ok for pod in there])
    with pytest.raises(PodError, match="does not answer"):
        await lost.exec("true")
    await asyncio.gather(*(pod.close() for pod in made))
    await asyncio.to_thread(first.start)
    await until(lambda: fleet.watch.states[first.url][0] == "")
    async with await fleet.clients[first.url].create() as pod:
        assert (await pod.exec("echo back")).ok
    await wait_until_empty(first)


@pytest.mark.slow
def test_a_killed_host_is_left_out_and_comes_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def work(first: Server, second: Server) -> None:
        async with fleet_of(first.url, second.url, state=tmp_path) as fleet:
            await kill_and_restart(fleet, first, second)

    with caplog.at_level(logging.WARNING), server("--max-pods", "2") as first, server() as second:
        asyncio.run(work(first, second))
        lines = [record.getMessage() for record in caplog.records if first.url in record.getMessage()]
        assert any("does not answer" in line for line in lines), lines
        assert any(line.endswith("takes pods again") for line in lines), lines


@pytest.mark.slow
def test_requests_wait_while_the_only_host_is_restarted(tmp_path: Path) -> None:
    context = write_context(tmp_path / "context", "FROM host\nRUN echo built > /srv/file\n")

    async def work(host: Server) -> None:
        async with fleet_of(host.url, state=tmp_path / "state") as fleet:
            await asyncio.to_thread(host.end, 9)
            await until(lambda: fleet.watch.states[host.url][0] == "gone")
            making = [asyncio.create_task(fleet.create()), asyncio.create_task(build_in(fleet, context))]
            await asyncio.sleep(1)
            assert not any(task.done() for task in making)
            await asyncio.to_thread(host.start)
            pod, image = await asyncio.gather(*making)
            assert isinstance(pod, RemotePod)
            assert (await pod.exec("echo ok")).ok
            assert isinstance(image, Image)
            async with await fleet.create(image) as built:
                assert await built.read("/srv/file") == b"built\n"
            await pod.close()

    with server() as host:
        asyncio.run(work(host))


# ------------------------------------------------------------------------------------------- another network


@contextlib.contextmanager
def network_namespace(number: int) -> Iterator[tuple[str, str]]:
    """Make a network namespace that a link connects with this one; yield its name and its address."""
    name, address = f"etude-{os.getpid()}-{number}", f"10.213.{number}"
    link = f"et{os.getpid() % 100000}-{number}"

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)

    try:
        ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {error}")
    try:
        ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("addr", "add", f"{address}.1/24", "dev", link)
        ip("link", "set", link, "up")
        for words in (("addr", "add", f"{address}.2/24", "dev", "eth0"), ("link", "set", "eth0", "up")):
            ip("-n", name, *words)
        ip("-n", name, "link", "set", "lo", "up")
        yield name, f"{address}.2"
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@pytest.mark.slow
def test_hosts_in_other_networks_are_used_and_one_that_is_cut_off_is_left_out(tmp_path: Path) -> None:
    async def work(first: Server, second: Server, cut_off: Callable[[str], None]) -> None:
        async with fleet_of(first.url, second.url, state=tmp_path) as fleet:
            assert fleet.own_address() == "10.213.1.1"
            image = layered_image(fleet.store, await fleet.resolve("host"), os.urandom(SIZE))
            for client in fleet.clients.values():
                await fleet.distribution.bring_image(image, client)
                async with await client.create(image) as pod:
                    assert (await pod.exec("wc -c < /srv/file")).stdout.strip() == str(SIZE)
            cut_off("down")
            pods = await asyncio.gather(*(fleet.create(image, timeout=120) for _ in range(4)))
            assert {url_of(pod) for pod in pods} == {second.url}
            await until(lambda: fleet.watch.states[first.url][0] == "gone")
            cut_off("up")
            await until(lambda: fleet.watch.states[first.url][0] == "")
            async with await fleet.clients[first.url].create(image) as pod:
                assert (await pod.exec("echo back")).ok

    with network_namespace(1) as (one, one_address), network_namespace(2) as (other, other_address):

        def cut_off(state: str) -> None:
            subprocess.run(["ip", "-n", one, "link", "set", "eth0", state], check=True)

        first = server(address=one_address, prefix=("ip", "netns", "exec", one))
        second = server(address=other_address, prefix=("ip", "netns", "exec", other))
        with first as running, second as other_running:
            asyncio.run(work(running, other_running, cut_off))
            asyncio.run(wait_until_empty(running))
