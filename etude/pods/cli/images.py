"""The verbs of `etude pods` for what pods are made from: images, snapshots, and files of them."""

import asyncio
import json
import re
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from etude.errors import InputError
from etude.pods.cli.options import AsJson, HostUrl, State, act
from etude.pods.pod import Egress
from etude.pods.remote.host_client import LocalPodService, PodService

image_app = typer.Typer(no_args_is_help=True, help="Make and forget images.")
Pairs = Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="Repeatable.", show_default=False)]


def add_to(app: typer.Typer) -> None:
    """Add these verbs to the room's."""
    app.command(epilog="Example:  etude pods images --json")(images)
    app.add_typer(image_app, name="image")
    app.command(epilog="Example:  etude pods snapshots")(snapshots)
    app.command("export", epilog="Example:  etude pods export snap-81c2 state.tar")(export)
    app.command("import", epilog="Example:  etude pods import state.tar --host http://10.0.0.7:7741")(import_)
    app.command(epilog="Example:  etude pods forget snap-81c2")(forget)


def images(state: State = None, host: HostUrl = None, as_json: AsJson = False) -> None:
    """List the images. Beside them there always is `host`, this machine's own toolchain."""
    found = act(state, host, lambda place: place.images())
    if as_json:
        print(json.dumps(found))
        return
    table = Table("name", "id", "layers", "starts in", box=None, header_style="bold")
    for image in found:
        table.add_row(escape(image["name"] or "-"), image["id"][:16], str(image["layers"]), escape(image["workdir"]))
    Console().print(table if found else "no images but `host`; `etude pods image add` makes some")


def snapshots(state: State = None, host: HostUrl = None, as_json: AsJson = False) -> None:
    """List the snapshots. One that is not on disk goes with the last pod's keeper."""
    found = act(state, host, lambda place: place.snapshots())
    if as_json:
        print(json.dumps(found))
        return
    table = Table("snapshot", "of image", "parent", "kind", "on disk", box=None, header_style="bold")
    for each in found:
        kept = "yes" if each["durable"] else "no"
        table.add_row(each["id"], escape(each["image"][:30]), each["parent"] or "-", each["kind"], kept)
    Console().print(table if found else "no snapshots")


