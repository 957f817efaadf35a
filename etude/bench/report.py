"""Reports of a comparison: a table for the terminal, and a self-contained HTML page.

Both are rendered from the summary alone. Names and reasons are untrusted and are shown as text, never as markup.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup
from rich.markup import escape
from rich.table import Table

from etude.evaluation.plot import COLOURS, Axis, Line, Panel, draw

JsonObject = Mapping[str, Any]

MISSING = "–"
LOG_AXIS_RATIO = 20.0  # largest over smallest value from which an axis is logarithmic


# ------------------------------------------------------------------------------------------- formatting


def percent(value: float | None) -> str:
    return MISSING if value is None else f"{100 * value:.1f}%"


def bounds(estimate: JsonObject | None) -> str:
    """Format an interval of fractions in percent; "" if there is none (a single task)."""
    if not estimate or estimate["low"] is None:
        return ""
    return f"{100 * estimate['low']:.1f} to {100 * estimate['high']:.1f}"


def points(value: float | None) -> str:
    """Format a difference of fractions in percentage points."""
    return MISSING if value is None else f"{100 * value:+.1f}"


def number(value: float | None) -> str:
    if value is None:
        return MISSING
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.1f}" if abs(value) >= 1 else f"{value:.2g}"


def number_range(estimate: JsonObject) -> str:
    """Format an interval of numbers."""
    return "" if estimate["low"] is None else f"{number(estimate['low'])} to {number(estimate['high'])}"


def dollars(value: float | None) -> str:
    if value is None:
        return MISSING
    return f"${value:,.2f}" if value >= 1 else f"${value:.4f}" if value >= 1e-3 or value == 0 else f"${value:.2g}"


def mean_of(policy: JsonObject, name: str) -> float | None:
    found: JsonObject | None = policy.get("spent", {}).get(name)
    return None if found is None else found["mean"]


def largest_k(policy: JsonObject) -> str:
    """Return the largest k of pass@k, "" if there is none."""
    return max(policy.get("pass_at", {}), key=int, default="")


# ------------------------------------------------------------------------------------------- terminal


def results_table(summary: JsonObject) -> Table:
    """Return a table with one row per policy."""
    shown = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    k = max((int(largest_k(policy) or 1) for policy in summary["policies"]), default=1)
    columns = ["policy", "tasks", "solved", "95%", *([f"pass@{k}"] if k > 1 else []), "sampled", "prompt", "turns", "s"]
    for column in [*columns, "cost", "failures"]:
        shown.add_column(column, justify="left" if column == "policy" else "right", no_wrap=column != "policy")
    for policy in summary["policies"]:
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


def failures(policy: JsonObject) -> str:
    """Format the number of infrastructure failures and of the tasks given up because of them."""
    infrastructure = policy["infrastructure"]
    given_up = len(infrastructure["given_up"])
    return f"{infrastructure['failures']}" + (f" ({given_up} given up)" if given_up else "")


def conclusions(summary: JsonObject) -> list[str]:
    """Return a sentence per difference, and notes about missing trials and cheating."""
    lines = [describe_difference(each) for each in summary["differences"]]
    if summary.get("stopped"):
        lines.append(f"{summary['stopped']}; --resume with a higher --max-cost runs the other trials")
    elif (spent := summary.get("usage", {}).get("dollars")) is not None:
        lines.append(f"all replies of the endpoints: {dollars(spent)}")
    if len(summary.get("settings", {}).get("harness", ())) > 1:
        lines.append("the trials were run with several versions of the harness: see settings.harness in summary.json")
    for policy in summary["policies"]:
        trials = policy["trials"]
        missing = trials["wanted"] - trials["graded"]
        if missing and not summary["finished"]:
            lines.append(f"{policy['name']}: {missing:,} of {trials['wanted']:,} trials are missing")
        asked = policy.get("sampling", {})
        if (asked.get("effort") or asked.get("thinking_budget")) and mean_of(policy, "thinking") == 0:
            lines.append(f"{policy['name']}: the endpoint counted no thinking tokens; it may ignore what was asked for")
        if policy.get("hacks"):
            lines.append(f"{policy['name']}: {policy['hacks']} trials cheated and count as unsolved")
    return lines


def describe_difference(each: JsonObject) -> str:
    """Describe a difference in one sentence."""
    if not each["tasks"]:
        return f"{each['to']} against {each['from']}: no task finished by both"
    accuracy = each["accuracy"]
    words = f"{each['to']} against {each['from']}: {points(accuracy['mean'])} points solved"
    if accuracy["low"] is None:
        return f"{words}, from a single task: no interval"
    caveat = "" if accuracy["low"] > 0 or accuracy["high"] < 0 else "; the interval contains zero"
    if accuracy["low"] == accuracy["high"]:
        caveat = "; all tasks had the same difference, so the interval has no width"
    interval = f"[{points(accuracy['low'])}, {points(accuracy['high'])}]"
    return f"{words} {interval} over {each['tasks']} tasks, {each['better']} better, {each['worse']} worse{caveat}"


# ------------------------------------------------------------------------------------------- plots


def render_plots(summary: JsonObject) -> str:
    """Return an SVG of success against tokens and, if prices are known, against cost, with 95% intervals."""
    policies = [(index, policy) for index, policy in enumerate(summary["policies"]) if policy.get("accuracy")]
    if not policies:
        return ""
    panels = [_scatter("against tokens", "sampled tokens per trial", "made", policies)]
    priced = [(index, policy) for index, policy in policies if "dollars" in policy["spent"]]
    if priced:
        panels.append(_scatter("against cost", "dollars per trial", "dollars", priced))
    words = "; ".join(
        f"{policy['name']}: {percent(policy['accuracy']['mean'])} with {number(mean_of(policy, 'made'))} tokens"
        for _, policy in policies
    )
    return draw(panels, title="Tasks solved", description=f"{words}. Bars are 95% intervals over tasks.")


def _scatter(title: str, label: str, name: str, policies: Sequence[tuple[int, JsonObject]]) -> Panel:
    series: list[Line] = []
    for index, policy in policies:
        x, y = policy["spent"][name], policy["accuracy"]
        series.append(Line(policy["name"], [x["mean"]], [y["mean"]], style="points", colour=index))
        if y["low"] is not None:
            series.append(Line("", [x["mean"]] * 2, [y["low"], y["high"]], colour=index))
            series.append(Line("", [x["low"], x["high"]], [y["mean"]] * 2, colour=index))
    low, high, log = _axis_range([value for line in series for value in line.x])
    across = Axis(label, log=log, low=low, high=high)
    return Panel(across, Axis("solved", low=0.0, high=1.0, percent=True), series, title=title)


def _axis_range(values: Iterable[float]) -> tuple[float, float, bool]:
    """Return the range of an axis, with a margin around the values, and whether it is logarithmic."""
    found = [value for value in values if math.isfinite(value)]
    low, high = min(found), max(found)
    if low > 0 and high / low >= LOG_AXIS_RATIO:
        return low / 1.5, high * 1.5, True
    room = 0.15 * (high - low) or 0.2 * high or 1.0
    return max(0.0, low - room), high + room, False


# ------------------------------------------------------------------------------------------- the page


def render_page(summary: JsonObject, name: str) -> str:
    """Return the comparison as one self-contained HTML page."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.lstrip_blocks = True
    forms = (percent, bounds, points, number, number_range, dollars)
    environment.filters |= {form.__name__: form for form in forms}
    policies = summary["policies"]
    template = files("etude.bench").joinpath("report.html").read_text(encoding="utf-8")
    return environment.from_string(template).render(
        summary=summary,
        name=name,
        policies=policies,
        k=max((largest_k(policy) for policy in policies), key=lambda k: int(k or 0), default=""),
        colours=COLOURS,
        colour_index={policy["name"]: index for index, policy in enumerate(policies)},
        plot=Markup(render_plots(summary)),
        scored=any(policy["score"]["mean"] != policy["accuracy"]["mean"] for policy in policies if "score" in policy),
        priced=any("dollars" in policy.get("spent", {}) for policy in policies),
        categories=sorted({name for policy in policies for name in policy.get("by_category", {})}),
        endings=_collect_names(policies, lambda policy: policy.get("endings", {})),
        errors=_collect_names(policies, lambda policy: policy.get("errors", {}).get("failed", {})),
        ending=lambda policy, name: percent(policy.get("endings", {}).get(name, 0.0)),
        error=lambda policy, name: _rate(policy.get("errors"), name),
        task_cell=_task_cell,
        difference_bar=_difference_bar,
    )


