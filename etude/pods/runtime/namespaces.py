"""The default backend: Linux namespaces and overlayfs, without a daemon, a container engine or a third-party binary.

A pod is a process forked by the zygote into its own namespaces, with an overlay of immutable layers as its root. As
root, the pod's users are a range of otherwise unused host ids that no other pod has, because the kernel counts some
resources by user, and all files are id-mapped; as an ordinary user the pod has one user, its root, which is that user
outside. The kernel is shared with the host: docs/pods.md describes the strength of this boundary.
"""

import asyncio
import contextlib
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal

from etude.pods.guest import protocol
from etude.pods.images.certificates import (
    IMAGE_BUNDLES,
    MAX_BUNDLE,
    POD_BUNDLE,
    certificate_variables,
    host_bundle,
    merge_bundles,
)
from etude.pods.images.layers import LayerDir
from etude.pods.images.records import Layer
from etude.pods.images.store import Store
from etude.pods.network.policy import EgressPolicy
from etude.pods.pod import Capabilities, FileInfo, PodFileError, SnapshotKind, Unsupported
from etude.pods.runtime import capabilities, disk_images, seccomp, zygote_protocol
from etude.pods.runtime.backend import SOFT_DISK_LIMITS, Backend, LocalPod, PodSpec
from etude.pods.runtime.diff import diff_layers

# Host ids of pods as root: above every range that systemd and /etc/subuid hand out, and those of `directories`.
SHARED_FIRST_ID = 2_000_000_000  # of all pods, where a tmpfs cannot be id-mapped
FIRST_ID = 2_200_000_000
IDS = 65_536
ZYGOTE = f"zygote-{zygote_protocol.VERSION}"
TEMPLATES = "disk-templates"  # of disk images, in the state directory
POD_RANGES = 2048  # of one state directory
TMPFS_MAPPED_SINCE = (6, 3)  # Linux


class NamespaceBackend(Backend):
    """Pods in namespaces of their own."""

    name = "namespace"
    mode = "namespaces"

    def __init__(self, state: Path, store: Store, helper: Path) -> None:
        super().__init__(state, store, helper, str(state), ZYGOTE)
        self.root = os.geteuid() == 0
        self.own_ids = self.root and kernel_version() >= TMPFS_MAPPED_SINCE
        self.shift = SHARED_FIRST_ID if self.root and not self.own_ids else 0  # of what pods write
        self.filter = seccomp.build_filter("own")
        other_limits = {"disk", "inodes", *(() if self.root else ("pids",))}  # pids as RLIMIT_NPROC
        notes = self.layout_notes(other_limits)
        if not self.root:
            notes.append(
                "one user in a pod (its root), because only one id is mapped without root; submitted code is the user "
                "of its verifier in the pod, and checks are judged outside it"
            )
        if not self.own_ids:
            why = "the service is not root" if not self.root else "the kernel is older than Linux 6.3"
            notes.append(
                f"pods share a user outside ({why}), by which the kernel counts descriptors in flight, pipes and epoll "
                "watches: a pod that takes all disturbs others, and without root our other programs; of inotify "
                "watches and queued signals a pod gets a part, and no POSIX message queues"
            )
        no_images = disk_images.why_not()
        if no_images:
            notes.append(f"with storage=disk, {SOFT_DISK_LIMITS} ({no_images})")
        limits = {*self.layout.controllers, *other_limits}
        self.capabilities = Capabilities(
            isolation="namespace",
            limits=frozenset(limits),
            disk_limits="soft" if no_images else "hard",
            egress=frozenset({"proxy", "transparent"}),
            snapshots=self.snapshots,
            users=self.root,
            own_users=self.own_ids,
            notes=tuple(notes),
        )

    def make_pod(self, spec: PodSpec) -> "NamespacePod":
        return NamespacePod(self, spec)

    async def memory_layers(self) -> set[str]:
        status = await self.request(zygote_protocol.STATUS)
        return {name.decode() for name in status.get(zygote_protocol.LAYER, [])}

    # ------------------------------------------------------------------------------------------- layers

    def layer_fields(self, found: Iterable[Layer]) -> list[tuple[int, bytes]]:
        """Return the fields of layers: their paths in the zygote's mount namespace; top first, as overlayfs expects."""
        fields = []
        for layer in found:
            in_memory = f"{zygote_protocol.MEMORY}/{layer.id}/u"
            path = in_memory if layer.memory else self.state_relative(self.store.layer_path(layer))
            if self.root and (self.own_ids or layer.shift != self.shift):
                fields.append((zygote_protocol.MAPPED, os.fsencode(f"{layer.shift} {path}")))
            else:
                fields.append((zygote_protocol.LOWER, os.fsencode(path)))
        return fields[::-1]

    def state_relative(self, path: Path) -> str:
        """Return a path relative to the state directory, the zygote's working directory."""
        return os.path.relpath(path, self.state)

    def id_fields(self) -> list[tuple[int, int]]:
        """Return the fields of the host ids of a pod."""
        if not self.root:
            return [(zygote_protocol.OWNER, 0), (zygote_protocol.IDS, 1)]
        first = SHARED_FIRST_ID
        if self.own_ids:  # pods of several state directories rarely share ids
            digest = hashlib.sha256(os.fsencode(self.state)).digest()
            first = FIRST_ID + digest[0] % 15 * POD_RANGES * IDS
        return [(zygote_protocol.OWNER, first), (zygote_protocol.IDS, IDS)]

    async def persist(self, layer: Layer) -> Layer:
        with owned_descriptor(await self.fetch(zygote_protocol.LAYER, layer.id)) as directory:
            return await self.copy_to_store(directory, layer.shift)

    async def copy_to_store(self, directory: int, shift: int) -> Layer:
        """Copy the current content of a directory into a layer on disk."""
        return await asyncio.to_thread(self.store.copy_layer, Path(f"/proc/self/fd/{directory}"), shift)

    async def fetch(self, key: int, name: str) -> int:
        """Return a descriptor of the directory of a pod's writes (ID) or of a layer in memory (LAYER)."""
        _, (directory,) = await self.zygote.request(zygote_protocol.FETCH, (key, name.encode()))
        return directory

    async def open_layer(self, layer: Layer, opened: contextlib.ExitStack) -> LayerDir:
        """Return the directory of a layer, which stays accessible until `opened` is closed."""
        if not layer.memory:
            return LayerDir(str(self.store.layer_path(layer)), layer.shift)
        descriptor = opened.enter_context(owned_descriptor(await self.fetch(zygote_protocol.LAYER, layer.id)))
        return LayerDir(f"/proc/self/fd/{descriptor}/.", layer.shift)

    async def drop(self, layer: Layer) -> None:
        await self.request(zygote_protocol.DROP, (zygote_protocol.LAYER, layer.id.encode()))


