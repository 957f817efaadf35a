"""Open or survey the cluster that the settings name."""

from etude.cluster.cluster import Cluster, ClusterSize
from etude.cluster.local import LocalCluster
from etude.cluster.settings import ClusterSettings
from etude.runs.layout import RunLayout


def open_cluster(settings: ClusterSettings, layout: RunLayout) -> Cluster:
    """Return this machine, or connect to a Ray cluster; InputError if that is not possible."""
    if settings.is_local:
        return LocalCluster()
    from etude.cluster.ray_cluster import RayCluster  # Ray is an extra

    return RayCluster(settings, layout.cluster_probe)


def survey_cluster(settings: ClusterSettings) -> ClusterSize | None:
    """Return what a cluster has, None for this machine; InputError if it cannot be joined."""
    if settings.is_local:
        return None
    from etude.cluster.ray_cluster import survey

    return survey(settings)
