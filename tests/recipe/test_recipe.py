"""A recipe is read strictly, or refused with errors that name the key and the mistake."""

import json
import os
import re
import string
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import example, given
from hypothesis import strategies as st

from etude.config import Settings, differing_keys, render_toml, settings_data, settings_keys, table_of
from etude.data.settings import CorpusSettings, TokenizerSettings
from etude.errors import InputError
from etude.recipe import Recipe, load_recipe

SCRATCH = Path(__file__).parents[2] / "recipes" / "scratch.toml"
TOKENIZER = 'name = "t"\nstages = ["tokenizer"]\n[tokenizer]\nsources = ["code"]\n'


def written(directory: Path, text: str) -> Path:
    path = directory / "r.toml"
    path.write_text(text, encoding="utf-8")
    return path


def problems(directory: Path, text: str, *overrides: str) -> list[str]:
    """Return the problems of a recipe, one line each, without the prefix that names the file."""
    path = written(directory, text)
    with pytest.raises(InputError) as caught:
        load_recipe(path, overrides)
    assert caught.value.exit_code == 2
    lines = str(caught.value).splitlines()
    assert all(line.startswith(f"recipe {path}: ") for line in lines), lines
    return [line.removeprefix(f"recipe {path}: ") for line in lines]


# --- reading


def test_a_recipe_loads_again_after_rendering(tmp_path: Path) -> None:
    recipe = load_recipe(SCRATCH)
    assert recipe.stages == ("tokenizer", "init", "corpus", "pretrain", "mtp", "extend", "sft", "nll")
    assert recipe.init is not None
    assert recipe.init.config["hidden_size"] == 128
    assert load_recipe(written(tmp_path, render_toml(recipe))) == recipe


