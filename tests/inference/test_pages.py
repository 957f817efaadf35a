"""The page pool against a reference model that searches lists: same pages found, same pages evicted, none lost."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from etude.errors import InputError
from etude.inference.pages import VERSIONS, PagePool, PrefixRoots

SIZE, COUNT = 2, 7


@dataclass
class Entry:
    """An indexed page: the entry before it in its chain, and its tokens."""

    page: int
    before: "Entry | None"
    tokens: list[int]


@dataclass
class Holder:
    tokens: list[int]
    pages: list[int] = field(default_factory=list)
    prefix_id: int = 0
    chain: Entry | None = None  # the reference model of `prefix_id`
    published: int = 0
    lost: bool = False  # the index was reset since: what it publishes now has no indexed parent


class PoolReference(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(COUNT, SIZE)
        self.holders: list[Holder] = []
        self.entries: list[Entry] = []
        self.evictable: list[int] = []  # indexed pages without a reference, the next to evict first
        self.truth: dict[int, list[int]] = {}  # all tokens from the beginning to the end of a page

    def held(self) -> set[int]:
        return {page for holder in self.holders for page in holder.pages}

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def begin(self, tokens: list[int]) -> None:
        """Start a sequence with its cached pages and new ones for the rest, unless there are too few."""
        found = self.pool.find_prefix(tokens)
        chain, want = None, []
        for start in range(0, len(tokens) - SIZE + 1, SIZE):
            part = tokens[start : start + SIZE]
            following = [entry for entry in self.entries if entry.before is chain and entry.tokens == part]
            if not following:
                break
            (chain,) = following
            want.append(chain.page)
        assert found.pages == want
        for index, page in enumerate(found.pages):
            assert self.truth[page] == tokens[: (index + 1) * SIZE]
        need = -(-len(tokens) // SIZE) - len(found.pages)
        assert [self.pool.is_evictable(page) for page in want] == [page in self.evictable for page in want]
        if need > self.pool.available - sum(page in self.evictable for page in want):
            return
        self.pool.acquire(found.pages)
        self.evictable = [page for page in self.evictable if page not in want]
        holder = Holder(tokens, list(found.pages), found.prefix_id, chain, len(found.pages))
        self.holders.append(holder)
        for _ in range(need):
            self.allocate_for(holder)

    def allocate_for(self, holder: Holder) -> None:
        free = COUNT - len(self.held()) - len(self.evictable)
        page = self.pool.allocate()
        assert page not in self.held()
        if free:
            assert page not in self.evictable
        else:
            assert page == self.evictable.pop(0)
            self.entries = [entry for entry in self.entries if entry.page != page]
        holder.pages.append(page)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        """Publish one more full page of a holder."""
        holder = data.draw(st.sampled_from(self.holders))
        if (holder.published + 1) * SIZE > len(holder.tokens):
            return
        start, page = holder.published * SIZE, holder.pages[holder.published]
        tokens = holder.tokens[start : start + SIZE]
        self.truth[page] = holder.tokens[: start + SIZE]
        holder.prefix_id = self.pool.publish(page, holder.prefix_id, tokens)
        same = [e for e in self.entries if e.before is holder.chain and e.tokens == tokens and not holder.lost]
        if same:
            (holder.chain,) = same
        else:
            before = Entry(-1, None, []) if holder.lost else holder.chain
            holder.chain = Entry(page, before, tokens)
            self.entries.append(holder.chain)
            holder.lost = False  # from here on the chain hangs on an entry of its own
        holder.published += 1

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        self.holders.remove(holder)
        self.pool.release(holder.pages)
        findable = {entry.page for entry in self.entries}
        self.evictable += [page for page in reversed(holder.pages) if page not in self.held() and page in findable]

    @rule()
    def forget(self) -> None:
        self.pool.reset_prefix_cache()
        self.entries, self.evictable = [], []
        for holder in self.holders:
            holder.lost = holder.published > 0

    @invariant()
    def every_page_is_accounted_for(self) -> None:
        self.pool.check_invariants()
        assert self.pool.held == len(self.held())
        assert self.pool.available == COUNT - len(self.held())


TestPoolReference = PoolReference.TestCase
TestPoolReference.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_of_two_pages_with_the_same_content_both_stay_and_one_is_found() -> None:
    pool = PagePool(6, 2)
    first, second = [pool.allocate(), pool.allocate()], [pool.allocate(), pool.allocate()]
    one = pool.publish(first[0], 0, [1, 2])
    assert pool.publish(second[0], 0, [1, 2]) == one
    pool.publish(second[1], one, [3, 4])
    assert pool.find_prefix([1, 2, 3, 4]).pages == [first[0], second[1]]
    pool.release(second)
    pool.check_invariants()
    assert pool.find_prefix([1, 2, 3, 4]).pages == [first[0], second[1]]


def test_what_follows_a_prefix_is_evicted_before_the_prefix() -> None:
    pool = PagePool(3, 1)
    pages = [pool.allocate() for _ in range(3)]
    prefix_id = 0
    for token, page in enumerate(pages):
        prefix_id = pool.publish(page, prefix_id, [token])
    pool.release(pages)
    assert [pool.allocate() for _ in range(3)] == pages[::-1]


def test_without_prefix_caching_nothing_is_ever_found() -> None:
    pool = PagePool(2, 2, prefix_caching=False)
    page = pool.allocate()
    pool.publish(page, 0, [1, 2])
    assert pool.find_prefix([1, 2]).pages == []
    pool.release([page])
    pool.check_invariants()
    assert pool.available == 2


def test_an_empty_pool_and_an_overdrawn_one_say_so() -> None:
    with pytest.raises(InputError, match="empty"):
        PagePool(0, 16)
    pool = PagePool(1, 1)
    pool.allocate()
    with pytest.raises(InputError, match="no free page"):
        pool.allocate()


# ------------------------------------------------------------------------------------------- weights


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.one_of(st.none(), st.integers(0, 11)))
def test_a_session_finds_no_pages_of_weights_older_than_its_own(versions: list[int], since: int | None) -> None:
    roots = PrefixRoots(versions[0])
    loads = {roots.current: versions[0]}  # in order; a number that is not the highest begins the count again
    for version in versions[1:]:
        roots.add_version(version)
        loads = {root: known for root, known in loads.items() if known < version} | {roots.current: version}
    fit = [root for root, version in loads.items() if since is not None and version >= since]
    assert roots.root_for(since) == (fit[0] if fit else roots.current)
    assert roots.root_for(None) == roots.current == -len(versions)


def test_only_so_many_versions_are_known() -> None:
    roots = PrefixRoots(0)
    for version in range(1, 3 * VERSIONS):
        roots.add_version(version)
    oldest = 2 * VERSIONS
    assert roots.root_for(0) == roots.root_for(oldest) == -1 - oldest
    assert roots.root_for(oldest + 1) == -2 - oldest
