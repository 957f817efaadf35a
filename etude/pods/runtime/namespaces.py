"""The default backend: Linux namespaces and overlayfs, without a daemon, a container engine or a third-party binary.

A pod is a process forked by the zygote into its own namespaces, with an overlay of immutable layers as its root. As
root, the pod's users are a range of otherwise unused host ids, and image layers are id-mapped; as an ordinary user the
pod has one user, its root, which is that user outside. The kernel is shared with the host: docs/pods.md describes the
strength of this boundary.
"""

import asyncio
import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from etude.pods.guest import protocol
from etude.pods.images.layers import LayerDir
from etude.pods.images.records import Layer
from etude.pods.images.store import Store
from etude.pods.network.policy import EgressPolicy
from etude.pods.pod import Capabilities, FileInfo, PodError, SnapshotKind, Unsupported
from etude.pods.runtime import capabilities, seccomp, zygote_protocol
from etude.pods.runtime.backend import Backend, LocalPod, PodSpec
from etude.pods.runtime.diff import diff_layers

FIRST_ID = 2_000_000_000  # first host id of pods as root: above every range that systemd and /etc/subuid hand out
IDS = 65_536


class NamespaceBackend(Backend):
    """Pods in namespaces of their own."""

    name = "namespace"
    mode = "namespaces"

    def __init__(self, state: Path, store: Store, helper: Path) -> None:
        # The name does not change, so that versions that share a state directory share one zygote.
        super().__init__(state, store, helper, str(state), "keeper")
        self.root = os.geteuid() == 0
        self.first_id = FIRST_ID if self.root else 0
        self.filter = seccomp.build_filter("own")
        self.mapped: set[str] = set()  # layers that the current zygote has mounted id-mapped
        self.zygote.on_connect = self.mapped.clear
        notes = self.layout_notes()
        if not self.root:
            notes.append("one user in a pod (its root), because only one id is mapped without root")
        self.capabilities = Capabilities(
            isolation="namespace",
            limits=frozenset({*self.layout.controllers, "disk", "inodes"}),
            egress=frozenset({"proxy", "transparent"}),
            snapshots=self.snapshots,
            users=self.root,
            notes=tuple(notes),
        )

    def make_pod(self, spec: PodSpec) -> "NamespacePod":
        if spec.storage == "disk" and (spec.limits.disk or spec.limits.inodes):
            raise Unsupported('a limit on disk or inodes needs storage="memory": there are no quotas on disk')
        return NamespacePod(self, spec)

    async def memory_layers(self) -> set[str]:
        status = await self.request(zygote_protocol.STATUS)
        return {name.decode() for name in status.get(zygote_protocol.LAYER, [])}

    # ------------------------------------------------------------------------------------------- layers

    async def lower_paths(self, found: Iterable[Layer]) -> list[str]:
        """Return the layers' paths in the zygote's mount namespace; top first, as overlayfs expects."""
        paths = []
        for layer in found:
            if layer.memory:
                paths.append(f"{zygote_protocol.MEMORY}/{layer.id}/u")
            elif layer.shift == self.first_id:
                paths.append(self.state_relative(self.store.layer_path(layer)))
            elif layer.shift == 0:
                await self.map_layer(layer)
                paths.append(f"{zygote_protocol.MAPPED}/{layer.id}")
            else:
                raise PodError(f"layer {layer.id} is for other host ids ({layer.shift}); export and import it again")
        return paths[::-1]

    def state_relative(self, path: Path) -> str:
        """Return a path relative to the state directory, the zygote's working directory."""
        return os.path.relpath(path, self.state)

    async def map_layer(self, layer: Layer) -> None:
        if layer.id in self.mapped and self.zygote.sock is not None:  # unconnected: another zygote
            return
        path = os.fsencode(self.state_relative(self.store.layer_path(layer)))
        await self.request(
            zygote_protocol.MAP,
            (zygote_protocol.LAYER, layer.id.encode()),
            (zygote_protocol.PATH, path),
            *self.id_maps(),
        )
        self.mapped.add(layer.id)

    def id_maps(self) -> list[tuple[int, bytes]]:
        text = f"0 {FIRST_ID} {IDS}\n" if self.root else "0 0 1\n"
        return [(zygote_protocol.UIDMAP, text.encode()), (zygote_protocol.GIDMAP, text.encode())]

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
        self.mapped.discard(layer.id)
        await self.request(zygote_protocol.DROP, (zygote_protocol.LAYER, layer.id.encode()))


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
        environment = {**spec.image.env, **EgressPolicy.from_egress(spec.egress).environment()}
        super().__init__(backend, spec, environment, spec.image.workdir, spec.image.user)

    # ------------------------------------------------------------------------------------------- starting

    async def boot(self) -> None:
        lower = await self.backend.lower_paths(self.spec.image.layers)
        self.directory.mkdir(parents=True, exist_ok=True)
        await self.create_process(self._create_fields(lower))

    def _create_fields(self, lower: list[str]) -> list[tuple[int, protocol.Value]]:
        backend, limits = self.backend, self.limits
        binds = [(path, path) for path in self.spec.image.binds]
        if resolver := self.policy.resolv_conf():
            file = self.directory / "resolv.conf"
            file.write_text(resolver)
            file.chmod(0o644)
            binds.append((backend.state_relative(file), "/etc/resolv.conf"))
        listening = [f"{one.kind} {one.address} {one.port}" for one in self.policy.listen_specs()]
        fields: list[tuple[int, protocol.Value]] = [
            *((zygote_protocol.LOWER, os.fsencode(path)) for path in lower),
            *backend.id_maps(),
            (zygote_protocol.OWNER, backend.first_id),
            (zygote_protocol.HOSTNAME, b"pod"),
            (zygote_protocol.CAPS, capabilities.mask()),
            (zygote_protocol.FILTER, backend.filter),
            *((zygote_protocol.ADDRESS, address.encode()) for address in self.policy.addresses()),
            *((zygote_protocol.LISTEN, each.encode()) for each in listening),
            *((zygote_protocol.BIND, os.fsencode(f"{source}\0{target}")) for source, target in binds),
        ]
        if self.spec.storage == "disk":
            fields.append((zygote_protocol.UPPER, os.fsencode(backend.state_relative(self._make_upper()))))
        if limits.disk:
            fields.append((zygote_protocol.SIZE, limits.disk))
        if limits.inodes:
            fields.append((zygote_protocol.INODES, int(limits.inodes)))
        if "memory" in backend.layout.controllers:
            fields.append((zygote_protocol.FLAGS, zygote_protocol.ADJUST_OOM_SCORE))
        if limits.memory:  # files and shared memory together must leave memory for the guest init
            fields.append((zygote_protocol.SHM, min(64 << 20, limits.memory // 4)))
        return fields

    def _make_upper(self) -> Path:
        upper = self.directory / "writes"
        for path in (upper, upper / "u", upper / "w"):
            path.mkdir(mode=0o755, exist_ok=True)
            if self.backend.root:
                os.chown(path, FIRST_ID, FIRST_ID)
        return upper

    # ------------------------------------------------------------------------------------------- snapshots

    async def diff(self) -> Mapping[str, FileInfo | None]:
        await self.ready()
        with contextlib.ExitStack() as opened:
            written = LayerDir(f"/proc/self/fd/{opened.enter_context(await self._open_writes())}/.")
            found = [await self.backend.open_layer(layer, opened) for layer in reversed(self.spec.image.layers)]
            own = self.spec.own_layers
            return await asyncio.to_thread(diff_layers, [written, *found[:own]], found[own:])

    async def _open_writes(self) -> AbstractContextManager[int]:
        """Open the directory that holds the pod's writes."""
        if self.spec.storage == "disk":
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
        if self.spec.storage == "disk":
            await self.backend.zygote.request(zygote_protocol.KILL, pod)
            layer = self.backend.store.adopt_layer(self.directory / "writes" / "u", self.backend.first_id)
            self.backend.delete(self.directory / "writes", self.backend.state / "trash")
        else:
            layer = Layer(f"{self.backend.owner}.{os.urandom(12).hex()}", self.backend.first_id, memory=True)
            await self.backend.zygote.request(zygote_protocol.SEAL, pod, (zygote_protocol.LAYER, layer.id.encode()))
        # A new group: the old one is charged for the sealed files, which all pods over this layer now share.
        await self.backend.remove_group(self.group)
        return layer

    async def _seal_live(self) -> Layer:
        """Copy the pod's writes into a layer while its processes are frozen."""
        with await self._open_writes() as directory:
            async with self.group.frozen():
                return await self.backend.copy_to_store(directory, self.backend.first_id)
