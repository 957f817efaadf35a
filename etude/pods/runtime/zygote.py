"""The keeper of a state directory's pods: the process they are forked from, and their parent.

It is started when the first pod is asked for, holds no policy, imports
nothing heavy, has one thread, and ends when nothing is left to keep. It lives in a mount namespace of its own, where
layers in memory and id-mapped layers are mounted: when it dies, all of that and every pod goes with it, and no
mount is ever left on the host. Without root it first becomes root of a user namespace of its own.
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

FILES = resource.getrlimit(resource.RLIMIT_NOFILE)  # as we were started; what programs in pods get
IDLE_S = 30.0  # with nothing to keep and nobody connected
NAMESPACES = linux.NEWUSER | linux.NEWNS | linux.NEWPID | linux.NEWNET | linux.NEWIPC | linux.NEWUTS | linux.NEWCGROUP
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")


class Kept:
    """A pod that was made: its first process, and the tmpfs it writes to, if it writes to memory."""

    def __init__(self, pid: int, tree: int) -> None:
        self.pid, self.tree = pid, tree
        self.alive = True


class Keeper:
    """Answer requests one by one; every one of them is short."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.pods: dict[bytes, Kept] = {}
        self.layers: set[bytes] = set()
        self.mapped: set[bytes] = set()
        self.namespaces: dict[bytes, int] = {}  # uid map -> user namespace for id-mapping
        self.connections: dict[int, tuple[socket.socket, protocol.Splitter, list[int]]] = {}
        self.running = True
        self.life = os.pipe2(os.O_CLOEXEC)  # nobody else keeps the writing end: a pod sees by it whether we live
        self.answers: dict[
            int, Callable[[protocol.Fields, list[int]], tuple[list[tuple[int, protocol.Value]], list[int]]]
        ] = {
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
        quiet_since = time.monotonic()
        while self.running:
            if self.pods or self.layers or self.connections:
                quiet_since = time.monotonic()
            elif time.monotonic() - quiet_since > IDLE_S:
                return
            for fd, _ in poll.poll(1000 if not self.connections else 60_000):
                if fd == wake_r:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake_r, 512)
                    self.reap()
                elif fd == self.listener.fileno():
                    sock, _ = self.listener.accept()
                    self.connections[sock.fileno()] = (sock, protocol.Splitter(), [])
                    poll.register(sock, select.POLLIN)
                elif not self.exchange(*self.connections[fd]):
                    poll.unregister(fd)
                    sock, _, waiting = self.connections.pop(fd)
                    sock.close()
                    for descriptor in waiting:
                        os.close(descriptor)

    def exchange(self, sock: socket.socket, splitter: protocol.Splitter, waiting: list[int]) -> bool:
        try:
            received, fds, _, _ = socket.recv_fds(sock, 1 << 20, 8)
        except OSError:
            return False
        waiting += fds
        if not received:
            return False
        try:
            for op, call, fields in splitter.feed(received):
                given = [waiting.pop(0)] if op == zygote_protocol.CREATE and waiting else []
                self.answer(sock, op, call, fields, given)
        except (protocol.WireError, OSError):
            return False
        return True

    def answer(self, sock: socket.socket, op: int, call: int, fields: protocol.Fields, given: list[int]) -> None:
        passed: list[int] = []
        try:
            answer, passed = self.answers[op](fields, given)
            reply = protocol.frame(protocol.OK, call, *answer)
        except (OSError, KeyError, ValueError) as error:
            number = getattr(error, "errno", None) or 22
            reply = protocol.frame(protocol.FAIL, call, (protocol.NUMBER, number), (protocol.DATA, str(error).encode()))
        finally:
            for fd in given:
                os.close(fd)
        try:
            socket.send_fds(sock, [reply], passed)
        finally:
            for fd in passed:  # theirs now; ours would keep what a pod wrote alive
                os.close(fd)

    # ------------------------------------------------------------------------------------------- requests

    def create(self, fields: protocol.Fields, given: list[int]) -> tuple[list[tuple[int, protocol.Value]], list[int]]:
        name = protocol.data(fields, zygote_protocol.ID)
        if name in self.pods or not given:
            raise ValueError(f"pod {name.decode()} exists already, or no socket came with it")
        in_memory = zygote_protocol.UPPER not in fields
        tree = self.stage_memory(fields) if in_memory else -1
        sync_r, sync_w = os.pipe2(os.O_CLOEXEC)
        try:
            pid, left = clone_pod(fields)
            if pid == 0:
                be_pod(fields, given[0], (sync_r, sync_w), self.life)  # never returns
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
        self.pods[name] = Kept(pid, tree)
        return [(zygote_protocol.PID, pid)], []

    def stage_memory(self, fields: protocol.Fields) -> int:
        """A tmpfs for what a pod writes, attached only while the pod is made; the descriptor outlives that.

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
            for place in (zygote_protocol.STAGE, f"{zygote_protocol.STAGE}/u", f"{zygote_protocol.STAGE}/w"):
                if place != zygote_protocol.STAGE:
                    os.mkdir(place)
                os.chmod(place, 0o755)
                os.chown(place, owner, owner)
            return linux.clone_tree(zygote_protocol.STAGE)
        except OSError:
            linux.umount(zygote_protocol.STAGE)
            raise

    def kill(self, fields: protocol.Fields, _: list[int]) -> tuple[list[tuple[int, protocol.Value]], list[int]]:
        """Kill a pod's first process; the kernel kills the rest before that one can be waited for."""
        name = protocol.data(fields, zygote_protocol.ID)
        pod = self.pods.pop(name, None)
        if pod is not None:
            self.end(pod)
            if pod.tree >= 0:
                os.close(pod.tree)
        return [], []

    def end(self, pod: Kept) -> None:
        if pod.alive:
            pod.alive = False
            os.kill(pod.pid, signal.SIGKILL)
            os.waitpid(pod.pid, 0)

    def reap(self) -> None:
        """A pod that ended by itself stays known, so that what it wrote can still be sealed, until it is killed."""
        for pod in self.pods.values():
            if pod.alive and os.waitpid(pod.pid, os.WNOHANG)[0]:
                pod.alive = False

    def seal(self, fields: protocol.Fields, _: list[int]) -> tuple[list[tuple[int, protocol.Value]], list[int]]:
        name, layer = protocol.data(fields, zygote_protocol.ID), protocol.data(fields, zygote_protocol.LAYER)
        pod = self.pods.get(name)
        if pod is None or pod.tree < 0:
            raise OSError(errno.ENOENT, f"pod {name.decode()} writes nothing to memory here")
        self.end(pod)
        place = f"{zygote_protocol.MEMORY}/{layer.decode()}"
        os.mkdir(place, 0o700)
        linux.attach(pod.tree, place)  # failing, it leaves the pod as it is: dead, but what it wrote is there
        del self.pods[name]
        os.close(pod.tree)
        self.layers.add(layer)
        return [], []

    def fetch(self, fields: protocol.Fields, _: list[int]) -> tuple[list[tuple[int, protocol.Value]], list[int]]:
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

    def drop(self, fields: protocol.Fields, _: list[int]) -> tuple[list[tuple[int, protocol.Value]], list[int]]:
        layer = protocol.data(fields, zygote_protocol.LAYER)
        for known, directory in ((self.layers, zygote_protocol.MEMORY), (self.mapped, zygote_protocol.MAPPED)):
            if layer in known:
                known.discard(layer)
                place = f"{directory}/{layer.decode()}"
                linux.umount(place)
                os.rmdir(place)
        return [], []

    def map_layer(self, fields: protocol.Fields, _: list[int]) -> tuple[list[tuple[int, protocol.Value]], list[int]]:
        """Show a layer with the owners a pod's user namespace expects."""
        layer = protocol.data(fields, zygote_protocol.LAYER)
        if layer in self.mapped:
            return [], []
        uid_map, gid_map = protocol.data(fields, zygote_protocol.UIDMAP), protocol.data(fields, zygote_protocol.GIDMAP)
        if uid_map not in self.namespaces:
            self.namespaces[uid_map] = user_namespace(uid_map, gid_map)
        place = f"{zygote_protocol.MAPPED}/{layer.decode()}"
        os.makedirs(place, mode=0o700, exist_ok=True)
        tree = linux.clone_tree(os.fsdecode(protocol.data(fields, zygote_protocol.PATH)))
        try:
            attributes = linux.MOUNT_ATTR_IDMAP | linux.MOUNT_ATTR_RDONLY
            linux.set_attributes(tree, attributes, user_namespace=self.namespaces[uid_map])
            linux.attach(tree, place)
        finally:
            os.close(tree)
        self.mapped.add(layer)
        return [], []

    def status(self, _: protocol.Fields, __: list[int]) -> tuple[list[tuple[int, protocol.Value]], list[int]]:
        self.reap()
        pods = [(zygote_protocol.ID, name) for name, pod in self.pods.items() if pod.alive]
        return [*pods, *((zygote_protocol.LAYER, layer) for layer in self.layers)], []

    def stop(self, _: protocol.Fields, __: list[int]) -> tuple[list[tuple[int, protocol.Value]], list[int]]:
        self.running = False
        for pod in self.pods.values():
            self.end(pod)
        return [], []


