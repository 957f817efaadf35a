"""How a model is used: tools, prompt, window, dialect and sampling of its sessions. Importing this loads no torch.

Training writes them into the checkpoint as `agent.json`; `etude serve`, `etude agent` and `etude bench` read them, so
that a model is shown in use what it was shown in training.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, ValidationError, model_validator

from etude.chat.dialects import DIALECTS
from etude.config import Settings, make_settings, merged, registered
from etude.errors import InputError
from etude.harness.budget import Budget
from etude.harness.summary import SummarySettings
from etude.harness.tool_set import ToolSet
from etude.harness.tools.executor import exposed_tools
from etude.model.config import PROFILE_FILE, import_checkpoint_plugins

DEFAULT_TURNS = 50  # of a session with a model that has no profile


def _check_tools(tool_set: ToolSet) -> ToolSet:
    try:
        shown = exposed_tools(tool_set)
    except InputError as error:
        raise ValueError(str(error).replace("tool set", "tools", 1)) from None
    if not shown:
        raise ValueError("tools: no tool is shown to the model; name at least one")
    return tool_set


class SessionSettings(Settings):
    """What a model is shown in a session, and how it is sampled."""

    dialect: Annotated[str, registered(DIALECTS, "auto")] = Field(
        default="auto", description="chat format; auto: chosen by the tokenizer"
    )
    window: int | None = Field(default=None, ge=64, description="context window in tokens; default: the model's own")
    temperature: float = Field(default=1.0, ge=0, description="sampling temperature")
    tool_set: Annotated[ToolSet, AfterValidator(_check_tools)] = Field(default_factory=ToolSet)
    budget: Budget = Field(default_factory=Budget)
    summaries: SummarySettings = Field(default_factory=SummarySettings)

    @model_validator(mode="after")
    def _check_session_keys(self) -> Self:
        if self.summaries.mode == "off" and self.summaries.trigger:
            raise ValueError("summaries.trigger would not be used: the mode is off")
        if self.window and self.budget.max_turn_tokens >= self.window:
            taken = f"budget.max_turn_tokens = {self.budget.max_turn_tokens}"
            raise ValueError(f"{taken} must be less than window = {self.window}")
        if self.tool_set.web:
            raise ValueError("tool_set.web: sessions of a run have no web access; leave it out")
        if self.tool_set.root:
            raise ValueError("tool_set.root would not be used: the task names the workspace")
        return self


class AgentProfile(SessionSettings):
    """The sessions that a checkpoint was trained in; its file is `agent.json`."""

    plugins: tuple[str, ...] = Field(default=(), strict=False, description="plugins that its tools come from")

    @classmethod
    def of(cls, settings: SessionSettings, plugins: tuple[str, ...] = ()) -> Self:
        """Return the profile of a model that is trained in sessions with these settings."""
        return cls(plugins=plugins, **{name: getattr(settings, name) for name in SessionSettings.model_fields})

    @classmethod
    def from_json(cls, data: str | bytes, where: str) -> Self:
        """Return the profile that `data` holds; InputError that names `where` if it is not one."""
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            detail = error.errors()[0]
            key = ".".join(map(str, detail["loc"]))
            raise InputError(f"{where}: not an agent profile: {key}: {detail['msg']}") from None

    @classmethod
    def load(cls, directory: Path) -> Self | None:
        """Return the profile of a checkpoint, with its plugins imported; None if it has none."""
        file = directory / PROFILE_FILE
        if not file.is_file():
            return None
        import_checkpoint_plugins(directory)
        return cls.from_json(file.read_bytes(), str(file))

    @classmethod
    def for_model(cls, found: Self | None, window: int, changes: Mapping[str, Any]) -> Self:
        """Return the settings of sessions with a model: those it was trained in, with some changed by options.

        `found` is the model's profile, if it has one, and `window` the context length it can use. The limit of a turn
        and the room for a summary fit the window, unless they are given and do not.
        """
        base, given = found or cls(budget=Budget(turns=DEFAULT_TURNS)), changes.get("window") or 0
        if given > window:
            raise InputError(f"--window {given:,}: this model's window has {window:,} tokens")
        limit = given or min(base.window or window, window)
        values = merged(base.model_dump(), {**changes, "window": limit})
        largest = limit - 1 if found else limit // 4
        for table, key in (("budget", "max_turn_tokens"), ("summaries", "reserve")):
            unused = table == "summaries" and values[table]["mode"] == "off"
            if values[table][key] > largest and key not in changes.get(table, {}) and not unused:
                values[table][key] = limit // 4
        return make_settings(cls, "options", **values)

    def to_json(self) -> str:
        """Return the contents of `agent.json`."""
        return self.model_dump_json(indent=2) + "\n"
