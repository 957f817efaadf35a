"""The process that makes harder siblings of retired tasks: `python -m etude.rl.sibling_process RUN`.

A task source makes a sibling (`TaskSource.harder`). It is refused if it contains the answer of a measured task, and
validated in pods: doing nothing fails, its solution passes, and it does not give its solution away. `rl/siblings.json`
records the result for every parent, so that each is tried once; the orchestrator adds the admitted siblings to the
curriculum. A sibling that retires gets one too.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

from etude.config import read_toml
from etude.errors import EtudeError, InputError
from etude.files import write_atomically
from etude.pods.fleet import Fleet, open_fleet
from etude.pods.settings import PodSettings
from etude.rl.curriculum import Curriculum
from etude.rl.services import SIBLINGS
from etude.rl.settings import open_rl_run
from etude.rollouts.queue import RolloutQueue
from etude.rollouts.settings import load_evaluation
from etude.runs.layout import RunLayout
from etude.runs.service_status import StatusReader
from etude.system.processes import die_with_parent, parent_process
from etude.system.terminal import say
from etude.tasks.harbor import find_tasks
from etude.tasks.leaks import find_leaks, measured_answers
from etude.tasks.sources import TASK_SOURCES, TaskSource
from etude.tasks.validate import validate

POLL_S, STATUS_S = 2.0, 1.0
TRIES = 3  # siblings drawn until one is admitted


@dataclass(frozen=True)
class Sibling:
    """The sibling of a task: its name and directory, or why there is none."""

    name: str = ""
    directory: str = ""
    reason: str = ""


def read_siblings(layout: RunLayout) -> dict[str, Sibling]:
    """Return the siblings by the name of their parent."""
    try:
        found = json.loads(layout.siblings.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return {parent: Sibling(**each) for parent, each in found.items()}


async def make_sibling(
    source: TaskSource, fleet: Fleet, layout: RunLayout, parent: str, task: Path, measured: Collection[Path], seed: int
) -> Sibling:
    """Make and validate a harder sibling of a task; it is written to its final directory when it is admitted."""
    answers = measured_answers(measured)
    name = f"{parent}+"
    final, reason = layout.sibling_tasks / name, "the task source makes no harder sibling of it"
    for number in range(TRIES):
        draft = layout.sibling_tasks / f".{sha256(parent.encode()).hexdigest()[:12]}.making"
        shutil.rmtree(draft, ignore_errors=True)
        draft.parent.mkdir(parents=True, exist_ok=True)
        number_seed = int.from_bytes(sha256(f"{seed}/sibling/{parent}/{number}".encode()).digest()[:3], "big")
        if not await asyncio.to_thread(source.harder, task, draft, number_seed, measured):
            break
        if leak := next(find_leaks(answers, [draft]), None):
            reason = f"refused: it contains the answer of {leak.task}"
            continue
        report = await validate(fleet, draft, reruns=1)
        if report.admitted:
            shutil.rmtree(final, ignore_errors=True)  # of a process that was killed before it recorded it
            final.parent.mkdir(parents=True, exist_ok=True)
            draft.rename(final)
            return Sibling(name, str(final))
        reason = f"not admitted: {report.reasons[0].code}: {report.reasons[0].evidence[-200:]}"
        shutil.rmtree(draft)
    return Sibling(reason=reason)


async def make_siblings(layout: RunLayout, source: TaskSource, fleet: Fleet, curriculum: Curriculum, seed: int) -> bool:
    """Make the sibling of one retired task that has none yet; return whether there was one to make."""
    lists, made = layout.task_lists(), read_siblings(layout)
    tasks = lists["train"]
    if curriculum.tasks.keys() != tasks.keys():  # siblings have joined
        curriculum.set_tasks(dict.fromkeys(tasks, ""))
    with closing(RolloutQueue.open_read_only(layout.slots)) as queue:
        states = curriculum.states(queue)
    waiting = sorted(states.retired - made.keys())
    if not waiting:
        return False
    measured = measured_tasks(layout)
    parent = waiting[0]
    sibling = await make_sibling(source, fleet, layout, parent, tasks[parent], measured, seed)
    record: Mapping[str, Sibling] = {**made, parent: sibling}
    write_atomically(layout.siblings, json.dumps({name: asdict(each) for name, each in record.items()}), durable=True)
    return True


def measured_tasks(layout: RunLayout) -> list[Path]:
    """Return the tasks of all sets that models of the run are measured on."""
    evaluation = load_evaluation(layout)
    names = [name for _, name in evaluation.measured()] if evaluation else []
    sets = [Path(name) if os.path.isabs(name) else layout.artefacts / f"tasks-{name}" for name in names]
    return [task for directory in sets for task in find_tasks(directory)]


def open_source(name: str) -> TaskSource:
    """Return the task source of this name; InputError if it makes no siblings."""
    if name not in TASK_SOURCES:
        raise InputError(f'rl.curriculum.siblings: there is no task source "{name}"; {TASK_SOURCES.advice(name)}')
    if TASK_SOURCES[name].harder is TaskSource.harder:
        raise InputError(f"rl.curriculum.siblings: the task source {name} makes no harder siblings")
    return TASK_SOURCES[name]()


async def run(layout: RunLayout, pods: PodSettings, source: TaskSource, curriculum: Curriculum, seed: int) -> None:
    statuses = StatusReader(layout)

    async def report() -> None:
        while True:
            await asyncio.to_thread(statuses.report, SIBLINGS, state="working", siblings=len(read_siblings(layout)))
            await asyncio.sleep(STATUS_S)

    async with open_fleet(pods=pods, state=layout.pods) as fleet:
        reporting = asyncio.create_task(report())
        try:
            while True:
                if not await make_siblings(layout, source, fleet, curriculum, seed):
                    await asyncio.sleep(POLL_S)
        finally:
            reporting.cancel()


def main() -> None:
    die_with_parent(parent_process())
    layout, settings = open_rl_run(sys.argv[1])
    seed = int(read_toml(layout.recipe).get("seed", 0))
    try:
        source = open_source(settings.curriculum.siblings)
        curriculum = Curriculum(dict.fromkeys(layout.task_lists()["train"], ""), seed, settings.curriculum)
        asyncio.run(run(layout, settings.pods, source, curriculum, seed))
    except EtudeError as error:
        say(f"etude: {error}", file=sys.stderr)
        StatusReader(layout).report(SIBLINGS, state="failed", problem=str(error))
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
