"""Resolve the image named by FROM. No image is pulled; public names map to images that can be made on the pods' host:

    python:3.11, python:3.11-slim, ...   the host's programs and its Python of that version, in a writable virtual
                                         environment with `python`, `pip` and `pytest` on PATH
    debian:*, ubuntu:*, host             the host's programs, if the host is Debian or Ubuntu
    host-writable                        the host's programs with apt and dpkg, for RUN apt-get install; on this machine
    anything else                        an image of the store, chosen with `--map NAME=IMAGE`

The host's /usr is read-only in the first two. Of several hosts, it is the system that most of them have.
"""

import asyncio
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path

from etude.errors import InputError
from etude.globs import Globs
from etude.pods.fleet import Fleet
from etude.pods.images.builder import LayerBuilder
from etude.pods.images.dockerfile import build
from etude.pods.images.records import Image
from etude.pods.images.trees import digest
from etude.pods.images.writable_system import writable_system
from etude.pods.pod import Egress

PYTHON_PREFIX = "/srv/python"  # not below /usr or /opt, which belong to the host
PACKAGES = ("pip", "pytest")
NO_EGRESS = Egress()
_PYTHON_NAME = re.compile(r"python(?::(3(?:\.\d+)?)(?:\.\d+)?(?:[.-].*)?)?")


@dataclass(frozen=True)
class HostSettings:
    """Resources that the caller grants to tasks; a task cannot grant itself any of them.

    `images` maps names or globs after FROM to images of the store. `build_egress` applies to RUN, `egress` to phases of
    tasks whose network is "public". `variables` are the values of `${NAME}` in task.toml.
    """

    images: Mapping[str, str] = field(default_factory=dict)
    build_egress: Egress = NO_EGRESS
    egress: Egress = NO_EGRESS
    variables: Mapping[str, str] = field(default_factory=dict)


def short_image_name(name: str) -> str:
    """Return an image name without digest and, for official images, without the registry mirror."""
    name = name.partition("@")[0]
    return name.rpartition("/library/")[2].removeprefix("library/")


def mapped_image(name: str, images: Mapping[str, str]) -> str | None:
    """Return the image mapped to a name: an exact match first, then the first matching glob, else None."""
    for each in (name, short_image_name(name)):
        if each in images:
            return images[each]
        for pattern, image in images.items():
            if Globs([f"/{pattern}"]).matches(each):
                return image
    return None


async def resolve_base_image(fleet: Fleet, name: str, host_settings: HostSettings, where: str) -> Image:
    """Return the image that a FROM names."""
    chosen, short_name = mapped_image(name, host_settings.images), short_image_name(name)
    if chosen is None and (short_name == "host" or _host_provides(fleet, short_name)):
        chosen = "host"
    if chosen is not None:
        return await fleet.resolve(chosen)
    if short_name == "host-writable":
        return await writable_image(fleet, await fleet.resolve("host"))
    if (found := _PYTHON_NAME.fullmatch(short_name)) is not None:
        version = fleet.system.python
        if version and found[1] in (None, "3", version):
            return await python_image(fleet)
        has = f"Python {version}" if version else "no Python"
        owner = "this host has" if fleet.local is not None else "the pod hosts have"
        raise InputError(
            f"{where}: FROM {name}: {owner} {has}; make an image with that Python "
            f"(`etude pods image add NAME ...`) and pass --map {name}=NAME"
        )
    raise InputError(
        f"{where}: FROM {name}: unknown image, and images are not pulled; make one "
        f"(`etude pods image add NAME ...`) and pass --map {name}=NAME"
    )


def _host_provides(fleet: Fleet, short_name: str) -> bool:
    names = {"debian", "ubuntu"}
    return short_name.partition(":")[0] in names and bool(names.intersection(fleet.system.distributions))


