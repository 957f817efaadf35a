"""Pods without namespaces: a process and a directory of its own, under Landlock (`landlock`) or nothing (`subprocess`).

For machines that refuse user namespaces. There is no image but the machine's own programs, no overlay and no quota: a
pod works in `work`, `home` and `tmp` of one directory, whose path programs see as it is, and a snapshot is a copy of
that directory. Started by root, each `landlock` pod is a user of its own; otherwise it has its maker's, and what
Landlock cannot tell apart within one user is closed by a system-call filter (`seccomp_notify.py`) or said in the notes.
`subprocess` isolates nothing, and is used only when asked for by name. docs/pods.md says what each is worth.
"""

import asyncio
import contextlib
import functools
import hashlib
import os
import random
import secrets
import signal
import socket
import stat
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from etude.pods.guest import protocol
from etude.pods.guest.client import CONNECT_S, Agent, Link, SocketLink, connect_unix
from etude.pods.images import layers, trees
from etude.pods.images.records import SYSTEM_BINDS, Image, Layer
from etude.pods.images.store import Store
from etude.pods.network.policy import EgressPolicy
from etude.pods.network.proxy import EgressProxy
from etude.pods.pod import Capabilities, PodError, PodGone, SnapshotKind, Unsupported
from etude.pods.runtime import capabilities, seccomp, zygote_protocol
from etude.pods.runtime.backend import Backend, LocalPod, PodSpec
from etude.pods.runtime.cgroups import CONTROLLERS, Group, existing, find_layout
from etude.pods.runtime.landlock import ruleset as landlock
from etude.pods.runtime.landlock import seccomp_notify
from etude.pods.runtime.landlock import zygote as warden
from etude.pods.runtime.landlock.client import WardenLine, landlock_available

__all__ = ["DirectoryBackend", "DirectoryPod", "LandlockBackend", "SubprocessBackend", "landlock_available"]

AGENT_SOCKET = "agent.sock"
PLACES = ("work", "home", "tmp")
SAVED = "directory-pod"  # the only name in the root of a layer made here: no program of a pod can put one beside it
OUTSIDE = Path("/var/tmp")  # where pods with a user of their own live: state directories are closed to other users
# Ids of such users: above those of the namespace backend; in a container with few ids, above what people have.
USERS = (range(2_000_100_000, 2_200_000_000), range(50_000, 60_000))
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ROOT_NEEDS = ("chown", "dac_override", "fowner", "kill", "setgid", "setuid")  # to have users of their own for pods

# What of /etc and /proc programs need: nothing that holds secrets, or tells of other processes.
ETC = (
    *("passwd", "group", "nsswitch.conf", "host.conf", "hosts", "services", "protocols", "gai.conf", "mime.types"),
    *("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime", "timezone", "locale.alias"),
    *("ssl/certs", "ssl/openssl.cnf", "pki/tls/certs", "pki/ca-trust/extracted", "ca-certificates", "crypto-policies"),
    *("profile", "bash.bashrc", "bashrc", "inputrc", "terminfo", "shells", "os-release", "debian_version", "magic"),
    *("python3", "python3.11", "python3.12", "python3.13", "perl", "java", "java-17-openjdk", "fonts", "xattr.conf"),
)
PROC = (
    *("cpuinfo", "meminfo", "stat", "uptime", "loadavg", "version", "filesystems", "vmstat"),
    *("sys/kernel", "sys/vm", "sys/fs"),
)
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")


