"""Settings of the training stages: pretrain, mtp, extend and sft. Loading them needs no torch."""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from etude.config import AbsolutePath, HuggingFaceConfig, NameOrPath, Settings, StageSettings, made_by
from etude.model.settings import LoraSettings
from etude.parallel.settings import ParallelSettings


class MixturePart(Settings):
    """One source of a mixture."""

    corpus: NameOrPath = Field(description="name of a corpus of this run, or path of a built one")
    weight: float = Field(default=1.0, gt=0, description="share of the rows, relative to the other sources")


class HeldOutSettings(Settings):
    """Text that is evaluated during training and never trained on."""

    corpus: NameOrPath = Field(description="name of a corpus of this run, or path of a built one")
    split: Literal["held_out", "validation"] = Field(default="held_out", description="split of the corpus to evaluate")
    max_tokens: int | None = Field(default=None, ge=1, description="evaluate at most this many tokens; default: all")
    window: int = Field(default=1024, ge=2, description="tokens of a rolling window, which moves by half its size")
    long_rows: int = Field(
        default=8,
        ge=1,
        description="extend only: stretches of `length` tokens in which the loss by position is evaluated",
    )


BIAS_RATE = 0.001  # of DeepSeek-V3's pretraining


class BalanceSettings(Settings):
    """How experts of a mixture-of-experts model are kept equally loaded in training."""

    bias_rate: float | None = Field(
        default=None,
        ge=0,
        description="change of the routers' correction bias per step, in models that have one, such as deepseek_v3; "
        "default: 0.001, in rl 0.0001; 0: none",
    )
    loss_weight: float = Field(
        default=0.0, ge=0, description="weight of the auxiliary load-balancing loss, for MoE models; 0: none"
    )


def check_frozen_routers(lora: LoraSettings | None, balance: BalanceSettings) -> None:
    """Refuse balancing where adapters leave the routers as they are."""
    if lora is not None and (balance.bias_rate or balance.loss_weight):
        raise ValueError("balance would not be used: with lora, routers are frozen")


class TrainingSettings(StageSettings):
    """Settings that pretrain, mtp, extend and sft have in common."""

    renamed_keys: ClassVar[dict[str, str]] = {"final": "final_lr_fraction", "clip": "max_grad_norm"}

    model: AbsolutePath | None = None
    mix: tuple[MixturePart, ...] = Field(strict=False, min_length=1, description="corpora and their weights")
    length: int = Field(ge=2, description="sequence length: tokens of a row")
    tokens: int = Field(ge=1, description="tokens to train on, rounded up to whole steps")
    rows: int = Field(default=8, ge=1, description="rows of one micro-batch")
    micro_batches: int = Field(
        default=1,
        ge=1,
        description="micro-batches of one step, over all processes; a multiple of dp_replicate x dp_shard",
    )
    learning_rate: float = Field(default=3e-4, gt=0, description="peak learning rate")
    warmup: float = Field(default=0.02, ge=0, le=1, description="share of the steps spent in linear warm-up")
    decay: Literal["cosine", "linear", "constant"] = Field(
        default="cosine", description="shape of the learning-rate decay"
    )
    final_lr_fraction: float = Field(
        default=0.1, ge=0, le=1, description="learning rate of the last step, as a share of the peak"
    )
    betas: tuple[float, float] = Field(default=(0.9, 0.95), strict=False, description="Adam's betas")
    eps: float = Field(default=1e-8, gt=0, description="Adam's epsilon, added to the root of the second moment")
    weight_decay: float = Field(default=0.1, ge=0, description="AdamW weight decay, applied to matrices only")
    max_grad_norm: float = Field(default=1.0, ge=0, description="gradient-norm limit; 0 turns clipping off")
    balance: BalanceSettings = Field(default_factory=BalanceSettings, description="load of the experts of a MoE model")
    lora: LoraSettings | None = Field(
        default=None, description="train adapters only, with the weights frozen; default: all weights"
    )
    parallel: ParallelSettings = Field(
        default_factory=ParallelSettings, description="processes of the stage; default: those of [parallel], or one"
    )
    device: str = Field(default="auto", description="cpu, cuda ...; auto takes a GPU if there is one")
    precision: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="dtype of weights and matrix products; master weights and moments are always float32",
    )
    compile: bool = Field(
        default=False, description="compile the transformer blocks with torch.compile; faster on a GPU"
    )
    recompute: bool = Field(
        default=False, description="activation checkpointing: less memory, a third more computation"
    )
    held_out: HeldOutSettings | None = Field(default=None, description="corpus for held-out evaluation")
    evaluate_every: int = Field(
        default=0,
        ge=0,
        description="steps between held-out evaluations; 0: before the first and after the last step only",
    )
    checkpoint_every: int = Field(default=0, ge=0, description="steps between checkpoints; 0: after the last step only")
    keep: int = Field(
        default=2, ge=1, description="newest checkpoints to keep, in addition to the one at half of the steps"
    )
    spike: float = Field(
        default=3.0, ge=0, description="stop when the loss is this many nats above the recent median; 0: never"
    )

    @model_validator(mode="after")
    def _evaluation_has_a_corpus(self) -> Self:
        if self.evaluate_every and self.held_out is None:
            raise ValueError("evaluate_every would not be used: there is no held_out corpus to evaluate")
        if self.held_out and self.held_out.long_rows != 8 and not isinstance(self, ExtendSettings):
            raise ValueError("held_out.long_rows would not be used: only extend evaluates the loss by position")
        return self

    @model_validator(mode="after")
    def _divides_over_the_mesh(self) -> Self:
        self.parallel.check_device(self.device)
        if self.micro_batches % (ranks := self.parallel.data_ranks):
            raise ValueError(
                f"micro_batches = {self.micro_batches} must be a multiple of dp_replicate x dp_shard = {ranks}: every "
                "process gets as many"
            )
        if self.parallel.cp > 1 and self.length % (2 * self.parallel.cp):
            raise ValueError(f"length = {self.length} must be a multiple of 2 x cp = {2 * self.parallel.cp}")
        return self

    @model_validator(mode="after")
    def _check_values(self) -> Self:
        check_frozen_routers(self.lora, self.balance)
        if self.decay == "constant" and self.final_lr_fraction != 0.1:
            raise ValueError('final_lr_fraction would not be used: decay = "constant" stays at the peak')
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be at least 0 and below 1, not {list(self.betas)}")
        names = [part.corpus for part in self.mix]
        if len(set(names)) != len(names):
            raise ValueError(f"mix names a corpus twice: {', '.join(names)}")
        return self


