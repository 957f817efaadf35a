"""The tables of task.toml in the Harbor format, schema 1.4: types, defaults, legacy key names.

A value of the wrong type is an error that names the file and the key. Unknown keys are accepted, as Harbor does (they
may come from a newer writer); `unknown_keys` lists them for lint.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from etude.config import Settings, make_settings
from etude.errors import InputError
from etude.tasks.task import Artifact, CollectCommand, MachineSpec, NetworkAccess, NetworkMode, TaskPhase

SCHEMA_VERSION = "1.4"
DEFAULT_VERIFIER_TIMEOUT_S = 600.0
_SIZE = re.compile(r"([0-9.]+)\s*([GMK])", re.IGNORECASE)


def read_config(config: Mapping[str, Any], where: str) -> "TaskTable":
    """Return the tables of a parsed task.toml; InputError starts with `where` and names the key."""
    return make_settings(TaskTable, where, **config)


def unknown_keys(config: Mapping[str, Any]) -> list[str]:
    """Return the keys of a valid task.toml that the format does not define, as dotted paths."""
    return list(_unknown(read_config(config, "task.toml"), ""))


def _unknown(table: "TomlTable", prefix: str) -> Iterator[str]:
    yield from (f"{prefix}{key}" for key in table.model_extra or ())
    for name in table.model_fields_set:
        value = getattr(table, name, None)
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, TomlTable):
                yield from _unknown(inner, f"{prefix}{name}.")


# ------------------------------------------------------------------------------------------------- values


def _matching(pattern: str, expected: str) -> AfterValidator:
    """Return a check that a text matches completely."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"must be {expected}, not {text!r}")
        return text

    return AfterValidator(check)


def _user(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _rewards(value: Any) -> Any:
    """A single number is the least value of the key `reward`."""
    return value if isinstance(value, dict) else {"reward": value}


def _artifact(value: Any) -> Any:
    return {"source": value} if isinstance(value, str) else value


_UP = r"(^|.*/)\.\.(/.*|$)"  # a path with ..
Positive = Annotated[float, Field(gt=0, lt=1e12)]
NotNegative = Annotated[float, Field(ge=0, lt=1e12)]
Size = Annotated[str, _matching(rf"\s*{_SIZE.pattern}\s*|", 'a size such as "2G" or "512M"')]
User = Annotated[str, BeforeValidator(_user), Field(min_length=1)]
DirectoryInPod = Annotated[str, _matching(rf"(?!{_UP})/.*|", "an absolute path")]
PathInPod = Annotated[str, _matching(rf"(?!{_UP}).+", "a path in the pod without ..")]
CollectedPath = Annotated[
    str, _matching(rf"(?!/|{_UP}|manifest\.json$).*", "a relative path without .., other than manifest.json")
]


# ------------------------------------------------------------------------------------------------- tables


class TomlTable(Settings, extra="allow"):
    """One table of task.toml."""


class HealthcheckTable(TomlTable):
    command: str = ""
    interval_sec: NotNegative | None = None
    timeout_sec: NotNegative | None = None
    start_period_sec: NotNegative | None = None
    start_interval_sec: NotNegative | None = None
    retries: int | None = None


class NetworkTable(TomlTable):
    """The keys of a table that may set the network access of a phase."""

    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] = Field(default_factory=list)

    @model_validator(mode="after")
    def _hosts_need_the_allowlist(self) -> Self:
        if self.allowed_hosts and self.network_mode != "allowlist":
            raise ValueError('allowed_hosts must be absent unless network_mode is "allowlist"')
        return self

    def network(self) -> NetworkAccess | None:
        """Return the network access that the table requests, or None if it sets none."""
        return NetworkAccess(self.network_mode, tuple(self.allowed_hosts)) if self.network_mode else None


class MachineTable(NetworkTable):
    """An [environment] table, of the task or of its verifier."""

    build_timeout_sec: Positive = DEFAULT_VERIFIER_TIMEOUT_S
    docker_image: str = ""
    os: Literal["linux"] = "linux"  # pods run no other system
    cpus: Positive | None = None
    memory_mb: Positive | None = None
    storage_mb: Positive | None = None
    env: dict[str, str] = Field(default_factory=dict)
    workdir: DirectoryInPod = ""
    healthcheck: HealthcheckTable | None = None
    # not supported by pods: an error when the task is run
    gpus: Any = None
    gpu_types: Any = None
    tpu: Any = None
    mcp_servers: Any = None
    skills_dir: Any = None
    # legacy names
    memory: Size = ""
    storage: Size = ""
    allow_internet: Any = None

    def spec(self) -> MachineSpec:
        legacy = self.allow_internet
        network = NetworkAccess("public" if legacy else "no-network") if isinstance(legacy, bool) else NetworkAccess()
        return MachineSpec(
            image=self.docker_image,
            build_timeout_s=self.build_timeout_sec,
            cpus=self.cpus,
            memory_mb=int(self.memory_mb) if self.memory_mb is not None else _legacy_size(self.memory),
            storage_mb=int(self.storage_mb) if self.storage_mb is not None else _legacy_size(self.storage),
            network=self.network() or network,
            env=self.env,
            workdir=self.workdir,
            healthcheck=self.healthcheck.model_dump(exclude_none=True) if self.healthcheck else {},
        )


