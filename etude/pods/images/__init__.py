"""Images and snapshots as stacks of immutable layers in overlayfs form, as in containerd.

`Store` keeps layers, images and snapshots of one state directory; `build` runs a Dockerfile; the `image_from_*`
functions and `host_image` (in `sources`) make images from other sources. The names below are imported when first used:
a pod's first process imports parts of this package and must stay small.
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude.pods.images.dockerfile import build
    from etude.pods.images.records import Image, Layer, SnapshotRecord
    from etude.pods.images.sources import (
        image_from_debootstrap,
        image_from_directory,
        image_from_oci_layout,
        image_from_tar,
    )
    from etude.pods.images.store import Store

_MODULES = {
    "Image": "etude.pods.images.records",
    "Layer": "etude.pods.images.records",
    "SnapshotRecord": "etude.pods.images.records",
    "Store": "etude.pods.images.store",
    "build": "etude.pods.images.dockerfile",
    "image_from_debootstrap": "etude.pods.images.sources",
    "image_from_directory": "etude.pods.images.sources",
    "image_from_oci_layout": "etude.pods.images.sources",
    "image_from_tar": "etude.pods.images.sources",
}
__all__ = [
    "Image",
    "Layer",
    "SnapshotRecord",
    "Store",
    "build",
    "image_from_debootstrap",
    "image_from_directory",
    "image_from_oci_layout",
    "image_from_tar",
]
__getattr__ = lazy_exports(__name__, _MODULES)
