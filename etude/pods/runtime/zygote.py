"""The zygote of a state directory: the process that all its pods are forked from, and their parent.

It is started with the first pod, makes no policy decisions, imports nothing heavy, has one thread, and exits when it
holds no pod and no layer. It runs in a mount namespace of its own, where layers in memory and id-mapped layers are
mounted: when it dies, these mounts and every pod go with it, and no mount is ever left on the host. Without root it
first becomes root of a user namespace of its own.
"""

import contextlib
import errno
import fcntl
import gc
import os
import resource
import select
import signal
import socket
import struct
import time
from collections.abc import Callable

from etude.pods.guest import init, protocol
from etude.pods.runtime import capabilities, linux, seccomp, zygote_protocol

FILES = resource.getrlimit(resource.RLIMIT_NOFILE)  # the limit at our start, which programs in pods get
IDLE_S = 30.0  # until it exits without pods, layers and connections
NAMESPACES = linux.NEWUSER | linux.NEWNS | linux.NEWPID | linux.NEWNET | linux.NEWIPC | linux.NEWUTS | linux.NEWCGROUP
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
ZygoteReply = tuple[list[tuple[int, protocol.Value]], list[int]]  # fields and descriptors of a reply


class PodProcess:
    """A created pod: its first process, and the tmpfs it writes to if its storage is memory, else -1."""

    def __init__(self, pid: int, tree: int) -> None:
        self.pid, self.tree = pid, tree
        self.alive = True


