"""A dry run plans every stage, reports all problems at once, and writes nothing."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rl_runs import TINY, make_recipe
from typer.testing import CliRunner

from etude.cli import app
from etude.data.corpus import CorpusOptions, build_corpus
from etude.errors import InputError
from etude.model.config import ModelConfig, with_rope
from etude.model.describe import find_config
from etude.pipeline.measure import measure_scaled, step_seconds
from etude.pipeline.memory import training_memory
from etude.pipeline.plan import check_recipe, make_plan
from etude.pipeline.render import duration, plan_data, plan_text
from etude.pipeline.rl_stage import (
    STARTUP_S,
    launched_samplers_and_workers,
    rl_memory,
    seconds_from_records,
    sessions_memory,
)
from etude.pipeline.stage import RecipeInputs
from etude.pipeline.stages import STAGES, run_recipe
from etude.recipe.recipe import load_recipe
from etude.runs.run import Run

ROOT = Path(__file__).parents[2]
RECIPE = """
name = "tiny"
stages = ["tokenizer", "init", "corpus", "pretrain", "mtp", "extend", "sft", "nll"]
[tokenizer]
sources = ["code"]
vocab_size = 320
[init.config]
model_type = "qwen3"
hidden_size = 16
intermediate_size = 24
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 8
tie_word_embeddings = true
max_position_embeddings = 32
[[corpus.build]]
name = "code"
sources = ["code"]
held_out = ["away"]
[[corpus.build]]
name = "chat"
sources = ["chat.jsonl"]
chat = true
[pretrain]
mix = [{ corpus = "code" }]
length = 32
tokens = 2560
rows = 2
micro_batches = 2
checkpoint_every = 4
held_out = { corpus = "code", window = 16 }
[mtp]
mix = [{ corpus = "code" }]
length = 32
tokens = 320
rows = 2
[extend]
mix = [{ corpus = "code" }]
length = 64
tokens = 512
rows = 2
min_document = 64
[sft]
mix = [{ corpus = "chat" }]
length = 64
tokens = 512
rows = 2
[nll]
sources = ["code"]
window = 32
stride = 16
"""
BUDGET = 0.05  # seconds to measure in


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    for package in ("one", "two", "away"):
        (tmp_path / "code" / package).mkdir(parents=True)
        for name in ("a", "b"):
            text = "".join(f"def {package}_{name}_{i}(x, y):\n    return x * {i} + y\n\n" for i in range(12))
            (tmp_path / f"code/{package}/{name}.py").write_text(text)
    rows = [
        {"messages": [{"role": "user", "content": f"add {i}"}, {"role": "assistant", "content": f"the sum is {2 * i}"}]}
        for i in range(30)
    ]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tiny.toml").write_text(RECIPE)
    return tmp_path


def file_digests(workspace: Path) -> dict[str, str]:
    """Return the digest of every file below a directory."""
    files = (path for path in sorted(workspace.rglob("*")) if path.is_file())
    return {str(path.relative_to(workspace)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def problems(recipe: Path, *overrides: str, out: Path | None = None, only: str | None = None) -> list[str]:
    with pytest.raises(InputError) as raised:
        make_plan(load_recipe(recipe, overrides), out, only, budget=BUDGET)
    return str(raised.value).splitlines()


# ------------------------------------------------------------------------------------------------ the plan


def test_every_stage_is_planned_and_nothing_is_written(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workspace)
    before = file_digests(workspace)
    plan = make_plan(load_recipe(workspace / "tiny.toml"), workspace / "run", budget=BUDGET)
    assert file_digests(workspace) == before
    assert not (workspace / "run").exists()
    stages = {stage.stage: stage for stage in plan.stages}
    assert list(stages) == list(load_recipe(workspace / "tiny.toml").stages)
    assert all(stage.time is not None and stage.time.seconds > 0 for stage in plan.stages)
    assert stages["pretrain"].does[0] == "20 steps of 2 x 2 rows of 32 tokens: 2,560 tokens"
    assert "trains 1 layer of multi-token prediction alone, with the model frozen" in stages["mtp"].does
    assert "measured here" in stages["sft"].time.basis  # type: ignore[union-attr]
    assert all(stages[name].memory[0].total > 0 for name in ("pretrain", "mtp", "extend", "sft"))
    assert plan.seconds == pytest.approx(sum(stage.time.seconds for stage in plan.stages if stage.time))
    text = plan_text(plan)
    assert all(f"\n{stage}" in text for stage in stages)
    assert json.loads(json.dumps(plan_data(plan)))["stages"]["extend"]["does"] == list(stages["extend"].does)


def test_json_output_is_one_object(workspace: Path) -> None:
    result = CliRunner().invoke(app, ["pretrain", str(workspace / "tiny.toml"), "--dry-run", "--json"])
    assert result.exit_code == 0, result.exception
    found = json.loads(result.stdout)
    assert list(found["stages"]) == ["pretrain"]
    stage = found["stages"]["pretrain"]
    assert stage["seconds"] > 0
    assert stage["memory"][0]["total"] == sum(stage["memory"][0]["pieces"].values())


def test_the_tokens_of_a_corpus_are_predicted_from_its_first_files(workspace: Path) -> None:
    recipe = load_recipe(workspace / "tiny.toml")
    for stage in ("tokenizer", "init", "corpus"):
        run_recipe(recipe, workspace / "run", resume=True, only=stage)
    run = Run.read(workspace / "run")
    found = check_recipe(recipe, ["corpus"], run)
    assert not found.problems
    assert found.tokenizer is not None
    text, options = found.texts["code"], CorpusOptions(held_out=("away",), near=1.0)
    built = build_corpus([str(workspace / "code")], found.tokenizer, workspace / "corpus", options)
    assert text.files == 6
    assert text.tokens == pytest.approx(sum(size.tokens for size in built.splits.values()), rel=0.05)


# ------------------------------------------------------------------------------------------------ problems


def test_all_problems_come_together_each_under_its_key(workspace: Path) -> None:
    lines = problems(
        workspace / "tiny.toml",
        'tokenizer.sources=["./nowhere"]',
        "pretrain.length=64",
        "mtp.device=cuda:7",
        'sft.mix=[{corpus = "code"}]',
        'loggers=["wandb"]',
        'nll.sources=["chat.jsonl", "./missing"]',
    )
    expected = [
        "loggers names wandb, which is not installed",
        f"tokenizer.sources: source {os.path.abspath('nowhere')} does not exist",
        "pretrain.length 64 exceeds the model's context of 32 tokens",
        "mtp.device: device cuda:7: torch cannot use it here",
        "sft.mix: sft trains on conversations; corpus code has none",
        "nll.sources: ",
    ]
    assert len(lines) == len(expected), lines
    assert all(line.startswith(words) for line, words in zip(lines, expected, strict=True)), lines


def test_problems_of_rl_are_reported_before_it_starts(tmp_path: Path) -> None:
    estimator = {"kl": "k1", "kl_weight": 0.1, "reference": str(tmp_path / "no")}
    recipe = make_recipe(tmp_path, tasks=5, estimator=estimator, evaluation={})
    lines = problems(
        recipe,
        "rl.window=4096",
        "rl.sampler.device=cuda:7",
        "rl.weights.store=nosuch://bucket",
        f"evaluation.validation={tmp_path}/elsewhere",
        only="rl",
    )
    expected = [
        "rl.sampler.device: device cuda:7",
        f"evaluation.validation: {tmp_path}/elsewhere does not exist",
        "rl.tasks has 5 prompts, but 3 steps of 2 groups take 6",
        "rl.weights.store: nosuch://bucket: no such object store",
        f"rl.estimator.reference: {tmp_path}/no does not exist",
        "rl.window 4,096 exceeds the model's context of 2,048 tokens",
    ]
    assert len(lines) == len(expected), lines
    assert all(line.startswith(words) for line, words in zip(lines, expected, strict=True)), lines


def test_a_prompt_that_does_not_fit_the_window_is_a_problem(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, window=256, tool_set={"short_system_prompt": False})
    (line,) = problems(recipe)
    assert re.match(r"rl.window: \S+: the prompt has [\d,]+ tokens, but only \d+ of the window of 256 are free", line)


def test_rl_from_a_model_that_does_not_exist_yet_is_only_predicted(tmp_path: Path) -> None:
    directory = make_recipe(tmp_path).parent
    text = (directory / "recipe.toml").read_text().replace('stages = [\n    "rl",\n]', 'stages = ["init", "rl"]')
    text = text.replace('model = "model"\n', "") + '\n[init]\ntokenizer = "model"\n[init.config]\n'
    text += "".join(f"{key} = {json.dumps(value)}\n" for key, value in TINY.items())
    (directory / "recipe.toml").write_text(text)
    plan = make_plan(load_recipe(directory / "recipe.toml"), budget=BUDGET)
    assert plan.stages[-1].time is None
    assert plan.stages[-1].does[-1] == ("predicted only: the model's weights do not exist yet, so no rollout was run")


def test_a_missing_model_is_reported_in_one_line(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text('name = "r"\nstages = ["base"]\n[base]\nsource = "no-such-package"\n')
    (line,) = problems(recipe)
    assert line.startswith("base.source: no-such-package: neither a .gguf file nor an installed package")
    (line,) = problems(recipe, "base.source=./nowhere")
    assert line == f"base.source: {os.path.abspath('nowhere')} does not exist; name a model's directory, " + (
        "a .gguf file or a package"
    )


def test_the_command_exits_with_2_and_prints_no_plan(workspace: Path) -> None:
    result = CliRunner().invoke(app, ["run", str(workspace / "tiny.toml"), "--dry-run", "--set", "sft.device=cuda:7"])
    assert isinstance(result.exception, InputError)
    assert result.exception.exit_code == 2
    assert "tokens" not in result.stdout


# ------------------------------------------------------------------------------------------------ an existing run


def interrupted_run(workspace: Path) -> Path:
    """Return a run that was stopped in pretrain, after a checkpoint."""
    recipe = load_recipe(workspace / "tiny.toml")
    for stage in ("tokenizer", "init", "corpus"):
        run_recipe(recipe, workspace / "run", resume=True, only=stage)

    def stop_in_the_sixth_step(done: int, total: int, note: str = "") -> None:
        if done == 6:
            raise KeyboardInterrupt

    with Run.create_or_resume(workspace / "run", recipe, resume=True) as run, pytest.raises(KeyboardInterrupt):
        STAGES["pretrain"].run(run, recipe, stop_in_the_sixth_step)
    return workspace / "run"


def test_the_plan_of_an_existing_run_continues_it(workspace: Path) -> None:
    run = interrupted_run(workspace)
    before = file_digests(workspace)
    plan = make_plan(load_recipe(workspace / "tiny.toml"), run, budget=BUDGET)
    assert file_digests(workspace) == before
    assert plan.run == str(run)
    assert [stage.stage for stage in plan.stages if stage.done] == ["tokenizer", "init", "corpus"]
    stage = next(stage for stage in plan.stages if stage.stage == "pretrain")
    assert "continues after step 4" in stage.does
    assert stage.time is not None
    assert stage.time.basis.startswith("from the 6 earlier steps of this run")
    assert "3 of 8 stages done: --resume continues it" in plan_text(plan)


def test_only_stages_that_have_not_started_may_change(workspace: Path) -> None:
    run = interrupted_run(workspace)
    recipe = workspace / "tiny.toml"
    assert make_plan(load_recipe(recipe, ["sft.tokens=1024"]), run, "mtp", budget=BUDGET)
    lines = problems(recipe, "pretrain.learning_rate=0.5", out=run)
    assert "was started with another recipe" in lines[0]
    assert lines[1].strip() == "pretrain.learning_rate: 0.0003 -> 0.5"


def test_a_directory_with_other_files_is_not_taken_for_a_run(workspace: Path) -> None:
    (line,) = problems(workspace / "tiny.toml", out=workspace / "code")
    assert "is not a run and not empty" in line


def test_a_run_in_use_is_a_warning(workspace: Path) -> None:
    with Run.create_or_resume(workspace / "run", load_recipe(workspace / "tiny.toml")):
        plan = make_plan(load_recipe(workspace / "tiny.toml"), workspace / "run", "tokenizer", budget=BUDGET)
    (line,) = plan.warnings
    assert line.startswith(f"the run is in use by pid {os.getpid()} on ")
    assert not make_plan(load_recipe(workspace / "tiny.toml"), workspace / "run", "tokenizer", budget=BUDGET).warnings


# ------------------------------------------------------------------------------------------------ a single stage


def test_stages_run_one_at_a_time(workspace: Path) -> None:
    run = interrupted_run(workspace)
    for stage in ("pretrain", "mtp", "extend", "sft"):
        options = [stage, str(workspace / "tiny.toml"), "--out", str(run), "--resume", "--json"]
        result = CliRunner().invoke(app, options)
        assert result.exit_code == 0, result.exception
        assert list(json.loads(result.stdout)["stages"]) == [stage]
    assert not Run.read(run).stage_done("nll")


def test_a_single_stage_names_the_missing_inputs(workspace: Path) -> None:
    assert problems(workspace / "tiny.toml", out=workspace / "run", only="sft") == [
        "sft starts from the weights of init or pretrain or extend; run that stage first",
        "sft needs chat, which the stage corpus makes; run that stage first",
    ]
    plan = make_plan(load_recipe(workspace / "tiny.toml"), only="sft", budget=BUDGET)
    assert [stage.stage for stage in plan.stages] == ["sft"]


def test_without_out_only_a_dry_run_is_possible(workspace: Path) -> None:
    for verb in ("run", "pretrain", "rl"):
        result = CliRunner().invoke(app, [verb, str(workspace / "tiny.toml")])
        assert isinstance(result.exception, InputError)
        assert "--out is missing" in str(result.exception)


# ------------------------------------------------------------------------------------------------ estimates


def test_memory_is_within_10_percent_of_the_measured() -> None:
    """SmolLM2-135M on an H200 took 37.1 GiB in pretrain and 21.6 in extend (docs/pretraining.md)."""
    recipe = load_recipe(ROOT / "recipes/smollm2-135m.toml")
    assert recipe.pretrain is not None
    assert recipe.extend is not None
    config = find_config("smollm2-135m")
    needed, _ = training_memory(config, recipe.pretrain, "cuda")
    assert needed.total / 2**30 == pytest.approx(37.1, rel=0.1)
    longer = with_rope(config, length=recipe.extend.length, theta=recipe.extend.rope_theta)
    needed, _ = training_memory(longer, recipe.extend, "cuda", mtp_layers=1)
    assert needed.total / 2**30 == pytest.approx(21.6, rel=0.1)


def test_a_mesh_is_planned_by_process(workspace: Path) -> None:
    mesh = ["parallel.dp_shard=2", "mtp.micro_batches=2", "extend.micro_batches=2", "sft.micro_batches=2"]
    plan = make_plan(load_recipe(workspace / "tiny.toml", mesh), only="pretrain", budget=BUDGET)
    (stage,) = plan.stages
    assert [each.process for each in stage.memory] == ["trainer", "trainer", "checkpoint"]
    assert stage.time is None  # one process here would not show it
    assert stage.does[-1].startswith("each of 2 processes receives 0.00 GB a step: weights 0.00, gradients 0.00")
    one = make_plan(load_recipe(workspace / "tiny.toml"), only="pretrain", budget=BUDGET).stages[0].memory[0]
    assert 2 * stage.memory[0].pieces["optimizer"] == pytest.approx(one.pieces["optimizer"], rel=0.01)
    assert "2 x 0.3" in plan_text(plan)


def test_a_recipe_for_gpus_is_planned_where_there_are_none(workspace: Path) -> None:
    plan = make_plan(load_recipe(workspace / "tiny.toml", ["sft.device=cuda"]), only="sft", budget=BUDGET)
    if torch.cuda.is_available():
        assert not plan.warnings
    else:
        assert plan.stages[0].memory[0].device == "cuda"
        assert plan.warnings[0].startswith("sft is planned for 1 GPU, of which this host lacks 1")


def test_a_published_config_can_be_planned_but_not_run(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text('name = "r"\nstages = ["base"]\n[base]\nsource = "qwen3-coder-30b-a3b"\n')
    plan = make_plan(load_recipe(recipe), budget=BUDGET)
    assert "the published config qwen3-coder-30b-a3b: to run, download the model" in plan.stages[0].does[0]
    with pytest.raises(InputError, match="qwen3-coder-30b-a3b is a published config without weights; to run, download"):
        run_recipe(load_recipe(recipe), tmp_path / "run")


def test_too_little_memory_and_disk_are_warnings(workspace: Path) -> None:
    recipe = load_recipe(workspace / "tiny.toml", ["sft.rows=20_000_000"])
    plan = make_plan(recipe, only="sft", budget=BUDGET)
    (line,) = plan.warnings
    assert line.startswith("sft needs about ")
    assert plan.stages[0].time is not None  # scaled up from fewer rows


class WorkClock:
    """A clock that only work moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def work(self, rows: int, length: int) -> None:
        self.now += rows * length * 2e-5


