"""Start and watch the services of a run. Today as processes of this machine; other launchers implement the same calls."""

from etude.cluster.local import LocalServices, Service, ServiceFailed, ServiceGaveUp

__all__ = ["LocalServices", "Service", "ServiceFailed", "ServiceGaveUp"]
