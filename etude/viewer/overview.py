"""The data of a run's first screen: the model, and the result and duration of every stage. Only what the run recorded
is shown. `stage_outcome` has the first picture.
"""

import json
import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
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
    stages: Sequence[JsonObject], recipe: JsonObject, curves: Sequence[JsonObject], validations: Sequence[JsonObject]
) -> list[JsonObject]:
    """Return a short description of every stage, and the metric it changed: first and last value."""
    curve = {result["stage"]: result for result in curves}
    found = []
    for stage in stages:
        name, facts = stage["name"], stage["facts"]
        section = recipe.get(name) if isinstance(recipe.get(name), dict) else {}
        assert isinstance(section, dict)
        result: JsonObject = {"did": _stage_summary(name, facts, section, curve.get(name))}
        if name == "rl" and len(validations) > 1:
            first, last = (as_number(line.get("solved")) for line in (validations[0], validations[-1]))
            result |= {"measure": "validation tasks solved", "share": True, "before": first, "after": last}
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
    if name == "control":
        steps = as_number(facts.get("steps"))
        return f"{_format_count(steps)} steps of {section.get('kind')}" if steps else ""
    if name == "rl":
        size, groups = as_number(section.get("group_size")), as_number(section.get("groups_per_step"))
        steps = as_number(facts.get("steps")) or as_number(section.get("steps"))
        each = f" of {_format_count(groups)} tasks × {_format_count(size)} sessions" if size and groups else ""
        return f"{_format_count(steps)} steps{each}" if steps else ""
    if name == "evaluation" and isinstance(models := facts.get("models"), dict):
        return f"measured the models of {', '.join(models)}"
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
