"""Typed settings read from TOML: the base class of every settings class, strict loading, errors and key listings.

A settings class lives next to the code that it configures; `etude.recipe` puts all of them together. `Registry` holds
the named plugins that a recipe chooses from; installed packages add to it through `etude.plugins`.
"""

from etude.config.loading import (
    SettingsKey,
    differing_keys,
    load_settings,
    load_table,
    make_settings,
    read_toml,
    render_toml,
    settings_data,
    settings_keys,
    suggest,
    table_of,
)
from etude.config.plugins import Registry, load_plugins
from etude.config.settings import (
    AbsolutePath,
    CommandLineValue,
    HuggingFaceConfig,
    NameOrPath,
    Settings,
    StageSettings,
    made_by,
    resolve_name_or_path,
    resolve_path,
)

__all__ = [
    "AbsolutePath",
    "CommandLineValue",
    "HuggingFaceConfig",
    "NameOrPath",
    "Registry",
    "Settings",
    "SettingsKey",
    "StageSettings",
    "differing_keys",
    "load_plugins",
    "load_settings",
    "load_table",
    "made_by",
    "make_settings",
    "read_toml",
    "render_toml",
    "resolve_name_or_path",
    "resolve_path",
    "settings_data",
    "settings_keys",
    "suggest",
    "table_of",
]
