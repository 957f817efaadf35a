"""The store: layers stay intact, unreferenced ones are collected, and a process may be killed at any time."""

import io
import json
import os
import signal
import stat
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from etude.errors import InputError
from etude.pods.images import trees
from etude.pods.images.archive import tree_digest
from etude.pods.images.records import Image, Layer
from etude.pods.images.store import Store
from etude.pods.pod import PodError, Snapshot


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def text_layer(store: Store, **files: str) -> Layer:
    def fill(target: Path) -> None:
        for name, text in files.items():
            (target / name).write_text(text)

    return store.add_layer(fill)


def snapshot_of(store: Store, id: str, image: Image, *deltas: Layer) -> None:
    store.save_snapshot(Snapshot(id, image.name or image.id), image.with_(layers=(*image.layers, *deltas)))


def intact(store: Store, layer: Layer) -> bool:
    return tree_digest(store.layer_path(layer)) == layer.id


def child(store: Store, script: str) -> "subprocess.Popen[str]":
    """Start a process that runs `script` with `store`, and prints a line when it has reached the tested point."""
    head = "import os, sys, time; from pathlib import Path; from etude.pods.images.store import *"
    command = [sys.executable, "-c", f"{head}\nstore = Store(Path(sys.argv[1]))\n{script}", str(store.root)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


# -- layers


def test_the_same_content_is_the_same_layer(store: Store) -> None:
    one, two = text_layer(store, a="1", b="2"), text_layer(store, b="2", a="1")
    assert one == two
    assert text_layer(store, a="1") != one
    assert (store.layer_path(one) / "a").read_text() == "1"
    assert os.listdir(store.root / "staging") == []
    assert intact(store, one)


@pytest.mark.parametrize("change", ["content", "mode", "name", "link", "opaque", "whiteout", "attribute"])
def test_every_difference_makes_another_layer(store: Store, change: str) -> None:
    def fill(target: Path, changed: bool) -> None:
        (target / "d").mkdir()
        (target / "file").write_text("b" if changed and change == "content" else "a")
        (target / "link").symlink_to("y" if changed and change == "link" else "x")
        if not changed:
            return
        if change == "mode":
            os.chmod(target / "file", 0o751)
        elif change == "name":
            os.rename(target / "file", target / "other")
        elif change == "opaque":
            trees.make_opaque(str(target / "d"))
        elif change == "whiteout":
            trees.make_whiteout(str(target / "gone"))
        elif change == "attribute":
            os.setxattr(target / "file", "user.x", b"1")

    assert store.add_layer(lambda path: fill(path, False)) != store.add_layer(lambda path: fill(path, True))


def test_a_key_is_built_once_and_again_when_its_layer_is_removed(store: Store) -> None:
    calls = []

    def fill(target: Path) -> None:
        calls.append(target)
        (target / "f").write_text("x")

    first = store.add_layer(fill, key="k")
    assert store.add_layer(fill, key="k") == first
    assert len(calls) == 1
    assert store.collect_garbage(grace=0) == [first.id]
    assert store.add_layer(fill, key="k") == first
    assert len(calls) == 2


def test_a_failing_fill_leaves_nothing(store: Store) -> None:
    def fill(target: Path) -> None:
        (target / "half").write_text("x")
        os.chmod(target, 0)
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        store.add_layer(fill)
    assert os.listdir(store.root / "staging") == os.listdir(store.root / "layers") == []


def test_adopting_a_layer_is_a_rename(store: Store, tmp_path: Path) -> None:
    upper = tmp_path / "upper"
    upper.mkdir()
    (upper / "file").write_text("x")
    inode = (upper / "file").stat().st_ino
    os.chmod(upper, 0o555)
    layer = store.adopt_layer(upper, 100_000)
    assert layer.shift == 100_000
    assert not upper.exists()
    assert (store.layer_path(layer) / "file").stat().st_ino == inode
    assert stat.S_IMODE(store.layer_path(layer).stat().st_mode) == 0o555


def test_adopting_from_another_file_system_is_an_error(store: Store) -> None:
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK) or shm.stat().st_dev == store.root.stat().st_dev:
        pytest.skip("there is no second file system to write to")
    upper = shm / f"etude-upper-{os.getpid()}"
    upper.mkdir()
    try:
        with pytest.raises(PodError, match="another file system"):
            store.adopt_layer(upper)
        (upper / "f").write_text("x")
        assert (store.layer_path(store.copy_layer(upper)) / "f").read_text() == "x"
    finally:
        trees.remove_tree(upper)


