"""The data of the first picture of a run: what each stage did, from the records and facts of the stage `evaluation`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from etude.evaluation.scorings import count_scorings
from etude.evaluation.stage_comparison import CONTROL, largest_k, verdict_words
from etude.runs.layout import RunLayout
from etude.viewer.run_reader import JsonObject, as_number


def stage_outcome(
    layout: RunLayout, records: Sequence[JsonObject], facts: JsonObject, recipe: JsonObject
) -> JsonObject | None:
    """Return the solve rates of every model on every set, the gains, and how often each set was scored.

    None if no model has been scored. Models are in pipeline order; gains are there when the stage has finished.
    """
    own = (line for line in records if line.get("stage") == "evaluation")
    lines = [line for line in own if as_number(line.get("solved")) is not None]
    if not lines:
        return None
    kinds, validation = _kinds(recipe), _validation(recipe)
    sets: dict[str, JsonObject] = {}
    models: dict[str, JsonObject] = {}
    for line in lines:
        name, model, k = str(line.get("set")), str(line.get("model")), largest_k(line)
        tasks, samples = as_number(line.get("tasks")) or 0.0, as_number(line.get("samples")) or 0.0
        purpose = "for choices" if name == validation else "scored once per model"
        sets.setdefault(
            name,
            {"name": name, "kind": kinds.get(name, ""), "purpose": purpose, "tasks": tasks, "k": k}
            | {"sessions": round(samples / tasks) if tasks else 0, "test": name != validation},
        )
        measures = {"solved": "solved", "best": f"best/{k}", "proper": "proper", "proper_solved": "proper_solved"}
        models.setdefault(model, {})[name] = {word: _bounded(line, key) for word, key in measures.items()}
    rows = [{"model": model, "sets": results} for model, results in models.items()]
    return {"sets": list(sets.values()), "rows": rows, "gains": _gains(facts), "scored": _scored(layout)}


def _gains(facts: JsonObject) -> list[JsonObject]:
    """Return the gain of every model over the best earlier one, the last model first, its gain over a control next."""
    gains = [gain for gain in recorded_gains(facts) if gain["against"] != CONTROL]
    controls = [gain for gain in recorded_gains(facts) if gain["against"] == CONTROL]
    found = []
    for gain in [*gains[-1:], *controls, *reversed(gains[:-1])]:
        sets = gain["sets"]
        for name, difference in sets.items() if isinstance(sets, dict) else ():
            k = largest_k(difference)
            measures = {"solved": "solved", "best": f"best/{k}", "proper": "proper", "proper_solved": "proper_solved"}
            verdict = str(difference.get("verdict", ""))
            about = {"model": gain["model"], "against": gain["against"], "set": name, "k": k, "verdict": verdict}
            about["control"] = str(facts.get("control", "")) if gain["against"] == CONTROL else ""
            row = {word: _bounded(difference, key) for word, key in measures.items()}
            found.append({**about, **row, "words": verdict_words(verdict)})
    return found


def recorded_gains(facts: JsonObject) -> list[JsonObject]:
    """Return the gains in the facts of the stage `evaluation`."""
    gains = facts.get("gains")
    return [gain for gain in gains if isinstance(gain, dict)] if isinstance(gains, list) else []


def _scored(layout: RunLayout) -> JsonObject:
    try:
        return dict(count_scorings(layout))
    except (OSError, KeyError, TypeError):
        return {}


def _bounded(line: Mapping[str, object], name: str) -> JsonObject:
    keys = {"at": name, "low": f"{name}_low", "high": f"{name}_high"}
    return {word: as_number(line.get(key)) for word, key in keys.items()}


def _validation(recipe: JsonObject) -> str:
    section = recipe.get("evaluation")
    return Path(str(section.get("validation", "validation"))).name if isinstance(section, dict) else "validation"


def _kinds(recipe: JsonObject) -> dict[str, str]:
    """Return for every task set whether its tasks are of the kinds that were trained on, according to the recipe."""
    table, section = recipe.get("tasks"), recipe.get("rl")
    builds = table.get("build") if isinstance(table, dict) else None
    known = {str(build.get("name")): build for build in builds or () if isinstance(build, dict)}
    train = known.get(str(section.get("tasks")) if isinstance(section, dict) else "train")
    if train is None or not train.get("source"):
        return {}
    result = {}
    for name, build in known.items():
        if build.get("source") == train["source"]:
            alike = build.get("split", "train") != "unseen"  # the other splits share their kinds
            result[name] = "new tasks of kinds that are trained on" if alike else "kinds that are never trained on"
    return result
