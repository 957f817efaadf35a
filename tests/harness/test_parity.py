"""Prompts are identical in `etude agent` and in a training rollout, token for token."""

import asyncio
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from agent_workspace import ETUDE, AgentWorkspace, make_workspace, open_pods, tiny_checkpoint
from replay_policy import ReplayPolicy
from session_helpers import call, chatml, says

from etude.agent import conversation
from etude.agent.upload import upload_directory
from etude.chat.dialects import dialect_for
from etude.chat.messages import Message
from etude.chat.tokenizer import Tokenizer
from etude.harness.budget import Budget
from etude.harness.model_client import TokenModelClient
from etude.harness.model_options import ModelOptions
from etude.harness.open_client import OpenedModel
from etude.harness.profile import AgentProfile
from etude.harness.prompt import SessionRequest
from etude.harness.scripted_policy import ScriptedPolicy
from etude.harness.session import SessionSpec
from etude.harness.session_factory import open_session
from etude.harness.trace import Trace
from etude.harness.trace_store import load_trace
from etude.inference.policy import Policy
from etude.inference.sampling import Sampling
from etude.pods.fleet import open_fleet

REQUEST = "Fix the failing test in test_calc.py."
WINDOW = 32_768
SCRIPT: Sequence[Message] = [
    says("Looking.", call("read_file", target_file="calc.py"), call("list_dir", target_directory=".")),
    says("", call("run_terminal_cmd", command="python3 test_calc.py")),
    says("", call("search_replace", file_path="calc.py", old_string="a - b", new_string="sum((a, b))")),
    says("", call("run_terminal_cmd", command="python3 test_calc.py && git diff --stat")),
    says("Fixed."),
]


@pytest.fixture(scope="module")
def pods() -> Iterator[Path]:
    with open_pods() as state:
        yield state


@pytest.fixture
def workspace(
    tmp_path: Path, pods: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> AgentWorkspace:
    workspace = make_workspace(tmp_path, pods, monkeypatch, capsys)
    (workspace.project / "AGENTS.md").write_text("Say little.\n")
    return workspace


def rollout(
    workspace: AgentWorkspace, policy: Policy, tokenizer: Tokenizer, budget: Budget, request: SessionRequest
) -> Trace:
    """Run the same task as training does."""

    async def go() -> Trace:
        client = TokenModelClient(policy, dialect_for(tokenizer), Sampling(), window=WINDOW)
        async with open_fleet() as fleet, await fleet.create("host") as pod:
            await upload_directory(pod, pod.workdir, workspace.project)
            async with open_session(request, client, pod, SessionSpec(budget=budget)) as (session, _):
                return await session.run()

    return asyncio.run(go())


def test_every_prompt_of_a_session_is_the_same_in_a_terminal_and_in_a_rollout(workspace: AgentWorkspace) -> None:
    asked = ScriptedPolicy(chatml(), SCRIPT)

    @asynccontextmanager
    async def scripted(model: ModelOptions, session: str) -> AsyncIterator[OpenedModel]:
        client = TokenModelClient(asked, chatml(), Sampling(), window=WINDOW, model="script")
        yield OpenedModel(client, AgentProfile.for_model(None, WINDOW, model.session))

    workspace.monkeypatch.setattr(conversation, "open_model_client", scripted)
    said = workspace.agent("-p", REQUEST)
    assert (said.code, said.out) == (0, "Fixed.\n")

    trained = ScriptedPolicy(chatml(), SCRIPT)
    trace = rollout(workspace, trained, chatml().tokenizer, Budget(), SessionRequest(REQUEST, recent=("AGENTS.md",)))
    assert trace.final == "Fixed."
    assert len(trained.prompts) == len(SCRIPT)
    assert asked.prompts == trained.prompts
    first = chatml().tokenizer.decode(asked.prompts[0])
    assert "Say little." in first
    assert "<recent_files>\nAGENTS.md\n</recent_files>\n\n" + REQUEST in first


@pytest.mark.slow
def test_the_command_line_sends_the_same_prompts_as_a_rollout(workspace: AgentWorkspace, tmp_path: Path) -> None:
    place = tiny_checkpoint(tmp_path / "tiny")
    options = ["--model", str(place), "--answer", "16", "--turns", "1", "--seed", "3"]
    subprocess.run(
        [*ETUDE, "agent", "-p", *options, REQUEST], cwd=workspace.project, env=workspace.environment, check=False
    )
    (file,) = workspace.sessions.glob("*/session.trace")
    trace = load_trace(file)
    assert trace.exact
    # `ReplayPolicy` raises Diverged at the first token that it is asked otherwise.
    request = SessionRequest(REQUEST, recent=("AGENTS.md",))
    again = rollout(workspace, ReplayPolicy(trace), Tokenizer.load(place), Budget(turns=1, max_turn_tokens=16), request)
    assert np.array_equal(again.segments[0].tokens, trace.segments[0].tokens)
    assert replace(again.cost, model_s=0, pod_s=0, wall_s=0, cached=0) == replace(
        trace.cost, model_s=0, pod_s=0, wall_s=0, cached=0
    )
