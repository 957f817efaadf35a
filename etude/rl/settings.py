"""Settings of the `rl` stage: those of rollouts, and those of learning."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, JsonValue, model_validator

from etude.config import (
    AbsolutePath,
    NameOrPath,
    Registry,
    StageSettings,
    check_options,
    load_table,
    made_by,
    read_toml,
    registered,
)
from etude.errors import InputError
from etude.inference.settings import SamplerRunSettings
from etude.model.settings import LoraSettings
from etude.parallel.settings import ParallelSettings
from etude.rl.advantages import EstimatorSettings
from etude.rl.curriculum import CurriculumSettings
from etude.rollouts.settings import RolloutSettings
from etude.runs.layout import RunLayout
from etude.train.settings import BalanceSettings, check_frozen_routers

# Losses of sampled tokens (`TokenLoss` in rl/objective.py), with their options as keyword-only parameters.
OBJECTIVES = Registry[Callable[..., Any]]("objective", lazy={"policy_gradient": "etude.rl.objective:policy_gradient"})
policy_objective = OBJECTIVES.add  # decorator


class RlSettings(RolloutSettings, SamplerRunSettings):
    """Asynchronous reinforcement learning: every sample is a whole agent session."""

    renamed_keys: ClassVar[dict[str, str]] = {**RolloutSettings.renamed_keys, "clip": "max_grad_norm"}

    model: AbsolutePath | None = made_by(
        "base", "init", "pretrain", "extend", "sft", doc="model directory, when no stage makes one"
    )
    tasks: NameOrPath = Field(description="training tasks: a task set of this run by name, or a directory")
    steps: int = Field(ge=1, description="policy steps to train")
    group_size: int = Field(default=8, ge=2, description="rollouts per prompt")

    control: Literal["none", "placebo", "rejection", "imitation"] = Field(
        default="none",
        description="run a control instead: placebo (rewards shuffled within groups), rejection (fine-tuning on its "
        "own solved rollouts), imitation (further epochs of sft); also `etude run --control`",
    )
    estimator: EstimatorSettings = Field(default_factory=EstimatorSettings)
    objective: Annotated[str, registered(OBJECTIVES)] = Field(
        default="policy_gradient", description="loss of a sampled token: policy_gradient, or one of a plugin"
    )
    objective_options: dict[str, JsonValue] = Field(default={}, description="options of an objective of a plugin")
    curriculum: CurriculumSettings = Field(default_factory=CurriculumSettings)

    learning_rate: float = Field(default=1e-6, gt=0, description="learning rate, constant after the warm-up")
    warmup: int | None = Field(
        default=None,
        ge=0,
        description="steps of linear learning-rate warm-up; default: a tenth of the steps, at least 2, at most 10",
    )
    betas: tuple[float, float] = Field(default=(0.9, 0.95), strict=False, description="Adam betas")
    eps: float = Field(
        default=1e-9,
        gt=0,
        description="Adam's epsilon; below typical gradients, else it lowers the learning rate, and above those of "
        "tokens that are never drawn, else these move as fast",
    )
    weight_decay: float = Field(default=0.0, ge=0, description="weight decay of matrices")
    max_grad_norm_ratio: float = Field(
        default=1.5,
        ge=0,
        description="gradient-norm limit as a multiple of the median norm of the last 32 steps; 0: none",
    )
    max_grad_norm: float = Field(default=0.0, ge=0, description="absolute gradient-norm limit; 0: none")
    loss_tokens: int = Field(
        default=1024,
        ge=1,
        description="the summed loss of a step is divided by its rollouts times this constant, not by their tokens",
    )
    balance: BalanceSettings = Field(default_factory=BalanceSettings, description="load of the experts of a MoE model")
    lora: LoraSettings | None = Field(
        default=None,
        description="train and publish adapters only, with the weights frozen; default: all weights",
    )
    max_numerics_mismatch: float = Field(
        default=0.2,
        ge=0,
        description="alarm: p99 difference of trainer and sampler log-probability, tokens of the same weights; 0: off",
    )
    max_staleness_mismatch: float = Field(
        default=1.0, ge=0, description="alarm: the same difference on tokens of older weights; 0: off"
    )
    length: int = Field(default=4096, ge=2, description="tokens of a packed row; a longer segment gets its own row")
    rows: int = Field(default=4, ge=1, description="packed rows of one micro-batch")
    parallel: ParallelSettings = Field(
        default_factory=ParallelSettings, description="processes of the trainer; default: those of [parallel], or one"
    )
    device: str = Field(default="auto", description="trainer device: cpu, cuda ...; auto: a GPU if there is one")
    threads: int = Field(default=0, ge=0, description="CPU threads of the trainer; 0: torch's default")
    compile: bool = Field(
        default=False, description="compile the transformer blocks with torch.compile; faster on a GPU"
    )
    recompute: bool = Field(default=False, description="activation checkpointing: less memory, a third more compute")
    checkpoint_every: int = Field(default=10, ge=1, description="policy steps between trainer checkpoints")
    keep: int = Field(default=2, ge=1, description="newest trainer checkpoints to keep")
    keep_best: bool = Field(
        default=True,
        description="the stage ends with the model of the evaluated step that has the highest solve rate",
    )
    max_validation_fall: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="stop the run when the solve rate of an evaluation is below the best one by more than this, and by "
        "more than the 95 % interval of the difference; 0: never",
    )

    @model_validator(mode="after")
    def _check_key_combinations(self) -> Self:
        check_frozen_routers(self.lora, self.balance)
        self.parallel.check_device(self.device)
        if self.objective == "policy_gradient":
            if self.objective_options:
                raise ValueError("objective_options would not be used: policy_gradient is set by rl.estimator")
        elif self.estimator.max_importance_ratio:
            raise ValueError(f"estimator.max_importance_ratio would not be used: the objective is {self.objective}")
        else:
            check_options("objective_options", OBJECTIVES[self.objective], self.objective_options)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be at least 0 and below 1, not {list(self.betas)}")
        if self.warmup is not None and self.warmup > self.steps:
            raise ValueError(
                f"warmup = {self.warmup} is more than the {self.steps} steps: the rate would not be reached"
            )
        if self.precision == "bfloat16" and self.weights.dtype == "float32":
            raise ValueError(
                'weights.dtype must be "bfloat16" if precision is: there are no float32 weights to publish'
            )
        if self.sampler.backend != "etude" and self.lora is not None and self.sampler.on_swap == "recompute":
            raise ValueError(
                'sampler.on_swap = "recompute" would not be used: with adapters a running request ends with those that '
                "it began with, and a new one shares no cache of older ones"
            )
        if self.sampler.backend == "etude" and self.window and self.sampler.kv_cache_tokens < self.window:
            held = f"sampler.kv_cache_tokens = {self.sampler.kv_cache_tokens} does not hold one session"
            raise ValueError(f"{held}: give at least window = {self.window}, better that for each of in_flight")
        return self

    @property
    def warmup_steps(self) -> int:
        """The steps of the warm-up."""
        return min(10, max(2, self.steps // 10)) if self.warmup is None else self.warmup


class ControlSettings(StageSettings):
    """A control of RL in the same run: RL's loop with another signal, from the same start, measured beside it."""

    kind: Literal["placebo", "rejection", "imitation"] = Field(
        description="placebo (rewards shuffled within groups), rejection (fine-tuning on its own solved rollouts), "
        "imitation (further epochs of sft)"
    )
    learning_rate: float | None = Field(default=None, gt=0, description="learning rate; default: rl.learning_rate")


def open_rl_run(run: Path | str) -> tuple[RunLayout, RlSettings]:
    """Return the layout of a run and the settings of its `rl` stage, from its recorded recipe."""
    layout = RunLayout.of_run(run)
    if "rl" not in read_toml(layout.recipe):
        raise InputError(f"{layout.run}: this run has no stage rl")
    settings = load_table(layout.recipe, "rl", RlSettings)
    return RunLayout(layout.run, settings.weights.store), settings