def test_an_open_directory_can_be_copied_by_its_path_in_proc(store: Store, tmp_path: Path) -> None:
    (tmp_path / "upper/d").mkdir(parents=True)
    trees.make_opaque(str(tmp_path / "upper/d"))
    handle = os.open(tmp_path / "upper", os.O_RDONLY)
    layer = store.copy_layer(Path(f"/proc/self/fd/{handle}"), 100_000)
    os.close(handle)
    assert trees.is_opaque(str(store.layer_path(layer) / "d"))


def test_flatten_shares_files_and_is_done_once(store: Store) -> None:
    base = text_layer(store, a="base", b="base")
    one, two = text_layer(store, a="one", c="one"), text_layer(store, c="two")

    def fill(target: Path) -> None:
        trees.make_whiteout(str(target / "b"))
        trees.make_whiteout(str(target / "never"))

    three = store.add_layer(fill)
    flat = store.flatten([one, two, three], below=[base])
    path = store.layer_path(flat)
    assert (path / "a").stat().st_ino == (store.layer_path(one) / "a").stat().st_ino
    assert (path / "c").read_text() == "two"
    assert trees.is_whiteout(os.lstat(path / "b"))
    assert not os.path.lexists(path / "never")
    assert store.flatten([one, two, three], below=[base]) == flat
    with pytest.raises(InputError, match="no layers"):
        store.flatten([], [base])


@pytest.mark.skipif(not trees.can_chown(), reason="only root keeps owners")
def test_flatten_of_different_shifts_gives_plain_ids(store: Store, tmp_path: Path) -> None:
    stack = []
    for number, shift in enumerate((100_000, 200_000)):
        upper = tmp_path / f"upper{number}"
        upper.mkdir()
        (upper / f"f{number}").write_text("x")
        for path in (upper, upper / f"f{number}"):
            os.chown(path, shift + 7, shift + 7)
        stack.append(store.adopt_layer(upper, shift))
    flat = store.flatten(stack, [])
    assert flat.shift == 0
    assert {(store.layer_path(flat) / name).stat().st_uid for name in ("f0", "f1", ".")} == {7}
    same = store.flatten(stack[:1], [])
    assert same.shift == 100_000
    assert (store.layer_path(same) / "f0").stat().st_uid == 100_007


# -- records


def test_images_by_name_and_id(store: Store) -> None:
    image = store.add_image(Image.of((text_layer(store, a="1"),), "one", env={"A": "b"}, command=("sh",)))
    assert store.image("one") == image
    assert store.image(image.id) == image.named("")
    store.add_image(image.named("also/one:latest"))
    assert sorted(each.name for each in store.images()) == ["also/one:latest", "one"]
    other = store.add_image(Image.of((text_layer(store, a="2"),), "one"))
    assert store.image("one").id == other.id
    store.remove_image("also/one:latest")
    with pytest.raises(InputError, match=r"there is no image 'also/one:latest'.* there are: one"):
        store.image("also/one:latest")
    store.remove_image(other.id)
    assert store.images() == []


def test_a_snapshot_can_be_used_like_an_image(store: Store) -> None:
    image = store.add_image(Image.of((text_layer(store, a="1"),), "base", env={"A": "b"}))
    snapshot_of(store, "snap", image, text_layer(store, b="2"))
    saved = store.snapshot("snap")
    assert saved.snapshot == Snapshot("snap", "base")
    assert saved.image.env == {"A": "b"}
    assert len(saved.image.layers) == 2
    assert [each.snapshot.id for each in store.snapshots()] == ["snap"]
    store.remove_snapshot("snap")
    store.remove_snapshot("snap")
    with pytest.raises(InputError, match="no snapshot"):
        store.snapshot("snap")


