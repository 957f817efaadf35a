"""The default backend: Linux namespaces and overlayfs, without a daemon, a container engine or a third-party binary.

A pod is a process forked by the zygote into its own namespaces, with an overlay of immutable layers as its root. As
root, the pod's users are a range of otherwise unused host ids, and image layers are id-mapped; as an ordinary user the
pod has one user, its root, which is that user outside. The kernel is shared with the host: docs/pods.md describes the
strength of this boundary.
"""

import asyncio
import contextlib
import hashlib
import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from etude.pods.guest import protocol
from etude.pods.guest.client import CONNECT_S, GuestClient, Link, SocketLink, connect_unix
from etude.pods.images import trees
from etude.pods.images.layers import LayerDir
from etude.pods.images.records import Layer
from etude.pods.images.store import Store
from etude.pods.network.policy import EgressPolicy
from etude.pods.network.proxy import EgressProxy
from etude.pods.pod import Capabilities, FileInfo, PodError, PodGone, SnapshotKind, Unsupported
from etude.pods.runtime import capabilities, seccomp, zygote_protocol
from etude.pods.runtime.backend import Backend, LocalPod, PodSpec
from etude.pods.runtime.cgroups import CONTROLLERS, CgroupLayout, PodCgroup, find_layout, list_groups
from etude.pods.runtime.diff import diff_layers
from etude.pods.runtime.zygote_client import ZygoteClient

FIRST_ID = 2_000_000_000  # first host id of pods as root: above every range that systemd and /etc/subuid hand out
IDS = 65_536
GUEST_SOCKET = "agent.sock"  # this name does not change, so that pods of other versions can be adopted


