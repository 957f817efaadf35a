"""The engine in a thread of its own, for async callers.

Only that thread touches the engine: every call is a command that runs between two steps, and callers are notified once
after each step. An accepted request ends exactly once: with its completions, or with an error that says why. An
exception inside a step fails all of them and marks the service broken.
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
from etude.inference.engine import Engine
from etude.inference.latency import FIRST_TOKEN_S, OUTPUT_TOKEN_S, Histogram
from etude.inference.policy import Weights
from etude.inference.request import Completion, Ending, SequenceState
from etude.inference.sampling import Sampling
from etude.inference.settings import CachePolicy
from etude.inference.speculation import Acceptance
from etude.inference.weight_update import check_finite, read_weights

ServiceState = Literal["running", "paused", "draining", "broken", "closed"]
T = TypeVar("T")

MAX_WAITING = 1024  # sequences that may wait to run
RETRY_AFTER_S = 1.0  # sent to a refused caller; a sequence ends every few steps
STUCK_STEPS = 1000  # consecutive steps without work while requests exist: a bug that must not spin for ever

logger = logging.getLogger(__name__)


class QueueFull(BusyError):
    """The queue is full; a request may be accepted `retry_after` seconds later."""

    retry_after = RETRY_AFTER_S


class Draining(BusyError):
    """The service finishes its requests and accepts no new ones."""

    retry_after = RETRY_AFTER_S


class EngineBroken(EtudeError):
    """The engine has stopped: its requests will not finish and no new ones are accepted."""


class ContextLengthExceeded(InputError):
    """Prompt and new tokens are more than the model or the cache can hold."""


@dataclass(frozen=True, slots=True)
class CompletionDelta:
    """New tokens of one completion; the last delta, which may be empty, sets `ending`."""

    index: int
    tokens: list[int]
    logprobs: list[float]
    raw_logprobs: list[float]
    versions: list[int]
    ending: Ending | None = None


@dataclass(frozen=True)
class WeightSwap:
    """Result of loading weights."""

    version: int
    on_swap: CachePolicy
    in_flight: int  # sequences that go on with the new weights
    seconds: float  # for which sampling was paused


@dataclass(frozen=True)
class Stats:
    """Counters and present state of the service."""

    state: ServiceState
    version: int
    requests: int
    endings: dict[str, int]  # sequences by how they ended: stop, length, cancelled, failed
    refused: int  # requests refused because the queue was full
    output_tokens: int
    prefill_tokens: int  # recomputation after a preemption included
    prompt_tokens: int  # of the sequences that ended
    cached_tokens: int  # of those, found in the prefix cache
    preemptions: int
    running: int
    waiting: int
    pages_held: int
    pages: int
    swaps: int
    steps: int
    busy_s: float
    draft_rounds: int  # times a sequence's drafts were verified
    accepted: list[int]  # how often the first, second, ... draft of a round was accepted; empty without speculation
    first_token: Histogram  # seconds from a request to each sequence's first token
    output_token: Histogram  # seconds a sequence took for each token after its first


class Generation:
    """An accepted request: iterate over its deltas or await its completions. Leaving the context cancels the rest."""

    def __init__(self, service: "EngineService", prompt: Sequence[int], sampling: Sampling, streaming: bool) -> None:
        self.prompt, self.sampling, self.streaming = list(prompt), sampling, streaming
        self.loop = asyncio.get_running_loop()
        self.accepted: asyncio.Future[None] = self.loop.create_future()
        self.sequences: list[SequenceState] = []  # written by the engine's thread before `accepted` is set
        self.cancelled = False
        self.submitted_at = time.perf_counter()
        self._service = service
        self._changed = asyncio.Event()
        self._ready = [0] * sampling.samples  # tokens of each completion reported so far
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
        """Return the number of prompt tokens found in the prefix cache."""
        return self.sequences[0].cached

    def cancel(self) -> None:
        """End what still runs; its pages are free before the next step. Safe from any thread and more than once."""
        if not self.ended and not self.cancelled:
            self.cancelled = True
            self._service.cancel(self)

    def on_progress(self, progress: list[tuple[int, int, Ending | None]], error: EtudeError | None = None) -> None:
        """Take a report of the engine's thread, in our loop: tokens and ending of some completions, or a failure."""
        for index, count, ending in progress:
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

    async def deltas(self) -> AsyncIterator[CompletionDelta]:
        """Yield new tokens as they come, until every completion has ended."""
        shown = [0] * len(self._ready)
        done: set[int] = set()
        while True:
            self._changed.clear()
            error, endings = self._error, dict(self._endings)
            for index, sequence in enumerate(self.sequences):
                start, end = shown[index], self._ready[index]
                if start < end or (index in endings and index not in done):
                    shown[index] = end
                    if index in endings:
                        done.add(index)
                    yield CompletionDelta(
                        index,
                        sequence.output[start:end],
                        sequence.logprobs[start:end],
                        sequence.raw_logprobs[start:end],
                        sequence.versions[start:end],
                        endings.get(index),
                    )
            if len(done) == len(shown):
                return
            if error is not None:
                raise error
            await self._changed.wait()

    async def completions(self) -> list[Completion]:
        """Return all completions, once the last has ended."""
        while not self.ended:
            self._changed.clear()
            await self._changed.wait()
        if self._error is not None:
            raise self._error
        return [sequence.result() for sequence in self.sequences]


