"""A task: a directory in the Harbor format (schema 1.4), read into frozen data.

    <task>/task.toml  instruction.md  environment/Dockerfile  tests/test.sh  solution/solve.sh  [steps/<name>/...]

Etude's own settings are in `[metadata]`, which the format leaves free. This module is the contract; `harbor.py` reads
and writes tasks, `lint.py` checks them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Category = Literal["debugging", "feature", "refactor", "docs", "testing", "review", "devops", "migration", "question"]
TASK_LABELS = ("category", "family", "difficulty")  # keys of the metadata by which results are divided
NetworkMode = Literal["public", "no-network", "allowlist"]


@dataclass(frozen=True)
class NetworkAccess:
    """Network access of a phase; `hosts` applies in allowlist mode only."""

    mode: NetworkMode = "public"
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class MachineSpec:
    """Image, resources and network of the machine a phase runs on: an [environment] table of task.toml."""

    image: str = ""  # `docker_image`; "" builds environment/Dockerfile
    build_timeout_s: float = 600.0
    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    network: NetworkAccess = field(default_factory=NetworkAccess)
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str = ""  # overrides the image's
    healthcheck: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskPhase:
    """How the agent, the verifier or the solution runs. None means the machine's default."""

    timeout_s: float | None = None
    user: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    network: NetworkAccess | None = None


@dataclass(frozen=True)
class Artifact:
    """A file or directory of the agent's pod that is collected for a separate verifier."""

    source: str  # relative to the workspace, or absolute
    destination: str = ""  # in the directory of artifacts; "" is the source's name
    exclude: tuple[str, ...] = ()  # globs


@dataclass(frozen=True)
class CollectCommand:
    """A command that runs in the agent's pod before artifacts are collected."""

    command: str
    timeout_s: float
    user: str | None


@dataclass(frozen=True)
class TaskStep:
    """One step of a multi-step task; its files are in steps/<name>."""

    name: str
    instruction: str
    agent: TaskPhase
    verifier: TaskPhase
    min_rewards: Mapping[str, float] = field(default_factory=dict)  # a lower reward ends the trial after this step
    verifier_machine: MachineSpec | None = None  # of a separate verifier
    artifacts: tuple[Artifact, ...] = ()  # beside the task's
    collect: tuple[CollectCommand, ...] = ()


@dataclass(frozen=True)
class Task:
    """One task. `metadata` is free-form; the properties below read Etude's keys in it."""

    directory: Path
    name: str
    instruction: str
    machine: MachineSpec
    agent: TaskPhase
    verifier: TaskPhase
    solution: TaskPhase
    steps: tuple[TaskStep, ...] = ()
    step_reward_strategy: Literal["mean", "final"] = "mean"
    verifier_machine: MachineSpec | None = None  # of a separate verifier
    artifacts: tuple[Artifact, ...] = ()
    collect: tuple[CollectCommand, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)  # parsed task.toml

    @property
    def category(self) -> str:
        return str(self.metadata.get("category", ""))

    @property
    def may_edit(self) -> bool:
        """Whether files may be changed; False for questions and for requests about code that is already correct."""
        return bool(self.metadata.get("may_edit", True))

    @property
    def protected(self) -> tuple[str, ...]:
        """Globs, relative to the workspace, of files the agent must not change; usually the tests."""
        return tuple(self.metadata.get("protected", ()))

    @property
    def passing_score(self) -> float:
        """The lowest score that counts as solved."""
        return float(self.metadata.get("passing", 1.0))

    @property
    def asks_for_tests(self) -> bool:
        return self.category == "testing"