class Zygote:
    """Handles requests one by one; every one of them is short."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.pods: dict[bytes, PodProcess] = {}
        self.layers: set[bytes] = set()
        self.mapped: set[bytes] = set()
        self.namespaces: dict[bytes, int] = {}  # uid map -> user namespace for id-mapping
        self.connections: dict[int, tuple[socket.socket, protocol.FrameDecoder, list[int]]] = {}
        self.running = True
        self.liveness = os.pipe2(os.O_CLOEXEC)  # only we hold the write end: it closes when we die, which pods detect
        self.handlers: dict[int, Callable[[protocol.Fields, list[int]], ZygoteReply]] = {
            zygote_protocol.CREATE: self.create,
            zygote_protocol.KILL: self.kill,
            zygote_protocol.SEAL: self.seal,
            zygote_protocol.FETCH: self.fetch,
            zygote_protocol.DROP: self.drop,
            zygote_protocol.MAP: self.map_layer,
            zygote_protocol.STATUS: self.status,
            zygote_protocol.STOP: self.stop,
        }

    def serve(self) -> None:
        wake_r, wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poll = select.poll()
        poll.register(self.listener, select.POLLIN)
        poll.register(wake_r, select.POLLIN)
        idle_since = time.monotonic()
        while self.running:
            if self.pods or self.layers or self.connections:
                idle_since = time.monotonic()
            elif time.monotonic() - idle_since > IDLE_S:
                return
            for fd, _ in poll.poll(1000 if not self.connections else 60_000):
                if fd == wake_r:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake_r, 512)
                    self.reap()
                elif fd == self.listener.fileno():
                    sock, _ = self.listener.accept()
                    self.connections[sock.fileno()] = (sock, protocol.FrameDecoder(), [])
                    poll.register(sock, select.POLLIN)
                elif not self.handle_requests(*self.connections[fd]):
                    poll.unregister(fd)
                    sock, _, pending = self.connections.pop(fd)
                    sock.close()
                    for descriptor in pending:
                        os.close(descriptor)

    def handle_requests(self, sock: socket.socket, decoder: protocol.FrameDecoder, pending: list[int]) -> bool:
        try:
            received, fds, _, _ = socket.recv_fds(sock, 1 << 20, 8)
        except OSError:
            return False
        pending += fds
        if not received:
            return False
        try:
            for op, call, fields in decoder.feed(received):
                descriptors = [pending.pop(0)] if op == zygote_protocol.CREATE and pending else []
                self.dispatch(sock, op, call, fields, descriptors)
        except (protocol.WireError, OSError):
            return False
        return True

    def dispatch(
        self, sock: socket.socket, op: int, call: int, fields: protocol.Fields, descriptors: list[int]
    ) -> None:
        reply_fds: list[int] = []
        try:
            reply_fields, reply_fds = self.handlers[op](fields, descriptors)
            reply = protocol.frame(protocol.OK, call, *reply_fields)
        except (OSError, KeyError, ValueError) as error:
            number = getattr(error, "errno", None) or 22
            reply = protocol.frame(protocol.FAIL, call, (protocol.NUMBER, number), (protocol.DATA, str(error).encode()))
        finally:
            for fd in descriptors:
                os.close(fd)
        try:
            socket.send_fds(sock, [reply], reply_fds)
        finally:
            for fd in reply_fds:  # the client has its own now; ours would keep a pod's files alive
                os.close(fd)

    # ------------------------------------------------------------------------------------------- requests

    def create(self, fields: protocol.Fields, descriptors: list[int]) -> ZygoteReply:
        name = protocol.data(fields, zygote_protocol.ID)
        if name in self.pods or not descriptors:
            raise ValueError(f"pod {name.decode()} exists already, or no socket came with it")
        in_memory = zygote_protocol.UPPER not in fields
        tree = self.stage_memory(fields) if in_memory else -1
        sync_r, sync_w = os.pipe2(os.O_CLOEXEC)
        try:
            pid, left = clone_pod(fields)
            if pid == 0:
                run_pod(fields, descriptors[0], (sync_r, sync_w), self.liveness)  # never returns
            try:
                write(f"/proc/{pid}/uid_map", protocol.data(fields, zygote_protocol.UIDMAP))
                if os.getuid() != 0 or b" 1\n" in protocol.data(fields, zygote_protocol.GIDMAP):
                    write(f"/proc/{pid}/setgroups", b"deny")
                write(f"/proc/{pid}/gid_map", protocol.data(fields, zygote_protocol.GIDMAP))
                for file in [*fields.get(zygote_protocol.CGROUP, []), *left]:
                    write(os.fsdecode(file), b"%d" % pid)
                os.write(sync_w, b"g")
            except OSError:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                raise
        except OSError:
            if tree >= 0:
                os.close(tree)
            raise
        finally:
            os.close(sync_r)
            os.close(sync_w)
            if in_memory:
                linux.umount(zygote_protocol.STAGE)
        self.pods[name] = PodProcess(pid, tree)
        return [(zygote_protocol.PID, pid)], []

    def stage_memory(self, fields: protocol.Fields) -> int:
        """Return a descriptor of a tmpfs for a pod's writes, attached only while the pod is created.

        The kernel copies every mount of this namespace into each new pod's, so a thousand pods must not mean a
        thousand mounts here.
        """
        options: list[tuple[str, str | None]] = [("mode", "0755")]
        for key, option in ((zygote_protocol.SIZE, "size"), (zygote_protocol.INODES, "nr_inodes")):
            if key in fields:
                options.append((option, str(protocol.number(fields, key))))
        fresh = linux.new_mount("tmpfs", options, linux.MOUNT_ATTR_NODEV)
        try:
            linux.attach(fresh, zygote_protocol.STAGE)
        finally:
            os.close(fresh)
        owner = protocol.number(fields, zygote_protocol.OWNER)
        try:
            for path in (zygote_protocol.STAGE, f"{zygote_protocol.STAGE}/u", f"{zygote_protocol.STAGE}/w"):
                if path != zygote_protocol.STAGE:
                    os.mkdir(path)
                os.chmod(path, 0o755)
                os.chown(path, owner, owner)
            return linux.clone_tree(zygote_protocol.STAGE)
        except OSError:
            linux.umount(zygote_protocol.STAGE)
            raise

    def kill(self, fields: protocol.Fields, _: list[int]) -> ZygoteReply:
        """Kill a pod's first process; the kernel kills the rest before that one can be waited for."""
        name = protocol.data(fields, zygote_protocol.ID)
        pod = self.pods.pop(name, None)
        if pod is not None:
            self.end(pod)
            if pod.tree >= 0:
                os.close(pod.tree)
        return [], []

    def end(self, pod: PodProcess) -> None:
        if pod.alive:
            pod.alive = False
            os.kill(pod.pid, signal.SIGKILL)
            os.waitpid(pod.pid, 0)

    def reap(self) -> None:
        """Reap pods that ended by themselves. They stay known until killed, so that their writes can be sealed."""
        for pod in self.pods.values():
            if pod.alive and os.waitpid(pod.pid, os.WNOHANG)[0]:
                pod.alive = False

    def seal(self, fields: protocol.Fields, _: list[int]) -> ZygoteReply:
        name, layer = protocol.data(fields, zygote_protocol.ID), protocol.data(fields, zygote_protocol.LAYER)
        pod = self.pods.get(name)
        if pod is None or pod.tree < 0:
            raise OSError(errno.ENOENT, f"pod {name.decode()} writes nothing to memory here")
        self.end(pod)
        path = f"{zygote_protocol.MEMORY}/{layer.decode()}"
        os.mkdir(path, 0o700)
        linux.attach(pod.tree, path)  # on failure the pod stays known: dead, but with its writes
        del self.pods[name]
        os.close(pod.tree)
        self.layers.add(layer)
        return [], []

    def fetch(self, fields: protocol.Fields, _: list[int]) -> ZygoteReply:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        if zygote_protocol.ID in fields:
            pod = self.pods.get(protocol.data(fields, zygote_protocol.ID))
            if pod is None or pod.tree < 0:
                raise OSError(errno.ENOENT, "no such pod, or it does not write to memory")
            return [], [os.open("u", flags, dir_fd=pod.tree)]
        layer = protocol.data(fields, zygote_protocol.LAYER)
        if layer not in self.layers:
            raise OSError(errno.ENOENT, f"no layer {layer.decode()} in memory")
        return [], [os.open(f"{zygote_protocol.MEMORY}/{layer.decode()}/u", flags)]

    def drop(self, fields: protocol.Fields, _: list[int]) -> ZygoteReply:
        layer = protocol.data(fields, zygote_protocol.LAYER)
        for known, directory in ((self.layers, zygote_protocol.MEMORY), (self.mapped, zygote_protocol.MAPPED)):
            if layer in known:
                known.discard(layer)
                path = f"{directory}/{layer.decode()}"
                linux.umount(path)
                os.rmdir(path)
        return [], []

    def map_layer(self, fields: protocol.Fields, _: list[int]) -> ZygoteReply:
        """Mount a layer with the owners that a pod's user namespace expects."""
        layer = protocol.data(fields, zygote_protocol.LAYER)
        if layer in self.mapped:
            return [], []
        uid_map, gid_map = protocol.data(fields, zygote_protocol.UIDMAP), protocol.data(fields, zygote_protocol.GIDMAP)
        if uid_map not in self.namespaces:
            self.namespaces[uid_map] = user_namespace(uid_map, gid_map)
        path = f"{zygote_protocol.MAPPED}/{layer.decode()}"
        os.makedirs(path, mode=0o700, exist_ok=True)
        tree = linux.clone_tree(os.fsdecode(protocol.data(fields, zygote_protocol.PATH)))
        try:
            attributes = linux.MOUNT_ATTR_IDMAP | linux.MOUNT_ATTR_RDONLY
            linux.set_attributes(tree, attributes, user_namespace=self.namespaces[uid_map])
            linux.attach(tree, path)
        finally:
            os.close(tree)
        self.mapped.add(layer)
        return [], []

    def status(self, _: protocol.Fields, __: list[int]) -> ZygoteReply:
        self.reap()
        pods = [(zygote_protocol.ID, name) for name, pod in self.pods.items() if pod.alive]
        return [*pods, *((zygote_protocol.LAYER, layer) for layer in self.layers)], []

    def stop(self, _: protocol.Fields, __: list[int]) -> ZygoteReply:
        self.running = False
        for pod in self.pods.values():
            self.end(pod)
        return [], []


