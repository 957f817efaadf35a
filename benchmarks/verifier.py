"""How many tasks are graded in a minute on this machine, and where the time goes.

    python benchmarks/verifier.py [--tasks 200] [--at-once CORES]

Each grade is a whole one: a new pod, the task's files, a session's change, the hidden tests, the verifier, the reward.
The limit is the verifier's own program in a pod that is there already: what no grading could be faster than.
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
from etude.tasks.environment import open_ground
from etude.tasks.harbor import write_task
from etude.tasks.runner import cases_files, pytest_files
from etude.tasks.task import Task
from etude.tasks.trial import solution
from etude.tasks.verifier import Clock, bring_tests, grade
from etude.tasks.verifier_result import FileChange, Grade

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
    """A small task of its own; no two are the same."""
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


async def bare(fleet: Fleet, task: Task, times: int = 5) -> float:
    """Seconds of test.sh alone, in a pod that is there."""
    spent = []
    for _ in range(times):
        async with open_ground(fleet, task) as ground:
            await solution(ground, None)
            await bring_tests(ground.pod, task, None, Clock())
            started = time.perf_counter()
            await ground.pod.exec(["/tests/test.sh"], cwd=ground.workspace)
            spent.append(time.perf_counter() - started)
    return statistics.median(spent)


async def measure(fleet: Fleet, tasks: list[Task], at_once: int) -> tuple[float, list[Grade]]:
    """Grade every task once, a few at a time: seconds, and the grades."""
    gate = asyncio.Semaphore(at_once)
    change = FileChange("calc.py", WRONG.encode(), WRONG.replace("a - b", "a + b").encode())

    async def one(task: Task) -> Grade:
        async with gate:
            return await grade(fleet, task, (change,))

    await one(tasks[0])
    started = time.perf_counter()
    grades = await asyncio.gather(*map(one, tasks))
    return time.perf_counter() - started, grades


async def main(count: int, at_once: int) -> None:
    table = Table(box=None, header_style="bold")
    columns = ("verifier", "graded/min", "ms each, alone", *PHASES, "verifier alone", "ratio")
    for column in columns:
        table.add_column(column, justify="left" if column == "verifier" else "right")
    with tempfile.TemporaryDirectory(prefix="etude-verifier-") as directory:
        async with open_fleet() as fleet:
            for kind in ("shell", "cases", "pytest"):
                tasks = [make_task(Path(directory), kind, number) for number in range(2, count + 2)]
                least = await bare(fleet, tasks[0])
                seconds, grades = await measure(fleet, tasks, at_once)
                assert all(each.score == 1.0 for each in grades), "a right change is always paid"
                alone, few = await measure(fleet, tasks[:10], 1)
                mean = {name: statistics.mean(each.facts["seconds"].get(name, 0.0) for each in few) for name in PHASES}
                table.add_row(
                    kind,
                    f"{60 * count / seconds:,.0f}",
                    f"{alone / 10 * 1e3:.1f}",
                    *(f"{mean[name] * 1e3:.1f}" for name in PHASES),
                    f"{least * 1e3:.1f}",
                    f"{alone / 10 / least:.2f}",
                )
    Console(width=120).print(table)
    print(
        f"{count} distinct tasks of each kind, {at_once} at a time on {os.cpu_count()} cores; phases in ms, alone. "
        "The ratio is a whole grade over the verifier's program alone: what a clean pod for every grade costs."
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=max(2, os.cpu_count() or 2))
    given = parser.parse_args()
    asyncio.run(main(given.tasks, given.at_once))
