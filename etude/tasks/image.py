"""Turn a task's environment/ into an image plan: an image, files to copy into the pod, environment variables and user.

Dockerfile steps up to the last one that needs a pod or a layer (RUN, ADD, COPY --from, COPY --chown) are built and
cached. The steps after it are applied to each new pod: thousands of tasks that differ in a few files share one image,
and none of them leaves a layer behind.
"""

import asyncio
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from etude.errors import InputError
from etude.pods.fleet import Fleet
from etude.pods.images.context import CopySource, DockerIgnore, from_context
from etude.pods.images.dockerfile import build, declare
from etude.pods.images.instructions import BuildStage, Dockerfile, Instruction, expand, pairs, parse, substitute, words
from etude.pods.images.records import Image
from etude.pods.pod import Limits, PodError
from etude.pods.runtime.backend import Storage
from etude.tasks.base_images import HostSettings, mapped_image, resolve_base_image
from etude.tasks.schema import resolve_env
from etude.tasks.task import MachineSpec

_NOT_BUILT = (  # instructions that need neither a pod nor a layer
    *("COPY", "ENV", "ARG", "WORKDIR", "USER", "LABEL", "CMD", "ENTRYPOINT", "SHELL", "EXPOSE", "VOLUME"),
    *("STOPSIGNAL", "HEALTHCHECK", "MAINTAINER"),
)


@dataclass(frozen=True)
class FileToCopy:
    """One file or link of the build context and its path in the pod."""

    source: Path
    target: str
    mode: int
    stamp: tuple[int, int] = (0, 0)  # size and modification time, to notice that the source has changed


@dataclass(frozen=True)
class ImagePlan:
    """Everything needed to make a pod for an environment/ directory."""

    image: Image | str
    workspace: str
    files: tuple[FileToCopy, ...] = ()
    directories: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    user: str = ""


class BuildFailed(PodError):
    """Building a Dockerfile failed."""


async def plan_image(fleet: Fleet, context: Path, machine: MachineSpec, host_settings: HostSettings) -> ImagePlan:
    """Plan the image of a build context: a task's environment/, or tests/ of a separate verifier."""
    compose = [name for name in ("docker-compose.yaml", "docker-compose.yml") if (context / name).exists()]
    if compose and not machine.image:
        raise InputError(f"{context / compose[0]}: a pod is a single machine; tasks with several services do not run")
    file = context / "Dockerfile"
    # a prebuilt image is used if it is mapped; otherwise the Dockerfile it was built from serves as well
    if machine.image and (mapped_image(machine.image, host_settings.images) is not None or not file.exists()):
        image = await resolve_base_image(fleet, machine.image, host_settings, f"{context.parent}/task.toml")
        return _finish(ImagePlan(image, _workdir(image)), machine, host_settings, context)
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeError) as error:
        raise InputError(f"{file}: cannot be read ({error})") from None
    dockerfile = parse(text, str(file))
    first = _first_unbuilt(dockerfile)
    image = await _build_prefix(fleet, dockerfile, first, text, context, machine, host_settings)
    return _finish(_plan_unbuilt(image, dockerfile, first, context), machine, host_settings, context)


def _finish(plan: ImagePlan, machine: MachineSpec, host_settings: HostSettings, context: Path) -> ImagePlan:
    env = {**plan.env, **resolve_env(machine.env, host_settings.variables, f"{context.parent}/task.toml")}
    workspace = machine.workdir or plan.workspace
    if workspace == "/":
        raise InputError(f"{context}: the workspace is /, the whole machine; set WORKDIR or environment.workdir")
    image = plan.image
    if isinstance(image, Image):
        changes = {"env": {**image.env, **env}, "workdir": workspace, "user": plan.user or image.user}
        if any(getattr(image, key) != value for key, value in changes.items()):
            image = image.with_(**changes)
    elif workspace != "/work":  # a remote host uses its named images unchanged
        raise InputError(f"{context}: WORKDIR is {workspace}; on remote hosts only /work is possible")
    return replace(plan, image=image, env=env, workspace=workspace)


