"""The environment of a trial: a pod with the task's image and files, and the changes that an agent made to them.

    async with open_environment(fleet, task) as environment:
        await environment.pod.exec("...", cwd=environment.workspace)
        changes = await environment.changes()     # differences from the initial workspace

If nothing has to be built, opening one takes about as long as creating a pod.
"""

import asyncio
import contextlib
import errno
import os
import time
import weakref
from collections import OrderedDict
from collections.abc import AsyncIterator, Hashable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter

from etude.errors import EtudeError, InputError
from etude.pods.fleet import Fleet
from etude.pods.images.records import Image
from etude.pods.network.policy import EgressPolicy, forbidden_address, parse_rule
from etude.pods.pod import DiffTooLarge, Egress, FileInfo, Pod, PodError, PodFileError, Snapshot, Unsupported
from etude.pods.scheduling.pools import Prepare
from etude.pods.workspace import (
    CACHE_DIRECTORIES,
    FileChange,
    FileState,
    changed_files,
    full_path,
    read_files,
    stat_if_exists,
    touched_paths,
)
from etude.system.run_limited import run_limited
from etude.tasks.base_images import HostSettings
from etude.tasks.harbor import files_to_upload
from etude.tasks.image import FileToCopy, ImagePlan, plan_image, pod_limits
from etude.tasks.task import MachineSpec, NetworkAccess, Task, TaskPhase, TaskStep

MAX_FILE = 16 << 20  # bytes of one changed file
MAX_BYTES = 256 << 20  # bytes of all changed files
MAX_IMAGE_FILES = 50_000  # files of the workspace in the image
GIT = ".git"
ARTIFACTS = "/logs/artifacts"  # always collected
LOG_DIRECTORIES = ("/logs/agent", "/logs/verifier", ARTIFACTS)
FINAL_MESSAGE = "/logs/agent/final.txt"  # the session's final message, for tasks whose `carry` lists this file
Baseline = Mapping[str, FileToCopy | None]  # initial files by path; None: of the image, not copied from this host
_image_files: dict[tuple[str, str, tuple[str, ...]], Baseline] = {}
_MAX_IMAGES = 64
# One lock per fleet and Dockerfile: the first of many tasks with the same Dockerfile builds it for all of them.
_plan_locks: weakref.WeakKeyDictionary[Fleet, weakref.WeakValueDictionary[str, asyncio.Lock]]
_plan_locks = weakref.WeakKeyDictionary()


class EnvironmentCheckpointLost(EtudeError):
    """The pod snapshot of an environment checkpoint no longer exists."""


class EnvironmentUnavailable(PodError):
    """The pod of an environment could not be created."""


@dataclass(frozen=True)
class EnvironmentCheckpoint:
    """A snapshot of an environment's pod, the initial files, and the paths touched since then."""

    snapshot: Snapshot
    baseline: Baseline
    touched: frozenset[str] = frozenset()

    def to_json(self) -> dict[str, Any]:
        """Return the checkpoint as JSON; the inverse of `from_json`."""
        found: dict[str, Any] = TypeAdapter(EnvironmentCheckpoint).dump_python(self, mode="json")
        return found

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> "EnvironmentCheckpoint":
        """Raise KeyError or ValueError for anything that `to_json` did not return."""
        fields = {name: state[name] for name in ("snapshot", "baseline", "touched")}
        return TypeAdapter(EnvironmentCheckpoint).validate_python(fields)


