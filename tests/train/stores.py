"""A source of documents in memory, for tests of what reads one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt


class Memory:
    def __init__(self, documents: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]] | None = None) -> None:
        self.documents = [np.array(document, dtype=np.uint16) for document in documents]  # as shards store them
        self.masks = [np.array(mask, dtype=bool) for mask in masks] if masks else None
        self.lengths = np.array([len(document) for document in documents], dtype=np.int64)
        self.digest = str(hash(tuple(map(tuple, documents))))

    def read(self, document: int, start: int = 0, stop: int | None = None) -> npt.NDArray[Any]:
        return self.documents[document][start:stop]

    def mask(self, document: int, start: int = 0, stop: int | None = None) -> npt.NDArray[np.bool_]:
        if self.masks is None:
            return np.ones(len(self.documents[document][start:stop]), dtype=bool)
        return self.masks[document][start:stop]


def counting(sizes: Sequence[int], base: int = 0) -> Memory:
    """Documents whose tokens are all different, so that a token names its place."""
    ends = np.cumsum([0, *sizes])
    return Memory([list(range(base + a, base + b)) for a, b in pairwise(ends)])
