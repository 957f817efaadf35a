"""The studies kl, std, length, replay and summary at small size, the toy policies they use, and the plots they draw."""

import json
import random
import runpy
import string
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from etude.chat.messages import Message, ToolCall
from etude.errors import InputError
from etude.evaluation.plot import Axis, Bars, Line, Mark, Panel, Scale, draw, nice_step
from etude.harness.budget import Budget
from etude.harness.summary import SummaryMode
from etude.harness.trace import Trace
from studies import kl, length, replay, std, summary
from studies.cli import list_app, study_app
from studies.study import Study, StudyResult, find_study, known_studies, round_numbers, study, write_result
from studies.toy_dialect import CONTROL, ToyDialect
from studies.toy_policy import LockstepPolicy, initialize, one_thread, toy_config
from studies.toy_tasks import (
    LOOK_TOOL,
    ToySessionSettings,
    ToyTask,
    note,
    run_demonstrations,
    run_sessions,
    toy_task_dialect,
)

no_deadline = settings(deadline=None)  # a busy machine is no failure
DIALECT = ToyDialect(["look", "a is 3"])
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    with one_thread():
        yield


def quietly(done: int, total: int, note: str = "") -> None:
    """A progress callback that does nothing."""


def study_record(name: str, tmp_path: Path, chosen_settings: Any, seed: int = 0) -> dict[str, Any]:
    """Run a study and return the record it writes."""
    chosen = find_study(name)
    result = chosen.function(seed, quietly, chosen_settings)
    write_result(chosen, result, tmp_path, seed, 1.0)
    record: dict[str, Any] = json.loads((tmp_path / f"{name}.json").read_text())
    picture = ElementTree.fromstring((tmp_path / f"{name}.svg").read_text())
    assert picture.find(f"{SVG}title") is not None
    assert record["command"] == f"python -m studies.{name} --seed {seed} --out DIR"
    assert record["conclusion"] == result.conclusion
    assert all(len(row) == len(result.columns) for row in result.rows)
    return record


# ------------------------------------------------------------------------------------------------- studies


def test_dividing_by_the_standard_deviation_unlearns_what_pays(tmp_path: Path) -> None:
    small = std.StdSettings(steps=8, replicas=1, fine_tuning_steps=30)
    record = study_record("std", tmp_path, small)
    checked = {name: [point["checked"] for point in runs[0]] for name, runs in record["data"]["curves"].items()}
    assert checked[std.OFF][-1] > checked[std.OFF][0] > checked[std.ON][-1], "seed 0"
    plain, divided = (record["data"]["largest_advantage"][name] for name in (std.OFF, std.ON))
    assert max(plain[:3]) < 1e-3 < 1 < min(divided[1:])


def test_k1_as_a_loss_has_no_gradient_and_in_the_reward_the_exact_one(tmp_path: Path) -> None:
    small = kl.KlSettings(draws=400_000, steps=5, rollouts=64, estimates=20, gradient_samples=(16, 512))
    record = study_record("kl", tmp_path, small)
    gradients = record["data"]["gradients"]
    truth = gradients["truth"]["norm"]
    assert gradients["k1 as a loss"]["norm"] < 1e-4 * truth
    for right in ("k1 in the reward", "k3 for later tokens in the reward"):
        assert gradients[right]["norm"] == pytest.approx(truth, rel=1e-3)
        assert gradients[right]["cosine"] == pytest.approx(1, abs=1e-4)
    assert gradients["k3 for the token too in the reward"]["cosine"] < 0.9
    norms = record["data"]["mean_gradient_norms"]
    assert norms["k1 as a loss"][-1] < norms["k1 in the reward"][-1] / 2
    assert all(point["k3_mean"] == pytest.approx(point["divergence"], abs=1e-3) for point in record["data"]["drift"])
    assert kl.variance_crossing(record["data"]["gaussians"]) == pytest.approx(kl.CROSSING, abs=0.05)


def test_full_replay_is_exact_and_a_filter_of_one_is_no_replay(tmp_path: Path) -> None:
    small = replay.ReplaySettings(
        layers=2, pretraining_steps=12, steps_behind=2, sequences=12, new_tokens=16, sweep=(0.0, 0.5, 1.0)
    )
    record = study_record("replay", tmp_path, small)
    for situation in record["data"]["mismatch"].values():
        assert situation[replay.REPLAY]["differing"] == 0
        assert situation["sweep"][0] == situation[replay.REPLAY]
        assert situation["sweep"][-1] == situation[replay.NO_REPLAY]
    assert record["data"]["mismatch"][replay.ROUNDING][replay.REPLAY]["p99"] < 0.2


