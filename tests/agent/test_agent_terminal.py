"""`etude agent` on a real pseudo-terminal: colours, Ctrl-C and Ctrl-D."""

import json
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from agent_workspace import ETUDE, AgentWorkspace, make_workspace, open_pods
from stub_endpoint import StubEndpoint, call, says, serving
from terminal_driver import TerminalDriver, open_terminal

EDIT = call("search_replace", file_path="calc.py", old_string="a - b", new_string="sum((a, b))")
SLEEP = call("run_terminal_cmd", command="sleep 77")
LONG = says("word " * 400, pause=0.05)


@pytest.fixture(scope="module")
def pods() -> Iterator[Path]:
    with open_pods() as state:
        yield state


@pytest.fixture
def workspace(
    tmp_path: Path, pods: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> AgentWorkspace:
    return make_workspace(tmp_path, pods, monkeypatch, capsys)


def talk(workspace: AgentWorkspace, stub: StubEndpoint, *arguments: str) -> AbstractContextManager[TerminalDriver]:
    command = [*ETUDE, "agent", "--endpoint", stub.url, *arguments]
    return open_terminal(command, workspace.project, workspace.environment)


def test_ctrl_c_stops_the_answer_or_the_tool_and_twice_quits(workspace: AgentWorkspace) -> None:
    lines = [says("", EDIT), says("", SLEEP), LONG, says("As you like.")]
    with serving(StubEndpoint(lines)) as stub, talk(workspace, stub, "work") as terminal:
        terminal.expect("run_terminal_cmd sleep 77")  # it is said while it runs
        terminal.interrupt()
        terminal.expect("aborted")
        terminal.expect("(interrupted;")
        terminal.expect("> ")
        terminal.type("say something long")
        terminal.expect("word word word")  # long before it is over
        terminal.interrupt()
        terminal.expect("(interrupted;")
        terminal.expect("> ")
        terminal.type("stop")
        terminal.expect("word word word")
        terminal.interrupt()
        terminal.expect("(interrupted;")
        terminal.expect("> ")
        terminal.interrupt()
        assert terminal.wait() == 130
    assert "not applied: 1" in terminal.seen
    assert "etude agent --resume" in terminal.seen
    assert "Traceback" not in terminal.seen
    assert "a - b" in workspace.read("calc.py")
    (record,) = workspace.sessions.glob("*/session.json")
    assert json.loads(record.read_text())["ending"] == "interrupted"


def test_a_conversation_at_a_terminal_is_in_colour_and_ends_with_ctrl_d(workspace: AgentWorkspace) -> None:
    with (
        serving(StubEndpoint([says("Hm.", EDIT, thinking="Let me see."), says("Done.")])) as stub,
        talk(workspace, stub) as terminal,
    ):
        terminal.expect("> ")
        terminal.interrupt()
        terminal.expect("(Ctrl-C again")
        terminal.type("fix it")
        terminal.expect("Done.")
        terminal.expect("Apply 1 change")
        terminal.interrupt()  # neither yes nor the end
        terminal.expect("(Ctrl-C again")
        terminal.expect("> ")
        terminal.type("/apply")
        terminal.expect("Apply 1 change")
        terminal.type("y")
        terminal.expect("applied 1")
        terminal.expect("> ")
        terminal.end()
        assert terminal.wait() == 0
    assert "sum((a, b))" in workspace.read("calc.py")
    shown = terminal.raw.decode()
    assert "\x1b[2;3mLet" in shown  # thoughts are dim
    assert "\x1b[32m+    return sum((a, b))" in shown
    assert "\x1b[31m-    return a - b" in shown


@pytest.mark.slow
def test_direct_mode_can_be_interrupted_at_a_question(workspace: AgentWorkspace) -> None:
    lines = [says("", EDIT), says("", call("write", file_path="x", contents="x")), says("Done.")]
    with serving(StubEndpoint(lines)) as stub, talk(workspace, stub, "--direct", "work") as terminal:
        terminal.expect("search_replace calc.py")
        terminal.expect("+sum((a, b))")
        terminal.expect("Allow it?")
        terminal.type("y")
        terminal.expect("write x")
        terminal.expect("Allow it?")
        terminal.interrupt()
        terminal.expect("(interrupted;")
        terminal.expect("> ")
        terminal.type("/quit")
        assert terminal.wait() == 0
    assert "sum((a, b))" in workspace.read("calc.py")
    assert not (workspace.project / "x").exists()


@pytest.mark.slow
def test_a_session_goes_on_at_a_terminal(workspace: AgentWorkspace) -> None:
    with serving(StubEndpoint([says("", EDIT), says("First."), says("Second.")])) as stub:
        with talk(workspace, stub, "fix it") as terminal:
            terminal.expect("Apply 1 change")
            terminal.type("n")
            terminal.expect("> ")
            terminal.type("/quit")
            assert terminal.wait() == 0
        with open_terminal([*ETUDE, "agent", "--resume"], workspace.project, workspace.environment) as terminal:
            terminal.expect("resumed")
            terminal.expect("First.")
            terminal.expect("> ")
            terminal.type("and now?")
            terminal.expect("Second.")
            terminal.expect("Apply 1 change")
            terminal.type("y")
            terminal.expect("applied 1")
            terminal.expect("> ")
            terminal.end()
            assert terminal.wait() == 0
    assert "sum((a, b))" in workspace.read("calc.py")


def test_an_interrupted_print_mode_saves_its_session(workspace: AgentWorkspace) -> None:
    with serving(StubEndpoint([LONG, says("On.")])) as stub:
        command = [*ETUDE, "agent", "-p", "--json", "--endpoint", stub.url, "work"]
        process = subprocess.Popen(
            command, cwd=workspace.project, env=workspace.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        deadline = time.monotonic() + 60
        while not stub.asked and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err.decode()
    found = json.loads(out)
    assert found["ending"] == "interrupted"
    assert (workspace.sessions / found["session"] / "session.trace").exists()
    assert b"Traceback" not in err


@pytest.mark.slow
def test_ctrl_c_during_startup_quits(workspace: AgentWorkspace) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        command = [*ETUDE, "agent", "--endpoint", url, "work"]
        with open_terminal(command, workspace.project, workspace.environment) as terminal:
            terminal.expect("loading the model")
            terminal.interrupt()
            assert terminal.wait() == 130
    assert "Traceback" not in terminal.seen
