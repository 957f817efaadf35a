"""The studies fig4, fig5 and fig6: conclusions follow from the numbers, and their runs are ordinary runs."""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import tomli_w
from typer.testing import CliRunner

from etude.config import differing_keys, settings_data
from etude.errors import EtudeError, InputError
from etude.evaluation import held_out, statistics
from etude.harness.trace import Cost
from etude.recipe.recipe import load_recipe
from etude.rewards.effort import effort, effort_units
from etude.rl.settings import open_rl_run
from etude.rollouts.queue import RolloutQueue
from etude.rollouts.settings import evaluation_queue, load_evaluation
from etude.runs.layout import RunLayout
from etude.runs.run import Run
from studies import fig4, fig5, fig6
from studies.cli import study_app
from studies.study import find_study, run_study, settings_with_overrides, write_result
from studies.subprocess_runs import Command, last_metrics, recipe_file, run_commands

SVG = "{http://www.w3.org/2000/svg}"


def quietly(done: int, total: int, note: str = "") -> None:
    """A progress callback that does nothing."""


def written_record(name: str, result: Any, out: Path) -> dict[str, Any]:
    """Write a result, check its plot, and return its record."""
    write_result(find_study(name), result, out, 0, 1.0)
    assert all(len(row) == len(result.columns) for row in result.rows)
    assert ElementTree.fromstring((out / f"{name}.svg").read_text()).findtext(f"{SVG}title") == result.title
    record: dict[str, Any] = json.loads((out / f"{name}.json").read_text())
    return record


# ------------------------------------------------------------------------------------------------- estimators


def test_sampled_variances_are_the_exact_ones_and_only_k2_is_biased(tmp_path: Path) -> None:
    record = written_record("fig4", fig4.fig4(0, quietly, fig4.Fig4Settings(batches=1024, divergences=8)), tmp_path)
    points = {point["divergence"]: point for point in record["data"]["points"]}
    assert set(fig4.SHOWN) <= set(points)
    for kl, point in points.items():
        for name in fig4.NAMES if kl <= 1 else ("k1", "k2"):  # above, the variance of k3 depends on a few samples
            assert point[f"{name}_variance"] == pytest.approx(point[f"{name}_exact"], rel=0.25), (kl, name, "seed 0")
        assert point["k1_mean"] == pytest.approx(kl, abs=0.02)
        assert point["k3_mean"] == pytest.approx(kl, abs=0.1)
        assert point["k2_mean"] == pytest.approx(kl + kl**2 / 2, rel=0.05)
    assert points[2.0]["k3_exact"] == pytest.approx(49.598, abs=1e-3)
    assert points[2.0]["k1_exact"] == 4
    assert len(record["table"]["rows"]) == len(fig4.SHOWN)


# ------------------------------------------------------------------------------------------------- synthetic runs


def reward(solved: bool, **cost: int) -> dict[str, Any]:
    spent = Cost(**cost)
    return {
        "total": float(solved),
        "score": float(solved),
        "solved": solved,
        "category": "debugging",
        "ending": "final",
        "made": spent.sampled,
        "cost": asdict(spent),
    }


def begin_run(path: Path, evaluation: Mapping[str, Any] | None = None, **rl: Any) -> Run:
    """Start a run that has only its recipe."""
    table = {"model": "./model", "tasks": "./tasks", "steps": 4, "group_size": 2, "groups_per_step": 1, **rl}
    recipe = path.with_suffix(".toml")
    measured = {"evaluation": {"validation": "./held-out", "test": [], **evaluation}} if evaluation else {}
    recipe.write_text(tomli_w.dumps({"name": "small", "stages": ["rl", *measured], "rl": table, **measured}))
    run = Run.create_or_resume(path, load_recipe(recipe))
    RunLayout(path).make()
    return run


def finish_all(queue: RolloutQueue, rewards: Iterable[Mapping[str, Any]], version: int = 0) -> None:
    remaining = iter(rewards)
    while (slot := queue.claim("worker", 0.0)) is not None:
        queue.finish(slot, dict(next(remaining)), f"traces/{slot.id}", (version, version))


