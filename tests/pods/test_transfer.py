"""Layers between two stores: once, resumed after an interruption, verified on arrival. Real stores, no network."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from etude.errors import InputError
from etude.pods.images import archive, transfer, trees
from etude.pods.images import store as store_module
from etude.pods.images.archive import tree_digest
from etude.pods.images.records import Layer
from etude.pods.images.store import Store
from etude.pods.images.transfer import Arrival, PackedLayer, SourceFailed, StorePeer, new_sender, send_layer
from etude.pods.pod import PodError


class CountingPeer(StorePeer):
    """A peer that counts the bytes it receives, and loses the connection where a test wants it to."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.bytes = 0
        self.cut: Callable[[int], bool] = lambda offset: False

    async def write(self, packed: PackedLayer, sender: str, offset: int, data: bytes) -> Arrival:
        if self.cut(offset):
            raise PodError("the connection was cut")
        self.bytes += len(data)
        return await super().write(packed, sender, offset, data)


@pytest.fixture
def stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Store, Store]:
    monkeypatch.setattr(transfer, "PART", 1 << 16)
    return Store(tmp_path / "a"), Store(tmp_path / "b")


def fill(made: Path) -> None:
    """Write every kind of file that a layer can have."""
    (made / "directory").mkdir(mode=0o700)
    (made / "directory/random").write_bytes(os.urandom(400_000))
    os.link(made / "directory/random", made / "linked")
    (made / "link").symlink_to("directory/random")
    os.mkfifo(made / "pipe")
    trees.make_whiteout(str(made / "deleted"))
    (made / "opaque").mkdir()
    trees.make_opaque(str(made / "opaque"))
    (made / "program").write_text("#!/bin/sh\n")
    os.chmod(made / "program", 0o4755)
    os.setxattr(made / "program", "user.note", b"kept")
    if trees.can_chown():
        os.chown(made / "directory", 1000, 50)


def test_a_layer_arrives_with_all_its_properties_and_is_sent_once_to_many(stores: tuple[Store, Store]) -> None:
    here, there = stores
    layer = here.add_layer(fill)

    async def work() -> None:
        source, target = StorePeer(here), CountingPeer(there)
        assert await target.missing([layer.id]) == [layer.id]
        sent = await asyncio.gather(*(send_layer(source, target, layer.id, new_sender()) for _ in range(5)))
        packed = await source.pack(layer.id)
        assert sorted(sent) == [0, 0, 0, 0, packed.size]
        assert target.bytes == packed.size
        assert await target.missing([layer.id]) == []
        assert await send_layer(source, target, layer.id, new_sender()) == 0

    asyncio.run(work())
    assert tree_digest(there.layer_path(layer)) == layer.id
    assert (there.layer_path(layer) / "linked").stat().st_nlink == 2
    assert list((there.root / "incoming").iterdir()) == []


