"""Comparisons with real endpoints in mind: variants, rates, cost, what a result records, and comparing two results."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bench_command import answer, bench
from solving_endpoint import SolvingEndpoint, runs, script
from stub_endpoint import StubTurn, says, serving

from etude.bench.policies import parse_policies, parse_prices
from etude.bench.variants import expand_variants, parse_rates, prices_of
from etude.errors import InputError
from etude.inference.clients.openai import thinking_fields
from etude_nano.source import generate_nano

SESSION = ("--tools", "read_file,search_replace,run_terminal_cmd", "--brief", "--summaries", "off", "--budget-turns", 4)


class ModestEndpoint(SolvingEndpoint):
    """Solves tasks, unless it is asked for low effort: then only those with an even number."""

    async def chat(self, request: Any) -> Any:
        self.effort = (await request.json()).get("reasoning_effort", "")
        return await super().chat(request)

    def turns(self, task: Path) -> list[StubTurn]:
        if self.effort == "low" and int(task.name[-1]) % 2:
            return [runs("ls"), says("I cannot do this.")]
        return script(task)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("endpoints") / "tasks"
    generate_nano(directory, 3, "new", 0, (1,))
    return directory


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pods")


@pytest.fixture
def endpoint(tasks: Path) -> Iterator[ModestEndpoint]:
    stub = ModestEndpoint([])
    stub.tasks = tasks
    with serving(stub):
        yield stub


def command(endpoint: ModestEndpoint, tasks: Path, state: Path, out: Path) -> tuple[object, ...]:
    return "run", "--policy", f"{endpoint.url}#stub", "--tasks", tasks, "--out", out, "--state", state, *SESSION


# ------------------------------------------------------------------------------------------- variants


def test_levels_of_effort_are_variants_with_a_row_each(
    endpoint: ModestEndpoint, tasks: Path, state: Path, tmp_path: Path
) -> None:
    asked = (*command(endpoint, tasks, state, tmp_path / "out"), "--effort", "low,high", "--price", "stub=1,2")
    summary = answer(*asked)
    low, high = summary["policies"]
    assert (low["name"], high["name"]) == ("stub@low", "stub@high")
    assert (low["accuracy"]["mean"], high["accuracy"]["mean"]) == (pytest.approx(2 / 3), 1.0)
    assert low["price"] == high["price"] == {"read": 1.0, "made": 2.0, "cached": 1.0}
    assert Counter(body["reasoning_effort"] for body in endpoint.asked).keys() == {"low", "high"}
    spec = json.loads((tmp_path / "out/bench.json").read_text())
    assert [policy["sampling"]["effort"] for policy in spec["policies"]] == ["low", "high"]
    assert summary["usage"]["dollars"] == pytest.approx(
        sum(policy["spent"]["dollars"]["mean"] * 3 for policy in summary["policies"])
    )
    text = bench("show", tmp_path / "out").stdout
    assert "stub@high: the endpoint counted no thinking tokens; it may ignore what was asked for" in text

    endpoint.reasoning_tokens = 7
    more = answer(*asked[:-3], "low,high,default", *asked[-2:], "--resume")  # a level may be added
    assert [policy["name"] for policy in more["policies"]] == ["stub@low", "stub@high", "stub"]
    assert more["policies"][2]["spent"]["thinking"]["mean"] > 0
    assert "reasoning_effort" not in endpoint.asked[-1]


def test_a_thinking_budget_is_sent_as_its_host_expects_and_must_fit_a_turn(
    endpoint: ModestEndpoint, tasks: Path, state: Path, tmp_path: Path
) -> None:
    asked = (*command(endpoint, tasks, state, tmp_path / "out"), "--limit", 1, "--thinking-budget", 2048)
    assert "a turn of stub@2048 has at most 1,000 tokens" in str(
        bench(*asked, "--budget-answer", 1000, code=2).exception
    )
    assert [policy["name"] for policy in answer(*asked)["policies"]] == ["stub@2048"]
    assert endpoint.asked[0]["thinking"] == {"type": "enabled", "budget_tokens": 2048}
    assert thinking_fields("https://openrouter.ai/api/v1", 9) == {"reasoning": {"max_tokens": 9}}
    assert thinking_fields("http://localhost/v1", 9, "vllm") == {"thinking_token_budget": 9}


def test_variants_rates_and_prices_are_parsed_for_all_endpoints_or_one(tmp_path: Path) -> None:
    policies = parse_policies([f"here={tmp_path}", "a=http://host/v1#m", "b=http://host/v1#n"])
    names = [each.name for each in expand_variants(policies, ["low,high", "b=default,max"], ["a=8,16"])]
    assert names == ["here", "a@low+8", "a@low+16", "a@high+8", "a@high+16", "b", "b@max"]
    prices = prices_of(names, parse_prices(["a=1,2", "b@max=3,4"], ["a", "b@max"]))
    assert {name: price.read for name, price in prices.items()} == {
        **dict.fromkeys(names[1:5], 1.0),
        "b@max": 3.0,
    }
    rates = parse_rates(policies, ["60", "b=6"], ["a=1000"])
    assert (rates["a"].requests_per_minute, rates["b"].requests_per_minute) == (60, 6)
    assert (rates["a"].tokens_per_minute, rates["b"].tokens_per_minute) == (1000, None)
    for wrong, message in ((["c=low"], "no endpoint c; the endpoints are a, b"), (["Low!"], "expected [NAME=]VALUE")):
        with pytest.raises(InputError, match=re.escape(message)):
            expand_variants(policies, wrong, [])
    with pytest.raises(InputError, match="--effort: applies to endpoints"):
        expand_variants(policies[:1], ["low"], [])
    with pytest.raises(InputError, match="--thinking-format other: expected one of anthropic"):
        expand_variants(policies, [], ["8"], "other")


# ------------------------------------------------------------------------------------------- rates and cost


def test_a_busy_endpoint_is_waited_for_and_the_wait_is_no_time_of_the_session(
    endpoint: ModestEndpoint, tasks: Path, state: Path, tmp_path: Path
) -> None:
    endpoint.fails, endpoint.status, endpoint.headers = (2,), 429, {"retry-after": "3"}
    asked = (*command(endpoint, tasks, state, tmp_path / "out"), "--limit", 1, "--budget-seconds", 2)
    (stub,) = answer(*asked, "--requests-per-minute", 6000, "--tokens-per-minute", "stub=1000000")["policies"]
    assert (stub["accuracy"]["mean"], stub["infrastructure"]["failures"]) == (1.0, 0)
    assert stub["spent"]["seconds"]["mean"] < 2  # the limit of the session, in which three seconds were waited
    assert len(endpoint.keys) == len(endpoint.asked) + 1


def test_a_comparison_stops_before_its_cost_limit_and_goes_on_with_a_higher_one(
    endpoint: ModestEndpoint, tasks: Path, state: Path, tmp_path: Path
) -> None:
    asked = (*command(endpoint, tasks, state, tmp_path / "out"), "--effort", "low,high", "--price", "stub=10000,0")
    endpoint.prompt_tokens = 1000  # ten dollars for each request
    limited = (*asked, "--budget-answer", 24, "-j", 2)
    assert "--max-cost: give the price of stub@low too" in str(bench(*limited[:-6], "--max-cost", 5, code=2).exception)
    done = bench(*limited, "--max-cost", 75)
    assert re.search(r"stopped at \d0\.00 of at most 75\.00 dollars; --resume with a higher --max-cost", done.stdout)
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    scored = sum(policy["trials"]["graded"] for policy in summary["policies"])
    assert 1 <= scored < 6
    assert not summary["finished"]
    assert [policy["infrastructure"]["failures"] for policy in summary["policies"]] == [0, 0]
    assert summary["usage"]["dollars"] == 10 * len(endpoint.asked) <= 75

    traces = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.trace")}
    again = answer(*limited, "--max-cost", 1000, "--resume")
    assert again["finished"]
    assert again["stopped"] == ""
    assert again["usage"]["dollars"] == 10 * len(endpoint.asked)  # with those of sessions that the limit has cut
    assert {path: path.stat().st_mtime_ns for path in traces} == traces


# ------------------------------------------------------------------------------------------- comparing results


def test_two_results_are_compared_on_the_tasks_that_are_the_same(
    endpoint: ModestEndpoint, tasks: Path, state: Path, tmp_path: Path
) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    answer(*command(endpoint, tasks, state, one), "--effort", "low", "-k", 2)
    # The other result is of two of the tasks, under other names, with another temperature.
    moved = tmp_path / "moved/nano-parent"
    moved.mkdir(parents=True)
    for number in (0, 1):
        (tasks / f"nano-new-00000{number}").rename(moved / f"nano-new-00000{number}")
    try:
        endpoint.tasks = moved
        asked = (*command(endpoint, moved.parent, state, other), "--effort", "high", "--temperature", 0.5)
        answer(*asked)
    finally:
        for each in moved.iterdir():
            each.rename(tasks / each.name)
    (found,) = answer("compare", one, other)
    assert (found["tasks"], found["better"], found["worse"], found["ties"]) == (2, 1, 0, 1)
    assert found["accuracy"]["mean"] == 0.5
    assert found["samples"] == [2, 1]
    assert found["minimum_detectable"] > 0.5
    assert found["differs"] == {"sampling: temperature": [1.0, 0.5], "samples per task": [2, 1]}
    assert found["tasks_not_shared"]["only_from"] == ["nano-new-000002"]
    described = answer("stats", tasks, "--results", one, "--results", f"{other}#stub@high")["benchmarks"][0]
    rates = {each["task"]: each["solve_rate"] for each in described["per_task"]}
    assert rates == {"nano-new-000000": 1.0, "nano-new-000001": 0.5, "nano-new-000002": 1.0}  # of both results
    assert [each["tasks"] for each in described["difficulty"]["bins"]] == [0, 0, 1, 0, 0, 2]
    assert "solved 25% to 50%" in bench("stats", tasks, "--results", one, "--results", other).stdout
    text = bench("compare", f"{one}#stub@low", f"{other}#stub@high").stdout
    assert "wins 1, losses 0, ties 1" in text
    assert "minimum detectable effect with these tasks and samples: " in text
    assert "differs: sampling: temperature: 1.0 -> 0.5" in text
    assert "1 tasks are only in" in text
    assert "no policy rl" in str(bench("compare", f"{one}#rl", other, code=2).exception)
    assert "no comparison there" in str(bench("compare", one, tmp_path, code=2).exception)


def test_results_without_a_common_task_are_not_compared_and_tools_and_prompt_are_named(
    endpoint: ModestEndpoint, tasks: Path, state: Path, tmp_path: Path
) -> None:
    first = tasks / "nano-new-000000"
    for name, options in (("one", ()), ("other", ("--tools", "run_terminal_cmd,list_dir"))):
        answer(*command(endpoint, tasks, state, tmp_path / name)[:3], "--tasks", first, "--out", tmp_path / name,
               "--state", state, *SESSION, *options)  # fmt: skip
    (found,) = answer("compare", tmp_path / "one", tmp_path / "other")
    assert found["differs"].keys() == {"tool schemas"}
    assert found["accuracy"]["low"] is None
    instruction = first / "instruction.md"
    before = instruction.read_text()
    instruction.write_text(f"{before}\nThank you.\n")
    try:
        answer(*command(endpoint, tasks, state, tmp_path / "new")[:3], "--tasks", first, "--out", tmp_path / "new",
               "--state", state, *SESSION)  # fmt: skip
    finally:
        instruction.write_text(before)
    why = str(bench("compare", tmp_path / "one", tmp_path / "new", code=2).exception)
    assert "they have no task in common" in why
