"""The examples of docs/extending.md are complete: they are taken from the page and run in an empty directory."""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from etude.config import import_plugins

ROOT = Path(__file__).resolve().parents[1]
MAX_LINES = 50


def examples() -> dict[str, str]:
    """Return the files of the page; the first line of each is its name."""
    page = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
    return dict(re.findall(r"```(?:python|toml)\n# (\S+)\n(.*?)```", page, re.DOTALL))


@pytest.fixture
def directory(tmp_path: Path, isolated_plugins: None) -> Path:
    for name, text in examples().items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def etude(directory: Path, *arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command in the directory; `path` is where Etude is installed, by default this checkout."""
    environment = {**os.environ, "PYTHONPATH": path or str(ROOT)}
    command = [sys.executable, "-m", "etude.cli", *arguments]
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=600)


def test_the_examples_are_short() -> None:
    files = {name: text for name, text in examples().items() if name.endswith(".py")}
    assert len(files) == 5
    assert all(len(text.splitlines()) <= MAX_LINES for text in files.values())


def test_they_use_public_names_only() -> None:
    for name, text in examples().items():
        for package, names in re.findall(r"^from (etude[\w.]*) import (.+)$", text, re.MULTILINE):
            assert package.count(".") == 1, f"{name}: {package} is not a package of etude"
            exported = __import__(package, fromlist=["x"]).__all__
            assert set(names.split(", ")) <= set(exported), name


def test_a_task_source_and_a_family_run_in_etude_run(directory: Path) -> None:
    ran = etude(directory, "run", "recipe.toml", "--out", "run", "--set", 'stages=["tokenizer", "init", "tasks"]')
    assert ran.returncode == 2
    assert "[rl] would not be used" in ran.stderr
    text = (directory / "recipe.toml").read_text().replace(', "rl"]', "]").partition("\n[rl]\n")[0]
    (directory / "short.toml").write_text(text)
    ran = etude(directory, "run", "short.toml", "--out", "run")
    assert ran.returncode == 0, ran.stderr
    config = json.loads((directory / "run/checkpoints/init-0/config.json").read_text())
    assert config["model_type"] == "seed_oss"
    tasks = sorted(path.name for path in (directory / "run/artefacts/tasks-train").iterdir())
    assert tasks == ["even-0001", "even-0002"]


def test_the_family_computes_what_transformers_computes(directory: Path) -> None:
    transformers = pytest.importorskip("transformers")
    import_plugins([str(directory / "seed_oss.py")])
    from etude.model import load

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 128, "head_dim": 16}
    config = transformers.SeedOssConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    torch.manual_seed(0)
    reference = transformers.SeedOssForCausalLM(config).eval()
    for name, parameter in reference.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    reference.save_pretrained(directory / "model")
    tokens = torch.randint(128, (2, 17))
    with torch.no_grad():
        found, expected = load(directory / "model")(tokens), reference(tokens).logits
    assert (found - expected).abs().max() < 1e-5


def test_a_checkpoint_names_the_plugin_of_its_family(directory: Path) -> None:
    text = (directory / "recipe.toml").read_text().partition("[tokenizer]")[2].partition("[init.config]")[2]
    sizes = dict(line.split(" = ") for line in text.partition("[[")[0].split("\n") if line)
    config = {key: json.loads(value) for key, value in sizes.items()} | {"vocab_size": 64}
    (directory / "config.json").write_text(json.dumps(config))
    code = "from etude.model.config import ModelConfig; print(ModelConfig.load('.').family)"
    load = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    alone = subprocess.run(load, cwd=directory, env=environment, capture_output=True, text=True)
    assert "model_type is 'seed_oss'; choose from" in alone.stderr
    (directory / "agent.json").write_text(json.dumps({"plugins": [str(directory / "seed_oss.py")]}))
    found = subprocess.run(load, cwd=directory, env=environment, capture_output=True, text=True)
    assert found.stdout == "seed_oss\n", found.stderr


def test_the_objective_is_clipped(directory: Path) -> None:
    import_plugins([str(directory / "clipped_ppo.py")])
    from etude.rl.settings import OBJECTIVES

    loss = OBJECTIVES["clipped_ppo"]
    logprobs = torch.tensor([0.5, 0.5, -0.5, -0.5], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    loss(logprobs, torch.zeros(4), advantages).backward()
    ratio = logprobs.detach().exp()
    assert logprobs.grad is not None
    assert torch.allclose(logprobs.grad, torch.tensor([0.0, ratio[1], -ratio[2], 0.0]))


def test_the_reward_and_the_tool_are_registered(directory: Path) -> None:
    import_plugins([str(directory / "short_final.py"), str(directory / "count_lines.py")])
    from cases import case

    from etude.harness import ToolSet
    from etude.harness.tools.executor import exposed_tools
    from etude.rewards import grade, score

    weights = {"correctness": 1.0, "short_final": 0.1, "small_change": 0.2}
    assert score(asyncio.run(grade(case(), weights)), weights).total == pytest.approx(1.2)
    for aliases in ("cursor", "bash"):
        shown = exposed_tools(ToolSet(tools=("run_terminal_cmd", "count_lines"), aliases=aliases))
        assert "count_lines" in shown


@pytest.mark.slow
def test_all_of_them_run_in_reinforcement_learning_from_an_installed_package(
    directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    installed = tmp_path_factory.mktemp("site")
    source = tmp_path_factory.mktemp("source")  # a build leaves files in its directory
    for name in ("etude", "etude_nano"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "-q", "--target", str(installed)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(source)], check=True)
    path = os.pathsep.join([str(installed), sysconfig.get_path("purelib")])
    ran = etude(directory, "run", "recipe.toml", "--out", "run", "--json", path=path)
    assert ran.returncode == 0, ran.stderr
    facts = json.loads(ran.stdout)["stages"]
    assert facts["rl"]["steps"] == 1
    metrics = [json.loads(line) for line in (directory / "run/metrics.jsonl").read_text().splitlines()]
    assert any("reward/small_change" in record for record in metrics)
    profile = json.loads(next((directory / "run").glob("checkpoints/rl-*/agent.json")).read_text())
    assert len(profile["plugins"]) == 5
    (directory / "clipped_ppo.py").write_text("# changed\n" + (directory / "clipped_ppo.py").read_text())
    again = etude(directory, "run", "recipe.toml", "--out", "run", "--resume", path=path)
    assert again.returncode == 2
    assert again.stderr.count("\n") == 1
    assert "another version of the plugin" in again.stderr
