"""Whole comparisons in real pods: a checkpoint beside an endpoint, whatever breaks, and what must never be written."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from rl_runs import make_model
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from stub_endpoint import StubEndpoint, StubTurn, call, says, serving
from typer.testing import CliRunner, Result

from etude.bench.candidates import KEY
from etude.bench.chat_rollout import DiscreetChat, run_chat_rollout
from etude.bench.cli import app
from etude.bench.directory import Place
from etude.bench.run import trial_record
from etude.errors import EtudeError, InputError
from etude.harness.budget import Budget
from etude.harness.summary import SummarySettings
from etude.harness.tool_set import ToolSet
from etude.harness.trace_store import load_trace
from etude.pods import open_fleet
from etude.rollouts.queue import RolloutQueue
from etude.rollouts.rollout import Rollout, RolloutFailed, RolloutOptions
from etude.tasks.harbor import read_task
from etude_nano.source import generate_nano

SECRET = "sk-0123456789abcdef"
TOOLS = ("read_file", "search_replace", "run_terminal_cmd")
ALIKE = ("--tools", ",".join(TOOLS), "--brief", "--summaries", "off", "--budget-turns", 4, "--budget-answer", 24)
SETTINGS = RolloutOptions(
    environment=ToolSet(tools=TOOLS, short_system_prompt=True), budget=Budget(turns=4, max_turn_tokens=24), summaries=SummarySettings(mode="off")
)


class Expert(StubEndpoint):
    """Solves nano tasks by their solutions; `fails` are the requests, counted from 1, that it breaks down at."""

    tasks: Path
    fails: tuple[int, ...] = ()
    status = 500
    looks_around = ""  # a command to begin with

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        asked = "\n".join(str(message["content"]) for message in body["messages"] if message["role"] == "user")
        (task,) = (each for each in self.tasks.glob("nano-*") if (each / "instruction.md").read_text().strip() in asked)
        if len(self.keys) + 1 in self.fails:
            self.keys.append("")
            message = f"out of order, {request.headers.get('authorization')}"
            return JSONResponse({"error": {"message": message}}, self.status)
        self.lines = [*([runs(self.looks_around)] if self.looks_around else []), *script(task)]
        return await super().chat(request)


def runs(command: str) -> StubTurn:
    return says("", call("run_terminal_cmd", command=command))


def script(task: Path) -> list[StubTurn]:
    final, repo = task / "solution/final.txt", task / "solution/repo"
    files = sorted(path for path in repo.rglob("*") if path.is_file())
    writes = [f"cat > {path.relative_to(repo)} <<'END'\n{path.read_text()}END" for path in files]
    return [*(map(runs, writes)), says(final.read_text() if final.exists() else "Done.")]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bench") / "tasks"
    generate_nano(directory, 3, "held-out", 0, (1,))
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("bench") / "tiny")


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pods")


@pytest.fixture
def expert(tasks: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Expert]:
    monkeypatch.setenv(KEY, SECRET)
    stub = Expert([], key=SECRET)
    stub.tasks = tasks
    with serving(stub):
        yield stub


def bench(*arguments: object, code: int = 0) -> Result:
    done = CliRunner().invoke(app, [*map(str, arguments)])
    found = done.exception.exit_code if isinstance(done.exception, EtudeError) else done.exit_code
    if done.exception is not None and not isinstance(done.exception, EtudeError | SystemExit):
        raise done.exception
    assert found == code, (done.output, done.exception)
    return done


def answer(*arguments: object) -> Any:
    return json.loads(bench(*arguments, "--json").stdout)


def outcomes(out: Path) -> dict[str, list[bool]]:
    lines = [json.loads(line) for line in (out / "trials.jsonl").read_text().splitlines()]
    found: dict[str, list[bool]] = {}
    for line in lines:
        found.setdefault(line["policy"], []).append(line["solved"])
    return found


def everything(out: Path) -> str:
    """All that a comparison wrote, traces unpacked."""
    parts = [path.read_bytes().decode("latin-1") for path in out.rglob("*") if path.is_file()]
    return "\n".join([*parts, *(repr(load_trace(path)) for path in out.rglob("*.trace"))])


# ------------------------------------------------------------------------------------------- side by side


def test_a_checkpoint_and_an_endpoint_are_compared_on_the_same_tasks(
    expert: Expert, tasks: Path, model: Path, state: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    who = ("--policy", f"tiny={model}", "--policy", f"{expert.url}#stub", "--price", "stub=1,2")
    asked = ("run", *who, "--tasks", tasks, "-k", 2, "--out", out, "--state", state, *ALIKE)
    said = answer(*asked)
    assert said["finished"]
    tiny, stub = said["policies"]
    assert (tiny["accuracy"]["mean"], stub["accuracy"]["mean"]) == (0.0, 1.0)
    assert (tiny["kind"], stub["kind"]) == ("checkpoint", "endpoint")
    assert said["differences"][0]["accuracy"]["mean"] == 1.0
    assert outcomes(out) == {"tiny": [False] * 6, "stub": [True] * 6}
    traces = sorted((out / "traces").rglob("*.trace"))
    assert len(traces) == 12
    assert Counter(load_trace(path).exact for path in traces) == {True: 6, False: 6}
    assert stub["spent"]["dollars"]["mean"] == pytest.approx(
        (stub["spent"]["prompt"]["mean"] + 2 * stub["spent"]["made"]["mean"]) / 1e6
    )
    assert json.loads((out / "summary.json").read_text()) == said
    assert "stub" in (out / "report.html").read_text()

    # nothing is run twice, and nothing is lost by asking again
    requests = len(expert.asked)
    assert "100.0%" in bench(*asked, "--resume").stdout
    assert len(expert.asked) == requests
    assert answer("show", out)["policies"][1]["accuracy"] == stub["accuracy"]
    assert answer("show", out, "--price", "tiny=1,1")["policies"][0]["spent"]["dollars"]["mean"] > 0


def test_the_same_seed_gives_a_checkpoint_the_same_sessions(
    tasks: Path, model: Path, state: Path, tmp_path: Path
) -> None:
    made = []
    for number, seed in enumerate((1, 1, 2)):
        out = tmp_path / str(number)
        given = ("--tasks", tasks, "--limit", 1, "--out", out, "--state", state, "--seed", seed, "-j", 1, *ALIKE)
        bench("run", "--policy", f"tiny={model}", *given)
        (path,) = (out / "traces").rglob("*.trace")
        made.append([segment.tokens.tolist() for segment in load_trace(path).segments])
    assert made[0] == made[1] != made[2]


# ------------------------------------------------------------------------------------------- what breaks


def test_a_failure_of_an_endpoint_is_tried_again_and_is_no_zero(
    expert: Expert, tasks: Path, state: Path, tmp_path: Path
) -> None:
    expert.fails = (2, 3)
    out = tmp_path / "out"
    said = answer("run", "--policy", f"{expert.url}#stub", "--tasks", tasks, "--out", out, "--state", state, *ALIKE)
    (stub,) = said["policies"]
    assert stub["accuracy"]["mean"] == 1.0
    assert (stub["tasks"], stub["infrastructure"]["failures"]) == (3, 2)
    assert stub["infrastructure"]["by_class"] == {"ServerError": 2}
    assert SECRET not in everything(out)


def test_a_policy_that_breaks_stops_alone_and_goes_on_later(
    expert: Expert, tasks: Path, model: Path, state: Path, tmp_path: Path
) -> None:
    """Its key is taken away in the middle; the other policy is not disturbed."""
    expert.fails, expert.status = tuple(range(4, 1000)), 401
    out = tmp_path / "out"
    who = ("--policy", f"tiny={model}", "--policy", f"{expert.url}#stub")
    asked = ("run", *who, "--tasks", tasks, "--out", out, "--state", state, "-j", 1, *ALIKE)
    done = bench(*asked, code=1)
    assert str(done.exception).startswith(
        f"policy stub: POST {expert.url}/chat/completions: 401: out of order, Bearer ["
    )
    assert "--resume goes on" in str(done.exception)
    said = json.loads((out / "summary.json").read_text())
    assert [policy["tasks"] for policy in said["policies"]] == [3, 1]
    assert not said["finished"]
    assert "still to come" in done.stdout

    expert.fails = ()
    assert [policy["tasks"] for policy in answer(*asked, "--resume")["policies"]] == [3, 3]
    assert SECRET not in everything(out)


def test_a_policy_that_fails_at_everything_is_not_tried_on_all_tasks(
    expert: Expert, tasks: Path, state: Path, tmp_path: Path
) -> None:
    expert.fails, expert.status = tuple(range(1, 1000)), 400
    asked = ("run", "--policy", f"{expert.url}#stub", "--tasks", tasks, "--state", state, "-j", 1, *ALIKE)
    done = bench(*asked, "--out", tmp_path / "out", code=1)
    assert "policy stub: none of its trials could be graded, and 3 tasks were given up; the last:" in str(
        done.exception
    )
    assert "400: out of order" in str(done.exception)

    # somebody repairs it: what was given up gets another chance
    expert.fails = ()
    (stub,) = answer(*asked, "--out", tmp_path / "out", "--resume")["policies"]
    assert (stub["tasks"], stub["accuracy"]["mean"]) == (3, 1.0)
    assert stub["infrastructure"]["failures"] == 12
    assert stub["infrastructure"]["given_up"] == {}


def test_what_is_asked_wrongly_is_said_before_anything_runs(
    expert: Expert, tasks: Path, model: Path, tmp_path: Path
) -> None:
    out, stub = tmp_path / "out", f"{expert.url}#stub"

    def wrong(*arguments: object, code: int = 2) -> str:
        return str(bench("run", "--out", out, *arguments, code=code).exception)

    (tmp_path / "empty").mkdir()
    assert "no task there" in wrong("--policy", stub, "--tasks", tmp_path / "empty")
    assert "not a directory" in wrong("--policy", stub, "--tasks", tmp_path / "nowhere")
    assert "no such directory" in wrong("--policy", "nowhere", "--tasks", tasks)
    assert "is not a tool" in wrong("--policy", stub, "--tasks", tasks, "--tools", "hammer")
    assert "no policy other" in wrong("--policy", stub, "--tasks", tasks, "--price", "other=1,2")
    assert "no checkpoint among the policies" in wrong("--policy", stub, "--tasks", tasks, "--dialect", "qwen3")
    dead = "http://127.0.0.1:9/v1#m"
    assert "policy m: GET http://127.0.0.1:9/v1/models: no connection: Connection refused" in wrong(
        "--policy", dead, "--tasks", tasks, code=1
    )
    assert not out.exists()
    (out / "mine").mkdir(parents=True)
    assert "is not a comparison and not empty (it has mine)" in wrong("--policy", stub, "--tasks", tasks)
    assert "no comparison there" in str(bench("show", out, code=2).exception)


def test_two_comparisons_are_not_mixed(expert: Expert, tasks: Path, model: Path, state: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    asked = ("run", "--policy", f"{expert.url}#stub", "--tasks", tasks, "--out", out, "--state", state, *ALIKE)
    bench(*asked, "--limit", 1)
    assert "add --resume to go on with it" in str(bench(*asked, "--limit", 1, code=2).exception)
    why = str(bench(*asked, "--limit", 1, "--resume", "--temperature", 0.5, code=2).exception)
    assert "temperature: 1.0 then, 0.5 now" in why
    assert "tasks.nano" in str(bench(*asked, "--resume", code=2).exception)
    other = ("run", "--policy", model, *asked[3:])
    assert "its policies are stub; name them in this order" in str(
        bench(*other, "--limit", 1, "--resume", code=2).exception
    )
    # a policy may be added to those that are there
    more = ("run", "--policy", f"{expert.url}#stub", "--policy", model, *asked[3:], "--limit", 1, "--resume")
    assert [policy["tasks"] for policy in answer(*more)["policies"]] == [1, 1]


# ------------------------------------------------------------------------------------------- one trial


def chat_trial(expert: Expert, task: Path, state: Path, settings: RolloutOptions = SETTINGS) -> Rollout:
    async def main() -> Rollout:
        client = DiscreetChat(expert.url, SECRET, model="stub")
        async with open_fleet(state=state) as fleet:
            try:
                return await run_chat_rollout(fleet, read_task(task), client, 8000, settings, id="trial")
            finally:
                await client.close()
                assert fleet.local is not None
                assert not fleet.local.pods

    return asyncio.run(main())


def test_a_key_is_in_no_pod(expert: Expert, tasks: Path, state: Path) -> None:
    expert.looks_around = "env; cat /proc/*/environ /proc/*/cmdline | tr '\\0' '\\n'; true"
    trace = chat_trial(expert, tasks / "nano-held-out-000000", state).trace
    (seen,) = trace.steps[-3].outcomes
    assert "PATH=" in seen.text
    assert SECRET not in repr(trace)
    assert expert.keys[-1] == f"Bearer {SECRET}"


def test_what_cheats_has_solved_nothing(expert: Expert, tasks: Path, state: Path) -> None:
    expert.looks_around = "cat /logs/verifier/reward.txt"
    task = tasks / "nano-held-out-000000"
    rollout = chat_trial(expert, task, state)
    record = trial_record(rollout, read_task(task))
    assert rollout.grade.score == 1.0
    assert (record["score"], record["solved"], record["verifier_score"]) == (0.0, False, 1.0)
    assert "reward files" in record["hack"]


def test_an_endpoint_that_does_not_answer_in_time_is_no_failure_of_the_agent(
    expert: Expert, tasks: Path, state: Path
) -> None:
    expert.on_ask = lambda said: time.sleep(3)
    hurried = RolloutOptions(SETTINGS.environment, Budget(turns=4, seconds=1.0), SETTINGS.summaries)
    with pytest.raises(RolloutFailed, match=r"no answer for \d s"):
        chat_trial(expert, tasks / "nano-held-out-000000", state, hurried)


def test_a_task_with_steps_is_refused(expert: Expert, tasks: Path, tmp_path: Path) -> None:
    step = tmp_path / "many/steps/one"
    for name in ("tests", "solution"):
        (step / name).mkdir(parents=True)
    (step / "tests/test.sh").write_text("#!/bin/sh\n")
    (step / "instruction.md").write_text("Do it.")
    (tmp_path / "many/environment").mkdir()
    (tmp_path / "many/task.toml").write_text('schema_version = "1.4"\n[[steps]]\nname = "one"\n')
    done = bench("run", "--policy", f"{expert.url}#stub", "--tasks", tmp_path / "many", "--out", tmp_path / "o", code=2)
    assert isinstance(done.exception, InputError)
    assert "a task with steps" in str(done.exception)


# ------------------------------------------------------------------------------------------- kills


MAIN = "import sys; from etude.bench.cli import app; app(sys.argv[1:])"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_comparison_that_is_stopped_goes_on_and_runs_nothing_twice(
    number: signal.Signals, expert: Expert, tasks: Path, model: Path, state: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    who = ("--policy", f"{expert.url}#stub", "--policy", f"tiny={model}")
    asked = ("run", *who, "--tasks", tasks, "-k", 4, "--out", out, "--state", state, "-j", 2, *ALIKE)
    expert.on_ask = lambda said: time.sleep(0.15)
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, *map(str, asked)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    table = Place(out).slots("stub")

    def graded() -> set[str]:
        if not table.exists():
            return set()
        with closing(RolloutQueue.open_read_only(table)) as slots:
            return {slot.trace for each in slots.progress() for slot in slots.group(each.id).slots if slot.reward}

    try:
        deadline = time.monotonic() + 60
        while len(graded()) < 3:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        if number != signal.SIGKILL:
            assert b"interrupted; the same command with --resume goes on where it was" in errors
    finally:
        process.kill()
        process.communicate()
    assert process.returncode != 0
    before = {name: (out / name).stat().st_mtime_ns for name in graded()}
    assert 3 <= len(before) < 12

    expert.on_ask = lambda said: None
    said = answer(*asked, "--resume")
    assert said["finished"]
    assert outcomes(out) == {"stub": [True] * 12, "tiny": [False] * 12}
    assert before == {name: (out / name).stat().st_mtime_ns for name in before}
    assert [policy["infrastructure"]["failures"] for policy in said["policies"]] == [0, 0]
    assert len(list((out / "traces").rglob("*.trace"))) == 24


@pytest.mark.slow
def test_two_processes_do_not_run_one_comparison(expert: Expert, tasks: Path, state: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    asked = ("run", "--policy", f"{expert.url}#stub", "--tasks", tasks, "--out", out, "--state", state, *ALIKE)
    expert.on_ask = lambda said: time.sleep(0.5)
    process = subprocess.Popen([sys.executable, "-c", MAIN, *map(str, asked)], stderr=subprocess.PIPE)
    try:
        while not (out / "bench.json").exists():
            assert process.poll() is None
            time.sleep(0.05)
        assert f"pid {process.pid}" in str(bench(*asked, "--resume", code=3).exception)
    finally:
        process.kill()
        process.communicate()