@pytest.mark.parametrize("name", ["../../etc/passwd", "", ".", "a/b", "x\0y"])
def test_no_id_leads_outside_the_store(store: Store, name: str) -> None:
    with pytest.raises(InputError):
        store.snapshot(name)
    with pytest.raises(InputError):
        store.image(name)
    store.remove_snapshot(name)
    with pytest.raises(ValueError, match="not an id"):
        store.save_snapshot(Snapshot(name, "x"), Image.of(()))


def test_a_damaged_record_names_the_file_and_stops_garbage_collection(store: Store) -> None:
    layer = text_layer(store, a="1")
    image = store.add_image(Image.of((layer,), "one"))
    file = store.root / "images" / f"{image.id}.json"
    for text in ("{", "[]", "{}", json.dumps({"format": 1, "id": "x", "name": "", "layers": [{"id": "../.."}]})):
        file.write_text(text)
        with pytest.raises(PodError, match=f"{file}.*damaged.*build the image again"):
            store.image("one")
        with pytest.raises(PodError, match="damaged"):
            store.collect_garbage(grace=0)
    assert store.layer_path(layer).exists()


def test_a_missing_layer_is_named(store: Store) -> None:
    layer = text_layer(store, a="1")
    store.add_image(Image.of((layer,), "one"))
    trees.remove_tree(store.layer_path(layer))
    with pytest.raises(PodError, match=f"image one: layer .*{layer.id}.* is missing"):
        store.image("one")
    with pytest.raises(PodError, match="is missing"):
        store.add_image(Image.of((layer,), "two"))


# -- collection


def test_only_unreferenced_layers_are_collected(store: Store) -> None:
    kept, snapped, used, pinned, loose = (text_layer(store, a=str(i)) for i in range(5))
    image = store.add_image(Image.of((kept,), "one"))
    snapshot_of(store, "snap", image, snapped)
    with store.pin() as pin:
        pin([pinned])
        assert store.references([used]) == {kept.id, snapped.id, used.id, pinned.id}
        assert store.collect_garbage([used], grace=0) == [loose.id]
    assert sorted(store.collect_garbage(grace=0)) == sorted([used.id, pinned.id])
    assert os.listdir(store.root / "trash") == os.listdir(store.root / "pins") == []
    store.remove_snapshot("snap")
    store.remove_image("one")
    assert sorted(store.collect_garbage(grace=0)) == sorted([kept.id, snapped.id])


def test_a_young_layer_is_not_collected(store: Store) -> None:
    layer = text_layer(store, a="1")
    assert store.collect_garbage() == []
    os.utime(store.layer_path(layer).parent, (1, 1))
    text_layer(store, a="1")  # added again: its grace period restarts
    assert store.collect_garbage() == []
    os.utime(store.layer_path(layer).parent, (1, 1))
    assert store.collect_garbage() == [layer.id]


@pytest.mark.parametrize("count", [6])
def test_many_processes_add_the_same_layer(store: Store, count: int) -> None:
    script = """
def fill(target):
    for i in range(200): (target / str(i)).write_text(str(i))
print(store.add_layer(fill, key="same").id, flush=True)
"""
    children = [child(store, script) for _ in range(count)]
    made = {process.communicate(timeout=60)[0].strip() for process in children}
    assert all(process.returncode == 0 for process in children)
    assert len(made) == 1
    assert os.listdir(store.root / "layers") == list(made)
    assert os.listdir(store.root / "staging") == []
    assert intact(store, Layer(made.pop()))


