"""Registries, and plugins that a recipe names: imported before its tables are checked, recorded with a digest."""

import subprocess
import sys
from pathlib import Path

import pytest

from etude.config import Registry, check_options, load_table, render_toml
from etude.errors import InputError
from etude.recipe import load_recipe
from etude.rollouts.settings import RolloutSettings
from etude.runs.run import Run

TERM = """
from etude.rewards import TermResult, VerifiedTrial, term

@term
def {name}(trial: VerifiedTrial) -> TermResult:
    return TermResult(0.5)
"""
RECIPE = """
name = "t"
plugins = ["plugins/{name}.py"]
stages = ["rl"]
[rl]
model = "model"
tasks = "./tasks"
steps = 1
rewards = {{ {name} = 1.0 }}
"""


pytestmark = pytest.mark.usefixtures("isolated_plugins")


def with_plugin(directory: Path, name: str) -> Path:
    """Write a recipe whose reward is a term of a plugin file beside it."""
    (directory / "plugins").mkdir(exist_ok=True)
    (directory / "plugins" / f"{name}.py").write_text(TERM.format(name=name))
    recipe = directory / "recipe.toml"
    recipe.write_text(RECIPE.format(name=name))
    return recipe


def refused(recipe: Path, *overrides: str) -> str:
    with pytest.raises(InputError) as caught:
        load_recipe(recipe, overrides)
    return str(caught.value).removeprefix(f"recipe {recipe}: ")


def test_a_registry_names_its_entries_and_suggests_the_closest() -> None:
    shapes = Registry[object]("shape", lazy={"tree": "json:dumps"})
    shapes.register("round")(1)
    assert list(shapes) == ["tree", "round"]
    assert shapes["round"] == 1
    assert callable(shapes["tree"])
    with pytest.raises(InputError, match="ruond is not a shape; did you mean round"):
        shapes["ruond"]
    with pytest.raises(InputError, match="shape 'round' is registered twice"):
        shapes.register("round")(2)
    with pytest.raises(InputError, match="shape 'tree' is registered twice"):
        shapes.register("tree")(2)


def test_names_are_checked_without_torch() -> None:
    code = (
        "import sys, etude.recipe; from etude.rl.settings import RlSettings; RlSettings(tasks='t', steps=1);"
        "from etude.harness.tools.tool import TOOLS; from etude.model.config import FAMILIES;"
        "assert 'grep' in TOOLS and 'llama' in FAMILIES; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_options_are_the_keyword_only_parameters() -> None:
    def function(rewards: list[float], *, clip: float = 0.2, kind: str = "a") -> None: ...

    check_options("options", function, {"clip": 1, "kind": "b"})
    with pytest.raises(ValueError, match=r"options\.clib is not an option of function; did you mean clip"):
        check_options("options", function, {"clib": 1})
    with pytest.raises(ValueError, match=r"options\.clip: Input should be a valid number, not 'x'"):
        check_options("options", function, {"clip": "x"})


def test_a_plugin_file_is_imported_relative_to_the_recipe_and_recorded(tmp_path: Path) -> None:
    recipe = load_recipe(with_plugin(tmp_path, "half_mark"))
    file = str(tmp_path / "plugins" / "half_mark.py")
    assert recipe.plugins == (file,)
    assert list(recipe.plugin_digests) == [file]
    resolved = tmp_path / "elsewhere" / "recipe.toml"
    resolved.parent.mkdir()
    resolved.write_text(render_toml(recipe))
    assert load_recipe(resolved) == recipe
    # Another process of the run reads its own table, and has the term.
    code = (
        "import sys; from pathlib import Path; from etude.config import load_table;"
        "from etude.rollouts.settings import RolloutSettings; from etude.rewards import TERMS;"
        "load_table(Path(sys.argv[1]), 'rl', RolloutSettings); assert 'half_mark' in TERMS;"
        "from half_mark import half_mark"
    )
    subprocess.run([sys.executable, "-c", code, str(resolved)], check=True, cwd=tmp_path)


def test_a_resume_with_a_changed_plugin_is_refused_in_one_line(tmp_path: Path) -> None:
    file = with_plugin(tmp_path, "changed_mark")
    with Run.create_or_resume(tmp_path / "run", load_recipe(file)):
        pass
    plugin = tmp_path / "plugins" / "changed_mark.py"
    plugin.write_text(plugin.read_text() + "# another version\n")
    with pytest.raises(InputError, match=rf"another version of the plugin {plugin}; restore that version") as caught:
        Run.create_or_resume(tmp_path / "run", load_recipe(file), resume=True)
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match=rf"plugin {plugin} has changed since the run was started"):
        load_table(tmp_path / "run" / "recipe.toml", "rl", RolloutSettings)


