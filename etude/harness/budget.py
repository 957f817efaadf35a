"""The budget of a session. Importing this loads no torch."""

from typing import ClassVar

from pydantic import Field

from etude.config import Settings


class Budget(Settings):
    """The limits of a session; a limit that is not given does not apply."""

    renamed_keys: ClassVar[dict[str, str]] = {"answer": "max_turn_tokens"}

    turns: int | None = Field(default=None, ge=1, description="maximum turns of a session")
    tokens: int | None = Field(default=None, ge=1, description="maximum sampled tokens of a session, over all segments")
    seconds: float | None = Field(
        default=None, gt=0, description="maximum seconds of a session; default: the task's own limit"
    )
    max_turn_tokens: int = Field(default=4096, ge=1, description="maximum tokens of one turn")
