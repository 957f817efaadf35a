"""Environments of commits: installed once for all commits with the same dependencies, and written into tasks.

A task contains its environment: the base image, and an archive of what the installation added to it. The archive has no
file that the commit tracks, no bytecode and no other product of a build that could contain the solution.
"""

import asyncio
import contextlib
import io
import json
import re
import tarfile
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from etude.errors import InputError
from etude.files import write_atomically
from etude.pods.fleet import Fleet
from etude.pods.images.archive import pack
from etude.pods.images.records import Image
from etude.tasks.base_images import HostSettings, resolve_base_image
from etude.tasks.generators.image import EXCLUDED_BINDS
from etude.tasks.installation.dependencies import dependency_digest
from etude.tasks.installation.result import Installation, InstallationFailed, load_installation, save_installation
from etude.tasks.installation.snapshot import RepositorySnapshot, checkout
from etude.tasks.installation.workspace import commit_image

ARCHIVE = "dependencies.tar"
OPAQUE = ".wh..wh..opq"  # in a directory of which the base shows nothing
FAILED = "failed.json"
BUILD_PRODUCTS = re.compile(
    r"(^|/)(\.git|\.hg|__pycache__|\.(mypy|pytest|ruff|hypothesis|tox|nox|eggs|cache)[^/]*|[^/]*\.egg-info)(/|$)"
    r"|^work/(build|dist)(/|$)|\.(pyc|pyo|whl|egg|orig|rej)$|(^|/)\.coverage$"
)
CACHES = re.compile(r"^(root/\.(cache|npm|local/share)|var/cache|tmp|var/tmp|trial)/")
Installer = Callable[[Fleet, RepositorySnapshot], Awaitable[Installation]]


@dataclass(frozen=True)
class CommitEnvironment:
    """The environment of one commit: the image with its files, and what a task needs to build it again."""

    installation: Installation
    snapshot: RepositorySnapshot = field(repr=False)
    image: Image
    base: str
    env: Mapping[str, str]
    archive: Path | None  # what the installation added to the base; None: nothing
    removed: tuple[str, ...] = ()  # paths of the base that the installation removed

    @property
    def files(self) -> dict[str, bytes]:
        """The regular files of the commit."""
        return {path: state.contents for path, state in self.snapshot.files.items() if state.kind == "file"}

    def dockerfile(self, python_path: str) -> str:
        lines = [f"FROM {self.base}"]
        if self.removed:
            lines.append("RUN rm -rf " + " ".join(f"'{path}'" for path in self.removed))
        if self.archive is not None:
            lines.append(f"ADD {ARCHIVE} /")
        env = {
            **self.env,
            **({"PYTHONPATH": python_path, "PYTHONDONTWRITEBYTECODE": "1"} if python_path else {}),
            "CI": "true",
        }
        lines.append("ENV " + " ".join(f"{key}={json.dumps(value)}" for key, value in sorted(env.items())))
        workspace = self.installation.workspace
        return "\n".join([*lines, f"WORKDIR {workspace}", f"COPY repo/ {workspace}/", ""])