def test_a_module_is_a_plugin_too() -> None:
    from etude.config import import_plugins

    digests = import_plugins(["etude_nano.plugin", "etude_nano"])
    assert len(set(digests.values())) == 2


@pytest.mark.parametrize(
    ("plugin", "expected"),
    [
        ("plugins/absent.py", r"plugin .*/plugins/absent.py does not exist; name a Python file or a module"),
        ("no_such_module", "plugin no_such_module cannot be imported: ModuleNotFoundError: No module named"),
        ("plugins/json.py", r"plugin .*/plugins/json.py: `import json` finds .*json/__init__.py; rename the file"),
        ("plugins/broken.py", r"plugin .*/plugins/broken.py cannot be imported: ZeroDivisionError: division by zero"),
    ],
)
def test_a_plugin_that_cannot_be_imported_is_an_error_of_the_recipe(tmp_path: Path, plugin: str, expected: str) -> None:
    recipe = with_plugin(tmp_path, "unused_mark")
    for name, text in (("json.py", ""), ("broken.py", "1 / 0\n")):
        (tmp_path / "plugins" / name).write_text(text)
    recipe.write_text(recipe.read_text().replace("plugins/unused_mark.py", plugin))
    with pytest.raises(InputError, match=expected):
        load_recipe(recipe)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "rl.rewards={corectness = 1.0}",
            "rl.rewards names a term that does not exist: corectness is not a term; did you mean correctness?",
        ),
        ("rl.objective=ppo", 'rl.objective is "ppo", which is no objective; choose from policy_gradient'),
        (
            "rl.objective_options={clip = 1}",
            "rl.objective_options would not be used: policy_gradient is set by rl.estimator",
        ),
        (
            "rl.estimator.advantage=mean",
            'rl.estimator.advantage is "mean", which is no group advantage; did you mean group_mean?',
        ),
        (
            "rl.estimator.advantage_options={divide = true}",
            "rl.estimator.advantage_options.divide is not an option of group_advantages; did you mean divide_by_std?",
        ),
        ("rl.estimator.kl=k2", 'rl.estimator.kl is "k2", which is no KL form; did you mean k3?'),
        (
            "rl.curriculum.order=shuffle",
            'rl.curriculum.order is "shuffle", which is no prompt order; choose from hard_kinds_late, solve_rate',
        ),
        ("rl.dialect=chatlm", 'rl.dialect is "chatlm", which is no dialect; did you mean chatml?'),
        ('rl.tool_set.tools=["raed_file"]', "rl.tool_set.tools: 'raed_file' is not a tool; did you mean read_file?"),
        (
            'rl.tool_set={aliases = "bash", tools = ["grep"]}',
            "rl.tool_set.tools: 'grep' has no name under aliases = 'bash'; leave it out",
        ),
        ("rl.tool_set={tools = []}", "rl.tool_set.tools: no tool is shown to the model; name at least one"),
        (
            'rl.tool_set={tools = ["grep"], renamed = {write = "w"}}',
            "rl.tool_set.tools: renamed.write would not be used: the tool set does not show 'write'",
        ),
    ],
)
def test_unknown_names_and_empty_tool_sets_are_errors_when_the_recipe_is_read(
    tmp_path: Path, override: str, expected: str
) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text('name = "t"\nstages = ["rl"]\n[rl]\nmodel = "m"\ntasks = "./tasks"\nsteps = 1\n')
    assert refused(recipe, override).endswith(expected)
