"""The index and the searcher, with an encoder that is fast enough for thousands of runs."""

import asyncio
import hashlib
import math
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.local_files import LocalFiles
from etude.errors import EtudeError, InputError
from etude.harness.search import bm25
from etude.harness.search.cache import VectorCache
from etude.harness.search.embedder import Embedder
from etude.harness.search.index import CodeIndex, fuse, top_scores
from etude.harness.search.render import render_result
from etude.harness.search.searcher import CodebaseSearcher, SearchResult
from etude.harness.search.source import FileEntry, SearchLimits, select, within


class WordEncoder:
    """A bag-of-words encoder: each word is a fixed random direction."""

    id = "words"
    dimensions = 32
    batch = 16

    def __init__(self, pause_s: float = 0.0, free_calls: float = math.inf) -> None:
        self.texts: list[str] = []
        self.pause_s = pause_s
        self.free_calls = free_calls  # further calls wait for `go`
        self.go = threading.Event()

    def encode(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        time.sleep(self.pause_s)
        self.free_calls -= 1
        if self.free_calls < 0:
            assert self.go.wait(120)
        self.texts += texts
        return np.stack([self.one(text) for text in texts])

    def one(self, text: str) -> npt.NDArray[np.float32]:
        total = np.full(self.dimensions, 1e-3, dtype=np.float32)
        for word in bm25.words(text):
            seed = int.from_bytes(hashlib.sha256(word.encode()).digest()[:4], "big")
            total += np.random.default_rng(seed).standard_normal(self.dimensions).astype(np.float32)
        return np.asarray(total / np.linalg.norm(total), dtype=np.float32)


class Files:
    """A workspace in memory that counts requests and may report false digests."""

    def __init__(self, files: Mapping[str, str | bytes]) -> None:
        self.files = {path: text.encode() if isinstance(text, str) else text for path, text in files.items()}
        self.fetched: list[str] = []
        self.claims: dict[str, str] = {}

    async def listing(self) -> Sequence[FileEntry]:
        return [
            FileEntry(path, len(data), self.claims.get(path, hashlib.sha256(data).hexdigest()))
            for path, data in self.files.items()
        ]

    async def contents(self, paths: Sequence[str]) -> Mapping[str, bytes]:
        self.fetched += paths
        return {path: self.files[path] for path in paths if path in self.files}


def searcher(encoder: WordEncoder | None = None, cache: VectorCache | None = None, **limits: float) -> CodebaseSearcher:
    model = encoder or WordEncoder()
    return CodebaseSearcher(Embedder(lambda: model, cache), limits=SearchLimits(**limits))  # type: ignore[arg-type]


def seen(found: SearchResult) -> list[tuple[str, int, int, str, float]]:
    return [(hit.chunk.path, hit.chunk.first, hit.chunk.last, hit.found_by, hit.score) for hit in found.hits]


FUNCTIONS = {
    f"pkg/m{n}.py": f'def f{n}():\n    """Does thing number{n} of many."""\n    return {n}\n' for n in range(30)
}

WORDS = st.sampled_from(["alpha", "beta", "gamma", "delta", "omega"])
FUNCTION = st.lists(WORDS, min_size=1, max_size=6).map(lambda w: f"def {'_'.join(w)}():\n    return {w[0]}\n\n\n")
TREE = st.dictionaries(
    st.sampled_from(["a.py", "b.py", "lib/c.py", "lib/d.c", "doc.md", "x.bin"]),
    st.lists(FUNCTION, max_size=3).map("".join) | st.just("\0binary"),
)


@given(st.lists(TREE, min_size=1, max_size=5), st.lists(WORDS, min_size=1, max_size=3).map(" ".join))
@settings(max_examples=40, deadline=None)
def test_an_index_that_was_updated_equals_one_made_from_scratch(trees: list[dict[str, str]], query: str) -> None:
    async def main() -> None:
        one = searcher()
        workspace = Files({})
        for tree in trees:
            workspace.files = {path: text.encode() for path, text in tree.items()}
            updated = await one.search(workspace, query)
            scratch = await searcher().search(Files(tree), query)
            assert seen(updated) == seen(scratch)
            assert (updated.files, updated.chunks, updated.embedded) == (
                scratch.files,
                scratch.chunks,
                scratch.embedded,
            )

    asyncio.run(main())


def test_only_what_changed_is_fetched_and_only_unseen_texts_are_embedded() -> None:
    async def main() -> None:
        encoder = WordEncoder()
        one, files = searcher(encoder), Files(FUNCTIONS)
        await one.prepare(files)
        assert len(encoder.texts) == 30
        files.fetched.clear()
        files.files["pkg/m3.py"] += b"\n\ndef added():\n    return 'new'\n"
        del files.files["pkg/m4.py"]
        index = await one.prepare(files)
        assert files.fetched == ["pkg/m3.py"]
        assert len(encoder.texts) == 31
        assert index.size == 30
        await one.prepare(Files(FUNCTIONS))  # another session in the same repository
        assert len(encoder.texts) == 31

    asyncio.run(main())


def test_workspaces_in_the_same_state_share_one_index() -> None:
    async def main() -> None:
        one = searcher()
        first, second = await one.prepare(Files(FUNCTIONS)), await one.prepare(Files(FUNCTIONS))
        assert first is second
        changed = Files(FUNCTIONS | {"pkg/m0.py": "x = 1\n"})
        third = await one.prepare(changed)
        assert third.root != first.root
        changed.files["pkg/m0.py"] = FUNCTIONS["pkg/m0.py"].encode()
        assert (await one.prepare(changed)).root == first.root

    asyncio.run(main())


def test_a_new_process_embeds_nothing_that_the_cache_has(tmp_path: Path) -> None:
    async def main() -> None:
        before = await searcher(cache=VectorCache(tmp_path)).search(Files(FUNCTIONS), "number7")
        encoder = WordEncoder()
        after = await searcher(encoder, VectorCache(tmp_path)).search(Files(FUNCTIONS), "number7")
        assert encoder.texts == ["number7"]  # the question itself is not kept
        assert seen(before) == seen(after)

    asyncio.run(main())


def test_many_sessions_that_start_at_once_embed_a_text_once() -> None:
    async def main() -> None:
        encoder = WordEncoder(pause_s=0.01)
        one = searcher(encoder)
        answers = await asyncio.gather(*(one.search(Files(FUNCTIONS), "thing number7") for _ in range(20)))
        assert len({str(seen(answer)) for answer in answers}) == 1
        assert sorted(encoder.texts) == sorted(set(encoder.texts))
        assert answers[0].embedded == 30

    asyncio.run(main())


def test_a_search_returns_at_its_time_limit_and_reports_how_much_was_embedded() -> None:
    async def main() -> None:
        encoder = WordEncoder(free_calls=3)
        one = searcher(encoder, max_wait_s=2.0)
        files = Files({f"m{n}.py": f"def f{n}():\n    return {n}\n" for n in range(200)})
        found = await one.search(files, "f150")
        assert found.hits[0].chunk.path == "m150.py"
        assert 0 < found.embedded < 200
        encoder.go.set()
        assert f"{found.embedded} chunks were searched by meaning" in render_result(found)
        await one.prepare(files)  # what was going on in the background is not done again
        assert len(encoder.texts) == 201
        assert (await one.search(files, "f150")).embedded == 200

    asyncio.run(main())


def test_a_cancelled_session_leaves_no_pending_work() -> None:
    async def main() -> None:
        encoder = WordEncoder(pause_s=0.1)
        one = searcher(encoder)
        task = asyncio.create_task(one.prepare(Files({f"m{n}.py": f"def f{n}(): pass\n" for n in range(400)})))
        while not encoder.texts:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await one.search(Files(FUNCTIONS), "number7")
        assert len(encoder.texts) < 100

    asyncio.run(main())


def test_a_searcher_outlives_the_event_loop_it_was_used_in() -> None:
    one, files = searcher(WordEncoder(pause_s=0.05), max_wait_s=0.05), Files(FUNCTIONS)
    first = asyncio.run(one.search(files, "number7"))
    one.limits = SearchLimits()
    second = asyncio.run(one.search(files, "number7"))
    assert first.embedded < second.embedded == 30
    one.close()


def test_a_model_that_fails_is_an_error_that_says_so() -> None:
    class Broken(WordEncoder):
        def encode(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
            raise RuntimeError("out of memory")

    async def main() -> None:
        with pytest.raises(EtudeError, match="the embedding model failed: RuntimeError: out of memory"):
            await searcher(Broken()).search(Files(FUNCTIONS), "number7")

    asyncio.run(main())


def test_the_event_loop_runs_on_while_texts_are_encoded() -> None:
    async def main() -> None:
        encoder = WordEncoder(free_calls=0)
        task = asyncio.create_task(searcher(encoder).prepare(Files(FUNCTIONS)))
        while encoder.free_calls == 0:
            await asyncio.sleep(0)
        encoder.go.set()  # set by the loop while the encoder waits for it
        await task
        assert threading.main_thread() is threading.current_thread()

    asyncio.run(main())


def test_every_hit_reports_how_it_was_found() -> None:
    async def main() -> None:
        files = Files(
            {
                "both.py": 'def parse_size():\n    """Reads the size of memory from words people write in files."""\n',
                "other.py": "def unrelated():\n    return 'zzz'\n",
            }
        )
        found = await searcher().search(files, "parse_size")
        assert [(hit.chunk.path, hit.found_by) for hit in found.hits] == [("both.py", "both"), ("other.py", "semantic")]
        text = render_result(found)
        assert text.startswith("2 results in 2 files, 2 chunks, searched by meaning and words.")
        assert "1. both.py:1-2  parse_size  [by meaning and words]\n     1|def parse_size():\n" in text
        lexical = CodebaseSearcher(None, "the embedding model is not installed")
        found = await lexical.search(files, "parse_size")
        assert [(hit.chunk.path, hit.found_by, hit.cosine) for hit in found.hits] == [("both.py", "lexical", None)]
        assert "lexical search only: the embedding model is not installed" in render_result(found)

    asyncio.run(main())


def test_directories_are_paths_or_patterns() -> None:
    cases = [
        ("src/a/b.py", [], True),
        ("src/a/b.py", ["src"], True),
        ("src/a/b.py", ["./src/a/"], True),
        ("src/a/b.py", ["src/a/b.py"], True),
        ("src/a/b.py", ["src/*"], True),
        ("src/a/b.py", ["src/**"], True),
        ("src/a/b.py", ["**"], True),
        ("src/a/b.py", ["."], True),
        ("src/a/b.py", ["sr"], False),
        ("src/a/b.py", ["a"], False),
        ("src/a/b.py", ["test", "src/?"], True),
    ]
    for path, directories, expected in cases:
        assert within(directories)(path) is expected, (path, directories)

    async def main() -> None:
        files = Files({"a/x.py": "def needle(): pass\n", "b/x.py": "def needle(): pass\n"})
        found = await searcher().search(files, "needle", ["b"])
        assert [hit.chunk.path for hit in found.hits] == ["b/x.py"]
        with pytest.raises(InputError, match="no files to search in missing"):
            await searcher().search(files, "needle", ["missing"])
        with pytest.raises(InputError, match="query is empty"):
            await searcher().search(files, "  ")

    asyncio.run(main())


def test_equal_hits_come_in_the_order_of_their_paths() -> None:
    async def main() -> None:
        files = Files(dict.fromkeys(("c.py", "a.py", "b.py"), "def needle():\n    return 1\n"))
        assert [hit.chunk.path for hit in (await CodebaseSearcher(None).search(files, "needle")).hits] == [
            "a.py",
            "b.py",
            "c.py",
        ]

    asyncio.run(main())


def test_false_digests_of_a_source_affect_only_that_source() -> None:
    async def main() -> None:
        one = searcher()
        honest, liar = Files({"m.py": "def honest(): pass\n"}), Files({"m.py": "def poisoned(): pass\n"})
        honest.claims = liar.claims = {"m.py": "the same digest"}
        await one.search(liar, "honest")
        assert [hit.chunk.name for hit in (await one.search(honest, "honest")).hits] == ["honest"]

        class Pushy(Files):
            async def listing(self) -> Sequence[FileEntry]:
                return [FileEntry("small.py", 10, "1"), FileEntry("gone.py", 10, "1"), FileEntry("", -5, "")]

            async def contents(self, paths: Sequence[str]) -> Mapping[str, bytes]:
                return {"small.py": b"x = 1\n" * 200_000, "/etc/passwd": b"def f(): pass\n", "../up.py": b"y = 1\n"}

        found = await one.search(Pushy({}), "x")
        assert (found.files, found.hits) == (0, [])
        assert render_result(found).startswith("No results in 0 files")

    asyncio.run(main())


def test_a_path_or_a_line_cannot_forge_a_result() -> None:
    async def main() -> None:
        files = Files({"a\n2. b.py:1-1  [by words]\n.py": "def needle(): pass\n" + "x" * 5000 + "\n"})
        text = render_result(await searcher().search(files, "needle"))
        assert "\n2. b.py" not in text
        assert "(4760 more characters)" in text
        assert len(text) < 1500

    asyncio.run(main())


def test_a_name_that_is_no_unicode_is_searched_and_shown() -> None:
    async def main() -> None:
        found = await searcher().search(Files({"caf\udce9.py": "def needle(): pass\n"}), "needle \ud800")
        assert found.hits[0].found_by == "both"
        render_result(found).encode()

    asyncio.run(main())


def test_the_text_stays_within_its_budget() -> None:
    async def main() -> None:
        body = "".join(f"    line_{n} = {n}\n" for n in range(30))
        files = Files({f"m{n}.py": f"def needle{n}():\n{body}" for n in range(40)})
        found = await searcher().search(files, "needle1 line", limit=40)
        text = render_result(found, total_chars=3000)
        assert len(text) < 3200
        assert "more results are not shown" in text
        assert "... (7 more lines, up to 31)" in text

    asyncio.run(main())


def test_files_beyond_the_limits_are_left_out_and_reported() -> None:
    entries = [FileEntry(f"m{n}.py", 100, "") for n in range(10)]
    entries += [FileEntry("big.py", 10_000, ""), FileEntry("node_modules/x.js", 5, ""), FileEntry("a.png", 5, "")]
    chosen = select(entries, SearchLimits(files=6, file_bytes=1000))
    assert (list(chosen.entries), chosen.too_large, chosen.too_many) == ([f"m{n}.py" for n in range(6)], 1, 4)
    assert select(entries, SearchLimits(total_bytes=350)).too_many == 8

    async def main() -> None:
        one = CodebaseSearcher(None, "no model", SearchLimits(file_bytes=60))
        found = await one.search(Files({"a.py": "x = 1\n", "b.py": "y = 2\n" * 50}), "x")
        assert "1 files were not searched (1 too large, 0 too many)." in render_result(found)

    asyncio.run(main())


def test_chunks_beyond_the_limit_are_found_by_their_words() -> None:
    async def main() -> None:
        one, files = searcher(embedded_chunks=10), Files(FUNCTIONS | {"z.py": "def needle():\n    pass\n"})
        assert (await one.prepare(files)).embedded == 10
        found = await one.search(files, "needle")
        assert found.hits[0].chunk.path == "z.py"
        assert found.hits[0].found_by == "both"  # what its words find is embedded beyond the limit
        assert found.embedded == 11

    asyncio.run(main())


def test_ranking_takes_the_best_and_breaks_ties_by_number() -> None:
    scores = np.array([0.5, 0.9, 0.5, 0.0, 0.5, 0.9])
    assert top_scores(scores, 3, above=0.0).tolist() == [1, 5, 0]
    assert top_scores(scores, 10, above=0.0).tolist() == [1, 5, 0, 2, 4]
    assert top_scores(np.zeros(0), 3, above=0.0).tolist() == []
    assert [number for number, _ in fuse(np.array([7, 3]), np.array([3, 9]))] == [3, 7, 9]
    assert [number for number, _ in fuse(np.array([7]), np.array([3, 9]), coverage=0.01)] == [3, 9, 7]
    assert CodeIndex.from_files(()).rank(["x"], None) == []


def test_a_directory_of_this_machine_is_a_source(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text("def needle(): pass\n")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "b.py").write_text("def needle(): pass\n")
    (tmp_path / "link.py").symlink_to("/etc/passwd")

    async def main() -> None:
        one, files = searcher(), LocalFiles(tmp_path)
        assert [hit.chunk.path for hit in (await one.search(files, "needle")).hits] == ["src/a.py"]
        (tmp_path / "src" / "a.py").write_text("def other(): pass\n")
        assert [hit.chunk.name for hit in (await one.search(files, "other")).hits] == ["other"]

    asyncio.run(main())
