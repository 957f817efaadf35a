"""The one place where hardware makes a difference: each kernel here picks its own path and every path agrees."""

import torch

from etude.errors import InputError


def usable_device(name: str) -> torch.device:
    """A device by name, tried before anything is loaded onto it; "auto" is a GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        if name == "meta":
            raise RuntimeError("it holds shapes and no numbers")
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as problem:  # torch asserts when it was built without CUDA
        raise InputError(f"device {name}: torch cannot use it here ({str(problem).splitlines()[0]})") from None
