"""`etude agent` as a person has it: a program on a terminal, with keys that stop it."""

import json
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from agent_desk import ETUDE, Desk, open_pods, set_desk
from stub_endpoint import StubEndpoint, call, says, serving
from typing_person import Person, at_terminal

EDIT = call("search_replace", file_path="calc.py", old_string="a - b", new_string="sum((a, b))")
SLEEP = call("run_terminal_cmd", command="sleep 77")
LONG = says("word " * 400, pause=0.05)


@pytest.fixture(scope="module")
def pods() -> Iterator[Path]:
    with open_pods() as state:
        yield state


@pytest.fixture
def desk(tmp_path: Path, pods: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Desk:
    return set_desk(tmp_path, pods, monkeypatch, capsys)


def talk(desk: Desk, stub: StubEndpoint, *arguments: str) -> AbstractContextManager[Person]:
    command = [*ETUDE, "agent", "--endpoint", stub.url, *arguments]
    return at_terminal(command, desk.project, desk.environment)


def test_ctrl_c_stops_the_answer_or_the_tool_and_twice_quits(desk: Desk) -> None:
    lines = [says("", EDIT), says("", SLEEP), LONG, says("As you like.")]
    with serving(StubEndpoint(lines)) as stub, talk(desk, stub, "work") as person:
        person.expect("run_terminal_cmd sleep 77")  # it is said while it runs
        person.interrupt()
        person.expect("aborted")
        person.expect("(interrupted;")
        person.expect("> ")
        person.type("say something long")
        person.expect("word word word")  # long before it is over
        person.interrupt()
        person.expect("(interrupted;")
        person.expect("> ")
        person.type("stop")
        person.expect("word word word")
        person.interrupt()
        person.expect("(interrupted;")
        person.expect("> ")
        person.interrupt()
        assert person.wait() == 130
    assert "not applied: 1" in person.seen
    assert "etude agent --resume" in person.seen
    assert "Traceback" not in person.seen
    assert "a - b" in desk.read("calc.py")
    (record,) = desk.sessions.glob("*/session.json")
    assert json.loads(record.read_text())["ending"] == "interrupted"


def test_a_conversation_at_a_terminal_is_in_colour_and_ends_with_ctrl_d(desk: Desk) -> None:
    with (
        serving(StubEndpoint([says("Hm.", EDIT, thinking="Let me see."), says("Done.")])) as stub,
        talk(desk, stub) as person,
    ):
        person.expect("> ")
        person.interrupt()
        person.expect("(Ctrl-C again")
        person.type("fix it")
        person.expect("Done.")
        person.expect("Apply 1 change")
        person.interrupt()  # neither yes nor the end
        person.expect("(Ctrl-C again")
        person.expect("> ")
        person.type("/apply")
        person.expect("Apply 1 change")
        person.type("y")
        person.expect("applied 1")
        person.expect("> ")
        person.end()
        assert person.wait() == 0
    assert "sum((a, b))" in desk.read("calc.py")
    shown = person.raw.decode()
    assert "\x1b[2;3mLet" in shown  # thoughts are dim
    assert "\x1b[32m+    return sum((a, b))" in shown
    assert "\x1b[31m-    return a - b" in shown


@pytest.mark.slow
def test_directly_a_person_is_asked_and_may_stop_while_being_asked(desk: Desk) -> None:
    lines = [says("", EDIT), says("", call("write", file_path="x", contents="x")), says("Done.")]
    with serving(StubEndpoint(lines)) as stub, talk(desk, stub, "--direct", "work") as person:
        person.expect("search_replace calc.py")
        person.expect("+sum((a, b))")
        person.expect("Allow it?")
        person.type("y")
        person.expect("write x")
        person.expect("Allow it?")
        person.interrupt()
        person.expect("(interrupted;")
        person.expect("> ")
        person.type("/quit")
        assert person.wait() == 0
    assert "sum((a, b))" in desk.read("calc.py")
    assert not (desk.project / "x").exists()


@pytest.mark.slow
def test_a_session_goes_on_at_a_terminal(desk: Desk) -> None:
    with serving(StubEndpoint([says("", EDIT), says("First."), says("Second.")])) as stub:
        with talk(desk, stub, "fix it") as person:
            person.expect("Apply 1 change")
            person.type("n")
            person.expect("> ")
            person.type("/quit")
            assert person.wait() == 0
        with at_terminal([*ETUDE, "agent", "--resume"], desk.project, desk.environment) as person:
            person.expect("goes on")
            person.expect("First.")
            person.expect("> ")
            person.type("and now?")
            person.expect("Second.")
            person.expect("Apply 1 change")
            person.type("y")
            person.expect("applied 1")
            person.expect("> ")
            person.end()
            assert person.wait() == 0
    assert "sum((a, b))" in desk.read("calc.py")


def test_a_script_that_is_interrupted_says_so_and_keeps_its_session(desk: Desk) -> None:
    with serving(StubEndpoint([LONG, says("On.")])) as stub:
        command = [*ETUDE, "agent", "-p", "--json", "--endpoint", stub.url, "work"]
        process = subprocess.Popen(
            command, cwd=desk.project, env=desk.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
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
    assert (desk.sessions / found["session"] / "session.trace").exists()
    assert b"Traceback" not in err


@pytest.mark.slow
def test_ctrl_c_while_it_starts_ends_it(desk: Desk) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        command = [*ETUDE, "agent", "--endpoint", url, "work"]
        with at_terminal(command, desk.project, desk.environment) as person:
            person.expect("loading the model")
            person.interrupt()
            assert person.wait() == 130
    assert "Traceback" not in person.seen
