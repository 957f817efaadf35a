"""A pod that is ready for the agent of a task: the environment made, its files in place, the workspace written down.

    async with open_ground(fleet, task) as ground:
        await ground.pod.exec("...", cwd=ground.workspace)
        changes = await ground.changes()          # everything that is not as the task left it

Where the environment needs no building this is one new pod and a few files: about as long as making the pod.
"""

import asyncio
import errno
import os
import time
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from etude.errors import EtudeError, InputError
from etude.pods.fleet import Fleet
from etude.pods.guest.guest_pod import AgentPod
from etude.pods.images.records import Image
from etude.pods.pod import Egress, Pod, PodError, PodFileError, Snapshot
from etude.tasks.base_images import Provision
from etude.tasks.image import Plan, Put, limits_of, plan_environment
from etude.tasks.task import Machine, Network, Phase, Task, TaskStep
from etude.tasks.verifier_result import FileChange
from etude.tasks.workspace import (
    MAX_FILE,
    MAX_FILES,
    Entry,
    Manifest,
    changed_paths,
    changes_between,
    counts,
    entry_of,
    link_entry,
    make_link,
    scan,
    together,
)

ARTIFACTS = "/logs/artifacts"  # always collected
LOGS = ("/logs/agent", "/logs/verifier", ARTIFACTS)
FINAL = "/logs/agent/final.txt"  # a session's final message, for tasks that ask for an answer and carry this file
_scans: dict[tuple[str, str, tuple[str, ...]], dict[str, Entry]] = {}  # what an image has in a workspace
_MOST_SCANS = 64
# Who plans what a fleet is planning already waits: the first of many equal tasks builds for all of them.
_planning: weakref.WeakKeyDictionary[Fleet, dict[str, asyncio.Lock]] = weakref.WeakKeyDictionary()


class OriginGone(EtudeError):
    """A ground cannot be opened where it was left: the snapshot of its pod is not there any more."""


@dataclass(frozen=True)
class Origin:
    """A ground that was left: a snapshot of its pod, and the workspace as the task had it."""

    snapshot: Snapshot
    before: Manifest


@dataclass
class Ground:
    """Where a session happens. `before` is the workspace as the task left it."""

    fleet: Fleet
    task: Task
    plan: Plan
    pod: Pod
    before: Manifest
    provision: Provision
    left_out: tuple[str, ...] = ()  # files of the last look that were not taken along
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def workspace(self) -> str:
        return self.plan.workspace

    @property
    def carry(self) -> tuple[str, ...]:
        return carried(self.task)

    async def changes(self) -> tuple[FileChange, ...]:
        """What the session did to the workspace (and to what the task carries), with both sides' contents."""
        after = await scan(self.pod, self.workspace, self.carry, self.before)
        self.left_out = tuple(after.left_out)
        changed = [path for path in changed_paths(self.before, after) if path in self.before]
        return changes_between(self.before, after, await self.originals(changed))

    async def leave_message(self, text: str) -> None:
        """Put a session's final message where the verifier of a question finds it; before the changes are taken."""
        await self.pod.write(FINAL, text)

    async def originals(self, paths: Sequence[str]) -> dict[str, bytes]:
        """The contents that files had at the beginning: from the task's own, else from a pod that nobody touched."""
        found: dict[str, bytes] = {}
        missing = []
        for path in paths:
            source = self.before[path].source
            if source is None:
                missing.append(path)
            elif self.before[path].kind == "symlink":
                found[path] = os.fsencode(os.readlink(source))
            else:
                found[path] = source.read_bytes()
        if missing:
            async with open_ground(self.fleet, self.task, provision=self.provision) as clean:
                for path in missing:
                    place = path if path.startswith("/") else f"{self.workspace}/{path}"
                    if self.before[path].kind == "symlink":
                        found[path] = os.fsencode((await clean.pod.stat(place)).target)
                    else:
                        found[path] = await clean.pod.read(place)
        return found

    async def begin_step(self, step: TaskStep) -> None:
        """Bring what a step adds: the files of its workdir/, then its setup.sh, then its health check."""
        directory = self.task.directory / "steps" / step.name / "workdir"
        entries: dict[str, Entry] = {}
        if directory.is_dir():
            puts = [
                Put(path, f"{self.workspace}/{path.relative_to(directory).as_posix()}", path.lstat().st_mode & 0o7777)
                for path in sorted(directory.rglob("*"))
                if not path.is_dir() or path.is_symlink()
            ]
            entries = await fill(self.pod, puts, self.workspace, self.carry)
        self.before = {**self.before, **entries}
        user = step.agent.user or self.task.agent.user
        if "setup.sh" in entries:
            done = await self.pod.exec(["bash", "setup.sh"], cwd=self.workspace, user=user, env=self.plan.env)
            if not done.ok:
                raise PodError(f"{directory}/setup.sh: ended with exit code {done.exit_code}: {done.stderr[-500:]}")
            await self.pod.remove(f"{self.workspace}/setup.sh")
            self.before = {path: entry for path, entry in self.before.items() if path != "setup.sh"}
        tables = {str(table.get("name")): table for table in self.task.config.get("steps", [])}
        await check_health(self.pod, tables[step.name].get("healthcheck") or {}, self.workspace, user)


