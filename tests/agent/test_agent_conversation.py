"""Interactive `etude agent`, in a pod and with --direct: approvals, and the changes that are applied."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_workspace import AgentWorkspace, make_workspace, messages_of, open_pods
from stub_endpoint import StubEndpoint, StubTurn, call, says, serving

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


# ------------------------------------------------------------------------------------------------- conversations


def test_a_conversation_over_a_pipe(workspace: AgentWorkspace) -> None:
    lines = [*FIX, says("You are welcome.")]
    typed = "fix it\nn\n/cost\n/nothing\n/diff\n/apply\ny\nthank \\\nyou\n/help\n"
    with serving(StubEndpoint(lines)) as stub:
        said = workspace.agent("--endpoint", stub.url, typed=typed)
    assert said.code == 0
    for part in (
        "Fixed.",
        "Apply 1 change",
        "sampled ",
        "no command /nothing",
        "applied 1",
        "You are welcome.",
        "/quit",
    ):
        assert part in said.out, said.out
    assert said.out.count("+    return sum((a, b))") == 3  # offered, /diff, /apply
    assert messages_of(stub.asked[-1], "user") == ["fix it", "thank \nyou"]
    assert workspace.read("calc.py") == FIXED
    assert "etude agent --resume" in said.out
    assert "\x1b" not in said.out


def test_changes_are_chosen_file_by_file(workspace: AgentWorkspace) -> None:
    two = [
        says(
            "",
            EDIT,
            call("write", file_path="new.txt", contents="new\n"),
            call("delete_file", target_file=".gitignore"),
        ),
        says("Done."),
    ]
    with serving(StubEndpoint(two)) as stub:
        said = workspace.agent("go", "--endpoint", stub.url, typed="f\ny\nn\ny\n")
    assert "Apply 3 changes" in said.out
    assert "not applied: 1" in said.out
    assert not (workspace.project / ".gitignore").exists()
    assert workspace.read("calc.py") != FIXED
    assert workspace.read("new.txt") == "new\n"


def test_a_message_can_be_repeated_after_an_endpoint_error(workspace: AgentWorkspace) -> None:
    with serving(StubEndpoint([says("One.")])) as stub:
        said = workspace.agent("go", "--endpoint", stub.url, typed="more\n/quit\n")
    assert said.code == 0
    assert "the script has no line 1" in said.out
    assert "to try again" in said.out


# ------------------------------------------------------------------------------------------------- --direct


DIRECT = [
    says("", call("read_file", target_file="calc.py"), EDIT),
    says("", TEST),
    says("", TEST, call("run_terminal_cmd", command="env | grep KEY; touch made")),
    says("", call("read_file", target_file="/etc/hostname"), call("write", file_path="b.txt", contents="b")),
    says("Done."),
]


def test_direct_mode_asks_for_everything_except_reading(
    workspace: AgentWorkspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "sk-1")
    typed = "y\ns\nplease do not\nn\na\n/diff\n"
    with serving(StubEndpoint(DIRECT)) as stub:
        said = workspace.agent("--direct", "go", "--endpoint", stub.url, "--key-env", "MY_KEY", typed=typed)
    assert said.code == 0
    assert said.out.count("Allow it?") == 5  # the second test run is the same command
    assert workspace.read("calc.py") == FIXED
    assert workspace.read("b.txt") == "b"
    assert not (workspace.project / "made").exists()
    results = messages_of(stub.asked[-1], "tool")
    assert "passed" in results[2]
    assert "please do not" in results[4]
    assert "did not allow" in results[5]
    assert "already" in said.out
    assert str(workspace.project) in messages_of(stub.asked[0], "system")[0]


def test_direct_mode_checks_paths_as_the_tools_read_them(workspace: AgentWorkspace) -> None:
    outside = workspace.state.parent / "secret.py"
    outside.write_text("secret = undefined\n")
    ways = [
        call("read_file", target_file=f'"{outside}"'),
        call("read_file", target_file='"' + str(outside).replace("/", "\\x2f") + '"'),
        call("grep", pattern="secret", path=f'"{outside.parent}"'),
        call("read_lints", paths=f'["{outside}"]'),
    ]
    with serving(StubEndpoint([says("", *ways), says("Done.")])) as stub:
        said = workspace.agent("--direct", "go", "--endpoint", stub.url, typed="n\n" * len(ways))
    assert said.out.count("Allow it?") == len(ways)
    assert all("did not allow" in result for result in messages_of(stub.asked[-1], "tool"))


def test_direct_mode_hides_the_api_key_from_commands(
    workspace: AgentWorkspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "sk-1")
    monkeypatch.setenv("OTHER", "seen")
    lines = [says("", call("run_terminal_cmd", command="env | grep -E 'MY_KEY|OTHER'")), says("Done.")]
    with serving(StubEndpoint(lines)) as stub:
        workspace.agent("--direct", "go", "--endpoint", stub.url, "--key-env", "MY_KEY", typed="y\n")
    assert messages_of(stub.asked[-1], "tool") == ["OTHER=seen\n[exit code 0]"]


def test_direct_mode_refuses_at_the_end_of_input(workspace: AgentWorkspace) -> None:
    with serving(StubEndpoint([says("", EDIT), says("Done.")])) as stub:
        workspace.agent("--direct", "go", "--endpoint", stub.url, typed="")
    assert workspace.read("calc.py") != FIXED
    assert "did not allow" in messages_of(stub.asked[-1], "tool")[0]


def test_direct_mode_ends_processes_with_the_session(workspace: AgentWorkspace) -> None:
    start = call("run_terminal_cmd", command="setsid sleep 1234 & echo $! > pid", is_background=True)
    lines: list[StubTurn] = [says("", start), says("Done.")]
    with serving(StubEndpoint(lines)) as stub:
        workspace.agent("--direct", "go", "--endpoint", stub.url, typed="y\n/quit\n")
    pid, deadline = int(workspace.read("pid")), time.monotonic() + 60
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        time.sleep(0.05)  # killed, and not yet waited for
    assert not os.path.exists(f"/proc/{pid}")
