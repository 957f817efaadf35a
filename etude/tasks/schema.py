"""Read task.toml of the Harbor format, schema 1.4: defaults, legacy key names, validation.

Unknown keys are ignored, as Harbor does (they may come from a newer writer); `unknown_keys` lists them for lint. A
value of the wrong type is an error that names the key.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, cast

from etude.errors import InputError
from etude.tasks.task import MachineSpec, NetworkAccess, NetworkMode, TaskPhase

SCHEMA_VERSION = "1.4"
DEFAULT_VERIFIER_TIMEOUT_S = 600.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_STEP = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SIZE = re.compile(r"([0-9.]+)\s*([GMK])", re.IGNORECASE)

_PHASE = ("network_mode", "allowed_hosts")
_MACHINE = (
    *("build_timeout_sec", "docker_image", "os", "cpus", "memory_mb", "storage_mb", "gpus", "gpu_types", "tpu", "env"),
    *("network_mode", "allowed_hosts", "mcp_servers", "skills_dir", "workdir", "healthcheck"),
    *("memory", "storage", "allow_internet"),  # legacy names
)
_VERIFIER = ("timeout_sec", "env", "user", *_PHASE, "environment_mode", "environment", "collect")
_HEALTH = ("command", "interval_sec", "timeout_sec", "start_period_sec", "start_interval_sec", "retries")
KNOWN_KEYS: Mapping[str, tuple[str, ...]] = {
    "": (
        *("schema_version", "version", "source", "artifacts", "steps", "multi_step_reward_strategy"),
        *("multi_step_reward_mode", "task", "metadata", "agent", "verifier", "solution", "environment"),
    ),
    "task": ("name", "version", "description", "authors", "keywords"),
    "agent": ("timeout_sec", "user", *_PHASE),
    "verifier": _VERIFIER,
    "verifier.environment": _MACHINE,
    "verifier.environment.healthcheck": _HEALTH,
    "verifier.collect": ("command", "service", "timeout_sec", "user"),
    "solution": ("env",),
    "environment": _MACHINE,
    "environment.healthcheck": _HEALTH,
    "environment.mcp_servers": ("name", "transport", "url", "command", "args", "headers"),
    "artifacts": ("source", "destination", "exclude", "service"),
    "steps": ("name", "agent", "verifier", "min_reward", "healthcheck", "artifacts"),
    "steps.agent": ("timeout_sec", "user", *_PHASE),
    "steps.verifier": _VERIFIER,
    "steps.verifier.environment": _MACHINE,
    "steps.healthcheck": _HEALTH,
    "steps.artifacts": ("source", "destination", "exclude", "service"),
}
_FREE_FORM = ("metadata", "env", "headers", "min_reward", "authors", "tpu")  # tables with arbitrary keys


def unknown_keys(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield keys of task.toml that the format does not define, as dotted paths."""
    for key, value in config.items():
        path = f"{prefix}.{key}" if prefix else key
        if prefix in KNOWN_KEYS and key not in KNOWN_KEYS[prefix]:
            yield path
            continue
        if key in _FREE_FORM:
            continue
        for table in value if isinstance(value, list) else [value]:
            if isinstance(table, dict):
                yield from unknown_keys(table, path)


