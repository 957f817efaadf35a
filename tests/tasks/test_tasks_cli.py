"""The `etude tasks` commands."""

import asyncio
import json
import tomllib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from session_helpers import call, says, scripted_client
from typer.testing import CliRunner, Result

from etude.cli import app
from etude.errors import InputError
from etude.harness.open_client import OpenedModel
from etude.harness.profile import AgentProfile
from etude.pods import open_fleet
from etude.tasks.harbor import task_digest, write_task
from etude.tasks.session_agent import session_agent
from etude.tasks.trial import Trial, run_trial

CONFIG = 'schema_version = "1.4"\n[metadata]\ncategory = "debugging"\n[environment]\nnetwork_mode = "no-network"\n'
CHECK = "grep -q 2 said.txt && r=1 || r=0; echo $r > /logs/verifier/reward.txt"
TASK: dict[str, str | bytes] = {
    "task.toml": CONFIG,
    "instruction.md": "Make it say 2.\n",
    "environment/Dockerfile": "FROM host\nWORKDIR /work\nCOPY repo/ .\n",
    "environment/repo/said.txt": "1\n",
    "tests/test.sh": f"#!/bin/sh\necho checking\n{CHECK}\n",
    "solution/solve.sh": "#!/bin/sh\necho 2 > said.txt\n",
}


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two tasks, and an empty validation cache."""
    monkeypatch.setattr("etude.tasks.validate.default_validation_cache", lambda: tmp_path / "cache")
    write_task(tmp_path / "tasks/good", TASK)
    write_task(tmp_path / "tasks/bad", {**TASK, "solution/solve.sh": "#!/bin/sh\n"})
    return tmp_path / "tasks"


def etude(*arguments: object, code: int = 0) -> Result:
    done = CliRunner().invoke(app, ["tasks", *map(str, arguments)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == code, done.output
    return done


def answer(*arguments: object, code: int = 0) -> Any:
    return json.loads(etude(*arguments, "--json", code=code).stdout)


def test_validate_reports_and_caches_what_is_admitted(tasks: Path) -> None:
    found = {report["task"]: report for report in answer("validate", tasks, "--reruns", 1, code=1)}
    assert found["good"]["admitted"]
    assert not found["good"]["cached"]
    assert [reason["code"] for reason in found["bad"]["reasons"]] == ["solution-fails"]
    shown = etude("validate", tasks, "--reruns", 1, code=1).stdout
    assert "1 of 2 admitted" in shown
    assert "(cached)" in shown
    assert "solution-fails" in shown


def test_run_shows_the_rewards_of_agents(tasks: Path, tmp_path: Path) -> None:
    assert [row["reward"] for row in answer("run", tasks / "good", "--as", "nothing")] == [0.0]
    (tmp_path / "commands.sh").write_text("echo 2 > said.txt\ntouch /logs/artifacts/x\n")
    out = tmp_path / "out"
    (row,) = answer("run", tasks / "good", "--as", tmp_path / "commands.sh", "--out", out)
    assert (row["reward"], row["changed"]) == (1.0, 1)
    assert json.loads((out / "good/grade.json").read_text())["reward"] == 1.0
    assert (out / "good/artifacts/artifacts/x").exists()
    assert "checking" in etude("run", tasks / "good").stdout


def test_a_verifier_cannot_control_the_terminal(tasks: Path) -> None:
    attack = "printf '\\033]0;evil\\007\\033[2J\\033]52;c;ZXZpbA==\\007'"
    write_task(tasks / "evil", {**TASK, "tests/test.sh": f"#!/bin/sh\n{attack}\n{CHECK}\n"})
    shown = etude("run", tasks / "evil").stdout
    assert "␛[2J" in shown
    assert "\x1b" not in shown


def test_show_and_lint_read_only(tasks: Path) -> None:
    shown = answer("show", tasks / "good")
    assert (shown["name"], shown["category"], shown["network"]) == ("good", "debugging", "no-network")
    assert shown["digest"] == task_digest(tasks / "good")
    assert "Make it say 2." in etude("show", tasks / "good").stdout
    assert {finding["rule"] for finding in answer("lint", tasks)[str(tasks / "good")]} == {"root-agent"}
    (tasks / "bad/instruction.md").write_text("\n")
    assert "empty-instruction" in etude("lint", tasks, code=1).stdout


def test_export_copies_admitted_tasks_into_a_set(tasks: Path, tmp_path: Path) -> None:
    (tasks / "good/environment/__pycache__").mkdir()
    (tasks / "good/notes.private").write_text("not for others")
    with pytest.raises(InputError, match="none of these"):
        etude("export", tasks, "--out", tmp_path / "set", "--name", "ours/set", "--admitted")
    etude("validate", tasks, "--reruns", 1, code=1)
    etude("export", tasks, "--out", tmp_path / "set", "--name", "ours/set", "--admitted")
    listed = tomllib.loads((tmp_path / "set/dataset.toml").read_text())
    assert [task["name"] for task in listed["tasks"]] == ["ours/good"]
    assert listed["tasks"][0]["digest"] == f"sha256:{task_digest(tmp_path / 'set/good')}"
    kept = {path.name for path in (tmp_path / "set/good").rglob("*")}
    assert not kept & {"__pycache__", "notes.private"}
    assert [row["reward"] for row in answer("run", tmp_path / "set")] == [1.0]


def test_a_harness_session_is_an_agent(tasks: Path) -> None:
    """End to end: the task's instruction, tools in its pod, a final message, the verifier result."""
    config = CONFIG.replace("[metadata]", '[metadata]\ncarry = ["/logs/agent/final.txt"]')
    check = (
        "grep -q done /logs/agent/final.txt && grep -q 2 said.txt && r=1 || r=0; echo $r > /logs/verifier/reward.txt"
    )
    task = write_task(tasks / "asked", {**TASK, "task.toml": config, "tests/test.sh": f"#!/bin/sh\n{check}\n"})
    lines = [says("", call("run_terminal_cmd", command="echo 2 > said.txt")), says("It is done.")]

    @asynccontextmanager
    async def speaking(id: str) -> AsyncIterator[OpenedModel]:
        yield OpenedModel(scripted_client(lines), AgentProfile())

    async def go() -> Trial:
        async with open_fleet() as fleet:
            return await run_trial(fleet, task, session_agent(speaking))

    trial = asyncio.run(go())
    result, (trace,) = trial.result, trial.traces
    assert result.score == 1.0, result.log
    assert [change.path for change in result.changes] == ["said.txt"], "a final message is no change of the workspace"
    assert (trace.task, trace.final) == ("asked", "It is done.")
    assert "Make it say 2." in trace.steps[1].message.content


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["validate", "."], "no task found"),
        (["run", "TASK", "--as", "unknown"], "expected nothing, solution"),
        (["run", "TASK", "--map", "x"], "--map x: expected FROM=IMAGE"),
        (["export", "TASK", "--out", "/", "--name", "a/b"], "already exists"),
        (["import", "kinds", ".", "--out", "x"], "unknown kind of task set"),
        (["show", "/nowhere"], "has no task.toml"),
    ],
)
def test_bad_input_is_named(
    arguments: list[str], words: str, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(InputError) as error:
        etude(*(str(tasks / "good") if argument == "TASK" else argument for argument in arguments))
    assert words in str(error.value)
