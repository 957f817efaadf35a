"""`etude pods ...`: one short function per verb. Results on standard output, the rest on standard error."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from etude.errors import BusyError, InputError
from etude.pods.cli import images
from etude.pods.cli.options import (
    DETACHED_S,
    AsJson,
    Backend,
    Cwd,
    Env,
    HostUrl,
    Input,
    Kind,
    PodId,
    State,
    Terminal,
    Ttl,
    User,
    WithCommand,
    act,
)
from etude.pods.cli.units import parse_seconds, parse_size, show_seconds, show_size
from etude.pods.pod import Egress, ExecResult, Limits, Pod, PodError, PodFileError, SnapshotKind
from etude.pods.remote.host_client import TOKEN, LocalPodService, PodService, age
from etude.pods.scheduling.admission import Thresholds

app = typer.Typer(no_args_is_help=True)


# ------------------------------------------------------------------------------------------------- running


@app.command(
    cls=WithCommand,
    epilog="Examples:\n\n  etude pods run -- python3 -c 'print(1)'\n\n  etude pods run -t -- bash\n\n"
    "  etude pods run debian --memory 512M --cpu 1 --allow pypi.org -- make test\n\n"
    "  etude pods run -d --ttl 2h -- python3 -m http.server",
)
def run(
    ctx: typer.Context,
    image: Annotated[
        str, typer.Argument(metavar="IMAGE", help="An image or a snapshot; host is this machine's own toolchain.")
    ] = "host",
    stdin: Input = False,
    terminal: Terminal = False,
    detach: Annotated[
        bool, typer.Option("-d", "--detach", help="Print the pod's id and leave it running; output goes to run.log.")
    ] = False,
    ttl: Ttl = None,
    memory: Annotated[str | None, typer.Option(help="Such as 512M.", show_default=False)] = None,
    cpu: Annotated[float | None, typer.Option(help="Cores: 0.5 is half of one.", show_default=False)] = None,
    pids: Annotated[int | None, typer.Option(help="Processes and threads.", show_default=False)] = None,
    disk: Annotated[str | None, typer.Option(help="Bytes written over the image.", show_default=False)] = None,
    on_disk: Annotated[bool, typer.Option("--on-disk", help="Keep what it writes on disk, not in memory.")] = False,
    allow: Annotated[
        list[str] | None, typer.Option(metavar="HOST[:PORT]", help="Let it connect there; repeatable.")
    ] = None,
    transparent: Annotated[
        bool, typer.Option("--transparent", help="Carry connections of programs that know no proxy.")
    ] = False,
    private: Annotated[bool, typer.Option("--private", help="Allowed names may lead into private networks.")] = False,
    user: User = None,
    cwd: Cwd = None,
    env: Env = None,
    timeout: Annotated[str | None, typer.Option(help="Kill the command after this.", show_default=False)] = None,
    backend: Backend = "auto",
    state: State = None,
    host: HostUrl = None,
) -> None:
    """Run a command in a new pod, which ends with it. The exit code is the command's."""
    if detach and (stdin or terminal):
        raise InputError("--detach: nobody would be there to type; leave out -i and -t")
    limits = Limits(
        memory=parse_size(memory, "--memory") if memory else None,
        disk=parse_size(disk, "--disk") if disk else None,
        cpu=cpu,
        pids=pids,
    )
    life = parse_seconds(ttl, "--ttl") if ttl else DETACHED_S if detach else None
    options = command_options(user, cwd, env, timeout)
    on_terminal = wants_terminal(stdin, terminal)
    egress = Egress.to(*allow or (), transparent=transparent, private=private)
    asked: dict[str, Any] = {
        "limits": limits,
        "egress": egress,
        "storage": "disk" if on_disk else "memory",
        "ttl": life,
    }

    async def work(place: PodService) -> ExecResult | str:
        pod = await place.create(image, detach=detach, **asked)
        command = given_command(ctx) or place.command_of(pod)
        if detach:
            return await leave_running(pod, command, options)
        if not command and not on_terminal:
            raise InputError("run: no command; give one after --, or -t for a shell")
        return await joined(pod, command, stdin, on_terminal, options)

    done = act(state, host, work, backend)
    if isinstance(done, str):
        print(done)
    else:
        leave(done, limits.memory)


