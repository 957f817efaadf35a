"""Compare the models of a run's stages on the same tasks: which earlier model is best, and what each stage gained.

The best earlier model is chosen on validation; the gain over it is measured on every set, task by task. RL is compared
with its control too, which is no earlier model. A gain whose interval includes 0 is unproven. One that is not found
among proper sessions is a gain of format or ending only.
"""

from collections.abc import Mapping
from typing import Any, Literal

from etude.evaluation import statistics
from etude.evaluation.held_out import Evaluation

Record = Mapping[str, Any]
Results = Mapping[str, Mapping[str, Evaluation]]  # by model, in pipeline order, and by task set
Verdict = Literal["proven", "only format or ending", "unproven", "worse"]

CONTROL = "control"  # the model of a control of RL
KEPT = ("solved", "proper", "proper_solved")  # figures that the facts of the stage hold, with their bounds


def best_earlier(results: Results, model: str, validation: str) -> str | None:
    """Return the model before `model` that solves most of the validation tasks; None if it is the first."""
    names = list(results)
    earlier = [name for name in names[: names.index(model)] if name != CONTROL]
    rates = {name: _solve_rate(results[name][validation]) for name in earlier}
    return max(rates, key=lambda name: rates[name]) if rates else None


def _solve_rate(evaluation: Evaluation) -> float:
    return float(statistics.summarise(evaluation)["solved"])


def verdict(difference: Record) -> Verdict:
    """Return what a paired difference of two models shows about their average solve rates."""
    if _sign(difference, "solved") < 0:
        return "worse"
    if _sign(difference, "solved") == 0:
        return "unproven"
    return "proven" if _sign(difference, "proper_solved") > 0 else "only format or ending"


def _sign(difference: Record, name: str) -> int:
    """Return 1 or -1 if the whole interval is on that side of 0; 0 if it includes 0, or there is none."""
    low, high = difference.get(f"{name}_low"), difference.get(f"{name}_high")
    if low is None or high is None:
        return 0
    return 1 if low > 0 else -1 if high < 0 else 0


def stage_gains(results: Results, validation: str) -> list[dict[str, Any]]:
    """Return the difference of every model but the first from the best earlier one, and that of RL from its control.

    Each has a `model`, the one it is `against`, and a difference with a verdict for each set.
    """
    pairs = [(model, best_earlier(results, model, validation)) for model in results]
    if "rl" in results and CONTROL in results:
        pairs.append(("rl", CONTROL))
    return [
        {"model": model, "against": against, "sets": _differences(results[against], results[model])}
        for model, against in pairs
        if against is not None
    ]


def _differences(before: Mapping[str, Evaluation], after: Mapping[str, Evaluation]) -> dict[str, dict[str, Any]]:
    found = {name: statistics.compare(before[name], each) for name, each in after.items()}
    return {name: {**difference, "verdict": verdict(difference)} for name, difference in found.items()}


def main_figures(record: Record) -> dict[str, Any]:
    """Return the figures of a model on a set that are shown first: average, best of the largest K, proper sessions."""
    kept = {"tasks": record.get("tasks", 0), "samples": record.get("samples", 0)}
    names = [*KEPT, *(f"best/{k}" for k in [largest_k(record)] if k)]
    keys = [key for name in names for key in (name, f"{name}_low", f"{name}_high")]
    return kept | {key: record[key] for key in keys if record.get(key) is not None}


def largest_k(record: Record) -> int:
    """Return the largest K of best-of-K; 0 if there is none."""
    return max((int(key[5:]) for key in record if key.startswith("best/") and key[5:].isdigit()), default=0)


# ------------------------------------------------------------------------------------------- in words


def summary_lines(facts: Record) -> list[str]:
    """Return the results of the stage as lines: a table of the models, the gains of the last one, and the scorings."""
    models: Mapping[str, Mapping[str, Record]] = facts["models"]
    sets = list(next(iter(models.values())))
    lines = [f"{'':10}" + "".join(f"{_set_title(name, models):28}" for name in sets).rstrip()]
    for model, figures in models.items():
        lines.append(f"{model:10}" + "".join(f"{_rate(figures[name], 'solved'):28}" for name in sets).rstrip())
    lines += [f"{'':10}" + "".join(f"{_best_title(name, models):28}" for name in sets).rstrip()]
    for model, figures in models.items():
        best = (_rate(figures[name], f"best/{largest_k(figures[name])}") for name in sets)
        lines.append(f"{model:10}" + "".join(f"{each:28}" for each in best).rstrip())
    last = list(models)[-1]
    for gain in facts["gains"]:
        lines += gain_lines(gain, facts.get("control", "")) if gain["model"] == last else []
    counts = ", ".join(f"{name} {_times(count)}" for name, count in facts["scored"].items())
    return [*lines, f"scored in this run so far: {counts}"]


def gain_lines(gain: Record, control: str) -> list[str]:
    """Return the gain of a model against another one in words, a line for each set; `control` is its kind."""
    role = control if gain["against"] == CONTROL else "the best earlier model on validation"
    lines = [f"{gain['model']} against {gain['against']}, {role}:"]
    for name, difference in gain["sets"].items():
        k = largest_k(difference)
        figures = {"average": "solved", f"best of {k}": f"best/{k}", "among proper sessions": "proper_solved"}
        figures["share of those"] = "proper"
        listed = ", ".join(f"{words} {points(difference, key)}" for words, key in figures.items())
        lines.append(f"  {name}: {verdict_words(difference['verdict'])}; {listed} ({difference['tasks']} tasks)")
    return lines


def verdict_words(found: str) -> str:
    """Return a verdict in plain words."""
    return {
        "proven": "a gain",
        "only format or ending": "a gain in format or ending only: among sessions with valid calls and a proper "
        "ending none is proven",
        "unproven": "a gain is unproven: the interval includes 0",
        "worse": "a loss",
    }[found]


def points(difference: Record, name: str) -> str:
    """Return a difference of shares in points with its interval: +3.1 (-0.5 to +6.8)."""
    value, low, high = (difference.get(f"{name}{end}") for end in ("", "_low", "_high"))
    if value is None:
        return "unknown"
    return f"{100 * value:+.1f}" + ("" if low is None or high is None else f" ({100 * low:+.1f} to {100 * high:+.1f})")


def _rate(figures: Record, name: str) -> str:
    value, low, high = (figures.get(f"{name}{end}") for end in ("", "_low", "_high"))
    if value is None:
        return "unknown"
    bounds = "" if low is None or high is None else f" ({100 * max(0, low):.0f} to {100 * min(1, high):.0f})"
    return f"{100 * value:.1f} %{bounds}"


def _set_title(name: str, models: Mapping[str, Mapping[str, Record]]) -> str:
    figures = next(iter(models.values()))[name]
    return f"{name}, {figures['tasks']} tasks"


def _best_title(name: str, models: Mapping[str, Mapping[str, Record]]) -> str:
    return f"best of {largest_k(next(iter(models.values()))[name])}"


def _times(count: int) -> str:
    return f"{count} time{'s' if count != 1 else ''}"
