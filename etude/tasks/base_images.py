"""Which image stands for the name of a public one: nothing is pulled, so FROM means something that pods can make here.

    python:3.11, python:3.11-slim, ...   this machine's programs and its Python of that version, as an environment of
                                         its own with `python`, `pip` and `pytest` on PATH and room to install
    debian:*, ubuntu:*, host             this machine's programs, when it is a Debian or Ubuntu
    anything else                        an image of the store, by `--map NAME=IMAGE`

The machine's /usr is read-only in all of these: a Dockerfile that installs Debian packages needs an image of its own.
"""

import fnmatch
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path

from etude.errors import InputError
from etude.pods.fleet import Fleet
from etude.pods.images.dockerfile import build
from etude.pods.images.records import Image
from etude.pods.images.trees import digest
from etude.pods.pod import Egress

PYTHON = "/srv/python"  # not below /usr or /opt, which are the machine's
PACKAGES = ("pip", "pytest")
NOWHERE = Egress()
_PYTHON_NAME = re.compile(r"python(?::(3(?:\.\d+)?)(?:\.\d+)?(?:[.-].*)?)?")


@dataclass(frozen=True)
class Provision:
    """What whoever runs tasks gives to them; a task itself takes nothing.

    `images` maps names after FROM (globs too) to images of the store; `build` is the network of RUN, `egress` that of
    the phases of tasks whose network is "public"; `variables` are those that `${NAME}` in task.toml may mean.
    """

    images: Mapping[str, str] = field(default_factory=dict)
    build: Egress = NOWHERE
    egress: Egress = NOWHERE
    variables: Mapping[str, str] = field(default_factory=dict)


def plain_name(name: str) -> str:
    """A public image's name without its digest, and an official one's without where it is mirrored."""
    name = name.partition("@")[0]
    return name.rpartition("/library/")[2].removeprefix("library/")


def mapped(name: str, images: Mapping[str, str]) -> str | None:
    """What the caller's table says of a name: exactly it first, then the first glob that fits."""
    for each in (name, plain_name(name)):
        if each in images:
            return images[each]
        for pattern, image in images.items():
            if fnmatch.fnmatchcase(each, pattern):
                return image
    return None


async def base_image(fleet: Fleet, name: str, provision: Provision, where: str) -> Image | str:
    """The image that a FROM means; the name of one where pods are made by other hosts."""
    chosen = mapped(name, provision.images)
    local = fleet.local
    if local is None:
        return chosen or ("host" if _host_serves(plain_name(name)) else _refuse(name, where))
    if chosen is not None:
        return local.resolve(chosen)
    plain = plain_name(name)
    if plain == "host" or _host_serves(plain):
        return local.resolve("host")
    if (found := _PYTHON_NAME.fullmatch(plain)) is not None:
        version = host_python()
        if version and found[1] in (None, "3", version):
            return await python_image(fleet)
        has = f"Python {version}" if version else "no Python"
        raise InputError(
            f"{where}: FROM {name}: this machine has {has}; make an image with that Python "
            f"(`etude pods image add NAME ...`) and say --map {name}=NAME"
        )
    return _refuse(name, where)


def _refuse(name: str, where: str) -> str:
    raise InputError(
        f"{where}: FROM {name}: there is no such image here, and none is pulled; make one "
        f"(`etude pods image add NAME ...`) and say --map {name}=NAME"
    )


def _host_serves(plain: str) -> bool:
    return plain.partition(":")[0] in ("debian", "ubuntu") and bool({"debian", "ubuntu"} & _distribution())


@cache
def _distribution() -> frozenset[str]:
    """What this machine is, and is like."""
    try:
        text = Path("/etc/os-release").read_text()
    except OSError:
        return frozenset()
    found = re.findall(r"^(?:ID|ID_LIKE)=(.*)$", text, re.MULTILINE)
    return frozenset(word for line in found for word in line.strip('"').split())


@cache
def host_python() -> str:
    """The version (3.11) of the Python that pods of the host image have; "" if there is none."""
    program = "/usr/bin/python3"
    if not os.path.exists(program):
        return ""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run([program, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=30)
    return done.stdout.strip()


# ------------------------------------------------------------------------------------------------- Python


async def python_image(fleet: Fleet, packages: tuple[str, ...] = PACKAGES) -> Image:
    """The host's programs with a Python environment over them, which holds copies of packages installed here.

    Made once: afterwards the store has it under a name that says what is in it.
    """
    if fleet.local is None:
        raise InputError("images are made where pods are: this fleet's hosts are elsewhere; make it there")
    store = fleet.local.store
    host = fleet.local.resolve("host")
    found = _closure(packages)
    name = f"python-{host_python()}-{digest('python image 2', host.id, *found)[:16]}"
    known = _remembered.get((str(store.root), name))
    if known is not None:
        return known
    try:
        image = store.image(name)
    except InputError:
        with tempfile.TemporaryDirectory(prefix="etude-python-") as directory:
            context = Path(directory)
            _lay_out(context, found.values())
            image = await build(fleet, store, context / "Dockerfile", context, {"host": host}, name=name)  # type: ignore[arg-type]
    _remembered[str(store.root), name] = image
    return image


_remembered: dict[tuple[str, str], Image] = {}


@cache
def _closure(names: tuple[str, ...]) -> dict[str, metadata.Distribution]:
    """Packages installed here and what they need, by name and version; one that is not installed is left out."""
    found: dict[str, metadata.Distribution] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        if name in found:
            continue
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        for line in found[name].requires or ():
            needed, _, marker = line.partition(";")
            if "extra" not in marker:  # those for other systems or versions are not installed here
                waiting.append(re.split(r"[^A-Za-z0-9._-]", needed.strip())[0])
    return {f"{name}=={found[name].version}": found[name] for name in sorted(found)}


def _lay_out(context: Path, found: Collection[metadata.Distribution]) -> None:
    """The files of the environment, and the Dockerfile that puts them into an image."""
    version = host_python()
    top = context / "python"
    packages = top / f"lib/python{version}/site-packages"
    packages.mkdir(parents=True)
    (top / "bin").mkdir()
    for program in ("python", "python3", f"python{version}"):
        os.symlink("/usr/bin/python3", top / "bin" / program)
    (top / "pyvenv.cfg").write_text(f"home = /usr/bin\ninclude-system-site-packages = false\nversion = {version}\n")
    for item in found:
        _copy(item, packages)
    for name, module in (("pip", "pip"), ("pip3", "pip"), ("pytest", "pytest")):
        if any(item.name == module for item in found):
            script = top / "bin" / name
            script.write_text(f'#!/bin/sh\nexec {PYTHON}/bin/python3 -m {module} "$@"\n')
            script.chmod(0o755)
    (context / "Dockerfile").write_text(
        f"FROM host\nCOPY python {PYTHON}\nENV PATH={PYTHON}/bin:$PATH\n"
        # by their contents, not by times that copying changes
        f"RUN python3 -m compileall -q --invalidation-mode unchecked-hash {PYTHON}/lib\n"
    )


def _copy(item: metadata.Distribution, packages: Path) -> None:
    here = Path(str(item.locate_file(""))).resolve()
    for file in item.files or ():
        source = Path(str(item.locate_file(file))).resolve()
        if source.is_relative_to(here) and source.suffix != ".pyc" and source.is_file():
            target = packages / source.relative_to(here)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
