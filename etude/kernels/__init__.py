"""Hardware-dependent kernels, each with a plain torch path that runs anywhere and gives the same result.

Callers import the functions from the modules; each function chooses its path by device and dtype.
"""

import os

import torch

from etude.errors import InputError

__all__ = ["choose_gpu", "consecutive_gpus", "nth_gpu", "usable_device"]


def choose_gpu(device: str, number: int) -> None:
    """Let this process see only one of several GPUs, counted round, if `device` names none. Call before using CUDA."""
    if device in ("auto", "cuda") and (count := torch.cuda.device_count()) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = nth_gpu(os.environ.get("CUDA_VISIBLE_DEVICES"), count, number)


def consecutive_gpus(device: str, first: int, number: int) -> list[str] | None:
    """Return `number` GPUs for another process, as CUDA_VISIBLE_DEVICES names them: from `first` on, counted round, or
    the one that `device` names. None: this machine has none, so there is nothing to choose."""
    visible, count = os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count()
    if device == "cpu":
        return []
    if device not in ("auto", "cuda"):
        return [nth_gpu(visible, max(count, 1), int(device.rpartition(":")[2]))]
    if not count and device == "cuda":
        raise InputError("device cuda: this machine has no GPU that torch can use")
    if not count:
        return None
    if number > count:
        raise InputError(f"tensor_parallel = {number}: a server needs {number} GPUs; this machine has {count}")
    return [nth_gpu(visible, count, first + index) for index in range(number)]


def nth_gpu(visible: str | None, count: int, number: int) -> str:
    """Return which of `count` GPUs, of those that CUDA_VISIBLE_DEVICES lists if it is set, has this number."""
    return (visible.split(",") if visible else [str(index) for index in range(count)])[number % count]


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
