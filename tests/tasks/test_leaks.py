"""Leaks: training data that contains the answer of a measured task is found and refused, renamed or not."""

import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from etude.tasks.cli import app
from etude.tasks.harbor import find_tasks
from etude.tasks.leaks import find_leaks, measured_answers, task_answer
from etude.tasks.stage import remove_leaks
from etude_nano.demonstrator import read_files
from etude_nano.source import generate_nano


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("leaks")
    generate_nano(place / "measured", 8, "new", seed=11)
    generate_nano(place / "train", 8, "train", seed=11)
    return place


def renamed(text: str) -> str:
    """Return code with other names and numbers."""
    names = sorted(set(re.findall(r"(?<=def )\w+|(?<=[(,] )\w+(?=[,)])|(?<=\()\w+(?=[,)])", text)))
    for number, name in enumerate(names):
        text = re.sub(rf"\b{name}\b", f"other_{number}", text)
    return text


def test_a_copy_of_a_measured_task_with_other_names_is_found_and_refused(sets: Path, tmp_path: Path) -> None:
    answers = measured_answers([sets / "measured"])
    assert answers.tasks == 8
    assert list(find_leaks(answers, [sets / "train"])) == []
    shutil.copytree(sets / "train", tmp_path / "train")
    task = next(task for task in find_tasks(sets / "measured") if (task / "solution/repo").is_dir())
    copy = shutil.copytree(task, tmp_path / "train" / "a-copy")
    for path in copy.rglob("*.py"):
        path.write_text(renamed(path.read_text()))
    found = list(find_leaks(answers, [tmp_path / "train"]))
    assert {leak.source for leak in found} == {str(copy)}
    assert task.name in {leak.task for leak in found}
    assert remove_leaks(tmp_path / "train", answers) == ["a-copy"]
    assert list(find_leaks(answers, [tmp_path / "train"])) == []


def test_conversations_and_files_are_searched(sets: Path, tmp_path: Path) -> None:
    files = next(
        files
        for task in find_tasks(sets / "measured")
        if task_answer("", files := read_files(task)).changed and "solution/plan.json" in files
    )
    code = next(text for path, text in files.items() if path.startswith("solution/repo/") and path.endswith(".py"))
    row = {"messages": [{"role": "user", "content": "hello"}, {"role": "tool", "content": code}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": []}) + "\n" + json.dumps(row) + "\n")
    (tmp_path / "plain.py").write_text(code)
    answers = measured_answers([sets / "measured"])
    sources = {leak.source for leak in find_leaks(answers, [tmp_path])}
    assert sources == {f"{tmp_path}/rows.jsonl, line 2", f"{tmp_path}/plain.py"}


def test_the_command_counts_leaks_and_its_exit_code_says_so(sets: Path) -> None:
    clean = CliRunner().invoke(app, ["leaks", str(sets / "measured"), "--training", str(sets / "train")])
    assert (clean.exit_code, clean.output.splitlines()[-1]) == (
        0,
        "0 leaks: 0 of 8 measured tasks are given away by training data",
    )
    own = CliRunner().invoke(app, ["leaks", str(sets / "measured"), "--training", str(sets / "measured"), "--json"])
    assert own.exit_code == 1
    assert len({leak["task"] for leak in json.loads(own.output)["leaks"]}) >= 7