class EngineService:
    """Runs an engine until `close`, for callers in any thread and event loop. At most `max_waiting` sequences wait."""

    def __init__(self, engine: Engine, *, max_waiting: int = MAX_WAITING) -> None:
        self.engine, self.max_waiting = engine, max_waiting
        self._wake = threading.Condition()
        self._commands: deque[tuple[Callable[[], object], Future[Any] | None]] = deque()
        self._open_sequences = 0  # accepted and not ended; guarded by _wake
        self._paused = self._draining = self._closing = False
        self._failure: EngineBroken | None = None
        self._drained: list[Future[None]] = []
        # Only the engine's thread touches these.
        self._open: dict[SequenceState, tuple[Generation, int]] = {}
        self._touched: dict[SequenceState, None] = {}
        self._ended: list[SequenceState] = []
        self._first_token_at: dict[SequenceState, float] = {}
        self._first_token, self._output_token = Histogram(FIRST_TOKEN_S), Histogram(OUTPUT_TOKEN_S)
        self._idle_steps = 0
        self._endings: Counter[str] = Counter()
        self._requests = self._refused = self._prompt_tokens = self._cached_tokens = self._swaps = 0
        self._busy_s = 0.0
        # One after the other, in the order of the calls: an older version must not overtake a newer one.
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="etude-weights")
        self._thread = threading.Thread(target=self._run, name="etude-engine", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ------------------------------------------------------------------------------------------- requests

    async def complete_many(self, prompt: Sequence[int], sampling: Sampling) -> list[Completion]:
        """Return the completions of a prompt. Cancelling the task that awaits cancels them."""
        async with await self.submit(prompt, sampling) as generation:
            return await generation.completions()

    async def stream(self, prompt: Sequence[int], sampling: Sampling) -> AsyncIterator[CompletionDelta]:
        """Yield the completions of a prompt as they are generated; closing the iterator cancels them."""
        async with await self.submit(prompt, sampling, streaming=True) as generation:
            async for delta in generation.deltas():
                yield delta

    async def submit(self, prompt: Sequence[int], sampling: Sampling, *, streaming: bool = False) -> Generation:
        """Accept a request, or raise why it is refused. Without `streaming`, deltas come only at a completion's end."""
        self._check(prompt, sampling)
        generation = Generation(self, prompt, sampling, streaming)
        with self._wake:
            self._check_capacity(sampling.samples)
            self._open_sequences += sampling.samples
            self._commands.append((partial(self._admit, generation), None))
            self._wake.notify()
        try:
            await generation.accepted
        except asyncio.CancelledError:
            generation.cancel()
            raise
        return generation

    @property
    def max_sequence_tokens(self) -> int:
        """Return the most tokens, prompt and output together, that one sequence can have."""
        pool, lookahead = self.engine.pool, self.engine.scheduler.lookahead
        return min(self.engine.model.config.max_length, pool.count * pool.size - lookahead)

    def _check(self, prompt: Sequence[int], sampling: Sampling) -> None:
        size = self.engine.model.config.vocab_size
        if invalid := [token for token in sampling.stop if not 0 <= token < size]:
            raise InputError(f"stop token id {invalid[0]} is not in the vocabulary of {size:,}: it would never stop")
        if len(prompt) + sampling.max_tokens > self.max_sequence_tokens:
            # Clients such as litellm recognise the error by its first words.
            raise ContextLengthExceeded(
                f"This model's maximum context length is {self.max_sequence_tokens} tokens, but the prompt has "
                f"{len(prompt)} and max_tokens is {sampling.max_tokens}; shorten the prompt or lower max_tokens"
                f"{self._advice()}"
            )

    def _advice(self) -> str:
        model, cache = self.engine.model.config.max_length, self.max_sequence_tokens
        return f" (the model allows {model}: serve it with a larger KV cache, --tokens)" if cache < model else ""

    def _check_capacity(self, samples: int) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closing:
            raise EngineBroken("the service is closed")
        if self._draining:
            raise Draining("draining: running requests are finished, new ones are refused")
        limit = self.engine.options.max_sequences + self.max_waiting
        if samples > limit:
            raise InputError(f"{samples:,} completions of one prompt; at most {limit:,} can run and wait here together")
        if self._open_sequences + samples > limit:
            self._refused += 1
            raise QueueFull(f"{self._open_sequences:,} sequences run or wait, of at most {limit:,}; try again later")

    async def load(self, weights: Weights, version: int) -> WeightSwap:
        """Load weights between two steps: tensors by name, or a checkpoint directory, read while requests run."""
        if version < 0:
            raise InputError(f"version {version}: versions count up from 0")
        return await asyncio.get_running_loop().run_in_executor(self._loader, self._load, weights, version)

    def _load(self, weights: Weights, version: int) -> WeightSwap:
        tensors = read_weights(weights, self.engine.model, self.engine.mtp)
        check_finite(tensors, version)
        return self._send(partial(self._swap, tensors, version)).result()

    async def pause(self) -> None:
        """Stop after the step that runs; requests wait and keep their output."""
        await asyncio.wrap_future(self._send(partial(self._set_paused, True)))

    async def resume(self) -> None:
        """Go on after `pause`, and accept requests again after `drain`."""
        with self._wake:
            self._draining = False
        await asyncio.wrap_future(self._send(partial(self._set_paused, False)))

    def start_draining(self) -> int:
        """Refuse new requests from now on; return how many sequences are still to end."""
        with self._wake:
            self._draining = True
            return self._open_sequences

    async def drain(self) -> None:
        """Refuse new requests and wait until all others have ended."""
        if self._paused:
            raise InputError("the service is paused, so its requests would never end; resume it before draining")
        self.start_draining()
        done: Future[None] = Future()
        await asyncio.wrap_future(self._send(partial(self._drained.append, done)))
        await asyncio.wrap_future(done)

    async def close(self) -> None:
        """End the thread; requests that have not ended fail with an error that says so."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)
        self._loader.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------------------------------- state

    @property
    def version(self) -> int:
        return self.engine.version

    @property
    def steps(self) -> int:
        return self.engine.steps

    @property
    def failure(self) -> EngineBroken | None:
        """Return why the service is broken; None while it is not."""
        return self._failure

    @property
    def state(self) -> ServiceState:
        if self._failure is not None:
            return "broken"
        if self._closing:
            return "closed"
        return "draining" if self._draining else "paused" if self._paused else "running"

    @property
    def open_sequences(self) -> int:
        """Return the number of sequences that were accepted and have not ended."""
        return self._open_sequences

    def stats(self) -> Stats:
        engine = self.engine
        drafting = engine.speculator.acceptance if engine.speculator is not None else Acceptance()
        return Stats(
            state=self.state,
            version=engine.version,
            requests=self._requests,
            endings=dict(self._endings),
            refused=self._refused,
            output_tokens=engine.output_tokens,
            prefill_tokens=engine.prefill_tokens,
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

    def _send(self, command: Callable[[], T]) -> "Future[T]":
        """Have the engine's thread run a command between two steps."""
        result: Future[T] = Future()
        with self._wake:
            if self._failure is not None or self._closing:
                result.set_exception(self._failure or EngineBroken("the service is closed"))
                return result
            self._commands.append((command, result))
            self._wake.notify()
        return result

    def cancel(self, generation: Generation) -> None:
        """End the sequences of a request; those that have ended stay as they are."""
        with self._wake:
            if not self._closing:
                self._commands.append((partial(self._cancel, generation), None))
                self._wake.notify()

    def _run(self) -> None:
        try:
            while self._wait():
                self._run_commands()
                if not self._paused and self.engine.busy:
                    self._step()
                self._notify_callers()
            self._fail(EngineBroken("the service was closed before this finished"))
        except Exception as error:
            logger.exception("the engine failed")
            broken = EngineBroken(f"the engine failed: {type(error).__name__}: {error}")
            with self._wake:
                self._failure = broken
            self._fail(broken)

    def _wait(self) -> bool:
        """Sleep until there is something to do; return False when the service is being closed."""
        with self._wake:
            while not self._commands and not self._closing and (self._paused or not self.engine.busy):
                self._wake.wait()
            return not self._closing

    def _run_commands(self) -> None:
        """Run pending commands. An EtudeError goes to the caller; any other exception breaks the service."""
        while self._commands:
            command, result = self._commands.popleft()
            if result is not None and not result.set_running_or_notify_cancel():
                continue
            try:
                value = command()
            except Exception as error:
                if result is not None:
                    result.set_exception(error)
                if result is None or not isinstance(error, EtudeError):
                    raise
            else:
                if result is not None:
                    result.set_result(value)

    def _step(self) -> None:
        start = time.perf_counter()
        worked = self.engine.step()
        self._busy_s += time.perf_counter() - start
        self._idle_steps = 0 if worked or not self.engine.busy else self._idle_steps + 1
        if self._idle_steps > STUCK_STEPS:
            waiting, running = len(self.engine.scheduler.waiting), len(self.engine.scheduler.running)
            raise RuntimeError(f"{waiting} sequences wait and {running} run, but the scheduler schedules none")

    def _admit(self, generation: Generation) -> None:
        try:
            if generation.cancelled:
                raise EngineBroken("cancelled before it was accepted")
            generation.sequences = self.engine.submit(generation.prompt, generation.sampling, self._on_tokens)
        except EtudeError as error:
            self._release(generation.sampling.samples)
            self._notify(generation, [], error)
            return
        self._requests += 1
        self._open |= {sequence: (generation, index) for index, sequence in enumerate(generation.sequences)}
        self._notify(generation, [])

    def _cancel(self, generation: Generation) -> None:
        for sequence in generation.sequences:
            if sequence in self._open:
                self.engine.cancel(sequence)

    def _swap(self, weights: Mapping[str, Tensor], version: int) -> WeightSwap:
        start = time.perf_counter()
        self.engine.load(weights, version)
        self._swaps += 1
        return WeightSwap(version, self.engine.options.on_swap, len(self._open), time.perf_counter() - start)

    def _set_paused(self, paused: bool) -> None:
        self._paused = paused

    def _on_tokens(self, sequence: SequenceState, tokens: list[int]) -> None:
        """Listener that the engine calls inside a step: note what changed; callers are notified after the step."""
        if not tokens:
            self._ended.append(sequence)
            return
        generation, _ = self._open[sequence]
        if sequence not in self._first_token_at:
            self._first_token_at[sequence] = time.perf_counter()
            self._first_token.add(self._first_token_at[sequence] - generation.submitted_at)
        if generation.streaming:
            self._touched[sequence] = None

    def _notify_callers(self) -> None:
        """Notify every caller. Requests whose event loop is closed are cancelled, which gives new notifications."""
        while self._touched or self._ended:
            self._notify_once()
        if self._draining and not self._open_sequences:
            for done in self._drained:
                if done.set_running_or_notify_cancel():
                    done.set_result(None)
            self._drained.clear()

    def _notify_once(self) -> None:
        """Make one call into each caller's loop, for everything it waits for."""
        progress: dict[Generation, list[tuple[int, int, Ending | None]]] = {}
        for sequence in dict.fromkeys((*self._touched, *self._ended)):
            if sequence in self._open:
                generation, index = self._open[sequence]
                progress.setdefault(generation, []).append((index, len(sequence.versions), sequence.ending))
        for sequence in self._ended:
            self._count_ended(sequence)
        self._touched.clear()
        self._ended.clear()
        for generation, items in progress.items():
            self._notify(generation, items)

    def _count_ended(self, sequence: SequenceState) -> None:
        """Count a sequence that has ended, and release its place in the queue."""
        del self._open[sequence]
        self._endings[str(sequence.ending)] += 1
        self._prompt_tokens += len(sequence.prompt)
        self._cached_tokens += sequence.cached
        began = self._first_token_at.pop(sequence, 0.0)
        if sequence.ending != "cancelled" and len(sequence.output) > 1:
            self._output_token.add((time.perf_counter() - began) / (len(sequence.output) - 1))
        self._release(1)

    def _notify(
        self, generation: Generation, progress: list[tuple[int, int, Ending | None]], error: EtudeError | None = None
    ) -> None:
        try:
            generation.loop.call_soon_threadsafe(generation.on_progress, progress, error)
        except RuntimeError:  # the caller's event loop is closed
            if not generation.cancelled:
                generation.cancelled = True
                self._cancel(generation)

    def _release(self, samples: int) -> None:
        with self._wake:
            self._open_sequences -= samples

    def _fail(self, error: EngineBroken) -> None:
        """Fail all requests and pending commands; the thread ends after this."""
        with self._wake:
            self._closing = True
            left, self._commands = list(self._commands), deque()
            self._open_sequences = 0
        for generation in {id(generation): generation for generation, _ in self._open.values()}.values():
            self._notify(generation, [], error)
        self._endings["failed"] += len(self._open)
        self._open.clear()
        for command, result in left:
            if result is not None and result.set_running_or_notify_cancel():
                result.set_exception(error)
            elif isinstance(command, partial) and command.func == self._admit:
                self._notify(command.args[0], [], error)
        for done in self._drained:
            if done.set_running_or_notify_cancel():
                done.set_exception(error)
