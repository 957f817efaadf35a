"""Which functions occur in which task sets: the canonical form of a function decides, so no two sets share one.

    train         RL training, demonstrations, and all data of the base model
    validation    tasks that choices are made on
    test          tasks that are measured once: new tasks of the kinds that are trained on, and tasks of unseen kinds

A function belongs to a side by the digest of its syntax tree without names and constants (`etude.data.canonical`).
Training texts have functions of the training side only, and the functions that a measured task is about are of its own
side, so that no training text contains the answer of a measured task, whatever the seeds.
"""

from functools import lru_cache
from typing import Literal

from etude.data.canonical import definition_digest

Split = Literal["train", "validation", "new", "unseen"]
Side = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "new", "unseen")
SIDES: dict[Split, Side] = {"train": "train", "validation": "validation", "new": "test", "unseen": "test"}
VALIDATION_PERCENT, TEST_PERCENT = 15, 15  # of all forms

# Kinds of faults and families of tasks that no training, validation or new task has.
UNSEEN_FAULTS = frozenset({"swapped", "off-by-one", "branch"})
UNSEEN_FAMILIES = frozenset({"import", "config", "migrate", "readme", "line", "where"})


@lru_cache(maxsize=1 << 16)
def side_of(function: str) -> Side:
    """Return the side of a function's text, which may contain calls written as `@name(`."""
    digest = definition_digest(function.replace("@", ""))
    if not digest:
        raise ValueError(f"not a function: {function!r}")
    percent = int(digest[:8], 16) % 100
    if percent < VALIDATION_PERCENT:
        return "validation"
    return "test" if percent < VALIDATION_PERCENT + TEST_PERCENT else "train"


def is_trained_fault(kind: str, split: Split) -> bool:
    """Return whether tasks of a split may have faults of a kind."""
    return (kind in UNSEEN_FAULTS) == (split == "unseen")
