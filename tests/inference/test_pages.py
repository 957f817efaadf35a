"""The page pool against a twin that looks through lists: same pages found, same pages evicted, none lost."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from etude.errors import InputError
from etude.inference.pages import VERSIONS, PagePool, Roots

SIZE, COUNT = 2, 7


@dataclass
class Entry:
    """A page that can be found: its place in a chain, what stands before it and in it."""

    page: int
    before: "Entry | None"
    tokens: list[int]


@dataclass
class Holder:
    tokens: list[int]
    pages: list[int] = field(default_factory=list)
    content: int = 0
    chain: Entry | None = None  # the twin of `content`
    published: int = 0
    lost: bool = False  # everything was forgotten since: what it publishes now hangs in the air


class PoolTwin(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(COUNT, SIZE)
        self.holders: list[Holder] = []
        self.entries: list[Entry] = []
        self.idle: list[int] = []  # findable pages that nobody holds, the one to go first in front
        self.truth: dict[int, list[int]] = {}  # everything from the beginning to the end of a page

    def held(self) -> set[int]:
        return {page for holder in self.holders for page in holder.pages}

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def begin(self, tokens: list[int]) -> None:
        """Somebody comes with tokens, gets what is there and pages for the rest, unless there are too few."""
        found = self.pool.find(tokens)
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
        assert [self.pool.idle(page) for page in want] == [page in self.idle for page in want]
        if need > self.pool.available - sum(page in self.idle for page in want):
            return
        self.pool.hold(found.pages)
        self.idle = [page for page in self.idle if page not in want]
        holder = Holder(tokens, list(found.pages), found.content, chain, len(found.pages))
        self.holders.append(holder)
        for _ in range(need):
            self.take(holder)

    def take(self, holder: Holder) -> None:
        free = COUNT - len(self.held()) - len(self.idle)
        page = self.pool.take()
        assert page not in self.held()
        if free:
            assert page not in self.idle
        else:
            assert page == self.idle.pop(0)
            self.entries = [entry for entry in self.entries if entry.page != page]
        holder.pages.append(page)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        """Somebody has computed one more whole page."""
        holder = data.draw(st.sampled_from(self.holders))
        if (holder.published + 1) * SIZE > len(holder.tokens):
            return
        start, page = holder.published * SIZE, holder.pages[holder.published]
        tokens = holder.tokens[start : start + SIZE]
        self.truth[page] = holder.tokens[: start + SIZE]
        holder.content = self.pool.publish(page, holder.content, tokens)
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
        self.idle += [page for page in reversed(holder.pages) if page not in self.held() and page in findable]

    @rule()
    def forget(self) -> None:
        self.pool.forget_all()
        self.entries, self.idle = [], []
        for holder in self.holders:
            holder.lost = holder.published > 0

    @invariant()
    def every_page_is_accounted_for(self) -> None:
        self.pool.check()
        assert self.pool.held == len(self.held())
        assert self.pool.available == COUNT - len(self.held())


TestPoolTwin = PoolTwin.TestCase
TestPoolTwin.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_two_who_computed_the_same_both_keep_theirs_and_one_is_found() -> None:
    pool = PagePool(6, 2)
    first, second = [pool.take(), pool.take()], [pool.take(), pool.take()]
    one = pool.publish(first[0], 0, [1, 2])
    assert pool.publish(second[0], 0, [1, 2]) == one
    pool.publish(second[1], one, [3, 4])
    assert pool.find([1, 2, 3, 4]).pages == [first[0], second[1]]
    pool.release(second)
    pool.check()
    assert pool.find([1, 2, 3, 4]).pages == [first[0], second[1]]


def test_what_follows_a_prefix_is_given_up_before_the_prefix() -> None:
    pool = PagePool(3, 1)
    pages = [pool.take() for _ in range(3)]
    content = 0
    for token, page in enumerate(pages):
        content = pool.publish(page, content, [token])
    pool.release(pages)
    assert [pool.take() for _ in range(3)] == pages[::-1]


def test_without_sharing_nothing_is_ever_found() -> None:
    pool = PagePool(2, 2, sharing=False)
    page = pool.take()
    pool.publish(page, 0, [1, 2])
    assert pool.find([1, 2]).pages == []
    pool.release([page])
    pool.check()
    assert pool.available == 2


def test_an_empty_pool_and_an_overdrawn_one_say_so() -> None:
    with pytest.raises(InputError, match="empty"):
        PagePool(0, 16)
    pool = PagePool(1, 1)
    pool.take()
    with pytest.raises(InputError, match="no free page"):
        pool.take()


# ------------------------------------------------------------------------------------------- weights


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.one_of(st.none(), st.integers(0, 11)))
def test_a_session_meets_no_weights_older_than_its_own(versions: list[int], since: int | None) -> None:
    roots = Roots(versions[0])
    loads = {roots.present: versions[0]}  # in order; a number that is not the highest begins the count again
    for version in versions[1:]:
        roots.begin(version)
        loads = {root: known for root, known in loads.items() if known < version} | {roots.present: version}
    fit = [root for root, version in loads.items() if since is not None and version >= since]
    assert roots.of(since) == (fit[0] if fit else roots.present)
    assert roots.of(None) == roots.present == -len(versions)


def test_only_so_many_versions_are_known() -> None:
    roots = Roots(0)
    for version in range(1, 3 * VERSIONS):
        roots.begin(version)
    oldest = 2 * VERSIONS
    assert roots.of(0) == roots.of(oldest) == -1 - oldest
    assert roots.of(oldest + 1) == -2 - oldest
