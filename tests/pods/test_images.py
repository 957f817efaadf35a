"""Images from directories, tars, OCI layouts and this machine: their contents, and what they must not contain."""

import gzip
import hashlib
import io
import json
import os
import shutil
import stat
import tarfile
from pathlib import Path
from typing import Any

import pytest
import zstandard

from etude.errors import InputError
from etude.pods.images import sources, trees
from etude.pods.images.layers import LayerStack
from etude.pods.images.oci import architecture
from etude.pods.images.records import Image
from etude.pods.images.sources import (
    host_image,
    image_from_debootstrap,
    image_from_directory,
    image_from_oci_layout,
    image_from_tar,
)
from etude.pods.images.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def root_of(store: Store, image: Image) -> Path:
    return store.layer_path(image.layers[-1])


# -- directories and tars


def test_an_image_from_a_directory_is_independent_of_it(store: Store, tmp_path: Path) -> None:
    source = tmp_path / "root"
    (source / "bin").mkdir(parents=True)
    (source / "bin/sh").write_text("#!")
    os.chmod(source / "bin/sh", 0o4755)
    (source / "link").symlink_to("/etc/passwd")
    trees.make_whiteout(str(source / "whiteout"))
    image = image_from_directory(store, source, "mine")
    root = root_of(store, image)
    assert sorted(os.listdir(root)) == ["bin", "link"]
    assert os.readlink(root / "link") == "/etc/passwd"
    assert stat.S_IMODE((root / "bin/sh").stat().st_mode) == 0o4755
    (source / "bin/sh").write_text("changed")
    assert (root / "bin/sh").read_text() == "#!"
    assert store.image("mine") == image
    with pytest.raises(InputError, match="not a directory"):
        image_from_directory(store, source / "bin/sh")


def tar_bytes(**files: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name.replace("__", "/").replace("WH_", ".wh."))
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return out.getvalue()


def test_a_tar_is_unpacked_once(store: Store, tmp_path: Path) -> None:
    (tmp_path / "root.tar.gz").write_bytes(gzip.compress(tar_bytes(etc__conf=b"x")))
    image = image_from_tar(store, tmp_path / "root.tar.gz", "tarred")
    assert (root_of(store, image) / "etc/conf").read_bytes() == b"x"
    before = root_of(store, image).stat().st_ino
    assert image_from_tar(store, tmp_path / "root.tar.gz", "tarred") == image
    assert root_of(store, image).stat().st_ino == before


def test_a_hostile_tar_leaves_nothing_behind(store: Store, tmp_path: Path) -> None:
    (tmp_path / "evil.tar").write_bytes(tar_bytes(good=b"x")[:1024] + tar_bytes(**{"..__..__evil": b"x"}))
    with pytest.raises(InputError, match=r"evil.tar: member '\.\./\.\./evil' leads outside"):
        image_from_tar(store, tmp_path / "evil.tar", "evil")
    assert os.listdir(store.root / "layers") == os.listdir(store.root / "staging") == store.images() == []
    with pytest.raises(InputError, match="no such file"):
        image_from_tar(store, tmp_path / "nothing.tar")


# -- OCI


