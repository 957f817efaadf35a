"""The first screen of a run: model, results and times of the stages, held-out success by set."""

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from etude.runs.layout import RunLayout
from etude.viewer.api import RunApi
from etude.viewer.chart_data import benchmarks, evaluations, training_curve
from etude.viewer.overview import ActivityClock, curve_change, read_model, stage_results, stage_times
from etude.viewer.stage_outcome import stage_outcome

HOUR = 3600.0


def stage(name: str, done: bool = True, saved: float = 0.0, **facts: Any) -> dict[str, Any]:
    return {"name": name, "done": done, "saved": datetime.fromtimestamp(saved, UTC).isoformat(), "facts": facts}


def line(name: str, step: int, time: float, **values: Any) -> dict[str, Any]:
    return {"stage": name, "step": step, "time": time, **values}


def test_the_first_screen_has_model_stages_and_outcome(run: Path) -> None:
    data = RunApi(run).get("run")
    assert data["model"] == {"family": "qwen3", "layers": 6.0, "parameters": 4096 * 192 + 192}
    by_name = {each["name"]: each for each in data["stages"]}
    assert by_name["pretrain"]["did"] == "1.23M tokens of code"
    assert by_name["pretrain"]["measure"] == "held-out loss"
    assert by_name["pretrain"]["before"] > by_name["pretrain"]["after"]
    assert (by_name["mtp"]["measure"], by_name["mtp"]["after"]) == ("held-out drafts accepted", 0.6)
    assert by_name["sft"]["measure"] == "training loss", "nothing was held out of it"
    assert by_name["rl"]["did"] == "3 steps of 2 tasks × 4 sessions"
    ends = [each["start"] + each["seconds"] for each in data["stages"]]
    assert [each["start"] for each in data["stages"]] == [0.0, *ends[:-1]], "each begins where the one before ended"
    assert all(each["seconds"] > 0 for each in data["stages"])
    assert by_name["rl"]["measure"] == "validation tasks solved"
    assert by_name["evaluation"]["did"] == "measured the models of sft, rl"
    outcome = data["outcome"]
    assert [(each["name"], each["tasks"], each["sessions"], each["k"]) for each in outcome["sets"]] == [
        (name, 3, 2, 2) for name in ("validation", "new", "unseen")
    ]
    assert [row["model"] for row in outcome["rows"]] == ["sft", "rl"]
    assert [(gain["model"], gain["against"], gain["set"]) for gain in outcome["gains"]] == [
        ("rl", "sft", name) for name in ("validation", "new", "unseen")
    ]
    assert outcome["scored"] == {"validation": 2, "new": 2, "unseen": 2}


# ------------------------------------------------------------------------------------------- time


def test_stages_without_metrics_have_a_time_and_long_gaps_are_left_out() -> None:
    stages = [stage("tasks", saved=100.0), stage("corpus", saved=130.0), stage("sft", saved=130.0 + 20 * HOUR)]
    records = [line("sft", step, 140.0 + (step > 2) * 19.9 * HOUR + step) for step in range(1, 6)]
    made = [{"created": datetime.fromtimestamp(40.0, UTC).isoformat()}]
    times = stage_times(stages, records, made)
    assert times["tasks"] == {"start": 0.0, "seconds": 60.0}
    assert times["corpus"] == {"start": 60.0, "seconds": 30.0}
    work = (142.0 - 130.0) + (130.0 + 20 * HOUR - (140.0 + 19.9 * HOUR + 3))
    assert times["sft"] == {"start": 90.0, "seconds": pytest.approx(work)}


def test_a_running_stage_lasts_until_its_last_record() -> None:
    stages = [stage("tasks", saved=100.0), stage("sft", done=False), stage("rl", done=False)]
    times = stage_times(stages, [line("sft", 1, 110.0), line("sft", 2, 150.0)], [])
    assert times == {"tasks": {"start": 0.0, "seconds": 0.0}, "sft": {"start": 0.0, "seconds": 50.0}}


def test_a_run_without_times_has_no_stage_times() -> None:
    assert stage_times([{"name": "a", "done": True, "saved": None, "facts": {}}], [{"stage": "a"}], [{}]) == {}
    assert ActivityClock([]).elapsed == [0.0]


# ------------------------------------------------------------------------------------------- the model


