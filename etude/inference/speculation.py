"""Speculative decoding inside the engine: the MTP layer drafts, the model verifies, the distribution stays its own.

The MTP layer keeps keys and values in the same pages as the model, in a layer of its own: for position i it reads the
model's state at i and the token at i + 1. A draft is accepted with probability min(1, p/q); the first that is not is
drawn anew from what p has more than q. Luck is by seed and place, so a stream speculates the same in any company. A
page shared by two streams may hold a draft state of the other at its last position: that can cost an acceptance,
never change a distribution.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from etude.errors import InputError
from etude.inference.paged import Batch, PagedCache, stream_slots
from etude.inference.request import Stream
from etude.inference.sampling import Knobs, distribution
from etude.kernels.draw import ACCEPT, DRAFT, REDRAW, luck, pick
from etude.kernels.paged import Spans
from etude.model.moe import Routing
from etude.model.mtp import MTP, MTPLayer
from etude.model.transformer import Transformer


@dataclass
class Acceptance:
    """How speculation goes: verifications, and how often the first, second, ... draft was accepted."""

    rounds: int = 0
    accepted: list[int] = field(default_factory=list)

    @property
    def length(self) -> float:
        """Tokens a verification yields; 1 without drafts."""
        return 1 + sum(self.accepted) / max(1, self.rounds)


@dataclass(frozen=True)
class Round:
    """What a round made for each stream, and the experts of the tokens it read."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    raw_logprobs: list[list[float]]
    routing: list[np.ndarray | None]


