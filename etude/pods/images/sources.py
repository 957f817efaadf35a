"""Make images from a directory, a tar, an OCI layout, a Debian mirror, or this machine (`host_image.py`).

Each function adds the image to the store and returns it; the same source gives the same layers.
"""

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from etude.errors import InputError
from etude.pods.images import layers, oci
from etude.pods.images.archive import unpack
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
DEBOOTSTRAP_S = 1800
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+_:-]*")


def image_from_directory(store: Store, directory: Path, name: str = "") -> Image:
    """Make an image from a directory that contains a root file system. Devices and sockets are skipped."""
    if not directory.is_dir():
        raise InputError(f"{directory}: not a directory; expected one that contains a root file system")

    def fill(target: Path) -> None:
        try:
            layers.copy(directory, target, lowest=True)
        except PermissionError as error:
            raise InputError(f"{directory}: cannot read {error.filename} ({error.strerror})") from None

    return store.add_image(Image.of((store.add_layer(fill),), name, env=dict(ENV)))


def image_from_tar(store: Store, file: Path, name: str = "") -> Image:
    """Make an image from a tar of a root file system: plain, gzip, xz, zstd or bzip2."""
    if not file.is_file():
        raise InputError(f"{file}: there is no such file")

    def fill(target: Path) -> None:
        with open(file, "rb") as source:
            unpack(source, target, str(file), lowest=True)

    layer = store.add_layer(fill, key=f"tar {file_digest(str(file.resolve())).hex()}")
    return store.add_image(Image.of((layer,), name, env=dict(ENV)))


def image_from_oci_layout(store: Store, source: Path, ref: str | None = None, name: str = "") -> Image:
    """Make an image from an OCI layout (directory or tar): the one named `ref`, or the only one for this platform."""
    with store.staging() as staging, store.pin() as pin:
        layout = oci.open_layout(source, staging)
        image = layout.import_image(store, layout.manifest(ref))
        pin(image.layers)
        return store.add_image(image.with_(name=name, env={**ENV, **image.env}))


def image_from_debootstrap(store: Store, suite: str = "bookworm", include: Sequence[str] = (), name: str = "") -> Image:
    """Make a minimal Debian image with the packages `include`, by `mmdebstrap` from its mirror."""
    for word in (suite, *include):
        if not _WORD.fullmatch(word):
            raise InputError(f"{word!r} is not the name of a Debian suite or package")
    program = shutil.which("mmdebstrap")
    if program is None:
        raise InputError(
            "there is no mmdebstrap on PATH, which builds Debian images; install it, "
            "or use image_from_tar, image_from_oci_layout or host_image"
        )
    with store.staging() as staging:
        made = staging / "root.tar"
        command = [program, "--variant=minbase", "--format=tar", "--quiet"]
        if include:
            command.append(f"--include={','.join(include)}")
        command += ["--", suite, str(made)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=DEBOOTSTRAP_S)
        except subprocess.TimeoutExpired:
            raise PodError(
                f"mmdebstrap {suite}: not finished after {DEBOOTSTRAP_S} s; is the mirror reachable?"
            ) from None
        if done.returncode != 0:
            last = "\n".join(done.stderr.strip().splitlines()[-5:])
            raise PodError(f"mmdebstrap {suite} failed with exit code {done.returncode}:\n{last}")
        return image_from_tar(store, made, name or f"debian-{suite}")
