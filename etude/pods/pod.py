"""The contract of pods: the interface of a pod, its limits and results, and the capabilities of a backend.

A pod is an isolated machine for one agent session: commands, files, terminals, snapshots and forks, under limits and
without network unless allowed. Nothing here assumes that a pod shares the host's kernel: host and pod communicate by
the guest protocol (`guest/protocol.py`) only. A backend raises `Unsupported` for what it cannot do; it never silently
does less than requested.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Self

from etude.errors import EtudeError, InputError

Command = Sequence[str] | str  # a list is an argv; a string is run by `sh -c`
SnapshotKind = Literal["fs", "fs-live", "full"]
Isolation = Literal["none", "lsm", "namespace", "vm"]

MAX_LIMIT = 1 << 62  # upper bound of every limit
MAX_OUTPUT = 1 << 20  # default bytes of each stream that `exec` keeps


class PodError(EtudeError):
    """A request to a pod, or to the host that runs it, failed."""


class Unsupported(PodError):
    """The backend cannot do this on this machine; the message gives the reason and an alternative."""


class DiffTooLarge(Unsupported):
    """The files of a pod differ in more places, or deeper, than `Pod.diff` lists."""


class PodGone(PodError):
    """The pod has ended: closed, past its ttl, or dead with its host."""


class PodFileError(PodError):
    """A file operation failed inside the pod; `errno` is the pod kernel's error number."""

    def __init__(self, errno: int, message: str) -> None:
        super().__init__(message)
        self.errno = errno


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of a pod. None takes the default; a limit the backend cannot enforce raises Unsupported."""

    memory: int | None = None  # bytes, including files when storage is memory
    pids: int | None = None  # processes and threads
    cpu: float | None = None  # cores: 0.5 is half of one
    disk: int | None = None  # bytes written on top of the image
    inodes: int | None = None  # files created on top of the image

    def __post_init__(self) -> None:
        for name, value in self.specified().items():
            if not 0 < value < MAX_LIMIT:
                raise InputError(f"limits: {name} is {value!r}; expected a positive number below {MAX_LIMIT:,}")

    def specified(self) -> dict[str, float]:
        """Return the limits that are not None, by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}

    def with_defaults(self, defaults: "Limits") -> "Limits":
        """Return these limits, with `defaults` where one is None."""
        return Limits(**{**defaults.specified(), **self.specified()})  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Egress:
    """Destinations a pod may connect to; none by default.

    A rule is `host:port`, or `host` for port 443; `*.example.org` means every name below example.org. With
    `transparent`, programs need no proxy support: names resolve inside the pod and connections to the allowed ports are
    forwarded. Without it the pod gets the usual proxy variables. With `private`, a name may resolve to a private
    network, such as a package mirror behind the firewall, but never to this machine or a cloud's metadata service.
    """

    allow: tuple[str, ...] = ()
    transparent: bool = False
    private: bool = False

    @classmethod
    def to(cls, *rules: str, transparent: bool = False, private: bool = False) -> Self:
        """Allow these destinations and nothing else."""
        return cls(tuple(rules), transparent, private)


@dataclass(frozen=True, slots=True)
class ResourceUsage:
    """Resources used by a finished command."""

    wall_s: float = 0.0
    user_s: float = 0.0
    system_s: float = 0.0
    max_rss: int = 0  # bytes


