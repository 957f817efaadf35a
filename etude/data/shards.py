"""Token shards on disk: written by the corpus builder, memory-mapped by the trainer.

    corpus.json                    format, options, tokenizer digest; per split its shards with sizes and sha256
    SPLIT/shard-00000.tokens       ids, little-endian uint16 when the vocabulary fits, else uint32
    SPLIT/shard-00000.mask         uint8 loss mask; only when the corpus has masks
    SPLIT/shard-00000.documents    int64 offsets into the tokens, one more than there are documents
    SPLIT/shard-00000.names        one JSON string per line: repository/path

Plain arrays and JSON, nothing that executes code. Reading never copies: `read` is a view of the memory map.
"""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from etude.errors import InputError

FORMAT = 1
MANIFEST = "corpus.json"
SPLITS = ("train", "validation", "held_out")


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def shard_name(number: int) -> str:
    return f"shard-{number:05d}"


class Shards:
    """One split of one corpus, open for reading."""

    def __init__(self, corpus: Path, split: str, manifest: dict[str, Any]) -> None:
        entry = manifest["splits"][split]
        self.digest = _entry_digest(entry)
        self.tokenizer_digest: str = manifest["tokenizer"]
        self.vocab_size: int = manifest["vocab_size"]
        self.has_mask: bool = manifest["mask"]
        self._directory = corpus / split
        dtype = token_dtype(self.vocab_size)
        self._tokens, self._masks, self._offsets = [], [], []
        for number in range(len(entry["shards"])):
            path = self._directory / shard_name(number)
            self._tokens.append(np.memmap(path.with_suffix(".tokens"), dtype=dtype, mode="r"))
            if self.has_mask:
                self._masks.append(np.memmap(path.with_suffix(".mask"), dtype=np.uint8, mode="r"))
            self._offsets.append(np.fromfile(path.with_suffix(".documents"), dtype="<i8").astype(np.int64))
        self.lengths: npt.NDArray[np.int64] = np.concatenate([np.diff(offsets) for offsets in self._offsets])
        self.tokens = int(self.lengths.sum())
        self._first = np.cumsum([0, *(len(offsets) - 1 for offsets in self._offsets)])
        self._names: dict[int, list[str]] = {}

    @classmethod
    def open(cls, corpus: Path | str, split: str = "train", *, verify: bool = True) -> "Shards":
        """Open a split after checking the size, and with `verify` the digest, of every file."""
        corpus = Path(corpus)
        manifest = read_manifest(corpus)
        entry = manifest["splits"].get(split)
        if entry is None or not entry["shards"]:
            present = ", ".join(name for name, found in manifest["splits"].items() if found["shards"])
            raise InputError(f"corpus {corpus} has no documents in split {split}; it has {present}")
        for number, shard in enumerate(entry["shards"]):
            for kind, recorded in shard["files"].items():
                _check_file(corpus / split / f"{shard_name(number)}.{kind}", recorded, verify)
        return cls(corpus, split, manifest)

    def __len__(self) -> int:
        return len(self.lengths)

    def read(self, document: int, start: int = 0, stop: int | None = None) -> npt.NDArray[np.integer[Any]]:
        """Return the ids of a document, or of a slice of it, as a view of the memory map."""
        shard, begin, end = self._find(document)
        return self._tokens[shard][begin:end][start:stop]

    def mask(self, document: int, start: int = 0, stop: int | None = None) -> npt.NDArray[np.bool_]:
        """Return the loss mask of a document, or of a slice of it; all True when the corpus has no masks."""
        shard, begin, end = self._find(document)
        if not self.has_mask:
            return np.ones(len(range(end - begin)[start:stop]), dtype=np.bool_)
        return self._masks[shard][begin:end][start:stop].view(np.bool_)

    def name(self, document: int) -> str:
        shard, _, _ = self._find(document)
        if shard not in self._names:
            lines = (self._directory / f"{shard_name(shard)}.names").read_text(encoding="utf-8").splitlines()
            self._names[shard] = [json.loads(line) for line in lines]
        return self._names[shard][document - int(self._first[shard])]

    def _find(self, document: int) -> tuple[int, int, int]:
        if not 0 <= document < len(self.lengths):
            raise IndexError(f"document {document} of {len(self.lengths)}")
        shard = int(np.searchsorted(self._first, document, side="right")) - 1
        offsets = self._offsets[shard]
        index = document - int(self._first[shard])
        return shard, int(offsets[index]), int(offsets[index + 1])


