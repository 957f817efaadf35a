"""Pods without namespaces: a process and a directory, confined by Landlock (`landlock`) or unconfined (`subprocess`).

For machines without user namespaces. The only image is the machine's own programs; there is no overlay and no quota: a
pod works in `work`, `home` and `tmp` of one directory, whose real path programs see, and a snapshot is a copy of that
directory. Started by root, each `landlock` pod has its own user; otherwise it has its creator's, and what Landlock
cannot separate within one user is closed by a second system-call filter or listed in the notes.
`subprocess` isolates nothing, and is used only when requested by name. docs/pods.md compares their strength.
"""

import asyncio
import contextlib
import functools
import os
import random
import signal
import socket
import stat
import tempfile
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

from etude.pods.guest import protocol
from etude.pods.images import layers, trees
from etude.pods.images.certificates import certificate_variables
from etude.pods.images.layers import LayerDir
from etude.pods.images.records import SYSTEM_BINDS, Image, Layer
from etude.pods.images.store import Store
from etude.pods.network.policy import EgressPolicy
from etude.pods.pod import Capabilities, FileInfo, PodError, SnapshotKind, Unsupported
from etude.pods.runtime import capabilities, landlock, seccomp, zygote_protocol
from etude.pods.runtime.backend import SOFT_DISK_LIMITS, Backend, LocalPod, PodSpec
from etude.pods.runtime.diff import diff_layers, is_below

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
    """Pods each of which is a process and a directory."""

    mode = "processes"
    confined: bool

    def __init__(self, state: Path, store: Store, helper: Path) -> None:
        super().__init__(state, store, helper, f"{state} {self.name}", f"{self.name}-{zygote_protocol.VERSION}")
        self.user_ids = pod_user_ids() if self.confined else None
        parent = USER_PODS_PARENT if USER_PODS_PARENT.is_dir() else Path(tempfile.gettempdir())
        self.user_pods = parent / self.layout.name.replace("etude-", "etude-pods-")
        self.recent_user_ids: set[int] = set()  # given to pods by this process
        self.capabilities = self._capabilities()

    @abstractmethod
    def _capabilities(self) -> Capabilities: ...

    def _shared_notes(self) -> list[str]:
        return [
            "no image but the machine's own programs, and files are always on disk",
            f"{SOFT_DISK_LIMITS}; a snapshot counts towards those of its pods",
            *self.layout_notes(),
            "a pod's paths contain its id: an absolute path that a program stored is not valid in a fork",
            "a program that kills the guest init, its parent, ends the pod",
        ]

    # ------------------------------------------------------------------------------------------- pods

    def make_pod(self, spec: PodSpec) -> "DirectoryPod":
        can = self.capabilities
        for name in spec.limits.specified():
            can.require(f"a limit on {name}", name in can.limits, f"it can limit {sorted(can.limits) or 'nothing'}")
        if spec.egress.allow:
            way = "transparent" if spec.egress.transparent else "proxy"
            can.require(f"egress by {way}", way in can.egress, "; ".join(can.notes[:1]) if not can.egress else "")
        snapshot_layer(self.store, spec.image)
        return DirectoryPod(self, spec)

    @abstractmethod
    def confinement(self, pod: "DirectoryPod", user: int, port: int) -> list[tuple[int, protocol.Value]]:
        """Return the fields of CREATE that confine a pod. `user`: its own, or -1; `port`: of its proxy, or 0."""

    def pod_directories(self) -> set[str]:
        found = super().pod_directories()
        with contextlib.suppress(FileNotFoundError):
            found |= {entry.name for entry in self.user_pods.iterdir()}
        for trash in {name for name in found if name.startswith(".")}:  # of a service killed while deleting
            found.discard(trash)
            self.run_in_background(asyncio.to_thread(trees.remove_tree, self.user_pods / trash))
        return found

    async def remove_files(self, name: str, orphaned: bool) -> None:
        fs = self.pod_fs(name)
        if orphaned and fs.exists():
            await asyncio.to_thread(kill_leftovers, fs, fs.stat().st_uid if self.user_ids else None)
        if self.user_ids and fs.exists():
            self.delete(fs.parent, self.user_pods)
        await super().remove_files(name, orphaned)

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

    async def close(self) -> None:
        await super().close()
        with contextlib.suppress(OSError):  # other services have pods
            self.user_pods.rmdir()

    async def shutdown(self) -> None:
        await super().shutdown()
        await asyncio.to_thread(trees.remove_tree, self.user_pods)


