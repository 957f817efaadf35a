"""Commands that a study runs, each in its own process, exactly as a user would type them.

A study thus shares no memory, threads or torch state with the runs it starts. Runs resume when the study is started
again, and end with it, however that ends. The output of a command is in a log next to its run.
"""

import json
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import etude
from etude.errors import EtudeError, InputError
from etude.runs.layout import RunLayout
from etude.system.processes import PARENT_VARIABLE, die_with_parent, parent_process

POLL_S = 0.5
TERMINATE_S = 10.0  # from SIGTERM to SIGKILL
TAIL_BYTES = 1 << 16  # read from the end of a metrics file to find its last line
FAILURE_LOG_LINES = 15  # shown of the log of a failed command


@dataclass(frozen=True)
class Command:
    """`python -m MODULE ARGUMENTS`, and the run directory it makes, if it makes one."""

    arguments: Sequence[str]
    log: Path
    run: Path | None = None
    module: str = "etude.cli"  # the `etude` command


def recipe_file(name: str) -> Path:
    """Return the path of a recipe of this checkout."""
    path = Path(etude.__file__).resolve().parent.parent / "recipes" / name
    if not path.is_file():
        raise InputError(f"{path} does not exist, and this study starts from it; run it in a checkout of the project")
    return path


def run_command(recipe: Path, out: Path, *overrides: str) -> Command:
    """Return `etude run RECIPE --out OUT --resume`, which does the stages that are not done yet."""
    sets = [word for override in overrides for word in ("--set", override)]
    log = out.with_name(f"{out.name}.log")
    return Command(["run", str(recipe), "--out", str(out), "--resume", *sets], log, out)


def run_commands(
    commands: Mapping[str, Command], progress: Callable[[int, str], None] = lambda done, note: None, at_once: int = 1
) -> dict[str, float]:
    """Run commands, `at_once` at a time; return the seconds of each. The first failure terminates the others."""
    pending, running = dict(commands), dict[str, tuple[subprocess.Popen[bytes], float]]()
    seconds: dict[str, float] = {}
    with ExitStack() as stack:
        while pending or running:
            while pending and len(running) < at_once:
                name = next(iter(pending))
                process = start(pending.pop(name))
                stack.callback(terminate, process)
                running[name] = (process, time.monotonic())
            for name, (process, started) in list(running.items()):
                if (code := process.poll()) is None:
                    continue
                if code != 0:
                    raise EtudeError(failure_message(name, commands[name], code))
                seconds[name] = time.monotonic() - started
                del running[name]
            progress(len(seconds), "; ".join(f"{name}: {progress_note(commands[name])}" for name in running))
            if running:
                time.sleep(POLL_S)
    return seconds


def start(command: Command) -> subprocess.Popen[bytes]:
    """Start a command through this module, so that it dies with the study."""
    command.log.parent.mkdir(parents=True, exist_ok=True)
    with command.log.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", __name__, command.module, *command.arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
        )


def terminate(process: subprocess.Popen[bytes]) -> None:
    """Terminate a process that still runs; kill it after TERMINATE_S."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(TERMINATE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def failure_message(name: str, command: Command, code: int) -> str:
    """Describe a failed command with the end of its log."""
    lines = command.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-FAILURE_LOG_LINES:]
    how = f"ended with signal {-code}" if code < 0 else f"ended with exit code {code}"
    return "\n".join([f"{name} {how}; its log {command.log} ends:", *(f"  {line}" for line in lines)])


def progress_note(command: Command) -> str:
    """Return the stage and step of a command's run, from the last line of its metrics."""
    if command.run is None:
        return command.module
    last = last_metrics(RunLayout(command.run).metrics)
    return f"{last['stage']} step {last['step']}" if last else "starting"


def last_metrics(path: Path) -> dict[str, Any] | None:
    """Return the last complete line of a metrics file; None if there is none yet."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]  # what follows the last newline is still being written
    except FileNotFoundError:
        return None
    return dict(json.loads(lines[-1])) if lines else None


if __name__ == "__main__":
    die_with_parent(parent_process())
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
