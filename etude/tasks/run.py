"""`etude tasks run`: somebody works on tasks, a few at once, and what came of it is written down."""

import asyncio
import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.errors import InputError
from etude.pods.fleet import Fleet
from etude.system.cores import usable_cores
from etude.system.progress import progress_line
from etude.tasks.base_images import Provision
from etude.tasks.harbor import read_task
from etude.tasks.trial import Actor, SolutionFailed, attempt, commands, nothing, solution
from etude.tasks.verifier_result import Grade, GradingFailed


def actor_for(who: str) -> Actor:
    """`nothing`, `solution`, or a file of shell commands."""
    if who in ("nothing", "solution"):
        return nothing if who == "nothing" else solution
    file = Path(who)
    if not file.is_file():
        raise InputError(f"--as {who}: expected nothing, solution, or a file of shell commands")
    return commands(file.read_text())


def model_actor(model: str, endpoint: str, key_env: str, turns: int, out: Path | None) -> Actor:
    """A model in the harness."""
    from etude.agent.options import Model
    from etude.harness.open_client import open_speaker
    from etude.harness.session import Budget
    from etude.harness.trace import Trace
    from etude.harness.trace_store import SUFFIX, save_trace
    from etude.tasks.session_agent import in_session

    chosen = Model(name=model, endpoint=endpoint, key_env=key_env)

    def keep(trace: Trace) -> None:
        if out is not None:
            place = out / trace.task.replace("/", "__")
            place.mkdir(parents=True, exist_ok=True)
            save_trace(trace, place / f"session{SUFFIX}")

    return in_session(lambda id: open_speaker(chosen, id), budget=Budget(turns=turns), on_trace=keep)


@dataclass(frozen=True)
class Runner:
    """How tasks are run."""

    provision: Provision
    in_place: bool = False
    out: Path | None = None
    at_once: int | None = None

    async def run(self, fleet: Fleet, directories: Sequence[Path], actor: Actor) -> list[dict[str, Any]]:
        """Every task once; rows in their order."""
        gate = asyncio.Semaphore(self.at_once or max(2, usable_cores()))
        done = 0
        with progress_line("run") as progress:

            async def one(directory: Path) -> dict[str, Any]:
                nonlocal done
                async with gate:
                    row = await self._one(fleet, directory, actor)
                    done += 1
                    progress(done, len(directories))
                    return row

            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(directory)) for directory in directories]
        return [task.result() for task in tasks]

    async def _one(self, fleet: Fleet, directory: Path, actor: Actor) -> dict[str, Any]:
        task = read_task(directory)
        place = self.out / task.name.replace("/", "__") if self.out is not None else None
        row: dict[str, Any] = {"task": task.name, "reward": None, "rewards": {}, "seconds": 0.0, "changed": 0}
        started = asyncio.get_running_loop().time()
        try:
            artifacts = None
            if place is not None:
                place.mkdir(parents=True, exist_ok=True)
                artifacts = _fresh(place / "artifacts")
            grade = await attempt(
                fleet, task, actor, provision=self.provision, in_place=self.in_place, artifacts=artifacts
            )
        except (GradingFailed, SolutionFailed) as error:
            cause = error.cause if isinstance(error, GradingFailed) else "solution"
            note = f"no reward ({cause}): {str(error).splitlines()[0]}"
            return {**row, "seconds": asyncio.get_running_loop().time() - started, "note": note, "log": str(error)}
        row |= {"reward": grade.score, "rewards": dict(grade.rewards), "changed": len(grade.changes)}
        row |= {"seconds": asyncio.get_running_loop().time() - started, "note": _note(grade), "log": grade.log}
        row["facts"] = dict(grade.facts)
        if place is not None:
            (place / "verifier.log").write_text(grade.log)
            (place / "grade.json").write_text(json.dumps({key: row[key] for key in row if key != "log"}, indent=1))
        return row


def _fresh(path: Path) -> Path:
    """A path that is not there: the first of artifacts, artifacts-2, ... that is free."""
    number, found = 1, path
    while found.exists():
        number += 1
        found = path.with_name(f"{path.name}-{number}")
    return found


def _note(grade: Grade) -> str:
    parts = []
    with contextlib.suppress(KeyError):
        parts.append("protected files were changed: " + ", ".join(grade.facts["protected"][:5]))
    if grade.facts.get("forged"):
        parts.append("the reward was forged")
    if grade.facts.get("stopped"):
        parts.append(str(grade.facts["stopped"]))
    extra = [f"{name} {value:g}" for name, value in grade.rewards.items() if name != "reward"]
    return "; ".join([*parts, *extra])
