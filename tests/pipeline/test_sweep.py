"""Sweeps: arms and seeds, shared stages, comparison on the same tasks, and whole sweeps in processes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from etude.cli import app
from etude.errors import EtudeError, InputError
from etude.evaluation import held_out
from etude.evaluation.run_results import BEFORE_RL, measured_sets, task_results
from etude.pipeline.shared_stages import shared_stages
from etude.pipeline.sweep import Sweep, SweepOutcome, make_arms, parse_seeds, plan_sweep, split_values
from etude.pipeline.sweep_report import conclusions, earlier_pairs, find_variance, sets_of, summarize_sweep
from etude.recipe.recipe import Recipe, load_recipe
from etude.rollouts.queue import RolloutQueue
from etude.rollouts.settings import QueueSettings, evaluation_queue
from etude.runs.run import Run

RECIPE = """
name = "swept"
stages = ["base", "tasks", "corpus", "pretrain", "sft", "rl", "evaluation"]
[base]
source = "model"
[[tasks.build]]
name = "train"
source = "nano"
count = 30
demonstrations = 4
[[tasks.build]]
name = "validation"
source = "nano"
seed = 500_000
count = 12
[[tasks.build]]
name = "unseen"
source = "nano"
seed = 700_000
count = 8
[[corpus.build]]
name = "demonstrations"
sources = ["demonstrations:train"]
chat = true
[[corpus.build]]
name = "code"
sources = ["code"]
[pretrain]
mix = [{ corpus = "code" }]
tokens = 1000
length = 64
[sft]
mix = [{ corpus = "demonstrations" }]
tokens = 1000
length = 64
[rl]
tasks = "train"
steps = 2
window = 8192
[evaluation]
validation = "validation"
test = ["unseen"]
samples = 4
validation_samples = 4
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "swept.toml").write_text(RECIPE)
    return tmp_path / "swept.toml"


def write_evaluation(
    run: Path, step: int, sets: dict[str, int], rate: Callable[[str, int], float], model: str = ""
) -> None:
    """Write the evaluation of a step in RL, or of a model; `rate` gives the solve rate of a set's task."""
    path = run / (f"evaluation/{model}" if model else "rl") / "evaluations.sqlite"
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng([step, *run.name.encode()])
    with closing(RolloutQueue(path, evaluation_queue(QueueSettings(), 4))) as queue:
        names = {f"{name}/task-{number}": (name, number) for name, size in sets.items() for number in range(size)}
        held_out.start(queue, step, names)
        while (slot := queue.claim("worker", 0.0)) is not None:
            solved = bool(rng.random() < rate(*names[slot.task.partition("/")[2]]))
            queue.finish(slot, {"total": float(solved), "solved": solved, "score": float(solved)}, "t", (step, step))


def fake_run(run: Path, recipe: Recipe, rate: Callable[[str, int], float], before: float = 0.3) -> None:
    """Write the run directory of a finished run, with the results of its evaluations."""
    with Run.create_or_resume(run, recipe) as opened:
        for stage in recipe.stages:
            if stage == "rl":
                with opened.checkpoint("rl", 2) as directory:
                    (directory / "weights").write_text(run.name)
            opened.finish_stage(stage)
    write_evaluation(run, 0, {"validation": 12}, lambda name, number: before)
    write_evaluation(run, 2, {"validation": 12}, rate)
    write_evaluation(run, 0, {"validation": 12, "unseen": 8}, rate, "rl")


def fake_sweep(recipe: Path, out: Path, seeds: str, rates: dict[str, float]) -> Sweep:
    """Return a sweep over the learning rate whose runs are finished, with these solve rates."""
    plan = plan_sweep(recipe, [f"rl.learning_rate={','.join(rates)}"], [], seeds, out, None)
    for run in plan.runs:
        value = rates[run.arm.name.partition("=")[2]]
        fake_run(run.path, run.recipe, lambda name, number, value=value: value)  # type: ignore[misc]
    return plan


