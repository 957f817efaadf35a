"""The plan of a recipe: every stage, what is wrong, what is unwise, and what all of it takes together.

`describe` is the way in. Problems come all together as one InputError; what is merely unwise is a warning of the plan.
In a run that is there, stages that are done cost nothing and the one that was interrupted goes on where it stands.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from etude.errors import InputError
from etude.pipeline.dry_run.check import look, makers
from etude.pipeline.dry_run.measure import SECONDS
from etude.pipeline.dry_run.stages import STAGES, Machine, StagePlan, View, beyond
from etude.pods.scheduling.pressure import read_pressure
from etude.recipe.recipe import Recipe
from etude.rl.settings import RlSettings
from etude.runs.run import Run, check_resumable, check_usable
from etude.system.progress import ProgressCallback
from etude.train.settings import TrainingSettings


@dataclass(frozen=True)
class Plan:
    """What would happen."""

    recipe: str
    machine: Machine
    stages: tuple[StagePlan, ...]
    warnings: tuple[str, ...]
    run: str = ""  # the run it would go on in

    @property
    def seconds(self) -> float:
        return sum(stage.time.seconds for stage in self.stages if stage.time)

    @property
    def disk(self) -> int:
        return sum(stage.disk for stage in self.stages)


def describe(
    recipe: Recipe,
    out: Path | None = None,
    only: str | None = None,
    *,
    budget: float = SECONDS,
    report: ProgressCallback | None = None,
) -> Plan:
    """The plan of a recipe, or of one stage of it, in the run `out` if that is given; InputError if it cannot run."""
    if only is not None and only not in recipe.stages:
        raise InputError(f'the recipe has no stage "{only}"; its stages are {", ".join(recipe.stages)}')
    stages = recipe.stages if only is None else (only,)
    problems: list[str] = []
    run = _run_there(out, recipe, problems)
    left = [stage for stage in stages if run is None or not run.stage_done(stage)]
    found = look(recipe, left, run)
    if only is not None and out is not None and not problems:
        problems += _missing(only, recipe, run)
    problems += found.problems
    if problems:
        raise InputError("\n".join(problems))
    view = View(recipe, found, this_machine(out), run, budget)
    plans = []
    for number, stage in enumerate(stages):
        if report is not None:
            report(number, len(stages), stage)
        plans.append(STAGES[stage](view) if stage in left else StagePlan(stage, ("done before, skipped",), done=True))
    warnings = [*_holder(run), *_warnings(plans, view)]
    return Plan(recipe.name, view.machine, tuple(plans), tuple(warnings), str(run.path) if run else "")


# --------------------------------------------------------------------------------------------- the run that is there


def _run_there(out: Path | None, recipe: Recipe, problems: list[str]) -> Run | None:
    """The run to go on with, if there is one, and what stands against that."""
    if out is None:
        return None
    path = Path(os.path.abspath(out))
    try:
        check_usable(path)
        if not (path / "recipe.toml").exists():
            return None
        check_resumable(path, recipe, resume=True, allow_changes=False)
        return Run.read(path)
    except InputError as error:
        problems.append(str(error))
        return None


def _holder(run: Run | None) -> list[str]:
    """Who is at work in the run now; the lock's text stays when its holder is killed, so the process is looked for."""
    said = (run.path / "lock").read_text().split() if run is not None and (run.path / "lock").exists() else []
    if len(said) < 4 or said[3] != socket.gethostname() or not Path("/proc", said[1]).exists():
        return []
    return [f"the run is in use by {' '.join(said)}: it would have to end first"]


def _missing(stage: str, recipe: Recipe, run: Run | None) -> list[str]:
    """What a stage alone would not find in its run."""
    there = run.artefacts() if run is not None else []
    names, lines = {artefact.name for artefact in there}, []
    before = [name for name in makers(stage) if name in recipe.stages]
    if before and not any(artefact.kind == "checkpoint" and artefact.stage in before for artefact in there):
        lines.append(f"{stage} begins with the weights that {' or '.join(before)} leaves; run that stage first")
    section = getattr(recipe, stage)
    needed: list[tuple[str, str]] = []
    if isinstance(section, TrainingSettings):
        needed = [("corpus", part.corpus) for part in section.mix]
        needed += [("corpus", section.held_out.corpus)] if section.held_out else []
    elif isinstance(section, RlSettings):
        needed = [
            ("tasks", name) for name in (section.tasks, *(section.evaluation.tasks if section.evaluation else ()))
        ]
    for kind, name in dict.fromkeys(needed):
        if not os.path.isabs(name) and f"{kind}-{name}" not in names:
            lines.append(f"{stage} needs {name}, which the stage {kind} makes; run that stage first")
    return lines


# ------------------------------------------------------------------------------------------------ the machine


def this_machine(out: Path | None) -> Machine:
    place = Path(os.path.abspath(out or "."))
    while not place.exists():
        place = place.parent
    pressure = read_pressure(place)
    memory, names = {"cpu": pressure.memory_available}, {}
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        memory[f"cuda:{number}"] = torch.cuda.mem_get_info(number)[0]
        names[f"cuda:{number}"] = torch.cuda.get_device_name(number)
    return Machine(pressure.cores, memory, names, pressure.disk_free)


def _warnings(plans: Sequence[StagePlan], view: View) -> list[str]:
    lines = []
    for plan in plans:
        for device, total in beyond(plan.memory, view.machine).items():
            free = view.machine.memory[device]
            less = "fewer rows, a shorter length or recompute = true"
            less += ", fewer sampler.kv_cache_tokens and in_flight" if plan.stage == "rl" else ""
            lines.append(
                f"{plan.stage} needs about {total / 2**30:,.1f} GiB on {device}, where {free / 2**30:,.1f} are free: "
                f"{less} take less"
            )
        section = getattr(view.recipe, plan.stage)
        on_cpu = plan.memory and plan.memory[0].device == "cpu"
        if not plan.done and on_cpu and getattr(section, "precision", "") == "bfloat16":
            lines.append(f"{plan.stage}.precision is bfloat16, which is several times slower than float32 on most CPUs")
    disk = sum(plan.disk for plan in plans)
    if disk > view.machine.disk:
        lines.append(f"the run takes about {disk / 1e9:,.1f} GB of disk, where {view.machine.disk / 1e9:,.1f} are free")
    return lines
