"""Whole comparisons in real pods: a checkpoint and an endpoint, failures, resuming, and API keys."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from bench_command import answer, bench
from rl_runs import make_model
from solving_endpoint import SolvingEndpoint
from stub_endpoint import serving

from etude.bench.directory import BenchDirectory
from etude.bench.policies import DEFAULT_KEY_ENV
from etude.bench.run import trial_record
from etude.errors import InputError
from etude.harness.budget import Budget
from etude.harness.session import SessionSpec
from etude.harness.summary import SummarySettings
from etude.harness.tool_set import ToolSet
from etude.harness.trace_store import load_trace
from etude.inference.clients.openai import OpenAIChat
from etude.pods import open_fleet
from etude.rollouts.queue import RolloutQueue
from etude.rollouts.rollout import ChatBinding, Rollout, RolloutFailed, RolloutOptions, run_rollout
from etude.tasks.harbor import read_task
from etude_nano.source import generate_nano

SECRET = "sk-0123456789abcdef"
TOOLS = ("read_file", "search_replace", "run_terminal_cmd")
COMMON_OPTIONS = (
    "--tools",
    ",".join(TOOLS),
    "--brief",
    "--summaries",
    "off",
    "--budget-turns",
    4,
    "--budget-answer",
    24,
)
SESSION = SessionSpec(
    ToolSet(tools=TOOLS, short_system_prompt=True),
    Budget(turns=4, max_turn_tokens=24),
    SummarySettings(mode="off"),
)
SETTINGS = RolloutOptions(SESSION)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bench") / "tasks"
    generate_nano(directory, 3, "new", 0, (1,))
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("bench") / "tiny")


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pods")


@pytest.fixture
def endpoint(tasks: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SolvingEndpoint]:
    monkeypatch.setenv(DEFAULT_KEY_ENV, SECRET)
    stub = SolvingEndpoint([], key=SECRET)
    stub.tasks = tasks
    with serving(stub):
        yield stub


def outcomes(out: Path) -> dict[str, list[bool]]:
    lines = [json.loads(line) for line in (out / "trials.jsonl").read_text().splitlines()]
    found: dict[str, list[bool]] = {}
    for line in lines:
        found.setdefault(line["policy"], []).append(line["solved"])
    return found


def everything(out: Path) -> str:
    """Return all that a comparison wrote, with traces unpacked."""
    parts = [path.read_bytes().decode("latin-1") for path in out.rglob("*") if path.is_file()]
    return "\n".join([*parts, *(repr(load_trace(path)) for path in out.rglob("*.trace"))])


# ------------------------------------------------------------------------------------------- results


def test_a_checkpoint_and_an_endpoint_are_compared_on_the_same_tasks(
    endpoint: SolvingEndpoint, tasks: Path, model: Path, state: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    policies = ("--policy", f"tiny={model}", "--policy", f"{endpoint.url}#stub", "--price", "stub=1,2")
    asked = ("run", *policies, "--tasks", tasks, "-k", 2, "--out", out, "--state", state, *COMMON_OPTIONS)
    summary = answer(*asked)
    assert summary["finished"]
    tiny, stub = summary["policies"]
    assert (tiny["accuracy"]["mean"], stub["accuracy"]["mean"]) == (0.0, 1.0)
    assert (tiny["kind"], stub["kind"]) == ("checkpoint", "endpoint")
    assert summary["differences"][0]["accuracy"]["mean"] == 1.0
    assert outcomes(out) == {"tiny": [False] * 6, "stub": [True] * 6}
    traces = sorted((out / "traces").rglob("*.trace"))
    assert len(traces) == 12
    assert Counter(load_trace(path).exact for path in traces) == {True: 6, False: 6}
    assert stub["spent"]["dollars"]["mean"] == pytest.approx(
        (stub["spent"]["prompt"]["mean"] + 2 * stub["spent"]["made"]["mean"]) / 1e6
    )
    assert json.loads((out / "summary.json").read_text()) == summary
    assert "stub" in (out / "report.html").read_text()

    # a resume runs nothing twice and loses nothing
    requests = len(endpoint.asked)
    assert "100.0%" in bench(*asked, "--resume").stdout
    assert len(endpoint.asked) == requests
    assert answer("show", out)["policies"][1]["accuracy"] == stub["accuracy"]
    assert answer("show", out, "--price", "tiny=1,1")["policies"][0]["spent"]["dollars"]["mean"] > 0


def test_the_same_seed_gives_a_checkpoint_the_same_sessions(
    tasks: Path, model: Path, state: Path, tmp_path: Path
) -> None:
    made = []
    for number, seed in enumerate((1, 1, 2)):
        out = tmp_path / str(number)
        given = (
            "--tasks",
            tasks,
            "--limit",
            1,
            "--out",
            out,
            "--state",
            state,
            "--seed",
            seed,
            "-j",
            1,
            *COMMON_OPTIONS,
        )
        bench("run", "--policy", f"tiny={model}", *given)
        (path,) = (out / "traces").rglob("*.trace")
        made.append([segment.tokens.tolist() for segment in load_trace(path).segments])
    assert made[0] == made[1] != made[2]


# ------------------------------------------------------------------------------------------- failures


def test_an_endpoint_failure_is_retried_and_does_not_count_as_zero(
    endpoint: SolvingEndpoint, tasks: Path, state: Path, tmp_path: Path
) -> None:
    endpoint.fails = (2, 3)
    out = tmp_path / "out"
    summary = answer(
        "run", "--policy", f"{endpoint.url}#stub", "--tasks", tasks, "--out", out, "--state", state, *COMMON_OPTIONS
    )
    (stub,) = summary["policies"]
    assert stub["accuracy"]["mean"] == 1.0
    assert (stub["tasks"], stub["infrastructure"]["failures"]) == (3, 2)
    assert stub["infrastructure"]["by_class"] == {"ServerError": 2}
    assert SECRET not in everything(out)


def test_a_failing_policy_stops_alone_and_can_be_resumed(
    endpoint: SolvingEndpoint, tasks: Path, model: Path, state: Path, tmp_path: Path
) -> None:
    """The endpoint refuses its key from the fourth request on; the other policy is not affected."""
    endpoint.fails, endpoint.status = tuple(range(4, 1000)), 401
    out = tmp_path / "out"
    policies = ("--policy", f"tiny={model}", "--policy", f"{endpoint.url}#stub")
    asked = ("run", *policies, "--tasks", tasks, "--out", out, "--state", state, "-j", 1, *COMMON_OPTIONS)
    done = bench(*asked, code=1)
    assert str(done.exception).startswith(
        f"policy stub: POST {endpoint.url}/chat/completions: 401: out of order, Bearer ["
    )
    assert "--resume runs the others" in str(done.exception)
    summary = json.loads((out / "summary.json").read_text())
    assert [policy["tasks"] for policy in summary["policies"]] == [3, 1]
    assert not summary["finished"]
    assert "trials are missing" in done.stdout

    endpoint.fails = ()
    assert [policy["tasks"] for policy in answer(*asked, "--resume")["policies"]] == [3, 3]
    assert SECRET not in everything(out)


def test_a_policy_that_always_fails_is_not_run_on_all_tasks(
    endpoint: SolvingEndpoint, tasks: Path, state: Path, tmp_path: Path
) -> None:
    endpoint.fails, endpoint.status = tuple(range(1, 1000)), 400
    asked = ("run", "--policy", f"{endpoint.url}#stub", "--tasks", tasks, "--state", state, "-j", 1, *COMMON_OPTIONS)
    done = bench(*asked, "--out", tmp_path / "out", code=1)
    assert "policy stub: no trial could be scored, and 3 tasks were given up; the last error:" in str(done.exception)
    assert "400: out of order" in str(done.exception)

    # once it works again, a resume queues the tasks that were given up
    endpoint.fails = ()
    (stub,) = answer(*asked, "--out", tmp_path / "out", "--resume")["policies"]
    assert (stub["tasks"], stub["accuracy"]["mean"]) == (3, 1.0)
    assert stub["infrastructure"]["failures"] == 12
    assert stub["infrastructure"]["given_up"] == {}


def test_bad_options_are_refused_before_anything_runs(
    endpoint: SolvingEndpoint, tasks: Path, model: Path, tmp_path: Path
) -> None:
    out, stub = tmp_path / "out", f"{endpoint.url}#stub"

    def wrong(*arguments: object, code: int = 2) -> str:
        return str(bench("run", "--out", out, *arguments, code=code).exception)

    (tmp_path / "empty").mkdir()
    assert "no task found" in wrong("--policy", stub, "--tasks", tmp_path / "empty")
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
    assert "is neither a comparison nor empty (it has mine)" in wrong("--policy", stub, "--tasks", tasks)
    assert "no comparison there" in str(bench("show", out, code=2).exception)


def test_two_comparisons_are_not_mixed(
    endpoint: SolvingEndpoint, tasks: Path, model: Path, state: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    asked = (
        "run",
        "--policy",
        f"{endpoint.url}#stub",
        "--tasks",
        tasks,
        "--out",
        out,
        "--state",
        state,
        *COMMON_OPTIONS,
    )
    bench(*asked, "--limit", 1)
    assert "add --resume to continue it" in str(bench(*asked, "--limit", 1, code=2).exception)
    why = str(bench(*asked, "--limit", 1, "--resume", "--temperature", 0.5, code=2).exception)
    assert "temperature: 1.0 -> 0.5" in why
    assert "tasks.nano" in str(bench(*asked, "--resume", code=2).exception)
    other = ("run", "--policy", model, *asked[3:])
    assert "its policies are stub; name them in this order" in str(
        bench(*other, "--limit", 1, "--resume", code=2).exception
    )
    # a policy may be added
    more = ("run", "--policy", f"{endpoint.url}#stub", "--policy", model, *asked[3:], "--limit", 1, "--resume")
    assert [policy["tasks"] for policy in answer(*more)["policies"]] == [1, 1]


# ------------------------------------------------------------------------------------------- single trials


def chat_trial(endpoint: SolvingEndpoint, task: Path, state: Path, settings: RolloutOptions = SETTINGS) -> Rollout:
    async def main() -> Rollout:
        client = OpenAIChat(endpoint.url, SECRET, model="stub")
        async with open_fleet(state=state) as fleet:
            try:
                return await run_rollout(fleet, read_task(task), ChatBinding(client, 8000), settings, id="trial")
            finally:
                await client.close()
                assert fleet.local is not None
                assert not fleet.local.pods

    return asyncio.run(main())


def test_the_api_key_is_not_visible_in_the_pod(endpoint: SolvingEndpoint, tasks: Path, state: Path) -> None:
    endpoint.first_command = "env; cat /proc/*/environ /proc/*/cmdline | tr '\\0' '\\n'; true"
    trace = chat_trial(endpoint, tasks / "nano-new-000000", state).trace
    (seen,) = trace.steps[-3].outcomes
    assert "PATH=" in seen.text
    assert SECRET not in repr(trace)
    assert endpoint.keys[-1] == f"Bearer {SECRET}"


def test_a_trial_that_cheats_is_unsolved(endpoint: SolvingEndpoint, tasks: Path, state: Path) -> None:
    endpoint.first_command = "cat /logs/verifier/reward.txt"
    task = tasks / "nano-new-000000"
    rollout = chat_trial(endpoint, task, state)
    record = trial_record(rollout, read_task(task))
    assert rollout.verifier_result.score == 1.0
    assert (record["score"], record["solved"], record["verifier_score"]) == (0.0, False, 1.0)
    assert "reward files" in record["hack"]


def test_an_endpoint_that_does_not_answer_in_time_is_an_infrastructure_failure(
    endpoint: SolvingEndpoint, tasks: Path, state: Path
) -> None:
    endpoint.on_ask = lambda number: time.sleep(3)
    hurried = RolloutOptions(replace(SESSION, budget=Budget(turns=4, seconds=1.0)))
    with pytest.raises(RolloutFailed, match=r"no completion for \d s"):
        chat_trial(endpoint, tasks / "nano-new-000000", state, hurried)


def test_a_task_with_steps_is_refused(endpoint: SolvingEndpoint, tasks: Path, tmp_path: Path) -> None:
    step = tmp_path / "many/steps/one"
    for name in ("tests", "solution"):
        (step / name).mkdir(parents=True)
    (step / "tests/test.sh").write_text("#!/bin/sh\n")
    (step / "instruction.md").write_text("Do it.")
    (tmp_path / "many/environment").mkdir()
    (tmp_path / "many/task.toml").write_text('schema_version = "1.4"\n[[steps]]\nname = "one"\n')
    done = bench(
        "run", "--policy", f"{endpoint.url}#stub", "--tasks", tmp_path / "many", "--out", tmp_path / "o", code=2
    )
    assert isinstance(done.exception, InputError)
    assert "a task with steps" in str(done.exception)


# ------------------------------------------------------------------------------------------- interruption


MAIN = "import sys; from etude.bench.cli import app; app(sys.argv[1:])"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_killed_comparison_can_be_resumed_and_runs_nothing_twice(
    number: signal.Signals, endpoint: SolvingEndpoint, tasks: Path, model: Path, state: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    policies = ("--policy", f"{endpoint.url}#stub", "--policy", f"tiny={model}")
    asked = ("run", *policies, "--tasks", tasks, "-k", 4, "--out", out, "--state", state, "-j", 2, *COMMON_OPTIONS)
    endpoint.on_ask = lambda number: time.sleep(0.15)
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, *map(str, asked)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    table = BenchDirectory(out).slots("stub")

    def graded() -> set[str]:
        if not table.exists():
            return set()
        with closing(RolloutQueue.open_read_only(table)) as slots:
            return {slot.trace for each in slots.progress() for slot in slots.group(each.id).slots if slot.reward}

    try:
        deadline = time.monotonic() + 300
        while len(graded()) < 3:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        _, errors = process.communicate(timeout=300)
        if number != signal.SIGKILL:
            assert b"interrupted; the same command with --resume continues" in errors
    finally:
        process.kill()
        process.communicate()
    assert process.returncode != 0
    before = {name: (out / name).stat().st_mtime_ns for name in graded()}
    assert 3 <= len(before) < 12

    endpoint.on_ask = lambda number: None
    summary = answer(*asked, "--resume")
    assert summary["finished"]
    assert outcomes(out) == {"stub": [True] * 12, "tiny": [False] * 12}
    assert before == {name: (out / name).stat().st_mtime_ns for name in before}
    assert [policy["infrastructure"]["failures"] for policy in summary["policies"]] == [0, 0]
    assert len(list((out / "traces").rglob("*.trace"))) == 24


@pytest.mark.slow
def test_two_processes_do_not_run_one_comparison(
    endpoint: SolvingEndpoint, tasks: Path, state: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    asked = (
        "run",
        "--policy",
        f"{endpoint.url}#stub",
        "--tasks",
        tasks,
        "--out",
        out,
        "--state",
        state,
        *COMMON_OPTIONS,
    )
    endpoint.on_ask = lambda number: time.sleep(0.5)
    process = subprocess.Popen([sys.executable, "-c", MAIN, *map(str, asked)], stderr=subprocess.PIPE)
    try:
        while not (out / "bench.json").exists():
            assert process.poll() is None
            time.sleep(0.05)
        assert f"pid {process.pid}" in str(bench(*asked, "--resume", code=3).exception)
    finally:
        process.kill()
        process.communicate()
