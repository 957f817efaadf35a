"""Versions that several processes write together: visible whole or not at all."""

import itertools
import random
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import torch
from weight_states import stepped, weights

from etude.errors import InputError
from etude.weights.hashed import checksum
from etude.weights.object_store import ObjectStore
from etude.weights.publisher import Publisher, PublishingFailed
from etude.weights.versions import BrokenChain, Part, WeightState, commit_version, follow, latest, write_version

COUNT = 3


def divided(state: WeightState, count: int = COUNT) -> list[dict[str, torch.Tensor]]:
    """Return the tensors of each process."""
    return [{name: state[name] for name in sorted(state)[number::count]} for number in range(count)]


def test_parts_in_any_order_are_one_version_once_all_are_there() -> None:
    for order in itertools.permutations(range(COUNT)):
        store = ObjectStore(f"memory://parts-{order}")
        state, last = weights(0), [None] * COUNT
        for number in range(4):
            parts = divided(state)
            for done, index in enumerate(order):
                assert commit_version(store, number, COUNT) is None
                if number:
                    assert follow(store)[0].number == number - 1
                else:
                    with pytest.raises(BrokenChain):
                        follow(store)
                parent = last[index] if number % 3 else None
                written = write_version(store, number, parts[index], parent, 300, Part(index, COUNT))
                last[index] = (written, parts[index])  # type: ignore[call-overload]
                assert done == COUNT - 1 or commit_version(store, number, COUNT) is None
            found = commit_version(store, number, COUNT)
            assert found is not None
            assert found.full == (number % 3 == 0)
            version, read = follow(store)
            assert version == found
            assert read.keys() == state.keys()
            assert all(torch.equal(read[name], state[name]) for name in state)
            state = stepped(state, number + 1)


def test_parts_against_different_parents_are_refused() -> None:
    store, state = ObjectStore("memory://parents"), weights(0)
    first, second = divided(state, 2)
    before = write_version(store, 0, first, None, part=Part(0, 2))
    write_version(store, 0, second, None, part=Part(1, 2))
    assert commit_version(store, 0, 2)
    write_version(store, 1, first, (before, first), part=Part(0, 2))
    write_version(store, 1, second, None, part=Part(1, 2))
    with pytest.raises(InputError, match="deltas against different versions"):
        commit_version(store, 1, 2)
    assert follow(store)[0].number == 0


def test_a_part_that_cannot_be_written_delays_the_version_and_costs_no_full_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etude.weights.publisher.WAIT_S", 0.01)
    stores = [ObjectStore(tmp_path) for _ in range(COUNT)]
    put = stores[1].put
    with ExitStack() as stack:
        publishers = [
            stack.enter_context(Publisher(store, full_every=100, part=Part(number, COUNT)))
            for number, store in enumerate(stores)
        ]
        state = weights(0)
        for publisher, part in zip(publishers, divided(state), strict=True):
            publisher.publish_soon(1, part)
        for publisher in publishers:
            publisher.flush(20)

        def failing(name: str, data: bytes) -> None:
            raise OSError("no space left")

        monkeypatch.setattr(stores[1], "put", failing)
        state = stepped(state, 2)
        for publisher, part in zip(publishers, divided(state), strict=True):
            publisher.publish_soon(2, part)
        publishers[2].flush(20)
        for number in (0, 1):
            with pytest.raises(PublishingFailed, match="not written after"):
                publishers[number].flush(0.3)
        assert [publisher.busy for publisher in publishers] == [True, True, False]
        assert latest(stores[0]) == 1
        assert publishers[1].problem == "OSError: no space left"
        while not publishers[0].problem:
            time.sleep(0.01)
        assert publishers[0].problem == "version 2 waits for the part of another process"
        with pytest.raises(InputError, match="while another is published"):
            publishers[1].publish_soon(3, divided(state)[1])
        for publisher in publishers:
            publisher.skip(3)
        assert publishers[0].behind == 2
        monkeypatch.setattr(stores[1], "put", put)
        for publisher in publishers:
            publisher.flush(20)
        version, read = follow(stores[0])
        assert (version.number, version.parent) == (2, 1)
        assert checksum(read) == checksum(state)


WRITER = """
import sys
sys.path.insert(0, {support!r})
from weight_states import stepped, weights
from etude.weights.object_store import ObjectStore
from etude.weights.publisher import Publisher
from etude.weights.versions import Part
state = weights(0, size=50_000)
own = sorted(state)[{number}::2]
with Publisher(ObjectStore({store!r}), full_every=4, part=Part({number}, 2)) as publisher:
    for number in range(1, 10_000):
        state = stepped(state, number)
        publisher.publish_soon(number, {{name: state[name] for name in own}})
        publisher.flush(60)
        print(number, flush=True)
        sys.stdin.readline()
"""


def test_a_killed_process_leaves_the_last_whole_version(tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng, support = random.Random(seed), str(Path(__file__).parents[1] / "support")
    for round_ in range(4):
        store = tmp_path / str(round_)
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", WRITER.format(support=support, store=str(store), number=number)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(2)
        ]
        done, versions, victim = 0, rng.randrange(1, 6), rng.randrange(2)
        try:
            while done < versions:
                for process in processes:
                    assert process.stdout is not None
                    done = int(process.stdout.readline())
                for process in processes:
                    assert process.stdin is not None
                    process.stdin.write("\n")
                    process.stdin.flush()
                if done == versions:
                    processes[victim].send_signal(signal.SIGKILL)
        finally:
            for process in processes:
                process.kill()
                with suppress(BrokenPipeError):
                    process.communicate()
        state = weights(0, size=50_000)
        states = {number: (state := stepped(state, number)) for number in range(1, done + 2)}
        version, read = follow(ObjectStore(store))
        assert version.number in (done, done + 1)
        assert checksum(read) == checksum(states[version.number])
        with pytest.raises(BrokenChain):
            follow(ObjectStore(tmp_path / "empty"))
