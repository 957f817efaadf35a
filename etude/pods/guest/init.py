"""The tool server inside a pod: PID 1 there, answering the frames of `protocol.py` on a listening socket.

Single-threaded and small. It is forked, never exec'd, inside the pod's namespaces, and cannot import anything once
the root has changed: standard library only, all of it loaded at the top. It runs untrusted programs but never
trusts them: what they are given are pipes, a session of their own and nothing else. It must never block on them.
"""

import contextlib
import encodings.idna  # codecs are looked up by name: load what may be needed before the root changes
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
from etude.pods.guest.files import Files
from etude.pods.guest.processes import find_user, kill_everything, kill_group, other_processes

HIGH_WATER = 4 << 20  # bytes not yet taken by a peer at which its jobs' output is left in their pipes
DRAIN = 1 << 20  # bytes read from a pipe after its process ended; a survivor may go on writing for ever
READ_SIZE = 1 << 16
INPUT_ROOM = 1 << 20  # bytes a job has not read yet at which INPUT is no longer answered at once
UNOWNED_S = 60.0  # a pod that nobody has taken by then was made for a service that is dead
PATIENCE = 3600.0  # seconds; the kernel's timer ends at 24 days, a deadline need not


class Job:
    """A command somebody started, and the descriptors that lead to it."""

    def __init__(self, peer: "Peer", call: int, limit: int) -> None:
        self.peer, self.call, self.limit = peer, call, limit
        self.pid = 0
        self.outputs: dict[int, int] = {}  # descriptor -> protocol.OUT or protocol.ERR
        self.sent = {protocol.OUT: 0, protocol.ERR: 0}
        self.stdin = -1
        self.stdin_closing = False
        self.pending = bytearray()  # input that the pipe has not taken
        self.unanswered: list[int] = []  # calls of INPUT that wait for it to be taken
        self.terminal = -1
        self.hung = False  # every program closed the terminal
        self.flags = 0
        self.started = time.monotonic()
        self.deadline = 0.0


