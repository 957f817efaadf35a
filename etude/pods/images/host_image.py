"""The `host` image: this machine's programs without its secrets, for machines that have no other image.

It is not the machine's root. It is a small skeleton layer (links such as bin -> usr/bin, empty directories, and the
part of /etc that programs need, by an allow-list) with /usr, /opt and the like bind-mounted read-only. Accounts are
generated: system ones only. Only world-readable files are copied. The skeleton is rebuilt only when its sources have
changed, which `lstat` alone detects.
"""

import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from etude.errors import InputError
from etude.files import write_atomically
from etude.globs import Globs
from etude.pods.host_system import host_system
from etude.pods.images.records import SYSTEM_BINDS, SYSTEM_LABEL, Image
from etude.pods.images.store import Store
from etude.pods.images.trees import OVERFLOW_ID, check_depth, digest
from etude.pods.pod import PodError

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
WORKDIR = "/work"

# allow-list of names in /etc
_ALLOWED = """
    nsswitch.conf host.conf gai.conf services protocols rpc networks ethertypes netconfig
    ld.so.cache ld.so.conf ld.so.conf.d ld-musl-* alternatives localtime timezone
    ssl pki ca-certificates ca-certificates.conf crypto-policies
    profile bash.bashrc bashrc inputrc terminfo shells login.defs skel
    os-release debian_version lsb-release redhat-release alpine-release arch-release
    mime.types magic magic.mime locale.alias locale.gen locale.conf xattr.conf
    python python2* python3* perl java* fonts groff vim sgml xml glvnd OpenCL
    ImageMagick-* texmf R ghc octave.conf manpath.config gprofng.rc bindresvport.blacklist
"""
# deny-list of names at any depth
_DENIED = """
    shadow* gshadow* ssh* sudoers* machine-id gitconfig pip.conf netrc .netrc docker kubernetes private
    *.key *.p12 *.pfx *password* *secret* *credential* *token* .* *- *~ *.bak
"""
_DIRECTORIES: Mapping[str, int] = {
    **dict.fromkeys(("proc", "sys", "dev", "run", "home", "mnt", "media", "srv", "usr", "opt", "etc", "var"), 0o755),
    **dict.fromkeys(("var/lib", "var/cache", "var/log", "var/spool", "run/lock", WORKDIR[1:]), 0o755),
    **dict.fromkeys(("tmp", "var/tmp"), 0o1777),
    "root": 0o700,
}
_LINKS: Mapping[str, str] = {"var/run": "/run", "var/lock": "/run/lock", "etc/mtab": "/proc/self/mounts"}
_FILES: Mapping[str, str] = {
    "etc/hosts": "127.0.0.1 localhost pod\n::1 localhost\n",
    "etc/hostname": "pod\n",
    "etc/resolv.conf": "",  # a regular file: pods with network have theirs mounted over it
}


_ALLOWED_GLOBS, _DENIED_GLOBS = Globs(_ALLOWED.split()), Globs(_DENIED.split())


def host_image(store: Store, *, root: Path = Path("/")) -> Image:
    """Return the image `host`, made from the machine whose files are below `root`."""
    cache_file = store.root / "keys" / f"{digest('host', str(root), SYSTEM_LABEL)}.host"
    if (known := _unchanged(store, cache_file)) is not None:
        return known
    links, binds = _top(root)
    stamps = _stamps(root)  # before the copy, so that a change during it is detected next time
    layer = store.add_layer(lambda target: _skeleton(target, root, links, binds))
    env = {"PATH": PATH, "LANG": "C.UTF-8", "HOME": "/root"}
    labels = {SYSTEM_LABEL: str(host_system())}
    image = store.add_image(Image.of((layer,), "host", binds=tuple(binds), env=env, workdir=WORKDIR, labels=labels))
    write_atomically(cache_file, json.dumps({"image": image.id, "stamps": stamps}))
    return image


# -- change detection


def _unchanged(store: Store, cache_file: Path) -> Image | None:
    try:
        given = json.loads(cache_file.read_bytes())
        if any(_stamp(path) != stamp for path, stamp in given["stamps"].items()):
            return None
        return store.image(given["image"]).named("host")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, PodError, InputError):
        return None  # not cached, or the image was removed


def _stamps(root: Path) -> dict[str, str]:
    """Return the stamps of the image's source directories (which cover their links) and files."""
    etc = str(root / "etc")
    paths = [str(root), etc, f"{etc}/passwd", f"{etc}/group"]
    for path, info in _allowed(etc, 0):
        if not stat.S_ISLNK(info.st_mode):  # a link cannot change without its directory
            paths.append(path)
    return {path: _stamp(path) for path in paths}


