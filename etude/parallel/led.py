"""Let one rank decide for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from etude.parallel.mesh import TrainingMesh

T = TypeVar("T")


def led(mesh: TrainingMesh | None, function: Callable[[], T]) -> T:
    """Return what the function returns on the leading rank, which alone calls it; without a mesh, just call it."""
    return function() if mesh is None else mesh.share(function() if mesh.leads else None)
