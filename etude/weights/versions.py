"""Weight versions in an object store: occasional full versions with deltas between, each visible once complete.

    versions/00000012/manifest.json      written last: a version without one does not exist
    versions/00000012/shard-000-DIGEST   a delta against the parent's shard; in a full version, against nothing
    latest.json                          the newest version, so that readers need not list

Several processes may write one version, each the tensors that it has (a `Part`): each writes its shards and then
part-000.json, which lists them; the first process writes the manifest when all parts are there.

A shard's name has a digest of its content: a version that is written again after the store was away never has the
objects of the first attempt, which may arrive late.

A reader follows parents from the newest version back to the one it has, or to a full one, then applies deltas forward
and checks every shard's checksum. Trainer and samplers share only the store.
"""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from etude.errors import EtudeError, InputError
from etude.weights.delta import DeltaError, apply_delta, delta_stats, encode_delta
from etude.weights.hashed import HashedWeights, checksum, merge_parts, with_digests
from etude.weights.object_store import ObjectStore

FORMAT = 2
LATEST = "latest.json"
SHARD_BYTES = 256 << 20

WeightState = Mapping[str, Tensor]


class BrokenChain(EtudeError):
    """The weights of a version cannot be rebuilt from the store."""


@dataclass(frozen=True)
class Shard:
    """One part of a version."""

    name: str
    size: int
    digest: str  # of the stored bytes
    result: str  # checksum of the resulting tensors


@dataclass(frozen=True)
class Version:
    """The manifest of a version: a delta against its parent, or a full version if there is none."""

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


def group_into_shards(state: WeightState, limit: int = SHARD_BYTES) -> list[tuple[str, ...]]:
    """Return tensor names in groups of about `limit` bytes; the same groups for the same shapes."""
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


@dataclass(frozen=True)
class Part:
    """Which of the processes that write a version together this one is."""

    number: int = 0
    count: int = 1

    def shard_name(self, index: int, digest: str) -> str:
        prefix = f"shard-{index:03}" if self.count == 1 else f"shard-{self.number:03}-{index:03}"
        return f"{prefix}-{digest[:8]}"

    @property
    def name(self) -> str:
        return f"part-{self.number:03}.json"


WHOLE = Part()


def write_version(
    store: ObjectStore,
    number: int,
    state: WeightState,
    parent: tuple[Version, WeightState] | None,
    limit: int = SHARD_BYTES,
    part: Part = WHOLE,
) -> Version:
    """Write a version to the store; a full one if there is no parent or its tensors have other names or sizes.

    A part of a version is not visible before `commit_version`.
    """
    state, groups = with_digests(state), group_into_shards(state, limit)
    checksum(state)  # all digests at once, on all cores; the shards and the next delta reuse them
    if parent is not None and list(parent[0].names) != groups:
        if part.count > 1:
            raise InputError(f"version {number}: the tensors of part {part.number} have changed; publish a full one")
        parent = None
    base = with_digests(parent[1]) if parent else None
    shards, values, changed = [], 0, 0
    for index, names in enumerate(groups):
        new = state.subset(names)
        data = encode_delta(base.subset(names) if base else {}, new)
        digest = _digest(data)
        shard = Shard(part.shard_name(index, digest), len(data), digest, checksum(new))
        store.put(f"{_directory(number)}/{shard.name}", data)
        stats = delta_stats(data)
        shards.append(shard)
        values, changed = values + stats.values, changed + stats.changed
    version = Version(
        number,
        parent[0].number if parent else None,
        _version_checksum(shards),
        tuple(shards),
        values,
        changed,
        tuple(groups),
    )
    if part.count == 1:
        _make_visible(store, version)
    else:
        store.put(f"{_directory(number)}/{part.name}", _manifest(version))
    return version


def commit_version(store: ObjectStore, number: int, count: int) -> Version | None:
    """Make a version visible that `count` processes have written; None if a part is not there yet."""
    parts = []
    for index in range(count):
        name = f"{_directory(number)}/{Part(index, count).name}"
        if (data := store.get(name)) is None:
            return None
        parts.append(_read_version(data, f"{store.url}: part {index} of version {number}"))
    if len(parents := {part.parent for part in parts}) != 1:
        raise InputError(f"version {number}: its parts are deltas against different versions ({parents})")
    shards = tuple(shard for part in parts for shard in part.shards)
    version = Version(
        number,
        parents.pop(),
        _version_checksum(shards),
        shards,
        sum(part.values for part in parts),
        sum(part.changed for part in parts),
        tuple(names for part in parts for names in part.names),
    )
    _make_visible(store, version)
    return version


def _make_visible(store: ObjectStore, version: Version) -> None:
    store.put(f"{_directory(version.number)}/manifest.json", _manifest(version))
    _point_to(store, version.number)


def _point_to(store: ObjectStore, number: int) -> None:
    store.put(LATEST, json.dumps({"number": number}).encode())


def keep_latest(store: ObjectStore, number: int) -> None:
    """Name a version as the newest if an older one is named: a write that arrived late has replaced it."""
    if (found := latest(store)) is not None and found < number:
        _point_to(store, number)


def latest(store: ObjectStore) -> int | None:
    """Return the number of the newest version, None if there is none."""
    data = store.get(LATEST)
    try:
        number = None if data is None else int(json.loads(data)["number"])
    except (ValueError, KeyError, TypeError):
        number = None
    # The pointer is written after the manifest, so it never names a version that is incomplete.
    return number if number is not None else max(version_numbers(store), default=None)


