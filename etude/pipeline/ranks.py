"""A training stage in several processes: rank 0 runs the pipeline, the others follow it into each such stage.

`etude run` starts the followers of a stage on this host. Under torchrun, on one host or several that share the run
directory, every process runs the same `etude run`: rank 0 does what one process would do and announces each stage in
the job's store, and the others wait for these announcements.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from etude.errors import EtudeError, InputError
from etude.kernels import usable_device
from etude.parallel.settings import ParallelSettings
from etude.recipe.recipe import Recipe, load_recipe
from etude.runs.run import Run
from etude.system.processes import die_with_parent, parent_process
from etude.system.terminal import say
from etude.train.settings import TrainingSettings

if TYPE_CHECKING:
    from etude.parallel.mesh import TrainingMesh

COUNTER, END = "etude/stages", "end"


@contextmanager
def under_torchrun() -> Iterator[bool]:
    """Take part in the stages of rank 0 if torchrun has started this process as another rank, and give True.

    Rank 0 and a process without torchrun get False, and the others end when this block of rank 0 does.
    """
    many, rank = int(os.environ.get("WORLD_SIZE", "1")) > 1, os.environ.get("RANK", "0")
    if many and rank != "0":
        follow_torchrun()
    try:
        yield many and rank != "0"
    finally:
        if many and rank == "0":
            end_torchrun()


@contextmanager
def joined_ranks(run: Run, stage: str, settings: ParallelSettings, device: str) -> Iterator[TrainingMesh | None]:
    """Give the mesh of a stage that this process leads; None for one process."""
    if settings.processes == 1:
        yield None
        return
    from etude.parallel.launch import open_store
    from etude.parallel.mesh import open_mesh, started_mesh

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # torchrun's
        store = open_store(os.environ)
        number = store.add(COUNTER, 1)
        store.set(f"{COUNTER}/{number}", json.dumps({"run": str(run.path), "stage": stage}))
        with open_mesh(settings, usable_device(device), name=f"{COUNTER}/{number}") as mesh:
            yield mesh
        return
    command = ["etude.pipeline.ranks", str(run.path), stage]
    with started_mesh(settings, usable_device(device), command, run.layout.rank_logs / stage) as mesh:
        yield mesh


def check_one_host(settings: ParallelSettings) -> None:
    """Refuse several processes for a stage that starts them itself, under a torchrun over several hosts."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if settings.processes > 1 and world > int(os.environ.get("LOCAL_WORLD_SIZE", world)):
        raise InputError(
            "the trainer processes of this stage are on one host, but torchrun has several; give this stage "
            "processes of one host in its own `parallel`, or use `--cluster ray` instead of torchrun"
        )


def follow_torchrun() -> None:
    """Take part in every stage that rank 0 announces, until it ends."""
    from etude.parallel.launch import open_store, wait_for_key

    store, number = open_store(os.environ), 0
    while True:
        number += 1
        told = wait_for_key(store, f"{COUNTER}/{number}")
        if told == END:
            return
        announced = json.loads(told)
        take_part(Path(announced["run"]), announced["stage"], f"{COUNTER}/{number}")


def end_torchrun() -> None:
    """Let the followers of this process end."""
    from etude.parallel.launch import open_store

    store = open_store(os.environ)
    store.set(f"{COUNTER}/{store.add(COUNTER, 1)}", END)


def take_part(directory: Path, stage: str, name: str) -> None:
    """Run a stage as another rank than the first: it computes, and writes its parts of checkpoints."""
    from etude.parallel.mesh import open_mesh
    from etude.train import stages

    run = Run.read(directory)
    recipe = load_recipe(run.layout.recipe)
    settings = stage_of(recipe, stage)
    with open_mesh(settings.parallel, usable_device(settings.device), name=name) as mesh:
        context = stages.StageContext(run, recipe.seed, lambda *_: None, recipe.mtp, mesh=mesh)
        getattr(stages, stage)(context, settings)


def stage_of(recipe: Recipe, stage: str) -> TrainingSettings:
    table = getattr(recipe, stage)
    assert isinstance(table, TrainingSettings)
    return table


def main() -> None:
    die_with_parent(parent_process())
    try:
        take_part(Path(sys.argv[1]), sys.argv[2], "job")
    except (EtudeError, OSError) as error:
        say(f"etude: {error}", file=sys.stderr)
        sys.exit(error.exit_code if isinstance(error, EtudeError) else 1)


if __name__ == "__main__":
    main()
