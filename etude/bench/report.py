"""A comparison to be looked at: a table for the terminal, and one page that needs nothing but itself.

Both are made from the summary alone. Names and reasons come from outside and are shown as text, never as markup.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jinja2
from markupsafe import Markup
from rich.markup import escape
from rich.table import Table

from etude.bench.template import PAGE, STYLE
from etude.evaluation.plot import COLOURS, Axis, Line, Panel, draw

Facts = Mapping[str, Any]

NONE = "–"
WIDE = 20.0  # the largest over the smallest from which on an axis is logarithmic


# ------------------------------------------------------------------------------------------- numbers as words


def percent(value: float | None) -> str:
    return NONE if value is None else f"{100 * value:.1f}%"


def bounds(estimate: Facts | None) -> str:
    """An interval of shares; one task alone has none."""
    if not estimate or estimate["low"] is None:
        return ""
    return f"{100 * estimate['low']:.1f} to {100 * estimate['high']:.1f}"


def points(value: float | None) -> str:
    """A difference of shares."""
    return NONE if value is None else f"{100 * value:+.1f}"


def number(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.1f}" if abs(value) >= 1 else f"{value:.2g}"


def range_(estimate: Facts) -> str:
    """An interval of numbers."""
    return "" if estimate["low"] is None else f"{number(estimate['low'])} to {number(estimate['high'])}"


def dollars(value: float | None) -> str:
    if value is None:
        return NONE
    return f"${value:,.2f}" if value >= 1 else f"${value:.4f}" if value >= 1e-3 or value == 0 else f"${value:.2g}"


def mean_of(policy: Facts, name: str) -> float | None:
    found: Facts | None = policy.get("spent", {}).get(name)
    return None if found is None else found["mean"]


def most_samples(policy: Facts) -> str:
    """The largest k of pass@k."""
    return max(policy.get("pass_at", {}), key=int, default="")


# ------------------------------------------------------------------------------------------- for the terminal


def results_table(said: Facts) -> Table:
    """One row for every policy."""
    shown = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    k = max((int(most_samples(policy) or 1) for policy in said["policies"]), default=1)
    columns = ["policy", "tasks", "solved", "95%", *([f"pass@{k}"] if k > 1 else []), "tokens", "read", "turns", "s"]
    for column in [*columns, "cost", "failures"]:
        shown.add_column(column, justify="left" if column == "policy" else "right", no_wrap=column != "policy")
    for policy in said["policies"]:
        accuracy, best = policy.get("accuracy"), policy.get("pass_at", {}).get(str(k))
        shown.add_row(
            escape(policy["name"]),
            str(policy["tasks"]),
            percent(accuracy and accuracy["mean"]),
            bounds(accuracy),
            *([percent(best and best["mean"])] if k > 1 else []),
            *(number(mean_of(policy, name)) for name in ("made", "prompt", "turns", "seconds")),
            dollars(mean_of(policy, "dollars")),
            failures(policy),
        )
    return shown


def failures(policy: Facts) -> str:
    """Failures of the infrastructure, and the tasks that were given up for them."""
    about = policy["infrastructure"]
    given_up = len(about["given_up"])
    return f"{about['failures']}" + (f" ({given_up} given up)" if given_up else "")


def conclusions(said: Facts) -> list[str]:
    """How policies differ, a sentence each; and what is missing."""
    lines = [sentence(each) for each in said["differences"]]
    for policy in said["policies"]:
        trials = policy["trials"]
        missing = trials["wanted"] - trials["graded"]
        if missing and not said["finished"]:
            lines.append(f"{policy['name']}: {missing:,} of {trials['wanted']:,} trials are still to come")
        if policy.get("hacks"):
            lines.append(f"{policy['name']}: {policy['hacks']} trials cheated and count as not solved")
    return lines


def sentence(each: Facts) -> str:
    """One difference in words."""
    if not each["tasks"]:
        return f"{each['to']} against {each['from']}: no task that both have finished"
    accuracy = each["accuracy"]
    words = f"{each['to']} against {each['from']}: {points(accuracy['mean'])} points solved"
    if accuracy["low"] is None:
        return f"{words}, from one task, which says nothing of others"
    sure = "" if accuracy["low"] > 0 or accuracy["high"] < 0 else "; no difference is within the interval"
    if accuracy["low"] == accuracy["high"]:
        sure = "; all tasks came out alike, and an interval knows only what was seen"
    interval = f"[{points(accuracy['low'])}, {points(accuracy['high'])}]"
    return f"{words} {interval} over {each['tasks']} tasks, {each['better']} better, {each['worse']} worse{sure}"


# ------------------------------------------------------------------------------------------- plots


def plots(said: Facts) -> str:
    """Success against tokens and, where prices are known, against cost; bars are 95% intervals over tasks."""
    policies = [(place, policy) for place, policy in enumerate(said["policies"]) if policy.get("accuracy")]
    if not policies:
        return ""
    panels = [_scatter("against tokens", "tokens made in a trial", "made", policies)]
    priced = [(place, policy) for place, policy in policies if "dollars" in policy["spent"]]
    if priced:
        panels.append(_scatter("against cost", "dollars for a trial", "dollars", priced))
    words = "; ".join(
        f"{policy['name']}: {percent(policy['accuracy']['mean'])} with {number(mean_of(policy, 'made'))} tokens"
        for _, policy in policies
    )
    return draw(panels, title="Tasks solved", description=f"{words}. Bars are 95% intervals over tasks.")


def _scatter(title: str, label: str, name: str, policies: Sequence[tuple[int, Facts]]) -> Panel:
    series: list[Line] = []
    for place, policy in policies:
        x, y = policy["spent"][name], policy["accuracy"]
        series.append(Line(policy["name"], [x["mean"]], [y["mean"]], style="points", colour=place))
        if y["low"] is not None:
            series.append(Line("", [x["mean"]] * 2, [y["low"], y["high"]], colour=place))
            series.append(Line("", [x["low"], x["high"]], [y["mean"]] * 2, colour=place))
    low, high, log = _reach([value for line in series for value in line.x])
    across = Axis(label, log=log, low=low, high=high)
    return Panel(across, Axis("solved", low=0.0, high=1.0, percent=True), series, title=title)


def _reach(values: Iterable[float]) -> tuple[float, float, bool]:
    """Where an axis begins and ends so that no point lies on its edge, and whether it is logarithmic."""
    found = [value for value in values if math.isfinite(value)]
    low, high = min(found), max(found)
    if low > 0 and high / low >= WIDE:
        return low / 1.5, high * 1.5, True
    room = 0.15 * (high - low) or 0.2 * high or 1.0
    return max(0.0, low - room), high + room, False


# ------------------------------------------------------------------------------------------- the page


def page(said: Facts, name: str) -> str:
    """The whole comparison as one HTML file that needs no other."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.lstrip_blocks = True
    forms = (percent, bounds, points, number, range_, dollars)
    environment.filters |= {form.__name__.rstrip("_"): form for form in forms}
    policies = said["policies"]
    return environment.from_string(PAGE).render(
        said=said,
        name=name,
        policies=policies,
        k=max((most_samples(policy) for policy in policies), key=lambda k: int(k or 0), default=""),
        style=Markup(STYLE),
        colours=COLOURS,
        place_of={policy["name"]: place for place, policy in enumerate(policies)},
        plot=Markup(plots(said)),
        scored=any(policy["score"]["mean"] != policy["accuracy"]["mean"] for policy in policies if "score" in policy),
        priced=any("dollars" in policy.get("spent", {}) for policy in policies),
        categories=sorted({name for policy in policies for name in policy.get("by_category", {})}),
        endings=_names(policies, lambda policy: policy.get("endings", {})),
        errors=_names(policies, lambda policy: policy.get("errors", {}).get("failed", {})),
        ending=lambda policy, name: percent(policy.get("endings", {}).get(name, 0.0)),
        error=lambda policy, name: _rate(policy.get("errors"), name),
        cells=_cell,
        span=_span,
    )