class LayoutWriter:
    """Writes a layout as other tools do."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "blobs/sha256").mkdir(parents=True)
        self.manifests: list[dict[str, Any]] = []

    def blob(self, data: bytes, media: str = "", **more: Any) -> dict[str, Any]:
        name = hashlib.sha256(data).hexdigest()
        (self.directory / "blobs/sha256" / name).write_bytes(data)
        return {"mediaType": media, "digest": f"sha256:{name}", "size": len(data), **more}

    def json(self, value: Any, media: str = "", **more: Any) -> dict[str, Any]:
        return self.blob(json.dumps(value).encode(), media, **more)

    def image(self, layers: list[bytes], packed: list[bytes] | None = None, **config: Any) -> dict[str, Any]:
        diff_ids = [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in layers]
        described = self.json({"config": config, "rootfs": {"type": "layers", "diff_ids": diff_ids}})
        blobs = [self.blob(data) for data in packed or layers]
        return self.json({"config": described, "layers": blobs}, "application/vnd.oci.image.manifest.v1+json")

    def index(self, *manifests: dict[str, Any]) -> None:
        (self.directory / "index.json").write_text(json.dumps({"manifests": manifests}))


LOW = tar_bytes(etc__conf=b"low", gone=b"x", d__a=b"a")
TOP = tar_bytes(etc__conf=b"top", WH_gone=b"", d__WH_a=b"", d__b=b"b")


def test_an_oci_layout_becomes_an_image(store: Store, tmp_path: Path) -> None:
    writer = LayoutWriter(tmp_path / "layout")
    packed = [gzip.compress(LOW), zstandard.compress(TOP)]
    config = {"Env": ["A=b=c", "PATH=/x"], "WorkingDir": "/src", "User": "1000", "Cmd": ["run"], "Entrypoint": ["/e"]}
    writer.index(writer.image([LOW, TOP], packed, **config, Labels={"k": "v"}))
    image = image_from_oci_layout(store, tmp_path / "layout", name="oci")
    assert (image.env["A"], image.env["PATH"], image.workdir, image.user) == ("b=c", "/x", "/src", "1000")
    assert (image.command, image.entrypoint, image.labels) == (("run",), ("/e",), {"k": "v"})
    stack = LayerStack.of(store.layer_dirs(image.layers))
    assert stack.read("/etc/conf") == b"top"
    assert not stack.locate("/gone")[1].exists
    assert stack.names(stack.locate("/d")[1]) == ["b"]
    with tarfile.open(tmp_path / "layout.tar", "w") as tar:
        tar.add(tmp_path / "layout", ".")
    assert image_from_oci_layout(store, tmp_path / "layout.tar").id == image.id


def test_the_manifest_for_this_machine_is_chosen(store: Store, tmp_path: Path) -> None:
    writer = LayoutWriter(tmp_path / "layout")
    here = {"os": "linux", "architecture": architecture()}
    mine = {**writer.image([LOW]), "platform": here}
    other = {**writer.image([TOP]), "platform": {"os": "linux", "architecture": "z80"}}
    signature = {**writer.image([]), "platform": {"os": "unknown", "architecture": "unknown"}}
    nested = writer.json({"manifests": [other, mine, signature]}, "application/vnd.oci.image.index.v1+json")
    ref = "org.opencontainers.image.ref.name"
    second = {**writer.image([TOP]), "annotations": {ref: "second"}}
    writer.index({**nested, "annotations": {ref: "first"}}, second)
    first = image_from_oci_layout(store, tmp_path / "layout", "first")
    assert LayerStack.of(store.layer_dirs(first.layers)).read("/etc/conf") == b"low"
    with pytest.raises(InputError, match=r"2 images .* name one of: first, second"):
        image_from_oci_layout(store, tmp_path / "layout")
    with pytest.raises(InputError, match="no image called third"):
        image_from_oci_layout(store, tmp_path / "layout", "third")


def test_blobs_are_verified_by_digest(store: Store, tmp_path: Path) -> None:
    writer = LayoutWriter(tmp_path / "layout")
    writer.index(writer.image([LOW], [gzip.compress(TOP)]))  # the blob is intact, but not the layer of the diff_id
    with pytest.raises(InputError, match="another digest"):
        image_from_oci_layout(store, tmp_path / "layout")
    writer.index(writer.image([LOW]))
    (tmp_path / "layout/blobs/sha256" / hashlib.sha256(LOW).hexdigest()).write_bytes(TOP)
    with pytest.raises(InputError, match="another digest"):
        image_from_oci_layout(store, tmp_path / "layout")
    (tmp_path / "layout/blobs/sha256" / hashlib.sha256(LOW).hexdigest()).unlink()
    (tmp_path / "layout/blobs/sha256" / hashlib.sha256(LOW).hexdigest()).symlink_to("/etc/hostname")
    with pytest.raises(InputError, match="cannot read"):
        image_from_oci_layout(store, tmp_path / "layout")
    assert os.listdir(store.root / "layers") == os.listdir(store.root / "staging") == []
    with pytest.raises(InputError, match="not an OCI image layout"):
        image_from_oci_layout(store, tmp_path)


def test_directories_that_a_layer_does_not_describe_keep_their_metadata(store: Store, tmp_path: Path) -> None:
    low = io.BytesIO()
    with tarfile.open(fileobj=low, mode="w") as tar:
        for name, mode in ((".", 0o750), ("tmp", 0o1777)):
            member = tarfile.TarInfo(name)
            member.type, member.mode = tarfile.DIRTYPE, mode
            tar.addfile(member)
    writer = LayoutWriter(tmp_path / "layout")
    writer.index(writer.image([low.getvalue(), tar_bytes(tmp__new__file=b"x")]))
    root = root_of(store, image_from_oci_layout(store, tmp_path / "layout"))
    modes = [stat.S_IMODE((root / name).stat().st_mode) for name in (".", "tmp", "tmp/new")]
    assert modes == [0o750, 0o1777, 0o755]


def test_an_opaque_root_drops_the_layers_below(store: Store, tmp_path: Path) -> None:
    writer = LayoutWriter(tmp_path / "layout")
    writer.index(writer.image([LOW, tar_bytes(**{"WH_.wh..opq": b"", "only": b"x"})]))
    image = image_from_oci_layout(store, tmp_path / "layout")
    assert len(image.layers) == 1
    assert os.listdir(root_of(store, image)) == ["only"]


def test_exports_can_be_read_as_oci_layouts(store: Store, tmp_path: Path) -> None:
    writer = LayoutWriter(tmp_path / "layout")
    writer.index(writer.image([LOW, TOP], Env=["A=b"], WorkingDir="/w"))
    image = image_from_oci_layout(store, tmp_path / "layout", name="mine")
    store.export("mine", tmp_path / "out.tar")
    again = image_from_oci_layout(Store(tmp_path / "other"), tmp_path / "out.tar", "mine", "mine")
    assert again == image


# -- Debian


def test_without_mmdebstrap_the_error_says_what_to_do(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(InputError, match="no mmdebstrap on PATH"):
        image_from_debootstrap(store)
    with pytest.raises(InputError, match="not the name of a Debian suite"):
        image_from_debootstrap(store, "--help")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mmdebstrap") is None, reason="mmdebstrap is not installed")
def test_debian_from_its_mirror(store: Store) -> None:
    try:
        image = image_from_debootstrap(store, include=["ca-certificates"])
    except sources.PodError as error:
        pytest.skip(f"no Debian mirror can be reached from here: {error}")
    assert (root_of(store, image) / "bin/sh").exists()


# -- this machine


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A machine with secrets."""
    root = tmp_path / "machine"
    for name in ("usr/bin", "opt", "etc/ssl/certs", "etc/ssl/private", "etc/ssh", "etc/alternatives", "root", "lib64"):
        (root / name).mkdir(parents=True)
    (root / "bin").symlink_to("usr/bin")
    files = {
        "etc/passwd": "root:secret:0:0:Admin:/home/boss:/bin/bash\ndaemon:x:1:1::/:/x\nme:x:1000:1000:Me:/home/me:/b\n"
        "nobody:x:65534:65534::/:/x\n",
        "etc/group": "root:x:0:me\ndaemon:x:1:me,daemon\nme:x:1000:\n",
        "etc/shadow": "root:hash",
        "etc/ssh/key": "k",
        "etc/ssl/private/key.pem": "k",
        "etc/ssl/certs/ca.pem": "cert",
        "etc/ssl/certs/own.key": "k",
        "etc/ssl/token.cnf": "k",
        "etc/profile": "p",
        "etc/environment": "TOKEN=1",
        "etc/gitconfig": "g",
        "etc/pip.conf": "g",
        "etc/resolv.conf": "nameserver 10.0.0.1",
        "etc/unknown": "u",
    }
    for name, text in files.items():
        (root / name).write_text(text)
        os.chmod(root / name, 0o644)
    (root / "etc/services").write_text("hidden")
    os.chmod(root / "etc/services", 0o600)
    for path, *_ in os.walk(root):
        os.chmod(path, 0o755)
    os.mkfifo(root / "etc/protocols")
    (root / "etc/alternatives/vi").symlink_to("/usr/bin/vim")
    return root


