"""Dense rows are a copy of pages: whoever joins, leaves or moves, they hold the same, and keep to their limit."""

import random

import torch
from engines import weights_of

from etude.inference.paged import PagedCache
from etude.inference.pages import PagePool
from etude.inference.request import Stream
from etude.inference.rows import Rows
from etude.inference.sampling import Sampling

PAGES, SIZE = 40, 4


def test_rows_always_hold_what_the_pages_hold() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        config = weights_of(rng.choice(("llama", "deepseek_v3"))).config
        cache = PagedCache(config, PAGES, SIZE, torch.float32, "cpu", exact=False)
        slabs = [*cache.keys, *cache.values]
        for slab in slabs:
            slab.normal_()
        rows, pool, streams = Rows(cache, limit=96), PagePool(PAGES, SIZE), list[Stream]()
        fitted = 0
        for _ in range(40):
            if len(streams) < 6 and rng.random() < 0.4:
                streams.append(joining(pool, rng))
            if streams and rng.random() < 0.25:
                gone = streams.pop(rng.randrange(len(streams)))
                rows.forget(gone)
                pool.release(gone.pages)
            if not streams:
                continue
            order, step = rows.arrange(streams)
            assert rows.capacity[0] * rows.capacity[1] <= 96
            assert sorted(map(id, order)) == sorted(map(id, streams)), f"seed {seed}"
            if step is not None:
                fitted += 1
                for row, stream in enumerate(order):
                    compare(cache, step.keys + (step.values if cache.values else []), row, stream, seed)
                    add(cache, step.keys + (step.values if cache.values else []), row, stream)
            for stream in streams:
                stream.made.append(0)
                if stream.length >= len(stream.pages) * SIZE:
                    stream.made.clear()
                    rows.forget(stream)
        assert fitted, f"seed {seed}: nothing ever fitted"


def joining(pool: PagePool, rng: random.Random) -> Stream:
    stream = Stream([0] * rng.randint(1, 14), Sampling(), 0, made=[0])
    stream.pages = [pool.take() for _ in range(6)]
    return stream


def compare(cache: PagedCache, dense: list[torch.Tensor], row: int, stream: Stream, seed: int) -> None:
    at = torch.arange(stream.length - 1)
    slots = torch.tensor(stream.pages)[at // SIZE] * SIZE + at % SIZE
    for mine, pages in zip(dense, (*cache.keys, *cache.values), strict=True):
        assert torch.equal(mine[row, :, : stream.length - 1].transpose(0, 1), pages[slots]), f"seed {seed}"


def add(cache: PagedCache, dense: list[torch.Tensor], row: int, stream: Stream) -> None:
    """The token of this step, in the row and in its page."""
    at = stream.length - 1
    for mine, pages in zip(dense, (*cache.keys, *cache.values), strict=True):
        mine[row, :, at] = pages[stream.pages[at // SIZE] * SIZE + at % SIZE]
