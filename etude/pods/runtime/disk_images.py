"""Disk images: what a pod with storage="disk" and a disk limit writes to, as root.

An image is a sparse file without a name, with an ext4 file system of the size of the limit; the zygote mounts it on a
loop device. It takes the space that the pod has used and disappears with its last user, however that ends. Making a
file system takes ten to eighty milliseconds, so images are copies of a template of the same size, of which only the few
hundred kilobytes that are not zero are copied.
"""

import contextlib
import fcntl
import os
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path

from etude.pods.pod import PodError

BLOCK = 4096
INODE = 256
MIN_INODES = 64
RESERVE = 4 << 20  # for the tables of a file system; what is left of it is made unavailable
LOOP_CTL_GET_FREE = 0x4C82
FEATURES = "^has_journal,^metadata_csum,uninit_bg,^resize_inode"  # contents are never needed after a crash
SEARCH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))


def why_not() -> str:
    """Return why disk images cannot be used here; empty if they can."""
    if os.geteuid():
        return "only root can mount disk images"
    if find_mkfs() is None:
        return "mkfs.ext4 is not installed (package e2fsprogs)"
    try:
        with open("/dev/loop-control", "rb+", buffering=0) as control:
            number = fcntl.ioctl(control, LOOP_CTL_GET_FREE)
        with open(f"/dev/loop{number}", "rb+", buffering=0):
            return ""
    except OSError as error:
        return f"no loop devices ({error})"


def find_mkfs() -> str | None:
    """Return the path of mkfs.ext4."""
    return shutil.which("mkfs.ext4", path=SEARCH)


def open_image(templates: Path, size: int, inodes: int) -> int:
    """Return the descriptor of a new image with `size` bytes for data and `inodes` files."""
    inodes = max(inodes, MIN_INODES)
    template = templates / f"{size}-{inodes}.ext4"
    if not template.exists():
        _make_template(template, size, inodes)
    with open(template, "rb", buffering=0) as source:
        image = os.open(templates, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            _copy_sparse(source.fileno(), image)
        except BaseException:
            os.close(image)
            raise
    return image


def _make_template(template: Path, size: int, inodes: int) -> None:
    mkfs = find_mkfs()
    if mkfs is None:
        raise PodError("a disk image needs mkfs.ext4 (package e2fsprogs), which is not installed any more")
    template.parent.mkdir(mode=0o700, exist_ok=True)
    total = size + inodes * INODE + size // 32 + RESERVE  # with room for bitmaps and for what the kernel reserves
    with tempfile.NamedTemporaryFile(dir=template.parent, prefix=".", delete=False) as file:
        try:
            file.truncate(-(-total // BLOCK) * BLOCK)
            options = ["-b", str(BLOCK), "-I", str(INODE), "-N", str(inodes), "-m", "0", "-O", FEATURES]
            options += ["-E", "lazy_itable_init=1,nodiscard,root_owner=0:0"]
            made = subprocess.run([mkfs, "-q", "-F", *options, file.name], capture_output=True, text=True)
            if made.returncode:
                raise PodError(f"{mkfs} failed for a disk limit of {size:,} bytes: {made.stderr.strip()[-300:]}")
            _reserve(file.fileno(), size)
            os.rename(file.name, template)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(file.name)
            raise


def _reserve(image: int, size: int) -> None:
    """Reserve the free blocks beyond `size` bytes, so that only these are available to a pod."""
    superblock = os.pread(image, 1024, 1024)

    def number(low: int, high: int) -> int:
        return int.from_bytes(superblock[low : low + 4] + superblock[high : high + 4], "little")

    blocks, free = number(4, 0x150), number(12, 0x158)
    by_kernel = min(blocks // 50, 4096)  # which an ext4 mount keeps for its own tables
    os.pwrite(image, struct.pack("<I", max(0, free - by_kernel - -(-size // BLOCK))), 1024 + 8)


def _copy_sparse(source: int, target: int) -> None:
    end = os.fstat(source).st_size
    os.ftruncate(target, end)
    at = 0
    while at < end:
        try:
            at = os.lseek(source, at, os.SEEK_DATA)
        except OSError:  # no data after this
            return
        hole = os.lseek(source, at, os.SEEK_HOLE)
        while at < hole:
            at += os.pwrite(target, os.pread(source, min(hole - at, 1 << 20), at), at)
