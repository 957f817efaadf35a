"""Canonical forms of definitions: equal up to names and constants, and found in listings, diffs and JSON."""

import json
from random import Random

import pytest

from etude.data.canonical import definition_digest, definition_digests

ONE = '''\
def total(prices: list[int], limit=3):
    """Sum of the prices above the limit."""
    found = 0
    for price in prices:
        if price > limit:
            found += price * 7
    return found
'''
RENAMED = """\
def f(xs, n=12):
    acc = 0
    for x in xs:
        if x > n:
            acc += x * 55
    return acc
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("price > limit", "price >= limit"),
        ("found += ", "found = "),
        ("found = 0", "found = 1"),
        ("return found", "return price"),
    ],
)
def test_names_and_numbers_do_not_matter_and_all_else_does(old: str, new: str) -> None:
    assert definition_digest(ONE) == definition_digest(RENAMED)
    assert definition_digest(ONE) != definition_digest(ONE.replace(old, new))


def test_two_names_stay_two_and_builtins_and_attributes_stay_themselves() -> None:
    for one, other in (("a - b", "b - a"), ("max(a, b)", "min(a, b)"), ("a.upper(b)", "a.lower(b)")):
        first, second = (definition_digest(f"def f(a, b):\n    return {code}\n") for code in (one, other))
        assert first != second


def shown_as(way: str) -> str:
    """Return a text in which the definition stands in one of the ways that training data has."""
    listing = "".join(f"{number}|{line}\n" for number, line in enumerate(("import os", "", *RENAMED.splitlines()), 1))
    return {
        "file": f"import os\n\n\n{RENAMED}\n\nprint(1)\n",
        "method": "class A:\n" + "".join(f"    {line}\n" for line in RENAMED.splitlines()),
        "listing": f"<tool_response>\n{listing}</tool_response>",
        "diff": "".join(f"+{line}\n" for line in RENAMED.splitlines()),
        "call": json.dumps({"name": "search_replace", "arguments": {"old_string": "pass", "new_string": RENAMED}}),
        "row": json.dumps([{"role": "tool", "content": listing}]),
    }[way]


@pytest.mark.parametrize("way", ["file", "method", "listing", "diff", "call", "row"])
def test_a_definition_is_found_however_it_is_shown(way: str) -> None:
    assert definition_digest(ONE) in definition_digests(shown_as(way))


def test_text_that_is_no_code_has_no_definitions_and_costs_little() -> None:
    rng = Random(0)
    noise = "".join(rng.choice('def (:\n \t"\\n|1+') for _ in range(20_000))
    assert all(definition_digests(text) == {} for text in ("", "def f(", "def f(x):", "x def f(x): return"))
    definition_digests(noise)
    definition_digests("def f(x):\n" + "    x = 1\n" * 5_000)
