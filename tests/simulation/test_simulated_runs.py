"""Whole runs in virtual time, with faults of every kind; see `sim_run` for what is real and what must be true.

A seed is a run: the same seed gives the same events. To look at one: `python tests/simulation/sim_run.py SEED`.
"""

from __future__ import annotations

import inspect
import itertools
import os
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sim_run import SimulatedRun, quick

from etude.cluster.supervisor import ServiceSupervisor
from etude.inference.sampler_process import VersionFollower
from etude.rl import loop, trainer_process
from etude.rollouts.queue import RolloutQueue
from etude.rollouts.worker import Worker
from etude.rollouts.worker_client import WorkerClient
from etude.weights import delta, publisher, versions
from etude.weights.publisher import Publisher

BLOCK = 20  # seeds of one test
SLOW_BLOCKS = 26
FIND_WITHIN = 200  # seeds, for a planted bug
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # a disk would be most of the time


@pytest.fixture(autouse=True)
def slower_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch.setattr)


def simulate(seed: int, faults: bool | None = None) -> SimulatedRun:
    """Run a seed; an error names it."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
        run = SimulatedRun(seed, Path(directory), faults)
        try:
            return run.run()
        except Exception as problem:
            last = "\n".join(run.simulation.log[-40:])
            raise AssertionError(f"seed {seed}: {problem!r}\n{last}") from problem


@pytest.mark.parametrize(
    "block",
    [0, *(pytest.param(block, marks=pytest.mark.slow) for block in range(1, SLOW_BLOCKS))],
)
def test_nothing_is_lost_or_trained_twice_and_the_run_finishes(block: int) -> None:
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        simulate(seed)


def test_the_same_seed_gives_the_same_events() -> None:
    one, other = (simulate(3, faults=True).simulation for _ in range(2))
    for here, there in itertools.zip_longest(one.log, other.log):
        assert here == there
    assert simulate(4, faults=True).simulation.log != one.log


# ------------------------------------------------------------------------------------------ planted bugs


@dataclass(frozen=True)
class Change:
    """A change of the source of one function."""

    owner: Any
    name: str
    replaced: tuple[tuple[str, str], ...]

    def apply(self, patch: pytest.MonkeyPatch) -> None:
        function = getattr(self.owner, self.name)
        source = textwrap.dedent(inspect.getsource(function))
        for old, new in self.replaced:
            assert source.count(old) == 1, f"{self.name} has {source.count(old)} times {old!r}"
            source = source.replace(old, new)
        found: dict[str, Any] = {}
        exec(compile(source, f"planted in {self.name}", "exec"), function.__globals__, found)
        patch.setattr(self.owner, self.name, found[self.name])
        for module in list(sys.modules.values()):  # that have imported it by name
            if getattr(module, "__dict__", {}).get(self.name) is function:
                patch.setattr(module, self.name, found[self.name])


def change(owner: Any, name: str, *replaced: tuple[str, str]) -> Change:
    return Change(owner, name, replaced)


MARK = "        loop.queue.mark_trained(material.groups, step + 1)\n"
CHECKPOINT = "checkpoint_every == 0 or validated:\n            loop.checkpoint()\n"
PUT = "    await self._put(name, await asyncio.to_thread(pack_trace, rollout.trace))\n"
COUNT = '    self.counts["finished"] += 1\n'
REPORT = '    await self._in_thread(lambda: call(self._client, f"/queues/{queue}/report/{kind}", body))\n'

BUGS: dict[str, tuple[Change, ...]] = {
    "queue: a report of an expired claim counts": (
        change(RolloutQueue, "_report", ("AND attempt=? AND {IN_FLIGHT}", "AND (attempt=? OR 1) AND {IN_FLIGHT}")),
    ),
    "queue: going back leaves the groups of lost steps trained": (
        change(RolloutQueue, "rewind", ("SET step=NULL WHERE step > ?", "SET step=NULL WHERE step > 1000 + ?")),
    ),
    "publisher: weights are not copied before they are written": (
        change(publisher, "copied", ('tensor.detach().to("cpu", copy=True)', "tensor.detach()")),
    ),
    "publisher: the store's failure is taken for success": (
        change(Publisher, "_run", ("overtaken = bool(self._waiting) and not next_up.pinned", "overtaken = True")),
    ),
    "follower: a delta is applied to whatever is there, unchecked": (
        change(versions, "_chain", ("if have is not None and parent == have[0].number:", "if have is not None:")),
        change(versions, "read_version", ("chain[0].parent == have[0].number", "chain[0].parent is not None")),
        change(versions, "_apply", ("if checksum(part) != shard.result:", "if False:")),
        change(
            delta,
            "apply_delta",
            ('if checksum(old) != header["base"]:', "if False:"),
            ('if checksum(result) != header["result"]:', "if False:"),
        ),
    ),
    "follower: after a failed read there is no further one": (
        change(VersionFollower, "_back_off", ("BACKOFF * (now - started)", "1e9")),
    ),
    "trainer: groups are marked as trained after the checkpoint": (
        change(loop, "learn", (MARK, ""), (CHECKPOINT, CHECKPOINT + MARK)),
    ),
    "queue: a request of a trainer that was replaced is applied": (
        change(RolloutQueue, "apply_once", ("if session != present:", "if False:")),
        change(trainer_process, "check_session", ("!= session", "== 0")),
    ),
    "queue: a request that comes late is applied": (
        change(RolloutQueue, "apply_once", ("if request < last:", "if False:"), ("if request > last:", "if True:")),
    ),
    "trainer: the queue does not go back with it": (
        change(trainer_process, "resumed_loop", ("    queue.rewind(trainer.step_count)\n", "")),
    ),
    "worker: a rollout is reported before its trace is stored": (
        change(Worker, "_finish", (PUT, ""), (COUNT, PUT + COUNT)),
    ),
    "client: a report without a response counts as delivered": (
        change(
            WorkerClient,
            "report",
            (
                REPORT,
                "    with contextlib.suppress(RunServiceUnavailable):\n    "
                + REPORT.replace("body", "body, patience_s=0"),
            ),
        ),
    ),
    "supervisor: the services of a dead node are forgotten": (
        change(ServiceSupervisor, "_on_process_death", ("if ended.node_lost and spec.node:", "if ended.node_lost:")),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in BUGS[bug]:
        each.apply(monkeypatch)
    for seed in range(FIND_WITHIN):
        try:
            simulate(seed, faults=True)
        except AssertionError as problem:
            print(f"{bug}: {str(problem).splitlines()[0]}")
            return
    raise AssertionError(f"not found in {FIND_WITHIN} seeds")