class NamespaceBackend(Backend):
    """Pods of one state directory."""

    name = "namespace"

    def __init__(self, state: Path, store: Store, helper: Path | None) -> None:
        super().__init__()
        self.state, self.store = state, store
        self.root = os.geteuid() == 0
        self.layout = find_layout(f"etude-{hashlib.sha256(os.fsencode(state)).hexdigest()[:12]}")
        self.zygote = ZygoteClient(state, helper)
        self.filter = seccomp.build_filter("own")
        self.capability_mask = capabilities.mask()
        self.mapped: set[str] = set()  # layers that the current zygote has mounted id-mapped
        self.zygote.on_connect = self.mapped.clear
        self.capabilities = self._capabilities(self.layout)

    def _capabilities(self, layout: CgroupLayout) -> Capabilities:
        notes = []
        missing = [name for name in CONTROLLERS if name not in layout.controllers]
        if missing:
            notes.append(f"no limit on {', '.join(missing)}: {layout.reason or 'no such controller'}")
        if layout.unified is None:
            notes.append(f"no live snapshot: no cgroup v2 group ({layout.reason})")
        if not self.root:
            notes.append("one user in a pod (its root), because only one id is mapped without root")
        return Capabilities(
            isolation="namespace",
            limits=frozenset({*layout.controllers, "disk", "inodes"}),
            egress=frozenset({"proxy", "transparent"}),
            snapshots=frozenset({"fs", "fs-live"} if layout.unified else {"fs"}),
            users=self.root,
            notes=tuple(notes),
        )

    # ------------------------------------------------------------------------------------------- pods

    async def start(self, spec: PodSpec) -> "NamespacePod":
        if spec.storage == "disk" and (spec.limits.disk or spec.limits.inodes):
            raise Unsupported('a limit on disk or inodes needs storage="memory": there are no quotas on disk')
        pod = NamespacePod(self, spec)
        try:
            try:
                await pod.boot(spec.image.layers)
            except PodGone:  # the zygote had just died: start another, which mounts the layers again
                await pod.boot(spec.image.layers)
        except BaseException:
            await pod.end()
            raise
        return pod

    async def adopt(self, spec: PodSpec) -> "NamespacePod | None":
        pod = NamespacePod(self, spec)
        try:
            await asyncio.to_thread(pod.group.thaw)  # its service may have died during a live snapshot
            await pod.connect(timeout=1.0, own=not spec.attached)
        except (OSError, PodError):
            return None
        return pod

    async def reap(self, known: Iterable[str]) -> list[str]:
        reply, _ = await self._request(zygote_protocol.STATUS)
        running = {name.decode() for name in reply.get(zygote_protocol.ID, [])}
        leftovers = {entry.name for entry in (self.state / "pods").iterdir()} | list_groups(self.layout) | running
        leftovers -= set(known)  # last: a pod created meanwhile is not in the lists above
        for name in sorted(leftovers):
            await self._request(zygote_protocol.KILL, (zygote_protocol.ID, name.encode()))
            group = PodCgroup(self.layout, name)
            if not group.remove():
                group.kill()  # its zygote died before it could
                await self.remove_group(group)
            self.delete(self.state / "pods" / name)
        return sorted(leftovers)

    async def memory_layers(self) -> set[str]:
        reply, _ = await self._request(zygote_protocol.STATUS)
        return {name.decode() for name in reply.get(zygote_protocol.LAYER, [])}

    async def close(self) -> None:
        await self.drain_background()
        self.zygote.close()

    async def shutdown(self) -> None:
        with contextlib.suppress(PodError):
            await self.zygote.request(zygote_protocol.STOP)
        for name in list_groups(self.layout):
            await self.remove_group(PodCgroup(self.layout, name))
        await self.close()

    async def _request(self, op: int, *fields: tuple[int, protocol.Value]) -> tuple[protocol.Fields, list[int]]:
        """Send an idempotent request; repeat it to a new zygote if the current one just died."""
        try:
            return await self.zygote.request(op, *fields)
        except PodGone:
            return await self.zygote.request(op, *fields)

    # ------------------------------------------------------------------------------------------- layers

    async def lower_paths(self, found: Iterable[Layer]) -> list[str]:
        """Return the layers' paths in the zygote's mount namespace; top first, as overlayfs expects."""
        paths = []
        for layer in found:
            if layer.memory:
                paths.append(f"{zygote_protocol.MEMORY}/{layer.id}/u")
            elif layer.shift == (FIRST_ID if self.root else 0):
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
        await self._request(
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
        await self._request(zygote_protocol.DROP, (zygote_protocol.LAYER, layer.id.encode()))

    # ------------------------------------------------------------------------------------------- cleanup

    def delete(self, directory: Path) -> None:
        """Move a directory to the trash at once and remove it in the background."""
        trash = self.state / "trash" / f"{directory.name}-{os.urandom(4).hex()}"
        trash.parent.mkdir(exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            directory.rename(trash)
            self.run_in_background(asyncio.to_thread(trees.remove_tree, trash))


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
        self.policy = EgressPolicy.from_egress(spec.egress)
        environment = {**spec.image.env, **self.policy.environment()}
        super().__init__(spec.id, environment, spec.image.workdir, spec.image.user)
        self.backend, self.spec = backend, spec
        self.image, self.limits, self.egress = spec.image.name, spec.limits, spec.egress
        self.directory = backend.state / "pods" / spec.id
        self.layers: tuple[Layer, ...] = spec.image.layers
        self.group = PodCgroup(backend.layout, spec.id)
        self.proxy: EgressProxy | None = None
        self.closed = False

    # ------------------------------------------------------------------------------------------- starting

    async def boot(self, found: tuple[Layer, ...]) -> None:
        """Create the pod's process over these layers and connect to its guest init."""
        self.layers = found
        lower = await self.backend.lower_paths(found)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.group.create(self.limits)
        listener = self._listen()
        try:
            await self.backend.zygote.request(
                zygote_protocol.CREATE, *self._create_fields(lower), descriptors=[listener.fileno()]
            )
        finally:
            listener.close()
        await self.connect()
        self.record("created", {"image": self.image, "layers": len(found)})

    def _listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        directory = os.open(self.directory, os.O_PATH | os.O_CLOEXEC)
        path = f"/proc/self/fd/{directory}/{GUEST_SOCKET}"
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            listener.bind(path)
            listener.listen(64)
        finally:
            os.close(directory)
        return listener

    def _create_fields(self, lower: list[str]) -> list[tuple[int, protocol.Value]]:
        backend, spec = self.backend, self.spec
        fields: list[tuple[int, protocol.Value]] = [
            (zygote_protocol.ID, spec.id.encode()),
            *((zygote_protocol.LOWER, os.fsencode(path)) for path in lower),
            *backend.id_maps(),
            (zygote_protocol.OWNER, FIRST_ID if backend.root else 0),
            *((zygote_protocol.GROUP, os.fsencode(group)) for group in [self.group.unified] if group),
            *(
                (zygote_protocol.CGROUP, os.fsencode(file))
                for file in self.group.procs
                if file.parent != self.group.unified
            ),
            (zygote_protocol.HOSTNAME, b"pod"),
            (zygote_protocol.WORKDIR, os.fsencode(spec.image.workdir)),
            (zygote_protocol.CAPS, backend.capability_mask),
            (zygote_protocol.FILTER, backend.filter),
            *((zygote_protocol.ADDRESS, address.encode()) for address in self.policy.addresses()),
            *(
                (zygote_protocol.LISTEN, f"{one.kind} {one.address} {one.port}".encode())
                for one in self.policy.listen_specs()
            ),
        ]
        fields += [(zygote_protocol.BIND, os.fsencode(f"{path}\0{path}")) for path in spec.image.binds]
        if resolver := self.policy.resolv_conf():
            file = self.directory / "resolv.conf"
            file.write_text(resolver)
            file.chmod(0o644)
            fields.append((zygote_protocol.BIND, os.fsencode(f"{backend.state_relative(file)}\0/etc/resolv.conf")))
        if spec.storage == "disk":
            fields.append((zygote_protocol.UPPER, os.fsencode(backend.state_relative(self._make_upper()))))
        else:
            fields += [(zygote_protocol.SIZE, spec.limits.disk)] if spec.limits.disk else []
            fields += [(zygote_protocol.INODES, int(spec.limits.inodes))] if spec.limits.inodes else []
        if "memory" in backend.layout.controllers:
            fields.append((zygote_protocol.FLAGS, zygote_protocol.ADJUST_OOM_SCORE))
        if spec.limits.memory:  # files and shared memory together must leave memory for the guest init
            fields.append((zygote_protocol.SHM, min(64 << 20, spec.limits.memory // 4)))
        return fields

    def _make_upper(self) -> Path:
        upper = self.directory / "writes"
        for path in (upper, upper / "u", upper / "w"):
            path.mkdir(mode=0o755, exist_ok=True)
            if self.backend.root:
                os.chown(path, FIRST_ID, FIRST_ID)
        return upper

    async def connect(self, timeout: float = CONNECT_S, own: bool = True) -> None:
        """Connect to the guest init; with `own`, claim the pod, as its owner if it is attached."""
        self.connection = GuestClient(await self.open_link(), self.id)
        await self.connection.wait_until_ready(timeout)
        await self._start_proxy(list(self.connection.link.descriptors))
        if own:
            await self.claim(self.spec)

    async def open_link(self) -> Link:
        return SocketLink(connect_unix(str(self.directory), GUEST_SOCKET))

    async def _start_proxy(self, descriptors: list[int]) -> None:
        listen_specs = self.policy.listen_specs()
        if not listen_specs:
            return
        if self.proxy is not None:
            await self.proxy.close()
        self.proxy = EgressProxy(self.policy, lambda facts: self.record("egress", facts))
        await self.proxy.start(list(zip(listen_specs, (socket.socket(fileno=fd) for fd in descriptors), strict=True)))

    def release(self) -> None:
        super().release()
        if self.proxy is not None:
            proxy, self.proxy = self.proxy, None
            self.backend.run_in_background(proxy.close())

    # ------------------------------------------------------------------------------------------- snapshots, end

    async def diff(self) -> Mapping[str, FileInfo | None]:
        await self.ready()
        with contextlib.ExitStack() as opened:
            written = LayerDir(f"/proc/self/fd/{opened.enter_context(await self._open_writes())}/.")
            found = [await self.backend.open_layer(layer, opened) for layer in reversed(self.layers)]
            own = self.spec.own_layers
            return await asyncio.to_thread(diff_layers, [written, *found[:own]], found[own:])

    async def _open_writes(self) -> AbstractContextManager[int]:
        """Open the directory that holds the pod's writes."""
        if self.spec.storage == "disk":
            path = self.directory / "writes" / "u"
            return owned_descriptor(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        return owned_descriptor(await self.backend.fetch(zygote_protocol.ID, self.id))

    async def seal(self, kind: SnapshotKind | None) -> tuple[tuple[Layer, ...], SnapshotKind]:
        kind = await self.choose_snapshot_kind(kind)
        layer = await (self._seal_stopped() if kind == "fs" else self._seal_live())
        self.record("snapshot", {"kind": kind, "layer": layer.id})
        return (*self.layers, layer), kind

    async def restart(self, layers: tuple[Layer, ...]) -> None:
        await self.boot(layers)

    async def _seal_stopped(self) -> Layer:
        """Stop the pod and turn its writes into a layer by moving them: as fast for a gigabyte as for nothing."""
        await self._stop()
        shift = FIRST_ID if self.backend.root else 0
        if self.spec.storage == "disk":
            await self.backend.zygote.request(zygote_protocol.KILL, (zygote_protocol.ID, self.id.encode()))
            layer = self.backend.store.adopt_layer(self.directory / "writes" / "u", shift)
            self.backend.delete(self.directory / "writes")
        else:
            layer = Layer(f"{self.backend.owner}.{os.urandom(12).hex()}", shift, memory=True)
            await self.backend.zygote.request(
                zygote_protocol.SEAL, (zygote_protocol.ID, self.id.encode()), (zygote_protocol.LAYER, layer.id.encode())
            )
        # A new group: the old one is charged for the sealed files, which all pods over this layer now share.
        await self.backend.remove_group(self.group)
        return layer

    async def _seal_live(self) -> Layer:
        """Copy the pod's writes into a layer while its processes are frozen."""
        with await self._open_writes() as directory:
            async with self.group.frozen():
                return await self.backend.copy_to_store(directory, FIRST_ID if self.backend.root else 0)

    async def _stop(self) -> None:
        if self.proxy is not None:
            await self.proxy.close()
            self.proxy = None
        if self.connection is not None:
            client, self.connection = self.connection, None
            client.close()

    async def end(self) -> None:
        if self.closed:
            return
        self.closed = True
        await self._stop()
        with contextlib.suppress(PodError):  # without a zygote there is no pod either
            await self.backend.zygote.request(zygote_protocol.KILL, (zygote_protocol.ID, self.id.encode()))
        self.record("closed", {})
        self.backend.delete(self.directory)
        await self.backend.remove_group(self.group)
