"""Start and watch the services of a run, as processes of this machine."""

from etude.cluster.local import LocalServices, Service, ServiceFailed, ServiceGaveUp

__all__ = ["LocalServices", "Service", "ServiceFailed", "ServiceGaveUp"]
