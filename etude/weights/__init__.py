"""Publish weights to samplers as versions in an object store, most of them deltas against the version before.

with Publisher(ObjectStore("s3://bucket/run")) as publisher:      # the trainer; it never waits
    publisher.publish_soon(step, model.state_dict())
version, weights = follow(ObjectStore("s3://bucket/run"), have)   # a sampler
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude.weights.delta import DeltaError as DeltaError
    from etude.weights.delta import apply_delta as apply_delta
    from etude.weights.delta import encode_delta as encode_delta
    from etude.weights.object_store import ObjectStore as ObjectStore
    from etude.weights.publisher import Publisher as Publisher
    from etude.weights.publisher import PublishingFailed as PublishingFailed
    from etude.weights.versions import BrokenChain as BrokenChain
    from etude.weights.versions import Version as Version
    from etude.weights.versions import WeightState as WeightState
    from etude.weights.versions import follow as follow
    from etude.weights.versions import latest as latest
    from etude.weights.versions import read_version as read_version

__getattr__ = lazy_exports(__name__)
