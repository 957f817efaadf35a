"""CPU time of one RL session on nano tasks, by part: worker, zygote, pods of agents, pods of verifiers.

    python benchmarks/session_cpu.py                      # 30 sessions, each on a task of its own
    python benchmarks/session_cpu.py --against DIRECTORY  # ratio to another checkout, measured in turns

Every session is what a worker of recipes/nano-gpu.toml runs, from a warm pod to the saved trace; only the model is a
script. CPU time is summed by the kernel, so it varies little with other load, but wall time is not measured at all.
Needs root and a control group hierarchy of version 2, which counts the CPU time of pods.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rich.console import Console
from rich.table import Table

from etude.chat.dialects import dialect_for
from etude.chat.tokenizer import Tokenizer
from etude.config import load_table
from etude.errors import InputError
from etude.harness.scripted_policy import ScriptedPolicy
from etude.harness.toolserver.client import launch_tool_server
from etude.harness.trace_store import save_trace
from etude.pods import open_fleet
from etude.pods.runtime.backend import LocalPod
from etude.rollouts.rollout import PolicyBinding, run_rollout
from etude.rollouts.settings import RolloutSettings
from etude.rollouts.worker import MIN_SNAPSHOT_FILES, rollout_options
from etude.tasks import verifier
from etude.tasks.environment import PreparedEnvironments, open_environment
from etude.tasks.harbor import write_task
from etude_nano.demonstrator import demonstration_turns, read_files
from etude_nano.source import nano_tasks

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("worker", "zygote", "agents' pods", "verifiers' pods", "all")
WARM_UP = 3  # sessions before those that are measured
WARM_PODS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=30)
    parser.add_argument("--seed", type=int, default=900, help="of the first task")
    parser.add_argument("--against", type=Path, help="another checkout of this repository")
    parser.add_argument("--rounds", type=int, default=3, help="of each checkout, with --against")
    parser.add_argument("--json", action="store_true", help="print one line of JSON: milliseconds by part")
    arguments = parser.parse_args()
    if arguments.against is not None:
        print_comparison(arguments)
        return
    found = asyncio.run(measure(arguments.sessions, arguments.seed))
    if arguments.json:
        print(json.dumps(found))
        return
    print_table({"ms of CPU": found})


def print_comparison(arguments: argparse.Namespace) -> None:
    """Measure both checkouts in turns; print the medians of the rounds and their ratio."""
    rounds: dict[Path, list[dict[str, float]]] = {arguments.against.resolve(): [], ROOT: []}
    command = [sys.executable, __file__, "--json", f"--sessions={arguments.sessions}", f"--seed={arguments.seed}"]
    for _ in range(arguments.rounds):
        for checkout, found in rounds.items():
            env = {**os.environ, "PYTHONPATH": str(checkout)}
            done = subprocess.run(command, cwd=checkout, env=env, check=True, stdout=subprocess.PIPE)
            found.append(json.loads(done.stdout.splitlines()[-1]))
    before, after = (
        {part: statistics.median(each[part] for each in found) for part in PARTS} for found in rounds.values()
    )
    ratios = {part: after[part] / before[part] for part in PARTS}
    print_table({"before, ms": before, "after, ms": after, "ratio": ratios})
    print(
        f"A session takes {ratios['all']:.2f} times the CPU time: {1e3 / after['all']:.1f} sessions a second and core."
    )


def print_table(columns: dict[str, dict[str, float]]) -> None:
    table = Table("CPU time of one session")
    for name in columns:
        table.add_column(name, justify="right")
    for part in PARTS:
        cells = (f"{found[part]:.2f}" if name == "ratio" else f"{found[part]:.1f}" for name, found in columns.items())
        table.add_row(part, *cells)
    Console(width=100).print(table)


async def measure(sessions: int, seed: int) -> dict[str, float]:
    """Run sessions one after another; return the mean milliseconds of CPU time of one, by part."""
    settings = load_table(ROOT / "recipes/nano-gpu.toml", "rl", RolloutSettings)
    dialect = dialect_for(Tokenizer.load(ROOT / "base/nano"))
    with tempfile.TemporaryDirectory(prefix="etude-cpu-") as name:
        directory = Path(name)
        drafts = nano_tasks(sessions + WARM_UP, "train", seed=seed)
        tasks = [write_task(directory / name, files) for name, files in drafts]
        scripts = [[turn.message for turn in demonstration_turns(read_files(task.directory), 7)] for task in tasks]
        async with open_fleet(state=directory / "state") as fleet:
            prepared = PreparedEnvironments(fleet, min_files=MIN_SNAPSHOT_FILES, prepare_pod=launch_tool_server)
            options = replace(rollout_options(settings), prepared=prepared)
            with pod_times() as seconds:
                async with prepared:
                    await prepared.keep_warm(tasks[0], WARM_PODS)
                    zygote = find_zygote(directory / "state")
                    before: dict[str, float] = {}
                    for number, (task, script) in enumerate(zip(tasks, scripts, strict=True)):
                        if number == WARM_UP:
                            before = times_of(seconds, zygote)
                        binding = PolicyBinding(ScriptedPolicy(dialect, script), dialect, settings.window or 2048)
                        done = await run_rollout(fleet, task, binding, options, seed=number, id=task.name)
                        save_trace(done.trace, directory / f"{number}.trace")
                        done.record(task)
                        assert done.verifier_result.score == 1.0, task.name
                    after = times_of(seconds, zygote)
    found = {part: 1e3 * (after[part] - before[part]) / sessions for part in PARTS[:-1]}
    return {**found, "all": sum(found.values())}


@contextmanager
def pod_times() -> Iterator[dict[str, float]]:
    """Collect the CPU seconds of every pod that is closed, by the use that it had."""
    seconds: dict[str, float] = defaultdict(float)
    of_verifiers: set[str] = set()
    end = LocalPod.end

    async def end_counted(pod: LocalPod) -> None:
        group = pod.group.unified
        if not pod.closed and group is not None and group.exists():
            part = "verifiers' pods" if pod.id in of_verifiers else "agents' pods"
            seconds[part] += group_seconds(group)
        await end(pod)

    @asynccontextmanager
    async def open_noted(*given: Any, **options: Any) -> AsyncIterator[Any]:
        async with open_environment(*given, **options) as environment:
            of_verifiers.add(environment.pod.id)
            yield environment

    with patch.object(LocalPod, "end", end_counted), patch.object(verifier, "open_environment", open_noted):
        yield seconds


def group_seconds(group: Path) -> float:
    """Return the CPU seconds of the processes of a control group, also of those that have ended."""
    for line in (group / "cpu.stat").read_text().splitlines():
        if line.startswith("usage_usec "):
            return int(line.split()[1]) / 1e6
    raise InputError(f"{group}/cpu.stat has no usage_usec: a control group hierarchy of version 2 is needed")


def find_zygote(state: Path) -> int:
    """Return the pid of the zygote of a state directory: our child that holds its lock file."""
    lock = str(next(state.glob("*.lock")))
    for each in Path("/proc").iterdir():
        if each.name.isdigit() and int(each.name) != os.getpid():
            try:
                if any(os.readlink(fd) == lock for fd in (each / "fd").iterdir()):
                    return int(each.name)
            except OSError:
                continue
    raise InputError(f"no process holds {lock}")


def times_of(pods: Mapping[str, float], zygote: int) -> dict[str, float]:
    """Return the CPU seconds so far by part."""
    times = os.times()
    running = int(Path(f"/proc/{zygote}/schedstat").read_text().split()[0]) / 1e9
    return {**dict.fromkeys(PARTS[:-1], 0.0), **pods, "worker": times.user + times.system, "zygote": running}


if __name__ == "__main__":
    main()
