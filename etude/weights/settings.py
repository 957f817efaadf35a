"""Settings of weight synchronisation from the trainer to the samplers."""

from typing import Literal

from pydantic import Field

from etude.config import Settings


class WeightSyncSettings(Settings):
    """How new weights reach the samplers."""

    store: str = Field(
        default="", description="object store of the weights, such as s3://bucket/run; default: in the run"
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        default="bfloat16", description="dtype of published weights; the trainer computes with the same rounded values"
    )
    full_every: int = Field(
        default=20, ge=1, description="publish all weights every this many versions, deltas in between"
    )
    keep: int = Field(default=2, ge=1, description="newest full versions to keep, with the deltas after them")
    poll_s: float = Field(default=0.2, gt=0, description="seconds between a sampler's checks for new weights")
