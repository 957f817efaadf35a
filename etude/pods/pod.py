"""The contract of the environment service: what a pod is, what may be asked of it, what a backend says of itself.

A pod is a machine of its own for one agent session: commands, files, terminals, snapshots and forks, under limits
and with no network unless some is allowed. Nothing here assumes that a pod shares our kernel: what crosses is the
wire protocol (`wire.py`) and the verbs below. What a backend cannot do raises `Unsupported`; it never does less
than it was asked for in silence.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Self

from etude.errors import EtudeError, InputError

Command = Sequence[str] | str  # a list is an argv; a string is given to `sh -c`
SnapshotKind = Literal["fs", "fs-live", "full"]
Isolation = Literal["none", "lsm", "namespace", "vm"]

MAX_LIMIT = 1 << 62  # of any limit
MAX_OUTPUT = 1 << 20  # bytes of each stream that `exec` keeps unless told otherwise


class PodError(EtudeError):
    """A pod, or the service that runs it, could not do what was asked."""


class Unsupported(PodError):
    """This backend cannot do that on this machine; the message says why and what can."""


class PodGone(PodError):
    """The pod is not there any more: closed, past its time to live, or dead with its host."""


class PodFileError(PodError):
    """A file call failed inside the pod; `errno` is what its kernel said."""

    def __init__(self, errno: int, message: str) -> None:
        super().__init__(message)
        self.errno = errno


@dataclass(frozen=True, slots=True)
class Limits:
    """What a pod may use. None takes the fleet's default; a number the backend cannot enforce raises Unsupported."""

    memory: int | None = None  # bytes, with everything in files when storage is memory
    pids: int | None = None  # processes and threads
    cpu: float | None = None  # cores: 0.5 is half of one
    disk: int | None = None  # bytes written over the image
    inodes: int | None = None  # files made over the image

    def __post_init__(self) -> None:
        for name, value in self.asked().items():
            if not 0 < value < MAX_LIMIT:
                raise InputError(f"limits: {name} is {value!r}; expected a positive number below {MAX_LIMIT:,}")

    def asked(self) -> dict[str, float]:
        """The limits that are set, by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}

    def over(self, defaults: "Limits") -> "Limits":
        """These limits, with `defaults` where one is not set."""
        return Limits(**{**defaults.asked(), **self.asked()})  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Egress:
    """Where a pod may connect to; nowhere by default.

    A rule is `host:port`, or `host` for port 443; `*.example.org` means every name below example.org. With
    `transparent` programs need not know: names resolve inside the pod and connections to the allowed ports are
    carried. Without it the pod is given the usual proxy variables. With `private` a name may lead into a private
    network, such as a package mirror behind the firewall; to this machine or a cloud's metadata service it never may.
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
    """What a finished command used."""

    wall_s: float = 0.0
    user_s: float = 0.0
    system_s: float = 0.0
    max_rss: int = 0  # bytes


