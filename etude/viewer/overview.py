"""What a run came to, for its first screen: the model, what every stage did and for how long, and held-out success
before and after. Everything is taken from what the run wrote down; what it did not is left out.
"""

import json
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from etude.viewer.run_reader import Facts, number

SILENCE_S = 3600.0  # a run from which nothing came for longer stood still: that time is nobody's
MOST_HEADER = 64 << 20  # bytes of a safetensors header: more is no header


# ------------------------------------------------------------------------------------------- the model


def read_model(path: Path, lineage: Sequence[Facts]) -> Facts | None:
    """The newest weights that are there: of which family, how many layers and parameters."""
    for record in reversed(lineage):
        directory = path / str(record.get("path") or "")
        if record.get("kind") != "checkpoint" or not directory.resolve().is_relative_to(path.resolve()):
            continue
        try:
            config = json.loads((directory / "config.json").read_bytes())
            counted = sum(map(_parameters, sorted(directory.glob("model*.safetensors"))))
        except (OSError, ValueError, TypeError, AttributeError, KeyError):  # it was given back, or is being written
            continue
        if isinstance(config, dict) and counted:
            layers = number(config.get("num_hidden_layers"))
            return {"family": str(config.get("model_type") or ""), "layers": layers, "parameters": counted}
    return None


