"""Allocation of KV cache pages, with prefix caching and eviction. Bookkeeping only: no tensor is touched here.

A page holds the keys and values of `size` consecutive tokens. Sequences that begin with the same tokens share full
pages: the index is keyed by the tokens themselves, so a match is exact. Unreferenced pages keep their content until
their room is needed and are evicted least recently used first.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from etude.errors import InputError

VERSIONS = 64  # weight versions whose pages a session may still ask for


@dataclass(slots=True)
class _Page:
    ref_count: int = 0
    key: tuple[int, tuple[int, ...]] | None = None  # (id of the prefix before it, its tokens), while it is indexed
    prefix_id: int = 0  # id of the prefix that ends with this page, never reused; 0 while it is not indexed


@dataclass(slots=True)
class Prefix:
    """Pages that already hold the beginning of a sequence."""

    pages: list[int] = field(default_factory=list)
    prefix_id: int = 0  # of the last page; the prefix root where there is none


class PrefixRoots:
    """Ids that stand for the empty prefix in the index, one for each time weights were loaded.

    Pages computed with older weights stay for sessions that began with them; other sequences do not find them.
    """

    def __init__(self, version: int) -> None:
        self._by_version: dict[int, int] = {}
        self.current = 0
        self.add_version(version)

    def add_version(self, version: int) -> None:
        """Start a new root for weights of this version. Roots of higher versions (the count was reset) are dropped."""
        self.current -= 1  # prefix ids are above 0
        older = [(known, root) for known, root in self._by_version.items() if known < version]
        self._by_version = dict((*older[1 - VERSIONS :], (version, self.current)))

    def root_for(self, since: int | None) -> int:
        """Return the root of the oldest weights not older than `since`, or the current root if there are none."""
        fit = () if since is None else [version for version in self._by_version if version >= since]
        return self._by_version[min(fit)] if fit else self.current


class PagePool:
    """`count` pages of `size` tokens. Every page is referenced, cached or free."""

    def __init__(self, count: int, size: int, prefix_caching: bool = True) -> None:
        if count < 1 or size < 1:
            raise InputError(f"a KV cache of {count} pages of {size} tokens is empty; give it more memory")
        self.count, self.size, self.prefix_caching = count, size, prefix_caching
        self._pages = [_Page() for _ in range(count)]
        self._free = list(range(count - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # indexed but unreferenced, least recently used first
        self._index: dict[tuple[int, tuple[int, ...]], int] = {}
        self._last_prefix_id = 0

    @property
    def available(self) -> int:
        """Return how many pages `allocate` can give now."""
        return len(self._free) + len(self._cached)

    @property
    def held(self) -> int:
        return self.count - self.available

    def allocate(self) -> int:
        """Return a page for new content. Check `available` first."""
        if self._free:
            page = self._free.pop()
        elif self._cached:
            page, _ = self._cached.popitem(last=False)
            self._unindex(page)
        else:
            raise InputError("the KV cache has no free page; this is a bug in the scheduler")
        self._pages[page].ref_count = 1
        return page

    def find_prefix(self, tokens: Sequence[int], root: int = 0) -> Prefix:
        """Return the longest run of pages that hold the beginning of `tokens` under a root; `acquire` keeps them."""
        found = Prefix(prefix_id=root)
        if self.prefix_caching:
            for start in range(0, len(tokens) - self.size + 1, self.size):
                page = self._index.get((found.prefix_id, tuple(tokens[start : start + self.size])))
                if page is None:
                    break
                found.pages.append(page)
                found.prefix_id = self._pages[page].prefix_id
        return found

    def truncate(self, prefix: Prefix, pages: int, root: int = 0) -> Prefix:
        """Return the first `pages` pages of a prefix under a root."""
        kept = prefix.pages[:pages]
        return Prefix(kept, self._pages[kept[-1]].prefix_id if kept else root)

    def is_evictable(self, page: int) -> bool:
        """Return whether a page is cached but unreferenced: acquiring it lowers `available`."""
        return page in self._cached

    def acquire(self, pages: Sequence[int]) -> None:
        """Reference pages that `find_prefix` returned."""
        for page in pages:
            self._pages[page].ref_count += 1
            self._cached.pop(page, None)

    def publish(self, page: int, before: int, tokens: Sequence[int]) -> int:
        """Index a page that is full of `tokens` after prefix `before`, and return the id of the longer prefix."""
        key = (before, tuple(tokens))
        entry = self._pages[page]
        if entry.key == key:
            return entry.prefix_id
        known = self._index.get(key)
        if known is not None:  # computed twice at the same time: both pages stay, only the first is indexed
            return self._pages[known].prefix_id
        self._last_prefix_id += 1
        entry.prefix_id = self._last_prefix_id
        if self.prefix_caching:
            entry.key = key
            self._index[key] = page
        return entry.prefix_id

    def release(self, pages: Sequence[int]) -> None:
        """Drop a reference to each page; indexed pages stay usable until their room is needed.

        The end of a sequence is evicted first, because prefixes are shared more often than what follows them.
        """
        for page in reversed(pages):
            entry = self._pages[page]
            entry.ref_count -= 1
            if entry.ref_count:
                continue
            if entry.key is not None:
                self._cached[page] = None
            else:
                self._unindex(page)
                self._free.append(page)

    def reset_prefix_cache(self) -> None:
        """Remove every page from the index, because the weights have changed."""
        for page in list(self._cached):
            self._free.append(page)
        self._cached.clear()
        for page in range(self.count):
            self._unindex(page)

    def _unindex(self, page: int) -> None:
        entry = self._pages[page]
        if entry.key is not None:
            del self._index[entry.key]
        entry.key, entry.prefix_id = None, 0

    def check_invariants(self) -> None:
        """Raise AssertionError unless every page is accounted for exactly once; for tests and the chaos run."""
        free, cached = set(self._free), set(self._cached)
        held = {number for number, page in enumerate(self._pages) if page.ref_count}
        assert len(free) == len(self._free), "a page is free twice"
        assert len(free | cached | held) == len(free) + len(cached) + len(held), "a page is in two states"
        assert len(free) + len(cached) + len(held) == self.count, "a page is lost"
        assert all(self._pages[page].key is not None for page in cached), "a cached page is not indexed"
        assert all(self._pages[page].key is None for page in free), "a free page is indexed"
        assert all(self._pages[page].key == key for key, page in self._index.items()), "an index entry is wrong"
