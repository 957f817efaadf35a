"""Install a repository: detectors first (stage 0), sessions of a model if they fail (stages 1 and 2).

    async with open_fleet() as fleet:
        installation = await install(fleet, checkout("humanize", "4.9.0"), InstallOptions())

The result is an image in the pod store, the script that replays it, and the statuses of the tests, established by
`verification.py` in fresh pods without a network.
"""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from etude.errors import InputError
from etude.harness.open_client import open_model_client
from etude.pods.fleet import Fleet
from etude.pods.pod import PodError
from etude.system.progress import ProgressCallback
from etude.tasks.installation.agents import AgentStages, install_by_sessions
from etude.tasks.installation.dependencies import dependency_digest
from etude.tasks.installation.detect import propose
from etude.tasks.installation.package_index import (
    VIEWS,
    IndexSettings,
    PackageIndex,
    View,
    default_index_cache,
    open_package_index,
    parse_time,
)
from etude.tasks.installation.proposal import ECOSYSTEMS, Proposal
from etude.tasks.installation.registries import index_url, npm_registry_url, registry_hosts
from etude.tasks.installation.result import Installation, InstallationFailed
from etude.tasks.installation.setup_pod import (
    InstallContext,
    InstallLog,
    InstallOptions,
    available_pythons,
    base_image,
    with_system_packages,
)
from etude.tasks.installation.snapshot import RepositorySnapshot
from etude.tasks.installation.stage0 import explore
from etude.tasks.installation.test_run import TestCommand
from etude.tasks.installation.verification import Replay, Verification, replay_script, verify_tests
from etude.tasks.session_agent import OpenModel

__all__ = ["InstallOptions", "InstallationFailed", "install"]

LAST = {"no-toolchain", "secret"}  # reasons that other versions of packages do not change


def ignore_progress(done: int, total: int, note: str = "") -> None:
    """Show nothing."""


@dataclass(frozen=True)
class _Installed:
    """What a stage achieved."""

    script: str
    base: str
    command: TestCommand
    replay: Replay
    verification: Verification
    view: View
    facts: Mapping[str, object] = field(default_factory=dict)


async def install(
    fleet: Fleet,
    repository: RepositorySnapshot,
    options: InstallOptions,
    progress: ProgressCallback = ignore_progress,
    log: InstallLog | None = None,
    open_model: OpenModel | None = None,
) -> Installation:
    """Return the installation of a revision; raise InstallationFailed with a reason by code.

    `open_model` opens the model of stages 1 and 2; default: the one that the options name.
    """
    log = log or InstallLog()
    log.secrets = options.secrets
    if repository.submodules and not options.submodules:
        raise InputError(
            f"{repository.label}: {repository.submodules[0]} is a submodule, whose files are in another repository; "
            "--without-submodules installs without them"
        )
    if options.model is not None and open_model is None:
        open_model = partial(open_model_client, options.model)
    started = time.monotonic()
    try:
        settings = replace(index_settings(repository, options), address=fleet.own_address())
        with open_package_index(settings) as index:
            made = await _run_stages(fleet, repository, index, options, log, progress, open_model)
            undated = sorted(index.undated)
    except PodError as error:
        raise InstallationFailed("pod", f"{repository.label}: {error}", log.text) from error
    facts = {
        "seconds": round(time.monotonic() - started, 1),
        "egress_bytes": log.egress_bytes,
        "as_of": index.as_of.isoformat() if index.as_of is not None and made.view != "all" else "",
        "packages": made.view,
        "undated": undated,
        "flaky": list(made.verification.flaky),
        "test_seconds": list(made.verification.seconds),
        "restored": list(made.replay.restored),
    }
    return Installation(
        repository=repository.name,
        commit=repository.commit,
        script=made.script,
        base=made.base,
        image=made.replay.image.name,
        env=dict(made.command.env),
        test_command=made.command.command,
        framework=made.command.framework,
        tests=made.verification.tests,
        dependency_digest=dependency_digest(repository, options.project),
        project=options.project,
        facts={**facts, **made.facts},
    )