# ------------------------------------------------------------------------------------------------- inside a new pod


class MountSources:
    """The directories of the host that a pod's root file system is built from.

    Opened by the child, because a mount must belong to its own namespace to be used there, and before it becomes the
    pod's root, which has no access to our directories. Paths are relative to the state directory, our cwd.
    """

    def __init__(self, fields: protocol.Fields) -> None:
        self.root = self._open(zygote_protocol.ROOT)
        self.lower = [self._open(os.fsdecode(path)) for path in fields[zygote_protocol.LOWER]]
        self.writes = self._open(
            os.fsdecode(protocol.data(fields, zygote_protocol.UPPER, zygote_protocol.STAGE.encode()))
        )
        pairs = [os.fsdecode(pair).partition("\0") for pair in fields.get(zygote_protocol.BIND, [])]
        self.binds = [(self._open(source), target) for source, _, target in pairs]

    def _open(self, path: str) -> int:
        return os.open(path, os.O_PATH | os.O_CLOEXEC)


def at(fd: int) -> str:
    """Return the path of an open descriptor."""
    return f"/proc/self/fd/{fd}"


def clone_pod(fields: protocol.Fields) -> tuple[int, list[bytes]]:
    """Clone into new namespaces and, if possible, into the v2 group; return pid and the group files left to write."""
    groups = fields.get(zygote_protocol.GROUP, [])
    try:
        if groups:
            return linux.clone_into(NAMESPACES, os.fsdecode(groups[0])), []
    except OSError:  # an old kernel, or a filter that blocks clone3: the process is moved afterwards
        pass
    return linux.clone(NAMESPACES), [group + b"/cgroup.procs" for group in groups]


