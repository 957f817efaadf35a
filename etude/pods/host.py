"""One machine that runs pods: creates, snapshots, forks and closes them, and collects garbage.

A host owns a state directory (pods, layers, snapshots, the zygote's socket), which several processes may share. Every
pod's record is on disk before the pod exists, so that after any crash the next host to open the directory finds the
pods that still run and removes what is left of the others.
"""

import asyncio
import contextlib
import math
import os
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack

from etude.errors import BusyError, InputError
from etude.pods.host_system import host_system
from etude.pods.images.builder import StoreBuilder
from etude.pods.images.records import Image, Layer, SnapshotRecord
from etude.pods.images.sources import host_image
from etude.pods.images.store import Store
from etude.pods.images.trees import remove_tree
from etude.pods.memory_layers import MemoryLayers
from etude.pods.pod import Egress, Limits, Pod, PodError, PodGone, Snapshot, SnapshotKind, Unsupported
from etude.pods.registry import PodRegistry
from etude.pods.runtime.backend import Backend, LocalPod, PodSpec, Storage
from etude.pods.scheduling.admission import Admission, AdmissionQueue, Reservation, ResourceRequest, Thresholds
from etude.pods.scheduling.pools import PodKind, Prepare, WarmPool
from etude.pods.scheduling.pressure import read_pressure
from etude.pods.scheduling.router import HostReport, capability_labels

GIB = 1 << 30
DEFAULT_LIMITS = Limits(memory=2 * GIB, pids=512, disk=GIB, inodes=200_000)
BYTES_PER_INODE = 16 << 10  # of files on disk, by default
MAX_TTL_S = 10 * 365 * 86400.0
FLATTEN_AT = 48  # layers; overlayfs slows down beyond 64
MEASURE_INTERVAL_S = 2.0  # between memory measurements, from which admission learns what pods of an image use
HOST_IMAGE_MAX_AGE_S = 2.0  # between checks of /etc for changes of the host image; each costs half a millisecond
EXPIRED_S = 0.001  # `PodSpec.remaining` of a pod whose ttl has passed


PodT = TypeVar("PodT", bound=Pod)


class PodOptions(TypedDict, total=False):
    """Options of a pod that a warm pod must share with the request that claims it."""

    limits: Limits | None
    egress: Egress | None
    storage: Storage  # "disk" is for pods that write more than fits in memory
    env: Mapping[str, str] | None  # added to the image's variables