class TomlTable:
    """One table of task.toml with typed access to its keys; errors name the file and the key."""

    def __init__(self, values: Any, where: str) -> None:
        if not isinstance(values, Mapping):
            raise InputError(f"{where}: expected a table")
        self.values, self.where = values, where

    def error(self, key: str, expected: str) -> InputError:
        return InputError(f"{self.where}.{key}: {self.values.get(key)!r}; expected {expected}")

    def table(self, key: str) -> "TomlTable":
        return TomlTable(self.values.get(key, {}), f"{self.where}.{key}")

    def tables(self, key: str) -> list["TomlTable"]:
        found = self.values.get(key, [])
        if not isinstance(found, list):
            raise self.error(key, "a list of tables")
        return [TomlTable(values, f"{self.where}.{key}[{number}]") for number, values in enumerate(found)]

    def string(self, key: str, default: str = "") -> str:
        value = self.values.get(key, default)
        if not isinstance(value, str):
            raise self.error(key, "a string")
        return value

    def number(self, key: str, *, integer: bool = False, above: float = 0.0) -> float | None:
        value = self.values.get(key)
        if value is None:
            return None
        types = (int,) if integer else (int, float)
        if isinstance(value, bool) or not isinstance(value, types) or not above < value < 1e12:
            raise self.error(key, f"{'an integer' if integer else 'a number'} over {above:g}")
        return float(value)

    def one_of(self, key: str, allowed: tuple[str, ...], default: str) -> str:
        value = self.string(key, default)
        if value not in allowed:
            raise self.error(key, " or ".join(allowed))
        return value

    def strings(self, key: str) -> tuple[str, ...]:
        value = self.values.get(key) or []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(key, "a list of strings")
        return tuple(value)

    def env(self) -> dict[str, str]:
        value = self.values.get("env", {})
        if not isinstance(value, Mapping) or not all(isinstance(item, str) for item in value.values()):
            raise self.error("env", "a table of strings")
        return dict(value)

    def user(self) -> str | None:
        value = self.values.get("user")
        if value is not None and (isinstance(value, bool) or not isinstance(value, str | int) or value == ""):
            raise self.error("user", "a user name or id")
        return None if value is None else str(value)


# ------------------------------------------------------------------------------------------------- tables


def read_network(table: TomlTable) -> NetworkAccess | None:
    """Return the network access a table requests, or None if it sets none."""
    mode: str | None = None
    if "network_mode" in table.values:
        mode = table.one_of("network_mode", ("public", "no-network", "allowlist"), "public")
    elif isinstance(legacy := table.values.get("allow_internet"), bool):
        mode = "public" if legacy else "no-network"
    hosts = table.strings("allowed_hosts")
    if mode is None:
        if hosts:
            raise table.error("allowed_hosts", 'none without network_mode = "allowlist"')
        return None
    if mode != "allowlist" and hosts:
        raise table.error("allowed_hosts", 'none unless network_mode is "allowlist"')
    return NetworkAccess(cast(NetworkMode, mode), hosts)


def read_machine(table: TomlTable) -> MachineSpec:
    """Read an [environment] table, of the task or of its verifier."""
    if table.one_of("os", ("linux", "windows"), "linux") == "windows":
        raise table.error("os", "linux; pods run no other system")
    memory, storage = table.number("memory_mb"), table.number("storage_mb")
    health = table.table("healthcheck").values if "healthcheck" in table.values else {}
    return MachineSpec(
        image=table.string("docker_image"),
        build_timeout_s=table.number("build_timeout_sec") or DEFAULT_VERIFIER_TIMEOUT_S,
        cpus=table.number("cpus"),
        memory_mb=int(memory) if memory is not None else _legacy_size(table, "memory"),
        storage_mb=int(storage) if storage is not None else _legacy_size(table, "storage"),
        network=read_network(table) or NetworkAccess(),
        env=table.env(),
        workdir=_absolute(table, "workdir"),
        healthcheck=dict(health),
    )


def _legacy_size(table: TomlTable, key: str) -> int | None:
    """Read a size such as `memory = "2G"`, the form used before memory_mb."""
    text = table.string(key)
    if not text:
        return None
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise table.error(key, 'a size such as "2G" or "512M"')
    return int(float(found[1]) * {"G": 1024, "M": 1, "K": 1 / 1024}[found[2].upper()])


def _absolute(table: TomlTable, key: str) -> str:
    path = table.string(key)
    if path and (not path.startswith("/") or ".." in path.split("/")):
        raise table.error(key, "an absolute path")
    return path


def read_agent(table: TomlTable) -> TaskPhase:
    return TaskPhase(table.number("timeout_sec"), table.user(), {}, read_network(table))