class LandlockBackend(DirectoryBackend):
    """Pods confined by Landlock and system-call filters: the machine is shared, its files and network are not."""

    name = "landlock"
    confined = True

    def __init__(self, state: Path, store: Store, helper: Path) -> None:
        self.abi = landlock.abi()
        super().__init__(state, store, helper)
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
                f"pods have our own user ({why}): they can change modes, times and extended attributes of its "
                "files, though not read them"
            )
            notes.append("a command can have a terminal, but programs cannot open more (tmux, script)")
        if not self.allows_unix_sockets:
            notes.append("no UNIX sockets but pairs: this kernel's Landlock cannot deny access to those of the machine")
        return Capabilities(
            isolation="lsm",
            limits=frozenset({*self.layout.controllers, "disk", "inodes"}),
            egress=frozenset({"proxy"}) if self.abi >= 4 else frozenset(),
            images=False,
            snapshots=self.snapshots,
            own_users=self.user_ids is not None,
            notes=tuple(notes),
        )

    @property
    def allows_unix_sockets(self) -> bool:
        """Whether programs may use UNIX sockets: those outside must be inaccessible by user or by Landlock."""
        return self.abi >= 9 or (self.user_ids is not None and self.abi >= 6)

    def confinement(self, pod: "DirectoryPod", user: int, port: int) -> list[tuple[int, protocol.Value]]:
        devices = (*DEVICES, "ptmx", "pts") if user >= 0 else DEVICES
        rules = landlock.build_ruleset(
            read=[*(f"/etc/{x}" for x in ETC), *(f"/proc/{x}" for x in PROC), "/sys/devices/system/cpu"],
            write=[str(pod.fs), *(f"/dev/{name}" for name in devices)],
            execute=[str(pod.fs), *dict.fromkeys((*SYSTEM_BINDS, *pod.spec.image.binds))],
            tcp=not port,
            scope=self.abi >= 6,
        )
        unix = self.allows_unix_sockets and not port
        return [
            (zygote_protocol.FLAGS, 0 if user >= 0 else zygote_protocol.ZYGOTE_OPENS_TERMINALS),
            (zygote_protocol.RULESET, rules.attributes),
            *((zygote_protocol.RULE, rule) for rule in rules.rules),
            (zygote_protocol.FILTER, cached_filter("tcp-only" if port else "none")),
            (zygote_protocol.NOTIFY, seccomp.build_shared_filter(unix, egress=bool(port), own_user=user >= 0)),
        ]


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
            limits=frozenset({*self.layout.controllers, "disk", "inodes"}),
            images=False,
            snapshots=self.snapshots,
            notes=tuple(notes),
        )

    def confinement(self, pod: "DirectoryPod", user: int, port: int) -> list[tuple[int, protocol.Value]]:
        memory = "memory" in self.layout.controllers
        return [(zygote_protocol.FLAGS, zygote_protocol.ADJUST_OOM_SCORE if memory else 0)]