class PreparedEnvironments:
    """Prepared environments as snapshots: image and files of a task are put together once for all of its trials.

        async with PreparedEnvironments(fleet) as prepared:           # one per process, for its whole life
            async with open_environment(fleet, task, prepared=prepared) as environment: ...

    An environment opened this way, and the clean pod of its verifier, are pods of one snapshot. Trials of the same task
    that start together wait for the first to prepare it. At most `max_snapshots` are kept, the most recently used;
    leaving the context removes them and the warm pods. A lost snapshot is made again. On a backend without snapshots
    every environment is prepared by itself.

    A task with fewer than `min_files` files is copied into a pod of its image instead. `prepare_pod` prepares every pod
    of an agent; `keep_warm` has some of them ready in advance.
    """

    def __init__(
        self, fleet: Fleet, max_snapshots: int = 32, *, min_files: int = 0, prepare_pod: Prepare | None = None
    ) -> None:
        self.fleet, self.max_snapshots, self.min_files = fleet, max_snapshots, min_files
        self.prepare_pod = prepare_pod
        self._pools: list[tuple[str | Image, dict[str, Any]]] = []
        self._found: OrderedDict[Hashable, EnvironmentCheckpoint] = OrderedDict()
        self._locks: weakref.WeakValueDictionary[Hashable, asyncio.Lock] = weakref.WeakValueDictionary()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for image, options in self._pools:
            await self.fleet.pool(image, 0, **options)
        for key in list(self._found):
            await self._remove(key)

    @property
    def snapshots(self) -> frozenset[str]:
        """The ids of the snapshots that are kept, which a sweep of unused snapshots must spare."""
        return frozenset(each.snapshot.id for each in self._found.values())

    async def keep_warm(self, task: Task, size: int, host_settings: HostSettings | None = None) -> None:
        """Keep `size` pods ready for agents of tasks with the image, limits and network of this one; 0: its image."""
        settings = host_settings or HostSettings()
        plan = await _plan(self.fleet, task.directory / "environment", task.machine, settings)
        options = _pod_options(self.fleet, task, task.machine, task.agent, plan, settings)
        if size:
            options["prepare"] = self.prepare_pod
            self._pools.append((plan.image, options))
            await self.fleet.pool(plan.image, size, **options)

    async def create_pod(
        self, plan: ImagePlan, carry: tuple[str, ...], options: Mapping[str, Any]
    ) -> tuple[Pod, Baseline] | None:
        """Return a pod of a plan's prepared environment and its initial files; None if there is no snapshot of it."""
        if len(plan.files) < self.min_files:
            return None
        image, env = plan.image.id, tuple(plan.env.items())
        key = (image, plan.workspace, plan.directories, plan.files, env, carry, options["storage"])
        lock = self._locks.setdefault(key, asyncio.Lock())
        for retry in (True, False):
            async with lock:
                known = self._found.get(key) or await self._prepare(key, plan, carry, options)
            if known is None:
                return None
            try:
                pod = await self.fleet.create(known.snapshot, **{**options, "env": None})  # the snapshot has them
            except (PodError, InputError):
                if self._found.get(key) is known:
                    await self._remove(key)
                if not retry:
                    raise
            else:
                if key in self._found:  # not evicted meanwhile
                    self._found.move_to_end(key)
                return pod, known.baseline
        raise AssertionError("unreachable: the second attempt returns or raises")

    async def _remove(self, key: Hashable) -> None:
        await self.fleet.remove_snapshot(self._found.pop(key).snapshot.id)

    async def _prepare(
        self, key: Hashable, plan: ImagePlan, carry: tuple[str, ...], options: Mapping[str, Any]
    ) -> EnvironmentCheckpoint | None:
        async with await self.fleet.create(plan.image, **{**options, "egress": Egress(), "prepare": None}) as pod:
            baseline = await _populate(pod, plan, carry)
            try:
                snapshot = await pod.snapshot("fs")
            except Unsupported:
                return None
        found = self._found[key] = EnvironmentCheckpoint(snapshot, baseline)
        while len(self._found) > self.max_snapshots:
            await self._remove(next(iter(self._found)))
        return found


