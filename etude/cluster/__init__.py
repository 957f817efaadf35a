"""Start and watch the services of a run: as processes of this machine, or on the nodes of a Ray cluster."""
