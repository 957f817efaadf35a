"""Images and snapshots as stacks of immutable layers in overlayfs form, as in containerd.

`Store` keeps layers, images and snapshots of one state directory; `build` runs a Dockerfile; the `image_from_*`
functions and `host_image` (in `sources`) make images from other sources. The names below are imported when first used:
a pod's first process imports parts of this package and must stay small.
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude.pods.images.dockerfile import build as build
    from etude.pods.images.records import Image as Image
    from etude.pods.images.records import Layer as Layer
    from etude.pods.images.records import SnapshotRecord as SnapshotRecord
    from etude.pods.images.sources import image_from_debootstrap as image_from_debootstrap
    from etude.pods.images.sources import image_from_directory as image_from_directory
    from etude.pods.images.sources import image_from_oci_layout as image_from_oci_layout
    from etude.pods.images.sources import image_from_tar as image_from_tar
    from etude.pods.images.store import Store as Store

__getattr__ = lazy_exports(__name__)