def run_pod(fields: protocol.Fields, listener: int, sync: tuple[int, int], liveness: tuple[int, int]) -> None:
    """Run the child: wait for its id maps, set up its root, drop privileges, serve as guest init; never returns."""
    code = 1
    sock = socket.socket(fileno=os.dup(listener))
    try:
        os.close(sync[1])
        os.close(liveness[1])
        if os.read(sync[0], 1) != b"g":
            os._exit(1)
        signal.set_wakeup_fd(-1)
        try:
            egress_sockets = enter(fields, MountSources(fields))
            die_with_zygote(liveness[0])
            close_others(sorted({sock.fileno(), *egress_sockets}))
            drop_privileges(fields)
            detach_log()
        except (OSError, KeyError, ValueError) as error:
            report_failure(sock, error)
            os._exit(1)
        adjust = bool(protocol.number(fields, zygote_protocol.FLAGS) & zygote_protocol.ADJUST_OOM_SCORE)
        workdir = os.fsdecode(protocol.data(fields, zygote_protocol.WORKDIR, b"/"))
        init.GuestInit(sock, egress_sockets, workdir, adjust).serve()
        code = 0
    finally:  # the child of a fork must never return into its parent's code
        os._exit(code)


def enter(fields: protocol.Fields, sources: MountSources) -> list[int]:
    """Become root of the new namespaces, mount the root file system and pivot into it; return the egress sockets."""
    with contextlib.suppress(PermissionError):  # denied where only one id is mapped; there are no groups then
        os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    os.umask(0)
    egress_sockets = open_network(fields)
    mount_overlay(sources)  # and change into it
    for source, target in sources.binds:
        tree = linux.clone_tree(source, recursive=True)
        attributes = linux.MOUNT_ATTR_RDONLY | linux.MOUNT_ATTR_NOSUID | linux.MOUNT_ATTR_NODEV
        linux.set_attributes(tree, attributes, recursive=True)
        linux.attach(tree, target.lstrip("/"))
        os.close(tree)
    mount_devices(protocol.number(fields, zygote_protocol.SHM, 64 << 20))
    linux.mount("proc", "proc", "proc", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
    linux.pivot_root(".", ".")
    linux.umount(".")
    os.chdir("/")
    socket.sethostname(os.fsdecode(protocol.data(fields, zygote_protocol.HOSTNAME, b"pod")))
    os.umask(0o022)
    return egress_sockets


def mount_overlay(sources: MountSources) -> None:
    """Mount the pod's root, its writes over its layers, and change into it."""
    lower = [at(fd) for fd in sources.lower]
    # volatile: unmounting would otherwise sync the whole file system beneath (50 ms at the 99th percentile).
    rest: list[tuple[str, str | None]] = [
        ("upperdir", f"{at(sources.writes)}/u"),
        ("workdir", f"{at(sources.writes)}/w"),
        ("volatile", None),
        ("userxattr", None),
    ]
    try:
        tree = linux.new_mount("overlay", [*(("lowerdir+", path) for path in lower), *rest])
        linux.attach(tree, at(sources.root))
    except OSError as error:
        if error.errno != errno.EINVAL or "lowerdir+" not in str(error):
            raise
        # Kernels before 6.8 take all layers in one option, of at most a page.
        options = ",".join([f"lowerdir={':'.join(lower)}", *(f"{k}={v}" if v else k for k, v in rest)])
        linux.mount("overlay", at(sources.root), "overlay", linux.MS_NODEV, options)
        tree = linux.clone_tree(at(sources.root))
    os.fchdir(tree)
    os.close(tree)


def mount_devices(shm: int) -> None:
    dev = "dev"
    linux.mount("tmpfs", dev, "tmpfs", linux.MS_NOSUID | linux.MS_NOEXEC, "mode=755,size=65536,nr_inodes=64")
    for name in DEVICES:
        os.close(os.open(f"{dev}/{name}", os.O_CREAT | os.O_WRONLY, 0o666))
        tree = linux.clone_tree(f"/dev/{name}")
        linux.attach(tree, f"{dev}/{name}")
        os.close(tree)
    for link, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(f"/proc/self/{target}", f"{dev}/{link}")
    os.mkdir(f"{dev}/pts", 0o755)
    linux.mount("devpts", f"{dev}/pts", "devpts", linux.MS_NOSUID | linux.MS_NOEXEC, "newinstance,ptmxmode=0666")
    os.symlink("pts/ptmx", f"{dev}/ptmx")
    os.mkdir(f"{dev}/shm", 0o1777)
    flags = linux.MS_NOSUID | linux.MS_NODEV
    linux.mount("tmpfs", f"{dev}/shm", "tmpfs", flags, f"mode=1777,size={shm},nr_inodes=4096")


def open_network(fields: protocol.Fields) -> list[int]:
    """Bring up loopback, the only interface, and open the sockets that the host's egress proxy serves."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, 0x8914, struct.pack("16sh14x", b"lo", 0x1 | 0x40))  # SIOCSIFFLAGS: up, running
        for index, address in enumerate(fields.get(zygote_protocol.ADDRESS, [])):
            name = b"lo:%d" % (index + 1)
            packed = struct.pack("16sHH4s8x", name, socket.AF_INET, 0, socket.inet_aton(address.decode()))
            fcntl.ioctl(control, 0x8916, packed)  # SIOCSIFADDR
    egress_sockets = []
    for entry in fields.get(zygote_protocol.LISTEN, []):
        kind, host, port = entry.decode().split()
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM if kind == "tcp" else socket.SOCK_DGRAM)
        sock.bind((host, int(port)))
        if kind == "tcp":
            sock.listen(128)
        egress_sockets.append(sock.detach())
    return egress_sockets


def die_with_zygote(liveness: int) -> None:
    """Make the kernel kill this process when the zygote dies. Call after `enter`, which clears this setting."""
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    poll = select.poll()
    poll.register(liveness, 0)
    if poll.poll(0):  # it died in between
        os._exit(1)


def drop_privileges(fields: protocol.Fields) -> None:
    """Restrict this process irreversibly; the pod's programs inherit the restrictions."""
    resource.setrlimit(resource.RLIMIT_NOFILE, FILES)
    # Not dumpable: the pod's root has our uid, and must not trace us or open /proc/1/mem.
    linux.prctl(linux.PR_SET_DUMPABLE, 0)
    capabilities.drop_to(protocol.number(fields, zygote_protocol.CAPS))
    if zygote_protocol.FILTER in fields:
        seccomp.install(protocol.data(fields, zygote_protocol.FILTER))
    else:
        linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)


