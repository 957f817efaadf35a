"""Start the processes of a parallel job on this host, or meet those that something else has started.

The process that runs a training stage is rank 0. Without torchrun it starts the other ranks itself, with the
environment that torchrun would give them; they end with it, and it with them. The ranks of the RL trainer are all
started by the supervisor of its services (`etude.cluster`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from etude.errors import EtudeError
from etude.system.processes import PARENT_VARIABLE
from etude.system.terminal import say

POLL_S = 0.2
GRACE_S = 20.0  # after a rank has died, for rank 0 to notice by itself
LOG_TAIL = 2000  # characters of a log shown in an error


@contextmanager
def rendezvous(count: int, host: str = "127.0.0.1") -> Iterator[list[dict[str, str]]]:
    """Give the environment of each rank. The store by which they find each other lives in this process.

    `host` is the address of this host, as the ranks reach it. The port is chosen by the system and held from the start,
    so that two jobs on a host cannot meet.
    """
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    shared = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the ranks connect to the store instead of one of them making it
    }
    yield [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    del store


def open_store(environment: Mapping[str, str]) -> TCPStore:
    """Connect to the store of a job; rank 0 makes it unless the launcher has."""
    has_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return TCPStore(
        environment["MASTER_ADDR"],
        int(environment["MASTER_PORT"]),
        is_master=environment["RANK"] == "0" and not has_store,
        wait_for_workers=False,
        multi_tenant=True,
    )


class RankDied(EtudeError):
    """Another process of the job has ended."""


class Followers:
    """The ranks after the first, on this host. A context manager: leaving it ends them."""

    def __init__(self, command: Sequence[str], environments: Sequence[Mapping[str, str]], logs: Path) -> None:
        self.logs, self.problem = logs, ""
        self._ended = threading.Event()
        logs.mkdir(parents=True, exist_ok=True)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        for environment in environments[1:]:
            rank = int(environment["RANK"])
            with self._log(rank).open("wb") as out:
                self._processes[rank] = subprocess.Popen(
                    [sys.executable, "-m", *command],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **environment, PARENT_VARIABLE: str(os.getpid())},
                )
        self._thread = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._thread.start()

    def __enter__(self) -> Followers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        failed = error is not None
        if not failed:
            for process in self._processes.values():
                process.wait()
        elif isinstance(error, RuntimeError) and not self.problem:  # of a collective: a rank may just be dying
            self._thread.join(GRACE_S)
        self._ended.set()
        self._thread.join()
        for process in self._processes.values():
            process.kill()
            process.wait()
        if isinstance(error, RuntimeError) and self.problem:
            raise RankDied(self.problem) from None

    def _watch(self) -> None:
        """Notice a rank that dies; end this process if it goes on waiting for it."""
        while not self._ended.wait(POLL_S):
            codes = {rank: process.poll() for rank, process in self._processes.items()}
            if died := [rank for rank, code in codes.items() if code]:
                self.problem = self._describe(died[0], codes[died[0]] or 0)
                if not self._ended.wait(GRACE_S):
                    say(f"etude: {self.problem}", file=sys.stderr)
                    for process in self._processes.values():
                        process.kill()
                    os._exit(RankDied.exit_code)
                return

    def _describe(self, rank: int, code: int) -> str:
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        text = self._log(rank).read_text(encoding="utf-8", errors="replace").strip()[-LOG_TAIL:]
        log = f"its log ends:\n{text}" if text else "its log is empty"
        return f"rank {rank} of {len(self._processes) + 1} ended with {how}; {log}"

    def _log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.log"


def wait_for_key(store: TCPStore, key: str) -> str:
    """Wait, as long as it takes, until another process sets a key of the store."""
    while not store.check([key]):
        time.sleep(POLL_S)
    return bytes(store.get(key)).decode()
