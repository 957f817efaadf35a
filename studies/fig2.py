"""The report's figure of loss against reward: does a lower loss after pretraining mean a higher reward after RL?

    data         tokenizer and corpora of `etude tasks nano-base`
    foundation   a model that has read a little code; the tasks, and the expert sessions to imitate
    BUDGET       for each of three log-spaced budgets: continued pretraining on sessions, drills and code, then the same
                 small SFT on expert sessions, then an identical short run of reinforcement learning

Each is a directory in `place` that anybody could have made: a recipe written there and `etude run` on it, with the
numbers of `recipes/nano-base.toml` and `recipes/nano-rl.toml` but for those in `Settings`. What is there is not made
again. The loss is taken after SFT, on expert sessions in shapes of code that no training task has and on code of the
standard library, of which nothing was read; the reward is that of the last steps, on prompts that come only once.
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
from etude.data.sources import source_files, spread
from etude.errors import InputError
from etude.evaluation.codebase_nll import codebase_nll
from etude.evaluation.held_out import interval
from etude.evaluation.plot import Axis, Line, Panel
from etude.kernels import usable_device
from etude.kernels.loss import token_logprobs
from etude.model.checkpoint import load
from etude.model.transformer import Transformer
from etude.recipe.recipe import load_recipe
from etude.rollouts.queue import Slots
from etude.runs.layout import Place
from etude.runs.run import Artefact, Run
from etude.system.progress import Report
from etude_nano.pod_sessions import Demonstration
from etude_nano.simulated_sessions import rehearse
from etude_nano.source import nano_tasks
from etude_nano.templates import Split
from studies.study import Finding, study
from studies.subprocess_runs import Command, carry_out, recipe_file, run_command

BASE, AGENT = "nano-base.toml", "nano-rl.toml"
LENGTH = 2048  # tokens of a row, everywhere
CODE = ("stdlib/json", "stdlib/logging", "stdlib/email")  # never read: what is read are packages beside torch
OTHERS = 1_500_000_000  # seed of the first task of the measured sessions: no recipe counts so far
SPLITS: tuple[Split, ...] = ("held-out", "train")  # whose shapes were never seen, and whose were
Table = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """For one GPU and 16 cores."""

    budgets: tuple[int, ...] = (10_000_000, 50_000_000, 250_000_000)  # tokens of continued pretraining
    foundation: int = 40_000_000  # tokens of code and drills before it
    practice: int = 80_000  # sessions there are to read,
    sessions: int = 40_000  # those of experts,
    drills: int = 20_000
    code: float = 40.0  # and megabytes
    sources: tuple[str, ...] = ()  # directories the code is from; none given: the packages beside torch
    hidden: int = 192
    layers: int = 6
    rows: int = 64  # of a step of pretraining
    precision: str = "bfloat16"
    compile: bool = True
    experts: int = 320  # sessions to imitate
    imitated: int = 160_000  # tokens of that
    steps: int = 10  # of reinforcement learning
    groups: int = 8  # of a step
    group_size: int = 8
    turns: int = 10  # of a session
    answer: int = 200  # tokens of an answer
    in_flight: int = 64
    workers: int = 2
    held_out: int = 16  # tasks of each set that is measured with, before and after
    samples: int = 4  # of each
    measured: int = 200  # expert sessions and
    files: int = 40  # files of code that the loss is taken on
    at_once: int = 3  # budgets


# Shows that it works, in some minutes on two cores, and nothing else.
TINY = Settings(
    budgets=(4_096, 8_192, 16_384),
    foundation=4_096,
    practice=40,
    sessions=8,
    drills=40,
    code=1.0,
    hidden=64,
    layers=2,
    rows=1,
    precision="float32",
    compile=False,
    experts=8,
    imitated=8_192,
    steps=1,
    groups=1,
    group_size=2,
    turns=1,
    answer=8,
    in_flight=4,
    workers=1,
    held_out=2,
    samples=1,
    measured=4,
    files=2,
    at_once=1,
)


@study("fig2")
def fig2(seed: int, report: Report, settings: Settings | None = None, place: Path | None = None) -> Finding:
    """Does a lower loss after continued pretraining mean a higher reward after reinforcement learning?"""
    if place is None:
        raise InputError("fig2 needs a place to keep its runs")
    s = settings or Settings()
    device = usable_device("auto")
    check(s, device)
    print(f"fig2: {expected(s)}", file=sys.stderr)
    place = place.absolute()
    seconds = make_all(s, seed, place, report)
    tokenizer = Tokenizer.load(place / "data" / "tokenizer")
    sessions = {split: asyncio.run(expert_sessions(tokenizer, split, s.measured)) for split in SPLITS}
    points = [measure(place / name(budget), budget, s, seed, sessions, device) for budget in s.budgets]
    return finding(points, s, seconds)


def check(s: Settings, device: torch.device) -> None:
    if len(s.budgets) < 2 or any(small >= large for small, large in pairwise(s.budgets)):
        raise InputError(f"fig2: budgets are {list(s.budgets)}; expected two or more, each larger than the one before")
    if device.type == "cpu" and s.precision == "bfloat16":
        raise InputError(
            f"fig2 reads {sum(s.budgets) / 1e6:,.0f}M tokens in bfloat16, minutes on a GPU and days on this CPU: run "
            "it where there is a GPU, or with far smaller budgets and --set precision=float32 --set compile=false"
        )


def name(budget: int) -> str:
    """A budget as a word: 48M, 512k."""
    return next((f"{budget / size:g}{word}" for size, word in ((1e6, "M"), (1e3, "k")) if budget >= size), str(budget))


def expected(s: Settings) -> str:
    """How long the parts take, from the rates of an H200 with 16 cores; loading and compiling are a minute or two."""
    rehearsals_s, tokens_s, sessions_s = 2000.0, 2e6, 8.0
    tasks = s.held_out * len(measured_sets(tables_of(AGENT)))
    agent = 60 + (s.steps * s.groups * s.group_size + 2 * tasks * s.samples) / sessions_s
    rounds = math.ceil(len(s.budgets) / s.at_once)
    data = 15 + (s.practice + s.sessions) / rehearsals_s
    foundation = 40 + s.foundation / tokens_s
    budgets = 30 + (sum if rounds > 1 else max)(s.budgets) / tokens_s + rounds * agent
    return (
        f"on an H200 with 16 cores about {data:.0f} s for data, {foundation:.0f} s for the foundation, {budgets:.0f} s "
        f"for budgets of {', '.join(map(name, s.budgets))} tokens with {s.steps} steps of RL each, "
        f"{(data + foundation + budgets) / 60:.0f} minutes in all; what is there already is not made again"
    )


# ------------------------------------------------------------------------------------------------- what is made


def make_all(s: Settings, seed: int, place: Path, report: Report) -> dict[str, float]:
    """Data, foundation, budgets: what is not there yet; the seconds of each that was made."""
    total = 2 + len(s.budgets)

    def telling(before: int) -> Callable[[int, str], None]:
        return lambda done, note: report(before + done, total, note)

    seconds = make_data(s, seed, place / "data", telling(0))
    seconds |= make_runs({"foundation": foundation_recipe(s, seed, place)}, place, 1, telling(1))
    origin = Origin.of(place / "foundation")
    recipes = {name(budget): budget_recipe(s, seed, place, budget, origin) for budget in s.budgets}
    return seconds | make_runs(recipes, place, s.at_once, telling(2))


def make_data(s: Settings, seed: int, out: Path, told: Callable[[int, str], None]) -> dict[str, float]:
    """A tokenizer and corpora, whole or not at all."""
    amounts = {"practice": s.practice, "sessions": s.sessions, "drills": s.drills, "code": s.code, "seed": seed}
    sources = list(s.sources) or [str(Path(torch.__file__).parent.parent)]
    facts = {**amounts, "sources": sources}
    if out.is_dir():
        if (made := json.loads((out / "made.json").read_text(encoding="utf-8"))) != facts:
            raise InputError(f"{out} was made from {made}, not from {facts}; name another directory with --out")
        return {}
    making = out.with_name("data.making")
    shutil.rmtree(making, ignore_errors=True)
    words = ["tasks", "nano-base", str(making), *(word for source in sources for word in ("--from", source))]
    words += [word for key, value in amounts.items() for word in (f"--{key}", str(value))]
    seconds = carry_out({"data": Command(words, out.with_name("data.log"))}, told)
    (making / "made.json").write_text(json.dumps(facts), encoding="utf-8")
    making.rename(out)
    return seconds


def make_runs(
    recipes: Mapping[str, Table], place: Path, at_once: int, told: Callable[[int, str], None]
) -> dict[str, float]:
    """Write recipes and run those that are not through."""
    commands = {}
    for each, table in recipes.items():
        file = place / f"{each}.toml"
        file.write_text(tomli_w.dumps(table), encoding="utf-8")
        if not through(place / each, file):
            commands[each] = run_command(file, place / each)
    before = len(recipes) - len(commands)
    return carry_out(commands, lambda done, note: told(before + done, note), at_once)


def through(out: Path, recipe: Path) -> bool:
    """Whether this very recipe has been run to its end."""
    if not (out / "recipe.toml").is_file():
        return False
    run = Run.read(out)
    return run.recipe == load_recipe(recipe) and all(run.stage_done(stage) for stage in run.recipe.stages)


# ------------------------------------------------------------------------------------------------- recipes


def tables_of(recipe: str) -> Table:
    return tomllib.loads(recipe_file(recipe).read_text(encoding="utf-8"))


def foundation_recipe(s: Settings, seed: int, place: Path) -> Table:
    """A model that has read a little code; and beside it the tasks and experts that all budgets share."""
    base, agent = tables_of(BASE), tables_of(AGENT)
    tokenizer, taught = str(place / "data" / "tokenizer"), [part["corpus"] for part in agent["sft"]["mix"]]
    config = base["init"]["config"] | {"hidden_size": s.hidden, "num_hidden_layers": s.layers}
    return {
        "name": "fig2-foundation",
        "seed": seed,
        "stages": ["init", "tasks", "corpus", "pretrain"],
        "init": base["init"] | {"tokenizer": tokenizer, "dtype": s.precision, "config": config},
        "tasks": {"build": task_sets(s, agent)},
        "corpus": {
            "build": [each for each in agent["corpus"]["build"] if each["name"] in taught],
            "tokenizer": tokenizer,
        },
        "pretrain": reading(base["pretrain"], s, place, s.foundation),
    }


def task_sets(s: Settings, agent: Table) -> list[Table]:
    """The set that is trained on, and those that are measured with."""
    counts = {each: {"count": s.held_out} for each in measured_sets(agent)}
    counts[agent["rl"]["tasks"]] = {"count": max(2 * s.steps * s.groups, 40), "experts": s.experts}
    return [each | counts[each["name"]] for each in agent["tasks"]["build"] if each["name"] in counts]


def measured_sets(agent: Table) -> list[str]:
    found = agent["rl"]["evaluation"]["tasks"]
    return [found] if isinstance(found, str) else list(found)


def reading(table: Table, s: Settings, place: Path, tokens: int) -> Table:
    """A stage of pretraining on the data here, in the proportions of the recipe it is from."""
    mix = [part | {"corpus": str(place / "data" / Path(part["corpus"]).name)} for part in table["mix"]]
    # one shape for all stages, so that they are compiled once; a warm-up that the smallest budget has steps for
    sizes = {"length": LENGTH, "rows": s.rows, "tokens": tokens, "warmup": 0.05}
    return table | sizes | {"mix": mix, "precision": s.precision, "compile": s.compile}


@dataclass(frozen=True)
class Origin:
    """What the budgets have in common."""

    model: Path
    artefacts: Mapping[str, Path]  # sets of tasks and corpora, by name

    @classmethod
    def of(cls, foundation: Path) -> "Origin":
        made = {artefact.name: artefact.path for artefact in Run.read(foundation).artefacts()}
        return cls(checkpoint_of(foundation, "pretrain").path, made)

    def tasks(self, name: str) -> str:
        return str(self.artefacts[f"tasks-{name}"])

    def corpus(self, name: str) -> str:
        return str(self.artefacts[f"corpus-{name}"])


def checkpoint_of(run: Path, stage: str) -> Artefact:
    return [artefact for artefact in Run.read(run).artefacts("checkpoint") if artefact.stage == stage][-1]


def budget_recipe(s: Settings, seed: int, place: Path, budget: int, origin: Origin) -> Table:
    """Continued pretraining, then what is the same for every budget."""
    base, agent = tables_of(BASE), tables_of(AGENT)
    rl = agent["rl"] | {
        "tasks": origin.tasks(agent["rl"]["tasks"]),
        "steps": s.steps,
        "group_size": s.group_size,
        "groups_per_step": s.groups,
        "in_flight": s.in_flight,
        "workers": s.workers,
        "precision": s.precision,
        "checkpoint_every": s.steps,
        "budget": {"turns": s.turns, "answer": s.answer},
        "curriculum": {"hard_weight": 0.0},  # or each budget would be asked other things
        "evaluation": {"tasks": [origin.tasks(each) for each in measured_sets(agent)], "samples": s.samples},
    }
    taught = [part | {"corpus": origin.corpus(part["corpus"])} for part in agent["sft"]["mix"]]
    rl["sampler"] = rl["sampler"] | {"max_streams": s.in_flight, "budget": 64 * s.in_flight}
    return {
        "name": f"fig2-{name(budget)}",
        "seed": seed,
        "stages": ["pretrain", "sft", "rl"],
        "pretrain": reading(base["sft"], s, place, budget) | {"model": str(origin.model)},
        "sft": agent["sft"] | {"mix": taught, "length": LENGTH, "tokens": s.imitated},
        "rl": rl,
    }


# ------------------------------------------------------------------------------------------------- what is measured


@dataclass(frozen=True)
class Budget:
    """One point of the figure. Losses are after SFT, in nats per token; rewards come with their 95% interval."""

    tokens: int
    sessions_loss: float
    known_sessions_loss: float  # on sessions in shapes that training tasks have
    code_loss: float
    first_reward: float
    reward: float
    reward_low: float
    reward_high: float
    solved_before: float
    solved: float
    solved_low: float
    solved_high: float
    sets: Mapping[str, float | None]  # the same for each set of tasks
    seconds: Mapping[str, float]  # of each stage, from its first line of metrics to its last


def measure(
    run: Path,
    tokens: int,
    s: Settings,
    seed: int,
    sessions: Mapping[Split, Sequence[Demonstration]],
    device: torch.device,
) -> Budget:
    directory = checkpoint_of(run, "sft").path
    model, tokenizer = load(directory, dtype=torch.float32, device=device), Tokenizer.load(directory)
    unknown, known = (session_loss(model, sessions[split]) for split in SPLITS)
    files = spread(source_files(CODE), s.files)
    code = codebase_nll(model, tokenizer, files, window=LENGTH // 2, stride=LENGTH // 4).nats_per_token
    lines = Run.read(run).metrics("rl")
    before, after = sorted((line for line in lines if line.get("evaluation")), key=lambda line: int(line["step"]))
    by_step = rewards_by_step(run)
    last = np.concatenate([by_step[step] for step in sorted(by_step)[-max(1, s.steps // 4) :]])
    mean = float(last.mean())
    low, high = interval(last, seed=seed) or (mean, mean)
    return Budget(
        tokens,
        unknown,
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
        {key.removeprefix("set/"): value for key, value in after.items() if key.startswith("set/")},
        durations(run),
    )


def _or(bound: float | None, value: float) -> float:
    return value if bound is None else bound


async def expert_sessions(tokenizer: Tokenizer, split: Split, count: int) -> list[Demonstration]:
    """Sessions of careful experts in tasks that nobody was trained on, as difficult as those of training."""
    dialect, found = dialect_for(tokenizer), list[Demonstration]()
    difficulties = tables_of(AGENT)["tasks"]["build"][0]["difficulties"]
    for _, files in nano_tasks(1 << 40, split, OTHERS, difficulties):
        shown = await rehearse(files, dialect)
        if shown is not None and not shown.odd:
            found.append(shown)
        if len(found) == count:
            break
    return found


@torch.inference_mode()
def session_loss(model: Transformer, sessions: Sequence[Demonstration]) -> float:
    """Mean -log p of what the experts wrote."""
    nats, count, device = 0.0, 0, model.head_weight.device
    for session in sessions:
        ids = torch.from_numpy(session.tokens.astype(np.int64)).to(device)
        taught = torch.from_numpy(session.taught[1:]).to(device)
        hidden = model.hidden(ids[None, :-1])[0][taught]
        nats -= token_logprobs(hidden, model.head_weight, ids[1:][taught]).double().sum().item()
        count += int(taught.sum())
    return nats / count


def rewards_by_step(run: Path) -> dict[int, np.ndarray[Any, np.dtype[np.float64]]]:
    """Mean rewards of the groups of each step: prompts are what was drawn, rollouts of one are not independent."""
    found: dict[int, list[float]] = {}
    with closing(Slots.look(Place(run).slots)) as slots:
        for standing in slots.standings():
            if standing.step is not None:
                totals = [slot.reward["total"] for slot in slots.group(standing.id).slots if slot.reward]
                found.setdefault(standing.step, []).append(float(np.mean(totals)))
    return {step: np.array(means) for step, means in found.items()}


def durations(run: Path) -> dict[str, float]:
    times: dict[str, list[float]] = {}
    for line in Run.read(run).metrics():
        times.setdefault(line["stage"], []).append(line["time"])
    return {stage: max(found) - min(found) for stage, found in times.items()}


# ------------------------------------------------------------------------------------------------- the picture


def finding(points: Sequence[Budget], s: Settings, seconds: Mapping[str, float]) -> Finding:
    first, last = points[0], points[-1]
    return Finding(
        title="Loss after continued pretraining and fine-tuning, reward after reinforcement learning",
        conclusion=(
            f"From {name(first.tokens)} to {name(last.tokens)} tokens of continued pretraining the loss after the same "
            f"SFT goes from {first.sessions_loss:.3f} to {last.sessions_loss:.3f} nats on expert sessions of other "
            f"tasks and from {first.code_loss:.3f} to {last.code_loss:.3f} on held-out code, and the reward after "
            f"{s.steps} identical steps of RL from {first.reward:.3f} ({first.reward_low:.3f} to "
            f"{first.reward_high:.3f}) to {last.reward:.3f} ({last.reward_low:.3f} to {last.reward_high:.3f}), "
            f"tasks solved that were never trained on from {first.solved:.1%} to {last.solved:.1%}: {verdict(points)}."
        ),
        columns=(
            "tokens",
            "loss: sessions",
            "known shapes",
            "code",
            "reward: first step",
            "last steps, 95% interval",
            "other tasks solved: before",
            "after, 95% interval",
        ),
        rows=[_row(point) for point in points],
        panels=panels(points, s),
        data={"budgets": [asdict(point) for point in points], "seconds": dict(seconds)},
        settings=s,
    )


def verdict(points: Sequence[Budget]) -> str:
    """Whether the budgets stand in the same order by loss and by reward."""
    by_loss = sorted(points, key=lambda point: -point.sessions_loss)
    steps = list(pairwise(by_loss))
    if all(worse.reward < better.reward for worse, better in steps):
        apart = by_loss[0].reward_high < by_loss[-1].reward_low
        words = f"at all {len(points)} a lower loss goes with a higher reward"
        return words if apart else f"{words}, though the intervals of the first and the last overlap"
    rising = sum(worse.reward < better.reward for worse, better in steps)
    return f"a lower loss goes with a higher reward in {rising} of {len(steps)} steps between neighbours"


def _row(point: Budget) -> tuple[str, ...]:
    return (
        name(point.tokens),
        f"{point.sessions_loss:.3f}",
        f"{point.known_sessions_loss:.3f}",
        f"{point.code_loss:.3f}",
        f"{point.first_reward:.3f}",
        f"{point.reward:.3f} ({point.reward_low:.3f} to {point.reward_high:.3f})",
        f"{point.solved_before:.1%}",
        f"{point.solved:.1%} ({point.solved_low:.1%} to {point.solved_high:.1%})",
    )


def panels(points: Sequence[Budget], s: Settings) -> list[Panel]:
    def of(key: str, some: Sequence[Budget]) -> list[float]:
        return [getattr(point, key) for point in some]

    def against(loss: str, label: str) -> Panel:
        some = sorted(points, key=lambda point: float(getattr(point, loss)))
        x = of(loss, some)
        lines = [
            Line("reward", x, of("reward", some), of("reward_low", some), of("reward_high", some), "both"),
            Line("other tasks solved", x, of("solved", some), of("solved_low", some), of("solved_high", some), "both"),
            Line("before RL", x, of("solved_before", some), style="dashed", colour=1),
        ]
        return Panel(Axis(label), Axis(f"after {s.steps} steps of RL", low=0), lines, title="Loss against reward")

    tokens = of("tokens", points)
    losses = {"other sessions": "sessions_loss", "known shapes": "known_sessions_loss", "code": "code_loss"}
    return [
        Panel(
            Axis("tokens of continued pretraining", log=True),
            Axis("loss after SFT, nats per token", low=0),
            [Line(label, tokens, of(key, points), style="both") for label, key in losses.items()],
            title="Budget against loss",
        ),
        against("sessions_loss", "loss after SFT, expert sessions of other tasks"),
        against("code_loss", "loss after SFT, held-out code"),
    ]