# ------------------------------------------------------------------------------------------------- inside a new pod


class Places:
    """Everything of the host that a pod is built from.

    Opened by the child, because a mount must be one of its own namespace to be used there, and before it becomes
    the pod's root, who cannot walk our directories. Paths are relative: the state directory is where we are.
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
    """The path of an open descriptor."""
    return f"/proc/self/fd/{fd}"


def clone_pod(fields: protocol.Fields) -> tuple[int, list[bytes]]:
    """Clone into new namespaces and, where it can be, into the v2 group; and the group files left to write."""
    groups = fields.get(zygote_protocol.GROUP, [])
    try:
        if groups:
            return linux.clone_into(NAMESPACES, os.fsdecode(groups[0])), []
    except OSError:  # an old kernel, or a filter that knows no clone3: the process is moved afterwards
        pass
    return linux.clone(NAMESPACES), [group + b"/cgroup.procs" for group in groups]


def be_pod(fields: protocol.Fields, listener: int, sync: tuple[int, int], life: tuple[int, int]) -> None:
    """The child's life: wait for its identity, build its world, lock itself in, serve; never returns."""
    code = 1
    sock = socket.socket(fileno=os.dup(listener))
    try:
        os.close(sync[1])
        os.close(life[1])
        if os.read(sync[0], 1) != b"g":
            os._exit(1)
        signal.set_wakeup_fd(-1)
        try:
            carried = enter(fields, Places(fields))
            die_with_keeper(life[0])
            close_others(sorted({sock.fileno(), *carried}))
            lock_in(fields)
            hide_log()
        except (OSError, KeyError, ValueError) as error:
            refuse(sock, error)
            os._exit(1)
        mark = bool(protocol.number(fields, zygote_protocol.FLAGS) & zygote_protocol.MARK_CHILDREN)
        init.Agent(sock, carried, os.fsdecode(protocol.data(fields, zygote_protocol.WORKDIR, b"/")), mark).serve()
        code = 0
    finally:  # the child of a fork must not return into its parent's code, whatever happened
        os._exit(code)


