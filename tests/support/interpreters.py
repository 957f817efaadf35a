"""The Pythons of this machine on which programs for pods are tested."""

import shutil
from pathlib import Path


def interpreters() -> list[str]:
    """The oldest and the newest Python of this machine that a pod's programs should run on."""
    found: dict[int, str] = {}
    for minor in range(8, 20):
        kept = [str(path) for path in Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python3")]
        if program := next(iter(kept), shutil.which(f"python3.{minor}")):
            found[minor] = program
    return [found[minor] for minor in sorted({min(found), max(found)})] if found else []
