"""Package exports that are imported when they are first used, so that importing a package stays cheap.

    if TYPE_CHECKING:
        from etude.pods.fleet import Fleet as Fleet
    __getattr__ = lazy_exports(__name__)

The imports that type checkers read are the only list of a package's public names.
"""

import ast
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from etude.syntax import parse_tree


def lazy_exports(package: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package whose public names are those that it imports as `NAME as NAME`."""

    @cache
    def modules() -> dict[str, str]:
        tree = parse_tree(Path(str(sys.modules[package].__file__)).read_bytes())
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
        return {alias.name: str(node.module) for node in imports for alias in node.names if alias.asname == alias.name}

    def get(name: str) -> Any:
        if name == "__all__":
            return sorted(modules())
        if name not in modules():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules()[name]), name)

    return get