class DirectoryBackend(Backend):
    """Pods of one state directory that are a process and a directory each."""

    confined: bool

    def __init__(self, state: Path, store: Store) -> None:
        super().__init__()
        self.state, self.store = state, store
        mark = hashlib.sha256(os.fsencode(f"{state} {self.name}")).hexdigest()[:12]
        self.layout = find_layout(f"etude-{mark}")
        self.users = own_users() if self.confined else None
        self.outside = (OUTSIDE if OUTSIDE.is_dir() else Path(tempfile.gettempdir())) / f"etude-pods-{mark}"
        self.warden = WardenLine(state, self.name)
        self.recent: set[int] = set()  # users given to pods by this process
        self.capabilities = self._capabilities()

    def _capabilities(self) -> Capabilities:
        raise NotImplementedError

    def _shared_notes(self) -> list[str]:
        notes = ["no images but the machine's own programs, no limit on disk or inodes, and files are always on disk"]
        if missing := [name for name in CONTROLLERS if name not in self.layout.controllers]:
            notes.append(f"no limit on {', '.join(missing)}: {self.layout.reason or 'no such controller'}")
        if self.layout.unified is None:
            notes.append(f"no pause and no live snapshot: no cgroup v2 group ({self.layout.reason})")
        notes.append(
            "a pod's paths hold its id: what a program wrote down as an absolute path is another one in a fork"
        )
        notes.append("a program that kills the agent, its parent, ends the pod")
        return notes

    @property
    def snapshots(self) -> frozenset[str]:
        return frozenset({"fs", "fs-live"} if self.layout.unified else {"fs"})

    # ------------------------------------------------------------------------------------------- pods

    async def start(self, spec: PodSpec) -> "DirectoryPod":
        can = self.capabilities
        for name in spec.limits.asked():
            can.require(f"a limit on {name}", name in can.limits, f"it can limit {sorted(can.limits) or 'nothing'}")
        if spec.egress.allow:
            way = "transparent" if spec.egress.transparent else "proxy"
            can.require(f"egress by {way}", way in can.egress, "; ".join(can.notes[:1]) if not can.egress else "")
        saved = saved_layer(self.store, spec.image)
        pod = DirectoryPod(self, spec)
        try:
            await pod.boot(saved)
        except BaseException:
            await pod.end()
            raise
        return pod

    async def adopt(self, spec: PodSpec) -> "DirectoryPod | None":
        pod = DirectoryPod(self, spec)
        pod.paused = pod.group.frozen()
        try:
            if pod.paused:  # for a moment: the agent has to know us
                await asyncio.to_thread(pod.group.freeze, False)
            await pod.connect(timeout=1.0, own=not spec.attached)
        except (OSError, PodError):
            pod.release()
            return None
        finally:
            if pod.paused:
                await asyncio.to_thread(pod.group.freeze, True)
        return pod

    async def reap(self, known: Iterable[str]) -> list[str]:
        reply, _ = await self.warden.ask(zygote_protocol.STATUS)
        found = {name.decode() for name in reply.get(zygote_protocol.ID, [])} | existing(self.layout)
        for place in (self.state / "pods", self.outside):
            with contextlib.suppress(FileNotFoundError):
                found |= {entry.name for entry in place.iterdir()}
        for trash in {name for name in found if name.startswith(".")}:  # of a service that was killed while deleting
            found.discard(trash)
            self.later(asyncio.to_thread(trees.remove_tree, self.outside / trash))
        found -= set(known)  # last: a pod made meanwhile is in no list of ours
        for name in sorted(found):
            await self.clear(name, orphaned=True)
        return sorted(found)

    async def clear(self, name: str, orphaned: bool = False) -> None:
        """Remove everything of a pod: processes, groups, directories. `orphaned`: its warden may be dead as well."""
        try:
            await self.warden.ask(zygote_protocol.KILL, (zygote_protocol.ID, name.encode()))
        except PodGone:
            orphaned = True
        group, fs = Group(self.layout, name), self.fs(name)
        if not group.remove():
            group.kill()
            await self.remove_group(group)
        if orphaned and fs.exists():
            await asyncio.to_thread(kill_leftovers, fs, fs.stat().st_uid if self.users else None)
        for directory in {fs.parent, self.state / "pods" / name}:
            self.delete(directory)

    def fs(self, name: str) -> Path:
        """The directory that is all a pod can write to."""
        return (self.outside if self.users else self.state / "pods") / name / "fs"

    def new_user(self) -> int:
        """A user that nobody has; -1 where pods have none of their own."""
        if self.users is None:
            return -1
        taken: set[int] = set()
        if len(self.users) < 1_000_000:  # with more, chance is enough: one in a million with two hundred pods
            taken = {place.stat().st_uid for place in self.outside.glob("*/fs")}
        while (user := random.SystemRandom().choice(self.users)) in taken | self.recent:
            pass
        self.recent.add(user)
        return user

    async def persist(self, layer: Layer) -> Layer:
        return layer  # all of ours are on disk

    async def drop(self, layer: Layer) -> None:
        """Nothing is held for a layer."""

    async def close(self) -> None:
        await self.settle()
        self.warden.close()

    async def shut(self) -> None:
        with contextlib.suppress(PodError):
            await self.warden.ask(zygote_protocol.STOP)
        for name in existing(self.layout):
            await self.remove_group(Group(self.layout, name))
        await asyncio.to_thread(trees.remove_tree, self.outside)
        await self.close()

    # ------------------------------------------------------------------------------------------- cleaning

    def delete(self, directory: Path) -> None:
        """Remove a directory in the background; it has another name from now on."""
        inside = directory.is_relative_to(self.state)
        bin = self.state / "trash" if inside else self.outside
        trash = bin / f".{directory.name}-{secrets.token_hex(8)}"
        with contextlib.suppress(FileNotFoundError):
            if inside:
                bin.mkdir(mode=0o700, exist_ok=True)
            directory.rename(trash)
            self.later(asyncio.to_thread(trees.remove_tree, trash))