def test_the_model_is_the_newest_checkpoint_that_exists(run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    first = {"kind": "checkpoint", "path": "checkpoints/init-0"}
    gone = {"kind": "checkpoint", "path": "checkpoints/sft-60"}
    outside = {"kind": "checkpoint", "path": "../run/checkpoints/init-0/../../../elsewhere"}
    found = read_model(copy, [first, {"kind": "tasks", "path": "artefacts/tasks"}, gone, outside])
    assert found is not None
    assert found["parameters"] == 4096 * 192 + 192
    (copy / "checkpoints/init-0/model.safetensors").write_bytes(b"\xff" * 40)
    assert read_model(copy, [first]) is None
    assert read_model(copy, []) is None


# ------------------------------------------------------------------------------------------- metrics


def test_the_metric_of_draft_layers_is_their_acceptance_rate() -> None:
    steps = [line("mtp", at, at, loss=2.0, mtp_1_kl=8.0 - at, mtp_1_overlap=at / 10, tokens=at * 10) for at in (1, 2)]
    tests = [line("mtp", 2 * at, at, evaluation=True, tokens=20 * at, held_out_overlap=0.1 + at / 5) for at in (0, 1)]
    curve = training_curve("mtp", [tests[0], *steps, tests[1]])
    assert curve is not None
    assert curve["measure"] == "mtp_1_overlap"
    data = curve_change(curve)
    assert (data["measure"], data["share"]) == ("held-out drafts accepted", True)
    assert (data["before"], data["after"]) == (0.1, pytest.approx(0.3))


def test_the_loss_by_position_has_its_first_and_last_evaluation() -> None:
    records = [line("extend", at, at, loss=2.0, tokens=at + 1, loss_by_position=[3.0 - at, 2.0 - at]) for at in (0, 1)]
    curve = training_curve("extend", records)
    assert curve is not None
    assert curve["by_position"] == [[3.0, 2.0], [2.0, 1.0]]


FIGURES = {"tasks": 72, "samples": 288, "solved": 0.23, "solved_low": 0.16, "solved_high": 0.3, "best/4": 0.49}


def scored(model: str, task_set: str, **values: Any) -> dict[str, Any]:
    return line("evaluation", 0, 0.0, model=model, set=task_set, **FIGURES, **values)


def test_a_run_without_rl_has_the_same_picture(tmp_path: Path) -> None:
    records = [scored("base", "validation"), scored("base", "unseen"), scored("sft", "validation")]
    data = stage_outcome(RunLayout(tmp_path), records, {}, {})
    assert data is not None
    assert [list(row["sets"]) for row in data["rows"]] == [["validation", "unseen"], ["validation"]], "while it runs"
    assert (data["gains"], data["scored"]) == ([], {})
    assert data["rows"][0]["sets"]["unseen"]["best"]["at"] == 0.49
    assert stage_outcome(RunLayout(tmp_path), [line("rl", 0, 0.0, evaluation=True, solved=0.3)], {}, {}) is None


def test_task_sets_are_described_by_their_recipe_entry(tmp_path: Path) -> None:
    builds = [
        {"name": "train", "source": "nano", "split": "train"},
        {"name": "new", "source": "nano", "seed": 9},
        {"name": "unseen", "source": "nano", "split": "unseen"},
        {"name": "other", "path": "/somewhere"},
    ]
    recipe = {"tasks": {"build": builds}, "rl": {"tasks": "train"}, "evaluation": {"validation": "/tasks/other"}}
    records = [scored("base", name) for name in ("other", "new", "unseen")]
    data = stage_outcome(RunLayout(tmp_path), records, {}, recipe)
    assert data is not None
    assert {each["name"]: (each["kind"], each["test"]) for each in data["sets"]} == {
        "other": ("", False),
        "new": ("new tasks of kinds that are trained on", True),
        "unseen": ("kinds that are never trained on", True),
    }


def test_stages_of_a_malformed_recipe_are_still_shown() -> None:
    made = {"tasks": 1000, "demonstrations": 320}
    stages = [stage("rl"), stage("tasks", train=made, odd=3), stage("base"), stage("new")]
    data = stage_results(stages, {"rl": 3, "base": []}, [], [])
    assert [each["did"] for each in data] == ["", "1\u202f000 train (and 320 demonstrations)", "", ""]
    assert json.dumps(data)


def test_benchmarks_during_rl_have_curves_of_their_own() -> None:
    lines = [{"stage": "rl", "step": step, "evaluation": True, "solved": step / 10} for step in (0, 2)]
    lines += [{**lines[1], "benchmark": name, "solved": 0.9} for name in ("more", "large")]
    assert [(each["step"], each["solved"]) for each in evaluations(lines)] == [(0, 0.0), (2, 0.2)]
    assert {name: [each["solved"] for each in found] for name, found in benchmarks(lines).items()} == {
        "large": [0.9],
        "more": [0.9],
    }
