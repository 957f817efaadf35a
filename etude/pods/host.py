"""One machine that runs pods: who may start now, what was started, what is left, what can be thrown away.

A host owns a state directory (pods, layers, snapshots, the keeper's socket), which several processes may share. Every
pod has a record on disk before it exists, so that whatever is killed, the next host to open the directory finds the
pods that still run and removes what is left of the others.
"""

import asyncio
import contextlib
import math
import os
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from etude.errors import BusyError, InputError
from etude.pods.images.records import Image, Layer
from etude.pods.images.sources import host_image
from etude.pods.images.store import Store
from etude.pods.images.trees import remove_tree
from etude.pods.pod import Egress, Limits, Pod, PodError, PodGone, Snapshot, SnapshotKind, Unsupported
from etude.pods.registry import Registry
from etude.pods.runtime.backend import Backend, LocalPod, PodSpec, Storage
from etude.pods.scheduling.admission import Admission, FairQueue, Reservation, ResourceRequest, Thresholds
from etude.pods.scheduling.pools import WarmPool, WarmPoolKey, warm_pool_key
from etude.pods.scheduling.pressure import read_pressure
from etude.pods.scheduling.router import HostReport, capability_labels

GIB = 1 << 30
DEFAULTS = Limits(memory=2 * GIB, pids=512, disk=GIB, inodes=200_000)
LONGEST_S = 10 * 365 * 86400.0
FLATTEN_AT = 48  # layers; overlayfs slows down beyond 64
WATCH_S = 2.0  # how often pods are measured, so that admission learns what an image really takes
HOST_IMAGE_S = 2.0  # how long the machine's own /etc is taken to be as it was; looking costs half a millisecond
EXPIRED_S = 0.001  # what `PodSpec.remaining` says when nothing is left
SWEEP_S = 0.5  # between looking for layers in memory that nobody needs any more


