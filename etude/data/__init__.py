"""Repositories and text, on their way to becoming packed token batches. Knows nothing of models or agents."""
