"""Processes that stay for several tests and run functions together, each as one rank of a job."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from etude.parallel.launch import rendezvous


class RankFailed(AssertionError):
    """A rank raised; the message is its traceback."""


class Ranks:
    """`count` processes, each with one thread. A failure in one of them ends all."""

    def __init__(self, count: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.count = count
        self._connections: list[Connection] = []
        self._processes = []
        for _ in range(count):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return what the function returns on each rank; it must be importable, like its arguments."""
        with rendezvous(self.count) as environments:
            for connection, environment in zip(self._connections, environments, strict=True):
                connection.send((function, arguments, environment))
            found: dict[int, Any] = {}
            while len(found) < self.count:
                waiting = [c for rank, c in enumerate(self._connections) if rank not in found]
                for ready in wait(waiting):
                    assert isinstance(ready, Connection)
                    rank = self._connections.index(ready)
                    try:
                        problem, found[rank] = ready.recv()
                    except EOFError:
                        problem = "the process ended"
                    if problem:
                        self.close()
                        raise RankFailed(f"rank {rank} of {self.count}: {problem}")
        return [found[rank] for rank in range(self.count)]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


@contextmanager
def open_ranks(count: int) -> Iterator[Ranks]:
    ranks = Ranks(count)
    try:
        yield ranks
    finally:
        ranks.close()


def follower_of(parent: int, word: str) -> int:
    """Return the pid of the process of rank 1 that a process has started, with this word in its command line."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            command, environment = ((stat.parent / name).read_text() for name in ("cmdline", "environ"))
        except OSError:
            continue
        if int(fields[1]) == parent and word in command and "RANK=1" in environment.split("\0"):
            return int(stat.parent.name)
    raise AssertionError("no rank is running")


def _serve(connection: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            function, arguments, environment = connection.recv()
        except EOFError:
            return
        os.environ.update(environment)
        try:
            connection.send(("", function(*arguments)))
        except BaseException:
            connection.send((traceback.format_exc(), None))
