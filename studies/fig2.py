"""Loss against reward, in the manner of the report's figure: does a lower loss come with a higher reward after RL?

    data         tokenizer and corpora of `python -m etude_nano`
    foundation   a model pretrained on a little code; the tasks, and the demonstrations for SFT
    BUDGET       for each of three log-spaced budgets: mid-training, then the same small SFT on demonstrations, then an
                 identical short run of reinforcement learning

The mix of mid-training is the one of the stage sft in `recipes/nano-base.toml`: five sixths of the tokens are agent
sessions (half of all tokens exercises, a third demonstrations of training tasks), the rest drills and code. So this is
not the report's continued pretraining. Each part is a directory made by `etude run` on a recipe written next to
it, with the numbers of `recipes/nano-base.toml` and `recipes/nano-rl.toml` except those in `Fig2Settings`; finished
parts are not made again. The loss is taken after SFT, on demonstrations in shapes of code that no training task has and
on standard library code that was not trained on; the reward is that of the last steps, on prompts used only once.
"""

import asyncio
import json
import math
import shutil
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch

from etude.chat.dialects import dialect_for
from etude.chat.tokenizer import Tokenizer
from etude.data.sources import sample_evenly, source_files
from etude.errors import InputError
from etude.evaluation.codebase_nll import codebase_nll
from etude.evaluation.plot import Axis, Line, Panel
from etude.evaluation.statistics import bootstrap_interval
from etude.kernels import usable_device
from etude.kernels.loss import token_logprobs
from etude.model.checkpoint import load
from etude.model.transformer import Transformer
from etude.recipe.recipe import load_recipe
from etude.rollouts.queue import RolloutQueue
from etude.runs.layout import RunLayout
from etude.runs.run import Artefact, Run
from etude.system.progress import ProgressCallback
from etude_nano.pod_sessions import Demonstration
from etude_nano.simulated_sessions import simulate_demonstration
from etude_nano.source import nano_tasks
from etude_nano.templates import Split
from studies.study import StudyResult, study
from studies.subprocess_runs import Command, recipe_file, run_command, run_commands

BASE, AGENT = "nano-base.toml", "nano-rl.toml"
LENGTH = 2048  # tokens of a row, in every stage
HELD_OUT_CODE = ("stdlib/json", "stdlib/logging", "stdlib/email")  # training code is from the packages next to torch
HELD_OUT_SEED = 1_500_000_000  # of the first task of the measured demonstrations; no recipe reaches it
SPLITS: tuple[Split, ...] = ("held-out", "train")  # unseen shapes of code, and those of training tasks
Table = dict[str, Any]


@dataclass(frozen=True)
class Fig2Settings:
    """Defaults for one GPU and 16 cores."""

    budgets: tuple[int, ...] = (10_000_000, 50_000_000, 250_000_000)  # tokens of mid-training
    foundation: int = 40_000_000  # tokens of code and drills before it
    exercises: int = 80_000  # sessions in the corpus of exercises
    demonstrations: int = 40_000  # sessions in the corpus of demonstrations
    drills: int = 20_000  # documents
    code: float = 40.0  # megabytes
    sources: tuple[str, ...] = ()  # directories of the code; default: the packages next to torch
    hidden: int = 192
    layers: int = 6
    rows: int = 64  # of a pretraining step
    precision: str = "bfloat16"
    compile: bool = True
    sft_demonstrations: int = 320
    sft_tokens: int = 160_000
    steps: int = 10  # of reinforcement learning
    groups: int = 8  # of a step
    group_size: int = 8
    turns: int = 10  # of a session
    max_turn_tokens: int = 200
    in_flight: int = 64
    workers: int = 2
    evaluation_tasks: int = 16  # of each evaluated set; validation before and after RL, the others after it
    evaluation_samples: int = 4  # of each
    loss_sessions: int = 200  # demonstrations that the loss is taken on
    loss_files: int = 40  # and files of code
    at_once: int = 3  # budgets


