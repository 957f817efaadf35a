"""The sampler's steps on CUDA as captured graphs: what would be hundreds of small launches by the host is one.

A graph is one decode step at a fixed number of rows and pages: it reads its inputs from buffers that stay, draws the
next tokens and writes them back as the next inputs. A burst replays it, and the host copies all results once. Rows
beyond the streams at hand are dummies that write to a page nobody owns. What cannot be captured (latents, float32,
cut-off sampling) runs step by step instead.

A step that reads prompts is a graph as well, with room for so many tokens of whichever streams, those that decode
first: it runs once, and draws only for the rows that write.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from etude.inference.paged import Batch, PagedCache, lay_out
from etude.inference.request import Stream
from etude.inference.scheduler import Step
from etude.kernels.draw import Drawn, draw_plain
from etude.kernels.paged import Blocks
from etude.model.moe import Routing
from etude.model.transformer import Transformer


@dataclass(frozen=True)
class Burst:
    """What a burst made, by stream and step, on the host."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    raw_logprobs: list[list[float]]
    routing: np.ndarray | None  # [steps, streams, moe layers, experts per token]


# A graph that reads computes its empty rows too, up to a third: where that takes longer than launching, it is no gain.
READ = 8192  # tokens
WORK = 1 << 40  # tokens times parameters: some milliseconds of an H200
NARROW = 4096  # tokens of the shortest page table; attention's cost grows with its width, used or not


@dataclass(frozen=True)
class Read:
    """What a step with prompts in it made: for each stream that writes in it, and for each of its tokens."""

    drawn: Drawn | None
    slots: npt.NDArray[np.int64]
    routing: npt.NDArray[np.integer] | None  # [tokens, moe layers, experts per token]