def _legacy_size(text: str) -> int | None:
    """Return the megabytes of a size such as "2G", the form used before memory_mb."""
    found = _SIZE.fullmatch(text.strip())
    return int(float(found[1]) * {"G": 1024, "M": 1, "K": 1 / 1024}[found[2].upper()]) if found else None


class AgentTable(NetworkTable):
    timeout_sec: Positive | None = None
    user: User | None = None

    def phase(self) -> TaskPhase:
        return TaskPhase(self.timeout_sec, self.user, {}, self.network())


class CollectTable(TomlTable):
    """A command that runs before artifacts are collected."""

    command: Annotated[str, Field(min_length=1)]
    service: Any = None
    timeout_sec: Positive = 60.0
    user: User | None = None

    def hook(self) -> CollectCommand:
        return CollectCommand(self.command, self.timeout_sec, self.user)


class VerifierTable(AgentTable):
    env: dict[str, str] = Field(default_factory=dict)
    environment_mode: Literal["shared", "separate"] | None = None
    environment: MachineTable | None = None
    collect: list[CollectTable] = Field(default_factory=list)

    @model_validator(mode="after")
    def _shared_has_no_machine(self) -> Self:
        if self.environment_mode == "shared" and self.environment is not None:
            raise ValueError('environment must be absent when environment_mode is "shared"')
        return self

    def verifier_phase(self, default_s: float | None) -> TaskPhase:
        return TaskPhase(self.timeout_sec or default_s, self.user, self.env, self.network())

    def machine(self, default: MachineSpec, inherited: MachineSpec | None = None) -> MachineSpec | None:
        """Return the machine of a separate verifier, None if it shares the agent's; `inherited` is the task's."""
        if self.environment is not None:
            return self.environment.spec()
        return {"shared": None, "separate": inherited or default}.get(self.environment_mode or "", inherited)


class ArtifactTable(TomlTable):
    source: PathInPod
    destination: CollectedPath = ""
    exclude: list[str] = Field(default_factory=list)
    service: Literal["main"] = "main"  # pods have no other services

    def artifact(self) -> Artifact:
        return Artifact(self.source, self.destination, tuple(self.exclude))


class StepTable(TomlTable):
    name: Annotated[str, _matching(r"[A-Za-z0-9][A-Za-z0-9._-]*", "a single directory name")]
    agent: AgentTable = AgentTable()
    verifier: VerifierTable = VerifierTable()
    min_reward: Annotated[dict[str, float], BeforeValidator(_rewards)] = Field(default_factory=dict)
    healthcheck: HealthcheckTable | None = None
    artifacts: list[Annotated[ArtifactTable, BeforeValidator(_artifact)]] = Field(default_factory=list)


class SolutionTable(TomlTable):
    env: dict[str, str] = Field(default_factory=dict)


class NameTable(TomlTable):
    """The table [task]."""

    name: Annotated[
        str, _matching(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*", 'a name of the form "org/name"')
    ]
    version: Any = None
    description: Any = None
    authors: Any = None
    keywords: Any = None


class TaskTable(TomlTable):
    """A whole task.toml. Any version is accepted: some sets put their own version there."""

    schema_version: str = SCHEMA_VERSION
    version: str = SCHEMA_VERSION  # the legacy name
    source: Any = None
    artifacts: list[Annotated[ArtifactTable, BeforeValidator(_artifact)]] = Field(default_factory=list)
    steps: list[StepTable] = Field(default_factory=list)
    multi_step_reward_strategy: Literal["mean", "final"] = "mean"
    multi_step_reward_mode: Any = None
    task: NameTable | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    agent: AgentTable = AgentTable()
    verifier: VerifierTable = VerifierTable()
    solution: SolutionTable = SolutionTable()
    environment: MachineTable = MachineTable()

    @model_validator(mode="after")
    def _step_names_are_unique(self) -> Self:
        names = [step.name for step in self.steps]
        for number, name in enumerate(names):
            if name in names[:number]:
                raise ValueError(f"steps[{number}].name must be unique, not {name!r}")
        return self


# ------------------------------------------------------------------------------------------------- variables


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
