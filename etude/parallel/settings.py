"""Settings of parallel training: how the processes of a job divide the work. Loading them needs no torch."""

from typing import Self

from pydantic import Field, model_validator

from etude.config import Settings


class ParallelSettings(Settings):
    """Processes of a training stage, one per device. All sizes 1: one process, without torch.distributed."""

    dp_replicate: int = Field(default=1, ge=1, description="copies of the sharded model; each gets other rows")
    dp_shard: int = Field(
        default=1, ge=1, description="processes that shard parameters and optimizer (FSDP); each gets other rows"
    )
    cp: int = Field(
        default=1,
        ge=1,
        description="context parallelism: processes that share the tokens of a row; they shard parameters too",
    )
    ep: int = Field(
        default=1,
        ge=1,
        description="expert parallelism: processes that share the experts of a MoE layer; divides dp_shard x cp",
    )

    @property
    def processes(self) -> int:
        return self.dp_replicate * self.dp_shard * self.cp

    @property
    def data_ranks(self) -> int:
        """Return among how many ranks the rows of a step are divided."""
        return self.dp_replicate * self.dp_shard

    def check_device(self, device: str) -> None:
        """Refuse a single device for several processes."""
        if self.processes > 1 and ":" in device:
            raise ValueError(
                f"device = {device} is one device, but parallel has {self.processes} processes, each with its own: "
                "give cuda, and choose GPUs with CUDA_VISIBLE_DEVICES"
            )

    @model_validator(mode="after")
    def _ep_divides_the_shards(self) -> Self:
        if self.dp_shard * self.cp % self.ep:
            raise ValueError(f"ep = {self.ep} must divide dp_shard x cp = {self.dp_shard * self.cp}")
        return self
