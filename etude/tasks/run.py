"""`etude tasks run`: run one trial of each task, several at a time, and record the results."""

import asyncio
import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from etude.errors import InputError
from etude.harness.model_options import ModelOptions
from etude.harness.trace import Trace
from etude.harness.trace_store import SUFFIX, save_trace
from etude.pods.fleet import Fleet
from etude.system.cores import usable_cores
from etude.system.progress import progress_line
from etude.system.run_limited import run_limited
from etude.tasks.base_images import HostSettings
from etude.tasks.environment import TaskEnvironment
from etude.tasks.harbor import read_task
from etude.tasks.task import TaskStep
from etude.tasks.trial import SolutionFailed, TrialAgent, commands_agent, nop_agent, oracle_agent, run_trial
from etude.tasks.verifier_result import VerifierFailed, VerifierResult


def agent_by_name(name: str) -> TrialAgent:
    """Return the agent for a value of --as: `nothing`, `solution`, or a file of shell commands."""
    if name in ("nothing", "solution"):
        return nop_agent if name == "nothing" else oracle_agent
    file = Path(name)
    if not file.is_file():
        raise InputError(f"--as {name}: expected nothing, solution, or a file of shell commands")
    return commands_agent(file.read_text())


def model_agent(model: ModelOptions) -> TrialAgent:
    """Return an agent that runs harness sessions with a model."""
    from etude.harness.open_client import open_model_client
    from etude.tasks.session_agent import session_agent

    return session_agent(partial(open_model_client, model))


@dataclass(frozen=True)
class TrialRunner:
    """Runs one trial of each task with the same settings."""

    host_settings: HostSettings
    in_place: bool = False
    out: Path | None = None
    at_once: int | None = None

    async def run(self, fleet: Fleet, directories: Sequence[Path], agent: TrialAgent) -> list[dict[str, Any]]:
        """Run every task once; return one row per task, in order."""
        done = 0
        with progress_line("run") as progress:

            async def one(directory: Path) -> dict[str, Any]:
                nonlocal done
                row = await self._one(fleet, directory, agent)
                done += 1
                progress(done, len(directories))
                return row

            return await run_limited(map(one, directories), self.at_once or max(2, usable_cores()))

    async def _one(self, fleet: Fleet, directory: Path, agent: TrialAgent) -> dict[str, Any]:
        task = read_task(directory)
        out = self._directory(task.name)
        row: dict[str, Any] = {"task": task.name, "reward": None, "rewards": {}, "seconds": 0.0, "changed": 0}
        started = asyncio.get_running_loop().time()
        try:
            artifacts = None
            if out is not None:
                out.mkdir(parents=True, exist_ok=True)
                artifacts = _unused_path(out / "artifacts")
            trial = await run_trial(
                fleet,
                task,
                self._recorded(agent),
                host_settings=self.host_settings,
                in_place=self.in_place,
                artifacts=artifacts,
            )
            result = trial.result
        except (VerifierFailed, SolutionFailed) as error:
            cause = error.cause if isinstance(error, VerifierFailed) else "solution"
            note = f"no reward ({cause}): {str(error).splitlines()[0]}"
            return {**row, "seconds": asyncio.get_running_loop().time() - started, "note": note, "log": str(error)}
        row |= {"reward": result.score, "rewards": dict(result.rewards), "changed": len(result.changes)}
        row |= {"seconds": asyncio.get_running_loop().time() - started, "note": _note(result), "log": result.log}
        row["facts"] = dict(result.facts)
        if out is not None:
            (out / "verifier.log").write_text(result.log)
            (out / "grade.json").write_text(json.dumps({key: row[key] for key in row if key != "log"}, indent=1))
        return row

    def _recorded(self, agent: TrialAgent) -> TrialAgent:
        """Return an agent that saves its traces, also those of trials that cannot be verified."""

        async def run(environment: TaskEnvironment, step: TaskStep | None) -> Trace | None:
            trace = await agent(environment, step)
            directory = self._directory(trace.task) if trace is not None else None
            if trace is not None and directory is not None:
                directory.mkdir(parents=True, exist_ok=True)
                save_trace(trace, directory / f"session{SUFFIX}")
            return trace

        return run

    def _directory(self, name: str) -> Path | None:
        """Return the directory of the results of a task or of one of its steps."""
        return self.out / name.replace("/", "__") if self.out is not None else None


def _unused_path(path: Path) -> Path:
    """Return the first of NAME, NAME-2, NAME-3, ... that does not exist."""
    number, found = 1, path
    while found.exists():
        number += 1
        found = path.with_name(f"{path.name}-{number}")
    return found


def _note(result: VerifierResult) -> str:
    parts = []
    with contextlib.suppress(KeyError):
        parts.append("protected files were changed: " + ", ".join(result.facts["protected"][:5]))
    if result.facts.get("forged"):
        parts.append("the reward was forged")
    if result.facts.get("hack"):
        parts.append(f"the submission attacks its tests: {result.facts['hack']}")
    if cause := result.facts.get("verifier_failed"):
        parts.append(f"the submission stopped the verifier ({cause}), which completes on {result.facts['control']}")
    if result.facts.get("stopped"):
        parts.append(str(result.facts["stopped"]))
    extra = [f"{name} {value:g}" for name, value in result.rewards.items() if name != "reward"]
    return "; ".join([*parts, *extra])