def mounts_below(paths: Iterable[str]) -> list[str]:
    """Return the mount points below paths of this machine, which a mount of the path itself does not include."""
    tops = tuple(f"{path}/" for path in paths)
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        points = [line.split(" ", 5)[4] for line in file]
    return [
        re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), point) for point in points if point.startswith(tops)
    ]


def kernel_version() -> tuple[int, int]:
    """Return the version of the running kernel."""
    major, minor = re.findall(r"\d+", os.uname().release)[:2]
    return int(major), int(minor)


@contextlib.contextmanager
def owned_descriptor(descriptor: int) -> Iterator[int]:
    """Yield a descriptor and close it at the end."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class NamespacePod(LocalPod):
    """A pod in its own namespaces."""

    backend: NamespaceBackend

    def __init__(self, backend: NamespaceBackend, spec: PodSpec) -> None:
        policy = EgressPolicy.from_egress(spec.egress)
        certificates = certificate_variables(spec.image) if policy.rules else {}
        environment = {**certificates, **spec.image.env, **policy.environment()}
        super().__init__(backend, spec, environment, spec.image.workdir, spec.image.user)

    def _user(self, user: str | None) -> str | None:
        chosen = super()._user(user)
        if chosen and not self.backend.root and chosen.partition(":")[0] not in ("root", "0"):
            raise Unsupported(f"commands as {chosen!r} are not possible: without root a pod has one user, its root")
        return chosen

    # ------------------------------------------------------------------------------------------- starting

    @property
    def writes_to(self) -> Literal["memory", "image", "directory"]:
        """Where its files are; a directory has no limit, or a soft one."""
        if self.spec.storage == "memory":
            return "memory"
        return "image" if self.limits.disk and self.backend.capabilities.disk_limits == "hard" else "directory"

    async def boot(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as opened:
            descriptors = []
            if self.writes_to == "image":
                assert self.limits.disk is not None
                templates, size = self.backend.state / TEMPLATES, (self.limits.disk, int(self.limits.inodes or 0))
                image = await asyncio.to_thread(disk_images.open_image, templates, *size)
                descriptors.append(opened.enter_context(owned_descriptor(image)))
            await self.create_process(self._create_fields(), descriptors)
        if self.policy.rules and not self.spec.image.binds and (bundle := host_bundle()):
            await self._write_certificates(bundle)

    async def _write_certificates(self, bundle: str) -> None:
        """Write the certificates of this machine and of the image to the pod's /dev, which is in no layer."""
        of_image = b""
        for path in IMAGE_BUNDLES:
            with contextlib.suppress(PodFileError):
                of_image = await self.read(path, length=MAX_BUNDLE)
                break
        await self.write(POD_BUNDLE, merge_bundles(of_image, Path(bundle).read_bytes()), mode=0o644)

    def _create_fields(self) -> list[tuple[int, protocol.Value]]:
        backend, limits = self.backend, self.limits
        binds = [(path, path) for path in (*self.spec.image.binds, *mounts_below(self.spec.image.binds))]
        if resolver := self.policy.resolv_conf():
            file = self.directory / "resolv.conf"
            file.write_text(resolver)
            file.chmod(0o644)
            binds.append((backend.state_relative(file), "/etc/resolv.conf"))
        listening = [f"{one.kind} {one.address} {one.port}" for one in self.policy.listen_specs()]
        fields: list[tuple[int, protocol.Value]] = [
            *backend.layer_fields(self.spec.image.layers),
            *backend.id_fields(),
            (zygote_protocol.HOSTNAME, b"pod"),
            (zygote_protocol.CAPS, capabilities.mask()),
            (zygote_protocol.FILTER, backend.filter),
            *((zygote_protocol.ADDRESS, address.encode()) for address in self.policy.addresses()),
            *((zygote_protocol.LISTEN, each.encode()) for each in listening),
            *((zygote_protocol.BIND, os.fsencode(f"{source}\0{target}")) for source, target in binds),
        ]
        if self.writes_to == "directory":
            upper = os.fsencode(backend.state_relative(self._make_upper()))
            fields.append((zygote_protocol.UPPER, upper))
            fields += [(zygote_protocol.WATCH, upper)] if limits.disk else []
        if limits.disk:
            fields.append((zygote_protocol.SIZE, limits.disk))
        if limits.inodes:
            fields.append((zygote_protocol.INODES, int(limits.inodes)))
        flags = zygote_protocol.ADJUST_OOM_SCORE if "memory" in backend.layout.controllers else 0
        flags |= zygote_protocol.DISK_IMAGE if self.writes_to == "image" else 0
        fields.append((zygote_protocol.FLAGS, flags | (zygote_protocol.OWN_IDS if backend.own_ids else 0)))
        if limits.pids and "pids" not in backend.layout.controllers:
            fields.append((zygote_protocol.PIDS, limits.pids))
        if limits.memory:  # files and shared memory together must leave memory for the guest init
            fields.append((zygote_protocol.SHM, min(64 << 20, limits.memory // 4)))
        return fields

    def _make_upper(self) -> Path:
        upper = self.directory / "writes"
        for path in (upper, upper / "u", upper / "w"):
            path.mkdir(mode=0o755, exist_ok=True)
            if self.backend.shift:
                os.chown(path, self.backend.shift, self.backend.shift)
        return upper

    # ------------------------------------------------------------------------------------------- snapshots

    async def diff(self, paths: Sequence[str] = ("/",)) -> Mapping[str, FileInfo | None]:
        await self.ready()
        with contextlib.ExitStack() as opened:
            written = LayerDir(f"/proc/self/fd/{opened.enter_context(await self._open_writes())}/.")
            found = [await self.backend.open_layer(layer, opened) for layer in reversed(self.spec.image.layers)]
            own = self.spec.own_layers
            return await asyncio.to_thread(diff_layers, [written, *found[:own]], found[own:], paths)

    async def _open_writes(self) -> AbstractContextManager[int]:
        """Open the directory that holds the pod's writes."""
        if self.writes_to == "directory":
            path = self.directory / "writes" / "u"
            return owned_descriptor(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        return owned_descriptor(await self.backend.fetch(zygote_protocol.ID, self.id))

    async def take_layers(self, kind: SnapshotKind) -> tuple[Layer, ...]:
        layer = await (self._seal_stopped() if kind == "fs" else self._seal_live())
        return (*self.spec.image.layers, layer)

    async def restart(self) -> None:
        await self.boot()

    async def _seal_stopped(self) -> Layer:
        """Stop the pod and turn its writes into a layer by moving them: as fast for a gigabyte as for nothing."""
        self.release()
        pod = (zygote_protocol.ID, self.id.encode())
        if self.writes_to == "directory":
            await self.backend.zygote.request(zygote_protocol.KILL, pod)
            layer = self.backend.store.adopt_layer(self.directory / "writes" / "u", self.backend.shift)
            self.backend.delete(self.directory / "writes", self.backend.state / "trash")
        else:
            layer = Layer(f"{self.backend.owner}.{os.urandom(12).hex()}", self.backend.shift, memory=True)
            await self.backend.zygote.request(zygote_protocol.SEAL, pod, (zygote_protocol.LAYER, layer.id.encode()))
        # A new group: the old one is charged for the sealed files, which all pods over this layer now share.
        await self.backend.remove_group(self.group)
        return layer

    async def _seal_live(self) -> Layer:
        """Copy the pod's writes into a layer while its processes are frozen."""
        with await self._open_writes() as directory:
            async with self.group.frozen():
                return await self.backend.copy_to_store(directory, self.backend.shift)
