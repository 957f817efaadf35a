"""Publish weights to samplers as versions in an object store, most of them deltas against the version before.

with Publisher(ObjectStore("s3://bucket/run")) as publisher:      # the trainer; it never waits
    publisher.publish_soon(step, model.state_dict())
version, weights = follow(ObjectStore("s3://bucket/run"), have)   # a sampler
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude.weights.delta import DeltaError, apply_delta, encode_delta
    from etude.weights.object_store import ObjectStore
    from etude.weights.publisher import Publisher, PublishingFailed
    from etude.weights.versions import BrokenChain, Version, WeightState, follow, latest, read_version

_MODULES = {
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
__getattr__ = lazy_exports(__name__, _MODULES)
