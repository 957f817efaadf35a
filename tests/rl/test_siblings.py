"""Harder siblings of retired tasks: made by a source, validated in pods, added while the run goes on."""

import asyncio
import json
import shutil
from collections.abc import Collection
from pathlib import Path

import pytest
from rl_runs import make_recipe
from run_services import FakeStatuses
from test_loop import prepare_run

from etude.errors import InputError
from etude.pods.fleet import open_fleet
from etude.recipe.recipe import load_recipe
from etude.rl.curriculum import Curriculum, CurriculumSettings
from etude.rl.orchestrator import Orchestrator, RlTaskSets, named_tasks, write_task_lists
from etude.rl.settings import open_rl_run
from etude.rl.sibling_process import make_siblings, open_source, read_siblings
from etude.rollouts.queue import RolloutQueue
from etude.rollouts.run_queues import open_queues
from etude.runs.layout import RunLayout
from etude.runs.run import Run
from etude.tasks.harbor import read_task
from etude.tasks.sources import TASK_SOURCES, TaskSource
from etude_nano.demonstrator import read_files
from etude_nano.plugin import NanoTaskSource
from etude_nano.source import generate_nano, text_digest


class CopyingSource(TaskSource):
    """Returns the task with a longer request: a sibling that is valid. Every second one passes without work."""

    calls = 0

    def harder(self, task: Path, out: Path, seed: int, exclude: Collection[Path]) -> bool:
        if task.name.endswith("+"):
            return False
        shutil.copytree(task, out)
        (out / "instruction.md").write_text((task / "instruction.md").read_text() + " Explain it.")
        CopyingSource.calls += 1
        if CopyingSource.calls % 2:
            (out / "tests" / "test.sh").write_text("#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n")
            (out / "tests" / "checks.json").unlink(missing_ok=True)
        return True


@pytest.fixture
def run(tmp_path: Path) -> RunLayout:
    """Return a run whose first two tasks were always solved."""
    table = {"order": "solve_rate", "reuse": 2, "retire_after": 1, "siblings": "nano", "rest_steps": 1}
    recipe = make_recipe(tmp_path, tasks=3, held_out=2, steps=1, curriculum=table)
    layout = prepare_run(recipe, tmp_path / "run")
    tasks = named_tasks(tmp_path / "tasks")
    write_task_lists(layout, tasks, named_tasks(tmp_path / "held-out"))
    queue = RolloutQueue(layout.slots, open_rl_run(layout.run)[1])
    queue.add((name, 0.0) for name in sorted(tasks)[:2])
    while (slot := queue.claim("w", 0.0)) is not None:
        queue.finish(slot, {"total": 1.0, "solved": True}, "t", (0, 0))
    queue.mark_trained(queue.ready(0), 1)
    return layout


def make_all(layout: RunLayout, source: TaskSource, state: Path) -> None:
    settings = open_rl_run(layout.run)[1].curriculum
    curriculum = Curriculum(dict.fromkeys(layout.task_lists()["train"], ""), 0, settings)

    async def work() -> None:
        async with open_fleet(state=state) as fleet:
            while await make_siblings(layout, source, fleet, curriculum, 0):
                pass

    asyncio.run(work())


def test_siblings_of_retired_tasks_are_validated_and_join_the_run(run: RunLayout, tmp_path: Path) -> None:
    retired = sorted(run.task_lists()["train"])[:2]
    leftover = run.sibling_tasks / f"{retired[0]}+"
    leftover.mkdir(parents=True)  # of a process that was killed before it recorded the sibling
    (leftover / "half").write_text("")
    make_all(run, NanoTaskSource(), tmp_path / "pods")
    made = read_siblings(run)
    assert sorted(made) == retired
    assert [each.name for each in made.values()] == [f"{parent}+" for parent in sorted(made)], made
    for parent, each in made.items():
        old, new = (read_task(path) for path in (run.task_lists()["train"][parent], Path(each.directory)))
        assert new.metadata["difficulty"] == int(str(old.metadata["difficulty"])) + 1
        assert new.metadata["category"] == old.metadata["category"]
        assert new.metadata["split"] == "train"
    layout, settings = open_rl_run(run.run)
    record = Run.create_or_resume(layout.run, load_recipe(tmp_path / "recipe.toml"), resume=True)
    layout.exhausted.write_text("no prompt is left")
    with open_queues(layout) as queues:
        tasks, queue = RlTaskSets(named_tasks(tmp_path / "tasks"), {}), queues["training"]
        both = queue, queues["evaluation"]
        orchestrator = Orchestrator(record, settings, layout, *both, FakeStatuses(), tasks, 0, lambda *_: None)
        orchestrator.add_siblings()
        assert len(orchestrator.curriculum.tasks) == 5
        assert set(layout.task_lists()["train"]) == set(orchestrator.curriculum.tasks)
        assert not layout.exhausted.exists()
        drawn = [name for name, _ in orchestrator.curriculum.next(queue, 5, 0.0).prompts]
        assert sorted(drawn) == sorted({*orchestrator.curriculum.tasks} - {*retired})
        assert orchestrator.curriculum.facts(queue)["curriculum/retired"] == 2


def test_a_sibling_that_passes_without_work_is_not_admitted(run: RunLayout, tmp_path: Path) -> None:
    CopyingSource.calls = 0
    make_all(run, CopyingSource(), tmp_path / "pods")
    assert CopyingSource.calls == 4  # each parent's first was refused
    for parent, each in read_siblings(run).items():
        assert each.name == f"{parent}+", each
        assert (Path(each.directory) / "instruction.md").read_text().endswith("Explain it.")
    assert not list(run.sibling_tasks.glob(".*"))
    json.loads(run.siblings.read_text())


def test_the_hardest_tasks_have_no_sibling_and_measured_tasks_are_excluded(tmp_path: Path) -> None:
    generate_nano(tmp_path / "hardest", 1, "train", 0, (5,))
    generate_nano(tmp_path / "easy", 1, "train", 0, (1,))
    (hardest,), (easy,) = ([each.directory for each in named_tasks(tmp_path / n).values()] for n in ("hardest", "easy"))
    source = NanoTaskSource()
    assert not source.harder(hardest, tmp_path / "none", 0, [])
    assert source.harder(easy, tmp_path / "one", 0, [])
    assert source.harder(easy, tmp_path / "again", 0, [])
    assert source.harder(easy, tmp_path / "other", 0, [tmp_path / "one"])
    one, again, other = (text_digest(read_files(tmp_path / name)) for name in ("one", "again", "other"))
    assert one == again != other


def test_a_source_without_siblings_is_refused() -> None:
    class Plain(TaskSource):
        pass

    TASK_SOURCES.register("plain-for-siblings")(Plain)
    with pytest.raises(InputError, match="the task source plain-for-siblings makes no harder siblings"):
        open_source("plain-for-siblings")
    with pytest.raises(InputError, match='there is no task source "nono"'):
        open_source("nono")
    assert CurriculumSettings(order="solve_rate", siblings="nano").siblings == "nano"
