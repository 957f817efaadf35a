"""The sampler: continuous batching over pages, weights that change under running requests, every token accounted for.

`step` is the whole algorithm: plan, lay out, run the model, draw, hand out. It is synchronous and knows nothing of
threads or servers; `service.py` runs it in a thread for callers that await. The model is the trainer's own code.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from etude.chat.tokenizer import Tokenizer
from etude.errors import InputError
from etude.inference.paged import PagedCache, make_batch
from etude.inference.pages import PagePool, Roots
from etude.inference.request import Ending, Stream, streams_of
from etude.inference.sampling import Knobs, Sampling, draw
from etude.inference.scheduler import Scheduler, Step
from etude.inference.speculation import Speculator
from etude.inference.weight_update import put_weights
from etude.kernels.draw import Drawn
from etude.kernels.linear import pack, pays_to_pack
from etude.model.layers import Linear
from etude.model.moe import Routing
from etude.model.mtp import MTP
from etude.model.transformer import Transformer

if TYPE_CHECKING:
    from etude.inference.graphs import Decoder

CachePolicy = Literal["keep", "recompute"]
PIECE = 256  # tokens of a prompt read at once when a stream's numbers must not depend on others

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineOptions:
    """How much room there is and how it is used."""

    tokens: int = 65_536  # of KV cache, over all streams
    page: int = 16  # tokens of a page
    max_streams: int = 64  # running at once
    budget: int = 512  # tokens of one step: decoding streams first, then prompts in pieces
    sharing: bool = True  # streams that begin alike share pages
    on_swap: CachePolicy = "keep"  # what new weights do to keys and values of the old ones
    drafts: int = 0  # tokens drafted by the MTP layer for each verification; 0: no speculation
    burst: int = 16  # tokens a decoding stream makes before the host looks, where graphs are captured
    invariant: bool = False  # a stream's numbers never depend on what else is in the batch; slower

    def __post_init__(self) -> None:
        for name in ("tokens", "page", "max_streams", "budget", "burst"):
            if (value := getattr(self, name)) < 1:
                raise InputError(f"engine: {name} is {value}; expected at least 1")
        if self.drafts < 0:
            raise InputError(f"engine: drafts is {self.drafts}; expected 0 (none) or more")


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
        # The draft of a shared prefix ends in a state that belongs to the stream that read it: drafts may change with
        # the company, and with them, though never their distribution, the tokens.
        self.pool = PagePool(o.tokens // o.page, o.page, o.sharing and not (o.invariant and o.drafts))
        captured = can_capture(model) and o.burst > 1 and not o.drafts
        ahead = o.burst if captured else 1 + o.drafts
        piece = -(-PIECE // o.page) * o.page if o.invariant else 0
        self.scheduler = Scheduler(self.pool, max_streams=o.max_streams, budget=o.budget, ahead=ahead, piece=piece)
        self.roots = Roots(version)
        # what is still there of older weights depends on the company
        self.scheduler.root_of = lambda stream: self.roots.of(None if o.invariant else stream.sampling.since)
        self.cache = PagedCache(config, self.pool.count, o.page, weight.dtype, self.device, o.invariant)
        self.routes: npt.NDArray[np.unsignedinteger] | None = None
        if config.moe:
            small = np.uint8 if config.moe.experts <= 256 else np.uint16
            shape = (self.pool.count * o.page, len(config.moe.layers), config.moe.per_token)
            self.routes = np.zeros(shape, small)  # by slot, so that a shared prefix brings its routing along
        self.decoder = self._make_decoder() if captured else None
        self.speculator: Speculator | None = None
        if mtp is not None and o.drafts:
            self.speculator = Speculator(model, mtp, self.cache, self.pool.count, o.drafts)
            self.scheduler.on_forget = self.speculator.forget
        pack_weights(model)
        self._knobs: tuple[list[Stream], Knobs] | None = None  # of the streams that wrote last
        self._stepping = False
        self._burst_is_due = False
        self.steps = 0
        self.read_tokens = self.made_tokens = 0

    def _make_decoder(self) -> "Decoder":
        from etude.inference.graphs import Decoder  # needs Triton

        o = self.options
        fixed = o.invariant
        return Decoder(self.model, self.cache, pages=self.pool.count, steps=o.burst, most=o.max_streams, fixed=fixed)

    def warm(self) -> Iterator[bool]:
        """Make ready for steps to come, a moment's work at a time, for as long as the caller has time to spare."""
        if self.decoder is not None:
            yield from self.decoder.warm(self.options.budget)

    # ------------------------------------------------------------------------------------------- asking

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        listener: Callable[[Stream, list[int]], None] | None = None,
    ) -> list[Stream]:
        """Queue a prompt; one stream per sample. They are finished when their `ending` is set."""
        config = self.model.config
        if not prompt:
            raise InputError("the prompt is empty; a model needs at least one token to continue")
        if (low := min(prompt)) < 0 or (high := max(prompt)) >= config.vocab_size:
            stray = low if low < 0 else high
            raise InputError(f"token id {stray} is not in the vocabulary of {config.vocab_size:,}")
        if len(prompt) + sampling.max_tokens > config.max_length:
            asked = f"{len(prompt):,} prompt tokens and {sampling.max_tokens:,} new ones"
            raise InputError(f"{asked} exceed the model's {config.max_length:,}")
        if sampling.stop_text and self.tokenizer is None:
            raise InputError("stop texts need an engine with a tokenizer; give stop token ids instead")
        streams = streams_of(prompt, sampling, listener)
        self.scheduler.add(streams)
        return streams

    def cancel(self, stream: Stream) -> None:
        """End a stream, at once; when a listener asks inside a step, at its end. What the stream has made stays."""
        self.scheduler.cancel(stream)
        if not self._stepping:
            self._end_cancelled()

    def _end_cancelled(self) -> None:
        for stream in self.scheduler.drop_cancelled():
            self._tell(stream, [])

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """New weights between two steps, in place, by our names or the checkpoint's; new tokens are of `version`.

        Streams that run `keep` their keys and values of older weights, or `recompute` them all; either way what
        starts later finds nothing of older weights, but for the sessions that began with them (`Sampling.since`).
        """
        put_weights(weights, self.model, self.mtp, version)
        self.version = version
        if self.options.on_swap == "recompute":
            self.scheduler.recompute_all()
        else:
            self.roots.begin(version)
            self.scheduler.renew()

    # ------------------------------------------------------------------------------------------- running

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def step(self) -> bool:
        """Run one step; False when there is nothing to do."""
        self._stepping = True
        try:
            worked = self._step()
        finally:
            self._stepping = False
        self._end_cancelled()
        return worked

    @torch.inference_mode()
    def _step(self) -> bool:
        # A step that reads makes one token for each stream, and agents' short turns arrive all the time: without a
        # burst after it nearly every token would cost one. When prompts pile up reading goes on, to fill the next.
        step = self.scheduler.plan(read=not self._burst_is_due)
        self._burst_is_due = self.decoder is not None and bool(step.reading) and not step.full
        for stream in step.ended:
            self._tell(stream, [])
        if not step:
            return False
        for part in self._one_by_one(step) if self.options.invariant else [step]:
            self._run(part)
        return True

    def _one_by_one(self, step: Step) -> Iterator[Step]:
        """Every stream in a step of its own; but a captured graph of fixed size may hold all who decode."""
        if self.decoder is not None and step.decoding:
            plain = [stream for stream in step.decoding if stream.sampling.plain]
            if plain:
                yield Step(plain, [])
            yield from (Step([stream], []) for stream in step.decoding if not stream.sampling.plain)
        else:
            yield from (Step([stream], []) for stream in step.decoding)
        yield from (Step([], [piece]) for piece in step.reading)

    def _run(self, step: Step) -> None:
        writers = [*step.decoding, *(piece.stream for piece in step.reading if piece.writes)]
        if self.decoder is not None and all(stream.sampling.plain for stream in writers):
            if not step.reading:
                self._burst(self.decoder, step.decoding)
                return
            if self.decoder.can_read(step):
                self._read(self.decoder, step, writers)
                return
        if self.speculator is not None and step.decoding:
            self._speculate(self.speculator, step.decoding)
            step, writers = Step([], step.reading), writers[len(step.decoding) :]
            if not step:
                return
        batch = make_batch(step, self.pool.size, self.device)
        routing = Routing() if self.routes is not None else None
        self.cache.batch = batch
        hidden = self.model.hidden(batch.tokens[None], cache=self.cache, routing=routing)  # type: ignore[arg-type]
        if self.routes is not None and routing is not None:
            assert routing.chosen is not None
            self.routes[batch.slots.cpu().numpy()] = routing.chosen[0].cpu().numpy()
        drawn = self._draw(hidden[0, batch.writers], writers) if writers else None
        self._account(step, writers, drawn)
        if self.speculator is not None:
            alive = [piece for piece in step.reading if piece.stream.ending is None]
            sizes = [piece.end - piece.start for piece in step.reading]
            states = dict(zip((id(piece) for piece in step.reading), hidden[0].split(sizes), strict=True))
            self.speculator.absorb([piece.stream for piece in alive], [states[id(piece)] for piece in alive])

    def _read(self, decoder: "Decoder", step: Step, writers: list[Stream]) -> None:
        """A step with prompts in it, launched as one graph."""
        made = decoder.read(step)
        if self.routes is not None and made.routing is not None:
            self.routes[made.slots] = made.routing
        self._account(step, writers, made.drawn)

    def _speculate(self, speculator: Speculator, streams: list[Stream]) -> None:
        """A verified run of tokens for everybody."""
        made = speculator.round(streams)
        self.steps += 1
        for row, stream in enumerate(streams):
            start = stream.length
            kept = self._take(stream, made.tokens[row], made.logprobs[row], made.raw_logprobs[row])
            chosen = made.routing[row]
            if chosen is not None:
                self._keep_burst_routing(stream, start, chosen[:kept])
            if stream.ending is None:
                self.scheduler.advance(stream, stream.length - 1)
            else:
                self._finish(stream, start - 1 + kept)

    def _burst(self, decoder: "Decoder", streams: list[Stream]) -> None:
        """Several tokens for everybody; what a stream makes after its end is thrown away."""
        steps = min(self.options.burst, max(s.sampling.max_tokens - len(s.made) for s in streams))
        made = decoder.burst(streams, steps)
        self.steps += steps
        for row, stream in enumerate(streams):
            start, tokens = stream.length, made.tokens[row]
            kept = self._take(stream, tokens, made.logprobs[row], made.raw_logprobs[row])
            if made.routing is not None:
                self._keep_burst_routing(stream, start, made.routing[:kept, row])
            if stream.ending is None:
                self.scheduler.advance(stream, stream.length - 1)
            else:
                self._finish(stream, start - 1 + kept)

    def _keep_burst_routing(self, stream: Stream, start: int, chosen: npt.NDArray[np.integer]) -> None:
        """Experts of the tokens a burst read: the one it began with and all it made but the last."""
        assert self.routes is not None
        size, places = self.pool.size, np.arange(start - 1, start - 1 + len(chosen))
        self.routes[np.asarray(stream.pages)[places // size] * size + places % size] = chosen
        self._record_routes(stream, start - 1 + len(chosen))

    def _draw(self, hidden: Tensor, writers: list[Stream]) -> Drawn:
        if self._knobs is None or self._knobs[0] != writers:
            knobs = Knobs.of([s.sampling for s in writers], [s.seed for s in writers], self.device)
            self._knobs = writers, knobs
        places = torch.tensor([len(stream.made) for stream in writers], device=self.device)
        return draw(self.model.logits(hidden), self._knobs[1], places)

    def _account(self, step: Step, writers: list[Stream], drawn: Drawn | None) -> None:
        """Write down what the step read and made."""
        for stream in step.decoding:
            self._record_routes(stream, stream.length)
            self.scheduler.advance(stream, stream.length)
        for piece in step.reading:
            self._record_routes(piece.stream, piece.end)
            self.scheduler.advance(piece.stream, piece.end)
        self.steps += 1
        self.read_tokens += sum(piece.end - piece.start for piece in step.reading)
        if drawn is None:
            return
        rows = zip(writers, drawn.tokens.tolist(), drawn.logprobs.tolist(), drawn.raw_logprobs.tolist(), strict=True)
        for stream, token, logprob, raw in rows:
            self._take(stream, [token], [logprob], [raw])
            if stream.ending is not None:
                self._finish(stream, stream.length - 1)

    def _record_routes(self, stream: Stream, end: int) -> None:
        """The experts of tokens up to `end`, as they were when first read: what made the tokens that followed."""
        if self.routes is None:
            return
        if stream.routed < end:
            places = np.arange(stream.routed, end)
            slots = np.asarray(stream.pages)[places // self.pool.size] * self.pool.size + places % self.pool.size
            stream.routing.append(self.routes[slots])
            stream.routed = end

    def _take(self, stream: Stream, tokens: list[int], logprobs: list[float], raws: list[float]) -> int:
        """Give a stream its new tokens, up to its end; how many they were."""
        count = min(len(tokens), stream.sampling.max_tokens - len(stream.made))
        ending: Ending | None = "length" if len(stream.made) + count == stream.sampling.max_tokens else None
        if stream.sampling.stop:
            for index, token in enumerate(tokens[:count]):
                if token in stream.sampling.stop:
                    count, ending = index + 1, "stop"
                    break
        if stream.sampling.stop_text:
            count, ending = self._find_text(stream, tokens[:count], ending)
        stream.made += tokens[:count]
        stream.logprobs += logprobs[:count]
        stream.raw_logprobs += raws[:count]
        stream.versions += [self.version] * count
        self.made_tokens += count
        stream.ending = ending
        self._tell(stream, tokens[:count])
        return count

    def _tell(self, stream: Stream, tokens: list[int]) -> None:
        """Tell whoever listens to a stream. One that raises loses that stream, and nobody else anything."""
        if stream.listener is None:
            return
        try:
            stream.listener(stream, tokens)
        except Exception:
            logger.exception("the listener of stream %d failed; the stream is cancelled", stream.number)
            self.cancel(stream)

    def _finish(self, stream: Stream, read: int) -> None:
        """A stream has its end: its full pages can be found by whoever continues it, and its room is free."""
        self.scheduler.advance(stream, read)
        self.scheduler.finish(stream)
        self._tell(stream, [])

    def _find_text(self, stream: Stream, tokens: list[int], ending: Ending | None) -> tuple[int, Ending | None]:
        """How many of the new tokens there are up to the one that completes a stop text."""
        assert self.tokenizer is not None
        reach = max(map(len, stream.sampling.stop_text)) * 4 + 8  # a token is at least a quarter of a character
        for count in range(1, len(tokens) + 1):
            text = self.tokenizer.decode((stream.made + tokens[:count])[-reach:])
            if any(stop in text for stop in stream.sampling.stop_text):
                return count, "stop"
        return len(tokens), ending


def pack_weights(model: Transformer) -> None:
    """Where it pays, keep every matrix of a model once more as its products read it."""
    matrices = [model.head_weight, *(part.weight for part in model.modules() if isinstance(part, Linear))]
    for weight in {id(weight): weight for weight in matrices if pays_to_pack(weight)}.values():
        pack(weight)


def can_capture(model: Transformer) -> bool:
    """Whether a model decodes by captured graphs: on CUDA, half precision, keys and values of a kernel's size."""
    weight, config = model.head_weight, model.config
    fits = config.latent is None and config.head_dim in (16, 32, 64, 128, 256)
    return weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16) and fits