def test_killed_while_building_leaves_nothing_after_the_next_collection(store: Store) -> None:
    script = """
def fill(target):
    (target / "half").write_text("x")
    with store.pin() as pin:
        pin([Layer("some")])
        print("here", flush=True)
        time.sleep(60)
store.add_layer(fill)
"""
    process = child(store, script)
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    store.collect_garbage(grace=0)
    assert len(os.listdir(store.root / "staging")) == 1, "a live builder keeps its directory"
    assert store.references() == {"some"}
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert store.references() == set()
    store.collect_garbage(grace=0)
    for name in ("staging", "layers", "pins", "trash"):
        assert os.listdir(store.root / name) == []


def test_killed_while_deleting_is_finished_by_the_next_collection(store: Store) -> None:
    def fill(target: Path) -> None:
        for i in range(3000):
            (target / str(i)).write_text("")

    store.add_layer(fill)
    kept = store.add_image(Image.of((text_layer(store, a="1"),), "kept"))
    # dies at its 1000th deletion
    script = """
import etude.pods.images.trees as trees
real, count = os.unlink, 0
def unlink(*args, **kwargs):
    global count
    count += 1
    if count == 1000: os.kill(os.getpid(), 9)
    real(*args, **kwargs)
trees.os.unlink = unlink
store.collect_garbage(grace=0)
"""
    process = child(store, script)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    (left,) = (store.root / "trash").iterdir()
    assert 0 < len(list((left / "fs").iterdir())) < 3000
    assert len(os.listdir(store.root / "layers")) == 1
    assert store.collect_garbage(grace=0) == []
    assert os.listdir(store.root / "trash") == []
    assert store.image("kept") == kept


def test_records_are_written_atomically(store: Store) -> None:
    image = Image.of((text_layer(store, a="1"),), "one", env={f"V{i}": "x" * 50 for i in range(200)})
    store.add_image(image)
    script = """
image = store.image("one")
print("here", flush=True)
while True:
    store.save_snapshot(__import__("etude.pods.pod").pods.pod.Snapshot("s", "one"), image)
"""
    process = child(store, script)
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    ends = time.monotonic() + 0.5
    while time.monotonic() < ends:
        for saved in store.snapshots():
            assert len(saved.image.env) == 200
    process.kill()
    process.communicate()
    store.snapshots()


# -- export and import


def filled(store: Store) -> tuple[Image, str]:
    """An image of two layers, and a snapshot over it with deletions, links and an opaque directory."""

    def low(target: Path) -> None:
        (target / "etc").mkdir()
        (target / "etc/conf").write_text("low")
        (target / "gone").write_text("x")
        os.chmod(target / "etc/conf", 0o640)
        if trees.can_chown():
            os.chown(target / "etc/conf", 33, 44)

    def delta(target: Path) -> None:
        trees.make_whiteout(str(target / "gone"))
        (target / "etc").mkdir()
        trees.make_opaque(str(target / "etc"))
        (target / "etc/new").write_text("new")
        os.link(target / "etc/new", target / "etc/same")
        (target / "etc/link").symlink_to("/nowhere")

    layers = (store.add_layer(low), text_layer(store, b="2"))
    image = store.add_image(Image.of(layers, "base", env={"A": "b"}, binds=("/usr",), workdir="/work", user="u"))
    snapshot_of(store, "snap", image, store.add_layer(delta))
    return image, "snap"


def test_export_and_import_round_trip(store: Store, tmp_path: Path) -> None:
    image, snap = filled(store)
    store.export(snap, tmp_path / "snap.tar")
    store.export("base", tmp_path / "base.tar")
    other = Store(tmp_path / "other")
    assert other.import_(tmp_path / "snap.tar") == snap
    assert other.import_(tmp_path / "snap.tar") == snap, "twice is allowed"
    mine, theirs = store.snapshot(snap), other.snapshot(snap)
    assert theirs.snapshot == mine.snapshot
    assert theirs.image == mine.image, "layers named by content keep their names"
    assert all(intact(other, layer) for layer in theirs.image.layers)
    assert other.import_(tmp_path / "base.tar") == image.id
    assert other.image("base") == image
    assert os.listdir(other.root / "staging") == os.listdir(other.root / "pins") == []


