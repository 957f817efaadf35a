"""One embedding model for all sessions of a process: texts are encoded batch by batch in one thread.

A text is embedded once, however many sessions wait for it; its vector is cached in memory and on disk. Questions go
before chunks, and texts of cancelled sessions are dropped.
"""

import asyncio
import hashlib
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from etude.errors import EtudeError
from etude.harness.search.cache import Vector, VectorCache

MAX_CACHED = 200_000  # vectors in memory, about 180 MB


class TextEncoder(Protocol):
    """The interface of a model, implemented by `encoder.BertEncoder`."""

    id: str
    dimensions: int
    batch: int  # texts per batch; a question waits at most for one batch

    def encode(self, texts: Sequence[str]) -> npt.NDArray[np.float32]: ...


@dataclass
class _Waiter:
    """A caller that waits for a number of texts."""

    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[None]
    missing: int
    error: EtudeError | None = None
    listening: bool = True  # until its time is up
    abandoned: bool = False  # cancelled or failed

    def report(self) -> None:
        """Wake the caller from the worker thread; its loop may be closed by now."""
        try:
            self.loop.call_soon_threadsafe(self._wake)
        except RuntimeError:
            self.abandoned = True

    def _wake(self) -> None:
        if self.listening and not self.done.done():
            if self.error:
                self.done.set_exception(self.error)
            else:
                self.done.set_result(None)


@dataclass
class _PendingText:
    text: str
    on_disk: bool  # cache on disk too
    waiters: list[_Waiter] = field(default_factory=list)


class Embedder:
    """Returns vectors of texts. `load` loads the model on first use, which takes a second or two."""

    def __init__(self, load: Callable[[], TextEncoder], cache: VectorCache | None = None) -> None:
        self._load = load
        self._encoder: TextEncoder | None = None
        self._loading = threading.Lock()
        self.cache = cache
        self._lock = threading.Lock()  # guards everything below
        self._known: OrderedDict[bytes, Vector] = OrderedDict()
        self._waiting: dict[bytes, _PendingText] = {}
        self._urgent: dict[bytes, None] = {}  # keys of _waiting that go first
        self._running: dict[bytes, _PendingText] = {}  # in the current batch
        self._working = False
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="embedder")
        self.embedded = 0  # texts encoded so far

    def encoder(self) -> TextEncoder:
        """Return the loaded model. Blocks; for worker threads."""
        with self._loading:
            if self._encoder is None:
                self._encoder = self._load()
            return self._encoder

    async def prepare(self) -> None:
        """Load the model; keys depend on it."""
        if self._encoder is None:
            await asyncio.to_thread(self.encoder)

    def key(self, text: str) -> bytes:
        """Return the cache key of a text; the model must be loaded."""
        return hashlib.blake2b(text.encode(), key=self.encoder().id.encode()[:64], digest_size=20).digest()

    async def embed_question(self, text: str) -> npt.NDArray[np.float32]:
        """Return the vector of a question, with priority."""
        await self.prepare()
        key = self.key(text)
        await self.embed({key: text}, urgent=True, keep=False)
        return self.known([key])[key].astype(np.float32)

    async def recall(self, keys: Sequence[bytes]) -> dict[bytes, Vector]:
        """Return the cached vectors, from memory or disk."""
        found = self.known(keys)
        rest = [key for key in keys if key not in found]
        if rest and self.cache:
            loaded = await asyncio.to_thread(self.cache.get, rest)
            loaded = {key: vector for key, vector in loaded.items() if len(vector) == self.encoder().dimensions}
            self._remember(loaded.items())
            found |= loaded
        return found

    def known(self, keys: Iterable[bytes]) -> dict[bytes, Vector]:
        """Return the vectors that are in memory."""
        with self._lock:
            found = {key: self._known[key] for key in keys if key in self._known}
            for key in found:
                self._known.move_to_end(key)
        return found

    async def embed(
        self, texts: Mapping[bytes, str], *, urgent: bool = False, keep: bool = True, max_wait_s: float | None = None
    ) -> bool:
        """Embed these texts; return False if the time ran out (the rest continues in the background)."""
        loop = asyncio.get_running_loop()
        with self._lock:
            wanted = {key: text for key, text in texts.items() if key not in self._known}
            waiter = _Waiter(loop, loop.create_future(), len(wanted))
            for key, text in wanted.items():
                running = self._running.get(key)
                entry = running or self._waiting.setdefault(key, _PendingText(text, keep))
                entry.waiters.append(waiter)
                if urgent and not running:
                    self._urgent[key] = None
            if wanted and not self._working:
                self._working = True
                self._worker.submit(self._step)
        if not wanted:
            return True
        try:
            done, _ = await asyncio.wait([waiter.done], timeout=max_wait_s)
        except asyncio.CancelledError:
            waiter.abandoned = True
            raise
        waiter.listening = False
        if done:
            waiter.done.result()
        return bool(done)

    def close(self) -> None:
        """Stop after the current batch."""
        self._worker.shutdown(wait=True, cancel_futures=True)

    # ------------------------------------------------------------------------------ worker thread

    def _step(self) -> None:
        """Encode one batch and submit the next as a new task, so that shutdown waits for one batch only."""
        batch = self._next_batch()
        if not batch:
            return
        try:
            vectors = self.encoder().encode([wanted.text for wanted in batch.values()]).astype(np.float16)
            encoded = dict(zip(batch, vectors, strict=True))
            self._remember(encoded.items())
            self.embedded += len(encoded)
            if self.cache:
                self.cache.put({key: vector for key, vector in encoded.items() if batch[key].on_disk})
            self._settle(None)
        except Exception as error:  # report any failure to the waiting callers
            self._settle(EtudeError(f"the embedding model failed: {type(error).__name__}: {error}"))
        try:
            self._worker.submit(self._step)
        except RuntimeError:  # shut down
            with self._lock:
                self._working = False

    def _next_batch(self) -> dict[bytes, _PendingText]:
        """Take the next batch of texts that still have a waiting caller, urgent ones first."""
        size = self._encoder.batch if self._encoder else 1
        with self._lock:
            taken: dict[bytes, _PendingText] = {}
            abandoned: list[bytes] = []
            for key in itertools.chain(self._urgent, self._waiting):
                if len(taken) == size:
                    break
                wanted = self._waiting[key]
                if all(waiter.abandoned for waiter in wanted.waiters):
                    abandoned.append(key)
                else:
                    taken[key] = wanted
            for key in itertools.chain(taken, abandoned):
                self._waiting.pop(key, None)
                self._urgent.pop(key, None)
            self._running = taken
            self._working = bool(taken)
        return taken

    def _settle(self, error: EtudeError | None) -> None:
        """Notify the callers that wait for the current batch."""
        with self._lock:
            for wanted in self._running.values():
                for waiter in wanted.waiters:
                    waiter.missing -= 1
                    if error and not waiter.error:
                        waiter.error, waiter.abandoned = error, True
                        waiter.report()
                    elif waiter.missing == 0:
                        waiter.report()
            self._running = {}

    def _remember(self, vectors: Iterable[tuple[bytes, Vector]]) -> None:
        with self._lock:
            for key, vector in vectors:
                self._known[key] = vector
                self._known.move_to_end(key)
            while len(self._known) > MAX_CACHED:
                self._known.popitem(last=False)