class DirectoryPod(LocalPod):
    """A pod that is a process and a directory."""

    backend: DirectoryBackend

    def __init__(self, backend: DirectoryBackend, spec: PodSpec) -> None:
        self.fs = backend.pod_fs(spec.id)
        home, scratch = str(self.fs / "home"), str(self.fs / "tmp")
        own = {"HOME": home, "TMPDIR": scratch, "USER": "pod", "LOGNAME": "pod"}
        policy = EgressPolicy.from_egress(spec.egress)
        certificates = certificate_variables(spec.image) if policy.rules else {}
        environment = {"PATH": PATH, "LANG": "C.UTF-8", **certificates, **spec.image.env, **own, **policy.environment()}
        if backend.confined:  # /etc/gitconfig may hold credentials, and git treats a denied read as a fatal error
            environment["GIT_CONFIG_NOSYSTEM"] = "1"
        if policy.rules:  # loopback is the machine's: a rule for 127.0.0.1 goes through the proxy as well
            environment |= {"NO_PROXY": "", "no_proxy": ""}
        super().__init__(backend, spec, environment, str(self.fs / "work"))

    # ------------------------------------------------------------------------------------------- starting

    async def boot(self) -> None:
        user = self.backend.new_user_id()
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.fs.exists():  # of a first attempt
            await asyncio.to_thread(trees.remove_tree, self.fs.parent if user >= 0 else self.fs)
        saved = snapshot_layer(self.backend.store, self.spec.image)
        if saved is None:
            create_pod_directory(self.fs, None, 0, user)
        else:
            source = self.backend.store.layer_path(saved) / SNAPSHOT_ROOT
            await asyncio.to_thread(create_pod_directory, self.fs, source, saved.shift, user)
        with contextlib.ExitStack() as opened:
            listening = []
            if self.policy.rules:
                listening.append(opened.enter_context(socket.create_server(("127.0.0.1", 0), backlog=128)))
            port = listening[0].getsockname()[1] if listening else 0
            fields = [(zygote_protocol.OWNER, user), *self.backend.confinement(self, user, port)]
            fields += [(zygote_protocol.PORT, port)] if port else []
            if self.limits.disk:
                fields += [(zygote_protocol.WATCH, os.fsencode(self.fs)), (zygote_protocol.SIZE, self.limits.disk)]
                fields += [(zygote_protocol.INODES, int(self.limits.inodes))] if self.limits.inodes else []
            await self.create_process(fields, [sock.fileno() for sock in listening])

    def _user(self, user: str | None) -> str | None:
        if user:
            raise Unsupported(
                f"commands as another user ({user!r}) are not possible on the {self.backend.name} backend"
            )
        return None

    # ------------------------------------------------------------------------------------------- snapshots, end

    async def diff(self, paths: Sequence[str] = ("/",)) -> Mapping[str, FileInfo | None]:
        await self.ready()
        saved = snapshot_layer(self.backend.store, self.spec.image.with_(layers=self.spec.base_layers))
        base = [LayerDir(str(self.backend.store.layer_path(saved) / SNAPSHOT_ROOT))] if saved else []
        written, root = [LayerDir(str(self.fs))], str(self.fs)
        changes = await asyncio.to_thread(diff_layers, written, base, paths, root=root, complete=True)
        for path in () if saved else (f"{root}/{name}" for name in SUBDIRECTORIES):  # created with the pod
            info = changes.get(path)
            if info and (info.kind, info.mode) == ("directory", 0o755):
                del changes[path]
            elif path not in changes and not os.path.lexists(path) and any(is_below(path, each) for each in paths):
                changes[path] = None
        return changes

    async def take_layers(self, kind: SnapshotKind) -> tuple[Layer, ...]:
        if kind == "fs":
            await self.guest.request(protocol.KILLALL)
            layer = await asyncio.to_thread(self._copy_to_layer)
        else:
            async with self.group.frozen():
                layer = await asyncio.to_thread(self._copy_to_layer)
        return (*self.spec.base_layers[-1:], layer)

    def _copy_to_layer(self) -> Layer:
        """Copy the pod's whole directory into a layer without parents."""
        store = self.backend.store
        with store.staging() as staging:
            target = staging / "up" / SNAPSHOT_ROOT
            target.mkdir(parents=True)
            layers.copy(self.fs, target, keep_shift=True)
            return store.adopt_layer(staging / "up", self.fs.stat().st_uid if self.backend.user_ids else 0)


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