# ------------------------------------------------------------------------------------------- arms and names


def test_arms_are_all_combinations_and_controls_change_one_thing() -> None:
    arms = make_arms(["rl.learning_rate=1e-4,3e-4", "sft.tokens=1,2", "rl.steps=9"], ["rl.group_size=4"])
    assert [arm.name for arm in arms] == [
        "rl.learning_rate=1e-4,sft.tokens=1",
        "rl.learning_rate=1e-4,sft.tokens=2",
        "rl.learning_rate=3e-4,sft.tokens=1",
        "rl.learning_rate=3e-4,sft.tokens=2",
        "control:rl.group_size=4",
    ]
    assert all("rl.steps=9" in arm.overrides for arm in arms)
    assert arms[-1].overrides == (*arms[0].overrides, "rl.group_size=4")
    placebo = make_arms(["rl.steps=3"], ["placebo"])[-1]
    assert (placebo.name, placebo.overrides) == ("control:placebo", ("rl.steps=3", "rl.control=placebo"))
    assert [arm.name for arm in make_arms([], [])] == ["recipe"]


def test_values_are_split_at_commas_outside_of_brackets_and_quotes() -> None:
    assert split_values("a.b = 1, 2") == ["a.b=1", "a.b=2"]
    assert split_values("a=[1, 2],[3]") == ["a=[1, 2]", "a=[3]"]
    assert split_values('a="x,y",z') == ['a="x,y"', "a=z"]
    assert split_values("a={b=1,c=2}") == ["a={b=1,c=2}"]
    for wrong in ("a", "=1", "a=1,,2", "a="):
        with pytest.raises(InputError, match="expected KEY=VALUE"):
            split_values(wrong)


def test_seeds_and_names_are_not_settings_of_arms() -> None:
    for setting in ("seed=1,2", "name=other"):
        with pytest.raises(InputError, match=r"a sweep sets (seed|name) itself"):
            split_values(setting)


def test_seeds_are_ranges_and_lists() -> None:
    assert parse_seeds("0..2") == [0, 1, 2]
    assert parse_seeds("7") == [7]
    assert parse_seeds("0,3,5..6,3") == [0, 3, 5, 6]
    for wrong in ("", "a", "2..0", "-1"):
        with pytest.raises(InputError, match="expected seeds"):
            parse_seeds(wrong)


def test_every_run_has_a_name_that_says_what_it_is(recipe: Path, tmp_path: Path) -> None:
    plan = plan_sweep(recipe, ["rl.learning_rate=1e-4,3e-4"], ["sft.tokens=2000"], "0..1", tmp_path / "out", None)
    assert [run.name for run in plan.runs] == [
        "rl.learning_rate=1e-4,seed=0",
        "rl.learning_rate=3e-4,seed=0",
        "control-sft.tokens=2000,seed=0",
        "rl.learning_rate=1e-4,seed=1",
        "rl.learning_rate=3e-4,seed=1",
        "control-sft.tokens=2000,seed=1",
    ]
    assert [run.recipe.seed for run in plan.runs] == [0, 0, 0, 1, 1, 1]
    assert plan.runs[2].recipe.sft is not None
    assert plan.runs[2].recipe.sft.tokens == 2000
    with pytest.raises(InputError, match=r"rl\.learning_rate"):
        plan_sweep(recipe, ["rl.learning_rate=1e-4,-1"], [], "0", tmp_path / "out", None)
    with pytest.raises(InputError, match="--stage mtp: the stages of the recipe are base"):
        plan_sweep(recipe, [], [], "0", tmp_path / "out", "mtp")
    with pytest.raises(InputError, match="two combinations have the same name"):
        plan_sweep(recipe, ["rl.steps=2,2"], [], "0", tmp_path / "out", None)


# ------------------------------------------------------------------------------------------- shared stages


