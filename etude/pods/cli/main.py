"""The commands of `etude pods`, one function each. Results go to standard output, the rest to standard error."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic_core import to_jsonable_python
from rich.markup import escape
from rich.table import Table

from etude.errors import BusyError, InputError
from etude.pods.cli import images
from etude.pods.cli.options import (
    DETACHED_TTL_S,
    Allow,
    AsJson,
    Backend,
    Cwd,
    Env,
    HostUrl,
    HostUrls,
    Input,
    Kind,
    PodId,
    State,
    Terminal,
    Timeout,
    TrailingCommand,
    Transparent,
    Ttl,
    User,
    parse_pairs,
    raise_failed,
    show,
    with_client,
    with_clients,
    with_host,
)
from etude.pods.cli.units import parse_seconds, parse_size, show_seconds, show_size
from etude.pods.host import Host, PodOptions, all_or_none
from etude.pods.host_client import TOKEN_FILE, HostClient
from etude.pods.pod import Egress, ExecResult, Limits, Pod, PodError, PodFileError, Snapshot
from etude.pods.scheduling.admission import Thresholds
from etude.pods.scheduling.router import HostReport
from etude.pods.settings import TOKEN_VARIABLE
from etude.system.terminal import say

app = typer.Typer(no_args_is_help=True)


# ------------------------------------------------------------------------------------------------- running commands


@app.command(
    cls=TrailingCommand,
    epilog="Examples:\n\n  etude pods run -- python3 -c 'print(1)'\n\n  etude pods run -t -- bash\n\n"
    "  etude pods run debian --memory 512M --cpu 1 --allow packages.example.org -- make test\n\n"
    "  etude pods run -d --ttl 2h -- python3 -m http.server",
)
def run(
    ctx: typer.Context,
    image: Annotated[
        str, typer.Argument(metavar="IMAGE", help="An image or a snapshot; `host` is this machine's toolchain.")
    ] = "host",
    stdin: Input = False,
    terminal: Terminal = False,
    detach: Annotated[
        bool, typer.Option("-d", "--detach", help="Print the pod's id and leave it running; output goes to run.log.")
    ] = False,
    ttl: Ttl = None,
    memory: Annotated[str | None, typer.Option(help="Memory limit, such as 512M.")] = None,
    cpu: Annotated[float | None, typer.Option(help="CPU limit in cores, such as 0.5.")] = None,
    pids: Annotated[int | None, typer.Option(help="Limit on processes and threads.")] = None,
    disk: Annotated[
        str | None, typer.Option(help="Limit on bytes written, such as 2G; over the memory limit with --on-disk.")
    ] = None,
    on_disk: Annotated[bool, typer.Option("--on-disk", help="Store written files on disk, not in memory.")] = False,
    allow: Allow = None,
    transparent: Transparent = False,
    private: Annotated[bool, typer.Option("--private", help="Allowed names may resolve to private networks.")] = False,
    user: User = None,
    cwd: Cwd = None,
    env: Env = None,
    timeout: Timeout = None,
    backend: Backend = "auto",
    state: State = None,
    host: HostUrl = None,
) -> None:
    """Run a command in a new pod, which ends with the command. The exit code is the command's."""
    if detach and (stdin or terminal):
        raise InputError("--detach: a detached command has no standard input; leave out -i and -t")
    limits = Limits(
        memory=parse_size(memory, "--memory") if memory else None,
        disk=parse_size(disk, "--disk") if disk else None,
        cpu=cpu,
        pids=pids,
    )
    ttl_s = parse_seconds(ttl, "--ttl") if ttl else DETACHED_TTL_S if detach else None
    exec_options = command_options(user, cwd, env, timeout)
    on_terminal = wants_terminal(stdin, terminal)
    egress = Egress.to(*allow or (), transparent=transparent, private=private)
    pod_options: PodOptions = {"limits": limits, "egress": egress, "storage": "disk" if on_disk else "memory"}

    async def work(client: HostClient) -> ExecResult | str:
        pod = await client.create(image, detached=detach, ttl=ttl_s, **pod_options)
        command = given_command(ctx) or [*pod.default_command]
        if detach:
            return await start_detached(pod, command, exec_options)
        if not command and not on_terminal:
            raise InputError("run: no command; give one after --, or -t for a shell")
        return await run_attached(pod, command, stdin, on_terminal, exec_options)

    result = with_client(state, host, work, backend)
    if isinstance(result, str):
        print(result)
    else:
        exit_with_result(result, limits.memory)


