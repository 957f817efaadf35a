"""Decoding on CUDA as captured graphs: several tokens for every stream without the host looking in between.

A graph is one decode step at a fixed number of rows and pages: it reads its inputs from buffers that stay, draws the
next tokens and writes them back as the next inputs. A burst replays it, and the host copies all results once. Rows
beyond the streams at hand are dummies that write to a page nobody owns. What cannot be captured (latents, float32,
cut-off sampling) runs step by step instead.

A few tokens of prompts are rows as well, each with its stream's pages and its own position: every row's keys are stored
before any row looks. What agents' turns add to their prompts is read that way; such a graph runs once, and draws only
for the rows that write.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from etude.inference.paged import Batch, PagedCache
from etude.inference.request import Stream
from etude.inference.scheduler import Piece, Step
from etude.kernels.draw import Drawn, draw_plain
from etude.model.moe import Routing
from etude.model.transformer import Transformer


@dataclass(frozen=True)
class Burst:
    """What a burst made, by stream and step, on the host."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    raw_logprobs: list[list[float]]
    routing: np.ndarray | None  # [steps, streams, moe layers, experts per token]


# What a graph reads in a step: each token looks by itself at all before it, which for many costs more than launching.
READ = 1024  # tokens
LOOKS = READ * 4096  # tokens looked at
NARROW = 4096  # tokens of the shortest page table; attention's cost grows with its width, used or not


@dataclass(frozen=True)
class Read:
    """What a step with prompts in it made: for each stream that writes in it, and for each of its tokens."""

    drawn: Drawn | None
    slots: npt.NDArray[np.int64]
    routing: npt.NDArray[np.integer] | None  # [tokens, moe layers, experts per token]


class Graph:
    """Buffers of `rows` tokens of streams of up to `width` pages, and the step over them, which draws for `draws`."""

    def __init__(self, decoder: "Decoder", rows: int, width: int, draws: int | None = None) -> None:
        device, steps = decoder.device, decoder.steps if draws is None else 2  # two to warm up
        self.rows, self.width, self.reads = rows, width, draws is not None
        draws = rows if draws is None else draws
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self.tables = torch.full((rows, width), decoder.spare, dtype=torch.int32, device=device)
        self.writers = torch.zeros(draws, dtype=torch.int64, device=device)  # rows that are drawn for, if it reads
        self.temperatures = torch.ones(draws, dtype=torch.float32, device=device)
        self.seeds = torch.zeros(draws, dtype=torch.int64, device=device)
        self.places = torch.zeros(draws, dtype=torch.int64, device=device)
        self.turn = torch.zeros(1, dtype=torch.int64, device=device)
        self.out = torch.zeros(steps, draws, dtype=torch.int64, device=device)
        self.scores = torch.zeros(steps, 2, draws, dtype=torch.float32, device=device)
        moe = decoder.model.config.moe
        shape = (steps, rows, len(moe.layers), moe.per_token) if moe else (0,)
        self.routes = torch.zeros(shape, dtype=torch.int16, device=device)
        self.replay: Callable[[], None] = lambda: decoder.run_step(self)


