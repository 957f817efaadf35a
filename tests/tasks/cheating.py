"""Cheats as data: submissions that do not solve their task and try to take its reward, and how they are tried.

    python -m tests.tasks.cheating TARGETS --out ROWS --state DIRECTORY [--cheats DIRECTORY ...] [--fast]

A module in `cheats/`, or in another directory of the same form, has a table `CHEATS`: a `Cheat` by name. Its script is
what an agent does in the workspace of every target of its kinds, with these variables set:

    TARGET   the file with the fault, as a path in the workspace      TESTS    the file of visible tests
    MODULE   the name under which the target is imported              WORDS    words that the request or answer is about

A trial is `run_trial` with that script, then `score`: the reward that a training run would pay. The trace is empty, so
that nothing but the change and the verifier can give a cheat away. Every trial prints one JSON object.
"""

import argparse
import asyncio
import importlib.util
import json
import os
import shlex
import subprocess
import tempfile
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from etude.harness.trace import Trace
from etude.pods import Fleet, open_fleet
from etude.rewards import VerifiedTrial, score
from etude.tasks.base_images import HostSettings
from etude.tasks.generators.image import prepare_base_image
from etude.tasks.harbor import read_task
from etude.tasks.task import Task
from etude.tasks.trial import TrialAgent, commands_agent, nop_agent, oracle_agent, run_trial
from etude.tasks.verifier_result import VerifierFailed
from tests.pods.test_conformance import OVERFLOW_ID, command_of

ROOT = Path(__file__).resolve().parents[2]
COLLECTION = Path(__file__).parent / "cheats"
CONTROLS: dict[str, TrialAgent] = {"(nothing)": nop_agent, "(solution)": oracle_agent}
AT_ONCE = 3
TRIAL_S = 240.0  # no trial takes longer; a verifier that is made to hang ends after seconds


@dataclass(frozen=True)
class Cheat:
    """A script for targets of some kinds. `fast` are the targets that it is tried at in `make test`.

    Kinds and targets are names separated by spaces."""

    kinds: str
    script: str
    fast: str = ""


@dataclass(frozen=True)
class Target:
    """A task to cheat at. `group` is the kind of verifier that is reported; `kinds` are those that cheats name."""

    name: str
    group: str
    kinds: str
    directory: str
    target: str = ""
    module: str = ""
    tests: str = ""
    words: str = ""

    def agent(self, cheat: Cheat) -> TrialAgent:
        values = {"TARGET": self.target, "MODULE": self.module, "TESTS": self.tests, "WORDS": self.words}
        settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in values.items())
        return commands_agent(f"export {settings}\n{cheat.script}")


@dataclass(frozen=True)
class Row:
    """The outcome of one trial. `outcome` is paid, flagged (a hack was found), zeroed or dropped (no result)."""

    cheat: str
    target: str
    group: str
    outcome: str
    text: str = ""
    score: float = 0.0  # the verifier's, whatever the gates found


# ------------------------------------------------------------------------------------------------- scripts


def put(path: str, text: str) -> str:
    """Return commands that write a file."""
    return f'mkdir -p "$(dirname "{path}")"; cat > "{path}" <<\'END\'\n{textwrap.dedent(text).strip(chr(10))}\nEND\n'


def first(code: str) -> str:
    """Return commands that put code at the start of the target."""
    return put("/tmp/code", code) + 'cat /tmp/code "$TARGET" > /tmp/new; cp /tmp/new "$TARGET"\n'


def last(code: str) -> str:
    """Return commands that put code at the end of the target."""
    return put("/tmp/code", code) + 'cat /tmp/code >> "$TARGET"\n'


def every_function(code: str) -> str:
    """Return commands that replace each function of the target with `replacement(original)`, defined by the code."""
    loop = """
for _name, _value in list(globals().items()):
    if type(_value).__name__ == "function" and _value.__module__ == __name__ and _name not in _mine:
        globals()[_name] = replacement(_value)
"""
    return last("_before = set(globals())\n" + textwrap.dedent(code) + "\n_mine = set(globals()) - _before\n" + loop)


