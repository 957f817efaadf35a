"""Render a plan as text for people, and as JSON data for programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from etude.pipeline.memory import ProcessMemory
from etude.pipeline.plan import RunPlan
from etude.pipeline.stage import StagePlan

GIB = 1 << 30
INDENT = 11


def plan_text(plan: RunPlan) -> str:
    """Return a block of lines for each stage, then the totals and the warnings."""
    lines = [f"{plan.recipe}: {', '.join(stage.stage for stage in plan.stages)}", _machine_line(plan)]
    if plan.run:
        done = sum(stage.done for stage in plan.stages)
        lines.append(f"{plan.run} exists, with {done} of {len(plan.stages)} stages done: --resume continues it")
    lines.append("")
    for stage in plan.stages:
        first, *others = _stage_lines(stage)
        lines += [f"{stage.stage:{INDENT}}{first}", *(f"{'':{INDENT}}{line}" for line in others)]
    lines += ["", *(f"{'' if number else 'total':{INDENT}}{line}" for number, line in enumerate(_total_lines(plan)))]
    return "\n".join([*lines, *(f"warning: {line}" for line in plan.warnings)])


def _total_lines(plan: RunPlan) -> Iterator[str]:
    if all(stage.done for stage in plan.stages):
        yield "nothing is left to do"
        return
    unknown = [stage.stage for stage in plan.stages if stage.time is None and not stage.done]
    yield f"{duration(plan.seconds)}{', without ' + ' and '.join(unknown) if unknown else ''}"
    peak = max(sum(each.total for each in stage.memory) for stage in plan.stages)
    yield f"{peak / GIB:,.1f} GiB of memory at most, {size(plan.disk)} of disk"


def _machine_line(plan: RunPlan) -> str:
    machine = plan.machine
    gpus = [f"{name} with {machine.memory[device] / GIB:,.0f} GiB" for device, name in machine.names.items()]
    free = [f"{machine.cores:g} cores", f"{machine.memory['cpu'] / GIB:,.1f} GiB of memory", *gpus]
    return f"free here: {', '.join(free)}, {size(machine.disk)} of disk"


def _stage_lines(stage: StagePlan) -> Iterator[str]:
    if stage.done:
        yield stage.does[0]
        return
    if stage.time is None:
        yield "time unknown: the stage cannot be measured here"
    else:
        yield f"{duration(stage.time.seconds)} ({stage.time.basis})"
    yield from stage.does
    if stage.launches:
        where = "this machine" if stage.cluster is None else stage.cluster
        yield f"launches {', '.join(stage.launches)}, on {where}"
    for same in _grouped(stage.memory):
        yield _memory_line(same)
    if stage.disk:
        yield f"{size(stage.disk)} of disk"


def _grouped(memory: tuple[ProcessMemory, ...]) -> list[list[ProcessMemory]]:
    """Return the processes that need the same, each on a device of its own or all on one."""
    found: list[list[ProcessMemory]] = []
    for each in memory:
        same = [group for group in found if (group[0].process, group[0].pieces) == (each.process, each.pieces)]
        if same:
            same[0].append(each)
        else:
            found.append([each])
    return found


def _memory_line(processes: list[ProcessMemory]) -> str:
    memory, last = processes[0], processes[-1]
    pieces = sorted(memory.pieces.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{name} {value / GIB:,.2f}" for name, value in pieces if value >= GIB / 200)
    times = f"{len(processes)} x " if len(processes) > 1 else ""
    device = memory.device if last.device == memory.device else f"{memory.device} to {last.device}"
    return f"{times}{memory.total / GIB:,.2f} GiB on {device} for the {memory.process}: {parts}"


def duration(seconds: float) -> str:
    """Return a duration in words, rounded."""
    if seconds < 90:
        return f"about {max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"about {minutes} min" if minutes < 90 else f"about {minutes // 60} h {minutes % 60:02d} min"


def size(count: float) -> str:
    """Return a number of bytes in GB or MB."""
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def plan_data(plan: RunPlan) -> dict[str, Any]:
    """Return the plan as JSON values; times in seconds, sizes in bytes."""
    stages = {}
    for stage in plan.stages:
        estimate = {"seconds": None, "basis": None} if stage.time is None else asdict(stage.time)
        memory = [{**asdict(each), "total": each.total} for each in stage.memory]
        stages[stage.stage] = {**asdict(stage), **estimate, "memory": memory}
    return {**asdict(plan), "run": plan.run or None, "stages": stages, "seconds": plan.seconds, "disk": plan.disk}
