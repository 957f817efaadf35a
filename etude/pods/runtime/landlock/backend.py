"""Pods without namespaces: a process and a directory, confined by Landlock (`landlock`) or unconfined (`subprocess`).

For machines without user namespaces. The only image is the machine's own programs; there is no overlay and no quota: a
pod works in `work`, `home` and `tmp` of one directory, whose real path programs see, and a snapshot is a copy of that
directory. Started by root, each `landlock` pod has its own user; otherwise it has its creator's, and what Landlock
cannot separate within one user is closed by a system-call filter (`seccomp_notify.py`) or listed in the notes.
`subprocess` isolates nothing, and is used only when requested by name. docs/pods.md compares their strength.
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
from collections.abc import Iterable, Mapping
from pathlib import Path

from etude.pods.guest import protocol
from etude.pods.guest.client import CONNECT_S, GuestClient, Link, SocketLink, connect_unix
from etude.pods.images import layers, trees
from etude.pods.images.layers import LayerDir
from etude.pods.images.records import SYSTEM_BINDS, Image, Layer
from etude.pods.images.store import Store
from etude.pods.network.policy import EgressPolicy
from etude.pods.network.proxy import EgressProxy
from etude.pods.pod import Capabilities, FileInfo, PodError, PodGone, SnapshotKind, Unsupported
from etude.pods.runtime import capabilities, seccomp, zygote_protocol
from etude.pods.runtime.backend import Backend, LocalPod, PodSpec
from etude.pods.runtime.cgroups import CONTROLLERS, PodCgroup, find_layout, list_groups
from etude.pods.runtime.diff import diff_layers
from etude.pods.runtime.landlock import ruleset as landlock
from etude.pods.runtime.landlock import seccomp_notify
from etude.pods.runtime.landlock import zygote as landlock_zygote
from etude.pods.runtime.landlock.client import LandlockZygoteClient, landlock_available

__all__ = ["DirectoryBackend", "DirectoryPod", "LandlockBackend", "SubprocessBackend", "landlock_available"]

GUEST_SOCKET = "agent.sock"
SUBDIRECTORIES = ("work", "home", "tmp")
SNAPSHOT_ROOT = "directory-pod"  # the only entry in the root of our layers: a pod's programs cannot add another
USER_PODS_PARENT = Path("/var/tmp")  # of pods with their own user: state directories are closed to other users
# Ids of such users: above those of the namespace backend; in a container with few ids, above ordinary users.
USER_ID_RANGES = (range(2_000_100_000, 2_200_000_000), range(50_000, 60_000))
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
NEEDED_CAPABILITIES = ("chown", "dac_override", "fowner", "kill", "setgid", "setuid")  # to give pods their own users

# The files of /etc and /proc that programs need: none that holds secrets or describes other processes.
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
    """Pods of one state directory, each of which is a process and a directory."""

    confined: bool

    def __init__(self, state: Path, store: Store) -> None:
        super().__init__()
        self.state, self.store = state, store
        mark = hashlib.sha256(os.fsencode(f"{state} {self.name}")).hexdigest()[:12]
        self.layout = find_layout(f"etude-{mark}")
        self.user_ids = pod_user_ids() if self.confined else None
        self.user_pods = (
            USER_PODS_PARENT if USER_PODS_PARENT.is_dir() else Path(tempfile.gettempdir())
        ) / f"etude-pods-{mark}"
        self.zygote = LandlockZygoteClient(state, self.name)
        self.recent_user_ids: set[int] = set()  # given to pods by this process
        self.capabilities = self._capabilities()

    def _capabilities(self) -> Capabilities:
        raise NotImplementedError

    def _shared_notes(self) -> list[str]:
        notes = ["no image but the machine's own programs, no limit on disk or inodes, and files are always on disk"]
        if missing := [name for name in CONTROLLERS if name not in self.layout.controllers]:
            notes.append(f"no limit on {', '.join(missing)}: {self.layout.reason or 'no such controller'}")
        if self.layout.unified is None:
            notes.append(f"no live snapshot: no cgroup v2 group ({self.layout.reason})")
        notes.append("a pod's paths contain its id: an absolute path that a program stored is not valid in a fork")
        notes.append("a program that kills the guest init, its parent, ends the pod")
        return notes

    @property
    def snapshots(self) -> frozenset[str]:
        return frozenset({"fs", "fs-live"} if self.layout.unified else {"fs"})

    # ------------------------------------------------------------------------------------------- pods

    async def start(self, spec: PodSpec) -> "DirectoryPod":
        can = self.capabilities
        for name in spec.limits.specified():
            can.require(f"a limit on {name}", name in can.limits, f"it can limit {sorted(can.limits) or 'nothing'}")
        if spec.egress.allow:
            way = "transparent" if spec.egress.transparent else "proxy"
            can.require(f"egress by {way}", way in can.egress, "; ".join(can.notes[:1]) if not can.egress else "")
        saved = snapshot_layer(self.store, spec.image)
        pod = DirectoryPod(self, spec)
        try:
            await pod.boot(saved)
        except BaseException:
            await pod.end()
            raise
        return pod

    async def adopt(self, spec: PodSpec) -> "DirectoryPod | None":
        pod = DirectoryPod(self, spec)
        try:
            await asyncio.to_thread(pod.group.thaw)  # its service may have died during a live snapshot
            await pod.connect(timeout=1.0, own=not spec.attached)
        except (OSError, PodError):
            pod.release()
            return None
        return pod

    async def reap(self, known: Iterable[str]) -> list[str]:
        reply, _ = await self.zygote.request(zygote_protocol.STATUS)
        found = {name.decode() for name in reply.get(zygote_protocol.ID, [])} | list_groups(self.layout)
        for directory in (self.state / "pods", self.user_pods):
            with contextlib.suppress(FileNotFoundError):
                found |= {entry.name for entry in directory.iterdir()}
        for trash in {name for name in found if name.startswith(".")}:  # of a service killed while deleting
            found.discard(trash)
            self.run_in_background(asyncio.to_thread(trees.remove_tree, self.user_pods / trash))
        found -= set(known)  # last: a pod created meanwhile is not in the lists above
        for name in sorted(found):
            await self.remove_pod(name, orphaned=True)
        return sorted(found)

    async def remove_pod(self, name: str, orphaned: bool = False) -> None:
        """Remove a pod's processes, groups and directories. `orphaned`: its zygote may be dead as well."""
        try:
            await self.zygote.request(zygote_protocol.KILL, (zygote_protocol.ID, name.encode()))
        except PodGone:
            orphaned = True
        group, fs = PodCgroup(self.layout, name), self.pod_fs(name)
        if not group.remove():
            group.kill()
            await self.remove_group(group)
        if orphaned and fs.exists():
            await asyncio.to_thread(kill_leftovers, fs, fs.stat().st_uid if self.user_ids else None)
        for directory in {fs.parent, self.state / "pods" / name}:
            self.delete(directory)

    def pod_fs(self, name: str) -> Path:
        """Return the only directory that a pod can write to."""
        return (self.user_pods if self.user_ids else self.state / "pods") / name / "fs"

    def new_user_id(self) -> int:
        """Return an unused user id; -1 where pods do not have their own users."""
        if self.user_ids is None:
            return -1
        taken: set[int] = set()
        if len(self.user_ids) < 1_000_000:  # with more, a collision has a chance of one in a million at 200 pods
            taken = {fs.stat().st_uid for fs in self.user_pods.glob("*/fs")}
        while (user := random.SystemRandom().choice(self.user_ids)) in taken | self.recent_user_ids:
            pass
        self.recent_user_ids.add(user)
        return user

    async def persist(self, layer: Layer) -> Layer:
        return layer  # all layers are on disk

    async def drop(self, layer: Layer) -> None:
        """Do nothing: this backend holds nothing for a layer."""

    async def close(self) -> None:
        await self.drain_background()
        self.zygote.close()

    async def shutdown(self) -> None:
        with contextlib.suppress(PodError):
            await self.zygote.request(zygote_protocol.STOP)
        for name in list_groups(self.layout):
            await self.remove_group(PodCgroup(self.layout, name))
        await asyncio.to_thread(trees.remove_tree, self.user_pods)
        await self.close()

    # ------------------------------------------------------------------------------------------- cleanup

    def delete(self, directory: Path) -> None:
        """Move a directory to the trash at once and remove it in the background."""
        inside = directory.is_relative_to(self.state)
        bin = self.state / "trash" if inside else self.user_pods
        trash = bin / f".{directory.name}-{secrets.token_hex(8)}"
        with contextlib.suppress(FileNotFoundError):
            if inside:
                bin.mkdir(mode=0o700, exist_ok=True)
            directory.rename(trash)
            self.run_in_background(asyncio.to_thread(trees.remove_tree, trash))


