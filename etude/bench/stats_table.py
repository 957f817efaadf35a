"""The statistics of benchmarks as a table: one column for each benchmark."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.markup import escape
from rich.table import Table

from etude.bench.report import MISSING, percent

Rows = Iterator[tuple[str, list[str]]]


def stats_table(found: Mapping[str, Any]) -> Table:
    """Return the table of `describe_benchmarks`."""
    shown = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    shown.add_column("")
    for each in found["benchmarks"]:
        shown.add_column(escape(each["name"]), justify="right")
    for name, cells in _rows(found):
        shown.add_row(escape(name), *map(escape, cells))
    return shown


def _rows(found: Mapping[str, Any]) -> Rows:
    sets = found["benchmarks"]
    yield "tasks", [f"{each['tasks']:,}" for each in sets]
    yield "repositories", [str(each["repositories"] or MISSING) for each in sets]
    for key, name in (("lines", "changed lines"), ("files", "changed files"), ("request", "request, characters")):
        yield name, [_quartiles(each[key]) for each in sets]
    yield "several files", [percent(each["several_files"]) for each in sets]
    if any(each["unknown_changes"] for each in sets):
        yield "changes not readable", [f"{each['unknown_changes']:,} tasks" for each in sets]
    for name in dict.fromkeys(name for each in sets for name in each["categories"]):
        yield f"  {name}", [str(each["categories"].get(name, 0)) for each in sets]
    if found["results"]:
        yield "solve rate, mean", [percent(each["difficulty"]["mean"]) for each in sets]
        yield "  tasks with results", [f"{each['difficulty']['tasks']:,}" for each in sets]
        for number, each in enumerate(sets[0]["difficulty"]["bins"]):
            yield f"  {_bin(each)}", [str(one["difficulty"]["bins"][number]["tasks"]) for one in sets]
    if any(each["age"]["dated"] for each in sets):
        for key in ("oldest", "median", "newest"):
            yield f"{key} commit", [each["age"][key] or MISSING for each in sets]
    if found["cutoff"]:
        yield "tasks without a date", [f"{each['tasks'] - each['age']['dated']:,}" for each in sets]
        for key, words in (("before_cutoff", "until"), ("after_cutoff", "after")):
            yield f"{words} {found['cutoff']}", [_side(each["age"][key]) for each in sets]


def _quartiles(found: Mapping[str, float] | None) -> str:
    if found is None:
        return MISSING
    return f"{found['median']:,.0f} ({found['q1']:,.0f} to {found['q3']:,.0f})"


def _bin(found: Mapping[str, float]) -> str:
    low, high = (f"{100 * found[key]:.0f}%" for key in ("from", "to"))
    return f"solved {low}" if low == high else f"solved {low} to {high}"


def _side(found: Mapping[str, Any]) -> str:
    rate = "" if found["solve_rate"] is None else f", {percent(found['solve_rate'])} solved"
    return f"{found['tasks']:,} tasks{rate}"