@app.command("exec", cls=TrailingCommand, epilog="Example:  etude pods exec 3fa9 -- ls -la")
def exec_(
    ctx: typer.Context,
    pod: PodId,
    stdin: Input = False,
    terminal: Terminal = False,
    user: User = None,
    cwd: Cwd = None,
    env: Env = None,
    timeout: Timeout = None,
    state: State = None,
    host: HostUrl = None,
) -> None:
    """Run a command in a running pod. The exit code is the command's."""
    command, options = given_command(ctx), command_options(user, cwd, env, timeout)
    if not command:
        raise InputError(f"exec: no command; give one after --, as in `etude pods exec {pod} -- ls`")
    on_terminal = wants_terminal(stdin, terminal)

    async def work(client: HostClient) -> ExecResult:
        return await run_attached(await client.find(pod), command, stdin, on_terminal, options)

    exit_with_result(with_client(state, host, work))


@app.command(epilog="Example:  etude pods shell 3fa9")
def shell(pod: PodId, user: User = None, cwd: Cwd = None, state: State = None, host: HostUrl = None) -> None:
    """Open a shell in a pod, on this terminal."""
    if not wants_terminal(False, True):
        raise InputError("shell: needs a terminal; `etude pods exec` runs commands without one")

    async def work(client: HostClient) -> ExecResult:
        return await run_attached(await client.find(pod), [], True, True, command_options(user, cwd, None, None))

    exit_with_result(with_client(state, host, work))


def given_command(ctx: typer.Context) -> list[str]:
    return list(ctx.meta["etude.command"])


def command_options(user: str | None, cwd: str | None, env: list[str] | None, timeout: str | None) -> dict[str, Any]:
    """Return the keyword options for `exec` and `spawn`."""
    limit = parse_seconds(timeout, "--timeout") if timeout else None
    return {"user": user, "cwd": cwd, "env": parse_pairs(env, "--env"), "timeout": limit}


def wants_terminal(stdin: bool, terminal: bool) -> bool:
    """Whether the command gets a terminal: -t requires one, -i uses one if there is one."""
    from etude.pods.cli.terminal import is_terminal

    if terminal and not is_terminal():
        raise InputError("-t: standard input and output are not on a terminal; -i passes standard input without one")
    return terminal or (stdin and is_terminal())


async def run_attached(
    pod: Pod, command: list[str], stdin: bool, terminal: bool, options: dict[str, Any]
) -> ExecResult:
    """Run a command on this process's streams or terminal; without a command, a shell."""
    from etude.pods.cli.terminal import SHELL, run_on_streams
    from etude.pods.guest.client import not_started

    try:
        return await run_on_streams(pod, command or SHELL, stdin=stdin, terminal=terminal, **options)
    except PodError as error:
        cause = error.__cause__
        if isinstance(cause, PodFileError) and (result := not_started(cause, command)):
            say(f"etude: {result.stderr.strip()}", file=sys.stderr)
            return result
        raise
    except BrokenPipeError:  # the reader of our output closed it
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        return ExecResult(128 + signal.SIGPIPE)


async def start_detached(pod: Pod, command: list[str], options: dict[str, Any]) -> str:
    """Start a command in the background and return the id of its pod."""
    if command:
        script = 'exec >run.log 2>&1 </dev/null; "$@" &'
        try:
            await pod.exec(["/bin/sh", "-c", script, "sh", *command], **{**options, "timeout": None})
        except BaseException:
            await pod.close()
            raise
    return pod.id


def exit_with_result(result: ExecResult, memory: int | None = None) -> None:
    """Exit with the command's exit code, after reporting a timeout or an out-of-memory kill."""
    if result.timed_out:
        print("etude: the command was killed: its timeout passed", file=sys.stderr)
    if result.out_of_memory:
        limit = f" (limit {show_size(memory)})" if memory else ""
        print(f"etude: the pod ran out of memory{limit}; the kernel killed a process", file=sys.stderr)
    raise typer.Exit(result.exit_code)


