"""COPY and ADD of a Dockerfile: find the sources in the context, another stage or a heredoc, and write the layer.

Sources never leave the context: a source that resolves outside is refused; links inside a copied tree are copied as
links. The layer is written without a pod: the target path is resolved in the layers below, following their links as a
pod would, and parent directories keep the owner and mode they have there.
"""

import glob
import hashlib
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from etude.errors import InputError
from etude.globs import GitignorePattern, compile_name
from etude.pods.images import layers
from etude.pods.images.archive import unpack
from etude.pods.images.layers import LayerStack
from etude.pods.images.trees import can_chown, components, copy_leaf, copy_metadata, digest, file_digest, remove_tree

_ARCHIVES = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd")


# -- .dockerignore


@dataclass(frozen=True, slots=True)
class DockerIgnore:
    """The rules of a .dockerignore: globs from the top of the context, of which the last one that matches a path or one
    of its parents decides. Unlike in git, a path below an ignored directory can be taken out again."""

    rules: tuple[GitignorePattern, ...] = ()

    @classmethod
    def read(cls, context: Path) -> "DockerIgnore":
        try:
            text = (context / ".dockerignore").read_text(encoding="utf-8-sig")
        except FileNotFoundError:
            return cls()
        return cls.parse(text)

    @classmethod
    def parse(cls, text: str) -> "DockerIgnore":
        rules = []
        for line in text.splitlines():
            rule = line.strip()
            if not rule or rule.startswith("#"):
                continue
            negation = "!" if rule.startswith("!") else ""
            pattern = os.path.normpath(rule.removeprefix("!").strip()).strip("/")
            if pattern not in (".", ""):
                anywhere = re.sub(r"(^|/)\*\*(?=[^/*])", r"\1**/*", pattern)  # "**.log" stands for "**/*.log"
                rules.append(GitignorePattern(f"{negation}/{anywhere}"))
        return cls(tuple(rules))

    def ignores(self, path: str) -> bool:
        """Return whether a path of the context is ignored."""
        parts = path.split("/")
        above = ["/".join(parts[: i + 1]) for i in range(len(parts))]
        rules = (rule for rule in reversed(self.rules) if any(rule.match(each, True) for each in above))
        last = next(rules, None)
        return last is not None and not last.negated


# -- sources


@dataclass(frozen=True, slots=True)
class CopySource:
    """A file or tree on disk to copy, and the name it was requested by."""

    path: Path
    name: str
    keep: frozenset[str] | None = None  # of a directory: its paths that are not ignored; None: all


def from_context(context: Path, pattern: str, ignore: DockerIgnore, where: str) -> list[CopySource]:
    """Return the sources that a COPY pattern matches in the context; raise InputError for one that leads outside."""
    top = context.resolve()
    parts = [part for part in os.path.normpath("/" + pattern).split("/") if part]
    if glob.has_magic(pattern):
        names = sorted(glob.glob("/".join(parts), root_dir=top, include_hidden=True))
    else:
        names = ["/".join(parts) or "."]
    found = []
    for name in names:
        path = top / name
        if name != "." and ignore.ignores(name):
            continue
        # links in a named path are followed; links inside a named directory are copied as they are
        real = path.resolve()
        if not real.is_relative_to(top):
            raise InputError(f"{where}: {name} leads outside the context {context} to {real}; copy the file into it")
        if not real.exists():
            continue
        inside = real.relative_to(top).as_posix()
        found.append(CopySource(real, Path(name).name, _not_ignored(top, inside, ignore) if real.is_dir() else None))
    if not found:
        raise InputError(f"{where}: {pattern} is not in the context {context} (or .dockerignore excludes it)")
    return found


def _not_ignored(top: Path, directory: str, ignore: DockerIgnore) -> frozenset[str] | None:
    if not ignore.rules:
        return None
    kept: set[str] = set()
    base = top if directory == "." else top / directory
    for path, directories, files in os.walk(base):
        for name in (*directories, *files):
            full = os.path.join(path, name)
            if not ignore.ignores(os.path.relpath(full, top)):
                inside = os.path.relpath(full, base)
                while inside:  # a kept file needs its parent directories
                    kept.add(inside)
                    inside = os.path.dirname(inside)
    return frozenset(kept)


