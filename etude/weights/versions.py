"""Versions of the weights in an object store: a full one now and then, deltas between, each visible when complete.

    versions/00000012/manifest.json      written last: a version without one does not exist
    versions/00000012/shard-000          a delta against the parent's shard; of a full version, against nothing
    latest.json                          the newest, so that nobody needs to list

Whoever reads follows parents from the newest back to what it has, or to a full one, then applies forward and checks
every shard's checksum. Trainer and samplers share nothing but the store.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from etude.errors import EtudeError, InputError
from etude.weights.bucket import Bucket
from etude.weights.delta import DeltaError, apply_delta, delta_facts, encode_delta
from etude.weights.sealed import Sealed, checksum, joined, seal

FORMAT = 2
LATEST = "latest.json"
SHARD_BYTES = 256 << 20

State = Mapping[str, Tensor]


class BrokenChain(EtudeError):
    """No way leads from the store to the weights of a version."""


@dataclass(frozen=True)
class Shard:
    """One part of a version."""

    name: str
    size: int
    digest: str  # of the bytes in the store
    result: str  # checksum of the tensors it gives


@dataclass(frozen=True)
class Version:
    """A number, a parent, a checksum: a full snapshot where there is no parent, else a delta against it."""

    number: int
    parent: int | None
    checksum: str
    shards: tuple[Shard, ...]
    values: int = 0
    changed: int = 0
    names: tuple[tuple[str, ...], ...] = ()  # tensors of each shard

    @property
    def full(self) -> bool:
        return self.parent is None

    @property
    def bytes(self) -> int:
        return sum(shard.size for shard in self.shards)


def shards_of(state: State, limit: int = SHARD_BYTES) -> list[tuple[str, ...]]:
    """Names in groups of about `limit` bytes; the same for the same shapes."""
    groups: list[list[str]] = [[]]
    size = 0
    for name in sorted(state):
        more = state[name].numel() * state[name].element_size()
        if groups[-1] and size + more > limit:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += more
    return [tuple(group) for group in groups]


def write_version(
    bucket: Bucket, number: int, state: State, parent: tuple[Version, State] | None, limit: int = SHARD_BYTES
) -> Version:
    """Make a version visible in the store; a full one where there is no parent, or its tensors are others."""
    state, groups = seal(state), shards_of(state, limit)
    checksum(state)  # all of it at once, on all cores; the shards know their part, and so does the next delta
    if parent is not None and list(parent[0].names) != groups:
        parent = None
    base = seal(parent[1]) if parent else None
    shards, values, changed = [], 0, 0
    for index, names in enumerate(groups):
        new = state.part(names)
        data = encode_delta(base.part(names) if base else {}, new)
        shard = Shard(f"shard-{index:03}", len(data), _digest(data), checksum(new))
        bucket.put(f"{_place(number)}/{shard.name}", data)
        facts = delta_facts(data)
        shards.append(shard)
        values, changed = values + facts.values, changed + facts.changed
    version = Version(
        number, parent[0].number if parent else None, _whole(shards), tuple(shards), values, changed, tuple(groups)
    )
    bucket.put(f"{_place(number)}/manifest.json", _manifest(version))
    bucket.put(LATEST, json.dumps({"number": number}).encode())
    return version


def latest(bucket: Bucket) -> int | None:
    """The newest version there is."""
    data = bucket.get(LATEST)
    try:
        number = None if data is None else int(json.loads(data)["number"])
    except (ValueError, KeyError, TypeError):
        number = None
    # The pointer is written after the manifest: a version may be there that it does not name yet, never the reverse.
    return number if number is not None else max(numbers(bucket), default=None)


def numbers(bucket: Bucket) -> list[int]:
    """All versions with a manifest or the beginnings of one, oldest first."""
    return sorted(int(name) for name in bucket.names("versions") if name.isdigit())


def read_manifest(bucket: Bucket, number: int) -> Version:
    """What a version is made of; BrokenChain when that cannot be read."""
    data = bucket.get(f"{_place(number)}/manifest.json")
    if data is None:
        raise BrokenChain(f"{bucket.url}: version {number} is not there, or not complete")
    try:
        text, _, digest = data.decode().rpartition("\n")
        if _digest(text.encode()) != digest:
            raise ValueError("it is not as it was written")
        found = json.loads(text)
        if found.pop("format") != FORMAT:
            raise BrokenChain(f"{bucket.url}: version {number} was written by another version of Etude")
        shards = tuple(Shard(**shard) for shard in found.pop("shards"))
        return Version(**found | {"shards": shards, "names": tuple(map(tuple, found["names"]))})
    except (ValueError, KeyError, TypeError) as error:
        raise BrokenChain(f"{bucket.url}: the manifest of version {number} is damaged: {error}") from error


def read_version(bucket: Bucket, number: int, have: tuple[Version, State] | None = None) -> tuple[Version, State]:
    """The weights of a version, from what the caller has if the chain passes there, else from a full one."""
    chain = _chain(bucket, number, have)
    state = seal(have[1]) if have and chain[0].parent == have[0].number else Sealed({})
    for version in chain:
        state = _apply(bucket, version, state)
    return chain[-1], state


def follow(bucket: Bucket, have: tuple[Version, State] | None = None) -> tuple[Version, State]:
    """The newest version that can be rebuilt. A damaged link costs at most the way back to the last full version.

    What it gives is what the next call goes on from: copy tensors before writing to them.
    """
    newest = latest(bucket)
    if newest is None:
        raise BrokenChain(f"{bucket.url}: there is no version yet")
    if have is not None and have[0].number == newest:
        return have
    problems: list[EtudeError] = []
    for number in sorted({newest, *(n for n in numbers(bucket) if n <= newest)}, reverse=True):
        if have is not None and number <= have[0].number and have[0].number in numbers(bucket):
            break  # what we have is at least as new as what is left
        for start in (have, None) if have else (None,):
            try:
                return read_version(bucket, number, start)
            except (BrokenChain, DeltaError) as error:
                problems.append(error)
    if have is not None:
        return have
    raise BrokenChain(f"{bucket.url}: no version can be rebuilt; the newest: {problems[0]}")


def prune(bucket: Bucket, fulls: int) -> list[int]:
    """Remove what is older than the last `fulls` full versions; the numbers that went."""
    if fulls < 1:
        raise InputError(f"versions: at least one full version must stay, not {fulls}")
    there = numbers(bucket)
    found = [number for number in there if _is_full(bucket, number)]
    if len(found) <= fulls:
        return []
    gone = [number for number in there if number < found[-fulls]]
    for number in gone:
        bucket.remove(_place(number))
    return gone


def _is_full(bucket: Bucket, number: int) -> bool:
    try:
        return read_manifest(bucket, number).full
    except BrokenChain:
        return False


def _chain(bucket: Bucket, number: int, have: tuple[Version, State] | None) -> list[Version]:
    """The versions to apply, oldest first."""
    chain = [read_manifest(bucket, number)]
    while (parent := chain[-1].parent) is not None:
        if have is not None and parent == have[0].number:
            break
        if parent >= chain[-1].number:
            raise BrokenChain(f"{bucket.url}: version {chain[-1].number} names {parent} as its parent")
        chain.append(read_manifest(bucket, parent))
    return chain[::-1]


def _apply(bucket: Bucket, version: Version, state: Sealed) -> Sealed:
    parts: list[Sealed] = []
    for shard, names in zip(version.shards, version.names, strict=True):
        where = f"version {version.number}, {shard.name}"
        data = bucket.get(f"{_place(version.number)}/{shard.name}")
        if data is None:
            raise BrokenChain(f"{bucket.url}: {where} is missing")
        if _digest(data) != shard.digest:
            raise BrokenChain(f"{bucket.url}: {where} is not as it was written")
        missing = [] if version.full else [name for name in names if name not in state]
        if missing:
            raise BrokenChain(f"{bucket.url}: {where} changes {missing[0]}, which its parent does not have")
        part = apply_delta({} if version.full else state.part(names), data)
        if checksum(part) != shard.result:
            raise BrokenChain(f"{bucket.url}: {where} gives other weights than were published")
        parts.append(part)
    return joined(parts)


def _place(number: int) -> str:
    return f"versions/{number:08}"


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _whole(shards: Sequence[Shard]) -> str:
    return _digest("\n".join(shard.result for shard in shards).encode())


def _manifest(version: Version) -> bytes:
    found: dict[str, Any] = {"format": FORMAT, **asdict(version)}
    text = json.dumps(found, sort_keys=True)
    return f"{text}\n{_digest(text.encode())}".encode()
