"""Harder siblings of nano tasks: the same family or category, one difficulty up.

A higher difficulty withholds the hint, adds files between symptom and fault, or needs a change in two places.
"""

import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from etude_nano.demonstrator import read_files
from etude_nano.sides import SPLITS
from etude_nano.source import DIFFICULTIES, nano_task, text_digest

DRAWS = 300  # tasks drawn to find one of the same family; after that, one of the same category
SEED_OFFSET = 2_000_000_000  # apart from the seeds of task sets and of demonstrations


def harder_sibling(task: Path, seed: int, exclude: Collection[Path]) -> Mapping[str, str] | None:
    """Return the files of a harder sibling, none of `exclude`; None if there is no higher difficulty."""
    parent = _metadata((task / "task.toml").read_text(encoding="utf-8"))
    level = int(parent["difficulty"]) + 1
    if level not in DIFFICULTIES:
        return None
    known = {text_digest(read_files(each)) for each in exclude}
    related: Mapping[str, str] | None = None
    split = next(split for split in SPLITS if split == parent["split"])
    for number in range(DRAWS):
        files = nano_task(SEED_OFFSET + DRAWS * seed + number, split, level)
        found = _metadata(files["task.toml"])
        if found["category"] != parent["category"] or text_digest(files) in known:
            continue
        if found["family"] == parent["family"]:
            return files
        related = related or files
    return related


def _metadata(text: str) -> dict[str, Any]:
    metadata: dict[str, Any] = tomllib.loads(text)["metadata"]
    return metadata
