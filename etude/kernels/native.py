"""Load the kernels of `decode.c`, compiled for this processor on first use.

They serve float32 inference on a CPU only. Without a C compiler the same functions run in torch, slower and equal
except for the last bits; `unavailable_reason` says why. ETUDE_CPU_KERNELS=off turns them off.
"""

import ctypes
import functools
import hashlib
import os
import platform
from pathlib import Path

import torch
from torch import Tensor

from etude.system.compiler import COMPILE_S, Compiler, cache_directory, find_compiled, find_compilers, run

SWITCH = "ETUDE_CPU_KERNELS"
COMPILERS = ("cc", "gcc", "clang")
# fused multiply-adds are allowed, reordered sums only where the source says so
OPTIONS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")

_SOURCE = Path(__file__).parent / "decode.c"
_P, _L, _F = ctypes.c_void_p, ctypes.c_long, ctypes.c_float
_SIGNATURES = {
    "rms_norm": (_P, _P, _P, _L, _L, _F),
    "swiglu": (_P, _P, _L, _L),
    "rotate": (_P, _L, _P, _P, _P, _L, _L, _L),
    "store_pages": (_P, _L, _P, _L, _P, _P, _P, _L, _L),
    "attend_pages": (_P, _P, _P, _L, _P, _L, _P, _L, _P, _P, *(_L,) * 6, _F),
    "draw": (_P, _P, _P, _P, _P, _P, _P, _L, _L),
}


def native_kernels_for(x: Tensor) -> ctypes.CDLL | None:
    """Return the kernels if they may be used for `x`, else None."""
    if x.device.type != "cpu" or x.dtype != torch.float32 or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    return _library()[0]


def unavailable_reason() -> str:
    """Return why there are no kernels; "" if there are."""
    return _library()[1]


@functools.cache
def _library() -> tuple[ctypes.CDLL | None, str]:
    if os.environ.get(SWITCH) == "off":
        return None, f"{SWITCH}=off"
    key = f"{OPTIONS} {_processor()}"
    path, reason = find_compiled(
        "decode", [_SOURCE], find_compilers(*COMPILERS), _compile, _test, cache_directory(), key
    )
    return (_load(path), "") if path else (None, reason)


def _compile(compiler: Compiler, target: str) -> None:
    run([*compiler, *OPTIONS, "-o", target, str(_SOURCE), "-lm"], COMPILE_S)


def _test(path: Path) -> None:
    x, weight, out = torch.tensor([[3.0, -4.0]]), torch.ones(2), torch.empty(1, 2)
    _load(path).rms_norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), 1, 2, 0.0)
    if not torch.allclose(out, x / 12.5**0.5):
        raise OSError(f"{path.name}: rms_norm returned wrong numbers")


def _load(path: Path) -> ctypes.CDLL:
    # torch has already loaded an OpenMP library of the same name, so its threads are used here
    library = ctypes.CDLL(str(path))
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return library


def _processor() -> str:
    """Return a digest of the processor, which `-march=native` depends on: a cache may be shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    facts = sorted({line for line in lines if line.startswith(("flags", "Features", "model name", "CPU part"))})
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()
