"""The tasks stage of a recipe, experts as a corpus, and a base that is a directory."""

import json
from pathlib import Path

import pytest
import torch

from etude import model as models
from etude.chat.tokenizer import CHAT_TEMPLATE, Tokenizer
from etude.errors import InputError
from etude.model.config import ModelConfig
from etude.pipeline.stages import run_recipe
from etude.recipe.recipe import load_recipe
from etude.runs.run import Run
from etude.tasks.harbor import find_tasks
from etude.tasks.stage import DEMONSTRATIONS_FILE, demonstrations_file
from etude_nano.demonstrator import read_files
from etude_nano.pod_sessions import vocabulary_texts
from etude_nano.source import generate_nano, text_digest
from etude_nano.tokenizer import train_nano_tokenizer

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "tie_word_embeddings": True,
    "max_position_embeddings": 1024,
}
RECIPE = """
name = "sets"
stages = ["base", "tasks", "corpus"]
[base]
source = "./model"
[[tasks.build]]
name = "train"
source = "nano"
count = 6
difficulties = [1, 2]
seed = 40
demonstrations = 5
[[tasks.build]]
name = "mine"
path = "given"
[[corpus.build]]
name = "sessions"
chat = true
sources = ["demonstrations:train"]
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("stage")
    tokenizer = train_nano_tokenizer(vocabulary_texts(30), 900)
    config = ModelConfig.from_hugging_face({**CONFIG, "vocab_size": len(tokenizer)})
    models.save(models.initialize(config, dtype=torch.bfloat16), place / "model")
    tokenizer.save(place / "model")
    generate_nano(place / "given", 2, "unseen")
    (place / "sets.toml").write_text(RECIPE)
    run_recipe(load_recipe(place / "sets.toml"), place / "run")
    return place


def test_the_base_may_be_a_directory_and_is_kept_as_it_is(place: Path) -> None:
    made, given = models.load(place / "run/checkpoints/base-0"), models.load(place / "model", dtype=torch.float32)
    assert all(torch.equal(one, other) for one, other in zip(made.parameters(), given.parameters(), strict=True))
    assert Tokenizer.load(place / "run/checkpoints/base-0").digest == Tokenizer.load(place / "model").digest


def test_sets_are_artefacts_and_demonstrations_are_on_other_tasks(place: Path) -> None:
    sets = {path.name: path for path in (place / "run/artefacts").iterdir()}
    own = {text_digest(read_files(task)) for task in find_tasks(sets["tasks-train"])}
    assert len(own) == 6
    assert len(list(find_tasks(sets["tasks-mine"]))) == 2
    rows = [json.loads(line) for line in (sets["demonstrations-train"] / DEMONSTRATIONS_FILE).read_text().splitlines()]
    assert len(rows) == 5
    requests = {task: read_files(task)["instruction.md"] for task in find_tasks(sets["tasks-train"])}
    assert not {row["messages"][1]["content"] for row in rows} & set(requests.values())
    assert json.loads((sets["corpus-sessions"] / "report.json").read_text())["splits"]["train"]["documents"] == 5


def test_a_finished_set_is_not_made_again(place: Path) -> None:
    recipe = load_recipe(place / "sets.toml")
    facts = run_recipe(recipe, place / "run", resume=True)
    assert facts["tasks"] == {"train": {"tasks": 6, "demonstrations": 5}, "mine": {"tasks": 2}}
    with Run.create_or_resume(place / "run", recipe, resume=True) as run:
        assert demonstrations_file(run, "train").is_file()
        with pytest.raises(InputError, match="this run has no demonstrations:mine"):
            demonstrations_file(run, "mine")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('path = "given"', 'path = "given"\nsource = "nano"', "give exactly one of them"),
        ('path = "given"', 'path = "given"\ncount = 3', "count would not be used"),
        ("count = 6", "", "count is missing"),
        ("seed = 40", 'split = "new"', "demonstrations would reveal measured tasks"),
        ("demonstrations = 5", "", '"demonstrations:train" needs a set train'),
        ("demonstrations = 5", "mistakes = 0.0", "mistakes would not be used"),
        ("chat = true", "", "which are conversations"),
        ('name = "mine"', 'name = "train"', "names train twice"),
        ('source = "nano"', 'source = "micro"', 'no task source "micro"'),
    ],
)
def test_a_key_that_would_not_act_is_an_error(place: Path, tmp_path: Path, old: str, new: str, says: str) -> None:
    assert old in RECIPE
    (tmp_path / "sets.toml").write_text(RECIPE.replace(old, new))
    with pytest.raises(InputError, match=says):
        load_recipe(tmp_path / "sets.toml")


def test_a_directory_without_tasks_is_no_set(place: Path, tmp_path: Path) -> None:
    (tmp_path / "given").mkdir()
    text = RECIPE.replace("./model", str(place / "model"))
    (tmp_path / "sets.toml").write_text(text)
    with pytest.raises(InputError, match="has no task"):
        run_recipe(load_recipe(tmp_path / "sets.toml"), tmp_path / "run")


def test_a_base_without_tools_gets_a_template_that_has_them(place: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    models.save(models.load(place / "model"), plain)
    tokenizer = Tokenizer.load(place / "model")
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save(plain)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('name = "t"\nstages = ["base"]\n[base]\nsource = "./plain"\nchat_template = "chatml"\n')
    run_recipe(load_recipe(recipe), tmp_path / "run")
    assert Tokenizer.load(tmp_path / "run" / "checkpoints" / "base-0").chat_template == CHAT_TEMPLATE


def test_demonstrations_make_as_many_mistakes_as_asked_for(place: Path, tmp_path: Path) -> None:
    text = RECIPE.replace("demonstrations = 5", "demonstrations = 40\nmistakes = CHANCE").replace(
        '"./model"', f'"{place / "model"}"'
    )
    text = text.replace('path = "given"', f'path = "{place / "given"}"')
    failed = []
    for chance in ("0", "1"):
        recipe = tmp_path / f"{chance}.toml"
        recipe.write_text(text.replace("CHANCE", chance))
        run_recipe(load_recipe(recipe), tmp_path / chance)
        rows = map(json.loads, demonstrations_file(Run.read(tmp_path / chance), "train").read_text().splitlines())
        answers = [[said["content"] for said in row["messages"] if said["role"] == "tool"] for row in rows]
        failed.append(sum(any("was not found" in text or "exit code 1" in text for text in each) for each in answers))
    assert failed[0] < 8, failed  # some checks fail before the change
    assert failed[1] > 12, failed
