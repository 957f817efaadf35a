"""Measure how long an image takes to get from the host that built it to another, and what later uses of it send.

    python benchmarks/pods_transfer.py [--size 200]

Two `etude pods serve` processes on this machine, each with a store of its own, are the hosts. A RUN step makes the
files of the image on one of them: half of the bytes random, half text. A row is the first pod of the image under these
conditions, from the request to the result of its first command; "sent" are the bytes of layers that the host received.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from etude.pods import Fleet, open_fleet
from etude.pods.images.builder import LayerBuilder
from etude.pods.images.dockerfile import build
from etude.pods.images.records import Image
from etude.pods.settings import TOKEN_VARIABLE, PodSettings

ROOT = Path(__file__).resolve().parents[1]
TOKEN = "a-token-of-this-benchmark"
FILES = 200
DOCKERFILE = """FROM host
RUN mkdir /srv/files && cd /srv/files && for i in $(seq {files}); do head -c {half} /dev/urandom > random$i; \\
    yes "line $i of a text" | head -c {half} > text$i; done
"""


@contextlib.contextmanager
def serve(state: Path) -> Iterator[str]:
    """Run a host on a free port; yield its address."""
    words = ["pods", "serve", "--listen", "127.0.0.1:0", "--state", str(state), "--close"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), TOKEN_VARIABLE: TOKEN}
    with subprocess.Popen(
        [sys.executable, "-m", "etude.cli", *words], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[0]
        process.send_signal(signal.SIGTERM)


async def make_image(fleet: Fleet, context: Path, size: int) -> tuple[Image, str]:
    """Build the image on one of the hosts; return it and the address of that host."""
    (context / "Dockerfile").write_text(DOCKERFILE.format(files=FILES, half=(size << 20) // FILES // 2))

    async def work(builder: LayerBuilder) -> Image:
        return await build(builder, context / "Dockerfile", context, {"host": await fleet.resolve("host")})

    image = await fleet.build("benchmark", work)
    (builder_name,) = await fleet.distribution.holders(image)
    return image, next(url for url, client in fleet.clients.items() if client.name == builder_name)


async def first_command(fleet: Fleet, image: Image, url: str) -> tuple[float, int]:
    """Return the seconds until a pod of the image on a host has run a command, and the bytes sent for it."""
    client = fleet.clients[url]
    before, started = fleet.distribution.sent[client], time.perf_counter()
    await fleet.distribution.bring_image(image, client)
    async with await client.create(image) as pod:
        assert (await pod.exec("ls /srv/files | wc -l")).stdout.strip() == str(2 * FILES)
        return time.perf_counter() - started, fleet.distribution.sent[client] - before


async def main(size: int) -> None:
    table = Table("pod", "seconds", "sent, MB", box=None, header_style="bold")
    with tempfile.TemporaryDirectory(prefix="etude-transfer-") as directory, contextlib.ExitStack() as stack:
        top = Path(directory)
        urls = [stack.enter_context(serve(top / name)) for name in ("first", "second")]
        os.environ[TOKEN_VARIABLE] = TOKEN
        settings = PodSettings(hosts=tuple(urls))
        (top / "context").mkdir()
        async with open_fleet(pods=settings, state=top / "here") as fleet:
            started = time.perf_counter()
            image, home = await make_image(fleet, top / "context", size)
            built = time.perf_counter() - started
            other = next(url for url in urls if url != home)
            rows = [("on the host that built it", home), ("on the other host", other), ("there again", other)]
            for name, url in rows:
                seconds, sent = await first_command(fleet, image, url)
                table.add_row(name, f"{seconds:.2f}", f"{sent / 1e6:.1f}")
        async with open_fleet(pods=settings, state=top / "elsewhere") as fleet:
            seconds, sent = await first_command(fleet, image, other)
            table.add_row("there, of another client", f"{seconds:.2f}", f"{sent / 1e6:.1f}")
    Console(width=100).print(table)
    print(f"An image with {size} MB of files, which took {built:.1f} s to build, travelled once.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=200, help="MB of files")
    asyncio.run(main(parser.parse_args().size))
