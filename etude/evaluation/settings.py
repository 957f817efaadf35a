"""Settings of the codebase NLL stage."""

from typing import Self

from pydantic import Field, model_validator

from etude.config import AbsolutePath, StageSettings, made_by
from etude.data.settings import TextSources


class NllSettings(StageSettings):
    """Evaluate the negative log-likelihood of a codebase."""

    sources: TextSources = Field(description='code to score: directories, files, "stdlib" or "site-packages"')
    window: int = Field(default=512, ge=2, description="tokens the model sees at once")
    stride: int = Field(default=256, ge=1, description="tokens scored per window, at most window")
    max_files: int | None = Field(default=None, ge=1, description="score at most this many files, evenly spread")
    model: AbsolutePath | None = made_by(
        "base", "init", "pretrain", "extend", "sft", "rl", doc="model directory, when no stage makes one"
    )

    @model_validator(mode="after")
    def _windows_leave_no_gap(self) -> Self:
        if self.stride > self.window:
            raise ValueError(f"stride must be at most window = {self.window}, not {self.stride}")
        return self
