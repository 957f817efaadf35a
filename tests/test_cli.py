"""The command as its users meet it: a process with arguments, two streams and an exit code."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import etude
from etude.recipe.recipe import load_recipe
from etude.runs.run import Run

ROOT = Path(__file__).parent.parent
SCRATCH = ROOT / "recipes" / "scratch.toml"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200", "NO_COLOR": "1"}


def command(*arguments: object, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "etude.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**ENVIRONMENT, **environment},
        timeout=60,
    )


def test_version_and_help() -> None:
    assert command("--version").stdout == f"etude {etude.__version__}\n"
    shown = command("--help")
    assert shown.returncode == 0
    for word in ("run", "recipe", "model", "Exit codes", "130 interrupted"):
        assert word in shown.stdout
    assert "--resume" in command("run", "--help").stdout


def test_the_command_starts_without_torch() -> None:
    code = "import sys, etude.cli, etude.pipeline.stages, etude.recipe.recipe; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT).returncode == 0


def test_a_model_is_loaded_without_the_compiler() -> None:
    code = "import sys, etude.inference.engine, etude.model.checkpoint; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT).returncode == 0


def test_rooms_are_attributes_of_the_package_and_nothing_else_is() -> None:
    code = "import etude; print(etude.data.__name__, etude.recipe.recipe.__name__, hasattr(etude, 'nonsense'))"
    shown = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True)
    assert shown.stdout == "etude.data etude.recipe.recipe False\n"


def test_recipe_show_prints_the_resolved_recipe(tmp_path: Path) -> None:
    shown = command("recipe", "show", SCRATCH, "--set", "nll.window=300")
    (tmp_path / "resolved.toml").write_text(shown.stdout)
    assert load_recipe(tmp_path / "resolved.toml") == load_recipe(SCRATCH, ["nll.window=300"])
    data = json.loads(command("recipe", "show", SCRATCH, "--json").stdout)
    assert data["nll"]["window"] == 512


def test_recipe_keys_lists_every_key_with_its_default_and_meaning() -> None:
    assert "nll.stride" in command("recipe", "keys").stdout
    keys = {key["name"]: key for key in json.loads(command("recipe", "keys", "--json").stdout)}
    assert keys["nll.window"]["default"] == "512"
    assert keys["tokenizer.sources"]["default"] == "required"
    assert all(key["doc"] for key in keys.values())


def test_bad_input_is_a_line_per_problem_and_exit_code_2(tmp_path: Path) -> None:
    failed = command("run", SCRATCH, "--out", tmp_path / "run", "--set", "nll.windw=1", "--set", "seed=x")
    assert failed.returncode == 2
    assert failed.stdout == ""
    assert failed.stderr.splitlines() == [
        f'etude: recipe {SCRATCH}: --set seed=x: seed must be an integer, not "x"',
        f"etude: recipe {SCRATCH}: --set nll.windw=1: nll.windw is not a key of [nll]; did you mean window?",
    ]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "arguments", [("run", SCRATCH), ("nonsense",), ("recipe", "show", "no.toml"), ("run", SCRATCH, "--ot", "x")]
)
def test_wrong_usage_is_exit_code_2_without_a_traceback(arguments: tuple[object, ...]) -> None:
    failed = command(*arguments)
    assert failed.returncode == 2
    assert "Traceback" not in failed.stderr


def test_developers_can_ask_for_the_traceback() -> None:
    failed = command("recipe", "show", "no.toml", ETUDE_TRACEBACK="1")
    assert failed.returncode != 0
    assert "Traceback" in failed.stderr


def test_an_existing_run_wants_resume(tmp_path: Path) -> None:
    with Run.create_or_resume(tmp_path, load_recipe(SCRATCH)):
        pass
    failed = command("run", SCRATCH, "--out", tmp_path)
    assert failed.returncode == 2
    assert "--resume" in failed.stderr


def test_a_run_somebody_holds_is_exit_code_3(tmp_path: Path) -> None:
    with Run.create_or_resume(tmp_path, load_recipe(SCRATCH)):
        failed = command("run", SCRATCH, "--out", tmp_path, "--resume")
    assert failed.returncode == 3
    (line,) = failed.stderr.splitlines()
    assert line.startswith(f"etude: run {tmp_path} is in use by pid {os.getpid()} on ")


def test_a_run_with_nothing_left_to_do_says_what_was_done(tmp_path: Path) -> None:
    recipe = load_recipe(SCRATCH)
    with Run.create_or_resume(tmp_path, recipe) as run:
        for stage in recipe.stages:
            run.finish_stage(stage, files=1234, score=0.5)
    done = command("run", SCRATCH, "--out", tmp_path, "--resume", "--json")
    assert done.returncode == 0
    expected = {stage: {"files": 1234, "score": 0.5} for stage in recipe.stages}
    assert json.loads(done.stdout) == {"run": str(tmp_path), "stages": expected}
    assert "tokenizer: files 1,234, score 0.5000\n" in command("run", SCRATCH, "--out", tmp_path, "--resume").stdout


def test_an_interrupted_run_exits_130_and_can_be_resumed(tmp_path: Path) -> None:
    """A stage that never ends stands in for a long one, so that the interrupt always arrives inside it."""
    recipe, run = tmp_path / "r.toml", tmp_path / "run"
    recipe.write_text('name = "r"\nstages = ["tokenizer"]\n[tokenizer]\nsources = ["stdlib"]\n')
    endless = (
        "import sys, time, etude.cli, etude.pipeline.stages;"
        "etude.pipeline.stages.STAGES['tokenizer'].run = lambda *_: (print('started', flush=True), time.sleep(60));"
        f"sys.argv = ['etude', 'run', {str(recipe)!r}, '--out', {str(run)!r}]; etude.cli.main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", endless],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert "etude: stopped in stage tokenizer; the same command with --resume continues" in errors
    assert "Traceback" not in errors
    with Run.create_or_resume(run, load_recipe(recipe), resume=True) as resumed:
        assert not resumed.stage_done("tokenizer")