@dataclass
class TaskEnvironment:
    """The prepared pod in which a trial runs. `baseline` has the initial files of the workspace."""

    fleet: Fleet
    task: Task
    plan: ImagePlan
    pod: Pod
    baseline: Baseline
    host_settings: HostSettings
    prepared: PreparedEnvironments | None = None
    touched: frozenset[str] = frozenset()  # paths changed before the snapshot of the pod, or by us: not in its diff
    left_out: tuple[str, ...] = ()  # files that the last call of `changes` skipped
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def workspace(self) -> str:
        return self.plan.workspace

    @property
    def carry(self) -> tuple[str, ...]:
        return carried_paths(self.task)

    async def changes(self) -> tuple[FileChange, ...]:
        """Return the changes to the workspace and the carried paths; bytecode, caches and .git are skipped.

        An agent that changed more files than a pod can list has changed nothing, as far as the verifier is concerned.
        """
        try:
            touched = await self._touched()
        except DiffTooLarge as error:
            self.left_out = (str(error),)
            return ()
        found = changed_files(touched, self.baseline)
        files = {path: info for path, info in found.items() if is_tracked(path, self.carry)}
        unnamed = [path for path in files if path.encode("utf-8", "ignore").decode() != path]
        for path in unnamed:
            del files[path]
        after, left_out = await read_files(self.pod, self.workspace, files, MAX_FILE, MAX_BYTES)
        before = await self._originals([path for path in after if path in self.baseline])
        left_out += [path for path in after if path in self.baseline and path not in before]
        self.left_out = (*left_out, *map(repr, unnamed))
        changes = [FileChange(path, before.get(path), after[path]) for path in sorted(after) if path not in left_out]
        return tuple(change for change in changes if change.before != change.after)

    async def _touched(self) -> dict[str, FileInfo | None]:
        """Return the paths changed since the initial state, and their present state."""
        outside = [path for path in self.carry if path.startswith("/")]
        touched = await touched_paths(self.pod, self.workspace, outside)

        async def stat(path: str) -> None:
            touched[path] = await stat_if_exists(self.pod, full_path(self.workspace, path))

        await run_limited(stat(path) for path in self.touched - touched.keys())
        return touched

    async def _originals(self, paths: Sequence[str]) -> dict[str, FileState]:
        """Return the initial states of files: from the task directory, else from a new pod of the same task."""
        found = {path: _source_state(file) for path in paths if (file := self.baseline[path]) is not None}
        if missing := [path for path in paths if path not in found]:
            async with self.open_clean() as clean:
                files = {path: await clean.pod.stat(full_path(self.workspace, path)) for path in missing}
                states, _ = await read_files(clean.pod, self.workspace, files, MAX_BYTES, MAX_BYTES)
            found |= {path: state for path, state in states.items() if state is not None}
        return found

    async def checkpoint(self) -> EnvironmentCheckpoint:
        """Take a snapshot of the pod that `open_environment` can restore; the caller removes it."""
        touched = await self._touched()
        removed = changed_files(touched, self.baseline)  # with a directory, which may be there again at the end
        paths = frozenset(touched) | frozenset(removed)
        return EnvironmentCheckpoint(await self.pod.snapshot(), self.baseline, paths)

    def open_clean(self) -> AbstractAsyncContextManager["TaskEnvironment"]:
        """Open another environment of the same task as it was before the agent's work."""
        return open_environment(
            self.fleet,
            self.task,
            host_settings=self.host_settings,
            phase=self.task.agent,
            plan=self.plan,
            prepared=self.prepared,
        )

    async def write_final_message(self, text: str) -> None:
        """Write the session's final message where verifiers read it. Call before `changes`.

        An agent that left no room for it, or something else in its place, has no final message.
        """
        with contextlib.suppress(PodFileError):
            await self.pod.write(FINAL_MESSAGE, text)

    async def begin_step(self, step: TaskStep) -> None:
        """Prepare a step: copy its workdir/ files, run its setup.sh, wait for its health check."""
        directory = f"steps/{step.name}/workdir"
        files = files_to_upload(self.task, directory, self.workspace)
        entries = await copy_files(self.pod, files, self.workspace, self.carry)
        self.baseline, self.touched = {**self.baseline, **entries}, self.touched | entries.keys()
        user = step.agent.user or self.task.agent.user
        if "setup.sh" in entries:
            done = await self.pod.exec(["bash", "setup.sh"], cwd=self.workspace, user=user, env=self.plan.env)
            if not done.ok:
                raise PodError(
                    f"{self.task.directory}/{directory}/setup.sh: exit code {done.exit_code}: {done.stderr[-500:]}"
                )
            await self.pod.remove(f"{self.workspace}/setup.sh")
            self.baseline = {path: entry for path, entry in self.baseline.items() if path != "setup.sh"}
        tables = {str(table.get("name")): table for table in self.task.config.get("steps", [])}
        await wait_until_healthy(self.pod, tables[step.name].get("healthcheck") or {}, self.workspace, user)