class Peer:
    """One connection."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.splitter = protocol.Splitter()
        self.queue = bytearray()
        self.jobs: dict[int, Job] = {}
        self.stalled = False


class Agent(Files):
    """Serve until told to end, until the owner goes, or until the time to live is over."""

    def __init__(self, listener: socket.socket, carried: Sequence[int], workdir: str, mark_children: bool) -> None:
        self.listener, self.carried, self.workdir = listener, list(carried), workdir
        self.mark_children = mark_children
        self.deadline = time.monotonic() + UNOWNED_S
        self.owner: Peer | None = None
        self.peers: dict[int, Peer] = {}
        self.jobs: dict[int, Job] = {}  # by pid
        self.pipes: dict[int, Job] = {}  # by descriptor
        self.epoll = select.epoll()
        self.null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        self.running = True
        self.proc_device = os.stat("/proc").st_dev if os.path.isdir("/proc/1") else -1
        self.self_prefix = f"/proc/{os.getpid()}/"
        self.answers: dict[int, Callable[[Peer, int, protocol.Fields], None]] = {
            protocol.PING: lambda peer, call, _: self.ok(peer, call),
            protocol.SPAWN: self.spawn,
            protocol.INPUT: self.give_input,
            protocol.SIGNAL: self.send_signal,
            protocol.RESIZE: self.resize,
            protocol.READ: self.read,
            protocol.WRITE: self.write,
            protocol.LIST: self.list_directory,
            protocol.STAT: self.stat_path,
            protocol.REMOVE: self.remove,
            protocol.MKDIR: self.make_directory,
            protocol.SYMLINK: self.make_link,
            protocol.OWN: self.own,
            protocol.PROCESSES: lambda peer, call, _: self.ok(peer, call, (protocol.SIZE, len(other_processes()))),
            protocol.KILLALL: self.kill_all,
        }

    # ------------------------------------------------------------------------------------------- the loop

    def serve(self) -> None:
        """Wait, answer, reap; one turn per wake-up."""
        wake_r, wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.listener.setblocking(False)
        self.epoll.register(self.listener.fileno(), select.EPOLLIN)
        self.epoll.register(wake_r, select.EPOLLIN)
        while self.running:
            for fd, event in self.epoll.poll(self.patience()):
                if fd == wake_r:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake_r, 512)
                elif fd == self.listener.fileno():
                    self.accept()
                elif fd in self.peers:
                    self.exchange(self.peers[fd], event)
                elif fd in self.pipes:
                    self.move_pipe(fd, self.pipes[fd], event)
            self.reap()
            self.expire()

    def patience(self) -> float:
        """Seconds until a deadline, or -1."""
        ends = [job.deadline for job in self.jobs.values() if job.deadline]
        if self.deadline:
            ends.append(self.deadline)
        return min(PATIENCE, max(0.0, min(ends) - time.monotonic()) + 0.001) if ends else -1

    def expire(self) -> None:
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
            # The sockets opened for egress travel with the greeting, so that whoever takes the pod over can carry them.
            socket.send_fds(sock, [hello], self.carried)
        except OSError:  # it is gone already
            sock.close()
            return
        self.peers[sock.fileno()] = peer
        self.epoll.register(sock.fileno(), select.EPOLLIN)

    def exchange(self, peer: Peer, event: int) -> None:
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
            self.part(peer)
            return
        try:
            for op, call, fields in peer.splitter.feed(received):
                self.answer(peer, op, call, fields)
        except protocol.WireError:
            self.part(peer)

    def answer(self, peer: Peer, op: int, call: int, fields: protocol.Fields) -> None:
        act = self.answers.get(op)
        try:
            if act is None:
                raise OSError(errno.ENOSYS, f"unknown request {op}")
            act(peer, call, fields)
        except OSError as error:
            where = f"{error.filename!r}: " if error.filename else ""
            text = where + (error.strerror or os.strerror(error.errno or errno.EIO))
            self.fail(peer, call, error.errno or errno.EIO, text)
        except protocol.WireError:
            raise
        except Exception as error:  # a number too large, a table that makes no sense: no request may end the agent
            self.fail(peer, call, errno.EINVAL, f"{type(error).__name__}: {error}")

    def part(self, peer: Peer) -> None:
        """A connection ended: so do the jobs nobody can hear any more, and the pod if this was its owner."""
        fd = peer.sock.fileno()
        if fd in self.peers:
            del self.peers[fd]
            self.epoll.unregister(fd)
        for job in list(peer.jobs.values()):
            kill_group(job.pid, signal.SIGKILL)
            self.forget_pipes(job)
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
                peer.queue.clear()  # the reading side will see the end
                return
        fd = peer.sock.fileno()
        if fd in self.peers:
            self.epoll.modify(fd, select.EPOLLIN | (select.EPOLLOUT if peer.queue else 0))
        stalled = len(peer.queue) > HIGH_WATER
        if stalled != peer.stalled:
            peer.stalled = stalled
            for job in peer.jobs.values():
                for pipe in () if job.hung else job.outputs:
                    waiting = select.EPOLLOUT if pipe == job.terminal and job.pending else 0
                    self.epoll.modify(pipe, waiting | (0 if stalled else select.EPOLLIN))

    # ------------------------------------------------------------------------------------------- commands

    def spawn(self, peer: Peer, call: int, fields: protocol.Fields) -> None:
        argv = [os.fsdecode(a) for a in fields.get(protocol.ARG, [])]
        env = dict(e.split(b"=", 1) for e in fields.get(protocol.ENV, []) if b"=" in e)
        flags, given = protocol.number(fields, protocol.FLAGS), protocol.data(fields, protocol.DATA)
        job = Job(peer, call, protocol.number(fields, protocol.LIMIT))
        theirs: list[int] = []
        try:
            if protocol.ROWS in fields:
                master, slave = os.openpty()
                theirs.append(slave)
                job.terminal = job.stdin = master
                set_size(master, protocol.number(fields, protocol.ROWS), protocol.number(fields, protocol.COLS))
                stdin = stdout = stderr = slave
                job.outputs[master] = protocol.OUT
            else:
                stdin, stdout, stderr = self.open_pipes(job, theirs, bool(given or flags & protocol.KEEP_STDIN))
            job.pid = self.start(argv, env, fields, stdin, stdout, stderr, job.terminal >= 0)
        except BaseException:
            for fd in {*job.outputs, job.stdin} - {-1}:
                os.close(fd)
            raise
        finally:
            for fd in theirs:
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
            job.pending += given
            job.stdin_closing = not flags & protocol.KEEP_STDIN
            self.feed(job)

    def open_pipes(self, job: Job, theirs: list[int], wants_input: bool) -> tuple[int, int, int]:
        stdin = self.null
        if wants_input:
            stdin, job.stdin = os.pipe2(os.O_CLOEXEC)
            theirs.append(stdin)
        ends = []
        for kind in (protocol.OUT, protocol.ERR):
            ours, end = os.pipe2(os.O_CLOEXEC)
            job.outputs[ours] = kind
            theirs.append(end)
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
        """Start the program in a session of its own; by vfork where nothing has to be done between."""
        user = os.fsdecode(protocol.data(fields, protocol.USER))
        who = find_user(user) if user else None
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
            user=who[0] if who else None,
            group=who[1] if who else None,
            extra_groups=who[2] if who else None,
            umask=0o022,
            preexec_fn=take_terminal if terminal else None,
        )
        process.returncode = 0  # we reap by wait4(-1); Popen must neither wait nor warn
        if self.mark_children:
            # When memory runs out the kernel must choose a program, not the agent. Children inherit the mark.
            with contextlib.suppress(OSError), open(f"/proc/{process.pid}/oom_score_adj", "w") as file:
                file.write("1000")
        return process.pid

    def give_input(self, peer: Peer, call: int, fields: protocol.Fields) -> None:
        job = self.job_of(peer, fields)
        if job.stdin < 0:
            raise OSError(errno.EPIPE, "its standard input is closed")
        job.pending += protocol.data(fields, protocol.DATA)
        if protocol.number(fields, protocol.FLAGS) & protocol.END:
            if job.terminal >= 0:
                job.pending += b"\x04"
            else:
                job.stdin_closing = True
        job.unanswered.append(call)
        self.feed(job)

    def send_signal(self, peer: Peer, call: int, fields: protocol.Fields) -> None:
        job = self.job_of(peer, fields)
        os.killpg(job.pid, protocol.number(fields, protocol.NUMBER))
        self.ok(peer, call)

    def resize(self, peer: Peer, call: int, fields: protocol.Fields) -> None:
        job = self.job_of(peer, fields)
        if job.terminal < 0:
            raise OSError(errno.ENOTTY, "it has no terminal")
        set_size(job.terminal, protocol.number(fields, protocol.ROWS), protocol.number(fields, protocol.COLS))
        self.ok(peer, call)

    def job_of(self, peer: Peer, fields: protocol.Fields) -> Job:
        job = peer.jobs.get(protocol.number(fields, protocol.JOB))
        if job is None:
            raise OSError(errno.ESRCH, "no such job, or it has ended")
        return job

    def feed(self, job: Job) -> None:
        """Give a job what it will take of its input; wait for room for the rest, and let the giver wait too."""
        while job.pending and job.stdin >= 0:
            try:
                del job.pending[: os.write(job.stdin, job.pending)]
            except BlockingIOError:
                break
            except OSError:  # it closed its end: the rest is of no use
                job.pending.clear()
                job.stdin_closing = job.terminal < 0
        if len(job.pending) <= INPUT_ROOM:
            self.answer_input(job)
        fd = job.stdin
        if fd < 0:
            return
        waiting = select.EPOLLOUT if job.pending else 0
        if job.hung:
            job.pending.clear()
        elif job.terminal >= 0:
            self.epoll.modify(fd, waiting | (0 if job.peer.stalled else select.EPOLLIN))
        elif not job.pending and job.stdin_closing:
            self.forget_pipe(job, fd)
        else:
            try:
                self.epoll.modify(fd, waiting)
            except FileNotFoundError:
                self.epoll.register(fd, waiting)

    def answer_input(self, job: Job) -> None:
        for call in job.unanswered:
            self.ok(job.peer, call)
        job.unanswered.clear()

    def move_pipe(self, fd: int, job: Job, event: int) -> None:
        if event & select.EPOLLOUT or (fd == job.stdin and fd not in job.outputs):
            if event & select.EPOLLERR and not event & select.EPOLLOUT:
                job.pending.clear()
                self.forget_pipe(job, fd)
                return
            self.feed(job)
        readable = event & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR)
        if fd in job.outputs and readable and self.take(job, fd, READ_SIZE) == 0:
            if fd == job.terminal and job.pid in self.jobs:
                self.silence(job)
            else:
                self.forget_pipe(job, fd)

    def silence(self, job: Job) -> None:
        """Nobody has the terminal open now. Closing our end would hang up on a program that is only ending: it
        stays, unwatched, until the job is over."""
        with contextlib.suppress(FileNotFoundError):
            self.epoll.unregister(job.terminal)
        job.pending.clear()
        self.answer_input(job)
        job.hung = True

    def take(self, job: Job, fd: int, size: int) -> int:
        """Read once and pass it on; 0 at the end, -1 when there is nothing now."""
        try:
            received = os.read(fd, size)
        except BlockingIOError:
            return -1
        except OSError:  # EIO: the last holder of a terminal closed it
            return 0
        kind = job.outputs[fd]
        room = len(received) if not job.limit else max(0, job.limit - job.sent[kind])
        if len(received) > room:
            job.flags |= protocol.TRUNCATED
        if kept := received[:room]:
            job.sent[kind] += len(kept)
            self.send(job.peer, kind, job.call, (protocol.DATA, kept))
        return len(received)

    def forget_pipe(self, job: Job, fd: int) -> None:
        if self.pipes.pop(fd, None) is None:
            return
        with contextlib.suppress(FileNotFoundError):
            self.epoll.unregister(fd)
        job.outputs.pop(fd, None)
        if fd == job.stdin:
            job.stdin = -1
            self.answer_input(job)
        if fd == job.terminal:
            job.terminal = -1
        os.close(fd)

    def forget_pipes(self, job: Job) -> None:
        for fd in {*job.outputs, job.stdin} - {-1}:
            self.forget_pipe(job, fd)

    def reap(self) -> None:
        """Wait for everything that ended: our jobs, and orphans, which would otherwise fill the pod with zombies."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if job := self.jobs.pop(pid, None):
                self.finish(job, status, usage.ru_utime, usage.ru_stime, usage.ru_maxrss)

    def finish(self, job: Job, status: int, user: float, system: float, rss: int) -> None:
        """The main process ended; take what is in the pipes already and report. Nobody waits for survivors."""
        for fd in list(job.outputs):
            taken = 0
            while taken < DRAIN and (size := self.take(job, fd, READ_SIZE)) > 0:
                taken += size
        self.forget_pipes(job)
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

    def own(self, peer: Peer, call: int, fields: protocol.Fields) -> None:
        self.owner = peer if protocol.number(fields, protocol.FLAGS) & protocol.ATTACHED else None
        limit = protocol.number(fields, protocol.TIME)
        self.deadline = time.monotonic() + limit / 1000 if limit else 0.0
        self.ok(peer, call)

    def kill_all(self, peer: Peer, call: int, _: protocol.Fields) -> None:
        deadline = time.monotonic() + 5
        while other_processes() and time.monotonic() < deadline:  # one sweep can miss a fork in flight
            kill_everything()
            self.reap()
        self.ok(peer, call)


def set_size(terminal: int, rows: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows & 0xFFFF, columns & 0xFFFF, 0, 0))
