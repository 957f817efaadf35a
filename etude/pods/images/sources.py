"""Images from what people have: a directory, a tar, an OCI layout, a Debian mirror, or nothing but this machine.

Each function leaves the image in the store and returns it; the same source gives the same layers. `host_image` is in
`hostimage.py`.
"""

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from etude.errors import InputError
from etude.pods.images import layers, oci
from etude.pods.images.archive import UnpackLimits, unpack
from etude.pods.images.bundle import open_layout
from etude.pods.images.host_image import PATH, host_image
from etude.pods.images.records import Image
from etude.pods.images.store import Store
from etude.pods.images.trees import file_digest
from etude.pods.pod import PodError

__all__ = [
    "host_image",
    "image_from_debootstrap",
    "image_from_directory",
    "image_from_oci_layout",
    "image_from_tar",
]

ENV: Mapping[str, str] = {"PATH": PATH, "LANG": "C.UTF-8", "HOME": "/root"}
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+_:-]*")


def image_from_directory(store: Store, directory: Path, name: str = "", *, workdir: str = "/root") -> Image:
    """A copy of a root file system in a directory. Devices and sockets are left out."""
    if not directory.is_dir():
        raise InputError(f"{directory}: not a directory; expected one that holds a root file system")

    def fill(target: Path) -> None:
        try:
            layers.copy(directory, target, lowest=True)
        except PermissionError as error:
            raise InputError(f"{directory}: cannot read {error.filename} ({error.strerror})") from None

    return store.add_image(Image.of((store.add_layer(fill),), name, env=dict(ENV), workdir=workdir))


def image_from_tar(
    store: Store, file: Path, name: str = "", *, workdir: str = "/root", allowance: UnpackLimits | None = None
) -> Image:
    """A root file system in a tar: plain, gzip, xz, zstd or bzip2."""
    if not file.is_file():
        raise InputError(f"{file}: there is no such file")

    def fill(target: Path) -> None:
        with open(file, "rb") as source:
            unpack(source, target, str(file), allowance, lowest=True)

    layer = store.add_layer(fill, key=f"tar {file_digest(str(file.resolve())).hex()}")
    return store.add_image(Image.of((layer,), name, env=dict(ENV), workdir=workdir))


def image_from_oci_layout(
    store: Store, source: Path, ref: str | None = None, name: str = "", *, allowance: UnpackLimits | None = None
) -> Image:
    """An image of an OCI layout, a directory or a tar: the one called `ref`, or the only one, for this machine."""
    if not source.exists():
        raise InputError(f"{source}: there is no such file or directory")
    what = str(source)
    with store.staging() as staging, store.pin() as pin:
        layout = open_layout(source, staging)
        manifest = layout.manifest(ref)
        if not isinstance(manifest.get("config"), dict) or not isinstance(manifest.get("layers"), list):
            raise InputError(f"{what}: the manifest has no config or no layers; only images can be used")
        config = layout.json(manifest["config"])
        diff_ids = (config.get("rootfs") or {}).get("diff_ids") or []
        taken = oci.take_layers(store, layout, manifest["layers"], diff_ids, what, allowance or UnpackLimits())
        pin(taken)
        started = oci.configuration(config, what)
        started["env"] = {**ENV, **started["env"]}
        return store.add_image(Image.of(taken, name, **started))


def image_from_debootstrap(
    store: Store,
    suite: str = "bookworm",
    include: Sequence[str] = (),
    name: str = "",
    *,
    mirrors: Sequence[str] = (),
    timeout: float = 1800.0,
) -> Image:
    """A minimal Debian with the packages `include`, made by `mmdebstrap` from its mirror (or `mirrors`)."""
    for word in (suite, *include):
        if not _WORD.fullmatch(word):
            raise InputError(f"{word!r} is not the name of a Debian suite or package")
    if any(mirror.startswith("-") for mirror in mirrors):
        raise InputError(f"mirrors {list(mirrors)}: expected addresses or lines of sources.list")
    program = shutil.which("mmdebstrap")
    if program is None:
        raise InputError(
            "there is no mmdebstrap on PATH, which makes Debian images; install it, "
            "or use image_from_tar, image_from_oci_layout or host_image"
        )
    with store.staging() as staging:
        made = staging / "root.tar"
        command = [program, "--variant=minbase", "--format=tar", "--quiet"]
        if include:
            command.append(f"--include={','.join(include)}")
        command += ["--", suite, str(made), *mirrors]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout)
        except subprocess.TimeoutExpired:
            raise PodError(f"mmdebstrap {suite}: not done after {timeout:g} s; is the mirror reachable?") from None
        if done.returncode != 0:
            last = "\n".join(done.stderr.strip().splitlines()[-5:])
            raise PodError(f"mmdebstrap {suite} failed with exit code {done.returncode}:\n{last}")
        return image_from_tar(store, made, name or f"debian-{suite}")
