"""Named plugins that a recipe can choose from, registered by the packages that implement them.

    task_sources = Registry["TaskSource"]("task source")

    @task_sources.register("nano")
    class NanoTaskSource: ...

Installed packages add theirs through the entry-point group `etude.plugins`: each entry names a module to import.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from etude.config.loading import suggest
from etude.errors import InputError

ENTRY_POINT_GROUP = "etude.plugins"
T = TypeVar("T")


class Registry(Generic[T]):
    """Plugins of one kind, by name."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that registers its argument under `name`; a name is given once."""

        def add(entry: T) -> T:
            if self._entries.get(name, entry) is not entry:
                raise InputError(f"{self.kind} {name!r} is registered twice; rename one of them")
            self._entries[name] = entry
            return entry

        return add

    def names(self) -> list[str]:
        """Return all registered names, those of plugins included."""
        load_plugins()
        return sorted(self._entries)

    def get(self, name: str) -> T:
        """Return the entry called `name`; InputError with a suggestion if there is none."""
        if name not in self._entries:
            known = self.names()
            if name not in known:
                raise InputError(
                    f"{self.kind} {name!r} is unknown; {suggest(name, known) if known else 'there is none'}"
                )
        return self._entries[name]


@cache
def load_plugins() -> None:
    """Import the modules that installed packages declare in the entry-point group `etude.plugins`, once per process."""
    for module in sorted({entry.value for entry in entry_points(group=ENTRY_POINT_GROUP)}):
        import_module(module)