def test_the_length_study_records_its_curves(tmp_path: Path) -> None:
    small = length.LengthSettings(
        pretraining_steps=3, fine_tuning_steps=2, demonstrations=6, steps=2, groups=3, group_size=4
    )
    record = study_record("length", tmp_path, small)
    assert [len(points) for points in record["data"]["curves"].values()] == [2, 2]
    assert record["data"]["least_tokens_per_solved"] > 0


def test_the_summary_study_records_its_curves(tmp_path: Path) -> None:
    small = summary.SummaryStudySettings(
        pretraining_steps=3, fine_tuning_steps=2, demonstrations=8, steps=2, groups=2, group_size=4
    )
    record = study_record("summary", tmp_path, small)
    assert list(record["data"]["curves"]) == [summary.TRAINED, summary.MASKED, summary.COMPACTED]


def test_the_same_seed_gives_the_same_numbers_and_another_seed_others() -> None:
    small = length.LengthSettings(
        pretraining_steps=2, fine_tuning_steps=2, demonstrations=6, steps=2, groups=3, group_size=4
    )
    first, again, other = (length.length(seed, quietly, small).data["curves"] for seed in (4, 4, 5))
    assert first == again
    assert first != other


@pytest.mark.slow
def test_a_penalty_shortens_and_does_not_cost_success(tmp_path: Path) -> None:
    record = study_record("length", tmp_path, length.LengthSettings(steps=20))
    off, on = (record["data"]["curves"][name][-1] for name in (length.OFF, length.ON))
    assert on["tokens_per_solved"] < off["tokens_per_solved"] - 2, "seed 0"
    assert on["success"] > off["success"] - 0.05, "seed 0"


@pytest.mark.slow
def test_the_final_reward_trains_what_summaries_keep(tmp_path: Path) -> None:
    record = study_record("summary", tmp_path, summary.SummaryStudySettings(steps=16))
    curves = record["data"]["curves"]
    trained, masked, compacted = (curves[name][-1]["success"] for name in summary.MODES)
    assert trained > max(masked, compacted) + 0.3, "seed 0"


# ------------------------------------------------------------------------------------------------- toy tasks


def demonstrated(mode: SummaryMode) -> Trace:
    """Return a demonstration with five notes, which has two summaries."""
    rng = random.Random(0)
    session = summary.session_settings(mode, summary.SummaryStudySettings())
    (trace,) = run_demonstrations([summary.draw_task(rng, 5)], summary.demonstrator(rng), summary.DIALECT, session)
    return trace


def test_the_final_advantage_is_on_summaries_unless_they_are_masked() -> None:
    trace = demonstrated("self")
    spans = [(step.segment, step.span) for step in trace.steps if step.kind == "summary"]
    assert len(spans) == 2
    whole, masked = (summary.trained_sequences(trace, 0.5, masked=masked) for masked in (False, True))
    assert all((sequence.token_advantages == 0.5).all() for sequence in whole)
    for number, sequence in enumerate(masked):
        sampled = np.flatnonzero(sequence.segment.sampled)
        inside = {position for segment, span in spans if segment == number for position in range(*span)}
        assert [value == 0 for value in sequence.token_advantages] == [position in inside for position in sampled]


def test_compactions_are_not_trained_on() -> None:
    trace = demonstrated("compaction")
    kinds = [segment.kind for segment in trace.segments]
    assert kinds.count("compaction") == 2
    assert [each.segment.kind for each in summary.trained_sequences(trace, 0.5, masked=False)] == [
        kind for kind in kinds if kind != "compaction"
    ]


def test_a_longer_session_scores_lower_only_with_a_penalty() -> None:
    tasks = length.draw_tasks(1, random.Random(0), length.LengthSettings())

    def after(looks: int) -> Trace:
        demonstrator = lambda task: lambda context: task.answer if context.count("<tool>") >= looks else ""  # noqa: E731
        return run_demonstrations(tasks, demonstrator, length.DIALECT, length.SESSION)[0]

    shortest, longer = after(1), after(3)
    assert length.reward(tasks[0], shortest, 0.0) == length.reward(tasks[0], longer, 0.0) == 1.0
    assert length.reward(tasks[0], shortest, 0.1) > length.reward(tasks[0], longer, 0.1)


def test_sessions_in_lockstep_are_the_same_every_time() -> None:
    dialect = toy_task_dialect()
    model = initialize(toy_config(len(dialect)), 3)
    session = ToySessionSettings(Budget(turns=4, max_turn_tokens=6))
    tasks = [ToyTask("Find a", [note("a", value)], note("a", value)) for value in range(8)]
    first, again = (run_sessions(tasks, LockstepPolicy(model), dialect, session, 5) for _ in range(2))
    for one, other in zip(first, again, strict=True):
        assert [s.tokens.tolist() for s in one.segments] == [s.tokens.tolist() for s in other.segments]
        assert [s.logprobs.tolist() for s in one.segments] == [s.logprobs.tolist() for s in other.segments]


