"""Who speaks in `etude agent`: a checkpoint, one of our servers, any endpoint; and what cannot be is said at once."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_desk import Desk, open_pods, set_desk, tiny_checkpoint
from samplers import served
from stub_endpoint import StubEndpoint, says, serving

from etude.agent import upload as intake
from etude.chat.tokenizer import Tokenizer
from etude.harness.trace_store import load_trace
from etude.inference.engine import Engine, EngineOptions
from etude.model import load

FIX = [says("Fixed.")]


@pytest.fixture(scope="module")
def pods() -> Iterator[Path]:
    with open_pods() as state:
        yield state


@pytest.fixture
def desk(tmp_path: Path, pods: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Desk:
    return set_desk(tmp_path, pods, monkeypatch, capsys)


@pytest.fixture
def stub() -> Iterator[StubEndpoint]:
    with serving(StubEndpoint(FIX)) as stub:
        yield stub


# ------------------------------------------------------------------------------------------------- models


def test_a_checkpoint_speaks_and_goes_on_token_for_token(desk: Desk, tmp_path: Path) -> None:
    model = str(tiny_checkpoint(tmp_path / "tiny"))
    options = ("-p", "--json", "--model", model, "--answer", "12", "--turns", "1", "--seed", "1")
    said = desk.agent(*options, "fix it").json
    assert said["exact"]
    assert said["cost"]["turns"] == 1
    file = desk.sessions / said["session"] / "session.trace"
    first = load_trace(file)
    desk.agent("-p", "--resume", "go on", "--turns", "2", "--answer", "12")
    second = load_trace(file)
    before, after = (trace.segments[0].tokens.tolist() for trace in (first, second))
    assert after[: len(before)] == before
    assert second.segments[0].sampled.sum() > first.segments[0].sampled.sum()
    other = desk.agent("-p", "--resume", "go on", "--model", str(_other(tmp_path)))
    assert (other.code, "another tokenizer" in other.err) == (2, True)


def _other(tmp_path: Path) -> Path:
    """The same model with another tokenizer."""
    place = tiny_checkpoint(tmp_path / "other")
    text = (place / "tokenizer.json").read_text()
    (place / "tokenizer.json").write_text(text.replace('"use_regex": true', '"use_regex": false', 1))
    return place


def test_one_of_our_servers_is_spoken_to_in_tokens(desk: Desk, tmp_path: Path) -> None:
    place = tiny_checkpoint(tmp_path / "tiny")
    engine = Engine(load(place), EngineOptions(cache_tokens=32_768), tokenizer=Tokenizer.load(place))
    options = ("--answer", "8", "--turns", "1", "--window", "30000", "fix it")
    with served(engine) as (url, _):
        exact = desk.agent("-p", "--json", "--endpoint", f"{url}/v1", "--model", str(place), *options)
        chat = desk.agent("-p", "--json", "--endpoint", f"{url}/v1", *options)
    assert exact.json["exact"], exact.err
    assert not chat.json["exact"], chat.err
    with serving(StubEndpoint([])) as stub:
        wrong = desk.agent("-p", "--endpoint", stub.url, "--model", str(place), *options)
    assert (wrong.code, "not an Etude server" in wrong.err) == (2, True)


def test_a_prompt_that_does_not_fit_is_refused(desk: Desk, tmp_path: Path) -> None:
    model = str(tiny_checkpoint(tmp_path / "tiny"))
    said = desk.agent("-p", "--model", model, "--window", "1000", "fix it")
    assert said.code == 2
    assert "the prompt has" in said.err
    assert "fewer tools" in said.err


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["-p", "x"], 2, "no model: give --model"),
        (["-p", "x", "--model", "nowhere"], 2, "--model nowhere: no such directory"),
        (["-p", "x", "--model", "."], 2, "tokenizer.json: no such file"),
        (["-p", "x", "--endpoint", "http://127.0.0.1:9/v1"], 1, "127.0.0.1:9"),
        (["-p", "x", "--endpoint", "nonsense"], 2, "expected a URL"),
        (["-p", "x", "--endpoint", "http://me:secret@127.0.0.1:9/v1"], 2, "--key-env"),
        (["-p", "x", "--endpoint", "http://127.0.0.1:9", "--key-env", "NO_SUCH"], 2, "no such variable"),
        (["x", "--model", "nowhere"], 2, "--model nowhere: no such directory"),
        (["-p"], 2, "--print needs a request"),
        (["-p", "x", "--direct"], 2, "nobody answers"),
        (["--json"], 2, "are for --print"),
        (["-p", "x", "--resume"], 2, "there is no session of"),
        (["-p", "x", "-C", "nowhere"], 2, "not a directory"),
        (["-p", "x", "--toolset", "hammer", "--endpoint", "STUB"], 2, "naming is 'hammer'"),
        (["-p", "x", "--include", "nothing", "--endpoint", "STUB"], 2, "no such file"),
        (["-p", "x", "--model", "two", "--endpoint", "STUB", "--image", "nothing"], 2, "nothing"),
    ],
)
def test_what_cannot_be_is_said_at_once(
    desk: Desk, stub: StubEndpoint, arguments: list[str], code: int, complaint: str
) -> None:
    said = desk.agent(*(stub.url if word == "STUB" else word for word in arguments))
    assert (said.code, complaint in said.err) == (code, True), said


def test_a_huge_directory_is_refused(desk: Desk, stub: StubEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "MAX_BYTES", 100)
    said = desk.agent("-p", "x", "--endpoint", stub.url)
    assert (said.code, "copied into a pod" in said.err) == (2, True)