def enter(fields: protocol.Fields, places: Places) -> list[int]:
    """Become root of the new namespaces, put the root file system together and move into it."""
    with contextlib.suppress(PermissionError):  # denied where only one id is mapped; there are no groups then
        os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    os.umask(0)
    carried = open_network(fields)
    mount_overlay(places)  # and we are in it
    for source, target in places.binds:
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
    return carried


def mount_overlay(places: Places) -> None:
    """Mount the pod's root, what it writes over its layers, and step into it."""
    lower = [at(fd) for fd in places.lower]
    # volatile: unmounting would otherwise sync the whole file system beneath (50 ms at the 99th percentile).
    rest: list[tuple[str, str | None]] = [
        ("upperdir", f"{at(places.writes)}/u"),
        ("workdir", f"{at(places.writes)}/w"),
        ("volatile", None),
        ("userxattr", None),
    ]
    try:
        tree = linux.new_mount("overlay", [*(("lowerdir+", path) for path in lower), *rest])
        linux.attach(tree, at(places.root))
    except OSError as error:
        if error.errno != errno.EINVAL or "lowerdir+" not in str(error):
            raise
        # Kernels before 6.8 take all layers in one option, of at most a page.
        options = ",".join([f"lowerdir={':'.join(lower)}", *(f"{k}={v}" if v else k for k, v in rest)])
        linux.mount("overlay", at(places.root), "overlay", linux.MS_NODEV, options)
        tree = linux.clone_tree(at(places.root))
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
    """Raise the loopback interface, the only one, and open the sockets on which the host carries allowed egress."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, 0x8914, struct.pack("16sh14x", b"lo", 0x1 | 0x40))  # SIOCSIFFLAGS: up, running
        for index, address in enumerate(fields.get(zygote_protocol.ADDRESS, [])):
            name = b"lo:%d" % (index + 1)
            packed = struct.pack("16sHH4s8x", name, socket.AF_INET, 0, socket.inet_aton(address.decode()))
            fcntl.ioctl(control, 0x8916, packed)  # SIOCSIFADDR
    carried = []
    for entry in fields.get(zygote_protocol.LISTEN, []):
        kind, host, port = entry.decode().split()
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM if kind == "tcp" else socket.SOCK_DGRAM)
        sock.bind((host, int(port)))
        if kind == "tcp":
            sock.listen(128)
        carried.append(sock.detach())
    return carried


def die_with_keeper(life: int) -> None:
    """Be killed when the keeper dies. Only now: becoming the pod's root makes the kernel forget it."""
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    poll = select.poll()
    poll.register(life, 0)
    if poll.poll(0):  # it died in between
        os._exit(1)