def test_an_engine_that_fails_leaves_no_session_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    dialect = toy_task_dialect()
    policy = LockstepPolicy(initialize(toy_config(len(dialect)), 0))

    def broken() -> bool:
        raise RuntimeError("out of pages")

    monkeypatch.setattr(policy.engine, "step", broken)
    with pytest.raises(RuntimeError, match="out of pages"):
        run_sessions([ToyTask("Find a", [note("a", 1)], "")], policy, dialect, ToySessionSettings(Budget(turns=2)), 0)


@no_deadline
@given(st.text(string.printable[:95] + "\n"))
def test_the_toy_dialect_decodes_what_it_encoded_and_no_text_is_a_control_token(text: str) -> None:
    tokens = DIALECT.encode(text)
    assert DIALECT.decode(tokens) == text
    assert all(token >= len(CONTROL) for token in tokens)


@no_deadline
@given(st.text(string.ascii_letters + " ", max_size=12), st.integers(0, 3))
def test_the_toy_dialect_parses_what_it_wrote(text: str, calls: int) -> None:
    message = Message("assistant", text, calls=tuple(ToolCall("look", {}, f"call_{n}") for n in range(calls)))
    tokens = DIALECT.write(message)
    turn = DIALECT.parse(tokens, [LOOK_TOOL])
    assert turn.closed
    assert turn.text == text
    assert [(call.name, call.status) for call in turn.calls] == [("look", "ok")] * calls
    assert turn.call_tokens + turn.text_tokens == len(tokens)
    assert DIALECT.parse(tokens[:-1], [LOOK_TOOL]).closed is False


def test_a_call_of_an_unknown_tool_is_marked() -> None:
    (call,) = DIALECT.parse([DIALECT.call, *DIALECT.encode("jump"), DIALECT.end], [LOOK_TOOL]).calls
    assert (call.status, call.arguments) == ("unknown_tool", None)


# ------------------------------------------------------------------------------------------------- registry and files


def test_every_study_has_a_name_and_a_question() -> None:
    assert set(known_studies()) >= {"std", "kl", "length", "summary", "replay"}
    assert all(each.question.endswith("?") for each in known_studies().values())
    with pytest.raises(InputError, match=r"nonsense.*there are .*kl, length"):
        find_study("nonsense")
    with pytest.raises(InputError, match="two studies have the name std"):
        study("std")(std.std)


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_the_list_names_every_study(arguments: list[str]) -> None:
    shown = CliRunner().invoke(list_app(), arguments, env={"COLUMNS": "200"}).output
    assert all(f"{name}: " in shown for name in known_studies())
    assert "std: Advantages divided" in shown
    assert "python -m studies.NAME --out DIR" in shown


def test_the_command_of_a_study_writes_its_files(tmp_path: Path) -> None:
    def function(seed: int, progress: Any) -> StudyResult:
        panel = Panel(Axis("x"), Axis("y"), [Line("", [0, 1], [seed, 2])])
        return StudyResult(
            "A title", f"It is {seed}.", ("a", "b"), [("1", "2")], [panel], {"x": 1 / 3}, kl.KlSettings()
        )

    app = study_app(Study("trial", "Is it?", function))
    assert "Is it?" in CliRunner().invoke(app, ["--help"]).output
    result = CliRunner().invoke(app, ["--out", str(tmp_path), "--seed", "7"])
    assert result.exit_code == 0, result.output
    assert "It is 7." in result.output
    assert "seed 7" in result.output
    record = json.loads((tmp_path / "trial.json").read_text())
    assert (record["seed"], record["data"]) == (7, {"x": 0.333333})
    assert (tmp_path / "trial.svg").exists()


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("name", ["kl", "std", "length", "replay", "summary", "fig4", "fig5", "fig6"])
def test_every_study_module_runs_its_study(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [f"studies.{name}", "--help"])
    with pytest.raises(SystemExit) as stopped, redirect_stdout(StringIO()) as shown:
        runpy.run_module(f"studies.{name}", run_name="__main__")
    assert stopped.value.code == 0
    assert f"{name}.json" in shown.getvalue()


def test_an_error_is_printed_without_a_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "studies.fig4", "--out", str(tmp_path), "--set", "steps=1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == InputError.exit_code
    assert "studies: --set steps=1: expected KEY=VALUE" in done.stderr
    assert "Traceback" not in done.stderr


