"""The data of a run's first screen: the model, the result and duration of every stage, and held-out success at the
first and the last evaluation of RL. Only what the run recorded is shown.
"""

import json
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from etude.viewer.run_reader import JsonObject, as_number

MAX_GAP_S = 3600.0  # a run without any event for longer was not running; the gap is not counted
MAX_HEADER_BYTES = 64 << 20  # of safetensors; a larger number means a damaged file


# ------------------------------------------------------------------------------------------- the model


def read_model(path: Path, lineage: Sequence[JsonObject]) -> JsonObject | None:
    """Return family, layers and parameters of the newest checkpoint that exists."""
    for record in reversed(lineage):
        directory = path / str(record.get("path") or "")
        if record.get("kind") != "checkpoint" or not directory.resolve().is_relative_to(path.resolve()):
            continue
        try:
            config = json.loads((directory / "config.json").read_bytes())
            counted = sum(map(_count_parameters, sorted(directory.glob("model*.safetensors"))))
        except (OSError, ValueError, TypeError, AttributeError, KeyError):  # deleted, or being written
            continue
        if isinstance(config, dict) and counted:
            layers = as_number(config.get("num_hidden_layers"))
            return {"family": str(config.get("model_type") or ""), "layers": layers, "parameters": counted}
    return None


def _count_parameters(path: Path) -> int:
    """Return the number of parameters in a safetensors file, from its header."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size)) if size <= MAX_HEADER_BYTES else {}
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")


# ------------------------------------------------------------------------------------------- time


class ActivityClock:
    """Measures the time in which a run was active: gaps between events above MAX_GAP_S are left out."""

    def __init__(self, events: Iterable[float]) -> None:
        self.events = sorted(set(events))
        self.elapsed = [0.0]
        for before, after in zip(self.events, self.events[1:], strict=False):
            self.elapsed.append(self.elapsed[-1] + (after - before if after - before <= MAX_GAP_S else 0.0))

    def at(self, event: float) -> float:
        """Return the active seconds up to one of the events."""
        return self.elapsed[bisect_left(self.events, event)]


def stage_times(
    stages: Sequence[JsonObject], records: Sequence[JsonObject], lineage: Sequence[JsonObject]
) -> dict[str, JsonObject]:
    """Return start and duration of every stage in active seconds; each starts where the previous one ended."""
    ends = {stage["name"]: end for stage in stages if (end := _end(stage, records)) is not None}
    lines = [when for record in records if (when := as_number(record.get("time"))) is not None]
    made = [when for record in lineage if (when := _parse_time(record.get("created"))) is not None]
    clock = ActivityClock([*ends.values(), *lines, *made])
    times: dict[str, JsonObject] = {}
    start = 0.0
    for stage in stages:
        if stage["name"] not in ends:
            continue
        end = clock.at(ends[stage["name"]])
        times[stage["name"]] = {"start": start, "seconds": max(0.0, end - start)}
        start = max(start, end)
    return times


def _end(stage: JsonObject, records: Sequence[JsonObject]) -> float | None:
    """Return the time at which a stage finished, or of its last record."""
    if stage["done"]:
        return _parse_time(stage["saved"])
    mine = (as_number(record.get("time")) for record in records if record.get("stage") == stage["name"])
    return max((when for when in mine if when is not None), default=None)


def _parse_time(text: object) -> float | None:
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except (ValueError, OverflowError):
        return None


# ------------------------------------------------------------------------------------------- stages


def stage_results(
    stages: Sequence[JsonObject], recipe: JsonObject, curves: Sequence[JsonObject], outcome_result: JsonObject | None
) -> list[JsonObject]:
    """Return a short description of every stage, and the metric it changed: first and last value."""
    curve = {result["stage"]: result for result in curves}
    found = []
    for stage in stages:
        name, facts = stage["name"], stage["facts"]
        section = recipe.get(name) if isinstance(recipe.get(name), dict) else {}
        assert isinstance(section, dict)
        result: JsonObject = {"did": _stage_summary(name, facts, section, curve.get(name))}
        if name == "rl" and outcome_result is not None:
            whole = outcome_result["rows"][0]
            result |= {"measure": "held-out tasks solved", "share": True}
            result |= {"before": (whole["before"] or {}).get("at"), "after": whole["after"]["at"]}
        elif name in curve:
            result |= curve_change(curve[name])
        found.append(result)
    return found


def curve_change(curve: JsonObject) -> JsonObject:
    """Return the first and last value of a curve: of held-out text if it was measured at least twice."""
    share = curve["measure"].endswith("overlap")
    name = "drafts accepted" if share else "loss" if curve["measure"] == "loss" else "divergence of drafts"
    if len(curve["held_out"]) > 1:
        (_, before), *_, (_, after) = curve["held_out"]
        return {"measure": f"held-out {name}", "share": share, "before": before, "after": after}
    mean = curve["curve"]["mean"]
    return {"measure": f"training {name}", "share": share, "before": mean[0], "after": mean[-1]}


def _stage_summary(name: str, facts: JsonObject, section: JsonObject, curve: JsonObject | None) -> str:
    if curve is not None:
        mix = section.get("mix")
        parts = [str(part.get("corpus")) for part in mix if isinstance(part, dict)] if isinstance(mix, list) else []
        of = f" of {' and '.join(parts)}" if parts else ""
        what = {"mtp": "MTP layers: ", "extend": "longer context: ", "sft": "imitation: "}.get(name, "")
        if name == "extend" and (length := as_number(section.get("length"))):
            what = f"context window of {_format_count(length)} tokens: "
        return f"{what}{_format_size(curve['tokens'])} tokens{of}"
    if name == "rl":
        size, groups = as_number(section.get("group_size")), as_number(section.get("groups_per_step"))
        steps = as_number(facts.get("steps")) or as_number(section.get("steps"))
        each = f" of {_format_count(groups)} tasks × {_format_count(size)} sessions" if size and groups else ""
        return f"{_format_count(steps)} steps{each}" if steps else ""
    if name == "base":
        source = Path(str(facts.get("source") or section.get("source") or "")).name
        return f"starts from {source}" if source else ""
    if (size := as_number(facts.get("parameters"))) is not None:
        return f"{_format_size(size)} random parameters"
    if (size := as_number(facts.get("vocab_size"))) is not None:
        return f"{_format_count(size)} entries"
    if (bits := as_number(facts.get("bits_per_byte"))) is not None:
        return f"{bits:.3f} bits per byte"
    return _describe_sets(facts)


def _describe_sets(facts: JsonObject) -> str:
    """Describe the task sets and corpora that a stage made."""
    found = []
    for name, made in facts.items():
        if not isinstance(made, dict):
            continue
        if (tasks := as_number(made.get("tasks"))) is not None:
            demonstrations = as_number(made.get("demonstrations"))
            shown = f" (and {_format_count(demonstrations)} demonstrations)" if demonstrations else ""
            found.append(f"{_format_count(tasks)} {name}{shown}")
        elif (tokens := as_number(made.get("train"))) is not None:
            found.append(f"{name} {_format_size(tokens)} tokens")
    return ", ".join(found)


def _format_count(value: float) -> str:
    return f"{value:,.0f}".replace(",", "\u202f")


def _format_size(value: float | None) -> str:
    """Format with three digits, as the charts do: 164k, 1.77M."""
    size = value or 0.0
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= (10 * unit if name == "k" else unit):
            return f"{float(f'{size / unit:.3g}'):g}{name}"
    return f"{size:.0f}"


# ------------------------------------------------------------------------------------------- held-out success


def outcome(evaluations: Sequence[JsonObject], facts: JsonObject, recipe: JsonObject) -> JsonObject | None:
    """Return held-out success at the first and last evaluation: of all tasks, every set, and best of K sessions.

    The first evaluation is of the checkpoint that RL started from (usually after SFT), not of the base model. A change
    has an interval if the run compared the two task by task.
    """
    if not evaluations or as_number(evaluations[-1].get("solved")) is None:
        return None
    first, last = (evaluations[0], evaluations[-1]) if len(evaluations) > 1 else (None, evaluations[0])
    kinds = _kinds(recipe)
    names = [key.split("/")[1] for key in last if key.startswith("set/") and key.endswith("/solved")]
    tasks, samples = as_number(last.get("tasks")) or 0.0, as_number(last.get("samples")) or 0.0
    each = round(samples / tasks) if tasks else 0
    rows = [_row("all", first, last, "", "solved", _matching_comparison(facts.get("rise"), first, last))]
    for name in sorted(names, key=lambda name: list(kinds).index(name) if name in kinds else len(kinds)):
        row = _row(
            name, first, last, f"set/{name}/", "solved", _matching_comparison(facts.get(f"rise_{name}"), first, last)
        )
        rows.append(row | {"kind": kinds.get(name, "")})
    if each > 1 and as_number(last.get(f"best/{each}")) is not None:
        best = _row("best", first, last, "", f"best/{each}", _matching_comparison(facts.get("rise"), first, last))
        rows.append(best | {"of": each})
    steps = [int(as_number(line.get("step")) or 0) for line in (first, last) if line is not None]
    return {"tasks": int(tasks), "sessions": each, "steps": steps, "rows": rows}


def _matching_comparison(comparison: object, first: JsonObject | None, last: JsonObject) -> JsonObject:
    """Return the run's own comparison if it is between these two evaluations."""
    if first is None or not isinstance(comparison, dict):
        return {}
    return comparison if (comparison.get("from"), comparison.get("to")) == (first.get("step"), last.get("step")) else {}


