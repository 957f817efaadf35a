"""The host side of the process inside a pod, the guest init (`runtime/native/init.c`).

`protocol` has the frames, `client.GuestClient` sends them over a link, and `guest_pod.GuestPod` is a pod built on one.
"""
