"""Run a small recipe: the same result twice, and the same result when killed on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from etude.errors import InputError
from etude.pipeline.stages import run_recipe
from etude.recipe.recipe import load_recipe
from etude.runs.run import Run

RECIPE = """
name = "tiny"
seed = 3
stages = ["tokenizer", "init", "nll"]
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
max_position_embeddings = 64
[nll]
sources = ["code"]
window = 32
stride = 16
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "code").mkdir()
    for name in ("a", "b"):
        (tmp_path / f"code/{name}.py").write_text(f"def {name}(x):\n    return x * 2\n" * 30)
    (tmp_path / "tiny.toml").write_text(RECIPE)
    return tmp_path / "tiny.toml"


def test_a_run_records_its_artefacts_with_their_lineage(recipe: Path, tmp_path: Path) -> None:
    facts = run_recipe(load_recipe(recipe), tmp_path / "run")
    assert facts["tokenizer"]["files"] == 2
    run = Run.read(tmp_path / "run")
    made = {artefact.name: artefact for artefact in run.artefacts()}
    assert made["init-0"].parents[0].digest == made["tokenizer"].digest
    (score,) = [record for record in run.metrics() if record["stage"] == "nll"]
    assert score["nats"] == facts["nll"]["nats"] > 0
    again = run_recipe(load_recipe(recipe), tmp_path / "again")
    assert again == facts
    assert Run.read(tmp_path / "again").find("checkpoint").digest == made["init-0"].digest


def test_a_run_killed_between_stages_resumes_to_the_same_result(recipe: Path, tmp_path: Path) -> None:
    whole = run_recipe(load_recipe(recipe), tmp_path / "whole")
    command = [sys.executable, "-m", "etude.cli", "run", str(recipe), "--out", str(tmp_path / "cut")]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (tmp_path / "cut/artefacts/tokenizer").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.returncode == -signal.SIGKILL
    assert run_recipe(load_recipe(recipe), tmp_path / "cut", resume=True) == whole
    assert (
        Run.read(tmp_path / "cut").find("checkpoint").digest == Run.read(tmp_path / "whole").find("checkpoint").digest
    )


def test_an_unknown_model_type_is_named_by_its_key(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"init\.config: model_type is 'qwen33'; did you mean qwen3"):
        run_recipe(load_recipe(recipe, ["init.config.model_type=qwen33"]), tmp_path / "run")


# Run commands as from a shell, but in one process: starting one takes seconds.
RUN_COMMANDS = """
import contextlib, io, json, sys
from etude.cli import main
for words in map(json.loads, sys.argv[1:]):
    sys.argv, error = ["etude", *words], io.StringIO()
    code = 0
    with contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()):
        try:
            main()
        except SystemExit as end:
            code = end.code
    print(json.dumps([code, error.getvalue()]), flush=True)
"""


def test_the_model_commands_work_on_a_checkpoint_of_a_run(recipe: Path, tmp_path: Path) -> None:
    run_recipe(load_recipe(recipe), tmp_path / "run")
    model = tmp_path / "run/checkpoints/init-0"

    def etude(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "etude.cli", "model", *map(str, arguments)]
        environment = {**os.environ, "COLUMNS": "160", "NO_COLOR": "1"}
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)

    score = json.loads(etude("nll", model, tmp_path / "code", "--window", 32, "--stride", 16, "--json").stdout)
    assert score == pytest.approx(Run.read(tmp_path / "run").facts("nll"))
    generated = json.loads(etude("generate", model, "def", "--max-tokens", 4, "--json").stdout)
    assert len(generated["tokens"]) <= 4
    shown = etude("describe", model, "--gpus", 8, "--cp", 2, "--length", 64)
    assert shown.returncode == 0, shown.stderr
    assert "grouped-query, 2 heads of 8" in shown.stdout
    trained = etude("tokenizer", tmp_path / "code", "--out", tmp_path / "tok", "--vocab-size", 300)
    assert trained.returncode == 0, trained.stderr
    assert (tmp_path / "tok/tokenizer.json").exists()

    mistakes: dict[tuple[object, ...], str] = {
        ("generate", tmp_path / "nowhere", "x"): "nowhere",
        ("generate", model, "x", "--dtype", "float8"): "--dtype float8: expected float32 or bfloat16",
        ("generate", model, "x", "--device", "cuda:0"): "device cuda:0",
        ("generate", model, "x", "--device", "tpuu"): "device tpuu",
        ("generate", model, "x", "--max-tokens", 999): "exceed the model's 64",
        ("nll", model, tmp_path / "none"): "does not exist",
        ("nll", model, tmp_path / "code", "--window", 65): "longer than the 64",
        ("describe", "kimi-k2.5", "--ep", 8): "give --gpus or --dp-shard too",
        ("describe", "kimi-k2.5", "--gpus", 8, "--ep", 0): "--ep 0: expected at least 1",
        ("nll", model, tmp_path / "code", "--window", 32, "--stride", 0): "stride 0",
        ("generate", model, "x<|im_end|>y", "--chat"): "contains the control token <|im_end|>",
        ("generate", model, "x", "--device", "meta"): "device meta",
        ("describe", "nonsense"): "neither a model directory",
        ("tokenizer", tmp_path / "code", "--out", tmp_path / "tok"): "already exists",
        ("import", "no-such-package", tmp_path / "x"): "no-such-package",
    }
    done = subprocess.run(
        [sys.executable, "-c", RUN_COMMANDS, *(json.dumps(["model", *map(str, words)]) for words in mistakes)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == len(mistakes), done.stderr
    for (wrong, words), (code, error) in zip(mistakes.items(), results, strict=True):
        assert code == 2, (wrong, error)
        assert words in error.splitlines()[-1]
        assert "Traceback" not in error
    assert not (tmp_path / "x").exists()