def test_runs_share_the_stages_before_the_first_difference(recipe: Path) -> None:
    def shared(*overrides: str) -> tuple[str, ...]:
        return shared_stages(load_recipe(recipe), load_recipe(recipe, overrides))

    everything = ("base", "tasks", "corpus", "pretrain", "sft")  # RL keeps more than artefacts, so it is not copied
    assert shared("name=other") == everything
    assert shared("rl.learning_rate=0.5") == everything
    assert shared("sft.tokens=2000") == everything[:-1]
    assert shared("pretrain.tokens=2000") == everything[:3]
    assert shared("base.dtype=bfloat16") == ()
    assert shared("seed=1") == ()
    assert shared("evaluation.max_tasks=3") == ()  # training data may depend on what is measured
    # The checkpoints of sft say how the model is used, which the rl table sets.
    assert shared("rl.window=16384") == everything[:-1]


# ------------------------------------------------------------------------------------------- results


def test_the_results_of_a_run_are_read_by_model_set_and_task(recipe: Path, tmp_path: Path) -> None:
    fake_run(tmp_path / "run", load_recipe(recipe), lambda name, number: float(name == "unseen"), before=0.0)
    found = task_results(tmp_path / "run")
    assert list(found) == [BEFORE_RL, "rl"]
    assert {name: len(tasks) for name, tasks in found["rl"].items()} == {"validation": 12, "unseen": 8}
    assert found["rl"]["unseen"]["task-3"] == [1.0] * 4
    assert found["rl"]["validation"]["task-3"] == [0.0] * 4
    sets = measured_sets(json.loads(load_recipe(recipe).model_dump_json(exclude_none=True)), "validation")
    assert [(each.name, each.tasks, each.samples, each.is_validation) for each in sets] == [
        ("validation", 12, 4, True),
        ("unseen", 8, 4, False),
    ]