def carried(task: Task) -> tuple[str, ...]:
    """Paths outside the workspace (or `.git` in it) whose changes are brought along: `carry`, and what is collected."""
    found = task.metadata.get("carry", ())
    if not isinstance(found, list | tuple) or not all(isinstance(path, str) and path for path in found):
        raise InputError(f"{task.directory}/task.toml: metadata.carry is {found!r}; expected a list of paths")
    if any(".." in path.split("/") or path.strip("/") == "" for path in found):
        raise InputError(f"{task.directory}/task.toml: metadata.carry is {found!r}; expected paths without .., not /")
    collected = [str(entry["source"]) for entry in task.artifacts if str(entry["source"]).startswith("/")]
    return tuple(dict.fromkeys(path.rstrip("/") for path in (*found, ARTIFACTS, *collected)))


@asynccontextmanager
async def open_ground(
    fleet: Fleet,
    task: Task,
    *,
    egress: Egress | None = None,
    provision: Provision | None = None,
    phase: Phase | None = None,
    machine: Machine | None = None,
    context: Path | None = None,
    plan: Plan | None = None,
    origin: Origin | None = None,
) -> AsyncIterator[Ground]:
    """A pod for a task's agent (or another phase of it), closed at the end with everything in it.

    `egress` is what a task with a public network may reach; none by default. A separate verifier gives its own
    `machine` and `context`. `plan` is how the same environment was made before. With an `origin` the pod is as it was
    left there, and OriginGone is raised when it cannot be.
    """
    given = provision or Provision()
    given = given if egress is None else replace(given, egress=egress)
    machine = machine or task.machine
    _check_features(task, machine)
    started = time.monotonic()
    plan = plan or await _plan(fleet, context or task.directory / "environment", machine, given)
    planned = time.monotonic()
    network = (phase or task.agent).network or machine.network
    limits, storage = limits_of(machine)
    options: dict[str, Any] = {"limits": limits, "storage": storage, "egress": _egress(network, given, task)}
    if origin is None:
        pod = await fleet.create(plan.image, **options)
    else:
        pod = await _reopened(fleet, origin, options)
    try:
        made = time.monotonic()
        if isinstance(pod, AgentPod) and not isinstance(plan.image, Image):
            pod.environment.update(plan.env)
        if origin is not None:
            before = origin.before
        else:
            before = await _furnish(pod, plan, carried(task))
            await check_health(pod, machine.healthcheck, plan.workspace, None)
        filled = time.monotonic()
        seconds = {"plan": planned - started, "pod": made - planned, "fill": filled - made}
        yield Ground(fleet, task, plan, pod, before, given, seconds=seconds)
    finally:
        await pod.close()


async def _plan(fleet: Fleet, context: Path, machine: Machine, provision: Provision) -> Plan:
    """`plan_environment`, one at a time for the same Dockerfile: thousands of tasks may have the same."""
    try:
        key = (context / "Dockerfile").read_text(encoding="utf-8", errors="replace")
    except OSError:  # it is said there what is missing
        key = ""
    locks = _planning.setdefault(fleet, {})
    lock = locks.setdefault(key, asyncio.Lock())
    try:
        async with lock:
            return await plan_environment(fleet, context, machine, provision)
    finally:
        if not lock.locked():
            locks.pop(key, None)


