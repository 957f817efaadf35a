"""Weight versions: a reader rebuilds weights bit for bit, from any start, despite damage and a killed trainer."""

import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from weight_states import State, stepped, weights

from etude.errors import BusyError, InputError
from etude.weights import publisher as publisher_module
from etude.weights.hashed import checksum
from etude.weights.object_store import ObjectStore
from etude.weights.owner import claimed
from etude.weights.publisher import Publisher, PublishingFailed
from etude.weights.versions import (
    BrokenChain,
    follow,
    latest,
    prune,
    read_manifest,
    read_version,
    version_numbers,
    write_version,
)


def write_chain(store: ObjectStore, count: int, full_every: int = 4, shard_bytes: int = 1500) -> list[State]:
    states, parent, state = [], None, weights(0)
    for number in range(count):
        state = stepped(state, number)
        version = write_version(store, number, state, None if number % full_every == 0 else parent, shard_bytes)
        parent = version, state
        states.append(state)
    return states


@pytest.fixture(params=["directory", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return ObjectStore(
        tmp_path / "store" if request.param == "directory" else f"memory://{tmp_path.name}-{random.random()}"
    )


def test_every_version_is_rebuilt_to_the_bit_from_any_start(store: ObjectStore) -> None:
    states = write_chain(store, 10)
    for number, state in enumerate(states):
        version, found = read_version(store, number)
        assert checksum(found) == checksum(state)
        assert version.full == (number % 4 == 0)
    have = read_version(store, 2)
    for number in range(3, 10):
        have = read_version(store, number, have)
        assert checksum(have[1]) == checksum(states[number])
    assert latest(store) == 9
    version, found = follow(store)
    assert (version.number, checksum(found)) == (9, checksum(states[9]))
    assert follow(store, (version, found))[1] is found
    assert len(version.shards) == 3


def test_a_delta_is_a_fraction_of_a_full_version(store: ObjectStore) -> None:
    state = weights(0, size=50_000)
    full = write_version(store, 0, state, None)
    delta = write_version(store, 1, stepped(state, 1), (full, state))
    assert delta.bytes < full.bytes / 30
    assert delta.changed / delta.values == pytest.approx(0.02, rel=0.1)


def test_other_tensors_make_a_full_version(store: ObjectStore) -> None:
    state = weights(0)
    first = write_version(store, 0, state, None)
    other = {**state, "new": torch.zeros(3)}
    assert write_version(store, 1, other, (first, state)).full
    assert checksum(follow(store, (first, state))[1]) == checksum(other)


def damage(store: ObjectStore, version: int, part: str, how: str) -> None:
    """Damage an object of a version: its manifest, or the shard whose name begins so."""
    name = f"versions/{version:08}"
    name += f"/{next(each for each in store.names(name) if each.startswith(part))}"
    data = store.get(name)
    assert data is not None
    if how == "missing":
        store.remove(name)
    else:
        middle = len(data) // 2
        store.put(
            name, data[:middle] if how == "torn" else data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :]
        )


@pytest.mark.parametrize("how", ["missing", "torn", "flipped"])
@pytest.mark.parametrize("part", ["manifest.json", "shard-001"])
@pytest.mark.parametrize("broken", [5, 7])
def test_a_damaged_delta_is_detected_and_costs_at_most_the_way_to_the_last_full_version(
    tmp_path: Path, how: str, part: str, broken: int
) -> None:
    store = ObjectStore(tmp_path)
    states = write_chain(store, 8)
    damage(store, broken, part, how)
    with pytest.raises(BrokenChain):
        read_version(store, 7)
    version, found = follow(store)
    assert version.number == broken - 1  # as far as the chain still reaches
    assert checksum(found) == checksum(states[version.number])
    # a reader past the damage is not affected
    have = (read_manifest(store, 6), states[6]) if broken == 5 and part != "manifest.json" else None
    if have is not None:
        assert checksum(follow(store, have)[1]) == checksum(states[7])


def test_a_reader_with_newer_weights_than_can_be_rebuilt_keeps_them(tmp_path: Path) -> None:
    store = ObjectStore(tmp_path)
    states = write_chain(store, 8)
    have = read_version(store, 6)
    damage(store, 7, "shard-000", "flipped")
    version, found = follow(store, have)
    assert version.number == 6
    assert checksum(found) == checksum(states[6])


def test_a_version_without_a_manifest_does_not_exist(tmp_path: Path) -> None:
    store = ObjectStore(tmp_path)
    states = write_chain(store, 3)
    store.put("versions/00000003/shard-000", b"half an upload")
    version, found = follow(store)
    assert (version.number, checksum(found)) == (2, checksum(states[2]))


def test_an_empty_store_is_an_error(store: ObjectStore) -> None:
    with pytest.raises(BrokenChain, match="no version yet"):
        follow(store)


def test_retention_keeps_the_last_full_versions_and_what_follows_them(store: ObjectStore) -> None:
    states = write_chain(store, 11)
    assert prune(store, 2) == [0, 1, 2, 3]
    assert version_numbers(store) == list(range(4, 11))
    assert checksum(follow(store)[1]) == checksum(states[10])
    assert prune(store, 2) == []


def test_a_pinned_version_stays_with_all_that_it_is_rebuilt_from(store: ObjectStore) -> None:
    states = write_chain(store, 15)  # full versions 0, 4, 8, 12
    assert prune(store, 1, pinned=(6, 8, 99)) == [0, 1, 2, 3, 7, 9, 10, 11]
    for number in (4, 5, 6, 8, 12, 13, 14):
        assert checksum(read_version(store, number)[1]) == checksum(states[number])
    # A reader may go back to it, and then follow the chain again.
    have = read_version(store, 6, read_version(store, 14))
    assert checksum(have[1]) == checksum(states[6])
    assert follow(store, have)[0].number == 14
    assert prune(store, 1) == [4, 5, 6, 8]


def test_an_unknown_protocol_is_refused() -> None:
    with pytest.raises(InputError, match="no such object store"):
        ObjectStore("nonsense://x")


# ------------------------------------------------------------------------------------------------- publishing


def test_publishing_never_waits_and_skips_overtaken_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ObjectStore(tmp_path)
    gate, put = threading.Event(), store.put

    def slow_put(name: str, data: bytes) -> None:
        gate.wait(20)
        put(name, data)

    monkeypatch.setattr(store, "put", slow_put)
    state = weights(0)
    with Publisher(store, full_every=100) as publisher:
        for number in range(1, 6):
            state = stepped(state, number)
            publisher.publish_soon(number, state)
            if number == 1:
                while publisher._waiting:
                    time.sleep(0.01)
        assert latest(store) is None
        gate.set()
        publisher.flush(20)
        assert [(p.version.number, p.version.parent, p.skipped) for p in publisher.history] == [(1, None, 0), (5, 1, 3)]
    assert checksum(follow(store)[1]) == checksum(state)


def test_a_pinned_version_is_published_although_newer_ones_overtake_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, states = ObjectStore(tmp_path / "store"), [stepped(weights(0), number) for number in range(6)]
    put, open_, failures = store.put, threading.Event(), [OSError("away")] * 2

    def slow_put(name: str, data: bytes) -> None:
        open_.wait(60)
        if failures:
            raise failures.pop()
        put(name, data)

    monkeypatch.setattr(store, "put", slow_put)
    monkeypatch.setattr("etude.weights.publisher.WAIT_S", 0.01)
    with Publisher(store) as publisher:
        for number, state in enumerate(states):
            publisher.publish_soon(number, state, pinned=number in (0, 2, 3))
        assert publisher.behind == 5
        open_.set()
        publisher.flush(60)
        assert [each.version.number for each in publisher.history] == [0, 2, 3, 5]
        assert sum(each.skipped for each in publisher.history) == 2
    for number in (0, 2, 3, 5):
        assert checksum(read_version(store, number)[1]) == checksum(states[number])


def test_weights_changed_after_publishing_do_not_change_what_is_published(tmp_path: Path) -> None:
    state = weights(0)
    before = checksum(state)
    with Publisher(ObjectStore(tmp_path)) as publisher:
        publisher.publish_soon(1, state)
        for tensor in state.values():
            tensor.zero_()
    assert checksum(follow(ObjectStore(tmp_path))[1]) == before


def test_full_versions_are_written_regularly_and_old_ones_removed(tmp_path: Path) -> None:
    store, state = ObjectStore(tmp_path), weights(0)
    with Publisher(store, full_every=3, keep=2) as publisher:
        for number in range(1, 14):
            state = stepped(state, number)
            publisher.publish_soon(number, state)
            publisher.flush(20)
    assert [p.version.number for p in publisher.history if p.version.full] == [1, 4, 7, 10, 13]
    assert version_numbers(store) == [10, 11, 12, 13]


def test_after_a_store_failure_the_newest_version_is_published_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etude.weights.publisher.WAIT_S", 0.01)
    store, state = ObjectStore(tmp_path), weights(0)
    put = store.put
    with Publisher(store, full_every=100) as publisher:
        publisher.publish_soon(1, state)
        publisher.flush(20)

        def failing(name: str, data: bytes) -> None:
            raise OSError("no space left")

        monkeypatch.setattr(store, "put", failing)
        publisher.publish_soon(2, stepped(state, 2))
        with pytest.raises(PublishingFailed, match=r"not written after 0\.3 s: OSError: no space left"):
            publisher.flush(0.3)
        publisher.publish_soon(3, stepped(state, 3))  # costs no step
        assert publisher.behind == 2
        monkeypatch.setattr(store, "put", put)
        publisher.flush(20)
        assert (publisher.history[-1].version.number, publisher.history[-1].version.full) == (3, True)
        assert (publisher.behind, publisher.problem) == (0, "")
    again = Publisher(store)
    again.publish_soon(3, state)
    with pytest.raises(PublishingFailed, match="not newer than 3"):
        again.flush(20)


def test_a_store_belongs_to_one_run(tmp_path: Path) -> None:
    store = ObjectStore(tmp_path / "store")
    with claimed(store, "first", inside=False), Publisher(store, run="first") as publisher:
        publisher.publish_soon(1, weights(0))
        publisher.flush(20)
        with pytest.raises(BusyError, match=r"weight store .* is in use by pid"), claimed(store, "first", inside=False):
            pass
        with pytest.raises(BusyError), claimed(store, "second", inside=False):
            pass
    refused = pytest.raises(InputError, match=r"another run; name another place in rl\.weights\.store, or delete")
    with refused, claimed(store, "second", inside=False):
        pass
    with claimed(store, "first", inside=False):  # resumed
        pass
    (tmp_path / "store" / "owner.json").unlink()  # leftovers of a run that is not known
    with pytest.raises(InputError, match="another run"), claimed(store, "second", inside=False):
        pass


def test_a_directory_that_is_away_is_not_written_to_and_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etude.weights.publisher.WAIT_S", 0.01)
    monkeypatch.setattr("etude.weights.publisher.MAX_WAIT_S", 0.02)
    place, state = tmp_path / "mounted", weights(0)
    store = ObjectStore(place)
    with claimed(store, "run", inside=False), Publisher(store, run="run") as publisher:
        publisher.publish_soon(0, state)
        publisher.flush(20)
        place.rename(tmp_path / "away")
        place.mkdir()  # an empty mount point
        for number in range(1, 6):
            publisher.publish_soon(number, state := stepped(state, number))
        with pytest.raises(PublishingFailed, match="is not there"):
            publisher.flush(0.3)
        assert list(place.iterdir()) == []
        place.rmdir()
        (tmp_path / "away").rename(place)
        publisher.flush(20)
    version, read = follow(store)
    assert version.number == 5
    assert all(torch.equal(read[name], state[name]) for name in state)


KILLED = """
import sys, torch
sys.path.insert(0, {support!r})
from weight_states import stepped, weights
from etude.weights.object_store import ObjectStore
from etude.weights.publisher import Publisher
store, state = ObjectStore({store!r}), weights(0, size=200_000)
with Publisher(store, full_every=5) as publisher:
    for number in range(1, 10_000):
        state = stepped(state, number)
        publisher.publish_soon(number, state)
        publisher.flush(20)
        print(number, flush=True)
"""


def test_a_trainer_killed_while_it_publishes_leaves_complete_versions_only(tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    store = ObjectStore(tmp_path / "store")
    code = KILLED.format(support=str(Path(__file__).parents[1] / "support"), store=str(tmp_path / "store"))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        published = [trainer.stdout.readline() for _ in range(3)]
        time.sleep(random.Random(seed).random() * 0.2)
        trainer.kill()
    version, found = follow(store)
    assert version.number >= int(published[-1])
    state = weights(0, size=200_000)
    for number in range(1, version.number + 1):
        state = stepped(state, number)
    assert checksum(found) == checksum(state), f"seed {seed}"


def test_a_pointer_that_a_late_write_has_set_back_is_set_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_module, "RECHECK_S", 0.02)
    store = ObjectStore(tmp_path)
    with Publisher(store) as publisher:
        for number in (1, 2):
            publisher.publish_soon(number, weights(number))
            publisher.flush()
        store.put("latest.json", b'{"number": 1}')
        deadline = time.monotonic() + 60
        while latest(store) != 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        store.put("latest.json", b'{"number": 3}')  # of a newer trainer
        time.sleep(0.2)
        assert latest(store) == 3


def test_a_late_write_of_a_first_attempt_leaves_the_second_one_whole(tmp_path: Path) -> None:
    class LateStore(ObjectStore):
        late: tuple[str, bytes] | None = None

        def put(self, name: str, data: bytes) -> None:
            if name.startswith("versions/00000002/shard") and self.late is None:
                self.late = name, data
                raise OSError("timed out")
            super().put(name, data)

    store = LateStore(tmp_path)
    with Publisher(store) as publisher:
        for number in (1, 2):
            publisher.publish_soon(number, weights(number))
            publisher.flush()
    assert store.late is not None
    ObjectStore(tmp_path).put(*store.late)
    assert checksum(read_version(store, 2)[1]) == checksum(weights(2))


def test_a_first_version_of_which_a_part_was_written_is_written_again(tmp_path: Path) -> None:
    class TornStore(ObjectStore):
        torn = False

        def put(self, name: str, data: bytes) -> None:
            super().put(name, data)
            if "shard" in name and not self.torn:
                self.torn = True
                raise OSError("no response")

    store = TornStore(tmp_path)
    with Publisher(store) as publisher:
        publisher.publish_soon(0, weights(0))
        publisher.flush()
    assert latest(store) == 0
