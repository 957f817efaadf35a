"""The demo, made small, is killed in every stage and resumed: it ends as if it had not been interrupted.

Every stage before rl is a function of recipe and seed, so its outputs are compared byte for byte with those of an
uninterrupted run. rl depends on timing; there, nothing may be lost, trained on twice or left running.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from etude.errors import InputError
from etude.evaluation.scorings import count_scorings
from etude.files import content_digest
from etude.harness.trace_store import load_trace
from etude.model import load
from etude.recipe.recipe import load_recipe
from etude.rollouts.queue import RolloutQueue
from etude.runs.layout import RunLayout
from etude.runs.run import Run

ROOT = Path(__file__).resolve().parents[2]
STAGES = ("base", "tasks", "corpus", "pretrain", "mtp", "extend", "sft", "control", "rl", "evaluation")
STEPS = {"pretrain": 8, "mtp": 4, "extend": 2, "sft": 4, "rl": 2}
EVALUATED = ("pretrain", "mtp", "extend", "rl")  # before the first step and after the last
PACKAGES = ("kernels", "model", "tasks", "train", "weights")  # of our own source: a corpus that is built in a second
MODELS = ("base", "pretrain", "sft", "control", "rl")  # of the demo
LIMIT_S = 300  # for one stage, on a busy machine
SETTLE_S = 60  # until the processes of a finished run are gone: the zygote of pods waits for half a minute


def small_demo(directory: Path) -> Path:
    """Return recipes/nano.toml with smaller numbers: the same stages, the same tables."""
    for package in PACKAGES:
        (directory / "code" / package).mkdir(parents=True, exist_ok=True)
        for file in (ROOT / "etude" / package).glob("*.py"):
            shutil.copy(file, directory / "code" / package)
    recipe = tomllib.loads((ROOT / "recipes/nano.toml").read_text(encoding="utf-8"))
    assert tuple(recipe["stages"]) == STAGES, "the demo has other stages now: add kills for them"
    recipe["base"]["source"] = str(ROOT / "base/nano")
    for tasks, count in zip(recipe["tasks"]["build"], (12, 2, 2, 2), strict=True):
        tasks["count"] = count
    recipe["tasks"]["build"][0]["demonstrations"] = 24
    for corpus in recipe["corpus"]["build"][:2]:
        corpus["sources"] = ["./code"]
    short = {"max_tokens": 2048, "window": 512}
    recipe["pretrain"] |= {"rows": 2, "length": 512, "tokens": STEPS["pretrain"] * 2 * 512}
    recipe["pretrain"]["held_out"] |= short
    recipe["mtp"] |= {"rows": 2, "length": 512, "tokens": STEPS["mtp"] * 2 * 512, "checkpoint_every": 2}
    recipe["mtp"]["held_out"] |= short
    recipe["extend"] |= {"rows": 1, "tokens": STEPS["extend"] * recipe["extend"]["length"], "checkpoint_every": 1}
    recipe["extend"]["held_out"] |= {"max_tokens": 4096, "long_rows": 1}
    recipe["sft"] |= {"rows": 1, "tokens": STEPS["sft"] * recipe["sft"]["length"], "checkpoint_every": 2}
    recipe["rl"] |= {"steps": STEPS["rl"], "groups_per_step": 2, "group_size": 2, "in_flight": 4}
    recipe["rl"] |= {"checkpoint_every": STEPS["rl"]}  # so that a kill after the first step loses it
    recipe["rl"] |= {"informative_groups": False}  # groups that are alike would use up the few prompts
    recipe["rl"]["budget"] |= {"turns": 3, "max_turn_tokens": 64}
    recipe["evaluation"] |= {"max_tasks": 2, "samples": 2, "validation_samples": 1}
    path = directory / "demo.toml"
    path.write_text(tomli_w.dumps(recipe), encoding="utf-8")
    return path


# ------------------------------------------------------------------------------------------- when to kill


def lines(file: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a file that may still be written."""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def lineage(run: Path) -> str:
    """Return the complete lines of the lineage."""
    file = run / "lineage.jsonl"
    return "".join(line for line in file.read_text().splitlines(True) if line.endswith("\n")) if file.exists() else ""


def done(run: Path) -> dict[str, Any]:
    """Return the finished stages, with their facts."""
    state = run / "state.json"
    stages = json.loads(state.read_text(encoding="utf-8"))["stages"] if state.exists() else {}
    return {stage: entry for stage, entry in stages.items() if entry["done"]}


def exists(name: str) -> Callable[[Path], bool]:
    return lambda run: (run / name).exists()


def stepped(stage: str, step: int) -> Callable[[Path], bool]:
    return lambda run: any(line["stage"] == stage and line["step"] >= step for line in lines(run / "metrics.jsonl"))