@pytest.mark.parametrize("path", sorted(SCRATCH.parent.glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_of_the_project_is_valid(path: Path, tmp_path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe.name == path.stem
    assert load_recipe(written(tmp_path, render_toml(recipe))) == recipe


def test_the_cpu_and_the_gpu_recipe_have_the_same_stages_and_tables() -> None:
    names = "nano.toml", "smollm2-135m.toml"
    small, large = (tomllib.loads((SCRATCH.parent / name).read_text(encoding="utf-8")) for name in names)
    small["stages"].remove("control")  # on a GPU controls are runs of their own, of a sweep
    del small["control"]
    assert small["stages"] == large["stages"]
    assert small.keys() == large.keys()
    assert small["rl"].keys() - large["rl"].keys() == set()
    assert len(small["corpus"]["build"]) == len(large["corpus"]["build"])


def test_the_recipe_in_the_documentation_is_valid(tmp_path: Path) -> None:
    page = (SCRATCH.parent.parent / "docs" / "recipes.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)  # what turns own.toml into one with SFT
    stages, tables = text.split("\n", 1)
    own = re.sub(r"stages = .*", stages, (SCRATCH.parent / "own.toml").read_text(encoding="utf-8"))
    assert load_recipe(written(tmp_path, f"{own}\n{tables}")).stages == tuple(json.loads(stages.partition("=")[2]))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "rl.sampler.kv_cache_tokens=64",
            "sampler.kv_cache_tokens = 64 does not hold one session: give at least window = 2048",
        ),
        ("rl.prefetch_steps=4.5", "prefetch_steps = 4.5 is more than max_staleness = 4"),
        ("rl.budget.max_turn_tokens=5000", "budget.max_turn_tokens = 5000 must be less than window = 2048"),
        ("rl.learning_rate=inf", "rl.learning_rate must be a finite number"),
        ("evaluation.test=train", 'evaluation.test names "train", which rl trains on'),
        ("evaluation.test=validation", '"validation" is given twice among validation and test'),
        ('evaluation.models=["init"]', 'evaluation.models names "init", which is not in stages'),
        ("evaluation.samples=65", "evaluation.samples must be less than or equal to 64"),
        ("evaluation.sessions.window=512", 'evaluation.sessions would not be used: the stage "rl" makes it'),
        ("rl.evaluation.samples=2", 'rl.evaluation is now [evaluation], the table of the stage "evaluation"'),
    ],
)
def test_contradictory_settings_of_rl_are_refused(override: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        load_recipe(SCRATCH.parent / "nano.toml", [override])
    assert words in str(caught.value)


def test_relative_paths_start_at_the_recipe_and_become_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    text = 'name = "n"\nstages = ["nll"]\n[nll]\nsources = ["../code", "stdlib", "/abs"]\nmodel = "m"\n'
    recipe = load_recipe(written(tmp_path, text))
    assert recipe.nll is not None
    assert recipe.nll.sources == (str(tmp_path.parent / "code"), "stdlib", "/abs")
    assert recipe.nll.model == tmp_path / "m"


def test_a_path_on_the_command_line_starts_at_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    recipe = load_recipe(written(tmp_path, TOKENIZER), ['tokenizer.sources=["x", "stdlib"]'])
    assert recipe.tokenizer is not None
    assert recipe.tokenizer.sources == (str(tmp_path / "elsewhere" / "x"), "stdlib")


def test_a_recipe_beside_the_commands_has_the_paths_of_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("own.toml", "own-small.toml"):
        (tmp_path / name).write_text((SCRATCH.parent / name).read_text())
        recipe = load_recipe(Path(name))
        assert recipe.tasks is not None
        assert recipe.corpus is not None
        assert [each.path for each in recipe.tasks.build[:3]] == [
            Path("tasks", name).absolute() for name in ("train", "validation", "unseen")
        ]
        assert recipe.corpus.build[0].sources[0] == os.path.abspath("../service")
        assert load_recipe(Path(name), ['rl.tasks="./tasks"']).rl.tasks == str(tmp_path / "tasks")  # type: ignore[union-attr]
        assert recipe.rl is not None
        assert recipe.rl.tasks == "train"  # a name


def test_overrides_are_toml_values_or_else_strings(tmp_path: Path) -> None:
    overrides = ["tokenizer.vocab_size=2048", "name=two words", "seed = 7"]
    recipe = load_recipe(written(tmp_path, TOKENIZER), overrides)
    assert recipe.tokenizer is not None
    assert (recipe.tokenizer.vocab_size, recipe.name, recipe.seed) == (2048, "two words", 7)


def test_an_override_reaches_into_the_model_config() -> None:
    recipe = load_recipe(SCRATCH, ["init.config.hidden_size=64", "init.config.rope_scaling.factor=2.0"])
    assert recipe.init is not None
    assert recipe.init.config["hidden_size"] == 64
    assert recipe.init.config["rope_scaling"] == {"factor": 2.0}


paths = st.text(string.ascii_letters + string.digits + "._- /é\"'\\\n", min_size=1).map(os.path.abspath)
sources = st.lists(paths | st.just("stdlib"), min_size=1, max_size=3)
json_values = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    order = ["tokenizer", "init", "nll"]
    stages = [stage for stage in order if draw(st.booleans())] or [draw(st.sampled_from(order))]
    data: dict[str, Any] = {"name": draw(st.text(min_size=1)), "stages": stages}
    data["seed"] = draw(st.integers(0, 2**63 - 1))
    if "tokenizer" in stages:
        data["tokenizer"] = {"sources": draw(sources), "vocab_size": draw(st.integers(300, 10**9))}
    if "init" in stages:
        # `architectures` is a label for other tools: it may hold anything, and must come back unchanged
        config = load_recipe(SCRATCH).init.config | {"architectures": draw(json_values)}  # type: ignore[union-attr]
        data["init"] = {"config": config, "dtype": draw(st.sampled_from(["float32", "bfloat16"]))}
        data["init"] |= {} if "tokenizer" in stages else {"tokenizer": Path(draw(paths))}
    if "nll" in stages:
        window = draw(st.integers(2, 10**6))
        data["nll"] = {"sources": draw(sources), "window": window, "stride": draw(st.integers(1, window))}
        data["nll"] |= {} if "init" in stages else {"model": Path(draw(paths))}
        data["nll"] |= draw(st.just({}) | st.fixed_dictionaries({"max_files": st.integers(1, 10**6)}))
    return Recipe.model_validate(data)


@given(recipe=recipes())
def test_any_recipe_loads_again_after_rendering(tmp_path_factory: pytest.TempPathFactory, recipe: Recipe) -> None:
    path = tmp_path_factory.getbasetemp() / "rendered.toml"
    path.write_text(render_toml(recipe), encoding="utf-8", newline="")
    loaded = load_recipe(path)
    assert loaded == recipe
    assert render_toml(loaded) == render_toml(recipe)


# --- errors


KEYS = [key.name for key in settings_keys(Recipe) if "[]" not in key.name]


@given(key=st.sampled_from(KEYS), at=st.integers(0, 30), letter=st.sampled_from(string.ascii_lowercase))
@example(key="nll.window", at=2, letter="z")
def test_a_misspelt_key_is_named_with_the_nearest_valid_one(
    tmp_path_factory: pytest.TempPathFactory, key: str, at: int, letter: str
) -> None:
    section, _, name = key.rpartition(".")
    at %= len(name)
    wrong = name[:at] + letter + name[at:]  # one extra letter
    dotted = f"{section}.{wrong}" if section else wrong
    text = f'{dotted} = 1\nname = "n"\nstages = ["tokenizer"]\n' if not section else f"{dotted} = 1\n"
    lines = problems(tmp_path_factory.getbasetemp(), text)
    table = f"[{section}]" if section else "the recipe"
    assert f"{dotted} is not a key of {table}; did you mean {name}?" in lines


def renamed_keys(
    root: type[Settings] = Recipe, table: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """Yield the table, the old and the new name of every renamed key of a settings class and of the tables in it."""
    for old, new in root.renamed_keys.items():
        assert old not in root.model_fields
        if not new.startswith("["):  # the table moved; tested with contradictory settings
            assert new in root.model_fields
            yield table, old, new
    for name, field in root.model_fields.items():
        if inner := table_of(field):
            yield from renamed_keys(inner, (*table, name))


RENAMED = list(renamed_keys())


def test_all_tables_with_renamed_keys_are_found() -> None:
    training = {(stage, old) for stage in ("pretrain", "mtp", "extend", "sft") for old in ("final", "clip")}
    rl = {("rl", old) for old in ("ahead", "attempts", "clip", "environment")}
    rl |= {("rl.estimator", "correction")}
    shared = [("sampler", "tokens"), ("sampler", "max_streams"), ("sampler", "budget"), ("tool_set", "naming")]
    shared += [("tool_set", "brief"), ("budget", "answer"), ("summaries", "attempts"), ("summaries", "most")]
    rl |= {(f"{table}.{inner}", old) for table in ("rl", "evaluation.sessions") for inner, old in shared}
    rl |= {("evaluation.sampler", old) for inner, old in shared if inner == "sampler"}
    expected = training | rl | {("", "track"), ("tasks.build", "experts")}
    assert {(".".join(table), old) for table, old, _ in RENAMED} == expected


@pytest.mark.parametrize(
    ("table", "old", "new"), RENAMED, ids=lambda value: value if isinstance(value, str) else ".".join(value)
)
def test_a_key_of_an_earlier_version_is_an_error_that_names_the_new_key(
    tmp_path: Path, table: tuple[str, ...], old: str, new: str
) -> None:
    recipe = tomllib.loads((SCRATCH.parent / "nano.toml").read_text(encoding="utf-8"))
    dotted, inner = "", recipe
    for name in table:
        inner, dotted = inner.setdefault(name, {}), f"{dotted}{name}"
        if isinstance(inner, list):
            inner, dotted = inner[0], f"{dotted}[0]"
        dotted += "."
    inner[old] = inner.pop(new, 1)
    lines = problems(tmp_path, tomli_w.dumps(recipe))
    assert f"{dotted}{old} is now called {dotted}{new}; rename it" in lines


def test_a_misspelt_key_in_a_list_of_tables_is_named_with_its_index(tmp_path: Path) -> None:
    text = 'name = "n"\nstages = ["corpus"]\n[corpus]\ntokenizer = "t"\n'
    wrong = (
        text + '[[corpus.build]]\nname = "c"\nsources = ["stdlib"]\n[[corpus.build]]\nnme = "d"\nsources = ["stdlib"]\n'
    )
    assert problems(tmp_path, wrong) == [
        f"corpus.build[1].name is missing: {CorpusSettings.model_fields['name'].description}",
        "corpus.build[1].nme is not a key of [corpus.build[1]]; did you mean name?",
    ]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("init.config.rope_tetha=5", "init.config.rope_tetha would not be used: a qwen3 model has no such key"),
        ("init.config.num_hidden_layers=-3", "num_hidden_layers is -3; expected an integer of at least 1"),
        ("init.config.head_dim=7", "head_dim is 7; rotary positions rotate pairs"),
        ("init.config={}", "model_type is None"),
        ('pretrain.mix=[{corpus="stdlub"}]', 'pretrain.mix names the corpus "stdlub"'),
        ("pretrain.evaluate_every=-1", "pretrain.evaluate_every must be at least 0"),
    ],
)
def test_an_impossible_model_or_mixture_is_refused_when_the_recipe_is_read(override: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        load_recipe(SCRATCH, [override])
    assert words in str(caught.value)


@pytest.mark.parametrize("override", ['stages=[["a"]]', "stages=" + "[" * 3000])
def test_strange_overrides_are_errors_not_crashes(override: str) -> None:
    with pytest.raises(InputError, match="stages"):
        load_recipe(SCRATCH, [override])


def test_a_key_below_the_wrong_header_is_named_with_the_right_one(tmp_path: Path) -> None:
    assert problems(tmp_path, TOKENIZER + "seed = 3\nstride = 8\n") == [
        "tokenizer.seed is not a key of [tokenizer]; did you mean seed?",
        "tokenizer.stride is not a key of [tokenizer]; did you mean nll.stride?",
    ]


@pytest.mark.parametrize(
    ("value", "shown"), [('"512"', '"512"'), ("512.0", "512.0"), ("true", "true"), ("[512]", "[512]")]
)
def test_only_an_integer_is_an_integer(tmp_path: Path, value: str, shown: str) -> None:
    assert problems(tmp_path, TOKENIZER + f"vocab_size = {value}\n") == [
        f"tokenizer.vocab_size must be an integer, not {shown}"
    ]


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    text = (
        'nane = "n"\nname = 3\nstages = ["init", "nll"]\n[tokenizer]\nsources = []\n'
        '[init]\nconfig = {vocab_size = 9}\ndtype = "int8"\n'
        '[nll]\nsources = ["a", 1]\nwindow = 1\nmodel = "m"\n'
    )
    assert sorted(problems(tmp_path, text)) == [
        '[tokenizer] would not be used: "tokenizer" is not in stages = ["init", "nll"]; add it or remove the table',
        "init.dtype must be 'float32' or 'bfloat16', not \"int8\"",
        'init.tokenizer is needed, as no stage makes it: set it or add the stage "tokenizer"',
        "name must be a string, not 3",
        "nane is not a key of the recipe; did you mean name?",
        'nll.model would not be used: the stage "init" makes it; remove one of them',
        "nll.sources[1] must be a string, not 1",
        "nll.window must be at least 2, not 1",
        "tokenizer.sources must not be empty",
    ]


@pytest.mark.parametrize(
    ("stages", "complaint"),
    [
        ("[]", "stages must not be empty"),
        ('"nll"', 'stages must be a list, not "nll"'),
        ('["nl"]', 'stages names "nl", which is not a stage; did you mean nll?'),
        ('["init", "tokenizer"]', 'stages must be in pipeline order: ["tokenizer", "init"]'),
        ('["nll", "nll"]', 'stages names "nll" twice; a stage runs once'),
    ],
)
def test_stages_are_known_distinct_and_in_order(tmp_path: Path, stages: str, complaint: str) -> None:
    assert complaint in problems(tmp_path, f'name = "n"\nstages = {stages}\n')


def test_a_stage_without_its_table_is_an_error_that_names_the_missing_key(tmp_path: Path) -> None:
    (line,) = problems(tmp_path, 'name = "n"\nstages = ["tokenizer"]\n')
    assert line == f"tokenizer.sources is missing: {TokenizerSettings.model_fields['sources'].description}"


def test_a_stride_longer_than_its_window_is_refused(tmp_path: Path) -> None:
    text = 'name = "n"\nstages = ["nll"]\n[nll]\nsources = ["a"]\nmodel = "m"\nwindow = 8\nstride = 9\n'
    assert problems(tmp_path, text) == ["nll.stride must be at most window = 8, not 9"]


def test_the_vocabulary_size_of_the_config_is_refused() -> None:
    with pytest.raises(InputError, match=r"init\.config\.vocab_size would not be used"):
        load_recipe(SCRATCH, ["init.config.vocab_size=99"])


def test_a_wrong_override_is_named(tmp_path: Path) -> None:
    overrides = ["tokenizer.vocab_sise=400", "tokenizer.vocab_size=many", "seed.x=1", "loose"]
    assert sorted(problems(tmp_path, f"seed = 0\n{TOKENIZER}", *overrides)) == [
        "--set loose: expected KEY=VALUE, such as tokenizer.vocab_size=2048",
        "--set seed.x=1: seed is not a table",
        "--set tokenizer.vocab_sise=400: tokenizer.vocab_sise is not a key of [tokenizer]; did you mean vocab_size?",
        '--set tokenizer.vocab_size=many: tokenizer.vocab_size must be an integer, not "many"',
    ]


def test_a_syntax_error_names_the_line(tmp_path: Path) -> None:
    path = written(tmp_path, 'name = "n"\nstages = ["nll"]\nseed 3\n')
    with pytest.raises(InputError, match=rf"recipe {path}:3: not valid TOML"):
        load_recipe(path)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b'name = "caf\xe9"\n')
    for path, complaint in [("none.toml", "does not exist"), ("latin.toml", "not UTF-8"), (".", "directory")]:
        with pytest.raises(InputError, match=complaint):
            load_recipe(tmp_path / path)


def test_differing_keys_are_listed_old_to_new() -> None:
    old, new = load_recipe(SCRATCH), load_recipe(SCRATCH, ["nll.window=300", "init.config.head_dim=16"])
    assert differing_keys(settings_data(old), settings_data(new)) == [
        "init.config.head_dim: 32 -> 16",
        "nll.window: 512 -> 300",
    ]
    assert differing_keys(settings_data(old), settings_data(old)) == []
