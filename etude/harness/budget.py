"""The budget of a session. Importing this loads no torch."""

from typing import ClassVar

from pydantic import Field

from etude.config import Settings


class Budget(Settings):
    """The limits of a session; a limit that is not given does not apply."""

    renamed_keys: ClassVar[dict[str, str]] = {"answer": "max_turn_tokens"}

    turns: int | None = Field(default=None, ge=1, description="turns of the model")
    tokens: int | None = Field(default=None, ge=1, description="tokens the model samples, over all segments")
    seconds: float | None = Field(default=None, gt=0, description="wall-clock time; not given: the task's own limit")
    max_turn_tokens: int = Field(default=4096, ge=1, description="tokens of one turn")
