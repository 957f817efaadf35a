"""Read a TOML file into a settings class, and explain in one line per problem what is wrong with it."""

import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

import tomli_w
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

from etude.config.plugins import import_plugins
from etude.config.settings import CommandLineValue, Settings
from etude.errors import InputError, suggest

SettingsT = TypeVar("SettingsT", bound=Settings)
FurtherChecks = Callable[[Mapping[str, Any]], Iterable[str]]


def load_settings(
    path: Path | str,
    root: type[SettingsT],
    overrides: Sequence[str] = (),
    further_checks: FurtherChecks = lambda data: (),
) -> SettingsT:
    """Read `path` as a `root` and apply overrides such as `nll.window=256`. All problems come as one InputError.

    `further_checks` looks at the data as written when a field error kept the validators of `root` itself from running.
    """
    path = Path(path)
    data = read_toml(path)
    overridden, problems = _apply(overrides, data)
    directory = Path(os.path.abspath(path)).parent
    try:
        settings = root.model_validate(data, context={"directory": directory})
    except ValidationError as error:
        for detail in error.errors():
            lines = list(_describe(root, detail))
            problems += [_name_override(line, detail["loc"], overridden) for line in lines]
        if not any(detail["loc"][:1] == () for detail in error.errors()):
            problems += further_checks(data)
    if problems:
        raise InputError("\n".join(f"recipe {path}: {problem}" for problem in problems))
    return settings


def make_settings(settings: type[SettingsT], what: str, /, **values: Any) -> SettingsT:
    """Return settings made from command-line options; InputError, with a line per problem, if they are not valid."""
    try:
        return settings.model_validate(values)
    except ValidationError as error:
        lines = [line for detail in error.errors() for line in _describe(settings, detail)]
        raise InputError("\n".join(f"{what}: {line}" for line in lines)) from None


def load_table(path: Path, table: str, settings: type[SettingsT]) -> SettingsT:
    """Read one table of a resolved recipe, ignoring keys that belong to a subclass of `settings`.

    A worker or sampler process reads its own part of the run's recipe this way without importing all of it. The
    recipe's plugins are imported first; InputError if one has changed since the recipe was recorded.
    """
    return settings.model_validate(table_values(path, table, settings), context={"directory": path.parent})


def table_values(path: Path, table: str, settings: type[Settings]) -> dict[str, Any]:
    """Return the values of a table of a resolved recipe that belong to `settings`; its plugins are imported."""
    data: Any = read_toml(path)
    import_plugins(data.get("plugins", ()), data.get("plugin_digests"))
    for name in table.split("."):
        data = data.get(name)
        if not isinstance(data, dict):
            raise InputError(f"recipe {path}: [{table}] is missing")
    return {name: value for name, value in data.items() if name in settings.model_fields}


