"""What an agent is asked to do: a directory in the Harbor task format (schema 1.4), read into frozen data.

    <task>/task.toml  instruction.md  environment/Dockerfile  tests/test.sh  solution/solve.sh  [steps/<name>/...]

Public task sets run here unmodified and ours run elsewhere. What is ours alone stands in `[metadata]`, which the format
leaves free. This file is the contract; `harbor.py` reads and writes it, `lint.py` says what is doubtful in one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Category = Literal["debugging", "feature", "refactor", "docs", "testing", "review", "devops", "migration", "question"]
NetworkMode = Literal["public", "no-network", "allowlist"]


@dataclass(frozen=True)
class Network:
    """Where the machine of a phase may connect to; `hosts` count in allowlist mode only."""

    mode: NetworkMode = "public"
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Machine:
    """The environment a task runs in."""

    image: str = ""  # `docker_image`; "" builds environment/Dockerfile
    build_timeout_s: float = 600.0
    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    network: Network = field(default_factory=Network)
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str = ""  # over the image's own
    healthcheck: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Phase:
    """How the agent, the verifier or the solution runs. None takes the machine's."""

    timeout_s: float | None = None
    user: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    network: Network | None = None


@dataclass(frozen=True)
class TaskStep:
    """One step of a task of several; its files are in steps/<name>."""

    name: str
    instruction: str
    agent: Phase
    verifier: Phase
    least: Mapping[str, float] = field(default_factory=dict)  # rewards below which the rest is not tried


@dataclass(frozen=True)
class Task:
    """One task. `metadata` is free; the properties below read what ours say there."""

    directory: Path
    name: str
    instruction: str
    machine: Machine
    agent: Phase
    verifier: Phase
    solution: Phase
    steps: tuple[TaskStep, ...] = ()
    step_rewards: Literal["mean", "final"] = "mean"
    separate: Machine | None = None  # the verifier's own machine, where it has one
    artifacts: tuple[Mapping[str, Any], ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)  # task.toml as it was read

    @property
    def category(self) -> str:
        return str(self.metadata.get("category", ""))

    @property
    def may_edit(self) -> bool:
        """False for questions and for code that is right as it is: any change is one too many."""
        return bool(self.metadata.get("may_edit", True))

    @property
    def protected(self) -> tuple[str, ...]:
        """Globs, from the workspace, of files that the agent has no business to change: tests, as a rule."""
        return tuple(self.metadata.get("protected", ()))

    @property
    def passing(self) -> float:
        """The score from which on it counts as solved."""
        return float(self.metadata.get("passing", 1.0))

    @property
    def asks_for_tests(self) -> bool:
        return self.category == "testing"