def load_cheats(directories: Iterable[Path] = ()) -> dict[str, Cheat]:
    """Return the cheats of the collection and of other directories, by name."""
    found: dict[str, Cheat] = {}
    for file in [file for directory in (COLLECTION, *directories) for file in sorted(directory.glob("*.py"))]:
        spec = importlib.util.spec_from_file_location(f"cheats_{file.stem}", file)
        assert spec is not None, file
        assert spec.loader is not None, file
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        twice = found.keys() & module.CHEATS.keys()
        assert not twice, f"{file}: {sorted(twice)} exist already"
        found |= module.CHEATS
    return found


# ------------------------------------------------------------------------------------------------- trials


def pairs(targets: Sequence[Target], cheats: dict[str, Cheat], fast: bool) -> list[tuple[str, Target, TrialAgent]]:
    """Return every cheat with every target of its kinds, and the controls of these targets."""
    found = [
        (name, target, target.agent(cheat))
        for name, cheat in cheats.items()
        for target in targets
        if (target.name in cheat.fast.split() if fast else set(cheat.kinds.split()) & set(target.kinds.split()))
    ]
    used = {target for _, target, _ in found}
    return [(name, target, agent) for target in targets if target in used for name, agent in CONTROLS.items()] + found


async def try_one(fleet: Fleet, settings: HostSettings | None, name: str, target: Target, agent: TrialAgent) -> Row:
    task = read_task(target.directory)
    try:
        async with asyncio.timeout(TRIAL_S):
            trial = await run_trial(fleet, task, agent, host_settings=settings)
    except VerifierFailed as error:
        return Row(name, target.name, target.group, "dropped", f"{error.cause}: {str(error)[-300:]}")
    except TimeoutError:
        return Row(name, target.name, target.group, "dropped", f"no end in {TRIAL_S:g} s")
    reward = score(VerifiedTrial(task, empty_trace(task), trial.result), {"correctness": 1.0})
    outcome = "flagged" if reward.hack else "paid" if reward.total > 0 else "zeroed"
    text = reward.hack or trial.result.log[-300:]
    return Row(name, target.name, target.group, outcome, text, trial.result.score)


def empty_trace(task: Task) -> Trace:
    return Trace("cheat", task.name, "chatml", "", (), (), (), "final")


async def try_all(trials: Sequence[tuple[str, Target, TrialAgent]], out: Path, state: Path) -> None:
    """Run trials; write one row of JSON for each."""
    semaphore = asyncio.Semaphore(AT_ONCE)
    with out.open("w") as rows:
        async with open_fleet(state=state) as fleet:
            settings = (
                await prepare_base_image(fleet) if any(t.name.startswith("generated") for _, t, _ in trials) else None
            )

            async def one(name: str, target: Target, agent: TrialAgent) -> None:
                async with semaphore:
                    row = await try_one(fleet, settings, name, target, agent)
                rows.write(json.dumps(asdict(row)) + "\n")
                rows.flush()

            await asyncio.gather(*(one(*trial) for trial in trials))


def run_as(user: str, targets: Path, options: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Run this file as root or as an ordinary user ("nobody"); return its rows."""
    prefix, environment, reason = command_of(user)
    if reason:
        raise RuntimeError(f"cannot run as {user}: {reason}")
    with tempfile.TemporaryDirectory(prefix="etude-cheats-") as directory:
        if user != "root" and os.geteuid() == 0:
            os.chown(directory, OVERFLOW_ID, OVERFLOW_ID)
        out = Path(directory) / "rows"
        command = [
            *prefix,
            "-m",
            "tests.tasks.cheating",
            str(targets),
            f"--out={out}",
            f"--state={directory}/state",
        ]
        environment = {**environment, "HOME": directory, "TMPDIR": directory}
        done = subprocess.run([*command, *options], env=environment, cwd="/", capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return [json.loads(line) for line in out.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", type=Path, help="directory that `write_targets` filled")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--state", type=Path, required=True, help="directory of pods and images")
    parser.add_argument("--cheats", type=Path, nargs="*", default=())
    parser.add_argument("--only", nargs="*", default=())
    parser.add_argument("--fast", action="store_true")
    given = parser.parse_args()
    os.umask(0o022)
    targets = [Target(**each) for each in json.loads((given.targets / "targets.json").read_text())]
    cheats = load_cheats(given.cheats)
    chosen = {name: cheat for name, cheat in cheats.items() if not given.only or name in given.only}
    asyncio.run(try_all(pairs(targets, chosen, given.fast), given.out, given.state))


if __name__ == "__main__":
    main()