def environment_kind(task: Task) -> str:
    """Return what the pods of a task's environment are made of: those of equal kinds can be kept warm together."""
    dockerfile = task.directory / "environment/Dockerfile"
    text = dockerfile.read_text(encoding="utf-8", errors="replace") if dockerfile.is_file() else ""
    return f"{task.machine}\n{task.agent.network}\n{text}"


def carried_paths(task: Task) -> tuple[str, ...]:
    """Return paths outside the workspace (or its `.git`) whose changes reach the verifier: `carry` and artifacts."""
    found = task.metadata.get("carry", ())
    if not isinstance(found, list | tuple) or not all(isinstance(path, str) and path for path in found):
        raise InputError(f"{task.directory}/task.toml: metadata.carry is {found!r}; expected a list of paths")
    if any(".." in path.split("/") or path.strip("/") == "" for path in found):
        raise InputError(f"{task.directory}/task.toml: metadata.carry is {found!r}; expected paths without .., not /")
    collected = [entry.source for entry in task.artifacts if entry.source.startswith("/")]
    return tuple(dict.fromkeys(path.rstrip("/") for path in (*found, ARTIFACTS, *collected)))


@asynccontextmanager
async def open_environment(
    fleet: Fleet,
    task: Task,
    *,
    egress: Egress | None = None,
    host_settings: HostSettings | None = None,
    phase: TaskPhase | None = None,
    machine: MachineSpec | None = None,
    context: Path | None = None,
    plan: ImagePlan | None = None,
    prepared: PreparedEnvironments | None = None,
    checkpoint: EnvironmentCheckpoint | None = None,
) -> AsyncIterator[TaskEnvironment]:
    """Open a pod for a phase of a task, by default the agent's; it is destroyed on exit.

    `egress` applies to tasks with a public network; none by default. A separate verifier passes its own `machine` and
    `context`. `plan` reuses an earlier plan of the same environment, `prepared` its snapshot or its
    warm pods. With a `checkpoint` the pod is restored from its snapshot; EnvironmentCheckpointLost is raised if that no
    longer exists.
    """
    settings = host_settings or HostSettings()
    settings = settings if egress is None else replace(settings, egress=egress)
    machine = machine or task.machine
    _check_features(task, machine)
    started = time.monotonic()
    plan = plan or await _plan(fleet, context or task.directory / "environment", machine, settings)
    planned = time.monotonic()
    options = _pod_options(fleet, task, machine, phase or task.agent, plan, settings)
    if prepared is not None and phase is None:
        options["prepare"] = prepared.prepare_pod
    pod, baseline = await _create_pod(fleet, plan, carried_paths(task), options, prepared, checkpoint)
    created = time.monotonic()
    try:
        touched = checkpoint.touched if checkpoint else frozenset[str]()
        if baseline is None:
            baseline = await _populate(pod, plan, carried_paths(task))
            touched = frozenset(path for path, file in baseline.items() if file)
        if checkpoint is None:
            await wait_until_healthy(pod, machine.healthcheck, plan.workspace, None)
        seconds = {"plan": planned - started, "pod": created - planned, "fill": time.monotonic() - created}
        yield TaskEnvironment(fleet, task, plan, pod, baseline, settings, prepared, touched, seconds=seconds)
    finally:
        await pod.close()


def _pod_options(
    fleet: Fleet, task: Task, machine: MachineSpec, phase: TaskPhase, plan: ImagePlan, settings: HostSettings
) -> dict[str, Any]:
    """Return the limits, storage, network and variables of a pod.

    A task names the resources that it needs. What an ordinary user cannot limit stays without a limit.
    """
    limits, storage = pod_limits(machine)
    possible = fleet.possible_limits()
    limits = replace(limits, **{name: None for name in limits.specified() if name not in possible})
    options: dict[str, Any] = {"limits": limits, "storage": storage}
    options["egress"] = _egress(phase.network or machine.network, settings, task)
    return options


