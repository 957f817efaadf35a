"""Publish weights to samplers as versions in an object store, most of them deltas against the version before.

with Publisher(ObjectStore("s3://bucket/run")) as publisher:      # the trainer; it never waits
    publisher.publish_soon(step, model.state_dict())
version, weights = follow(ObjectStore("s3://bucket/run"), have)   # a sampler
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etude.weights.delta import DeltaError, apply_delta, encode_delta
    from etude.weights.object_store import ObjectStore
    from etude.weights.publisher import Publisher, PublishingFailed
    from etude.weights.versions import BrokenChain, Version, WeightState, follow, latest, read_version

_HOMES = {
    "BrokenChain": "etude.weights.versions",
    "DeltaError": "etude.weights.delta",
    "ObjectStore": "etude.weights.object_store",
    "Publisher": "etude.weights.publisher",
    "PublishingFailed": "etude.weights.publisher",
    "Version": "etude.weights.versions",
    "WeightState": "etude.weights.versions",
    "apply_delta": "etude.weights.delta",
    "encode_delta": "etude.weights.delta",
    "follow": "etude.weights.versions",
    "latest": "etude.weights.versions",
    "read_version": "etude.weights.versions",
}
__all__ = [
    "BrokenChain",
    "DeltaError",
    "ObjectStore",
    "Publisher",
    "PublishingFailed",
    "Version",
    "WeightState",
    "apply_delta",
    "encode_delta",
    "follow",
    "latest",
    "read_version",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'etude.weights' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
