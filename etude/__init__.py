"""Etude trains coding agents: base model, continued pretraining, fine-tuning and reinforcement learning.

Importing `etude` is cheap and loads no torch. Each package (`etude.model`, `etude.data`, ...) is imported when it is
first used, so `import etude; etude.model.load(path)` works without a second import.
"""

import importlib as _importlib
from types import ModuleType as _ModuleType

__version__ = "0.2.0"

# In the order of the import contract: a package imports only packages listed before it.
__all__ = [  # noqa: RUF022
    "config",
    "runs",
    "kernels",
    "parallel",
    "chat",
    "model",
    "data",
    "train",
    "weights",
    "inference",
    "pods",
    "harness",
    "tasks",
    "rewards",
    "rollouts",
    "evaluation",
    "cluster",
    "rl",
    "bench",
    "agent",
    "viewer",
    "recipe",
    "pipeline",
]


def __getattr__(name: str) -> _ModuleType:
    if name not in __all__:
        raise AttributeError(f"module 'etude' has no attribute {name!r}")
    return _importlib.import_module(f"etude.{name}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
