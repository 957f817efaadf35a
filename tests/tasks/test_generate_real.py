"""On real repositories: eighty validated tasks over all categories within half an hour on two cores."""

import asyncio
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from etude.pods import open_fleet
from etude.tasks.generators.cli import print_yields
from etude.tasks.generators.generator_run import GenerationOptions, generate
from etude.tasks.generators.journal import GeneratorYield
from etude.tasks.harbor import find_tasks

NAMES = ("click", "marshmallow")
CATEGORIES = {"debugging", "feature", "refactor", "docs", "testing", "review", "devops", "migration", "question"}


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Download source archives from the package index; skip if it cannot be reached."""
    directory = tmp_path_factory.mktemp("archives")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(directory)]
    for name in NAMES:
        done = subprocess.run([*command, "--no-binary", name, name], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"pip cannot fetch {name}: {done.stderr[-200:]}")
    return sorted(directory.iterdir())


@pytest.mark.slow
def test_two_repositories_give_eighty_validated_tasks_of_all_categories(archives: list[Path], tmp_path: Path) -> None:
    async def work() -> list[GeneratorYield]:
        async with open_fleet() as fleet:
            return await generate(
                fleet, archives, GenerationOptions(tmp_path / "out", count=80, jobs=2, cache=tmp_path / "cache")
            )

    rows = asyncio.run(work())
    print_yields(rows)
    tasks = [tomllib.loads((path / "task.toml").read_text())["metadata"] for path in find_tasks(tmp_path / "out")]
    assert len(tasks) >= 80
    assert {task["category"] for task in tasks} == CATEGORIES
    assert len({task["repository"] for task in tasks}) == 2