def evaluating(step: int, model: str = "") -> Callable[[Path], bool]:
    """Return a check that some sessions of the validation after a step, or of a model's evaluation, are scored, and
    others are not."""

    def now(run: Path) -> bool:
        queue = (RunLayout(run).evaluation_of(model) if model else RunLayout(run)).evaluations
        with suppress(InputError), closing(RolloutQueue.open_read_only(queue)) as table:  # InputError: not made yet
            groups = table.progress(f"{step:06d}/")
            return 0 < sum(group.ready for group in groups) < sum(group.size for group in groups)
        return False

    return now


# In the middle of each stage: part of it is finished, part is not.
KILLS: tuple[tuple[str, Callable[[Path], bool]], ...] = (
    ("base", exists("recipe.toml")),
    ("tasks", exists("artefacts/tasks-train")),
    ("corpus", exists("artefacts/corpus-code")),
    ("pretrain", stepped("pretrain", 6)),  # its last checkpoint is the one at half of the steps
    ("mtp", stepped("mtp", 3)),
    ("extend", exists("checkpoints/extend-1")),
    ("sft", stepped("sft", 3)),
    ("control", lambda run: stepped("rl", 1)(run / "control")),
    ("rl", evaluating(0)),
    ("rl", stepped("rl", 1)),
    ("rl", evaluating(2)),
    ("evaluation", evaluating(0, "base")),
    ("evaluation", evaluating(0, "rl")),
)


# ------------------------------------------------------------------------------------------- running and killing


