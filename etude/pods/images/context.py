"""What COPY and ADD take, and the layer they make: from a build's context directory, another stage, or a heredoc.

Sources never leave the context: a link that leads out is refused, one inside is copied as a link, as is a tree. The
layer is written here, without a pod: where the target lies is read from the layers below, following their links as
a pod would, and directories on the way keep the owner and mode they have there.
"""

import fnmatch
import glob
import hashlib
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from etude.errors import InputError
from etude.pods.images import layers
from etude.pods.images.archive import unpack
from etude.pods.images.layers import LayerStack
from etude.pods.images.trees import can_chown, components, copy_leaf, copy_metadata, digest, file_digest, remove_tree

_ARCHIVES = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd")


# -- .dockerignore


@dataclass(frozen=True, slots=True)
class DockerIgnore:
    """The rules of a .dockerignore: the last one that matches a path, or a directory above it, decides."""

    rules: tuple[tuple[bool, re.Pattern[str]], ...] = ()

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
            keep = rule.startswith("!")
            pattern = os.path.normpath(rule.removeprefix("!").strip()).strip("/")
            if pattern not in (".", ""):
                rules.append((not keep, re.compile(_pattern(pattern))))
        return cls(tuple(rules))

    def ignores(self, path: str) -> bool:
        """Whether a path of the context is left out."""
        parts = path.split("/")
        above = ["/".join(parts[: i + 1]) for i in range(len(parts))]
        verdict = False
        for out, pattern in self.rules:
            if any(pattern.fullmatch(each) for each in above):
                verdict = out
        return verdict


def _pattern(rule: str) -> str:
    """A rule as an expression: `**` is any number of directories, `*` and `?` stay inside one name."""
    out, at = "", 0
    while at < len(rule):
        if rule.startswith("**/", at):
            out, at = out + "(?:.*/)?", at + 3
        elif rule.startswith("**", at):
            out, at = out + ".*", at + 2
        elif rule[at] == "[" and "]" in rule[at:]:
            end = rule.index("]", at)
            out, at = out + "[" + rule[at + 1 : end].replace("\\", "\\\\") + "]", end + 1
        else:
            out += {"*": "[^/]*", "?": "[^/]"}.get(rule[at], re.escape(rule[at]))
            at += 1
    return out


# -- sources


@dataclass(frozen=True, slots=True)
class CopySource:
    """One thing to copy: a tree or file on disk under the name it was asked for."""

    path: Path
    name: str
    keep: frozenset[str] | None = None  # of a directory: the paths in it that are not ignored; None: all


def from_context(context: Path, pattern: str, ignore: DockerIgnore, where: str) -> list[CopySource]:
    """What a source of COPY names in the context, which it cannot leave."""
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
        # the way to it, and it itself: what is named is followed, what lies in a directory is copied as it is
        real = path.resolve()
        if not real.is_relative_to(top):
            raise InputError(f"{where}: {name} leads out of the context {context} to {real}; copy the file into it")
        if not real.exists():
            continue
        inside = real.relative_to(top).as_posix()
        found.append(CopySource(real, Path(name).name, _kept(top, inside, ignore) if real.is_dir() else None))
    if not found:
        raise InputError(f"{where}: {pattern} is not in the context {context} (or .dockerignore leaves it out)")
    return found


def _kept(top: Path, directory: str, ignore: DockerIgnore) -> frozenset[str] | None:
    if not ignore.rules:
        return None
    kept: set[str] = set()
    base = top if directory == "." else top / directory
    for path, directories, files in os.walk(base):
        for name in (*directories, *files):
            full = os.path.join(path, name)
            if not ignore.ignores(os.path.relpath(full, top)):
                inside = os.path.relpath(full, base)
                while inside:  # a file that is kept needs the directories above it
                    kept.add(inside)
                    inside = os.path.dirname(inside)
    return frozenset(kept)


def source_digest(sources: Sequence[CopySource]) -> str:
    """What the sources are: names, kinds, modes, contents; not owners (COPY sets them) nor times."""
    running = hashlib.sha256()

    def add(*values: str) -> None:
        running.update(digest(*values).encode())

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
    return running.hexdigest()


# -- the layer


