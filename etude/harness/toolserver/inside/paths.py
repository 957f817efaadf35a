"""Paths and files in the pod: resolution, display, reads that cannot block and atomic writes.

A file name may contain anything but "/" and NUL. A name that would break a line or is not UTF-8 is displayed quoted
with escapes, and is accepted in that form.
"""

from __future__ import annotations

import errno
import os
import stat

MAX_FILE = 64 << 20  # bytes of a file that is read completely
SAMPLE = 8192  # first bytes, in which a NUL means binary, as in git

_ESCAPED = r'\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|([ntr\\"]))'
_SHORT = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\\": "\\\\", '"': '\\"'}
_LONG = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", '"': '"'}
_MAGIC = (
    (b"\x89PNG", "PNG image"),
    (b"\xff\xd8\xff", "JPEG image"),
    (b"GIF8", "GIF image"),
    (b"%PDF", "PDF document"),
    (b"PK\x03\x04", "zip archive"),
    (b"\x1f\x8b", "gzip data"),
    (b"\x7fELF", "ELF program"),
    (b"SQLite format 3", "SQLite database"),
    (b"\xff\xfe", "perhaps UTF-16 text"),
    (b"\xfe\xff", "perhaps UTF-16 text"),
)


class Refusal(Exception):
    """A failed operation: `kind` is the error class, the message is for the model."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def quote_name(name: str) -> str:
    """Return a name on one line: as it is, or quoted with escapes if it is ambiguous."""
    if not name.startswith('"') and (name.isprintable() or not any(map(_is_unsafe, name))):
        return name
    parts = []
    for char in name:
        code = ord(char)
        if char in _SHORT:
            parts.append(_SHORT[char])
        elif 0xDC80 <= code <= 0xDCFF:  # a byte that is not UTF-8, decoded with surrogateescape
            parts.append(f"\\x{code - 0xDC00:02x}")
        elif code < 0x80 and _is_unsafe(char):
            parts.append(f"\\x{code:02x}")
        elif _is_unsafe(char):
            parts.append(f"\\u{code:04x}")
        else:
            parts.append(char)
    return '"' + "".join(parts) + '"'


def _is_unsafe(char: str) -> bool:
    """Return whether a character breaks a line, is invisible or cannot be encoded: none of them is printable."""
    return char < " " or "\x7f" <= char <= "\x9f" or "\ud800" <= char <= "\udfff" or char in "\u2028\u2029\ufeff"


def unquote_name(text: str) -> str:
    """Undo `quote_name`."""
    import re

    def char(found: re.Match[str]) -> str:
        byte, code, letter = found.groups()
        if byte:
            number = int(byte, 16)
            return chr(number if number < 0x80 else number + 0xDC00)
        return chr(int(code, 16)) if code else _LONG[letter]

    return re.sub(_ESCAPED, char, text[1:-1])


def session_start_ns(state: str) -> int:
    """Return the mtime of a file that the first server of the session created."""
    os.makedirs(state, mode=0o700, exist_ok=True)
    file = os.open(os.path.join(state, "began"), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        return os.fstat(file).st_mtime_ns
    finally:
        os.close(file)


class ToolWorkspace:
    """The workspace of a session, and the tool names shown to the model."""

    def __init__(self, root: str, state: str, names: dict[str, str]) -> None:
        self.root = os.path.realpath(root)
        self.state = state  # the server's own directory, outside the workspace
        self.names = names
        self.began = session_start_ns(state)  # by the clock of the file system

    def hint(self, tool: str, text: str) -> str:
        """Return a sentence that refers to another tool (`{}` is its name), empty if the model does not have it."""
        return " " + text.format(self.names[tool]) if tool in self.names else ""

    def resolve(self, text: str) -> str:
        """Return the path of a name. Relative names start at the root; links are not followed."""
        if "\0" in text:
            raise Refusal("bad_arguments", "a path cannot contain a NUL character")
        path = os.path.join(self.root, text)
        if os.path.lexists(path):
            return path
        if len(text) > 1 and text[0] == text[-1] == '"':
            return os.path.join(self.root, unquote_name(text))
        if text == "~" or text.startswith("~/"):
            return os.path.expanduser(text)
        return path

    def relative(self, path: str) -> str:
        """Return the path relative to the root if it is inside, else unchanged."""
        path = os.path.normpath(path)
        if path == self.root:
            return "."
        inside = self.root.rstrip("/") + "/"
        return path[len(inside) :] if path.startswith(inside) else path

    def display(self, path: str) -> str:
        """Return the path as shown to the model."""
        return quote_name(self.relative(path))

    def writable(self, path: str) -> str:
        """Return the real path of a file to change; refuse paths and links outside the workspace."""
        real = os.path.realpath(path)
        if real != self.root and not real.startswith(self.root.rstrip("/") + "/"):
            where = "" if real == os.path.normpath(path) else f" (it leads to {quote_name(real)})"
            raise Refusal(
                "denied",
                f"{self.display(path)} is outside the workspace {quote_name(self.root)}{where}; nothing was changed",
            )
        return real


def lent_program(workspace: ToolWorkspace, name: str) -> str | None:
    """Return the path of a program that the host has lent to the pod, None if it has not."""
    path = os.path.join(workspace.state, name)
    return path if os.access(path, os.X_OK) else None


def read_bytes(workspace: ToolWorkspace, path: str, max_bytes: int = MAX_FILE) -> tuple[bytes, os.stat_result]:
    """Read a regular file completely. Never blocks: a pipe or device is refused before reading."""
    shown = workspace.display(path)
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as error:
        raise refusal_for(workspace, path, error) from None
    try:
        info = os.fstat(file)
        if stat.S_ISDIR(info.st_mode):
            hint = workspace.hint("list_dir", "List it with {}.")
            raise Refusal("environment", f"{shown} is a directory, not a file.{hint}")
        if not stat.S_ISREG(info.st_mode):
            raise Refusal("environment", f"{shown} is not a regular file (a pipe, a socket or a device)")
        parts, size = [], 0
        while chunk := os.read(file, 1 << 20):
            parts.append(chunk)
            size += len(chunk)
            if size > max_bytes:
                at_least = f"it has over {max_bytes >> 20} MB"
                hint = workspace.hint("run_terminal_cmd", "Look at a part of it with {} (sed -n, tail, grep).")
                raise Refusal("environment", f"{shown} is too large to be read: {at_least}.{hint}")
        return b"".join(parts), info
    except OSError as error:  # some files in /proc open but fail to read
        raise refusal_for(workspace, path, error) from None
    finally:
        os.close(file)


def check_text(workspace: ToolWorkspace, path: str, data: bytes) -> None:
    """Raise Refusal if the data is not text."""
    if b"\0" in data[:SAMPLE]:
        kind = next((name for magic, name in _MAGIC if data.startswith(magic)), "contains NUL bytes")
        what = f"a binary file ({kind}, {len(data):,} bytes), not text"
        raise Refusal("environment", f"{workspace.display(path)} is {what}")


def refusal_for(workspace: ToolWorkspace, path: str, error: OSError) -> Refusal:
    """Convert an OSError to a refusal; for a missing file, suggest similar names."""
    shown = workspace.display(path)
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        if os.path.islink(path):
            target = quote_name(os.readlink(path))
            return Refusal("environment", f"{shown} is a symbolic link to {target}, which does not exist")
        return Refusal("environment", f"{shown} does not exist.{_suggestion(workspace, path)}")
    if error.errno in (errno.EACCES, errno.EPERM):
        return Refusal("environment", f"{shown}: permission denied")
    return Refusal("environment", f"{shown}: {(error.strerror or str(error)).lower()}")


def _suggestion(workspace: ToolWorkspace, path: str) -> str:
    import difflib

    directory, name = os.path.split(os.path.normpath(path))
    if not os.path.isdir(directory):
        while directory and not os.path.isdir(directory):
            directory, name = os.path.split(directory)
        found = [] if not directory else difflib.get_close_matches(name, sorted(_names(directory)), 1)
        near = f" Did you mean {workspace.display(os.path.join(directory, found[0]))}/...?" if found else ""
        return f" There is no directory {workspace.display(os.path.join(directory, name))}.{near}"
    close = difflib.get_close_matches(name, sorted(_names(directory)), 3)
    if same := [other for other in _names(directory) if other.lower() == name.lower()]:
        close = [*same, *(other for other in close if other not in same)][:3]
    found = [os.path.join(directory, other) for other in close] or _elsewhere(workspace, name)
    return f" Did you mean {' or '.join(map(workspace.display, found))}?" if found else ""


def _names(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))[:2000]
    except OSError:
        return []


def _elsewhere(workspace: ToolWorkspace, name: str) -> list[str]:
    """Return files of the same name among the first few thousand of the workspace."""
    found, count = [], 0
    for directory, directories, files in os.walk(workspace.root):
        directories[:] = sorted(other for other in directories if other not in (".git", "node_modules"))
        if name in files:
            found.append(os.path.join(directory, name))
        count += len(files) + len(directories)
        if len(found) == 3 or count > 5000:
            break
    return found


def replace_file(path: str, data: bytes, mode: int | None = None) -> None:
    """Replace or create a file atomically; it keeps the old mode, or gets `mode` if it is new."""
    try:
        old = os.stat(path)
    except FileNotFoundError:
        old = None
    if old is not None and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, "permission denied", path)
    if old is not None and old.st_nlink > 1:  # keep hard links
        write_through(path, data)
        return
    directory, name = os.path.split(path)
    temporary = os.path.join(directory, f".{name[:80]}.{os.getpid()}.new")
    try:
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except PermissionError:
        if old is None:
            raise
        write_through(path, data)  # a writable file in a read-only directory
        return
    try:
        with os.fdopen(file, "wb") as out:
            out.write(data)
            if old is not None:
                os.fchmod(file, stat.S_IMODE(old.st_mode))
                if (old.st_uid, old.st_gid) != (os.getuid(), os.getgid()):
                    keep_owner(file, old)
            elif mode is not None:
                os.fchmod(file, mode)
        os.rename(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def keep_owner(file: int, old: os.stat_result) -> None:
    """Give the new file the owner of the old one, if permitted."""
    try:
        os.fchown(file, old.st_uid, old.st_gid)
        os.fchmod(file, stat.S_IMODE(old.st_mode))  # chown clears the setuid bits
    except PermissionError:
        return  # an ordinary user cannot change owners


def write_through(path: str, data: bytes) -> None:
    """Overwrite the existing file in place."""
    file = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
    with os.fdopen(file, "wb") as out:
        out.write(data)
