"""Engine steps on CUDA as captured graphs: one launch instead of hundreds of small ones by the host.

A decode graph is one step at a fixed number of rows and pages: it reads its inputs from static buffers, samples the
next tokens and writes them back as the next inputs. A burst replays it, and the host copies all results once. Rows
beyond the sequences at hand are padding that writes to a page outside the pool. Latent attention, float32 and truncated
sampling are not captured; they run step by step.

A mixed graph is a step with prefill, with room for a number of tokens of any sequences, decoding ones first. It runs
once, and samples only for the rows that need a next token.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from etude.inference.paged import PagedBatch, PagedCache, lay_out_step
from etude.inference.request import SequenceState
from etude.inference.scheduler import ScheduledStep
from etude.kernels.draw import Drawn, draw_untruncated
from etude.kernels.paged import Blocks
from etude.model.moe import Routing
from etude.model.transformer import Transformer


@dataclass(frozen=True)
class BurstResult:
    """Output of a burst, by sequence and step, on the host."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    raw_logprobs: list[list[float]]
    routing: np.ndarray | None  # [steps, sequences, moe layers, experts per token]


# Limits of mixed graphs: up to a third of their rows is padding, whose cost must stay below the launches saved.
MAX_GRAPH_TOKENS = 8192
MAX_GRAPH_WORK = 1 << 40  # tokens times parameters: some milliseconds of an H200
MIN_TABLE_TOKENS = 4096  # covered by the narrowest page table; attention's cost grows with its width, used or not


@dataclass(frozen=True)
class MixedStepResult:
    """Output of a step with prefill: sampled tokens, and the routing of every token in it."""

    drawn: Drawn | None
    slots: npt.NDArray[np.int64]
    routing: npt.NDArray[np.integer] | None  # [tokens, moe layers, experts per token]