def _row(
    name: str, first: JsonObject | None, last: JsonObject, prefix: str, measure: str, comparison: JsonObject
) -> JsonObject:
    return {
        "name": name,
        "tasks": as_number(last.get(f"{prefix}tasks")),
        "before": _bounded(first, f"{prefix}{measure}") if first is not None else None,
        "after": _bounded(last, f"{prefix}{measure}"),
        "change": _bounded(comparison, measure) if comparison else None,
    }


def _bounded(line: Mapping[str, object], name: str) -> JsonObject:
    keys = {"at": name, "low": f"{name}_low", "high": f"{name}_high"}
    return {word: as_number(line.get(key)) for word, key in keys.items()}


def _kinds(recipe: JsonObject) -> dict[str, str]:
    """Return for every task set whether its tasks are of the kinds that RL trained on, according to the recipe."""
    table, section = recipe.get("tasks"), recipe.get("rl")
    builds = table.get("build") if isinstance(table, dict) else None
    known = {str(build.get("name")): build for build in builds or () if isinstance(build, dict)}
    train = known.get(str(section.get("tasks")) if isinstance(section, dict) else "")
    if train is None or not train.get("source"):
        return {}
    result = {}
    for name, build in known.items():
        if build.get("source") == train["source"]:
            alike = build.get("split", "train") == train.get("split", "train")
            result[name] = "new tasks of kinds it trained on" if alike else "tasks of kinds it never trained on"
    return result
