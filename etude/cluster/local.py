"""Services as processes of this machine: the default, which needs nothing."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from etude.cluster.cluster import Cluster, Exit, Node, Resources, ServiceProcess, ServiceSpec, exit_of
from etude.system.processes import NODE_VARIABLE, PARENT_VARIABLE


class LocalProcess(ServiceProcess):
    """A child of this process, which ends with it."""

    def __init__(self, process: subprocess.Popen[bytes], node: str) -> None:
        self.process, self.node = process, node

    def poll(self) -> Exit | None:
        code = self.process.poll()
        return None if code is None else exit_of(code)

    def terminate(self) -> None:
        self.process.terminate()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class LocalCluster(Cluster):
    """This machine, whose processes share it: resources are not counted."""

    name, address, assigns_gpus = "this machine", "127.0.0.1", False

    def start(
        self, spec: ServiceSpec, environments: Sequence[Mapping[str, str]], logs: Sequence[Path]
    ) -> list[LocalProcess]:
        command, node, found = [sys.executable, "-m", spec.module, *spec.arguments], socket.gethostname(), []
        for environment, path in zip(environments, logs, strict=True):
            with open(path, "ab") as log:
                child = start_child(command, {**spec.environment, **environment, NODE_VARIABLE: node}, log)
            found.append(LocalProcess(child, node))
        return found

    def nodes(self, resources: Resources) -> list[Node]:
        return [Node("", socket.gethostname())]

    def update(self) -> None:
        """Nothing happens elsewhere."""

    def close(self) -> None:
        """There is no connection."""


def start_child(
    command: Sequence[str], environment: Mapping[str, str], log: IO[bytes], own_session: bool = False
) -> subprocess.Popen[bytes]:
    """Start a process that ends with this one; its output goes to an open file."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env={**os.environ, **environment, PARENT_VARIABLE: str(os.getpid())},
        start_new_session=own_session,
    )
