"""The zygote of pods without namespaces: they are forked from it, and none of their processes can outlive it.

One per state directory and backend. It is two processes: the worker creates pods and handles requests; its parent, the
guard, only waits. Both are subreapers, and so is every guest init, so whatever a program does (fork, setsid, double
fork), it stays a descendant of its guest init, and becomes a child of the worker when the guest init dies: a child of
the worker that is no guest init is a leftover, and is killed with its descendants. When the worker is killed the guard
does the same; when the guard is, the worker ends everything and exits. The worker has one thread, makes no policy
decisions and imports nothing later.

    CREATE  ID PATH(the pod's directory) WORKDIR OWNER(a user of its own) CGROUP* FLAGS      OK PID
            READ* EXECUTE* WRITE* (paths) FILTER NOTIFY_FILTER PORT; descriptors: the guest init's socket, the proxy's
    KILL    ID                                              OK when none of its processes is left
    STATUS                                                  OK ID*
    STOP    ends the zygote and with it every pod           OK
"""

import contextlib
import errno
import gc
import os
import resource
import select
import signal
import socket
import struct
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from etude.pods.guest import init, processes, protocol
from etude.pods.runtime import capabilities, linux, seccomp, zygote_protocol
from etude.pods.runtime.landlock import ruleset, seccomp_notify
from etude.pods.runtime.zygote import close_others, report_failure, write

READ, EXECUTE, WRITE, NOTIFY_FILTER, PORT = range(160, 165)  # fields in addition to those of zygote_protocol.py
CONFINED, SCOPED, ZYGOTE_OPENS_TERMINALS, ADJUST_OOM_SCORE, EGRESS = 1, 2, 4, 8, 16  # FLAGS

IDLE_S = 30.0  # until it exits without pods and connections
UNCLAIMED_S = 60.0  # for a new pod to be claimed; its creator may have been killed
DEADLINE_S = 5.0  # for killed processes to end
FILES, PROCESSES = 65_536, 4_096  # limits of one process, and of a user that only one pod has
ReplyFields = list[tuple[int, protocol.Value]]


@dataclass
class DirectoryPodProcess:
    """A created pod: its guest init, our channel to it, its connect broker, and its control groups."""

    pid: int
    channel: socket.socket
    broker: int = 0
    groups: list[str] = field(default_factory=list)
    alive: bool = True