class LandlockBackend(DirectoryBackend):
    """Pods confined by Landlock and system-call filters: the machine is shared, its files and network are not."""

    name = "landlock"
    confined = True

    def __init__(self, state: Path, store: Store) -> None:
        self.abi = landlock.abi()
        super().__init__(state, store)
        if self.abi < 3:
            have = f"this kernel's is {self.abi}" if self.abi else "this kernel has none, or does not let us use it"
            raise Unsupported(f"landlock: protecting files from reading and truncation needs ABI 3 (Linux 6.2); {have}")
        if self.abi < 6 and not self.user_ids:
            raise Unsupported(
                f"landlock: this kernel's ABI is {self.abi}; below 6 (Linux 6.12) a pod could signal every process of "
                "its user, and only root can give it another user. Start the service as root, or update the kernel"
            )

    def _capabilities(self) -> Capabilities:
        notes = self._shared_notes()
        notes += [
            "the kernel and the machine's network are shared; names, sizes and modes of files outside are visible",
            "/proc only has machine-wide figures: no ps, no /proc/self/maps; no /tmp, no /dev/shm (semaphores)",
        ]
        if self.abi < 4:
            notes.insert(0, f"no egress: it needs Landlock ABI 4 (Linux 6.7), this kernel has {self.abi}")
        if not self.user_ids:
            why = "the service is not root" if os.geteuid() else "this root may not become other users"
            notes.append(
                f"pods have our own user ({why}): they can change modes and times of its files, though not read them"
            )
            notes.append("a command can have a terminal, but programs cannot open more (tmux, script)")
        if not self.allows_unix_sockets:
            notes.append("no UNIX sockets but pairs: this kernel's Landlock cannot deny access to those of the machine")
        return Capabilities(
            isolation="lsm",
            limits=frozenset(self.layout.controllers),
            egress=frozenset({"proxy"}) if self.abi >= 4 else frozenset(),
            images=False,
            snapshots=self.snapshots,
            notes=tuple(notes),
        )

    @property
    def allows_unix_sockets(self) -> bool:
        """Whether programs may use UNIX sockets: those outside must be inaccessible by user or by Landlock."""
        return self.abi >= 9 or (self.user_ids is not None and self.abi >= 6)


