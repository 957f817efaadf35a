"""The host image with writable system directories, so that `apt-get install` works in a pod.

    image = writable_system(store, host_image(store))

A bound /usr cannot be written. Here it is a layer instead: a tree of hard links to the world-readable files of the
host's system directories, made in seconds and without disk space. A pod copies a file before it changes it, so the
host's never change; files that the host replaces keep their old contents until the layer is made again. A second layer
has the state of dpkg and apt, without credentials and without sources that the host never fetched; services are not
started. Both need root and a store on the file system of /usr.
"""

import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

from etude.errors import InputError
from etude.pods.images.records import SYSTEM_BINDS, Image
from etude.pods.images.store import Store
from etude.pods.images.trees import digest

VERSION = "writable system 1"
NOT_OF_DEBIAN = ("/opt", "/nix", "/gnu")  # stay bound
DPKG, APT = "var/lib/dpkg", "etc/apt"
_WRITTEN = {
    "etc/apt/apt.conf.d/99pod": 'APT::Sandbox::User "root";\nDPkg::Use-Pty "0";\n',
    "etc/dpkg/dpkg.cfg.d/pod": "force-unsafe-io\n",  # a pod's files need not survive a power failure
    "usr/sbin/policy-rc.d": "#!/bin/sh\nexit 101\n",  # services are installed, not started
}
_EMPTY = (
    *("var/lib/dpkg/updates", "var/lib/dpkg/triggers", "var/lib/dpkg/alternatives", "var/lib/dpkg/parts"),
    *("var/lib/apt/lists/partial", "var/cache/apt/archives/partial", "var/cache/debconf", "var/log/apt"),
    *("etc/apt/apt.conf.d", "etc/apt/preferences.d", "etc/dpkg/dpkg.cfg.d", "usr/sbin"),
)
# World-readable files of the state; not those with credentials, backups and locks.
_STATE = re.compile(
    r"var/lib/dpkg/((info|triggers|alternatives|parts)/[^/]+|status|available|diversions|statoverride|arch)"
    r"|etc/apt/(sources\.list(\.d/[^/]+)?|trusted\.gpg(\.d/[^/]+)?|keyrings/[^/]+|preferences(\.d/[^/]+)?)"
    r"|var/lib/apt/extended_states|etc/debconf\.conf|var/cache/debconf/(config|templates)\.dat"
    r"|etc/(adduser|deluser|libaudit|ucf)\.conf|etc/pam\.d/[^/]+|etc/rc[0-9S]\.d/.*|etc/(default|init\.d)/[^/]+"
)


def writable_system(store: Store, image: Image, *, root: Path = Path("/")) -> Image:
    """Return an image on the host's programs with writable system directories; raise InputError where that is
    impossible. An image that binds none is returned as it is."""
    directories = [path for path in SYSTEM_BINDS if path in image.binds and path not in NOT_OF_DEBIAN]
    if not directories:
        return image
    if not (root / DPKG / "status").is_file():
        raise InputError("this host has no dpkg: Debian packages cannot be installed in its image")
    stamps = [f"{path} {info.st_mtime_ns}" for each in directories for path, info in _walk_directories(root / each[1:])]
    state = _state_files(root)
    stamps += [f"{path} {info.st_mtime_ns} {info.st_size}" for path in state for info in (os.lstat(root / path),)]
    name = digest(VERSION, str(root), *stamps)[:32]
    try:
        system = store.add_layer(lambda target: _link_system(root, directories, target), id=f"system-{name}")
    except OSError as error:
        raise InputError(
            f"the host's system directories cannot be made writable in pods ({error.strerror}): that needs root, and a "
            "state directory on the file system of /usr"
        ) from None
    apt = store.add_layer(lambda target: _copy_state(root, state, target), id=f"apt-{name}")
    binds = tuple(path for path in image.binds if path not in directories)
    made = image.with_(layers=(system, *image.layers[:1], apt, *image.layers[1:]), binds=binds)
    return store.add_image(made.named(f"writable-{made.id[:12]}"))  # the other image keeps its name


def _walk_directories(top: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the world-readable directories at and below one on the same file system, parents first."""
    device = os.lstat(top).st_dev
    for path, names, _ in os.walk(top):
        info = os.lstat(path)
        if info.st_mode & 0o005 != 0o005 or info.st_dev != device:
            names.clear()
            continue
        names.sort()
        yield path, info


def _link_system(root: Path, directories: list[str], target: Path) -> None:
    for top in directories:
        for path, info in _walk_directories(root / top[1:]):
            made = target / os.path.relpath(path, root)
            made.mkdir(parents=True)
            with os.scandir(path) as entries:
                for entry in entries:
                    mode = entry.stat(follow_symlinks=False).st_mode
                    if stat.S_ISLNK(mode) or (stat.S_ISREG(mode) and mode & 0o004):
                        os.link(entry.path, made / entry.name, follow_symlinks=False)
            os.chown(made, info.st_uid, info.st_gid)
            os.chmod(made, stat.S_IMODE(info.st_mode))


def _state_files(root: Path) -> list[str]:
    """Return the files of the state of dpkg and apt to copy."""
    found = []
    sources = _fetched_sources() if root == Path("/") else None
    for top in ("var/lib/dpkg", "var/lib/apt", "var/cache/debconf", "etc"):
        for path, names, files in os.walk(root / top):
            inside = os.path.relpath(path, root)
            names[:] = [name for name in sorted(names) if name != "lists"]
            for name in sorted(files):
                file = f"{inside}/{name}"
                if not _STATE.fullmatch(file) or not os.lstat(root / file).st_mode & 0o004:
                    continue
                if sources and file.startswith("etc/apt/sources") and f"/{file}" not in sources:
                    continue
                found.append(file)
    return found


def _fetched_sources() -> set[str]:
    """Return the files of apt's sources of which the host has fetched lists: the others may not be reachable."""
    command = ["apt-get", "indextargets", "--format", "$(SOURCESENTRY)"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return set()
    return {line.rpartition(":")[0] for line in listed.splitlines()}


def _copy_state(root: Path, files: list[str], target: Path) -> None:
    for path in _EMPTY:
        (target / path).mkdir(parents=True, exist_ok=True)
    for path in files:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / path, target / path, follow_symlinks=False)
    for path, text in _WRITTEN.items():
        (target / path).write_text(text)
        (target / path).chmod(0o755 if text.startswith("#!") else 0o644)
