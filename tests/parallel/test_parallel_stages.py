"""Whole stages in several processes: the losses of one process, and a run that continues on another mesh."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import transformers
from ranks import follower_of

from etude.chat.tokenizer import Tokenizer
from etude.pipeline.stages import run_recipe
from etude.recipe.recipe import load_recipe
from etude.runs.run import Run

RECIPE = """
name = "ranks"
stages = ["tokenizer", "init", "corpus", "pretrain", "mtp", "sft"]
[tokenizer]
sources = ["code"]
vocab_size = 300
[init.config]
model_type = "deepseek_v3"
hidden_size = 16
intermediate_size = 24
moe_intermediate_size = 8
num_hidden_layers = 3
first_k_dense_replace = 1
num_attention_heads = 2
num_key_value_heads = 2
n_routed_experts = 4
num_experts_per_tok = 2
n_shared_experts = 1
n_group = 1
topk_group = 1
routed_scaling_factor = 1.0
norm_topk_prob = true
q_lora_rank = 8
kv_lora_rank = 8
qk_nope_head_dim = 8
qk_rope_head_dim = 4
v_head_dim = 8
max_position_embeddings = 64
initializer_range = 0.1
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
tokens = 3072
rows = 2
micro_batches = 4
learning_rate = 1e-2
eps = 1e-3
checkpoint_every = 4
held_out = { corpus = "code", window = 16 }
[mtp]
mix = [{ corpus = "code" }]
length = 32
tokens = 512
rows = 1
micro_batches = 4
eps = 1e-3
[sft]
mix = [{ corpus = "chat" }]
length = 64
tokens = 1024
rows = 1
micro_batches = 4
eps = 1e-3
"""
TWO = ["parallel.dp_shard=2", "parallel.ep=2"]
FOUR = ["parallel.dp_shard=2", "parallel.cp=2", "parallel.ep=2"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("ranks")
    for package in ("one", "two", "away"):
        (place / "code" / package).mkdir(parents=True)
        for name in ("a", "b"):
            text = "".join(f"def {package}_{name}_{i}(x, y):\n    return x * {i} + y\n\n" for i in range(12))
            (place / f"code/{package}/{name}.py").write_text(text)
    rows = [
        {"messages": [{"role": "user", "content": f"add {i}"}, {"role": "assistant", "content": f"the sum is {2 * i}"}]}
        for i in range(30)
    ]
    (place / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "ranks.toml").write_text(RECIPE)
    return place / "ranks.toml"


@pytest.fixture(scope="module")
def whole(recipe: Path) -> Run:
    """The run of one process."""
    out = recipe.parent / "whole"
    run_recipe(load_recipe(recipe), out)
    return Run.read(out)


def assert_same(run: Run, whole: Run) -> None:
    """Losses, held-out scores and learning rates of all stages are those of one process."""
    for stage in ("pretrain", "mtp", "sft"):
        found, want = run.metrics(stage), whole.metrics(stage)
        assert [(r["step"], r.get("evaluation")) for r in found] == [(r["step"], r.get("evaluation")) for r in want]
        for record, expected in zip(found, want, strict=True):
            for name in ("loss", "held_out_nats", "mtp_1_kl", "held_out_overlap", "gradient_norm", "tokens", "trained"):
                if name in expected:
                    assert record[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), (stage, record["step"])


def etude_run(recipe: Path, out: Path, overrides: list[str], *launcher: str) -> list[str]:
    given = [word for override in overrides for word in ("--set", override)]
    return [sys.executable, "-m", *launcher, "etude.cli", "run", str(recipe), "--out", str(out), "--resume", *given]


def test_a_run_of_two_processes_is_killed_and_continues_in_one(recipe: Path, whole: Run, tmp_path: Path) -> None:
    out = tmp_path / "run"
    started = subprocess.Popen(etude_run(recipe, out, TWO), stderr=subprocess.PIPE, text=True)
    while not (out / "checkpoints" / "pretrain-4").exists():
        assert started.poll() is None, started.communicate()
        time.sleep(0.05)
    follower = follower_of(started.pid, "etude.pipeline.ranks")
    os.kill(follower, signal.SIGKILL)
    _, problem = started.communicate()
    assert started.returncode == 1
    assert "Traceback" not in problem
    assert "rank 1 of 2 ended with signal 9" in problem
    continued = load_recipe(recipe)
    run_recipe(continued, out, resume=True)
    run = Run.read(out)
    assert_same(run, whole)
    assert any("imbalance" in record for record in run.metrics("pretrain"))  # of the first process
    checkpoint = run.find("checkpoint").path
    found = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    assert found.config.model_type == "deepseek_v3"
    assert Tokenizer.load(checkpoint)


@pytest.mark.slow
def test_torchrun_starts_the_same_run(recipe: Path, whole: Run, tmp_path: Path) -> None:
    launcher = ("torch.distributed.run", "--nproc-per-node", "4", "--rdzv-backend", "c10d", "--rdzv-endpoint")
    command = etude_run(recipe, tmp_path / "run", FOUR, *launcher, "127.0.0.1:0", "-m")
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert_same(Run.read(tmp_path / "run"), whole)


@pytest.mark.slow
def test_a_run_of_four_processes_continues_on_another_mesh(recipe: Path, whole: Run, tmp_path: Path) -> None:
    out = tmp_path / "run"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = subprocess.Popen(etude_run(recipe, out, FOUR), env=environment)
    while not (out / "checkpoints" / "pretrain-4").exists():
        assert started.poll() is None
        time.sleep(0.05)
    started.kill()
    started.wait()
    subprocess.run(etude_run(recipe, out, TWO), check=True, env=environment)
    assert_same(Run.read(out), whole)


def test_what_does_not_divide_is_refused_in_one_line(recipe: Path, tmp_path: Path) -> None:
    cases = {
        "parallel.dp_shard=3": r"micro_batches = 4 must be a multiple of dp_replicate x dp_shard = 3",
        "parallel.ep=2": r"ep = 2 must divide dp_shard x cp = 1",
        "pretrain.parallel.cp=3": r"length = 32 must be a multiple of 2 x cp = 6",
    }
    for override, message in cases.items():
        done = subprocess.run(etude_run(recipe, tmp_path, [override]), capture_output=True, text=True)
        assert done.returncode == 2
        assert re.search(message, done.stderr), done.stderr
        assert "Traceback" not in done.stderr