@app.command("exec", cls=WithCommand, epilog="Example:  etude pods exec 3fa9 -- ls -la")
def exec_(
    ctx: typer.Context,
    pod: PodId,
    stdin: Input = False,
    terminal: Terminal = False,
    user: User = None,
    cwd: Cwd = None,
    env: Env = None,
    timeout: Annotated[str | None, typer.Option(help="Kill the command after this.", show_default=False)] = None,
    state: State = None,
    host: HostUrl = None,
) -> None:
    """Run a command in a pod that is there. The exit code is the command's."""
    command, options = given_command(ctx), command_options(user, cwd, env, timeout)
    if not command:
        raise InputError(f"exec: no command; give one after --, as in `etude pods exec {pod} -- ls`")
    on_terminal = wants_terminal(stdin, terminal)

    async def work(place: PodService) -> ExecResult:
        return await joined(await place.find(pod), command, stdin, on_terminal, options)

    leave(act(state, host, work))


@app.command(epilog="Example:  etude pods shell 3fa9")
def shell(pod: PodId, user: User = None, cwd: Cwd = None, state: State = None, host: HostUrl = None) -> None:
    """Open a shell in a pod, on this terminal."""
    if not wants_terminal(False, True):
        raise InputError("shell: needs a terminal; `etude pods exec` runs commands without one")

    async def work(place: PodService) -> ExecResult:
        return await joined(await place.find(pod), [], True, True, command_options(user, cwd, None, None))

    leave(act(state, host, work))


def given_command(ctx: typer.Context) -> list[str]:
    return list(ctx.meta["etude.command"])


def command_options(user: str | None, cwd: str | None, env: list[str] | None, timeout: str | None) -> dict[str, Any]:
    """What a command is started with."""
    pairs = [pair.partition("=") for pair in env or ()]
    if bad := [name for name, sign, _ in pairs if not sign or not name]:
        raise InputError(f"--env {bad[0]}: expected NAME=VALUE")
    limit = parse_seconds(timeout, "--timeout") if timeout else None
    return {"user": user, "cwd": cwd, "env": {name: value for name, _, value in pairs}, "timeout": limit}


def wants_terminal(stdin: bool, terminal: bool) -> bool:
    """Whether the command gets a terminal: -t demands one, -i takes one if we have one."""
    from etude.pods.cli.terminal import is_terminal

    if terminal and not is_terminal():
        raise InputError("-t: we are not on a terminal; -i passes standard input without one")
    return terminal or (stdin and is_terminal())


async def joined(pod: Pod, command: list[str], stdin: bool, terminal: bool, options: dict[str, Any]) -> ExecResult:
    from etude.pods.cli.terminal import SHELL, run_joined
    from etude.pods.guest.client import not_started

    try:
        return await run_joined(pod, command or SHELL, stdin=stdin, terminal=terminal, **options)
    except PodError as error:
        cause = error.__cause__
        if isinstance(cause, PodFileError) and (result := not_started(cause, command)):
            print(f"etude: {result.stderr.strip()}", file=sys.stderr)
            return result
        raise
    except BrokenPipeError:  # whoever read our output has seen enough
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        return ExecResult(128 + signal.SIGPIPE)


async def leave_running(pod: Pod, command: list[str], options: dict[str, Any]) -> str:
    """Start a command that nobody waits for; the id of its pod."""
    if command:
        script = 'exec >run.log 2>&1 </dev/null; "$@" &'
        try:
            await pod.exec(["/bin/sh", "-c", script, "sh", *command], **{**options, "timeout": None})
        except BaseException:
            await pod.close()
            raise
    return pod.id


def leave(result: ExecResult, memory: int | None = None) -> None:
    """End as the command ended, and say why if it does not say itself."""
    if result.timed_out:
        print("etude: the command was killed: its time was over", file=sys.stderr)
    if result.out_of_memory:
        limit = f" (limit {show_size(memory)})" if memory else ""
        print(f"etude: memory ran out in the pod{limit}; the kernel killed a process", file=sys.stderr)
    raise typer.Exit(result.exit_code)


# ------------------------------------------------------------------------------------------------- pods that are there


@app.command(epilog="Example:  etude pods ps --json")
def ps(state: State = None, host: HostUrl = None, as_json: AsJson = False) -> None:
    """List the pods and what they use."""
    pods = act(state, host, lambda place: place.pods())
    if as_json:
        print(json.dumps(pods))
        return
    table = Table("pod", "image", "age", "ends in", "memory", "pids", "cpu", "state", box=None, header_style="bold")
    for pod in pods:
        stats = pod["stats"]
        table.add_row(
            pod["id"],
            escape(pod["image"][:30]),
            show_seconds(age(pod)),
            show_seconds(pod["remaining"]) if pod["remaining"] is not None else "lease" if pod["lease"] else "-",
            show_size(stats.get("memory")),
            f"{stats['pids']:.0f}" if "pids" in stats else "-",
            f"{stats['cpu_s']:.1f}s" if "cpu_s" in stats else "-",
            pod["state"],
        )
    Console().print(table if pods else "no pods")


