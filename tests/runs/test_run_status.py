"""The progress of a run in two lines, while a process runs it and afterwards."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from etude.errors import InputError
from etude.recipe.recipe import load_recipe
from etude.runs.run import Run
from etude.runs.run_status import run_status

RECIPE = """
name = "tiny"
stages = ["tokenizer", "init", "nll"]
[tokenizer]
sources = ["stdlib"]
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
sources = ["stdlib"]
"""
RESUME = "not running; `etude run` with --resume continues it"


def test_the_status_names_finished_stages_the_current_one_and_the_running_process(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    recipe, path = load_recipe(tmp_path / "recipe.toml"), tmp_path / "run"
    with pytest.raises(InputError, match="is not a run"):
        run_status(path)
    with Run.create_or_resume(path, recipe) as run:
        first, second = run_status(path)
        assert first == "tiny: in tokenizer; init, nll to come"
        assert re.fullmatch(rf"running: pid {os.getpid()} on \S+ since \S+", second)
        run.finish_stage("tokenizer")
        with run.checkpoint("init", 0):
            pass
        assert re.fullmatch(r"tiny: tokenizer done; in init \(init-0, \d s ago\); nll to come", run_status(path)[0])
        run.finish_stage("init")
        run.log("nll", 3, nats=1.0)
    assert run_status(path, time.time() + 200) == ["tiny: tokenizer, init done; in nll (step 3, 3 minutes ago)", RESUME]
    with Run.create_or_resume(path, recipe, resume=True) as run:
        run.finish_stage("nll")
    assert run_status(path) == ["tiny: tokenizer, init, nll done; nothing is left to do"]


def test_a_killed_process_is_not_running(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    killed = f"""
import os, signal
from pathlib import Path
from etude.recipe.recipe import load_recipe
from etude.runs.run import Run
with Run.create_or_resume({str(tmp_path / "run")!r}, load_recipe(Path({str(tmp_path / "recipe.toml")!r}))):
    os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", killed], check=False, timeout=60)
    assert (tmp_path / "run/lock").read_text().startswith("pid ")
    assert run_status(tmp_path / "run")[1] == RESUME