def source_digest(sources: Sequence[CopySource]) -> str:
    """Return a digest of the sources' names, types, modes and contents; not owners (COPY sets them) nor times."""
    hasher = hashlib.sha256()

    def add(*values: str) -> None:
        hasher.update(digest(*values).encode())

    def visit(path: str, name: str, inside: str, keep: frozenset[str] | None) -> None:
        info = os.lstat(path)
        kind = stat.S_IFMT(info.st_mode)
        add(name, f"{kind:o} {stat.S_IMODE(info.st_mode):o}")
        if stat.S_ISDIR(info.st_mode):
            for child in sorted(os.listdir(path)):
                below = f"{inside}/{child}" if inside else child
                if keep is None or below in keep:
                    visit(f"{path}/{child}", f"{name}/{child}", below, keep)
        elif stat.S_ISREG(info.st_mode):
            add(file_digest(path).hex())
        elif stat.S_ISLNK(info.st_mode):
            add(os.readlink(path))

    for source in sources:
        visit(str(source.path), source.name, "", source.keep)
    return hasher.hexdigest()


# -- the layer


@dataclass(slots=True)
class CopyLayerWriter:
    """Writes a layer on top of `below`."""

    target: Path
    below: LayerStack
    where: str
    owner: tuple[int, int] = (0, 0)
    mode: int | None = None
    binds: tuple[str, ...] = ()

    def directory(self, path: str) -> Path:
        """Create a directory and its parents in the layer, following links of the layers below; return its path."""
        place = self.target
        reached = ""
        for name in components(path):
            reached = f"{reached}/{name}"
            real, found = self.below.locate(reached)
            if found.is_directory or not found.exists:
                reached = real
            self._check_writable(reached)
            place = self.target / reached[1:]
            if found.exists and not found.is_directory and not os.path.lexists(place):
                raise InputError(f"{self.where}: {reached} is a file in the image; expected a directory")
            self._make(reached)
        return place

    def _make(self, path: str) -> None:
        """Create a directory and its parents in the layer, with their metadata from below if they exist there."""
        parts = components(path)
        for depth in range(1, len(parts) + 1):
            inside = "/".join(parts[:depth])
            place = self.target / inside
            if place.is_dir() and not place.is_symlink():
                continue
            remove_tree(place)  # an earlier source may have written a link here: never write through it
            place.mkdir()
            real, found = self.below.locate(f"/{inside}", follow=False)
            if found.is_directory and found.info is not None and real == f"/{inside}":
                copy_metadata(found.dirs[0].path, str(place), found.info, found.dirs[0].shift)
            else:
                self._set_owner_and_mode(place, 0o755)

    def _check_writable(self, path: str) -> None:
        for bind in self.binds:
            if path == bind or path.startswith(bind + "/"):
                raise InputError(f"{self.where}: {path} is a read-only bind mount of the host; choose another target")

    def _set_owner_and_mode(self, place: Path, mode: int | None) -> None:
        if can_chown():
            os.lchown(place, *self.owner)
        if mode is not None and not place.is_symlink():
            os.chmod(place, mode)

    def copy(self, sources: Sequence[CopySource], to: str, unpack_archives: bool) -> None:
        """Copy as COPY does: into a directory if `to` is one or ends with a slash; of a directory, its contents.

        With `unpack_archives` (ADD), sources that are archives are unpacked.
        """
        _, found = self.below.locate(to)
        into = to.endswith("/") or found.is_directory
        if len(sources) > 1 and not into:
            raise InputError(
                f"{self.where}: {len(sources)} sources need a directory as target; end {to!r} with a slash"
            )
        for source in sources:
            if source.path.is_dir():
                self._copy_tree(source.path, self.directory(to), source.keep, "")
            elif unpack_archives and _is_archive(source.path):
                self._copy_archive(source.path, to)
            elif into:
                self._copy_file(source.path, self.directory(to) / source.name)
            else:
                parent, _, name = to.rpartition("/")
                real, _ = self.below.locate(to)  # a link as target is followed, as in a pod
                parent, _, name = real.rpartition("/") if found.exists else (parent, "", name)
                self._copy_file(source.path, self.directory(parent) / name)

    def _copy_tree(self, source: Path, place: Path, keep: frozenset[str] | None, inside: str) -> None:
        for name in sorted(os.listdir(source)):
            below = f"{inside}/{name}" if inside else name
            if keep is not None and below not in keep:
                continue
            here, to = source / name, place / name
            if stat.S_ISDIR(os.lstat(here).st_mode):
                made = self.directory("/" + to.relative_to(self.target).as_posix())
                self._set_owner_and_mode(
                    made, self.mode if self.mode is not None else stat.S_IMODE(os.lstat(here).st_mode)
                )
                self._copy_tree(here, made, keep, below)
            else:
                self._copy_file(here, to)

    def _copy_file(self, source: Path, place: Path) -> None:
        self._check_writable("/" + place.relative_to(self.target).as_posix())
        remove_tree(place)
        info = os.lstat(source)
        if copy_leaf(str(source), str(place), info):
            self._set_owner_and_mode(place, self.mode if self.mode is not None else stat.S_IMODE(info.st_mode))

    def _copy_archive(self, source: Path, to: str) -> None:
        place = self.directory(to)
        unpacked = self.target.with_name("unpacked")
        unpacked.mkdir()
        with open(source, "rb") as file:
            unpack(file, unpacked, str(source), lowest=True)
        self._copy_tree(unpacked, place, None, "")
        remove_tree(unpacked)