def _names(policies: Iterable[Facts], part: Any) -> list[str]:
    return sorted({name for policy in policies for name in part(policy)})


def _rate(errors: Facts | None, name: str) -> str:
    """Of a hundred calls, how many failed so."""
    calls = errors["calls"] if errors else 0
    return number(100 * errors["failed"].get(name, 0) / calls) if errors and calls else NONE


def _cell(row: Facts, policy: str) -> dict[str, Any]:
    """A policy's samples of a task: how many were solved, and how full the field is to be painted."""
    found = row["policies"].get(policy)
    if found is None:
        return {"words": "", "share": None, "title": "not yet"}
    if found["given_up"]:
        return {"words": "given up", "share": None, "title": found["given_up"]}
    solved, tried = sum(found["solved"]), len(found["solved"])
    scores = ", ".join(f"{score:.3g}" for score in found["score"])
    return {"words": f"{solved}/{tried}", "share": solved / tried, "title": f"scores {scores}"}


def _span(estimate: Facts) -> Markup:
    """A difference as a bar on a line from -1 to 1, with zero marked."""
    low, high = (estimate["mean"] if estimate[end] is None else estimate[end] for end in ("low", "high"))
    left, right, middle = (80 + 76 * max(-1.0, min(1.0, value)) for value in (low, high, estimate["mean"]))
    kind = "up" if low > 0 else "down" if high < 0 else "level"
    return Markup(
        f'<svg class="span {kind}" viewBox="0 0 160 14" width="160" height="14" aria-hidden="true">'
        '<line class="rule" x1="0" x2="160" y1="7" y2="7"/><line class="zero" x1="80" x2="80" y1="0" y2="14"/>'
        f'<line class="bar" x1="{left:.1f}" x2="{right:.1f}" y1="7" y2="7"/><circle cx="{middle:.1f}" cy="7" r="3.5"/>'
        "</svg>"
    )
