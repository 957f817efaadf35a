"""What a person chose for a session. Light: nothing here loads torch."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from etude.errors import InputError
from etude.harness.tool_set import ToolSet


@dataclass(frozen=True)
class Model:
    """Which model, and how it is asked. Either a directory, or an endpoint and a name, or both: then by its tokens."""

    name: str = ""  # a checkpoint's directory, or what the endpoint calls it
    endpoint: str = ""  # URL, with its /v1
    key_env: str = ""  # the variable that holds the key
    window: int = 0  # tokens; 0: what the model has
    dialect: str = ""  # "": by the tokenizer
    device: str = "auto"
    temperature: float = 1.0
    seed: int | None = None  # None: another each time

    def key(self) -> str:
        """The key for the endpoint; never kept anywhere else."""
        if self.key_env and not os.environ.get(self.key_env):
            raise InputError(f"--key-env {self.key_env}: there is no such variable, or it is empty")
        return os.environ[self.key_env] if self.key_env else ""

    @property
    def directory(self) -> Path | None:
        path = Path(self.name).expanduser()
        return path if self.name and path.is_dir() else None


@dataclass(frozen=True)
class Options:
    """Where and how to work."""

    directory: Path  # real path
    model: Model = field(default_factory=Model)
    environment: ToolSet = field(default_factory=ToolSet)
    direct: bool = False  # on the directory itself, not in a pod
    image: str = "host"
    egress: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    history: bool = True
    turns: int | None = None
    tokens: int | None = None
    seconds: float | None = None
    answer: int = 4096