@study("fig2")
def fig2(
    seed: int, progress: ProgressCallback, settings: Fig2Settings | None = None, directory: Path | None = None
) -> StudyResult:
    """Does a lower loss after more tokens of mid-training come with a higher reward after reinforcement learning?"""
    if directory is None:
        raise InputError("fig2 needs a directory for its runs")
    s = settings or Fig2Settings()
    device = usable_device("auto")
    check_settings(s, device)
    print(f"fig2: {estimate_time(s)}", file=sys.stderr)
    directory = directory.absolute()
    seconds = make_all(s, seed, directory, progress)
    tokenizer = Tokenizer.load(directory / "data" / "tokenizer")
    sessions = {split: asyncio.run(draw_demonstrations(tokenizer, split, s.loss_sessions)) for split in SPLITS}
    points = [measure(directory / budget_name(budget), budget, s, seed, sessions, device) for budget in s.budgets]
    return build_result(points, s, seconds)


def check_settings(s: Fig2Settings, device: torch.device) -> None:
    if len(s.budgets) < 2 or any(small >= large for small, large in pairwise(s.budgets)):
        raise InputError(f"fig2: budgets are {list(s.budgets)}; expected two or more, each larger than the one before")
    if device.type == "cpu" and s.precision == "bfloat16":
        raise InputError(
            f"fig2 trains on {sum(s.budgets) / 1e6:,.0f}M tokens in bfloat16, minutes on a GPU and days on this CPU: "
            "run it where there is a GPU, or with far smaller budgets and --set precision=float32 --set compile=false"
        )


def budget_name(budget: int) -> str:
    """Return a budget such as 48M or 512k."""
    return next((f"{budget / size:g}{word}" for size, word in ((1e6, "M"), (1e3, "k")) if budget >= size), str(budget))


def estimate_time(s: Fig2Settings) -> str:
    """Estimate the time of each part from the rates of an H200 with 16 cores, with a minute to load and compile."""
    simulated_per_s, tokens_per_s, rollouts_per_s = 2000.0, 2e6, 8.0
    tasks = s.evaluation_tasks * (2 + len(evaluated_sets(recipe_tables(AGENT))))  # two validations in RL
    rl = 60 + (s.steps * s.groups * s.group_size + tasks * s.evaluation_samples) / rollouts_per_s
    rounds = math.ceil(len(s.budgets) / s.at_once)
    data = 15 + (s.exercises + s.demonstrations) / simulated_per_s
    foundation = 40 + s.foundation / tokens_per_s
    budgets = 30 + (sum if rounds > 1 else max)(s.budgets) / tokens_per_s + rounds * rl
    return (
        f"on an H200 with 16 cores about {data:.0f} s for data, {foundation:.0f} s for the foundation, {budgets:.0f} s "
        f"for budgets of {', '.join(map(budget_name, s.budgets))} tokens with {s.steps} steps of RL each, "
        f"{(data + foundation + budgets) / 60:.0f} minutes in all; finished parts are not made again"
    )


# ------------------------------------------------------------------------------------------------- runs


def make_all(s: Fig2Settings, seed: int, directory: Path, progress: ProgressCallback) -> dict[str, float]:
    """Make the missing ones of data, foundation and budgets; return the seconds of each that was made."""
    total = 2 + len(s.budgets)

    def progress_after(before: int) -> Callable[[int, str], None]:
        return lambda done, note: progress(before + done, total, note)

    seconds = make_data(s, seed, directory / "data", progress_after(0))
    seconds |= make_runs({"foundation": foundation_recipe(s, seed, directory)}, directory, 1, progress_after(1))
    foundation = FoundationArtefacts.of(directory / "foundation")
    recipes = {budget_name(budget): budget_recipe(s, seed, directory, budget, foundation) for budget in s.budgets}
    return seconds | make_runs(recipes, directory, s.at_once, progress_after(2))


