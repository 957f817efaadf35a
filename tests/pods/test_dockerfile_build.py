"""A Dockerfile built in real pods: the image contains what RUN wrote, and a second build is fully cached."""

import asyncio
from pathlib import Path
from unittest.mock import patch

from etude.pods import open_fleet
from etude.pods.images.dockerfile import build
from etude.pods.images.records import is_content_id
from etude.pods.images.sources import host_image
from etude.pods.images.store import Store

TEXT = """
FROM host AS made
WORKDIR /made
COPY words.txt .
ARG SUFFIX=none
RUN tr a-z A-Z < words.txt > loud.txt && echo "$SUFFIX" >> loud.txt && rm words.txt
RUN <<SCRIPT
mkdir -p out
cp loud.txt out/final.txt
SCRIPT
FROM host
ENV GREETING=hello
COPY --from=made /made/out /result
WORKDIR /result
RUN grep -q QUIET final.txt && echo "$GREETING" > greeting && head -c 16 /dev/urandom | od -An -tx1 > random
"""


def test_an_image_is_built_in_pods_and_cached(tmp_path: Path) -> None:
    (tmp_path / "context").mkdir()
    (tmp_path / "context/words.txt").write_text("quiet\n")
    (tmp_path / "Dockerfile").write_text(TEXT)

    async def go() -> None:
        async with open_fleet() as fleet:
            assert fleet.local is not None
            store = fleet.local.store
            base_images = {"host": host_image(store)}
            dockerfile, context = tmp_path / "Dockerfile", tmp_path / "context"
            builder = fleet.local.builder
            first = await build(builder, dockerfile, context, base_images, {"SUFFIX": "end"})
            second = await build(builder, dockerfile, context, base_images, {"SUFFIX": "end"})
            assert first == second, "the random bytes are those of the first build: nothing ran again"
            async with await fleet.create(image=first) as pod:
                done = await pod.exec("cat final.txt greeting; ls -d /made 2>/dev/null; echo $GREETING; pwd")
                assert done.stdout == "QUIET\nend\nhello\nhello\n/result\n", done.stderr
            store.remove_image(first.id)

    asyncio.run(go())


def test_cached_layers_that_no_other_host_can_have_are_made_again(tmp_path: Path) -> None:
    """The build cache of an earlier version holds layers with random ids."""
    (tmp_path / "Dockerfile").write_text(f"FROM host\nRUN echo {tmp_path} > /made\n")

    async def go() -> None:
        async with open_fleet() as fleet:
            assert fleet.local is not None
            builder, base_images = fleet.local.builder, {"host": host_image(fleet.local.store)}

            async def layers() -> list[str]:
                image = await build(builder, tmp_path / "Dockerfile", tmp_path, base_images, {})
                return [layer.id for layer in image.layers]

            with patch.object(Store, "portable", lambda store, layer: layer), patch.object(Store, "discard_layers"):
                assert not all(map(is_content_id, await layers()))
            assert all(map(is_content_id, made := await layers()))
            assert await layers() == made

    asyncio.run(go())