class Decoder:
    """Graphs by number of rows and pages, captured when first needed."""

    def __init__(
        self, model: Transformer, cache: PagedCache, *, pages: int, steps: int, most: int, fixed: bool = False
    ) -> None:
        self.model, self.cache, self.steps, self.most = model, cache, steps, most
        self.fixed = fixed  # always the same number of rows: another number may mean another matrix kernel
        self.device = model.head_weight.device
        self.width = -(-(model.config.max_length + steps) // cache.size)  # pages of the longest stream there can be
        self.spare = pages  # the page beyond the pool's
        self.memory: Any = None  # the graphs' common pool
        self.graphs: dict[tuple[int, int, bool], Graph] = {}

    def run_step(self, graph: Graph) -> None:
        """One step over a graph's buffers; what is captured."""
        size = self.cache.size
        page = graph.tables.gather(1, (graph.positions // size)[:, None])[:, 0]
        slots = page.long() * size + graph.positions % size
        lengths = graph.positions + 1
        rows, none = graph.rows, torch.empty(0, dtype=torch.int64, device=self.device)
        self.cache.batch = Batch(graph.tokens, graph.positions, slots, rows, graph.tables, lengths, None, none)
        routing = Routing() if self.model.config.moe else None
        hidden = self.model.hidden(graph.tokens[None], cache=self.cache, routing=routing)  # type: ignore[arg-type]
        logits = self.model.logits(hidden[0, graph.writers] if graph.reads else hidden[0])
        tokens, logprobs, raw = draw_plain(logits, graph.temperatures, graph.seeds, graph.places)
        graph.out.index_copy_(0, graph.turn, tokens[None])
        graph.scores.index_copy_(0, graph.turn, torch.stack((logprobs, raw))[None])
        if routing is not None and routing.chosen is not None:
            graph.routes.index_copy_(0, graph.turn, routing.chosen.to(torch.int16))
        if not graph.reads:
            graph.tokens.copy_(tokens)
            graph.positions += 1
            graph.places += 1
        graph.turn += 1

    def burst(self, streams: Sequence[Stream], steps: int) -> Burst:
        """`steps` tokens for every stream."""
        rows = self.most if self.fixed else min(self.most, _bucket(len(streams)))
        graph = self._graph(rows, streams)
        self._fill(graph, streams, [])
        for _ in range(steps):
            graph.replay()
        n = len(streams)
        tokens = graph.out[:steps, :n].T.tolist()
        scores = graph.scores[:steps, :, :n].permute(1, 2, 0).tolist()
        routing = graph.routes[:steps, :n].cpu().numpy() if graph.routes.numel() else None
        return Burst(tokens, scores[0], scores[1], routing)

    def can_read(self, step: Step) -> bool:
        looks = sum((piece.end - piece.start) * piece.end for piece in step.reading)
        return not self.fixed and step.tokens <= READ and looks <= LOOKS

    def read(self, step: Step) -> Read:
        """A step with prompts in it."""
        rows = max(64, 1 << (step.tokens - 1).bit_length())  # few graphs: a capture takes as long as several steps
        streams = [*step.decoding, *(piece.stream for piece in step.reading)]
        graph = self._graph(rows, streams, draws=min(rows, self.most))
        slots, drawn = self._fill(graph, step.decoding, step.reading)
        graph.replay()
        made = Drawn(graph.out[0, :drawn], *graph.scores[0, :, :drawn]) if drawn else None
        routing = graph.routes[0, : step.tokens].cpu().numpy() if graph.routes.numel() else None
        return Read(made, slots, routing)

    def _graph(self, rows: int, streams: Sequence[Stream], draws: int | None = None) -> Graph:
        pages = max(len(stream.pages) for stream in streams)
        # another width is another order of sums
        width = self.width if self.fixed else min(self.width, table_width(pages, self.cache.size))
        key = rows, width, draws is not None
        if key not in self.graphs:
            graph = self.graphs[key] = Graph(self, rows, width, draws)
            self.capture(graph)
        return self.graphs[key]

    def capture(self, graph: Graph) -> None:
        """Run a graph's step once for the record; from then on it is replayed."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # kernels are compiled and chosen outside the capture
                self.run_step(graph)
        torch.cuda.current_stream().wait_stream(side)
        self.memory = self.memory or torch.cuda.graph_pool_handle()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, pool=self.memory):
            self.run_step(graph)
        graph.replay = captured.replay

    def _fill(
        self, graph: Graph, decoding: Sequence[Stream], reading: Sequence[Piece]
    ) -> tuple[npt.NDArray[np.int64], int]:
        """Rows for a token of every decoding stream and those of the pieces: their slots, and how many tokens come."""
        tables = np.full((graph.rows, graph.width), self.spare, np.int32)
        tokens = [stream.made[-1] for stream in decoding]
        positions = [stream.length - 1 for stream in decoding]
        writers = list(range(len(decoding)))
        for row, stream in enumerate(decoding):
            tables[row, : len(stream.pages)] = stream.pages
        for piece in reading:
            tables[len(tokens) : len(tokens) + piece.end - piece.start, : len(piece.stream.pages)] = piece.stream.pages
            tokens += piece.stream.tokens(piece.start, piece.end)
            positions += range(piece.start, piece.end)
            if piece.writes:
                writers.append(len(tokens) - 1)
        inputs = np.zeros((2, graph.rows), np.int64)
        inputs[:, : len(tokens)] = tokens, positions
        writing = [*decoding, *(piece.stream for piece in reading if piece.writes)]
        draws = np.zeros((3, len(graph.seeds)), np.int64)
        draws[:, : len(writing)] = (
            writers,
            [stream.seed for stream in writing],
            [len(stream.made) for stream in writing],
        )
        warmth = np.ones(len(graph.seeds), np.float32)
        warmth[: len(writing)] = [stream.sampling.temperature for stream in writing]
        for buffers, values in (
            ((graph.tokens, graph.positions), inputs),
            ((graph.writers, graph.seeds, graph.places), draws),
        ):
            for buffer, row_values in zip(buffers, torch.from_numpy(values).to(self.device), strict=True):
                buffer.copy_(row_values)
        graph.tables.copy_(torch.from_numpy(tables))
        graph.temperatures.copy_(torch.from_numpy(warmth))
        graph.turn.zero_()
        size, at = self.cache.size, inputs[1, : len(tokens)]
        return tables[np.arange(len(tokens)), at // size].astype(np.int64) * size + at % size, len(writing)


def table_width(pages: int, size: int) -> int:
    """Pages of a table for streams of up to `pages`: the narrow one's, doubled as often as it takes."""
    narrow = max(1, NARROW // size)
    return narrow << max(0, -(-pages // narrow) - 1).bit_length()


def _bucket(rows: int) -> int:
    """The number of rows a graph is captured for: few enough graphs, little waste."""
    if rows <= 8:
        return 1 << (rows - 1).bit_length()
    step = max(8, 1 << (rows.bit_length() - 3))
    return -(-rows // step) * step
