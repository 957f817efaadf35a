"""Install a repository: detectors first (stage 0), sessions of a model if they fail (stages 1 and 2).

    async with open_fleet() as fleet:
        installation = await install(fleet, checkout("humanize", "4.9.0"), InstallOptions())

The result is an image in the pod store, the script that replays it, and the statuses of the tests, established by
`verification.py` in fresh pods without a network.
"""

import re
import time
from collections.abc import Sequence

from etude.errors import InputError
from etude.pods.fleet import Fleet
from etude.pods.pod import PodError
from etude.system.progress import ProgressCallback
from etude.tasks.installation.dependencies import dependency_digest
from etude.tasks.installation.detect import propose
from etude.tasks.installation.package_index import (
    PYPI,
    VIEWS,
    IndexSettings,
    PackageIndex,
    View,
    default_index_cache,
    open_package_index,
    parse_time,
)
from etude.tasks.installation.proposal import Proposal
from etude.tasks.installation.result import Installation, InstallationFailed
from etude.tasks.installation.setup_pod import InstallLog, InstallOptions, available_pythons, base_image
from etude.tasks.installation.snapshot import RepositorySnapshot
from etude.tasks.installation.stage0 import Trial0, explore
from etude.tasks.installation.verification import Replay, Verification, replay_script, verify_tests
from etude.tasks.installation.workspace import local_store, with_files

__all__ = ["InstallOptions", "InstallationFailed", "install"]


def ignore_progress(done: int, total: int, note: str = "") -> None:
    """Default of `progress`: shows nothing."""


async def install(
    fleet: Fleet,
    repository: RepositorySnapshot,
    options: InstallOptions,
    progress: ProgressCallback = ignore_progress,
    log: InstallLog | None = None,
) -> Installation:
    """Return the installation of a revision; raise InstallationFailed with a reason by code."""
    log = log or InstallLog()
    log.secrets = options.secrets
    if repository.submodules and not options.submodules:
        raise InputError(
            f"{repository.label}: {repository.submodules[0]} is a submodule, whose files are in another repository; "
            "--without-submodules installs without them"
        )
    started = time.monotonic()
    proposal = propose(repository, available_pythons(options.images), options.project)
    if proposal.ecosystem == "python" and not proposal.base:
        raise InstallationFailed(
            "python-version",
            f"{repository.label}: it needs another Python than {', '.join(available_pythons(options.images)) or 'none'}; "
            "make an image with one and pass --map python:VERSION=IMAGE",
        )
    try:
        with open_package_index(index_settings(repository, options)) as index:
            deadline = time.monotonic() + options.timeout_s
            found = await _install_stage0(fleet, repository, proposal, index, options, log, deadline, progress)
            undated = sorted(index.undated)
    except PodError as error:
        raise InstallationFailed("pod", f"{repository.label}: {error}", log.text) from error
    trial, replay, verification = found
    facts: dict[str, object] = {
        "stage": 0,
        "seconds": round(time.monotonic() - started, 1),
        "egress_bytes": log.egress_bytes,
        "as_of": index.as_of.isoformat() if index.as_of is not None and trial.view != "all" else "",
        "packages": trial.view,
        "undated": undated,
        "flaky": list(verification.flaky),
        "test_seconds": list(verification.seconds),
        "restored": list(replay.restored),
        "sources": list(proposal.sources),
    }
    return Installation(
        repository=repository.name,
        commit=repository.commit,
        script=trial.script,
        base=proposal.base,
        image=replay.image.name,
        env=dict(trial.command.env),
        test_command=trial.command.command,
        framework=trial.command.framework,
        tests=verification.tests,
        dependency_digest=dependency_digest(repository, proposal.project),
        project=proposal.project,
        facts=facts,
    )


def index_settings(repository: RepositorySnapshot, options: InstallOptions) -> IndexSettings:
    """Return where the packages of an installation come from."""
    as_of = {"commit": repository.date, "none": ""}.get(options.as_of, options.as_of)
    if as_of:
        parse_time(as_of)
    return IndexSettings(
        url=options.index_url or PYPI,
        as_of=as_of,
        proxy=options.proxy,
        certificates=options.certificates,
        cache=options.cache or default_index_cache(),
    )


async def _install_stage0(
    fleet: Fleet,
    repository: RepositorySnapshot,
    proposal: Proposal,
    index: PackageIndex,
    options: InstallOptions,
    log: InstallLog,
    deadline: float,
    progress: ProgressCallback,
) -> tuple[Trial0, Replay, Verification]:
    """Try the proposal with packages of the date, then with newer tools, then with all; verify the first that works."""
    views: Sequence[View] = VIEWS if index.as_of is not None and proposal.ecosystem == "python" else ("all",)
    views = ("dated",) if index.as_of is not None and proposal.ecosystem == "node" else views
    base = await base_image(fleet, proposal.base, options.images)
    store = local_store(fleet)
    image = with_files(store, base, repository.files)
    first: InstallationFailed | None = None
    for view in views:
        log.note(f"== packages: {view}")
        try:
            trial = await explore(fleet, image, repository, proposal, index, view, options, log, deadline, progress)
            progress(len(proposal.steps) + 1, len(proposal.steps) + 3, "replaying the script in a fresh pod")
            replay = await replay_script(
                fleet, base, repository, trial.script, store, proposal.ecosystem, index, view, options, log, deadline
            )
            progress(len(proposal.steps) + 2, len(proposal.steps) + 3, "testing without a network")
            verification = await verify_tests(fleet, replay.image, trial.command, repository.label, options, log)
            return trial, replay, verification
        except InstallationFailed as error:
            log.note(f"failed: {error}")
            first = first or error
            if time.monotonic() > deadline or error.reason in ("no-toolchain", "secret"):
                raise
    assert first is not None
    raise InstallationFailed(first.reason, re.sub(r" \[[\w-]+\]$", "", str(first)), log.text)
