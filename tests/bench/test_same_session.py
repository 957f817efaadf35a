"""A model is shown the same in evaluation, `etude bench`, `etude tasks run` and `etude agent`, by its profile alone."""

import asyncio
import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from agent_workspace import AgentWorkspace, make_workspace, open_pods

from etude import cli
from etude.chat.dialects import dialect_for
from etude.chat.tokenizer import Tokenizer
from etude.harness.profile import AgentProfile
from etude.harness.session import SessionSpec
from etude.harness.trace import Trace
from etude.harness.trace_store import load_trace
from etude.inference.clients.inprocess import InProcessPolicy
from etude.inference.engine import Engine
from etude.inference.service import EngineService
from etude.model import load
from etude.pods import open_fleet
from etude.recipe import load_recipe
from etude.rollouts.rollout import PolicyBinding, RolloutOptions, run_rollout
from etude.tasks.harbor import find_tasks, read_task
from etude_nano.source import generate_nano

ROOT = Path(__file__).parents[2]
NANO = ROOT / "base/nano"


@pytest.fixture(scope="module")
def pods() -> Iterator[Path]:
    with open_pods() as state:
        yield state


@pytest.fixture
def workspace(
    tmp_path: Path, pods: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> AgentWorkspace:
    return make_workspace(tmp_path, pods, monkeypatch, capsys)


@pytest.fixture
def tasks(tmp_path: Path) -> list[Path]:
    generate_nano(tmp_path / "tasks", 3, "new", seed=1)
    return list(find_tasks(tmp_path / "tasks"))


def tokens(trace: Trace) -> list[list[int]]:
    return [segment.tokens.tolist() for segment in trace.segments]


def run_etude(workspace: AgentWorkspace, *arguments: str) -> str:
    """Run a command in this process; return its output."""
    workspace.capsys.readouterr()
    workspace.monkeypatch.setattr(sys, "argv", ["etude", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = workspace.capsys.readouterr()
    assert not ended.value.code, err
    return out


async def evaluate(tasks: list[Path], pods: Path) -> list[Trace]:
    """Run sessions as the held-out evaluation of the shipped recipe does, but greedily."""
    settings = load_recipe(ROOT / "recipes/nano.toml").rl
    assert settings is not None
    tokenizer = Tokenizer.load(NANO)
    options = RolloutOptions(SessionSpec.of(settings), temperature=0.0)
    async with EngineService(Engine(load(NANO), tokenizer=tokenizer)) as service, open_fleet(state=pods) as fleet:
        dialect, window = dialect_for(tokenizer, settings.dialect), settings.window or 2048
        binding = PolicyBinding(InProcessPolicy(service), dialect, window)
        return [(await run_rollout(fleet, read_task(task), binding, options)).trace for task in tasks]


@pytest.mark.slow
def test_the_same_tasks_give_the_same_tokens_everywhere(
    workspace: AgentWorkspace, tasks: list[Path], pods: Path, tmp_path: Path
) -> None:
    evaluated = asyncio.run(evaluate(tasks, pods))
    assert any(len(trace.steps) > 4 for trace in evaluated), "no session used a tool"
    greedy, out = ("--temperature", "0"), tmp_path / "out"

    directory = str(tmp_path / "tasks")
    bench = ("bench", "run", "--policy", f"base={NANO}", "--tasks", directory, "--out", str(out / "bench"))
    run_etude(workspace, *bench, *greedy, "--state", str(pods), "--device", "cpu")
    names = [task.relative_to(tmp_path / "tasks").as_posix() for task in tasks]
    benched = [load_trace(out / "bench/traces/base" / name / "00.trace") for name in names]
    assert list(map(tokens, benched)) == list(map(tokens, evaluated))

    run_etude(workspace, "tasks", "run", directory, "--model", str(NANO), *greedy, "--out", str(out / "run"))
    ran = [load_trace(out / "run" / read_task(task).name.replace("/", "__") / "session.trace") for task in tasks]
    assert list(map(tokens, ran)) == list(map(tokens, evaluated))

    for task, wanted in zip(tasks, evaluated, strict=True):
        files = tmp_path / "work" / task.name
        shutil.copytree(task / "environment/repo", files)
        asked = ("-C", str(files), "--model", str(NANO), *greedy, "--turns", "10", read_task(task).instruction)
        said = workspace.agent("-p", "--json", *asked)
        trace = load_trace(workspace.sessions / json.loads(said.out)["session"] / "session.trace")
        assert tokens(trace) == tokens(wanted), task


@contextmanager
def serving(*arguments: str) -> Iterator[str]:
    """Run `etude serve`; yield its URL."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "etude.cli", "serve", *arguments, "--port", str(port), "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[0]
        finally:
            process.terminate()


def check_served(workspace: AgentWorkspace, model: Path, *options: str) -> dict[str, object]:
    """Serve a model as the README says, and let the agent use it; return what the agent says."""
    (workspace.project / "note.txt").write_text("The code is 7.\n")
    with serving(str(model), *options) as url:
        said = workspace.agent("-p", "--json", "--endpoint", url, "--turns", "3", "Which number is in note.txt?")
    found = said.json  # an error would be no JSON
    assert found["ending"] in ("final", "turns", "length")
    assert found["cost"]["turns"] > 0
    return found


def test_serve_and_agent_work_together_at_once(workspace: AgentWorkspace) -> None:
    check_served(workspace, NANO)
    profile = AgentProfile.load(NANO)
    assert profile is not None
    (file,) = workspace.sessions.glob("*/session.json")
    recorded = json.loads(file.read_text())["options"]["model"]["session"]
    assert recorded["tool_set"] == profile.model_dump(mode="json")["tool_set"]
    assert (recorded["window"], recorded["budget"]["max_turn_tokens"]) == (2048, 200)


@pytest.mark.slow
def test_serve_and_agent_work_together_with_an_imported_model(workspace: AgentWorkspace, smollm2_dir: Path) -> None:
    check_served(workspace, smollm2_dir)
    (file,) = workspace.sessions.glob("*/session.json")
    recorded = json.loads(file.read_text())["options"]["model"]["session"]
    assert (recorded["window"], recorded["budget"]["max_turn_tokens"]) == (8192, 2048)