@image_app.command(
    epilog="Examples:\n\n  etude pods image add debian --debootstrap bookworm --include git --include make\n\n"
    "  etude pods image add task --dockerfile environment/Dockerfile --allow pypi.org"
)
def add(
    name: Annotated[str, typer.Argument(help="What to call it.", show_default=False)],
    directory: Annotated[Path | None, typer.Option(help="A root file system.", show_default=False)] = None,
    tar: Annotated[Path | None, typer.Option(help="A root file system in a tar.", show_default=False)] = None,
    oci: Annotated[Path | None, typer.Option(help="An OCI layout, directory or tar.", show_default=False)] = None,
    debootstrap: Annotated[str | None, typer.Option(metavar="SUITE", help="Debian's.", show_default=False)] = None,
    dockerfile: Annotated[Path | None, typer.Option(help="Built here, in pods.", show_default=False)] = None,
    ref: Annotated[str | None, typer.Option(help="Which image of an OCI layout.", show_default=False)] = None,
    include: Annotated[list[str] | None, typer.Option(help="A Debian package; repeatable.", show_default=False)] = None,
    context: Annotated[Path | None, typer.Option(help="Of COPY; the Dockerfile's directory if not given.")] = None,
    build_arg: Pairs = None,
    base: Annotated[
        list[str] | None, typer.Option(metavar="NAME=IMAGE", help="What a FROM means; repeatable.", show_default=False)
    ] = None,
    allow: Annotated[list[str] | None, typer.Option(metavar="HOST[:PORT]", help="For RUN; repeatable.")] = None,
    transparent: Annotated[bool, typer.Option("--transparent", help="For programs that know no proxy.")] = False,
    state: State = None,
    as_json: AsJson = False,
) -> None:
    """Make an image from a directory, a tar, an OCI layout, a Debian mirror or a Dockerfile."""
    from etude.pods.images import sources as make

    if name == "host" or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,127}", name) or ".." in name:
        raise InputError(f"an image cannot be called {name!r}; letters, digits and ._:/@- please, and not `host`")
    chosen = [each for each in (directory, tar, oci, debootstrap, dockerfile) if each is not None]
    if len(chosen) != 1:
        raise InputError("image add: give one of --directory, --tar, --oci, --debootstrap and --dockerfile")
    only_for(dockerfile, "--dockerfile", context=context, build_arg=build_arg, base=base, allow=allow)
    only_for(oci, "--oci", ref=ref)
    only_for(debootstrap, "--debootstrap", include=include)
    egress = Egress.to(*allow or (), transparent=transparent)

    async def work(place: PodService) -> str:
        assert isinstance(place, LocalPodService)
        host, store = place.host, place.host.store
        if directory:
            made = await asyncio.to_thread(make.image_from_directory, store, directory, name)
        elif tar:
            made = await asyncio.to_thread(make.image_from_tar, store, tar, name)
        elif oci:
            made = await asyncio.to_thread(make.image_from_oci_layout, store, oci, ref, name)
        elif debootstrap:
            made = await asyncio.to_thread(make.image_from_debootstrap, store, debootstrap, include or (), name)
        else:
            from etude.pods.images.dockerfile import build

            assert dockerfile is not None
            table = {"host": host.resolve("host"), **{image.name: image for image in store.images() if image.name}}
            table |= {given: host.resolve(image) for given, image in pairs(base, "--base").items()}
            args = pairs(build_arg, "--build-arg")
            here = context or dockerfile.parent
            made = await build(cast(Any, host), store, dockerfile, here, table, args, egress, name=name)
        return made.id

    id = act(state, None, work)
    print(json.dumps({"name": name, "id": id}) if as_json else f"{name}  {id[:16]}")


def only_for(chosen: object, option: str, **given: object) -> None:
    """Refuse options that mean nothing for the source that was chosen."""
    for name, value in given.items():
        if value and chosen is None:
            raise InputError(f"--{name.replace('_', '-')} goes with {option} only")


def pairs(texts: list[str] | None, option: str) -> dict[str, str]:
    """The names and values of `NAME=VALUE`s."""
    split = [text.partition("=") for text in texts or ()]
    if bad := [name for name, sign, _ in split if not sign or not name]:
        raise InputError(f"{option} {bad[0]}: expected NAME=VALUE")
    return {name: value for name, _, value in split}


@image_app.command(epilog="Example:  etude pods image remove debian")
def remove(
    name: Annotated[str, typer.Argument(help="Its name or id.", show_default=False)], state: State = None
) -> None:
    """Forget an image. `etude pods gc` then removes the layers that only it needed."""

    async def work(place: PodService) -> None:
        assert isinstance(place, LocalPodService)
        place.host.store.remove_image(name)

    act(state, None, work)


def export(
    id: Annotated[str, typer.Argument(metavar="ID", help="A snapshot or an image.", show_default=False)],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The tar to write.", show_default=False)],
    state: State = None,
    host: HostUrl = None,
) -> None:
    """Write a snapshot or an image as one file, an OCI layout in a tar."""
    if not file.absolute().parent.is_dir():
        raise InputError(f"{file}: there is no directory {file.parent}")
    act(state, host, lambda place: place.export(id, file))


def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `export` wrote.", show_default=False)],
    state: State = None,
    host: HostUrl = None,
    as_json: AsJson = False,
) -> None:
    """Take in what `export` wrote, and print its id."""
    id = act(state, host, lambda place: place.import_(file))
    print(json.dumps({"id": id}) if as_json else id)


def forget(
    snapshot: Annotated[str, typer.Argument(metavar="SNAPSHOT", help="Its id.", show_default=False)],
    state: State = None,
    host: HostUrl = None,
) -> None:
    """Forget a snapshot. Pods that were made from it go on."""
    act(state, host, lambda place: place.forget(snapshot))
