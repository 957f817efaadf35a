"""Reading a run that is being written, is half finished, or is damaged."""

import os
import socket
from pathlib import Path

import pytest

from etude.errors import InputError
from etude.runs.layout import RunLayout
from etude.viewer.run_reader import JsonLines, find_runs, read_recipe, read_stages, run_status


def lines(path: Path) -> tuple[list[int], list[str]]:
    problems: list[str] = []
    return [record["n"] for record in JsonLines(path).read(problems.append)], problems


def test_only_whole_lines_count_and_only_new_ones_are_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"n": 1}\n{"n": 2}\n{"n":')
    reader = JsonLines(path)
    assert [record["n"] for record in reader.read(pytest.fail)] == [1, 2]
    with path.open("a") as file:
        file.write(" 3}\n")
    first = reader.records[0]
    assert [record["n"] for record in reader.read(pytest.fail)] == [1, 2, 3]
    assert reader.records[0] is first, "lines are parsed once"


def test_a_replaced_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"n": 1}\n{"n": 2}\n')
    reader = JsonLines(path)
    reader.read(pytest.fail)
    (tmp_path / "new").write_text('{"n": 7}\n')
    (tmp_path / "new").replace(path)  # as a run does when it repeats steps
    assert [record["n"] for record in reader.read(pytest.fail)] == [7]
    path.unlink()
    assert reader.read(pytest.fail) == []


def test_damaged_lines_are_left_out_and_reported(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"n": 1}\nrubbish\n[2]\n\xff\xfe\n{"n": 5}\n')
    found, problems = lines(path)
    assert found == [1, 5]
    assert problems == ["metrics.jsonl: lines 2, 3, 4 cannot be parsed and are left out"]


def test_a_run_is_running_finished_or_stopped(tmp_path: Path) -> None:
    done, open_ = {"name": "a", "done": True}, {"name": "b", "done": False}
    lock = tmp_path / "lock"
    assert run_status(RunLayout(tmp_path), [done]).state == "finished"
    assert run_status(RunLayout(tmp_path), [done, open_]).state == "stopped"
    lock.write_text(f"pid {os.getpid()} on {socket.gethostname()} since 2026-01-01T00:00:00+00:00\n")
    assert run_status(RunLayout(tmp_path), [done, open_]).state == "running"
    lock.write_text(f"pid {2**22 + 7} on {socket.gethostname()} since 2026-01-01T00:00:00+00:00\n")
    stopped = run_status(RunLayout(tmp_path), [done, open_])
    assert stopped.state == "stopped"
    assert "in b" in stopped.text
    lock.write_text("pid 1 on another-machine since 2026-01-01T00:00:00+00:00\n")
    assert "another-machine" in run_status(RunLayout(tmp_path), [done, open_]).text


def test_only_directories_with_a_recipe_are_runs(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"recipe\.toml"):
        find_runs(tmp_path)
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "recipe.toml").write_text('name = "x"\n')
    (tmp_path / "other").mkdir()
    assert list(find_runs(tmp_path)) == ["a", "b"]
    assert list(find_runs(tmp_path / "a")) == [""]
    with pytest.raises(InputError):
        find_runs(tmp_path / "nowhere")


def test_a_malformed_recipe_or_state_is_reported(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text("name = [")
    (tmp_path / "state.json").write_text("{")
    problems: list[str] = []
    text, recipe = read_recipe(RunLayout(tmp_path), problems.append)
    assert (text, recipe) == ("name = [", {})
    assert read_stages(RunLayout(tmp_path), recipe, problems.append) == []
    assert len(problems) == 2
    (tmp_path / "state.json").write_text('{"stages": {"pretrain": 3, "rl": {"done": true, "facts": []}}}')
    stages = read_stages(RunLayout(tmp_path), {"stages": ["pretrain"]}, pytest.fail)
    assert [(stage["name"], stage["done"], stage["facts"]) for stage in stages] == [
        ("pretrain", False, {}),
        ("rl", True, {}),
    ]
