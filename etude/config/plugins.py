"""Things that a recipe chooses by name, and the plugins that add to them.

    TERMS = Registry[Term]("reward term", modules=("etude.rewards.terms",))
    term = TERMS.add

    @term
    def short_final(trial: VerifiedTrial) -> TermResult: ...

A plugin is a module that registers such things when it is imported: an installed one (entry-point group
`etude.plugins`), or one that a recipe names under `plugins`, as a module or as a file. Every process of a run imports
the plugins of its recipe.
"""

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from pydantic import AfterValidator, ConfigDict, ValidationError, create_model

from etude.errors import InputError, suggest
from etude.files import content_digest, files_digest

ENTRY_POINT_GROUP = "etude.plugins"
T = TypeVar("T")


class Registry(Mapping[str, T]):
    """Things of one kind by name; looking up an unknown name is an InputError with a suggestion.

    The built-in ones register when `modules` are imported. `lazy` names some as "module:attribute", which is imported
    when the thing is used, so that its name can be checked without torch.
    """

    def __init__(self, kind: str, *, modules: Sequence[str] = (), lazy: Mapping[str, str] | None = None) -> None:
        self.kind = kind
        self._modules = modules
        self._lazy = dict(lazy or {})
        self._entries: dict[str, T] = {}

    def add(self, entry: T) -> T:
        """Register a thing under its own name; usable as a decorator."""
        name = getattr(entry, "name", None) or getattr(entry, "__name__", None)
        if not isinstance(name, str):
            raise InputError(f"{self.kind}: {entry!r} has no name; register it with register(name)")
        return self.register(name)(entry)

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that registers its argument under `name`; a name is given once."""

        def add(entry: T) -> T:
            if self._entries.get(name, entry) is not entry or name in self._lazy:
                raise InputError(f"{self.kind} {name!r} is registered twice; rename one of them")
            self._entries[name] = entry
            return entry

        return add

    def __getitem__(self, name: str) -> T:
        if name in self._lazy:
            module, _, attribute = self._lazy[name].partition(":")
            entry: T = getattr(importlib.import_module(module), attribute)
            return entry
        if name not in self._entries and name not in self:
            raise InputError(f"{name} is not a {self.kind}; {self.advice(name)}")
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._lazy or name in self._loaded()

    def __iter__(self) -> Iterator[str]:
        return iter([*self._lazy, *self._loaded()])

    def __len__(self) -> int:
        return len(self._lazy) + len(self._loaded())

    def _loaded(self) -> dict[str, T]:
        for module in self._modules:
            importlib.import_module(module)
        import_installed_plugins()
        return self._entries

    def advice(self, name: str) -> str:
        """Return advice for a name that is not registered."""
        known = sorted(self)
        return suggest(name, known) if known else "no plugin provides one"


def registered(registry: Registry[T], *also: str) -> AfterValidator:
    """Return the check of a settings key that names an entry of the registry, or is one of `also`."""

    def check(name: str) -> str:
        if name not in also and name not in registry:
            raise ValueError(f'is "{name}", which is no {registry.kind}; {registry.advice(name)}')
        return name

    return AfterValidator(check)


def check_options(key: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise a ValueError unless the options are keyword-only parameters of the function, with values of their types.

    `key` is the settings key of the options.
    """
    parameters = inspect.signature(function, eval_str=True).parameters.values()
    fields: dict[str, Any] = {
        parameter.name: (
            Any if parameter.annotation is parameter.empty else parameter.annotation,
            ... if parameter.default is parameter.empty else parameter.default,
        )
        for parameter in parameters
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    model = create_model("Options", __config__=ConfigDict(strict=True, extra="forbid"), **fields)
    try:
        model.model_validate(dict(options))
    except ValidationError as error:
        detail = error.errors()[0]
        name = ".".join(map(str, detail["loc"]))
        if detail["type"] == "extra_forbidden":
            advice = suggest(name, list(fields)) if fields else "it has none"
            raise ValueError(f"{key}.{name} is not an option of {function.__name__}; {advice}") from None
        raise ValueError(f"{key}.{name}: {detail['msg']}, not {detail['input']!r}") from None


# ------------------------------------------------------------------------------------------------ importing


@cache
def import_installed_plugins() -> None:
    """Import the modules that installed packages declare in the entry-point group `etude.plugins`, once per process."""
    for module in sorted({entry.value for entry in entry_points(group=ENTRY_POINT_GROUP)}):
        _import(module, module)


def is_plugin_file(name: str) -> bool:
    """Return whether a plugin is named by its file, not as a module."""
    return name.endswith(".py") or os.sep in name


def import_plugins(plugins: Iterable[str], recorded: Mapping[str, str] | None = None) -> dict[str, str]:
    """Import modules and files (absolute paths); return the digest of each one's source.

    InputError if one cannot be imported, or if its digest is not the recorded one.
    """
    digests = {
        name: _source_digest(_import_file(name) if is_plugin_file(name) else _import(name, name)) for name in plugins
    }
    for name, digest in (recorded or {}).items():
        if digests.get(name, digest) != digest:
            raise InputError(f"plugin {name} has changed since the run was started; restore it or start another run")
    return digests


def _import_file(name: str) -> ModuleType:
    """Import a file as a module of its own name. Its folder is put on sys.path, which child processes inherit."""
    path = Path(name)
    if not path.is_file():
        raise InputError(f"plugin {path} does not exist; name a Python file or a module")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # at the end: it must not hide an installed module
    importlib.invalidate_caches()
    spec = importlib.util.find_spec(path.stem)
    if spec is None or spec.origin is None or not path.samefile(spec.origin):
        other = spec.origin if spec else "no module"
        raise InputError(f"plugin {path}: `import {path.stem}` finds {other}; rename the file")
    return _import(path.stem, name)


def _import(module: str, plugin: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise InputError(f"plugin {plugin} cannot be imported: {type(error).__name__}: {error}") from error


def _source_digest(module: ModuleType) -> str:
    """Return a digest of a module's file, or of all Python files of a package."""
    folders = [Path(folder) for folder in getattr(module, "__path__", ())]
    files = [(str(file.relative_to(folder)), file) for folder in folders for file in sorted(folder.rglob("*.py"))]
    if files:
        return files_digest(files)
    return content_digest(Path(module.__file__)) if module.__file__ else ""