def _collect_names(policies: Iterable[JsonObject], part: Any) -> list[str]:
    return sorted({name for policy in policies for name in part(policy)})


def _rate(errors: JsonObject | None, name: str) -> str:
    """Format the failures of one class per hundred calls."""
    calls = errors["calls"] if errors else 0
    return number(100 * errors["failed"].get(name, 0) / calls) if errors and calls else MISSING


def _task_cell(row: JsonObject, policy: str) -> dict[str, Any]:
    """Return the text, fill (fraction solved) and tooltip of a policy's cell for a task."""
    found = row["policies"].get(policy)
    if found is None:
        return {"words": "", "share": None, "title": "not run yet"}
    if found["given_up"]:
        return {"words": "given up", "share": None, "title": found["given_up"]}
    solved, tried = sum(found["solved"]), len(found["solved"])
    scores = ", ".join(f"{score:.3g}" for score in found["score"])
    return {"words": f"{solved}/{tried}", "share": solved / tried, "title": f"scores {scores}"}


def _difference_bar(estimate: JsonObject) -> Markup:
    """Return an SVG bar of an interval on a line from -1 to 1, with zero marked."""
    low, high = (estimate["mean"] if estimate[end] is None else estimate[end] for end in ("low", "high"))
    left, right, middle = (80 + 76 * max(-1.0, min(1.0, value)) for value in (low, high, estimate["mean"]))
    kind = "up" if low > 0 else "down" if high < 0 else "level"
    return Markup(
        f'<svg class="span {kind}" viewBox="0 0 160 14" width="160" height="14" aria-hidden="true">'
        '<line class="rule" x1="0" x2="160" y1="7" y2="7"/><line class="zero" x1="80" x2="80" y1="0" y2="14"/>'
        f'<line class="bar" x1="{left:.1f}" x2="{right:.1f}" y1="7" y2="7"/><circle cx="{middle:.1f}" cy="7" r="3.5"/>'
        "</svg>"
    )