def make_data(s: Fig2Settings, seed: int, out: Path, progress: Callable[[int, str], None]) -> dict[str, float]:
    """Make the tokenizer and the corpora, completely or not at all."""
    amounts = {
        "practice": s.exercises,
        "sessions": s.demonstrations,
        "drills": s.drills,
        "code": s.code,
        "seed": seed,
    }
    options = {"practice": "--exercises", "sessions": "--demonstrations"}
    sources = list(s.sources) or [str(Path(torch.__file__).parent.parent)]
    facts = {**amounts, "sources": sources}
    if out.is_dir():
        if (made := json.loads((out / "made.json").read_text(encoding="utf-8"))) != facts:
            raise InputError(f"{out} was made from {made}, not from {facts}; name another directory with --out")
        return {}
    partial = out.with_name("data.making")
    shutil.rmtree(partial, ignore_errors=True)
    arguments = [str(partial), *(word for source in sources for word in ("--from", source))]
    arguments += [word for key, value in amounts.items() for word in (options.get(key, f"--{key}"), str(value))]
    command = Command(arguments, out.with_name("data.log"), module="etude_nano")
    seconds = run_commands({"data": command}, progress)
    (partial / "made.json").write_text(json.dumps(facts), encoding="utf-8")
    partial.rename(out)
    return seconds


def make_runs(
    recipes: Mapping[str, Table], directory: Path, at_once: int, progress: Callable[[int, str], None]
) -> dict[str, float]:
    """Write the recipes and run those that are not finished."""
    commands = {}
    for name, table in recipes.items():
        file = directory / f"{name}.toml"
        file.write_text(tomli_w.dumps(table), encoding="utf-8")
        if not is_finished(directory / name, file):
            commands[name] = run_command(file, directory / name)
    before = len(recipes) - len(commands)
    return run_commands(commands, lambda done, note: progress(before + done, note), at_once)


def is_finished(out: Path, recipe: Path) -> bool:
    """Return whether this exact recipe has been run to its end."""
    if not (out / "recipe.toml").is_file():
        return False
    run = Run.read(out)
    return load_recipe(out / "recipe.toml") == load_recipe(recipe) and all(map(run.stage_done, run.settings.stages))


# ------------------------------------------------------------------------------------------------- recipes


def recipe_tables(recipe: str) -> Table:
    return tomllib.loads(recipe_file(recipe).read_text(encoding="utf-8"))


def foundation_recipe(s: Fig2Settings, seed: int, directory: Path) -> Table:
    """Return the recipe of a model pretrained on a little code, and of the tasks and demonstrations of all budgets."""
    base, agent = recipe_tables(BASE), recipe_tables(AGENT)
    tokenizer = str(directory / "data" / "tokenizer")
    sft_corpora = [part["corpus"] for part in agent["sft"]["mix"]]
    config = base["init"]["config"] | {"hidden_size": s.hidden, "num_hidden_layers": s.layers}
    return {
        "name": "fig2-foundation",
        "seed": seed,
        "stages": ["init", "tasks", "corpus", "pretrain"],
        "init": base["init"] | {"tokenizer": tokenizer, "dtype": s.precision, "config": config},
        "tasks": {"build": task_sets(s, agent)},
        "corpus": {
            "build": [each for each in agent["corpus"]["build"] if each["name"] in sft_corpora],
            "tokenizer": tokenizer,
        },
        "pretrain": pretrain_table(base["pretrain"], s, directory, s.foundation),
    }


def task_sets(s: Fig2Settings, agent: Table) -> list[Table]:
    """Return the tables of the training set and of the evaluated sets."""
    counts = {name: {"count": s.evaluation_tasks} for name in evaluated_sets(agent)}
    counts[agent["rl"]["tasks"]] = {
        "count": max(2 * s.steps * s.groups, 40),
        "demonstrations": s.sft_demonstrations,
    }
    return [each | counts[each["name"]] for each in agent["tasks"]["build"] if each["name"] in counts]


def evaluated_sets(agent: Table) -> list[str]:
    return [agent["evaluation"]["validation"], *agent["evaluation"]["test"]]


