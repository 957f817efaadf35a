"""The process inside a pod and the host side of its protocol.

`init.GuestInit` is PID 1 of a pod and serves the frames of `protocol`; `client.GuestClient` is its client and
`guest_pod.GuestPod` a pod built on one. The exported names are imported when first used, because the zygote imports
this package and must stay small.
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude.pods.guest.client import GuestClient, Link, SocketLink
    from etude.pods.guest.guest_pod import GuestPod
    from etude.pods.guest.init import GuestInit

_MODULES = {
    "GuestClient": "etude.pods.guest.client",
    "GuestInit": "etude.pods.guest.init",
    "GuestPod": "etude.pods.guest.guest_pod",
    "Link": "etude.pods.guest.client",
    "SocketLink": "etude.pods.guest.client",
}
__all__ = ["GuestClient", "GuestInit", "GuestPod", "Link", "SocketLink"]
__getattr__ = lazy_exports(__name__, _MODULES)
