"""Publish weights to samplers as versions in an object store, most of them deltas against the version before.

with Publisher(ObjectStore("s3://bucket/run")) as publisher:      # the trainer; it never waits
    publisher.publish_soon(step, model.state_dict())
version, weights = follow(ObjectStore("s3://bucket/run"), have)   # a sampler
"""
