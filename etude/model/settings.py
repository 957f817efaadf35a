"""Settings of the stages that provide the first checkpoint: import an open model, or initialise a new one."""

from typing import Literal, Self

from pydantic import Field, model_validator

from etude.config import AbsolutePath, HuggingFaceConfig, NameOrPath, StageSettings, made_by
from etude.errors import InputError
from etude.model.config import ModelConfig, unused_keys


class BaseModelSettings(StageSettings):
    """Start from an open model: a directory of one, or a GGUF file, as the first checkpoint."""

    source: NameOrPath = Field(
        description="a model's directory, a .gguf file, or an installed package that carries one"
    )
    chat_template: Literal["own", "chatml"] = Field(
        default="own", description="chatml: one with tools, for models whose own knows none"
    )
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="number format of the weights")


class InitSettings(StageSettings):
    """Make a model with random weights."""

    config: HuggingFaceConfig = Field(description="a Hugging Face config.json as a table, without vocab_size")
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="number format of the weights")
    tokenizer: AbsolutePath | None = made_by("tokenizer", doc="directory of a tokenizer, when no stage trains one")

    @model_validator(mode="after")
    def _config_is_one_we_can_build(self) -> Self:
        if "vocab_size" in self.config:
            raise ValueError("config.vocab_size would not be used: the tokenizer decides it; remove it")
        stand_in = {**self.config, "vocab_size": 1024}
        try:
            ModelConfig.from_hugging_face(stand_in, "config")
        except InputError as problem:
            raise ValueError(str(problem)) from None
        if unread := unused_keys(stand_in):
            raise ValueError(
                f"config.{unread[0]} would not be used: a {self.config['model_type']} model has no such key"
            )
        return self
