"""The HTML report and the table: complete, self-contained, and hostile names stay text."""

import io
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from rich.console import Console

from etude.bench.report import conclusions, render_page, render_plots, results_table

HOSTILE = '<script>alert(1)</script>"x'


def estimate(mean: float, wide: float = 0.1) -> dict[str, float]:
    return {"mean": mean, "low": mean - wide, "high": mean + wide}


def policy(name: str, accuracy: float, tokens: float = 100.0, dollars: float | None = None) -> dict[str, Any]:
    spent = {part: estimate(tokens, 5.0) for part in ("made", "prompt", "cached", "turns", "seconds")}
    if dollars is not None:
        spent["dollars"] = estimate(dollars, 0.0)
    return {
        "name": name,
        "kind": "endpoint",
        "where": f"http://host/v1#{name}",
        "model": name,
        "window": 2048,
        "dialect": "chat",
        "price": None,
        "tasks": 2,
        "trials": {"graded": 4, "wanted": 4, "counted": 4},
        "infrastructure": {"failures": 1, "by_class": {"sandbox": 1}, "last": "sandbox: x", "given_up": {}},
        "accuracy": estimate(accuracy),
        "score": estimate(accuracy),
        "pass_at": {"1": estimate(accuracy), "2": estimate(accuracy)},
        "best_of": {"1": accuracy, "2": accuracy},
        "spent": spent,
        "per_solved": {"made": 10.0, "seconds": 1.0, **({"dollars": dollars} if dollars is not None else {})},
        "by_category": {"debugging": {"tasks": 2, "accuracy": accuracy, "pass_at": {"2": accuracy}}},
        "endings": {"final": 1.0},
        "errors": {"calls": 4, "failed": {"timeout": 1}},
        "hacks": 0,
    }


def summary(*policies: dict[str, Any], finished: bool = True) -> dict[str, Any]:
    cells = {each["name"]: {"solved": [True, False], "score": [1.0, 0.5], "given_up": ""} for each in policies}
    differences = []
    if len(policies) > 1:
        both = {"from": policies[0]["name"], "to": policies[1]["name"], "tasks": 2, "tasks_of_one_only": 0}
        differences = [{**both, "accuracy": estimate(0.3), "score": estimate(0.3), "better": 1, "worse": 0}]
    return {
        "finished": finished,
        "samples": 2,
        "policies": list(policies),
        "differences": differences,
        "tasks": [{"task": "a/one", "category": "debugging", "policies": cells}],
        "settings": {"samples": 2, "tasks": 1, "budget": {"turns": 5, "tokens": None}, "environment": {"tools": ["a"]}},
    }


class Reader(HTMLParser):
    """Collects the tags, links and text of a page; checks that every tag is closed."""

    VOID = ("meta", "br", "line", "circle", "rect", "path")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.values: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.values += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "action")]
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    assert not reader.open
    return reader


def test_a_page_is_self_contained() -> None:
    text = render_page(summary(policy("a", 0.4), policy("b", 0.7, 5000.0, 0.01)), "compare")
    reader = read(text)
    assert reader.values == []
    assert "script" not in reader.tags
    assert "url(" not in re.sub(r"url\(#c[0-9a-f]+\)", "", text)
    assert "@import" not in text
    for word in ("Results", "Differences", "By category", "Task by task", "70.0%", "+30.0", "1/2", "timeout", "$0.01"):
        assert word in reader.text
    assert reader.text.count("against cost") == 1


def test_untrusted_names_and_reasons_stay_text() -> None:
    facts = summary(policy(HOSTILE, 0.4), policy("b", 0.7))
    facts["tasks"][0] |= {"task": HOSTILE, "category": HOSTILE}
    facts["policies"][0] |= {"where": HOSTILE, "endings": {HOSTILE: 1.0}, "by_category": {}}
    facts["policies"][0]["infrastructure"] |= {"given_up": {HOSTILE: HOSTILE}, "by_class": {HOSTILE: 2}}
    facts["settings"]["environment"]["tools"] = [HOSTILE]
    reader = read(render_page(facts, HOSTILE))
    assert "script" not in reader.tags
    assert reader.text.count(HOSTILE) > 8


def test_a_page_without_results_says_so() -> None:
    empty = {key: policy("a", 0.0)[key] for key in ("name", "kind", "where", "model", "window", "dialect", "price")}
    empty |= {"tasks": 0, "trials": {"graded": 0, "wanted": 4, "counted": 0}}
    empty["infrastructure"] = {"failures": 0, "by_class": {}, "last": "", "given_up": {}}
    facts = summary(empty, finished=False) | {"tasks": []}
    reader = read(render_page(facts, "compare"))
    assert "Not finished" in reader.text
    assert "no task is finished" in reader.text
    assert render_plots(facts) == ""
    assert shown(facts).split()[-4:] == ["–", "–", "–", "0"]
    assert conclusions(facts) == ["a: 4 of 4 trials are missing"]


def test_without_prices_there_is_no_plot_against_cost() -> None:
    facts = summary(policy("a", 0.4))
    assert "against cost" not in render_plots(facts)
    assert "--price NAME=IN,OUT" in read(render_page(facts, "compare")).text


@pytest.mark.parametrize(("low", "high"), [(1.0, 1.0), (0.0, 0.0), (3.0, 5.0), (1.0, 1e6)])
def test_plots_accept_any_numbers(low: float, high: float) -> None:
    svg = render_plots(summary(policy("a", 0.0, low, low), policy("b", 1.0, high, high)))
    assert "nan" not in svg
    assert svg.count("<circle") == 8  # a point and a key of each, in two panels


def shown(facts: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), width=140)
    console.print(results_table(facts))
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_the_table_shows_the_results() -> None:
    text = shown(summary(policy("[red]a", 0.4), policy("b", 0.7, 5000.0, 0.01)))
    for word in ("[red]a", "40.0%", "30.0 to 50.0", "pass@2", "5,000", "$0.0100"):
        assert word in text


def test_the_sentence_of_a_difference_has_its_interval_and_caveats() -> None:
    facts = summary(policy("a", 0.4), policy("b", 0.7))
    assert conclusions(facts) == ["b against a: +30.0 points solved [+20.0, +40.0] over 2 tasks, 1 better, 0 worse"]
    facts["differences"][0]["accuracy"] = estimate(0.05)
    assert conclusions(facts)[0].endswith("; the interval contains zero")
    facts["differences"][0]["accuracy"] = {"mean": 0.1, "low": None, "high": None}
    assert "from a single task" in conclusions(facts)[0]
