"""Wheels of installed distributions, so that tests of generators need no package index."""

from importlib import metadata
from pathlib import Path

from etude.tasks.generators.packages import pack_wheel


def wheels_of(names: tuple[str, ...], directory: Path) -> None:
    """Pack installed distributions as wheels, so that tests need no package index."""
    for name in names:
        found = metadata.distribution(name)
        members = {}
        for file in found.files or ():
            path = Path(str(found.locate_file(file)))
            if ".." not in file.parts and file.suffix != ".pyc" and path.is_file() and file.name != "RECORD":
                members[str(file)] = path.read_bytes()
        info = next(member.split("/")[0] for member in members if member.endswith(".dist-info/METADATA"))
        stem = info.removesuffix(".dist-info")
        (directory / f"{stem}-py3-none-any.whl").write_bytes(pack_wheel(members, info))
