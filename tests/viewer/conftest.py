"""Runs for the viewer's tests: a small one with simulated sessions of nano demonstrations, and a large one.

Log-probabilities, versions, times and mistakes are drawn from a seed.
"""

import asyncio
import json
import math
import os
import sqlite3
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from etude.chat.dialects import dialect_for
from etude.chat.dialects.dialect import Dialect
from etude.chat.messages import Message
from etude.chat.tokenizer import train_tokenizer
from etude.evaluation import held_out, statistics
from etude.evaluation.stage_comparison import main_figures, stage_gains
from etude.harness.tools.tool import ToolOutcome
from etude.harness.trace import NO_VERSION, Segment, Step, Trace
from etude.harness.trace_store import SUFFIX, save_trace
from etude.rewards.monitors import HISTORY
from etude.rl import metrics
from etude.rollouts.queue import RolloutQueue
from etude.rollouts.queue_records import Slot
from etude.rollouts.settings import QueueSettings, evaluation_queue
from etude.runs.layout import RunLayout
from etude.runs.service_status import write_copy
from etude.tasks.harbor import read_task
from etude_nano.demonstrator import DemonstratorStyle, ScriptedTurn, demonstration_turns, read_files, workspace_files
from etude_nano.pod_sessions import vocabulary_texts
from etude_nano.simulated_sessions import simulate_session
from etude_nano.source import generate_nano

BEGAN = 1_767_000_000.0  # seconds since the epoch; a date in the pictures


@dataclass(frozen=True)
class Shape:
    """The size of a run."""

    steps: int = 3
    groups: int = 2
    size: int = 4
    held_out: int = 3
    samples: int = 2
    every: int = 2
    seed: int = 0

    @property
    def plan(self) -> QueueSettings:
        return QueueSettings(group_size=self.size, groups_per_step=self.groups, max_staleness=3, in_flight=10_000)


def make_run(directory: Path, shape: Shape | None = None) -> Path:
    """Make a finished run with all kinds of stages, as `etude run` would write it."""
    return _RunMaker(directory, shape or Shape()).make()