def _parameters(path: Path) -> int:
    """The numbers a file of weights holds, by its header alone."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size)) if size <= MOST_HEADER else {}
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")


# ------------------------------------------------------------------------------------------- time


class WorkClock:
    """A clock that goes while a run gives signs of life and stands still in between."""

    def __init__(self, signs: Iterable[float]) -> None:
        self.signs = sorted(set(signs))
        self.read = [0.0]
        for before, after in zip(self.signs, self.signs[1:], strict=False):
            self.read.append(self.read[-1] + (after - before if after - before <= SILENCE_S else 0.0))

    def at(self, sign: float) -> float:
        """Seconds of work up to one of the signs."""
        return self.read[bisect_left(self.signs, sign)]


def stage_times(stages: Sequence[Facts], records: Sequence[Facts], lineage: Sequence[Facts]) -> dict[str, Facts]:
    """When every stage began and how long it took, in seconds of work: each begins where the one before ended."""
    ends = {stage["name"]: end for stage in stages if (end := _end(stage, records)) is not None}
    lines = [when for record in records if (when := number(record.get("time"))) is not None]
    made = [when for record in lineage if (when := _moment(record.get("created"))) is not None]
    clock = WorkClock([*ends.values(), *lines, *made])
    times: dict[str, Facts] = {}
    began = 0.0
    for stage in stages:
        if stage["name"] not in ends:
            continue
        ended = clock.at(ends[stage["name"]])
        times[stage["name"]] = {"start": began, "seconds": max(0.0, ended - began)}
        began = max(began, ended)
    return times


def _end(stage: Facts, records: Sequence[Facts]) -> float | None:
    """When a stage was done, or last heard of."""
    if stage["done"]:
        return _moment(stage["saved"])
    mine = (number(record.get("time")) for record in records if record.get("stage") == stage["name"])
    return max((when for when in mine if when is not None), default=None)


def _moment(text: object) -> float | None:
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except (ValueError, OverflowError):
        return None


# ------------------------------------------------------------------------------------------- stages


def stage_results(stages: Sequence[Facts], recipe: Facts, curves: Sequence[Facts], won: Facts | None) -> list[Facts]:
    """What every stage did, in a few words, and the one measure it changed: before and after."""
    curve = {told["stage"]: told for told in curves}
    found = []
    for stage in stages:
        name, facts = stage["name"], stage["facts"]
        section = recipe.get(name) if isinstance(recipe.get(name), dict) else {}
        assert isinstance(section, dict)
        told: Facts = {"did": _did(name, facts, section, curve.get(name))}
        if name == "rl" and won is not None:
            whole = won["rows"][0]
            told |= {"measure": "held-out tasks solved", "share": True}
            told |= {"before": (whole["before"] or {}).get("at"), "after": whole["after"]["at"]}
        elif name in curve:
            told |= measured(curve[name])
        found.append(told)
    return found


def measured(curve: Facts) -> Facts:
    """What a curve went from and came to: on held-out text where that was measured twice."""
    share = curve["measure"].endswith("overlap")
    name = "drafts accepted" if share else "loss" if curve["measure"] == "loss" else "divergence of drafts"
    if len(curve["held_out"]) > 1:
        (_, before), *_, (_, after) = curve["held_out"]
        return {"measure": f"held-out {name}", "share": share, "before": before, "after": after}
    mean = curve["curve"]["mean"]
    return {"measure": f"training {name}", "share": share, "before": mean[0], "after": mean[-1]}


def _did(name: str, facts: Facts, section: Facts, curve: Facts | None) -> str:
    if curve is not None:
        mix = section.get("mix")
        parts = [str(part.get("corpus")) for part in mix if isinstance(part, dict)] if isinstance(mix, list) else []
        of = f" of {' and '.join(parts)}" if parts else ""
        what = {"mtp": "learns to draft ahead: ", "extend": "longer context: ", "sft": "imitates: "}.get(name, "")
        if name == "extend" and (length := number(section.get("length"))):
            what = f"context of {_whole(length)} tokens: "
        return f"{what}{_short(curve['tokens'])} tokens{of}"
    if name == "rl":
        size, groups = number(section.get("group_size")), number(section.get("groups_per_step"))
        steps = number(facts.get("steps")) or number(section.get("steps"))
        each = f" of {_whole(groups)} tasks × {_whole(size)} sessions" if size and groups else ""
        return f"{_whole(steps)} steps{each}" if steps else ""
    if name == "base":
        source = Path(str(facts.get("source") or section.get("source") or "")).name
        return f"starts from {source}" if source else ""
    if (size := number(facts.get("parameters"))) is not None:
        return f"{_short(size)} parameters at random"
    if (size := number(facts.get("vocab_size"))) is not None:
        return f"{_whole(size)} entries"
    if (bits := number(facts.get("bits_per_byte"))) is not None:
        return f"{bits:.3f} bits per byte"
    return _sets(facts)


def _sets(facts: Facts) -> str:
    """What was made, by name: sets of tasks, corpora."""
    found = []
    for name, made in facts.items():
        if not isinstance(made, dict):
            continue
        if (tasks := number(made.get("tasks"))) is not None:
            experts = number(made.get("experts"))
            found.append(f"{_whole(tasks)} {name}" + (f" (and {_whole(experts)} expert sessions)" if experts else ""))
        elif (tokens := number(made.get("train"))) is not None:
            found.append(f"{name} {_short(tokens)} tokens")
    return ", ".join(found)


def _whole(value: float) -> str:
    return f"{value:,.0f}".replace(",", "\u202f")


def _short(value: float | None) -> str:
    """Three digits, as the charts have them: 164k, 1.77M."""
    size = value or 0.0
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= (10 * unit if name == "k" else unit):
            return f"{float(f'{size / unit:.3g}'):g}{name}"
    return f"{size:.0f}"


# ------------------------------------------------------------------------------------------- held-out success


def outcome(evaluations: Sequence[Facts], facts: Facts, recipe: Facts) -> Facts | None:
    """Held-out success from the first measurement to the last: of all tasks, of every set, and the best of K sessions.

    A change has an interval of its own where the run has compared the two task by task.
    """
    if not evaluations or number(evaluations[-1].get("solved")) is None:
        return None
    first, last = (evaluations[0], evaluations[-1]) if len(evaluations) > 1 else (None, evaluations[0])
    kinds = _kinds(recipe)
    names = [key.split("/")[1] for key in last if key.startswith("set/") and key.endswith("/solved")]
    tasks, samples = number(last.get("tasks")) or 0.0, number(last.get("samples")) or 0.0
    each = round(samples / tasks) if tasks else 0
    rows = [_row("all", first, last, "", "solved", _compared(facts.get("rise"), first, last))]
    for name in sorted(names, key=lambda name: list(kinds).index(name) if name in kinds else len(kinds)):
        row = _row(name, first, last, f"set/{name}/", "solved", _compared(facts.get(f"rise_{name}"), first, last))
        rows.append(row | {"kind": kinds.get(name, "")})
    if each > 1 and number(last.get(f"best/{each}")) is not None:
        best = _row("best", first, last, "", f"best/{each}", _compared(facts.get("rise"), first, last))
        rows.append(best | {"of": each})
    steps = [int(number(line.get("step")) or 0) for line in (first, last) if line is not None]
    return {"tasks": int(tasks), "sessions": each, "steps": steps, "rows": rows}


def _compared(rise: object, first: Facts | None, last: Facts) -> Facts:
    """What the run says of the change, if it is between these two measurements."""
    if first is None or not isinstance(rise, dict):
        return {}
    return rise if (rise.get("from"), rise.get("to")) == (first.get("step"), last.get("step")) else {}


def _row(name: str, first: Facts | None, last: Facts, prefix: str, measure: str, rise: Facts) -> Facts:
    return {
        "name": name,
        "tasks": number(last.get(f"{prefix}tasks")),
        "before": _bounded(first, f"{prefix}{measure}") if first is not None else None,
        "after": _bounded(last, f"{prefix}{measure}"),
        "change": _bounded(rise, measure) if rise else None,
    }


def _bounded(line: Mapping[str, object], name: str) -> Facts:
    keys = {"at": name, "low": f"{name}_low", "high": f"{name}_high"}
    return {word: number(line.get(key)) for word, key in keys.items()}


def _kinds(recipe: Facts) -> dict[str, str]:
    """What the recipe tells of every set of tasks: made like those it was trained on, or not."""
    table, section = recipe.get("tasks"), recipe.get("rl")
    builds = table.get("build") if isinstance(table, dict) else None
    known = {str(build.get("name")): build for build in builds or () if isinstance(build, dict)}
    train = known.get(str(section.get("tasks")) if isinstance(section, dict) else "")
    if train is None or not train.get("source"):
        return {}
    told = {}
    for name, build in known.items():
        if build.get("source") == train["source"]:
            alike = build.get("split", "train") == train.get("split", "train")
            told[name] = "new tasks of kinds it trained on" if alike else "tasks of kinds it never trained on"
    return told