# ------------------------------------------------------------------------------------------------- running pods


@app.command(
    epilog="Examples:\n\n  etude pods ps --json\n\n  etude pods ps --host https://a:7741 --host https://b:7741"
)
def ps(state: State = None, hosts: HostUrls = None, as_json: AsJson = False) -> None:
    """List the pods of this machine, or of hosts, and their resource usage."""
    several = len(hosts or ()) > 1
    found, failed = with_clients(state, hosts, lambda client: client.pods())
    columns = ("pod", "image", "age", "ends in", "memory", "pids", "cpu", "state")
    table = Table(*(["host"] if several else []), *columns, box=None, header_style="bold")
    pods = [(url, pod) for url, listed in found.items() for pod in listed]
    for url, pod in pods:
        table.add_row(
            *([url] if several else []),
            pod.id,
            escape(pod.image[:30]),
            show_seconds(max(0.0, time.time() - pod.created)),
            show_seconds(pod.remaining) if pod.remaining is not None else "lease" if pod.lease else "-",
            show_size(pod.stats.get("memory")),
            f"{pod.stats['pids']:.0f}" if "pids" in pod.stats else "-",
            f"{pod.stats['cpu_s']:.1f}s" if "cpu_s" in pod.stats else "-",
            pod.state,
        )
    rows = [{**to_jsonable_python(pod), "host": url} for url, pod in pods] if several else [pod for _, pod in pods]
    show(rows, as_json, table if pods else "no pods")
    raise_failed(failed)


@app.command(epilog="Example:  etude pods snapshot 3fa9")
def snapshot(pod: PodId, kind: Kind = None, state: State = None, host: HostUrl = None, as_json: AsJson = False) -> None:
    """Save a pod's files to disk as a snapshot, from which `run` can start, and print its id."""

    async def work(client: HostClient) -> Snapshot:
        return await client.persist((await (await client.find(pod)).snapshot(kind)).id)

    created = with_client(state, host, work)
    show(created, as_json, created.id)


@app.command(epilog="Example:  etude pods fork 3fa9 -n 4")
def fork(
    pod: PodId,
    n: Annotated[int, typer.Option("-n", "--count", min=1, help="The number of pods.")] = 1,
    kind: Kind = None,
    ttl: Ttl = "1h",
    state: State = None,
    host: HostUrl = None,
    as_json: AsJson = False,
) -> None:
    """Create pods that start with this pod's files, and print their ids: all of them, or none on an error."""
    ttl_s = parse_seconds(ttl or "1h", "--ttl")

    async def work(client: HostClient) -> list[str]:
        parent = await client.find(pod)
        snapshot = await parent.snapshot(kind)
        options: PodOptions = {"limits": parent.limits, "egress": parent.egress}
        try:
            making = (client.create(snapshot, ttl=ttl_s, detached=True, **options) for _ in range(n))
            return [child.id for child in await all_or_none(making)]
        finally:
            await client.remove_snapshot(snapshot.id)

    ids = with_client(state, host, work)
    show(ids, as_json, "\n".join(ids))


@app.command(epilog="Examples:\n\n  etude pods cp src 3fa9:/root/src\n\n  etude pods cp 3fa9:/root/out.txt .")
def cp(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A path, or POD:path.")],
    target: Annotated[str, typer.Argument(metavar="DST", help="A path, or POD:path.")],
    state: State = None,
    host: HostUrl = None,
) -> None:
    """Copy a file or a tree into a pod or out of one."""
    (source_pod, source_path), (target_pod, target_path) = split_path(source), split_path(target)
    if bool(source_pod) == bool(target_pod):
        raise InputError(f"cp {source} {target}: exactly one of the two must be POD:path")

    async def work(client: HostClient) -> None:
        pod = await client.find(source_pod or target_pod)
        name = Path(source_path.rstrip("/")).resolve().name if target_pod else Path(source_path).name
        if target_pod:
            into = target_path.endswith("/") or await is_directory(pod, target_path)
            await pod.upload(Path(source_path), f"{target_path.rstrip('/')}/{name}" if into else target_path)
        else:
            to = Path(target_path)
            await pod.download(source_path, to / name if to.is_dir() else to)

    with_client(state, host, work)