class SubprocessBackend(DirectoryBackend):
    """No isolation: programs can do what our user can, on the machine's network. For trusted code, by name only."""

    name = "subprocess"
    confined = False

    def _capabilities(self) -> Capabilities:
        notes = [
            "the network is open, and egress rules cannot be enforced",
            "nothing is isolated: programs can read, write and signal everything that our user can",
            *self._shared_notes(),
        ]
        return Capabilities(
            isolation="none",
            limits=frozenset(self.layout.controllers),
            images=False,
            snapshots=self.snapshots,
            notes=tuple(notes),
        )


class DirectoryPod(LocalPod):
    """A pod that is a process and a directory."""

    backend: DirectoryBackend

    def __init__(self, backend: DirectoryBackend, spec: PodSpec) -> None:
        self.policy = EgressPolicy.from_egress(spec.egress)
        self.fs = backend.pod_fs(spec.id)
        home, scratch = str(self.fs / "home"), str(self.fs / "tmp")
        own = {"HOME": home, "TMPDIR": scratch, "USER": "pod", "LOGNAME": "pod"}
        environment = {"PATH": PATH, "LANG": "C.UTF-8", **spec.image.env, **own, **self.policy.environment()}
        if backend.confined:  # /etc/gitconfig may hold credentials, and git treats a denied read as a fatal error
            environment["GIT_CONFIG_NOSYSTEM"] = "1"
        if self.policy.rules:  # loopback is the machine's: a rule for 127.0.0.1 goes through the proxy as well
            environment |= {"NO_PROXY": "", "no_proxy": ""}
        super().__init__(spec.id, environment, str(self.fs / "work"))
        self.backend, self.spec = backend, spec
        self.image, self.limits, self.egress = spec.image.name, spec.limits, spec.egress
        self.directory = backend.state / "pods" / spec.id
        self.group = PodCgroup(backend.layout, spec.id)
        self.proxy: EgressProxy | None = None
        self.closed = False

    # ------------------------------------------------------------------------------------------- starting

    async def boot(self, saved: Layer | None) -> None:
        """Create the directory, from `saved` if given, and the process; connect to its guest init."""
        user = self.backend.new_user_id()
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        source = self.backend.store.layer_path(saved) / SNAPSHOT_ROOT if saved else None
        if source is None:
            create_pod_directory(self.fs, None, 0, user)
        else:
            await asyncio.to_thread(create_pod_directory, self.fs, source, saved.shift if saved else 0, user)
        self.group.create(self.limits)
        with contextlib.ExitStack() as opened:
            sockets = [opened.enter_context(listen_unix(self.directory))]
            if self.policy.rules:
                sockets.append(opened.enter_context(socket.create_server(("127.0.0.1", 0), backlog=128)))
            descriptors = [sock.fileno() for sock in sockets]
            port = sockets[1].getsockname()[1] if self.policy.rules else 0
            await self.backend.zygote.request(
                zygote_protocol.CREATE, *self._create_fields(user, port), descriptors=descriptors
            )
        await self.connect()
        self.record("created", {"image": self.image})

    def _create_fields(self, user: int, port: int) -> list[tuple[int, protocol.Value]]:
        flags = landlock_zygote.EGRESS if port else 0
        fields: list[tuple[int, protocol.Value]] = [
            (zygote_protocol.ID, self.id.encode()),
            (zygote_protocol.PATH, os.fsencode(self.fs)),
            (zygote_protocol.WORKDIR, os.fsencode(self.workdir)),
            *((zygote_protocol.CGROUP, os.fsencode(file)) for file in self.group.procs),
            *([(zygote_protocol.OWNER, user)] if user >= 0 else []),
            (landlock_zygote.PORT, port),
        ]
        if not isinstance(self.backend, LandlockBackend):
            flags |= landlock_zygote.ADJUST_OOM_SCORE if "memory" in self.backend.layout.controllers else 0
            return [*fields, (zygote_protocol.FLAGS, flags)]
        flags |= landlock_zygote.CONFINED | (landlock_zygote.SCOPED if self.backend.abi >= 6 else 0)
        flags |= landlock_zygote.ZYGOTE_OPENS_TERMINALS if user < 0 else 0
        terminals = ("ptmx", "pts") if user >= 0 else ()
        return [
            *fields,
            (zygote_protocol.FLAGS, flags),
            (zygote_protocol.FILTER, cached_filter("tcp-only" if port else "none")),
            (
                landlock_zygote.NOTIFY_FILTER,
                seccomp_notify.build_filter(
                    self.backend.allows_unix_sockets and not port, egress=bool(port), own_user=user >= 0
                ),
            ),
            *path_fields(landlock_zygote.EXECUTE, executable_paths(self.spec.image)),
            *path_fields(
                landlock_zygote.READ,
                (*(f"/etc/{x}" for x in ETC), *(f"/proc/{x}" for x in PROC), "/sys/devices/system/cpu"),
            ),
            *path_fields(landlock_zygote.WRITE, [f"/dev/{name}" for name in (*DEVICES, *terminals)]),
        ]

    async def connect(self, timeout: float = CONNECT_S, own: bool = True) -> None:
        """Connect to the guest init; with `own`, claim the pod, as its owner if it is attached."""
        self.connection = GuestClient(await self.open_link(), self.id)
        await self.connection.wait_until_ready(timeout)
        descriptors = list(self.connection.link.descriptors)
        if own:
            await self._start_proxy(descriptors)
            await self.claim(self.spec)
        else:  # its owner is alive and serves the egress proxy
            landlock_zygote.close_all(descriptors)

    async def open_link(self) -> Link:
        return SocketLink(connect_unix(str(self.directory), GUEST_SOCKET))

    async def _start_proxy(self, descriptors: list[int]) -> None:
        """Start the egress proxy on the first socket, to which all of the pod's connects go."""
        if not descriptors:
            return
        self.proxy = EgressProxy(self.policy, lambda facts: self.record("egress", facts))
        await self.proxy.start([(self.policy.listen_specs()[0], socket.socket(fileno=descriptors[0]))])

    def _user(self, user: str | None) -> str | None:
        if user:
            raise Unsupported(
                f"commands as another user ({user!r}) are not possible on the {self.backend.name} backend"
            )
        return None

    # ------------------------------------------------------------------------------------------- snapshots, end

    async def diff(self) -> Mapping[str, FileInfo | None]:
        await self.ready()
        saved = snapshot_layer(self.backend.store, self.spec.image.with_(layers=self.spec.base_layers))
        base = [LayerDir(str(self.backend.store.layer_path(saved) / SNAPSHOT_ROOT))] if saved else []
        written, root = [LayerDir(str(self.fs))], str(self.fs)
        changes = await asyncio.to_thread(diff_layers, written, base, root=root, complete=True)
        for path in () if saved else (f"{root}/{name}" for name in SUBDIRECTORIES):  # created with the pod
            info = changes.setdefault(path, None)
            if info and (info.kind, info.mode) == ("directory", 0o755):
                del changes[path]
        return changes

    async def seal(self, kind: SnapshotKind | None) -> tuple[tuple[Layer, ...], SnapshotKind]:
        kind = await self.choose_snapshot_kind(kind)
        if kind == "fs":
            await self.guest.request(protocol.KILLALL)
            layer = await asyncio.to_thread(self._copy_to_layer)
        else:
            async with self.group.frozen():
                layer = await asyncio.to_thread(self._copy_to_layer)
        self.record("snapshot", {"kind": kind, "layer": layer.id})
        return (*self.spec.base_layers[-1:], layer), kind

    def _copy_to_layer(self) -> Layer:
        """Copy the pod's whole directory into a layer without parents."""
        store = self.backend.store
        with store.staging() as staging:
            target = staging / "up" / SNAPSHOT_ROOT
            target.mkdir(parents=True)
            layers.copy(self.fs, target, keep_shift=True)
            return store.adopt_layer(staging / "up", self.fs.stat().st_uid if self.backend.user_ids else 0)

    def release(self) -> None:
        super().release()
        if self.proxy is not None:  # the next owner of the pod serves its connections
            proxy, self.proxy = self.proxy, None
            self.backend.run_in_background(proxy.close())

    async def end(self) -> None:
        if self.closed:
            return
        self.closed = True
        self.release()
        await self.backend.remove_pod(self.id)
        self.record("closed", {})


