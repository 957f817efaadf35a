"""Runs submitted code in a child process of another user and returns its results. Standard library only.

The child cannot read the verifier's files, signal the verifier, or write rewards. `run_guarded` returns when every
process of the child is dead. Results come through a pipe, and each message starts with a secret that the submitted code
is not told. If the pod has no other users (pods made without root), the child keeps our user: all that comes back is
then what the submitted code chose to send. No process here knows an expected result.
"""

from __future__ import annotations

import os
import select
import site  # without effect under -S; the child may not be able to read it
import stat
import sys
import time

from etude import pod_stdlib
from etude.pod_stdlib import suppress

TYPE_CHECKING = False  # Python 3.8
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

    JsonObject = dict[str, Any]
    Send = Callable[[JsonObject], None]

PROGRAM = os.path.abspath(sys.argv[0])  # this program, a directory; its name, if it was sent (`etude.pods.payload`)
HERE = os.path.dirname(PROGRAM)
TESTER = 54321  # user and group id of the submitted code only
MAX_OUTPUT = 32 << 10  # bytes kept of the child's output
MAX_MESSAGES = 8 << 20  # bytes read of the child's messages
SIGKILL = 9
# Modules that a file of the workspace cannot replace in a process of the verifier: checks use them on submitted code.
PINNED = frozenset(
    [
        "__future__",
        "_bz2",
        "_compression",
        "_lzma",
        "bz2",
        "collections",
        "contextlib",
        "copyreg",
        "email",
        "enum",
        "errno",
        "fnmatch",
        "functools",
        "grp",
        "hashlib",
        "importlib",
        "json",
        "keyword",
        "lzma",
        "operator",
        "pwd",
        "re",
        "reprlib",
        "runpy",
        "select",
        "shutil",
        "signal",
        "struct",
        "subprocess",
        "tempfile",
        "types",
        "warnings",
        "zipfile",
        "zipimport",
        "zlib",
    ]
)
PATH = os.environ.get("PATH", "/usr/local/bin:/usr/bin:/bin")


class VerifierBroken(Exception):
    """The verifier cannot run: there is no reward, and the agent is not at fault."""


class ChildResult:
    """Messages, end of the output and exit status of a child process."""

    def __init__(self) -> None:
        self.messages: list[JsonObject] = []
        self.output = b""
        self.errors = b""
        self.timed_out = False
        self.status = -1

    @property
    def text(self) -> str:
        """Return standard output and standard error as text."""
        return b"\n".join(part for part in (self.output, self.errors) if part).decode("utf-8", "replace")


def run_guarded(
    work: Callable[[Send], None],
    *,
    timeout: float,
    cwd: str,
    env: dict[str, str] | None = None,
    stdin: bytes = b"",
    max_output: int = MAX_OUTPUT,
) -> ChildResult:
    """Call `work` in a child process of another user; on return no process of the child is left.

    `work` gets a function that sends a message to the parent. The child is a fork of this process, so anything that the
    submitted code must not know must not have been read before.
    """
    if can_switch_user():
        check_readable(os.__file__)
    secret = os.urandom(24).hex()
    pipes = [os.pipe() for _ in range(3)]
    home = private_directory("home", owner=TESTER)
    stdin_fd = _open_input(stdin)
    if not can_switch_user():
        _adopt_orphans()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _run_child(work, secret, [write for _, write in pipes], stdin_fd, cwd, env or {}, home)
    for fd in (stdin_fd, *(write for _, write in pipes)):
        os.close(fd)
    result = ChildResult()
    reads = [read for read, _ in pipes]
    try:
        _read_child(result, reads, pid, time.monotonic() + timeout, secret.encode(), max_output)
    finally:
        kill_all(pid)
        for fd in reads:
            os.close(fd)
        remove_tree(home)
    return result


def _run_child(
    work: Callable[[Send], None], secret: str, writes: list[int], stdin: int, cwd: str, env: dict[str, str], home: str
) -> NoReturn:
    """Drop privileges, descriptors and environment variables, then call `work`. Runs in the child."""
    messages, output, errors = writes
    try:
        os.setsid()
        _raise_oom_score()
        for fd, target in ((stdin, 0), (output, 1), (errors, 2)):
            os.dup2(fd, target)
        os.closerange(3, messages)
        os.closerange(max(3, messages + 1), 256)
        if can_switch_user():
            _become_tester()
        os.umask(0o022)
        os.environ.clear()
        os.environ.update({"PATH": PATH, "LANG": "C.UTF-8", "HOME": home, "TMPDIR": home, **env})
        os.chdir(cwd)
        sys.meta_path.insert(0, PinnedModules([path for path in sys.path if os.path.abspath(path) != PROGRAM]))

        def send(message: JsonObject) -> None:
            line = (secret + pod_stdlib.dumps(message) + "\n").encode()
            while line:
                line = line[os.write(messages, line) :]

        work(send)
        sys.stdout.flush()
        sys.stderr.flush()
    except FileNotFoundError as error:
        os.write(2, f"{error}\n".encode("utf-8", "replace"))
        os._exit(127)
    except BaseException as error:  # this fork must never return into the parent's code
        with suppress(BaseException):
            os.write(2, f"{type(error).__name__}: {error}\n".encode("utf-8", "replace"))
        os._exit(1)
    os._exit(0)


