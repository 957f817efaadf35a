"""Speculative decoding inside the engine: the MTP layer drafts, the model verifies, the distribution stays the model's.

The MTP layer keeps keys and values in the same pages as the model, in a layer of its own: for position i it reads the
model's state at i and the token at i + 1. A draft is accepted with probability min(1, p/q); the first rejected one is
resampled from max(0, p - q). Random numbers depend on seed and position only, so a sequence speculates the same in any
batch. A page shared by two sequences may hold a draft state of the other at its last position: that can cost an
acceptance, but never changes a distribution.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from etude.errors import InputError
from etude.inference.paged import PagedBatch, PagedCache, slots_of
from etude.inference.request import SequenceState
from etude.inference.sampling import SamplingTensors, sampling_probabilities
from etude.kernels.draw import ACCEPT, DRAFT, REDRAW, invert_cdf, uniform
from etude.kernels.paged import Spans
from etude.model.moe import Routing
from etude.model.mtp import MTP, MTPLayer
from etude.model.transformer import Transformer


@dataclass
class Acceptance:
    """Number of verifications, and how often the first, second, ... draft was accepted."""

    rounds: int = 0
    accepted: list[int] = field(default_factory=list)

    @property
    def length(self) -> float:
        """Return the tokens a verification yields; 1 without drafts."""
        return 1 + sum(self.accepted) / max(1, self.rounds)


@dataclass(frozen=True)
class VerifiedDrafts:
    """New tokens of each sequence, and the experts of the tokens that were computed."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    raw_logprobs: list[list[float]]
    routing: list[np.ndarray | None]


