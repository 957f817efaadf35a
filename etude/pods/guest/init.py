"""The guest init: PID 1 of a pod, serving the requests of `protocol.py` on a listening socket.

Single-threaded and small. It is forked, never exec'd, inside the pod's namespaces, and cannot import anything once
the root has changed: standard library only, all of it loaded at the top. The programs it runs are untrusted: each
gets pipes and a session of its own and nothing else, and the guest init must never block on one.
"""

import contextlib
import encodings.idna  # codecs are looked up by name: load those that may be needed before the root changes
import encodings.latin_1  # noqa: F401
import errno
import fcntl
import os
import resource  # noqa: F401  os.wait4 imports it when first called
import select
import signal
import socket
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Sequence

from etude.pods.guest import protocol
from etude.pods.guest.files import FileHandlers
from etude.pods.guest.processes import find_user, kill_everything, kill_group, other_processes

HIGH_WATER = 4 << 20  # unsent bytes of a peer above which its jobs' output stays in their pipes
MAX_DRAIN = 1 << 20  # bytes read from a pipe after its process ended; a background process may write without end
READ_SIZE = 1 << 16
INPUT_HIGH_WATER = 1 << 20  # unread input bytes of a job above which INPUT is acknowledged later
UNCLAIMED_S = 60.0  # a pod not claimed within this time was created for a service that died
MAX_POLL_S = 3600.0  # the kernel's timer is limited to 24 days, a deadline is not


class GuestJob:
    """A running command and its descriptors."""

    def __init__(self, peer: "Peer", call: int, limit: int) -> None:
        self.peer, self.call, self.limit = peer, call, limit
        self.pid = 0
        self.outputs: dict[int, int] = {}  # descriptor -> protocol.OUT or protocol.ERR
        self.sent = {protocol.OUT: 0, protocol.ERR: 0}
        self.stdin = -1
        self.stdin_closing = False
        self.pending = bytearray()  # input not yet written to the pipe
        self.unacknowledged: list[int] = []  # INPUT calls to be answered when it is
        self.terminal = -1
        self.hung_up = False  # no program has the terminal open
        self.flags = 0
        self.started = time.monotonic()
        self.deadline = 0.0