@app.command(epilog="Example:  etude pods snapshot 3fa9")
def snapshot(pod: PodId, kind: Kind = None, state: State = None, host: HostUrl = None, as_json: AsJson = False) -> None:
    """Keep a pod's files as they are now, on disk, and print the snapshot's id. `run` starts from it."""

    async def work(place: PodService) -> dict[str, Any]:
        made = await (await place.find(pod)).snapshot(kind_of(kind))
        await place.persist(made.id)
        return next(each for each in await place.snapshots() if each["id"] == made.id)

    made = act(state, host, work)
    print(json.dumps(made) if as_json else made["id"])


@app.command(epilog="Example:  etude pods fork 3fa9 -n 4")
def fork(
    pod: PodId,
    n: Annotated[int, typer.Option("-n", "--count", min=1, help="How many.")] = 1,
    kind: Kind = None,
    ttl: Ttl = "1h",
    state: State = None,
    host: HostUrl = None,
    as_json: AsJson = False,
) -> None:
    """Make pods that start where this one is, and print their ids."""
    life = parse_seconds(ttl or "1h", "--ttl")

    async def work(place: PodService) -> list[str]:
        return [child.id for child in await place.fork(await place.find(pod), n, kind_of(kind), life)]

    ids = act(state, host, work)
    print(json.dumps(ids) if as_json else "\n".join(ids))


def kind_of(text: str | None) -> SnapshotKind | None:
    if text is None or text in ("fs", "fs-live", "full"):
        return text  # type: ignore[return-value]
    raise InputError(f"--kind {text}: expected fs or fs-live")


@app.command(epilog="Examples:\n\n  etude pods cp src 3fa9:/root/src\n\n  etude pods cp 3fa9:/root/out.txt .")
def cp(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A path, or POD:path.", show_default=False)],
    target: Annotated[str, typer.Argument(metavar="DST", help="A path, or POD:path.", show_default=False)],
    state: State = None,
    host: HostUrl = None,
) -> None:
    """Copy a file or a tree into a pod or out of one."""
    (source_pod, source_path), (target_pod, target_path) = split_path(source), split_path(target)
    if bool(source_pod) == bool(target_pod):
        raise InputError(f"cp {source} {target}: one of them, and only one, must be POD:path")

    async def work(place: PodService) -> None:
        pod = await place.find(source_pod or target_pod)
        name = Path(source_path.rstrip("/")).resolve().name if target_pod else Path(source_path).name
        if target_pod:
            inside = target_path.endswith("/") or await is_directory(pod, target_path)
            await pod.upload(Path(source_path), f"{target_path.rstrip('/')}/{name}" if inside else target_path)
        else:
            to = Path(target_path)
            await pod.download(source_path, to / name if to.is_dir() else to)

    act(state, host, work)


def split_path(text: str) -> tuple[str, str]:
    """(pod, path) of `POD:path`; a path of ours has no pod."""
    pod, sign, path = text.partition(":")
    return (pod, path or ".") if sign and pod and "/" not in pod else ("", text)


async def is_directory(pod: Pod, path: str) -> bool:
    with contextlib.suppress(PodFileError):
        info = await pod.stat(path)
        return info.kind == "directory"
    return False


@app.command(epilog="Example:  etude pods close 3fa9 81c2")
def close(
    pods: Annotated[list[str] | None, typer.Argument(metavar="POD...", help="Their ids.", show_default=False)] = None,
    every: Annotated[bool, typer.Option("--all", help="Close every pod there is.")] = False,
    state: State = None,
    host: HostUrl = None,
) -> None:
    """End pods and remove what they wrote."""
    if bool(pods) == every:
        raise InputError("close: name pods, or say --all")

    async def work(place: PodService) -> None:
        ids = [pod["id"] for pod in await place.pods()] if every else pods or []
        for id in ids:
            await (await place.find(id)).close()

    act(state, host, work)


@app.command(epilog="Example:  etude pods events 3fa9 --host http://10.0.0.7:7741")
def events(pod: PodId, state: State = None, host: HostUrl = None, as_json: AsJson = False) -> None:
    """Print what happened to a pod, oldest first. A server keeps its pods' events; without one little is known."""
    found = act(state, host, lambda place: place.events(pod))
    if as_json:
        print(json.dumps([{"time": event.time, "kind": event.kind, "facts": dict(event.facts)} for event in found]))
        return
    for event in found:
        facts = " ".join(f"{name}={value}" for name, value in event.facts.items())
        print(
            f"{datetime.fromtimestamp(event.time).isoformat(sep=' ', timespec='milliseconds')}  {event.kind}  {facts}"
        )


