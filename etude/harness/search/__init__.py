"""Code search in a workspace by embeddings and BM25, outside the pod.

    result = await open_searcher().search(LocalFiles(root), "where are user roles checked?")

Names are imported on first use; torch is loaded with the embedding model.
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude.harness.search.render import render_result
    from etude.harness.search.searcher import CodebaseSearcher, SearchResult, open_searcher
    from etude.harness.search.source import FileSource, LocalFiles, SearchLimits

_MODULES = {
    "CodebaseSearcher": "etude.harness.search.searcher",
    "FileSource": "etude.harness.search.source",
    "LocalFiles": "etude.harness.search.source",
    "SearchLimits": "etude.harness.search.source",
    "SearchResult": "etude.harness.search.searcher",
    "open_searcher": "etude.harness.search.searcher",
    "render_result": "etude.harness.search.render",
}
__all__ = [
    "CodebaseSearcher",
    "FileSource",
    "LocalFiles",
    "SearchLimits",
    "SearchResult",
    "open_searcher",
    "render_result",
]
__getattr__ = lazy_exports(__name__, _MODULES)
