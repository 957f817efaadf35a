"""Commands of `etude` that a study carries out, each in a process of its own: those that anybody could type.

A study thereby shares no memory, no threads and no state of torch with the runs it makes. They go on where they were
when the study is asked again, and end with it, however that ends. What a command says is in a log beside its run.
"""

import json
import os
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
from etude.runs.layout import die_with_parent, parent_process

POLL_S = 0.5
END_S = 10.0  # that a command has to end when it is asked to
TAIL_BYTES = 1 << 16  # of a file of metrics in which its last line is looked for
LOG_LINES = 15  # that are shown of a failure


@dataclass(frozen=True)
class Command:
    """What stands after `etude`, and the run it makes, if it makes one."""

    words: Sequence[str]
    log: Path
    run: Path | None = None


def recipe_file(name: str) -> Path:
    """A recipe of this project."""
    path = Path(etude.__file__).resolve().parent.parent / "recipes" / name
    if not path.is_file():
        raise InputError(f"{path} does not exist: this study starts from it; run it in a checkout of the project")
    return path


def run_command(recipe: Path, out: Path, *overrides: str) -> Command:
    """`etude run`, of which as much is done as is not done yet."""
    sets = [word for override in overrides for word in ("--set", override)]
    log = out.with_name(f"{out.name}.log")
    return Command(["run", str(recipe), "--out", str(out), "--resume", *sets], log, out)


def carry_out(
    commands: Mapping[str, Command], told: Callable[[int, str], None] = lambda done, note: None, at_once: int = 1
) -> dict[str, float]:
    """Run commands, so many at once, and wait; the seconds of each. The first that fails ends the others."""
    waiting, going = dict(commands), dict[str, tuple[subprocess.Popen[bytes], float]]()
    seconds: dict[str, float] = {}
    with ExitStack() as stack:
        while waiting or going:
            while waiting and len(going) < at_once:
                name = next(iter(waiting))
                process = start(waiting.pop(name))
                stack.callback(end, process)
                going[name] = (process, time.monotonic())
            for name, (process, started) in list(going.items()):
                if (code := process.poll()) is None:
                    continue
                if code != 0:
                    raise EtudeError(failure(name, commands[name], code))
                seconds[name] = time.monotonic() - started
                del going[name]
            told(len(seconds), "; ".join(f"{name}: {standing(commands[name])}" for name in going))
            if going:
                time.sleep(POLL_S)
    return seconds


def start(command: Command) -> subprocess.Popen[bytes]:
    command.log.parent.mkdir(parents=True, exist_ok=True)
    with command.log.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", __name__, *command.words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "ETUDE_PARENT": str(os.getpid())},
        )


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process if it still is: asked first, then killed."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def failure(name: str, command: Command, code: int) -> str:
    lines = command.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-LOG_LINES:]
    how = f"ended with signal {-code}" if code < 0 else f"ended with exit code {code}"
    return "\n".join([f"{name} {how}; its log {command.log} ends:", *(f"  {line}" for line in lines)])


def standing(command: Command) -> str:
    """Where a command is, from the last line of its run's metrics."""
    if command.run is None:
        return command.words[0]
    last = last_line(command.run / "metrics.jsonl")
    return f"{last['stage']} step {last['step']}" if last else "beginning"


def last_line(path: Path) -> dict[str, Any] | None:
    """The last whole line of metrics; None where there is none yet."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]  # what follows the last newline is being written
    except FileNotFoundError:
        return None
    return dict(json.loads(lines[-1])) if lines else None


if __name__ == "__main__":
    from etude.cli import main

    die_with_parent(parent_process())
    main()
