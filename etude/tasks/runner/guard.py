"""Runs code nobody trusts and says what came of it. Placed in a task's tests/ as it is; standard library only.

The tested code runs in a child, as a user of its own: it cannot read the verifier's files, signal it, or write where
the reward goes. `guarded` returns when every process of the child is dead. What the child wants to tell goes through a
pipe, each message behind a word that the tested code was not told. Where a machine has no other users (pods made
without root) the child stays ours, and the seal that the grader left is what makes a forged reward worthless.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import stat
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

HERE = os.path.dirname(os.path.abspath(__file__))
LOGS = "/logs/verifier"
TESTER = 54321  # user and group of the tested code; nobody else's
OUTPUT = 32 << 10  # bytes of the child's output that are kept
MESSAGES = 64 << 20  # bytes of messages that are read
PATH = os.environ.get("PATH", "/usr/local/bin:/usr/bin:/bin")
Message = dict[str, Any]
Send = Callable[[Message], None]


class Broken(Exception):
    """The verifier cannot do its work: there is no reward, and the agent is not to blame."""


class Outcome:
    """What came out of a child: its messages, the end of its output, how it ended."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.output = b""
        self.errors = b""
        self.timed_out = False
        self.status = -1

    @property
    def text(self) -> str:
        """What it printed, for people."""
        return b"\n".join(part for part in (self.output, self.errors) if part).decode("utf-8", "replace")


def guarded(
    work: Callable[[Send], None],
    *,
    timeout: float,
    cwd: str,
    env: dict[str, str] | None = None,
    stdin: bytes = b"",
    most: int = OUTPUT,
) -> Outcome:
    """Do `work` in a child of another user; when this returns, no process of the child is left.

    `work` is given a function that sends a message to us. It is a copy of this process: what the tested code may not
    know must not have been read before.
    """
    word = os.urandom(24).hex()
    pipes = [os.pipe() for _ in range(3)]
    home = private_directory("home", owner=TESTER)
    given = _input(stdin)
    if not can_switch():
        _adopt_orphans()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _be_tested(work, word, [write for _, write in pipes], given, cwd, env or {}, home)
    for number in (given, *(write for _, write in pipes)):
        os.close(number)
    outcome = Outcome()
    try:
        _listen(outcome, [read for read, _ in pipes], pid, time.monotonic() + timeout, word.encode(), most)
    finally:
        end_all(pid)
        for read, _ in pipes:
            os.close(read)
        shutil.rmtree(home, ignore_errors=True)
    return outcome


def _be_tested(
    work: Callable[[Send], None], word: str, ends: list[int], stdin: int, cwd: str, env: dict[str, str], home: str
) -> NoReturn:
    """The child: give up what can be given up, then work."""
    messages, output, errors = ends
    try:
        os.setsid()
        _prefer_to_be_killed()
        for number, target in ((stdin, 0), (output, 1), (errors, 2)):
            os.dup2(number, target)
        for number in range(3, 256):
            if number != messages:
                with contextlib.suppress(OSError):
                    os.close(number)
        if can_switch():
            _become_tester()
        os.umask(0o022)
        os.environ.clear()
        os.environ.update({"PATH": PATH, "LANG": "C.UTF-8", "HOME": home, "TMPDIR": home, **env})
        os.chdir(cwd)

        def send(message: Message) -> None:
            line = (word + json.dumps(message) + "\n").encode()
            while line:
                line = line[os.write(messages, line) :]

        work(send)
        sys.stdout.flush()
        sys.stderr.flush()
    except FileNotFoundError as error:
        os.write(2, f"{error}\n".encode("utf-8", "replace"))
        os._exit(127)
    except BaseException as error:  # whatever it is, this process must not go on as its parent's copy
        with contextlib.suppress(BaseException):
            os.write(2, f"{type(error).__name__}: {error}\n".encode("utf-8", "replace"))
        os._exit(1)
    os._exit(0)


def can_switch() -> bool:
    """Whether there are other users here. A pod made without root maps one id only."""
    if os.geteuid() != 0:
        return False
    try:
        with open("/proc/self/uid_map") as file:
            return any(int(first) <= TESTER < int(first) + int(count) for first, _, count in map(str.split, file))
    except OSError:
        return True


def _become_tester() -> None:
    os.setgroups([])
    os.setgid(TESTER)
    os.setuid(TESTER)


def _prefer_to_be_killed() -> None:
    """When memory runs out it is the child that goes, not who judges it."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def _input(data: bytes) -> int:
    """A descriptor to read these bytes from, and nothing else."""
    if not data:
        return os.open("/dev/null", os.O_RDONLY)
    directory = private_directory("input")
    with open(os.path.join(directory, "data"), "wb") as file:
        file.write(data)
    number = os.open(file.name, os.O_RDONLY)
    shutil.rmtree(directory)
    return number


def _listen(outcome: Outcome, reads: list[int], pid: int, deadline: float, word: bytes, most: int) -> None:
    """Take what comes until the child ends or its time is over; then what is left in the pipes."""
    _, output, errors = reads
    rest, taken, ended = b"", 0, False
    waiting = set(reads)
    while waiting or not ended:
        if not ended and time.monotonic() > deadline:
            outcome.timed_out = True
            return
        pause = 0.0 if ended else 0.05 if waiting else 0.001
        ready = select.select(list(waiting), [], [], pause)[0]
        if not ready:
            if ended:
                return  # a process it left holds the other ends
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                ended = True
                outcome.status = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
            continue
        for end in ready:
            data = os.read(end, 1 << 16)
            if not data:
                waiting.discard(end)
            elif end == output:
                outcome.output = (outcome.output + data)[-most:]
            elif end == errors:
                outcome.errors = (outcome.errors + data)[-most:]
            elif taken < MESSAGES:
                taken += len(data)
                *lines, rest = (rest + data).split(b"\n")
                outcome.messages += _told(lines, word)


def _told(lines: list[bytes], word: bytes) -> list[Message]:
    found = []
    for line in lines:
        if line.startswith(word):
            with contextlib.suppress(ValueError):
                found.append(json.loads(line[len(word) :]))
    return found


# ------------------------------------------------------------------------------------------------- the end


def end_all(group: int) -> None:
    """Kill every process the tested code has started, whatever session it hid in, and see that none is left."""
    for _ in range(300):
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
        switch = can_switch()
        if switch:
            _kill_as_tester()
        left = _testers() if switch else _descendants()
        for pid in left if not switch else ():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        _reap()
        if not left:
            return
        time.sleep(0.01)
    raise Broken("processes of the tested code cannot be ended")


def _kill_as_tester() -> None:
    """As that user, kill all one may: nothing can be missed between listing and killing."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(OSError):
            _become_tester()
            os.kill(-1, signal.SIGKILL)  # all but this very process
        os._exit(0)
    os.waitpid(pid, 0)


