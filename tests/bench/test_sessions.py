"""Sessions collected from an endpoint or a checkpoint as training data: what is kept, limits, resuming, SFT on them."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rl_runs import make_model, tiny_tokenizer
from solving_endpoint import SolvingEndpoint, runs, script
from stub_endpoint import StubTurn, says, serving
from typer.testing import CliRunner, Result

from etude.bench.policies import DEFAULT_KEY_ENV, CostLimitReached, TokenPrice
from etude.bench.sessions import RowWriter
from etude.bench.sessions_cli import app
from etude.bench.spending import PolicyMeter, UsageLedger
from etude.chat.dialects import dialect_for
from etude.data.corpus import CorpusOptions, build_corpus
from etude.data.shards import Shards
from etude.errors import EtudeError
from etude.harness.chat_rows import is_mistake
from etude.harness.trace import Trace
from etude.inference.clients.openai import ChatUsage
from etude.pipeline.stages import run_recipe
from etude.recipe.recipe import load_recipe
from etude.runs.run import Run
from etude_nano.simulated_sessions import simulate_demonstration
from etude_nano.source import generate_nano, nano_tasks

SECRET = "sk-0123456789abcdef"
SESSION = ("--tools", "read_file,search_replace,run_terminal_cmd", "--brief", "--summaries", "off", "--budget-turns", 4)
HONEST, FAILING, CHEATING = "nano-train-000000", "nano-train-000001", "nano-train-000002"


class MixedEndpoint(SolvingEndpoint):
    """Solves one task, gives up on another, and reads the reward file of a third before it solves it."""

    def turns(self, task: Path) -> list[StubTurn]:
        if task.name == FAILING:
            return [runs("ls"), says("I cannot do this.")]
        return [*([runs("cat /logs/verifier/reward.txt")] if task.name == CHEATING else []), *script(task)]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sessions") / "tasks"
    generate_nano(directory, 3, "train", 0, (1,))
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("sessions") / "tiny")


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pods")


@pytest.fixture
def endpoint(tasks: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MixedEndpoint]:
    monkeypatch.setenv(DEFAULT_KEY_ENV, SECRET)
    stub = MixedEndpoint([], key=SECRET)
    stub.tasks = tasks
    with serving(stub):
        yield stub


def collect(*arguments: object, code: int = 0) -> Result:
    done = CliRunner().invoke(app, ["sessions", *map(str, arguments)])
    found = done.exception.exit_code if isinstance(done.exception, EtudeError) else done.exit_code
    if done.exception is not None and not isinstance(done.exception, EtudeError | SystemExit):
        raise done.exception
    assert found == code, (done.output, done.exception)
    return done


def summary(*arguments: object) -> Any:
    return json.loads(collect(*arguments, "--json").stdout)


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "sessions.jsonl").read_text().splitlines()]


# ------------------------------------------------------------------------------------------- what is kept

SFT_RECIPE = """
name = "imitation"
stages = ["base", "corpus", "sft"]
[base]
source = "{model}"
[[corpus.build]]
name = "sessions"
sources = ["sessions:out"]
chat = true
[sft]
mix = [{{ corpus = "sessions" }}]
length = 1024
tokens = 4096
rows = 1
device = "cpu"
"""


def test_solved_honest_sessions_are_kept_and_sft_trains_on_them(
    endpoint: MixedEndpoint, tasks: Path, model: Path, state: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    asked = ("--policy", f"{endpoint.url}#stub", "--tasks", tasks, "--out", out, "--state", state, *SESSION)
    found = summary(*asked, "--tokenizer", model, "--price-in", 1, "--price-out", 2)
    assert {name: found[name] for name in ("tried", "solved", "hacks", "kept", "left_out", "failures")} == {
        "tried": 3,
        "solved": 1,
        "hacks": 1,
        "kept": 1,
        "left_out": {},
        "failures": 0,
    }
    used = found["endpoint_tokens"]
    assert found["replies"] == len(endpoint.asked)
    assert found["dollars"] == pytest.approx((used["prompt"] + 2 * used["sampled"]) / 1e6)
    assert SECRET not in "".join(path.read_text(errors="replace") for path in out.glob("*.json*"))

    (row,) = rows(out)
    assert row["path"] == f"{HONEST}/00"
    assert [message["role"] for message in row["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    dialect = dialect_for(tiny_tokenizer())
    turns = [dialect.parse(ids, row["tools"]) for in_loss, ids in row["exact"]["runs"] if in_loss]
    assert turns[0].calls[0].arguments == row["messages"][2]["tool_calls"][0]["function"]["arguments"]
    assert turns[-1].text == row["messages"][-1]["content"]
    assert all(turn.closed for turn in turns)

    (tmp_path / "sft.toml").write_text(SFT_RECIPE.format(model=model))
    facts = run_recipe(load_recipe(tmp_path / "sft.toml"), tmp_path / "run")
    assert facts["sft"]["last_loss"] < facts["sft"]["first_loss"]
    corpus = Shards.open(Run.read(tmp_path / "run").find("corpus").path, "train")
    wanted = [(in_loss, token) for in_loss, ids in row["exact"]["runs"] for token in ids]
    assert list(zip(corpus.mask(0).tolist(), corpus.read(0).tolist(), strict=True))[:-1] == wanted


def test_a_turn_whose_call_failed_is_not_imitated_and_unfinished_sessions_are_left_out(
    endpoint: MixedEndpoint, tasks: Path, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = says("", ("read_file", {"target_file": "nothing.py"}))
    lines = {HONEST: [missing], FAILING: [], CHEATING: [runs("true")] * 9}
    monkeypatch.setattr(MixedEndpoint, "turns", lambda self, task: [*script(task)[:-1], *lines[task.name], says("Ok.")])
    out = tmp_path / "out"
    found = summary("--policy", f"{endpoint.url}#stub", "--tasks", tasks, "--out", out, "--state", state, *SESSION)
    assert (found["solved"], found["kept"]) == (3, 2)
    assert found["left_out"] == {"ended by turns": 1}  # the verifier accepts it, but it has no end to learn from
    weights = [[m.get("weight", 1) for m in row["messages"] if m["role"] == "assistant"] for row in rows(out)]
    assert weights == [[1, 0, 1], [1, 1]]
    assert all("exact" not in row for row in rows(out))  # without a tokenizer, the corpus renders them


def demonstration(tasks: int = 1) -> list[Trace]:
    async def main() -> list[Trace]:
        dialect = dialect_for(tiny_tokenizer())
        shown = [await simulate_demonstration(files, dialect, seed=3) for _, files in nano_tasks(tasks, seed=3)]
        return [each.trace for each in shown if each is not None and not each.deviation]

    return asyncio.run(main())


def test_rows_of_a_token_policy_have_its_tokens_and_other_dialects_write_the_same_turns(tmp_path: Path) -> None:
    traces = demonstration(4)
    dialect = dialect_for(tiny_tokenizer())
    digest = tiny_tokenizer().digest
    lines = []
    for trace in traces:
        (sampled,) = RowWriter(dialect, digest).rows(trace, "task", 0)
        (written,) = RowWriter(dialect).rows(trace, "task", 0)
        tokens = [token for _, ids in sampled["exact"]["runs"] for token in ids]
        assert tokens == trace.segments[0].tokens.tolist()
        assert written["exact"] == sampled["exact"]  # a demonstration consists of what the dialect writes
        lines.append(json.dumps({**sampled, "path": trace.id}))
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    options = CorpusOptions(chat=True, near=1.0)
    build_corpus([str(tmp_path / "rows.jsonl")], tiny_tokenizer(), tmp_path / "corpus", options)
    shards = Shards.open(tmp_path / "corpus", "train")
    found = {tuple(shards.read(at).tolist()[:-1]): shards.mask(at).tolist()[:-1] for at in range(len(shards))}
    assert len(found) == len(traces)
    for trace in traces:
        (segment,) = trace.segments
        spans = [range(*step.span) for step in trace.steps if step.kind == "turn" and not is_mistake(step)]
        expected = [any(at in span for span in spans) for at in range(len(segment))]
        assert found[tuple(segment.tokens.tolist())] == expected


def test_sessions_of_a_checkpoint_are_collected_too(tasks: Path, model: Path, state: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    asked = ("--policy", model, "--tasks", tasks, "--limit", 1, "--out", out, "--state", state, *SESSION)
    found = summary(*asked, "--budget-answer", 16)
    assert (found["tried"], found["kept"], found["replies"]) == (1, 0, 0)  # random weights solve nothing
    assert rows(out) == []
    assert "prices and rates apply to endpoints only" in str(
        collect(*asked, "--requests-per-minute", 3, code=2).exception
    )


# ------------------------------------------------------------------------------------------- limits


def test_a_busy_endpoint_is_asked_again_after_the_time_it_names(
    endpoint: MixedEndpoint, tasks: Path, state: Path, tmp_path: Path
) -> None:
    endpoint.fails, endpoint.status, endpoint.headers = (1, 2, 4), 429, {"retry-after": "0.01"}
    out = tmp_path / "out"
    asked = ("--policy", f"{endpoint.url}#stub", "--tasks", tasks, "--limit", 1, "--out", out, "--state", state)
    found = summary(*asked, *SESSION, "--requests-per-minute", 6000)
    assert (found["solved"], found["failures"]) == (1, 0)
    assert found["replies"] == len(endpoint.keys) - 3


def test_a_collection_stops_at_its_limits_and_goes_on_with_higher_ones(
    endpoint: MixedEndpoint, tasks: Path, state: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    asked = ("--policy", f"{endpoint.url}#stub", "--tasks", tasks, "--out", out, "--state", state, "-j", 1, *SESSION)
    assert summary(*asked, "--max-sessions", 1)["tried"] == 1
    first = len(endpoint.asked)
    prices = ("--price-in", 1e4, "--price-out", 0)  # a dollar for each request of the stub's 100 tokens
    found = summary(*asked, *prices, "--max-cost", first + 0.5)
    assert (found["tried"], found["dollars"]) == (1, first)  # the next session would cost too much
    found = summary(*asked, *prices, "--max-cost", 2 * first + 1)
    assert found["tried"] == 2
    found = summary(*asked)
    assert (found["tried"], found["solved"], found["hacks"]) == (3, 1, 1)
    assert found["replies"] == len(endpoint.asked)
    text = collect(*asked).stdout
    assert "3 of 3 sessions tried: 1 solved, 1 hack refused" in text
    assert found["replies"] == len(endpoint.asked)  # nothing was run again


def test_a_session_that_costs_too_much_is_stopped(
    endpoint: MixedEndpoint, tasks: Path, state: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    asked = ("--policy", f"{endpoint.url}#stub", "--tasks", tasks, "--out", out, "--state", state, "-j", 1, *SESSION)
    endpoint.prompt_tokens = 3000  # about 30 dollars for each request; a third of its bytes is assumed before the first
    found = summary(*asked, "--price-in", 1e4, "--price-out", 0, "--max-cost", 50)
    assert (found["tried"], found["dollars"], found["failures"], len(endpoint.asked)) == (0, 30.0, 0, 1)
    assert summary(*asked)["tried"] == 3


def test_the_ledger_survives_a_kill_and_refuses_what_is_too_much(tmp_path: Path) -> None:
    prices = {"a": TokenPrice(1.0, 2.0, 0.5), "b": TokenPrice(1.0, 1.0, 1.0)}
    ledger = UsageLedger(tmp_path / "usage.jsonl", prices)
    ledger.record("a", 4_000_000, ChatUsage(1_000_000, 500_000, 400_000))
    assert ledger.dollars == pytest.approx(0.6 + 0.2 + 1.0)
    with (tmp_path / "usage.jsonl").open("a") as file:
        file.write('{"policy": "a", "prompt": 10')
    again = UsageLedger(tmp_path / "usage.jsonl", prices, max_cost=2.0)
    assert (again.of("a").replies, again.dollars) == (1, pytest.approx(1.8))
    meter = PolicyMeter(again, "a")
    reserved = meter.begin(400_000, 25_000)  # at most 100,000 prompt tokens, as the reply so far had, and the sampled
    assert reserved == pytest.approx(0.1 + 0.05)
    with pytest.raises(CostLimitReached, match=r"1\.80 of at most 2\.00 dollars, and the next request may cost 0\.15"):
        meter.begin(400_000, 25_000)  # beside the one under way
    meter.end(reserved, 400_000, None)
    assert meter.begin(400_000, 25_000) == reserved


def test_the_first_trial_runs_alone_and_no_trial_starts_that_would_cost_too_much(tmp_path: Path) -> None:
    ledger = UsageLedger(tmp_path / "usage.jsonl", {"a": TokenPrice(1.0, 1.0, 1.0)}, max_cost=10.0)
    assert ledger.may_start("a", 0, {})
    assert not ledger.may_start("a", 0, {"a": 1})
    ledger.record("a", 1, ChatUsage(3_000_000, 0))
    assert ledger.may_start("a", 1, {"a": 1})  # 3 dollars, and two trials of 3 dollars
    assert not ledger.may_start("a", 1, {"a": 2})
    assert not ledger.stop_reason()  # those that run may turn out cheaper
    ledger.record("a", 1, ChatUsage(6_000_000, 0))
    assert not ledger.may_start("a", 3, {})
    assert ledger.stop_reason() == "stopped at 9.00 of at most 10.00 dollars"
    assert ledger.may_start("checkpoint", 0, {"checkpoint": 5})  # costs nothing


def test_bad_options_are_refused_before_anything_runs(
    endpoint: MixedEndpoint, tasks: Path, model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    asked = ("--policy", f"{endpoint.url}#stub", "--tasks", tasks, "--out", out)

    def wrong(*arguments: object) -> str:
        return str(collect(*asked, *arguments, code=2).exception)

    assert "give the prices too" in wrong("--max-cost", 3)
    assert "give both" in wrong("--price-in", 3)
    assert "no such directory" in wrong("--tokenizer", tmp_path / "nowhere")
    assert not out.exists()


# ------------------------------------------------------------------------------------------- interruption

MAIN = "import sys; from etude.bench.sessions_cli import app; app(sys.argv[1:])"


@pytest.mark.slow
def test_a_killed_collection_goes_on_and_runs_no_scored_session_again(
    endpoint: MixedEndpoint, tasks: Path, state: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    asked = ("--policy", f"{endpoint.url}#stub", "--tasks", tasks, "-k", 4, "--out", out, "--state", state, "-j", 1)
    endpoint.on_ask = lambda number: time.sleep(0.2)
    command = [sys.executable, "-c", MAIN, "sessions", *map(str, (*asked, *SESSION))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 300
    while len(list(out.rglob("*.trace"))) < 3:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (out / "sessions.jsonl").exists()
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.trace")}

    endpoint.on_ask = lambda number: None
    found = summary(*asked, *SESSION)
    assert (found["tried"], found["solved"], found["hacks"], found["kept"]) == (12, 4, 4, 4)
    repeated = [path for path, written in before.items() if path.stat().st_mtime_ns != written]
    assert len(repeated) <= 1  # the one whose trace was written but not yet scored
    assert found["replies"] >= len(endpoint.asked) - 1  # a reply may have been on its way