async def _create_pod(
    fleet: Fleet,
    plan: ImagePlan,
    carry: tuple[str, ...],
    options: Mapping[str, Any],
    prepared: PreparedEnvironments | None,
    checkpoint: EnvironmentCheckpoint | None,
) -> tuple[Pod, Baseline | None]:
    """Create the pod of an environment from a checkpoint, a prepared snapshot, or its image, then without its files."""
    if checkpoint is not None:
        try:
            options = {**options, "env": None, "prepare": None}
            return await fleet.create(checkpoint.snapshot, **options), checkpoint.baseline
        except (PodError, InputError) as error:
            raise EnvironmentCheckpointLost(f"snapshot {checkpoint.snapshot.id} cannot be restored: {error}") from error
    try:
        if prepared is not None and (found := await prepared.create_pod(plan, carry, options)) is not None:
            return found
        return await fleet.create(plan.image, **options), None
    except PodError as error:
        raise EnvironmentUnavailable(str(error)) from error


async def _plan(fleet: Fleet, context: Path, machine: MachineSpec, host_settings: HostSettings) -> ImagePlan:
    """Call `plan_image`, one call at a time for equal Dockerfiles, which thousands of tasks may share."""
    try:
        key = (context / "Dockerfile").read_text(encoding="utf-8", errors="replace")
    except OSError:  # plan_image reports a missing Dockerfile
        key = ""
    locks = _plan_locks.setdefault(fleet, weakref.WeakValueDictionary())
    async with locks.setdefault(key, asyncio.Lock()):
        return await plan_image(fleet, context, machine, host_settings)


def _check_features(task: Task, machine: MachineSpec) -> None:
    """Raise InputError for features that pods lack, instead of letting the task fail without a visible reason."""
    table = task.config.get("environment", {})
    where = f"{task.directory}/task.toml: environment"
    if table.get("gpus") or table.get("tpu"):
        raise InputError(f"{where}: requests GPUs or TPUs; pods have none")
    for key, what in (("mcp_servers", "MCP"), ("skills_dir", "skills")):
        if table.get(key):
            raise InputError(f"{where}.{key}: the harness does not support {what}; the task cannot run here")
    for step in task.steps:
        if step.agent.network not in (None, task.agent.network or machine.network):
            raise InputError(
                f"{task.directory}/task.toml: steps.{step.name}.agent: the network of a pod cannot change between steps"
            )


def _egress(network: NetworkAccess, host_settings: HostSettings, task: Task) -> Egress:
    """Return what a phase may connect to. A task's own list names public hosts; the caller alone grants others."""
    if network.mode == "no-network":
        return Egress()
    if network.mode == "public":
        return host_settings.egress
    if not network.hosts:
        raise InputError(f"{task.directory}/task.toml: network_mode is allowlist, but allowed_hosts is empty")
    granted = EgressPolicy.from_egress(host_settings.egress)
    rules = [parse_rule(text) for text in network.hosts]
    refused = [rule for rule in rules if rule.wildcard or not granted.decide(rule.host, rule.port).allowed]
    for rule in refused:
        if rule.literal and (reason := forbidden_address(rule.host)):
            raise InputError(
                f"{task.directory}/task.toml: allowed_hosts has {rule}, {reason}; allow it with --allow {rule}"
            )
    # names may resolve to a private network only where the caller allows that, and all of them
    return Egress.to(*network.hosts, transparent=True, private=host_settings.egress.private and not refused)


async def _populate(pod: Pod, plan: ImagePlan, carry: tuple[str, ...]) -> Baseline:
    """Create directories and copy the plan's files; return the initial files."""
    for path in (*plan.directories, plan.workspace, *LOG_DIRECTORIES):
        await pod.make_directory(path, 0o777 if path in LOG_DIRECTORIES else 0o755)
    of_image = await _files_of_image(pod, plan, carry)
    return {**of_image, **await copy_files(pod, plan.files, plan.workspace, carry)}


