"""Settings of rollouts: how they are sampled, queued, retried and evaluated. `etude.rl` adds those of learning."""

import math
from typing import Annotated, ClassVar, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from etude.config import NameOrPath, Settings, StageSettings
from etude.errors import InputError
from etude.harness.profile import SessionSettings
from etude.rewards.effort import EffortSettings
from etude.rewards.reward import check_weights


def _check_rewards(weights: dict[str, float]) -> dict[str, float]:
    try:
        return check_weights(weights, "names a term that does not exist")
    except InputError as error:
        raise ValueError(str(error)) from None


def _as_tuple(value: object) -> object:
    return (value,) if isinstance(value, str) else value


class QueueSettings(Settings):
    """Numbers of rollouts, their maximum staleness, and when a lost one is retried."""

    renamed_keys: ClassVar[dict[str, str]] = {"ahead": "prefetch_steps", "attempts": "max_attempts"}

    group_size: int = Field(default=8, ge=1, description="rollouts per prompt")
    groups_per_step: int = Field(default=8, ge=1, description="groups (prompts) per policy step")
    informative_groups: bool = Field(
        default=True,
        description="count only groups whose rewards differ towards groups_per_step, and sample until there are enough",
    )
    max_groups_per_step: int | None = Field(
        default=None,
        ge=1,
        description="groups after which a step is taken with fewer informative ones; default: 4 times groups_per_step",
    )
    max_staleness: int = Field(
        default=4, ge=0, description="maximum policy steps between sampling a token and training on it; 0: synchronous"
    )
    prefetch_steps: float | None = Field(
        default=None, ge=0, description="groups to sample in advance, in policy steps; default: max_staleness / 2"
    )
    in_flight: int = Field(default=64, ge=1, description="maximum concurrent rollouts, over all workers")
    lease_s: float = Field(
        default=120.0, gt=0, description="seconds without a heartbeat after which a rollout is requeued"
    )
    max_attempts: int = Field(default=4, ge=1, description="infrastructure failures after which a group is dropped")

    @model_validator(mode="after")
    def _prefetch_fits_staleness(self) -> Self:
        if self.prefetch_steps is not None and self.prefetch_steps > self.max_staleness:
            raise ValueError(
                f"prefetch_steps = {self.prefetch_steps:g} is more than max_staleness = {self.max_staleness} allows"
            )
        if self.max_groups_per_step is not None and not self.informative_groups:
            raise ValueError("max_groups_per_step would not be used: informative_groups is off")
        if self.max_groups_per_step is not None and self.max_groups_per_step < self.groups_per_step:
            limit = f"max_groups_per_step = {self.max_groups_per_step}"
            raise ValueError(f"{limit} is less than groups_per_step = {self.groups_per_step}")
        return self

    @property
    def groups_limit(self) -> int:
        """Groups, informative or not, after which a step is taken."""
        return 4 * self.groups_per_step if self.max_groups_per_step is None else self.max_groups_per_step

    @property
    def max_outstanding_groups(self) -> int:
        """Number of useful groups to have started and not yet trained. Each prefetched step adds one of staleness."""
        steps = self.max_staleness / 2 if self.prefetch_steps is None else self.prefetch_steps
        return math.ceil((1 + steps) * self.groups_per_step)


class EvaluationSettings(Settings):
    """Held-out evaluation through the same harness."""

    renamed_keys: ClassVar[dict[str, str]] = {"most": "max_tasks"}

    tasks: Annotated[tuple[NameOrPath, ...], BeforeValidator(_as_tuple)] = Field(
        strict=False, min_length=1, description="task sets of this run by name, or directories of tasks"
    )
    max_tasks: int | None = Field(
        default=None, ge=1, description="evaluate at most this many tasks of each set, evenly spread"
    )
    samples: int = Field(default=4, ge=1, le=16, description="rollouts per task: the K of best-of-K")
    every: int = Field(
        default=0, ge=0, description="policy steps between evaluations; 0: before the first and after the last only"
    )
    temperature: float = Field(default=1.0, ge=0, description="sampling temperature of evaluations")


class RolloutSettings(QueueSettings, SessionSettings, StageSettings):
    """The part of `[rl]` that workers need."""

    renamed_keys: ClassVar[dict[str, str]] = {**QueueSettings.renamed_keys, "environment": "tool_set"}

    workers: int = Field(default=1, ge=1, description="worker processes that run sessions")
    checkpoint_rollouts_s: float = Field(
        default=60.0, ge=0, description="seconds between checkpoints of a rollout; 0: no checkpoints"
    )
    temperature: float = Field(
        default=1.0, ge=1e-3, le=1e3, description="sampling temperature; the policy that is trained includes it"
    )
    rewards: Annotated[dict[str, float], AfterValidator(_check_rewards)] = Field(
        default={"correctness": 1.0}, strict=False, description="weight of each reward term"
    )
    effort: EffortSettings = Field(default_factory=EffortSettings)
    evaluation: EvaluationSettings | None = Field(default=None, description="held-out evaluation")

    @model_validator(mode="after")
    def _check_rollout_key_combinations(self) -> Self:
        if self.effort != EffortSettings() and not self.rewards.get("effort_spent"):
            raise ValueError("effort would not be used: give rewards.effort_spent a weight")
        return self


def evaluation_queue(queue: QueueSettings, samples: int) -> QueueSettings:
    """Return the settings of an evaluation queue: groups of `samples` rollouts, none of which grows stale."""
    return QueueSettings(
        group_size=samples,
        groups_per_step=1,
        max_staleness=0,
        in_flight=queue.in_flight,
        lease_s=queue.lease_s,
        max_attempts=queue.max_attempts,
    )
