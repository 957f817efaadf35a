"""How new weights reach the samplers: as versions in an object store, mostly deltas against the one before."""

from etude.weights.delta import apply_delta, encode_delta

__all__ = ["apply_delta", "encode_delta"]