def _adopt_orphans() -> None:
    """Processes whose parent ends become ours, and so can be found."""
    import ctypes

    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _alive() -> dict[int, tuple[int, int]]:
    """Living processes: who owns them, and their parents."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
                if state not in (b"Z", b"X"):
                    found[int(name)] = os.stat(f"/proc/{name}").st_uid, int(parent)
    return found


def _testers() -> list[int]:
    return [pid for pid, (owner, _) in _alive().items() if owner == TESTER]


def _descendants() -> list[int]:
    """Processes below this one."""
    alive, found = _alive(), [os.getpid()]
    for pid in found:  # grows while it is read
        found += [child for child, (_, parent) in alive.items() if parent == pid and child not in found]
    return found[1:]


# ------------------------------------------------------------------------------------------------- files


def private_directory(name: str, owner: int | None = None) -> str:
    """A new directory that nobody had a name for; ours, or the tested code's."""
    for top in ("/", "/var/tmp", "/tmp"):
        path = os.path.join(top, f"{name}-{os.urandom(8).hex()}")
        with contextlib.suppress(OSError):
            os.mkdir(path, 0o755)
            if owner is not None and can_switch():
                os.chown(path, owner, owner)
            return path
    raise Broken("there is no place for a directory")


def restore(suite: str, workspace: str) -> set[str]:
    """Put the files of `suite` at their places in the workspace, through no link; their paths."""
    placed = set()
    for directory, _, files in os.walk(suite):
        for name in files:
            source = os.path.join(directory, name)
            inside = os.path.relpath(source, suite)
            target = os.path.join(workspace, inside)
            _real_directories(workspace, os.path.dirname(inside))
            remove(target)
            shutil.copyfile(source, target)
            os.chmod(target, 0o755 if os.stat(source).st_mode & 0o100 else 0o644)
            placed.add(inside)
    return placed


def remove(path: str) -> bool:
    """Remove a file, a link or a tree; whether there was one."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
        return True
    if os.path.lexists(path):
        os.unlink(path)
        return True
    return False


def _real_directories(workspace: str, inside: str) -> None:
    """Make directories; what stands in their way goes."""
    path = workspace
    for name in [part for part in inside.split("/") if part]:
        path = os.path.join(path, name)
        if os.path.islink(path) or (os.path.lexists(path) and not os.path.isdir(path)):
            os.unlink(path)
        if not os.path.isdir(path):
            os.mkdir(path, 0o755)


def prepare(workspace: str) -> None:
    """No compiled files: one made to fit its source could say something else. And room for new files: directories are
    sticky and ours, so the tested code can write beside what is there, but not over it."""
    for directory, names, files in os.walk(workspace):
        for name in [name for name in names if name == "__pycache__"]:
            remove(os.path.join(directory, name))
            names.remove(name)
        for name in files:
            if name.endswith(".pyc"):
                remove(os.path.join(directory, name))
        with contextlib.suppress(OSError):
            os.chmod(directory, stat.S_ISVTX | 0o777)


def site_packages() -> None:
    """The image's packages, without what runs by itself when Python starts: no sitecustomize, no user's site.

    And without this verifier: a module of the workspace may have the name of one of ours.
    """
    import site

    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != HERE]
    sys.modules.pop("guard", None)
    sys.modules["__main__"] = type(sys)("__main__")
    known = site.venv(site.removeduppaths())
    site.addsitepackages(known or set())
    sys.dont_write_bytecode = True


# ------------------------------------------------------------------------------------------------- the reward


def lock_up() -> str:
    """Close the verifier's files and the reward's directory to the tested code; the seal, if there is one."""
    seal = ""
    path = os.path.join(HERE, ".seal")
    with contextlib.suppress(FileNotFoundError, PermissionError):  # none, or it is not ours: then none is asked for
        with open(path) as file:
            seal = file.read()
        os.unlink(path)
    os.makedirs(LOGS, exist_ok=True)
    for place in (HERE, LOGS):
        with contextlib.suppress(PermissionError):
            os.chmod(place, 0o700)
    return seal


def settle(rewards: dict[str, float], seal: str = "", report: Message | None = None) -> None:
    """Write the reward. Last of all: nothing of the tested code may be running."""
    if report is not None:
        _put("report.json", json.dumps(report, indent=1, sort_keys=True))
    _put("reward.json", json.dumps(rewards))
    if seal:
        _put("seal", seal)


def _put(name: str, text: str) -> None:
    path = os.path.join(LOGS, name)
    remove(path)
    remove(f"{path}.new")
    with open(f"{path}.new", "w") as file:
        file.write(text)
    os.replace(f"{path}.new", path)
