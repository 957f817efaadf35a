"""Search in a workspace by meaning and by words, outside the pod. The door is `searcher.open_searcher`."""
