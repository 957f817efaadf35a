"""Find the helper, the compiled zygote and guest init: the one in the wheel, or built here by any C compiler.

Every backend needs it. A wheel holds it as a static program (setup.py); a checkout compiles it on first use.
"""

import os
import platform
import subprocess
from pathlib import Path

from etude.pods.pod import Unsupported
from etude.system.compiler import COMPILE_S, Compiler, cache_directory, find_compiled, find_compilers, run

MACHINES = ("x86_64", "aarch64")
SUPPORTED = platform.system() == "Linux" and platform.machine() in MACHINES
COMPILERS = ("musl-gcc", "cc", "gcc", "clang")  # musl first: its static programs are smaller, and so is every pod
OPTIONS = ("-O2", "-s", "-Wall", "-Wextra")
INSTALL = "install a C compiler (gcc or clang), or `pip install ziglang`"
RUN_S = 20.0

_HERE = Path(__file__).parent
PREBUILT = _HERE / "zygote"  # in a wheel


def find_helper(state: Path) -> tuple[Path | None, str]:
    """Return the helper, built if necessary, and ""; or None and the reason why there is none, with advice."""
    if not SUPPORTED:
        return None, f"pods need Linux on {' or '.join(MACHINES)}, this is {platform.system()} {platform.machine()}"
    if PREBUILT.exists():
        return PREBUILT, ""
    sources = sorted([*_HERE.glob("*.c"), *_HERE.glob("*.h")])
    cache = _writable_cache(state)
    found, reason = find_compiled("zygote", sources, find_compilers(*COMPILERS), build, _try, cache, key=str(OPTIONS))
    return found, "" if found else f"pods need a small program that could not be compiled ({reason}): {INSTALL}"


def require_helper(state: Path) -> Path:
    """Return the helper; raise Unsupported when there is none."""
    helper, reason = find_helper(state)
    if helper is None:
        raise Unsupported(reason)
    return helper


def build(compiler: Compiler, target: str) -> None:
    """Compile statically if possible; a dynamic program works too, since it is loaded before a pod's root changes."""
    command = [*compiler, *OPTIONS, "-o", target, *sorted(source.name for source in _HERE.glob("*.c"))]
    try:
        run([*command, "-static"], COMPILE_S, cwd=_HERE)
    except subprocess.CalledProcessError:
        run(command, COMPILE_S, cwd=_HERE)


def _try(helper: Path) -> None:
    run([str(helper), "--version"], RUN_S)


def _writable_cache(state: Path) -> Path:
    """Return the user's cache directory, or one in `state` for a user without a home directory."""
    directory = cache_directory()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return state / "cache"
    return directory if os.access(directory, os.W_OK | os.X_OK) else state / "cache"