class DecodeGraph:
    """Buffers of a decode step of `rows` sequences of up to `width` pages."""

    def __init__(self, runner: "CudaGraphRunner", rows: int, width: int, *, sequences: int = 0, steps: int = 0) -> None:
        device, sequences, steps = runner.device, sequences or rows, steps or runner.steps
        self.rows, self.width = rows, width
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self.tables = torch.full((sequences, width), runner.padding_page, dtype=torch.int32, device=device)
        self.temperatures = torch.ones(sequences, dtype=torch.float32, device=device)
        self.seeds = torch.zeros(sequences, dtype=torch.int64, device=device)
        self.output_positions = torch.zeros(sequences, dtype=torch.int64, device=device)
        self.step_index = torch.zeros(1, dtype=torch.int64, device=device)
        self.out = torch.zeros(steps, sequences, dtype=torch.int64, device=device)
        self.scores = torch.zeros(steps, 2, sequences, dtype=torch.float32, device=device)
        moe = runner.model.config.moe
        shape = (steps, rows, len(moe.layers), moe.per_token) if moe else (0,)
        self.routing = torch.zeros(shape, dtype=torch.int16, device=device)
        self.replay: Callable[[], None] = lambda: runner.run_step(self)

    def batch(self, size: int) -> PagedBatch:
        page = self.tables.gather(1, (self.positions // size)[:, None])[:, 0]
        slots = page.long() * size + self.positions % size
        none = torch.empty(0, dtype=torch.int64, device=slots.device)
        return PagedBatch(self.tokens, self.positions, slots, self.rows, self.tables, self.positions + 1, None, none)

    def select_sampled(self, hidden: Tensor) -> Tensor:
        """Return the rows from which a next token is sampled."""
        return hidden

    def feed_back(self, tokens: Tensor) -> None:
        """Make the sampled tokens the next inputs."""
        self.tokens.copy_(tokens)
        self.positions += 1
        self.output_positions += 1


class MixedGraph(DecodeGraph):
    """Buffers of a step of `rows` tokens of up to `sequences` sequences: decoding tokens, then prefill chunks."""

    def __init__(self, runner: "CudaGraphRunner", rows: int, width: int, sequences: int) -> None:
        super().__init__(runner, rows, width, sequences=sequences, steps=2)  # two to warm up
        config, device = runner.model.config, runner.device
        self.slots = torch.full((rows,), runner.padding_page * runner.cache.size, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(sequences, dtype=torch.int64, device=device)  # 0: it does not decode
        self.sampled_rows = torch.zeros(sequences, dtype=torch.int64, device=device)
        queries = Blocks.queries_of(config.heads, config.kv_heads)
        blocks = rows // queries + sequences  # every chunk may end with a block that is not full
        self.blocks = Blocks(torch.zeros(blocks, 4, dtype=torch.int32, device=device), queries)

    def batch(self, size: int) -> PagedBatch:
        table = self.tables, self.lengths, self.blocks
        return PagedBatch(self.tokens, self.positions, self.slots, len(self.lengths), *table, self.sampled_rows)

    def select_sampled(self, hidden: Tensor) -> Tensor:
        return hidden[self.sampled_rows]

    def feed_back(self, tokens: Tensor) -> None:
        """Do nothing: a mixed graph runs once."""


class CudaGraphRunner:
    """Graphs by number of rows and pages, captured when first needed, or earlier by `warm_up`."""

    def __init__(
        self, model: Transformer, cache: PagedCache, *, pages: int, steps: int, max_sequences: int, fixed: bool = False
    ) -> None:
        self.model, self.cache, self.steps, self.max_sequences = model, cache, steps, max_sequences
        self.fixed = fixed  # always the same number of rows: another number may mean another matrix kernel
        self.device = model.head_weight.device
        self.width = -(-(model.config.max_length + steps) // cache.size)  # pages of the longest possible sequence
        self.padding_page = pages  # the page beyond the pool's
        self.memory: Any = None  # memory pool shared by all graphs
        self.decode_graphs: dict[tuple[int, int], DecodeGraph] = {}
        self.mixed_graphs: dict[tuple[int, int], MixedGraph] = {}
        self.max_work_tokens = MAX_GRAPH_WORK // sum(weight.numel() for weight in model.parameters())

    def run_step(self, graph: DecodeGraph) -> None:
        """Run one step over a graph's buffers; this is what a graph captures."""
        self.cache.batch = graph.batch(self.cache.size)
        routing = Routing() if self.model.config.moe else None
        hidden = self.model.hidden(graph.tokens[None], cache=self.cache, routing=routing)  # type: ignore[arg-type]
        logits = self.model.logits(graph.select_sampled(hidden[0]))
        tokens, logprobs, raw = draw_untruncated(logits, graph.temperatures, graph.seeds, graph.output_positions)
        graph.out.index_copy_(0, graph.step_index, tokens[None])
        graph.scores.index_copy_(0, graph.step_index, torch.stack((logprobs, raw))[None])
        if routing is not None and routing.chosen is not None:
            graph.routing.index_copy_(0, graph.step_index, routing.chosen.to(torch.int16))
        graph.feed_back(tokens)
        graph.step_index += 1

    def run_burst(self, sequences: Sequence[SequenceState], steps: int) -> BurstResult:
        """Decode `steps` tokens for every sequence."""
        graph = self._decode_graph(min(self.max_sequences, _row_bucket(len(sequences))), self._width(sequences))
        _fill(graph.tokens, [sequence.output[-1] for sequence in sequences])
        _fill(graph.positions, [sequence.length - 1 for sequence in sequences])
        self._fill_sequences(graph, sequences, sequences)
        for _ in range(steps):
            graph.replay()
        n = len(sequences)
        tokens = graph.out[:steps, :n].T.tolist()
        scores = graph.scores[:steps, :, :n].permute(1, 2, 0).tolist()
        routing = graph.routing[:steps, :n].cpu().numpy() if graph.routing.numel() else None
        return BurstResult(tokens, scores[0], scores[1], routing)

    def can_run_mixed(self, step: ScheduledStep) -> bool:
        return not self.fixed and step.tokens <= min(MAX_GRAPH_TOKENS, self.max_work_tokens)

    def run_mixed(self, step: ScheduledStep) -> MixedStepResult:
        """Run a step with prefill."""
        sequences = [*step.decoding, *(chunk.sequence for chunk in step.prefill)]
        graph = self._mixed_graph(_token_bucket(step.tokens), self._width(sequences))
        layout = lay_out_step(step, self.cache.size)
        blocks = []
        for row, (chunk, first) in enumerate(zip(step.prefill, layout.starts, strict=True), len(step.decoding)):
            blocks += Blocks.split(row, first, chunk.end - chunk.start, chunk.start, graph.blocks.queries)
        _fill(graph.tokens, layout.tokens)
        _fill(graph.positions, layout.positions)
        _fill(graph.slots, layout.slots, self.padding_page * self.cache.size)
        _fill(graph.lengths, [sequence.length for sequence in step.decoding])
        _fill(graph.sampled_rows, layout.sampled_rows)
        _fill(graph.blocks.rows, blocks)
        sampled = [*step.decoding, *(chunk.sequence for chunk in step.prefill if chunk.is_last)]
        self._fill_sequences(graph, sequences, sampled)
        graph.replay()
        drawn = Drawn(graph.out[0, : len(sampled)], *graph.scores[0, :, : len(sampled)]) if sampled else None
        routing = graph.routing[0, : step.tokens].cpu().numpy() if graph.routing.numel() else None
        return MixedStepResult(drawn, layout.slots, routing)

    def warm_up(self, tokens: int) -> Iterator[bool]:
        """Capture the graphs that sequences of ordinary length need in steps of up to `tokens` tokens, one at a time.

        A graph captured while the engine is idle delays no request later.
        """
        width = self.width if self.fixed else min(self.width, table_width(1, self.cache.size))
        most = self.max_sequences
        for rows in sorted({min(most, _row_bucket(count)) for count in range(1, most + 1)}, reverse=True):
            self._decode_graph(rows, width)
            yield True
        limit = 0 if self.fixed else min(tokens, MAX_GRAPH_TOKENS, self.max_work_tokens)
        for rows in sorted({_token_bucket(count) for count in range(1, limit + 1)}):
            self._mixed_graph(rows, width)
            yield True

    @torch.inference_mode()
    def _decode_graph(self, rows: int, width: int) -> DecodeGraph:
        key = self.max_sequences if self.fixed else rows, width
        if key not in self.decode_graphs:
            self.decode_graphs[key] = DecodeGraph(self, *key)
            self.capture(self.decode_graphs[key])
        return self.decode_graphs[key]

    @torch.inference_mode()
    def _mixed_graph(self, rows: int, width: int) -> MixedGraph:
        key = rows, width
        if key not in self.mixed_graphs:
            self.mixed_graphs[key] = MixedGraph(self, *key, sequences=min(rows, self.max_sequences))
            self.capture(self.mixed_graphs[key])
        return self.mixed_graphs[key]

    def _width(self, sequences: Sequence[SequenceState]) -> int:
        pages = max(len(sequence.pages) for sequence in sequences)
        # another width means another order of summation
        return self.width if self.fixed else min(self.width, table_width(pages, self.cache.size))

    def _fill_sequences(
        self, graph: DecodeGraph, sequences: Sequence[SequenceState], sampled: Sequence[SequenceState]
    ) -> None:
        """Fill in the pages of all sequences and the sampling parameters of those that get a token."""
        tables = np.full(tuple(graph.tables.shape), self.padding_page, np.int32)
        for row, sequence in enumerate(sequences):
            tables[row, : len(sequence.pages)] = sequence.pages
        graph.tables.copy_(torch.from_numpy(tables))
        _fill(graph.seeds, [sequence.seed for sequence in sampled])
        _fill(graph.output_positions, [len(sequence.output) for sequence in sampled])
        _fill(graph.temperatures, [sequence.sampling.temperature for sequence in sampled], 1.0)
        graph.step_index.zero_()

    def capture(self, graph: DecodeGraph) -> None:
        """Capture a graph's step; from then on it is replayed."""
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


def _fill(buffer: Tensor, values: Sequence[Any] | npt.NDArray[np.int64], rest: float = 0) -> None:
    """Copy values from the host into a buffer that may be longer; the rest of it is set to `rest`."""
    dtype = np.float32 if buffer.is_floating_point() else np.int64
    whole = np.full(tuple(buffer.shape), rest, dtype)
    if len(values):
        whole[: len(values)] = values
    buffer.copy_(torch.from_numpy(whole))


def table_width(pages: int, size: int) -> int:
    """Return the page table width for sequences of up to `pages` pages: the narrowest, doubled as often as needed."""
    narrowest = max(1, MIN_TABLE_TOKENS // size)
    return narrowest << max(0, -(-pages // narrowest) - 1).bit_length()


def _row_bucket(rows: int) -> int:
    """Return the number of rows a decode graph is captured for: few graphs, little padding."""
    if rows <= 8:
        return 1 << (rows - 1).bit_length()
    step = max(8, 1 << (rows.bit_length() - 3))
    return -(-rows // step) * step


def _token_bucket(tokens: int) -> int:
    """Return the tokens a mixed graph has room for: powers of two and one between, at most a third padding."""
    above = max(64, 1 << (tokens - 1).bit_length())
    return 3 * above // 4 if tokens <= 3 * above // 4 and above > 64 else above
