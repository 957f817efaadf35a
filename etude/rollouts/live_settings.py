"""Settings of `[rl]` that may change while a run goes on.

    etude change RUN rl.temperature=0.9 rl.in_flight=32 rl.rewards.effort_spent=0.05

writes them to `live.toml` in the run directory, which has the form of a recipe and is laid over that of the run:

    [rl]
    temperature = 0.9
    in_flight = 32

    [rl.rewards]
    effort_spent = 0.05

The file may be edited too. Services that see the run directory read it when it has changed, workers get the changes
with their heartbeats. An invalid file changes nothing. `rl/changes.jsonl` records each change with the policy step at
which it took effect; a resumed run keeps what was last in force.
"""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from etude.config import load_table, make_settings, merged, read_toml, table_values
from etude.errors import InputError
from etude.rollouts.settings import RolloutSettings
from etude.runs.layout import RunLayout

SettingsT = TypeVar("SettingsT", bound=RolloutSettings)
TABLE = "rl"

# The keys of [rl] that may change, and what a change applies to.
LIVE_KEYS = {
    "temperature": "rollouts that start from now on; each is trained at its own temperature",
    "budget": "rollouts that start from now on; evaluations keep that of the recipe",
    "rewards": "the groups of the next policy step, all of whose rollouts are scored with the new weights",
    "effort": "rollouts that start from now on",
    "curriculum": "prompts that are started from now on",
    "in_flight": "rollouts that start from now on; those beyond a lower number are finished",
    "workers": "at once; workers that are too many finish their rollouts and end",
}
NOT_READ = (-1, -1)  # stamp of a file
FIXED = ("curriculum.siblings",)  # has a service of its own


class LiveSettings(Generic[SettingsT]):
    """The settings of `[rl]` in force, as one process sees them."""

    def __init__(self, layout: RunLayout, kind: type[SettingsT]) -> None:
        self.layout, self.kind = layout, kind
        self.problem = ""  # of the file
        self.changes: Mapping[str, Any] = last_recorded(layout)
        self.settings: SettingsT = changed_settings(layout, kind, self.changes)
        self._stamp: tuple[int, int] | None = NOT_READ

    def current(self) -> SettingsT:
        """Return the settings in force; while the file is invalid, those before."""
        stamp = _stamp(self.layout.live)
        if stamp == self._stamp:
            return self.settings
        self._stamp, self.problem = stamp, ""
        try:
            changes = read_changes(self.layout)
            self.settings, self.changes = changed_settings(self.layout, self.kind, changes), changes
        except InputError as error:
            self.problem = f"{error}; nothing was changed"
        return self.settings


def read_changes(layout: RunLayout) -> dict[str, Any]:
    """Return the changes in `live.toml`; InputError if it has other keys than those that may change."""
    return check_changes(read_toml(layout.live), str(layout.live)) if layout.live.exists() else {}


def check_changes(data: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the changes in a table like that of `live.toml`; InputError if a key may not change."""
    changes = data.get(TABLE, {})
    if other := sorted(data.keys() - {TABLE}):
        raise InputError(f"{where}: {other[0]}: only keys of [{TABLE}] can change while a run goes on")
    if not isinstance(changes, dict):
        raise InputError(f"{where}: {TABLE} must be a table")
    for key, value in changes.items():
        if key not in LIVE_KEYS:
            can = f"these can: {', '.join(LIVE_KEYS)}"
            raise InputError(f"{where}: {TABLE}.{key} cannot change while a run goes on; {can}")
        if fixed := [name for name in FIXED if isinstance(value, dict) and name in (f"{key}.{each}" for each in value)]:
            raise InputError(f"{where}: {TABLE}.{fixed[0]} cannot change while a run goes on")
    return changes


def changed_settings(layout: RunLayout, kind: type[SettingsT], changes: Mapping[str, Any]) -> SettingsT:
    """Return the settings of a run's recipe with changes; InputError if they are invalid."""
    if not changes:
        return load_table(layout.recipe, TABLE, kind)
    known = {key: value for key, value in changes.items() if key in kind.model_fields}
    return make_settings(kind, str(layout.live), **merged(table_values(layout.recipe, TABLE, kind), known))


def differing(before: RolloutSettings, after: RolloutSettings) -> dict[str, tuple[Any, Any]]:
    """Return the values of the live keys that differ, before and after, as they are in a recipe."""
    found = {key: tuple(_plain(settings, key) for settings in (before, after)) for key in LIVE_KEYS}
    return {key: (old, new) for key, (old, new) in found.items() if old != new}


# ------------------------------------------------------------------------------------------- the record


def record_changes(layout: RunLayout, step: int, changes: Mapping[str, tuple[Any, Any]]) -> None:
    """Record that live keys have another value from a policy step on."""
    if not changes:
        return
    lines = [
        json.dumps({"step": step, "time": time.time(), "key": f"{TABLE}.{key}", "before": old, "value": new}) + "\n"
        for key, (old, new) in changes.items()
    ]
    with open(layout.changes, "a", encoding="utf-8") as log:
        log.write("".join(lines))
        log.flush()
        os.fsync(log.fileno())


def recorded_changes(layout: RunLayout) -> list[dict[str, Any]]:
    """Return what was recorded, oldest first."""
    try:
        lines = layout.changes.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line.endswith("}")]  # the last line may be incomplete


def last_recorded(layout: RunLayout) -> dict[str, Any]:
    """Return the changes that were in force last."""
    return {entry["key"].removeprefix(f"{TABLE}."): entry["value"] for entry in recorded_changes(layout)}


def _plain(settings: RolloutSettings, key: str) -> Any:
    if key not in type(settings).model_fields:
        return None
    return settings.model_dump(mode="json", include={key})[key]


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
