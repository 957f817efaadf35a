"""Settings of rollouts: how they are sampled, queued, retried and evaluated. `etude.rl` adds those of learning.

`[rl]` and `[evaluation]` share the settings of sessions and of the processes that run them (`WorkerSettings`): those of
`[rl]` hold for the evaluation of its recipe, and a recipe without the stage rl gives them in `[evaluation.sessions]`.
"""

import math
import os
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from etude.config import AbsolutePath, NameOrPath, Settings, StageSettings, load_table, made_by, read_toml
from etude.errors import InputError
from etude.harness.profile import SessionSettings
from etude.inference.settings import SamplerRunSettings, SamplerSettings
from etude.pods.settings import PodSettings
from etude.rewards.effort import EffortSettings
from etude.rewards.reward import check_weights
from etude.runs.layout import RL_ROOT, RunLayout

# Stages that leave a model, in pipeline order. That of `control` is beside RL's: no stage starts from it.
MODEL_STAGES = ("base", "init", "pretrain", "extend", "sft", "control", "rl")


def _check_rewards(weights: dict[str, float]) -> dict[str, float]:
    try:
        return check_weights(weights, "names a term that does not exist")
    except InputError as error:
        raise ValueError(str(error)) from None


def _as_tuple(value: object) -> object:
    return (value,) if isinstance(value, str) else value


class QueueLimits(Settings):
    """How many rollouts run at once, and when a lost one is retried."""

    in_flight: int = Field(default=64, ge=1, description="maximum concurrent rollouts, over all workers")
    lease_s: float = Field(
        default=120.0, gt=0, description="seconds without a heartbeat after which a rollout is requeued"
    )
    max_attempts: int = Field(default=4, ge=1, description="infrastructure failures after which a group is dropped")


class QueueSettings(QueueLimits):
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


class WorkerSettings(QueueLimits, SessionSettings):
    """The sessions, and the workers that run them: shared by `[rl]` and `[evaluation.sessions]`."""

    traces: str = Field(
        default="",
        description="object store of traces and rollout checkpoints, such as s3://bucket/run; default: in the run",
    )
    workers: int = Field(
        default=1,
        ge=0,
        description="worker processes that run sessions, on each node of a cluster; 0: only those started by hand, on "
        "any machine",
    )
    checkpoint_rollouts_s: float = Field(
        default=60.0, ge=0, description="seconds between checkpoints of a rollout; 0: no checkpoints"
    )
    pods: PodSettings = Field(default_factory=PodSettings)


class RolloutSettings(QueueSettings, WorkerSettings, StageSettings):
    """The part of `[rl]` that workers need."""

    renamed_keys: ClassVar[dict[str, str]] = {
        **QueueSettings.renamed_keys,
        "environment": "tool_set",
        "evaluation": '[evaluation], the table of the stage "evaluation": `tasks` has become `validation` (the curve '
        "during RL) and `test` (scored once, at the end); samples, every, temperature and max_tasks keep their names",
    }

    temperature: float = Field(
        default=1.0, ge=1e-3, le=1e3, description="sampling temperature; the policy that is trained includes it"
    )
    rewards: Annotated[dict[str, float], AfterValidator(_check_rewards)] = Field(
        default={"correctness": 1.0}, strict=False, description="weight of each reward term"
    )
    effort: EffortSettings = Field(default_factory=EffortSettings)

    @model_validator(mode="after")
    def _check_rollout_key_combinations(self) -> Self:
        if self.effort != EffortSettings() and not self.rewards.get("effort_spent"):
            raise ValueError("effort would not be used: give rewards.effort_spent a weight")
        return self


class EvaluationSessions(WorkerSettings, SamplerRunSettings):
    """How models are used in the evaluation of a recipe without the stage rl."""

    @model_validator(mode="after")
    def _temperature_is_given_once(self) -> Self:
        if self.temperature != 1.0:
            raise ValueError("temperature would not be used: give evaluation.temperature")
        return self


class BenchmarkSettings(Settings):
    """A task set that is scored while RL runs, at an interval of its own. Nothing is chosen by it."""

    tasks: NameOrPath = Field(description="task set: by name, or a directory; not one of evaluation.test")
    every: int = Field(
        default=0, ge=0, description="policy steps between its evaluations; 0: before the first and after the last"
    )
    samples: int = Field(default=1, ge=1, le=64, description="sessions per task")
    max_tasks: int | None = Field(default=None, ge=1, description="score at most this many tasks, evenly spread")

    @property
    def name(self) -> str:
        """The name of the set: that of a directory is its last part."""
        return Path(self.tasks).name

    def is_due(self, step: int) -> bool:
        """Return whether the set is scored at a step before the last one."""
        return step == 0 or bool(self.every and step % self.every == 0)