@dataclass(frozen=True, slots=True)
class ExecResult:
    """How a command ended. A command killed by signal n has exit code 128 + n, as in a shell."""

    exit_code: int
    stdout_bytes: bytes = b""
    stderr_bytes: bytes = b""
    timed_out: bool = False
    out_of_memory: bool = False
    truncated: bool = False  # output beyond `max_output` was thrown away
    usage: ResourceUsage = field(default_factory=ResourceUsage)

    @property
    def stdout(self) -> str:
        """Standard output as text; bytes that are not UTF-8 become U+FFFD."""
        return self.stdout_bytes.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        """Standard error as text; bytes that are not UTF-8 become U+FFFD."""
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
    """Something that happened to a pod: created, exit, out-of-memory, egress, paused, snapshot, closed."""

    time: float
    kind: str
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A pod's file system at one moment, from which pods can be made; immutable, held by the store."""

    id: str
    image: str  # what it grew from
    parent: str | None = None
    kind: SnapshotKind = "fs"
    durable: bool = True  # False: in memory, gone when the keeper of the pods ends


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do on this machine. Ask before, or be told by Unsupported."""

    isolation: Isolation
    limits: frozenset[str] = frozenset()  # names of Limits that are enforced
    egress: frozenset[str] = frozenset()  # of "proxy", "transparent"
    images: bool = True  # False: only the machine's own root, "host"
    snapshots: frozenset[str] = frozenset()  # of SnapshotKind
    pause: bool = False
    users: bool = False  # commands may run as another user than the pod's own
    notes: tuple[str, ...] = ()  # in words, what is missing and why

    def require(self, what: str, present: bool, instead: str = "") -> None:
        """Raise Unsupported unless `present`."""
        if not present:
            raise Unsupported(f"{what} is not possible on this backend" + (f"; {instead}" if instead else ""))


class Job(ABC):
    """A command that is running: its output as it comes, its input, its end."""

    @abstractmethod
    def output(self) -> AsyncIterator[tuple[Literal["stdout", "stderr"], bytes]]:
        """What it writes, as it writes it, until it ends. A terminal has only stdout. Read it once."""

    @abstractmethod
    async def write(self, data: bytes) -> None:
        """Send to its standard input, or type into its terminal."""

    @abstractmethod
    async def close_stdin(self) -> None:
        """End of input."""

    @abstractmethod
    async def signal(self, number: int) -> None:
        """Send a signal to its process group."""

    @abstractmethod
    async def resize(self, rows: int, columns: int) -> None:
        """Change the size of its terminal."""

    @abstractmethod
    async def wait(self, timeout: float | None = None) -> ExecResult:
        """Wait for its end; TimeoutError (the job goes on) after `timeout` seconds."""


class Shell(ABC):
    """One bash that stays: directory, variables and functions last from command to command."""

    @abstractmethod
    async def run(self, command: str, timeout: float | None = None, max_output: int = MAX_OUTPUT) -> ExecResult:
        """Run a command in it. After a timeout the command is interrupted, and the shell restarted if need be."""

    @abstractmethod
    async def close(self) -> None: ...


class Pod(ABC):
    """A machine of its own. Use as `async with`, or close it; one that its owner forgets ends with the owner."""

    id: str
    image: str
    limits: Limits
    egress: Egress
    workdir: str  # where commands start; always writable

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
        """Run a command to its end. It ends when its main process does; what it left running goes on.

        `env` is added to the image's own. After `timeout` seconds its process group is killed. `max_output` is per
        stream: the rest is read and thrown away, and the result says truncated.
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
        """Start a command and go on; with `terminal` (rows, columns) on a pty of its own."""

    async def pty(self, command: Command = ("bash",), *, rows: int = 24, columns: int = 80, **options: Any) -> Job:
        """Start a command on a terminal."""
        return await self.spawn(command, terminal=(rows, columns), **options)

    @abstractmethod
    async def shell(self, *, cwd: str | None = None, env: Mapping[str, str] | None = None) -> Shell:
        """Start a shell that remembers."""

    # -- files: paths are the pod's, relative ones start at `workdir`; nothing outside the pod can be named

    @abstractmethod
    async def read(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes: ...

    @abstractmethod
    async def write(self, path: str, data: bytes | str, *, mode: int | None = None, append: bool = False) -> None:
        """Write a file, making the directories above it."""

    @abstractmethod
    async def list(self, path: str = ".") -> Listing: ...

    @abstractmethod
    async def stat(self, path: str) -> FileInfo: ...

    @abstractmethod
    async def remove(self, path: str) -> None:
        """Remove a file, a link, or a directory with all below it. A path that is not there is an error."""

    @abstractmethod
    async def make_directory(self, path: str, mode: int = 0o755) -> None:
        """Make a directory and those above it; one that is there is fine."""

    @abstractmethod
    async def upload(self, source: Path, path: str) -> None:
        """Copy a file or a tree from here into the pod; links are copied as links."""

    @abstractmethod
    async def download(self, path: str, target: Path) -> None:
        """Copy a file or a tree out of the pod to `target`, which must not exist. Nothing is written outside it."""

    # -- life

    @abstractmethod
    async def pause(self) -> None:
        """Stop every process where it is."""

    @abstractmethod
    async def resume(self) -> None: ...

    @abstractmethod
    async def snapshot(self, kind: SnapshotKind | None = None) -> Snapshot:
        """Keep the file system as it is now.

        `fs` seals what was written and is as fast for a gigabyte as for nothing, but ends every process in the pod;
        `fs-live` freezes, copies what was written and lets the processes go on; `full` keeps memory too. None takes
        `fs` when no process of the pod's own is running and `fs-live` when one is.
        """

    @abstractmethod
    async def fork(self, n: int = 1, kind: SnapshotKind | None = None) -> "Sequence[Pod]":
        """`n` pods that start from this one's state, with its limits and egress. The snapshot between is dropped."""

    @abstractmethod
    async def close(self) -> None:
        """End every process and remove what the pod wrote. Closing twice is fine."""

    @abstractmethod
    async def stats(self) -> Mapping[str, float]:
        """Live use: memory, pids, cpu_s, disk, as far as the backend can say."""

    @abstractmethod
    def events(self) -> Sequence[Event]:
        """What happened so far, oldest first."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