@contextmanager
def started(recipe: Path, run: Path, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start `etude run` as a user would; its child processes inherit a variable that names the run."""
    command = [sys.executable, "-m", "etude.cli", "run", str(recipe), "--out", str(run), *more]
    with open(f"{run}.out", "ab") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env={**os.environ, "WHOLE_RUN": str(run)}, start_new_session=True
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def finish(recipe: Path, run: Path, *more: str) -> None:
    with started(recipe, run, *more) as process:
        code = process.wait(LIMIT_S)
    assert code == 0, output(run)


def output(run: Path) -> str:
    return Path(f"{run}.out").read_text(encoding="utf-8", errors="replace")[-3000:]


def kill_at(recipe: Path, run: Path, moment: Callable[[Path], bool], delay: float, stages: int = 1) -> None:
    """Start or resume the run, and kill it when `moment` is true, at most so many stages later."""
    deadline = time.monotonic() + stages * LIMIT_S
    with started(recipe, run, "--resume") as process:
        while not moment(run):
            assert process.poll() is None, output(run)
            assert time.monotonic() < deadline, output(run)
            time.sleep(0.002)
        time.sleep(delay)
        assert process.pid in processes_of(run)
        process.kill()
        assert process.wait() == -signal.SIGKILL, output(run)


def processes_of(run: Path) -> dict[int, str]:
    """Return every process that this run started, or that works in its directory."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z":
                continue
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            marked = f"WHOLE_RUN={run}\0".encode() in (entry / "environ").read_bytes() + b"\0"
            if marked or str(run) in command or Path(os.readlink(entry / "cwd")).is_relative_to(run):
                found[int(entry.name)] = command
    return found


# ------------------------------------------------------------------------------------------- checks


def check_metrics(run: Path) -> None:
    """Check that every step and every evaluation is logged once."""
    records = lines(run / "metrics.jsonl")
    for stage, steps in STEPS.items():
        own = [record for record in records if record["stage"] == stage]
        assert [each["step"] for each in own if not each.get("evaluation")] == [*range(1, steps + 1)], stage
        measured = [each["step"] for each in own if each.get("evaluation")]
        assert measured == ([0, steps] if stage in EVALUATED else []), stage
    scored = [(record["model"], record["set"]) for record in records if record["stage"] == "evaluation"]
    assert scored == [(model, name) for model in MODELS for name in ("validation", "new", "unseen")]
    assert count_scorings(RunLayout(run)) == {"validation": 4 + len(MODELS), "new": len(MODELS), "unseen": len(MODELS)}


def check_same_up_to_rl(run: Path, uninterrupted: Path) -> None:
    """Check that artefacts are identical to the byte, and metrics equal."""
    made = {
        artefact.name: artefact for artefact in Run.read(run).artefacts() if artefact.stage not in ("control", "rl")
    }
    expected = {artefact.name: artefact for artefact in Run.read(uninterrupted).artefacts()}
    assert made.keys() == expected.keys()
    # The manifest of this corpus names its source, which is inside the run; checkpoints trained on it are compared.
    differing = [name for name in made if made[name].digest != expected[name].digest and name != "corpus-experts"]
    assert differing == []

    def measured(path: Path) -> list[dict[str, Any]]:
        timing = ("time", "tokens_per_second")
        records = [record for record in lines(path / "metrics.jsonl") if record["stage"] not in ("rl", "evaluation")]
        return [{key: value for key, value in record.items() if key not in timing} for record in records]

    assert measured(run) == measured(uninterrupted)


def check_rl(run: Path) -> None:
    """Check that no prompt was trained on twice, no group is missing, and the metrics are of the steps that count."""
    layout = RunLayout(run)
    own = [record for record in lines(run / "metrics.jsonl") if record["stage"] == "rl"]
    records = {record["step"]: record for record in own if not record.get("evaluation")}
    with closing(RolloutQueue.open_read_only(layout.slots)) as table:
        trained = table.trained()
        assert len({task for task, _ in trained}) == len(trained), "a prompt was trained on twice"
        assert Counter(step for _, step in trained) == dict.fromkeys(range(1, STEPS["rl"] + 1), 2)
        for step in range(1, STEPS["rl"] + 1):
            facts = json.loads((layout.steps / f"{step:06d}.json").read_text(encoding="utf-8"))
            groups = table.groups(facts["groups"])
            assert {group.task for group in groups} == {task for task, at in trained if at == step}
            assert records[step]["wall_s"] == facts["wall_s"], "the metrics are of a step that was taken again"
            for slot in (slot for group in groups for slot in group.slots):
                assert load_trace(layout.root / slot.trace).segments
                assert slot.reward is not None
                assert slot.oldest_step is not None
                assert 0 <= step - 1 - slot.oldest_step <= 4, "staler than allowed"
    load(run / "checkpoints" / f"rl-{STEPS['rl']}")


def check_nothing_left(run: Path) -> None:
    """Check that no process, pod or draft is left."""
    deadline = time.monotonic() + SETTLE_S
    while (alive := processes_of(run)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert alive == {}
    for pods in (RunLayout(run).pods, RunLayout(run).evaluation_of("base").pods):
        assert (pods / "pods").is_dir()
        assert [*pods.glob("pods/*"), *pods.glob("owners/*"), *pods.glob("memory-*/*")] == []
    assert str(run) not in Path("/proc/self/mountinfo").read_text()
    drafts = [*run.glob(".*"), *run.glob("artefacts/.*"), *run.glob("checkpoints/.*"), *run.glob("rl/.*")]
    assert drafts == []
    assert list(RunLayout(run).partial.iterdir()) == []


@pytest.mark.slow
def test_the_demo_killed_in_every_stage_ends_with_the_same_result(tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    uninterrupted, run = tmp_path / "uninterrupted", tmp_path / "killed"
    recipe = small_demo(tmp_path)
    # the stages after sft are not compared
    kill_at(recipe, uninterrupted, lambda run: "sft" in done(run), 0, stages=STAGES.index("control"))
    found: list[tuple[str, dict[str, Any]]] = []
    for stage, moment in KILLS:
        kill_at(recipe, run, moment, rng.uniform(0, 0.2) if stage in STEPS else 0)
        assert list(done(run)) == list(STAGES[: STAGES.index(stage)]), f"it was not in {stage} when it was killed"
        found.append((lineage(run), done(run)))
    finish(recipe, run, "--resume")

    assert set(done(run)) == set(STAGES)
    for made, stages in found:  # what was finished at a kill is unchanged, and was not made again
        assert lineage(run).startswith(made)
        assert stages.items() <= done(run).items()
    names = [record["name"] for record in lines(run / "lineage.jsonl")]
    assert len(set(names)) == len(names)
    assert all(content_digest(each.path) == each.digest for each in Run.read(run).artefacts())
    check_metrics(run)
    check_same_up_to_rl(run, uninterrupted)
    check_rl(run)
    check_nothing_left(run)


def test_a_changed_key_of_a_started_stage_is_named_and_refused(tmp_path: Path) -> None:
    recipe, run = load_recipe(small_demo(tmp_path)), tmp_path / "run"
    with Run.create_or_resume(run, recipe) as started:
        for stage in STAGES[:-2]:
            started.finish_stage(stage)
    changes = {
        "count = 12\n": ("count = 13\n", "tasks.build[train].count: 12 -> 13"),
        "tokens = 8192\n": ("tokens = 8191\n", "pretrain.tokens: 8192 -> 8191"),
        'layout = "repository"\n': ("", 'corpus.build[code-long].layout: "repository" -> "file"'),
        'corpus = "experts"': ('corpus = "code"', 'sft.mix[0].corpus: "experts" -> "code"'),
    }
    text = (tmp_path / "demo.toml").read_text(encoding="utf-8")
    for old, (new, words) in changes.items():
        assert old in text
        (tmp_path / "other.toml").write_text(text.replace(old, new, 1), encoding="utf-8")
        with pytest.raises(InputError, match="was started with another recipe") as refused:
            Run.create_or_resume(run, load_recipe(tmp_path / "other.toml"), resume=True)
        assert str(refused.value).splitlines()[1:] == [f"    {words}"]
    (tmp_path / "other.toml").write_text(text.replace("group_size = 2\n", "group_size = 4\n"), encoding="utf-8")
    Run.create_or_resume(run, load_recipe(tmp_path / "other.toml"), resume=True).close()  # rl has not started