def test_a_cut_transfer_is_resumed_where_it_stopped_also_by_another_sender(
    stores: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = stores
    layer = here.add_layer(fill)

    async def work() -> None:
        source, target = StorePeer(here), CountingPeer(there)
        target.cut = lambda offset: offset >= 200_000
        with pytest.raises(PodError, match="cut"):
            await send_layer(source, target, layer.id, "first")
        before = target.bytes
        assert before >= 200_000
        target = CountingPeer(there)  # as after a restart of the host
        waiting = asyncio.create_task(send_layer(source, target, layer.id, "second"))
        await asyncio.sleep(3 * transfer.BUSY_S)
        assert target.bytes == 0, "the first sender has the lease"
        monkeypatch.setattr(transfer, "LEASE_S", 0.0)
        assert await waiting == target.bytes == (await source.pack(layer.id)).size - before

    asyncio.run(work())
    assert tree_digest(there.layer_path(layer)) == layer.id


def test_damage_on_the_way_is_sent_again_and_a_wrong_content_is_refused(stores: tuple[Store, Store]) -> None:
    here, there = stores
    layer = here.add_layer(fill)

    async def work() -> None:
        source, target = StorePeer(here), CountingPeer(there)
        packed = await source.pack(layer.id)
        target.cut = lambda offset: offset > 0
        with pytest.raises(PodError, match="cut"):
            await send_layer(source, target, layer.id, "sender")
        (part,) = (there.root / "incoming").glob("*.part")
        part.write_bytes(bytes(part.stat().st_size))  # as after a power failure
        target.cut = lambda offset: False
        assert await send_layer(source, target, layer.id, "sender") > packed.size
        assert tree_digest(there.layer_path(layer)) == layer.id

        other = here.add_layer(lambda made: (made / "x").write_text("y") and None)
        (here.layer_path(other) / "x").write_text("changed")
        with pytest.raises(InputError, match="another content"):
            await send_layer(source, target, other.id, "sender")
        assert there.missing([other.id]) == [other.id]
        with pytest.raises(SourceFailed, match="is not in"):
            await send_layer(source, target, "0" * 40, "sender")

    if not trees.can_chown():
        pytest.skip("an ordinary user keeps a layer as it arrived")
    asyncio.run(work())


def test_an_ordinary_user_sends_a_layer_on_as_it_arrived(
    stores: tuple[Store, Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = stores
    if not trees.can_chown():
        pytest.skip("only root makes layers with several owners")
    layer, third = here.add_layer(fill), Store(tmp_path / "c")

    async def work() -> None:
        source, target = StorePeer(here), StorePeer(there)
        await source.pack(layer.id)
        with monkeypatch.context() as patch:
            for module in (archive, store_module, trees):
                patch.setattr(module, "can_chown", lambda: False)
            await send_layer(source, target, layer.id, "sender")
        assert there.missing([layer.id]) == []
        there.remove_packed(0)
        await send_layer(target, StorePeer(third), layer.id, "sender")

    asyncio.run(work())
    assert (there.layer_path(layer) / "directory").stat().st_uid == 0
    assert (third.layer_path(layer) / "directory").stat().st_uid == 1000
    assert tree_digest(third.layer_path(layer)) == layer.id


def test_a_layer_that_a_pod_wrote_becomes_portable_with_the_digest_of_its_content(tmp_path: Path) -> None:
    store, other = Store(tmp_path / "a"), Store(tmp_path / "b")
    shift = 3_000_000 if trees.can_chown() else 0
    for each in (store, other):
        with each.staging() as staging:
            (staging / "fs").mkdir()
            (staging / "fs/file").write_text("text")
            if shift:
                os.chown(staging / "fs/file", shift + 33, shift)
                os.chown(staging / "fs", shift, shift)
            written = each.adopt_layer(staging / "fs", shift)
        made = each.portable(written)
        assert made == each.portable(written) == each.portable(made)
        assert made != written
        if shift:
            assert os.stat(each.layer_path(made) / "file").st_uid == 33
        each.discard_layers([written])
        assert each.missing([written.id, made.id]) == [written.id]
        last = made
    assert store.missing([last.id]) == [], "both stores made the same layer"


def test_what_was_packed_or_left_unfinished_is_removed(stores: tuple[Store, Store]) -> None:
    here, there = stores
    layer = here.add_layer(fill)

    async def work() -> None:
        source, target = StorePeer(here), CountingPeer(there)
        target.cut = lambda offset: offset > 0
        with pytest.raises(PodError):
            await send_layer(source, target, layer.id, "sender")

    asyncio.run(work())
    assert len(list((there.root / "incoming").iterdir())) == 2
    for store in stores:
        store.remove_packed()
    assert len(list((there.root / "incoming").iterdir())) == 2
    for store in stores:
        store.remove_packed(0)
    assert list((there.root / "incoming").iterdir()) == []
    assert list((here.root / "layers" / layer.id).glob("packed-*")) == []
    assert here.missing([layer.id]) == []
    assert here.layer_path(Layer(layer.id)).is_dir()
