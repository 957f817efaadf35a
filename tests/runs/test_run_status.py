"""How far a run is, told in two lines, while somebody is at work on it and when nobody is."""

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
from etude.runs.run_status import standing

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
RESUME = "nobody is at work on it; `etude run` with --resume goes on"


def test_it_says_what_is_done_what_is_under_way_and_who_is_at_work(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    recipe, path = load_recipe(tmp_path / "recipe.toml"), tmp_path / "run"
    with pytest.raises(InputError, match="is not a run"):
        standing(path)
    with Run.create_or_resume(path, recipe) as run:
        first, second = standing(path)
        assert first == "tiny: in tokenizer; init, nll to come"
        assert re.fullmatch(rf"pid {os.getpid()} on \S+ since \S+ is at work on it", second)
        run.finish_stage("tokenizer")
        with run.checkpoint("init", 0):
            pass
        assert re.fullmatch(r"tiny: tokenizer done; in init \(init-0, \d s ago\); nll to come", standing(path)[0])
        run.finish_stage("init")
        run.log("nll", 3, nats=1.0)
    assert standing(path, time.time() + 200) == ["tiny: tokenizer, init done; in nll (step 3, 3 minutes ago)", RESUME]
    with Run.create_or_resume(path, recipe, resume=True) as run:
        run.finish_stage("nll")
    assert standing(path) == ["tiny: tokenizer, init, nll done; nothing is left to do"]


def test_who_was_killed_is_not_at_work(tmp_path: Path) -> None:
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
    assert standing(tmp_path / "run")[1] == RESUME
