"""Run a recipe under several settings and seeds: every combination is a run directory below one directory.

    OUT/NAME/            a run; NAME has the settings that differ and the seed
    OUT/recipes/NAME.toml, OUT/logs/NAME.log
    OUT/sweep.json       the result, as `etude sweep --json` prints it

Each run is a process of its own. A run that fails does not stop the others. Finished runs are skipped and interrupted
ones resumed, so a sweep is continued, and extended by seeds or values, with the same command. A new run starts with a
copy of the finished stages that it shares with another run of the sweep (`shared_stages`).
"""

import itertools
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from etude.config import render_toml
from etude.errors import InputError, Interrupted
from etude.files import take_lock, write_atomically
from etude.pipeline.shared_stages import finished_stages, shared_stages
from etude.recipe.recipe import Recipe, load_recipe
from etude.runs.layout import RunLayout
from etude.runs.run import Run
from etude.system.processes import PARENT_VARIABLE
from etude.system.progress import ProgressCallback

POLL_S = 0.2
TERMINATE_S = 20.0  # from SIGTERM to SIGKILL
FAILURE_LOG_LINES = 5  # of the log of a failed run that are shown
RECIPE_ARM = "recipe"  # the name of the only arm of a sweep over seeds alone


@dataclass(frozen=True)
class SweepArm:
    """One combination of settings, to be run with every seed."""

    name: str
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep."""

    arm: SweepArm
    seed: int
    path: Path
    recipe: Recipe

    @property
    def name(self) -> str:
        return self.path.name


@dataclass(frozen=True)
class Sweep:
    """The runs of a sweep, seed by seed, and the last stage that they run."""

    out: Path
    runs: tuple[SweepRun, ...]
    stage: str | None = None

    @property
    def arms(self) -> list[str]:
        return list(dict.fromkeys(run.arm.name for run in self.runs))

    @property
    def seeds(self) -> list[int]:
        return list(dict.fromkeys(run.seed for run in self.runs))

    def stages(self, run: SweepRun) -> tuple[str, ...]:
        """Return the stages that a run of this sweep has."""
        stages = run.recipe.stages
        return stages if self.stage is None else stages[: stages.index(self.stage) + 1]

    def is_finished(self, run: SweepRun) -> bool:
        if not RunLayout(run.path).recipe.exists():
            return False
        return finished_stages(Run.read(run.path), self.stages(run)) == self.stages(run)


@dataclass
class SweepOutcome:
    """What became of the runs."""

    finished: list[str] = field(default_factory=list)  # now
    skipped: list[str] = field(default_factory=list)  # were finished before
    failed: dict[str, str] = field(default_factory=dict)  # with the reason
    shared: dict[str, str] = field(default_factory=dict)  # stages that were copied, and from which run


# ------------------------------------------------------------------------------------------- command line


def plan_sweep(
    recipe: Path, settings: Sequence[str], controls: Sequence[str], seeds: str, out: Path, stage: str | None
) -> Sweep:
    """Return the runs of a sweep; every recipe is checked, and all problems come as one InputError."""
    arms = make_arms(settings, controls)
    runs, problems = [], dict[str, None]()
    for seed, arm in itertools.product(parse_seeds(seeds), arms):
        name = run_name(arm, seed)
        try:
            resolved = load_recipe(recipe, [*arm.overrides, f"seed={seed}", f"name={name}"])
            if stage is not None and stage not in resolved.stages:
                raise InputError(f"--stage {stage}: the stages of the recipe are {', '.join(resolved.stages)}")
            runs.append(SweepRun(arm, seed, Path(os.path.abspath(out)) / name, resolved))
        except InputError as error:
            problems |= dict.fromkeys(str(error).splitlines())
    if problems:
        raise InputError("\n".join(problems))
    if len({run.name for run in runs}) < len(runs):
        raise InputError("--set: two combinations have the same name; a value is given twice")
    return Sweep(Path(os.path.abspath(out)), tuple(runs), stage)


def make_arms(settings: Sequence[str], controls: Sequence[str]) -> list[SweepArm]:
    """Return the combinations of `KEY=VALUE,VALUE...`, and for each control the first of them with one change."""
    values = [split_values(setting) for setting in settings]
    arms = []
    for combination in itertools.product(*values):
        varied = [text for text, choices in zip(combination, values, strict=True) if len(choices) > 1]
        arms.append(SweepArm(",".join(varied) or RECIPE_ARM, combination))
    for control in controls:
        change = control if "=" in control else f"rl.control={control}"
        if len(split_values(change)) > 1:
            raise InputError(f"--control {control}: a control has one value; give --control again for another one")
        arms.append(SweepArm(f"control:{control}", (*arms[0].overrides, change)))
    return arms


def split_values(setting: str) -> list[str]:
    """Return `KEY=VALUE` for each value of `KEY=VALUE,VALUE...`; commas in brackets, braces and quotes do not count."""
    key, equals, text = setting.partition("=")
    if not equals or not key.strip():
        raise InputError(f"--set {setting}: expected KEY=VALUE[,VALUE...], such as rl.learning_rate=1e-4,3e-4")
    if key.strip() in ("seed", "name"):
        raise InputError(f"--set {setting}: a sweep sets {key.strip()} itself; give seeds with --seeds")
    values, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        else:
            depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not depth and not quote:
            values.append("")
        else:
            values[-1] += letter
    if not all(value.strip() for value in values):
        raise InputError(f"--set {setting}: a value is empty; expected KEY=VALUE[,VALUE...]")
    return [f"{key.strip()}={value.strip()}" for value in values]


def parse_seeds(text: str) -> list[int]:
    """Return the seeds of `0..2`, `7` or `0,3,5..6`."""
    seeds: dict[int, None] = {}
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+)(?:\.\.(\d+))?\s*", part)
        if found is None or int(found[2] or found[1]) < int(found[1]):
            raise InputError(f"--seeds {text}: expected seeds such as 0..2 or 0,3")
        seeds |= dict.fromkeys(range(int(found[1]), int(found[2] or found[1]) + 1))
    return list(seeds)


def run_name(arm: SweepArm, seed: int) -> str:
    """Return the name of a run's directory: the settings that differ between arms, and the seed."""
    settings = re.sub(r"[^\w.=,+-]+", "-", arm.name).strip("-")
    return f"seed={seed}" if arm.name == RECIPE_ARM else f"{settings},seed={seed}"