def test_numbers_are_rounded_and_those_that_are_not_finite_are_null() -> None:
    assert round_numbers({"a": [1.23456789, float("nan")], "b": (2, float("inf"))}) == {
        "a": [1.23457, None],
        "b": [2, None],
    }


# ------------------------------------------------------------------------------------------------- plots


def line_panel(**changes: Any) -> Panel:
    given = {"x": Axis("x"), "y": Axis("y"), "series": [Line("one", [0, 1, 2], [1.0, 3.0, 2.0])]} | changes
    return Panel(**given)


def test_a_plot_is_xml_with_a_title_a_description_and_its_labels() -> None:
    panel = line_panel(
        title="a < b & c",
        series=[Line("one", [0, 1], [1, 2], [0, 1], [2, 3], "both"), Line("two", [0, 1], [2, 1], style="dashed")],
        marks=[Mark(0.5, "here"), Mark(1.5, "there", across="y")],
    )
    text = draw([panel], title="Title <&>", description="What it shows.")
    picture = ElementTree.fromstring(text)
    assert picture.findtext(f"{SVG}title") == "Title <&>"
    assert picture.findtext(f"{SVG}desc") == "What it shows."
    words = {found.text for found in picture.iter(f"{SVG}text")}
    assert {"Title <&>", "a < b & c", "x", "y", "one", "two", "here", "there"} <= words
    assert text == draw([panel], title="Title <&>", description="What it shows.")


NUMBERS = st.floats(-1e6, 1e6, allow_subnormal=False)


@no_deadline
@given(
    st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=20),
    st.booleans(),
)
@example([(0.0, 0.0), (0.0, 2.3e-308)], False)
@example([(0.0, 1.0), (0.0, 2.3e-308)], True)
def test_points_lie_between_the_axes(points: list[tuple[float, float]], log: bool) -> None:
    if log and not any(y > 0 for _, y in points):
        points = [*points, (0.0, 1.0)]
    x, y = zip(*points, strict=True)
    text = draw([line_panel(y=Axis("y", log=log), series=[Line("", x, y, style="points")])], title="t", description="d")
    for circle in ElementTree.fromstring(text).iter(f"{SVG}circle"):
        assert -0.1 <= float(circle.attrib["cx"]) <= 340.1
        assert -0.1 <= float(circle.attrib["cy"]) <= 210.1


@no_deadline
@given(st.floats(-1e5, 1e5), st.floats(1e-4, 1e5), st.booleans())
@example(1e-12, 0.0625, True)
def test_ticks_are_few_and_round_and_on_the_axis(low: float, span: float, log: bool) -> None:
    low = abs(low) + 1e-3 if log else low
    scale = Scale(Axis("x", log=log), low, low * (1 + span) if log else low + span, 0.0, 100.0)
    ticks = scale.ticks()
    assert len(ticks) <= 12
    assert all(-1e-6 <= scale.at(tick) <= 100 + 1e-6 for tick in ticks)
    assert len({scale.tick_label(tick) for tick in ticks}) == len(ticks)


@pytest.mark.parametrize(("raw", "nice"), [(0.9, 1), (1.0, 1), (1.1, 2), (3, 5), (6, 10), (0.023, 0.05)])
def test_steps_are_one_two_or_five(raw: float, nice: float) -> None:
    assert nice_step(raw) == pytest.approx(nice)


def test_a_gap_breaks_a_line_and_bars_stand_on_the_floor() -> None:
    gap = draw([line_panel(series=[Line("", range(4), [1, float("nan"), 2, 3])])], title="t", description="d")
    assert sum("stroke-linejoin" in part for part in gap.splitlines()) == 2
    bars = Panel(Axis(""), Axis("y"), [Bars("b", [1.0, 2.0])], categories=["p", "q"])
    rects = [r for r in ElementTree.fromstring(draw([bars], title="t", description="d")).iter(f"{SVG}rect") if len(r)]
    assert {float(r.attrib["y"]) + float(r.attrib["height"]) for r in rects} == {210.0}


@pytest.mark.parametrize(
    "make",
    [
        lambda: line_panel(series=[Line("", [1, 2], [1])]),
        lambda: line_panel(series=[Line("", [1, 2], [1, 2], low=[0, 0])]),
        lambda: draw([line_panel(series=[Line("", [1], [-1])], y=Axis("y", log=True))], title="", description=""),
        lambda: draw([], title="", description=""),
    ],
)
def test_what_cannot_be_drawn_is_refused(make: Any) -> None:
    with pytest.raises(InputError, match="plot"):
        make()
