"""Etude trains coding agents: base model, continued pretraining, fine-tuning and reinforcement learning.

Importing `etude` is cheap and imports no torch. Each room (`etude.model`, `etude.data`, ...) is loaded the
first time it is touched, so `import etude; etude.model.load(path)` works without a second import.
"""

from importlib import import_module
from types import ModuleType

__version__ = "0.1.0"


def __getattr__(name: str) -> ModuleType:
    if name.startswith("_"):
        raise AttributeError(f"module 'etude' has no attribute {name!r}")
    try:
        return import_module(f"etude.{name}")
    except ModuleNotFoundError as error:
        # Only a room that is not there is an attribute error; one that lacks a dependency must say so.
        if error.name == f"etude.{name}":
            raise AttributeError(f"module 'etude' has no attribute {name!r}") from None
        raise