class LandlockBackend(DirectoryBackend):
    """Pods kept in by Landlock and system-call filters: the machine is shared, its files and network are not."""

    name = "landlock"
    confined = True

    def __init__(self, state: Path, store: Store) -> None:
        self.abi = landlock.abi()
        super().__init__(state, store)
        if self.abi < 3:
            have = f"this kernel's is {self.abi}" if self.abi else "this kernel has none, or does not let us use it"
            raise Unsupported(f"landlock: keeping files from being read and truncated needs ABI 3 (Linux 6.2); {have}")
        if self.abi < 6 and not self.users:
            raise Unsupported(
                f"landlock: this kernel's ABI is {self.abi}; below 6 (Linux 6.12) a pod could signal every process of "
                "its user, and as an ordinary user we can give it no other. Start the service as root, or update"
            )

    def _capabilities(self) -> Capabilities:
        notes = self._shared_notes()
        notes += [
            "the kernel and the machine's network are shared; names, sizes and modes of files outside can be seen",
            "of /proc only numbers of the whole machine: no ps, no /proc/self/maps; no /tmp, no /dev/shm (semaphores)",
        ]
        if self.abi < 4:
            notes.insert(0, f"no egress: Landlock's ABI 4 (Linux 6.7) is needed, this is {self.abi}")
        if not self.users:
            why = "the service is not root" if os.geteuid() else "this root may not become other users"
            notes.append(
                f"pods have our own user ({why}): they can change modes and times of its files, though not read them"
            )
            notes.append("terminals are opened for a command by the pod; programs cannot open more (tmux, script)")
        if not self.unix:
            notes.append("no UNIX sockets but pairs: Landlock cannot yet keep those of the machine out of reach")
        return Capabilities(
            isolation="lsm",
            limits=frozenset(self.layout.controllers),
            egress=frozenset({"proxy"}) if self.abi >= 4 else frozenset(),
            images=False,
            snapshots=self.snapshots,
            pause=self.layout.unified is not None,
            notes=tuple(notes),
        )

    @property
    def unix(self) -> bool:
        """Whether UNIX sockets can be left to programs: those outside must be out of reach by user or by Landlock."""
        return self.abi >= 9 or (self.users is not None and self.abi >= 6)