def read_verifier(
    table: TomlTable, default_s: float | None = DEFAULT_VERIFIER_TIMEOUT_S
) -> tuple[TaskPhase, MachineSpec | None]:
    """Read a [verifier] table and its own machine, if any. The caller resolves "separate" without a machine."""
    mode = table.string("environment_mode")
    if mode and mode not in ("shared", "separate"):
        raise table.error("environment_mode", "shared or separate")
    if mode == "shared" and "environment" in table.values:
        raise table.error("environment", 'none when environment_mode is "shared"')
    for hook in table.tables("collect"):
        if not hook.string("command"):
            raise hook.error("command", "a shell command")
    own = read_machine(table.table("environment")) if "environment" in table.values else None
    phase = TaskPhase(table.number("timeout_sec") or default_s, table.user(), table.env(), read_network(table))
    return phase, own


def read_artifacts(table: TomlTable) -> tuple[Mapping[str, Any], ...]:
    """Read `artifacts`: each entry is a path, or a table with a `source` path."""
    found = table.values.get("artifacts", [])
    if not isinstance(found, list):
        raise table.error("artifacts", "a list of paths or tables")
    return tuple(_artifact(item, f"{table.where}.artifacts[{number}]") for number, item in enumerate(found))


def _artifact(item: Any, where: str) -> Mapping[str, Any]:
    entry = TomlTable({"source": item} if isinstance(item, str) else item, where)
    source, target = entry.string("source"), entry.string("destination")
    if not source or ".." in source.split("/"):
        raise entry.error("source", "a path in the pod without ..")
    if target and (target.startswith("/") or ".." in target.split("/") or target == "manifest.json"):
        raise entry.error("destination", "a relative path without .., other than manifest.json")
    if entry.string("service", "main") != "main":
        raise entry.error("service", "main; pods have no other services")
    return {"source": source, "destination": target, "exclude": entry.strings("exclude")}


def read_min_rewards(table: TomlTable) -> dict[str, float]:
    """Read `min_reward`: a number for the key `reward`, or a table with one number per key."""
    value = table.values.get("min_reward")
    if value is None:
        return {}
    found = value if isinstance(value, Mapping) else {"reward": value}
    if any(isinstance(item, bool) or not isinstance(item, int | float) for item in found.values()):
        raise table.error("min_reward", "a number, or a table of numbers")
    return {key: float(item) for key, item in found.items()}


def read_name(config: TomlTable, directory: str) -> str:
    """Return the task's name: `[task] name`, else the directory's name."""
    if "task" not in config.values:
        return directory
    name = config.table("task").string("name")
    if not _NAME.fullmatch(name):
        raise config.table("task").error("name", 'a name of the form "org/name"')
    return name


def read_version(config: TomlTable) -> str:
    """Return the schema version, under its current or legacy key. Any string is accepted: some sets put their own
    version there."""
    version = config.values.get("schema_version", config.values.get("version", SCHEMA_VERSION))
    if not isinstance(version, str):
        raise config.error("schema_version", f'a string such as "{SCHEMA_VERSION}"')
    return version


def read_step_name(table: TomlTable, seen: set[str]) -> str:
    name = table.string("name")
    if not _STEP.fullmatch(name) or name in seen:
        raise table.error("name", "a unique name that is a single directory name")
    seen.add(name)
    return name


def read_step_reward_strategy(config: TomlTable) -> Literal["mean", "final"]:
    found = config.one_of("multi_step_reward_strategy", ("mean", "final"), "mean")
    return "final" if found == "final" else "mean"


_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")


def resolve_env(env: Mapping[str, str], given: Mapping[str, str], where: str) -> dict[str, str]:
    """Replace `${NAME}` and `${NAME:-default}` by the caller's variables; this process's own are never used."""

    def value(name: str) -> Callable[["re.Match[str]"], str]:
        def replace(found: "re.Match[str]") -> str:
            if found[1] in given:
                return given[found[1]]
            if found[2] is not None:
                return found[2]
            raise InputError(f"{where}: {name} needs the variable {found[1]}; give it with --env {found[1]}=VALUE")

        return replace

    return {name: _VARIABLE.sub(value(name), text) for name, text in env.items()}
