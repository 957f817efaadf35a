"""The inference engine: continuous batching over a paged KV cache, with weights that change under running requests.

`step` is the whole algorithm: schedule, build the batch, run the model, sample, append. It is synchronous and knows
nothing of threads or servers; `service.py` runs it in a thread for async callers. The model is the trainer's own code.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from etude.chat.tokenizer import Tokenizer, check_vocabulary
from etude.errors import InputError
from etude.inference.paged import PagedCache, make_batch, slots_of
from etude.inference.pages import PagePool, PrefixRoots
from etude.inference.request import Ending, SequenceState, make_sequences
from etude.inference.sampling import Sampling, SamplingTensors, draw
from etude.inference.scheduler import ScheduledStep, Scheduler
from etude.inference.settings import EngineOptions
from etude.inference.speculation import Speculator
from etude.inference.weight_update import copy_weights
from etude.kernels import usable_device
from etude.kernels.draw import Drawn
from etude.kernels.linear import pack, pays_to_pack
from etude.model.checkpoint import load
from etude.model.layers import Linear
from etude.model.moe import Routing
from etude.model.mtp import MTP, count_mtp_layers, load_mtp
from etude.model.transformer import Transformer

if TYPE_CHECKING:
    from etude.inference.graphs import CudaGraphRunner

INVARIANT_CHUNK = 256  # tokens of a prefill chunk when a sequence's numbers must not depend on the batch

logger = logging.getLogger(__name__)


class Engine:
    """One model, one cache, any number of requests. Not thread-safe: one thread drives it."""

    def __init__(
        self,
        model: Transformer,
        options: EngineOptions | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        mtp: MTP | None = None,
        version: int = 0,
    ) -> None:
        self.model, self.options, self.tokenizer, self.version = model, options or EngineOptions(), tokenizer, version
        self.mtp = mtp
        weight = model.head_weight
        self.device, config, o = weight.device, model.config, self.options
        if o.drafts and mtp is None:
            raise InputError(f"{o.drafts} drafts need a model with MTP layers; this checkpoint has none")
        # The draft state at the end of a shared prefix belongs to the sequence that computed it: with sharing, drafts
        # (and so the tokens, though never their distribution) may depend on other sequences.
        prefix_caching = o.prefix_caching and not (o.invariant and o.drafts)
        self.pool = PagePool(o.kv_cache_tokens // o.page_size, o.page_size, prefix_caching)
        captured = can_capture(model) and o.burst > 1 and not o.drafts
        self.scheduler = Scheduler(
            self.pool,
            max_sequences=o.max_sequences,
            max_step_tokens=o.max_step_tokens,
            lookahead=o.burst if captured else 1 + o.drafts,
            fixed_chunk=-(-INVARIANT_CHUNK // o.page_size) * o.page_size if o.invariant else 0,
        )
        self.prefix_roots = PrefixRoots(version)
        # Which pages of older weights are still cached depends on other sequences, so `invariant` uses none.
        self.scheduler.prefix_root_of = lambda sequence: self.prefix_roots.root_for(
            None if o.invariant else sequence.sampling.since
        )
        self.cache = PagedCache(config, self.pool.count, o.page_size, weight.dtype, self.device, o.invariant)
        self.routing_by_slot: npt.NDArray[np.unsignedinteger] | None = None  # a shared prefix shares its routing
        if config.moe:
            dtype = np.uint8 if config.moe.experts <= 256 else np.uint16
            shape = (self.pool.count * o.page_size, len(config.moe.layers), config.moe.per_token)
            self.routing_by_slot = np.zeros(shape, dtype)
        self.graph_runner = self._make_graph_runner() if captured else None
        self.speculator: Speculator | None = None
        if mtp is not None and o.drafts:
            self.speculator = Speculator(model, mtp, self.cache, self.pool.count, o.drafts)
            self.scheduler.on_release = self.speculator.forget
        pack_weights(model)
        self._tensors: tuple[list[SequenceState], SamplingTensors] | None = None  # of the last sampled sequences
        self._stepping = False
        self._burst_is_due = False
        self.steps = 0
        self.prefill_tokens = self.output_tokens = 0

    def _make_graph_runner(self) -> "CudaGraphRunner":
        from etude.inference.graphs import CudaGraphRunner  # needs Triton

        o = self.options
        sizes = {"pages": self.pool.count, "steps": o.burst, "max_sequences": o.max_sequences}
        return CudaGraphRunner(self.model, self.cache, **sizes, fixed=o.invariant)

    def warm_up(self) -> Iterator[bool]:
        """Capture the graphs that later steps need, one for each item the caller takes."""
        if self.graph_runner is not None:
            yield from self.graph_runner.warm_up(self.options.max_step_tokens)

    # ------------------------------------------------------------------------------------------- requests

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        listener: Callable[[SequenceState, list[int]], None] | None = None,
    ) -> list[SequenceState]:
        """Queue a prompt and return its sequences, one per completion. They are finished when `ending` is set."""
        config = self.model.config
        if not prompt:
            raise InputError("the prompt is empty; a model needs at least one token to continue")
        if (low := min(prompt)) < 0 or (high := max(prompt)) >= config.vocab_size:
            invalid = low if low < 0 else high
            raise InputError(f"token id {invalid} is not in the vocabulary of {config.vocab_size:,}")
        if len(prompt) + sampling.max_tokens > config.max_length:
            wanted = f"{len(prompt):,} prompt tokens and {sampling.max_tokens:,} new ones"
            raise InputError(f"{wanted} exceed the model's {config.max_length:,}")
        if sampling.stop_text and self.tokenizer is None:
            raise InputError("stop texts need an engine with a tokenizer; give stop token ids instead")
        sequences = make_sequences(prompt, sampling, listener)
        self.scheduler.add(sequences)
        return sequences

    def cancel(self, sequence: SequenceState) -> None:
        """End a sequence at once, or at the end of the step when a listener calls this inside one. Output is kept."""
        self.scheduler.cancel(sequence)
        if not self._stepping:
            self._end_cancelled()

    def _end_cancelled(self) -> None:
        for sequence in self.scheduler.drop_cancelled():
            self._notify(sequence, [])

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Load weights between two steps, in place, by our tensor names or the checkpoint's; new tokens get `version`.

        Running sequences `keep` keys and values of older weights or `recompute` them all. Either way, sequences that
        start later reuse nothing of older weights, except in sessions that began with them (`Sampling.since`).
        """
        copy_weights(weights, self.model, self.mtp, version)
        self.version = version
        if self.options.on_swap == "recompute":
            self.scheduler.recompute_all()
        else:
            self.prefix_roots.add_version(version)
            self.scheduler.on_new_weights()

    # ------------------------------------------------------------------------------------------- steps

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def step(self) -> bool:
        """Run one step; return False when there is nothing to do."""
        self._stepping = True
        try:
            worked = self._step()
        finally:
            self._stepping = False
        self._end_cancelled()
        return worked

    @torch.inference_mode()
    def _step(self) -> bool:
        # A step with prefill adds one token to each sequence, and agents' short turns arrive all the time: without a
        # burst after it nearly every token would cost such a step. When many prompts wait, prefill continues instead.
        step = self.scheduler.schedule(prefill=not self._burst_is_due)
        self._burst_is_due = self.graph_runner is not None and bool(step.prefill) and not step.exhausted
        for sequence in step.cancelled:
            self._notify(sequence, [])
        if not step:
            return False
        for part in self._split_by_sequence(step) if self.options.invariant else [step]:
            self._run(part)
        return True

    def _split_by_sequence(self, step: ScheduledStep) -> Iterator[ScheduledStep]:
        """Split a step into one per sequence; a captured graph of fixed size may decode all of them together."""
        if self.graph_runner is not None and step.decoding:
            together = [sequence for sequence in step.decoding if sequence.sampling.untruncated]
            if together:
                yield ScheduledStep(together, [])
            yield from (ScheduledStep([each], []) for each in step.decoding if not each.sampling.untruncated)
        else:
            yield from (ScheduledStep([sequence], []) for sequence in step.decoding)
        yield from (ScheduledStep([], [chunk]) for chunk in step.prefill)

    def _run(self, step: ScheduledStep) -> None:
        sampled = [*step.decoding, *(chunk.sequence for chunk in step.prefill if chunk.is_last)]
        if self.graph_runner is not None and all(sequence.sampling.untruncated for sequence in sampled):
            if not step.prefill:
                self._run_burst(self.graph_runner, step.decoding)
                return
            if self.graph_runner.can_run_mixed(step):
                self._run_mixed(self.graph_runner, step, sampled)
                return
        if self.speculator is not None and step.decoding:
            self._speculate(self.speculator, step.decoding)
            step, sampled = ScheduledStep([], step.prefill), sampled[len(step.decoding) :]
            if not step:
                return
        batch = make_batch(step, self.pool.size, self.device)
        routing = Routing() if self.routing_by_slot is not None else None
        self.cache.batch = batch
        hidden = self.model.hidden(batch.tokens[None], cache=self.cache, routing=routing)  # type: ignore[arg-type]
        if self.routing_by_slot is not None and routing is not None:
            assert routing.chosen is not None
            self.routing_by_slot[batch.slots.cpu().numpy()] = routing.chosen[0].cpu().numpy()
        drawn = self._draw(hidden[0, batch.sampled_rows], sampled) if sampled else None
        self._record_step(step, sampled, drawn)
        if self.speculator is not None:
            alive = [chunk for chunk in step.prefill if chunk.sequence.ending is None]
            sizes = [chunk.end - chunk.start for chunk in step.prefill]
            states = dict(zip((id(chunk) for chunk in step.prefill), hidden[0].split(sizes), strict=True))
            self.speculator.add_states([chunk.sequence for chunk in alive], [states[id(chunk)] for chunk in alive])

    def _run_mixed(self, runner: "CudaGraphRunner", step: ScheduledStep, sampled: list[SequenceState]) -> None:
        """Run a step with prefill as one captured graph."""
        result = runner.run_mixed(step)
        if self.routing_by_slot is not None and result.routing is not None:
            self.routing_by_slot[result.slots] = result.routing
        self._record_step(step, sampled, result.drawn)

    def _speculate(self, speculator: Speculator, sequences: list[SequenceState]) -> None:
        """Draft and verify several tokens for every sequence."""
        result = speculator.draft_and_verify(sequences)
        self.steps += 1
        for row, sequence in enumerate(sequences):
            start = sequence.length
            kept = self._append(sequence, result.tokens[row], result.logprobs[row], result.raw_logprobs[row])
            chosen = result.routing[row]
            if chosen is not None:
                self._record_burst_routing(sequence, start, chosen[:kept])
            if sequence.ending is None:
                self.scheduler.advance(sequence, sequence.length - 1)
            else:
                self._finish(sequence, start - 1 + kept)

    def _run_burst(self, runner: "CudaGraphRunner", sequences: list[SequenceState]) -> None:
        """Decode several tokens for every sequence; tokens after a sequence's end are discarded."""
        steps = min(self.options.burst, max(s.sampling.max_tokens - len(s.output) for s in sequences))
        result = runner.run_burst(sequences, steps)
        self.steps += steps
        for row, sequence in enumerate(sequences):
            start = sequence.length
            kept = self._append(sequence, result.tokens[row], result.logprobs[row], result.raw_logprobs[row])
            if result.routing is not None:
                self._record_burst_routing(sequence, start, result.routing[:kept, row])
            if sequence.ending is None:
                self.scheduler.advance(sequence, sequence.length - 1)
            else:
                self._finish(sequence, start - 1 + kept)

    def _record_burst_routing(self, sequence: SequenceState, start: int, chosen: npt.NDArray[np.integer]) -> None:
        """Record the experts of the tokens a burst computed: its first input and all its output but the last."""
        assert self.routing_by_slot is not None
        end = start - 1 + len(chosen)
        self.routing_by_slot[slots_of(sequence.pages, start - 1, end, self.pool.size)] = chosen
        self._record_routing(sequence, end)

    def _draw(self, hidden: Tensor, sampled: list[SequenceState]) -> Drawn:
        if self._tensors is None or self._tensors[0] != sampled:
            tensors = SamplingTensors.of([s.sampling for s in sampled], [s.seed for s in sampled], self.device)
            self._tensors = sampled, tensors
        positions = torch.tensor([len(sequence.output) for sequence in sampled], device=self.device)
        return draw(self.model.logits(hidden), self._tensors[1], positions)

    def _record_step(self, step: ScheduledStep, sampled: list[SequenceState], drawn: Drawn | None) -> None:
        """Record what a step computed and append the tokens it sampled."""
        for sequence in step.decoding:
            self._record_routing(sequence, sequence.length)
            self.scheduler.advance(sequence, sequence.length)
        for chunk in step.prefill:
            self._record_routing(chunk.sequence, chunk.end)
            self.scheduler.advance(chunk.sequence, chunk.end)
        self.steps += 1
        self.prefill_tokens += sum(chunk.end - chunk.start for chunk in step.prefill)
        if drawn is None:
            return
        rows = zip(sampled, drawn.tokens.tolist(), drawn.logprobs.tolist(), drawn.raw_logprobs.tolist(), strict=True)
        for sequence, token, logprob, raw in rows:
            self._append(sequence, [token], [logprob], [raw])
            if sequence.ending is not None:
                self._finish(sequence, sequence.length - 1)

    def _record_routing(self, sequence: SequenceState, end: int) -> None:
        """Copy the experts of tokens up to `end` as they are when first computed, by these weights: they produced what
        followed."""
        if self.routing_by_slot is None:
            return
        if sequence.routed < end:
            slots = slots_of(sequence.pages, sequence.routed, end, self.pool.size)
            sequence.routing.append(self.routing_by_slot[slots])
            sequence.routed = end

    def _append(self, sequence: SequenceState, tokens: list[int], logprobs: list[float], raws: list[float]) -> int:
        """Append new tokens to a sequence, up to its end; return how many."""
        count = min(len(tokens), sequence.sampling.max_tokens - len(sequence.output))
        ending: Ending | None = "length" if len(sequence.output) + count == sequence.sampling.max_tokens else None
        if sequence.sampling.stop:
            for index, token in enumerate(tokens[:count]):
                if token in sequence.sampling.stop:
                    count, ending = index + 1, "stop"
                    break
        if sequence.sampling.stop_text:
            count, ending = self._find_stop_text(sequence, tokens[:count], ending)
        sequence.output += tokens[:count]
        sequence.logprobs += logprobs[:count]
        sequence.raw_logprobs += raws[:count]
        sequence.versions += [self.version] * count
        self.output_tokens += count
        sequence.ending = ending
        self._notify(sequence, tokens[:count])
        return count

    def _notify(self, sequence: SequenceState, tokens: list[int]) -> None:
        """Call a sequence's listener. If it raises, that sequence is cancelled and no other is affected."""
        if sequence.listener is None:
            return
        try:
            sequence.listener(sequence, tokens)
        except Exception:
            logger.exception("the listener of sequence %d failed; the sequence is cancelled", sequence.number)
            self.cancel(sequence)

    def _finish(self, sequence: SequenceState, computed: int) -> None:
        """Index the full pages of a sequence that has ended, for requests that continue it, and release its pages."""
        self.scheduler.advance(sequence, computed)
        self.scheduler.finish(sequence)
        self._notify(sequence, [])

    def _find_stop_text(
        self, sequence: SequenceState, tokens: list[int], ending: Ending | None
    ) -> tuple[int, Ending | None]:
        """Return the number of new tokens up to the one that completes a stop text, and the ending."""
        assert self.tokenizer is not None
        reach = max(map(len, sequence.sampling.stop_text)) * 4 + 8  # a token is at least a quarter of a character
        for count in range(1, len(tokens) + 1):
            text = self.tokenizer.decode((sequence.output + tokens[:count])[-reach:])
            if any(stop in text for stop in sequence.sampling.stop_text):
                return count, "stop"
        return len(tokens), ending