class Host:
    """Runs the pods of one state directory on one backend."""

    def __init__(self, state: Path, store: Store, backend: Backend, thresholds: Thresholds | None = None) -> None:
        self.state, self.store, self.backend = state, store, backend
        self.name = f"{os.uname().nodename}-{secrets.token_hex(4)}"
        self.admission = Admission(lambda: read_pressure(state), thresholds)
        self.queue = AdmissionQueue(self.admission)
        self.pods: dict[str, LocalPod] = {}
        self.snapshot_locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by pod id
        self.foreign_pods: set[str] = set()  # ids of pods owned by another live process
        self.reservations: dict[str, Reservation] = {}
        self.pools: dict[PodKind, WarmPool[LocalPod]] = {}
        self.tasks: set[asyncio.Task[Any]] = set()  # finite; awaited by `close`
        self.timers: set[asyncio.Task[Any]] = set()  # cancelled by `close`
        self.draining = False
        self.registry = PodRegistry(state)
        self.layers = MemoryLayers(backend, store, self.registry)
        self.builder = StoreBuilder(store, self)
        self.owner = backend.owner = self.registry.owner
        self.host_image: Image | None = None
        self.host_image_checked = -HOST_IMAGE_MAX_AGE_S

    async def open(self) -> list[str]:
        """Register in the state directory and remove what dead processes left there. Return the ids of removed pods."""
        self.registry.open()
        reaped = await self.reap()
        self._spawn(self._measure_loop(), self.timers)
        return reaped

    async def close(self) -> None:
        """Close this process's attached pods and disconnect from the others."""
        for task in self.timers:
            task.cancel()
        await asyncio.gather(*(pool.close() for pool in self.pools.values()))
        attached = [pod for pod in self.pods.values() if pod.spec.attached and pod.id not in self.foreign_pods]
        await asyncio.gather(*(self.close_pod(pod) for pod in attached), return_exceptions=True)
        if self.tasks:  # such as pods that are being closed: otherwise they would stay half removed
            await asyncio.wait(self.tasks)
        for pod in self.pods.values():
            pod.release()
        await self.layers.close()
        await self.backend.close()
        self.registry.close()

    # ------------------------------------------------------------------------------------------- creating pods

    def resolve(self, source: str | Image | Snapshot) -> Image:
        """Return the image to start from: by name or id, of a snapshot, or "host", the machine's own toolchain."""
        if isinstance(source, Image):
            return source
        if isinstance(source, Snapshot):
            return replace(self.store.snapshot(source.id).image, name=source.image)
        if source == "host":
            if time.monotonic() - self.host_image_checked > HOST_IMAGE_MAX_AGE_S:
                self.host_image, self.host_image_checked = host_image(self.store), time.monotonic()
            assert self.host_image is not None
            return self.host_image
        with contextlib.suppress(InputError):
            return self.store.image(source)
        with contextlib.suppress(InputError):
            saved = self.store.snapshot(source)
            return replace(saved.image, name=saved.snapshot.image)
        known = ", ".join(sorted({"host", *(image.name or image.id for image in self.store.images())}))
        raise InputError(f"there is no image or snapshot {source!r} on this host; there are: {known}")

    async def create(
        self,
        image: str | Image | Snapshot = "host",
        *,
        ttl: float | None = None,
        attached: bool = True,
        lease: float = 0.0,
        timeout: float | None = None,
        prepare: Prepare | None = None,
        **options: Unpack[PodOptions],
    ) -> LocalPod:
        """Create a pod once admission allows it.

        A pod with a `lease` ends after that many seconds unless the lease is renewed (protocol.OWN) before. With
        `prepare`, its result is the pod's `prepared`; where a warm pool has such a pod, it ran in advance.
        """
        if ttl is not None and not 0 < ttl <= MAX_TTL_S:
            raise InputError(f"a pod's time to live is {ttl!r}; expected seconds, more than 0 and at most ten years")
        if not 0 <= lease < math.inf:
            raise InputError(f"a pod's lease is {lease!r}; expected seconds, or 0 for none")
        spec = replace(self._spec(image, **options), ttl=ttl, attached=attached, lease=lease)
        work = asyncio.create_task(self._create(spec, timeout, prepare))
        try:
            return await work
        except asyncio.CancelledError:  # the pod may just have been created; without a caller it must be closed
            work.add_done_callback(lambda done: None if _failed(done) else self._spawn(self.close_pod(done.result())))
            raise

    def _spec(self, source: str | Image | Snapshot, **options: Unpack[PodOptions]) -> PodSpec:
        image, env, storage = self.resolve(source), options.get("env"), options.get("storage", "memory")
        can, requested = self.backend.capabilities, options.get("limits") or Limits()
        egress = options.get("egress") or Egress()
        for name in requested.specified():
            can.require(f"a limit on {name}", name in can.limits, "omit it or use another backend")
        if egress.allow:
            mode = "transparent" if egress.transparent else "proxy"
            can.require(f"{mode} egress", mode in can.egress)
        on_disk = storage == "disk" or can.isolation != "namespace"
        if on_disk and requested.inodes and not requested.disk:
            raise InputError("limits: inodes without disk; with files on disk give both, or only disk")
        possible = can.limits - ({"disk", "inodes"} if on_disk else set())
        defaults = Limits(**{k: v for k, v in DEFAULT_LIMITS.specified().items() if k in possible})  # type: ignore[arg-type]
        limits = requested.with_defaults(defaults)
        if on_disk and limits.disk and not limits.inodes:
            limits = replace(limits, inodes=max(int(DEFAULT_LIMITS.inodes or 0), limits.disk // BYTES_PER_INODE))
        if not on_disk and limits.memory and limits.disk and limits.disk > limits.memory:
            if requested.disk:
                raise InputError(
                    f"limits: disk {requested.disk:,} is over memory {limits.memory:,}, and files are in memory; "
                    'raise memory or use storage="disk"'
                )
            limits = replace(limits, disk=limits.memory // 2)
        image = image.with_(env={**image.env, **env}) if env else image
        id, now = secrets.token_hex(6), time.time()
        return PodSpec(id, image, limits, egress, storage, owner=self.owner, created=now)

    async def _create(self, spec: PodSpec, timeout: float | None, prepare: Prepare | None = None) -> LocalPod:
        if self.draining:
            raise PodError(f"host {self.name} is draining and takes no new pods")
        pool = self.pools.get(PodKind.of(spec, prepare))
        pod = pool.take() if pool is not None else None
        try:
            if pod is None:
                return await self._create_cold(spec, timeout, prepare)
            spec = replace(spec, id=pod.id)
            self.registry.write(spec)
            await pod.claim(spec)
            return pod
        except BaseException:
            if pod is not None:
                await self.close_pod(pod)
            raise
        finally:
            if pool is not None:
                asyncio.get_running_loop().call_soon(pool.refill)  # once the caller has its pod

    async def _create_cold(
        self, spec: PodSpec, timeout: float | None = None, prepare: Prepare | None = None, background: bool = False
    ) -> LocalPod:
        request = _resource_request(spec)
        async with self.queue.acquire(request, timeout=timeout, background=background) as reservation:
            pod = await self._start(spec)
            self.reservations[pod.id] = reservation
        if prepare is not None:
            try:
                pod.prepared = await prepare(pod)
            except BaseException:
                self._spawn(self.close_pod(pod))
                raise
        return pod

    async def _start(self, spec: PodSpec) -> LocalPod:
        self.registry.write(spec)
        self.layers.ref(spec.image.layers, 1)
        try:
            pod = await self.backend.start(spec)
        except BaseException:
            self.layers.ref(spec.image.layers, -1)
            self.registry.remove(spec.id)
            raise
        self._adopt(pod)
        return pod

    def _adopt(self, pod: LocalPod) -> None:
        pod.host = self
        pod.default_command = (*pod.spec.image.entrypoint, *pod.spec.image.command)
        self.pods[pod.id] = pod
        pod.guest.on_disconnect = lambda: self._spawn(self._on_pod_lost(pod))

    async def _on_pod_lost(self, pod: LocalPod) -> None:
        """Clean up a pod that ended by itself: ttl, out of memory, or death of the zygote."""
        if pod.id in self.foreign_pods:  # it ended, or its owner took a snapshot; the owner cleans up
            self._forget_pod(pod)
            self.layers.ref(pod.spec.image.layers, -1)
            pod.release()
        elif pod.id in self.pods:
            reason = pod.over_limit()
            pod.record("died", {"reason": reason} if reason else {})
            await self.close_pod(pod)

    # ------------------------------------------------------------------------------------------- warm pools

    async def pool(
        self,
        image: str | Image | Snapshot,
        size: int,
        *,
        prepare: Prepare | None = None,
        **options: Unpack[PodOptions],
    ) -> None:
        """Keep `size` pods of this kind started in advance, each after `await prepare(pod)`; 0 closes them.

        `create` with the same image, options and `prepare` claims one of them.
        """
        first = self._spec(image, **options)
        kind = PodKind.of(first, prepare)

        def start() -> Coroutine[Any, Any, LocalPod]:
            return self._create_cold(self._spec(image, **options), prepare=prepare, background=True)

        pool = self.pools.setdefault(kind, WarmPool(start, first.image))
        if size == 0:
            del self.pools[kind]
        await pool.resize(size)

    # ------------------------------------------------------------------------------------------- snapshots and forks

    async def snapshot_pod(self, pod: LocalPod, kind: SnapshotKind | None) -> Snapshot:
        sealed, kind = await self._seal_and_restart(pod, kind)
        try:
            await pod.ready()
            layers = await self._limit_depth(sealed, sealed[:1])
            id = f"snap-{secrets.token_hex(8)}"
            durable = not any(layer.memory for layer in layers)
            parent = pod.spec.image.id if pod.spec.image.id.startswith("snap-") else None
            snapshot = Snapshot(id, pod.image, parent, kind, durable)
            self.store.save_snapshot(snapshot, pod.spec.image.with_(layers=layers))
            self.layers.ref(layers, 1)
            return snapshot
        finally:
            self.layers.ref(sealed, -1)

    async def _seal_and_restart(
        self, pod: LocalPod, kind: SnapshotKind | None, after: asyncio.Event | None = None
    ) -> tuple[tuple[Layer, ...], SnapshotKind]:
        """Seal a pod and restart it `after` an event. Return its layers, referenced for the caller, and the kind used.

        Not cancelled once started, because the pod does not run in between; requests to it wait meanwhile.
        """
        lock = self.snapshot_locks[pod.id]
        await lock.acquire()

        async def work() -> tuple[tuple[Layer, ...], SnapshotKind]:
            try:
                sealed, used_kind = await self._seal(pod, kind)
                self.layers.ref(sealed, 1)
            except BaseException:
                lock.release()
                raise
            if used_kind == "fs":
                pod.restarting = asyncio.create_task(self._restart_sealed(pod, sealed, after))
                pod.restarting.add_done_callback(lambda task: self._on_restarted(pod, task))
                pod.restarting.add_done_callback(lambda _: lock.release())
            else:
                lock.release()
            return sealed, used_kind

        working = asyncio.create_task(work())
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            working.add_done_callback(lambda done: None if _failed(done) else self.layers.ref(done.result()[0], -1))
            raise

    async def _seal(self, pod: LocalPod, kind: SnapshotKind | None) -> tuple[tuple[Layer, ...], SnapshotKind]:
        if kind == "full":
            raise Unsupported(
                f"a snapshot of memory is not possible on the {self.backend.name} backend; "
                "fs and fs-live keep the file system"
            )
        if pod.id not in self.pods:
            raise PodGone(f"pod {pod.id} is closed")
        if pod.id in self.foreign_pods:
            if kind == "fs":
                raise BusyError(
                    f"pod {pod.id} is run by another process ({pod.spec.owner}), which a snapshot of kind fs would cut "
                    "off; use fs-live"
                )
            kind = "fs-live"
        return await pod.seal(kind)

    async def _restart_sealed(self, pod: LocalPod, sealed: tuple[Layer, ...], after: asyncio.Event | None) -> None:
        """Restart a sealed pod on top of its sealed layers."""
        if after is not None:
            await after.wait()
        if self.pods.get(pod.id) is not pod:
            raise PodGone(f"pod {pod.id} was closed")
        self.layers.ref(sealed, 1)  # the caller has released its reference
        try:
            # Only its own layers are merged: `diff` compares them with those it was created from.
            layers = await self._limit_depth(sealed, pod.spec.base_layers)
            self.layers.ref(layers, 1)
        finally:
            self.layers.ref(sealed, -1)
        self.layers.ref(pod.spec.image.layers, -1)
        pod.spec = pod.spec.with_sealed(layers)
        self.registry.write(pod.spec)
        await pod.restart()
        pod.guest.on_disconnect = lambda: self._spawn(self._on_pod_lost(pod))

    def _on_restarted(self, pod: LocalPod, task: "asyncio.Task[None]") -> None:
        if not _failed(task):
            pod.restarting = None
        elif self.pods.get(pod.id) is pod:  # waiting requests get the exception
            self._spawn(self._on_pod_lost(pod))

    async def _limit_depth(self, layers: tuple[Layer, ...], base: tuple[Layer, ...]) -> tuple[Layer, ...]:
        """Merge the layers above `base` into one if there are too many for the kernel."""
        if len(layers) <= max(FLATTEN_AT, len(base) + 1):
            return layers
        on_disk = [await self.backend.persist(layer) if layer.memory else layer for layer in layers]
        flat = await asyncio.to_thread(self.store.flatten, on_disk[len(base) :], on_disk[: len(base)])
        return *on_disk[: len(base)], flat

    async def fork_pod(self, pod: LocalPod, n: int, kind: SnapshotKind | None) -> Sequence[LocalPod]:
        max_pods = self.admission.thresholds.max_pods
        if not 1 <= n <= max_pods:
            raise InputError(f"fork: {n} children; expected 1 to {max_pods}, the max_pods of this host")
        ready = asyncio.Event()  # the children start first: the caller waits for them, not for the parent
        sealed, kind = await self._seal_and_restart(pod, kind, ready)
        try:
            layers = await self._limit_depth(sealed, sealed[:1])
            child = replace(pod.spec, image=pod.spec.image.with_(layers=layers), own_layers=0, owner=self.owner)
            specs = [replace(child, id=secrets.token_hex(6), created=time.time()) for _ in range(n)]
            return await all_or_none(map(self._create_cold, specs))
        finally:
            self.layers.ref(sealed, -1)  # every child has its own reference
            ready.set()

    async def close_pod(self, pod: LocalPod) -> None:
        if self.pods.get(pod.id) is not pod:
            return
        self._forget_pod(pod)
        try:
            async with self.snapshot_locks[pod.id]:  # a snapshot in progress must not restart it
                await pod.end()
        finally:
            self.snapshot_locks.pop(pod.id, None)
            self.layers.ref(pod.spec.image.layers, -1)

    def _forget_pod(self, pod: LocalPod) -> None:
        """Remove a pod from this process's tables and release its reservation."""
        del self.pods[pod.id]
        for pool in self.pools.values():
            if pod in pool.ready:
                pool.ready.remove(pod)
        self.foreign_pods.discard(pod.id)
        if reservation := self.reservations.pop(pod.id, None):
            reservation.release()

    async def remove_snapshot(self, id: str) -> None:
        """Remove a snapshot and release its layers."""
        saved = self.store.snapshot(id)
        self.store.remove_snapshot(id)
        self.layers.ref(saved.image.layers, -1)

    async def persist(self, id: str) -> Snapshot:
        """Copy a snapshot's in-memory layers to disk, so that it outlives the zygote."""
        saved = self.store.snapshot(id)
        before = saved.image.layers
        layers = tuple([await self.backend.persist(layer) if layer.memory else layer for layer in before])
        snapshot = replace(saved.snapshot, durable=True)
        image = replace(saved.image, layers=layers)
        self.store.save_snapshot(snapshot, image, owner=saved.owner, lease=saved.lease)
        self.layers.ref(before, -1)
        return snapshot

    async def portable(self, image: Image) -> Image:
        """Return an image as other hosts can have it: its layers have the digests of their contents as ids."""
        found = []
        for layer in image.layers:
            known = self.store.known_portable(layer)
            if known is None and layer.memory:
                copy = await self.backend.persist(layer)
                known = await asyncio.to_thread(self.store.portable, layer, copy)
                await asyncio.to_thread(self.store.discard_layers, [copy])
            found.append(known or await asyncio.to_thread(self.store.portable, layer))
        return image.with_(layers=tuple(found))

    async def portable_snapshot(self, id: str) -> SnapshotRecord:
        """Return the record of a snapshot as other hosts can have it."""
        saved = self.store.snapshot(id)
        image = replace(await self.portable(saved.image), id=saved.image.id)
        return replace(saved, snapshot=replace(saved.snapshot, durable=True), image=image)

    async def remove_expired_snapshots(self) -> None:
        """Remove the snapshots whose lease has ended: the runs that took them are over."""
        for id in await asyncio.to_thread(self.store.expired_snapshots):
            with contextlib.suppress(InputError):
                await self.remove_snapshot(id)

    async def collect_garbage(self, grace: float = 60.0) -> dict[str, list[str]]:
        """Remove pods without an owner and layers without a reference. Return the ids of both."""
        pods = await self.reap()
        in_use = [layer for spec in self.registry.records() for layer in spec.image.layers]
        layers = await asyncio.to_thread(self.store.collect_garbage, in_use, grace)
        for id in layers:
            await self.backend.drop(Layer(id))
        return {"pods": pods, "layers": layers}

    # ------------------------------------------------------------------------------------------- recovery

    async def reap(self) -> list[str]:
        """Remove what is left of pods with a dead owner and of detached pods that do not answer. Return their ids."""
        for owner in (self.state / "owners").glob("*.lock"):
            self.registry.alive(owner.stem)  # removes the lock files of dead owners
        answering = set()
        for spec in self.registry.records():
            if not spec.attached and spec.id not in self.pods and not self._expired(spec):
                if self.registry.alive(spec.owner):
                    answering.add(spec.id)
                elif (pod := await self.backend.adopt(spec)) is not None:
                    pod.release()
                    answering.add(spec.id)
        removed = await self.backend.reap(self._live_pods(answering))
        for rest in (self.state / "trash").iterdir():  # of a process that was killed while it removed a pod
            self._spawn(asyncio.to_thread(remove_tree, rest))
        await self.layers.drop_of_dead_owners()
        return removed

    def _live_pods(self, answering: set[str]) -> Iterator[str]:
        """Yield the pods to keep. Lazy: must be read after the backend lists its pods, or new ones would be missing."""
        for spec in self.registry.records():
            if spec.id in self.pods or spec.id in answering or self.registry.alive(spec.owner):
                yield spec.id
        starting = time.time() - 30  # a directory without a record is being created, or its creator died
        for directory in (self.state / "pods").iterdir() if self.registry.other_owners() else ():
            with contextlib.suppress(FileNotFoundError):
                if not (directory / "pod.json").exists() and directory.stat().st_mtime > starting:
                    yield directory.name

    def _expired(self, spec: PodSpec) -> bool:
        left = spec.remaining()
        return left is not None and left <= EXPIRED_S

    async def find(self, id: str) -> LocalPod:
        """Return a running pod by its id or a unique prefix of it, whichever process created it."""
        matches = [spec for spec in self.registry.records() if spec.id.startswith(id)]
        if len(matches) != 1:
            count = "no" if not matches else f"{len(matches)}"
            raise InputError(f"there are {count} pods whose id begins with {id!r}; `etude pods ps` lists all")
        return await self.adopt(matches[0])

    async def adopt(self, spec: PodSpec) -> LocalPod:
        """Connect to a running pod that another process created; become its owner if that process is dead."""
        if spec.id in self.pods:
            return self.pods[spec.id]
        foreign = spec.owner != self.owner and self.registry.alive(spec.owner)
        spec = spec if foreign else replace(spec, owner=self.owner)
        pod = await self.backend.adopt(spec)
        if pod is None:
            raise PodError(f"pod {spec.id} does not answer; `etude pods gc` removes what is left of it")
        if spec.id in self.pods:  # two concurrent calls
            pod.release()
            return self.pods[spec.id]
        if foreign:
            self.foreign_pods.add(spec.id)
        else:
            self.registry.write(spec)
        self._adopt(pod)
        self.reservations[pod.id] = self.admission.adopt(_resource_request(spec))
        self.layers.ref(spec.image.layers, 1)
        return pod

    # ------------------------------------------------------------------------------------------- background

    def _spawn(self, work: Any, among: set[asyncio.Task[Any]] | None = None) -> None:
        tasks = self.tasks if among is None else among
        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def _measure_loop(self) -> None:
        while True:
            await asyncio.sleep(MEASURE_INTERVAL_S)
            for pod in list(self.pods.values()):
                if self._expired(pod.spec) and pod.id not in self.foreign_pods:
                    pod.record("died", {"reason": "its ttl has passed"})  # a frozen guest init cannot end itself
                    self._spawn(self.close_pod(pod))
            for id in self.reservations.keys() & self.pods.keys():
                if memory := self.pods[id].memory_used():
                    self.reservations[id].observe_memory(memory)

    def report(self) -> HostReport:
        """Return this host's state for the router."""
        pressure, warm = read_pressure(self.state), Counter[str]()
        for pool in self.pools.values():  # a placement request names its image by id or by name
            assert pool.image is not None
            warm.update(dict.fromkeys({pool.image.id, pool.image.name}, len(pool.ready)))
        return HostReport(
            host=self.name,
            pressure=pressure,
            pods=len(self.admission),
            max_pods=self.admission.thresholds.max_pods,
            memory_free=self.admission.free_memory(),
            capabilities=capability_labels(self.backend.name, self.backend.capabilities, host_system()),
            system=host_system(),
            lacks=tuple(self.backend.capabilities.lacks(isolation=True)),
            images=frozenset({"host", *(name for image in self.store.images() for name in (image.id, image.name))}),
            snapshots=frozenset(saved.snapshot.id for saved in self.store.snapshots()),
            warm=dict(warm),  # asdict would count the items of a Counter
            cores=pressure.cores,
            starting=sum(reservation.creating for reservation in self.reservations.values()),
            draining=self.draining,
            time=time.time(),
        )


async def all_or_none(making: Iterable[Coroutine[Any, Any, PodT]]) -> list[PodT]:
    """Create pods concurrently; if one fails, close the others and raise its error."""
    tasks = [asyncio.create_task(each) for each in making]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        for done in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(done, Pod):
                await done.close()
        raise


def _resource_request(spec: PodSpec) -> ResourceRequest:
    disk = 0 if spec.storage == "memory" else int(spec.limits.disk or 0)
    return ResourceRequest(spec.image.id, int(spec.limits.memory or DEFAULT_LIMITS.memory or GIB), disk)


def _failed(task: "asyncio.Task[Any]") -> bool:
    return task.cancelled() or task.exception() is not None