class PinnedModules:
    """Finds the modules in PINNED in the directories of the standard library."""

    def __init__(self, directories: list[str]) -> None:
        self.directories = directories

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        from _frozen_importlib_external import PathFinder

        return PathFinder.find_spec(name, self.directories) if name in PINNED else None


def can_switch_user() -> bool:
    """Whether the tester's user id exists here. A pod made without root maps only one id."""
    if os.geteuid() != 0:
        return False
    try:
        with open("/proc/self/uid_map") as file:
            return any(int(first) <= TESTER < int(first) + int(count) for first, _, count in map(str.split, file))
    except OSError:
        return True


def check_readable(path: str) -> None:
    """Raise VerifierBroken if the tester cannot read a file of the interpreter: all submissions would fail."""
    path = os.path.realpath(path)
    parents = [path[:at] or "/" for at, sign in enumerate(path) if sign == "/"]
    closed = [each for each in parents if not os.stat(each).st_mode & 0o001]
    if closed or not os.stat(path).st_mode & 0o004:
        raise VerifierBroken(f"user {TESTER} cannot read {path}: start it with a Python that all users can read")


def _become_tester() -> None:
    os.setgroups([])
    os.setgid(TESTER)
    os.setuid(TESTER)


def _raise_oom_score() -> None:
    """Make the OOM killer choose the child, not the verifier."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def _open_input(data: bytes) -> int:
    """Return a descriptor that reads exactly these bytes."""
    if not data:
        return os.open("/dev/null", os.O_RDONLY)
    directory = private_directory("input")
    with open(os.path.join(directory, "data"), "wb") as file:
        file.write(data)
    fd = os.open(file.name, os.O_RDONLY)
    os.unlink(file.name)
    os.rmdir(directory)
    return fd


def _read_child(
    result: ChildResult, reads: list[int], pid: int, deadline: float, secret: bytes, max_output: int
) -> None:
    """Read the child's pipes until it exits or the deadline passes, then the remaining data."""
    _, output, errors = reads
    rest, received, exited = b"", 0, False
    open_fds = set(reads)
    while open_fds or not exited:
        if not exited and time.monotonic() > deadline:
            result.timed_out = True
            return
        timeout = 0.0 if exited else 0.05 if open_fds else 0.001
        ready = select.select(list(open_fds), [], [], timeout)[0]
        if not ready:
            if exited:
                return  # a process that the child left behind holds the write ends
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                exited = True
                result.status = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
            continue
        for fd in ready:
            data = os.read(fd, 1 << 16)
            if not data:
                open_fds.discard(fd)
            elif fd == output:
                result.output = (result.output + data)[-max_output:]
            elif fd == errors:
                result.errors = (result.errors + data)[-max_output:]
            elif received < MAX_MESSAGES:
                received += len(data)
                *lines, rest = (rest + data).split(b"\n")
                result.messages += _authentic_messages(lines, secret)


def _authentic_messages(lines: list[bytes], secret: bytes) -> list[JsonObject]:
    """Return the messages that start with the secret."""
    found = []
    for line in lines:
        if line.startswith(secret):
            with suppress(ValueError, RecursionError):
                found.append(pod_stdlib.loads(line[len(secret) :]))
    return [message for message in found if isinstance(message, dict)]


# ------------------------------------------------------------------------------------------------- killing


def kill_all(group: int) -> None:
    """Kill every process that the submitted code started, in any session, and wait until none is left."""
    for _ in range(300):
        with suppress(OSError):
            os.killpg(group, SIGKILL)
        own_user = can_switch_user()
        if own_user:
            _kill_as_tester()
        left = _tester_processes() if own_user else _descendants()
        for pid in left if not own_user else ():
            with suppress(OSError):
                os.kill(pid, SIGKILL)
        _reap()
        if not left:
            return
        time.sleep(0.01)
    raise VerifierBroken("processes of the submitted code cannot be killed")


def _kill_as_tester() -> None:
    """Send SIGKILL to all processes of the tester's user at once, so that none escapes between listing and killing."""
    pid = os.fork()
    if pid == 0:
        with suppress(OSError):
            _become_tester()
            os.kill(-1, SIGKILL)  # every process of this user except this one
        os._exit(0)
    os.waitpid(pid, 0)


