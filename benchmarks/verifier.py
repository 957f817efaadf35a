"""Measure how many trials are verified per minute on this machine, and how long each phase takes.

    python benchmarks/verifier.py [--tasks 200] [--at-once CORES]

Each verification is complete: a new pod, the task's files, an agent's change, the hidden tests, the verifier, the
reward. The lower bound for its time is the verifier's own program in an existing pod ("verifier alone").
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from etude.pods import Fleet, open_fleet
from etude.pods.workspace import FileChange, FileState
from etude.tasks.checks import cases_files, pytest_files
from etude.tasks.environment import open_environment
from etude.tasks.harbor import write_task
from etude.tasks.task import Task
from etude.tasks.trial import oracle_agent
from etude.tasks.verifier import PhaseTimes, upload_tests, verify
from etude.tasks.verifier_result import VerifierResult

CONFIG = 'schema_version = "1.4"\n[metadata]\nprotected = ["tests/**"]\n[environment]\nnetwork_mode = "no-network"\n'
WRONG = "def add(a, b):\n    return a - b\n"
TESTS = """import calc


def test_add():
    assert calc.add(1, {n}) == {m}


def test_zero():
    assert calc.add({n}, 0) == {n}
"""
SHELL = "#!/bin/sh\ngrep -q 'a + b' calc.py && r=1 || r=0; echo $r > /logs/verifier/reward.txt\n"
PHASES = ("plan", "pod", "fill", "apply", "upload", "run", "read")


def make_task(directory: Path, kind: str, number: int) -> Task:
    """Write a small task; tasks with different numbers differ."""
    tests = TESTS.format(n=number, m=number + 1)
    files: dict[str, str | bytes] = {
        "task.toml": CONFIG,
        "instruction.md": f"add(1, {number}) should be {number + 1}.\n",
        "environment/Dockerfile": f"FROM {'python:3' if kind == 'pytest' else 'host'}\nWORKDIR /work\nCOPY repo/ .\n",
        "environment/repo/calc.py": WRONG,
        "environment/repo/tests/test_calc.py": tests,
        "solution/solve.sh": "#!/bin/sh\nsed -i 's/a - b/a + b/' calc.py\n",
    }
    if kind == "shell":
        files["tests/test.sh"] = SHELL
    elif kind == "cases":
        files |= cases_files([{"id": "add", "call": "calc:add", "args": f"(1, {number})", "returns": str(number + 1)}])
    else:
        ids = dict.fromkeys(("tests/test_calc.py::test_add", "tests/test_calc.py::test_zero"), "passed")
        files |= pytest_files(["tests/test_calc.py"], ids, {"tests/test_calc.py": tests})
    return write_task(directory / f"{kind}-{number}", files)


async def verifier_alone(fleet: Fleet, task: Task, times: int = 5) -> float:
    """Return the median seconds of test.sh alone, in an existing pod."""
    seconds = []
    for _ in range(times):
        async with open_environment(fleet, task) as environment:
            await oracle_agent(environment, None)
            await upload_tests(environment.pod, task, None, PhaseTimes())
            started = time.perf_counter()
            await environment.pod.exec(["/tests/test.sh"], cwd=environment.workspace)
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


async def measure(fleet: Fleet, tasks: list[Task], at_once: int) -> tuple[float, list[VerifierResult]]:
    """Verify every task once, `at_once` at a time; return the seconds and the results."""
    semaphore = asyncio.Semaphore(at_once)
    change = FileChange(
        "calc.py", *(FileState.file(text.encode()) for text in (WRONG, WRONG.replace("a - b", "a + b")))
    )

    async def one(task: Task) -> VerifierResult:
        async with semaphore:
            return await verify(fleet, task, (change,))

    await one(tasks[0])
    started = time.perf_counter()
    results = await asyncio.gather(*map(one, tasks))
    return time.perf_counter() - started, results


async def main(count: int, at_once: int) -> None:
    table = Table(box=None, header_style="bold")
    columns = ("verifier", "trials/min", "ms each, alone", *PHASES, "verifier alone", "ratio")
    for column in columns:
        table.add_column(column, justify="left" if column == "verifier" else "right")
    with tempfile.TemporaryDirectory(prefix="etude-verifier-") as directory:
        async with open_fleet() as fleet:
            for kind in ("shell", "cases", "pytest"):
                tasks = [make_task(Path(directory), kind, number) for number in range(2, count + 2)]
                bound = await verifier_alone(fleet, tasks[0])
                seconds, results = await measure(fleet, tasks, at_once)
                assert all(each.score == 1.0 for each in results), "a correct change gets the full reward"
                alone, few = await measure(fleet, tasks[:10], 1)
                mean = {name: statistics.mean(each.facts["seconds"].get(name, 0.0) for each in few) for name in PHASES}
                table.add_row(
                    kind,
                    f"{60 * count / seconds:,.0f}",
                    f"{alone / 10 * 1e3:.1f}",
                    *(f"{mean[name] * 1e3:.1f}" for name in PHASES),
                    f"{bound * 1e3:.1f}",
                    f"{alone / 10 / bound:.2f}",
                )
    Console(width=120).print(table)
    print(
        f"{count} distinct tasks of each kind, {at_once} at a time on {os.cpu_count()} cores; phases in ms, alone. "
        "The ratio is a complete verification over the verifier's program alone: the cost of a clean pod each time."
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=max(2, os.cpu_count() or 2))
    given = parser.parse_args()
    asyncio.run(main(given.tasks, given.at_once))