class LandlockZygote:
    """Handles requests one by one; every one of them is short."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.pods: dict[bytes, DirectoryPodProcess] = {}
        self.channels: dict[int, DirectoryPodProcess] = {}
        self.connections: dict[int, tuple[socket.socket, protocol.FrameDecoder, list[int]]] = {}
        self.poll = select.poll()
        self.running = True
        self.handlers: dict[int, Callable[[protocol.Fields, list[int]], ReplyFields]] = {
            zygote_protocol.CREATE: self.create,
            zygote_protocol.KILL: self.kill,
            zygote_protocol.STATUS: self.status,
            zygote_protocol.STOP: self.stop,
        }

    def serve(self) -> None:
        wake_r, wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self.on_sigterm)
        for fd in (self.listener.fileno(), wake_r):
            self.poll.register(fd, select.POLLIN)
        idle_since = time.monotonic()
        while self.running:
            if self.pods or self.connections:
                idle_since = time.monotonic()
            elif time.monotonic() - idle_since > IDLE_S:
                break
            for fd, _ in self.poll.poll(1000):
                if fd == wake_r:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake_r, 512)
                    self.reap()
                elif fd == self.listener.fileno():
                    self.accept()
                elif fd in self.channels:
                    self.handle_guest(fd, self.channels[fd])
                elif fd in self.connections and not self.handle_requests(*self.connections[fd]):
                    self.poll.unregister(fd)
                    sock, _, pending = self.connections.pop(fd)
                    sock.close()
                    close_all(pending)
        for name in list(self.pods):
            self.remove(name)

    def on_sigterm(self, *_: object) -> None:
        self.running = False

    def accept(self) -> None:
        sock, _ = self.listener.accept()
        self.connections[sock.fileno()] = (sock, protocol.FrameDecoder(), [])
        self.poll.register(sock.fileno(), select.POLLIN)

    def handle_requests(self, sock: socket.socket, decoder: protocol.FrameDecoder, pending: list[int]) -> bool:
        try:
            received, fds, _, _ = socket.recv_fds(sock, 1 << 18, 8)
            pending += fds
            if not received:
                return False
            for op, call, fields in decoder.feed(received):
                wanted = (
                    0
                    if op != zygote_protocol.CREATE
                    else 2
                    if protocol.number(fields, zygote_protocol.FLAGS) & EGRESS
                    else 1
                )
                descriptors, pending[:wanted] = pending[:wanted], []
                sock.sendall(self.dispatch(op, call, fields, descriptors))
        except (protocol.WireError, OSError):
            return False
        return True

    def dispatch(self, op: int, call: int, fields: protocol.Fields, descriptors: list[int]) -> bytes:
        try:
            if op not in self.handlers:
                raise OSError(errno.ENOSYS, f"unknown request {op}")
            return protocol.frame(protocol.OK, call, *self.handlers[op](fields, descriptors))
        except (OSError, ValueError) as error:
            number = getattr(error, "errno", None) or errno.EINVAL
            return protocol.frame(protocol.FAIL, call, (protocol.NUMBER, number), (protocol.DATA, str(error).encode()))
        finally:
            close_all(descriptors)

    # ------------------------------------------------------------------------------------------- requests

    def create(self, fields: protocol.Fields, descriptors: list[int]) -> ReplyFields:
        name = protocol.data(fields, zygote_protocol.ID)
        if name in self.pods or not descriptors:
            raise ValueError(f"pod {name.decode()} exists already, or no socket came with it")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        near, far = socket.socketpair()  # between the guest init and its broker
        sync_r, sync_w = os.pipe2(os.O_CLOEXEC)
        parent = os.getpid()
        pod = DirectoryPodProcess(
            0, ours, groups=[os.path.dirname(os.fsdecode(file)) for file in fields.get(zygote_protocol.CGROUP, [])]
        )
        try:
            pod.pid = os.fork()
            if pod.pid == 0:
                run_pod(fields, descriptors, theirs, near, sync_r, sync_w, parent)  # never returns
            if protocol.number(fields, zygote_protocol.FLAGS) & EGRESS:
                pod.broker = os.fork()
                if pod.broker == 0:
                    run_broker(fields, far, parent)  # never returns
            # Not the broker, which the pod's limits must not starve.
            for file in fields.get(zygote_protocol.CGROUP, []):
                write(os.fsdecode(file), b"%d" % pod.pid)
            os.write(sync_w, b"g")
        except OSError:
            self.end(pod)
            raise
        finally:
            close_all([sync_r, sync_w])
            for sock in (theirs, near, far):
                sock.close()
        self.pods[name] = self.channels[ours.fileno()] = pod
        self.poll.register(ours.fileno(), select.POLLIN)
        return [(zygote_protocol.PID, pod.pid)]

    def kill(self, fields: protocol.Fields, _: list[int]) -> ReplyFields:
        self.remove(protocol.data(fields, zygote_protocol.ID))
        return []

    def status(self, _: protocol.Fields, __: list[int]) -> ReplyFields:
        self.reap()
        return [(zygote_protocol.ID, name) for name, pod in self.pods.items() if pod.alive]

    def stop(self, _: protocol.Fields, __: list[int]) -> ReplyFields:
        self.running = False
        for name in list(self.pods):
            self.remove(name)
        return []

    # ------------------------------------------------------------------------------------------- guest requests

    def handle_guest(self, fd: int, pod: DirectoryPodProcess) -> None:
        """Handle a request of a guest init, which has no access to /proc and terminals.

        `p` counts its processes, `k` kills them, `t` opens a terminal.
        """
        try:
            request = pod.channel.recv(1, socket.MSG_DONTWAIT)
            if request == b"t":
                pair = os.openpty()
                try:
                    socket.send_fds(pod.channel, [b"t"], pair, socket.MSG_DONTWAIT)
                finally:
                    close_all(pair)
            elif request:
                found = kill_descendants(pod.pid) if request == b"k" else len(list(live_descendants(pod.pid)))
                pod.channel.send(struct.pack("=I", found), socket.MSG_DONTWAIT)
            else:
                self.close_channel(fd)
        except BlockingIOError:
            return
        except OSError:
            self.close_channel(fd)

    def close_channel(self, fd: int) -> None:
        if pod := self.channels.pop(fd, None):
            self.poll.unregister(fd)
            pod.channel.close()

    # ------------------------------------------------------------------------------------------- ending pods

    def remove(self, name: bytes) -> None:
        """End a pod and forget it; a no-op for an unknown pod."""
        if pod := self.pods.pop(name, None):
            self.close_channel(pod.channel.fileno())
            self.end(pod)

    def end(self, pod: DirectoryPodProcess) -> None:
        for group in pod.groups:
            # Kills all at once, including processes being forked or frozen, where the kernel has it (v2, 5.14).
            with contextlib.suppress(OSError):
                write(f"{group}/cgroup.kill", b"1")
        for pid in filter(None, (pod.pid if pod.alive else 0, pod.broker)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        pod.alive, pod.broker = False, 0
        self.kill_strays()

    def reap(self) -> None:
        """Reap ended guest inits and kill the programs they left to us. A pod stays known until it is killed."""
        for pod in self.pods.values():
            if pod.broker and os.waitpid(pod.broker, os.WNOHANG)[0]:
                pod.broker = 0
            if pod.alive and os.waitpid(pod.pid, os.WNOHANG)[0]:
                pod.alive = False
        try:
            self.kill_strays()
        except OSError as error:  # retried with the next SIGCHLD; must not affect the other pods
            os.write(2, f"{error}\n".encode())

    def kill_strays(self) -> None:
        kill_children({pid for pod in self.pods.values() for pid in (pod.pid if pod.alive else 0, pod.broker)})


def close_all(descriptors: Sequence[int]) -> None:
    for fd in descriptors:
        os.close(fd)


def live_descendants(root: int) -> Iterator[int]:
    return (pid for pid in processes.descendants(root) if not processes.is_zombie(pid))


def kill_descendants(root: int) -> int:
    """Kill all descendants of `root`; return how many are left at the deadline, normally 0."""
    deadline = time.monotonic() + DEADLINE_S
    while found := list(live_descendants(root)):
        if time.monotonic() > deadline:
            break
        kill_pids(found)
    return len(found)


def kill_children(kept: set[int]) -> None:
    """Kill and reap our children that are not in `kept`, with their descendants, until there are none."""
    deadline = time.monotonic() + DEADLINE_S
    while strays := [pid for pid in list_children() if pid not in kept]:
        if time.monotonic() > deadline:
            raise OSError(errno.EBUSY, f"processes {strays[:8]} of an ended pod could not be killed")
        for pid in strays:
            kill_pids([pid, *processes.descendants(pid)])
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def list_children() -> list[int]:
    me = os.getpid()
    with open(f"/proc/{me}/task/{me}/children", "rb") as file:
        return [int(pid) for pid in file.read().split()]


def kill_pids(pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


# ------------------------------------------------------------------------------------------------- inside a new pod


class LandlockGuestInit(init.GuestInit):
    """A guest init that asks the zygote to do what it is not permitted to do itself."""

    def __init__(
        self, listener: socket.socket, egress_sockets: Sequence[int], fields: protocol.Fields, channel: socket.socket
    ) -> None:
        self.flags = protocol.number(fields, zygote_protocol.FLAGS)
        workdir = os.fsdecode(protocol.data(fields, zygote_protocol.WORKDIR))
        super().__init__(listener, egress_sockets, workdir, bool(self.flags & ADJUST_OOM_SCORE))
        self.channel = channel
        self.deadline = time.monotonic() + UNCLAIMED_S
        self.handlers[protocol.PROCESSES] = lambda peer, call, _: self.ok(
            peer, call, (protocol.SIZE, self.ask_zygote(b"p"))
        )
        if self.flags & ZYGOTE_OPENS_TERMINALS:
            # Forbidden for this process, because /dev/pts also contains the terminals of its user.
            os.openpty = self.open_terminal

    def ask_zygote(self, what: bytes) -> int:
        self.channel.send(what)
        return int(struct.unpack("=I", self.channel.recv(4))[0])

    def open_terminal(self) -> tuple[int, int]:
        self.channel.send(b"t")
        _, (master, slave), _, _ = socket.recv_fds(self.channel, 1, 2)
        for fd in (master, slave):
            os.set_inheritable(fd, False)
        return master, slave

    def kill_all(self, peer: init.Peer, call: int, _: protocol.Fields) -> None:
        left = self.ask_zygote(b"k")
        self.reap()
        if left:
            raise OSError(errno.EBUSY, f"{left} processes could not be killed")
        self.ok(peer, call)


def run_pod(
    fields: protocol.Fields,
    descriptors: list[int],
    channel: socket.socket,
    broker: socket.socket,
    sync_r: int,
    sync_w: int,
    parent: int,
) -> None:
    """Run the child: wait until it is in its groups, confine itself, serve as guest init; never returns."""
    code = 1
    sock = socket.socket(fileno=os.dup(descriptors[0]))
    try:
        os.close(sync_w)
        if os.read(sync_r, 1) != b"g":
            os._exit(1)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            os.setsid()
            close_others(sorted({sock.fileno(), channel.fileno(), broker.fileno(), *descriptors[1:]}))
            set_rlimits(protocol.number(fields, zygote_protocol.OWNER, -1))
            become_user(protocol.number(fields, zygote_protocol.OWNER, -1))
            linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)  # after the user changed, which clears it
            linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
            if os.getppid() != parent:
                os._exit(1)
            os.chdir(os.fsdecode(protocol.data(fields, zygote_protocol.WORKDIR)))
            os.umask(0o022)
            if protocol.number(fields, zygote_protocol.FLAGS) & CONFINED:
                confine(fields, broker)
        except OSError as error:
            report_failure(sock, error)
            os._exit(1)
        broker.close()
        LandlockGuestInit(sock, descriptors[1:], fields, channel).serve()
        code = 0
    except Exception:  # the child of a fork must never return into its parent's code
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def run_broker(fields: protocol.Fields, channel: socket.socket, parent: int) -> None:
    """Run a pod's connect broker; never returns."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        close_others([channel.fileno()])
        seccomp_notify.run_broker(
            channel, protocol.number(fields, PORT), protocol.number(fields, zygote_protocol.OWNER, -1), parent
        )
    finally:
        os._exit(1)


