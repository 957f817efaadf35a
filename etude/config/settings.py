"""The base classes of everything a recipe configures, and the types of its keys.

A settings class lives next to the code that uses it and is that code's only configuration object. It is frozen, strict
(nothing is coerced) and closed (an unknown key is an error). Relative paths are relative to the recipe's directory.
"""

import math
import os
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, ValidationInfo


class CommandLineValue(str):
    """A string given on the command line: a relative path in it is resolved against the working directory."""


class Settings(BaseModel):
    """One table of a recipe."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    # Keys that earlier versions had, with their new names. Using one is an error that names the new key. A new name
    # that starts with a bracket is a table elsewhere in the recipe, such as "[evaluation]".
    renamed_keys: ClassVar[dict[str, str]] = {}


class StageSettings(Settings):
    """The table of a pipeline stage: given only when that stage runs."""


def made_by(*stages: str, doc: str) -> Any:
    """Declare a key for an input that an earlier stage may produce: forbidden if one of them runs, required if not."""
    return Field(default=None, description=doc, json_schema_extra={"made_by": list(stages)})


def resolve_path(value: object, info: ValidationInfo) -> object:
    """Make a path string absolute. Other values are returned unchanged; the type check reports them."""
    if not isinstance(value, str):
        return value
    if not value:
        raise ValueError("must be a path, not an empty string")
    recipe_directory = (info.context or {}).get("directory", Path.cwd())
    directory = Path.cwd() if isinstance(value, CommandLineValue) else recipe_directory
    return os.path.abspath(os.path.join(directory, os.path.expanduser(value)))


def resolve_name_or_path(value: object, info: ValidationInfo) -> object:
    """Make a string absolute if it contains a separator; a plain name stays a name."""
    return resolve_path(value, info) if isinstance(value, str) and os.sep in value else value


def _check_toml_value(config: dict[str, JsonValue]) -> dict[str, JsonValue]:
    def check(value: JsonValue, key: str) -> None:
        if value is None:
            raise ValueError(f"{key} is null, which TOML cannot hold: leave the key out")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{key} is {value}, which JSON cannot hold")
        if isinstance(value, dict | list):
            for name, item in value.items() if isinstance(value, dict) else enumerate(value):
                check(item, f"{key}.{name}")

    for name, item in config.items():
        check(item, name)
    return config


AbsolutePath = Annotated[Path, Field(strict=False), BeforeValidator(resolve_path)]
NameOrPath = Annotated[str, Field(min_length=1), BeforeValidator(resolve_name_or_path)]
HuggingFaceConfig = Annotated[dict[str, JsonValue], AfterValidator(_check_toml_value)]
