"""Trace files: exact round trips, and errors that say what is wrong."""

import contextlib
import json
import struct
import threading
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import zstandard
from harness_traces import equal, traces
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.chat.messages import Message, ToolCall
from etude.errors import EtudeError, InputError
from etude.harness import trace_store as store
from etude.harness.tools.tool import ToolOutcome
from etude.harness.trace import Cost, SegmentBuilder, Step, Trace
from etude.harness.trace_store import inflate, load_trace, pack_trace, save_trace, unpack_trace


def small(facts: dict[str, Any] | None = None) -> Trace:
    tape = SegmentBuilder("start", [1, 2, 3])
    tape.append_sampled([4, 5], [-0.5, -1.5], [-0.25, -2.0], [7, 8])
    tape.set_routing(np.arange(4 * 2 * 2, dtype=np.uint8).reshape(4, 2, 2))
    calls = (ToolCall("read_file", {"path": "a.py"}, "call_0", raw='{"path": "a.py"}', span=(0, 2)),)
    steps = (
        Step("prompt", Message("user", "Fix it."), 0, (0, 3)),
        Step("turn", Message("assistant", "", "Hm.", calls), 0, (3, 5), (ToolOutcome("no such file", "environment"),)),
    )
    tools = ({"type": "function", "function": {"name": "read_file"}},)
    return Trace("s", "t", "chatml", "m", tools, (tape.segment(),), steps, "turns", Cost(call=2), facts=facts or {})


@settings(deadline=None, max_examples=60)
@given(traces())
def test_any_trace_round_trips_exactly(trace: Trace) -> None:
    packed = pack_trace(trace)
    assert equal(unpack_trace(packed), trace)
    assert pack_trace(unpack_trace(packed)) == packed


def test_a_trace_survives_its_file(tmp_path: Path) -> None:
    trace = small({"seed": 3})
    save_trace(trace, tmp_path / "new" / "s.trace")
    save_trace(trace, str(tmp_path / "new" / "s.trace"))
    assert equal(load_trace(tmp_path / "new" / "s.trace"), trace)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["s.trace"]


def test_arrays_are_owned_and_in_the_machines_byte_order() -> None:
    trace = small()
    (segment,) = trace.segments
    foreign = replace(segment, tokens=segment.tokens[::-1][::-1], versions=np.repeat(segment.versions, 2)[::2])
    (read,) = unpack_trace(pack_trace(replace(trace, segments=[foreign]))).segments
    assert equal(replace(trace, segments=[read]), trace)
    assert read.tokens.flags.owndata
    assert read.tokens.flags.writeable
    assert read.tokens.dtype.isnative


def test_facts_may_be_any_mapping() -> None:
    nested = MappingProxyType({"where": MappingProxyType({"x": (1, 2)})})
    trace = small()
    step = replace(trace.steps[1], outcomes=(ToolOutcome("", facts=nested),))
    read = unpack_trace(pack_trace(replace(trace, facts=nested, steps=(step,))))
    assert read.facts == read.steps[0].outcomes[0].facts == {"where": {"x": [1, 2]}}


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"a": [{"b": {1, 2}}]}, r"trace s\.facts\.a\[0\]\.b: set cannot be stored"),
        ({"a": {1: 2}}, r"trace s\.facts\.a: a mapping whose keys are not all text"),
        ({"a": np.int64(1)}, r"trace s\.facts\.a: int64"),
        ({"a": 10**5000}, "4300 digits"),
    ],
)
def test_values_that_json_cannot_represent_are_refused_with_their_place(facts: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        pack_trace(small(facts))


def test_a_deeply_nested_value_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(InputError, match="trace s: cannot be stored"):
        pack_trace(small({"deep": deep}))
    text = b'{"a":' * 100_000
    with pytest.raises(InputError, match="nested too deeply"):
        unpack_trace(store.deflate(store.MAGIC + store.VERSION + struct.pack("<Q", len(text)) + text))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sampled": np.zeros(4, bool)}, r"segments\[0\]\.made: bool \[4\]; expected bool \[5\]"),
        ({"tokens": np.zeros(5, np.int64)}, r"tokens: int64 \[5\]; expected uint32"),
        ({"routing": np.zeros((6, 1, 1), np.uint8)}, "routing"),
        ({"routing": np.zeros((5, 1), np.uint8)}, "routing"),
    ],
)
def test_inconsistent_arrays_are_refused(change: dict[str, Any], said: str) -> None:
    trace = small()
    with pytest.raises(InputError, match=said):
        pack_trace(replace(trace, segments=[replace(trace.segments[0], **change)]))


# ------------------------------------------------------------------------------------------- damage


def test_a_truncated_file_raises(tmp_path: Path) -> None:
    packed = pack_trace(small())
    path = tmp_path / "torn.trace"
    for size in range(len(packed)):
        path.write_bytes(packed[:size])
        with pytest.raises(InputError, match=r"torn\.trace: "):
            load_trace(path)
    for more in (b"\0", packed):
        with pytest.raises(InputError, match="damaged"):
            unpack_trace(packed + more)