class Speculator:
    """Drafts and verifies for an engine's streams. `cache` is the model's."""

    def __init__(self, model: Transformer, mtp: MTP, cache: PagedCache, pages: int, drafts: int) -> None:
        if drafts < 1:
            raise InputError(f"speculation drafts {drafts} tokens; expected at least 1")
        self.model, self.cache, self.drafts = model, cache, drafts
        layer = mtp.layers[0]
        assert isinstance(layer, MTPLayer)
        self.layer = layer
        weight = model.head_weight
        self.side = PagedCache(replace(model.config, layers=1), pages, cache.size, weight.dtype, weight.device, False)
        self.states: dict[Stream, Tensor] = {}  # of positions the MTP layer has not read, the newest last
        self.acceptance = Acceptance(0, [0] * drafts)

    def forget(self, stream: Stream) -> None:
        self.states.pop(stream, None)

    def absorb(self, streams: Sequence[Stream], hidden: Sequence[Tensor]) -> None:
        """The model has read more of these streams; `hidden` are its states there. All but the last are read too:
        the last one is where the next draft starts."""
        ready = []
        for stream, states in zip(streams, hidden, strict=True):
            before = self.states.get(stream)
            whole = states if before is None else torch.cat((before, states))
            known = len(whole) - 1
            if known > 0:
                ready.append((stream, whole[:known], stream.read - len(whole)))
            self.states[stream] = whole[known:]
        if ready:
            following = [s.tokens(at + 1, at + 1 + len(states)) for s, states, at in ready]
            self._read([s for s, _, _ in ready], [at for _, _, at in ready], [st for _, st, _ in ready], following)

    def round(self, streams: list[Stream]) -> Round:
        """Draft for every stream, verify all in one forward."""
        device = self.model.head_weight.device
        knobs = Knobs.of([s.sampling for s in streams], [s.seed for s in streams], device)
        places = torch.tensor([len(s.made) for s in streams], device=device)
        drafted, draft_odds = self._draft(streams, knobs, places)
        tokens = [[s.made[-1], *row] for s, row in zip(streams, drafted.tolist(), strict=True)]
        starts = [s.length - 1 for s in streams]
        hidden, chosen = self._verify_forward(streams, starts, tokens)
        width = self.drafts + 1
        raw = self.model.logits(hidden).float().log_softmax(dim=-1)
        each = torch.arange(len(streams), device=device).repeat_interleave(width)
        odds = distribution(raw, _spread(knobs, each)).view(len(streams), width, -1)
        counts, last = self._accept(drafted, draft_odds, odds, knobs, places)
        return self._collect(streams, drafted, counts, last, odds, raw.view(len(streams), width, -1), hidden, chosen)

    # ------------------------------------------------------------------------------------------- parts of a round

    def _draft(self, streams: list[Stream], knobs: Knobs, places: Tensor) -> tuple[Tensor, Tensor]:
        ats = [stream.read - len(self.states[stream]) for stream in streams]
        following = [s.tokens(at + 1, s.length) for s, at in zip(streams, ats, strict=True)]
        last = self._read(streams, ats, [self.states[s] for s in streams], following)
        tokens, odds = [], []
        for depth in range(self.drafts):
            odds.append(distribution(self.model.logits(last).float().log_softmax(dim=-1), knobs))
            tokens.append(pick(odds[-1], luck(knobs.seeds, places + depth, DRAFT)))
            if depth + 1 < self.drafts:
                where = [stream.length - 1 + depth for stream in streams]
                steps = tokens[-1].tolist()
                last = self._read(streams, where, list(last[:, None]), [[token] for token in steps])
        return torch.stack(tokens, dim=1), torch.stack(odds, dim=1)

    def _read(self, streams: list[Stream], ats: list[int], states: list[Tensor], following: list[list[int]]) -> Tensor:
        """Run the MTP layer over states from position `at` on; its last output for each stream."""
        counts = [len(tokens) for tokens in following]
        tokens = [token for row in following for token in row]
        self.side.batch = self._batch(streams, ats, counts, tokens)
        batch = self.side.batch
        embedded = self.model.embed(batch.tokens)[None]
        rotation = self.model.rope(batch.positions[None], embedded.dtype)
        out: Tensor = self.layer(torch.cat(states)[None], embedded, rotation, None, self.side)
        return out[0, batch.writers]

    def _verify_forward(
        self, streams: list[Stream], starts: list[int], tokens: list[list[int]]
    ) -> tuple[Tensor, Tensor | None]:
        flat = [token for row in tokens for token in row]
        self.cache.batch = self._batch(streams, starts, [len(row) for row in tokens], flat)
        routing = Routing() if self.model.config.moe else None
        hidden = self.model.hidden(self.cache.batch.tokens[None], cache=self.cache, routing=routing)  # type: ignore[arg-type]
        return hidden[0], routing.chosen[0] if routing is not None and routing.chosen is not None else None

    def _batch(self, streams: list[Stream], ats: list[int], counts: list[int], tokens: list[int]) -> Batch:
        size, device = self.cache.size, self.model.head_weight.device
        ends = [at + count for at, count in zip(ats, counts, strict=True)]
        slots = [stream_slots(stream.pages, 0, end, size) for stream, end in zip(streams, ends, strict=True)]
        new = np.concatenate([where[at:] for where, at in zip(slots, ats, strict=True)])
        positions = np.concatenate([np.arange(at, end) for at, end in zip(ats, ends, strict=True)])
        empty = torch.empty(0, dtype=torch.int64, device=device)
        return Batch(
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
        self, drafted: Tensor, draft_odds: Tensor, odds: Tensor, knobs: Knobs, places: Tensor
    ) -> tuple[Tensor, Tensor]:
        """How many drafts each stream keeps, and the token that follows them."""
        p = odds[:, :-1].gather(2, drafted[..., None])[..., 0].double()
        q = draft_odds.gather(2, drafted[..., None])[..., 0].double()
        lucks = [luck(knobs.seeds, places + depth, ACCEPT) for depth in range(self.drafts)]
        counts = (torch.stack(lucks, dim=1) * q < p).long().cumprod(dim=1).sum(dim=1)
        rows = torch.arange(len(counts), device=counts.device)
        at = odds[rows, counts]
        left = (at - draft_odds[rows, counts.clamp(max=self.drafts - 1)]).clamp(min=0)
        rejected = (counts < self.drafts)[:, None] & (left.sum(dim=-1, keepdim=True) > 0)
        remaining = torch.where(rejected, left, at)
        return counts, pick(remaining, luck(knobs.seeds, places + counts, REDRAW))

    def _collect(
        self,
        streams: list[Stream],
        drafted: Tensor,
        counts: Tensor,
        last: Tensor,
        odds: Tensor,
        raw: Tensor,
        hidden: Tensor,
        chosen: Tensor | None,
    ) -> Round:
        rows = torch.arange(len(streams), device=counts.device)
        tokens = torch.cat((drafted, last[:, None]), dim=1)
        tokens[rows, counts] = last
        logprobs = odds.gather(2, tokens[..., None])[..., 0].log().tolist()
        raws = raw.gather(2, tokens[..., None])[..., 0].tolist()
        width = self.drafts + 1
        made, experts = [], []
        for row, (stream, kept) in enumerate(zip(streams, counts.tolist(), strict=True)):
            first = row * width
            self.states[stream] = hidden[first : first + kept + 1]
            made.append(tokens[row, : kept + 1].tolist())
            experts.append(None if chosen is None else chosen[first : first + kept + 1].cpu().numpy())
            self.acceptance.rounds += 1
            for depth in range(kept):
                self.acceptance.accepted[depth] += 1
        cut = [len(row) for row in made]
        return Round(
            made,
            [row[:n] for row, n in zip(logprobs, cut, strict=True)],
            [row[:n] for row, n in zip(raws, cut, strict=True)],
            experts,
        )


def _spread(knobs: Knobs, rows: Tensor) -> Knobs:
    """The knobs of rows that stand several times."""
    cut = None
    if knobs.cut is not None:
        cut = torch.isin(rows, knobs.cut).nonzero()[:, 0]
    return knobs.spread(rows, cut)
