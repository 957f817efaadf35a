"""The host side of the process inside a pod, the guest init (`runtime/native/init.c`).

`protocol` has the frames, `client.GuestClient` sends them over a link, and `guest_pod.GuestPod` is a pod built on one.
"""

from etude.pods.guest.client import GuestClient, Link, SocketLink
from etude.pods.guest.guest_pod import GuestPod

__all__ = ["GuestClient", "GuestPod", "Link", "SocketLink"]
