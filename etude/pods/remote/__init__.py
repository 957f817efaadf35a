"""Pods of another machine: a host behind HTTP (`server`), its client, and the JSON between them (`messages`).

`host_client` gives the command line one interface to the pods of this machine and of a remote host.
The names below are imported when first used: the server and the client load HTTP libraries.
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude.pods.remote.client import RemoteHostClient, RemotePod
    from etude.pods.remote.host_client import PodService, open_pod_service

_MODULES = {
    "PodService": "etude.pods.remote.host_client",
    "RemoteHostClient": "etude.pods.remote.client",
    "RemotePod": "etude.pods.remote.client",
    "open_pod_service": "etude.pods.remote.host_client",
}
__all__ = ["PodService", "RemoteHostClient", "RemotePod", "open_pod_service"]
__getattr__ = lazy_exports(__name__, _MODULES)