def open_engine(
    checkpoint: Path, options: EngineOptions, *, dtype: torch.dtype | None = None, device: str = "auto"
) -> Engine:
    """Return an engine for a checkpoint, with its MTP layers if it drafts; `dtype` is that of the files by default."""
    tokenizer = Tokenizer.load(checkpoint)
    if options.drafts and not count_mtp_layers(checkpoint):
        raise InputError(f"drafts = {options.drafts}: {checkpoint} has no MTP layers to draft with; leave drafts out")
    model = load(checkpoint, dtype=dtype, device=usable_device(device))
    check_vocabulary(tokenizer, model.config.vocab_size, str(checkpoint))
    weight = model.head_weight
    mtp = load_mtp(checkpoint, model.config, weight.dtype, weight.device) if options.drafts else None
    return Engine(model, options, tokenizer=tokenizer, mtp=mtp)


def pack_weights(model: Transformer) -> None:
    """Keep a packed copy of every matrix of a model where that makes its products faster."""
    matrices = [model.head_weight, *(part.weight for part in model.modules() if isinstance(part, Linear))]
    for weight in {id(weight): weight for weight in matrices if pays_to_pack(weight)}.values():
        pack(weight)


def can_capture(model: Transformer) -> bool:
    """Return whether a model can run as captured graphs: CUDA, half precision, a head size the kernel supports."""
    weight, config = model.head_weight, model.config
    fits = config.latent is None and config.head_dim in (16, 32, 64, 128, 256)
    return weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16) and fits