# Without rope_theta, which has a key of its own.
ROPE_SCALING_KEYS = {"rope_type", "type", "factor", "original_max_position_embeddings", "attention_factor", "truncate"}
ROPE_SCALING_KEYS |= {"beta_fast", "beta_slow", "mscale", "mscale_all_dim", "low_freq_factor", "high_freq_factor"}


class PretrainSettings(TrainingSettings):
    """Continue pretraining at the base length."""

    model: AbsolutePath | None = made_by("base", "init", doc="model directory, when no stage makes one")


class MtpSettings(TrainingSettings):
    """Train multi-token-prediction layers on a mid-run checkpoint."""

    model: AbsolutePath | None = made_by("pretrain", doc="model directory, when no stage makes one")
    layers: int = Field(default=1, ge=1, description="number of MTP layers: tokens predicted beyond the next one")
    distance: Literal["kl", "tv"] = Field(
        default="kl", description="distance to the main head: KL divergence or total variation"
    )

    @model_validator(mode="after")
    def _has_no_adapters(self) -> Self:
        if self.lora is not None:
            raise ValueError("lora would not be used: the main model is frozen in this stage")
        return self


class ExtendSettings(TrainingSettings):
    """Extend the context length."""

    model: AbsolutePath | None = made_by("base", "init", "pretrain", doc="model directory, when no stage makes one")
    rope_theta: float | None = Field(default=None, gt=0, description="new RoPE base; default: unchanged")
    rope_scaling: HuggingFaceConfig | None = Field(
        default=None, description='new RoPE scaling, such as {rope_type = "yarn", factor = 4.0, ...}'
    )
    min_document: int = Field(default=1, ge=1, description="skip documents with fewer tokens than this")

    @model_validator(mode="after")
    def _check_rope_scaling(self) -> Self:
        if unknown := set(self.rope_scaling or {}) - ROPE_SCALING_KEYS:
            what = f"rope_scaling.{min(unknown)} would not be used"
            raise ValueError(f"{what}; known are {', '.join(sorted(ROPE_SCALING_KEYS))}")
        return self


class SftSettings(TrainingSettings):
    """Fine-tune on conversations."""

    model: AbsolutePath | None = made_by(
        "base", "init", "pretrain", "extend", doc="model directory, when no stage makes one"
    )
