"""Typed settings read from TOML: the base class of every settings class, strict loading, errors and key listings.

A settings class lives next to the code that it configures; `etude.recipe` puts all of them together. `Registry` holds
things that a recipe chooses by name; plugins add to it (`import_plugins`).
"""

from etude.config.loading import (
    differing_keys,
    load_settings,
    load_table,
    make_settings,
    merged,
    override_values,
    read_toml,
    render_toml,
    settings_data,
    settings_keys,
    table_of,
    table_values,
)
from etude.config.plugins import (
    Registry,
    check_options,
    import_plugins,
    is_plugin_file,
    registered,
)
from etude.config.settings import (
    AbsolutePath,
    HuggingFaceConfig,
    NameOrPath,
    Settings,
    StageSettings,
    made_by,
    resolve_path,
)
from etude.errors import suggest

__all__ = [
    "AbsolutePath",
    "HuggingFaceConfig",
    "NameOrPath",
    "Registry",
    "Settings",
    "StageSettings",
    "check_options",
    "differing_keys",
    "import_plugins",
    "is_plugin_file",
    "load_settings",
    "load_table",
    "made_by",
    "make_settings",
    "merged",
    "override_values",
    "read_toml",
    "registered",
    "render_toml",
    "resolve_path",
    "settings_data",
    "settings_keys",
    "suggest",
    "table_of",
    "table_values",
]