# ------------------------------------------------------------------------------------------------- helpers


cached_filter = functools.cache(seccomp.build_filter)


def pod_user_ids() -> range | None:
    """Return the user ids that can be given to pods, one each; None where there are none."""
    if os.geteuid() or capabilities.mask(NEEDED_CAPABILITIES) & ~capabilities.permitted():
        return None
    maps = [list(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    for users in USER_ID_RANGES:
        if any(first <= users[0] and users[-1] < first + count for first, _, count in maps):
            return users
    return None


def snapshot_layer(store: Store, image: Image) -> Layer | None:
    """Return the layer to start from if the image is a snapshot of this backend, None for `host`; else Unsupported."""
    if image.layers and (store.layer_path(image.layers[-1]) / SNAPSHOT_ROOT).is_dir():
        return image.layers[-1]
    if len(image.layers) <= 1 and (image.name == "host" or image.binds):
        return None  # its layer only adds to the machine's programs what an overlay needs
    raise Unsupported(
        f"image {image.name or image.id!r} needs its own root file system, which this backend does not have; "
        'use "host", or the namespace backend'
    )


def executable_paths(image: Image) -> list[str]:
    """Return the directories of programs: the machine's own and the image's binds."""
    return [*dict.fromkeys((*SYSTEM_BINDS, *image.binds))]


def path_fields(key: int, wanted: Iterable[str]) -> list[tuple[int, protocol.Value]]:
    """Return fields for the paths that exist, following links."""
    return [(key, os.fsencode(path)) for path in wanted if os.path.exists(path)]


def create_pod_directory(fs: Path, source: Path | None, shift: int, user: int) -> None:
    """Create a pod's directory, as a copy of `source` if given, and give it to its user."""
    if user >= 0:
        fs.parent.parent.mkdir(mode=0o711, exist_ok=True)
        info = fs.parent.parent.lstat()
        if not stat.S_ISDIR(info.st_mode) or info.st_uid or info.st_mode & 0o022:
            raise PodError(f"{fs.parent.parent} is not a directory that only root can write to; remove it")
        fs.parent.mkdir(mode=0o700)  # closed until the owners are set: a copied program could be set-user-id root
    fs.mkdir(mode=0o700)
    if source is not None:
        layers.copy(source, fs, shift, lowest=True)
    for name in SUBDIRECTORIES:
        directory = fs / name
        if not directory.is_dir() or directory.is_symlink():
            directory.unlink(missing_ok=True)
            directory.mkdir(mode=0o755)
    os.chmod(fs, 0o700)
    if user >= 0:
        for _, directories, files, at in os.fwalk(fs, follow_symlinks=False):
            for name in (*directories, *files):
                os.chown(name, user, user, dir_fd=at, follow_symlinks=False)
        os.chown(fs, user, user)
        os.chmod(fs.parent, 0o711)


def listen_unix(directory: Path) -> socket.socket:
    """Create the socket on which a pod's guest init listens."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    parent = os.open(directory, os.O_PATH | os.O_CLOEXEC)
    path = f"/proc/self/fd/{parent}/{GUEST_SOCKET}"
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
    """Kill the processes of a pod without control group whose zygote was killed, guard and worker both.

    They are found by user where the pod has its own; otherwise, as a best effort, by working directory and $HOME.
    """
    home, inside = os.fsencode(f"HOME={fs}/home"), os.fsencode(f"{fs}/")
    for _ in range(100):
        found = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if pid != os.getpid()]
        mine = [pid for pid in found if _belongs_to_pod(pid, user, home, inside)]
        if not mine:
            return
        for pid in mine:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    raise PodError(f"processes {mine[:8]} in {fs} could not be killed")


def _belongs_to_pod(pid: int, user: int | None, home: bytes, inside: bytes) -> bool:
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
        return False  # ended, or not readable for us