# ------------------------------------------------------------------------------------------------- the house


@app.command(epilog="Example:  etude pods gc")
def gc(
    every: Annotated[
        bool, typer.Option("--all", help="End every pod and forget every snapshot too; images stay.")
    ] = False,
    state: State = None,
    as_json: AsJson = False,
) -> None:
    """Remove what dead processes left behind, and layers that nothing needs any more."""

    async def work(place: PodService) -> dict[str, list[str]]:
        assert isinstance(place, LocalPodService)
        host = place.host
        if not every:
            return {**await host.collect(grace=3600), "snapshots": []}
        if others := host.registry.others():
            raise BusyError(f"gc --all: {', '.join(others)} still use this state directory; end them first")
        pods, saved = [spec.id for spec in host.registry.records()], host.store.snapshots()
        for id in pods:
            with contextlib.suppress(PodError):  # what does not answer is reaped below
                await (await host.find(id)).close()
        for each in saved:
            await place.forget(each.snapshot.id)
        removed = await host.collect(grace=0)
        await host.backend.shut()
        removed["pods"] = sorted({*removed["pods"], *pods})
        return {**removed, "snapshots": [each.snapshot.id for each in saved]}

    done = act(state, None, work)
    print(json.dumps(done) if as_json else "removed " + ", ".join(f"{len(v)} {k}" for k, v in done.items()))


@app.command(
    epilog="Examples:\n\n  etude pods serve --no-token\n\n"
    f"  {TOKEN}=... etude pods serve --listen 0.0.0.0:7741 --certificate host.pem --key host.key --warm host=8"
)
def serve(
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where; port 0 takes a free one.")
    ] = "127.0.0.1:7741",
    token_file: Annotated[
        Path | None, typer.Option(help=f"Holds the token; else ${TOKEN}.", show_default=False)
    ] = None,
    no_token: Annotated[bool, typer.Option("--no-token", help="Let everybody on this machine in.")] = False,
    certificate: Annotated[Path | None, typer.Option(help="Of TLS, in PEM.", show_default=False)] = None,
    key: Annotated[Path | None, typer.Option(help="Of the certificate.", show_default=False)] = None,
    max_pods: Annotated[int | None, typer.Option(min=1, help="At most so many at once.", show_default=False)] = None,
    warm: Annotated[
        list[str] | None, typer.Option(metavar="IMAGE=N", help="Keep N pods started in advance; repeatable.")
    ] = None,
    close: Annotated[bool, typer.Option("--close", help="At the end, close the pods instead of leaving them.")] = False,
    backend: Backend = "auto",
    state: State = None,
) -> None:
    """Offer this machine's pods to others over HTTP, until SIGTERM. Pods and clients survive a restart."""
    from etude.pods.fleet import open_host
    from etude.pods.remote import server as server

    token = server.read_token(listen, token_file, no_token)
    if bool(certificate) != bool(key):
        raise InputError("--certificate and --key belong together: give both or none")
    if not server.is_loopback(listen) and not certificate:
        print("etude: warning: no TLS: the token and all that pods say can be read on the way", file=sys.stderr)
    pools = [server.parse_warm(text) for text in warm or ()]
    thresholds = Thresholds(max_pods=max_pods) if max_pods else None

    async def work() -> None:
        listener = server.bind(listen)
        open_to = await open_host(backend, state, thresholds)
        try:
            for image, count in pools:
                await open_to.pool(image, count)
            name = listener.getsockname()
            address = f"http{'s' if certificate else ''}://{f'[{name[0]}]' if ':' in name[0] else name[0]}:{name[1]}"

            def ready() -> None:
                print(f"{address}  pods of {open_to.state} on the {open_to.backend.name} backend", flush=True)

            await server.run(open_to, token, listener, certificate=certificate, key=key, close=close, ready=ready)
        finally:
            await open_to.close()

    asyncio.run(work())


@app.command(epilog="Example:  etude pods doctor --json")
def doctor(
    backend: Annotated[str, typer.Option(help="Look at this backend only.")] = "all",
    state: State = None,
    as_json: AsJson = False,
) -> None:
    """Say what this machine can do for pods, what not, and why. Every backend is tried."""
    from etude.pods.cli.doctor import examine, print_findings

    findings = asyncio.run(examine(state, backend))
    if as_json:
        print(json.dumps(findings))
    else:
        print_findings(findings)
    raise typer.Exit(0 if any(found["works"] for found in findings["backends"]) else 1)


images.add_to(app)
