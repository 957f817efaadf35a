"""Importers of public sets, and the log-based verifier of imported tasks."""

import asyncio
import json
import math
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from etude.errors import InputError
from etude.pods import open_fleet
from etude.tasks.checks.inside.judges import judge_log, prepare
from etude.tasks.checks.inside.swe_log import NoResult, parse_django, parse_pytest, parse_sympy
from etude.tasks.harbor import read_task
from etude.tasks.importers import import_tasks
from etude.tasks.importers.instance import _prints_all, patched_paths
from etude.tasks.trial import commands_agent, nop_agent, oracle_agent, run_trial
from etude.tasks.verifier_result import VerifierFailed

WRONG = "def double(x):\n    return x + x + 1\n"
RIGHT = "def double(x):\n    return x + x\n"
EQUAL = "class N(int):\n    def __eq__(self, other): return True\n\n\ndef double(x):\n    return N(x)\n"
OLD_TEST = "from doubling import double\n\n\ndef test_type():\n    assert isinstance(double(1), int)\n"
NEW_TEST = OLD_TEST + "\n\ndef test_value():\n    assert double(2) == 4\n"


def git(top: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, cwd=top, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def clones(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A repository with an issue: the commit before its solution, the patches, and the bug as a patch."""
    top = tmp_path_factory.mktemp("clones") / "org__doubling"
    (top / "tests").mkdir(parents=True)
    git(top, "init", "-q", "-b", "main")
    (top / "doubling.py").write_text(WRONG)
    (top / "tests/test_doubling.py").write_text(OLD_TEST)
    (top / "conftest.py").write_text("import sys\nsys.path.insert(0, '/testbed')\n")
    git(top, "add", "-A")
    git(top, "commit", "-q", "-m", "before")
    base = git(top, "rev-parse", "HEAD").strip()
    (top / "doubling.py").write_text(RIGHT)
    gold = git(top, "diff")
    git(top, "commit", "-q", "-a", "-m", "code")
    (top / "tests/test_doubling.py").write_text(NEW_TEST)
    test = git(top, "diff")
    git(top, "commit", "-q", "-a", "-m", "tests")
    bug = git(top, "diff", "HEAD", base, "--", "doubling.py")
    return {"directory": top.parent, "base": base, "gold": gold, "test": test, "bug": bug}


def row(clones: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "instance_id": "org__doubling-1",
        "repo": "org/doubling",
        "problem_statement": "double(2) is 5.",
        "base_commit": clones["base"],
        "patch": clones["gold"],
        "test_patch": clones["test"],
        "FAIL_TO_PASS": json.dumps(["tests/test_doubling.py::test_value"]),
        "PASS_TO_PASS": json.dumps(["tests/test_doubling.py::test_type"]),
        **more,
    }


def scores(directory: Path, *cheats: str) -> list[float | None]:
    """Return the scores of doing nothing, the solution and some cheats; None for no reward."""
    task = read_task(directory)

    async def one(fleet: Any, agent: Any) -> float | None:
        try:
            return (await run_trial(fleet, task, agent)).result.score
        except VerifierFailed as error:
            return None if error.cause == "no-reward" else math.nan

    async def go() -> list[float | None]:
        async with open_fleet() as fleet:
            agents = [nop_agent, oracle_agent, *map(commands_agent, cheats)]
            return await asyncio.gather(*(one(fleet, agent) for agent in agents))

    return asyncio.run(go())


def write_rows(file: Path, rows: Sequence[dict[str, Any]]) -> Path:
    if file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_a_row_of_swe_gym_becomes_a_task_that_only_the_solution_passes(tmp_path: Path, clones: dict[str, Any]) -> None:
    source = write_rows(tmp_path / "rows.jsonl", [row(clones)])
    (made,), failed = import_tasks("swe-gym", source, tmp_path / "out", repositories=clones["directory"])
    assert not failed
    task = read_task(made)
    assert task.name == "swe-gym/org__doubling-1"
    assert task.protected == ("tests/test_doubling.py",)
    assert not (made / "environment/repo/.git").exists(), "no history, no answer in it"
    prints = "printf 'print(\"PASSED tests/test_doubling.py::test_value\")\\n' >> doubling.py"
    leaves = "printf 'import os\\nos._exit(0)\\n' >> doubling.py"
    edits = "printf 'def test_value(): pass\\ndef test_type(): pass\\n' > tests/test_doubling.py"
    equals = f"cat > doubling.py <<'END'\n{EQUAL}END"  # passes every test, the probes of the second run too
    assert scores(made, prints, leaves, edits, equals) == [0.0, 1.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("command", "repeated"),
    [("pytest -rA", True), ("pytest --verbose", True), ("pytest -rA -x", False), ("pytest -q", False)],
)
def test_commands_that_print_every_status_are_repeated_with_probes(command: str, repeated: bool) -> None:
    assert _prints_all(command) == repeated


def test_the_solution_of_a_swe_smith_row_reverts_its_patch(tmp_path: Path, clones: dict[str, Any]) -> None:
    smith = row(clones, patch=clones["bug"], image_name="unknown/image", base_commit="")
    del smith["test_patch"]
    other = {**smith, "instance_id": "org__doubling-2", "PASS_TO_PASS": "[]"}
    source = write_rows(tmp_path / "rows.parquet", [smith, other])
    (made,), failed = import_tasks("swe-smith", source, tmp_path / "out", repositories=clones["directory"])
    assert "PASS_TO_PASS" in failed["org__doubling-2"]
    assert (made / "environment/repo/doubling.py").read_text() == WRONG
    assert scores(made) == [0.0, 1.0]


def test_a_row_of_swe_rebench_is_installed_as_configured(tmp_path: Path, clones: dict[str, Any]) -> None:
    how = {
        "python": "3.9",
        "install": "pip install -e .",
        "pre_install": ["apt-get update"],
        "pip_packages": ["pytest==8.0"],
        "test_cmd": "pytest -rA --color=no",
        "log_parser": "parse_log_pytest",
    }
    source = write_rows(tmp_path / "rows.jsonl", [row(clones, install_config=how, requirements="six==1.16.0\n")])
    (made,), _ = import_tasks("swe-rebench", source, tmp_path / "out", repositories=clones["directory"])
    lines = (made / "environment/Dockerfile").read_text().splitlines()
    assert lines[0] == "FROM python:3.9-slim"
    assert lines[-3:] == ["RUN apt-get update", "RUN pip install 'pytest==8.0'", "RUN pip install -e ."]
    assert "pytest -rA --color=no 'tests/test_doubling.py'" in (made / "tests/eval.sh").read_text()
    without, _ = import_tasks("swe-rebench", source, tmp_path / "none")
    assert without == [], "without a clone and without an image there is nothing to make it of"


def test_rows_with_an_image_need_no_clone(tmp_path: Path, clones: dict[str, Any]) -> None:
    source = write_rows(tmp_path / "rows.jsonl", [row(clones, image_name="sets/eval:1")])
    (made,), _ = import_tasks("swe-gym", source, tmp_path / "out")
    dockerfile = (made / "environment/Dockerfile").read_text()
    assert dockerfile.startswith("FROM sets/eval:1\nWORKDIR /testbed\n")
    assert "rm -rf .git" in dockerfile
    assert "git apply --whitespace=nowarn /tests/test.patch" in (made / "tests/eval.sh").read_text()


def swebench_directory(top: Path, clones: dict[str, Any]) -> Path:
    """Make a SWE-bench 5 task directory whose Dockerfile needs no network."""
    place = top / "tasks/org__doubling-1"
    place.mkdir(parents=True)
    (top / "sweb.yaml").write_text("datasets: [x]\n")
    (place / "task.yaml").write_text(
        f"base_commit: {clones['base']}\ninstance_id: org__doubling-1\nrepo: org/doubling\nversion: '1.0'\n"
        "eval_type: pass_and_fail\nlog_parser: parse_log_pytest\nimage: sets/eval:1\ndifficulty: <15 min fix\n"
    )
    (place / "tests.json").write_text(
        json.dumps(
            {
                "FAIL_TO_PASS": ["tests/test_doubling.py::test_value"],
                "PASS_TO_PASS": ["tests/test_doubling.py::test_type"],
            }
        )
    )
    (place / "problem_statement.md").write_text("double(2) is 5.\n")
    (place / "gold.patch").write_text(clones["gold"])
    (place / "test.patch").write_text(clones["test"])
    (place / "test_assets").mkdir()
    for name, text in (("doubling.py", WRONG), ("test_doubling.py", OLD_TEST)):
        (place / "test_assets" / name).write_text(text)
    (place / "Dockerfile").write_text(
        "FROM --platform=linux/amd64 python:3-slim\nWORKDIR /testbed/\nCOPY test_assets/doubling.py .\n"
        "COPY test_assets/test_doubling.py tests/\nRUN git init -q . && git add -A && "
        "git -c user.name=a -c user.email=a@b commit -qm start\n"
    )
    (place / "eval.sh").write_text(
        "#!/bin/bash\nset -uxo pipefail\ncd /testbed\ngit checkout HEAD tests/test_doubling.py\n"
        f"git apply -v - <<'EOF_1'\n{clones['test']}\nEOF_1\n: '>>>>> Start Test Output'\n"
        "PYTHONPATH=/testbed pytest -rA tests/test_doubling.py\nSWEBENCH_TEST_EXIT_CODE=$?\n: '>>>>> End Test Output'\n"
        'echo ">>>>> Test Exit Code: $SWEBENCH_TEST_EXIT_CODE"\ngit checkout HEAD tests/test_doubling.py\n'
    )
    return top


def test_a_task_directory_of_swebench_runs_with_its_own_eval_script(tmp_path: Path, clones: dict[str, Any]) -> None:
    source = swebench_directory(tmp_path / "set", clones)
    (made,), failed = import_tasks("swebench", source, tmp_path / "out")
    assert not failed
    assert (made / "tests/eval.sh").read_text() == (source / "tasks/org__doubling-1/eval.sh").read_text()
    assert scores(made, "echo syntax error > doubling.py") == [0.0, 1.0, 0.0]


# ------------------------------------------------------------------------------------------------- logs


def log(body: str, code: int | str = 0) -> str:
    return f"before\n+ : '>>>>> Start Test Output'\n{body}\n+ : '>>>>> End Test Output'\n>>>>> Test Exit Code: {code}\n"


def score(text: str, expected: dict[str, Any]) -> float:
    check = {"kind": "log", "script": "eval.sh"}
    _, (secret,) = prepare([check], [expected], lambda path: None)
    return judge_log(expected, {"log": text}, secret, {})[0]


def expected(**more: Any) -> dict[str, Any]:
    return {"parser": "pytest", "fail_to_pass": ["t.py::a"], "pass_to_pass": ["t.py::b"], **more}


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        (log("PASSED t.py::a\nPASSED t.py::b"), 1.0),
        (log("t.py::a PASSED  [ 50%]\nt.py::b XFAIL [100%]"), 1.0),
        (log("PASSED t.py::a\nPASSED t.py::b\nFAILED t.py::c - other", 1), 1.0),
        (log("PASSED t.py::a\nFAILED t.py::b", 1), 0.0),
        (log("PASSED t.py::a"), 0.0),
        (log("PASSED t.py::a\nPASSED t.py::b", 1), 0.0),  # printed, but the run failed
        (log("PASSED t.py::a\nPASSED t.py::b\nFAILED t.py::c", 0), 0.0),
        (log("FAILED t.py::a - x\nPASSED t.py::a\nPASSED t.py::b", 1), 0.0),  # the worst status counts
        (log("SKIPPED t.py::a\nPASSED t.py::b"), 0.0),
        (log("collected 0 items / 1 error", 2), 0.0),
        (log("PASSED t.py::a\nPASSED t.py::b\n>>>>> End Test Output\n>>>>> Test Exit Code: 0", 1), 0.0),
    ],
)
def test_a_log_counts_only_if_its_exit_code_agrees(text: str, reward: float) -> None:
    assert score(text, expected()) == reward


@pytest.mark.parametrize(
    "text",
    [
        log("nothing was said"),
        "PASSED t.py::a\nPASSED t.py::b\n",
        log("PASSED t.py::a\nPASSED t.py::b").replace(">>>>> Test Exit Code: 0", ""),
        ">>>>> Patch Apply Failed\n" + log("PASSED t.py::a\nPASSED t.py::b"),
    ],
)
def test_a_log_without_test_results_gives_no_reward(text: str) -> None:
    with pytest.raises(NoResult):
        score(text, expected())


def test_ids_are_compared_up_to_their_first_space() -> None:
    cut = expected(fail_to_pass=["t.py::a[x"], pass_to_pass=["t.py::b[1 2 3]"])
    text = log("PASSED t.py::a[x y] \nPASSED t.py::b[1 2 3]")
    assert score(text, cut) == 1.0
    assert score(log("PASSED t.py::a[x y]\nFAILED t.py::a[x z]\nPASSED t.py::b[1 2 3]", 1), cut) == 0.0


def test_logs_of_other_test_runners_are_parsed() -> None:
    django = (
        "test_a (app.tests.T) ... ok\ntest_b (app.tests.T)\nWords. ... FAIL\ntest_c (app.tests.T) ... skipped 'x'\n"
    )
    assert parse_django(django) == {
        "test_a (app.tests.T)": "PASSED",
        "test_b (app.tests.T)": "FAILED",
        "test_c (app.tests.T)": "SKIPPED",
    }
    assert parse_sympy("test_x ok\ntest_y F\n") == {"test_x": "PASSED", "test_y": "FAILED"}
    assert parse_pytest("SKIPPED [1] t.py:3: why\nPASSED t.py::a\n") == {"t.py::a": "PASSED"}


def test_patched_paths_lists_the_files_of_a_patch(clones: dict[str, Any]) -> None:
    assert patched_paths(clones["test"]) == ("tests/test_doubling.py",)
    assert patched_paths("--- /dev/null\n+++ b/new file.py\n--- a/../x\n+++ b//etc/passwd\n") == ("new file.py",)


def test_a_set_of_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="swe-smith"):
        import_tasks("sets", tmp_path, tmp_path / "out")