class Host:
    """The pods of one state directory on one backend."""

    def __init__(self, state: Path, store: Store, backend: Backend, thresholds: Thresholds | None = None) -> None:
        self.state, self.store, self.backend = state, store, backend
        self.name = f"{os.uname().nodename}-{secrets.token_hex(4)}"
        self.admission = Admission(lambda: read_pressure(state), thresholds)
        self.queue = FairQueue(self.admission)
        self.pods: dict[str, LocalPod] = {}
        self.turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # one snapshot of a pod at a time
        self.guests: set[str] = set()  # of the pods, those that another living process runs
        self.seats: dict[str, Reservation] = {}
        self.keys: dict[str, asyncio.Task[LocalPod]] = {}
        self.pools: dict[WarmPoolKey, WarmPool] = {}
        self.uses: Counter[str] = Counter()  # of layers in memory, by our pods and snapshots
        self.idle_layers: set[str] = set()
        self.tasks: set[asyncio.Task[Any]] = set()  # that come to an end, and are waited for
        self.timers: set[asyncio.Task[Any]] = set()  # that are cancelled
        self.draining = False
        self.registry = Registry(state)
        self.owner = backend.owner = self.registry.owner
        self.host_image: Image | None = None
        self.host_image_seen = -HOST_IMAGE_S

    async def open(self) -> list[str]:
        """Take our place in the state directory; remove what dead services left there. The names of the removed."""
        self.registry.open()
        reaped = await self.reap()
        self._later(self._watch(), self.timers)
        return reaped

    async def close(self) -> None:
        """End our attached pods and let go of the others."""
        for task in self.timers:
            task.cancel()
        for pool in self.pools.values():
            if pool.filling:
                pool.filling.cancel()
        attached = [pod for pod in self.pods.values() if pod.spec.attached and pod.id not in self.guests]
        await asyncio.gather(*(self.close_pod(pod) for pod in attached), return_exceptions=True)
        if self.tasks:  # pods that are being ended already, for instance: half removed they would be left
            await asyncio.wait(self.tasks)
        for pod in self.pods.values():
            pod.release()
        if self.idle_layers:
            await self._sweep()
        await self.backend.close()
        self.registry.close()

    # ------------------------------------------------------------------------------------------- making pods

    def resolve(self, source: str | Image | Snapshot) -> Image:
        """The image to start from: one by name or id, a snapshot, or "host", the machine's own toolchain."""
        if isinstance(source, Image):
            return source
        if isinstance(source, Snapshot):
            return replace(self.store.snapshot(source.id).image, name=source.image)
        if source == "host":
            if time.monotonic() - self.host_image_seen > HOST_IMAGE_S:
                self.host_image, self.host_image_seen = host_image(self.store), time.monotonic()
            assert self.host_image is not None
            return self.host_image
        with contextlib.suppress(InputError):
            return self.store.image(source)
        with contextlib.suppress(InputError):
            saved = self.store.snapshot(source)
            return replace(saved.image, name=saved.snapshot.image)
        known = ", ".join(sorted({"host", *(image.name or image.id for image in self.store.images())}))
        raise InputError(f"there is no image or snapshot {source!r} here; there are: {known}")

    async def create(
        self,
        image: str | Image | Snapshot = "host",
        *,
        limits: Limits | None = None,
        egress: Egress | None = None,
        storage: Storage = "memory",
        ttl: float | None = None,
        key: str = "",
        tenant: str = "",
        attached: bool = True,
        lease: float = 0.0,
        timeout: float | None = None,
    ) -> LocalPod:
        """A new pod when this machine can bear one; with a `key`, the pod that was made for it before, if there was.

        One with a `lease` ends after that many seconds unless they are renewed (wire.OWN) before.
        """
        if key and key in self.keys:
            return await asyncio.shield(self.keys[key])
        spec = self._spec(self.resolve(image), limits, egress, storage, ttl, key, tenant, attached)
        if not 0 <= lease < math.inf:
            raise InputError(f"a pod's lease is {lease!r}; expected seconds, or 0 for none")
        spec = replace(spec, lease=lease)
        work = asyncio.create_task(self._create(spec, timeout))
        if key:
            self.keys[key] = work
            work.add_done_callback(lambda done: self.keys.pop(key, None) if _failed(done) else None)
            return await asyncio.shield(work)
        try:
            return await work
        except asyncio.CancelledError:  # it may have been made in that very moment, and then nobody has it
            work.add_done_callback(lambda done: None if _failed(done) else self._later(self.close_pod(done.result())))
            raise

    def _spec(
        self,
        image: Image,
        limits: Limits | None,
        egress: Egress | None,
        storage: Storage,
        ttl: float | None,
        key: str,
        tenant: str,
        attached: bool,
    ) -> PodSpec:
        can, asked = self.backend.capabilities, limits or Limits()
        for name in asked.asked():
            can.require(f"a limit on {name}", name in can.limits, "leave it out or use another backend")
        if egress and egress.allow:
            way = "transparent" if egress.transparent else "proxy"
            can.require(f"egress by {way}", way in can.egress)
        if ttl is not None and not 0 < ttl <= LONGEST_S:
            raise InputError(f"a pod's time to live is {ttl!r}; expected seconds, more than 0 and at most ten years")
        possible = can.limits - ({"disk", "inodes"} if storage == "disk" else set())
        defaults = Limits(**{k: v for k, v in DEFAULTS.asked().items() if k in possible})  # type: ignore[arg-type]
        resolved = asked.over(defaults)
        if storage == "memory" and resolved.memory and resolved.disk and resolved.disk > resolved.memory:
            if asked.disk:
                raise InputError(
                    f"limits: disk {asked.disk:,} is over memory {resolved.memory:,}, and files are kept in memory; "
                    'raise memory or use storage="disk"'
                )
            resolved = replace(resolved, disk=resolved.memory // 2)
        return PodSpec(
            id=secrets.token_hex(6),
            image=image,
            limits=resolved,
            egress=egress or Egress(),
            storage=storage,
            ttl=ttl,
            attached=attached,
            key=key,
            tenant=tenant,
            owner=self.owner,
            created=time.time(),
        )

    async def _create(self, spec: PodSpec, timeout: float | None) -> LocalPod:
        if self.draining:
            raise PodError(f"host {self.name} is draining and takes no new pods")
        if (pod := self._warm(spec)) is not None:
            try:
                await self._hand_over(pod, spec)
            except BaseException:
                await self.close_pod(pod)
                raise
            return pod
        ask = ResourceRequest(
            spec.image.id, int(spec.limits.memory or DEFAULTS.memory or GIB), int(spec.limits.disk or 0)
        )
        if spec.storage == "memory":
            ask = replace(ask, disk=0)
        async with self.queue.turn(spec.tenant, ask, timeout=timeout) as seat:
            pod = await self._start(spec)
            self.seats[pod.id] = seat
        return pod

    async def _start(self, spec: PodSpec) -> LocalPod:
        self.registry.write(spec)
        self._use(spec.image.layers, 1)
        try:
            pod = await self.backend.start(spec)
        except BaseException:
            self._use(spec.image.layers, -1)
            self.registry.remove(spec.id)
            raise
        self._adopt(pod)
        return pod

    def _adopt(self, pod: LocalPod) -> None:
        pod.home = self
        self.pods[pod.id] = pod
        pod.line.on_lost = lambda: self._later(self._died(pod))

    async def _died(self, pod: LocalPod) -> None:
        """A pod ended by itself: time to live, memory, or its keeper."""
        if pod.id in self.guests:  # it ended, or the process that runs it snapshot it; that one knows
            self._leave(pod)
            self._use(pod.spec.image.layers, -1)
            pod.release()
        elif pod.id in self.pods:
            pod.record("died", {})
            await self.close_pod(pod)

    # ------------------------------------------------------------------------------------------- warm pools

    async def pool(
        self,
        image: str | Image | Snapshot,
        size: int,
        *,
        limits: Limits | None = None,
        egress: Egress | None = None,
        storage: Storage = "memory",
    ) -> None:
        """Keep `size` pods of this kind started in advance; 0 gives them up."""

        def spec() -> PodSpec:
            return self._spec(self.resolve(image), limits, egress, storage, None, "", "", True)

        first = spec()
        signature = warm_pool_key(first)
        pool = self.pools.setdefault(signature, WarmPool(size, spec, []))
        pool.size = size
        while len(pool.ready) > size:
            await self.close_pod(pool.ready.pop())
        if size == 0:
            del self.pools[signature]
        self._refill(pool)

    def _warm(self, spec: PodSpec) -> LocalPod | None:
        pool = self.pools.get(warm_pool_key(spec))
        if pool is None:
            return None
        self._refill(pool)
        while pool.ready:
            pod = pool.ready.pop()
            if pod.id in self.pods:
                return pod
        return None

    async def _hand_over(self, pod: LocalPod, spec: PodSpec) -> None:
        spec = replace(spec, id=pod.id)
        self.registry.write(spec)
        await pod.own(spec)

    def _refill(self, pool: WarmPool) -> None:
        async def fill() -> None:
            while len(pool.ready) < pool.size:
                pool.ready.append(await self._create_cold(pool.spec()))

        if pool.filling is None or pool.filling.done():
            pool.filling = asyncio.create_task(fill())
            pool.filling.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _create_cold(self, spec: PodSpec) -> LocalPod:
        ask = ResourceRequest(spec.image.id, int(spec.limits.memory or DEFAULTS.memory or GIB))
        async with self.queue.turn("warm pools", ask) as seat:
            pod = await self._start(spec)
            self.seats[pod.id] = seat
        return pod

    # ------------------------------------------------------------------------------------------- a pod's life

    async def snapshot_pod(self, pod: LocalPod, kind: SnapshotKind | None) -> Snapshot:
        sealed, kind = await self._sealed(pod, kind)
        try:
            await pod.ready()
            layers = await self._shallow(sealed)
            id = f"snap-{secrets.token_hex(8)}"
            durable = not any(layer.memory for layer in layers)
            parent = pod.spec.image.id if pod.spec.image.id.startswith("snap-") else None
            snapshot = Snapshot(id, pod.image, parent, kind, durable)
            self.store.save_snapshot(snapshot, pod.spec.image.with_(layers=layers))
            self._use(layers, 1)
            return snapshot
        finally:
            self._use(sealed, -1)

    async def _sealed(
        self, pod: LocalPod, kind: SnapshotKind | None, after: asyncio.Event | None = None
    ) -> tuple[tuple[Layer, ...], SnapshotKind]:
        """Seal a pod and let it go on, `after` something: its layers, which the caller holds, and how it was done.

        Once begun this is not cancelled: between the two there is no pod. Whoever uses it meanwhile waits.
        """
        turn = self.turns[pod.id]
        await turn.acquire()

        async def work() -> tuple[tuple[Layer, ...], SnapshotKind]:
            try:
                sealed, how = await self._seal(pod, kind)
            except BaseException:
                turn.release()
                raise
            self._use(sealed, 1)
            if how == "fs":
                pod.going_on = asyncio.create_task(self._go_on(pod, sealed, after))
                pod.going_on.add_done_callback(lambda task: self._went_on(pod, task))
                pod.going_on.add_done_callback(lambda _: turn.release())
            else:
                turn.release()
            return sealed, how

        working = asyncio.create_task(work())
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            working.add_done_callback(lambda done: None if _failed(done) else self._use(done.result()[0], -1))
            raise

    async def _seal(self, pod: LocalPod, kind: SnapshotKind | None) -> tuple[tuple[Layer, ...], SnapshotKind]:
        if kind == "full":
            raise Unsupported(
                f"a snapshot of memory is not possible on the {self.backend.name} backend; "
                "fs and fs-live keep the file system"
            )
        if pod.id not in self.pods:
            raise PodGone(f"pod {pod.id} is closed")
        if pod.id in self.guests:
            if kind == "fs":
                raise BusyError(
                    f"pod {pod.id} is run by another process ({pod.spec.owner}), which a snapshot of kind fs would cut "
                    "off; ask for fs-live"
                )
            kind = "fs-live"
        return await pod.seal(kind)

    async def _go_on(self, pod: LocalPod, layers: tuple[Layer, ...], after: asyncio.Event | None) -> None:
        """Let a sealed pod run again, over what it sealed."""
        if after is not None:
            await after.wait()
        if self.pods.get(pod.id) is not pod:
            raise PodGone(f"pod {pod.id} was closed")
        self._use(layers, 1)
        self._use(pod.spec.image.layers, -1)
        pod.spec = replace(pod.spec, image=pod.spec.image.with_(layers=layers))
        self.registry.write(pod.spec)
        await pod.restart(layers)
        pod.line.on_lost = lambda: self._later(self._died(pod))

    def _went_on(self, pod: LocalPod, task: "asyncio.Task[None]") -> None:
        if not _failed(task):
            pod.going_on = None
        elif self.pods.get(pod.id) is pod:  # whoever waits for it hears why
            self._later(self._died(pod))

    async def _shallow(self, layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
        return await self._flatten(layers) if len(layers) > FLATTEN_AT else layers

    async def _flatten(self, layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
        """All but the lowest layer, in one: a chain of forks must not end at the kernel's limit."""
        on_disk = [await self.backend.persist(layer) if layer.memory else layer for layer in layers]
        flat = await asyncio.to_thread(self.store.flatten, on_disk[1:], on_disk[:1])
        return on_disk[0], flat

    async def fork_pod(self, pod: LocalPod, n: int, kind: SnapshotKind | None) -> Sequence[LocalPod]:
        most = self.admission.thresholds.max_pods
        if not 1 <= n <= most:
            raise InputError(f"fork: {n} children; expected 1 to {most}, the pods this host runs at most")
        ready = asyncio.Event()  # the children first: who forks wants them, and the parent can wait
        sealed, kind = await self._sealed(pod, kind, ready)
        made: list[asyncio.Task[LocalPod]] = []
        try:
            layers = await self._shallow(sealed)
            child = replace(pod.spec, image=pod.spec.image.with_(layers=layers), key="", owner=self.owner)
            for _ in range(n):
                spec = replace(child, id=secrets.token_hex(6), created=time.time())
                made.append(asyncio.create_task(self._create(spec, timeout=None)))
            return await asyncio.gather(*made)
        except BaseException:
            for task in made:
                task.cancel()
            for done in await asyncio.gather(*made, return_exceptions=True):
                if isinstance(done, Pod):
                    await done.close()
            raise
        finally:
            self._use(sealed, -1)  # every child has its own hold on them
            ready.set()

    async def close_pod(self, pod: LocalPod) -> None:
        if self.pods.get(pod.id) is not pod:
            return
        self._leave(pod)
        try:
            async with self.turns[pod.id]:  # a snapshot that is being taken does not bring it back
                await pod.end()
        finally:
            self.turns.pop(pod.id, None)
            self._use(pod.spec.image.layers, -1)

    def _leave(self, pod: LocalPod) -> None:
        """The pod is not ours any more."""
        del self.pods[pod.id]
        self.guests.discard(pod.id)
        if seat := self.seats.pop(pod.id, None):
            seat.leave()
        self.keys.pop(pod.spec.key, None)

    async def remove_snapshot(self, id: str) -> None:
        """Forget a snapshot; what only it needed goes."""
        saved = self.store.snapshot(id)
        self.store.remove_snapshot(id)
        self._use(saved.image.layers, -1)

    async def persist(self, id: str) -> Snapshot:
        """Copy what a snapshot holds in memory to disk, so that it outlives the keeper of the pods."""
        saved = self.store.snapshot(id)
        before = saved.image.layers
        layers = tuple([await self.backend.persist(layer) if layer.memory else layer for layer in before])
        snapshot = replace(saved.snapshot, durable=True)
        self.store.save_snapshot(snapshot, replace(saved.image, layers=layers))
        self._use(before, -1)
        return snapshot

    # ------------------------------------------------------------------------------------------- layers in memory

    def _use(self, layers: Sequence[Layer], by: int) -> None:
        for layer in layers:
            if layer.memory:
                self.uses[layer.id] += by
                if self.uses[layer.id] <= 0:
                    del self.uses[layer.id]
                    if not self.idle_layers:
                        self._later(self._sweep_soon(), self.timers)
                    self.idle_layers.add(layer.id)

    async def _sweep_soon(self) -> None:
        await asyncio.sleep(SWEEP_S)
        await self._sweep()

    async def _sweep(self) -> None:
        """Drop layers in memory that neither we nor, by its records, any other process needs."""
        idle, self.idle_layers = self.idle_layers, set()
        needed = set(self.uses) | await asyncio.to_thread(self._needed)
        for id in idle - needed:
            with contextlib.suppress(PodError):
                await self.backend.drop(Layer(id, memory=True))

    def _needed(self) -> set[str]:
        stacks = [spec.image.layers for spec in self.registry.records()]
        stacks += [saved.image.layers for saved in self.store.snapshots()]
        return {layer.id for stack in stacks for layer in stack}

    async def collect(self, grace: float = 60.0) -> dict[str, list[str]]:
        """Garbage collection: pods nobody owns, layers nobody needs. What was removed."""
        pods = await self.reap()
        in_use = [layer for spec in self.registry.records() for layer in spec.image.layers]
        layers = await asyncio.to_thread(self.store.collect, in_use, grace)
        for id in layers:
            await self.backend.drop(Layer(id))
        return {"pods": pods, "layers": layers}

    # ------------------------------------------------------------------------------------------- what was left

    async def reap(self) -> list[str]:
        """Remove what is left of pods whose owner is dead, or that do not answer although they belong to nobody."""
        for owner in (self.state / "owners").glob("*.lock"):
            self.registry.alive(owner.stem)  # removes the files of the dead
        answering = set()
        for spec in self.registry.records():
            if not spec.attached and spec.id not in self.pods and not self._expired(spec):
                if self.registry.alive(spec.owner):
                    answering.add(spec.id)
                elif (pod := await self.backend.adopt(spec)) is not None:
                    pod.release()
                    answering.add(spec.id)
        removed = await self.backend.reap(self._known(answering))
        for rest in (self.state / "trash").iterdir():  # of a service that was killed while it removed a pod
            self._later(asyncio.to_thread(remove_tree, rest))
        for id in await self.backend.memory_layers() - set(self.uses) - await asyncio.to_thread(self._needed):
            if not self.registry.alive(id.partition(".")[0]):
                await self.backend.drop(Layer(id, memory=True))
        return removed

    def _known(self, answering: set[str]) -> Iterator[str]:
        """Pods that somebody looks after. Lazy: read after what there is was listed, or new ones would be missing."""
        for spec in self.registry.records():
            if spec.id in self.pods or spec.id in answering or self.registry.alive(spec.owner):
                yield spec.id
        starting = time.time() - 30  # a directory without a record is being made by another, or its maker died
        for directory in (self.state / "pods").iterdir() if self.registry.others() else ():
            with contextlib.suppress(FileNotFoundError):
                if not (directory / "pod.json").exists() and directory.stat().st_mtime > starting:
                    yield directory.name

    def _expired(self, spec: PodSpec) -> bool:
        left = spec.remaining()
        return left is not None and left <= EXPIRED_S

    async def find(self, id: str) -> LocalPod:
        """A running pod by its id (or the beginning of it), made by whomever."""
        matches = [spec for spec in self.registry.records() if spec.id.startswith(id)]
        if len(matches) != 1:
            count = "no" if not matches else f"{len(matches)}"
            raise InputError(f"there are {count} pods whose id begins with {id!r}; `etude pods ps` lists them")
        return await self.adopt(matches[0])

    async def adopt(self, spec: PodSpec) -> LocalPod:
        """Take up a running pod that another process made: as its owner if that process is dead, else as a guest."""
        if spec.id in self.pods:
            return self.pods[spec.id]
        guest = spec.owner != self.owner and self.registry.alive(spec.owner)
        spec = spec if guest else replace(spec, owner=self.owner)
        pod = await self.backend.adopt(spec)
        if pod is None:
            raise PodError(f"pod {spec.id} does not answer; `etude pods gc` removes what is left of it")
        if spec.id in self.pods:  # taken up twice at once
            pod.release()
            return self.pods[spec.id]
        if guest:
            self.guests.add(spec.id)
        else:
            self.registry.write(spec)
        self._adopt(pod)
        self.seats[pod.id] = self.admission.adopt(ResourceRequest(spec.image.id, int(spec.limits.memory or GIB)))
        self._use(spec.image.layers, 1)
        return pod

    # ------------------------------------------------------------------------------------------- watching

    def _later(self, work: Any, among: set[asyncio.Task[Any]] | None = None) -> None:
        tasks = self.tasks if among is None else among
        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            for late in [pod for pod in self.pods.values() if self._expired(pod.spec) and pod.id not in self.guests]:
                late.record("died", {"reason": "its time to live was over"})  # a paused agent cannot see to it itself
                self._later(self.close_pod(late))
            for id, seat in list(self.seats.items()):
                pod = self.pods.get(id)
                if pod is not None and (memory := pod.memory_used()):
                    seat.observed(memory)

    def report(self, address: str = "") -> HostReport:
        """What the router needs to know of this host."""
        pressure = read_pressure(self.state)
        return HostReport(
            host=self.name,
            address=address,
            backend=self.backend.name,
            pressure=pressure,
            pods=len(self.admission),
            max_pods=self.admission.thresholds.max_pods,
            memory_free=self.admission.room(),
            capabilities=capability_labels(self.backend.name, self.backend.capabilities),
            images=frozenset({"host", *(name for image in self.store.images() for name in (image.id, image.name))}),
            snapshots=frozenset(saved.snapshot.id for saved in self.store.snapshots()),
            warm=dict(Counter({signature.image: len(pool.ready) for signature, pool in self.pools.items()})),
            cores=pressure.cores,
            starting=sum(seat.creating for seat in self.seats.values()),
            draining=self.draining,
            time=time.time(),
        )


def _failed(task: "asyncio.Task[Any]") -> bool:
    return task.cancelled() or task.exception() is not None
