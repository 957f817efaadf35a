"""The stage evaluation: every model on the same tasks with the same seeds, resumable, and honest about gains."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from rl_runs import TINY, make_model, make_recipe, tiny_tokenizer

from etude.errors import InputError
from etude.evaluation.scorings import count_scorings, record_scoring
from etude.model import save
from etude.model.config import ModelConfig
from etude.model.transformer import initialize
from etude.pipeline.model_evaluation import check_windows, model_names
from etude.pipeline.plan import make_plan
from etude.pipeline.stages import run_recipe, summarize_stage
from etude.recipe.recipe import load_recipe
from etude.rollouts.queue import RolloutQueue
from etude.runs.layout import RunLayout
from etude.runs.run import Run
from etude_nano.source import generate_nano

LIMIT_S = 300
SESSIONS: dict[str, Any] = {
    "window": 1024,
    "in_flight": 8,
    "tool_set": {"tools": ["read_file", "search_replace", "run_terminal_cmd"], "short_system_prompt": True},
    "budget": {"turns": 2, "max_turn_tokens": 16},
    "summaries": {"mode": "off"},
    "sampler": {"device": "cpu", "kv_cache_tokens": 16384, "max_sequences": 8, "threads": 1, "invariant": True},
}
EVALUATION: dict[str, Any] = {
    "validation": "./validation",
    "test": ["./unseen"],
    "samples": 2,
    "validation_samples": 1,
    "sessions": SESSIONS,
}


def make_tasks(directory: Path, count: int = 2) -> None:
    generate_nano(directory / "validation", count, "train", 700_000, (1,))
    generate_nano(directory / "unseen", count, "unseen", 0, (1,))


def base_recipe(directory: Path, **evaluation: Any) -> Path:
    """Write a recipe whose only model is a base."""
    if not (directory / "model").exists():
        make_model(directory / "model")
        make_tasks(directory)
    recipe = {"name": "tiny", "stages": ["base", "evaluation"], "base": {"source": "./model"}}
    path = directory / "recipe.toml"
    path.write_text(tomli_w.dumps({**recipe, "evaluation": {**EVALUATION, **evaluation}}))
    return path


def records(run: Path) -> list[dict[str, Any]]:
    return Run.read(run).metrics("evaluation")


def sampled(run: Path, model: str) -> dict[str, dict[int, tuple[Any, ...]]]:
    """Return how every session of a model went, by task and sample."""
    found: dict[str, dict[int, tuple[Any, ...]]] = {}
    with closing(RolloutQueue.open_read_only(RunLayout(run).evaluation_of(model).evaluations)) as queue:
        for progress in queue.progress():
            for slot in queue.group(progress.id).slots:
                cost = slot.record["cost"]
                value = (slot.record["made"], slot.record["tokens"], slot.record["ending"], cost["calls"])
                found.setdefault(progress.task, {})[slot.number] = value
    return found


def test_a_run_without_rl_is_measured_once_and_never_again(tmp_path: Path) -> None:
    recipe, run = load_recipe(base_recipe(tmp_path)), tmp_path / "run"
    facts = run_recipe(recipe, run)["evaluation"]
    assert [(line["model"], line["set"], line["samples"]) for line in records(run)] == [
        ("base", "validation", 2),
        ("base", "unseen", 4),
    ]
    assert facts["scored"] == {"validation": 1, "unseen": 1}
    assert facts["gains"] == [], "there is no earlier model"
    for line in records(run):
        assert {"solved", "best/1", "proper", "proper_solved", "difficulty/1/solved_low"} <= line.keys()
    assert summarize_stage("evaluation", facts).splitlines()[-1].endswith("validation 1 time, unseen 1 time")
    assert not Path(RunLayout(run).evaluation_of("base").store).exists(), "the copy of the weights is removed"
    assert run_recipe(recipe, run, resume=True)["evaluation"] == facts
    assert count_scorings(RunLayout(run)) == facts["scored"]


@pytest.mark.slow
def test_rl_and_the_model_it_starts_from_are_measured_with_the_same_seeds(tmp_path: Path) -> None:
    make_tasks(tmp_path)
    table = {key: value for key, value in EVALUATION.items() if key != "sessions"}
    recipe = load_recipe(make_recipe(tmp_path, evaluation=table, steps=1, learning_rate=1e-30))
    assert model_names(recipe) == ["start", "rl"]
    facts = run_recipe(recipe, tmp_path / "run")["evaluation"]
    assert list(facts["models"]) == ["start", "rl"]
    assert [(gain["model"], gain["against"]) for gain in facts["gains"]] == [("rl", "start")]
    assert facts["gains"]["rl"]["sets"]["unseen"]["verdict"] == "unproven"
    # the step changed no weight: with the same seeds every session is the same
    assert sampled(tmp_path / "run", "start") == sampled(tmp_path / "run", "rl")
    assert facts["scored"] == {"validation": 4, "unseen": 2}, "RL validates before its first step and after its last"
    with sqlite3.connect(RunLayout(tmp_path / "run").evaluations) as db:
        names = {name.split("/")[1] for (name,) in db.execute("SELECT task FROM groups")}
    assert names == {"validation"}, "RL has looked at a test set"


@pytest.mark.slow
def test_a_killed_evaluation_ends_with_the_same_sessions(tmp_path: Path) -> None:
    recipe = base_recipe(tmp_path, samples=8, validation_samples=8)
    for name in ("whole", "killed"):
        run, kills = tmp_path / name, 3 if name == "killed" else 0
        command = [sys.executable, "-m", "etude.cli", "run", str(recipe), "--out", str(run), "--resume"]
        for ready in range(4, 4 + 8 * kills, 8):
            with subprocess.Popen(command, start_new_session=True) as process:
                wait_for_sessions(run, ready, process)
                os.kill(process.pid, signal.SIGKILL)
        subprocess.run(command, check=True, timeout=LIMIT_S)
    assert sampled(tmp_path / "killed", "base") == sampled(tmp_path / "whole", "base")

    def figures(run: Path) -> list[dict[str, Any]]:
        return [{key: value for key, value in line.items() if key != "time"} for line in records(run)]

    assert figures(tmp_path / "killed") == figures(tmp_path / "whole")
    assert count_scorings(RunLayout(tmp_path / "killed")) == {"validation": 1, "unseen": 1}


def wait_for_sessions(run: Path, count: int, process: "subprocess.Popen[bytes]") -> None:
    """Wait until so many sessions of the base are scored."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, "it ended before it was killed"
        try:
            with closing(RolloutQueue.open_read_only(RunLayout(run).evaluation_of("base").evaluations)) as queue:
                if queue.counts().get("ready", 0) >= count:
                    return
        except InputError:  # not made yet
            pass
        time.sleep(0.02)
    raise AssertionError(f"{count} sessions were not scored in {LIMIT_S} s")