class SubprocessBackend(DirectoryBackend):
    """No isolation: programs do what our user can, on the machine's own network. For trusted code, by name only."""

    name = "subprocess"
    confined = False

    def _capabilities(self) -> Capabilities:
        notes = [
            "the network is open, and egress rules cannot be enforced",
            "nothing is isolated: programs can read, write and signal whatever our user can",
            *self._shared_notes(),
        ]
        return Capabilities(
            isolation="none",
            limits=frozenset(self.layout.controllers),
            images=False,
            snapshots=self.snapshots,
            pause=self.layout.unified is not None,
            notes=tuple(notes),
        )


class DirectoryPod(LocalPod):
    """A pod that is a process and a directory."""

    backend: DirectoryBackend

    def __init__(self, backend: DirectoryBackend, spec: PodSpec) -> None:
        self.policy = EgressPolicy.from_egress(spec.egress)
        self.fs = backend.fs(spec.id)
        home, scratch = str(self.fs / "home"), str(self.fs / "tmp")
        own = {"HOME": home, "TMPDIR": scratch, "USER": "pod", "LOGNAME": "pod"}
        environment = {"PATH": PATH, "LANG": "C.UTF-8", **spec.image.env, **own, **self.policy.environment()}
        if backend.confined:  # a system file that may hold credentials; git takes "not allowed" for a fatal error
            environment["GIT_CONFIG_NOSYSTEM"] = "1"
        if self.policy.rules:  # our loopback is the machine's: a rule for 127.0.0.1 goes through the gate as well
            environment |= {"NO_PROXY": "", "no_proxy": ""}
        super().__init__(spec.id, environment, str(self.fs / "work"))
        self.backend, self.spec = backend, spec
        self.image, self.limits, self.egress = spec.image.name, spec.limits, spec.egress
        self.directory = backend.state / "pods" / spec.id
        self.group = Group(backend.layout, spec.id)
        self.gate: EgressProxy | None = None
        self.paused = False
        self.closed = False

    # ------------------------------------------------------------------------------------------- starting

    async def boot(self, saved: Layer | None) -> None:
        """Make the directory, as `saved` if given, and the process; connect to its agent."""
        user = self.backend.new_user()
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        source = self.backend.store.layer_path(saved) / SAVED if saved else None
        if source is None:
            make_places(self.fs, None, 0, user)
        else:
            await asyncio.to_thread(make_places, self.fs, source, saved.shift if saved else 0, user)
        self.group.create(self.limits)
        with contextlib.ExitStack() as opened:
            sockets = [opened.enter_context(listen_unix(self.directory))]
            if self.policy.rules:
                sockets.append(opened.enter_context(socket.create_server(("127.0.0.1", 0), backlog=128)))
            descriptors = [sock.fileno() for sock in sockets]
            port = sockets[1].getsockname()[1] if self.policy.rules else 0
            await self.backend.warden.ask(zygote_protocol.CREATE, *self._plan(user, port), descriptors=descriptors)
        await self.connect()
        self.record("created", {"image": self.image})

    def _plan(self, user: int, port: int) -> list[tuple[int, protocol.Value]]:
        flags = warden.CARRIED if port else 0
        fields: list[tuple[int, protocol.Value]] = [
            (zygote_protocol.ID, self.id.encode()),
            (zygote_protocol.PATH, os.fsencode(self.fs)),
            (zygote_protocol.WORKDIR, os.fsencode(self.workdir)),
            *((zygote_protocol.CGROUP, os.fsencode(file)) for file in self.group.procs),
            *([(zygote_protocol.OWNER, user)] if user >= 0 else []),
            (warden.PORT, port),
        ]
        if not isinstance(self.backend, LandlockBackend):
            flags |= warden.MARKED if "memory" in self.backend.layout.controllers else 0
            return [*fields, (zygote_protocol.FLAGS, flags)]
        flags |= warden.CONFINED | (warden.SCOPED if self.backend.abi >= 6 else 0)
        flags |= warden.LENT_TERMINALS if user < 0 else 0
        terminals = ("ptmx", "pts") if user >= 0 else ()
        return [
            *fields,
            (zygote_protocol.FLAGS, flags),
            (zygote_protocol.FILTER, filter_of("tcp-only" if port else "none")),
            (warden.FENCE, seccomp_notify.build(self.backend.unix and not port, carry=bool(port), alone=user >= 0)),
            *paths(warden.EXECUTE, executable(self.spec.image)),
            *paths(
                warden.READ, (*(f"/etc/{x}" for x in ETC), *(f"/proc/{x}" for x in PROC), "/sys/devices/system/cpu")
            ),
            *paths(warden.WRITE, [f"/dev/{name}" for name in (*DEVICES, *terminals)]),
        ]

    async def connect(self, timeout: float = CONNECT_S, own: bool = True) -> None:
        """Connect to the agent and take the pod, as its owner if it is attached; with `own` false only connect."""
        self.agent = Agent(await self.open_link(), self.id)
        await self.agent.greeting(timeout)
        descriptors = list(self.agent.link.descriptors)
        if own:
            await self._carry(descriptors)
            await self.own(self.spec)
        else:  # its owner lives, and carries what it sends
            warden.close_all(descriptors)

    async def open_link(self) -> Link:
        return SocketLink(connect_unix(str(self.directory), AGENT_SOCKET))

    async def _carry(self, descriptors: list[int]) -> None:
        """Serve the gate; what a pod's programs connect to is always its first socket."""
        if not descriptors:
            return
        self.gate = EgressProxy(self.policy, lambda facts: self.record("egress", facts))
        await self.gate.start([(self.policy.listen_specs()[0], socket.socket(fileno=descriptors[0]))])

    def _user(self, user: str | None) -> str | None:
        if user:
            raise Unsupported(
                f"commands as another user ({user!r}) are not possible on the {self.backend.name} backend"
            )
        return None

    # ------------------------------------------------------------------------------------------- life

    async def seal(self, kind: SnapshotKind | None) -> tuple[tuple[Layer, ...], SnapshotKind]:
        kind = await self.choose_kind(kind)
        if kind == "fs":
            if self.paused:  # its programs are to end, and its agent is to answer
                await self.resume()
            await self.line.ask(protocol.KILLALL)
            layer = await asyncio.to_thread(self._copy)
        else:
            await asyncio.to_thread(self.group.freeze, True)
            try:
                layer = await asyncio.to_thread(self._copy)
            finally:
                if not self.paused:
                    await asyncio.to_thread(self.group.freeze, False)
        self.record("snapshot", {"kind": kind, "layer": layer.id})
        return (layer,), kind

    def _copy(self) -> Layer:
        """What the pod wrote, as a layer of its own: the whole of it, over nothing."""
        store = self.backend.store
        with store.staging() as staging:
            target = staging / "up" / SAVED
            target.mkdir(parents=True)
            layers.copy(self.fs, target, keep_shift=True)
            return store.adopt_layer(staging / "up", self.fs.stat().st_uid if self.backend.users else 0)

    def release(self) -> None:
        super().release()
        if self.gate is not None:  # whoever takes the pod next carries its connections
            gate, self.gate = self.gate, None
            self.backend.later(gate.close())

    async def end(self) -> None:
        if self.closed:
            return
        self.closed = True
        self.release()
        await self.backend.clear(self.id)
        self.record("closed", {})


