"""How new weights reach the samplers: as versions in an object store, mostly deltas against the one before.

with Publisher(Bucket("s3://bucket/run")) as publisher:      # the trainer; never waits
    publisher.publish_soon(step, model.state_dict())
version, weights = follow(Bucket("s3://bucket/run"), have)   # a sampler, anywhere
"""

from etude.weights.bucket import Bucket
from etude.weights.delta import apply_delta, encode_delta
from etude.weights.publisher import Publisher
from etude.weights.versions import Version, follow

__all__ = ["Bucket", "Publisher", "Version", "apply_delta", "encode_delta", "follow"]
