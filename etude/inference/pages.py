"""Pages of the KV cache: who holds which, which hold a prefix that others can use, which can be taken back.

Pure bookkeeping; no tensor is touched here. A page holds the keys and values of `size` consecutive tokens. A page that
is full can be shared by every sequence that begins with the same tokens: the index is keyed by the content, token for
token, so a match is never a guess. Pages nobody holds keep their content until the room is needed, oldest first.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from etude.errors import InputError

VERSIONS = 64  # whose pages a session may still ask for


@dataclass(slots=True)
class _Page:
    holders: int = 0
    key: tuple[int, tuple[int, ...]] | None = None  # (what stood before, its tokens), when it is in the index
    content: int = 0  # a number for "these tokens after that", unique for ever; 0 when it is not in the index


@dataclass(slots=True)
class Prefix:
    """Pages that already hold the beginning of a sequence."""

    pages: list[int] = field(default_factory=list)
    content: int = 0  # of the last page; the root where there is none


class Roots:
    """What stands before the first page of a sequence in the index: a number for each time weights were loaded.

    Pages of older weights stay, for sessions that began with them, and whoever asks for the present ones finds none.
    """

    def __init__(self, version: int) -> None:
        self._known: dict[int, int] = {}
        self.present = 0
        self.begin(version)

    def begin(self, version: int) -> None:
        """Weights of this version are there from now on. Where the count began again, later numbers mean nothing."""
        self.present -= 1  # contents are above 0
        older = [(known, root) for known, root in self._known.items() if known < version]
        self._known = dict((*older[1 - VERSIONS :], (version, self.present)))

    def of(self, since: int | None) -> int:
        """That of the oldest weights which are not older than a version; of the present ones where there are none."""
        fit = () if since is None else [version for version in self._known if version >= since]
        return self._known[min(fit)] if fit else self.present


class PagePool:
    """`count` pages of `size` tokens. Every page is held by somebody, or cached, or free."""

    def __init__(self, count: int, size: int, sharing: bool = True) -> None:
        if count < 1 or size < 1:
            raise InputError(f"a KV cache of {count} pages of {size} tokens is empty; give it more memory")
        self.count, self.size, self.sharing = count, size, sharing
        self._pages = [_Page() for _ in range(count)]
        self._free = list(range(count - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # held by nobody, oldest use first
        self._index: dict[tuple[int, tuple[int, ...]], int] = {}
        self._contents = 0

    @property
    def available(self) -> int:
        """Pages that `take` can give now."""
        return len(self._free) + len(self._cached)

    @property
    def held(self) -> int:
        return self.count - self.available

    def take(self) -> int:
        """A page for new content. Ask `available` first."""
        if self._free:
            page = self._free.pop()
        elif self._cached:
            page, _ = self._cached.popitem(last=False)
            self._forget(page)
        else:
            raise InputError("the KV cache has no free page; this is a bug in the scheduler")
        self._pages[page].holders = 1
        return page

    def find(self, tokens: Sequence[int], root: int = 0) -> Prefix:
        """The longest run of pages that hold the beginning of `tokens` after a root; not held until `hold`."""
        found = Prefix(content=root)
        if self.sharing:
            for start in range(0, len(tokens) - self.size + 1, self.size):
                page = self._index.get((found.content, tuple(tokens[start : start + self.size])))
                if page is None:
                    break
                found.pages.append(page)
                found.content = self._pages[page].content
        return found

    def shorten(self, prefix: Prefix, pages: int, root: int = 0) -> Prefix:
        """The first `pages` pages of a prefix after a root."""
        kept = prefix.pages[:pages]
        return Prefix(kept, self._pages[kept[-1]].content if kept else root)

    def idle(self, page: int) -> bool:
        """Whether nobody holds a page whose content is kept: holding it takes it from what is available."""
        return page in self._cached

    def hold(self, pages: Sequence[int]) -> None:
        """Hold pages that `find` returned."""
        for page in pages:
            self._pages[page].holders += 1
            self._cached.pop(page, None)

    def publish(self, page: int, before: int, tokens: Sequence[int]) -> int:
        """A page is full of `tokens` after content `before`: others may use it. Its content number."""
        key = (before, tuple(tokens))
        held = self._pages[page]
        if held.key == key:
            return held.content
        known = self._index.get(key)
        if known is not None:  # somebody computed the same at the same time; both stay, one is found
            return self._pages[known].content
        self._contents += 1
        held.content = self._contents
        if self.sharing:
            held.key = key
            self._index[key] = page
        return held.content

    def release(self, pages: Sequence[int]) -> None:
        """Let go of pages; what is in the index stays usable until its room is needed.

        The end of a sequence goes first when room is needed: prefixes are shared more often than what follows them.
        """
        for page in reversed(pages):
            held = self._pages[page]
            held.holders -= 1
            if held.holders:
                continue
            if held.key is not None:
                self._cached[page] = None
            else:
                self._forget(page)
                self._free.append(page)

    def forget_all(self) -> None:
        """Nothing that was computed so far may be found any more: the weights have changed."""
        for page in list(self._cached):
            self._free.append(page)
        self._cached.clear()
        for page in range(self.count):
            self._forget(page)

    def _forget(self, page: int) -> None:
        held = self._pages[page]
        if held.key is not None:
            del self._index[held.key]
        held.key, held.content = None, 0

    def check(self) -> None:
        """Raise AssertionError unless every page is accounted for exactly once; for tests and the chaos run."""
        free, cached = set(self._free), set(self._cached)
        held = {number for number, page in enumerate(self._pages) if page.holders}
        assert len(free) == len(self._free), "a page is free twice"
        assert len(free | cached | held) == len(free) + len(cached) + len(held), "a page is in two places"
        assert len(free) + len(cached) + len(held) == self.count, "a page is lost"
        assert all(self._pages[page].key is not None for page in cached), "a cached page cannot be found"
        assert all(self._pages[page].key is None for page in free), "a free page can be found"
        assert all(self._pages[page].key == key for key, page in self._index.items()), "a page is found by mistake"