def detach_log() -> None:
    """Close the zygote's log, a file of the host whose name would show in /proc/1/fd."""
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (1, 2):
        os.dup2(null, fd)
    os.close(null)


def close_others(kept: list[int]) -> None:
    """Close every descriptor but `kept` and the standard three: the zygote's give access to other pods."""
    first = 3
    for fd in kept:
        if fd > first:
            linux.close_range(first, fd - 1)
        first = fd + 1
    linux.close_range(first)


def report_failure(sock: socket.socket, error: Exception) -> None:
    """Send the first client that connects the reason why the pod could not be created."""
    sock.settimeout(5)
    with contextlib.suppress(OSError):
        peer, _ = sock.accept()
        peer.sendall(
            protocol.frame(
                protocol.FAIL,
                0,
                (protocol.NUMBER, getattr(error, "errno", None) or 5),
                (protocol.DATA, str(error).encode()),
            )
        )
        peer.close()


# ------------------------------------------------------------------------------------------------- starting


def user_namespace(uid_map: bytes, gid_map: bytes) -> int:
    """Return a descriptor of a user namespace with these maps; its process has ended."""
    sync_r, sync_w = os.pipe2(os.O_CLOEXEC)
    pid = linux.clone(linux.NEWUSER)
    if pid == 0:
        os.close(sync_w)
        os.read(sync_r, 1)
        os._exit(0)
    try:
        write(f"/proc/{pid}/uid_map", uid_map)
        write(f"/proc/{pid}/gid_map", gid_map)
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(sync_r)
        os.close(sync_w)
        os.waitpid(pid, 0)


def write(path: str, text: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text)
    except OSError as error:
        raise OSError(error.errno, f"write {text!r} to {path}: {error.strerror}") from None
    finally:
        os.close(fd)


def unshare_namespaces() -> None:
    """Enter a new mount namespace that still follows the host's mounts; without root, a new user namespace too."""
    uid, gid = os.getuid(), os.getgid()
    if uid == 0:
        linux.unshare(linux.NEWNS)
    else:
        linux.unshare(linux.NEWUSER | linux.NEWNS)
        write("/proc/self/setgroups", b"deny")
        write("/proc/self/uid_map", b"0 %d 1\n" % uid)
        write("/proc/self/gid_map", b"0 %d 1\n" % gid)
    linux.mount("", "/", "", linux.MS_REC | linux.MS_SLAVE)


def main(state: str, descriptor: int) -> None:
    """Run as the zygote of a state directory, on a listening socket."""
    listener = socket.socket(fileno=descriptor)
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.close(null)
    listener.setblocking(True)
    os.umask(0o077)
    unshare_namespaces()
    os.chdir(state)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # one descriptor for each pod
    gc.collect()
    gc.freeze()  # pods share these pages until they are written to
    gc.disable()
    Zygote(listener).serve()