def test_models_that_are_evaluated_for_themselves_are_read_in_pipeline_order(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    fake_run(run, load_recipe(recipe), lambda name, number: 1.0)
    for model, rate in (("base", 0.0), ("sft", 1.0)):
        write_evaluation(run, 0, {"validation": 3, "unseen": 2}, lambda name, number, rate=rate: rate, model)  # type: ignore[misc]
    found = task_results(run)
    assert list(found) == [BEFORE_RL, "base", "sft", "rl"]
    assert found["sft"]["validation"] == {f"task-{number}": [1.0] * 4 for number in range(3)}
    table = {"validation": "validation", "test": ["unseen"], "samples": 16, "validation_samples": 4, "max_tasks": 10}
    build = [{"name": "validation", "count": 12}, {"name": "unseen", "count": 8}]
    sets = measured_sets({"tasks": {"build": build}, "evaluation": table})
    assert [(each.name, each.tasks, each.samples, each.is_validation) for each in sets] == [
        ("validation", 10, 4, True),
        ("unseen", 8, 16, False),
    ]


def test_arms_are_compared_by_seed_and_task_and_chosen_on_validation_only(recipe: Path, tmp_path: Path) -> None:
    plan = fake_sweep(recipe, tmp_path / "out", "0..2", {"1e-4": 0.2, "3e-4": 0.8, "1e-3": 0.25})
    sets, outcome = sets_of(plan, "validation"), SweepOutcome()
    summary = summarize_sweep(plan, outcome, sets, plan.arms[0], final=False)
    assert list(summary["sets"]) == ["validation"]
    assert summary["choice"]["arm"] == "rl.learning_rate=3e-4"
    validation = summary["sets"]["validation"]
    assert validation["arms"]["rl.learning_rate=3e-4"]["tasks"] == 36
    found = validation["differences"]["rl.learning_rate=3e-4"]["solved"]
    assert found["interval"] == found["over_seeds"]
    assert found["interval"][0] > 0.3
    close = validation["differences"]["rl.learning_rate=1e-3"]["solved"]
    assert close["interval"][0] < 0 < close["interval"][1]
    text = "\n".join(conclusions(summary))
    assert "best of 3 arms on the validation set over 3 seeds" in text
    assert "2 arms are compared" in text
    assert "--final shows the test sets" in text

    final = summarize_sweep(plan, outcome, sets, "rl.learning_rate=3e-4", final=True)
    assert list(final["sets"]) == ["validation", "unseen"]
    assert final["sets"]["unseen"]["differences"]["rl.learning_rate=1e-4"]["solved"]["mean"] < 0
    assert "--final" not in "\n".join(conclusions(final))
    with pytest.raises(InputError, match="the recipe measures validation, unseen"):
        sets_of(plan, "fresh")


def test_the_variance_comes_from_earlier_results_or_is_assumed(recipe: Path, tmp_path: Path) -> None:
    plan = plan_sweep(recipe, ["rl.steps=2,3"], [], "0", tmp_path / "new", None)
    sets = sets_of(plan, None)
    assert find_variance(plan, sets, []).origin.startswith("assumed: 50% solved")
    earlier = fake_sweep(recipe, tmp_path / "earlier", "0..1", {"1e-4": 0.2, "3e-4": 0.8})
    assert len(earlier_pairs(earlier.out, "validation")) == 1
    measured = find_variance(plan, sets, [earlier.out])
    assert measured.origin == f"measured on validation in {earlier.out}"
    # Two samples that are solved independently with 0.2 and 0.8
    assert measured.of_task(1) == pytest.approx(0.32, abs=0.12)
    assert find_variance(earlier, sets, []).tasks == measured.tasks
    one = find_variance(plan, sets, [earlier.runs[0].path])  # the first and the last model of one run
    assert 0 < one.of_task(4) < 1
    with pytest.raises(InputError, match="there is no run"):
        find_variance(plan, sets, [tmp_path / "nothing"])


def sweep(*arguments: object, code: int = 0) -> Any:
    done = CliRunner().invoke(app, ["sweep", *map(str, arguments)])
    found = done.exception.exit_code if isinstance(done.exception, EtudeError) else done.exit_code
    assert found == code, (done.output, done.exception)
    return done


def test_a_sweep_says_beforehand_what_it_can_detect(recipe: Path, tmp_path: Path) -> None:
    asked = (recipe, "--set", "rl.learning_rate=1e-4,3e-4", "--seeds", "0..2", "--out", tmp_path / "out", "--dry-run")
    text = sweep(*asked).stdout
    assert "validation: 12 tasks x 4 samples x 3 seeds detects a difference of 26.1 points" in text
    assert "over tasks and seeds" in text
    assert "unseen" not in text
    assert "unseen: 8 tasks" in sweep(*asked, "--final").stdout
    found = json.loads(sweep(*asked, "--json").stdout)
    assert len(found["runs"]) == 6
    assert found["detectable"]["validation"] == pytest.approx(0.261, abs=0.001)
    assert not (tmp_path / "out").exists()
    assert "the arms are rl.learning_rate=1e-4" in str(sweep(*asked, "--baseline", "none", code=2).exception)


def test_finished_runs_are_skipped_and_compared_again(recipe: Path, tmp_path: Path) -> None:
    fake_sweep(recipe, tmp_path / "out", "0..1", {"1e-4": 0.2, "3e-4": 0.9})
    asked = (recipe, "--set", "rl.learning_rate=1e-4,3e-4", "--seeds", "0..1", "--out", tmp_path / "out")
    text = sweep(*asked).stdout
    assert "runs: 4 skipped" in text
    assert "validation (validation)" in text
    assert "unseen" not in text
    stored = json.loads((tmp_path / "out/sweep.json").read_text())
    assert stored["sets"]["validation"]["differences"]["rl.learning_rate=3e-4"]["solved"]["over_seeds"] is None
    assert "unseen (test)" in sweep(*asked, "--final").stdout


# ------------------------------------------------------------------------------------------- processes

SMALL = """
name = "small"
stages = ["tokenizer", "init", "nll"]
[tokenizer]
sources = ["code.py"]
vocab_size = 320
[init.config]
model_type = "qwen3"
hidden_size = 16
intermediate_size = 24
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 8
max_position_embeddings = 64
[nll]
sources = ["code.py"]
window = 32
stride = 16
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    (tmp_path / "code.py").write_text("def double(x):\n    return x * 2\n" * 30)
    (tmp_path / "small.toml").write_text(SMALL)
    return tmp_path / "small.toml"


def digests(run: Path) -> dict[str, str]:
    return {each.name: each.digest for each in Run.read(run).artefacts()}


@pytest.mark.slow
def test_a_sweep_shares_stages_continues_after_a_failure_and_is_resumed(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    asked = (small, "--set", "nll.window=32,48", "--seeds", "0..1", "--out", out, "--parallel", 2, "--json")
    foreign = out / "nll.window=32,seed=1"
    foreign.mkdir(parents=True)
    (foreign / "mine").write_text("no run")
    found = json.loads(sweep(*asked, code=1).stdout)["runs"]
    assert sorted(found["finished"]) == ["nll.window=32,seed=0", "nll.window=48,seed=0", "nll.window=48,seed=1"]
    assert "is not a run and not empty" in found["failed"]["nll.window=32,seed=1"]
    assert found["shared"] == {"nll.window=48,seed=0": "tokenizer, init from nll.window=32,seed=0"}
    assert digests(out / "nll.window=32,seed=0") == digests(out / "nll.window=48,seed=0")
    assert digests(out / "nll.window=48,seed=1")["init-0"] != digests(out / "nll.window=48,seed=0")["init-0"]

    (foreign / "mine").unlink()
    found = json.loads(sweep(*asked).stdout)["runs"]
    assert (len(found["skipped"]), found["finished"]) == (3, ["nll.window=32,seed=1"])
    assert found["shared"] == {"nll.window=32,seed=1": "tokenizer, init from nll.window=48,seed=1"}
    assert digests(out / "nll.window=32,seed=1") == digests(out / "nll.window=48,seed=1")


@pytest.mark.slow
def test_a_shared_stage_has_the_result_that_the_run_would_have_made_itself(small: Path, tmp_path: Path) -> None:
    shared, alone = tmp_path / "shared", tmp_path / "alone"
    sweep(small, "--set", "nll.window=32,48", "--out", shared, "--stage", "init")
    assert not Run.read(shared / "nll.window=48,seed=0").stage_done("nll")
    sweep(small, "--set", "nll.window=32,48", "--out", shared)
    sweep(small, "--set", "nll.window=48", "--out", alone)
    runs = shared / "nll.window=48,seed=0", alone / "seed=0"
    assert digests(runs[0]) == digests(runs[1])
    assert Run.read(runs[0]).facts("nll") == Run.read(runs[1]).facts("nll")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_sweep_that_is_killed_ends_its_runs_and_can_be_continued(
    number: signal.Signals, small: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    asked = ["sweep", str(small), "--set", "nll.window=32,48", "--out", str(out)]
    process = subprocess.Popen([sys.executable, "-m", "etude.cli", *asked], stderr=subprocess.PIPE)
    lock, deadline = out / "nll.window=32,seed=0/lock", time.monotonic() + 120
    while not lock.exists() or not lock.read_text().strip():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    child = int(lock.read_text().split()[1])
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    if number == signal.SIGINT:
        assert b"the same command continues the sweep" in errors
    while Path(f"/proc/{child}").exists() and Path(f"/proc/{child}/status").read_text().split()[5] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert os.path.exists(out / "nll.window=32,seed=0")
    found = json.loads(sweep(*asked[1:], "--json").stdout)["runs"]
    assert len(found["finished"]) == 2