class EvaluationSettings(StageSettings):
    """Measure the model of every stage on held-out tasks, through the workers and samplers of RL."""

    validation: NameOrPath = Field(
        default="validation",
        description="task set of every choice, and of the curve during RL: by name, or a directory",
    )
    test: Annotated[tuple[NameOrPath, ...], BeforeValidator(_as_tuple)] = Field(
        default=("new", "unseen"), strict=False, description="task sets that are scored once per model, after training"
    )
    max_tasks: int | None = Field(
        default=None, ge=1, description="score at most this many tasks of each set, evenly spread"
    )
    samples: int = Field(default=4, ge=1, le=64, description="sessions per test task: the K of best-of-K")
    validation_samples: int = Field(default=4, ge=1, le=64, description="sessions per validation task")
    every: int = Field(
        default=0, ge=0, description="policy steps between validations in RL; 0: before the first and after the last"
    )
    temperature: float = Field(default=1.0, ge=0, description="sampling temperature")
    benchmarks: tuple[BenchmarkSettings, ...] = Field(
        default=(), strict=False, description="further task sets that are scored while RL runs, as [[...]] tables"
    )
    sampler: SamplerSettings | None = Field(
        default=None, description="samplers that only evaluate while RL runs; default: those of RL are borrowed"
    )
    models: tuple[str, ...] | None = Field(
        default=None, strict=False, min_length=1, description="stages whose models are measured; default: all of them"
    )
    model: AbsolutePath | None = made_by(*MODEL_STAGES, doc="model directory, when no stage makes one")
    sessions: EvaluationSessions | None = made_by("rl", doc="tools, window, sampler ...: without the stage rl")

    @model_validator(mode="after")
    def _sets_differ(self) -> Self:
        names = [Path(name).name for name in (self.validation, *self.test)]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f'test: "{twice[0]}" is given twice among validation and test; every set has one purpose')
        tests = {os.path.realpath(name) for name in self.test if os.path.isabs(name)}
        for each in self.benchmarks:
            if each.name in names[1:] or (os.path.isabs(each.tasks) and os.path.realpath(each.tasks) in tests):
                raise ValueError(
                    f'benchmarks: "{each.tasks}" is a test set (evaluation.test): those are scored once, after '
                    "training; score another set while RL runs"
                )
        shown = [names[0], *(each.name for each in self.benchmarks)]
        if twice := [name for name in shown if shown.count(name) > 1]:
            raise ValueError(f'benchmarks: "{twice[0]}" is given twice among validation and benchmarks')
        if unknown := [name for name in self.models or () if name not in MODEL_STAGES]:
            raise ValueError(f'models: "{unknown[0]}" makes no model; expected some of {", ".join(MODEL_STAGES)}')
        return self

    def sets_during_rl(self) -> dict[str, BenchmarkSettings]:
        """Return the sets that are scored while RL runs, by name: validation first, which alone decides."""
        validation = BenchmarkSettings.model_construct(
            tasks=self.validation, every=self.every, samples=self.validation_samples, max_tasks=self.max_tasks
        )
        return {each.name: each for each in (validation, *self.benchmarks)}

    def due_sets(self, step: int) -> list[str]:
        """Return the names of the sets that are scored at a step before the last one."""
        return [name for name, each in self.sets_during_rl().items() if each.is_due(step)]

    def is_validated(self, step: int) -> bool:
        """Return whether the validation set is scored at a step between the first and the last."""
        return bool(self.every and step % self.every == 0)

    def measured(self) -> list[tuple[str, str]]:
        """Return all sets that models are scored on, each with the key that names it."""
        found = [("evaluation.validation", self.validation), *(("evaluation.test", name) for name in self.test)]
        return [*found, *(("evaluation.benchmarks", each.tasks) for each in self.benchmarks)]

    def task_sets(self) -> dict[str, str]:
        """Return the sets by their short name, validation first: the name of a directory is its last part."""
        return {Path(name).name: name for name in (self.validation, *self.test)}

    def samples_of(self, name: str) -> int:
        """Return the sessions per task of a set, given by its short name."""
        return self.validation_samples if name == Path(self.validation).name else self.samples


def load_sessions(layout: RunLayout) -> WorkerSettings:
    """Return the settings of a run's sessions: those of `[rl]`, or of `[evaluation.sessions]`."""
    table = layout.sessions_table()
    return load_table(layout.recipe, table, RolloutSettings if table == "rl" else WorkerSettings)


def load_evaluation(layout: RunLayout) -> EvaluationSettings | None:
    """Return the table `[evaluation]` of a run's recorded recipe; None if it has none."""
    if "evaluation" not in read_toml(layout.recipe):
        return None
    return load_table(layout.recipe, "evaluation", EvaluationSettings)


def evaluation_queue(queue: QueueLimits, samples: int) -> QueueSettings:
    """Return the settings of an evaluation queue: groups of `samples` rollouts, none of which grows stale."""
    return QueueSettings(
        group_size=samples,
        groups_per_step=1,
        max_staleness=0,
        in_flight=queue.in_flight,
        lease_s=queue.lease_s,
        max_attempts=queue.max_attempts,
    )


QueueName = Literal["training", "evaluation"]
QUEUES: tuple[QueueName, ...] = ("evaluation", "training")  # in order of priority


def load_queues(layout: RunLayout) -> dict[QueueName, QueueSettings]:
    """Return the settings of the queues of a set of processes: the stage `evaluation` has no training queue."""
    sessions, evaluation = load_sessions(layout), load_evaluation(layout)
    found: dict[QueueName, QueueSettings] = {
        "evaluation": evaluation_queue(sessions, evaluation.validation_samples if evaluation else 1)
    }
    if isinstance(sessions, RolloutSettings) and layout.service_root == RL_ROOT:
        found["training"] = sessions
    return found


# ------------------------------------------------------------------------------------------- object stores


def weight_store(layout: RunLayout) -> str:
    """Return the URL or directory of the store of weights: only those that RL trains may be outside of the run."""
    if layout.service_root != RL_ROOT:
        return layout.store
    return str(read_toml(layout.recipe).get("rl", {}).get("weights", {}).get("store", "")) or layout.store


def rollout_store(layout: RunLayout) -> str:
    """Return the URL or directory of the store of traces and rollout checkpoints."""
    if not layout.recipe.exists():
        return str(layout.root)
    table: Any = read_toml(layout.recipe)
    for name in layout.sessions_table().split("."):
        table = table.get(name, {})
    elsewhere = str(table.get("traces", ""))
    return f"{elsewhere.rstrip('/')}/{layout.service_root}" if elsewhere else str(layout.root)
