"""`etude agent --print`: its output, the changes it makes, the session it saves, and resuming it."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
from agent_workspace import AgentWorkspace, make_workspace, messages_of, open_pods
from rich.console import Console
from session_helpers import FakeTools, scripted_client
from session_helpers import says as rehearsed
from stub_endpoint import StubEndpoint, call, says, serving

from etude.agent.conversation import AgentConversation
from etude.agent.options import AgentOptions
from etude.agent.screen import Screen
from etude.harness.open_client import OpenedModel
from etude.harness.profile import AgentProfile
from etude.harness.prompt import SessionRequest
from etude.harness.session import Session
from etude.harness.trace_store import load_trace
from etude.pods.pod import Pod

# Changes the file's size: Python would reuse old bytecode after an edit within a second that keeps the size.
EDIT = call("search_replace", file_path="calc.py", old_string="a - b", new_string="sum((a, b))")
TEST = call("run_terminal_cmd", command="python3 test_calc.py")
FIX = [says("Looking.", call("read_file", target_file="calc.py"), TEST), says("", EDIT), says("", TEST), says("Fixed.")]
FIXED = "def add(a, b):\n    return sum((a, b))\n"


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


# ------------------------------------------------------------------------------------------------- for scripts


def test_print_mode_prints_the_final_message_and_writes_only_a_patch(
    workspace: AgentWorkspace, stub: StubEndpoint
) -> None:
    said = workspace.agent("-p", "fix it", "--endpoint", stub.url)
    assert (said.code, said.out) == (0, "Fixed.\n")
    for part in ("● run_terminal_cmd python3 test_calc.py  exit 1", "● search_replace calc.py  +1 -1", "exit 0"):
        assert part in said.err
    (patch,) = workspace.sessions.glob("*/changes.patch")
    assert str(patch) in said.err
    assert "+    return sum((a, b))" in patch.read_text()
    assert workspace.read("calc.py") != FIXED
    assert "\x1b" not in said.out + said.err  # not a terminal: no colours


def test_the_report_is_one_json_object_and_changes_can_be_applied(
    workspace: AgentWorkspace, stub: StubEndpoint
) -> None:
    said = workspace.agent("-p", "--json", "--apply", "--endpoint", stub.url, "fix", "it")
    found = said.json
    assert said.code == 0
    assert (found["final"], found["ending"], found["exact"], found["model"]) == ("Fixed.", "final", False, "stub")
    assert found["applied"] == ["calc.py"]
    assert found["patch"] is None
    assert found["cost"]["calls"] == 4
    assert "+    return sum((a, b))" in found["diff"]
    assert workspace.read("calc.py") == FIXED
    trace = load_trace(workspace.sessions / found["session"] / "session.trace")
    assert (trace.final, trace.exact) == ("Fixed.", False)
    assert messages_of(stub.asked[0], "user") == ["fix it"]


def test_a_request_can_come_from_standard_input(workspace: AgentWorkspace, stub: StubEndpoint) -> None:
    assert workspace.agent("-p", "-", "--endpoint", stub.url, typed="fix\nit\n").code == 0
    assert messages_of(stub.asked[0], "user") == ["fix\nit"]


def test_a_file_that_was_edited_meanwhile_is_not_overwritten(workspace: AgentWorkspace) -> None:
    def edit(said: int) -> None:
        if said == 3:
            (workspace.project / "calc.py").write_text("# my own\n")

    with serving(StubEndpoint(FIX, on_ask=edit)) as stub:
        said = workspace.agent("-p", "--json", "--apply", "--endpoint", stub.url, "fix it")
    assert said.code == 1
    assert said.json["refused"] == {"calc.py": "it changed on disk meanwhile"}
    assert workspace.read("calc.py") == "# my own\n"


def test_a_directory_without_git_works_too(workspace: AgentWorkspace, stub: StubEndpoint) -> None:
    shutil.rmtree(workspace.project / ".git")
    said = workspace.agent("-p", "--json", "--apply", "--endpoint", stub.url, "fix it")
    assert (said.code, said.json["applied"]) == (0, ["calc.py"])  # and no __pycache__
    assert workspace.read("calc.py") == FIXED


@pytest.mark.parametrize(("arguments", "ending"), [(["--turns", "2"], "turns"), (["--tokens", "10"], "tokens")])
def test_an_exhausted_budget_is_a_failure(
    workspace: AgentWorkspace, stub: StubEndpoint, arguments: list[str], ending: str
) -> None:
    said = workspace.agent("-p", "--json", "--apply", *arguments, "--endpoint", stub.url, "fix it")
    assert (said.code, said.json["ending"], said.json["applied"]) == (1, ending, [])
    assert workspace.read("calc.py") != FIXED


def test_the_api_key_comes_from_a_variable_and_is_written_nowhere(
    workspace: AgentWorkspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "sk-very-secret")
    look = says("", call("run_terminal_cmd", command="env; cat /proc/*/environ 2>/dev/null | tr '\\0' '\\n'"))
    with serving(StubEndpoint([look, says("Done.")], key="sk-very-secret")) as stub:
        said = workspace.agent("-p", "look", "--endpoint", stub.url, "--key-env", "MY_KEY")
        wrong = workspace.agent("-p", "look", "--endpoint", stub.url)
    assert said.code == 0
    assert set(stub.keys) == {"Bearer sk-very-secret", ""}
    assert "sk-very-secret" not in json.dumps(stub.asked) + said.out + said.err
    kept = b"".join(path.read_bytes() for path in workspace.state.rglob("*") if path.is_file())
    assert b"sk-very-secret" not in kept
    assert (wrong.code, "401: wrong key" in wrong.err) == (1, True)


def test_control_characters_are_escaped_in_the_output(workspace: AgentWorkspace) -> None:
    evil = "\x1b]0;title\x07\x1b[2J safe \u202e"
    lines = [says(evil, call("run_terminal_cmd", command=f"echo '{evil}'")), says(f"Done. {evil}")]
    with serving(StubEndpoint(lines)) as stub:
        said = workspace.agent("-p", "go", "--endpoint", stub.url)
    assert "\x1b" not in said.out + said.err
    assert "\u202e" not in said.out + said.err
    assert said.out.startswith("Done. ␛]0;title␇")


# ------------------------------------------------------------------------------------------------- resuming


def test_a_resumed_session_has_its_messages_and_its_files(workspace: AgentWorkspace) -> None:
    more = [*FIX, says("", call("read_file", target_file="calc.py")), says("It is fixed.")]
    with serving(StubEndpoint(more)) as stub:
        first = workspace.agent("-p", "--json", "--endpoint", stub.url, "fix it")
        listed = workspace.agent("--list")
        again = workspace.agent("-p", "--json", "--apply", "--resume", "is it fixed?")
    assert listed.out.startswith(first.json["session"][:12])
    assert "fix it" in listed.out
    assert (again.code, again.json["session"]) == (0, first.json["session"])
    assert messages_of(stub.asked[-1], "user") == ["fix it", "is it fixed?"]
    assert "return sum((a, b))" in messages_of(stub.asked[-1], "tool")[-1]  # in a new pod, from the saved files
    assert (again.json["applied"], workspace.read("calc.py")) == (["calc.py"], FIXED)
    assert again.json["cost"]["turns"] == 6


def test_a_session_is_found_by_the_beginning_of_its_id(workspace: AgentWorkspace) -> None:
    with serving(StubEndpoint([says("One."), says("Two.")])) as stub:
        first = workspace.agent("-p", "--json", "--endpoint", stub.url, "go")
        again = workspace.agent("-p", "--resume", first.json["session"][:8], "go on")
        elsewhere = workspace.agent("-p", "-C", str(workspace.state), "--resume", first.json["session"], "go on")
    assert again.out == "Two.\n"
    mistyped = workspace.agent("-p", "--resume", "0123456789ab", "go on")
    assert (elsewhere.code, "worked in" in elsewhere.err) == (2, True)
    assert (mistyped.code, "no such session" in mistyped.err) == (2, True)


def test_a_file_edited_before_resuming_is_not_overwritten(workspace: AgentWorkspace) -> None:
    with serving(StubEndpoint([*FIX, says("Done.")])) as stub:
        workspace.agent("-p", "--endpoint", stub.url, "fix it")
        (workspace.project / "calc.py").write_text("# my own\n")
        again = workspace.agent("-p", "--json", "--apply", "--resume", "go on")
    assert again.json["refused"] == {"calc.py": "it changed on disk meanwhile"}
    assert workspace.read("calc.py") == "# my own\n"


def test_a_failed_session_can_be_resumed(workspace: AgentWorkspace) -> None:
    with serving(StubEndpoint([FIX[0]])) as stub:
        failed = workspace.agent("-p", "--endpoint", stub.url, "fix it")
    with serving(StubEndpoint(FIX)) as stub:
        again = workspace.agent("-p", "--resume", "--endpoint", stub.url, "try again")
    assert (failed.code, "no line 1" in failed.err) == (1, True)
    assert (again.code, again.out) == (0, "Fixed.\n")
    roles = [message["role"] for message in stub.asked[0]["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "tool", "user"]


def test_an_interruption_between_two_answers_does_not_end_the_next() -> None:
    session = Session(SessionRequest("Go."), scripted_client([rehearsed("One."), rehearsed("Two.")]), FakeTools())
    conversation = AgentConversation(
        AgentOptions(Path("/")),
        Screen(Console()),
        OpenedModel(session.client, AgentProfile()),
        cast(Pod, None),
        {},
        None,
        "id",
    )
    conversation.session = session

    async def talk() -> str:
        await session.run()
        conversation.interrupt()
        session.say("Go on.")
        return (await session.run()).final

    assert asyncio.run(talk()) == "Two."