def test_no_flipped_bit_changes_what_is_read() -> None:
    trace = small()
    packed = bytearray(pack_trace(trace))
    seen = 0
    for bit in range(8 * len(packed)):
        packed[bit // 8] ^= 1 << bit % 8
        try:
            assert equal(unpack_trace(bytes(packed)), trace), f"bit {bit}"
        except InputError:
            seen += 1
        packed[bit // 8] ^= 1 << bit % 8
    assert seen > 0.9 * 8 * len(packed)  # some bits of a zstd frame mean nothing


@settings(deadline=None, max_examples=60)
@given(st.binary(max_size=40), st.integers(0, 2**32))
def test_any_damage_raises_input_error(data: bytes, seed: int) -> None:
    packed, luck = bytearray(pack_trace(small())), np.random.default_rng(seed)
    place = luck.integers(len(packed))
    packed[place : place + len(data)] = data
    for damaged in (data, bytes(packed), store.deflate(data), store.deflate(store.MAGIC + store.VERSION + data)):
        with contextlib.suppress(InputError):
            assert equal(unpack_trace(damaged), small())


def test_a_file_cannot_claim_more_memory_than_a_trace_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 20))
    monkeypatch.setattr(store, "MAX_BYTES", 1 << 19)
    with pytest.raises(InputError, match="claims to hold 1048576 bytes"):
        unpack_trace(bomb)
    with pytest.raises(InputError, match="cannot be stored"):
        pack_trace(small({"text": "x" * (1 << 19)}))
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(b"x")
    with pytest.raises(InputError, match="claims"):
        unpack_trace(unsized)


def test_a_trace_of_another_version_says_which() -> None:
    whole = inflate(pack_trace(small()))
    newer = whole.replace(store.MAGIC + store.VERSION, store.MAGIC + b"\x09\n")
    with pytest.raises(InputError, match="x: a trace of version 9; this program reads 1"):
        unpack_trace(store.deflate(newer), "x")
    with pytest.raises(InputError, match="does not begin with the magic of a trace"):
        unpack_trace(store.deflate(b"something else"))


def written(change: Any) -> bytes:
    """Return a trace file with a changed header."""
    whole = inflate(pack_trace(small()))
    start = len(store.MAGIC + store.VERSION) + 8
    (size,) = struct.unpack_from("<Q", whole, start - 8)
    header = json.loads(whole[start : start + size])
    text = json.dumps(change(header) or header).encode()
    return store.deflate(whole[: start - 8] + struct.pack("<Q", len(text)) + text + whole[start + size :])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda h: h.update(ending="tired"), "trace.ending: 'tired' is none of final, length"),
        (lambda h: h.update(colour="red"), "trace: unknown key 'colour'"),
        (lambda h: h.pop("task") and None, "trace: task is missing"),
        (lambda h: h.update(facts=[1]), "trace.facts: a list where an object was expected"),
        (lambda h: h["cost"].update(calls=1.5), "trace.cost.calls: 1.5 where an integer was expected"),
        (lambda h: h["cost"].update(calls=True), "trace.cost.calls: True where an integer was expected"),
        (lambda h: h["cost"].update(pod_s="long"), "trace.cost.pod_s: 'long' where a number was expected"),
        (lambda h: h["steps"][1].update(span=[1]), "trace.steps[1].span: 1 values where 2 were expected"),
        (lambda h: h["steps"][1]["outcomes"][0].update(error="bad luck"), "steps[1].outcomes[0].error: 'bad luck'"),
        (lambda h: h["steps"][1]["message"]["calls"][0].update(status=3), "steps[1].message.calls[0].status: 3"),
        (lambda h: h["steps"].__setitem__(0, 3), "trace.steps[0]: 3 where an object was expected"),
        (lambda h: h["segments"][0].update(kind="end"), "segments[0].kind: 'end'"),
        (lambda h: h["segments"][0].pop("made") and None, "segments[0]: expected an object with kind, tokens"),
        (lambda h: h["segments"][0]["made"].update(at=10**6), "segments[0].made: damaged"),
        (lambda h: h["segments"][0]["made"].update(at="x"), "segments[0].made: damaged"),
        (lambda h: h["segments"][0]["made"].update(type="O"), "segments[0].made: damaged"),
        (lambda h: h["segments"][0]["made"].update(shape=[-1]), "segments[0].made: damaged"),
        (lambda h: h["segments"][0]["made"].update(shape=[2**62, 4]), "segments[0].made: damaged"),
        (lambda h: h["segments"][0].update(made=5), "segments[0].made: damaged"),
        (lambda h: h.pop("segments") and None, "damaged"),
        (lambda h: h.update(segments=3), "damaged"),
        (lambda h: [1], "damaged"),
        (lambda h: "text", "damaged"),
    ],
)
def test_an_invalid_header_raises_with_its_place(change: Any, said: str) -> None:
    with pytest.raises(InputError) as error:
        unpack_trace(written(change), "x")
    assert str(error.value).startswith("x: ")
    assert said in str(error.value)


def test_fields_that_came_later_may_be_missing() -> None:
    assert unpack_trace(written(lambda header: header["cost"].pop("cached") and None)).cost == small().cost


# ------------------------------------------------------------------------------------------- files


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "s.trace"
    versions = [replace(small({"n": n}), task="x" * 100_000 * n) for n in range(3)]
    save_trace(versions[0], path)

    def write(trace: Trace) -> None:
        for _ in range(15):
            save_trace(trace, path)

    writers = [threading.Thread(target=write, args=(trace,)) for trace in versions]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        read = load_trace(path)
        assert equal(read, versions[read.facts["n"]])
    assert [name.name for name in tmp_path.iterdir()] == ["s.trace"]


def test_a_failed_write_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "x").touch()
    with pytest.raises(EtudeError, match="taken: cannot be written"):
        save_trace(small(), tmp_path / "taken")
    with pytest.raises(EtudeError, match=r"s\.trace: cannot be written"):
        save_trace(small(), tmp_path / "taken" / "x" / "s.trace")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_a_file_that_is_not_there_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.trace: cannot be read: No such file"):
        load_trace(tmp_path / "none.trace")
    with pytest.raises(InputError, match="cannot be read: Is a directory"):
        load_trace(tmp_path)
