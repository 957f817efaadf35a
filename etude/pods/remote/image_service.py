"""The endpoints of a host for images: layers that arrive and leave in parts, and the steps of builds."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from etude.errors import InputError
from etude.pods.host import Host
from etude.pods.host_client import HostGone, LocalHostClient
from etude.pods.images.builder import DirectoryStep, RunStep, unpack_sources
from etude.pods.images.records import Image, SnapshotRecord, check_travelled
from etude.pods.images.transfer import PART, LayersMissing, PackedLayer
from etude.pods.remote import messages
from etude.system.http import cancel_on_disconnect

MAX_JSON = 1 << 20


class ImageService:
    """Endpoints, one method each."""

    def __init__(self, host: Host, client: LocalHostClient, max_upload: int) -> None:
        self.host, self.client, self.layers, self.max_upload = host, client, client.layers, max_upload

    async def check(self, *images: Image) -> None:
        """Raise LayersMissing, or InputError for an image that does not come from a store."""
        ids = [layer.id for image in images for layer in check_travelled(image, f"image {image.id}").layers]
        if missing := await self.layers.missing(ids):
            raise LayersMissing(f"host {self.host.name} lacks {len(missing)} layers of the image, such as {missing[0]}")

    async def image(self, request: Request) -> Any:
        return await self.client.image(request.path_params["name"])

    async def get_snapshot(self, request: Request) -> Any:
        return await self.client.portable_snapshot(request.path_params["id"])

    async def put_snapshot(self, request: Request) -> Any:
        record = messages.parse(SnapshotRecord, await read_body(request), "snapshot")
        await self.check(record.image)
        await self.client.add_snapshot(record)
        return {}

    # ------------------------------------------------------------------------------------------- layers

    async def missing(self, request: Request) -> Any:
        return await self.layers.missing(messages.parse(list[str], await read_body(request), "layers"))

    async def pack(self, request: Request) -> Any:
        return await self.layers.pack(request.path_params["id"])

    async def read(self, request: Request) -> Any:
        packed, offset = _part_of(request)
        return Response(await self.layers.read(packed, offset), media_type="application/octet-stream")

    async def begin(self, request: Request) -> Any:
        asked = messages.parse(messages.LayerRequest, await read_body(request), "layer")
        if asked.packed.size > self.max_upload:
            raise InputError(
                f"the layer has {asked.packed.size:,} bytes; this host accepts at most {self.max_upload:,}"
            )
        return await self.layers.begin(asked.packed, asked.sender)

    async def write(self, request: Request) -> Any:
        packed, offset = _part_of(request)
        data = await read_body(request, PART)
        return await self.layers.write(packed, request.query_params.get("sender", ""), offset, data)

    # ------------------------------------------------------------------------------------------- builds

    async def run(self, request: Request) -> Any:
        step = messages.parse(RunStep, await read_body(request), "build")
        await self.check(step.image)
        if self.host.draining:
            raise HostGone(f"host {self.host.name} is draining and builds nothing")
        return await cancel_on_disconnect(request, self.host.builder.run(step))

    async def copy(self, request: Request) -> Any:
        asked = messages.parse(messages.CopyRequest, await read_body(request), "build")
        step, layer = asked.step, asked.layer
        images = [step.image, *([step.origin] if step.origin else []), *([Image.of((layer,))] if layer else [])]
        await self.check(*images)
        sources = unpack_sources(self.host.store, layer, asked.sources) if layer else []
        return await self.host.builder.copy(step, sources)

    async def make_directory(self, request: Request) -> Any:
        step = messages.parse(DirectoryStep, await read_body(request), "build")
        await self.check(step.image)
        return await self.host.builder.make_directory(step)

    async def locate(self, request: Request) -> Any:
        asked = messages.parse(messages.LocateRequest, await read_body(request), "build")
        await self.check(asked.image)
        return await self.host.builder.locate(asked.image, asked.path)


def _part_of(request: Request) -> tuple[PackedLayer, int]:
    """Return the packed layer and the offset that a query names."""
    query = request.query_params
    try:
        packed = PackedLayer(request.path_params["id"], query.get("digest", ""), int(query.get("size", "")))
        return packed, max(0, int(query.get("offset", "")))
    except ValueError:
        raise InputError("layer: expected its digest, size and offset in the query") from None


async def read_body(request: Request, limit: int = MAX_JSON) -> bytes:
    """Return the body of a request, of at most `limit` bytes."""
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > limit:
            raise InputError(f"the body is over {limit:,} bytes")
    return bytes(data)
