"""The process inside a pod and the host side of its protocol.

`init.GuestInit` is PID 1 of a pod and serves the frames of `protocol`; `client.GuestClient` is its client and
`guest_pod.GuestPod` a pod built on one. The exported names are imported when first used, because the zygote imports
this package and must stay small.
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude.pods.guest.client import GuestClient as GuestClient
    from etude.pods.guest.client import Link as Link
    from etude.pods.guest.client import SocketLink as SocketLink
    from etude.pods.guest.guest_pod import GuestPod as GuestPod
    from etude.pods.guest.init import GuestInit as GuestInit

__getattr__ = lazy_exports(__name__)
