"""The seed of a recipe changes its tasks and its initial weights; the same seed gives the same ones."""

from pathlib import Path

import pytest
from rl_runs import tiny_tokenizer

from etude.files import content_digest
from etude.pipeline.stages import run_recipe
from etude.recipe.recipe import load_recipe
from etude.runs.run import Run
from etude.tasks.harbor import find_tasks
from etude.tasks.settings import SEED_STRIDE, TaskSetSettings

RECIPE = """
name = "seeds"
stages = ["init", "tasks"]
[init]
tokenizer = "tokenizer"
[init.config]
model_type = "qwen3"
hidden_size = 16
intermediate_size = 24
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 8
max_position_embeddings = 4096
[[tasks.build]]
name = "train"
source = "nano"
count = 60
demonstrations = 4
[[tasks.build]]
name = "new"
source = "nano"
seed = 600_000
count = 30
[[tasks.build]]
name = "unseen"
source = "nano"
seed = 700_000
count = 30
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    directory = tmp_path_factory.mktemp("seeds")
    tiny_tokenizer().save(directory / "tokenizer")
    (directory / "seeds.toml").write_text(RECIPE)
    seeds = {"zero": 0, "one": 1, "one-again": 1}
    for name, seed in seeds.items():
        run_recipe(load_recipe(directory / "seeds.toml", [f"seed={seed}"]), directory / name)
    return {name: Run.read(directory / name) for name in seeds}


def visible_texts(run: Run) -> dict[str, str]:
    """Return the digest of what a model sees of each task, by set and task."""
    tasks = [(each.name, task) for each in run.artefacts("tasks") for task in find_tasks(each.path)]
    return {
        f"{name}/{task.name}": content_digest(task / "environment") + (task / "instruction.md").read_text()
        for name, task in tasks
    }


def test_two_seeds_share_no_task_in_any_set(runs: dict[str, Run]) -> None:
    zero, one = visible_texts(runs["zero"]), visible_texts(runs["one"])
    assert len(zero) == len(one) == 120
    assert not zero.keys() & one.keys()
    assert not set(zero.values()) & set(one.values())


def test_two_seeds_differ_in_demonstrations_and_initial_weights(runs: dict[str, Run]) -> None:
    for kind in ("demonstrations", "checkpoint"):
        assert runs["zero"].find(kind).digest != runs["one"].find(kind).digest


def test_the_same_seed_gives_identical_tasks_and_weights(runs: dict[str, Run]) -> None:
    digests = [{each.name: each.digest for each in runs[name].artefacts()} for name in ("one", "one-again")]
    assert digests[0] == digests[1]
    assert len(digests[0]) == 5


def test_seed_zero_keeps_the_seed_of_the_set() -> None:
    settings = TaskSetSettings(name="a", source="nano", count=1, seed=7)
    assert settings.for_run_seed(0) == settings
    assert settings.for_run_seed(2).seed == 2 * SEED_STRIDE + 7
    copied = TaskSetSettings(name="a", path=Path("/tasks"))
    assert copied.for_run_seed(3) == copied
