"""Shards read back what was written, for all sizes; damaged files are named before anything is read."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.data.shards import MANIFEST, Shards, ShardWriter
from etude.errors import InputError

Documents = list[tuple[str, list[int], list[bool]]]


def write(path: Path, documents: Documents, *, vocab_size: int = 1000, mask: bool = True, limit: int = 64) -> None:
    entries: list[Any] = []
    writer = ShardWriter(path / "train", vocab_size, mask=mask, limit=limit, first=0, finished=entries.append)
    for name, tokens, loss_mask in documents:
        writer.add(name, np.array(tokens), np.array(loss_mask, dtype=np.bool_), 1)
    writer.close()
    splits = {"train": {"shards": entries}, "validation": {"shards": []}}
    manifest = {"format": 1, "tokenizer": "abc", "vocab_size": vocab_size, "mask": mask, "splits": splits}
    (path / MANIFEST).write_text(json.dumps(manifest))


@contextmanager
def corpus(documents: Documents, **options: Any) -> Iterator[Path]:
    with TemporaryDirectory() as directory:
        write(Path(directory), documents, **options)
        yield Path(directory)


def document(vocab_size: int) -> st.SearchStrategy[tuple[str, list[int], list[bool]]]:
    pairs = st.lists(st.tuples(st.integers(0, vocab_size - 1), st.booleans()), min_size=1, max_size=40)
    return st.tuples(st.text(max_size=10), pairs).map(
        lambda value: (value[0], [token for token, _ in value[1]], [flag for _, flag in value[1]])
    )


@settings(max_examples=40, deadline=None)
@given(data=st.data(), vocab_size=st.sampled_from([2, 65536, 65537, 2**31]), mask=st.booleans())
def test_round_trip(data: st.DataObject, vocab_size: int, mask: bool) -> None:
    documents = data.draw(st.lists(document(vocab_size), min_size=1, max_size=12))
    start, stop = data.draw(st.integers(-5, 45)), data.draw(st.none() | st.integers(-5, 45))
    with corpus(documents, vocab_size=vocab_size, mask=mask) as path:
        shards = Shards.open(path)
        assert len(shards) == len(documents)
        assert shards.lengths.tolist() == [len(tokens) for _, tokens, _ in documents]
        assert shards.tokens == sum(shards.lengths)
        for at, (name, tokens, loss_mask) in enumerate(documents):
            assert shards.name(at) == name
            assert shards.read(at, start, stop).tolist() == tokens[start:stop]
            expected = loss_mask if mask else [True] * len(tokens)
            assert shards.mask(at, start, stop).tolist() == expected[start:stop]
            assert shards.mask(at).dtype == np.bool_
        assert shards.read(0).dtype == np.dtype("<u2" if vocab_size <= 65536 else "<u4")


TWENTY: Documents = [(f"r/{i}", [i] * 10, [True] * 10) for i in range(20)]


def test_shards_are_bounded_and_reading_is_a_view(tmp_path: Path) -> None:
    write(tmp_path, [*TWENTY, ("r/large", [7] * 100, [True] * 100)], limit=64)
    sizes = [path.stat().st_size for path in sorted(tmp_path.glob("train/*.tokens"))]
    assert sizes == [60] * 6 + [40] + [200]  # a document larger than a shard has one of its own
    view = Shards.open(tmp_path).read(5, 2, 4)
    assert isinstance(view, np.memmap)
    assert not view.flags.writeable


@pytest.mark.parametrize("kind", ["tokens", "mask", "documents", "names"])
def test_a_damaged_file_is_named(tmp_path: Path, kind: str) -> None:
    write(tmp_path, TWENTY)
    broken = tmp_path / "train" / f"shard-00002.{kind}"
    whole = broken.read_bytes()
    broken.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(InputError, match=rf"shard-00002\.{kind} does not have the sha256"):
        Shards.open(tmp_path)
    broken.write_bytes(whole[:-1])
    for verify in (True, False):
        with pytest.raises(InputError, match=rf"shard-00002\.{kind} has {len(whole) - 1} bytes, not {len(whole)}"):
            Shards.open(tmp_path, verify=verify)
    broken.unlink()
    with pytest.raises(InputError, match=rf"shard-00002\.{kind} is missing"):
        Shards.open(tmp_path)
    broken.write_bytes(whole)
    assert len(Shards.open(tmp_path)) == 20


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1}', '{"format": 1, "splits": []}'])
def test_a_foreign_manifest_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError, match="is not a corpus"):
        Shards.open(tmp_path)
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(InputError, match=r"corpus\.json is not the manifest of a corpus"):
        Shards.open(tmp_path)


def test_a_later_format_is_refused(tmp_path: Path) -> None:
    write(tmp_path, TWENTY)
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(json.dumps({**manifest, "format": 2}))
    with pytest.raises(InputError, match="format 2 is not the one this version reads"):
        Shards.open(tmp_path)


def test_a_split_without_documents_is_named_with_those_that_have(tmp_path: Path) -> None:
    write(tmp_path, TWENTY)
    for split in ("validation", "nonsense"):
        with pytest.raises(InputError, match=f"no documents in split {split}; it has train"):
            Shards.open(tmp_path, split)


def test_the_digest_is_that_of_the_content(tmp_path: Path) -> None:
    write(tmp_path / "a", TWENTY)
    write(tmp_path / "b", TWENTY)
    write(tmp_path / "c", TWENTY[1:])
    a, b, c = (Shards.open(tmp_path / name).digest for name in "abc")
    assert a == b
    assert a != c
