"""COPY and ADD of a Dockerfile: find the sources in the context, another stage or a heredoc, and write the layer.

Sources never leave the context: a source that resolves outside is refused; links inside a copied tree are copied as
links. The layer is written without a pod: the target path is resolved in the layers below, following their links as a
pod would, and parent directories keep the owner and mode they have there.
"""

import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from etude.errors import InputError
from etude.globs import GitignorePattern, compile_name
from etude.pods.images import layers
from etude.pods.images.archive import unpack
from etude.pods.images.layers import LayerStack, StackEntry
from etude.pods.images.trees import can_chown, components, copy_leaf, copy_metadata, digest, file_digest, remove_tree

_MAGIC = re.compile(r"[*?\[]")
_ARCHIVES = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd")


# -- .dockerignore

MAX_RULES = 1000  # each is compared with every path of the context


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
        if len(rules) > MAX_RULES:
            raise InputError(f".dockerignore has {len(rules):,} rules; at most {MAX_RULES:,} are allowed")
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
    unpack: bool = False  # if it is an archive

    def walk(self) -> Iterator[tuple[str, Path, os.stat_result]]:
        """Yield the path inside the source ("" for itself), the path on disk and its status; parents first, sorted."""

        def visit(inside: str, path: Path) -> Iterator[tuple[str, Path, os.stat_result]]:
            info = path.lstat()
            yield inside, path, info
            for name in sorted(os.listdir(path)) if stat.S_ISDIR(info.st_mode) else ():
                below = f"{inside}/{name}" if inside else name
                if self.keep is None or below in self.keep:
                    yield from visit(below, path / name)

        return visit("", self.path)


def from_context(context: Path, pattern: str, ignore: DockerIgnore, where: str) -> list[CopySource]:
    """Return the sources that a COPY pattern matches in the context; raise InputError for one that leads outside."""
    top = context.resolve()
    parts = [part for part in os.path.normpath("/" + pattern).split("/") if part]
    names = _matching(top, parts) if _MAGIC.search(pattern) else ["/".join(parts) or "."]
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


def _matching(top: Path, parts: Sequence[str]) -> list[str]:
    """Return the paths below `top` that a pattern matches, name by name."""
    found = [""]
    for part in parts:
        if not _MAGIC.search(part):
            found = [f"{above}{part}/" for above in found]
            continue
        matches = compile_name(part)
        directories = [(above, top / above) for above in found if (top / above).is_dir()]
        found = [f"{above}{name}/" for above, path in directories for name in sorted(os.listdir(path)) if matches(name)]
    return [path[:-1] for path in found]


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
    parts = []
    for source in sources:
        for inside, path, info in source.walk():
            parts += [source.name, inside, f"{info.st_mode:o}"]
            if stat.S_ISREG(info.st_mode):
                parts.append(file_digest(str(path)).hex())
            elif stat.S_ISLNK(info.st_mode):
                parts.append(os.readlink(path))
    return digest(*parts)


@dataclass(frozen=True)
class FileToCopy:
    """One file or link of the build context and its path in the pod."""

    source: Path
    target: str
    mode: int
    stamp: tuple[int, int] = (0, 0)  # size and modification time, to notice that the source has changed


@dataclass(frozen=True)
class DirectoryToMake:
    """A directory that a step creates; without a mode, one that exists keeps its own."""

    target: str
    mode: int | None = None


def copies(
    sources: Iterable[CopySource], target: str, into: bool, mode: int | None
) -> Iterator[FileToCopy | DirectoryToMake]:
    """Yield what COPY creates: a file `into` the directory `target` or as `target`, a directory's contents in it."""
    for source in sources:
        for inside, path, info in source.walk():
            chosen = stat.S_IMODE(info.st_mode) if mode is None else mode
            if stat.S_ISDIR(info.st_mode):
                yield DirectoryToMake(os.path.normpath(f"{target}/{inside}"), chosen if inside else None)
            elif stat.S_ISREG(info.st_mode) or stat.S_ISLNK(info.st_mode):
                below = inside or (source.name if into else "")
                place = f"{target.rstrip('/')}/{below}" if below else target
                yield FileToCopy(path, place, chosen, (info.st_size, info.st_mtime_ns))


# -- the layer


@dataclass(slots=True)
class CopyLayerWriter:
    """Writes a layer on top of `below`."""

    target: Path
    below: LayerStack
    where: str
    owner: tuple[int, int] = (0, 0)
    binds: tuple[str, ...] = ()
    made: dict[str, Path] = field(default_factory=dict)  # directories that exist in the layer

    def write(self, files: Iterable[FileToCopy | DirectoryToMake]) -> None:
        """Create these files and directories."""
        for each in files:
            if isinstance(each, DirectoryToMake):
                made = self.directory(each.target)
                if each.mode is not None:
                    self._set_owner_and_mode(made, each.mode)
                continue
            parent, _, name = each.target.rpartition("/")
            self._check_writable(each.target)
            place = self.directory(parent) / name
            if place.is_dir():
                self.made.clear()
            remove_tree(place)
            copy_leaf(str(each.source), str(place), os.lstat(each.source))
            self._set_owner_and_mode(place, each.mode)

    def directory(self, path: str) -> Path:
        """Create a directory and its parents in the layer, following links of the layers below; return its path."""
        if not components(path):
            return self.target
        if path not in self.made:
            parent, _, name = path.rpartition("/")
            wanted = f"/{(self.directory(parent) / name).relative_to(self.target)}"
            real, found = self.below.locate(wanted)
            if os.path.lexists(self.target / wanted[1:]) or real == wanted:  # this layer hides a link below
                self._make(wanted, found)
                self.made[path] = self.target / wanted[1:]
            else:
                self.made[path] = self.directory(real)
        return self.made[path]

    def _make(self, path: str, found: StackEntry) -> None:
        """Create a directory in the layer, with its metadata from below if it exists there."""
        self._check_writable(path)
        place = self.target / path[1:]
        if place.is_dir() and not place.is_symlink():
            return
        if found.exists and not found.is_directory and not os.path.lexists(place):
            raise InputError(f"{self.where}: {path} is a file in the image; expected a directory")
        remove_tree(place)  # an earlier source may have written a link here: never write through it
        place.mkdir()
        if found.is_directory and found.info is not None:
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


def archive_source(source: CopySource, staging: Path) -> CopySource:
    """Return the source of an ADD: an archive is unpacked to `staging`, anything else is as it is."""
    if source.path.is_dir():
        return source
    with open(source.path, "rb") as file:
        head = file.read(512)
        if not head.startswith(_ARCHIVES) and head[257:262] != b"ustar":
            return source
        file.seek(0)
        unpacked = staging / f"unpacked-{len(os.listdir(staging))}"
        unpacked.mkdir()
        unpack(file, unpacked, str(source.path), lowest=True)
    return CopySource(unpacked, source.name)


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
    if _MAGIC.search(last) and above.is_directory:
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