def set_rlimits(user: int) -> None:
    """Set limits against accidents. They hold per process or per user, so they are no guarantee for a pod."""
    wanted = {resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: FILES, resource.RLIMIT_MSGQUEUE: 0}
    if user >= 0:
        wanted[resource.RLIMIT_NPROC] = PROCESSES  # counted per user: only where the pod has its own
    for kind, limit in wanted.items():
        soft, hard = resource.getrlimit(kind)
        top = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (top if soft == resource.RLIM_INFINITY else min(soft, top), top))


def become_user(user: int) -> None:
    """Become a pod's own user, without groups; this drops the capabilities of root."""
    if user >= 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)


def confine(fields: protocol.Fields, broker: socket.socket) -> None:
    """Restrict this process irreversibly; the pod's programs inherit the restrictions."""
    flags = protocol.number(fields, zygote_protocol.FLAGS)
    # Not dumpable: the programs have our user, and must not trace us or open our memory.
    linux.prctl(linux.PR_SET_DUMPABLE, 0)
    # The bounding set stays, because cutting it may be forbidden: with no-new-privileges it grants nothing.
    capabilities.drop((), bounding=False)
    home = os.fsdecode(protocol.data(fields, zygote_protocol.PATH))
    ruleset.restrict(
        get_paths(fields, READ),
        [home, *get_paths(fields, WRITE)],
        [home, *get_paths(fields, EXECUTE)],
        connect_ports=() if flags & EGRESS else None,
        scope=bool(flags & SCOPED),
    )
    listener = seccomp_notify.install(protocol.data(fields, NOTIFY_FILTER), bool(flags & EGRESS))
    if flags & EGRESS:
        socket.send_fds(broker, [b"n"], [listener])
        os.close(listener)
    seccomp.install(protocol.data(fields, zygote_protocol.FILTER))
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)  # again: dropping capabilities may have cleared it


