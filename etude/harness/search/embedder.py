"""One embedding model for every session of a process: requests from anywhere, encoded batch by batch in one thread.

A text is embedded once, however many sessions wait for it; its vector is remembered here and on disk. A question goes
before the chunks that wait, and a session that is cancelled leaves nothing to be done.
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

REMEMBERED = 200_000  # vectors in memory, about 180 MB


class TextEncoder(Protocol):
    """What is needed of a model; `encoder.Encoder` is one."""

    id: str
    dimensions: int
    batch: int  # texts to encode at a time: as long as that takes, a question may have to wait

    def encode(self, texts: Sequence[str]) -> npt.NDArray[np.float32]: ...


@dataclass
class _Ticket:
    """Somebody who waits, and for how many texts."""

    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[None]
    missing: int
    error: EtudeError | None = None
    listening: bool = True  # until the patience is over
    abandoned: bool = False  # cancelled, or failed: nothing more need be done for it

    def report(self) -> None:
        """From the worker's thread, wake whoever waits; their loop may be closed by now."""
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
class _Wanted:
    text: str
    kept: bool  # on disk too
    tickets: list[_Ticket] = field(default_factory=list)


class Embedder:
    """Vectors for texts. `load` makes the model when it is first needed, which takes a second or two."""

    def __init__(self, load: Callable[[], TextEncoder], cache: VectorCache | None = None) -> None:
        self._load = load
        self._encoder: TextEncoder | None = None
        self._loading = threading.Lock()
        self.cache = cache
        self._lock = threading.Lock()  # of all that follows
        self._known: OrderedDict[bytes, Vector] = OrderedDict()
        self._waiting: dict[bytes, _Wanted] = {}
        self._urgent: dict[bytes, None] = {}  # those of them that go first
        self._running: dict[bytes, _Wanted] = {}  # in the model now
        self._working = False
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="embedder")
        self.embedded = 0  # texts that went through the model

    def encoder(self) -> TextEncoder:
        """The model, loaded. Blocks; for worker threads."""
        with self._loading:
            if self._encoder is None:
                self._encoder = self._load()
            return self._encoder

    async def prepare(self) -> None:
        """Have the model loaded: what a key is depends on it."""
        if self._encoder is None:
            await asyncio.to_thread(self.encoder)

    def key(self, text: str) -> bytes:
        """What a text's vector is kept under; the model must be loaded."""
        return hashlib.blake2b(text.encode(), key=self.encoder().id.encode()[:64], digest_size=20).digest()

    async def question(self, text: str) -> npt.NDArray[np.float32]:
        """The vector of a question, at once."""
        await self.prepare()
        key = self.key(text)
        await self.embed({key: text}, urgent=True, keep=False)
        return self.known([key])[key].astype(np.float32)

    async def recall(self, keys: Sequence[bytes]) -> dict[bytes, Vector]:
        """Vectors that need no model: from memory, or from disk."""
        found = self.known(keys)
        rest = [key for key in keys if key not in found]
        if rest and self.cache:
            read = await asyncio.to_thread(self.cache.get, rest)
            read = {key: vector for key, vector in read.items() if len(vector) == self.encoder().dimensions}
            self._remember(read.items())
            found |= read
        return found

    def known(self, keys: Iterable[bytes]) -> dict[bytes, Vector]:
        """Vectors that are in memory."""
        with self._lock:
            found = {key: self._known[key] for key in keys if key in self._known}
            for key in found:
                self._known.move_to_end(key)
        return found

    async def embed(
        self, texts: Mapping[bytes, str], *, urgent: bool = False, keep: bool = True, patience_s: float | None = None
    ) -> bool:
        """Have these embedded. False when the time was over before; the rest is then done in the background."""
        loop = asyncio.get_running_loop()
        with self._lock:
            wanted = {key: text for key, text in texts.items() if key not in self._known}
            ticket = _Ticket(loop, loop.create_future(), len(wanted))
            for key, text in wanted.items():
                running = self._running.get(key)
                entry = running or self._waiting.setdefault(key, _Wanted(text, keep))
                entry.tickets.append(ticket)
                if urgent and not running:
                    self._urgent[key] = None
            if wanted and not self._working:
                self._working = True
                self._worker.submit(self._step)
        if not wanted:
            return True
        try:
            done, _ = await asyncio.wait([ticket.done], timeout=patience_s)
        except asyncio.CancelledError:
            ticket.abandoned = True
            raise
        ticket.listening = False
        if done:
            ticket.done.result()
        return bool(done)

    def close(self) -> None:
        """Take up no more; what is being encoded is finished."""
        self._worker.shutdown(wait=True, cancel_futures=True)

    # ------------------------------------------------------------------------------ in the worker's thread

    def _step(self) -> None:
        """One batch, and then the next as a new task: so that a process that ends need not wait for all of them."""
        batch = self._take()
        if not batch:
            return
        try:
            vectors = self.encoder().encode([wanted.text for wanted in batch.values()]).astype(np.float16)
            made = dict(zip(batch, vectors, strict=True))
            self._remember(made.items())
            self.embedded += len(made)
            if self.cache:
                self.cache.put({key: vector for key, vector in made.items() if batch[key].kept})
            self._settle(None)
        except Exception as error:  # whoever waits must hear of it, whatever it is
            self._settle(EtudeError(f"the embedding model failed: {type(error).__name__}: {error}"))
        try:
            self._worker.submit(self._step)
        except RuntimeError:  # the process is ending
            with self._lock:
                self._working = False

    def _take(self) -> dict[bytes, _Wanted]:
        """The next texts that somebody still waits for, the urgent ones first."""
        most = self._encoder.batch if self._encoder else 1
        with self._lock:
            taken: dict[bytes, _Wanted] = {}
            dead: list[bytes] = []
            for key in itertools.chain(self._urgent, self._waiting):
                if len(taken) == most:
                    break
                wanted = self._waiting[key]
                if all(ticket.abandoned for ticket in wanted.tickets):
                    dead.append(key)
                else:
                    taken[key] = wanted
            for key in itertools.chain(taken, dead):
                self._waiting.pop(key, None)
                self._urgent.pop(key, None)
            self._running = taken
            self._working = bool(taken)
        return taken

    def _settle(self, error: EtudeError | None) -> None:
        """Tell those who wait for what was just encoded."""
        with self._lock:
            for wanted in self._running.values():
                for ticket in wanted.tickets:
                    ticket.missing -= 1
                    if error and not ticket.error:
                        ticket.error, ticket.abandoned = error, True
                        ticket.report()
                    elif ticket.missing == 0:
                        ticket.report()
            self._running = {}

    def _remember(self, vectors: Iterable[tuple[bytes, Vector]]) -> None:
        with self._lock:
            for key, vector in vectors:
                self._known[key] = vector
                self._known.move_to_end(key)
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