def pretrain_table(table: Table, s: Fig2Settings, directory: Path, tokens: int) -> Table:
    """Return a pretraining stage on the data in `directory`, in the proportions of the given stage."""
    mix = [part | {"corpus": str(directory / "data" / Path(part["corpus"]).name)} for part in table["mix"]]
    # one shape for all stages, so that it is compiled once; a warm-up short enough for the smallest budget
    sizes = {"length": LENGTH, "rows": s.rows, "tokens": tokens, "warmup": 0.05}
    return table | sizes | {"mix": mix, "precision": s.precision, "compile": s.compile}


@dataclass(frozen=True)
class FoundationArtefacts:
    """The inputs that all budgets share."""

    model: Path
    artefacts: Mapping[str, Path]  # task sets and corpora, by name

    @classmethod
    def of(cls, foundation: Path) -> "FoundationArtefacts":
        paths = {artefact.name: artefact.path for artefact in Run.read(foundation).artefacts()}
        return cls(checkpoint_of(foundation, "pretrain").path, paths)

    def tasks(self, name: str) -> str:
        return str(self.artefacts[f"tasks-{name}"])

    def corpus(self, name: str) -> str:
        return str(self.artefacts[f"corpus-{name}"])


def checkpoint_of(run: Path, stage: str) -> Artefact:
    return [artefact for artefact in Run.read(run).artefacts("checkpoint") if artefact.stage == stage][-1]


def budget_recipe(s: Fig2Settings, seed: int, directory: Path, budget: int, foundation: FoundationArtefacts) -> Table:
    """Return the recipe of one budget: mid-training, then SFT and RL, which are the same for every budget."""
    base, agent = recipe_tables(BASE), recipe_tables(AGENT)
    rl = agent["rl"] | {
        "tasks": foundation.tasks(agent["rl"]["tasks"]),
        "steps": s.steps,
        "group_size": s.group_size,
        "groups_per_step": s.groups,
        "in_flight": s.in_flight,
        "workers": s.workers,
        "precision": s.precision,
        "checkpoint_every": s.steps,
        "budget": {"turns": s.turns, "max_turn_tokens": s.max_turn_tokens},
        "curriculum": {"hard_weight": 0.0},  # otherwise each budget would draw other tasks
    }
    validation, *test = (foundation.tasks(name) for name in evaluated_sets(agent))
    samples = {"samples": s.evaluation_samples, "validation_samples": s.evaluation_samples}
    sft_mix = [part | {"corpus": foundation.corpus(part["corpus"])} for part in agent["sft"]["mix"]]
    rl["sampler"] = rl["sampler"] | {"max_sequences": s.in_flight, "max_step_tokens": 64 * s.in_flight}
    return {
        "name": f"fig2-{budget_name(budget)}",
        "seed": seed,
        "stages": ["pretrain", "sft", "rl", "evaluation"],
        "pretrain": pretrain_table(base["sft"], s, directory, budget) | {"model": str(foundation.model)},
        "sft": agent["sft"] | {"mix": sft_mix, "length": LENGTH, "tokens": s.sft_tokens},
        "rl": rl,
        "evaluation": {"validation": validation, "test": test, "models": ["rl"], **samples},
    }


# ------------------------------------------------------------------------------------------------- measurements


@dataclass(frozen=True)
class Fig2Budget:
    """One point of the figure. Losses are after SFT, in nats per token; rewards have a 95% interval."""

    tokens: int
    sessions_loss: float
    known_sessions_loss: float  # on demonstrations in shapes of code that training tasks have
    code_loss: float
    first_reward: float
    reward: float
    reward_low: float
    reward_high: float
    solved_before: float  # validation tasks
    solved: float
    solved_low: float
    solved_high: float
    sets: Mapping[str, float | None]  # the same for each task set
    seconds: Mapping[str, float]  # of each stage, from its first line of metrics to its last


