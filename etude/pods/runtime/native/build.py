"""Compile the zygote in C where there is a compiler; report why where it is not possible."""

import os
import platform
import subprocess
from pathlib import Path

from etude.pods.runtime import linux
from etude.system.compiler import COMPILE_S, find_compiled, run

COMPILERS = ("musl-gcc", "cc", "gcc", "clang")  # musl first: its static programs are smaller, and so is every pod
OPTIONS = ("-O2", "-s", "-Wall", "-Wextra")
SWITCH = "ETUDE_PODS_HELPER"  # `off`: use the zygote in Python
RUN_S = 20.0

_HERE = Path(__file__).parent


def find_helper(cache: Path) -> tuple[Path | None, str]:
    """Return the compiled zygote, built if necessary, and ""; or None and the reason why there is none."""
    if os.environ.get(SWITCH) == "off":
        return None, f"{SWITCH}=off"
    if not linux.SUPPORTED:
        return None, f"needs Linux on x86_64 or aarch64, this is {platform.system()} {platform.machine()}"
    sources = sorted([*_HERE.glob("*.c"), *_HERE.glob("*.h")])
    return find_compiled("zygote", sources, COMPILERS, _compile, _try, cache, key=str(OPTIONS))


def _compile(compiler: str, target: str) -> None:
    """Compile statically if possible; a dynamic program works too, since it is loaded before a pod's root changes."""
    command = [compiler, *OPTIONS, "-o", target, *sorted(source.name for source in _HERE.glob("*.c"))]
    try:
        run([*command, "-static"], COMPILE_S, cwd=_HERE)
    except subprocess.CalledProcessError:
        run(command, COMPILE_S, cwd=_HERE)


def _try(helper: Path) -> None:
    run([str(helper), "--version"], RUN_S)
