"""The commands of `etude pods` for images and snapshots, and for exporting and importing them."""

import asyncio
import re
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from etude.errors import InputError
from etude.pods.cli.options import (
    Allow,
    AsJson,
    HostUrl,
    State,
    Transparent,
    parse_pairs,
    show,
    with_client,
    with_host,
)
from etude.pods.host import Host
from etude.pods.pod import Egress

image_app = typer.Typer(no_args_is_help=True, help="Add and remove images.")


def add_commands(app: typer.Typer) -> None:
    """Add these commands to `etude pods`."""
    app.command(epilog="Example:  etude pods images --json")(images)
    app.add_typer(image_app, name="image")
    app.command(epilog="Example:  etude pods snapshots")(snapshots)
    app.command("export", epilog="Example:  etude pods export snap-81c2 state.tar")(export)
    app.command("import", epilog="Example:  etude pods import state.tar --host http://10.0.0.7:7741")(import_)
    app.command(epilog="Example:  etude pods forget snap-81c2")(forget)


def images(state: State = None, host: HostUrl = None, as_json: AsJson = False) -> None:
    """List the stored images. The image `host`, this machine's toolchain, always exists."""
    found = with_client(state, host, lambda client: client.images())
    table = Table("name", "id", "layers", "workdir", box=None, header_style="bold")
    for image in found:
        table.add_row(escape(image.name or "-"), image.id[:16], str(image.layers), escape(image.workdir))
    show(found, as_json, table if found else "no images except `host`; add one with `etude pods image add`")


def snapshots(state: State = None, host: HostUrl = None, as_json: AsJson = False) -> None:
    """List the snapshots. One that is not on disk is lost when the zygote exits."""
    found = with_client(state, host, lambda client: client.snapshots())
    table = Table("snapshot", "of image", "parent", "kind", "on disk", box=None, header_style="bold")
    for each in found:
        table.add_row(each.id, escape(each.image[:30]), each.parent or "-", each.kind, "yes" if each.durable else "no")
    show(found, as_json, table if found else "no snapshots")


@image_app.command(
    epilog="Examples:\n\n  etude pods image add debian --debootstrap bookworm --include git --include make\n\n"
    "  etude pods image add task --dockerfile environment/Dockerfile --allow packages.example.org"
)
def add(
    name: Annotated[str, typer.Argument(help="The name of the new image.")],
    directory: Annotated[Path | None, typer.Option(help="A directory with a root filesystem.")] = None,
    tar: Annotated[Path | None, typer.Option(help="A tar of a root filesystem.")] = None,
    oci: Annotated[Path | None, typer.Option(help="An OCI layout, directory or tar.")] = None,
    debootstrap: Annotated[str | None, typer.Option(metavar="SUITE", help="A Debian suite to install.")] = None,
    dockerfile: Annotated[Path | None, typer.Option(help="A Dockerfile to build; RUN executes in pods.")] = None,
    ref: Annotated[str | None, typer.Option(help="The name of the image in the OCI layout.")] = None,
    include: Annotated[list[str] | None, typer.Option(help="A Debian package; repeatable.")] = None,
    context: Annotated[Path | None, typer.Option(help="Build context; default: the Dockerfile's directory.")] = None,
    build_arg: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="Repeatable.")] = None,
    base: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=IMAGE", help="Use this image for a name after FROM; repeatable."),
    ] = None,
    allow: Allow = None,
    transparent: Transparent = False,
    state: State = None,
    as_json: AsJson = False,
) -> None:
    """Create an image from a directory, a tar, an OCI layout, a Debian mirror or a Dockerfile."""
    from etude.pods.images import sources

    if name == "host" or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,127}", name) or ".." in name:
        raise InputError(f"image name {name!r}: expected letters, digits and ._:/@-, and not `host`")
    chosen = [each for each in (directory, tar, oci, debootstrap, dockerfile) if each is not None]
    if len(chosen) != 1:
        raise InputError(
            "image add: give one of --directory, --tar, --oci, --debootstrap and --dockerfile, and only one"
        )
    require_source(dockerfile, "--dockerfile", context=context, build_arg=build_arg, base=base, allow=allow)
    require_source(oci, "--oci", ref=ref)
    require_source(debootstrap, "--debootstrap", include=include)
    egress = Egress.to(*allow or (), transparent=transparent)

    async def work(host: Host) -> str:
        store = host.store
        if directory:
            made = await asyncio.to_thread(sources.image_from_directory, store, directory, name)
        elif tar:
            made = await asyncio.to_thread(sources.image_from_tar, store, tar, name)
        elif oci:
            made = await asyncio.to_thread(sources.image_from_oci_layout, store, oci, ref, name)
        elif debootstrap:
            made = await asyncio.to_thread(sources.image_from_debootstrap, store, debootstrap, include or (), name)
        else:
            from etude.pods.images.dockerfile import build

            assert dockerfile is not None
            table = {"host": host.resolve("host"), **{image.name: image for image in store.images() if image.name}}
            table |= {given: host.resolve(image) for given, image in parse_pairs(base, "--base").items()}
            args = parse_pairs(build_arg, "--build-arg")
            build_context = context or dockerfile.parent
            made = await build(host.builder, dockerfile, build_context, table, args, egress, name=name)
        return made.id

    id = with_host(state, work)
    show({"name": name, "id": id}, as_json, f"{name}  {id[:16]}")


def require_source(chosen: object, option: str, **given: object) -> None:
    """Raise InputError for options that do not apply to the chosen source."""
    for name, value in given.items():
        if value and chosen is None:
            raise InputError(f"--{name.replace('_', '-')} needs {option}")


@image_app.command(epilog="Example:  etude pods image remove debian")
def remove(name: Annotated[str, typer.Argument(help="The image's name or id.")], state: State = None) -> None:
    """Remove an image. `etude pods gc` then removes the layers that only it used."""

    async def work(host: Host) -> None:
        host.store.remove_image(name)

    with_host(state, work)


def export(
    id: Annotated[str, typer.Argument(metavar="ID", help="A snapshot or an image.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The tar to write.")],
    state: State = None,
    host: HostUrl = None,
) -> None:
    """Write a snapshot or an image to one file, an OCI layout in a tar."""
    if not file.absolute().parent.is_dir():
        raise InputError(f"{file}: there is no directory {file.parent}")
    with_client(state, host, lambda client: client.export(id, file))


def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file written by `export`.")],
    state: State = None,
    host: HostUrl = None,
    as_json: AsJson = False,
) -> None:
    """Import a file written by `export`, and print the id."""
    id = with_client(state, host, lambda client: client.import_(file))
    show({"id": id}, as_json, id)


def forget(
    snapshot: Annotated[str, typer.Argument(metavar="SNAPSHOT", help="The snapshot's id.")],
    state: State = None,
    host: HostUrl = None,
) -> None:
    """Remove a snapshot. Pods that were created from it go on."""
    with_client(state, host, lambda client: client.remove_snapshot(snapshot))
