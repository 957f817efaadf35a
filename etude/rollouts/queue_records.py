"""The records that a rollout queue returns: slots, groups and incidents as they are in its tables."""

from dataclasses import dataclass
from typing import Any, Literal

from etude.errors import EtudeError

IncidentKind = Literal["failed", "lost", "stale", "dropped"]


@dataclass(frozen=True)
class Slot:
    """One rollout of a group, as its row is now."""

    id: int
    group: int
    task: str
    number: int
    attempt: int
    state: str
    oldest_step: int | None = None  # policy steps that the weights which sampled it count as
    newest_step: int | None = None
    reward: dict[str, Any] | None = None
    trace: str = ""
    resume: dict[str, Any] | None = None
    note: str = ""

    @property
    def record(self) -> dict[str, Any]:
        """The record of the scored rollout; EtudeError if it has none."""
        if self.reward is None:
            raise EtudeError(f"slot {self.id} of {self.task} has no reward: its state is {self.state}")
        return self.reward


@dataclass(frozen=True)
class ReadyGroup:
    """The finished rollouts of one prompt."""

    id: int
    task: str
    slots: tuple[Slot, ...]

    @property
    def oldest_step(self) -> int:
        return min(slot.oldest_step for slot in self.slots if slot.oldest_step is not None)


@dataclass(frozen=True)
class GroupProgress:
    """How many rollouts of a group are ready. `failures` counts infrastructure failures over all its slots."""

    id: int
    task: str
    step: int | None
    dropped: str
    size: int
    ready: int
    failures: int

    @property
    def is_finished(self) -> bool:
        """Whether all rollouts are scored, or the group was dropped."""
        return bool(self.dropped) or self.ready == self.size


@dataclass(frozen=True)
class GroupEffort:
    """Mean effort of the finished rollouts of a group; None where unknown. `seconds` is that of the slowest."""

    task: str
    step: int | None  # that consumed it
    rollouts: int
    turns: float | None
    thinking: float | None
    solved: float | None
    seconds: float | None


@dataclass(frozen=True)
class GroupRecord:
    """What a group has come to so far; `change` is the number of its last change, over all groups."""

    id: int
    task: str
    step: int | None
    dropped: bool
    change: int
    effort: GroupEffort | None  # None: no rollout is finished


@dataclass(frozen=True)
class HeldSlot:
    """A slot as its worker reports it."""

    id: int
    attempt: int
    state: str


@dataclass(frozen=True)
class StepOffer:
    """What the queue has for the next policy step: complete groups to judge first, or the groups of the step."""

    unjudged: tuple[ReadyGroup, ...] = ()
    groups: tuple[ReadyGroup, ...] | None = None  # None: there are not enough yet, or slow ones are awaited


@dataclass(frozen=True)
class QueueState:
    """The figures of a queue at one time; `changes` differs after every change."""

    changes: int
    counts: dict[str, int]  # slots by state; those of trained and dropped groups count as such
    outstanding: int  # groups that may still be trained on
    last_step: int
    last_heartbeat: float
    lineage: int
    waiting_for: str


@dataclass(frozen=True)
class Incident:
    """A slot that had to be sampled again, or a group (`number` is None) that was dropped, and why."""

    task: str
    number: int | None
    kind: IncidentKind
    why: str
