"""Measure how long it takes to open a task's environment and to take the changes of an agent, by size of the workspace.

    python benchmarks/workspace.py [--files 300 1500 4000]

Three files are changed in each workspace. "prepared" environments start from one snapshot of the task
(`PreparedEnvironments`); the others copy the task's files into a pod of its image.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from etude.pods import Fleet, open_fleet
from etude.tasks.environment import PreparedEnvironments, open_environment
from etude.tasks.harbor import write_task
from etude.tasks.task import Task

CONFIG = 'schema_version = "1.4"\n[environment]\nnetwork_mode = "no-network"\n'
TRIALS = 5


def make_task(directory: Path, count: int) -> Task:
    """Write a task with this many files of 1.2 kB."""
    files: dict[str, str | bytes] = {
        "task.toml": CONFIG,
        "instruction.md": "Change three files.\n",
        "environment/Dockerfile": "FROM host\nWORKDIR /work\nCOPY repo/ .\n",
        "tests/test.sh": "#!/bin/sh\n",
    }
    files |= {f"environment/repo/d{number % 50}/f{number}.py": "x = 1\n" * 200 for number in range(count)}
    return write_task(directory / f"files-{count}", files)


async def measure(fleet: Fleet, task: Task, prepared: PreparedEnvironments | None) -> tuple[float, float]:
    """Return the median seconds of opening an environment and of taking its changes."""
    opened, took = [], []
    for _ in range(TRIALS):
        started = time.perf_counter()
        async with open_environment(fleet, task, prepared=prepared) as environment:
            opened.append(time.perf_counter() - started)
            await environment.pod.exec("for i in 0 1 2; do echo y >> d$i/f$i.py; done")
            started = time.perf_counter()
            changes = await environment.changes()
            took.append(time.perf_counter() - started)
            assert len(changes) == 3
    return statistics.median(opened), statistics.median(took)


async def main(counts: list[int]) -> None:
    table = Table("files", "environment", "open, ms", "changes, ms", box=None, header_style="bold")
    with tempfile.TemporaryDirectory(prefix="etude-workspace-") as directory:
        async with open_fleet() as fleet, PreparedEnvironments(fleet) as prepared:
            for count in counts:
                task = make_task(Path(directory), count)
                for name, given in (("prepared", prepared), ("copied", None)):
                    opened, took = await measure(fleet, task, given)
                    table.add_row(f"{count:,}", name, f"{opened * 1e3:.1f}", f"{took * 1e3:.1f}")
    Console(width=100).print(table)
    print(f"Medians of {TRIALS} trials in which an agent changed 3 files.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, nargs="+", default=[300, 1500, 4000])
    asyncio.run(main(parser.parse_args().files))
