"""Images and snapshots as stacks of immutable layers in overlayfs form, as in containerd.

`Store` keeps layers, images and snapshots of one state directory; `build` runs a Dockerfile; the `image_from_*`
functions and `host_image` (in `sources`) make images from other sources. The names below are imported when first used:
a pod's first process imports parts of this package and must stay small.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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

_HOMES = {
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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'etude.pods.images' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
