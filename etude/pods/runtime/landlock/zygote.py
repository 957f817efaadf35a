"""The warden: the process that pods without namespaces are forked from, and that nothing of theirs can outlive.

One per state directory and backend. It is two processes: the worker makes pods and answers requests; the guard above
it does nothing but wait. Both are subreapers, and so is every pod's agent, so whatever a program does (fork, setsid,
double fork) it stays below its agent, and falls to the worker when the agent dies: a child of the worker that is not
an agent is a leftover, and is killed with all below it. When the worker itself is killed the guard does the same; when
the guard is, the worker ends everything and goes. The warden has one thread, holds no policy and imports nothing late.

    CREATE  ID PATH(the pod's directory) WORKDIR OWNER(a user of its own) CGROUP* FLAGS      OK PID
            READ* EXECUTE* WRITE* (paths) FILTER FENCE PORT; descriptors: the agent's socket, the gate's
    KILL    ID                                              OK when no process of it is left
    STATUS                                                  OK ID*
    STOP    ends the warden and with it every pod           OK
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

from etude.pods.guest import init as agent
from etude.pods.guest import processes, protocol
from etude.pods.runtime import capabilities, linux, seccomp, zygote_protocol
from etude.pods.runtime.landlock import ruleset, seccomp_notify
from etude.pods.runtime.zygote import close_others, refuse, write

READ, EXECUTE, WRITE, FENCE, PORT = range(160, 165)  # fields beside those of zygote_protocol.py
CONFINED, SCOPED, LENT_TERMINALS, MARKED, CARRIED = 1, 2, 4, 8, 16  # FLAGS

IDLE_S = 30.0  # with nothing to keep and nobody connected
UNCLAIMED_S = 60.0  # for whoever asked for a pod to take it; its maker may have been killed in between
DEADLINE_S = 5.0  # for killed processes to be gone
FILES, PROCESSES = 65_536, 4_096  # of one process, and of one user that is a pod's own
Reply = list[tuple[int, protocol.Value]]


@dataclass
class Held:
    """A pod that was made: its agent, our line to it, its carrier, and its control groups."""

    pid: int
    line: socket.socket
    carrier: int = 0
    groups: list[str] = field(default_factory=list)
    alive: bool = True


class Warden:
    """Answer requests one by one; every one of them is short."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.pods: dict[bytes, Held] = {}
        self.lines: dict[int, Held] = {}
        self.connections: dict[int, tuple[socket.socket, protocol.Splitter, list[int]]] = {}
        self.poll = select.poll()
        self.running = True
        self.answers: dict[int, Callable[[protocol.Fields, list[int]], Reply]] = {
            zygote_protocol.CREATE: self.create,
            zygote_protocol.KILL: self.kill,
            zygote_protocol.STATUS: self.status,
            zygote_protocol.STOP: self.stop,
        }

    def serve(self) -> None:
        wake_r, wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self.quit)
        for fd in (self.listener.fileno(), wake_r):
            self.poll.register(fd, select.POLLIN)
        quiet_since = time.monotonic()
        while self.running:
            if self.pods or self.connections:
                quiet_since = time.monotonic()
            elif time.monotonic() - quiet_since > IDLE_S:
                break
            for fd, _ in self.poll.poll(1000):
                if fd == wake_r:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake_r, 512)
                    self.reap()
                elif fd == self.listener.fileno():
                    self.accept()
                elif fd in self.lines:
                    self.attend(fd, self.lines[fd])
                elif fd in self.connections and not self.exchange(*self.connections[fd]):
                    self.poll.unregister(fd)
                    sock, _, waiting = self.connections.pop(fd)
                    sock.close()
                    close_all(waiting)
        for name in list(self.pods):
            self.finish(name)

    def quit(self, *_: object) -> None:
        self.running = False

    def accept(self) -> None:
        sock, _ = self.listener.accept()
        self.connections[sock.fileno()] = (sock, protocol.Splitter(), [])
        self.poll.register(sock.fileno(), select.POLLIN)

    def exchange(self, sock: socket.socket, splitter: protocol.Splitter, waiting: list[int]) -> bool:
        try:
            received, fds, _, _ = socket.recv_fds(sock, 1 << 18, 8)
            waiting += fds
            if not received:
                return False
            for op, call, fields in splitter.feed(received):
                wanted = (
                    0
                    if op != zygote_protocol.CREATE
                    else 2
                    if protocol.number(fields, zygote_protocol.FLAGS) & CARRIED
                    else 1
                )
                given, waiting[:wanted] = waiting[:wanted], []
                sock.sendall(self.answer(op, call, fields, given))
        except (protocol.WireError, OSError):
            return False
        return True

    def answer(self, op: int, call: int, fields: protocol.Fields, given: list[int]) -> bytes:
        try:
            if op not in self.answers:
                raise OSError(errno.ENOSYS, f"unknown request {op}")
            return protocol.frame(protocol.OK, call, *self.answers[op](fields, given))
        except (OSError, ValueError) as error:
            number = getattr(error, "errno", None) or errno.EINVAL
            return protocol.frame(protocol.FAIL, call, (protocol.NUMBER, number), (protocol.DATA, str(error).encode()))
        finally:
            close_all(given)

    # ------------------------------------------------------------------------------------------- requests

    def create(self, fields: protocol.Fields, given: list[int]) -> Reply:
        name = protocol.data(fields, zygote_protocol.ID)
        if name in self.pods or not given:
            raise ValueError(f"pod {name.decode()} exists already, or no socket came with it")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        near, far = socket.socketpair()  # from the agent to its carrier
        sync_r, sync_w = os.pipe2(os.O_CLOEXEC)
        parent = os.getpid()
        pod = Held(
            0, ours, groups=[os.path.dirname(os.fsdecode(file)) for file in fields.get(zygote_protocol.CGROUP, [])]
        )
        try:
            pod.pid = os.fork()
            if pod.pid == 0:
                be_pod(fields, given, theirs, near, sync_r, sync_w, parent)  # never returns
            if protocol.number(fields, zygote_protocol.FLAGS) & CARRIED:
                pod.carrier = os.fork()
                if pod.carrier == 0:
                    be_carrier(fields, far, parent)  # never returns
            for file in fields.get(
                zygote_protocol.CGROUP, []
            ):  # not the carrier, which the pod's limits must not starve
                write(os.fsdecode(file), b"%d" % pod.pid)
            os.write(sync_w, b"g")
        except OSError:
            self.end(pod)
            raise
        finally:
            close_all([sync_r, sync_w])
            for sock in (theirs, near, far):
                sock.close()
        self.pods[name] = self.lines[ours.fileno()] = pod
        self.poll.register(ours.fileno(), select.POLLIN)
        return [(zygote_protocol.PID, pod.pid)]

    def kill(self, fields: protocol.Fields, _: list[int]) -> Reply:
        self.finish(protocol.data(fields, zygote_protocol.ID))
        return []

    def status(self, _: protocol.Fields, __: list[int]) -> Reply:
        self.reap()
        return [(zygote_protocol.ID, name) for name, pod in self.pods.items() if pod.alive]

    def stop(self, _: protocol.Fields, __: list[int]) -> Reply:
        self.running = False
        for name in list(self.pods):
            self.finish(name)
        return []

    # ------------------------------------------------------------------------------------------- what agents ask

    def attend(self, fd: int, pod: Held) -> None:
        """An agent may not see /proc or open terminals: `p` counts its processes, `k` kills them, `t` opens one."""
        try:
            asked = pod.line.recv(1, socket.MSG_DONTWAIT)
            if asked == b"t":
                pair = os.openpty()
                try:
                    socket.send_fds(pod.line, [b"t"], pair, socket.MSG_DONTWAIT)
                finally:
                    close_all(pair)
            elif asked:
                found = clear_below(pod.pid) if asked == b"k" else len(list(living_below(pod.pid)))
                pod.line.send(struct.pack("=I", found), socket.MSG_DONTWAIT)
            else:
                self.hang_up(fd)
        except BlockingIOError:
            return
        except OSError:
            self.hang_up(fd)

    def hang_up(self, fd: int) -> None:
        if pod := self.lines.pop(fd, None):
            self.poll.unregister(fd)
            pod.line.close()

    # ------------------------------------------------------------------------------------------- ends

    def finish(self, name: bytes) -> None:
        """End a pod and forget it; one that is not known is gone already."""
        if pod := self.pods.pop(name, None):
            self.hang_up(pod.line.fileno())
            self.end(pod)

    def end(self, pod: Held) -> None:
        for group in pod.groups:
            # At once, with those being forked, and thawed if frozen; where the kernel has it (v2, 5.14).
            with contextlib.suppress(OSError):
                write(f"{group}/cgroup.kill", b"1")
        for pid in filter(None, (pod.pid if pod.alive else 0, pod.carrier)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        pod.alive, pod.carrier = False, 0
        self.sweep()

    def reap(self) -> None:
        """An agent that ended leaves its programs to us: they end with it. The pod stays known until it is killed."""
        for pod in self.pods.values():
            if pod.carrier and os.waitpid(pod.carrier, os.WNOHANG)[0]:
                pod.carrier = 0
            if pod.alive and os.waitpid(pod.pid, os.WNOHANG)[0]:
                pod.alive = False
        try:
            self.sweep()
        except OSError as error:  # tried again with the next death; the other pods must not suffer for it
            os.write(2, f"{error}\n".encode())

    def sweep(self) -> None:
        clear_children({pid for pod in self.pods.values() for pid in (pod.pid if pod.alive else 0, pod.carrier)})


def close_all(descriptors: Sequence[int]) -> None:
    for fd in descriptors:
        os.close(fd)


def living_below(root: int) -> Iterator[int]:
    return (pid for pid in processes.descendants(root) if not processes.is_zombie(pid))


def clear_below(root: int) -> int:
    """Kill everything below `root`; how many are left when time is over, which should be none."""
    deadline = time.monotonic() + DEADLINE_S
    while found := list(living_below(root)):
        if time.monotonic() > deadline:
            break
        kill_each(found)
    return len(found)


def clear_children(kept: set[int]) -> None:
    """Kill and reap our children that are not in `kept`, and all below them, until there are none."""
    deadline = time.monotonic() + DEADLINE_S
    while strays := [pid for pid in own_children() if pid not in kept]:
        if time.monotonic() > deadline:
            raise OSError(errno.EBUSY, f"processes {strays[:8]} of a pod that ended do not die")
        for pid in strays:
            kill_each([pid, *processes.descendants(pid)])
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def own_children() -> list[int]:
    me = os.getpid()
    with open(f"/proc/{me}/task/{me}/children", "rb") as file:
        return [int(pid) for pid in file.read().split()]


def kill_each(pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


# ------------------------------------------------------------------------------------------------- inside a new pod


class PodAgent(agent.Agent):
    """An agent that asks the warden for what it cannot do itself."""

    def __init__(
        self, listener: socket.socket, carried: Sequence[int], fields: protocol.Fields, line: socket.socket
    ) -> None:
        self.flags = protocol.number(fields, zygote_protocol.FLAGS)
        workdir = os.fsdecode(protocol.data(fields, zygote_protocol.WORKDIR))
        super().__init__(listener, carried, workdir, bool(self.flags & MARKED))
        self.line = line
        self.deadline = time.monotonic() + UNCLAIMED_S
        self.answers[protocol.PROCESSES] = lambda peer, call, _: self.ok(peer, call, (protocol.SIZE, self.ask(b"p")))
        if self.flags & LENT_TERMINALS:
            # Ruled out for this process: /dev/pts holds the terminals of its user too. The warden opens them for us.
            os.openpty = self.borrow_terminal

    def ask(self, what: bytes) -> int:
        self.line.send(what)
        return int(struct.unpack("=I", self.line.recv(4))[0])

    def borrow_terminal(self) -> tuple[int, int]:
        self.line.send(b"t")
        _, (master, slave), _, _ = socket.recv_fds(self.line, 1, 2)
        for fd in (master, slave):
            os.set_inheritable(fd, False)
        return master, slave

    def kill_all(self, peer: agent.Peer, call: int, _: protocol.Fields) -> None:
        left = self.ask(b"k")
        self.reap()
        if left:
            raise OSError(errno.EBUSY, f"{left} processes do not die")
        self.ok(peer, call)


def be_pod(
    fields: protocol.Fields,
    given: list[int],
    line: socket.socket,
    carrier: socket.socket,
    sync_r: int,
    sync_w: int,
    parent: int,
) -> None:
    """The child's life: wait until it is in its groups, lock itself in, serve; never returns."""
    code = 1
    sock = socket.socket(fileno=os.dup(given[0]))
    try:
        os.close(sync_w)
        if os.read(sync_r, 1) != b"g":
            os._exit(1)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            os.setsid()
            close_others(sorted({sock.fileno(), line.fileno(), carrier.fileno(), *given[1:]}))
            set_limits(protocol.number(fields, zygote_protocol.OWNER, -1))
            become(protocol.number(fields, zygote_protocol.OWNER, -1))
            linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)  # after the user changed, which clears it
            linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
            if os.getppid() != parent:
                os._exit(1)
            os.chdir(os.fsdecode(protocol.data(fields, zygote_protocol.WORKDIR)))
            os.umask(0o022)
            if protocol.number(fields, zygote_protocol.FLAGS) & CONFINED:
                confine(fields, carrier)
        except OSError as error:
            refuse(sock, error)
            os._exit(1)
        carrier.close()
        PodAgent(sock, given[1:], fields, line).serve()
        code = 0
    except Exception:  # the child of a fork must not return into its parent's code, whatever happened
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def be_carrier(fields: protocol.Fields, line: socket.socket, parent: int) -> None:
    """The life of a pod's carrier; never returns."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        close_others([line.fileno()])
        seccomp_notify.be_carrier(
            line, protocol.number(fields, PORT), protocol.number(fields, zygote_protocol.OWNER, -1), parent
        )
    finally:
        os._exit(1)


def set_limits(user: int) -> None:
    """What keeps an accident small. These hold for one process, or for one user: no promise is made of them."""
    wanted = {resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: FILES, resource.RLIMIT_MSGQUEUE: 0}
    if user >= 0:
        wanted[resource.RLIMIT_NPROC] = PROCESSES  # counted by user: only where a pod has one to itself
    for what, most in wanted.items():
        soft, hard = resource.getrlimit(what)
        top = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (top if soft == resource.RLIM_INFINITY else min(soft, top), top))


def become(user: int) -> None:
    """Become a pod's own user, without groups; the capabilities of root go with that."""
    if user >= 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)