def test_adopted_layers_are_exported_without_their_shift(store: Store, tmp_path: Path) -> None:
    image, _ = filled(store)
    upper = tmp_path / "upper"
    upper.mkdir()
    (upper / "f").write_text("x")
    shift = 100_000 if trees.can_chown() else 0
    if shift:
        for path in (upper, upper / "f"):
            os.chown(path, shift + 5, shift + 6)
    snapshot_of(store, "sealed", image, store.adopt_layer(upper, shift))
    store.export("sealed", tmp_path / "sealed.tar")
    other = Store(tmp_path / "other")
    last = other.snapshot(other.import_(tmp_path / "sealed.tar")).image.layers[-1]
    assert last.shift == 0
    assert intact(other, last)
    if shift:
        info = (other.layer_path(last) / "f").stat()
        assert (info.st_uid, info.st_gid) == (5, 6)


def test_an_import_replaces_no_existing_name_or_snapshot(store: Store, tmp_path: Path) -> None:
    filled(store)
    store.export("base", tmp_path / "base.tar")
    store.export("snap", tmp_path / "snap.tar")
    other = Store(tmp_path / "other")
    mine = other.add_image(Image.of((text_layer(other, a="mine"),), "base"))
    snapshot_of(other, "snap", mine)
    other.import_(tmp_path / "base.tar")
    assert other.image("base") == mine
    assert other.import_(tmp_path / "snap.tar") != "snap"
    assert other.snapshot("snap").image.layers == mine.layers


def test_an_import_binds_only_system_directories_of_the_host(store: Store, tmp_path: Path) -> None:
    store.add_image(Image.of((text_layer(store, a="1"),), "evil", binds=("/usr", "/home/me")))
    store.export("evil", tmp_path / "evil.tar")
    other = Store(tmp_path / "other")
    with pytest.raises(InputError, match="binds the host paths /home/me"):
        other.import_(tmp_path / "evil.tar")


def rewrite(file: Path, change: "dict[str, bytes]") -> None:
    """Replace members of a tar, by the prefix of their names."""
    with tarfile.open(file) as tar:
        members = [(member, tar.extractfile(member)) for member in tar.getmembers()]
        contents = [(member, source.read() if source else b"") for member, source in members]
    with tarfile.open(file, "w") as tar:
        for member, data in contents:
            for start, other in change.items():
                data = other if member.name.startswith(start) else data
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def test_a_changed_export_is_refused(store: Store, tmp_path: Path) -> None:
    _, snap = filled(store)
    store.export(snap, tmp_path / "good.tar")
    with tarfile.open(tmp_path / "good.tar") as tar:
        blobs = [name for name in tar.getnames() if name.startswith("blobs/")]
    file = tmp_path / "bad.tar"
    for number, blob in enumerate(blobs):
        other = Store(tmp_path / f"other-{number}")  # a layer that a store has is not read again
        file.write_bytes((tmp_path / "good.tar").read_bytes())
        rewrite(file, {blob: b"{}"})
        with pytest.raises(InputError, match=r"another digest|damaged"):
            other.import_(file)
        assert other.snapshots() == other.images() == []
    for change in ({"index.json": b"{"}, {"index.json": b'{"manifests": [{"digest": "sha256:../../x"}]}'}):
        file.write_bytes((tmp_path / "good.tar").read_bytes())
        rewrite(file, change)
        with pytest.raises(InputError, match=r"JSON|not a digest"):
            other.import_(file)
    file.write_bytes((tmp_path / "good.tar").read_bytes()[:5000])
    with pytest.raises(InputError):
        other.import_(file)
    with pytest.raises(InputError, match="no such file"):
        other.import_(tmp_path / "nothing.tar")
    assert other.snapshots() == other.images() == []
    assert os.listdir(other.root / "staging") == []


def test_exporting_a_missing_image_is_an_error(store: Store, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no image and no snapshot"):
        store.export("nothing", tmp_path / "x.tar")
    filled(store)
    with pytest.raises(InputError, match="export to"):
        store.export("base", tmp_path / "no/such/x.tar")
    assert os.listdir(store.root / "staging") == []