def split_path(text: str) -> tuple[str, str]:
    """Return (pod, path) of `POD:path`; the pod is empty for a local path."""
    pod, sign, path = text.partition(":")
    return (pod, path or ".") if sign and pod and "/" not in pod else ("", text)


async def is_directory(pod: Pod, path: str) -> bool:
    with contextlib.suppress(PodFileError):
        info = await pod.stat(path)
        return info.kind == "directory"
    return False


@app.command(epilog="Example:  etude pods close 3fa9 81c2")
def close(
    pods: Annotated[list[str] | None, typer.Argument(metavar="POD...", help="Ids of the pods.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Close every pod.")] = False,
    state: State = None,
    host: HostUrl = None,
) -> None:
    """Close pods and remove the files they wrote."""
    if bool(pods) == every:
        raise InputError("close: give pod ids, or --all for every pod")

    async def work(client: HostClient) -> None:
        ids = [pod.id for pod in await client.pods()] if every else pods or []
        for id in ids:
            await (await client.find(id)).close()

    with_client(state, host, work)


@app.command(epilog="Example:  etude pods events 3fa9 --host http://10.0.0.7:7741")
def events(pod: PodId, state: State = None, host: HostUrl = None, as_json: AsJson = False) -> None:
    """Print the events of a pod, oldest first. Only a server (`etude pods serve`) keeps all events of its pods."""
    found = with_client(state, host, lambda client: client.events(pod))
    lines = []
    for event in found:
        when = datetime.fromtimestamp(event.time).isoformat(sep=" ", timespec="milliseconds")
        lines.append(f"{when}  {event.kind}  {' '.join(f'{name}={value}' for name, value in event.facts.items())}")
    show(found, as_json, "\n".join(lines))


# ------------------------------------------------------------------------------------------------- the host


@app.command(epilog="Example:  etude pods gc")
def gc(
    every: Annotated[
        bool, typer.Option("--all", help="Also close every pod and remove every snapshot; images stay.")
    ] = False,
    state: State = None,
    as_json: AsJson = False,
) -> None:
    """Remove the remains of dead processes and the layers that nothing uses."""

    async def work(host: Host) -> dict[str, list[str]]:
        if not every:
            return {**await host.collect_garbage(grace=3600), "snapshots": []}
        if others := host.registry.other_owners():
            raise BusyError(f"gc --all: {', '.join(others)} still use this state directory; end them first")
        pods, saved = [spec.id for spec in host.registry.records()], host.store.snapshots()
        for id in pods:
            with contextlib.suppress(PodError):  # a pod that does not answer is reaped below
                await (await host.find(id)).close()
        for each in saved:
            await host.remove_snapshot(each.snapshot.id)
        removed = await host.collect_garbage(grace=0)
        await host.backend.shutdown()
        removed["pods"] = sorted({*removed["pods"], *pods})
        return {**removed, "snapshots": [each.snapshot.id for each in saved]}

    removed = with_host(state, work)
    show(removed, as_json, "removed " + ", ".join(f"{len(ids)} {kind}" for kind, ids in removed.items()))