@dataclass(slots=True)
class CopyLayerWriter:
    """A layer being written over `below`."""

    target: Path
    below: LayerStack
    where: str
    owner: tuple[int, int] = (0, 0)
    mode: int | None = None
    binds: tuple[str, ...] = ()

    def directory(self, path: str) -> Path:
        """A directory of the pod, in the layer, with those above it; links below are followed."""
        place = self.target
        reached = ""
        for name in components(path):
            reached = f"{reached}/{name}"
            real, found = self.below.locate(reached)
            if found.directory or not found.there:
                reached = real
            self._check(reached)
            place = self.target / reached[1:]
            if found.there and not found.directory and not os.path.lexists(place):
                raise InputError(f"{self.where}: {reached} is a file in the image; expected a directory")
            self._make(reached)
        return place

    def _make(self, path: str) -> None:
        """Make a directory of the layer, and those above it, as they are below or as new ones."""
        parts = components(path)
        for depth in range(1, len(parts) + 1):
            inside = "/".join(parts[:depth])
            place = self.target / inside
            if place.is_dir() and not place.is_symlink():
                continue
            remove_tree(place)  # an earlier source may have put a link here: never write through it
            place.mkdir()
            real, found = self.below.locate(f"/{inside}", follow=False)
            if found.directory and found.info is not None and real == f"/{inside}":
                copy_metadata(found.parts[0].path, str(place), found.info, found.parts[0].shift)
            else:
                self._own(place, 0o755)

    def _check(self, path: str) -> None:
        for bind in self.binds:
            if path == bind or path.startswith(bind + "/"):
                raise InputError(f"{self.where}: {path} is shown read-only from this machine; choose another place")

    def _own(self, place: Path, mode: int | None) -> None:
        if can_chown():
            os.lchown(place, *self.owner)
        if mode is not None and not place.is_symlink():
            os.chmod(place, mode)

    def copy(self, sources: Sequence[CopySource], to: str, tidy: bool) -> None:
        """Copy as COPY does: into a directory if `to` is one, or ends with a slash; a directory gives its contents.

        With `tidy` (ADD) an archive among the sources is unpacked.
        """
        _, found = self.below.locate(to)
        into = to.endswith("/") or found.directory
        if len(sources) > 1 and not into:
            raise InputError(f"{self.where}: {len(sources)} sources need a directory to go to; end {to!r} with a slash")
        for source in sources:
            if source.path.is_dir():
                self._tree(source.path, self.directory(to), source.keep, "")
            elif tidy and _is_archive(source.path):
                self._archive(source.path, to)
            elif into:
                self._leaf(source.path, self.directory(to) / source.name)
            else:
                parent, _, name = to.rpartition("/")
                real, _ = self.below.locate(to)  # a link there is written through, as in a pod
                parent, _, name = real.rpartition("/") if found.there else (parent, "", name)
                self._leaf(source.path, self.directory(parent) / name)

    def _tree(self, source: Path, place: Path, keep: frozenset[str] | None, inside: str) -> None:
        for name in sorted(os.listdir(source)):
            below = f"{inside}/{name}" if inside else name
            if keep is not None and below not in keep:
                continue
            here, to = source / name, place / name
            if stat.S_ISDIR(os.lstat(here).st_mode):
                there = "/" + to.relative_to(self.target).as_posix()
                made = self.directory(there)
                self._own(made, self.mode if self.mode is not None else stat.S_IMODE(os.lstat(here).st_mode))
                self._tree(here, made, keep, below)
            else:
                self._leaf(here, to)

    def _leaf(self, source: Path, place: Path) -> None:
        self._check("/" + place.relative_to(self.target).as_posix())
        remove_tree(place)
        info = os.lstat(source)
        if copy_leaf(str(source), str(place), info):
            self._own(place, self.mode if self.mode is not None else stat.S_IMODE(info.st_mode))

    def _archive(self, source: Path, to: str) -> None:
        place = self.directory(to)
        unpacked = self.target.with_name("unpacked")
        unpacked.mkdir()
        with open(source, "rb") as file:
            unpack(file, unpacked, str(source), lowest=True)
        self._tree(unpacked, place, None, "")
        remove_tree(unpacked)


def _is_archive(path: Path) -> bool:
    with open(path, "rb") as file:
        head = file.read(512)
    return head.startswith(_ARCHIVES) or head[257:262] == b"ustar"


def owner_of(spec: str | None, below: LayerStack, where: str) -> tuple[int, int]:
    """`user:group` of --chown, by number or by the image's own passwd and group."""
    if not spec:
        return 0, 0
    user, _, group = spec.partition(":")
    uid, its_group = _account(user, below.read("/etc/passwd"), where, "user")
    return uid, _account(group, below.read("/etc/group"), where, "group")[0] if group else its_group


def _account(name: str, table: bytes, where: str, what: str) -> tuple[int, int]:
    """The id of an account, and its group if it is a user; a number without an entry is its own group."""
    for line in table.decode(errors="replace").splitlines():
        fields = line.split(":")
        if len(fields) > 3 and name in (fields[0], fields[2]) and fields[2].isdecimal():
            return int(fields[2]), int(fields[3]) if what == "user" and fields[3].isdecimal() else 0
    if not name.isdecimal():
        raise InputError(f"{where}: the image has no {what} {name!r}; use a number")
    return int(name), int(name)


def from_stack(stack: LayerStack, pattern: str, staging: Path, where: str, binds: Sequence[str]) -> list[CopySource]:
    """What a source of COPY --from names in another stage: copied out of its layers into `staging`."""
    found: list[CopySource] = []
    parent, _, last = os.path.normpath("/" + pattern).rpartition("/")
    _, above = stack.locate(parent or "/")
    names = [last]
    if glob.has_magic(last) and above.directory:
        names = fnmatch.filter(stack.names(above), last)
    for number, name in enumerate(names):
        real, there = stack.locate(f"{parent}/{name}")
        if any(real == bind or real.startswith(bind + "/") for bind in binds):
            raise InputError(f"{where}: {real} is this machine's, not a file of that stage; copy it from the context")
        if there.info is None:
            continue
        place = staging / f"{len(os.listdir(staging))}-{number}"
        if there.directory:
            place.mkdir()
            layers.merge(tuple(reversed(there.parts)), (), place)
        else:
            copy_leaf(there.parts[0].path, str(place), there.info, there.parts[0].shift)
        found.append(CopySource(place, name or "root"))
    if not found:
        raise InputError(f"{where}: {pattern} is not in that stage")
    return found


def heredoc_source(name: str, body: str, staging: Path) -> CopySource:
    """A heredoc of COPY as a file."""
    directory = staging / f"heredoc-{len(os.listdir(staging))}"
    directory.mkdir()
    (directory / "file").write_text(body)
    os.chmod(directory / "file", 0o644)
    return CopySource(directory / "file", name)


def visible(given: Mapping[str, str]) -> list[str]:
    """Variables as parts of a key."""
    return [f"{key}={value}" for key, value in sorted(given.items())]
