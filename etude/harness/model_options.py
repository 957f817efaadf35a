"""The options by which a command chooses a model and changes its sessions. Importing this loads no torch."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from etude.errors import InputError

# Options of several commands. Not given, they are as in the model's profile, or the defaults of `AgentProfile`.
Tools = Annotated[
    str,
    typer.Option(
        metavar="A,B,...",
        help="Tools shown to the model; default: those it was trained with, else all.",
        show_default=False,
    ),
]
Toolset = Annotated[
    str,
    typer.Option(
        help="Names under which the tools are shown to the model: cursor, claude-code or bash.", show_default=False
    ),
]
Brief = Annotated[
    bool | None,
    typer.Option("--brief/--no-brief", help="Use the short system prompt, for small windows.", show_default=False),
]
Window = Annotated[
    int | None, typer.Option(min=64, help="Context window in tokens; default: the model's own.", show_default=False)
]
Temperature = Annotated[
    float | None,
    typer.Option(min=0.0, help="Sampling temperature; default: that of training, else 1.", show_default=False),
]
SummaryModeName = Annotated[
    Literal["self", "compaction", "off"] | None,
    typer.Option(
        "--summaries", help="How to continue when the context window is full; off ends the session.", show_default=False
    ),
]
Reserve = Annotated[
    int | None,
    typer.Option(min=1, help="Tokens of the context window reserved for a summary.", show_default=False),
]
DialectName = Annotated[
    str, typer.Option(help="Dialect of tool calls, if the chat template does not determine it.", show_default=False)
]


def session_changes(
    *,
    tools: str = "",
    toolset: str = "",
    brief: bool | None = None,
    instructions: str = "",
    window: int | None = None,
    temperature: float | None = None,
    dialect: str = "",
    summaries: str | None = None,
    reserve: int | None = None,
    **budget: float | None,
) -> dict[str, Any]:
    """Return the settings of `AgentProfile` that these options give; `budget` are those of its table `budget`."""
    names = tuple(name.strip() for name in tools.split(",")) if tools else None
    tool_set = {
        "tools": names,
        "aliases": toolset or None,
        "short_system_prompt": brief,
        "instructions": instructions or None,
    }
    tables: dict[str, Mapping[str, Any]] = {
        "tool_set": tool_set,
        "budget": budget,
        "summaries": {"mode": summaries, "reserve": reserve},
    }
    top = {"window": window, "temperature": temperature, "dialect": dialect or None}
    return _given(top) | {name: given for name, table in tables.items() if (given := _given(table))}


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class ModelOptions:
    """Which model to use and how. A directory, or an endpoint and a name, or both: then the endpoint gets token ids."""

    name: str = ""  # a checkpoint directory, or the endpoint's name of the model
    endpoint: str = ""  # URL, including /v1
    key_env: str = ""  # environment variable with the API key
    device: str = "auto"
    seed: int | None = None  # None: a random one
    session: Mapping[str, Any] = field(default_factory=dict)  # settings that differ from the model's profile

    def key(self) -> str:
        """Return the API key of the endpoint; it is stored nowhere else."""
        if self.key_env and not os.environ.get(self.key_env):
            raise InputError(f"--key-env {self.key_env}: the environment variable is not set, or empty")
        return os.environ[self.key_env] if self.key_env else ""

    @property
    def directory(self) -> Path | None:
        path = Path(self.name).expanduser()
        return path if self.name and path.is_dir() else None