def test_a_task_set_that_changed_since_training_is_refused(tmp_path: Path) -> None:
    recipe = load_recipe(base_recipe(tmp_path))
    run_recipe(recipe, tmp_path / "run", only="base")
    with Run.create_or_resume(tmp_path / "run", recipe, resume=True) as run:
        run.save_facts("evaluation", digests={"unseen": "another"})
    with pytest.raises(InputError, match=r"the task set unseen .* has changed since training began"):
        run_recipe(recipe, tmp_path / "run", resume=True)
    changed = load_recipe(base_recipe(tmp_path, samples=3))
    with pytest.raises(InputError, match=r"evaluation.samples: 2 -> 3"):
        run_recipe(changed, tmp_path / "run", resume=True)


def test_models_with_other_rope_share_a_window_that_fits_all(tmp_path: Path) -> None:
    short = ModelConfig.from_hugging_face({**TINY, "vocab_size": 512})
    long = ModelConfig.from_hugging_face({**TINY, "vocab_size": 512, "max_position_embeddings": 4096})
    check_windows({"base": short, "extend": long}, 2048)
    with pytest.raises(InputError, match=r"contexts of different lengths \(base 2,048, extend 4,096\): set the window"):
        check_windows({"base": short, "extend": long}, None)
    with pytest.raises(InputError, match="exceeds the context of the model base, 2,048"):
        check_windows({"base": short, "extend": long}, 4096)


def test_a_dry_run_estimates_the_stage(tmp_path: Path) -> None:
    plan = make_plan(load_recipe(base_recipe(tmp_path)), budget=0.05)
    stage = plan.stages[-1]
    assert stage.does == ("models of base, each on validation 2 x 1, unseen 2 x 2: 6 sessions",)
    assert stage.time is not None
    assert stage.time.basis == "predicted from one rollout here"
    assert stage.launches[0] == "1 sampler on cpu"


def test_a_scoring_counts_once_and_a_torn_line_does_not(tmp_path: Path) -> None:
    recipe = load_recipe(base_recipe(tmp_path))
    with Run.create_or_resume(tmp_path / "run", recipe) as run:
        for key in ("one", "one", "two"):
            record_scoring(run, "unseen", "base", key)
        with run.layout.scorings.open("a") as file:
            file.write('{"set": "unse')
        record_scoring(run, "validation", "base", "one")
        assert count_scorings(run.layout) == {"unseen": 2, "validation": 1}
        assert [json.loads(line)["set"] for line in run.layout.scorings.read_text().splitlines()[:2]] == ["unseen"] * 2


@pytest.mark.slow
def test_a_longer_context_is_measured_too(tmp_path: Path) -> None:
    """A recipe may name a model whose rotary embedding differs from the base's; its evaluation reads its own config."""
    config = ModelConfig.from_hugging_face(
        {**TINY, "vocab_size": len(tiny_tokenizer()), "max_position_embeddings": 4096, "rope_theta": 40_000.0}
    )
    save(initialize(config, seed=1), tmp_path / "model")
    tiny_tokenizer().save(tmp_path / "model")
    make_tasks(tmp_path)
    path = base_recipe(tmp_path, test=[], max_tasks=1)
    run_recipe(load_recipe(path), tmp_path / "run")
    assert records(tmp_path / "run")[0]["tasks"] == 1
