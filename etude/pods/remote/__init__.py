"""Pods of another machine: a host behind HTTP (`server`), its client, and the JSON between them (`messages`).

`host_client` gives the command line one interface to the pods of this machine and of a remote host.
The names below are imported when first used: the server and the client load HTTP libraries.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etude.pods.remote.client import RemoteHostClient, RemotePod
    from etude.pods.remote.host_client import PodService, open_pod_service

_HOMES = {
    "PodService": "etude.pods.remote.host_client",
    "RemoteHostClient": "etude.pods.remote.client",
    "RemotePod": "etude.pods.remote.client",
    "open_pod_service": "etude.pods.remote.host_client",
}
__all__ = ["PodService", "RemoteHostClient", "RemotePod", "open_pod_service"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'etude.pods.remote' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
