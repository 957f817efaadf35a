"""The result of a verifier: its rewards and the changes the agent made. `verifier.py` creates it.

An infrastructure failure is VerifierFailed, never a result.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from etude.errors import EtudeError
from etude.pods.workspace import FileChange

# The causes of Harbor's taxonomy that yield no reward. An exhausted budget or a refusal is not among them.
FailureCause = Literal["sandbox", "verifier-timeout", "no-reward", "bad-reward", "no-tools", "build", "bug"]


class VerifierFailed(EtudeError):
    """There is no reward because the infrastructure or the verifier failed, not the agent. The trial can be retried."""

    def __init__(self, cause: FailureCause, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class VerifierStopped(VerifierFailed):
    """The verifier left no reward after the submission was in its pod; `control.py` finds out whose fault that is."""

    def __init__(
        self, cause: FailureCause, message: str, changes: tuple[FileChange, ...] = (), seconds: float = 0.0
    ) -> None:
        super().__init__(cause, message)
        self.changes, self.seconds = changes, seconds


@dataclass(frozen=True)
class VerifierResult:
    """Rewards for the final state of a trial."""

    rewards: Mapping[str, float]  # as written by the verifier; `reward` is the score
    changes: tuple[FileChange, ...] = ()
    seconds: float = 0.0
    log: str = ""  # the end of the verifier's output
    facts: Mapping[str, Any] = field(default_factory=dict)  # JSON

    @property
    def score(self) -> float:
        """Return `reward`, or the mean of all rewards if that key is missing."""
        if "reward" in self.rewards:
            return self.rewards["reward"]
        return sum(self.rewards.values()) / len(self.rewards) if self.rewards else 0.0