async def _reopened(fleet: Fleet, origin: Origin, options: Mapping[str, Any]) -> Pod:
    try:
        return await fleet.create(origin.snapshot, **options)
    except (PodError, InputError) as error:
        raise OriginGone(f"snapshot {origin.snapshot.id} cannot be opened again: {error}") from error


def _check_features(task: Task, machine: Machine) -> None:
    """What pods cannot give is said now, not found out by a task that fails for no visible reason."""
    table = task.config.get("environment", {})
    where = f"{task.directory}/task.toml: environment"
    if table.get("gpus") or table.get("tpu"):
        raise InputError(f"{where}: asks for GPUs or TPUs; pods have none")
    if table.get("mcp_servers"):
        raise InputError(f"{where}.mcp_servers: the harness has no MCP; such tasks do not run here")
    for step in task.steps:
        if step.agent.network not in (None, task.agent.network or machine.network):
            raise InputError(f"{task.directory}/task.toml: steps.{step.name}.agent: a pod's network stays as it is")


def _egress(network: Network, provision: Provision, task: Task) -> Egress:
    if network.mode == "no-network":
        return Egress()
    if network.mode == "allowlist":
        if not network.hosts:
            raise InputError(f"{task.directory}/task.toml: network_mode is allowlist, but allowed_hosts names none")
        return Egress.to(*network.hosts, transparent=True)
    return provision.egress


async def _furnish(pod: Pod, plan: Plan, carry: tuple[str, ...]) -> dict[str, Entry]:
    """Put the files in place; the manifest of the workspace after that."""
    for path in (*plan.directories, plan.workspace, *LOGS):
        await pod.make_directory(path, 0o777 if path in LOGS else 0o755)
    before = await _of_image(pod, plan, carry)
    return {**before, **await fill(pod, plan.puts, plan.workspace, carry)}


async def _of_image(pod: Pod, plan: Plan, carry: tuple[str, ...]) -> dict[str, Entry]:
    """What the image itself has there; looked at once for each image."""
    key = (plan.image.id, plan.workspace, carry) if isinstance(plan.image, Image) else None
    if key is None or key not in _scans:
        seen = await scan(pod, plan.workspace, carry)
        if unseen := [path for path in seen.left_out if path.endswith("/")]:
            message = (
                f"{plan.workspace} has over {MAX_FILES:,} files, or is too deep ({unseen[0]}); choose a smaller WORKDIR"
            )
            raise InputError(message)
        entries = seen.entries
        if key is None:
            return entries
        while len(_scans) >= _MOST_SCANS:
            del _scans[next(iter(_scans))]
        _scans[key] = entries
    return _scans[key]


async def fill(pod: Pod, puts: Sequence[Put], workspace: str, carry: Sequence[str] = ()) -> dict[str, Entry]:
    """Write files into a pod; the entries of those that are the workspace's, or carried."""
    found: dict[str, Entry] = {}

    async def put(each: Put) -> None:
        target = each.target
        if each.source.is_symlink():
            await make_link(pod, target, os.readlink(each.source))
            entry = replace(link_entry(os.readlink(each.source)), source=each.source)
        else:
            data = each.source.read_bytes()
            try:
                await pod.write(target, data, mode=each.mode)
            except PodFileError as error:
                if error.errno != errno.EISDIR:  # COPY into a directory that the image has
                    raise
                target = f"{target}/{each.source.name}"
                await pod.write(target, data, mode=each.mode)
            entry = entry_of(data, each.mode, each.source)
        path = target.removeprefix(f"{workspace.rstrip('/')}/")
        if counts(path, carry) and each.source.lstat().st_size <= MAX_FILE:
            found[path] = entry

    await together(put(each) for each in puts if not each.source.is_symlink())
    await together(put(each) for each in puts if each.source.is_symlink())
    return found


async def check_health(pod: Pod, check: Mapping[str, Any], workspace: str, user: str | None) -> None:
    """Wait until the environment says it is ready; after `retries` failures in a row it is not."""
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
