"""Build an image from a Dockerfile: RUN executes in a pod of the image so far, COPY and the rest without one.

Every step that changes files makes a layer, cached by the image before it, the instruction, the variables it can see
and the digests of what it copies. EXPOSE, VOLUME, STOPSIGNAL, HEALTHCHECK and MAINTAINER are accepted without effect;
CMD, ENTRYPOINT and LABEL are recorded in the image. ADD takes no URLs: a build has only the network it was given.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from etude.errors import InputError
from etude.pods.images.context import (
    CopyLayerWriter,
    CopySource,
    DockerIgnore,
    from_context,
    from_stack,
    heredoc_source,
    owner_of,
    source_digest,
    variable_key_parts,
)
from etude.pods.images.instructions import BuildStage, Dockerfile, Instruction, expand, pairs, parse, substitute, words
from etude.pods.images.layers import LayerStack
from etude.pods.images.records import Image
from etude.pods.images.store import Store
from etude.pods.images.trees import copy_metadata, digest
from etude.pods.pod import Egress, Pod, PodError

__all__ = ["build", "parse"]

_SHELL = ("/bin/sh", "-c")
_IGNORED = ("EXPOSE", "VOLUME", "STOPSIGNAL", "HEALTHCHECK", "MAINTAINER")
_FLAGS = {"COPY": {"chown", "chmod", "from", "link"}, "ADD": {"chown", "chmod", "link"}, "FROM": {"platform"}}
_HEREDOC_ONLY = re.compile(r"<<-?(['\"]?)[A-Za-z_][A-Za-z0-9_]*\1")


class PodFactory(Protocol):
    """The part of the fleet that a build uses."""

    async def create(self, *, image: Image, storage: str, egress: Egress) -> Pod: ...


@dataclass(slots=True)
class _StageState:
    """A stage during its build."""

    image: Image
    globals: Mapping[str, str]  # ARGs before the first FROM
    build_args: Mapping[str, str]  # given by the caller
    arguments: dict[str, str] = field(default_factory=dict)
    shell: tuple[str, ...] = _SHELL

    @property
    def variables(self) -> dict[str, str]:
        """Return the variables for substitution: ENV overrides ARG."""
        return {**self.arguments, **self.image.env}

    def change(self, **config: Any) -> None:
        self.image = self.image.with_(**config)


@dataclass(frozen=True, slots=True)
class _ImageBuild:
    fleet: PodFactory
    store: Store
    context: Path
    ignore: DockerIgnore
    base_images: Mapping[str, str | Image]
    egress: Egress
    pin: Any
    stages: dict[str, Image] = field(default_factory=dict)

    def base(self, stage: BuildStage, variables: Mapping[str, str]) -> Image:
        """Return the image of a FROM: an earlier stage, or one of `base_images`."""
        name = expand(stage.base.text.split()[0], variables, stage.base.escape, stage.base.where)
        return self._image(name, stage.base)

    def _image(self, name: str, instruction: Instruction) -> Image:
        if name.lower() in self.stages:
            return self.stages[name.lower()]
        if name == "scratch":
            empty = self.store.add_layer(lambda target: None, key="empty")
            return Image.of((empty,), workdir="/")
        found = self.base_images.get(name)
        if found is None:
            known = ", ".join(sorted((*self.stages, *self.base_images, "scratch")))
            raise instruction.error(f"the image {name!r} is not among the base images; there are: {known}")
        return self.store.image(found) if isinstance(found, str) else found

    def stack(self, image: Image) -> LayerStack:
        return LayerStack.of(self.store.layer_dirs(image.layers))

    async def step(self, state: _StageState, step: Instruction) -> None:
        """Execute one instruction."""
        _check_flags(step)
        if step.name == "RUN":
            await self._run(state, step)
        elif step.name in ("COPY", "ADD"):
            await asyncio.to_thread(self._copy, state, step)
        elif step.name == "WORKDIR":
            await asyncio.to_thread(self._workdir, state, step)
        else:
            configure(state, step)
        self.pin(state.image.layers)

    # -- RUN

    async def _run(self, state: _StageState, step: Instruction) -> None:
        command = run_command(step, state.shell)
        key = step_key(state.image, step, [*command, *variable_key_parts(state.variables), repr(self.egress)])
        if (cached := self.store.cached_image(key)) is not None:
            state.image = cached
            return
        pod = await self.fleet.create(image=state.image, storage="disk", egress=self.egress)
        try:
            user = state.image.user or None
            done = await pod.exec(command, cwd=state.image.workdir, env=state.variables, user=user)
            if not done.ok:
                last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-20:])
                raise PodError(f"{step.where}: RUN failed with exit code {done.exit_code}:\n{last}")
            snapshot = await pod.snapshot("fs")
        finally:
            await pod.close()
        made = self.store.snapshot(snapshot.id).image.layers
        self.pin(made)
        self.store.remove_snapshot(snapshot.id)
        state.change(layers=made)
        self.store.cache_image(key, state.image)

    # -- COPY, ADD, WORKDIR

    def _copy(self, state: _StageState, step: Instruction) -> None:
        *names, to = self._words(state, step)
        if not names:
            raise step.error("expected at least one source and a target")
        to = to if to.startswith("/") else f"{state.image.workdir.rstrip('/')}/{to}"
        below = self.stack(state.image)
        with self.store.staging() as staging:
            sources = self._sources(state, step, names, staging)
            inputs = [to, step.flag("chown") or "", step.flag("chmod") or "", source_digest(sources)]
            owner = owner_of(_flag(state, step, "chown"), below, step.where)

            def write(layer: CopyLayerWriter) -> None:
                layer.owner, layer.mode = owner, _mode(_flag(state, step, "chmod"), step)
                layer.copy(sources, to, unpack_archives=step.name == "ADD")

            self._write_layer(state, step, inputs, write, below)

    def _words(self, state: _StageState, step: Instruction) -> list[str]:
        if step.json is not None:
            return [substitute(word, state.variables, step.escape, step.where) for word in step.json]
        return words(step.text, state.variables, step.escape, step.where)

    def _sources(self, state: _StageState, step: Instruction, names: Sequence[str], staging: Path) -> list[CopySource]:
        bodies = {heredoc.name: heredoc for heredoc in step.heredocs}
        origin = _flag(state, step, "from")
        other = self._image(origin, step) if origin is not None else None
        found: list[CopySource] = []
        for name in names:
            mark = name.removeprefix("<<").removeprefix("-")
            if name.startswith("<<") and mark in bodies:
                body = bodies[mark].body
                text = substitute(body, state.variables, step.escape, step.where) if bodies[mark].expand else body
                found.append(heredoc_source(mark, text, staging))
            elif re.match(r"[a-z]+://|git@", name):
                raise step.error(f"{name} is a URL; fetch it in a RUN with the network it needs, or before the build")
            elif other is not None:
                found += from_stack(self.stack(other), name, staging, step.where, other.binds)
            else:
                found += from_context(self.context, name, self.ignore, step.where)
        return found

    def _workdir(self, state: _StageState, step: Instruction) -> None:
        path = expand(step.text, state.variables, step.escape, step.where)
        path = path if path.startswith("/") else f"{state.image.workdir.rstrip('/')}/{path}"
        below = self.stack(state.image)
        if not below.locate(path)[1].is_directory and not any(path.startswith(bind) for bind in state.image.binds):
            self._write_layer(state, step, [path], lambda layer: layer.directory(path) and None, below)
        state.change(workdir=path)

    def _write_layer(
        self, state: _StageState, step: Instruction, inputs: Sequence[str], write: Any, below: LayerStack
    ) -> None:
        """Add a layer that `write` fills to the image, or the cached one."""
        key = step_key(state.image, step, inputs)

        def fill(target: Path) -> None:
            _, root = below.locate("/")
            if root.info is not None:
                copy_metadata(root.dirs[0].path, str(target), root.info, root.dirs[0].shift)
            write(CopyLayerWriter(target, below, step.where, binds=state.image.binds))

        state.change(layers=(*state.image.layers, self.store.add_layer(fill, key=key)))


async def build(
    fleet: PodFactory,
    store: Store,
    dockerfile: Path,
    context: Path,
    base_images: Mapping[str, str | Image],
    args: Mapping[str, str] | None = None,
    egress: Egress | None = None,
    *,
    name: str = "",
    target: str | None = None,
) -> Image:
    """Build the last stage of a Dockerfile, or the stage `target`, and add it to the store under `name`.

    `base_images` maps a name after FROM to an `Image` or to the name of one in the store. `args` are values for ARG.
    RUN has the network that `egress` allows; none by default.
    """
    try:
        parsed = parse(dockerfile.read_text(encoding="utf-8-sig"), str(dockerfile))
    except (OSError, UnicodeError) as error:
        raise InputError(f"{dockerfile}: cannot be read ({error})") from None
    if not context.is_dir():
        raise InputError(f"context {context}: not a directory")
    build_args = dict(args or {})
    _check_args(parsed, build_args, dockerfile)
    stages = parsed.stages if target is None else _until(parsed.stages, target, dockerfile)
    global_args: dict[str, str] = {}
    for argument in parsed.arguments:
        global_args.update(declare(argument, global_args, {}, build_args))
    with ExitStack() as stack:
        pin = stack.enter_context(store.pin())
        work = _ImageBuild(fleet, store, context, DockerIgnore.read(context), base_images, egress or Egress(), pin)
        for number, stage in enumerate(stages):
            _check_flags(stage.base)
            state = _StageState(work.base(stage, global_args), global_args, build_args)
            pin(state.image.layers)
            for step in stage.steps:
                await work.step(state, step)
            work.stages[stage.name] = work.stages[str(number)] = state.image
        return store.add_image(state.image.with_(name=name))


def _until(stages: Sequence[BuildStage], target: str, file: Path) -> Sequence[BuildStage]:
    for number, stage in enumerate(stages):
        if target.lower() in (stage.name, str(number)):
            return stages[: number + 1]
    raise InputError(f"{file}: there is no stage {target!r}; there are: {', '.join(stage.name for stage in stages)}")


# -- instructions that only change the configuration


def configure(state: _StageState, step: Instruction) -> None:
    """Apply ARG, ENV, USER, SHELL, LABEL, CMD or ENTRYPOINT; accept the ignored instructions."""
    text, where = step.text, step.where
    if step.name == "ARG":
        state.arguments.update(declare(step, state.variables, state.globals, state.build_args))
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


def declare(
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


def run_command(step: Instruction, shell: Sequence[str]) -> list[str]:
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


def step_key(image: Image, step: Instruction, inputs: Sequence[str]) -> str:
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
