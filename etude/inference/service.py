"""The engine in a thread of its own, for callers that await.

The thread alone touches the engine: everything asked for is a command that runs between two steps, and everything that
comes of a step is told to the callers once, after it. A request that was taken in ends exactly once: with its samples,
or with an error that says why. An exception inside a step ends all of them and marks the service broken.
"""

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from torch import Tensor

from etude.errors import BusyError, EtudeError, InputError
from etude.inference.engine import CachePolicy, Engine
from etude.inference.latency import FIRST_TOKEN_S, OUTPUT_TOKEN_S, Histogram
from etude.inference.policy import Weights
from etude.inference.request import Ending, Sample, Stream
from etude.inference.sampling import Sampling
from etude.inference.speculation import Acceptance
from etude.inference.weight_update import check_finite, read_weights

State = Literal["running", "paused", "draining", "broken", "closed"]
T = TypeVar("T")

MAX_WAITING = 1024  # samples that wait for a place among the running ones
RETRY_AFTER_S = 1.0  # what a refused caller is told; a place falls free every few steps
STUCK_STEPS = 1000  # steps in a row that did nothing while there was work: a bug that must not spin for ever

logger = logging.getLogger(__name__)


class QueueFull(BusyError):
    """There is no place to wait in; `retry_after` seconds later there may be one."""

    retry_after = RETRY_AFTER_S


class Draining(BusyError):
    """The service finishes what it has and takes nothing new."""

    retry_after = RETRY_AFTER_S


class EngineBroken(EtudeError):
    """The engine stopped: nothing it had will be finished, nothing new is taken."""


class TooLong(InputError):
    """Prompt and new tokens are more than the model or the cache can hold."""


@dataclass(frozen=True, slots=True)
class Piece:
    """New tokens of one sample; `ending` is set in its last piece, which may be empty."""

    index: int
    tokens: list[int]
    logprobs: list[float]
    raw_logprobs: list[float]
    versions: list[int]
    ending: Ending | None = None


@dataclass(frozen=True)
class Loaded:
    """A swap that was done."""

    version: int
    on_swap: CachePolicy
    in_flight: int  # samples that went on with the new weights
    seconds: float  # that sampling stood still


@dataclass(frozen=True)
class Stats:
    """What the service has done and what it is doing."""

    state: State
    version: int
    requests: int
    endings: dict[str, int]  # samples by how they ended: stop, length, cancelled, failed
    refused: int  # requests for which there was no place
    made_tokens: int
    read_tokens: int  # prompt tokens the model has read, again after a preemption included
    prompt_tokens: int  # of the samples that ended
    cached_tokens: int  # of those, the ones whose keys and values were there already
    preemptions: int
    running: int
    waiting: int
    pages_held: int
    pages: int
    swaps: int
    steps: int
    busy_s: float
    draft_rounds: int  # times a sample's drafts were verified
    accepted: list[int]  # how often the first, second, ... draft of a round was; empty without speculation
    first_token: Histogram  # seconds from a request to each sample's first token
    output_token: Histogram  # seconds a sample took for each token after its first


class Generation:
    """A request that was taken in: iterate over its pieces or await its samples. Leaving it cancels what still runs."""

    def __init__(self, service: "EngineService", prompt: Sequence[int], sampling: Sampling, streaming: bool) -> None:
        self.prompt, self.sampling, self.streaming = list(prompt), sampling, streaming
        self.loop = asyncio.get_running_loop()
        self.accepted: asyncio.Future[None] = self.loop.create_future()
        self.streams: list[Stream] = []  # written by the engine's thread before `accepted` is set
        self.cancelled = False
        self.asked = time.perf_counter()
        self._service = service
        self._changed = asyncio.Event()
        self._ready = [0] * sampling.samples  # tokens of each that were told to us
        self._endings: dict[int, Ending] = {}
        self._error: EtudeError | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    @property
    def ended(self) -> bool:
        return len(self._endings) == self.sampling.samples or self._error is not None

    @property
    def cached(self) -> int:
        """Prompt tokens that did not have to be read."""
        return self.streams[0].cached

    def cancel(self) -> None:
        """End what still runs; its pages are free before the next step. Any thread may call it, and often."""
        if not self.ended and not self.cancelled:
            self.cancelled = True
            self._service.cancel(self)

    def hear(self, news: list[tuple[int, int, Ending | None]], error: EtudeError | None = None) -> None:
        """What the engine's thread says, in our loop: how far each sample is, or that all is lost."""
        for index, count, ending in news:
            self._ready[index] = count
            if ending is not None:
                self._endings[index] = ending
        self._error = self._error or error
        if not self.accepted.done():
            if error is None:
                self.accepted.set_result(None)
            else:
                self.accepted.set_exception(error)
        self._changed.set()

    async def pieces(self) -> AsyncIterator[Piece]:
        """New tokens as they come, until every sample has ended."""
        shown = [0] * len(self._ready)
        told: set[int] = set()
        while True:
            self._changed.clear()
            error, endings = self._error, dict(self._endings)
            for index, stream in enumerate(self.streams):
                start, end = shown[index], self._ready[index]
                if start < end or (index in endings and index not in told):
                    shown[index] = end
                    if index in endings:
                        told.add(index)
                    yield Piece(
                        index,
                        stream.made[start:end],
                        stream.logprobs[start:end],
                        stream.raw_logprobs[start:end],
                        stream.versions[start:end],
                        endings.get(index),
                    )
            if len(told) == len(shown):
                return
            if error is not None:
                raise error
            await self._changed.wait()

    async def samples(self) -> list[Sample]:
        """All samples, once the last has ended."""
        while not self.ended:
            self._changed.clear()
            await self._changed.wait()
        if self._error is not None:
            raise self._error
        return [stream.result() for stream in self.streams]


