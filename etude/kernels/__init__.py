"""Hardware-dependent kernels, each with a plain torch path that runs anywhere and gives the same result.

Callers import the functions from the modules; each function chooses its path by device and dtype.
"""

import torch

from etude.errors import InputError

__all__ = ["usable_device"]


def usable_device(name: str) -> torch.device:
    """Return a device by name, tested before anything is loaded onto it; "auto" is a GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        if name == "meta":
            raise RuntimeError("it holds shapes only, no values")
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as problem:  # torch asserts when it was built without CUDA
        raise InputError(f"device {name}: torch cannot use it here ({str(problem).splitlines()[0]})") from None
