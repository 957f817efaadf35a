"""From a task's environment/ to what a pod needs: an image, files to put into it, and how programs start there.

A Dockerfile's steps up to the last one that needs a pod or a layer (RUN, ADD, COPY --from, COPY --chown) are built,
each cached by what decides it. What comes after is written into the pod when it is made: thousands of tasks that differ
in a few files share one image, and none of them leaves a layer behind.
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
from etude.tasks.base_images import Provision, base_image, mapped
from etude.tasks.schema import resolve_env
from etude.tasks.task import Machine

_WRITTEN = (  # steps that need neither pod nor layer
    *("COPY", "ENV", "ARG", "WORKDIR", "USER", "LABEL", "CMD", "ENTRYPOINT", "SHELL", "EXPOSE", "VOLUME"),
    *("STOPSIGNAL", "HEALTHCHECK", "MAINTAINER"),
)


@dataclass(frozen=True)
class Put:
    """One file or link of the context at its place in the pod."""

    source: Path
    target: str
    mode: int


@dataclass(frozen=True)
class Plan:
    """How a pod for an environment is made."""

    image: Image | str
    workspace: str
    puts: tuple[Put, ...] = ()
    directories: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    user: str = ""


class BuildFailed(PodError):
    """A step of a Dockerfile failed."""


async def plan_environment(fleet: Fleet, context: Path, machine: Machine, provision: Provision) -> Plan:
    """What to make for the environment in a directory: that of a task, or the tests/ of a separate verifier."""
    compose = [name for name in ("docker-compose.yaml", "docker-compose.yml") if (context / name).exists()]
    if compose and not machine.image:
        raise InputError(f"{context / compose[0]}: pods are single machines; tasks with several services do not run")
    file = context / "Dockerfile"
    # an image that was built elsewhere is used where it is known; what it was built from is as good
    if machine.image and (mapped(machine.image, provision.images) is not None or not file.exists()):
        image = await base_image(fleet, machine.image, provision, f"{context.parent}/task.toml")
        return _finish(Plan(image, _workdir(image)), machine, provision, context)
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeError) as error:
        raise InputError(f"{file}: cannot be read ({error})") from None
    recipe = parse(text, str(file))
    first = _first_written(recipe)
    image = await _built(fleet, recipe, first, text, context, machine, provision)
    return _finish(_write_out(image, recipe, first, context), machine, provision, context)


def _finish(plan: Plan, machine: Machine, provision: Provision, context: Path) -> Plan:
    env = {**plan.env, **resolve_env(machine.env, provision.variables, f"{context.parent}/task.toml")}
    workspace = machine.workdir or plan.workspace
    if workspace == "/":
        raise InputError(f"{context}: the workspace is /, the whole machine; set WORKDIR, or environment.workdir")
    image = plan.image
    if isinstance(image, Image):
        changes = {"env": {**image.env, **env}, "workdir": workspace, "user": plan.user or image.user}
        if any(getattr(image, key) != value for key, value in changes.items()):
            image = image.with_(**changes)
    elif workspace != "/work":  # a host elsewhere makes pods of images it has under a name, as they are
        raise InputError(f"{context}: WORKDIR is {workspace}; on other hosts only /work is possible")
    return replace(plan, image=image, env=env, workspace=workspace)


def _workdir(image: Image | str) -> str:
    return image.workdir if isinstance(image, Image) else "/work"


# ------------------------------------------------------------------------------------------------- what is built


def _first_written(recipe: Dockerfile) -> int:
    """Where in the last stage the steps begin that are written into the pod."""
    steps = recipe.stages[-1].steps
    for at in range(len(steps), 0, -1):
        step = steps[at - 1]
        if step.name not in _WRITTEN or step.heredocs or (step.name == "COPY" and set(dict(step.flags)) - {"chmod"}):
            return at
    return 0


async def _built(
    fleet: Fleet, recipe: Dockerfile, first: int, text: str, context: Path, machine: Machine, provision: Provision
) -> Image | str:
    """The image of everything before; FROM alone needs no building."""
    stage = recipe.stages[-1]
    names = [_from(recipe, each) for each in recipe.stages]
    earlier = {each.name for each in recipe.stages[:-1]} | {str(number) for number in range(len(names) - 1)}
    if first == 0 and names[-1].lower() not in earlier:
        return await base_image(fleet, names[-1], provision, stage.base.where)
    if fleet.local is None:
        raise InputError(
            f"{context / 'Dockerfile'}: its steps must be run, and this fleet's hosts are elsewhere; build it there "
            "(`etude pods image add NAME --dockerfile ...`) and name it with docker_image"
        )
    table: dict[str, str | Image] = {}
    for number, name in enumerate(names):
        known = {each.name for each in recipe.stages[:number]} | {str(each) for each in range(number)}
        if name != "scratch" and name.lower() not in known:
            table[name] = await base_image(fleet, name, provision, recipe.stages[number].base.where)
    lines = text.replace("\r\n", "\n").split("\n")
    rest = stage.steps[first:]
    kept = lines[: _line(rest[0]) - 1] if rest else lines
    with tempfile.TemporaryDirectory(prefix="etude-build-") as directory:
        file = Path(directory) / "Dockerfile"
        file.write_text("\n".join(kept) + "\n")
        work = build(fleet, fleet.local.store, file, context, table, egress=provision.build)  # type: ignore[arg-type]
        try:
            return await asyncio.wait_for(work, machine.build_timeout_s)
        except TimeoutError:
            raise BuildFailed(f"{context / 'Dockerfile'}: not built after {machine.build_timeout_s:g} s") from None
        except PodError as error:
            raise BuildFailed(str(error).replace(str(file), str(context / "Dockerfile"))) from error


def _from(recipe: Dockerfile, stage: BuildStage) -> str:
    """The name after FROM, with its variables."""
    before: dict[str, str] = {}
    for argument in recipe.arguments:
        before.update(declare(argument, before, {}, {}))
    return expand(stage.base.text.split()[0], before, stage.base.escape, stage.base.where)


def _line(step: Instruction) -> int:
    return int(step.where.rpartition(":")[2])


# ------------------------------------------------------------------------------------------------- what is written


def _write_out(image: Image | str, recipe: Dockerfile, first: int, context: Path) -> Plan:
    """The steps after the image, as files and settings."""
    before: dict[str, str] = {}
    for argument in recipe.arguments:
        before.update(declare(argument, before, {}, {}))
    steps = recipe.stages[-1].steps
    base_env = dict(image.env) if isinstance(image, Image) else {}
    arguments: dict[str, str] = {}
    for step in steps[:first]:
        if step.name == "ARG":
            arguments.update(declare(step, {**arguments, **base_env}, before, {}))
    plan = Plan(image, _workdir(image))
    env: dict[str, str] = {}
    ignore = DockerIgnore.read(context)
    puts: list[Put] = []
    directories: list[str] = []
    for step in steps[first:]:
        variables = {**arguments, **base_env, **env}
        if step.name == "ARG":
            arguments.update(declare(step, variables, before, {}))
        elif step.name == "ENV":
            env.update(pairs(step, variables))
        elif step.name == "USER":
            plan = replace(plan, user=expand(step.text, variables, step.escape, step.where))
        elif step.name == "WORKDIR":
            path = os.path.normpath(os.path.join(plan.workspace, expand(step.text, variables, step.escape, step.where)))
            directories.append(path)
            plan = replace(plan, workspace=path)
        elif step.name == "COPY":
            made = {os.path.dirname(put.target) for put in puts} | set(directories)
            files, empty = _copied(step, variables, plan.workspace, context, ignore, made)
            puts += files
            directories += empty
    return replace(plan, puts=tuple(puts), directories=tuple(directories), env=env)


def _copied(
    step: Instruction, variables: Mapping[str, str], workdir: str, context: Path, ignore: DockerIgnore, made: set[str]
) -> tuple[list[Put], list[str]]:
    """What a COPY puts where, and empty directories. A target is a directory if it says so, or was made before."""
    if step.json is not None:
        given = [substitute(word, variables, step.escape, step.where) for word in step.json]
    else:
        given = words(step.text, variables, step.escape, step.where)
    *names, to = given
    if not names:
        raise step.error("expected at least one source and a target")
    sources = [source for name in names for source in from_context(context, name, ignore, step.where)]
    target = os.path.normpath(os.path.join(workdir, to))
    into = to.endswith(("/", "/.")) or to in (".", "..") or target in made
    if len(sources) > 1 and not into:
        raise step.error(f"{len(sources)} sources need a directory to go to; end {to!r} with a slash")
    mode = step.flag("chmod")
    if mode is not None and not re.fullmatch(r"[0-7]{3,4}", mode):
        raise step.error(f"--chmod={mode}: expected a mode in octal, such as 755")
    found: list[Put] = []
    empty: list[str] = []
    for source in sources:
        if source.path.is_dir():
            files, directories = _tree(source, target, mode)
            found += files
            empty += directories
        else:
            place = f"{target.rstrip('/')}/{source.name}" if into else target
            found.append(_put(source.path, place, mode))
    return found, empty


def _tree(source: CopySource, target: str, mode: str | None) -> tuple[list[Put], list[str]]:
    found: list[Put] = []
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
                found.append(_put(path, f"{target.rstrip('/')}/{inside}", mode))
    return found, empty


def _put(path: Path, target: str, mode: str | None) -> Put:
    return Put(path, target, int(mode, 8) if mode else path.lstat().st_mode & 0o7777)


def limits_of(machine: Machine) -> tuple[Limits, Storage]:
    """A machine's limits as a pod's, and where the pod keeps its files.

    Files are in memory, and then cannot be more than it; a task that asks for more storage than memory has them on
    disk, where pods have no limit to give.
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
