"""Weight versions in a bucket behind the S3 protocol: published, followed, damaged, pruned."""

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from etude.weights.hashed import checksum
from etude.weights.object_store import ObjectStore
from etude.weights.publisher import Publisher, PublishingFailed
from etude.weights.versions import BrokenChain, follow, latest, read_manifest, read_version, version_numbers

pytestmark = pytest.mark.slow
pytest.importorskip("s3fs", reason="needs the extra test-slow")
pytest.importorskip("moto.server", reason="needs the extra test-slow")

State = dict[str, Tensor]
LARGE = 12 << 20  # bytes: more than s3fs sends in one part


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Run an S3 server with a bucket, to which the usual environment variables point."""
    import s3fs
    from moto.server import ThreadedMotoServer

    web = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    web.start()
    host, port = web.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "any-key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "anything")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem().mkdir("runs")
        yield "s3://runs"
        web.stop()
        s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def s3(server: str, request: pytest.FixtureRequest) -> str:
    return f"{server}/{request.node.name}"


def weights(seed: int, size: int = 30_000) -> State:
    chance = torch.Generator().manual_seed(seed)
    return {name: torch.randn(size, generator=chance).bfloat16() for name in ("a", "b.weight", "c")}


def stepped(state: State, seed: int) -> State:
    chance = torch.Generator().manual_seed(seed)
    moved = {name: torch.rand(tensor.shape, generator=chance) < 0.02 for name, tensor in state.items()}
    return {name: torch.where(moved[name], tensor * 1.02, tensor) for name, tensor in state.items()}


def publish(url: str, count: int, **options: int) -> list[State]:
    """Publish versions 1 to `count`, each awaited."""
    states = [weights(0)]
    with Publisher(ObjectStore(url), **options) as publisher:
        for number in range(1, count + 1):
            states.append(stepped(states[-1], number))
            publisher.publish_soon(number, states[-1])
            publisher.flush(60)
    return states


def test_two_readers_rebuild_published_versions_to_the_bit(s3: str) -> None:
    states, seen = [weights(0)], {}
    done = threading.Event()

    def read(name: str, pause: float) -> None:
        store, have, found = ObjectStore(s3), None, {}
        while not (done.is_set() and have is not None and have[0].number == 6):
            try:
                have = follow(store, have)
            except BrokenChain:  # there is no version yet
                done.wait(0.05)
                continue
            found[have[0].number] = checksum(have[1])
            done.wait(pause)
        seen[name] = found

    readers = [threading.Thread(target=read, args=each) for each in (("quick", 0.01), ("slow", 0.3))]
    for reader in readers:
        reader.start()
    with Publisher(ObjectStore(s3), full_every=4, shard_bytes=80_000) as publisher:
        for number in range(1, 7):
            states.append(stepped(states[-1], number))
            publisher.publish_soon(number, states[-1])
            publisher.flush(60)
    done.set()
    for reader in readers:
        reader.join(60)
    assert [each.version.full for each in publisher.history] == [True, False, False, False, True, False]
    assert len(publisher.history[0].version.shards) == 3
    assert publisher.history[1].version.bytes < publisher.history[0].version.bytes / 20
    for found in seen.values():
        assert found[6] == checksum(states[6])
        assert all(digest == checksum(states[number]) for number, digest in found.items())
    assert len(seen) == 2
    assert len(seen["quick"]) > 2


def test_a_missing_delta_is_detected_and_the_next_full_version_repairs_it(s3: str) -> None:
    states = publish(s3, 6, full_every=100)
    store = ObjectStore(s3)
    assert version_numbers(store) == [1, 2, 3, 4, 5, 6]
    have = read_version(store, 3)
    (shard,) = (each.name for each in read_manifest(store, 5).shards)
    store.remove(f"versions/00000005/{shard}")
    with pytest.raises(BrokenChain, match=f"version 5, {shard} is missing"):
        read_version(store, 6, have)
    assert follow(store, have)[0].number == 4
    assert follow(store)[0].number == 4
    with Publisher(ObjectStore(s3)) as publisher:
        publisher.publish_soon(7, stepped(states[6], 7))
    version, found = follow(store, have)
    assert (version.number, version.full) == (7, True)
    assert checksum(found) == checksum(stepped(states[6], 7))


def test_retention_removes_what_is_older_than_the_last_full_versions(s3: str) -> None:
    states = publish(s3, 7, full_every=2, keep=2)
    store = ObjectStore(s3)
    assert version_numbers(store) == [5, 6, 7]
    assert store.names("versions/00000001") == []
    assert checksum(read_version(store, 6)[1]) == checksum(states[6])
    assert checksum(follow(store)[1]) == checksum(states[7])


def test_an_object_of_several_parts_comes_back_complete_and_replaces_the_one_before(s3: str) -> None:
    store = ObjectStore(s3)
    assert store.get("thing") is None
    for seed in (1, 2):
        data = torch.randint(256, (LARGE,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
        store.put("thing", data.numpy().tobytes())
        assert store.get("thing") == data.numpy().tobytes()
    state = {"large": torch.randn(LARGE // 2, generator=torch.Generator().manual_seed(3)).bfloat16()}
    with Publisher(store) as publisher:
        publisher.publish_soon(1, state)
    assert read_manifest(store, 1).bytes > LARGE / 2
    assert checksum(follow(store)[1]) == checksum(state)


def test_a_store_that_is_gone_is_an_error_in_the_trainer(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.weights.publisher.WAIT_S", 0.01)
    lost = ObjectStore(s3.replace("runs", "missing"))
    assert latest(lost) is None
    publisher = Publisher(lost)
    publisher.publish_soon(1, weights(0))
    with pytest.raises(PublishingFailed, match=r"not written after 5 s: .*bucket"):
        publisher.flush(5)
    with pytest.raises(PublishingFailed, match=r"cannot be written: .*bucket"):  # it goes on trying until then
        publisher.close()
    dead = ObjectStore(
        "s3://runs/first", endpoint_url="http://127.0.0.1:1", config_kwargs={"retries": {"max_attempts": 1}}
    )
    with pytest.raises(OSError, match=r"127\.0\.0\.1:1"):
        dead.get("latest.json")