class EngineService:
    """Runs an engine until `close`. Any thread and any event loop may ask; at most `max_waiting` samples wait."""

    def __init__(self, engine: Engine, *, max_waiting: int = MAX_WAITING) -> None:
        self.engine, self.max_waiting = engine, max_waiting
        self._news = threading.Condition()
        self._inbox: deque[tuple[Callable[[], object], Future[Any] | None]] = deque()
        self._held = 0  # samples taken in and not ended; guarded by _news
        self._paused = self._draining = self._closing = False
        self._failure: EngineBroken | None = None
        self._drained: list[Future[None]] = []
        # Only the engine's thread touches these.
        self._open: dict[Stream, tuple[Generation, int]] = {}
        self._touched: dict[Stream, None] = {}
        self._ended: list[Stream] = []
        self._began: dict[Stream, float] = {}  # when each had its first token
        self._first_token, self._output_token = Histogram(FIRST_TOKEN_S), Histogram(OUTPUT_TOKEN_S)
        self._idle_steps = 0
        self._endings: Counter[str] = Counter()
        self._requests = self._refused = self._prompt_tokens = self._cached_tokens = self._swaps = 0
        self._busy_s = 0.0
        # One after the other, in the order asked for: an older version must not overtake a newer one.
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="etude-weights")
        self._thread = threading.Thread(target=self._run, name="etude-engine", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ------------------------------------------------------------------------------------------- asking

    async def sample(self, prompt: Sequence[int], sampling: Sampling) -> list[Sample]:
        """The samples of a prompt. Cancelling the task that awaits cancels them."""
        async with await self.submit(prompt, sampling) as generation:
            return await generation.samples()

    async def stream(self, prompt: Sequence[int], sampling: Sampling) -> AsyncIterator[Piece]:
        """The samples of a prompt as they are made; closing the iterator cancels them."""
        async with await self.submit(prompt, sampling, streaming=True) as generation:
            async for piece in generation.pieces():
                yield piece

    async def submit(self, prompt: Sequence[int], sampling: Sampling, *, streaming: bool = False) -> Generation:
        """Take a request in, or raise why not. Only with `streaming` are its pieces told before a sample's end."""
        self._check(prompt, sampling)
        generation = Generation(self, prompt, sampling, streaming)
        with self._news:
            self._check_place(sampling.samples)
            self._held += sampling.samples
            self._inbox.append((partial(self._admit, generation), None))
            self._news.notify()
        try:
            await generation.accepted
        except asyncio.CancelledError:
            generation.cancel()
            raise
        return generation

    @property
    def room(self) -> int:
        """The most tokens, prompt and new ones together, that one sample can have."""
        pool, ahead = self.engine.pool, self.engine.scheduler.ahead
        return min(self.engine.model.config.max_length, pool.count * pool.size - ahead)

    def _check(self, prompt: Sequence[int], sampling: Sampling) -> None:
        size = self.engine.model.config.vocab_size
        if stray := [token for token in sampling.stop if not 0 <= token < size]:
            raise InputError(f"stop token id {stray[0]} is not in the vocabulary of {size:,}: it would never stop")
        if len(prompt) + sampling.max_tokens > self.room:
            raise TooLong(
                f"{len(prompt):,} prompt tokens and {sampling.max_tokens:,} new ones are more than the {self.room:,} "
                "that the model and its cache can hold"
            )

    def _check_place(self, samples: int) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closing:
            raise EngineBroken("the service is closed")
        if self._draining:
            raise Draining("draining: what runs is finished, nothing new is taken")
        limit = self.engine.options.max_streams + self.max_waiting
        if samples > limit:
            raise InputError(f"{samples:,} samples of one prompt; at most {limit:,} can run and wait here together")
        if self._held + samples > limit:
            self._refused += 1
            raise QueueFull(f"{self._held:,} samples run or wait, of at most {limit:,}; try again in a moment")

    async def load(self, weights: Weights, version: int) -> Loaded:
        """New weights between two steps: tensors by name, or a checkpoint directory, which is read while others run."""
        if version < 0:
            raise InputError(f"version {version}: versions count up from 0")
        return await asyncio.get_running_loop().run_in_executor(self._loader, self._load, weights, version)

    def _load(self, weights: Weights, version: int) -> Loaded:
        tensors = read_weights(weights, self.engine.model, self.engine.mtp)
        check_finite(tensors, version)
        return self._ask(partial(self._swap, tensors, version)).result()

    async def pause(self) -> None:
        """Stop after the step that runs; requests wait, with what they have made."""
        await asyncio.wrap_future(self._ask(partial(self._set_paused, True)))

    async def resume(self) -> None:
        """Go on after `pause`, and take requests again after `drain`."""
        with self._news:
            self._draining = False
        await asyncio.wrap_future(self._ask(partial(self._set_paused, False)))

    def start_draining(self) -> int:
        """Take nothing new from now on; how many samples are still to end."""
        with self._news:
            self._draining = True
            return self._held

    async def drain(self) -> None:
        """Take nothing new and wait until everything has ended."""
        if self._paused:
            raise InputError("the service is paused, so nothing would ever end; resume it before draining")
        self.start_draining()
        done: Future[None] = Future()
        await asyncio.wrap_future(self._ask(partial(self._drained.append, done)))
        await asyncio.wrap_future(done)

    async def close(self) -> None:
        """End the thread; what has not ended fails with an error that says so."""
        with self._news:
            self._closing = True
            self._news.notify()
        await asyncio.to_thread(self._thread.join)
        self._loader.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------------------------------- looking

    @property
    def version(self) -> int:
        return self.engine.version

    @property
    def failure(self) -> EngineBroken | None:
        """Why the service is broken; None while it is not."""
        return self._failure

    @property
    def state(self) -> State:
        if self._failure is not None:
            return "broken"
        if self._closing:
            return "closed"
        return "draining" if self._draining else "paused" if self._paused else "running"

    @property
    def held(self) -> int:
        """Samples that were taken in and have not ended."""
        return self._held

    def stats(self) -> Stats:
        engine = self.engine
        drafting = engine.speculator.acceptance if engine.speculator is not None else Acceptance()
        return Stats(
            state=self.state,
            version=engine.version,
            requests=self._requests,
            endings=dict(self._endings),
            refused=self._refused,
            made_tokens=engine.made_tokens,
            read_tokens=engine.read_tokens,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            preemptions=engine.scheduler.preemptions,
            running=len(engine.scheduler.running),
            waiting=len(engine.scheduler.waiting),
            pages_held=engine.pool.held,
            pages=engine.pool.count,
            swaps=self._swaps,
            steps=engine.steps,
            busy_s=self._busy_s,
            draft_rounds=drafting.rounds,
            accepted=list(drafting.accepted),
            first_token=self._first_token.copy(),
            output_token=self._output_token.copy(),
        )

    # ------------------------------------------------------------------------------------------- the thread

    def _ask(self, command: Callable[[], T]) -> "Future[T]":
        """Have the engine's thread run something between two steps."""
        answer: Future[T] = Future()
        with self._news:
            if self._failure is not None or self._closing:
                answer.set_exception(self._failure or EngineBroken("the service is closed"))
                return answer
            self._inbox.append((command, answer))
            self._news.notify()
        return answer

    def cancel(self, generation: Generation) -> None:
        """End the samples of a request; those that have ended stay as they are."""
        with self._news:
            if not self._closing:
                self._inbox.append((partial(self._cancel, generation), None))
                self._news.notify()

    def _run(self) -> None:
        try:
            while self._wait():
                self._obey()
                if not self._paused and self.engine.busy:
                    self._step()
                self._report()
            self._fail(EngineBroken("the service is closed; this was not finished"))
        except Exception as error:
            logger.exception("the engine failed")
            broken = EngineBroken(f"the engine failed: {type(error).__name__}: {error}")
            with self._news:
                self._failure = broken
            self._fail(broken)

    def _wait(self) -> bool:
        """Sleep until there is something to do; False when the service is being closed."""
        with self._news:
            while not self._inbox and not self._closing and (self._paused or not self.engine.busy):
                self._news.wait()
            return not self._closing

    def _obey(self) -> None:
        """Run what was asked for. The caller's mistakes are the caller's; anything else breaks the service."""
        while self._inbox:
            command, answer = self._inbox.popleft()
            if answer is not None and not answer.set_running_or_notify_cancel():
                continue
            try:
                result = command()
            except Exception as error:
                if answer is not None:
                    answer.set_exception(error)
                if answer is None or not isinstance(error, EtudeError):
                    raise
            else:
                if answer is not None:
                    answer.set_result(result)

    def _step(self) -> None:
        start = time.perf_counter()
        worked = self.engine.step()
        self._busy_s += time.perf_counter() - start
        self._idle_steps = 0 if worked or not self.engine.busy else self._idle_steps + 1
        if self._idle_steps > STUCK_STEPS:
            waiting, running = len(self.engine.scheduler.waiting), len(self.engine.scheduler.running)
            raise RuntimeError(f"{waiting} streams wait and {running} run, but the scheduler plans nothing")

    def _admit(self, generation: Generation) -> None:
        try:
            if generation.cancelled:
                raise EngineBroken("cancelled before it was taken in")
            generation.streams = self.engine.submit(generation.prompt, generation.sampling, self._listen)
        except EtudeError as error:
            self._let_go(generation.sampling.samples)
            self._tell(generation, [], error)
            return
        self._requests += 1
        self._open |= {stream: (generation, index) for index, stream in enumerate(generation.streams)}
        self._tell(generation, [])

    def _cancel(self, generation: Generation) -> None:
        for stream in generation.streams:
            if stream in self._open:
                self.engine.cancel(stream)

    def _swap(self, weights: Mapping[str, Tensor], version: int) -> Loaded:
        start = time.perf_counter()
        self.engine.load(weights, version)
        self._swaps += 1
        return Loaded(version, self.engine.options.on_swap, len(self._open), time.perf_counter() - start)

    def _set_paused(self, paused: bool) -> None:
        self._paused = paused

    def _listen(self, stream: Stream, tokens: list[int]) -> None:
        """What the engine calls inside a step: note it, tell it after the step."""
        if not tokens:
            self._ended.append(stream)
            return
        generation, _ = self._open[stream]
        if stream not in self._began:
            self._began[stream] = time.perf_counter()
            self._first_token.add(self._began[stream] - generation.asked)
        if generation.streaming:
            self._touched[stream] = None

    def _report(self) -> None:
        """Tell every caller what is new. Who has gone without a word is cancelled, and that is news again."""
        while self._touched or self._ended:
            self._report_once()
        if self._draining and not self._held:
            for done in self._drained:
                if done.set_running_or_notify_cancel():
                    done.set_result(None)
            self._drained.clear()

    def _report_once(self) -> None:
        """One call into each caller's loop, for all that it waits for."""
        news: dict[Generation, list[tuple[int, int, Ending | None]]] = {}
        for stream in dict.fromkeys((*self._touched, *self._ended)):
            if stream in self._open:
                generation, index = self._open[stream]
                news.setdefault(generation, []).append((index, len(stream.versions), stream.ending))
        for stream in self._ended:
            self._account(stream)
        self._touched.clear()
        self._ended.clear()
        for generation, items in news.items():
            self._tell(generation, items)

    def _account(self, stream: Stream) -> None:
        """A stream has ended: count it, and give its place to another."""
        del self._open[stream]
        self._endings[str(stream.ending)] += 1
        self._prompt_tokens += len(stream.prompt)
        self._cached_tokens += stream.cached
        began = self._began.pop(stream, 0.0)
        if stream.ending != "cancelled" and len(stream.made) > 1:
            self._output_token.add((time.perf_counter() - began) / (len(stream.made) - 1))
        self._let_go(1)

    def _tell(
        self, generation: Generation, news: list[tuple[int, int, Ending | None]], error: EtudeError | None = None
    ) -> None:
        try:
            generation.loop.call_soon_threadsafe(generation.hear, news, error)
        except RuntimeError:  # the loop was closed: whoever waited has gone
            if not generation.cancelled:
                generation.cancelled = True
                self._cancel(generation)

    def _let_go(self, samples: int) -> None:
        with self._news:
            self._held -= samples

    def _fail(self, error: EngineBroken) -> None:
        """The end of the thread: everything that was taken in or asked for gets the error."""
        with self._news:
            self._closing = True
            left, self._inbox = list(self._inbox), deque()
            self._held = 0
        for generation in {id(generation): generation for generation, _ in self._open.values()}.values():
            self._tell(generation, [], error)
        self._endings["failed"] += len(self._open)
        self._open.clear()
        for command, answer in left:
            if answer is not None and answer.set_running_or_notify_cancel():
                answer.set_exception(error)
            elif isinstance(command, partial) and command.func == self._admit:
                self._tell(command.args[0], [], error)
        for done in self._drained:
            if done.set_running_or_notify_cancel():
                done.set_exception(error)
