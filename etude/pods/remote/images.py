"""The images of a remote host: its layers as a peer of other stores, and builds whose steps run there."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from etude.pods.distribution import Distribution
from etude.pods.host_client import HostRefused
from etude.pods.host_system import HostSystem
from etude.pods.images.builder import (
    CopyStep,
    DirectoryStep,
    LayerBuilder,
    Location,
    RunStep,
    empty_image,
    pack_sources,
)
from etude.pods.images.context import CopySource
from etude.pods.images.records import SYSTEM_LABEL, Image
from etude.pods.images.transfer import PART, Arrival, LayerPeer, LayersMissing, PackedLayer
from etude.pods.remote.messages import parse, to_json

if TYPE_CHECKING:
    from etude.pods.remote.client import RemoteHostClient

T = TypeVar("T")
LONG_S = 1800.0  # to pack or unpack a layer


class RemoteLayers(LayerPeer):
    """The layers of a host."""

    def __init__(self, client: "RemoteHostClient") -> None:
        self.client = client

    async def missing(self, layers: Sequence[str]) -> list[str]:
        return await self._ask(list[str], "POST", "missing", json=list(layers))

    async def pack(self, layer: str) -> PackedLayer:
        return await self._ask(PackedLayer, "POST", f"{layer}/pack")

    async def read(self, packed: PackedLayer, offset: int) -> bytes:
        path = f"/layers/{packed.layer}/part"
        data = await self.client.request("GET", path, params={**to_json(packed), "offset": offset})
        return data[:PART]

    async def begin(self, packed: PackedLayer, sender: str) -> Arrival:
        body = {"packed": to_json(packed), "sender": sender}
        return await self._ask(Arrival, "POST", f"{packed.layer}/begin", json=body)

    async def write(self, packed: PackedLayer, sender: str, offset: int, data: bytes) -> Arrival:
        query = {**to_json(packed), "sender": sender, "offset": offset}
        headers = {"content-type": "application/octet-stream"}
        return await self._ask(Arrival, "PUT", f"{packed.layer}/part", params=query, content=data, headers=headers)

    async def _ask(self, kind: type[T], method: str, path: str, **options: Any) -> T:
        """Send a request, again if the connection breaks: each of them may arrive twice."""
        body = await self.client.request(method, f"/layers/{path}", wait=LONG_S, **options)
        return parse(kind, body, self.client.url)


class RemoteBuilder(LayerBuilder):
    """Builds on a host: the images that steps start from and the sources of COPY travel there as layers."""

    def __init__(self, client: "RemoteHostClient", distribution: Distribution, system: HostSystem) -> None:
        self.client, self.distribution, self.system = client, distribution, str(system)

    async def scratch(self) -> Image:
        return empty_image(self.distribution.here.store)

    async def locate(self, image: Image, path: str) -> Location:
        return await self._make(Location, "locate", {"image": image, "path": path}, image)

    async def run(self, step: RunStep) -> Image:
        return await self._make(Image, "run", step, step.image)

    async def copy(self, step: CopyStep, sources: Sequence[CopySource]) -> Image:
        layer = pack_sources(self.distribution.here.store, sources) if sources else None
        names = [(each.name, each.unpack) for each in sources]
        images = [each for each in (step.image, step.origin) if each is not None]
        asked = {"step": step, "layer": layer, "sources": names}
        return await self._make(Image, "copy", asked, *images, *([Image.of((layer,))] if layer else []))

    async def make_directory(self, step: DirectoryStep) -> Image:
        return await self._make(Image, "directory", step, step.image)

    async def keep(self, image: Image) -> Image:
        return image

    async def _make(self, kind: type[T], operation: str, asked: object, *needed: Image) -> T:
        """Send a request, after the images that it needs."""
        for again in (True, False):
            for image in needed:
                if image.binds and image.labels.get(SYSTEM_LABEL, self.system) != self.system:
                    raise HostRefused(
                        f"host {self.client.url} has other programs ({self.system}) than the image binds "
                        f"({image.labels[SYSTEM_LABEL]})"
                    )
                await self.distribution.bring_image(image, self.client)
            try:
                # Not repeated if the connection breaks: that ends a RUN, unless another client waits for it, too.
                body = await self.client.request(
                    "POST", f"/builds/{operation}", retry=False, wait=None, json=to_json(asked)
                )
                made = parse(kind, body, self.client.url)
                if isinstance(made, Image):
                    self.distribution.note(made, self.client)
                return made
            except LayersMissing:
                if not again:
                    raise
                self.distribution.forget(self.client)
        raise AssertionError("unreachable: the second attempt returns or raises")