def measure(
    run: Path,
    tokens: int,
    s: Fig2Settings,
    seed: int,
    sessions: Mapping[Split, Sequence[Demonstration]],
    device: torch.device,
) -> Fig2Budget:
    """Measure the losses after SFT and the rewards of one budget's run."""
    directory = checkpoint_of(run, "sft").path
    model, tokenizer = load(directory, dtype=torch.float32, device=device), Tokenizer.load(directory)
    unseen, known = (session_loss(model, sessions[split]) for split in SPLITS)
    files = sample_evenly(source_files(HELD_OUT_CODE), s.loss_files)
    code = codebase_nll(model, tokenizer, files, window=LENGTH // 2, stride=LENGTH // 4).nats_per_token
    lines = Run.read(run).metrics("rl")
    before, after = sorted((line for line in lines if line.get("evaluation")), key=lambda line: int(line["step"]))
    scored = Run.read(run).metrics("evaluation")
    kept = ("tasks", "solved", "solved_low", "solved_high", f"best/{s.evaluation_samples}")
    by_step = rewards_by_step(run)
    last = np.concatenate([by_step[step] for step in sorted(by_step)[-max(1, s.steps // 4) :]])
    mean = float(last.mean())
    low, high = bootstrap_interval(last, seed=seed) or (mean, mean)
    return Fig2Budget(
        tokens,
        unseen,
        known,
        code,
        float(by_step[min(by_step)].mean()),
        mean,
        low,
        high,
        before["solved"],
        after["solved"],
        _or(after["solved_low"], after["solved"]),
        _or(after["solved_high"], after["solved"]),
        {f"{line['set']}/{key}": line[key] for line in scored for key in kept if key in line},
        durations(run),
    )


def _or(bound: float | None, value: float) -> float:
    return value if bound is None else bound


async def draw_demonstrations(tokenizer: Tokenizer, split: Split, count: int) -> list[Demonstration]:
    """Return completed demonstrations of tasks that no model was trained on, as difficult as training tasks."""
    dialect, demonstrations = dialect_for(tokenizer), list[Demonstration]()
    difficulties = recipe_tables(AGENT)["tasks"]["build"][0]["difficulties"]
    for _, files in nano_tasks(1 << 40, split, HELD_OUT_SEED, difficulties):
        demonstration = await simulate_demonstration(files, dialect)
        if demonstration is not None and not demonstration.deviation:
            demonstrations.append(demonstration)
        if len(demonstrations) == count:
            break
    return demonstrations


@torch.inference_mode()
def session_loss(model: Transformer, sessions: Sequence[Demonstration]) -> float:
    """Return the mean -log p of the tokens under the loss mask."""
    nats, count, device = 0.0, 0, model.head_weight.device
    for session in sessions:
        ids = torch.from_numpy(session.tokens.astype(np.int64)).to(device)
        mask = torch.from_numpy(session.loss_mask[1:]).to(device)
        hidden = model.hidden(ids[None, :-1])[0][mask]
        nats -= token_logprobs(hidden, model.head_weight, ids[1:][mask]).double().sum().item()
        count += int(mask.sum())
    return nats / count


def rewards_by_step(run: Path) -> dict[int, np.ndarray[Any, np.dtype[np.float64]]]:
    """Return mean rewards of the groups of each step: prompts are independent draws, rollouts of one are not."""
    found: dict[int, list[float]] = {}
    with closing(RolloutQueue.open_read_only(RunLayout(run).slots)) as queue:
        for group in queue.progress():
            if group.step is not None:
                totals = [slot.reward["total"] for slot in queue.group(group.id).slots if slot.reward]
                found.setdefault(group.step, []).append(float(np.mean(totals)))
    return {step: np.array(means) for step, means in found.items()}


def durations(run: Path) -> dict[str, float]:
    """Return the seconds of each stage, from its first line of metrics to its last."""
    times: dict[str, list[float]] = {}
    for line in Run.read(run).metrics():
        times.setdefault(line["stage"], []).append(line["time"])
    return {stage: max(found) - min(found) for stage, found in times.items()}


# ------------------------------------------------------------------------------------------------- plot


def build_result(points: Sequence[Fig2Budget], s: Fig2Settings, seconds: Mapping[str, float]) -> StudyResult:
    first, last = points[0], points[-1]
    return StudyResult(
        title="Loss after mid-training and fine-tuning, reward after reinforcement learning",
        conclusion=(
            f"From {budget_name(first.tokens)} to {budget_name(last.tokens)} tokens of mid-training, mostly on agent "
            f"sessions, the loss after the same SFT goes from {first.sessions_loss:.3f} to {last.sessions_loss:.3f} "
            f"nats on demonstrations of other tasks and from {first.code_loss:.3f} to {last.code_loss:.3f} on held-out "
            f"code, and the reward after {s.steps} identical steps of RL from {first.reward:.3f} "
            f"({first.reward_low:.3f} to {first.reward_high:.3f}) to {last.reward:.3f} ({last.reward_low:.3f} to "
            f"{last.reward_high:.3f}), held-out tasks solved from {first.solved:.1%} to {last.solved:.1%}: "
            f"{compare_orders(points)}."
        ),
        columns=(
            "tokens",
            "loss: sessions",
            "known shapes",
            "code",
            "reward: first step",
            "last steps, 95% interval",
            "validation tasks solved: before",
            "after, 95% interval",
        ),
        rows=[_row(point) for point in points],
        panels=panels(points, s),
        data={"budgets": [asdict(point) for point in points], "seconds": dict(seconds)},
        settings=s,
    )


def compare_orders(points: Sequence[Fig2Budget]) -> str:
    """Describe whether the budgets have the same order by loss and by reward."""
    by_loss = sorted(points, key=lambda point: -point.sessions_loss)
    steps = list(pairwise(by_loss))
    if all(worse.reward < better.reward for worse, better in steps):
        apart = by_loss[0].reward_high < by_loss[-1].reward_low
        words = f"at all {len(points)} a lower loss goes with a higher reward"
        return words if apart else f"{words}, though the intervals of the first and the last overlap"
    rising = sum(worse.reward < better.reward for worse, better in steps)
    return f"a lower loss goes with a higher reward in {rising} of {len(steps)} steps between neighbours"


def _row(point: Fig2Budget) -> tuple[str, ...]:
    return (
        budget_name(point.tokens),
        f"{point.sessions_loss:.3f}",
        f"{point.known_sessions_loss:.3f}",
        f"{point.code_loss:.3f}",
        f"{point.first_reward:.3f}",
        f"{point.reward:.3f} ({point.reward_low:.3f} to {point.reward_high:.3f})",
        f"{point.solved_before:.1%}",
        f"{point.solved:.1%} ({point.solved_low:.1%} to {point.solved_high:.1%})",
    )


def panels(points: Sequence[Fig2Budget], s: Fig2Settings) -> list[Panel]:
    def column(key: str, some: Sequence[Fig2Budget]) -> list[float]:
        return [getattr(point, key) for point in some]

    def against(loss: str, label: str) -> Panel:
        some = sorted(points, key=lambda point: float(getattr(point, loss)))
        x = column(loss, some)
        lines = [
            Line("reward", x, column("reward", some), column("reward_low", some), column("reward_high", some), "both"),
            Line(
                "held-out tasks solved",
                x,
                column("solved", some),
                column("solved_low", some),
                column("solved_high", some),
                "both",
            ),
            Line("before RL", x, column("solved_before", some), style="dashed", colour=1),
        ]
        return Panel(Axis(label), Axis(f"after {s.steps} steps of RL", low=0), lines, title="Loss against reward")

    tokens = column("tokens", points)
    losses = {"unseen shapes": "sessions_loss", "known shapes": "known_sessions_loss", "code": "code_loss"}
    return [
        Panel(
            Axis("tokens of mid-training", log=True),
            Axis("loss after SFT, nats per token", low=0),
            [Line(label, tokens, column(key, points), style="both") for label, key in losses.items()],
            title="Budget against loss",
        ),
        against("sessions_loss", "loss after SFT, demonstrations of other tasks"),
        against("code_loss", "loss after SFT, held-out code"),
    ]


if __name__ == "__main__":
    from studies.cli import main

    main("fig2")