def _stamp(path: str) -> str:
    try:
        info = os.lstat(path)
    except OSError:
        return ""
    return f"{info.st_mtime_ns} {info.st_ino} {info.st_size} {info.st_mode:o}"


def _allowed(directory: str, depth: int) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the entries of a directory to copy, parents first: allowed by name, and world-readable."""
    check_depth(directory, depth)
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return
    for name in names:
        if _DENIED_GLOBS.matches(name):
            continue
        if depth == 0 and not _ALLOWED_GLOBS.matches(name):
            continue
        path = f"{directory}/{name}"
        try:
            info = os.lstat(path)
        except OSError:
            continue
        if stat.S_ISDIR(info.st_mode) and info.st_mode & 0o005 == 0o005:
            yield path, info
            yield from _allowed(path, depth + 1)
        elif stat.S_ISLNK(info.st_mode) or (stat.S_ISREG(info.st_mode) and info.st_mode & 0o004):
            yield path, info


# -- the skeleton


def _top(root: Path) -> tuple[dict[str, str], list[str]]:
    """Return the links in the machine's root directory (bin -> usr/bin), and the directories to bind."""
    links: dict[str, str] = {}
    binds: list[str] = []
    for path in SYSTEM_BINDS:
        here = root / path[1:]
        if here.is_symlink():
            links[path[1:]] = os.readlink(here)
        elif here.is_dir():
            binds.append(path)
    return links, binds


def _skeleton(target: Path, root: Path, links: Mapping[str, str], binds: Sequence[str]) -> None:
    for name, mode in _DIRECTORIES.items():
        (target / name).mkdir(parents=True, exist_ok=True)
        os.chmod(target / name, mode)
    for name, to in {**links, **_LINKS}.items():
        os.symlink(to, target / name)
    for name, text in _FILES.items():
        (target / name).write_text(text)
    _copy_etc(root / "etc", target / "etc")
    users = _accounts(root / "etc/passwd", 7)
    names = {fields[0] for fields in users}
    (target / "etc/passwd").write_text("".join(":".join(_user(fields)) + "\n" for fields in users))
    groups = _accounts(root / "etc/group", 4)
    (target / "etc/group").write_text("".join(":".join(_group(fields, names)) + "\n" for fields in groups))
    for bind in binds:
        (target / bind[1:]).mkdir(exist_ok=True)
    for path, directories, files in os.walk(target):  # independent of the umask of this process
        for name in (*directories, *files):
            info = os.lstat(f"{path}/{name}")
            if f"{path}/{name}"[len(str(target)) + 1 :] not in _DIRECTORIES and not stat.S_ISLNK(info.st_mode):
                os.chmod(f"{path}/{name}", 0o755 if info.st_mode & 0o111 else 0o644)


def _copy_etc(etc: Path, target: Path) -> None:
    for path, info in _allowed(str(etc), 0):
        to = target / os.path.relpath(path, etc)
        if stat.S_ISDIR(info.st_mode):
            to.mkdir(exist_ok=True)
        elif stat.S_ISLNK(info.st_mode):
            os.symlink(os.readlink(path), to)
        else:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(file, "rb") as source:
                to.write_bytes(source.read())
            os.chmod(to, 0o755 if info.st_mode & 0o111 else 0o644)


def _accounts(file: Path, width: int) -> list[list[str]]:
    """Return the system entries of passwd or group, with root and nobody even if the file has none."""
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    found: dict[int, list[str]] = {}
    for line in lines:
        fields = line.split(":")
        if len(fields) == width and fields[2].isdecimal() and (int(fields[2]) < 1000 or int(fields[2]) == OVERFLOW_ID):
            found.setdefault(int(fields[2]), fields)
    for id, name in ((0, "root"), (OVERFLOW_ID, "nobody" if width == 7 else "nogroup")):
        rest = [str(id), "", "/root" if id == 0 else "/nonexistent", "/bin/sh"] if width == 7 else [""]
        found.setdefault(id, [name, "x", str(id), *rest])
    return [found[id] for id in sorted(found)]


def _user(fields: Sequence[str]) -> list[str]:
    name, _, uid, gid, _, home, shell = fields
    return [name, "x", uid, gid, "", "/root" if uid == "0" else home, shell]


def _group(fields: Sequence[str], users: set[str]) -> list[str]:
    name, _, gid, members = fields
    return [name, "x", gid, ",".join(member for member in members.split(",") if member in users)]