def merged(table: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table with some of its values replaced, those of tables in it one by one."""
    return {
        **table,
        **{
            key: merged(table[key], value)
            if isinstance(value, Mapping) and isinstance(table.get(key), Mapping)
            else value
            for key, value in changes.items()
        },
    }


def read_toml(path: Path) -> dict[str, Any]:
    """Return the TOML file as plain values; InputError with file and line if it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"recipe {path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except FileNotFoundError:
        raise InputError(f"recipe {path} does not exist; name a TOML file") from None
    except OSError as error:
        raise InputError(f"recipe {path} cannot be read: {error.strerror}") from None
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise InputError(f"recipe {path}: its values are nested too deeply to read") from None
    except tomllib.TOMLDecodeError as error:
        reason = str(error)
        found = re.search(r"at line (\d+)", reason)
        line = int(found[1]) if found else text.count("\n") + 1
        raise InputError(f"recipe {path}:{line}: not valid TOML: {reason}") from None


def _apply(overrides: Sequence[str], data: dict[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Write the overrides into `data`; return the override behind each dotted key, and the problems."""
    overridden: dict[str, str] = {}
    problems: list[str] = []
    for override in overrides:
        key, equals, text = override.partition("=")
        *tables, name = (part.strip() for part in key.split("."))
        if not equals or not all([*tables, name]):
            problems.append(f"--set {override}: expected KEY=VALUE, such as tokenizer.vocab_size=2048")
            continue
        table = data
        for depth, part in enumerate(tables, start=1):
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                problems.append(f"--set {override}: {'.'.join(tables[:depth])} is not a table")
                break
        else:
            table[name] = _parse_value(text.strip())
            overridden[".".join([*tables, name])] = override
    return overridden, problems


def override_values(overrides: Sequence[str]) -> dict[str, Any]:
    """Return overrides such as `rl.in_flight=8` as tables; InputError if one is not understood."""
    data: dict[str, Any] = {}
    if problems := _apply(overrides, data)[1]:
        raise InputError("\n".join(problem.removeprefix("--set ") for problem in problems))
    return data


def _parse_value(text: str) -> object:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        return CommandLineValue(text)
    return _mark_strings(parsed["value"]) if parsed.keys() == {"value"} else CommandLineValue(text)


def _mark_strings(value: object) -> object:
    if isinstance(value, str):
        return CommandLineValue(value)
    if isinstance(value, list):
        return [_mark_strings(item) for item in value]
    if isinstance(value, dict):
        return {key: _mark_strings(item) for key, item in value.items()}
    return value


# ------------------------------------------------------------------------------------------ explaining errors

_EXPECTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "path_type": "a path in a string",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "invalid-json-value": "a value JSON can hold",
}


def _describe(root: type[Settings], error: ErrorDetails) -> Iterator[str]:
    """Yield one pydantic error as lines that use the recipe's keys."""
    key, kind, seen, limits = _dotted(error["loc"]), error["type"], error["input"], error.get("ctx", {})
    if kind == "extra_forbidden":
        yield _unknown_key(root, error["loc"])
    elif kind == "missing":
        yield f"{key} is missing{_doc(root, error['loc'])}"
    elif kind in _EXPECTED:
        yield f"{key} must be {_EXPECTED[kind]}, not {show_value(seen)}"
    elif kind == "literal_error":
        yield f"{key} must be {limits['expected']}, not {show_value(seen)}"
    elif kind == "too_short" and seen:
        return  # pydantic counts items that were themselves refused; those have lines of their own
    elif kind in ("too_short", "string_too_short"):
        yield f"{key} must not be empty"
    elif kind == "value_error":
        # A message of a table's own check starts with the key it is about; a message of a field's check does not.
        joint = "" if not error["loc"] else "." if _table_at(root, error["loc"]) else " "
        for line in str(limits["error"]).splitlines():
            yield f"{key}{joint}{line}"
    else:
        reason = error["msg"].removeprefix("Input should be ").replace("greater than or equal to", "at least")
        yield f"{key} must be {reason}, not {show_value(seen)}"


def _name_override(line: str, loc: Sequence[int | str], overridden: Mapping[str, str]) -> str:
    """Prefix the line with the override that wrote the key, so that the user does not search the file for it."""
    key = _dotted(loc)
    for name, override in overridden.items():
        if key == name or key.startswith((f"{name}.", f"{name}[")) or name.startswith(f"{key}."):
            return f"--set {override}: {line}"
    return line


def _dotted(loc: Sequence[int | str]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).removeprefix(".")


def table_of(field: FieldInfo) -> type[Settings] | None:
    """Return the settings class of a field that is a table or a list of tables."""
    kinds = [field.annotation]
    while kinds:
        kind = kinds.pop(0)
        if isinstance(kind, type) and issubclass(kind, Settings):
            return kind
        kinds += get_args(kind)
    return None


def _table_at(root: type[Settings], loc: Sequence[int | str]) -> type[Settings] | None:
    table: type[Settings] | None = root
    for part in loc:
        if isinstance(part, str):  # a number only says which table of a list
            field = table.model_fields.get(part) if table else None
            table = table_of(field) if field else None
    return table


def _doc(root: type[Settings], loc: Sequence[int | str]) -> str:
    owner = _table_at(root, loc[:-1])
    field = owner.model_fields.get(str(loc[-1])) if owner else None
    return f": {field.description}" if field and field.description else ""


def _unknown_key(root: type[Settings], loc: Sequence[int | str]) -> str:
    owner, name = _table_at(root, loc[:-1]) or root, str(loc[-1])
    where = f"[{_dotted(loc[:-1])}]" if loc[:-1] else "the recipe"
    if name in owner.renamed_keys:
        new = owner.renamed_keys[name]
        if new.startswith("["):  # a table of its own
            return f"{_dotted(loc)} is now {new}; move it there"
        return f"{_dotted(loc)} is now called {_dotted([*loc[:-1], new])}; rename it"
    elsewhere = [key.name for key in settings_keys(root) if key.name.rpartition(".")[2] == name]
    if elsewhere and name not in owner.model_fields:
        # The usual TOML mistake: a key written below the wrong header.
        nearest = min(elsewhere, key=lambda key: key.count("."))
        return f"{_dotted(loc)} is not a key of {where}; did you mean {nearest}?"
    return f"{_dotted(loc)} is not a key of {where}; {suggest(name, list(owner.model_fields))}"


def show_value(value: object) -> str:
    """Return a value as JSON, shortened to fit in an error message."""
    return _shorten(_to_json(value))


def _to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


# ------------------------------------------------------------------------------------------ writing and comparing


def render_toml(settings: Settings) -> str:
    """Return the settings as TOML with every default written out; loading it again gives equal settings."""
    return tomli_w.dumps(settings_data(settings))


def settings_data(settings: Settings) -> dict[str, Any]:
    """Return the settings as plain JSON values, absent keys left out."""
    return settings.model_dump(mode="json", exclude_none=True)


def differing_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return one line per key that differs, such as `nll.window: 512 -> 256` or `tasks.build[train].count: 9 -> 5`."""
    before, after = ({key: _to_json(value) for key, value in _leaves(each)} for each in (old, new))
    keys = [*before, *(key for key in after if key not in before)]
    pairs = [(key, before.get(key, "(absent)"), after.get(key, "(absent)")) for key in keys]
    return [f"{key}: {_show_change(was, now)}" for key, was, now in pairs if was != now]


def _show_change(was: str, now: str) -> str:
    """Show both values, shortened unless that makes them look equal."""
    short = _shorten(was), _shorten(now)
    return " -> ".join(short if short[0] != short[1] else (was, now))


def _leaves(value: object, key: str = "") -> Iterator[tuple[str, object]]:
    """Yield every value with its dotted key; items of a list of tables by the table's name, or else by index."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else name)
    elif isinstance(value, list) and value and all(isinstance(inner, dict) for inner in value):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{key}[{inner.get('name', index)}]")
    else:
        yield key, value


# ------------------------------------------------------------------------------------------ listing keys


@dataclass(frozen=True)
class SettingsKey:
    """One key a recipe may hold: dotted name, type and default as a user would write them, and meaning."""

    name: str
    type: str
    default: str
    doc: str


def settings_keys(root: type[Settings], prefix: str = "") -> list[SettingsKey]:
    """Return every key of a settings class and of the tables in it, in order."""
    keys = []
    for name, field in root.model_fields.items():
        if inner := table_of(field):
            many = "[]" if "tuple[" in str(field.annotation) else ""  # a list of tables
            keys += settings_keys(inner, f"{prefix}{name}{many}.")
        else:
            keys.append(SettingsKey(f"{prefix}{name}", _type_name(field), _default(field), field.description or ""))
    return keys


def _type_name(field: FieldInfo) -> str:
    text = str(field.annotation)
    if choices := re.search(r"Literal\[(.*?)\]", text):
        words = choices[1].replace("'", '"').replace(", ", " | ")
        return f"list of {words}" if "tuple[" in text else words
    names = {"tuple[float": "list of numbers", "tuple[typing.Annotated[int": "list of integers"}
    names |= {"tuple[": "list of strings", "dict[": "table", "Path": "path"}
    names |= {"int": "integer", "float": "number", "bool": "true | false"}
    return next((shown for part, shown in names.items() if part in text), "string")


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    extra = field.json_schema_extra
    if isinstance(extra, dict) and isinstance(makers := extra.get("made_by"), list):
        return f"from {' or '.join(map(str, makers))}"
    return "none" if field.default is None else show_value(field.default)
