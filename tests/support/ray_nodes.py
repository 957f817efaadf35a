"""A Ray cluster of several nodes on this machine."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

CPUS = 4  # of a node, as Ray counts them
STORE_BYTES = 80 << 20


@contextmanager
def open_nodes(count: int, cpus: int = CPUS, **head: Any) -> Iterator[Any]:
    """Give a running `ray.cluster_utils.Cluster`; skip the test if Ray is not installed."""
    pytest.importorskip("ray")
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    options = {"num_cpus": cpus, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    # A killed node is noticed after some seconds; one that is busy has as much time as always.
    noticing = {"health_check_period_ms": 1000, "health_check_failure_threshold": 4}
    nodes = Cluster(initialize_head=True, head_node_args={**options, "_system_config": noticing, **head})
    try:
        for _ in range(count - 1):
            add_node(nodes, num_cpus=cpus)
        yield nodes
    finally:
        nodes.shutdown()


def add_node(nodes: Any, **more: Any) -> Any:
    return nodes.add_node(**{"num_cpus": CPUS, "object_store_memory": STORE_BYTES, **more})


@contextmanager
def blind_node(nodes: Any, hidden: Path, cache: Path | None = None, **resources: float) -> Iterator[None]:
    """Add a node that, like another machine, sees an empty directory in place of `hidden` and has its own cache."""
    join = f"ray start --address={nodes.address} --num-cpus={CPUS} --object-store-memory={STORE_BYTES} --block"
    join += f" --resources='{json.dumps(resources)}'"
    command = ["unshare", "--mount", "sh", "-c", f"mount -t tmpfs none {hidden} && exec {join}"]
    if os.geteuid() or subprocess.run([*command[:2], "true"], check=False).returncode:
        pytest.skip("a mount namespace needs root")
    environment = {**os.environ, **({"XDG_CACHE_HOME": str(cache)} if cache else {})}
    node = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        nodes.wait_for_nodes()
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(node.pid, signal.SIGKILL)
        node.wait()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
