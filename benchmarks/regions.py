"""Weights of a large model over several regions: bytes, seconds and staleness of a version, by arithmetic.

    python benchmarks/regions.py                                             # 1T parameters, three regions
    python benchmarks/regions.py --model qwen3-30b-a3b-base --ranks 8 --delta 0.01 --step 120

Nothing is measured here except what the options name as measured. Every rank of the trainer encodes and uploads its
part of a version; every sampler node reads the whole delta from the store, applies it and swaps. A link is shared
equally by the nodes of its region.
"""

import argparse
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from etude.model.config import ModelConfig
from etude.model.describe import count_parameters
from etude.model.known import KNOWN_MODELS

GB = 1e9
BYTES = 2  # of a published value: bfloat16


@dataclass(frozen=True)
class Region:
    """Sampler nodes in one region, and the link by which they read the store, in bytes a second."""

    name: str
    nodes: int
    link: float


@dataclass(frozen=True)
class Fleet:
    """What a version has to pass through."""

    size: float  # bytes of all weights
    delta: float  # bytes of a delta, as a share of them
    ranks: int
    encode: float  # bytes of weights a second, of one rank
    upload: float  # bytes a second, of one rank
    apply: float  # bytes of weights a second, of one node
    swap: float  # seconds that an engine stands still
    poll: float  # seconds between two looks for a new version

    def publish_s(self) -> float:
        """Return the seconds from the end of a step until its version is visible."""
        return self.size / self.ranks / self.encode + self.delta * self.size / self.ranks / self.upload

    def read_s(self, region: Region, share: float) -> float:
        """Return the seconds in which all nodes of a region read `share` of the bytes of the weights."""
        return share * self.size / min(region.link / region.nodes, self.upload)

    def load_s(self, region: Region, share: float) -> float:
        """Return the seconds until a region samples with a version, of which `share` of all bytes is read."""
        return self.poll + self.read_s(region, share) + self.size / self.apply + self.swap


def version_table(fleet: Fleet, regions: list[Region], step: float, session: float) -> Table:
    """Return a row for each region: bytes and seconds of a delta and of a full version, and steps of staleness."""
    table = Table(title="from the end of a step until a region samples with its weights", title_justify="left")
    names = ("region", "nodes", "GB a step", "read, s", "in all, s", "full, s", "steps behind", "oldest token, steps")
    for name in names:
        table.add_column(name, justify="left" if name == "region" else "right")
    for region in regions:
        late = fleet.publish_s() + fleet.load_s(region, fleet.delta)
        behind = late / step
        table.add_row(
            region.name,
            str(region.nodes),
            f"{fleet.delta * fleet.size * region.nodes / GB:,.1f}",
            f"{fleet.read_s(region, fleet.delta):,.0f}",
            f"{late:,.0f}",
            f"{fleet.publish_s() + fleet.load_s(region, 1.0):,.0f}",
            f"{behind:.2f}",
            f"{behind + session / step:.1f}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="kimi-k2.5", choices=sorted(KNOWN_MODELS))
    parser.add_argument("--delta", type=float, default=0.0198, help="bytes of a delta by those of the weights")
    parser.add_argument("--full-every", type=int, default=25, help="versions between two full ones")
    parser.add_argument("--ranks", type=int, default=64, help="trainer processes, each with a part")
    parser.add_argument("--encode", type=float, default=0.63, help="GB/s of one rank (benchmarks/deltas.py, two cores)")
    parser.add_argument("--apply", type=float, default=10.5, help="GB/s of one node: 32 cores at 0.33 each")
    parser.add_argument("--upload", type=float, default=1.0, help="GB/s between one rank or node and its store")
    parser.add_argument(
        "--regions", default="near:32:100,far:16:5,overseas:16:2", help="NAME:NODES:GB/s of the link,..."
    )
    parser.add_argument("--step", type=float, default=300.0, help="seconds of a policy step")
    parser.add_argument("--session", type=float, default=1800.0, help="seconds of a long session")
    given = parser.parse_args()
    with torch.device("meta"):
        counts = count_parameters(ModelConfig.from_hugging_face(KNOWN_MODELS[given.model].config))
    size = float(BYTES * counts.total)
    fleet = Fleet(
        size, given.delta, given.ranks, given.encode * GB, given.upload * GB, given.apply * GB, swap=1.0, poll=1.0
    )
    parts = [text.split(":") for text in given.regions.split(",")]
    regions = [Region(name, int(nodes), float(link) * GB) for name, nodes, link in parts]
    console = Console(width=120)
    nodes, delta = sum(region.nodes for region in regions), given.delta * size
    mean = (size + (given.full_every - 1) * delta) / given.full_every
    console.print(f"{given.model}: {counts.total / 1e12:.3f}T values, {size / GB:,.0f} GB in bfloat16")
    console.print(f"a delta: {delta / GB:,.1f} GB, {delta / given.ranks / 1e6:,.0f} MB of each of {given.ranks} ranks")
    console.print(f"written: {mean / GB:,.1f} GB a version on average with a full one every {given.full_every}")
    console.print(
        f"read: {nodes * delta / GB:,.0f} GB a step by {nodes} nodes; only a node that starts reads a full version"
    )
    console.print(
        f"visible {fleet.publish_s():,.0f} s after the end of a step; a node applies it in {size / fleet.apply:,.0f} s"
    )
    console.print(version_table(fleet, regions, given.step, given.session))
    worst = max(fleet.publish_s() + fleet.load_s(region, fleet.delta) for region in regions)
    console.print(
        f"max_staleness of at least {1 + int((worst + given.session) // given.step)} keeps the tokens of sessions of "
        f"{given.session:,.0f} s at steps of {given.step:,.0f} s"
    )


if __name__ == "__main__":
    main()
