"""The interpreter of Dockerfiles: RUN executes in a pod of the image so far, COPY and the rest without one.

`build` makes an image: every step that changes files makes a layer, cached by the image before it, the instruction, the
variables it can see and the digests of what it copies. `plan` builds only the steps up to the last one that needs a pod
or a layer; the files of later steps are returned as a list, for the caller to write into each new pod.

EXPOSE, VOLUME, STOPSIGNAL, HEALTHCHECK and MAINTAINER are accepted without effect; CMD, ENTRYPOINT and LABEL are
recorded in the image. ADD takes no URLs: a build has only the network it was given.
"""

import os
import re
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from etude.errors import InputError
from etude.pods.images.builder import CopyStep, DirectoryStep, LayerBuilder, RunStep, check_count
from etude.pods.images.context import (
    CopySource,
    DirectoryToMake,
    DockerIgnore,
    FileToCopy,
    copies,
    from_context,
    heredoc_source,
    source_digest,
)
from etude.pods.images.instructions import Dockerfile, Instruction, expand, pairs, parse, substitute, words
from etude.pods.images.records import Image
from etude.pods.images.trees import digest
from etude.pods.pod import Egress

BaseImages = Callable[[str, Instruction], Awaitable[Image]]  # finds the image of a FROM or COPY --from

_SHELL = ("/bin/sh", "-c")
_IGNORED = ("EXPOSE", "VOLUME", "STOPSIGNAL", "HEALTHCHECK", "MAINTAINER")
_NEED_LAYER = ("RUN", "ADD")  # and COPY with a heredoc or one of the flags other than --chmod
_FLAGS = {"COPY": {"chown", "chmod", "from", "link"}, "ADD": {"chown", "chmod", "link"}, "FROM": {"platform"}}
_HEREDOC_ONLY = re.compile(r"<<-?(['\"]?)[A-Za-z_][A-Za-z0-9_]*\1")


@dataclass(frozen=True)
class BuildPlan:
    """An image, and what to create in each new pod of it."""

    image: Image
    files: tuple[FileToCopy, ...] = ()
    directories: tuple[str, ...] = ()


@dataclass(slots=True)
class _StageState:
    """A stage during its build."""

    image: Image
    globals: Mapping[str, str]  # ARGs before the first FROM
    build_args: Mapping[str, str]  # given by the caller
    arguments: dict[str, str] = field(default_factory=dict)
    shell: tuple[str, ...] = _SHELL
    built: bool = False  # steps of this stage, or of earlier ones, made layers
    # from the first step on that need not make a layer: what would have been in it
    deferred: list[FileToCopy | DirectoryToMake] | None = None

    @property
    def variables(self) -> dict[str, str]:
        """Return the variables for substitution: ENV overrides ARG."""
        return {**self.arguments, **self.image.env}

    def change(self, **config: Any) -> None:
        self.image = self.image.with_(**config)

    def path(self, path: str) -> str:
        return path if path.startswith("/") else f"{self.image.workdir.rstrip('/')}/{path}"