def version_numbers(store: ObjectStore) -> list[int]:
    """Return the numbers of all versions in the store, complete or not, oldest first."""
    return sorted(int(name) for name in store.names("versions") if name.isdigit())


def read_manifest(store: ObjectStore, number: int) -> Version:
    """Return the manifest of a version; raise BrokenChain if it cannot be read."""
    data = store.get(f"{_directory(number)}/manifest.json")
    if data is None:
        raise BrokenChain(f"{store.url}: version {number} is missing or incomplete")
    return _read_version(data, f"{store.url}: the manifest of version {number}")


def _read_version(data: bytes, what: str) -> Version:
    try:
        text, _, digest = data.decode().rpartition("\n")
        if _digest(text.encode()) != digest:
            raise ValueError("it does not match its digest")
        found = json.loads(text)
        if found.pop("format") != FORMAT:
            raise BrokenChain(f"{what} was written by another version of Etude")
        shards = tuple(Shard(**shard) for shard in found.pop("shards"))
        return Version(**found | {"shards": shards, "names": tuple(map(tuple, found["names"]))})
    except (ValueError, KeyError, TypeError) as error:
        raise BrokenChain(f"{what} is damaged: {error}") from error


def read_version(
    store: ObjectStore, number: int, have: tuple[Version, WeightState] | None = None
) -> tuple[Version, WeightState]:
    """Return a version and its weights, starting from `have` if the chain contains it, else from a full version."""
    chain = _chain(store, number, have)
    state = with_digests(have[1]) if have and chain[0].parent == have[0].number else HashedWeights({})
    for version in chain:
        state = _apply(store, version, state)
    return chain[-1], state


def follow(store: ObjectStore, have: tuple[Version, WeightState] | None = None) -> tuple[Version, WeightState]:
    """Return the newest version that can be rebuilt. A damaged delta costs at most the way back to a full version.

    Pass the result as `have` to the next call; do not write to its tensors.
    """
    newest = latest(store)
    if newest is None:
        raise BrokenChain(f"{store.url}: there is no version yet")
    if have is not None and have[0].number == newest:
        return have
    problems: list[EtudeError] = []
    for number in sorted({newest, *(n for n in version_numbers(store) if n <= newest)}, reverse=True):
        if have is not None and number <= have[0].number and have[0].number in version_numbers(store):
            break  # `have` is at least as new as the rest
        for start in (have, None) if have else (None,):
            try:
                return read_version(store, number, start)
            except (BrokenChain, DeltaError) as error:
                problems.append(error)
    if have is not None:
        return have
    raise BrokenChain(f"{store.url}: no version can be rebuilt; the newest: {problems[0]}")


def has_version(store: ObjectStore, number: int) -> bool:
    """Return whether a version is complete in the store."""
    return store.get(f"{_directory(number)}/manifest.json") is not None


def prune(store: ObjectStore, fulls: int, pinned: Collection[int] = ()) -> list[int]:
    """Remove versions older than the last `fulls` full ones and return their numbers.

    A `pinned` version stays with those that it is rebuilt from: back to the full one before it.
    """
    if fulls < 1:
        raise InputError(f"versions: {fulls} full versions to keep; expected at least 1")
    numbers = version_numbers(store)
    found = [number for number in numbers if _is_full(store, number)]
    if len(found) <= fulls:
        return []
    needed = {
        number for pin in pinned for number in range(max((full for full in found if full <= pin), default=pin), pin + 1)
    }
    removed = [number for number in numbers if number < found[-fulls] and number not in needed]
    for number in removed:
        store.remove(_directory(number))
    return removed


def _is_full(store: ObjectStore, number: int) -> bool:
    try:
        return read_manifest(store, number).full
    except BrokenChain:
        return False


def _chain(store: ObjectStore, number: int, have: tuple[Version, WeightState] | None) -> list[Version]:
    """Return the versions to apply, oldest first."""
    chain = [read_manifest(store, number)]
    while (parent := chain[-1].parent) is not None:
        if have is not None and parent == have[0].number:
            break
        if parent >= chain[-1].number:
            raise BrokenChain(f"{store.url}: version {chain[-1].number} has the newer version {parent} as its parent")
        chain.append(read_manifest(store, parent))
    return chain[::-1]


def _apply(store: ObjectStore, version: Version, state: HashedWeights) -> HashedWeights:
    parts: list[HashedWeights] = []
    for shard, names in zip(version.shards, version.names, strict=True):
        where = f"version {version.number}, {shard.name}"
        data = store.get(f"{_directory(version.number)}/{shard.name}")
        if data is None:
            raise BrokenChain(f"{store.url}: {where} is missing")
        if _digest(data) != shard.digest:
            raise BrokenChain(f"{store.url}: {where} does not match its digest")
        missing = [] if version.full else [name for name in names if name not in state]
        if missing:
            raise BrokenChain(f"{store.url}: {where} changes {missing[0]}, which its parent does not have")
        part = apply_delta({} if version.full else state.subset(names), data)
        if checksum(part) != shard.result:
            raise BrokenChain(f"{store.url}: {where} gives weights other than those published")
        parts.append(part)
    return merge_parts(parts)


def _directory(number: int) -> str:
    return f"versions/{number:08}"


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _version_checksum(shards: Sequence[Shard]) -> str:
    return _digest("\n".join(shard.result for shard in shards).encode())


def _manifest(version: Version) -> bytes:
    found: dict[str, Any] = {"format": FORMAT, **asdict(version)}
    text = json.dumps(found, sort_keys=True)
    return f"{text}\n{_digest(text.encode())}".encode()
