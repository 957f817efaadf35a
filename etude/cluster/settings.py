"""Settings of the cluster: where the services of the stages `rl` and `evaluation` run. Loading them needs no Ray."""

import re
from typing import Self

from pydantic import Field, model_validator

from etude.cluster.cluster import Resources
from etude.config import Settings

LOCAL, RAY = "local", "ray"


class ProcessResources(Settings):
    """What the cluster reserves for one process. GPUs are those that its device needs."""

    cpus: float = Field(default=1.0, ge=0, description="CPUs, as the cluster counts them; also its OMP_NUM_THREADS")
    memory_gib: float = Field(default=0.0, ge=0, description="GiB of memory; 0: not counted")

    def resources(self, gpus: int = 0, having: str = "") -> Resources:
        return Resources(self.cpus, gpus, int(self.memory_gib * 2**30), having)


class ClusterSettings(Settings):
    """Where the services of the run are started."""

    address: str = Field(
        default=LOCAL,
        description="local: processes of this machine; ray: the Ray cluster that this machine belongs to, or "
        "RAY_ADDRESS; ray://HOST:10001: another one through Ray's client; HOST:6379: the one with this head",
    )
    workers_per_node: int | None = Field(
        default=None, ge=1, description="workers on each node of a cluster; default: `workers` of the stage"
    )
    worker_resource: str = Field(
        default="", description="name of a Ray resource that a node must have to get workers; default: none needed"
    )
    worker: ProcessResources = Field(default_factory=ProcessResources, description="reserved for each worker")
    sampler: ProcessResources = Field(default_factory=ProcessResources, description="reserved for each sampler")
    trainer: ProcessResources = Field(default_factory=ProcessResources, description="reserved for each trainer rank")
    environment: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="variables of this process that services elsewhere get too, such as AWS_*; others are the node's",
    )

    @property
    def is_local(self) -> bool:
        return self.address == LOCAL

    @model_validator(mode="after")
    def _keys_are_used(self) -> Self:
        if not re.fullmatch(r"local|ray|(ray://)?[^/\s:]+:\d+", self.address):
            raise ValueError(f'address is "{self.address}"; expected local, ray, ray://HOST:PORT or HOST:PORT')
        for name, field in type(self).model_fields.items():
            given = getattr(self, name) != field.get_default(call_default_factory=True)
            if self.is_local and name != "address" and given:
                raise ValueError(f'{name} would not be used: address is "local", whose processes share this machine')
        return self