# ------------------------------------------------------------------------------------------------- the pieces


filter_of = functools.cache(seccomp.build_filter)


def own_users() -> range | None:
    """Ids that can be given to pods, one each; None where we cannot give any."""
    if os.geteuid() or capabilities.mask(ROOT_NEEDS) & ~capabilities.held():
        return None
    maps = [list(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    for users in USERS:
        if any(first <= users[0] and users[-1] < first + count for first, _, count in maps):
            return users
    return None


def saved_layer(store: Store, image: Image) -> Layer | None:
    """The layer to start from, if the image is a snapshot made here; None for `host`, Unsupported for all others."""
    if image.layers and (store.layer_path(image.layers[-1]) / SAVED).is_dir():
        return image.layers[-1]
    if len(image.layers) <= 1 and (image.name == "host" or image.binds):
        return None  # its layer is what an overlay shows around the machine's programs: not needed here
    raise Unsupported(
        f"image {image.name or image.id!r} needs a root of its own, which this backend cannot give; "
        'use "host", or the namespace backend'
    )


def executable(image: Image) -> list[str]:
    """Where programs are: the machine's own and what the image shows of it. Links lead into these."""
    return [*dict.fromkeys((*SYSTEM_BINDS, *image.binds))]


def paths(key: int, wanted: Iterable[str]) -> list[tuple[int, protocol.Value]]:
    """Those paths that are there; a link stands for what it leads to."""
    return [(key, os.fsencode(path)) for path in wanted if os.path.exists(path)]


def make_places(fs: Path, source: Path | None, shift: int, user: int) -> None:
    """Make a pod's directory, as a copy of `source` if given, and give it to its user."""
    if user >= 0:
        fs.parent.parent.mkdir(mode=0o711, exist_ok=True)
        info = fs.parent.parent.lstat()
        if not stat.S_ISDIR(info.st_mode) or info.st_uid or info.st_mode & 0o022:
            raise PodError(f"{fs.parent.parent} is not a directory of root's alone; remove it")
        fs.parent.mkdir(mode=0o700)  # closed until all is given away: a copied program could be set-user-id root's
    fs.mkdir(mode=0o700)
    if source is not None:
        layers.copy(source, fs, shift, lowest=True)
    for name in PLACES:
        place = fs / name
        if not place.is_dir() or place.is_symlink():
            place.unlink(missing_ok=True)
            place.mkdir(mode=0o755)
    os.chmod(fs, 0o700)
    if user >= 0:
        for _, directories, files, at in os.fwalk(fs, follow_symlinks=False):
            for name in (*directories, *files):
                os.chown(name, user, user, dir_fd=at, follow_symlinks=False)
        os.chown(fs, user, user)
        os.chmod(fs.parent, 0o711)


def listen_unix(directory: Path) -> socket.socket:
    """The socket on which a pod's agent is found."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    parent = os.open(directory, os.O_PATH | os.O_CLOEXEC)
    path = f"/proc/self/fd/{parent}/{AGENT_SOCKET}"
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        listener.bind(path)
        listener.listen(64)
    except OSError:
        listener.close()
        raise
    finally:
        os.close(parent)
    return listener


def kill_leftovers(fs: Path, user: int | None) -> None:
    """Kill what still runs of a pod whose warden was killed, guard and worker both, and that had no control group.

    By its user where it has its own; else by where it stands and what it calls home, the best there is.
    """
    home, inside = os.fsencode(f"HOME={fs}/home"), os.fsencode(f"{fs}/")
    for _ in range(100):
        found = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if pid != os.getpid()]
        mine = [pid for pid in found if _is_of(pid, user, home, inside)]
        if not mine:
            return
        for pid in mine:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    raise PodError(f"processes {mine[:8]} in {fs} do not die")


def _is_of(pid: int, user: int | None, home: bytes, inside: bytes) -> bool:
    process = f"/proc/{pid}"
    try:
        with open(f"{process}/stat", "rb") as file:
            if file.read().rpartition(b")")[2].split()[0] in (b"Z", b"X"):
                return False
        if user is not None:
            with open(f"{process}/status", "rb") as file:
                return any(line.split()[1] == b"%d" % user for line in file if line.startswith(b"Uid:"))
        with open(f"{process}/environ", "rb") as file:
            if home in file.read().split(b"\0"):
                return True
        return os.fsencode(os.readlink(f"{process}/cwd")).startswith(inside)
    except OSError:
        return False  # gone, or not ours to look at
