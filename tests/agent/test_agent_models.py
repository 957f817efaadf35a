"""The models of `etude agent`: a checkpoint, an Etude server, any endpoint; bad options are refused at once."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_workspace import AgentWorkspace, make_workspace, open_pods, tiny_checkpoint
from samplers import served
from stub_endpoint import StubEndpoint, says, serving

from etude.agent import upload
from etude.chat.tokenizer import Tokenizer
from etude.harness.trace_store import load_trace
from etude.inference.engine import Engine
from etude.inference.settings import EngineOptions
from etude.model import load

FIX = [says("Fixed.")]


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
def stub() -> Iterator[StubEndpoint]:
    with serving(StubEndpoint(FIX)) as stub:
        yield stub


# ------------------------------------------------------------------------------------------------- models


def test_a_checkpoint_answers_and_resumes_token_for_token(workspace: AgentWorkspace, tmp_path: Path) -> None:
    model = str(tiny_checkpoint(tmp_path / "tiny"))
    options = ("-p", "--json", "--model", model, "--answer", "12", "--turns", "1", "--seed", "1")
    said = workspace.agent(*options, "fix it").json
    assert said["exact"]
    assert said["cost"]["turns"] == 1
    file = workspace.sessions / said["session"] / "session.trace"
    first = load_trace(file)
    workspace.agent("-p", "--resume", "go on", "--turns", "2", "--answer", "12")
    second = load_trace(file)
    before, after = (trace.segments[0].tokens.tolist() for trace in (first, second))
    assert after[: len(before)] == before
    assert second.segments[0].sampled.sum() > first.segments[0].sampled.sum()
    other = workspace.agent("-p", "--resume", "go on", "--model", str(_other(tmp_path)))
    assert (other.code, "another tokenizer" in other.err) == (2, True)


def _other(tmp_path: Path) -> Path:
    """Save the same model with another tokenizer."""
    place = tiny_checkpoint(tmp_path / "other")
    text = (place / "tokenizer.json").read_text()
    (place / "tokenizer.json").write_text(text.replace('"use_regex": true', '"use_regex": false', 1))
    return place


def test_an_etude_server_is_used_token_for_token(workspace: AgentWorkspace, tmp_path: Path) -> None:
    place = tiny_checkpoint(tmp_path / "tiny")
    engine = Engine(load(place), EngineOptions(kv_cache_tokens=32_768), tokenizer=Tokenizer.load(place))
    options = ("--answer", "8", "--turns", "1", "--window", "30000", "fix it")
    with served(engine) as (url, _):
        exact = workspace.agent("-p", "--json", "--endpoint", f"{url}/v1", "--model", str(place), *options)
        chat = workspace.agent("-p", "--json", "--endpoint", f"{url}/v1", *options)
    assert exact.json["exact"], exact.err
    assert not chat.json["exact"], chat.err
    with serving(StubEndpoint([])) as stub:
        wrong = workspace.agent("-p", "--endpoint", stub.url, "--model", str(place), *options)
    assert (wrong.code, "not an Etude server" in wrong.err) == (2, True)


def test_a_prompt_that_does_not_fit_is_refused(workspace: AgentWorkspace, tmp_path: Path) -> None:
    model = str(tiny_checkpoint(tmp_path / "tiny"))
    said = workspace.agent("-p", "--model", model, "--window", "1000", "fix it")
    assert said.code == 2
    assert "the prompt has" in said.err
    assert "fewer tools" in said.err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["-p", "x"], 2, "no model: give --model"),
        (["-p", "x", "--model", "nowhere"], 2, "--model nowhere: no such directory"),
        (["-p", "x", "--model", "."], 2, "tokenizer.json: no such file"),
        (["-p", "x", "--endpoint", "http://127.0.0.1:9/v1"], 1, "127.0.0.1:9"),
        (["-p", "x", "--endpoint", "nonsense"], 2, "expected a URL"),
        (["-p", "x", "--endpoint", "http://me:secret@127.0.0.1:9/v1"], 2, "--key-env"),
        (["-p", "x", "--endpoint", "http://127.0.0.1:9", "--key-env", "NO_SUCH"], 2, "variable is not set"),
        (["x", "--model", "nowhere"], 2, "--model nowhere: no such directory"),
        (["-p"], 2, "--print needs a request"),
        (["-p", "x", "--direct"], 2, "--print cannot answer"),
        (["--json"], 2, "need --print"),
        (["-p", "x", "--resume"], 2, "there is no session of"),
        (["-p", "x", "-C", "nowhere"], 2, "not a directory"),
        (["-p", "x", "--toolset", "hammer", "--endpoint", "STUB"], 2, 'not "hammer"'),
        (["-p", "x", "--include", "nothing", "--endpoint", "STUB"], 2, "no such file"),
        (["-p", "x", "--model", "two", "--endpoint", "STUB", "--image", "nothing"], 2, "nothing"),
    ],
)
def test_bad_options_are_refused_at_once(
    workspace: AgentWorkspace, stub: StubEndpoint, arguments: list[str], code: int, message: str
) -> None:
    said = workspace.agent(*(stub.url if word == "STUB" else word for word in arguments))
    assert (said.code, message in said.err) == (code, True), said


def test_a_huge_directory_is_refused(
    workspace: AgentWorkspace, stub: StubEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "MAX_BYTES", 100)
    said = workspace.agent("-p", "x", "--endpoint", stub.url)
    assert (said.code, "copied into a pod" in said.err) == (2, True)