async def writable_image(fleet: Fleet, image: Image) -> Image:
    """Return an image of the host's programs with writable system directories; InputError where that is impossible."""
    if fleet.local is None:
        raise InputError(
            "host-writable consists of links to the host's own files, which are not sent to other hosts; make an image "
            "with apt and dpkg (`etude pods image add NAME --debootstrap ...`) and use that"
        )
    return await asyncio.to_thread(writable_system, fleet.store, image)


# ------------------------------------------------------------------------------------------------- Python image


async def python_image(fleet: Fleet, packages: tuple[str, ...] = PACKAGES) -> Image:
    """Return the host image plus a Python environment with copies of packages installed on this machine.

    It is built once and has a name derived from its contents.
    """
    host, version = await fleet.resolve("host"), fleet.system.python
    found = _with_dependencies(packages)
    name = f"python-{version}-{digest('python image 5', host.id, *found)[:16]}"
    if (known := await fleet.known_image(name)) is not None:
        return known

    async def work(builder: LayerBuilder) -> Image:
        with tempfile.TemporaryDirectory(prefix="etude-python-") as directory:
            context = Path(directory)
            await asyncio.to_thread(_write_build_context, context, found.values(), version)
            return await build(builder, context / "Dockerfile", context, {"host": host}, name=name)

    image = await fleet.build(name, work)
    fleet.name_image(image)
    return image


@cache
def _with_dependencies(names: tuple[str, ...]) -> dict[str, metadata.Distribution]:
    """Return installed packages and their dependencies as "name==version"; those not installed are left out."""
    found: dict[str, metadata.Distribution] = {}
    pending = list(names)
    while pending:
        name = pending.pop().lower().replace("_", "-")
        if name in found:
            continue
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        for line in found[name].requires or ():
            requirement, _, marker = line.partition(";")
            if "extra" not in marker:  # requirements of other systems or versions are simply not installed
                pending.append(re.split(r"[^A-Za-z0-9._-]", requirement.strip())[0])
    return {f"{name}=={found[name].version}": found[name] for name in sorted(found)}


def _write_build_context(context: Path, distributions: Collection[metadata.Distribution], version: str) -> None:
    """Write the files of the Python environment and the Dockerfile that copies them into an image."""
    top = context / "python"
    packages = top / f"lib/python{version}/site-packages"
    packages.mkdir(parents=True)
    (top / "bin").mkdir()
    for program in ("python", "python3", f"python{version}"):
        os.symlink("/usr/bin/python3", top / "bin" / program)
    (top / "pyvenv.cfg").write_text(f"home = /usr/bin\ninclude-system-site-packages = false\nversion = {version}\n")
    for each in distributions:
        _copy(each, packages)
    for name, module in (("pip", "pip"), ("pip3", "pip"), ("pytest", "pytest")):
        if any(each.name == module for each in distributions):
            script = top / "bin" / name
            script.write_text(f'#!/bin/sh\nexec {PYTHON_PREFIX}/bin/python3 -m {module} "$@"\n')
            script.chmod(0o755)
    (context / "Dockerfile").write_text(
        f"FROM host\nCOPY python {PYTHON_PREFIX}\nENV PATH={PYTHON_PREFIX}/bin:$PATH\n"
        # unchecked-hash: copying changes the modification times that .pyc files are checked by otherwise
        f"RUN python3 -m compileall -q --invalidation-mode unchecked-hash {PYTHON_PREFIX}/lib\n"
    )


def _copy(distribution: metadata.Distribution, packages: Path) -> None:
    top = Path(str(distribution.locate_file(""))).resolve()
    for file in distribution.files or ():
        source = Path(str(distribution.locate_file(file))).resolve()
        if source.is_relative_to(top) and source.suffix != ".pyc" and source.is_file():
            target = packages / source.relative_to(top)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            if source.name == "RECORD":  # has digests of scripts that name the environment they are installed in
                lines = source.read_text(encoding="utf-8").splitlines(keepends=True)
                target.write_text("".join(line for line in lines if not line.startswith("../")), encoding="utf-8")
