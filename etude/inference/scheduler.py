"""Who runs in the next step: everybody who is decoding, then prompts in pieces, as far as tokens and pages go.

Pure bookkeeping over `Stream`s and the `PagePool`. Running streams come first, because a token for each costs one pass
over the weights whatever their number; what is left of the step's budget reads prompts, for which pages are taken when
a stream starts. When pages run out the youngest stream gives its own up and is read again later: older ones always
finish, so nothing starves and nothing is lost.

With `piece`, what a stream is computed from depends on the stream alone: prompts are read in pieces of that many tokens
counted from their beginning, only whole pieces are shared, and all room is taken at the start, so that nobody is ever
preempted.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

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
    ended: list[Stream] = field(default_factory=list)  # cancelled before it
    full: bool = False  # there may be more to read than fitted

    @property
    def tokens(self) -> int:
        return len(self.decoding) + sum(piece.end - piece.start for piece in self.reading)

    def __bool__(self) -> bool:
        return bool(self.decoding or self.reading)


class Scheduler:
    """Streams waiting and running. `ahead` is how many tokens a decoding stream may make before we look again."""

    def __init__(self, pool: PagePool, *, max_streams: int, budget: int, ahead: int = 1, piece: int = 0) -> None:
        if piece % pool.size:
            raise InputError(f"pieces of {piece} tokens are not whole pages of {pool.size}")
        if max_streams < 1 or budget < 1:
            raise InputError(f"{max_streams} streams at once, {budget} tokens a step: nothing would ever run")
        self.pool, self.max_streams, self.budget, self.ahead = pool, max_streams, budget, ahead
        self.piece = piece
        self.waiting: deque[Stream] = deque()  # oldest first
        self.running: list[Stream] = []  # oldest first; they and nobody else hold pages
        self.preemptions = 0
        self.on_forget: Callable[[Stream], None] = lambda stream: None  # somebody else keeps things for a stream
        self.root_of: Callable[[Stream], int] = lambda stream: 0  # for one that starts now
        self._leaving: list[Stream] = []  # cancelled, still among the waiting or running

    def add(self, streams: list[Stream]) -> None:
        """Queue the samples of a prompt; one that could never fit is an error now, not a hang later."""
        longest = max(len(stream.prompt) + stream.sampling.max_tokens for stream in streams)
        if self._pages_for(longest + self.ahead) > self.pool.count:
            room = self.pool.count * self.pool.size
            raise InputError(f"prompt and max_tokens are {longest:,} tokens; the KV cache holds {room:,}")
        self.waiting.extend(streams)

    def cancel(self, stream: Stream) -> None:
        """A stream leaves at the next plan, wherever it is."""
        if stream.ending is None and not stream.cancelled:
            stream.cancelled = True
            self._leaving.append(stream)

    def plan(self, read: bool = True) -> Step:
        """The next step; empty when there is nothing to do. Without `read` prompts wait while there is decoding."""
        ended = self.drop_cancelled()
        decoding = self._grow([stream for stream in self.running if stream.decoding])
        if decoding and not read:
            return Step(decoding, [], ended)
        self._admit()
        budget = self.budget - len(decoding)
        reading: list[Piece] = []
        for stream in self.running:
            if budget <= 0:
                break
            if not stream.decoding:
                reading.append(self._next_piece(stream, budget))
                budget -= reading[-1].end - reading[-1].start
        return Step(decoding, reading, ended, full=budget <= 0)

    def _grow(self, decoding: list[Stream]) -> list[Stream]:
        """Give every decoding stream the pages it needs to go on, oldest first; those who can."""
        # A victim is the youngest of all, so never one that has its pages already; it has none when its turn comes.
        return [stream for stream in decoding if stream.pages and self._reserve(stream, stream.length + self.ahead)]

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

    def _admit(self) -> None:
        """Let waiting streams in, oldest first, each with pages for all it has to read.

        The oldest that does not fit keeps younger ones out: a huge prompt gets its turn. Samples whose leader is still
        reading their prompt are passed over; they will find its pages.
        """
        held_back: list[Stream] = []
        while self.waiting and len(self.running) < self.max_streams and self.pool.available:
            stream = self.waiting.popleft()
            leader = stream.leader
            if leader is not None and leader.ending is None and leader.read < len(stream.prompt):
                held_back.append(stream)
            elif not self._start(stream):
                self.waiting.appendleft(stream)
                break
        self.waiting.extendleft(reversed(held_back))

    def _start(self, stream: Stream) -> bool:
        """Give a stream what others have computed of it and pages for the rest; False when there are too few."""
        # One token is always read, since it writes the next; of a stream that has written already two are, because
        # whoever drafts needs the state before the last token.
        stream.root = self.root_of(stream)
        found = self.pool.find(stream.tokens(0, stream.length - (2 if stream.made else 1)), stream.root)
        if self.piece:
            whole = len(found.pages) - len(found.pages) % (self.piece // self.pool.size)
            found = self.pool.shorten(found, whole, stream.root)
        need = self._pages_for(self._room(stream)) - len(found.pages)
        if need > self.pool.available - sum(1 for page in found.pages if self.pool.idle(page)):
            return False
        self.pool.hold(found.pages)
        stream.pages = [*found.pages, *(self.pool.take() for _ in range(need))]
        stream.content, stream.published = found.content, len(found.pages)
        stream.read = len(found.pages) * self.pool.size
        if not stream.preempted:
            stream.cached = max(stream.cached, min(stream.read, len(stream.prompt)))
        insort(self.running, stream, key=_age)
        return True

    def _next_piece(self, stream: Stream, budget: int) -> Piece:
        """What a stream reads next; with `piece` always that many tokens, even if the budget ends inside them."""
        end = stream.read + (self.piece - stream.read % self.piece if self.piece else budget)
        return Piece(stream, stream.read, min(stream.length, end))

    def preempt(self, stream: Stream) -> None:
        """Take a stream's pages; it will be read again, and what it has written stays."""
        self._leave(stream)
        self._forget(stream)
        stream.preempted += 1
        self.preemptions += 1
        place = bisect_left(self.waiting, stream.number, key=_age)
        self.waiting.insert(place, stream)

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
        self._leave(stream)
        self.on_forget(stream)
        self.pool.release(stream.pages)
        stream.pages = []

    def _leave(self, stream: Stream) -> None:
        place = bisect_left(self.running, stream.number, key=_age)
        assert self.running[place] is stream
        del self.running[place]

    def recompute_all(self) -> None:
        """Nothing computed so far may be used any more: every running stream is read again from its beginning."""
        for stream in self.running:
            self._forget(stream)
        self.waiting = deque(sorted((*self.running, *self.waiting), key=_age))
        self.running.clear()
        self.pool.forget_all()
        self._elect(set())

    def renew(self) -> None:
        """New weights: running streams go on with what they have. Samples that wait for one of them would not find its
        pages, unless they are of a session that began with the old weights."""
        self._elect({stream for stream in self.running if stream.root != self.root_of(stream)})

    def drop_cancelled(self) -> list[Stream]:
        """End every stream that was cancelled since the last time, and free its pages."""
        gone = [stream for stream in self._leaving if stream.ending is None]
        self._leaving.clear()
        if not gone:
            return gone
        for stream in gone:
            if stream.pages:
                self.finish(stream)
            stream.ending = "cancelled"
        self.waiting = deque(stream for stream in self.waiting if stream.ending is None)
        self._elect(set(gone))
        return gone

    def _elect(self, gone: set[Stream]) -> None:
        """Samples whose leader will not have the prompt for them follow the oldest of themselves instead."""
        heirs: dict[Stream, Stream] = {}
        for stream in self.waiting:
            leader = stream.leader
            if leader is not None and (leader in gone or leader.ending is not None):
                heir = heirs.setdefault(leader, stream)
                stream.leader = None if heir is stream else heir

    def _room(self, stream: Stream) -> int:
        """Tokens to have pages for before a stream starts."""
        if self.piece:
            return len(stream.prompt) + stream.sampling.max_tokens + self.ahead
        return stream.length + self.ahead

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.pool.size)


def _age(stream: Stream) -> int:
    return stream.number