def test_the_host_image_contains_programs_and_no_secrets(store: Store, machine: Path) -> None:
    image = host_image(store, root=machine)
    root = root_of(store, image)
    assert image.binds == ("/usr", "/opt", "/lib64")
    assert os.readlink(root / "bin") == "usr/bin"
    found = {str(path.relative_to(root / "etc")) for path in (root / "etc").rglob("*") if not path.is_dir()}
    made = {"passwd", "group", "hosts", "hostname", "resolv.conf", "mtab"}
    assert found - made == {"profile", "ssl/certs/ca.pem", "alternatives/vi"}
    passwd = (root / "etc/passwd").read_text()
    assert passwd.startswith("root:x:0:0::/root:/bin/bash\ndaemon:x:1:1::/:/x\nnobody:")
    assert "me" not in passwd
    assert (root / "etc/group").read_text() == "root:x:0:\ndaemon:x:1:daemon\nnogroup:x:65534:\n"
    assert (root / "etc/resolv.conf").read_text() == ""
    assert stat.S_ISREG((root / "etc/resolv.conf").lstat().st_mode)
    assert "localhost pod" in (root / "etc/hosts").read_text()
    modes = {name: stat.S_IMODE((root / name).stat().st_mode) for name in ("tmp", "var/tmp", "root", "work", "usr")}
    assert modes == {"tmp": 0o1777, "var/tmp": 0o1777, "root": 0o700, "work": 0o755, "usr": 0o755}


def test_the_host_image_is_rebuilt_when_its_sources_change(store: Store, machine: Path) -> None:
    first = host_image(store, root=machine)
    assert host_image(store, root=machine) == first
    (machine / "etc/profile").write_text("other")
    second = host_image(store, root=machine)
    assert second != first
    assert (root_of(store, second) / "etc/profile").read_text() == "other"
    (machine / "etc/alternatives/vi").unlink()
    (machine / "etc/alternatives/vi").symlink_to("/usr/bin/nano")
    assert host_image(store, root=machine) not in (first, second)
    assert store.image("host") == host_image(store, root=machine)


def test_the_host_image_is_cached(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    image = host_image(store)
    assert "/usr" in image.binds
    with monkeypatch.context() as patch:
        patch.setattr(store, "add_layer", lambda fill: pytest.fail("it was built again"))
        assert host_image(store) == image
    store.remove_image("host")
    store.collect_garbage(grace=0)
    assert root_of(store, host_image(store)).is_dir(), "collected, so built again"


def test_the_host_image_is_independent_of_the_umask(tmp_path: Path, machine: Path) -> None:
    one = host_image(Store(tmp_path / "one"), root=machine)
    before = os.umask(0o077)
    try:
        two = host_image(Store(tmp_path / "two"), root=machine)
    finally:
        os.umask(before)
    assert one == two
