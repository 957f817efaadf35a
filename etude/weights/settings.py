"""Settings of weight synchronisation from the trainer to the samplers."""

from typing import Literal

from pydantic import Field

from etude.config import Settings


class WeightSyncSettings(Settings):
    """How new weights reach the samplers."""

    store: str = Field(default="", description="an fsspec URL such as s3://bucket/run; not given: in the run directory")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="bfloat16", description="of what travels; the trainer computes with the same values"
    )
    full_every: int = Field(default=20, ge=1, description="versions from one full snapshot to the next")
    keep: int = Field(default=2, ge=1, description="full snapshots to keep, with what follows them")
    poll_s: float = Field(default=0.2, gt=0, description="seconds between looks for a new version")
