"""The options of an agent session. Importing this loads no torch."""

from dataclasses import dataclass, field
from pathlib import Path

from etude.harness.model_options import ModelOptions


@dataclass(frozen=True)
class AgentOptions:
    """Where the agent works, with which model and which limits."""

    directory: Path  # real path
    model: ModelOptions = field(default_factory=ModelOptions)
    direct: bool = False  # work on the directory itself, not in a pod
    image: str = "host"
    egress: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    history: bool = True
