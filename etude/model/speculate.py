"""Speculative decoding with the MTP layers, in its simplest exact form: a reference that measures acceptance.

Each round drafts a few tokens with the first MTP layer, applied repeatedly to its own output, and verifies them in one
forward of the main model. Greedy: a draft is accepted if it is the most likely token. Sampled: it is accepted with
probability min(1, p/q), otherwise the token is drawn from the normalised max(p - q, 0). The output distribution is that
of the main model alone. Rows advance independently.
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
class SpeculationResult:
    tokens: list[list[int]]  # new tokens of every row, at least `new_tokens`
    rounds: int  # forwards of the main model, summed over rows
    accepted_by_depth: list[float]  # share of rounds in which draft 1, 2, ... was accepted

    @property
    def acceptance_length(self) -> float:
        """Tokens per forward of the main model; 1 without drafts."""
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
) -> SpeculationResult:
    """Continue every prompt by at least `new_tokens` tokens. Stop tokens are ignored: this measures acceptance."""
    if not prompts or min(map(len, prompts)) < 2:
        raise InputError("speculation needs prompts of at least two tokens")
    # All rows run until the slowest one is done: a row that accepts every draft reaches this length.
    max_new_tokens = (drafts + 1) * new_tokens
    decoder = _SpeculativeDecoder(model, mtp, prompts, max_new_tokens, drafts, temperature, seed)
    rows = range(len(prompts))
    generated = [[token] for token in decoder.pending.tolist()]
    rounds, accepted = 0, torch.zeros(drafts)
    while min(map(len, generated)) < new_tokens:
        counts, tokens = decoder.round()
        for row in rows:
            if len(generated[row]) < new_tokens:
                count = int(counts[row])
                generated[row] += tokens[row, : count + 1].tolist()
                rounds += 1
                accepted[:count] += 1
    return SpeculationResult(generated, rounds, (accepted / max(1, rounds)).tolist())


class _SpeculativeDecoder:
    """Both KV caches and the start of the next round: the pending token and the hidden states before it."""

    def __init__(
        self,
        model: Transformer,
        mtp: MTP,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
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
        length = longest + max_new_tokens + drafts
        self.main_cache = KVCache(model.config, rows, length, head.dtype, head.device)
        self.mtp_cache = KVCache(replace(model.config, layers=1), rows, length, head.dtype, head.device)
        padded = torch.zeros(rows, longest, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            padded[row, : len(prompt)] = torch.tensor(list(prompt))
        tokens = padded.to(head.device)
        hidden = model.hidden(tokens, cache=self.main_cache)
        self.main_cache.truncate(self.lengths)
        last = hidden[torch.arange(rows), self.lengths - 1]
        self.pending = self._sample(self._probs(model.logits(last)))
        # Next input of the MTP layer: hidden states of positions it has not read, with the tokens that follow them.
        following = tokens.roll(-1, dims=1)
        following[torch.arange(rows), self.lengths - 1] = self.pending
        self.states, self.following, self.unread = hidden, following, self.lengths.clone()

    def round(self) -> tuple[Tensor, Tensor]:
        """Draft and verify once; return the number of accepted drafts of each row and its new tokens (one more)."""
        drafted, draft_probs = self._draft()
        rows = torch.arange(len(self.pending), device=self.pending.device)
        start = self.main_cache.lengths.clone()
        tokens = torch.cat((self.pending[:, None], drafted), dim=1)
        hidden = self.model.hidden(tokens, cache=self.main_cache)
        probs = self._probs(self.model.logits(hidden))
        counts, token = self._verify(drafted, draft_probs, probs)
        self.main_cache.truncate(start + 1 + counts)
        new = torch.cat((drafted, torch.zeros_like(token)[:, None]), dim=1)
        new[rows, counts] = token
        self.states, self.following, self.unread = hidden, new, counts + 1
        self.pending = token
        return counts, new

    def _draft(self) -> tuple[Tensor, Tensor]:
        rows = torch.arange(len(self.pending), device=self.pending.device)
        start = self.mtp_cache.lengths.clone()
        state = self._read(self.states, self.following)
        self.mtp_cache.truncate(start + self.unread)  # drop the padding after a row's own tokens
        last = state[rows, self.unread - 1][:, None]
        tokens, probs, lengths = [], [], self.mtp_cache.lengths.clone()
        for depth in range(self.drafts):
            probs.append(self._probs(self.model.logits(last))[:, 0])
            tokens.append(self._sample(probs[-1]))
            if depth + 1 < self.drafts:
                last = self._read(last, tokens[-1][:, None])
        self.mtp_cache.truncate(lengths)  # these entries come from drafted states; the next round adds the true ones
        return torch.stack(tokens, dim=1), torch.stack(probs, dim=1)

    def _read(self, states: Tensor, tokens: Tensor) -> Tensor:
        rotation = self.model.rope(self.mtp_cache.positions(tokens.shape[1]), states.dtype)
        out: Tensor = self.layer(states, self.model.embed(tokens), rotation, None, self.mtp_cache)
        self.mtp_cache.advance(tokens.shape[1])
        return out

    def _verify(self, drafted: Tensor, draft_probs: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the number of accepted drafts of each row, and its next token."""
        p = probs[:, :-1].gather(2, drafted[..., None])[..., 0]
        q = draft_probs.gather(2, drafted[..., None])[..., 0]
        uniform = torch.rand(p.shape, generator=self.generator, device=p.device)
        counts = (uniform * q < p).long().cumprod(dim=1).sum(dim=1)
        rows = torch.arange(len(counts), device=counts.device)
        target = probs[rows, counts]
        rejected = counts < self.drafts
        residual = (target - draft_probs[rows, counts.clamp(max=self.drafts - 1)]).clamp(min=0)
        final = torch.where(rejected[:, None] & (residual.sum(dim=-1, keepdim=True) > 0), residual, target)
        return counts, self._sample(final / final.sum(dim=-1, keepdim=True))

    def _probs(self, logits: Tensor) -> Tensor:
        """Return the sampling distribution; for greedy decoding, one-hot at the most likely token."""
        if self.temperature:
            return (logits.float() / self.temperature).softmax(dim=-1)
        return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)

    def _sample(self, probs: Tensor) -> Tensor:
        if not self.temperature:
            return probs.argmax(dim=-1)
        return torch.multinomial(probs, 1, generator=self.generator)[:, 0]