def check_confinement(inside: str, outside: str, allowed: Sequence[str], filters: Sequence[bytes]) -> str:
    """Confine this process irreversibly and test the confinement, for a probe; return the problem, or ""."""
    try:
        list_children()
    except OSError:
        return "the kernel does not list the children of a process (CONFIG_PROC_CHILDREN)"
    try:
        capabilities.drop((), bounding=False)
        ruleset.restrict((), [inside], allowed, scope=ruleset.abi() >= 6)
        for program in filters:
            seccomp.install(program)
    except OSError as error:
        return str(error)
    for path in (inside, outside):
        try:
            with open(path, "rb") as file:
                file.read(1)
            reached = True
        except OSError as error:
            if error.errno != errno.EACCES:
                return f"a file could not be opened, but not because it is forbidden: {error.strerror}"
            reached = False
        if reached != (path == inside):
            return "a forbidden file could be read" if reached else "an allowed file could not be read"
    return ""


def get_paths(fields: protocol.Fields, key: int) -> list[str]:
    return [os.fsdecode(path) for path in fields.get(key, [])]


# ------------------------------------------------------------------------------------------------- starting


def main(state: str, descriptor: int) -> None:
    """Run as the zygote of a state directory, on a listening socket."""
    listener = socket.socket(fileno=descriptor)
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.close(null)
    listener.setblocking(True)
    os.umask(0o077)
    os.chdir(state)
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    gc.collect()
    gc.freeze()  # pods share these pages until they are written to
    gc.disable()
    guard = os.getpid()
    worker = os.fork()
    if worker == 0:
        linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() == guard:
            LandlockZygote(listener).serve()
        os._exit(0)
    listener.close()  # no client may reach a zygote that has no worker
    # The guard holds the lock until no process of any pod is left.
    signal.signal(signal.SIGTERM, lambda *_: os.kill(worker, signal.SIGTERM))
    os.waitpid(worker, 0)
    kill_children(set())
