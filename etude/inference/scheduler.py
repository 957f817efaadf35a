"""Choose the work of the next step: a token for every decoding sequence, then prefill chunks within the token budget.

Bookkeeping over `SequenceState`s and the `PagePool`. Decoding sequences come first, because a token for each costs one
pass over the weights whatever their number; the rest of the budget goes to prefill. When pages run out the youngest
sequence is preempted and recomputed later: older ones always finish, so nothing starves and nothing is lost.

With `fixed_chunk` the numbers of a sequence depend on that sequence alone: prompts are prefilled in chunks of that many
tokens from their beginning, only whole chunks are shared, and all pages are reserved at the start, so that nothing is
ever preempted.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from etude.errors import InputError
from etude.inference.pages import PagePool
from etude.inference.request import SequenceState


@dataclass(frozen=True)
class PrefillChunk:
    """Tokens `start` to `end` of a sequence, to be computed in this step."""

    sequence: SequenceState
    start: int
    end: int

    @property
    def is_last(self) -> bool:
        """Return whether a token is sampled after this chunk."""
        return self.end == self.sequence.length


@dataclass(frozen=True)
class ScheduledStep:
    """The work of one step: decoding sequences, one token each, and prefill chunks."""

    decoding: list[SequenceState]
    prefill: list[PrefillChunk]
    cancelled: list[SequenceState] = field(default_factory=list)  # ended before this step
    exhausted: bool = False  # the token budget is used up: there may be more to prefill

    @property
    def tokens(self) -> int:
        return len(self.decoding) + sum(chunk.end - chunk.start for chunk in self.prefill)

    def __bool__(self) -> bool:
        return bool(self.decoding or self.prefill)


class Scheduler:
    """Waiting and running sequences. `lookahead` is how many tokens a decoding sequence may add in one step."""

    def __init__(
        self, pool: PagePool, *, max_sequences: int, max_step_tokens: int, lookahead: int = 1, fixed_chunk: int = 0
    ) -> None:
        if fixed_chunk % pool.size:
            raise InputError(f"prefill chunks of {fixed_chunk} tokens are not whole pages of {pool.size}")
        if max_sequences < 1 or max_step_tokens < 1:
            raise InputError(
                f"max_sequences is {max_sequences} and max_step_tokens {max_step_tokens}; expected at least 1"
            )
        self.pool, self.max_sequences, self.max_step_tokens = pool, max_sequences, max_step_tokens
        self.lookahead, self.fixed_chunk = lookahead, fixed_chunk
        self.waiting: deque[SequenceState] = deque()  # oldest first
        self.running: list[SequenceState] = []  # oldest first; only these hold pages
        self.preemptions = 0
        self.loads = 0  # times that new weights were loaded
        self.on_release: Callable[[SequenceState], None] = lambda sequence: None  # called when it loses its pages
        self.prefix_root_of: Callable[[SequenceState], int] = lambda sequence: 0  # for a sequence that starts
        self._cancelling: list[SequenceState] = []  # cancelled, still waiting or running

    def add(self, sequences: list[SequenceState]) -> None:
        """Queue the sequences of a prompt; raise InputError if one could never fit."""
        longest = max(len(sequence.prompt) + sequence.sampling.max_tokens for sequence in sequences)
        if self._pages_for(longest + self.lookahead) > self.pool.count:
            room = self.pool.count * self.pool.size
            raise InputError(f"prompt and max_tokens are {longest:,} tokens; the KV cache holds {room:,}")
        self.waiting.extend(sequences)

    def cancel(self, sequence: SequenceState) -> None:
        """Mark a sequence to be removed at the next `schedule`, waiting or running."""
        if sequence.ending is None and not sequence.cancelled:
            sequence.cancelled = True
            self._cancelling.append(sequence)

    def schedule(self, prefill: bool = True) -> ScheduledStep:
        """Return the next step, empty when there is no work. Without `prefill`, prompts wait while others decode."""
        cancelled = self.drop_cancelled()
        decoding = self._reserve_for_decoding([sequence for sequence in self.running if sequence.decoding])
        if decoding and not prefill:
            return ScheduledStep(decoding, [], cancelled)
        self._admit()
        budget = self.max_step_tokens - len(decoding)
        chunks: list[PrefillChunk] = []
        for sequence in self.running:
            if budget <= 0:
                break
            if not sequence.decoding:
                chunks.append(self._next_chunk(sequence, budget))
                budget -= chunks[-1].end - chunks[-1].start
        return ScheduledStep(decoding, chunks, cancelled, exhausted=budget <= 0)

    def _reserve_for_decoding(self, decoding: list[SequenceState]) -> list[SequenceState]:
        """Reserve pages for the next tokens of every decoding sequence, oldest first; return those that got them."""
        # The victim is the youngest of all, so never one that was served before; it has no pages when its turn comes.
        return [
            sequence
            for sequence in decoding
            if sequence.pages and self._reserve(sequence, sequence.length + self.lookahead)
        ]

    def _reserve(self, sequence: SequenceState, tokens: int) -> bool:
        """Reserve pages for `tokens` tokens, preempting younger sequences; return False if it was itself preempted."""
        missing = self._pages_for(tokens) - len(sequence.pages)
        while missing > self.pool.available:
            victim = self.running[-1]
            self.preempt(victim)
            if victim is sequence:
                return False
        sequence.pages += [self.pool.allocate() for _ in range(missing)]
        return True

    def _admit(self) -> None:
        """Start waiting sequences, oldest first, each with pages for everything it has to compute.

        The oldest that does not fit keeps younger ones out, so that a huge prompt gets its turn. Sequences whose leader
        is still computing their prompt are skipped; they will find its pages.
        """
        skipped: list[SequenceState] = []
        while self.waiting and len(self.running) < self.max_sequences and self.pool.available:
            sequence = self.waiting.popleft()
            leader = sequence.leader
            if leader is not None and leader.ending is None and leader.computed < len(sequence.prompt):
                skipped.append(sequence)
            elif not self._start(sequence):
                self.waiting.appendleft(sequence)
                break
        self.waiting.extendleft(reversed(skipped))

    def _start(self, sequence: SequenceState) -> bool:
        """Give a sequence its cached prefix and pages for the rest; return False if there are too few."""
        # At least one token is computed, since it gives the next. A sequence that already has output computes two:
        # drafting needs the state before the last token.
        sequence.prefix_root = self.prefix_root_of(sequence)
        if sequence.loads != self.loads:  # other weights recompute it: what it samples next attends to their experts
            sequence.loads, sequence.routing, sequence.routed = self.loads, [], 0
        reusable = sequence.tokens(0, sequence.length - (2 if sequence.output else 1))
        found = self.pool.find_prefix(reusable, sequence.prefix_root)
        if self.fixed_chunk:
            whole = len(found.pages) - len(found.pages) % (self.fixed_chunk // self.pool.size)
            found = self.pool.truncate(found, whole, sequence.prefix_root)
        need = self._pages_for(self._tokens_to_reserve(sequence)) - len(found.pages)
        if need > self.pool.available - sum(1 for page in found.pages if self.pool.is_evictable(page)):
            return False
        self.pool.acquire(found.pages)
        sequence.pages = [*found.pages, *(self.pool.allocate() for _ in range(need))]
        sequence.prefix_id, sequence.published = found.prefix_id, len(found.pages)
        sequence.computed = len(found.pages) * self.pool.size
        if not sequence.preempted:
            sequence.cached = max(sequence.cached, min(sequence.computed, len(sequence.prompt)))
        insort(self.running, sequence, key=_arrival)
        return True

    def _next_chunk(self, sequence: SequenceState, budget: int) -> PrefillChunk:
        """Return the next chunk of a sequence; with `fixed_chunk` a whole one, even if the budget ends inside it."""
        size = self.fixed_chunk - sequence.computed % self.fixed_chunk if self.fixed_chunk else budget
        return PrefillChunk(sequence, sequence.computed, min(sequence.length, sequence.computed + size))

    def preempt(self, sequence: SequenceState) -> None:
        """Take a sequence's pages and queue it to be recomputed; its output stays."""
        self._remove_running(sequence)
        self._release(sequence)
        sequence.preempted += 1
        self.preemptions += 1
        place = bisect_left(self.waiting, sequence.number, key=_arrival)
        self.waiting.insert(place, sequence)

    def _release(self, sequence: SequenceState) -> None:
        self.on_release(sequence)
        self.pool.release(sequence.pages)
        sequence.pages, sequence.computed, sequence.published, sequence.prefix_id = [], 0, 0, 0
        # The recorded routing stays unless the weights change: it belongs to the computation that produced the tokens.

    def advance(self, sequence: SequenceState, computed: int) -> None:
        """Record that a sequence's pages hold `computed` tokens, and index the full ones."""
        sequence.computed = computed
        size = self.pool.size
        if self.fixed_chunk:  # a page filled while decoding differs from a prefilled one in the last bits
            computed = min(computed, len(sequence.prompt) - len(sequence.prompt) % self.fixed_chunk)
        while (sequence.published + 1) * size <= computed:
            start = sequence.published * size
            tokens = sequence.tokens(start, start + size)
            page = sequence.pages[sequence.published]
            sequence.prefix_id = self.pool.publish(page, sequence.prefix_id, tokens)
            sequence.published += 1

    def finish(self, sequence: SequenceState) -> None:
        """Remove a sequence that has ended and release its pages."""
        self._remove_running(sequence)
        self.on_release(sequence)
        self.pool.release(sequence.pages)
        sequence.pages = []

    def _remove_running(self, sequence: SequenceState) -> None:
        place = bisect_left(self.running, sequence.number, key=_arrival)
        assert self.running[place] is sequence
        del self.running[place]

    def recompute_all(self) -> None:
        """Discard the whole cache for new weights: every running sequence is recomputed from its beginning."""
        self.loads += 1
        for sequence in self.running:
            self._release(sequence)
        self.waiting = deque(sorted((*self.running, *self.waiting), key=_arrival))
        self.running.clear()
        self.pool.reset_prefix_cache()
        self._reassign_leaders(set())

    def on_new_weights(self) -> None:
        """Let running sequences keep their pages, and give new leaders to sequences that would not find those pages."""
        self.loads += 1
        self._reassign_leaders({each for each in self.running if each.prefix_root != self.prefix_root_of(each)})

    def drop_cancelled(self) -> list[SequenceState]:
        """End every sequence cancelled since the last call, release its pages, and return them."""
        gone = [sequence for sequence in self._cancelling if sequence.ending is None]
        self._cancelling.clear()
        if not gone:
            return gone
        for sequence in gone:
            if sequence.pages:
                self.finish(sequence)
            sequence.ending = "cancelled"
        self.waiting = deque(sequence for sequence in self.waiting if sequence.ending is None)
        self._reassign_leaders(set(gone))
        return gone

    def _reassign_leaders(self, gone: set[SequenceState]) -> None:
        """Make the oldest of the sequences whose leader will not compute their prompt the leader of the others."""
        heirs: dict[SequenceState, SequenceState] = {}
        for sequence in self.waiting:
            leader = sequence.leader
            if leader is not None and (leader in gone or leader.ending is not None):
                heir = heirs.setdefault(leader, sequence)
                sequence.leader = None if heir is sequence else heir

    def _tokens_to_reserve(self, sequence: SequenceState) -> int:
        """Return the number of tokens to have pages for before a sequence starts."""
        if self.fixed_chunk:
            return len(sequence.prompt) + sequence.sampling.max_tokens + self.lookahead
        return sequence.length + self.lookahead

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.pool.size)


def _arrival(sequence: SequenceState) -> int:
    return sequence.number