def lock_in(fields: protocol.Fields) -> None:
    """Give up what programs of the pod must never have; they inherit it. From here on nothing can be undone."""
    resource.setrlimit(resource.RLIMIT_NOFILE, FILES)
    # Not dumpable: the pod's root is our uid, and must not trace us or open /proc/1/mem.
    linux.prctl(linux.PR_SET_DUMPABLE, 0)
    capabilities.drop_to(protocol.number(fields, zygote_protocol.CAPS))
    if zygote_protocol.FILTER in fields:
        seccomp.install(protocol.data(fields, zygote_protocol.FILTER))
    else:
        linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)


def hide_log() -> None:
    """The keeper's log is a file of the host: its name would show in /proc/1/fd."""
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (1, 2):
        os.dup2(null, fd)
    os.close(null)


def close_others(kept: list[int]) -> None:
    """Close every descriptor but `kept` and the standard three: the keeper's lead to other pods."""
    first = 3
    for fd in kept:
        if fd > first:
            linux.close_range(first, fd - 1)
        first = fd + 1
    linux.close_range(first)


def refuse(sock: socket.socket, error: Exception) -> None:
    """Tell whoever connects why there is no pod."""
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
    """A descriptor of a user namespace with these maps; the process that made it is gone."""
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


def own_namespaces() -> None:
    """A mount namespace of our own that still follows the host's mounts; as a user, with a user namespace around it."""
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
    """Become the keeper of a state directory, on a listening socket."""
    listener = socket.socket(fileno=descriptor)
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.close(null)
    listener.setblocking(True)
    os.umask(0o077)
    own_namespaces()
    os.chdir(state)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # one descriptor for each pod
    gc.collect()
    gc.freeze()  # pods share these pages until they are written to
    gc.disable()
    Keeper(listener).serve()