class EnvironmentPool:
    """Installs commits of a repository; those with the same dependency files share an installation."""

    def __init__(
        self, fleet: Fleet, repository: Path, directory: Path, install: Installer, host_settings: HostSettings
    ) -> None:
        self.fleet, self.repository, self.directory = fleet, repository, directory
        self.install, self.host_settings = install, host_settings
        self._locks: dict[str, asyncio.Lock] = {}

    async def of_commit(self, commit: str) -> CommitEnvironment:
        """Return the environment of a commit; raise InstallationFailed if it, or one like it, cannot be installed."""
        snapshot = await asyncio.to_thread(checkout, self.repository, commit)
        if snapshot.submodules:
            raise InputError(f"{self.repository}: {snapshot.submodules[0]} is a submodule; they are not supported")
        digest = dependency_digest(snapshot)
        async with self._locks.setdefault(digest, asyncio.Lock()):
            installation = await self._installation(digest, snapshot)
            installed = await asyncio.to_thread(checkout, self.repository, installation.commit)
            image = await asyncio.to_thread(commit_image, self.fleet, installation, installed, snapshot)
            return await self._describe(digest, installation, installed, snapshot, image)

    async def _installation(self, digest: str, snapshot: RepositorySnapshot) -> Installation:
        directory, store = self.directory / digest, self.fleet.store
        if (directory / FAILED).exists():
            raise InstallationFailed(**json.loads((directory / FAILED).read_text()))
        if (directory / "result.json").exists():
            found = load_installation(directory)
            if any(found.image in (image.name, image.id) for image in store.images()):
                return found
        try:
            found = await self.install(self.fleet, snapshot)
        except InstallationFailed as failed:
            directory.mkdir(parents=True, exist_ok=True)
            message = str(failed).removesuffix(f" [{failed.reason}]")
            write_atomically(directory / FAILED, json.dumps({"reason": failed.reason, "message": message}))
            raise
        save_installation(found, directory)
        return found

    async def _describe(
        self,
        digest: str,
        installation: Installation,
        installed: RepositorySnapshot,
        snapshot: RepositorySnapshot,
        image: Image,
    ) -> CommitEnvironment:
        full = self.fleet.store.image(installation.image)
        base, name = await self._base(installation, full)
        await self.fleet.fetch_image(base)
        if not set(full.binds) <= {*base.binds, *EXCLUDED_BINDS}:
            raise InstallationFailed("build", f"{snapshot.label}: its image binds {set(full.binds) - set(base.binds)}")
        archive = self.directory / digest / ARCHIVE
        added = full.layers[len(base.layers) :]
        removed = await asyncio.to_thread(self._write_archive, archive, added, base, set(installed.files))
        env = {key: value for key, value in {**full.env, **installation.env}.items() if base.env.get(key) != value}
        has_archive = archive if archive.exists() and archive.stat().st_size else None
        return CommitEnvironment(installation, snapshot, image, name, env, has_archive, removed)

    async def _base(self, installation: Installation, full: Image) -> tuple[Image, str]:
        """Return the image that a task starts from: the installation's base, or the host if tasks get another one."""
        with contextlib.suppress(InputError):
            name = installation.base
            base = await resolve_base_image(self.fleet, name, self.host_settings, installation.repository)
            if full.layers[: len(base.layers)] == base.layers:
                return base, name
        return await resolve_base_image(self.fleet, "host", self.host_settings, installation.repository), "host"

    def _write_archive(
        self, archive: Path, added: tuple[object, ...], base: Image, tracked: set[str]
    ) -> tuple[str, ...]:
        """Write what layers add to the base, once; return the paths of the base that they remove."""
        note = archive.with_suffix(".json")
        if note.exists():
            return tuple(json.loads(note.read_text()))
        removed: list[str] = []
        archive.parent.mkdir(parents=True, exist_ok=True)
        archive.write_bytes(b"")
        if added:
            store = self.fleet.store
            layer = store.flatten(added, base.layers)  # type: ignore[arg-type]
            raw = io.BytesIO()
            pack(store.layer_path(layer), raw, layer.shift)
            raw.seek(0)
            data, removed = filter_archive(raw, tracked)
            archive.write_bytes(data)
        write_atomically(note, json.dumps(removed))
        return tuple(removed)


def filter_archive(raw: io.BytesIO, tracked: set[str]) -> tuple[bytes, list[str]]:
    """Return an archive without tracked files and products of builds, and the paths that markers in it remove."""
    removed, out, kept = [], io.BytesIO(), 0
    with tarfile.open(fileobj=raw) as source, tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as target:
        for member in source:
            name = member.name.removeprefix("./").rstrip("/")
            directory, _, last = name.rpartition("/")
            if last.startswith(".wh."):  # a file of the base that is gone, or a directory that replaces the base's
                removed.append(f"/{directory}" + ("" if last == OPAQUE else f"/{last.removeprefix('.wh.')}"))
                continue
            in_work = name.startswith("work/")
            if name in ("", ".") or CACHES.search(f"{name}/") or (in_work and name.removeprefix("work/") in tracked):
                continue
            if member.isdir() and in_work:
                continue  # made with the files in them
            if (in_work and "node_modules/" not in name and BUILD_PRODUCTS.search(name)) or name.endswith(".pyc"):
                continue
            if member.type == tarfile.LNKTYPE and (member.linkname.startswith("work/") and not in_work):
                continue
            member.mtime = 0
            target.addfile(member, source.extractfile(member) if member.isreg() else None)
            kept += not member.isdir()
    return (out.getvalue() if kept else b""), sorted(path for path in removed if not path.startswith("/work/"))
