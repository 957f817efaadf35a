"""Code search in a workspace by embeddings and BM25, outside the pod.

    result = await open_searcher().search(LocalFiles(root), "where are user roles checked?")

Names are imported on first use; torch is loaded with the embedding model.
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude.harness.search.render import render_result as render_result
    from etude.harness.search.searcher import CodebaseSearcher as CodebaseSearcher
    from etude.harness.search.searcher import SearchResult as SearchResult
    from etude.harness.search.searcher import open_searcher as open_searcher
    from etude.harness.search.source import FileSource as FileSource
    from etude.harness.search.source import LocalFiles as LocalFiles
    from etude.harness.search.source import SearchLimits as SearchLimits

__getattr__ = lazy_exports(__name__)
