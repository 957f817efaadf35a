"""Settings of the stages that make the first checkpoint (import or initialise a model), and of adapters."""

from typing import Literal, Self

from pydantic import Field, model_validator

from etude.config import AbsolutePath, HuggingFaceConfig, NameOrPath, Settings, StageSettings, made_by
from etude.errors import InputError
from etude.model.config import ModelConfig, unused_keys


class BaseModelSettings(StageSettings):
    """Use an open model, from a directory or a GGUF file, as the first checkpoint."""

    source: NameOrPath = Field(
        description="a model directory, a .gguf file, or an installed package that contains one; for a dry run "
        "also the name of a published config, as in `etude model describe kimi-k2.5`"
    )
    chat_template: Literal["own", "chatml"] = Field(
        default="own",
        description="own: the template of the model; chatml: ChatML with tools, for models without tool support",
    )
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="dtype of the weights")


ADAPTER_TARGETS = ("attention", "mlp", "experts")


class LoraSettings(Settings):
    """Train low-rank adapters of the matrices in the blocks instead of all weights."""

    rank: int = Field(default=16, ge=1, description="rank of each update")
    alpha: float = Field(default=32.0, gt=0, description="updates are multiplied by alpha / rank")
    targets: tuple[Literal["attention", "mlp", "experts"], ...] | None = Field(
        default=None,
        strict=False,
        min_length=1,
        description="matrices that get adapters: attention, mlp (shared experts too), experts; default: all there are",
    )


class InitSettings(StageSettings):
    """Initialise a model with random weights."""

    config: HuggingFaceConfig = Field(description="a Hugging Face config.json as a table, without vocab_size")
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="dtype of the weights")
    tokenizer: AbsolutePath | None = made_by("tokenizer", doc="tokenizer directory, when no stage trains one")

    @model_validator(mode="after")
    def _check_config(self) -> Self:
        if "vocab_size" in self.config:
            raise ValueError("config.vocab_size would not be used: the tokenizer decides it; remove it")
        with_vocab_size = {**self.config, "vocab_size": 1024}
        try:
            ModelConfig.from_hugging_face(with_vocab_size, "config")
        except InputError as problem:
            raise ValueError(str(problem)) from None
        if unused := unused_keys(with_vocab_size):
            raise ValueError(
                f"config.{unused[0]} would not be used: a {self.config['model_type']} model has no such key"
            )
        return self
