"""Code search in a workspace by embeddings and BM25, outside the pod.

result = await open_searcher().search(files, "where are user roles checked?")
"""