def _workdir(image: Image | str) -> str:
    return image.workdir if isinstance(image, Image) else "/work"


# ------------------------------------------------------------------------------------------------- built steps


def _first_unbuilt(dockerfile: Dockerfile) -> int:
    """Return the index in the last stage from which on no step needs building."""
    steps = dockerfile.stages[-1].steps
    for at in range(len(steps), 0, -1):
        step = steps[at - 1]
        if step.name not in _NOT_BUILT or step.heredocs or (step.name == "COPY" and set(dict(step.flags)) - {"chmod"}):
            return at
    return 0


async def _build_prefix(
    fleet: Fleet,
    dockerfile: Dockerfile,
    first: int,
    text: str,
    context: Path,
    machine: MachineSpec,
    host_settings: HostSettings,
) -> Image | str:
    """Build the steps before `first`; a FROM alone is resolved without building."""
    stage = dockerfile.stages[-1]
    names = [_from(dockerfile, each) for each in dockerfile.stages]
    earlier = {each.name for each in dockerfile.stages[:-1]} | {str(number) for number in range(len(names) - 1)}
    if first == 0 and names[-1].lower() not in earlier:
        return await resolve_base_image(fleet, names[-1], host_settings, stage.base.where)
    if fleet.local is None:
        raise InputError(
            f"{context / 'Dockerfile'}: has steps to build, and this fleet has only remote hosts; build it there "
            "(`etude pods image add NAME --dockerfile ...`) and name it with docker_image"
        )
    bases: dict[str, str | Image] = {}
    for number, name in enumerate(names):
        known = {each.name for each in dockerfile.stages[:number]} | {str(each) for each in range(number)}
        if name != "scratch" and name.lower() not in known:
            bases[name] = await resolve_base_image(fleet, name, host_settings, dockerfile.stages[number].base.where)
    lines = text.replace("\r\n", "\n").split("\n")
    rest = stage.steps[first:]
    kept = lines[: _line(rest[0]) - 1] if rest else lines
    with tempfile.TemporaryDirectory(prefix="etude-build-") as directory:
        file = Path(directory) / "Dockerfile"
        file.write_text("\n".join(kept) + "\n")
        building = build(fleet, fleet.local.store, file, context, bases, egress=host_settings.build_egress)  # type: ignore[arg-type]
        try:
            return await asyncio.wait_for(building, machine.build_timeout_s)
        except TimeoutError:
            message = f"{context / 'Dockerfile'}: build took over {machine.build_timeout_s:g} s (build_timeout_sec)"
            raise BuildFailed(message) from None
        except PodError as error:
            raise BuildFailed(str(error).replace(str(file), str(context / "Dockerfile"))) from error


def _from(dockerfile: Dockerfile, stage: BuildStage) -> str:
    """Return the image name after FROM with its variables expanded."""
    arguments: dict[str, str] = {}
    for argument in dockerfile.arguments:
        arguments.update(declare(argument, arguments, {}, {}))
    return expand(stage.base.text.split()[0], arguments, stage.base.escape, stage.base.where)


def _line(step: Instruction) -> int:
    return int(step.where.rpartition(":")[2])


# ------------------------------------------------------------------------------------------------- copied steps