# ------------------------------------------------------------------------------------------- running


def run_sweep(sweep: Sweep, parallel: int, report: ProgressCallback) -> SweepOutcome:
    """Run what is not finished, `parallel` runs at a time; return what became of each run."""
    sweep.out.mkdir(parents=True, exist_ok=True)
    lock = take_lock(sweep.out / "lock", f"the sweep {sweep.out}")
    try:
        return _SweepRunner(sweep, report).run(parallel)
    except KeyboardInterrupt:
        raise Interrupted(f"stopped; the same command continues the sweep in {sweep.out}") from None
    finally:
        os.close(lock)


class _SweepRunner:
    """The state of a sweep that is running."""

    def __init__(self, sweep: Sweep, report: ProgressCallback) -> None:
        self.sweep, self.report, self.outcome = sweep, report, SweepOutcome()
        self.waiting: list[SweepRun] = []
        self.running: dict[str, tuple[SweepRun, subprocess.Popen[bytes], float]] = {}
        self.seconds: list[float] = []  # of runs that ended

    def run(self, parallel: int) -> SweepOutcome:
        for run in self.sweep.runs:
            (self.outcome.skipped.append(run.name) if self.sweep.is_finished(run) else self.waiting.append(run))
        with ExitStack() as stack:
            while self.waiting or self.running:
                while len(self.running) < parallel and (following := self.next_run()) is not None:
                    self.waiting.remove(following)
                    process = self.start(following)
                    stack.callback(terminate, process)
                    self.running[following.name] = (following, process, time.monotonic())
                for run, process, started in list(self.running.values()):
                    if (code := process.poll()) is not None:
                        self.end(run, code, time.monotonic() - started)
                self.report_progress(parallel)
                time.sleep(POLL_S if self.running else 0)
        return self.outcome

    def next_run(self) -> SweepRun | None:
        """Return the next run that needs not wait for stages that a running one is about to finish."""
        for run in self.waiting:
            if RunLayout(run.path).recipe.exists():  # it was interrupted, and has its own stages
                return run
            best = max(map(len, self.copies(run).values()), default=0)
            coming = (len(self.shared(other, run)) for other, _, _ in self.running.values())
            if best >= max(coming, default=0):
                return run
        return None

    def shared(self, donor: SweepRun, run: SweepRun) -> tuple[str, ...]:
        """Return the stages of a run that are, or will be, the same in another one."""
        stages = self.sweep.stages(run)
        return tuple(stage for stage in shared_stages(donor.recipe, run.recipe) if stage in stages)

    def copies(self, run: SweepRun) -> dict[str, tuple[str, ...]]:
        """Return the finished stages that other runs of the sweep share with this one, by run."""
        donors = [other for other in self.sweep.runs if other != run and RunLayout(other.path).recipe.exists()]
        return {donor.name: finished_stages(Run.read(donor.path), self.shared(donor, run)) for donor in donors}

    def start(self, run: SweepRun) -> subprocess.Popen[bytes]:
        """Start the process of a run, with the stages that it can copy."""
        out = self.sweep.out
        recipe, log = out / "recipes" / f"{run.name}.toml", out / "logs" / f"{run.name}.log"
        recipe.parent.mkdir(exist_ok=True)
        log.parent.mkdir(exist_ok=True)
        write_atomically(recipe, render_toml(run.recipe))
        arguments = ["--stage", self.sweep.stage] if self.sweep.stage else []
        copies = {} if RunLayout(run.path).recipe.exists() else self.copies(run)
        donor = max(copies, key=lambda name: len(copies[name]), default=None)
        if donor is not None and copies[donor]:
            arguments += ["--copy-from", str(out / donor), "--copy", ",".join(copies[donor])]
            self.outcome.shared[run.name] = f"{', '.join(copies[donor])} from {donor}"
        command = [sys.executable, "-m", "etude.pipeline.sweep_process", str(recipe), str(run.path), *arguments]
        environment = {**os.environ, PARENT_VARIABLE: str(os.getpid())}
        with log.open("ab") as output:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
            )

    def end(self, run: SweepRun, code: int, seconds: float) -> None:
        """Record the end of a run's process."""
        del self.running[run.name]
        self.seconds.append(seconds)
        if code == 0 and self.sweep.is_finished(run):
            self.outcome.finished.append(run.name)
            return
        log = self.sweep.out / "logs" / f"{run.name}.log"
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-FAILURE_LOG_LINES:]
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        self.outcome.failed[run.name] = "\n".join([f"{how}; {log} ends:", *(f"    {line}" for line in lines)])

    def report_progress(self, parallel: int) -> None:
        total, left = len(self.sweep.runs), len(self.waiting) + len(self.running)
        notes = [f"{name}: {_position(run.path)}" for name, (run, _, _) in self.running.items()]
        if self.seconds and left:
            spent = sum(time.monotonic() - started for _, _, started in self.running.values())
            mean = sum(self.seconds) / len(self.seconds)
            remaining = max(0.0, left * mean - spent) / min(parallel, left)
            notes.insert(0, f"about {remaining / 60:,.0f} min left")
        if self.outcome.failed:
            notes.insert(0, f"{len(self.outcome.failed)} failed")
        self.report(total - left, total, "; ".join(notes))


def _position(run: Path) -> str:
    """Return the stage that a run is in, and the last step of its metrics."""
    if not RunLayout(run).recipe.exists():
        return "starting"
    opened = Run.read(run)
    stage = next((stage for stage in opened.settings.stages if not opened.stage_done(stage)), "done")
    records = opened.metrics(stage)
    return f"{stage} step {records[-1]['step']}" if records else stage


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