@dataclass(frozen=True, slots=True)
class _Interpreter:
    builder: LayerBuilder
    context: Path
    ignore: DockerIgnore
    base_images: BaseImages
    egress: Egress
    stages: dict[str, Image] = field(default_factory=dict)

    async def run(self, parsed: Dockerfile, args: Mapping[str, str], defer: bool) -> _StageState:
        """Execute stages and return the last one; with `defer`, its layers end with the last step that needs one."""
        global_args: dict[str, str] = {}
        for argument in parsed.arguments:
            global_args.update(_declare(argument, global_args, {}, args))
        for number, stage in enumerate(parsed.stages):
            _check_flags(stage.base)
            name = expand(stage.base.text.split()[0], global_args, stage.base.escape, stage.base.where)
            state = _StageState(await self._image(name, stage.base), global_args, args, built=number > 0)
            built = len(stage.steps)
            if defer and stage is parsed.stages[-1]:
                built = max((at for at, step in enumerate(stage.steps, 1) if _needs_layer(step)), default=0)
            for at, step in enumerate(stage.steps):
                if at == built:
                    state.deferred = []
                await self._step(state, step)
            self.stages[stage.name] = self.stages[str(number)] = state.image
        return state

    async def _image(self, name: str, step: Instruction) -> Image:
        """Return the image of a FROM or --from: an earlier stage, or a base image."""
        if name.lower() in self.stages:
            return self.stages[name.lower()]
        return await self.builder.scratch() if name == "scratch" else await self.base_images(name, step)

    async def _step(self, state: _StageState, step: Instruction) -> None:
        _check_flags(step)
        before = state.image.layers
        if step.name == "RUN":
            await self._run(state, step)
        elif step.name in ("COPY", "ADD"):
            await self._copy(state, step)
        elif step.name == "WORKDIR":
            await self._workdir(state, step)
        else:
            _configure(state, step)
        state.built = state.built or state.image.layers != before

    async def _run(self, state: _StageState, step: Instruction) -> None:
        command = _run_command(step, state.shell)
        variables = [f"{key}={value}" for key, value in sorted(state.variables.items())]
        key = _step_key(state.image, step, [*command, *variables, repr(self.egress)])
        asked = RunStep(state.image, key, tuple(command), state.variables, self.egress, step.where)
        state.image = await self.builder.run(asked)

    async def _copy(self, state: _StageState, step: Instruction) -> None:
        origin = _flag(state, step, "from")
        other = None if origin is None else await self._image(origin, step)
        *names, to = _copy_arguments(state, step)
        if not names:
            raise step.error("expected at least one source and a target")
        target, mode = state.path(to), _mode(_flag(state, step, "chmod"), step)
        into = target.endswith(("/", "/.", "/.."))
        with tempfile.TemporaryDirectory(prefix="etude-heredoc-") as staging:
            sources, elsewhere = self._sources(state, step, names, Path(staging), other)
            if state.deferred is not None:
                state.deferred += await self._deferred_copies(state, step, sources, target, into, mode)
                return
            owner = _flag(state, step, "chown") or ""
            inputs = [to, step.flag("chown") or "", step.flag("chmod") or "", source_digest(sources), *elsewhere]
            key = _step_key(state.image, step, inputs)
            asked = CopyStep(state.image, key, target, into, owner, mode, other, tuple(elsewhere), step.where)
            state.image = await self.builder.copy(asked, sources)

    async def _deferred_copies(
        self,
        state: _StageState,
        step: Instruction,
        sources: Sequence[CopySource],
        target: str,
        into: bool,
        mode: int | None,
    ) -> list[FileToCopy | DirectoryToMake]:
        found = await self.builder.locate(state.image, target)
        made = {os.path.dirname(each.target) for each in state.deferred or ()}
        made |= {each.target for each in state.deferred or () if isinstance(each, DirectoryToMake)}
        into = into or found.is_directory or found.path in made
        check_count(len(sources), into, target, f"{step.where}: {step.name}")
        return list(copies(sources, found.path, into, mode))

    def _sources(
        self, state: _StageState, step: Instruction, names: Sequence[str], staging: Path, other: Image | None
    ) -> tuple[list[CopySource], list[str]]:
        """Return the sources of the context and heredocs, and the names of those in another stage."""
        sources: list[CopySource] = []
        elsewhere: list[str] = []
        bodies = {heredoc.name: heredoc for heredoc in step.heredocs}
        for name in names:
            mark = name.removeprefix("<<").removeprefix("-")
            if name.startswith("<<") and mark in bodies:
                body = bodies[mark].body
                text = substitute(body, state.variables, step.escape, step.where) if bodies[mark].expand else body
                sources.append(heredoc_source(mark, text, staging))
            elif re.match(r"[a-z]+://|git@", name):
                raise step.error(f"{name} is a URL; fetch it in a RUN with the network it needs, or before the build")
            elif other is not None:
                elsewhere.append(name)
            else:
                found = from_context(self.context, name, self.ignore, step.where)
                sources += [replace(each, unpack=step.name == "ADD") for each in found]
        return sources, elsewhere

    async def _workdir(self, state: _StageState, step: Instruction) -> None:
        path = os.path.normpath(state.path(expand(step.text, state.variables, step.escape, step.where)))
        if state.deferred is None:
            asked = DirectoryStep(state.image, _step_key(state.image, step, [path]), path, step.where)
            state.image = await self.builder.make_directory(asked)
        elif not (await self.builder.locate(state.image, path)).is_directory and not any(
            path.startswith(bind) for bind in state.image.binds
        ):
            state.deferred.append(DirectoryToMake(path))
        state.change(workdir=path)


