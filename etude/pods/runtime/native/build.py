"""The keeper in C, compiled where there is a compiler; where there is none, why not."""

import os
import platform
import subprocess
from pathlib import Path

from etude.pods.runtime import linux
from etude.system.compiler import COMPILE_S, find_compiled, run

COMPILERS = ("musl-gcc", "cc", "gcc", "clang")  # musl first: its static programs are smaller, and so is every pod
OPTIONS = ("-O2", "-s", "-Wall", "-Wextra")
SWITCH = "ETUDE_PODS_HELPER"  # `off`: pods are made by Python
RUN_S = 20.0

_HERE = Path(__file__).parent


def find_helper(cache: Path) -> tuple[Path | None, str]:
    """The compiled keeper, built if need be, and ""; or None and why there is none."""
    if os.environ.get(SWITCH) == "off":
        return None, f"{SWITCH}=off"
    if not linux.SUPPORTED:
        return None, f"the keeper runs on Linux, on x86_64 and aarch64, not on {platform.system()} {platform.machine()}"
    sources = sorted([*_HERE.glob("*.c"), *_HERE.glob("*.h")])
    return find_compiled("keeper", sources, COMPILERS, _compile, _try, cache, key=str(OPTIONS))


def _compile(compiler: str, target: str) -> None:
    """Statically if that can be; a dynamic one works as well, since it has all it needs before a pod's root changes."""
    command = [compiler, *OPTIONS, "-o", target, *sorted(source.name for source in _HERE.glob("*.c"))]
    try:
        run([*command, "-static"], COMPILE_S, cwd=_HERE)
    except subprocess.CalledProcessError:
        run(command, COMPILE_S, cwd=_HERE)


def _try(helper: Path) -> None:
    run([str(helper), "--version"], RUN_S)
