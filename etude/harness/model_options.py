"""The options by which a command chooses its model. Importing this loads no torch."""

import os
from dataclasses import dataclass
from pathlib import Path

from etude.errors import InputError


@dataclass(frozen=True)
class ModelOptions:
    """Which model to use and how. A directory, or an endpoint and a name, or both: then the endpoint gets token ids."""

    name: str = ""  # a checkpoint directory, or the endpoint's name of the model
    endpoint: str = ""  # URL, including /v1
    key_env: str = ""  # environment variable with the API key
    window: int = 0  # tokens; 0: the model's own
    dialect: str = ""  # "": chosen by the tokenizer
    device: str = "auto"
    temperature: float = 1.0
    seed: int | None = None  # None: a random one

    def key(self) -> str:
        """Return the API key of the endpoint; it is stored nowhere else."""
        if self.key_env and not os.environ.get(self.key_env):
            raise InputError(f"--key-env {self.key_env}: the environment variable is not set, or empty")
        return os.environ[self.key_env] if self.key_env else ""

    @property
    def directory(self) -> Path | None:
        path = Path(self.name).expanduser()
        return path if self.name and path.is_dir() else None