async def build(
    builder: LayerBuilder,
    dockerfile: Path,
    context: Path,
    base_images: Mapping[str, Image],
    args: Mapping[str, str] | None = None,
    egress: Egress | None = None,
    *,
    name: str = "",
) -> Image:
    """Build the last stage of a Dockerfile as an image of this name.

    `base_images` maps names after FROM to images. `args` are values for ARG. RUN has the network that `egress` allows;
    none by default.
    """
    parsed = _read(dockerfile, context)
    build_args = dict(args or {})
    _check_args(parsed, build_args, dockerfile)

    async def find(name: str, step: Instruction) -> Image:
        found = base_images.get(name)
        if found is None:
            known = ", ".join(sorted((*work.stages, *base_images, "scratch")))
            raise step.error(f"the image {name!r} is not among the base images; there are: {known}")
        return found

    work = _Interpreter(builder, context, DockerIgnore.read(context), find, egress or Egress())
    state = await work.run(parsed, build_args, defer=False)
    return await builder.keep(state.image.with_(name=name))


async def plan(
    builder: LayerBuilder, dockerfile: Path, context: Path, base_images: BaseImages, egress: Egress
) -> BuildPlan:
    """Build as little as possible: return the image, and the files of the steps that need no layer.

    Thousands of contexts that differ in a few files then share one image, and none of them leaves a layer behind.
    """
    parsed = _read(dockerfile, context)
    work = _Interpreter(builder, context, DockerIgnore.read(context), base_images, egress)
    state = await work.run(parsed, {}, defer=True)
    if state.built:
        await builder.keep(Image.of(state.image.layers))
    made = {each.target: each for each in state.deferred or ()}  # a later step replaces a file of an earlier one
    parents = {os.path.dirname(path) for path in made}  # created with what is in them
    files = tuple(each for each in made.values() if isinstance(each, FileToCopy))
    empty = tuple(
        each.target for each in made.values() if isinstance(each, DirectoryToMake) and each.target not in parents
    )
    return BuildPlan(state.image, files, empty)


def _read(dockerfile: Path, context: Path) -> Dockerfile:
    try:
        text = dockerfile.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeError) as error:
        raise InputError(f"{dockerfile}: cannot be read ({error})") from None
    if not context.is_dir():
        raise InputError(f"context {context}: not a directory")
    return parse(text, str(dockerfile))


def _needs_layer(step: Instruction) -> bool:
    return (
        step.name in _NEED_LAYER
        or bool(step.heredocs)
        or (step.name == "COPY" and not {flag for flag, _ in step.flags} <= {"chmod"})
    )


def _copy_arguments(state: _StageState, step: Instruction) -> list[str]:
    """Return the words of a COPY or ADD: its sources and its target."""
    if step.json is not None:
        return [substitute(word, state.variables, step.escape, step.where) for word in step.json]
    return words(step.text, state.variables, step.escape, step.where)


# -- instructions that only change the configuration


