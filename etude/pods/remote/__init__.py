"""Pods of another machine: a host behind HTTP (`server`), its client, and the JSON between them (`messages`).

`host_client` gives the command line one interface to the pods of this machine and of a remote host.
The names below are imported when first used: the server and the client load HTTP libraries.
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude.pods.remote.client import RemoteHostClient as RemoteHostClient
    from etude.pods.remote.client import RemotePod as RemotePod
    from etude.pods.remote.host_client import PodService as PodService
    from etude.pods.remote.host_client import open_pod_service as open_pod_service

__getattr__ = lazy_exports(__name__)