def _adopt_orphans() -> None:
    """Become the parent of orphaned descendants, so that `_descendants` finds them."""
    import ctypes

    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _live_processes() -> dict[int, tuple[int, int]]:
    """Return owner and parent of every live process."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
                if state not in (b"Z", b"X"):
                    found[int(name)] = os.stat(f"/proc/{name}").st_uid, int(parent)
    return found


def _tester_processes() -> list[int]:
    return [pid for pid, (owner, _) in _live_processes().items() if owner == TESTER]


def _descendants() -> list[int]:
    """Return the descendants of this process."""
    alive, found = _live_processes(), [os.getpid()]
    for pid in found:  # grows during the iteration
        found += [child for child, (_, parent) in alive.items() if parent == pid and child not in found]
    return found[1:]


# ------------------------------------------------------------------------------------------------- files


def private_directory(name: str, owner: int | None = None) -> str:
    """Create a directory with an unguessable name, owned by this user or by `owner`."""
    for top in ("/", "/var/tmp", "/tmp"):
        path = os.path.join(top, f"{name}-{os.urandom(8).hex()}")
        with suppress(OSError):
            os.mkdir(path, 0o755)
            if owner is not None and can_switch_user():
                os.chown(path, owner, owner)
            return path
    raise VerifierBroken("cannot create a directory in /, /var/tmp or /tmp")


def restore_suite(suite: str, workspace: str) -> set[str]:
    """Copy the files of `suite` into the workspace without following links; return their paths."""
    copied = set()
    for directory, _, files in os.walk(suite):
        for name in files:
            source = os.path.join(directory, name)
            inside = os.path.relpath(source, suite)
            target = os.path.join(workspace, inside)
            _real_directories(workspace, os.path.dirname(inside))
            remove(target)
            copy_file(source, target)
            os.chmod(target, 0o755 if os.stat(source).st_mode & 0o100 else 0o644)
            copied.add(inside)
    return copied


def copy_file(source: str, target: str) -> None:
    """Copy the content of a file."""
    with open(source, "rb") as original, open(target, "wb") as copy:
        copy.write(original.read())


def remove_tree(path: str) -> None:
    """Remove a directory if possible. No process of the submitted code is alive that could put a link into it."""
    for directory, names, files in os.walk(path, topdown=False):
        for name in [*names, *files]:
            inside = os.path.join(directory, name)
            with suppress(OSError):
                (os.rmdir if name in names and not os.path.islink(inside) else os.unlink)(inside)
    with suppress(OSError):
        os.rmdir(path)


def remove(path: str) -> bool:
    """Remove a file, link or directory; return whether it existed."""
    if os.path.isdir(path) and not os.path.islink(path):
        import shutil

        shutil.rmtree(path)
        return True
    if os.path.lexists(path):
        os.unlink(path)
        return True
    return False


def _real_directories(workspace: str, inside: str) -> None:
    """Create directories, removing links and files in their way."""
    path = workspace
    for name in [part for part in inside.split("/") if part]:
        path = os.path.join(path, name)
        if os.path.islink(path) or (os.path.lexists(path) and not os.path.isdir(path)):
            os.unlink(path)
        if not os.path.isdir(path):
            os.mkdir(path, 0o755)


def prepare_workspace(workspace: str) -> None:
    """Remove bytecode, which could differ from its source, and let the submitted code create files: directories become
    sticky and keep their owner, so it can add files but not replace existing ones."""
    for directory, names, files in os.walk(workspace):
        for name in [name for name in names if name == "__pycache__"]:
            remove(os.path.join(directory, name))
            names.remove(name)
        for name in files:
            if name.endswith(".pyc"):
                remove(os.path.join(directory, name))
        with suppress(OSError):
            os.chmod(directory, stat.S_ISVTX | 0o777)


def import_roots(spec: JsonObject, workspace: str) -> list[str]:
    """Return the directories of the workspace from which modules are imported."""
    return [os.path.normpath(os.path.join(workspace, path)) for path in spec.get("paths", ["."])]


def child_env(spec: JsonObject, workspace: str) -> dict[str, str]:
    """Return the child's environment. PYTHON* is for programs that tests start: the child itself does not read it."""
    defaults = {
        "PYTHONPATH": ":".join(import_roots(spec, workspace)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
    }
    return {**defaults, **spec.get("env", {})}


def use_site_packages() -> None:
    """Add the image's packages to sys.path without running sitecustomize or adding the user's site directory.

    Also remove the verifier's own modules: a module of the workspace may have the same name.
    """
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != PROGRAM]
    sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not globals()["__loader__"]]
    for name in [name for name in sys.modules if name.split(".")[0] == __name__.split(".")[0]]:
        del sys.modules[name]
    sys.modules["__main__"] = type(sys)("__main__")
    known = site.venv(site.removeduppaths())
    site.addsitepackages(known or set())
    sys.dont_write_bytecode = True
