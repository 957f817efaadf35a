"""The workspace of an installation as a layer on an image, written on the host without running anything."""

import os
from collections.abc import Mapping
from pathlib import Path

from etude.errors import InputError
from etude.pods.fleet import Fleet
from etude.pods.images.records import Image
from etude.pods.images.store import Store
from etude.pods.images.trees import make_whiteout
from etude.pods.workspace import FileState, parents
from etude.tasks.installation.result import WORKSPACE, Installation
from etude.tasks.installation.snapshot import RepositorySnapshot


def with_files(store: Store, image: Image, files: Mapping[str, FileState | None], root: str = WORKSPACE) -> Image:
    """Return the image with these files in the workspace; None removes one that the image has."""

    def fill(target: Path) -> None:
        top = target / root.strip("/")
        top.mkdir(parents=True)
        for path in sorted(files):  # a parent is a directory of this layer, never a link: links have no files below
            state, place = files[path], top / path
            if any(files.get(parent) is not None for parent in parents(path)):
                raise InputError(f"{path}: a file or link is also a directory")
            place.parent.mkdir(parents=True, exist_ok=True)
            if state is None:
                make_whiteout(str(place))
            elif state.kind == "symlink":
                os.symlink(state.target, place)
            else:
                place.write_bytes(state.contents)
                os.chmod(place, 0o755 if state.executable else 0o644)
        for directory, _, _ in os.walk(target):
            os.chmod(directory, 0o755)

    return image.with_(layers=(*image.layers, store.add_layer(fill)))


def commit_image(
    fleet: Fleet, installation: Installation, installed: RepositorySnapshot, other: RepositorySnapshot
) -> Image:
    """Return the installation's image with the files of another commit in place of those it was installed with.

    Only commits with the same dependency digest can share an installation.
    """
    changed: dict[str, FileState | None] = {
        path: state for path, state in other.files.items() if installed.files.get(path) != state
    }
    kept = {*other.files, *(parent for path in other.files for parent in parents(path))}
    for path in installed.files:
        if path not in kept and not any(parent in other.files for parent in parents(path)):
            changed[path] = None
    return with_files(fleet.store, fleet.store.image(installation.image), changed)
