"""Compile C where there is a compiler, once, into a cache; say in words why when it cannot be had.

The name of a result is a digest of everything it is made from, so a change of sources, compiler or processor makes a
new one, and processes that build at the same time replace each other's file by the same. Nothing is used untried.
"""

import contextlib
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

COMPILE_S = 120.0

Compile = Callable[[str, str], None]  # (compiler, target): make the target or raise
Try = Callable[[Path], None]  # raise when the result does not work here


def find_compiled(
    name: str,
    sources: Sequence[Path],
    compilers: Sequence[str],
    compile: Compile,
    try_: Try,
    cache: Path,
    key: str = "",
) -> tuple[Path | None, str]:
    """The compiled `name`, built if need be, and ""; or None and why there is none. `key`: what else it depends on."""
    found = [path for compiler in compilers if (path := shutil.which(compiler))]
    if not found:
        return None, f"no C compiler ({', '.join(compilers)})"
    reasons = []
    for compiler in found:
        try:
            target = cache / f"{name}-{_digest(compiler, sources, key)[:16]}"
            if target.exists():
                try_(target)
            else:
                _build(target, compiler, compile, try_)
            return target, ""
        except (OSError, subprocess.SubprocessError) as error:
            reasons.append(f"{Path(compiler).name}: {_first_line(error)}")
    return None, reasons[0]


def _build(target: Path, compiler: str, compile: Compile, try_: Try) -> None:
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    os.close(descriptor)
    try:
        compile(compiler, name)
        os.chmod(name, 0o755)
        try_(Path(name))
        os.replace(name, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def run(command: Sequence[str], seconds: float, cwd: Path | None = None) -> None:
    """Run a compiler, or what it made; SubprocessError when it fails."""
    subprocess.run(command, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds, check=True)


def cache_directory() -> Path:
    """Where compiled programs of this user are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "etude"


def _digest(compiler: str, sources: Sequence[Path], key: str) -> str:
    """The compiler is known by its file, which is faster than asking for its version."""
    found = os.stat(compiler)
    identity = f"{os.path.realpath(compiler)} {found.st_size} {found.st_mtime_ns} {platform.machine()} {key}"
    digest = hashlib.sha256(identity.encode())
    for source in sources:
        content = source.read_bytes()
        digest.update(f"\0{source.name} {len(content)}\0".encode() + content)
    return digest.hexdigest()


def _first_line(error: OSError | subprocess.SubprocessError) -> str:
    """The compiler's own first words about an error, if it had any."""
    said = error.stderr if isinstance(error, subprocess.CalledProcessError) else None
    lines = [line for line in (said or b"").decode("utf-8", "replace").splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else str(error))