async def _files_of_image(pod: Pod, plan: ImagePlan, carry: tuple[str, ...]) -> Baseline:
    """Return the files of the workspace and of carried paths in the image itself; listed once per image."""
    key = (plan.image.id, plan.workspace, carry)
    if key in _image_files:
        return _image_files[key]
    found: dict[str, None] = {}
    pending = [plan.workspace, *(path for path in carry if path.startswith("/"))]
    while pending:
        directory = pending.pop()
        try:
            listed = await pod.list(directory)
        except PodFileError as error:
            if error.errno == errno.EFBIG:
                raise InputError(f"{directory}: {error}; choose a smaller WORKDIR") from error
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                raise
            found |= {directory: None} if error.errno == errno.ENOTDIR else {}  # a carried file
            continue
        for info in listed:
            path = f"{directory}/{info.name}".removeprefix(f"{plan.workspace}/")
            if info.kind != "directory":
                found[path] = None
            elif is_tracked(path, carry):
                pending.append(f"{directory}/{info.name}")
        if len(found) > MAX_IMAGE_FILES:
            raise InputError(f"{plan.workspace} has over {MAX_IMAGE_FILES:,} files; choose a smaller WORKDIR")
    while len(_image_files) >= _MAX_IMAGES:
        del _image_files[next(iter(_image_files))]
    _image_files[key] = found
    return found


def is_tracked(path: str, carry: Sequence[str]) -> bool:
    """Return whether changes to a file are reported: not to caches, which could hide a cheat, and git's own files."""
    if path.startswith("/") and not any(path == top or path.startswith(f"{top}/") for top in carry):
        return False
    names = path.split("/")
    skipped = CACHE_DIRECTORIES if GIT in carry else {*CACHE_DIRECTORIES, GIT}
    return not skipped.intersection(names) and not path.endswith((".pyc", ".pyo"))


async def copy_files(
    pod: Pod, files: Sequence[FileToCopy], workspace: str, carry: Sequence[str] = ()
) -> dict[str, FileToCopy]:
    """Copy files into a pod, links last; return those in the workspace or in carried paths, by path."""
    found: dict[str, FileToCopy] = {}

    async def copy(file: FileToCopy) -> None:
        target = file.target
        if file.source.is_symlink():
            await pod.symlink(os.readlink(file.source), target)
        else:
            data = file.source.read_bytes()
            try:
                await pod.write(target, data, mode=file.mode)
            except PodFileError as error:
                if error.errno != errno.EISDIR:  # COPY into a directory that the image has
                    raise
                target = f"{target}/{file.source.name}"
                await pod.write(target, data, mode=file.mode)
        path = target.removeprefix(f"{workspace.rstrip('/')}/")
        if is_tracked(path, carry):
            found[path] = file

    for links in (False, True):
        await run_limited(copy(file) for file in files if file.source.is_symlink() == links)
    return found


def _source_state(file: FileToCopy) -> FileState:
    if file.source.is_symlink():
        return FileState.symlink(os.readlink(file.source))
    return FileState.file(file.source.read_bytes(), bool(file.mode & 0o100))


async def wait_until_healthy(pod: Pod, check: Mapping[str, Any], workspace: str, user: str | None) -> None:
    """Wait until the health check succeeds; raise PodError after `retries` failures outside the start period."""
    if not check:
        return
    command, retries = str(check["command"]), int(check.get("retries", 3))
    grace = time.monotonic() + float(check.get("start_period_sec", 0.0))
    failures = 0
    while True:
        done = await pod.exec(command, cwd=workspace, user=user, timeout=float(check.get("timeout_sec", 30.0)))
        if done.ok:
            return
        starting = time.monotonic() < grace
        failures += not starting
        if failures >= retries:
            raise PodError(f"health check `{command}` failed {retries} times: {(done.stdout + done.stderr)[-500:]}")
        await asyncio.sleep(float(check.get("start_interval_sec" if starting else "interval_sec", 5.0)))