def _plan_unbuilt(image: Image | str, dockerfile: Dockerfile, first: int, context: Path) -> ImagePlan:
    """Return the steps from `first` on as files and settings of a plan."""
    global_arguments: dict[str, str] = {}
    for argument in dockerfile.arguments:
        global_arguments.update(declare(argument, global_arguments, {}, {}))
    steps = dockerfile.stages[-1].steps
    base_env = dict(image.env) if isinstance(image, Image) else {}
    arguments: dict[str, str] = {}
    for step in steps[:first]:
        if step.name == "ARG":
            arguments.update(declare(step, {**arguments, **base_env}, global_arguments, {}))
    plan = ImagePlan(image, _workdir(image))
    env: dict[str, str] = {}
    ignore = DockerIgnore.read(context)
    files: list[FileToCopy] = []
    directories: list[str] = []
    for step in steps[first:]:
        variables = {**arguments, **base_env, **env}
        if step.name == "ARG":
            arguments.update(declare(step, variables, global_arguments, {}))
        elif step.name == "ENV":
            env.update(pairs(step, variables))
        elif step.name == "USER":
            plan = replace(plan, user=expand(step.text, variables, step.escape, step.where))
        elif step.name == "WORKDIR":
            path = os.path.normpath(os.path.join(plan.workspace, expand(step.text, variables, step.escape, step.where)))
            directories.append(path)
            plan = replace(plan, workspace=path)
        elif step.name == "COPY":
            made = {os.path.dirname(file.target) for file in files} | set(directories)
            copied, empty = _plan_copy(step, variables, plan.workspace, context, ignore, made)
            files += copied
            directories += empty
    return replace(plan, files=tuple(files), directories=tuple(directories), env=env)


def _plan_copy(
    step: Instruction, variables: Mapping[str, str], workdir: str, context: Path, ignore: DockerIgnore, made: set[str]
) -> tuple[list[FileToCopy], list[str]]:
    """Return the files a COPY creates, and its empty directories. The target is a directory if it ends in a slash or
    was made by an earlier step."""
    if step.json is not None:
        given = [substitute(word, variables, step.escape, step.where) for word in step.json]
    else:
        given = words(step.text, variables, step.escape, step.where)
    *names, to = given
    if not names:
        raise step.error("expected at least one source and one target")
    sources = [source for name in names for source in from_context(context, name, ignore, step.where)]
    target = os.path.normpath(os.path.join(workdir, to))
    into = to.endswith(("/", "/.")) or to in (".", "..") or target in made
    if len(sources) > 1 and not into:
        raise step.error(f"{len(sources)} sources need a directory as target; end {to!r} with a slash")
    mode = step.flag("chmod")
    if mode is not None and not re.fullmatch(r"[0-7]{3,4}", mode):
        raise step.error(f"--chmod={mode}: expected an octal mode such as 755")
    found: list[FileToCopy] = []
    empty: list[str] = []
    for source in sources:
        if source.path.is_dir():
            files, directories = _plan_tree(source, target, mode)
            found += files
            empty += directories
        else:
            path = f"{target.rstrip('/')}/{source.name}" if into else target
            found.append(_file_to_copy(source.path, path, mode))
    return found, empty


def _plan_tree(source: CopySource, target: str, mode: str | None) -> tuple[list[FileToCopy], list[str]]:
    found: list[FileToCopy] = []
    empty: list[str] = []
    for directory, names, files in os.walk(source.path):
        names.sort()
        above = Path(directory).relative_to(source.path).as_posix()
        if not names and not files and (source.keep is None or above in source.keep):
            empty.append(os.path.normpath(f"{target}/{above}"))
        for name in sorted(files) + [name for name in names if Path(directory, name).is_symlink()]:
            path = Path(directory, name)
            inside = path.relative_to(source.path).as_posix()
            if source.keep is None or inside in source.keep:
                found.append(_file_to_copy(path, f"{target.rstrip('/')}/{inside}", mode))
    return found, empty


def _file_to_copy(path: Path, target: str, mode: str | None) -> FileToCopy:
    info = path.lstat()
    return FileToCopy(path, target, int(mode, 8) if mode else info.st_mode & 0o7777, (info.st_size, info.st_mtime_ns))


def pod_limits(machine: MachineSpec) -> tuple[Limits, Storage]:
    """Return the pod limits for a machine, and whether the pod keeps its files in memory or on disk.

    Files in memory cannot exceed it, so a task that asks for more storage than memory gets them on disk, where pods
    have no size limit.
    """
    mib = 1 << 20
    memory, storage = machine.memory_mb, machine.storage_mb
    fits = storage is None or (memory is not None and storage <= memory)
    limits = Limits(
        memory=memory * mib if memory else None,
        cpu=machine.cpus,
        disk=storage * mib if storage and fits else None,
    )
    return limits, "memory" if fits else "disk"
