"""Rollouts of scripted demonstrations on nano tasks in real pods: sessions per minute, and claim to first tool result.

    python benchmarks/rollouts.py                        # 6 tasks in groups of 8, 4 rollouts at once
    python benchmarks/rollouts.py --json                 # one line of JSON, to compare commits

Every rollout is what a worker runs: environment, session with tools, workspace diff, verifier in a clean pod, reward.
Only the model is a script. It runs three ways: every environment prepared by itself, prepared once for a group and
forked, and from a warm pool whose pods have a running tool server.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from etude.chat.dialects import dialect_for
from etude.chat.messages import Message
from etude.chat.tokenizer import Tokenizer
from etude.harness.budget import Budget
from etude.harness.scripted_policy import ScriptedPolicy
from etude.harness.session import SessionSpec
from etude.harness.summary import SummarySettings
from etude.harness.toolserver.client import launch_tool_server
from etude.pods import open_fleet
from etude.rollouts.rollout import PolicyBinding, RolloutOptions, run_rollout
from etude.rollouts.worker import MIN_SNAPSHOT_FILES
from etude.tasks.environment import PreparedEnvironments
from etude.tasks.harbor import write_task
from etude.tasks.task import Task
from etude_nano.demonstrator import NANO_TOOL_SET, DemonstratorStyle, demonstration_turns, read_files
from etude_nano.source import nano_tasks

WINDOW = 2048
OPTIONS = RolloutOptions(
    SessionSpec(
        tool_set=NANO_TOOL_SET,
        budget=Budget(turns=16, max_turn_tokens=400),
        summaries=SummarySettings(mode="off"),
    )
)
MODES: dict[str, int | None] = {"each by itself": None, "forked": 0, "warm pool": MIN_SNAPSHOT_FILES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", type=int, default=6)
    parser.add_argument("--group", type=int, default=8, help="rollouts of each task")
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--model", type=Path, default=Path("base/nano"), help="directory with the tokenizer")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    arguments = parser.parse_args()
    found = {mode: asyncio.run(measure(mode, arguments)) for mode in MODES}
    if arguments.json:
        print(json.dumps(found))
        return
    table = Table("environments", "sessions a minute", "claim to first tool result, ms", "p90", "solved")
    for mode, result in found.items():
        shown = (f"{result[key]:.0f}" for key in ("per_minute", "first_ms", "first_p90_ms"))
        table.add_row(mode, *shown, f"{result['solved']:.0%}")
    Console().print(table)
    warm, plain = found["warm pool"], found["each by itself"]
    print(
        f"A warm pool gives {warm['per_minute'] / plain['per_minute']:.2f} times the sessions and "
        f"{warm['first_ms'] / plain['first_ms']:.2f} times the wait of environments prepared one by one."
    )


async def measure(mode: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Run every task's group of rollouts in one mode; return rates and waits."""
    dialect = dialect_for(Tokenizer.load(arguments.model))
    waits: list[float] = []
    semaphore = asyncio.Semaphore(arguments.at_once)
    with tempfile.TemporaryDirectory(prefix="etude-bench-") as directory:
        tasks = [
            write_task(Path(directory) / name, files) for name, files in nano_tasks(arguments.tasks, "train", seed=900)
        ]
        async with open_fleet(state=Path(directory) / "state") as fleet:
            prepared = None
            if (min_files := MODES[mode]) is not None:
                prepared = PreparedEnvironments(fleet, min_files=min_files, prepare_pod=launch_tool_server)
            options = replace(OPTIONS, prepared=prepared)
            if mode == "warm pool" and prepared is not None:
                await prepared.keep_warm(tasks[0], arguments.at_once)

            async def run(task: Task, number: int) -> float:
                async with semaphore:
                    script = TimedScript(demonstration_messages(task))
                    policy = ScriptedPolicy(dialect, script.next_message)
                    binding = PolicyBinding(policy, dialect, WINDOW)
                    rollout = await run_rollout(fleet, task, binding, options, seed=number, id=f"{task.name}-{number}")
                waits.append(script.first_result_s())
                return rollout.verifier_result.score

            await run(tasks[0], 99)  # builds the image
            waits.clear()
            started = time.perf_counter()
            scores = await asyncio.gather(*(run(task, n) for task in tasks for n in range(arguments.group)))
            seconds = time.perf_counter() - started
            if prepared is not None:
                async with prepared:
                    pass
    waits.sort()
    return {
        "per_minute": 60 * len(scores) / seconds,
        "first_ms": 1e3 * statistics.median(waits),
        "first_p90_ms": 1e3 * waits[int(0.9 * len(waits))],
        "solved": sum(score == 1.0 for score in scores) / len(scores),
    }


def demonstration_messages(task: Task) -> list[Message]:
    turns = demonstration_turns(read_files(task.directory), 7, DemonstratorStyle(mistakes=0.0))
    return [turn.message for turn in turns]


class TimedScript:
    """Gives the messages in order and notes when each was requested, from the start of its rollout."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self._messages, self._started = iter(messages), time.perf_counter()
        self._requested: list[float] = []

    def next_message(self, tokens: Sequence[int]) -> Message:
        self._requested.append(time.perf_counter() - self._started)
        return next(self._messages)

    def first_result_s(self) -> float:
        """Return the seconds until the result of the first tool call was in the prompt."""
        return self._requested[min(1, len(self._requested) - 1)]


if __name__ == "__main__":
    main()
