"""Images and snapshots as stacks of immutable layers in overlayfs form, as in containerd.

`Store` keeps layers, images and snapshots of one state directory; `build` runs a Dockerfile; the `image_from_*`
functions and `host_image` (in `sources`) make images from other sources.
A pod's first process imports parts of this package and must stay small.
"""