def _is_archive(path: Path) -> bool:
    with open(path, "rb") as file:
        head = file.read(512)
    return head.startswith(_ARCHIVES) or head[257:262] == b"ustar"


def owner_of(spec: str | None, below: LayerStack, where: str) -> tuple[int, int]:
    """Return the uid and gid of `user:group` of --chown, by number or from the image's passwd and group."""
    if not spec:
        return 0, 0
    user, _, group = spec.partition(":")
    uid, primary_gid = _account(user, below.read("/etc/passwd"), where, "user")
    return uid, _account(group, below.read("/etc/group"), where, "group")[0] if group else primary_gid


def _account(name: str, table: bytes, where: str, what: str) -> tuple[int, int]:
    """Return an account's id, and a user's primary group; a number without an entry is its own group."""
    for line in table.decode(errors="replace").splitlines():
        fields = line.split(":")
        if len(fields) > 3 and name in (fields[0], fields[2]) and fields[2].isdecimal():
            return int(fields[2]), int(fields[3]) if what == "user" and fields[3].isdecimal() else 0
    if not name.isdecimal():
        raise InputError(f"{where}: the image has no {what} {name!r}; use a number")
    return int(name), int(name)


def from_stack(stack: LayerStack, pattern: str, staging: Path, where: str, binds: Sequence[str]) -> list[CopySource]:
    """Return the sources that a COPY --from pattern matches in another stage, copied from its layers to `staging`."""
    found: list[CopySource] = []
    parent, _, last = os.path.normpath("/" + pattern).rpartition("/")
    _, above = stack.locate(parent or "/")
    names = [last]
    if glob.has_magic(last) and above.is_directory:
        names = list(filter(compile_name(last), stack.names(above)))
    for number, name in enumerate(names):
        real, entry = stack.locate(f"{parent}/{name}")
        if any(real == bind or real.startswith(bind + "/") for bind in binds):
            raise InputError(
                f"{where}: {real} is a bind mount of the host, not a file of that stage; copy it from the context"
            )
        if entry.info is None:
            continue
        place = staging / f"{len(os.listdir(staging))}-{number}"
        if entry.is_directory:
            place.mkdir()
            layers.merge(tuple(reversed(entry.dirs)), (), place)
        else:
            copy_leaf(entry.dirs[0].path, str(place), entry.info, entry.dirs[0].shift)
        found.append(CopySource(place, name or "root"))
    if not found:
        raise InputError(f"{where}: {pattern} is not in that stage")
    return found


def heredoc_source(name: str, body: str, staging: Path) -> CopySource:
    """Write a heredoc of COPY to a file and return it as a source."""
    directory = staging / f"heredoc-{len(os.listdir(staging))}"
    directory.mkdir()
    (directory / "file").write_text(body)
    os.chmod(directory / "file", 0o644)
    return CopySource(directory / "file", name)


def variable_key_parts(variables: Mapping[str, str]) -> list[str]:
    """Return variables in the form in which they enter a cache key."""
    return [f"{key}={value}" for key, value in sorted(variables.items())]