def trained_run(path: Path, rollouts: Sequence[Mapping[str, Any]], **rl: Any) -> Path:
    """Make a run that was trained on rollouts with these reward records, two per step."""
    with begin_run(path, **rl), closing(RolloutQueue(RunLayout(path).slots, open_rl_run(path)[1])) as queue:
        for step in range(len(rollouts) // 2):
            queue.add([(f"task-{step}", 0.0)])
            finish_all(queue, rollouts[2 * step : 2 * step + 2], step)
            queue.mark_trained(queue.ready(step), step + 1)
    return path


def open_evaluations(path: Path, samples: int) -> RolloutQueue:
    return RolloutQueue(RunLayout(path).evaluations, evaluation_queue(open_rl_run(path)[1], samples))


def evaluated_run(path: Path, solved: Mapping[int, Sequence[int]], samples: int = 4) -> Path:
    """Make a run evaluated at these steps: `solved` has the number of solved samples of each held-out task."""
    evaluation = {"validation_samples": samples}
    with begin_run(path, evaluation=evaluation) as run, closing(open_evaluations(path, samples)) as queue:
        found = load_evaluation(RunLayout(path))
        assert found is not None
        name = Path(found.validation).name
        for step, counts in solved.items():
            held_out.start(queue, step, [f"{name}/task-{number}" for number in range(len(counts))])
            rewards = [reward(index < count, turns=2) for count in counts for index in range(samples)]
            finish_all(queue, rewards, step)
            run.log("rl", step, evaluation=True, **statistics.summarise(held_out.results(queue, step)))
    return path


# ------------------------------------------------------------------------------------------------- effort penalty


def test_penalty_curves_have_their_check_values(tmp_path: Path) -> None:
    record = written_record("fig6", fig6.fig6(0, quietly), tmp_path)
    rows = {row[0]: row[1:4] for row in record["table"]["rows"]}
    assert rows["1, 2"] == ["0.500", "0.909", "0.990"]
    assert rows["1, 0.5"] == ["0.828", "4.633", "18.100"]
    assert rows["1, 0"] == ["1.000", "10.000", "100.000"]
    for curve in record["data"]["curves"]:
        x, penalty = np.array(record["data"]["x"]), np.array(curve["penalty"])
        assert (np.diff(penalty) > 0).all()
        assert (np.diff(penalty, 2) < 1e-5).all()  # concave, up to the rounding of the record
        assert penalty[-1] == pytest.approx(effort(x[-1], curve["k"], curve["q"]), rel=1e-5)
    assert "run" not in record["data"]


def test_sessions_of_a_run_are_marked_by_its_own_weights(tmp_path: Path) -> None:
    rewards = [
        reward(number % 2 == 0, call=10 * number, output=100, final=5, calls=number, turns=number + 1)
        for number in range(8)
    ]
    run = trained_run(tmp_path / "run", rewards, rewards={"effort_spent": 0.1}, effort={"turn": 0.5, "k": 2.0})
    record = written_record("fig6", fig6.fig6(0, quietly, run=run), tmp_path)
    described = record["data"]["run"]
    weights = fig6.read_sessions(run).weights
    assert (weights.turn, weights.k, described["penalty_counted"]) == (0.5, 2.0, True)
    expected = [effort_units(Cost(**each["cost"]), weights) for each in rewards]
    assert described["units"] == pytest.approx(expected)
    assert described["deciles_of_units"]["50"] == pytest.approx(np.median(expected))
    for word, some in (("solved", expected[::2]), ("not_solved", expected[1::2])):
        assert sum(described["mean_units"][word].values()) == pytest.approx(np.mean(some), rel=1e-5)
    assert "8 sessions of small" in record["conclusion"]


def test_a_run_without_rollouts_has_nothing_to_mark(tmp_path: Path) -> None:
    begin_run(tmp_path / "run").close()
    with pytest.raises(InputError, match="there are no rollouts yet"):
        fig6.fig6(0, quietly, run=tmp_path / "run")
    with pytest.raises(InputError, match="is not a run"):
        fig6.fig6(0, quietly, run=tmp_path / "nowhere")
    assert trained_run(tmp_path / "empty", [])
    with pytest.raises(InputError, match="no rollout has been trained on"):
        fig6.fig6(0, quietly, run=tmp_path / "empty")


# ------------------------------------------------------------------------------------------------- best of K


def test_average_and_best_of_k_are_those_of_the_evaluations(tmp_path: Path) -> None:
    run = evaluated_run(tmp_path / "run", {0: [0, 1, 2, 0, 1, 0], 2: [1, 1, 2, 0, 1, 1], 4: [3, 3, 4, 2, 3, 2]})
    record = written_record("fig5", fig5.fig5(0, quietly, run=run), tmp_path)
    assert record["data"]["k"] == 4
    evaluations = record["data"]["measurements"]
    assert [line["step"] for line in evaluations] == [0, 2, 4]
    assert [line["solved"] for line in evaluations] == pytest.approx([4 / 24, 6 / 24, 17 / 24], rel=1e-5)
    assert [line["best/4"] for line in evaluations] == pytest.approx([3 / 6, 5 / 6, 1.0], rel=1e-5)
    assert record["data"]["rise"]["solved"] == pytest.approx(13 / 24, rel=1e-5)
    assert record["conclusion"].startswith("Over 4 steps of small the average on 6 held-out tasks goes from 16.7% to")
    assert [row[0] for row in record["table"]["rows"]] == ["0", "2", "4"]


def test_fig5_runs_the_recipe_with_more_evaluations() -> None:
    original = load_recipe(recipe_file(fig5.RECIPE))
    changed = load_recipe(recipe_file(fig5.RECIPE), fig5.recipe_overrides(fig5.Fig5Settings(), 7))
    assert {line.split(":")[0] for line in differing_keys(settings_data(original), settings_data(changed))} <= {
        "seed",
        "rl.steps",
        "evaluation.every",
        "evaluation.validation_samples",
        "evaluation.max_tasks",
        "evaluation.models",
        "evaluation.test",
    }
    assert changed.evaluation is not None
    assert changed.evaluation.every == fig5.Fig5Settings().every


def test_one_evaluation_is_not_enough(tmp_path: Path) -> None:
    run = evaluated_run(tmp_path / "run", {0: [1, 2]})
    with pytest.raises(InputError, match=r"has 1 evaluations.*with `every` set"):
        fig5.fig5(0, quietly, run=run)
    with pytest.raises(InputError, match="--set would not be used; leave one of them out"):
        fig5.fig5(0, quietly, fig5.Fig5Settings(steps=3), run=run)
    with pytest.raises(InputError, match="a run to read, or a directory"):
        fig5.fig5(0, quietly)


def test_one_task_is_plotted_without_interval(tmp_path: Path) -> None:
    run = evaluated_run(tmp_path / "run", {0: [1], 4: [2]}, samples=2)
    result = fig5.fig5(0, quietly, run=run)
    written_record("fig5", result, tmp_path)
    assert result.rows[0][1] == "50.0%"
    assert "neither has moved by more than its interval" in result.conclusion


@pytest.mark.parametrize(
    ("average", "best", "words"),
    [
        ((0.1, 0.3), (0.1, 0.4), "both have risen"),
        ((-0.1, 0.3), (-0.1, 0.4), "neither has moved by more than its interval"),
        ((0.1, 0.3), (-0.4, -0.1), "the average has risen, the best has fallen"),
        ((0.1, 0.3), (-0.1, 0.1), "the average has risen, the best has moved by no more than its interval"),
    ],
)
def test_a_change_within_the_interval_is_not_called_a_rise(
    average: tuple[float, float], best: tuple[float, float], words: str
) -> None:
    bounds = {"solved": average, "best/4": best}
    change = {
        f"{key}_{end}": bound for key, both in bounds.items() for end, bound in zip(("low", "high"), both, strict=True)
    }
    assert fig5.describe_change(change, "best/4") == words


# ------------------------------------------------------------------------------------------------- commands


def test_commands_run_and_their_output_is_logged(tmp_path: Path) -> None:
    reported: list[int] = []
    commands = {name: Command(["--version"], tmp_path / f"{name}.log") for name in ("one", "two")}
    seconds = run_commands(commands, lambda done, note: reported.append(done), at_once=2)
    assert set(seconds) == {"one", "two"}
    assert reported[-1] == 2
    assert (tmp_path / "one.log").read_text().startswith("etude ")


def test_a_command_may_be_another_module(tmp_path: Path) -> None:
    run_commands({"help": Command(["--help"], tmp_path / "log", module="etude_nano")})
    assert "--exercises" in (tmp_path / "log").read_text()


def test_a_failed_command_is_reported_with_its_log(tmp_path: Path) -> None:
    command = Command(["recipe", "show", str(tmp_path / "none.toml")], tmp_path / "log")
    with pytest.raises(EtudeError, match=r"(?s)show ended with exit code 2.*none.toml does not exist"):
        run_commands({"show": command})


def test_the_last_metrics_are_a_complete_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert last_metrics(path) is None
    path.write_text('{"stage": "a", "step": 1}\n{"stage": "b", "step": 2}\n{"stage": "c", "st')
    assert last_metrics(path) == {"stage": "b", "step": 2}


# ------------------------------------------------------------------------------------------------- options


def test_a_run_is_refused_by_studies_that_read_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"kl reads no run.*those that do: fig5, fig6"):
        run_study(find_study("kl"), tmp_path, 0, quietly, run=tmp_path)


def test_settings_are_changed_by_name_and_keep_their_type() -> None:
    study = find_study("fig6")
    changed = settings_with_overrides(study, ["qs=[0, 1.5]", "points=11", "max_units=4"])
    assert changed == fig6.Fig6Settings(qs=(0.0, 1.5), points=11, max_units=4.0)
    for wrong in ("point=3", "points", 'points="many"', "points=1.5", "qs=[]", 'qs=["a"]', "qs=1"):
        with pytest.raises(InputError, match="--set"):
            settings_with_overrides(study, [wrong])


def test_the_command_records_the_run_and_the_settings(tmp_path: Path) -> None:
    run = evaluated_run(tmp_path / "run", {0: [1, 2], 4: [2, 3]})
    done = CliRunner().invoke(study_app(find_study("fig5")), ["--run", str(run), "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "fig5.json").read_text())["command"].endswith("--seed 0 --out DIR --run RUN")
    done = CliRunner().invoke(study_app(find_study("fig6")), ["--set", "points=5", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    record = json.loads((tmp_path / "fig6.json").read_text())
    assert record["command"].endswith("--out DIR --set points=5")
    assert record["settings"]["points"] == 5