@dataclass(frozen=True, slots=True)
class ExecResult:
    """Result of a command. One killed by signal n has exit code 128 + n, as in a shell."""

    exit_code: int
    stdout_bytes: bytes = b""
    stderr_bytes: bytes = b""
    timed_out: bool = False
    out_of_memory: bool = False
    truncated: bool = False  # output beyond `max_output` was discarded
    usage: ResourceUsage = field(default_factory=ResourceUsage)

    @property
    def stdout(self) -> str:
        """Return standard output as text; bytes that are not UTF-8 become U+FFFD."""
        return self.stdout_bytes.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        """Return standard error as text; bytes that are not UTF-8 become U+FFFD."""
        return self.stderr_bytes.decode("utf-8", "replace")

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not self.timed_out


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One file as `stat` and `list` show it; a symbolic link is described, not followed."""

    name: str
    kind: Literal["file", "directory", "symlink", "other"]
    size: int
    mode: int  # permission bits
    modified: float  # seconds since 1970
    target: str = ""  # of a symbolic link


Listing = list[FileInfo]


@dataclass(frozen=True, slots=True)
class Event:
    """An event in a pod's life: created, exit, out-of-memory, egress, snapshot, closed."""

    time: float
    kind: str
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A pod's file system at one moment, from which pods can be created; immutable, kept by the store."""

    id: str
    image: str  # the image it is based on
    parent: str | None = None
    kind: SnapshotKind = "fs"
    durable: bool = True  # False: in memory, lost when the zygote ends


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Features a backend supports on this machine; using another raises Unsupported."""

    isolation: Isolation
    limits: frozenset[str] = frozenset()  # names of Limits that are enforced
    disk_limits: Literal["hard", "soft"] = "soft"  # of files on disk; soft: a pod that is over a limit is ended
    egress: frozenset[str] = frozenset()  # subset of "proxy", "transparent"
    images: bool = True  # False: only "host", the machine's own root
    snapshots: frozenset[str] = frozenset()  # subset of SnapshotKind
    users: bool = False  # commands may run as a user other than the pod's
    own_users: bool = False  # no other pod, and nothing else, has its users: what the kernel counts by user is its own
    notes: tuple[str, ...] = ()  # what is missing and why, as text

    def lacks(self, *, isolation: bool = False) -> list[str]:
        """Return the features of the strongest backend, as root, that are missing here; one phrase for each.

        With `isolation` only those that keep pods from each other and from the machine."""
        limits = [limit.name for limit in fields(Limits) if limit.name not in self.limits]
        missing = {
            "namespaces": self.isolation in ("none", "lsm"),
            "users of its own, by which the kernel counts some resources": not self.own_users,
            f"limits on {', '.join(limits)}": bool(limits),
            "hard limits of files on disk": self.disk_limits != "hard",
        }
        if not isolation:
            missing |= {
                "egress rules": not self.egress,
                "images": not self.images,
                "users besides its root": not self.users,
                "live snapshots": "fs-live" not in self.snapshots,
            }
        return [feature for feature, is_missing in missing.items() if is_missing]

    def require(self, feature: str, present: bool, hint: str = "") -> None:
        """Raise Unsupported unless `present`."""
        if not present:
            raise Unsupported(f"{feature} is not possible on this backend" + (f"; {hint}" if hint else ""))


class Job(ABC):
    """A running command: streams its output, takes input and signals, waits for its end."""

    @abstractmethod
    def output(self) -> AsyncIterator[tuple[Literal["stdout", "stderr"], bytes]]:
        """Yield output as it is written, until the command ends. A terminal has only stdout. Can be read once."""

    @abstractmethod
    async def write(self, data: bytes) -> None:
        """Write to its standard input or terminal."""

    @abstractmethod
    async def close_stdin(self) -> None:
        """Close its standard input."""

    @abstractmethod
    async def signal(self, number: int) -> None:
        """Send a signal to its process group."""

    @abstractmethod
    async def resize(self, rows: int, columns: int) -> None:
        """Change the size of its terminal."""

    @abstractmethod
    async def wait(self, timeout: float | None = None) -> ExecResult:
        """Wait for its end; raise TimeoutError after `timeout` seconds, leaving it running."""


class Pod(ABC):
    """An isolated machine. Use as `async with`, or close it; an attached pod ends with its owner process."""

    id: str
    image: str
    limits: Limits
    egress: Egress
    workdir: str  # working directory of commands; always writable
    default_command: Sequence[str] = ()  # of its image
    prepared: Any = None  # result of the `prepare` that it was created with

    @property
    def connected(self) -> bool:
        """Whether the pod can be reached, as far as is known."""
        return True

    # -- commands

    @abstractmethod
    async def exec(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout: float | None = None,
        max_output: int = MAX_OUTPUT,
        user: str | None = None,
    ) -> ExecResult:
        """Run a command until its main process ends; its background processes keep running.

        `env` is added to the image's. After `timeout` seconds the process group is killed. `max_output` is per stream:
        the rest is read and discarded, and the result has `truncated` set.
        """

    @abstractmethod
    async def spawn(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        user: str | None = None,
        terminal: tuple[int, int] | None = None,
    ) -> Job:
        """Start a command without waiting; with `terminal` (rows, columns) on its own pty."""

    # -- files: paths are inside the pod, relative ones start at `workdir`; nothing outside the pod is reachable

    @abstractmethod
    async def read(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes: ...

    @abstractmethod
    async def write(self, path: str, data: bytes | str, *, mode: int | None = None, append: bool = False) -> None:
        """Write a file, creating its parent directories."""

    @abstractmethod
    async def list(self, path: str = ".") -> Listing:
        """Return the files in a directory by name; more than 20,000 are an error."""

    @abstractmethod
    async def stat(self, path: str) -> FileInfo: ...

    @abstractmethod
    async def remove(self, path: str) -> None:
        """Remove a file, a link, or a directory with its contents. A missing path is an error."""

    @abstractmethod
    async def make_directory(self, path: str, mode: int = 0o755) -> None:
        """Create a directory and its parents; it may exist already."""

    @abstractmethod
    async def symlink(self, target: str, path: str) -> None:
        """Create the symbolic link `path`, with its parent directories; an existing path is an error."""

    @abstractmethod
    async def diff(self, paths: Sequence[str] = ("/",)) -> Mapping[str, FileInfo | None]:
        """Return what was added, changed or removed at and below `paths` since the pod was created.

        `paths` are absolute and contain no links. If a directory above one was removed or replaced, that is reported.

        A change is one of kind, mode, content or link target; owners and times do not count. Keys are absolute paths;
        the value is the file as it is now, or None if it was removed. A removed directory, and one replaced by
        something else, stands for everything below it; a new directory is listed with everything below it. Files that
        programs write meanwhile may be missing. More than 100,000 changes below `paths`, or 200 nested directories, are
        an error.
        """

    @abstractmethod
    async def upload(self, source: Path, path: str) -> None:
        """Copy a file or a tree from this process's file system into the pod; links are copied as links."""

    @abstractmethod
    async def download(self, path: str, target: Path) -> None:
        """Copy a file or a tree out of the pod to `target`, which must not exist. Nothing is written outside it."""

    # -- lifecycle

    @abstractmethod
    async def snapshot(self, kind: SnapshotKind | None = None) -> Snapshot:
        """Take a snapshot of the file system.

        `fs` seals what was written, in time independent of its size, but ends every process in the pod; `fs-live`
        freezes the processes, copies what was written and lets them continue; `full` includes memory. None means `fs`
        when no process of the pod's own is running, else `fs-live`.
        """

    @abstractmethod
    async def fork(self, n: int = 1, kind: SnapshotKind | None = None) -> "Sequence[Pod]":
        """Return `n` new pods with this one's state, limits and egress. The intermediate snapshot is dropped."""

    @abstractmethod
    async def close(self) -> None:
        """End every process and remove what the pod wrote. May be called twice."""

    @abstractmethod
    async def stats(self) -> Mapping[str, float]:
        """Return the current use of memory, pids, cpu_s and disk, as far as the backend can measure it."""

    @abstractmethod
    def events(self) -> Sequence[Event]:
        """Return the events so far, oldest first."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
