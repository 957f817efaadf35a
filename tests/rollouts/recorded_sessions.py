"""Sessions that are recorded in pods of one user and replayed in pods of another; `test_users.py` compares the rewards.

    python -m tests.rollouts.recorded_sessions DIRECTORY --out ROWS --state DIRECTORY

A recording is a directory with `tasks/NAME` and `traces/`; each trace has the reward that it got. A replay repeats the
recorded turns in the real harness, verifies and scores them: a session whose prompts differ in one token from the
recorded ones has no reward, but an error. It prints nothing and writes one JSON object for each session.
"""

import argparse
import asyncio
import json
import os
import textwrap
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

from etude.chat.dialects import Dialect, dialect_for
from etude.chat.messages import Message, ToolCall
from etude.chat.tokenizer import Tokenizer
from etude.config import load_table
from etude.harness.scripted_policy import ScriptedPolicy
from etude.harness.trace_store import load_trace, save_trace
from etude.inference.policy import Policy
from etude.pods import open_fleet
from etude.rollouts.rollout import PolicyBinding, RolloutFailed, rollout_seed, run_rollout
from etude.rollouts.settings import RolloutSettings
from etude.rollouts.worker import rollout_options
from etude.tasks.harbor import read_task
from etude.tasks.task import Task
from etude_nano.demonstrator import demonstration_turns, read_files
from tests.harness.replay_policy import ReplayPolicy

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "base/nano"
AT_ONCE = 16
SESSION_S = 3600.0
Session = tuple[Task, Policy]

# Code that a session puts at the end of the files that it should change.
ATTACKS = {
    "writes a reward file": """
        import os
        os.makedirs("/logs/" + "verifier", exist_ok=True)
        open("/logs/" + "verifier/" + "reward" + ".json", "w").write('{"reward": 1.0}')
    """,
    "kills its parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    "exits": "import sys\nsys.exit(0)",
    "replaces its process": "import os\nos.execvp('true', ['true'])",
    "never ends": "while True:\n    pass",
}


def settings() -> RolloutSettings:
    """Return the settings of the demo's rollouts, without its time limit: a busy machine must not end a session."""
    demo = load_table(ROOT / "recipes/nano.toml", "rl", RolloutSettings)
    return demo.model_copy(update={"budget": demo.budget.model_copy(update={"seconds": SESSION_S})})


@cache
def dialect() -> Dialect:
    return dialect_for(Tokenizer.load(MODEL))


# ------------------------------------------------------------------------------------------------- policies


def demonstrates(task: Task, seed: int = 0) -> Policy:
    """Return a policy that solves a nano task."""
    return ScriptedPolicy(dialect(), [turn.message for turn in demonstration_turns(read_files(task.directory), seed)])


def gives_up() -> Policy:
    return ScriptedPolicy(dialect(), [Message("assistant", "Done.")])


def attacks(task: Task, code: str) -> Policy:
    """Return a policy that appends code to the files that the solution changes, and claims to be done."""
    solution = task.directory / "solution/repo"
    files = [file.relative_to(solution).as_posix() for file in sorted(solution.rglob("*.py"))]
    command = "".join(f"cat >> {file} <<'END'\n{textwrap.dedent(code).strip()}\nEND\n" for file in files)
    edit = Message("assistant", "", "", (ToolCall("run_terminal_cmd", {"command": command}, ""),))
    return ScriptedPolicy(dialect(), [edit, Message("assistant", "Done.")])


@asynccontextmanager
async def nano_model() -> AsyncIterator[Policy]:
    """The demo's base model as a policy in this process."""
    from etude.inference.clients.inprocess import InProcessPolicy
    from etude.inference.engine import Engine
    from etude.inference.service import EngineService
    from etude.inference.settings import EngineOptions
    from etude.model import load

    options = EngineOptions(kv_cache_tokens=65_536, max_sequences=16, max_step_tokens=512)
    async with EngineService(Engine(load(MODEL), options, tokenizer=Tokenizer.load(MODEL))) as service:
        yield InProcessPolicy(service)


# ------------------------------------------------------------------------------------------------- sessions


async def run_sessions(sessions: Sequence[Session], state: Path) -> AsyncIterator[dict[str, Any]]:
    """Run sessions in the order given, several at once; yield the trace, or the error, of each."""
    chosen, semaphore = settings(), asyncio.Semaphore(AT_ONCE)
    options, window = rollout_options(chosen), chosen.window or 2048

    async with open_fleet(state=state) as fleet:

        async def one(number: int, task: Task, policy: Policy) -> dict[str, Any]:
            binding = PolicyBinding(policy, dialect(), window)
            facts, seed = {"directory": task.directory.name}, rollout_seed(0, number)
            async with semaphore:
                try:
                    done = await run_rollout(
                        fleet, task, binding, options, seed=seed, facts=facts, weights=lambda _: chosen.rewards
                    )
                except RolloutFailed as error:
                    return {"error": str(error)}
            return {"trace": done.trace}

        for each in [asyncio.create_task(one(number, *session)) for number, session in enumerate(sessions)]:
            yield await each


async def record(directory: Path, sessions: Sequence[Session], state: Path) -> None:
    """Run sessions whose tasks are in `directory`/tasks, and save their traces beside them."""
    (directory / "traces").mkdir()
    number = 0
    async for outcome in run_sessions(sessions, state):
        assert "trace" in outcome, outcome
        save_trace(outcome["trace"], directory / f"traces/{number:03d}.trace")
        number += 1


async def replay(directory: Path, state: Path) -> AsyncIterator[dict[str, Any]]:
    """Replay a recording; yield the recorded and the replayed reward of each session."""
    traces = [load_trace(path) for path in sorted((directory / "traces").iterdir())]
    tasks = [read_task(directory / "tasks" / trace.facts["directory"]) for trace in traces]
    sessions = [(task, ReplayPolicy(trace)) for task, trace in zip(tasks, traces, strict=True)]
    number = 0
    async for outcome in run_sessions(sessions, state):
        reward = outcome["trace"].facts["reward"] if "trace" in outcome else outcome
        yield {"task": traces[number].task, "recorded": traces[number].facts["reward"], "replayed": reward}
        number += 1


async def write_rows(directory: Path, out: Path, state: Path) -> None:
    with out.open("w") as rows:
        async for row in replay(directory, state):
            rows.write(json.dumps(row) + "\n")


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--state", type=Path, required=True, help="directory of pods and images")
    given = parser.parse_args(None if arguments is None else list(arguments))
    os.umask(0o022)
    asyncio.run(write_rows(given.recording, given.out, given.state))


if __name__ == "__main__":
    main()