@app.command(
    epilog="Examples:\n\n  etude pods serve\n\n"
    f"  {TOKEN_VARIABLE}=... etude pods serve --listen 0.0.0.0:7741 --certificate host.pem --key host.key --warm host=8"
)
def serve(
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="The address to serve on; port 0 takes a free port.")
    ] = "127.0.0.1:7741",
    token_file: Annotated[
        Path | None,
        typer.Option(help=f"A file with the token; default: ${TOKEN_VARIABLE}, or one made in the state directory."),
    ] = None,
    no_token: Annotated[
        bool, typer.Option("--no-token", help="Serve without a token: every user of this machine has access.")
    ] = False,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Without a token: a further name of this server; repeatable."),
    ] = None,
    certificate: Annotated[Path | None, typer.Option(help="TLS certificate in PEM.")] = None,
    key: Annotated[Path | None, typer.Option(help="The certificate's private key.")] = None,
    max_pods: Annotated[int | None, typer.Option(min=1, help="Maximum number of pods.")] = None,
    warm: Annotated[
        list[str] | None, typer.Option(metavar="IMAGE=N", help="Keep N pods started in advance; repeatable.")
    ] = None,
    close: Annotated[bool, typer.Option("--close", help="Close the pods at the end instead of leaving them.")] = False,
    backend: Backend = "auto",
    state: State = None,
) -> None:
    """Serve this machine's pods over HTTP until SIGTERM. Pods and clients survive a restart."""
    from etude.pods.fleet import open_host
    from etude.pods.remote import server
    from etude.system.http import bind, is_loopback, read_token, stored_token, url_of

    name, _, port = listen.rpartition(":")
    if not name or not port.isdigit() or int(port) > 65535:
        raise InputError(f"--listen {listen}: expected HOST:PORT, such as 127.0.0.1:7741")
    token = read_token(name, token_file, no_token, TOKEN_VARIABLE)
    if bool(certificate) != bool(key):
        raise InputError("--certificate and --key: give both or none")
    if not is_loopback(name) and not certificate:
        print("etude: warning: no TLS: the token and all traffic can be read on the network", file=sys.stderr)
    pools = [server.parse_warm(text) for text in warm or ()]
    thresholds = Thresholds(max_pods=max_pods) if max_pods else None

    async def work() -> None:
        listener = bind(name, int(port))
        host = await open_host(backend, state, thresholds)
        try:
            for image, count in pools:
                await host.pool(image, count)
            known = stored_token(host.state / TOKEN_FILE) if token is None else token

            def ready() -> None:
                address = url_of(listener, "https" if certificate else "http")
                print(f"{address}  pods of {host.state} on the {host.backend.name} backend", flush=True)
                if token is None:
                    print(f"clients need {TOKEN_VARIABLE}=$(cat {host.state / TOKEN_FILE})", file=sys.stderr)

            tls, hosts = (certificate, key) if certificate and key else None, allow_host or ()
            await server.run(host, known, listener, hosts=hosts, tls=tls, close=close, ready=ready)
        finally:
            await host.close()

    asyncio.run(work())


@app.command(epilog="Example:  etude pods drain --host https://a:7741")
def drain(
    hosts: Annotated[list[str], typer.Option("--host", metavar="URL", help="The host; repeatable.")],
    off: Annotated[bool, typer.Option("--off", help="Let the hosts take pods again.")] = False,
) -> None:
    """Let hosts take no new pods, until `--off` or a restart of `etude pods serve`. Pods that run there go on."""

    async def work(client: HostClient) -> None:
        assert isinstance(client, RemoteHostClient)
        await client.drain(not off)

    from etude.pods.remote.client import RemoteHostClient

    done, failed = with_clients(None, hosts, work)
    for url in done:
        say(f"{url} {'takes pods again' if off else 'takes no new pods'}")
    raise_failed(failed)


@app.command(epilog="Examples:\n\n  etude pods doctor --json\n\n  etude pods doctor --host https://a:7741")
def doctor(
    backend: Annotated[str, typer.Option(help="Check only this backend.")] = "all",
    state: State = None,
    hosts: HostUrls = None,
    as_json: AsJson = False,
) -> None:
    """Try every backend and report what works on this machine, what does not, and why; or what hosts say of theirs."""
    from etude.pods.cli.doctor import print_diagnosis, print_host
    from etude.pods.diagnosis import diagnose

    if hosts:
        if backend != "all":
            raise InputError("--backend and --host: a host checks the backend that it serves")
        reports, failed = with_clients(state, hosts, host_diagnosis)
        for url, (found, report) in reports.items():
            if not as_json:
                print_host(url, found, report)
        if as_json:
            show({url: {"diagnosis": found, "report": report} for url, (found, report) in reports.items()}, True, "")
        raise_failed(failed)
        return
    diagnosis = asyncio.run(diagnose(state, backend))
    if as_json:
        print(json.dumps(diagnosis))
    else:
        print_diagnosis(diagnosis)
    raise typer.Exit(0 if any(found["works"] for found in diagnosis["backends"]) else 1)


async def host_diagnosis(client: HostClient) -> tuple[dict[str, Any], HostReport]:
    """Return what a host finds out about itself, and its present report."""
    from etude.pods.remote.client import RemoteHostClient

    assert isinstance(client, RemoteHostClient)
    return await client.doctor(), await client.report()


images.add_commands(app)