class Peer:
    """One connection."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.decoder = protocol.FrameDecoder()
        self.queue = bytearray()
        self.jobs: dict[int, GuestJob] = {}
        self.stalled = False


class GuestInit(FileHandlers):
    """Serves until its owner disconnects or the time to live is over."""

    def __init__(
        self, listener: socket.socket, egress_sockets: Sequence[int], workdir: str, adjust_oom_score: bool
    ) -> None:
        self.listener, self.egress_sockets, self.workdir = listener, list(egress_sockets), workdir
        self.adjust_oom_score = adjust_oom_score
        self.deadline = time.monotonic() + UNCLAIMED_S
        self.owner: Peer | None = None
        self.peers: dict[int, Peer] = {}
        self.jobs: dict[int, GuestJob] = {}  # by pid
        self.pipes: dict[int, GuestJob] = {}  # by descriptor
        self.epoll = select.epoll()
        self.null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        self.running = True
        self.proc_device = os.stat("/proc").st_dev if os.path.isdir("/proc/1") else -1
        self.self_prefix = f"/proc/{os.getpid()}/"
        self.handlers: dict[int, Callable[[Peer, int, protocol.Fields], None]] = {
            protocol.PING: lambda peer, call, _: self.ok(peer, call),
            protocol.SPAWN: self.spawn,
            protocol.INPUT: self.queue_input,
            protocol.SIGNAL: self.send_signal,
            protocol.RESIZE: self.resize,
            protocol.READ: self.read,
            protocol.WRITE: self.write,
            protocol.LIST: self.list_directory,
            protocol.STAT: self.stat_path,
            protocol.REMOVE: self.remove,
            protocol.MKDIR: self.make_directory,
            protocol.SYMLINK: self.make_link,
            protocol.OWN: self.set_owner,
            protocol.PROCESSES: lambda peer, call, _: self.ok(peer, call, (protocol.SIZE, len(other_processes()))),
            protocol.KILLALL: self.kill_all,
        }

    # ------------------------------------------------------------------------------------------- event loop

    def serve(self) -> None:
        """Run the event loop: handle events, reap children, enforce deadlines."""
        wake_r, wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.listener.setblocking(False)
        self.epoll.register(self.listener.fileno(), select.EPOLLIN)
        self.epoll.register(wake_r, select.EPOLLIN)
        while self.running:
            for fd, event in self.epoll.poll(self.poll_timeout()):
                if fd == wake_r:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake_r, 512)
                elif fd == self.listener.fileno():
                    self.accept()
                elif fd in self.peers:
                    self.on_peer_event(self.peers[fd], event)
                elif fd in self.pipes:
                    self.on_pipe_event(fd, self.pipes[fd], event)
            self.reap()
            self.enforce_deadlines()

    def poll_timeout(self) -> float:
        """Return the seconds until the next deadline, or -1."""
        ends = [job.deadline for job in self.jobs.values() if job.deadline]
        if self.deadline:
            ends.append(self.deadline)
        return min(MAX_POLL_S, max(0.0, min(ends) - time.monotonic()) + 0.001) if ends else -1

    def enforce_deadlines(self) -> None:
        now = time.monotonic()
        if self.deadline and now >= self.deadline:
            self.running = False
        for job in list(self.jobs.values()):
            if job.deadline and now >= job.deadline:
                job.deadline = 0.0
                job.flags |= protocol.TIMED_OUT
                kill_group(job.pid, signal.SIGKILL)

    def accept(self) -> None:
        try:
            sock, _ = self.listener.accept()
        except OSError:
            return
        sock.setblocking(False)
        peer = Peer(sock)
        hello = protocol.frame(
            protocol.HELLO, 0, (protocol.NUMBER, protocol.VERSION), (protocol.PATH, os.fsencode(self.workdir))
        )
        try:
            # HELLO carries the egress sockets, so that a service that adopts the pod can serve them.
            socket.send_fds(sock, [hello], self.egress_sockets)
        except OSError:  # it has already disconnected
            sock.close()
            return
        self.peers[sock.fileno()] = peer
        self.epoll.register(sock.fileno(), select.EPOLLIN)

    def on_peer_event(self, peer: Peer, event: int) -> None:
        if event & select.EPOLLOUT:
            self.flush(peer)
        if not event & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
            return
        try:
            received = peer.sock.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            self.disconnect(peer)
            return
        try:
            for op, call, fields in peer.decoder.feed(received):
                self.dispatch(peer, op, call, fields)
        except protocol.WireError:
            self.disconnect(peer)

    def dispatch(self, peer: Peer, op: int, call: int, fields: protocol.Fields) -> None:
        handler = self.handlers.get(op)
        try:
            if handler is None:
                raise OSError(errno.ENOSYS, f"unknown request {op}")
            handler(peer, call, fields)
        except OSError as error:
            where = f"{error.filename!r}: " if error.filename else ""
            text = where + (error.strerror or os.strerror(error.errno or errno.EIO))
            self.fail(peer, call, error.errno or errno.EIO, text)
        except protocol.WireError:
            raise
        except Exception as error:  # such as a number too large: no request may end the guest init
            self.fail(peer, call, errno.EINVAL, f"{type(error).__name__}: {error}")

    def disconnect(self, peer: Peer) -> None:
        """Close a connection and kill its jobs; end the pod if this was its owner."""
        fd = peer.sock.fileno()
        if fd in self.peers:
            del self.peers[fd]
            self.epoll.unregister(fd)
        for job in list(peer.jobs.values()):
            kill_group(job.pid, signal.SIGKILL)
            self.close_pipes(job)
        peer.sock.close()
        if peer is self.owner:
            self.running = False

    # ------------------------------------------------------------------------------------------- sending

    def send(self, peer: Peer, op: int, call: int, *fields: tuple[int, protocol.Value]) -> None:
        if peer.sock.fileno() < 0:
            return
        peer.queue += protocol.frame(op, call, *fields)
        self.flush(peer)

    def ok(self, peer: Peer, call: int, *fields: tuple[int, protocol.Value]) -> None:
        self.send(peer, protocol.OK, call, *fields)

    def fail(self, peer: Peer, call: int, number: int, text: str) -> None:
        self.send(
            peer, protocol.FAIL, call, (protocol.NUMBER, number), (protocol.DATA, text.encode("utf-8", "replace"))
        )

    def flush(self, peer: Peer) -> None:
        while peer.queue:
            try:
                del peer.queue[: peer.sock.send(peer.queue)]
            except BlockingIOError:
                break
            except OSError:
                peer.queue.clear()  # the next read reports the disconnect
                return
        fd = peer.sock.fileno()
        if fd in self.peers:
            self.epoll.modify(fd, select.EPOLLIN | (select.EPOLLOUT if peer.queue else 0))
        stalled = len(peer.queue) > HIGH_WATER
        if stalled != peer.stalled:
            peer.stalled = stalled
            for job in peer.jobs.values():
                for pipe in () if job.hung_up else job.outputs:
                    waiting = select.EPOLLOUT if pipe == job.terminal and job.pending else 0
                    self.epoll.modify(pipe, waiting | (0 if stalled else select.EPOLLIN))

    # ------------------------------------------------------------------------------------------- commands

    def spawn(self, peer: Peer, call: int, fields: protocol.Fields) -> None:
        argv = [os.fsdecode(a) for a in fields.get(protocol.ARG, [])]
        env = dict(e.split(b"=", 1) for e in fields.get(protocol.ENV, []) if b"=" in e)
        flags, first_input = protocol.number(fields, protocol.FLAGS), protocol.data(fields, protocol.DATA)
        job = GuestJob(peer, call, protocol.number(fields, protocol.LIMIT))
        child_fds: list[int] = []
        try:
            if protocol.ROWS in fields:
                master, slave = os.openpty()
                child_fds.append(slave)
                job.terminal = job.stdin = master
                set_size(master, protocol.number(fields, protocol.ROWS), protocol.number(fields, protocol.COLS))
                stdin = stdout = stderr = slave
                job.outputs[master] = protocol.OUT
            else:
                stdin, stdout, stderr = self.open_pipes(
                    job, child_fds, bool(first_input or flags & protocol.KEEP_STDIN)
                )
            job.pid = self.start(argv, env, fields, stdin, stdout, stderr, job.terminal >= 0)
        except BaseException:
            for fd in {*job.outputs, job.stdin} - {-1}:
                os.close(fd)
            raise
        finally:
            for fd in child_fds:
                os.close(fd)
        for fd in {*job.outputs, job.stdin} - {-1}:
            os.set_blocking(fd, False)
            self.pipes[fd] = job
        for fd in job.outputs:
            self.epoll.register(fd, 0 if peer.stalled else select.EPOLLIN)
        if limit := protocol.number(fields, protocol.TIME):
            job.deadline = job.started + limit / 1000
        self.jobs[job.pid] = peer.jobs[call] = job
        self.send(peer, protocol.STARTED, call, (protocol.PID, job.pid))
        if job.stdin >= 0 and job.terminal < 0:
            job.pending += first_input
            job.stdin_closing = not flags & protocol.KEEP_STDIN
            self.write_input(job)

    def open_pipes(self, job: GuestJob, child_fds: list[int], wants_input: bool) -> tuple[int, int, int]:
        stdin = self.null
        if wants_input:
            stdin, job.stdin = os.pipe2(os.O_CLOEXEC)
            child_fds.append(stdin)
        ends = []
        for kind in (protocol.OUT, protocol.ERR):
            ours, end = os.pipe2(os.O_CLOEXEC)
            job.outputs[ours] = kind
            child_fds.append(end)
            ends.append(end)
        return stdin, ends[0], ends[1]

    def start(
        self,
        argv: list[str],
        env: dict[bytes, bytes],
        fields: protocol.Fields,
        stdin: int,
        stdout: int,
        stderr: int,
        terminal: bool,
    ) -> int:
        """Start the program in a session of its own; by vfork where nothing is to be done before exec."""
        user = os.fsdecode(protocol.data(fields, protocol.USER))
        identity = find_user(user) if user else None
        cwd = os.path.join(self.workdir, os.fsdecode(protocol.data(fields, protocol.CWD)))
        if not os.path.isdir(cwd):
            raise OSError(errno.ENOTDIR, f"the working directory {cwd} is not there")

        def take_terminal() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        process = subprocess.Popen(
            argv,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            cwd=cwd,
            env=env,
            start_new_session=True,
            close_fds=True,
            user=identity[0] if identity else None,
            group=identity[1] if identity else None,
            extra_groups=identity[2] if identity else None,
            umask=0o022,
            preexec_fn=take_terminal if terminal else None,
        )
        process.returncode = 0  # we reap by wait4(-1); Popen must neither wait nor warn
        if self.adjust_oom_score:
            # The OOM killer must choose a program, not the guest init. Children inherit the score.
            with contextlib.suppress(OSError), open(f"/proc/{process.pid}/oom_score_adj", "w") as file:
                file.write("1000")
        return process.pid

    def queue_input(self, peer: Peer, call: int, fields: protocol.Fields) -> None:
        job = self.find_job(peer, fields)
        if job.stdin < 0:
            raise OSError(errno.EPIPE, "its standard input is closed")
        job.pending += protocol.data(fields, protocol.DATA)
        if protocol.number(fields, protocol.FLAGS) & protocol.END:
            if job.terminal >= 0:
                job.pending += b"\x04"
            else:
                job.stdin_closing = True
        job.unacknowledged.append(call)
        self.write_input(job)

    def send_signal(self, peer: Peer, call: int, fields: protocol.Fields) -> None:
        job = self.find_job(peer, fields)
        os.killpg(job.pid, protocol.number(fields, protocol.NUMBER))
        self.ok(peer, call)

    def resize(self, peer: Peer, call: int, fields: protocol.Fields) -> None:
        job = self.find_job(peer, fields)
        if job.terminal < 0:
            raise OSError(errno.ENOTTY, "it has no terminal")
        set_size(job.terminal, protocol.number(fields, protocol.ROWS), protocol.number(fields, protocol.COLS))
        self.ok(peer, call)

    def find_job(self, peer: Peer, fields: protocol.Fields) -> GuestJob:
        job = peer.jobs.get(protocol.number(fields, protocol.JOB))
        if job is None:
            raise OSError(errno.ESRCH, "no such job, or it has ended")
        return job

    def write_input(self, job: GuestJob) -> None:
        """Write as much pending input as the job takes; delay the acknowledgement while much is left."""
        while job.pending and job.stdin >= 0:
            try:
                del job.pending[: os.write(job.stdin, job.pending)]
            except BlockingIOError:
                break
            except OSError:  # it closed its end: discard the rest
                job.pending.clear()
                job.stdin_closing = job.terminal < 0
        if len(job.pending) <= INPUT_HIGH_WATER:
            self.acknowledge_input(job)
        fd = job.stdin
        if fd < 0:
            return
        waiting = select.EPOLLOUT if job.pending else 0
        if job.hung_up:
            job.pending.clear()
        elif job.terminal >= 0:
            self.epoll.modify(fd, waiting | (0 if job.peer.stalled else select.EPOLLIN))
        elif not job.pending and job.stdin_closing:
            self.close_pipe(job, fd)
        else:
            try:
                self.epoll.modify(fd, waiting)
            except FileNotFoundError:
                self.epoll.register(fd, waiting)

    def acknowledge_input(self, job: GuestJob) -> None:
        for call in job.unacknowledged:
            self.ok(job.peer, call)
        job.unacknowledged.clear()

    def on_pipe_event(self, fd: int, job: GuestJob, event: int) -> None:
        if event & select.EPOLLOUT or (fd == job.stdin and fd not in job.outputs):
            if event & select.EPOLLERR and not event & select.EPOLLOUT:
                job.pending.clear()
                self.close_pipe(job, fd)
                return
            self.write_input(job)
        readable = event & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR)
        if fd in job.outputs and readable and self.forward_output(job, fd, READ_SIZE) == 0:
            if fd == job.terminal and job.pid in self.jobs:
                self.on_terminal_hangup(job)
            else:
                self.close_pipe(job, fd)

    def on_terminal_hangup(self, job: GuestJob) -> None:
        """Stop watching a terminal that no program has open. It stays open until the job ends: closing our end would
        send a hangup to a program that is only ending."""
        with contextlib.suppress(FileNotFoundError):
            self.epoll.unregister(job.terminal)
        job.pending.clear()
        self.acknowledge_input(job)
        job.hung_up = True

    def forward_output(self, job: GuestJob, fd: int, size: int) -> int:
        """Read output once and send it; return its size, 0 at end of file, -1 when there is none now."""
        try:
            received = os.read(fd, size)
        except BlockingIOError:
            return -1
        except OSError:  # EIO: the last program closed the terminal
            return 0
        kind = job.outputs[fd]
        room = len(received) if not job.limit else max(0, job.limit - job.sent[kind])
        if len(received) > room:
            job.flags |= protocol.TRUNCATED
        if kept := received[:room]:
            job.sent[kind] += len(kept)
            self.send(job.peer, kind, job.call, (protocol.DATA, kept))
        return len(received)

    def close_pipe(self, job: GuestJob, fd: int) -> None:
        if self.pipes.pop(fd, None) is None:
            return
        with contextlib.suppress(FileNotFoundError):
            self.epoll.unregister(fd)
        job.outputs.pop(fd, None)
        if fd == job.stdin:
            job.stdin = -1
            self.acknowledge_input(job)
        if fd == job.terminal:
            job.terminal = -1
        os.close(fd)

    def close_pipes(self, job: GuestJob) -> None:
        for fd in {*job.outputs, job.stdin} - {-1}:
            self.close_pipe(job, fd)

    def reap(self) -> None:
        """Reap every ended child: our jobs, and orphans, which would otherwise fill the pod with zombies."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if job := self.jobs.pop(pid, None):
                self.finish(job, status, usage.ru_utime, usage.ru_stime, usage.ru_maxrss)

    def finish(self, job: GuestJob, status: int, user: float, system: float, rss: int) -> None:
        """Send what the pipes still hold and EXITED. Background processes of the job are not waited for."""
        for fd in list(job.outputs):
            taken = 0
            while taken < MAX_DRAIN and (size := self.forward_output(job, fd, READ_SIZE)) > 0:
                taken += size
        self.close_pipes(job)
        job.peer.jobs.pop(job.call, None)
        code = os.waitstatus_to_exitcode(status)
        self.send(
            job.peer,
            protocol.EXITED,
            job.call,
            (protocol.CODE, code if code >= 0 else 128 - code),
            (protocol.FLAGS, job.flags),
            (protocol.TIME, int((time.monotonic() - job.started) * 1e6)),
            (protocol.UTIME, int(user * 1e6)),
            (protocol.STIME, int(system * 1e6)),
            (protocol.MAXRSS, rss << 10),
        )

    # ------------------------------------------------------------------------------------------- the pod

    def set_owner(self, peer: Peer, call: int, fields: protocol.Fields) -> None:
        self.owner = peer if protocol.number(fields, protocol.FLAGS) & protocol.ATTACHED else None
        limit = protocol.number(fields, protocol.TIME)
        self.deadline = time.monotonic() + limit / 1000 if limit else 0.0
        self.ok(peer, call)

    def kill_all(self, peer: Peer, call: int, _: protocol.Fields) -> None:
        deadline = time.monotonic() + 5
        while other_processes() and time.monotonic() < deadline:  # one pass can miss a concurrent fork
            kill_everything()
            self.reap()
        self.ok(peer, call)


def set_size(terminal: int, rows: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows & 0xFFFF, columns & 0xFFFF, 0, 0))