def _configure(state: _StageState, step: Instruction) -> None:
    """Apply ARG, ENV, USER, SHELL, LABEL, CMD or ENTRYPOINT; accept the ignored instructions."""
    text, where = step.text, step.where
    if step.name == "ARG":
        state.arguments.update(_declare(step, state.variables, state.globals, state.build_args))
    elif step.name == "ENV":
        state.change(env={**state.image.env, **pairs(step, state.variables)})
    elif step.name == "LABEL":
        state.change(labels={**state.image.labels, **pairs(step, state.variables)})
    elif step.name == "USER":
        state.change(user=expand(text, state.variables, step.escape, where))
    elif step.name == "SHELL":
        if not step.json:
            raise step.error('expected the JSON form, such as SHELL ["/bin/bash", "-c"]')
        state.shell = step.json
    elif step.name in ("CMD", "ENTRYPOINT"):
        command = step.json if step.json is not None else (*state.shell, text)
        state.change(**{"command" if step.name == "CMD" else "entrypoint": command})
    elif step.name not in _IGNORED:
        raise step.error("cannot be used here")


def _declare(
    step: Instruction, variables: Mapping[str, str], global_args: Mapping[str, str], build_args: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables of an ARG: the caller's value, else its default, else the one from before the first FROM."""
    found: dict[str, str] = {}
    for word in words(step.text, {**variables, **found}, step.escape, step.where):
        name, equals, default = word.partition("=")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise step.error(f"{name!r} is not the name of a variable")
        if name in build_args:
            found[name] = build_args[name]
        elif equals:
            found[name] = default
        elif name in global_args:
            found[name] = global_args[name]
    return found


def _run_command(step: Instruction, shell: Sequence[str]) -> list[str]:
    """Return the argv of RUN. A heredoc alone is a script for the shell; after a command it is left to the shell."""
    if step.json is not None and not step.heredocs:
        if not step.json:
            raise step.error("an empty list is no command")
        return list(step.json)
    if len(step.heredocs) == 1 and _HEREDOC_ONLY.fullmatch(step.text):
        return [*shell, step.heredocs[0].body]
    text = step.text
    for heredoc in step.heredocs:
        text = f"{text}\n{heredoc.body}{heredoc.name}"
    # the tabs of <<- were removed by the parser
    return [*shell, f"{text}\n" if step.heredocs else text]


def _step_key(image: Image, step: Instruction, inputs: Sequence[str]) -> str:
    """Return the cache key of a step: the image before it (layers and configuration), its text, and its inputs."""
    bodies = [part for heredoc in step.heredocs for part in (heredoc.name, heredoc.body)]
    flags = [f"{name}={value}" for name, value in step.flags]
    return digest("dockerfile 1", image.id, step.name, *flags, step.text, *bodies, "|", *inputs)


def _check_flags(step: Instruction) -> None:
    for flag, _ in step.flags:
        if step.name != "HEALTHCHECK" and flag not in _FLAGS.get(step.name, ()):
            raise step.error(f"--{flag} is not supported")


def _check_args(dockerfile: Dockerfile, build_args: Mapping[str, str], file: Path) -> None:
    lines = [
        *dockerfile.arguments,
        *(step for stage in dockerfile.stages for step in stage.steps if step.name == "ARG"),
    ]
    declared = {word.partition("=")[0] for line in lines for word in line.text.split()}
    if unknown := sorted(set(build_args) - declared):
        raise InputError(f"{file}: no ARG declares {', '.join(unknown)}; remove it or declare it")


def _flag(state: _StageState, step: Instruction, name: str) -> str | None:
    value = step.flag(name)
    return None if value is None else expand(value, state.variables, step.escape, step.where)


def _mode(value: str | None, step: Instruction) -> int | None:
    if value is None:
        return None
    if not re.fullmatch(r"[0-7]{3,4}", value):
        raise step.error(f"--chmod={value}: expected a mode in octal, such as 755")
    return int(value, 8)
