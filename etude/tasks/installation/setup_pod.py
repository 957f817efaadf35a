"""Pods in which set-up commands run: base images, network to package registries only, a log without secrets."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from etude.errors import InputError
from etude.harness.model_options import ModelOptions
from etude.pods.fleet import Fleet
from etude.pods.images.records import Image
from etude.pods.images.store import Store
from etude.pods.pod import Egress, ExecResult, Pod
from etude.tasks.base_images import HostSettings, python_image, resolve_base_image, writable_image
from etude.tasks.generators.image import EXCLUDED_BINDS
from etude.tasks.installation.package_index import PackageIndex, View
from etude.tasks.installation.registries import debian_hosts, registry_environment
from etude.tasks.installation.result import WORKSPACE, InstallationFailed
from etude.tasks.installation.script import redact
from etude.tasks.installation.snapshot import RepositorySnapshot
from etude.tasks.installation.workspace import with_files

STEP_TIMEOUT_S = 900.0
KEPT_OUTPUT = 4000  # characters of a command's output in the log


@dataclass(frozen=True)
class InstallOptions:
    """How a repository is installed."""

    as_of: str = "commit"  # "commit", "none" or a date
    index_url: str = ""
    proxy: str = ""
    certificates: Path | None = None
    secrets: Mapping[str, str] = field(default_factory=dict)  # name in the pod -> value, during set-up only
    project: str = ""
    images: Mapping[str, str] = field(default_factory=dict)  # base name -> image of the store
    allow: tuple[str, ...] = ()  # further hosts that set-up may connect to
    system_packages: bool = True  # install the Debian packages that CI names, where the image can be made writable
    submodules: bool = False  # install although submodules are missing
    reruns: int = 3  # runs of the tests in the verification
    min_passing: float = 0.8  # share of the tests that ran and must pass
    timeout_s: float = 1800.0
    test_timeout_s: float = 600.0
    cache: Path | None = None  # of package files
    model: ModelOptions | None = None  # of stages 1 and 2, which follow if stage 0 fails
    skip_detectors: bool = False  # start with stage 1


@dataclass
class InstallLog:
    """The commands of an installation with their results, and what was received from the network."""

    secrets: Mapping[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    egress_bytes: int = 0

    def note(self, text: str) -> None:
        self.lines.append(redact(text, self.secrets))

    def command(self, command: str, done: ExecResult) -> None:
        """Record a command that was run."""
        end = "timed out" if done.timed_out else f"exit code {done.exit_code}"
        output = (done.stdout + done.stderr).strip()[-KEPT_OUTPUT:]
        self.note(f"$ {command}\n{output}\n[{end}, {done.usage.wall_s:.1f} s]")

    def count(self, pod: Pod) -> None:
        """Add what a pod sent and received."""
        facts = [event.facts for event in pod.events() if event.kind == "egress"]
        self.egress_bytes += sum(int(each.get("up", 0)) + int(each.get("down", 0)) for each in facts)

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


def available_pythons(python: str, images: Mapping[str, str]) -> list[str]:
    """Return the versions of Python that pods can have: of their host, and of mapped images, newest first."""
    mapped = [name.partition(":")[2] for name in images if name.startswith("python:")]
    return list(dict.fromkeys([version for version in (python, *sorted(mapped, reverse=True)) if version]))


async def base_image(fleet: Fleet, base: str, images: Mapping[str, str]) -> Image:
    """Return the image that a set-up script starts from: without test tools, and without the host's /opt."""
    if base in images or base not in ("host", f"python:{fleet.system.python}"):
        return await resolve_base_image(fleet, base, HostSettings(images=images), "install")
    image = await (fleet.resolve("host") if base == "host" else python_image(fleet, ("pip",)))
    return image.with_(binds=tuple(path for path in image.binds if path not in EXCLUDED_BINDS))


async def with_system_packages(fleet: Fleet, base: Image, log: InstallLog) -> Image:
    """Return the base image with writable system directories; the image itself where that is impossible."""
    try:
        return await writable_image(fleet, base)
    except InputError as error:
        log.note(f"Debian packages cannot be installed: {error}")
        return base


@dataclass
class SetupPod:
    """A pod with network to registries; every command of it is logged."""

    pod: Pod
    env: Mapping[str, str]
    directory: str
    log: InstallLog
    deadline: float

    async def run(self, command: str, timeout: float = STEP_TIMEOUT_S) -> ExecResult:
        """Run a command of the set-up in bash."""
        left = max(1.0, min(timeout, self.deadline - time.monotonic()))
        words = ["bash", "-c", f"set -o pipefail\n{command}"]
        done = await self.pod.exec(words, cwd=self.directory, env=self.env, timeout=left)
        self.log.command(command, done)
        return done


@dataclass(frozen=True)
class InstallContext:
    """What all parts of one installation share."""

    fleet: Fleet
    snapshot: RepositorySnapshot
    base: Image  # without the repository's files
    index: PackageIndex
    view: View
    options: InstallOptions
    log: InstallLog
    deadline: float  # of the set-up, on the monotonic clock
    registries: tuple[str, ...] = ()  # that set-up pods reach besides the index

    @property
    def label(self) -> str:
        return self.snapshot.label

    @property
    def store(self) -> Store:
        return self.fleet.store

    @cached_property
    def start(self) -> Image:
        """The base image with the repository's files in the workspace."""
        return with_files(self.store, self.base, self.snapshot.files)

    @property
    def egress(self) -> Egress:
        return Egress.to(self.index.rule, *self.registries, *debian_hosts(), *self.options.allow, private=True)

    def failed(self, reason: str, why: str) -> InstallationFailed:
        """Return the error of this installation for a reason by code."""
        return InstallationFailed(reason, f"{self.label}: {redact(why, self.options.secrets)}", self.log.text)


@asynccontextmanager
async def open_setup_pod(
    context: InstallContext, directory: str = WORKSPACE, env: Mapping[str, str] | None = None
) -> AsyncIterator[SetupPod]:
    """Open a pod for set-up commands: it reaches the index, the registries of its ecosystem and allowed hosts."""
    pod = await context.fleet.create(context.start, egress=context.egress, storage="disk")
    registries = {**registry_environment(), **context.index.environment(context.view)}
    variables = {**registries, **context.options.secrets, **(env or {})}
    try:
        yield SetupPod(pod, variables, directory, context.log, context.deadline)
    finally:
        context.log.count(pod)
        await pod.close()