def test_work_too_slow_to_measure_whole_is_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole work would take 20 seconds; its speed is known."""
    clock = WorkClock()
    monkeypatch.setattr("etude.pipeline.measure.time", clock)
    found = measure_scaled(clock.work, 1000, 1000, lambda rows, length: rows * length, torch.device("cpu"), budget=0.3)
    assert clock.now < 0.5
    assert found.seconds == pytest.approx(20)
    assert "scaled" in found.basis


def test_a_step_is_its_forwards_and_one_update(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(workspace / "tiny.toml")
    found = check_recipe(recipe, [], None)
    assert recipe.pretrain is not None
    config = found.models["pretrain"].config

    def timed(device: torch.device, work: Callable[..., object], *arguments: object) -> float:
        work(*arguments)
        return 0.5

    monkeypatch.setattr("etude.pipeline.measure.time_call", timed)
    one, many = (step_seconds(config, recipe.pretrain, forwards, budget=1e9) for forwards in (1, 200))
    assert one.basis == "measured here"
    assert (one.seconds, many.seconds) == (1.0, 100.5)


def test_rl_is_rehearsed_with_one_rollout_and_one_step_until_it_has_taken_steps(tmp_path: Path) -> None:
    recipe = load_recipe(make_recipe(tmp_path))
    plan = make_plan(recipe, budget=BUDGET)
    (stage,) = plan.stages
    assert stage.time is not None
    assert stage.time.basis == "predicted from one rollout and one step here"
    assert re.match(
        r"one rollout took .* s here \(\d turns?, .* tokens, ended by \w+, reward .*\), one step", stage.does[-1]
    )
    assert stage.launches[0] == "1 trainer on cpu"
    assert [memory.process for memory in stage.memory] == ["trainer", "checkpoint", "sampler", "sessions"]
    with Run.create_or_resume(tmp_path / "run", recipe) as run:
        for step in (1, 2):
            run.log("rl", step, wall_s=100.0)
    again = make_plan(recipe, tmp_path / "run", budget=BUDGET).stages[0].time
    assert again is not None
    assert again.basis == "from the 2 earlier steps of this run"
    assert again.seconds == pytest.approx(310, rel=0.1)


def test_samplers_behind_servers_are_planned_and_a_missing_program_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_recipe(tmp_path, sampler={"backend": "vllm", "server_python": sys.executable})
    (line,) = problems(path)
    missing = f"{sys.executable} has no package vllm; name a Python interpreter that has vLLM"
    assert line == f"rl.sampler.server_python: {missing}"
    (line,) = problems(path, "rl.sampler.server_python=/no/python")
    assert line.startswith("rl.sampler.server_python: /no/python does not run")
    urls = ["http://127.0.0.1:8000", "http://localhost:8001"]
    there = load_recipe(make_recipe(tmp_path / "there", sampler={"backend": "sglang", "urls": urls}))
    stage = make_plan(there, budget=BUDGET).stages[0]
    assert stage.launches[1] == "2 samplers in front of SGLang at http://127.0.0.1:8000, http://localhost:8001"
    assert stage.does[-1].endswith(", sampled by Etude's engine: a dry run starts no SGLang")
    assert [memory.process for memory in stage.memory].count("sampler") == 2
    (tmp_path / "stubs" / "vllm").mkdir(parents=True)
    (tmp_path / "stubs" / "vllm" / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "stubs"))
    pair = {"backend": "vllm", "count": 2, "tensor_parallel": 2, "memory_fraction": 0.8, "device": "cuda"}
    here = load_recipe(make_recipe(tmp_path / "here", sampler=pair))
    settings = here.rl
    assert settings is not None
    launched = list(launched_samplers_and_workers(settings, RecipeInputs(here)))
    assert launched[0] == "2 samplers, each with a vLLM server on 2 GPUs, of whose memory it takes 80%"
    memory = sessions_memory(settings, ModelConfig.load(Path(str(settings.model))), gpus=8, trainers=4)
    devices = [each.device for each in memory if each.process == "server"]
    assert devices == ["cuda:4", "cuda:5", "cuda:6", "cuda:7"]


def test_a_packed_row_may_be_longer_than_the_context(tmp_path: Path) -> None:
    recipe = load_recipe(make_recipe(tmp_path))
    assert recipe.rl is not None
    config = ModelConfig.load(Path(recipe.rl.model))
    packed = recipe.rl.model_copy(update={"rows": 1, "length": 4 * config.max_length})
    plain = recipe.rl.model_copy(update={"rows": 4, "length": config.max_length})
    assert rl_memory(packed, config) == rl_memory(plain, config)


def test_evaluations_beside_the_steps_are_no_steps(tmp_path: Path) -> None:
    recipe = load_recipe(make_recipe(tmp_path, evaluation={}))
    assert recipe.rl is not None
    steps = [{"step": step, "wall_s": 10.0} for step in (1, 2)]
    evaluated = [{"step": 0, "evaluation": True}, *steps, {"step": 2, "evaluation": True, "benchmark": "more"}]
    (before, after) = (seconds_from_records(recipe.rl, records, 2) for records in (steps, evaluated))
    assert before == after
    assert before is not None
    assert before.seconds == pytest.approx((recipe.rl.steps - 2) * 10.0, abs=STARTUP_S)


@pytest.mark.parametrize(("seconds", "words"), [(0.1, "about 1 s"), (89, "about 89 s"), (100, "about 2 min")])
def test_durations_are_rounded(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_the_nano_rl_recipe_has_no_problems_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "base", tmp_path / "base")
    (tmp_path / "recipes").mkdir()
    recipe = shutil.copy(ROOT / "recipes/nano-rl.toml", tmp_path / "recipes")
    monkeypatch.chdir(tmp_path)
    before = file_digests(tmp_path)
    plan = make_plan(load_recipe(recipe), budget=BUDGET)
    assert file_digests(tmp_path) == before
    assert not plan.warnings
    evaluation = plan.stages[-1]
    assert evaluation.stage == "evaluation"
    sets = "validation 24 x 2, new 24 x 4, unseen 24 x 4"
    assert evaluation.does[0] == f"models of base, sft, rl, each on {sets}: 720 sessions"
    assert evaluation.time is not None
    assert [memory.process for memory in evaluation.memory] == ["sampler", "sessions"]
