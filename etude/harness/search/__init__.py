"""Code search in a workspace by embeddings and BM25, outside the pod. `searcher.open_searcher` opens it."""