def index_settings(repository: RepositorySnapshot, options: InstallOptions) -> IndexSettings:
    """Return where the packages of an installation come from."""
    as_of = {"commit": repository.date, "none": ""}.get(options.as_of, options.as_of)
    if as_of:
        parse_time(as_of)
    return IndexSettings(
        url=options.index_url or index_url(),
        as_of=as_of,
        proxy=options.proxy,
        certificates=options.certificates,
        cache=options.cache or default_index_cache(),
        npm=npm_registry_url(),
    )


async def _run_stages(
    fleet: Fleet,
    repository: RepositorySnapshot,
    index: PackageIndex,
    options: InstallOptions,
    log: InstallLog,
    progress: ProgressCallback,
    open_model: OpenModel | None,
) -> _Installed:
    """Run stage 0, and stages 1 and 2 if it fails and there is a model."""
    failure: InstallationFailed | None = None
    if not options.skip_detectors:
        try:
            return await _install_by_detectors(fleet, repository, index, options, log, progress)
        except InstallationFailed as error:
            if open_model is None or error.reason in ("several-projects", "secret"):
                raise
            failure = error
    assert open_model is not None
    base = f"python:{fleet.system.python}" if fleet.system.python else "host"
    context = InstallContext(
        fleet,
        repository,
        await with_system_packages(fleet, await base_image(fleet, base, options.images), log),
        index,
        "tools" if index.as_of is not None else "all",
        options,
        log,
        time.monotonic() + options.timeout_s,
        tuple(host for ecosystem in ECOSYSTEMS for host in registry_hosts(ecosystem)),
    )
    stages = AgentStages()
    found = await install_by_sessions(context, open_model, stages, progress)
    facts: dict[str, object] = {"stage": 2, "attempt": found.attempt, "failures": stages.failures}
    facts |= {"proposals": stages.proposals, "targets": [each.to_json() for each in stages.targets]}
    facts |= {"stage_0": str(failure) if failure else "", "sampled_tokens": stages.sampled_tokens}
    return _Installed(found.script, base, found.command, found.replay, found.verification, context.view, facts)


async def _install_by_detectors(
    fleet: Fleet,
    repository: RepositorySnapshot,
    index: PackageIndex,
    options: InstallOptions,
    log: InstallLog,
    progress: ProgressCallback,
) -> _Installed:
    """Try the proposal with packages of the date, then with newer tools, then with all; verify the first that works."""
    pythons = available_pythons(fleet.system.python, options.images)
    proposal = propose(repository, pythons, options.project)
    if not proposal.base:
        raise InstallationFailed(
            "python-version",
            f"{repository.label}: it accepts no Python of this host ({', '.join(pythons)}); "
            "make an image with one that it accepts and pass --map python:VERSION=IMAGE",
        )
    views: Sequence[View] = VIEWS if proposal.ecosystem == "python" else ("dated",)
    chosen = await base_image(fleet, proposal.base, options.images)
    if proposal.apt and options.system_packages:
        chosen = await with_system_packages(fleet, chosen, log)
    newest: InstallationFailed | None = None  # of the newest packages that were tried: the older ones are out of date
    context = InstallContext(
        fleet,
        repository,
        chosen,
        index,
        "all",
        options,
        log,
        time.monotonic() + options.timeout_s,
        registry_hosts(proposal.ecosystem),
    )
    for view in views if index.as_of is not None else ("all",):
        log.note(f"== stage 0, packages: {view}")
        try:
            return await _install_view(replace(context, view=view), proposal, progress)
        except InstallationFailed as error:
            log.note(f"failed: {error}")
            newest = error
            if time.monotonic() > context.deadline or error.reason in LAST:
                break
    assert newest is not None
    raise InstallationFailed(newest.reason, re.sub(r" \[[\w-]+\]$", "", str(newest)), log.text)


async def _install_view(context: InstallContext, proposal: Proposal, progress: ProgressCallback) -> _Installed:
    """Explore, replay and verify with the packages of one view of the index."""
    explored = await explore(context, proposal, progress)
    progress(len(proposal.steps) + 1, len(proposal.steps) + 3, "replaying the script in a fresh pod")
    replay = await replay_script(context, explored.script)
    progress(len(proposal.steps) + 2, len(proposal.steps) + 3, "testing without a network")
    verification = await verify_tests(context, replay.image, explored.command)
    facts: dict[str, object] = {"stage": 0, "sources": list(proposal.sources)}
    return _Installed(explored.script, proposal.base, explored.command, replay, verification, context.view, facts)