class Graph:
    """Buffers of a decode step of `rows` streams of up to `width` pages."""

    def __init__(self, decoder: "Decoder", rows: int, width: int, *, streams: int = 0, steps: int = 0) -> None:
        device, streams, steps = decoder.device, streams or rows, steps or decoder.steps
        self.rows, self.width = rows, width
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self.tables = torch.full((streams, width), decoder.spare, dtype=torch.int32, device=device)
        self.temperatures = torch.ones(streams, dtype=torch.float32, device=device)
        self.seeds = torch.zeros(streams, dtype=torch.int64, device=device)
        self.places = torch.zeros(streams, dtype=torch.int64, device=device)
        self.turn = torch.zeros(1, dtype=torch.int64, device=device)
        self.out = torch.zeros(steps, streams, dtype=torch.int64, device=device)
        self.scores = torch.zeros(steps, 2, streams, dtype=torch.float32, device=device)
        moe = decoder.model.config.moe
        shape = (steps, rows, len(moe.layers), moe.per_token) if moe else (0,)
        self.routes = torch.zeros(shape, dtype=torch.int16, device=device)
        self.replay: Callable[[], None] = lambda: decoder.run_step(self)

    def batch(self, size: int) -> Batch:
        page = self.tables.gather(1, (self.positions // size)[:, None])[:, 0]
        slots = page.long() * size + self.positions % size
        none = torch.empty(0, dtype=torch.int64, device=slots.device)
        return Batch(self.tokens, self.positions, slots, self.rows, self.tables, self.positions + 1, None, none)

    def writing(self, hidden: Tensor) -> Tensor:
        """Of all rows those from which a next token is drawn."""
        return hidden

    def follow(self, tokens: Tensor) -> None:
        """What was drawn is what is read next."""
        self.tokens.copy_(tokens)
        self.positions += 1
        self.places += 1


class ReadingGraph(Graph):
    """Buffers of a step of `rows` tokens of up to `streams` streams: a token of each that decodes, then pieces."""

    def __init__(self, decoder: "Decoder", rows: int, width: int, streams: int) -> None:
        super().__init__(decoder, rows, width, streams=streams, steps=2)  # two to warm up
        config, device = decoder.model.config, decoder.device
        self.slots = torch.full((rows,), decoder.spare * decoder.cache.size, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(streams, dtype=torch.int64, device=device)  # 0: it does not decode
        self.writers = torch.zeros(streams, dtype=torch.int64, device=device)
        queries = Blocks.queries_of(config.heads, config.kv_heads)
        blocks = rows // queries + streams  # every run may end with a block that is not full
        self.blocks = Blocks(torch.zeros(blocks, 4, dtype=torch.int32, device=device), queries)

    def batch(self, size: int) -> Batch:
        table = self.tables, self.lengths, self.blocks
        return Batch(self.tokens, self.positions, self.slots, len(self.lengths), *table, self.writers)

    def writing(self, hidden: Tensor) -> Tensor:
        return hidden[self.writers]

    def follow(self, tokens: Tensor) -> None:
        """Nothing: it runs once."""


class Decoder:
    """Graphs by number of rows and pages, captured when first needed, or before: `warm`."""

    def __init__(
        self, model: Transformer, cache: PagedCache, *, pages: int, steps: int, most: int, fixed: bool = False
    ) -> None:
        self.model, self.cache, self.steps, self.most = model, cache, steps, most
        self.fixed = fixed  # always the same number of rows: another number may mean another matrix kernel
        self.device = model.head_weight.device
        self.width = -(-(model.config.max_length + steps) // cache.size)  # pages of the longest stream there can be
        self.spare = pages  # the page beyond the pool's
        self.memory: Any = None  # the graphs' common pool
        self.graphs: dict[tuple[int, int], Graph] = {}
        self.readers: dict[tuple[int, int], ReadingGraph] = {}
        self.readable = WORK // sum(weight.numel() for weight in model.parameters())

    def run_step(self, graph: Graph) -> None:
        """One step over a graph's buffers; what is captured."""
        self.cache.batch = graph.batch(self.cache.size)
        routing = Routing() if self.model.config.moe else None
        hidden = self.model.hidden(graph.tokens[None], cache=self.cache, routing=routing)  # type: ignore[arg-type]
        logits = self.model.logits(graph.writing(hidden[0]))
        tokens, logprobs, raw = draw_plain(logits, graph.temperatures, graph.seeds, graph.places)
        graph.out.index_copy_(0, graph.turn, tokens[None])
        graph.scores.index_copy_(0, graph.turn, torch.stack((logprobs, raw))[None])
        if routing is not None and routing.chosen is not None:
            graph.routes.index_copy_(0, graph.turn, routing.chosen.to(torch.int16))
        graph.follow(tokens)
        graph.turn += 1

    def burst(self, streams: Sequence[Stream], steps: int) -> Burst:
        """`steps` tokens for every stream."""
        graph = self._writer(min(self.most, _bucket(len(streams))), self._width(streams))
        _put(graph.tokens, [stream.made[-1] for stream in streams])
        _put(graph.positions, [stream.length - 1 for stream in streams])
        self._put_streams(graph, streams, streams)
        for _ in range(steps):
            graph.replay()
        n = len(streams)
        tokens = graph.out[:steps, :n].T.tolist()
        scores = graph.scores[:steps, :, :n].permute(1, 2, 0).tolist()
        routing = graph.routes[:steps, :n].cpu().numpy() if graph.routes.numel() else None
        return Burst(tokens, scores[0], scores[1], routing)

    def can_read(self, step: Step) -> bool:
        return not self.fixed and step.tokens <= min(READ, self.readable)

    def read(self, step: Step) -> Read:
        """A step with prompts in it."""
        streams = [*step.decoding, *(piece.stream for piece in step.reading)]
        graph = self._reader(_read_bucket(step.tokens), self._width(streams))
        laid = lay_out(step, self.cache.size)
        blocks = []
        for row, (piece, first) in enumerate(zip(step.reading, laid.starts, strict=True), len(step.decoding)):
            blocks += Blocks.cut(row, first, piece.end - piece.start, piece.start, graph.blocks.queries)
        _put(graph.tokens, laid.tokens)
        _put(graph.positions, laid.positions)
        _put(graph.slots, laid.slots, self.spare * self.cache.size)
        _put(graph.lengths, [stream.length for stream in step.decoding])
        _put(graph.writers, laid.writers)
        _put(graph.blocks.rows, blocks)
        writing = [*step.decoding, *(piece.stream for piece in step.reading if piece.writes)]
        self._put_streams(graph, streams, writing)
        graph.replay()
        drawn = Drawn(graph.out[0, : len(writing)], *graph.scores[0, :, : len(writing)]) if writing else None
        routing = graph.routes[0, : step.tokens].cpu().numpy() if graph.routes.numel() else None
        return Read(drawn, laid.slots, routing)

    def warm(self, tokens: int) -> Iterator[bool]:
        """Capture the graphs that streams of ordinary length need in steps of up to so many tokens, one at a time: what
        is captured while there is nothing to do keeps nobody waiting later."""
        width = self.width if self.fixed else min(self.width, table_width(1, self.cache.size))
        for rows in sorted({min(self.most, _bucket(count)) for count in range(1, self.most + 1)}, reverse=True):
            self._writer(rows, width)
            yield True
        most = 0 if self.fixed else min(tokens, READ, self.readable)
        for rows in sorted({_read_bucket(count) for count in range(1, most + 1)}):
            self._reader(rows, width)
            yield True

    @torch.inference_mode()
    def _writer(self, rows: int, width: int) -> Graph:
        key = self.most if self.fixed else rows, width
        if key not in self.graphs:
            self.graphs[key] = Graph(self, *key)
            self.capture(self.graphs[key])
        return self.graphs[key]

    @torch.inference_mode()
    def _reader(self, rows: int, width: int) -> ReadingGraph:
        key = rows, width
        if key not in self.readers:
            self.readers[key] = ReadingGraph(self, *key, streams=min(rows, self.most))
            self.capture(self.readers[key])
        return self.readers[key]

    def _width(self, streams: Sequence[Stream]) -> int:
        pages = max(len(stream.pages) for stream in streams)
        # another width is another order of sums
        return self.width if self.fixed else min(self.width, table_width(pages, self.cache.size))

    def _put_streams(self, graph: Graph, streams: Sequence[Stream], writing: Sequence[Stream]) -> None:
        """Pages of all streams, and how those that write are drawn for."""
        tables = np.full(tuple(graph.tables.shape), self.spare, np.int32)
        for row, stream in enumerate(streams):
            tables[row, : len(stream.pages)] = stream.pages
        graph.tables.copy_(torch.from_numpy(tables))
        _put(graph.seeds, [stream.seed for stream in writing])
        _put(graph.places, [len(stream.made) for stream in writing])
        _put(graph.temperatures, [stream.sampling.temperature for stream in writing], 1.0)
        graph.turn.zero_()

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


def _put(buffer: Tensor, values: Sequence[Any] | npt.NDArray[np.int64], rest: float = 0) -> None:
    """Values into a buffer that may be longer, from the host."""
    kind = np.float32 if buffer.is_floating_point() else np.int64
    whole = np.full(tuple(buffer.shape), rest, kind)
    if len(values):
        whole[: len(values)] = values
    buffer.copy_(torch.from_numpy(whole))


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


def _read_bucket(tokens: int) -> int:
    """The number of tokens a reading graph has room for: powers of two and one between, at most a third empty."""
    above = max(64, 1 << (tokens - 1).bit_length())
    return 3 * above // 4 if tokens <= 3 * above // 4 and above > 64 else above
