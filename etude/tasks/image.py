"""Turn a task's environment/ into an image plan: an image, files to copy into the pod, environment variables.

Dockerfiles are interpreted by `etude.pods.images.dockerfile.plan`. This module decides what a task adds to that: which
image stands for which FROM, variables and workspace of task.toml, time and pod limits.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from etude.errors import InputError
from etude.pods.fleet import Fleet
from etude.pods.host import DEFAULT_LIMITS
from etude.pods.images.builder import LayerBuilder
from etude.pods.images.context import FileToCopy
from etude.pods.images.dockerfile import BuildPlan, plan
from etude.pods.images.instructions import Instruction
from etude.pods.images.records import Image
from etude.pods.pod import Limits, PodError
from etude.pods.runtime.backend import Storage
from etude.tasks.base_images import HostSettings, mapped_image, resolve_base_image
from etude.tasks.schema import resolve_env
from etude.tasks.task import MachineSpec

__all__ = ["BuildFailed", "FileToCopy", "ImagePlan", "plan_image", "pod_limits"]


@dataclass(frozen=True)
class ImagePlan:
    """Everything needed to make a pod for an environment/ directory."""

    image: Image
    workspace: str
    files: tuple[FileToCopy, ...] = ()
    directories: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


class BuildFailed(PodError):
    """Building a Dockerfile failed."""


async def plan_image(fleet: Fleet, context: Path, machine: MachineSpec, host_settings: HostSettings) -> ImagePlan:
    """Plan the image of a build context: a task's environment/, or tests/ of a separate verifier."""
    file, config = context / "Dockerfile", f"{context.parent}/task.toml"
    compose = [name for name in ("docker-compose.yaml", "docker-compose.yml") if (context / name).exists()]
    if compose and not machine.image:
        raise InputError(f"{context / compose[0]}: a pod is a single machine; tasks with several services do not run")
    # a prebuilt image is used if it is mapped; otherwise the Dockerfile it was built from serves as well
    if machine.image and (mapped_image(machine.image, host_settings.images) is not None or not file.exists()):
        made = BuildPlan(await resolve_base_image(fleet, machine.image, host_settings, config))
    else:
        made = await _plan_dockerfile(fleet, file, machine, host_settings)
    env = {**made.image.env, **resolve_env(machine.env, host_settings.variables, config)}
    workspace = machine.workdir or made.image.workdir
    if workspace == "/":
        raise InputError(f"{context}: the workspace is /, the whole machine; set WORKDIR or environment.workdir")
    image = made.image.with_(env=env, workdir=workspace)
    return ImagePlan(image, workspace, made.files, made.directories, env)


async def _plan_dockerfile(fleet: Fleet, file: Path, machine: MachineSpec, host_settings: HostSettings) -> BuildPlan:
    async def find(name: str, step: Instruction) -> Image:
        return await resolve_base_image(fleet, name, host_settings, step.where)

    async def work(builder: LayerBuilder) -> BuildPlan:
        return await plan(builder, file, file.parent, find, host_settings.build_egress)

    try:
        key = file.read_text(encoding="utf-8", errors="replace")
        return await asyncio.wait_for(fleet.build(key, work), machine.build_timeout_s)
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error})") from None
    except TimeoutError:
        raise BuildFailed(f"{file}: build took over {machine.build_timeout_s:g} s (build_timeout_sec)") from None
    except PodError as error:
        raise BuildFailed(str(error)) from error


def pod_limits(machine: MachineSpec) -> tuple[Limits, Storage]:
    """Return the pod limits for a machine, and whether the pod keeps its files in memory or on disk.

    Files in memory cannot exceed it, so a task that asks for more storage than memory gets them on disk.
    """
    mib = 1 << 20
    memory, storage = machine.memory_mb, machine.storage_mb
    fits = storage is None or storage * mib <= (memory * mib if memory else DEFAULT_LIMITS.memory or 0)
    limits = Limits(
        memory=memory * mib if memory else None,
        cpu=machine.cpus,
        disk=storage * mib if storage else None,
    )
    return limits, "memory" if fits else "disk"
