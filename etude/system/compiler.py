"""Compile C programs once into a cache, or return the reason why that is not possible.

The file name of a result contains a digest of its sources, compiler and processor, so a change of any of them makes a
new file, and concurrent builds replace each other's file with the same content. Every result is tested before use.
"""

import contextlib
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

COMPILE_S = 120.0

Compiler = Sequence[str]  # the words of its command
Compile = Callable[[Compiler, str], None]  # (compiler, target): write the target or raise
SmokeTest = Callable[[Path], None]  # raise when the result does not work on this machine


def find_compilers(*names: str) -> list[Compiler]:
    """Return the C compilers of this machine: $CC, those of the given names, and zig's of the PyPI package ziglang."""
    named = os.environ.get("CC", "").split()
    path = shutil.which(named[0]) if named else None
    found: list[Compiler] = [[path, *named[1:]]] if path else []
    found += [[path] for name in names if (path := shutil.which(name))]
    if find_spec("ziglang"):
        found.append([sys.executable, "-m", "ziglang", "cc"])
    return found


def find_compiled(
    name: str,
    sources: Sequence[Path],
    compilers: Sequence[Compiler],
    compile: Compile,
    smoke_test: SmokeTest,
    cache: Path,
    key: str = "",
) -> tuple[Path | None, str]:
    """Return the path of the compiled program and "", or None and the reason. `key` is added to the digest."""
    if not compilers:
        return None, "no C compiler"
    reasons = []
    for compiler in compilers:
        try:
            target = cache / f"{name}-{_digest(compiler, sources, key)[:16]}"
            if target.exists():
                smoke_test(target)
            else:
                _build(target, compiler, compile, smoke_test)
            return target, ""
        except (OSError, subprocess.SubprocessError) as error:
            reasons.append(f"{Path(compiler[0]).name}: {_first_line(error)}")
    return None, reasons[0]


def _build(target: Path, compiler: Compiler, compile: Compile, smoke_test: SmokeTest) -> None:
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    os.close(descriptor)
    try:
        compile(compiler, name)
        os.chmod(name, 0o755)
        smoke_test(Path(name))
        os.replace(name, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def run(command: Sequence[str], seconds: float, cwd: Path | None = None) -> None:
    """Run a compiler or its result; raise SubprocessError when it fails."""
    subprocess.run(command, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds, check=True)


def cache_directory() -> Path:
    """Return the cache directory of this user's compiled programs."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "etude"


def _digest(compiler: Compiler, sources: Sequence[Path], key: str) -> str:
    """Return the digest of sources and compiler, identified by its file: faster than asking for its version."""
    found = os.stat(compiler[0])
    identity = (
        f"{os.path.realpath(compiler[0])} {compiler[1:]} {found.st_size} {found.st_mtime_ns} {platform.machine()} {key}"
    )
    digest = hashlib.sha256(identity.encode())
    for source in sources:
        content = source.read_bytes()
        digest.update(f"\0{source.name} {len(content)}\0".encode() + content)
    return digest.hexdigest()


def _first_line(error: OSError | subprocess.SubprocessError) -> str:
    """Return the first line of the compiler's message that mentions an error, else its first line."""
    stderr = error.stderr if isinstance(error, subprocess.CalledProcessError) else None
    lines = [line for line in (stderr or b"").decode("utf-8", "replace").splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else str(error))
