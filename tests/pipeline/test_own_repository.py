"""The documented path with repositories of one's own, as documented: tasks, recipe, dry run, run, bench."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from installed_wheels import wheels_of
from local_index import serving_index, tools_index

from tests.tasks.mined_history import shop_history

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes/own-small.toml"
PROJECT = """\
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}"
dynamic = ["version"]
dependencies = []

[tool.setuptools.packages.find]
where = ["src"]

[tool.setuptools_scm]
version_file = "src/{name}/_version.py"
"""
# The three repositories have other arithmetic: a task to measure on must not be given away by one to train on.
FUNCTION = '''

def {verb}_{noun}(value, rate={rate}, extra={extra}):
    """Return the {noun} of a value, to {verb}.

    value: the number
    rate: what it is multiplied by
    extra: what is added
    """
    total = value * rate
    if total > {limit}:
        total = total {sign} {limit}
    for step in range({rounds}):
        total = total + extra * step
    if total < 0:
        raise ValueError("{noun} is negative")
    return total
'''
TEST = """

def test_{verb}_{noun}():
    assert {verb}_{noun}(2) == {small}


def test_{verb}_{noun}_of_much():
    assert {verb}_{noun}(1000, 3, 0) == {large}
"""
VERBS, NOUNS = ("add", "cut", "plan"), ("tax", "fee", "load", "cost")


def make_repository(top: Path, number: int) -> None:
    """Make a git checkout whose version file only its build writes."""
    code, tests = ["from ._version import __version__\n"], [f"import pytest\n\nfrom {top.name} import *\n"]
    code.append("\n__all__ = [" + ", ".join(f'"{verb}_{noun}"' for verb in VERBS for noun in NOUNS) + "]\n")
    for at, (verb, noun) in enumerate((verb, noun) for verb in VERBS for noun in NOUNS):
        words = {
            "verb": verb,
            "noun": noun,
            "rate": at + 2 + number,
            "extra": at + 1,
            "limit": 100 * (number + 1) + at,
            "sign": "-+*"[number],
            "rounds": number + at + 2,
        }
        code.append(FUNCTION.format(**words))
        space: dict[str, object] = {}
        exec(code[-1], space)
        function = space[f"{verb}_{noun}"]
        assert callable(function)
        tests.append(TEST.format(**words, small=function(2), large=function(1000, 3, 0)))
    for path, text in {
        "pyproject.toml": PROJECT.format(name=top.name),
        ".gitignore": "_version.py\n",
        f"src/{top.name}/__init__.py": "".join(code),
        "tests/test_all.py": "".join(tests),
    }.items():
        (top / path).parent.mkdir(parents=True, exist_ok=True)
        (top / path).write_text(text)
    git = ["git", "-C", str(top), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"], ["tag", "v1.2"]):
        subprocess.run([*git, *command], check=True)


def documented_commands() -> list[list[str]]:
    """Return the commands in the recipe's header."""
    return [shlex.split(line) for line in re.findall(r"^#     (.*)$", RECIPE.read_text(), re.MULTILINE)]


def readme_commands(start: str) -> list[list[str]]:
    """Return the commands of README's own-repository path that begin with these words, without their comments."""
    section = (
        (ROOT / "README.md").read_text(encoding="utf-8").partition("## Your own repository")[2].partition("\n## ")[0]
    )
    return [shlex.split(line, comments=True) for line in section.splitlines() if line.startswith(start)]


@pytest.mark.slow
def test_readmes_line_makes_tasks_from_the_history_of_ones_own_repository(tmp_path: Path) -> None:
    here = tmp_path / "checkout"
    here.mkdir()
    shop_history(tmp_path / "service")
    (words,) = readme_commands("etude bench build")
    assert words[3] == "../service", "the same repository as in the lines around it"
    environment = {**os.environ, "ETUDE_PODS": str(tmp_path / "pods"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment["PYTHONPATH"] = str(ROOT)

    def run(*words: str) -> str:
        command = [sys.executable, "-m", "etude.cli", *words[1:]]
        done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, (words, done.stdout[-2000:], done.stderr[-4000:])
        return done.stdout

    with serving_index(tools_index()) as index:
        built = json.loads(run(*words, "--index-url", index.url, "--json"))
    assert built["bench"] > 0, built["reasons"]
    described = json.loads(run("etude", "bench", "stats", words[words.index("--out") + 1], "--json"))
    assert [each["tasks"] for each in described["benchmarks"]] == [built["bench"]]


@pytest.mark.slow
def test_the_documented_path_runs_with_repositories_of_ones_own(tmp_path: Path) -> None:
    here = tmp_path / "checkout"
    here.mkdir()
    for name in ("base", "recipes"):
        (here / name).symlink_to(ROOT / name)
    for number, name in enumerate(("service", "library", "other")):
        make_repository(tmp_path / name, number)
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheels_of(("pytest", "pluggy", "iniconfig", "packaging", "pygments", "setuptools"), wheels)
    environment = {**os.environ, "ETUDE_PODS": str(tmp_path / "pods"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment["PYTHONPATH"] = str(ROOT)

    def run(*words: str) -> str:
        command = [sys.executable, "-m", "etude.cli", *words[1:]] if words[0] == "etude" else [*words]
        done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, (words, done.stdout[-2000:], done.stderr[-4000:])
        return done.stdout

    # Generators that need few pods, and no package index.
    offline = ("--wheels", str(wheels), "--only", "docs", "--only", "refactor", "--only", "debugging")
    commands = documented_commands()
    assert [words[1] for words in commands] == ["tasks", "tasks", "tasks", "recipes/own-small.toml", "run"]
    for words in commands:
        if words[1] == "run":
            planned = json.loads(run(*words[:3], "--dry-run", "--json"))
            assert list(planned["stages"]) == [*("base", "tasks", "corpus", "pretrain", "sft", "rl", "evaluation")]
        run(*words, *(offline if words[1] == "tasks" else ()))
    described = json.loads(run("etude", "bench", "stats", "tasks/train", "tasks/unseen", "--json"))
    assert [each["tasks"] for each in described["benchmarks"]] == [6, 4]
    assert (here / "runs/small/checkpoints/rl-2/config.json").is_file()
    bench = ("etude", "bench", "run", "--policy", "base/nano", "--policy", "runs/small/checkpoints/rl-2")
    summary = json.loads(run(*bench, "--tasks", "tasks/unseen", "--limit", "1", "--out", "runs/bench", "--json"))
    assert [policy["trials"]["graded"] for policy in summary["policies"]] == [1, 1]
