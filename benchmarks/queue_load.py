"""Load on the run service: simulated workers, a trainer, an orchestrator and samplers against one real process.

    python benchmarks/queue_load.py                                     # 2,000 workers, about 10 minutes on two cores
    python benchmarks/queue_load.py --workers 200 --finished 1000 10000 --seconds 10

For each size of the past (rollouts that the queue has already finished) a new run, three phases:

    idle       the trainer and the orchestrator poll, samplers report; no worker
    realistic  workers with rollouts of two minutes: heartbeats, checkpoints, claims, reports, sweeps, policy steps
    saturated  rollouts that take no time: as many claims and reports as the service answers

The requests are those of the real clients: `WorkerClient`, driven by event loops (`queue_load_workers.py`), and
`QueueClient`, with the trainer's own waiting loop and what the orchestrator asks in each tick. CPU is that of the
service's process. On few cores the workers compete with it: CPU for each request depends little on that, latencies do.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import tomli_w
from rich.console import Console
from rich.table import Table

from benchmarks.queue_load_workers import Load, Shared, reward_record, run_workers
from etude.config import load_table
from etude.files import write_atomically
from etude.rl.loop import RlLoop, score_groups, wait_for_groups
from etude.rl.orchestrator import TICK_S
from etude.rl.settings import RlSettings
from etude.rollouts.queue import RolloutQueue
from etude.rollouts.queue_client import QueueClient
from etude.rollouts.settings import load_queues
from etude.runs.address import choose_address, run_token
from etude.runs.client import RunClient
from etude.runs.layout import RunLayout
from etude.runs.service_status import SAMPLER, StatusReader
from etude.weights.object_store import ObjectStore
from etude.weights.publisher import Publisher

PHASES = ("idle", "realistic", "saturated")
GROUP = 8
STEP_S = 5.0  # of the simulated trainer, in the realistic phase
UPDATE_S = 2.0  # until a sampler has a new version, on average
SETTLE_S = 15.0  # after the workers have started, and after a change of the phase


@dataclass(frozen=True)
class Sizes:
    """The size of the load."""

    workers: int
    rollouts: int  # of a worker at once
    rollout_s: float
    samplers: int
    seconds: float  # of each phase
    processes: int


@dataclass
class Phase:
    """What was measured in one phase."""

    seconds: float = 0.0
    requests: int = 0
    finished: int = 0
    steps: int = 0
    cpu_s: float = 0.0
    memory_mb: float = 0.0
    load: float = 0.0  # of the machine: processes that run or want to
    latencies_ms: dict[str, list[float]] = field(default_factory=dict)  # by endpoint: count, p50, p99, max

    @property
    def cpu_us(self) -> float:
        return 1e6 * self.cpu_s / max(1, self.requests)


# ------------------------------------------------------------------------------------------- a run with a past


def make_run(directory: Path, sizes: Sizes, finished: int) -> RunLayout:
    """Return a run whose training queue has finished and trained so many rollouts, a tenth of them dropped."""
    in_flight = sizes.workers * sizes.rollouts
    groups = max(1, in_flight // GROUP // 4)  # a step has a quarter of what is in flight
    table = {"tasks": "none", "steps": 10**6, "group_size": GROUP, "groups_per_step": groups, "in_flight": in_flight}
    table |= {
        "workers": sizes.workers,
        "max_staleness": 8,
        "prefetch_steps": 5.0,
        "model": str(directory / "none"),
        "stall_s": 3600.0,
    }
    layout = RunLayout(directory / "run")
    layout.make()
    write_atomically(layout.recipe, tomli_w.dumps({"name": "load", "stages": ["rl"], "rl": table}))
    write_atomically(layout.id, secrets.token_hex(16))
    write_atomically(layout.tasks, json.dumps({"train": {}, "held_out": {}}))
    with closing(RolloutQueue(layout.slots, load_queues(layout)["training"])) as queue:
        fill(queue, finished // GROUP, groups)
    return layout


def fill(queue: RolloutQueue, groups: int, per_step: int) -> None:
    """Insert groups that are done."""
    reward = json.dumps({**reward_record(True), "versions": [0, 0]})
    count = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?)"
    with queue._transaction() as db:
        db.execute(f"{count} INSERT INTO groups (task) SELECT printf('old-%d', i) FROM n", (groups,))
        db.execute(
            f"""{count} INSERT INTO slots (grp, number, attempt, state, reward, trace, oldest, newest)
                SELECT 1 + (i - 1) / {GROUP}, (i - 1) % {GROUP}, 1, 'ready', ?, 'traces/training/000001/00-1.trace',
                       1 + (i - 1) / {GROUP} / ?, 1 + (i - 1) / {GROUP} / ? FROM n""",
            (groups * GROUP, reward, per_step, per_step),
        )
        db.execute("UPDATE groups SET informative = id % 3 != 0, step = 1 + id / ? WHERE id % 10 != 0", (per_step,))
        db.execute("UPDATE groups SET dropped = 'failed' WHERE id % 10 = 0")
        db.execute(f"{count} INSERT INTO versions SELECT i, i FROM n", (1 + groups // per_step,))
        db.execute("INSERT OR REPLACE INTO plan SELECT 'served', MAX(step) FROM groups")


# ------------------------------------------------------------------------------------------- the other processes


class OtherProcesses:
    """The trainer, the orchestrator and the samplers of a run, as threads."""

    def __init__(self, layout: RunLayout, shared: Shared, sizes: Sizes) -> None:
        self.layout, self.shared, self.sizes = layout, shared, sizes
        self.stopped, self.problems = threading.Event(), list[BaseException]()
        self.step, self.step_s = 0, STEP_S
        works = (self.train, self.orchestrate, *(lambda n=n: self.sample(n) for n in range(sizes.samplers)))
        self.threads = [threading.Thread(target=self._guarded, args=(work,), daemon=True) for work in works]

    def __enter__(self) -> OtherProcesses:
        with closing(self._client()) as client:
            self.step = self._queue(client).last_step()
            self.shared.version.value = self._queue(client).newest_version()
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stopped.set()

    def _guarded(self, work: Any) -> None:
        try:
            work()
        except BaseException as error:
            if not self.stopped.is_set():
                self.problems.append(error)
                raise

    def _client(self) -> RunClient:
        client = RunClient.beside(self.layout, patience_s=60.0)
        client.connect()
        return client

    def _queue(self, client: RunClient) -> QueueClient:
        return QueueClient(client, "training", load_queues(self.layout)["training"])

    def train(self) -> None:
        """Take steps with the waiting loop of the real trainer; nothing is learned."""
        client = self._client()
        queue, settings = self._queue(client), self._settings()
        nothing = Publisher(ObjectStore(self.layout.store))  # is published
        idle = SimpleNamespace(waits=False, publisher=nothing)
        weights = {"correctness": 1.0}
        loop = RlLoop(self.layout, settings, cast(Any, idle), queue, None, 0, reward_weights=lambda step: weights)
        loop.report_status = lambda **facts: None  # reported by a thread of its own, every second
        while not self.stopped.is_set():
            groups, _ = wait_for_groups(loop, self.step)
            groups = score_groups(loop, groups or [], self.step + 1)
            self.stopped.wait(self.step_s)
            queue.mark_trained(groups, self.step + 1)
            self.step += 1
            queue.record_version(self.shared.version.value + 1, self.step)
            self.shared.version.value += 1

    def _settings(self) -> RlSettings:
        return load_table(self.layout.recipe, "rl", RlSettings)

    def orchestrate(self) -> None:
        """Ask what the orchestrator asks in each tick."""
        client, statuses = self._client(), StatusReader(self.layout)
        queue = self._queue(client)
        evaluations = QueueClient(client, "evaluation", load_queues(self.layout)["evaluation"])
        seen: Any = None
        served, change, number, logged = (-1, -1), 1 << 40, 0, self.step
        with suppress(ValueError):
            change = max(record.change for record in queue.changed_groups(0, 1 << 20))
        while not self.stopped.wait(TICK_S):
            found = statuses.all()
            versions = [each.facts.get("version") for name, each in found.items() if name.startswith(SAMPLER)]
            state, evaluated = queue.state(), evaluations.state()
            if (now := (self.step, state.changes, evaluated.changes, versions)) == seen:
                continue
            seen = now
            steps = [queue.step_of(version) for version in versions if version is not None]
            if steps and (min(steps), max(steps)) != served:
                served = min(steps), max(steps)
                queue.set_served_step(*served)
            fresh = queue.last_step() == self.step and bool(steps) and min(steps) >= self.step
            if wanted := queue.groups_to_start(fresh=fresh, steps_left=1000):
                changed = queue.changed_groups(change)
                change = max((record.change for record in changed), default=change)
                queue.add([(f"new-{number + each}", float(each % 7)) for each in range(wanted)])
                number += wanted
            while logged < self.step:
                logged += 1
                queue.trained_rewards(logged, 2000)
                queue.incidents(logged)
                client.report_status("orchestrator", step=logged)

    def sample(self, number: int) -> None:
        """Report as a sampler does, and take new versions a while after they were published."""
        client, version = self._client(), self.shared.version.value
        while not self.stopped.wait(1.0):
            if np.random.default_rng().random() < 1.0 / UPDATE_S:
                version = self.shared.version.value
            facts = {"kind": SAMPLER, "state": "ready", "url": f"http://10.0.0.{number}:8000", "version": version}
            client.report_status(f"{SAMPLER}-{number}", **facts, running=12, waiting=3, tokens_s=1234.5)


# ------------------------------------------------------------------------------------------- measuring


@contextmanager
def service_process(layout: RunLayout) -> Iterator[int]:
    """Run the service; give its process id."""
    choose_address(layout)
    command = [sys.executable, "-m", "etude.rollouts.run_service", str(layout.run)]
    with subprocess.Popen(command) as process:
        try:
            with closing(RunClient.beside(layout, patience_s=120.0)) as client:
                client.connect()
            yield process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_of(pid: int) -> float:
    rows = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return int(rows["VmRSS"].split()[0]) / 1024


def figures(client: RunClient) -> dict[str, float]:
    """Return requests by endpoint, as the service counts them."""
    found: dict[str, float] = {}
    for line in client.send("GET", "/metrics").decode().splitlines():
        if line.startswith("etude_run_requests_total"):
            found[line.split('"')[1]] = float(line.rsplit(" ", 1)[1])
    return found


def measure(sizes: Sizes, finished: int, only: str) -> dict[str, Phase]:
    """Return what was measured with a past of so many rollouts, by phase."""
    found: dict[str, Phase] = {}
    with tempfile.TemporaryDirectory(prefix="etude-load-") as directory:
        layout = make_run(Path(directory), sizes, finished)
        context = multiprocessing.get_context("spawn")
        shared = Shared(context.Value("i", 0), context.Value("q", 0), context.Value("d", sizes.rollout_s))
        with (
            service_process(layout) as pid,
            closing(RunClient.beside(layout)) as client,
            OtherProcesses(layout, shared, sizes) as others,
        ):
            client.connect()
            time.sleep(5.0)
            found["idle"] = watch(client, pid, others, sizes.seconds / 3)
            processes, pipes = start_workers(context, client, layout, shared, sizes)
            time.sleep(SETTLE_S + min(sizes.rollout_s, 60.0))
            for number, phase in enumerate(PHASES[1:], 1):
                if only in ("", phase):
                    if phase == "saturated":
                        shared.rollout_s.value, others.step_s = 0.0, 0.0
                        time.sleep(SETTLE_S)
                    shared.phase.value = number
                    found[phase] = watch(client, pid, others, sizes.seconds)
                    shared.phase.value = 0
            shared.phase.value = -1
            for pipe in pipes:
                add_latencies(found, pipe.recv()[0])
            for process in processes:
                process.join(60)
    for measured in found.values():
        measured.latencies_ms = {name: summary(rows) for name, rows in sorted(measured.latencies_ms.items())}
    return found


def start_workers(
    context: Any, client: RunClient, layout: RunLayout, shared: Shared, sizes: Sizes
) -> tuple[list[Any], list[Any]]:
    """Start the processes with the workers."""
    names = [f"worker-{number}" for number in range(sizes.workers)]
    processes, pipes = [], []
    for number in range(sizes.processes):
        load = Load(
            client.url, run_token(layout), client.run, tuple(names[number :: sizes.processes]), sizes.rollouts, number
        )
        receiving, sending = context.Pipe(duplex=False)
        process = context.Process(target=run_workers, args=(load, shared, sending), daemon=True)
        process.start()
        processes.append(process)
        pipes.append(receiving)
    return processes, pipes


def watch(client: RunClient, pid: int, others: OtherProcesses, seconds: float) -> Phase:
    """Return the figures of the service over so many seconds."""
    requests, cpu, started = figures(client), cpu_of(pid), time.monotonic()
    before, steps = sum(requests.values()), others.step
    time.sleep(seconds)
    if others.problems:
        raise others.problems[0]
    after, cpu_s, took = figures(client), cpu_of(pid) - cpu, time.monotonic() - started
    reports = after.get("report", 0.0) - requests.get("report", 0.0)
    load = os.getloadavg()[0]
    return Phase(
        took, int(sum(after.values()) - before), int(reports), others.step - steps, cpu_s, memory_of(pid), load
    )


def add_latencies(found: dict[str, Phase], by_phase: dict[int, dict[str, list[float]]]) -> None:
    for number, by_endpoint in by_phase.items():
        if number > 0 and PHASES[number] in found:
            for endpoint, seconds in by_endpoint.items():
                found[PHASES[number]].latencies_ms.setdefault(endpoint, []).extend(seconds)


def summary(seconds: list[float]) -> list[float]:
    """Return how many there are, and their p50, p99 and maximum in milliseconds."""
    values = 1000 * np.asarray(seconds)
    return [len(values), *(round(float(each), 2) for each in (*np.percentile(values, (50, 99)), values.max()))]


# ------------------------------------------------------------------------------------------- output


def tables(found: dict[int, dict[str, Phase]]) -> Iterator[Table]:
    first = found[min(found)]
    for name in first:
        table = Table(title=name)
        for column in ("past rollouts", "requests/s", "reports/s", "steps", "CPU", "CPU/request", "ratio", "memory"):
            table.add_column(column, justify="right")
        for past, phases in sorted(found.items()):
            phase = phases[name]
            table.add_row(
                f"{past:,}",
                f"{phase.requests / phase.seconds:,.0f}",
                f"{phase.finished / phase.seconds:,.0f}",
                str(phase.steps),
                f"{phase.cpu_s / phase.seconds:.0%}",
                f"{phase.cpu_us:,.0f} us",
                f"{phase.cpu_us / first[name].cpu_us:.2f}",
                f"{phase.memory_mb:,.0f} MB",
            )
        yield table
        endpoints = sorted({endpoint for phases in found.values() for endpoint in phases[name].latencies_ms})
        if not endpoints:
            continue
        table = Table(title=f"{name}: milliseconds p50 / p99 / max, by past rollouts")
        for column in ("endpoint", *(f"{past:,}" for past in sorted(found))):
            table.add_column(column, justify="right")
        for endpoint in endpoints:
            cells = (phases[name].latencies_ms.get(endpoint, [0, 0, 0, 0])[1:] for _, phases in sorted(found.items()))
            table.add_row(endpoint, *(" / ".join(f"{value:,.0f}" for value in cell) for cell in cells))
        yield table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2000)
    parser.add_argument("--rollouts", type=int, default=2, help="of a worker at once")
    parser.add_argument("--rollout-s", type=float, default=120.0, help="mean duration in the realistic phase")
    parser.add_argument("--samplers", type=int, default=16)
    parser.add_argument("--finished", type=int, nargs="+", default=[10_000, 100_000, 1_000_000], help="past rollouts")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each phase")
    parser.add_argument("--processes", type=int, default=2, help="processes that hold the workers")
    parser.add_argument("--phase", choices=PHASES[1:], default="", help="only this one, beside idle")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    given = parser.parse_args()
    sizes = Sizes(given.workers, given.rollouts, given.rollout_s, given.samplers, given.seconds, given.processes)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    found: dict[int, dict[str, Phase]] = {}
    for finished in sorted(given.finished):
        found[finished] = measure(sizes, finished, given.phase)
        print(f"{finished:,}: load of the machine {[round(each.load, 1) for each in found[finished].values()]}")
    if given.json:
        plain = {past: {name: asdict(each) for name, each in phases.items()} for past, phases in found.items()}
        given.json.write_text(json.dumps(plain, indent=1))
    console = Console(width=130)
    for table in tables(found):
        console.print(table)
    each = f"{sizes.workers:,} workers with {sizes.rollouts} rollouts at once, {sizes.samplers} samplers"
    print(f"{each}, phases of {sizes.seconds:.0f} s, {os.cpu_count()} cores shared by all processes.")


if __name__ == "__main__":
    main()
