"""`etude tasks install`: mounted by etude/tasks/cli.py."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from etude.errors import EtudeError, InputError, Interrupted
from etude.harness.model_options import ModelOptions
from etude.pods.cli.options import PodHosts, pod_settings
from etude.pods.settings import PodSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from etude.tasks.installation.result import Installation
    from etude.tasks.installation.setup_pod import InstallLog, InstallOptions
    from etude.tasks.installation.snapshot import RepositorySnapshot

EPILOG = (
    "Examples:\n\n  etude tasks install humanize@4.9.0\n\n"
    "  etude tasks install my-service --index-url https://packages.example.org/simple/ --secret TOKEN=CI_TOKEN\n\n"
    "  etude tasks install my-service --endpoint http://127.0.0.1:8000/v1 --out installed/my-service"
)
LOG = "log.txt"


def install_command(
    repository: Annotated[
        str,
        typer.Argument(
            metavar="REPO[@REV]", help="A git repository and a revision of it, a directory, or a source archive."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Directory of the result. Default: installed/NAME-COMMIT.", show_default=False)
    ] = None,
    as_of: Annotated[
        str,
        typer.Option(help="Packages that existed at a date: commit (its date), none, or a date such as 2024-05-31."),
    ] = "commit",
    project: Annotated[str, typer.Option(help="Directory of the project in a repository with several.")] = "",
    index_url: Annotated[str, typer.Option(help="Simple index, may have a name and password; default: pip's.")] = "",
    proxy: Annotated[str, typer.Option(help="Proxy through which this machine reaches the index.")] = "",
    certificates: Annotated[
        Path | None, typer.Option(help="Certificates of the index, in PEM form.", show_default=False)
    ] = None,
    secret: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VARIABLE", help="Pass $VARIABLE as NAME to the set-up only; repeatable."),
    ] = None,
    maps: Annotated[
        list[str] | None,
        typer.Option("--map", metavar="BASE=IMAGE", help="Use this image of the store for a base image; repeatable."),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST[:PORT]", help="Allow the set-up to connect to this host, too; repeatable."),
    ] = None,
    without_submodules: Annotated[
        bool, typer.Option("--without-submodules", help="Install although the files of submodules are missing.")
    ] = False,
    reruns: Annotated[int, typer.Option(min=2, help="Runs of the tests in the verification.")] = 3,
    timeout: Annotated[float, typer.Option(min=10, help="Time limit in seconds, without the verification.")] = 1800.0,
    test_timeout: Annotated[float, typer.Option(min=1, help="Time limit of one run of the tests in seconds.")] = 600.0,
    model: Annotated[str, typer.Option(help="A checkpoint, or a model of --endpoint, for stages 1 and 2.")] = "",
    endpoint: Annotated[str, typer.Option(help="An OpenAI-compatible server for stages 1 and 2.")] = "",
    key_env: Annotated[str, typer.Option(help="Environment variable with the endpoint's key.")] = "",
    only_model: Annotated[bool, typer.Option("--skip-stage-0", help="Start with stage 1.")] = False,
    state: Annotated[
        Path | None,
        typer.Option(help="State directory of pods; default: $ETUDE_PODS, else one in the home directory."),
    ] = None,
    pod_hosts: PodHosts = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Install a repository so that its tests run without a network: a set-up script, an image and a result.

    Stage 0 reads the project's files and needs no model. If it fails and a model is given, sessions of the model
    explore the repository (stage 1) and set it up (stage 2)."""
    from etude.tasks.installation.setup_pod import InstallOptions
    from etude.tasks.installation.snapshot import checkout, split_revision

    given = ModelOptions(name=model, endpoint=endpoint, key_env=key_env) if model or endpoint else None
    if only_model and given is None:
        raise InputError("--skip-stage-0: give the model of stages 1 and 2 with --model or --endpoint")
    options = InstallOptions(
        as_of=as_of,
        index_url=index_url,
        proxy=proxy,
        certificates=certificates,
        secrets=read_secrets(secret or []),
        project=project,
        images=_pairs(maps or []),
        allow=tuple(allow or ()),
        submodules=without_submodules,
        reruns=reruns,
        timeout_s=timeout,
        test_timeout_s=test_timeout,
        model=given,
        skip_detectors=only_model,
    )
    snapshot = checkout(*split_revision(repository))
    directory = out or Path("installed") / (
        f"{snapshot.name}-{snapshot.commit[:12]}" if snapshot.commit else snapshot.name
    )
    made = _run(snapshot, options, directory, state, pod_settings(pod_hosts))
    _show(made, directory, as_json)


def _run(
    snapshot: RepositorySnapshot, options: InstallOptions, directory: Path, state: Path | None, pods: PodSettings
) -> Installation:
    from etude.pods.fleet import open_fleet
    from etude.system.progress import progress_line
    from etude.tasks.installation.installer import install
    from etude.tasks.installation.result import save_installation
    from etude.tasks.installation.setup_pod import InstallLog

    log = InstallLog()

    async def work() -> Installation:
        async with open_fleet(pods=pods, state=state) as fleet:
            with progress_line(f"install {snapshot.label}") as show:
                return await install(fleet, snapshot, options, show, log)

    try:
        made = asyncio.run(work())
    except KeyboardInterrupt:
        raise Interrupted("interrupted; nothing was written. Downloaded packages are kept for the next time") from None
    except EtudeError:
        if log.lines:
            print(f"log: {_write_log(directory, log)}", file=sys.stderr)
        raise
    _write_log(directory, log)
    save_installation(made, directory)
    return made


def _write_log(directory: Path, log: InstallLog) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / LOG).write_text(log.text + "\n")
    return directory / LOG


def _show(made: Installation, directory: Path, as_json: bool) -> None:
    from dataclasses import asdict

    from etude.tasks.installation.result import RESULT
    from etude.tasks.installation.verification import summarize

    if as_json:
        print(json.dumps(asdict(made)))
        return
    print(f"{directory / RESULT}")
    print(f"image    {made.image} on {made.base}")
    print(f"tests    {made.test_command}")
    print(f"         {summarize(made.tests)}")
    facts = made.facts
    as_of = f", packages as of {facts['as_of']}" if facts.get("as_of") else ""
    print(f"cost     {facts['seconds']} s, {int(str(facts['egress_bytes'])) / 1e6:.1f} MB from the network{as_of}")


def read_secrets(given: list[str]) -> dict[str, str]:
    """Return the values of secrets given as NAME=VARIABLE."""
    found = {}
    for each in given:
        name, equals, variable = each.partition("=")
        if not (equals and name.isidentifier() and variable):
            raise InputError(
                f"--secret {each}: expected NAME=VARIABLE, the name of an environment variable with the value"
            )
        if not os.environ.get(variable):
            raise InputError(f"--secret {each}: the environment variable {variable} is not set, or empty")
        found[name] = os.environ[variable]
    return found


def _pairs(given: list[str]) -> Mapping[str, str]:
    found = {}
    for each in given:
        name, equals, image = each.rpartition("=")
        if not equals or not name:
            raise InputError(f"--map {each}: expected BASE=IMAGE, such as python:3.12=my-image")
        found[name] = image
    return found


def mount(app: typer.Typer) -> None:
    """Add the `install` command to `etude tasks`."""
    app.command("install", epilog=EPILOG)(install_command)