class ShardWriter:
    """Writes the shards of one split one after another; calls `finished` with each when it is complete and on disk.

    As a context manager it finishes the last shard if the block succeeds. An unfinished shard leaves files that the
    next writer of the same number overwrites.
    """

    def __init__(
        self, directory: Path, vocab_size: int, *, mask: bool, limit: int, first: int, finished: Callable[[Any], None]
    ) -> None:
        self._directory, self._mask, self._limit, self._finished = directory, mask, limit, finished
        self._dtype = token_dtype(vocab_size)
        self._number = first
        self._open: dict[str, _HashedFile] = {}
        self._offsets = [0]
        self._bytes = 0

    def add(self, name: str, tokens: npt.NDArray[np.integer[Any]], loss_mask: npt.NDArray[np.bool_], size: int) -> None:
        if self._open and (self._offsets[-1] + len(tokens)) * self._dtype.itemsize > self._limit:
            self.close()
        if not self._open:
            kinds = ("tokens", "mask", "names") if self._mask else ("tokens", "names")
            self._directory.mkdir(parents=True, exist_ok=True)
            self._open = {kind: _HashedFile(self._path(kind)) for kind in kinds}
        self._open["tokens"].write(tokens.astype(self._dtype).tobytes())
        self._open["names"].write(json.dumps(name).encode() + b"\n")
        if self._mask:
            self._open["mask"].write(loss_mask.astype(np.uint8).tobytes())
        self._offsets.append(self._offsets[-1] + len(tokens))
        self._bytes += size

    def close(self) -> None:
        """Finish the open shard, if there is one."""
        if not self._open:
            return
        self._open["documents"] = _HashedFile(self._path("documents"))
        self._open["documents"].write(np.asarray(self._offsets, dtype="<i8").tobytes())
        entry = {
            "documents": len(self._offsets) - 1,
            "tokens": self._offsets[-1],
            "bytes": self._bytes,
            "files": {kind: self._open[kind].finish() for kind in sorted(self._open)},
        }
        self._finished(entry)
        self._number += 1
        self._open, self._offsets, self._bytes = {}, [0], 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        for file in self._open.values():
            file.finish()

    def _path(self, kind: str) -> Path:
        return self._directory / f"{shard_name(self._number)}.{kind}"


class _HashedFile:
    """A file that computes size and digest while it is written."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._digest = hashlib.sha256()
        self._size = 0

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._digest.update(data)
        self._size += len(data)

    def finish(self) -> dict[str, Any]:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return {"bytes": self._size, "sha256": self._digest.hexdigest()}


def read_manifest(corpus: Path) -> dict[str, Any]:
    path = corpus / MANIFEST
    if not path.is_file():
        raise InputError(f"{corpus} is not a corpus: it has no {MANIFEST}; name a directory made by `etude data build`")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version = manifest["format"]
        shards = [shard for split in manifest["splits"].values() for shard in split["shards"]]
        kinds = {"tokens", "names", "documents"} | ({"mask"} if manifest["mask"] else set())
        complete = all(set(shard["files"]) == kinds for shard in shards)
        complete = complete and isinstance(manifest["tokenizer"], str) and isinstance(manifest["vocab_size"], int)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is not the manifest of a corpus ({type(error).__name__}: {error})") from None
    if version != FORMAT or not complete:
        raise InputError(
            f"{path}: format {version!r} is not the one this version reads ({FORMAT}); build the corpus again"
        )
    assert isinstance(manifest, dict)
    return manifest


def _check_file(path: Path, recorded: dict[str, Any], verify: bool) -> None:
    advice = "the corpus is damaged; copy it again or build it again"
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise InputError(f"{path} is missing; {advice}") from None
    if size != recorded["bytes"]:
        raise InputError(f"{path} has {size:,} bytes, not {recorded['bytes']:,}; {advice}")
    if verify:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != recorded["sha256"]:
            raise InputError(f"{path} does not have the sha256 that {MANIFEST} records; {advice}")


def _entry_digest(entry: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest()
