"""Speculative decoding with the MTP layers, in its plainest exact form: the reference, and the measure of acceptance.

Each round drafts a few tokens with the first MTP layer, applied again to its own output, and verifies them in one
forward of the main model. Greedy: a draft is accepted if it is the likeliest token. Sampled: accepted with probability
min(1, p/q), else the token is drawn from what p has more than q. Either way the text is what the main model alone
would have written; acceptance only changes how fast. Rows advance at their own pace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from etude.errors import InputError
from etude.model.cache import KVCache
from etude.model.mtp import MTP, MTPLayer
from etude.model.transformer import Transformer


@dataclass(frozen=True)
class Speculation:
    tokens: list[list[int]]  # new tokens of every row, at least as many as asked for
    rounds: int  # forwards of the main model, summed over rows
    accepted_by_depth: list[float]  # share of rounds in which draft 1, 2, ... was accepted

    @property
    def acceptance_length(self) -> float:
        """Tokens a forward of the main model yields: 1 without drafts."""
        return 1 + sum(self.accepted_by_depth)


@torch.inference_mode()
def speculate(
    model: Transformer,
    mtp: MTP,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    drafts: int = 3,
    temperature: float = 0.0,
    seed: int = 0,
) -> Speculation:
    """Continue every prompt by at least `new_tokens`; stop tokens are not looked for, this is a measurement."""
    if not prompts or min(map(len, prompts)) < 2:
        raise InputError("speculation needs prompts of at least two tokens")
    # All rows run until the slowest has enough: a row that accepts everything gets this far meanwhile.
    room = (drafts + 1) * new_tokens
    state = _Decoder(model, mtp, prompts, room, drafts, temperature, seed)
    rows = range(len(prompts))
    written = [[token] for token in state.pending.tolist()]
    rounds, accepted = 0, torch.zeros(drafts)
    while min(map(len, written)) < new_tokens:
        counts, tokens = state.round()
        for row in rows:
            if len(written[row]) < new_tokens:
                kept = int(counts[row])
                written[row] += tokens[row, : kept + 1].tolist()
                rounds += 1
                accepted[:kept] += 1
    return Speculation(written, rounds, (accepted / max(1, rounds)).tolist())


class _Decoder:
    """Both caches and what the next round starts from: the pending token and the states that led to it."""

    def __init__(
        self,
        model: Transformer,
        mtp: MTP,
        prompts: Sequence[Sequence[int]],
        room: int,
        drafts: int,
        temperature: float,
        seed: int,
    ) -> None:
        self.model, self.drafts, self.temperature = model, drafts, temperature
        layer = mtp.layers[0]
        assert isinstance(layer, MTPLayer)
        self.layer = layer
        head = model.head_weight
        self.generator = torch.Generator(head.device).manual_seed(seed)
        self.lengths = torch.tensor([len(prompt) for prompt in prompts], device=head.device)
        longest, rows = int(self.lengths.max()), len(prompts)
        self.main = KVCache(model.config, rows, longest + room + drafts, head.dtype, head.device)
        self.side = KVCache(replace(model.config, layers=1), rows, longest + room + drafts, head.dtype, head.device)
        padded = torch.zeros(rows, longest, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            padded[row, : len(prompt)] = torch.tensor(list(prompt))
        tokens = padded.to(head.device)
        hidden = model.hidden(tokens, cache=self.main)
        self.main.truncate(self.lengths)
        last = hidden[torch.arange(rows), self.lengths - 1]
        self.pending = self._pick(model.logits(last))
        # What the MTP layer reads next: states of positions it has not seen, with the tokens that followed them.
        following = tokens.roll(-1, dims=1)
        following[torch.arange(rows), self.lengths - 1] = self.pending
        self.states, self.following, self.unread = hidden, following, self.lengths.clone()

    def round(self) -> tuple[Tensor, Tensor]:
        """One draft and one verification: how many drafts each row accepted, and its new tokens (that many + 1)."""
        drafted, draft_odds = self._draft()
        rows = torch.arange(len(self.pending), device=self.pending.device)
        start = self.main.lengths.clone()
        tokens = torch.cat((self.pending[:, None], drafted), dim=1)
        hidden = self.model.hidden(tokens, cache=self.main)
        odds = self._odds(self.model.logits(hidden))
        counts, token = self._verify(drafted, draft_odds, odds)
        self.main.truncate(start + 1 + counts)
        new = torch.cat((drafted, torch.zeros_like(token)[:, None]), dim=1)
        new[rows, counts] = token
        self.states, self.following, self.unread = hidden, new, counts + 1
        self.pending = token
        return counts, new

    def _draft(self) -> tuple[Tensor, Tensor]:
        rows = torch.arange(len(self.pending), device=self.pending.device)
        start = self.side.lengths.clone()
        state = self._read(self.states, self.following)
        self.side.truncate(start + self.unread)  # padding after a row's own tokens leaves no trace
        last = state[rows, self.unread - 1][:, None]
        tokens, odds, kept = [], [], self.side.lengths.clone()
        for depth in range(self.drafts):
            odds.append(self._odds(self.model.logits(last))[:, 0])
            tokens.append(self._draw(odds[-1]))
            if depth + 1 < self.drafts:
                last = self._read(last, tokens[-1][:, None])
        self.side.truncate(kept)  # drafts were read from drafted states; the true ones come with the next round
        return torch.stack(tokens, dim=1), torch.stack(odds, dim=1)

    def _read(self, states: Tensor, tokens: Tensor) -> Tensor:
        rotation = self.model.rope(self.side.positions(tokens.shape[1]), states.dtype)
        out: Tensor = self.layer(states, self.model.embed(tokens), rotation, None, self.side)
        self.side.advance(tokens.shape[1])
        return out

    def _verify(self, drafted: Tensor, draft_odds: Tensor, odds: Tensor) -> tuple[Tensor, Tensor]:
        p = odds[:, :-1].gather(2, drafted[..., None])[..., 0]
        q = draft_odds.gather(2, drafted[..., None])[..., 0]
        luck = torch.rand(p.shape, generator=self.generator, device=p.device)
        counts = (luck * q < p).long().cumprod(dim=1).sum(dim=1)
        rows = torch.arange(len(counts), device=counts.device)
        at = odds[rows, counts]
        rejected = counts < self.drafts
        left = (at - draft_odds[rows, counts.clamp(max=self.drafts - 1)]).clamp(min=0)
        remaining = torch.where(rejected[:, None] & (left.sum(dim=-1, keepdim=True) > 0), left, at)
        return counts, self._draw(remaining / remaining.sum(dim=-1, keepdim=True))

    def _odds(self, logits: Tensor) -> Tensor:
        """The sampling distribution; greedy decoding is all weight on the likeliest token."""
        if self.temperature:
            return (logits.float() / self.temperature).softmax(dim=-1)
        return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)

    def _draw(self, odds: Tensor) -> Tensor:
        if not self.temperature:
            return odds.argmax(dim=-1)
        return torch.multinomial(odds, 1, generator=self.generator)[:, 0]

    def _pick(self, logits: Tensor) -> Tensor:
        return self._draw(self._odds(logits))