def confine(fields: protocol.Fields, carrier: socket.socket) -> None:
    """Give up what programs of the pod must never have; they inherit it. From here on nothing can be undone."""
    flags = protocol.number(fields, zygote_protocol.FLAGS)
    # Not dumpable: programs have our user, and must not trace us or open our memory.
    linux.prctl(linux.PR_SET_DUMPABLE, 0)
    # The bounding set stays where it cannot be cut: with no-new-privileges nothing is gained from it.
    capabilities.drop((), bounding=False)
    home = os.fsdecode(protocol.data(fields, zygote_protocol.PATH))
    ruleset.restrict(
        paths(fields, READ),
        [home, *paths(fields, WRITE)],
        [home, *paths(fields, EXECUTE)],
        connect_ports=() if flags & CARRIED else None,
        scope=bool(flags & SCOPED),
    )
    listener = seccomp_notify.install(protocol.data(fields, FENCE), bool(flags & CARRIED))
    if flags & CARRIED:
        socket.send_fds(carrier, [b"n"], [listener])
        os.close(listener)
    seccomp.install(protocol.data(fields, zygote_protocol.FILTER))
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)  # again: dropping capabilities may have cleared it


def check(inside: str, outside: str, allowed: Sequence[str], filters: Sequence[bytes]) -> str:
    """Lock this process in for good and try the walls, for a probe: what is wrong, or nothing."""
    try:
        own_children()
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
                return f"a file could not be opened, but for another reason: {error.strerror}"
            reached = False
        if reached != (path == inside):
            return "a file that was forbidden could be read" if reached else "a file that was allowed could not be read"
    return ""


def paths(fields: protocol.Fields, key: int) -> list[str]:
    return [os.fsdecode(path) for path in fields.get(key, [])]


# ------------------------------------------------------------------------------------------------- starting


def main(state: str, descriptor: int) -> None:
    """Become the warden of a state directory, on a listening socket."""
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
            Warden(listener).serve()
        os._exit(0)
    listener.close()  # nobody must find a warden that has no worker
    # Ours is the last word: we wait until no process of any pod is left, and only then let go of the lock.
    signal.signal(signal.SIGTERM, lambda *_: os.kill(worker, signal.SIGTERM))
    os.waitpid(worker, 0)
    clear_children(set())
