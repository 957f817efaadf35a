"""Compile the keeper where there is a C compiler, once, into a cache; say in words why when it cannot be had.

The name of the result is a digest of everything it is made from, so a change of sources or compiler makes a new one,
and processes that build at the same time replace each other's file by the same. Nothing is used that has not run.
"""

import contextlib
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from etude.pods import linux

COMPILERS = ("musl-gcc", "cc", "gcc", "clang")  # musl first: its static programs are smaller, and so is every pod
OPTIONS = ("-O2", "-s", "-Wall", "-Wextra")
SWITCH = "ETUDE_PODS_HELPER"  # `off`: pods are made by Python
COMPILE_S, RUN_S = 120.0, 20.0

_HERE = Path(__file__).parent


def find_helper(cache: Path) -> tuple[Path | None, str]:
    """The compiled keeper, built if need be, and ""; or None and why there is none."""
    if os.environ.get(SWITCH) == "off":
        return None, f"{SWITCH}=off"
    if not linux.SUPPORTED:
        return None, f"the keeper runs on Linux, on x86_64 and aarch64, not on {platform.system()} {platform.machine()}"
    compilers = [path for name in COMPILERS if (path := shutil.which(name))]
    if not compilers:
        return None, f"no C compiler ({', '.join(COMPILERS)})"
    reasons = []
    for compiler in compilers:
        try:
            return _find(compiler, cache), ""
        except (OSError, subprocess.SubprocessError) as error:
            reasons.append(f"{Path(compiler).name}: {_first_line(error)}")
    return None, reasons[0]


def _find(compiler: str, cache: Path) -> Path:
    sources = sorted([*_HERE.glob("*.c"), *_HERE.glob("*.h")])
    helper = cache / f"keeper-{_digest(compiler, sources)[:16]}"
    if helper.exists():
        _try(helper)
        return helper
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{helper.name}.", dir=cache)
    os.close(descriptor)
    try:
        _compile(compiler, [source.name for source in sources if source.suffix == ".c"], name)
        os.chmod(name, 0o755)
        _try(Path(name))
        os.replace(name, helper)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
    return helper


def _digest(compiler: str, sources: list[Path]) -> str:
    """What the program depends on. The compiler is known by its file, which is faster than asking for its version."""
    found = os.stat(compiler)
    identity = f"{os.path.realpath(compiler)} {found.st_size} {found.st_mtime_ns} {platform.machine()} {OPTIONS}"
    digest = hashlib.sha256(identity.encode())
    for source in sources:
        content = source.read_bytes()
        digest.update(f"\0{source.name} {len(content)}\0".encode() + content)
    return digest.hexdigest()


def _compile(compiler: str, sources: list[str], target: str) -> None:
    """Statically if that can be; a dynamic one works as well, since it has all it needs before a pod's root changes."""
    command = [compiler, *OPTIONS, "-o", target, *sources]
    try:
        _run([*command, "-static"], COMPILE_S, cwd=_HERE)
    except subprocess.CalledProcessError:
        _run(command, COMPILE_S, cwd=_HERE)


def _try(helper: Path) -> None:
    _run([str(helper), "--version"], RUN_S)


def _run(command: list[str], seconds: float, cwd: Path | None = None) -> None:
    subprocess.run(command, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds, check=True)


def _first_line(error: OSError | subprocess.SubprocessError) -> str:
    """The compiler's own first words about an error, if it had any."""
    said = error.stderr if isinstance(error, subprocess.CalledProcessError) else None
    lines = [line for line in (said or b"").decode("utf-8", "replace").splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else str(error))