class _RunMaker:
    def __init__(self, directory: Path, shape: Shape) -> None:
        self.shape, self.run = shape, directory / "run"
        self.layout = RunLayout(self.run)
        self.layout.make()
        self.random = Random(shape.seed)
        self.numbers = np.random.default_rng(shape.seed)
        tokenizer = train_tokenizer(vocabulary_texts(40), 512)
        tokenizer.save(self.layout.model)
        self.dialect: Dialect = dialect_for(tokenizer)
        self.time = BEGAN
        self.tasks: dict[str, Path] = {}
        count = shape.steps * shape.groups + 2
        for split, number in (("train", count), ("unseen", shape.held_out)):
            generate_nano(directory / split, number, split, 0, (1, 2, 3))
            self.tasks |= {path.parent.name: path.parent for path in sorted((directory / split).glob("*/task.toml"))}
        held_out = [name for name in self.tasks if "-unseen-" in name]
        self.held_out = {f"validation/{name}": name for name in held_out}
        lists = {
            "train": {name: str(path) for name, path in self.tasks.items() if name not in held_out},
            "held_out": {name: str(self.tasks[task]) for name, task in self.held_out.items()},
        }
        self.layout.tasks.write_text(json.dumps(lists))
        self.saved: dict[str, float] = {}  # end of each stage

    def make(self) -> Path:
        shape = self.shape
        self.text_stages()
        names = [name for name in self.tasks if "-train-" in name]
        slots = RolloutQueue(self.layout.slots, shape.plan)
        evaluations = RolloutQueue(self.layout.evaluations, evaluation_queue(shape.plan, shape.samples))
        with closing(slots), closing(evaluations):
            self.measure(evaluations, 0)
            for step in range(1, shape.steps + 1):
                self.step(slots, step, names[(step - 1) * shape.groups : step * shape.groups])
                if step % shape.every == 0 or step == shape.steps:
                    self.measure(evaluations, step)
            slots.add([(names[-1], 0.0)])  # one group is not finished
            ends = [held_out.results(evaluations, step) for step in (0, shape.steps)]
            facts = metrics.stage_facts(self.lines("rl"), slots, ["worker-0 was killed"])
            facts["rise"] = statistics.compare(*ends)
            self.finish(facts, self.evaluate({"sft": ends[0], "rl": ends[1]}))
        return self.run

    def evaluate(self, models: Mapping[str, held_out.Evaluation]) -> dict[str, Any]:
        """Log the stage evaluation as if these results were those of every task set; return its facts."""
        self.saved["rl"] = self.time + 2
        results = {model: dict.fromkeys(("validation", "new", "unseen"), found) for model, found in models.items()}
        scorings = []
        for number, (model, sets) in enumerate(results.items()):
            for name, found in sets.items():
                self.log("evaluation", number, model=model, set=name, **statistics.summarise(found))
                scorings.append(json.dumps({"time": self.time, "set": name, "model": model, "key": model}) + "\n")
        self.layout.scorings.write_text("".join(scorings))
        figures = {
            model: {name: main_figures(statistics.summarise(found)) for name, found in sets.items()}
            for model, sets in results.items()
        }
        scored = dict.fromkeys(("validation", "new", "unseen"), len(models))
        return {"models": figures, "gains": stage_gains(results, "validation"), "scored": scored}

    # -- training on text

    def text_stages(self) -> None:
        (self.run / "recipe.toml").write_text(RECIPE.format(steps=self.shape.steps, size=self.shape.size))
        (self.run / "lock").write_text("")
        self.weights()
        self.saved |= {"init": self.time + 2, "corpus": self.time + 10}
        self.time += 10
        noise = Random(self.shape.seed)  # separate, so that changes here do not affect the rollouts
        for stage, steps, low, high in TEXT:
            for step in range(1, steps + 1):
                loss = low + (high - low) * (1 + step / 6) ** -0.75 + noise.gauss(0, 0.05)
                rate = 9000 + noise.gauss(0, 300)
                drafts = {"mtp_1_kl": loss, "mtp_1_overlap": 0.6 * step / steps} if stage == "mtp" else {}
                self.log(stage, step, loss=loss, tokens=step * 4096, tokens_per_second=rate, **drafts)
                if stage != "sft" and step in (1, 30, 100, 300):
                    self.log(stage, step, tokens=step * 4096, evaluation=True, **self.tested(stage, step, loss + 0.06))
            self.saved[stage] = self.time + 1

    def tested(self, stage: str, step: int, loss: float) -> dict[str, Any]:
        """Return the metrics of held-out text."""
        if stage == "mtp":
            return {"held_out_overlap": 0.02 * step}
        places = {"loss_by_position": [loss - 0.01 * at for at in range(8)]} if stage == "extend" else {}
        return {"held_out_loss": loss, **places}

    def weights(self) -> None:
        """Write a checkpoint that has only a header, which is all that the pages read."""
        checkpoint = self.run / "checkpoints/init-0"
        checkpoint.mkdir(parents=True)
        (checkpoint / "config.json").write_text(json.dumps({"model_type": "qwen3", "num_hidden_layers": 6}))
        header = json.dumps({"__metadata__": {}, "embed": {"shape": [4096, 192]}, "norm": {"shape": [192]}}).encode()
        (checkpoint / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        made = {"kind": "checkpoint", "path": "checkpoints/init-0", "created": written(self.time)}
        (self.run / "lineage.jsonl").write_text(json.dumps(made) + "\n")

    def log(self, stage: str, step: int, /, **values: object) -> None:
        self.time += 0.4 if stage != "rl" else 6.0
        with (self.run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"time": self.time, "stage": stage, "step": step, **values}) + "\n")

    def lines(self, stage: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]
        return [line for line in lines if line["stage"] == stage]

    def finish(self, facts: Mapping[str, Any], evaluation: Mapping[str, Any]) -> None:
        stages: dict[str, Any] = {"init": {"parameters": 3_886_272}, "corpus": {"code": {"train": 11_930_394}}}
        for name, *_ in TEXT:
            stages[name] = {"steps": len(self.lines(name))}
        stages |= {"rl": dict(facts), "evaluation": dict(evaluation)}
        self.saved["evaluation"] = self.time + 2
        state = {
            name: {"done": True, "saved": written(self.saved[name]), "facts": values} for name, values in stages.items()
        }
        (self.run / "state.json").write_text(json.dumps({"format": 1, "stages": state}))
        (self.layout.logs / "deaths.jsonl").write_text(
            json.dumps({"time": BEGAN + 300, "name": "worker-0", "why": "was killed by signal 9"}) + "\n"
        )
        write_copy(self.layout, {"trainer": {"state": "ended", "step": self.shape.steps, "time": time.time()}})

    # -- reinforcement learning

    def skill(self, step: int, task: str = "") -> float:
        """Return the probability that a rollout solves its task; some tasks are harder than others."""
        hard = Random(task).gauss(0, 1.6) if task else 0.0
        return 1 / (1 + math.exp(1.4 + hard - 2.4 * step / max(1, self.shape.steps)))

    def step(self, slots: RolloutQueue, step: int, names: list[str]) -> None:
        slots.add([(name, 0.0) for name in names])
        while (slot := slots.claim("worker-0", 0.0)) is not None:
            if slot.attempt == 1 and self.random.random() < 0.02:
                slots.fail(slot, "sandbox: the pod was lost")
                continue
            self.finish_slot(
                slots, slot, self.layout.traces, slot.task, step - 1 - min(step - 1, self.random.randrange(3))
            )
        groups = slots.take(step - 1)
        assert groups is not None, "there are as many groups as a step takes"
        slots.mark_trained(groups, step)
        slots.record_version(step, step)
        waited = self.random.uniform(1, 5)
        values = {
            "mismatch_numerics_mean": 2e-6,
            "mismatch_numerics_p99": 4e-5,
            "mismatch_staleness_mean": 2e-4 * self.random.uniform(0.7, 1.5) * step**0.3,
            "mismatch_staleness_p99": 4e-3 * self.random.uniform(0.7, 1.5) * step**0.3,
            "version": step,
            "values": {"loss": -0.01, "entropy_seen": 1.1 - 0.5 * step / self.shape.steps, "ratio": 1.0},
            "gradient_norm": self.random.uniform(0.2, 0.9),
            "step_s": 1.5,
            "waited_s": waited,
            "waited_for": {"rollouts": waited},
            "wall_s": waited + 1.9,
            "upload": [
                {
                    "bytes": 240_000 + self.random.randrange(60_000),
                    "seconds": 0.2,
                    "full": step == 1,
                    "changed": 180_000 + step,
                    "values": 3_886_272,
                    "skipped": 0,
                }
            ],
        }
        line = metrics.rollout_facts(groups) | metrics.staleness_facts(groups, step - 1) | metrics.trainer_facts(values)
        line |= metrics.incident_facts(slots, step) | metrics.monitor_facts(slots.trained_rewards(step, HISTORY))
        self.log("rl", step, **line, samplers_idle_s=self.random.uniform(0.2, 1), samplers_seen_s=6.0)

    def measure(self, evaluations: RolloutQueue, step: int) -> None:
        held_out.start(evaluations, step, list(self.held_out))
        while (slot := evaluations.claim("worker-0", 0.0)) is not None:
            task = self.held_out[slot.task.partition("/")[2]]
            self.finish_slot(evaluations, slot, self.layout.evaluation_traces, task, step)
        found = held_out.results(evaluations, step)
        self.log("rl", step, evaluation=True, **statistics.summarise(found))

    def finish_slot(self, slots: RolloutQueue, slot: Slot, directory: Path, task: str, version: int) -> None:
        solved = self.random.random() < self.skill(version, task)
        trace = self.session(task, slot, version, solved)
        path = directory / f"{slot.group:06d}" / f"{slot.number:02d}-{slot.attempt}{SUFFIX}"
        path.parent.mkdir(parents=True, exist_ok=True)
        record = self.record(task, trace, solved)
        save_trace(replace(trace, facts={**trace.facts, "reward": {"total": record["total"]}}), path)
        slots.finish(slot, record, path.relative_to(self.layout.root).as_posix(), trace.versions())

    def session(self, task: str, slot: Slot, version: int, solved: bool) -> Trace:
        files = read_files(self.tasks[task])
        id = f"run/{slot.group:06d}/{slot.number:02d}-{slot.attempt}"
        fallback = [
            ScriptedTurn(Message("assistant", "I do not know how to do this."))
        ]  # for tasks that cannot be simulated without a pod
        for turns in (*(self.turns(files, slot.id * 8 + draw, solved) for draw in range(8)), fallback):
            trace = asyncio.run(
                simulate_session(id, files["instruction.md"], workspace_files(files), turns, self.dialect, task=task)
            )
            if trace is not None:
                break
        assert trace is not None
        if self.random.random() < 0.16 * (1 - self.skill(version)):
            trace = with_broken_call(trace)
        if slot.number == 1 and slot.group % 3 == 1:
            trace = with_summary(trace)
        return self.with_model_data(trace, version)

    def turns(self, files: Mapping[str, str], seed: int, solved: bool) -> list[ScriptedTurn]:
        """Return the demonstration; for an unsolved task without its edit, and ending in a false claim of success."""
        turns = demonstration_turns(files, seed, DemonstratorStyle(mistakes=0.3))
        if solved or len(turns) < 3:
            return turns
        kept = [turn for turn in turns if not any(call.name == "search_replace" for call in turn.message.calls)]
        return [
            *kept[:-1],
            ScriptedTurn(Message("assistant", "I looked at it and everything is fine. All tests pass.")),
        ]

    def with_model_data(self, trace: Trace, version: int) -> Trace:
        """Add log-probabilities, versions and times."""
        segments = []
        for segment in trace.segments:
            made = segment.sampled
            surprise = -self.numbers.gamma(0.35, 1.4 - self.skill(version), len(made))
            logprobs = np.where(made, surprise, 0).astype(np.float32)
            versions = np.where(made, version, NO_VERSION).astype(np.int32)
            if version and self.random.random() < 0.15:  # new weights arrived during the session
                versions[: len(versions) * 3 // 4] -= made[: len(versions) * 3 // 4]
            segments.append(replace(segment, logprobs=logprobs, raw_logprobs=logprobs, versions=versions))
        now, steps = 0.0, []
        for step in trace.steps:
            outcomes = tuple(replace(each, seconds=self.random.uniform(0.001, 0.6)) for each in step.outcomes)
            now += 0.004 * (step.span[1] - step.span[0]) if step.kind in ("turn", "summary") else 0.0
            now += sum(each.seconds for each in outcomes)
            steps.append(replace(step, outcomes=outcomes, time=now))
        cost = replace(trace.cost, wall_s=now, model_s=now * 0.6, pod_s=now * 0.3)
        return replace(trace, segments=tuple(segments), steps=tuple(steps), cost=cost)

    def record(self, task: str, trace: Trace, solved: bool) -> dict[str, Any]:
        effort = -0.02 * trace.cost.turns - 0.0004 * trace.cost.sampled
        parts = {
            "correctness": float(solved),
            "effort_spent": effort,
            "malformed_calls": -0.1 * trace.errors["malformed_call"],
        }
        return {
            "total": sum(parts.values()),
            "parts": parts,
            "hack": "",
            "score": float(solved),
            "solved": solved,
            "category": read_task(self.tasks[task]).category,
            "ending": trace.ending,
            "cost": asdict(trace.cost),
            "errors": dict(trace.errors),
            "segments": len(trace.segments),
            "tokens": sum(map(len, trace.segments)),
            "made": trace.cost.sampled,
            "pod_s": trace.cost.pod_s,
            "seconds": {"ground": self.random.uniform(0.1, 0.4), "session": trace.cost.wall_s, "grading": 0.5},
            "evidence": {
                "correctness": {"value": float(solved), "rewards": {"reward": float(solved)}},
                "effort_spent": {"value": effort, "units": -effort},
            },
            "habits": {"edit_rate": 1.0, "broken_calls": float(trace.errors["malformed_call"] > 0)},
        }


def with_broken_call(trace: Trace) -> Trace:
    """Make the first call malformed."""
    for at, step in enumerate(trace.steps):
        if step.message.calls:
            call = replace(
                step.message.calls[0],
                arguments=None,
                status="bad_json",
                raw='{"name": "read_file", "arguments": {"target_file": "',
                problem="the arguments are not valid JSON: the text ends inside a string",
            )
            outcome = ToolOutcome("error: the arguments are not valid JSON", "malformed_call")
            message = replace(step.message, calls=(call, *step.message.calls[1:]))
            broken = replace(step, message=message, outcomes=(outcome, *step.outcomes[1:]))
            return replace(trace, steps=(*trace.steps[:at], broken, *trace.steps[at + 1 :]))
    return trace


def with_summary(trace: Trace) -> Trace:
    """Insert a summary in the middle of a session; a new segment follows it."""
    turns = [at for at, step in enumerate(trace.steps) if step.kind == "turn"]
    if len(turns) < 3:
        return trace
    middle, whole = turns[len(turns) // 2], trace.segments[0]
    cut = trace.steps[middle].span[0]
    first = Segment("start", *(getattr(whole, name)[:cut] for name in ARRAYS))
    second = Segment("summary", *(getattr(whole, name)[cut:] for name in ARRAYS))
    asked = Step("summary-request", Message("user", "Please summarize the conversation."), 0, (cut - 2, cut - 1))
    said = Step(
        "summary",
        Message("assistant", "I have read the files and know what is wrong; the change comes next."),
        0,
        (cut - 1, cut),
    )
    again = Step("prompt", Message("user", "The request, and the summary so far."), 1, (0, 1), copied=True)
    rest = [replace(step, segment=1, span=(step.span[0] - cut, step.span[1] - cut)) for step in trace.steps[middle:]]
    return replace(
        trace,
        segments=(first, second),
        steps=(*trace.steps[:middle], asked, said, again, *rest),
        cost=replace(trace.cost, summaries=1),
    )


ARRAYS = ("tokens", "sampled", "logprobs", "raw_logprobs", "versions")

RECIPE = """\
name = "nano"
seed = 0
stages = ["init", "corpus", "pretrain", "mtp", "extend", "sft", "rl", "evaluation"]

[[tasks.build]]
name = "train"
source = "nano"

[[tasks.build]]
name = "validation"
source = "nano"

[[tasks.build]]
name = "new"
source = "nano"

[[tasks.build]]
name = "unseen"
source = "nano"
split = "unseen"

[pretrain]
mix = [{{ corpus = "code", weight = 1.0 }}]

[rl]
tasks = "train"
steps = {steps}
group_size = {size}
groups_per_step = 2

[evaluation]
validation = "validation"
test = ["new", "unseen"]
"""

TEXT = (  # stage, steps, last and first loss
    ("pretrain", 300, 2.1, 6.2),
    ("mtp", 30, 2.0, 7.0),
    ("extend", 30, 2.0, 2.2),
    ("sft", 60, 0.35, 2.0),
)


def written(time: float) -> str:
    """Format a time as a run writes it."""
    return datetime.fromtimestamp(time, UTC).isoformat(timespec="seconds")


def make_large(directory: Path, rollouts: int = 10_000, size: int = 8) -> Path:
    """Make a run with many rollouts, without traces, and a line of metrics per step."""
    run = directory / "large"
    layout = RunLayout(run)
    layout.make()
    (run / "recipe.toml").write_text(RECIPE.format(steps=rollouts // size // 8, size=size).replace("nano", "large"))
    RolloutQueue(layout.slots, QueueSettings(group_size=size)).close()
    random = Random(0)
    categories = ("debugging", "feature", "refactor", "docs", "testing", "review", "devops", "migration", "question")
    rows, groups = [], []
    for group in range(1, rollouts // size + 1):
        groups.append((group, f"repo-{group % 97}/task-{group:05d}", (group - 1) // 8 + 1))
        for number in range(size):
            solved = random.random() < 0.2 + 0.5 * group * size / rollouts
            errors = {"environment": random.randrange(1, 4)} if random.random() < 0.2 else {}
            cost = {
                "turns": random.randrange(2, 40),
                "calls": random.randrange(2, 60),
                "thinking": 300,
                "call": 200,
                "final": 40,
            }
            evidence = {f"term_{at}": {"value": 0.0, "found": [], "calls": 12} for at in range(11)}
            reward = {
                "total": float(solved) - random.random() / 10,
                "parts": {"correctness": float(solved), "effort_spent": -0.05},
                "solved": solved,
                "score": float(solved),
                "category": categories[group % len(categories)],
                "ending": random.choice(["final"] * 8 + ["turns", "context"]),
                "cost": cost,
                "errors": errors,
                "made": random.randrange(200, 9000),
                "seconds": {"ground": 1.0, "session": random.uniform(2, 400), "grading": 3.0},
                "evidence": evidence,
            }
            rows.append(
                (
                    group,
                    number,
                    "ready",
                    1,
                    json.dumps(reward),
                    group // 8,
                    group // 8,
                    f"traces/{group:06d}/{number:02d}-1.trace",
                )
            )
    with closing(sqlite3.connect(layout.slots)) as db, db:
        db.executemany("INSERT INTO groups (id, task, step) VALUES (?, ?, ?)", groups)
        db.executemany(
            "INSERT INTO slots (grp, number, state, attempt, reward, oldest, newest, trace) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            rows,
        )
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1, rollouts // size // 8 + 1):
            values = {f"value/{name}": random.random() for name in range(60)}
            file.write(
                json.dumps(
                    {
                        "time": BEGAN + step,
                        "stage": "rl",
                        "step": step,
                        "reward": random.random(),
                        "reward_best": 1.0,
                        **values,
                    }
                )
                + "\n"
            )
    return run


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; tests that change something copy it."""
    return make_run(tmp_path_factory.mktemp("viewer"))


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 10,000 rollouts."""
    return make_large(tmp_path_factory.mktemp("viewer"))


@pytest.fixture(autouse=True)
def _own_validation_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Do not read this machine's cache of validation reports."""
    monkeypatch.setitem(os.environ, "XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
