"""Who runs in the next step: everybody who is decoding, then prompts in pieces, as far as tokens and pages go.

Pure bookkeeping over `Stream`s and the `PagePool`. Running streams come first, because a token for each costs one pass
over the weights whatever their number; what is left of the step's budget reads prompts. When pages run out the youngest
stream gives its pages up and is read again later: older ones always finish, so nothing starves and nothing is lost.

With `piece`, what a stream is computed from depends on the stream alone: prompts are read in pieces of that many tokens
counted from their beginning, only whole pieces are shared, and all room is taken at the start, so that nobody is ever
preempted.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from etude.errors import InputError
from etude.inference.pages import PagePool
from etude.inference.request import Stream


@dataclass(frozen=True)
class Piece:
    """Tokens `start` to `end` of a stream, to be read in this step; `writes` says that a token comes of it."""

    stream: Stream
    start: int
    end: int

    @property
    def writes(self) -> bool:
        return self.end == self.stream.length


@dataclass(frozen=True)
class Step:
    """What the model does next: decoding streams, one unread token each, and pieces of prompts."""

    decoding: list[Stream]
    reading: list[Piece]

    def __bool__(self) -> bool:
        return bool(self.decoding or self.reading)


class Scheduler:
    """Streams waiting and running. `ahead` is how many tokens a decoding stream may make before we look again."""

    def __init__(self, pool: PagePool, *, max_streams: int, budget: int, ahead: int = 1, piece: int = 0) -> None:
        if piece % pool.size:
            raise InputError(f"pieces of {piece} tokens are not whole pages of {pool.size}")
        self.pool, self.max_streams, self.budget, self.ahead = pool, max_streams, budget, ahead
        self.piece = piece
        self.waiting: deque[Stream] = deque()
        self.running: list[Stream] = []  # oldest first
        self.preemptions = 0
        self.on_forget: Callable[[Stream], None] = lambda stream: None  # somebody else keeps things for a stream

    def add(self, streams: list[Stream]) -> None:
        """Queue the samples of a prompt; one that could never fit is an error now, not a hang later."""
        longest = max(len(stream.prompt) + stream.sampling.max_tokens for stream in streams)
        if self._pages_for(longest + self.ahead) > self.pool.count:
            room = self.pool.count * self.pool.size
            raise InputError(f"prompt and max_tokens are {longest:,} tokens; the KV cache holds {room:,}")
        self.waiting.extend(streams)

    def plan(self) -> Step:
        """The next step; empty when there is nothing to do."""
        self._drop_cancelled()
        decoding = self._grow([stream for stream in self.running if stream.decoding])
        budget = self.budget - len(decoding)
        reading: list[Piece] = []
        for stream in [stream for stream in self.running if not stream.decoding]:
            budget -= self._read(stream, budget, reading)
        self._admit()
        for stream in self.running:
            if budget <= 0:
                break
            if not stream.decoding and not any(piece.stream is stream for piece in reading):
                budget -= self._read(stream, budget, reading)
        return Step([stream for stream in decoding if stream in self.running], reading)

    def _admit(self) -> None:
        """Let waiting streams in while there is room for their prompt and nobody is short of pages."""
        held_back = deque[Stream]()
        while self.waiting and len(self.running) < self.max_streams:
            stream = self.waiting.popleft()
            if stream.leader is not None and stream.leader.ending is None and stream.leader.read < len(stream.prompt):
                held_back.append(stream)
                continue
            found = self.pool.find(stream.tokens(0, stream.length - 1))  # one token is always read: it writes the next
            if self.piece:
                found = self.pool.shorten(found, len(found.pages) - len(found.pages) % (self.piece // self.pool.size))
            need = self._pages_for(self._room(stream)) - len(found.pages)
            cached = sum(1 for page in found.pages if self.pool.idle(page))
            if need > self.pool.available - cached:
                self.waiting.appendleft(stream)
                break
            self.pool.hold(found.pages)
            stream.pages, stream.content = list(found.pages), found.content
            stream.published = len(found.pages)
            stream.read = len(found.pages) * self.pool.size
            stream.cached = max(stream.cached, min(stream.read, len(stream.prompt)) if not stream.preempted else 0)
            self._insert(stream)
        self.waiting.extendleft(reversed(held_back))

    def _insert(self, stream: Stream) -> None:
        self.running.append(stream)
        self.running.sort(key=lambda one: one.number)

    def _read(self, stream: Stream, budget: int, reading: list[Piece]) -> int:
        """Plan a piece of what a stream has not read; the tokens of it."""
        if stream not in self.running or budget <= 0:
            return 0
        end = min(stream.length, stream.read + budget)
        if self.piece:
            end = min(stream.length, stream.read - stream.read % self.piece + self.piece)
        room = self._room(stream) if self.piece else end + (self.ahead if end == stream.length else 0)
        if not self._reserve(stream, room):
            return 0
        reading.append(Piece(stream, stream.read, end))
        return end - stream.read

    def _grow(self, decoding: list[Stream]) -> list[Stream]:
        """Give every decoding stream the pages it needs to go on, oldest first."""
        for stream in decoding:
            if stream in self.running:
                self._reserve(stream, stream.length + self.ahead)
        return [stream for stream in decoding if stream in self.running]

    def _reserve(self, stream: Stream, tokens: int) -> bool:
        """Pages for `tokens` tokens of a stream, taken from younger ones if need be; False when it had to go itself."""
        missing = self._pages_for(tokens) - len(stream.pages)
        while missing > self.pool.available:
            victim = self.running[-1]
            self.preempt(victim)
            if victim is stream:
                return False
        stream.pages += [self.pool.take() for _ in range(missing)]
        return True

    def preempt(self, stream: Stream) -> None:
        """Take a stream's pages; it will be read again, and what it has written stays."""
        self.running.remove(stream)
        self._forget(stream)
        stream.preempted += 1
        self.preemptions += 1
        self.waiting.appendleft(stream)

    def _forget(self, stream: Stream) -> None:
        self.on_forget(stream)
        self.pool.release(stream.pages)
        stream.pages, stream.read, stream.published, stream.content = [], 0, 0, 0
        # what was recorded of its routing stays: it is of the reading that made its tokens

    def advance(self, stream: Stream, read: int) -> None:
        """A stream's pages now hold `read` tokens; the full ones can be shared."""
        stream.read = read
        size = self.pool.size
        if self.piece:  # a page written while decoding is not, to the last bit, what reading it would give
            read = min(read, len(stream.prompt) - len(stream.prompt) % self.piece)
        while (stream.published + 1) * size <= read:
            start = stream.published * size
            tokens = stream.tokens(start, start + size)
            stream.content = self.pool.publish(stream.pages[stream.published], stream.content, tokens)
            stream.published += 1

    def finish(self, stream: Stream) -> None:
        """A stream has ended: its pages are free for others."""
        self.running.remove(stream)
        self.on_forget(stream)
        self.pool.release(stream.pages)
        stream.pages = []

    def recompute_all(self) -> None:
        """Nothing computed so far may be used any more: every running stream is read again from its beginning."""
        for stream in list(self.running):
            self.running.remove(stream)
            self._forget(stream)
            self.waiting.appendleft(stream)
        self.waiting = deque(sorted(self.waiting, key=lambda one: one.number))
        self.pool.forget_all()

    def _drop_cancelled(self) -> None:
        for stream in [one for one in self.running if one.cancelled]:
            self.finish(stream)
            stream.ending = "cancelled"
        for stream in [one for one in self.waiting if one.cancelled]:
            self.waiting.remove(stream)
            stream.ending = "cancelled"

    def _room(self, stream: Stream) -> int:
        """Tokens to have pages for before a stream starts."""
        if self.piece:
            return len(stream.prompt) + stream.sampling.max_tokens + self.ahead
        return stream.length + self.ahead

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.pool.size)
