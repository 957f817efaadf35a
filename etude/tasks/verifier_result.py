"""What grading finds: the verifier's rewards, and what the session changed. An infrastructure failure is no grade.

The types only; `verify.py` makes them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from etude.errors import EtudeError

# The causes of Harbor's taxonomy under which there is no reward. A spent budget or a refusal is not among them.
FailureCause = Literal["sandbox", "verifier-timeout", "no-reward", "bad-reward", "build", "bug"]


class GradingFailed(EtudeError):
    """There is no reward: the machine or the verifier failed, not the agent. The slot is tried again."""

    def __init__(self, cause: FailureCause, message: str) -> None:
        super().__init__(message)
        self.cause = cause


@dataclass(frozen=True)
class FileChange:
    """One file of the workspace that is not as the task left it. None: it is not there."""

    path: str  # from the workspace
    before: bytes | None
    after: bytes | None
    kind: Literal["file", "symlink", "mode"] = "file"

    def lines(self, which: Literal["before", "after"]) -> list[str]:
        """The text of one side, in lines; nothing for what is not there."""
        data = self.before if which == "before" else self.after
        return (data or b"").decode("utf-8", "replace").splitlines()


@dataclass(frozen=True)
class Grade:
    """How a session's final state does."""

    rewards: Mapping[str, float]  # as the verifier wrote them; `reward` is the score
    changes: tuple[FileChange, ...] = ()
    seconds: float = 0.0
    log: str = ""  # the end of what the verifier printed
    facts: Mapping[str, Any] = field(default_factory=dict)  # JSON

    @property
    def score(self) -> float:
        """`reward` or, where the verifier wrote others only, their mean."""
        if "reward" in self.rewards:
            return self.rewards["reward"]
        return sum(self.rewards.values()) / len(self.rewards) if self.rewards else 0.0