class Speculator:
    """Drafts and verifies for an engine's sequences. `cache` is the model's."""

    def __init__(self, model: Transformer, mtp: MTP, cache: PagedCache, pages: int, drafts: int) -> None:
        if drafts < 1:
            raise InputError(f"speculation drafts {drafts} tokens; expected at least 1")
        self.model, self.cache, self.drafts = model, cache, drafts
        layer = mtp.layers[0]
        assert isinstance(layer, MTPLayer)
        self.layer = layer
        weight, config = model.head_weight, replace(model.config, layers=1)
        self.draft_cache = PagedCache(config, pages, cache.size, weight.dtype, weight.device, False)
        self.states: dict[SequenceState, Tensor] = {}  # of positions the MTP layer has not computed, the newest last
        self.acceptance = Acceptance(0, [0] * drafts)

    def forget(self, sequence: SequenceState) -> None:
        self.states.pop(sequence, None)

    def add_states(self, sequences: Sequence[SequenceState], hidden: Sequence[Tensor]) -> None:
        """Take the model's new states of these sequences and run the MTP layer over all of them but the last, from
        which the next draft starts."""
        ready = []
        for sequence, states in zip(sequences, hidden, strict=True):
            before = self.states.get(sequence)
            whole = states if before is None else torch.cat((before, states))
            known = len(whole) - 1
            if known > 0:
                ready.append((sequence, whole[:known], sequence.computed - len(whole)))
            self.states[sequence] = whole[known:]
        if ready:
            following = [s.tokens(at + 1, at + 1 + len(states)) for s, states, at in ready]
            self._run_mtp([s for s, _, _ in ready], [at for _, _, at in ready], [st for _, st, _ in ready], following)

    def draft_and_verify(self, sequences: list[SequenceState]) -> VerifiedDrafts:
        """Draft for every sequence and verify all drafts in one forward."""
        device = self.model.head_weight.device
        tensors = SamplingTensors.of([s.sampling for s in sequences], [s.seed for s in sequences], device)
        positions = torch.tensor([len(s.output) for s in sequences], device=device)
        drafted, draft_probabilities = self._draft(sequences, tensors, positions)
        tokens = [[s.output[-1], *row] for s, row in zip(sequences, drafted.tolist(), strict=True)]
        starts = [s.length - 1 for s in sequences]
        hidden, chosen = self._run_model(sequences, starts, tokens)
        width = self.drafts + 1
        raw = self.model.logits(hidden).float().log_softmax(dim=-1)
        each = torch.arange(len(sequences), device=device).repeat_interleave(width)
        probabilities = sampling_probabilities(raw, _repeat(tensors, each)).view(len(sequences), width, -1)
        counts, last = self._accept(drafted, draft_probabilities, probabilities, tensors, positions)
        raw = raw.view(len(sequences), width, -1)
        return self._collect(sequences, drafted, counts, last, probabilities, raw, hidden, chosen)

    # ------------------------------------------------------------------------------------------- parts of a round

    def _draft(
        self, sequences: list[SequenceState], tensors: SamplingTensors, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        starts = [sequence.computed - len(self.states[sequence]) for sequence in sequences]
        following = [s.tokens(at + 1, s.length) for s, at in zip(sequences, starts, strict=True)]
        last = self._run_mtp(sequences, starts, [self.states[s] for s in sequences], following)
        tokens, probabilities = [], []
        for depth in range(self.drafts):
            raw = self.model.logits(last).float().log_softmax(dim=-1)
            probabilities.append(sampling_probabilities(raw, tensors))
            tokens.append(invert_cdf(probabilities[-1], uniform(tensors.seeds, positions + depth, DRAFT)))
            if depth + 1 < self.drafts:
                where = [sequence.length - 1 + depth for sequence in sequences]
                steps = tokens[-1].tolist()
                last = self._run_mtp(sequences, where, list(last[:, None]), [[token] for token in steps])
        return torch.stack(tokens, dim=1), torch.stack(probabilities, dim=1)

    def _run_mtp(
        self, sequences: list[SequenceState], starts: list[int], states: list[Tensor], following: list[list[int]]
    ) -> Tensor:
        """Run the MTP layer over states from position `start` on; return its last output for each sequence."""
        counts = [len(tokens) for tokens in following]
        tokens = [token for row in following for token in row]
        self.draft_cache.batch = self._batch(sequences, starts, counts, tokens)
        batch = self.draft_cache.batch
        embedded = self.model.embed(batch.tokens)[None]
        rotation = self.model.rope(batch.positions[None], embedded.dtype)
        out: Tensor = self.layer(torch.cat(states)[None], embedded, rotation, None, self.draft_cache)
        return out[0, batch.sampled_rows]

    def _run_model(
        self, sequences: list[SequenceState], starts: list[int], tokens: list[list[int]]
    ) -> tuple[Tensor, Tensor | None]:
        flat = [token for row in tokens for token in row]
        self.cache.batch = self._batch(sequences, starts, [len(row) for row in tokens], flat)
        routing = Routing() if self.model.config.moe else None
        hidden = self.model.hidden(self.cache.batch.tokens[None], cache=self.cache, routing=routing)  # type: ignore[arg-type]
        return hidden[0], routing.chosen[0] if routing is not None and routing.chosen is not None else None

    def _batch(
        self, sequences: list[SequenceState], starts: list[int], counts: list[int], tokens: list[int]
    ) -> PagedBatch:
        size, device = self.cache.size, self.model.head_weight.device
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        slots = [slots_of(sequence.pages, 0, end, size) for sequence, end in zip(sequences, ends, strict=True)]
        new = np.concatenate([where[start:] for where, start in zip(slots, starts, strict=True)])
        positions = np.concatenate([np.arange(start, end) for start, end in zip(starts, ends, strict=True)])
        empty = torch.empty(0, dtype=torch.int64, device=device)
        return PagedBatch(
            torch.tensor(tokens, device=device),
            torch.from_numpy(positions).to(device),
            torch.from_numpy(new).to(device),
            0,
            empty,
            empty,
            Spans.of(counts, slots, device),
            torch.tensor(np.cumsum(counts) - 1, device=device),
        )

    def _accept(
        self,
        drafted: Tensor,
        draft_probabilities: Tensor,
        probabilities: Tensor,
        tensors: SamplingTensors,
        positions: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return how many drafts each sequence keeps, and the token that follows them."""
        p = probabilities[:, :-1].gather(2, drafted[..., None])[..., 0].double()
        q = draft_probabilities.gather(2, drafted[..., None])[..., 0].double()
        uniforms = [uniform(tensors.seeds, positions + depth, ACCEPT) for depth in range(self.drafts)]
        counts = (torch.stack(uniforms, dim=1) * q < p).long().cumprod(dim=1).sum(dim=1)
        rows = torch.arange(len(counts), device=counts.device)
        at = probabilities[rows, counts]
        residual = (at - draft_probabilities[rows, counts.clamp(max=self.drafts - 1)]).clamp(min=0)
        rejected = (counts < self.drafts)[:, None] & (residual.sum(dim=-1, keepdim=True) > 0)
        remaining = torch.where(rejected, residual, at)
        return counts, invert_cdf(remaining, uniform(tensors.seeds, positions + counts, REDRAW))

    def _collect(
        self,
        sequences: list[SequenceState],
        drafted: Tensor,
        counts: Tensor,
        last: Tensor,
        probabilities: Tensor,
        raw: Tensor,
        hidden: Tensor,
        chosen: Tensor | None,
    ) -> VerifiedDrafts:
        rows = torch.arange(len(sequences), device=counts.device)
        tokens = torch.cat((drafted, last[:, None]), dim=1)
        tokens[rows, counts] = last
        logprobs = probabilities.gather(2, tokens[..., None])[..., 0].log().tolist()
        raws = raw.gather(2, tokens[..., None])[..., 0].tolist()
        width = self.drafts + 1
        output, experts = [], []
        for row, (sequence, kept) in enumerate(zip(sequences, counts.tolist(), strict=True)):
            first = row * width
            self.states[sequence] = hidden[first : first + kept + 1]
            output.append(tokens[row, : kept + 1].tolist())
            experts.append(None if chosen is None else chosen[first : first + kept + 1].cpu().numpy())
            self.acceptance.rounds += 1
            for depth in range(kept):
                self.acceptance.accepted[depth] += 1
        sizes = [len(row) for row in output]
        return VerifiedDrafts(
            output,
            [row[:n] for row, n in zip(logprobs, sizes, strict=True)],
            [row[:n] for row, n in zip(raws, sizes, strict=True)],
            experts,
        )


def _repeat(tensors: SamplingTensors, rows: Tensor) -> SamplingTensors:
    """Return the sampling parameters of rows that repeat."""
    truncated = None
    if tensors.truncated is not None:
        truncated = torch.isin(rows, tensors.truncated).nonzero()[:, 0]
    return tensors.select(rows, truncated)
