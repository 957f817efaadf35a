"""The studies, each in miniature: what they leave, what they promise, and the truths their comparisons rest on."""

import json
import random
import string
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from etude.chat.messages import Call, Message
from etude.errors import InputError
from etude.evaluation.plot import Axis, Bars, Line, Mark, Panel, Scale, draw, nice_step
from etude.harness.session import Budget
from etude.harness.summary import SummaryMode
from etude.harness.trace import Trace
from studies import kl, length, replay, std, summary
from studies.cli import app
from studies.study import Finding, Study, find_study, known_studies, leave, shortened, study
from studies.toy_dialect import CONTROL, Shorthand
from studies.toy_policy import Lockstep, initialize, one_thread, tiny_config
from studies.toy_tasks import LOOK, Errand, Rules, demonstrate, errand_dialect, note, play

patient = settings(deadline=None)  # a busy machine is no failure
SHORTHAND = Shorthand(["look", "a is 3"])
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    with one_thread():
        yield


def quietly(done: int, total: int, note: str = "") -> None:
    """A report that nobody reads."""


def asked(name: str, tmp_path: Path, chosen_settings: Any, seed: int = 0) -> dict[str, Any]:
    """What a study leaves behind."""
    chosen = find_study(name)
    finding = chosen.ask(seed, quietly, chosen_settings)
    leave(chosen, finding, tmp_path, seed, 1.0)
    record: dict[str, Any] = json.loads((tmp_path / f"{name}.json").read_text())
    picture = ElementTree.fromstring((tmp_path / f"{name}.svg").read_text())
    assert picture.find(f"{SVG}title") is not None
    assert record["command"] == f"etude reproduce {name} --seed {seed} --out DIR"
    assert record["conclusion"] == finding.conclusion
    assert all(len(row) == len(finding.columns) for row in finding.rows)
    return record


# ------------------------------------------------------------------------------------------------- the studies


def test_division_by_the_deviation_turns_a_policy_against_what_pays(tmp_path: Path) -> None:
    small = std.Settings(steps=8, replicas=1, fine_tuning_steps=30)
    record = asked("std", tmp_path, small)
    checked = {name: [point["checked"] for point in runs[0]] for name, runs in record["data"]["curves"].items()}
    assert checked[std.OFF][-1] > checked[std.OFF][0] > checked[std.ON][-1], "seed 0"
    plain, divided = (record["data"]["largest_advantage"][name] for name in (std.OFF, std.ON))
    assert max(plain[:3]) < 1e-3 < 1 < min(divided[1:])


def test_k1_as_a_loss_has_no_gradient_and_in_the_reward_the_true_one(tmp_path: Path) -> None:
    small = kl.Settings(draws=400_000, steps=5, rollouts=64, estimates=20, checks=(16, 512))
    record = asked("kl", tmp_path, small)
    gradients = record["data"]["gradients"]
    truth = gradients["truth"]["norm"]
    assert gradients["k1 as a loss"]["norm"] < 1e-4 * truth
    assert gradients["k1 in the reward"]["norm"] == pytest.approx(truth, rel=1e-3)
    assert gradients["k1 in the reward"]["cosine"] == pytest.approx(1, abs=1e-4)
    norms = record["data"]["mean_gradient_norms"]
    assert norms["k1 as a loss"][-1] < norms["k1 in the reward"][-1] / 2
    assert all(point["k3_mean"] == pytest.approx(point["divergence"], abs=1e-3) for point in record["data"]["drift"])
    assert kl.crossed(record["data"]["gaussians"]) == pytest.approx(kl.CROSSING, abs=0.05)


def test_replay_of_all_is_exact_and_a_filter_of_one_is_no_replay(tmp_path: Path) -> None:
    small = replay.Settings(
        layers=2, pretraining_steps=12, steps_behind=2, sequences=12, made=16, sweep=(0.0, 0.5, 1.0)
    )
    record = asked("replay", tmp_path, small)
    for situation in record["data"]["mismatch"].values():
        assert situation[replay.REPLAY]["differing"] == 0
        assert situation["sweep"][0] == situation[replay.REPLAY]
        assert situation["sweep"][-1] == situation[replay.NONE]
    assert record["data"]["mismatch"][replay.ROUNDING][replay.REPLAY]["p99"] < 0.2


def test_the_length_study_leaves_its_curves(tmp_path: Path) -> None:
    small = length.Settings(lessons=3, fine_tuning_steps=2, demonstrations=6, steps=2, groups=3, group_size=4)
    record = asked("length", tmp_path, small)
    assert [len(points) for points in record["data"]["curves"].values()] == [2, 2]
    assert record["data"]["least_tokens_per_solved"] > 0


def test_the_summary_study_leaves_its_curves(tmp_path: Path) -> None:
    small = summary.Settings(lessons=3, fine_tuning_steps=2, demonstrations=8, steps=2, groups=2, group_size=4)
    record = asked("summary", tmp_path, small)
    assert list(record["data"]["curves"]) == [summary.TRAINED, summary.MASKED, summary.COMPACTED]


def test_the_same_seed_gives_the_same_numbers_and_another_seed_others() -> None:
    small = length.Settings(lessons=2, fine_tuning_steps=2, demonstrations=6, steps=2, groups=3, group_size=4)
    first, again, other = (length.length(seed, quietly, small).data["curves"] for seed in (4, 4, 5))
    assert first == again
    assert first != other


@pytest.mark.slow
def test_a_penalty_shortens_and_does_not_cost_success(tmp_path: Path) -> None:
    record = asked("length", tmp_path, length.Settings(steps=20))
    off, on = (record["data"]["curves"][name][-1] for name in (length.OFF, length.ON))
    assert on["tokens_per_solved"] < off["tokens_per_solved"] - 2, "seed 0"
    assert on["success"] > off["success"] - 0.05, "seed 0"


@pytest.mark.slow
def test_the_final_reward_teaches_what_to_keep(tmp_path: Path) -> None:
    record = asked("summary", tmp_path, summary.Settings(steps=16))
    curves = record["data"]["curves"]
    trained, masked, compacted = (curves[name][-1]["success"] for name in summary.MODES)
    assert trained > max(masked, compacted) + 0.3, "seed 0"


# ------------------------------------------------------------------------------------------------- what they rest on


def demonstrated(mode: SummaryMode) -> Trace:
    """An expert's session of five notes: two summaries."""
    luck = random.Random(0)
    rules = summary.rules_of(mode, summary.Settings())
    (trace,) = demonstrate([summary.errand(luck, 5)], summary.careless(luck), summary.DIALECT, rules)
    return trace


def test_the_final_advantage_is_on_summaries_unless_they_are_masked() -> None:
    trace = demonstrated("self")
    spans = [(step.segment, step.span) for step in trace.steps if step.kind == "summary"]
    assert len(spans) == 2
    whole, masked = (summary.taught(trace, 0.5, masked=masked) for masked in (False, True))
    assert all((piece.worths == 0.5).all() for piece in whole)
    for number, piece in enumerate(masked):
        made = np.flatnonzero(piece.segment.made)
        inside = {place for segment, span in spans if segment == number for place in range(*span)}
        assert [worth == 0 for worth in piece.worths] == [place in inside for place in made]


def test_compactions_are_trained_on_by_nobody() -> None:
    trace = demonstrated("compaction")
    kinds = [segment.kind for segment in trace.segments]
    assert kinds.count("compaction") == 2
    assert [piece.segment.kind for piece in summary.taught(trace, 0.5, masked=False)] == [
        kind for kind in kinds if kind != "compaction"
    ]


def test_a_longer_session_is_worth_less_only_with_a_penalty() -> None:
    errands = length.errands_of(1, random.Random(0), length.Settings())

    def after(looks: int) -> Trace:
        expert = lambda task: lambda read: task.answer if read.count("<tool>") >= looks else ""  # noqa: E731
        return demonstrate(errands, expert, length.DIALECT, length.RULES)[0]

    shortest, longer = after(1), after(3)
    assert length.reward(errands[0], shortest, 0.0) == length.reward(errands[0], longer, 0.0) == 1.0
    assert length.reward(errands[0], shortest, 0.1) > length.reward(errands[0], longer, 0.1)


def test_sessions_in_lockstep_are_the_same_every_time() -> None:
    dialect = errand_dialect()
    model = initialize(tiny_config(len(dialect)), 3)
    rules = Rules(Budget(turns=4, answer=6))
    errands = [Errand("Find a", [note("a", value)], note("a", value)) for value in range(8)]
    first, again = (play(errands, Lockstep(model), dialect, rules, 5) for _ in range(2))
    for one, other in zip(first, again, strict=True):
        assert [s.tokens.tolist() for s in one.segments] == [s.tokens.tolist() for s in other.segments]
        assert [s.logprobs.tolist() for s in one.segments] == [s.logprobs.tolist() for s in other.segments]


def test_an_engine_that_fails_leaves_no_session_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    dialect = errand_dialect()
    policy = Lockstep(initialize(tiny_config(len(dialect)), 0))

    def broken() -> bool:
        raise RuntimeError("out of pages")

    monkeypatch.setattr(policy.engine, "step", broken)
    with pytest.raises(RuntimeError, match="out of pages"):
        play([Errand("Find a", [note("a", 1)], "")], policy, dialect, Rules(Budget(turns=2)), 0)


@patient
@given(st.text(string.printable[:95] + "\n"))
def test_shorthand_reads_back_what_it_wrote_and_no_text_is_a_control_token(text: str) -> None:
    tokens = SHORTHAND.encode(text)
    assert SHORTHAND.decode(tokens) == text
    assert all(token >= len(CONTROL) for token in tokens)


@patient
@given(st.text(string.ascii_letters + " ", max_size=12), st.integers(0, 3))
def test_an_answer_in_shorthand_means_what_was_written(text: str, calls: int) -> None:
    wanted = Message("assistant", text, calls=tuple(Call("look", {}, f"call_{n}") for n in range(calls)))
    tokens = SHORTHAND.write(wanted)
    answer = SHORTHAND.parse(tokens, [LOOK])
    assert answer.closed
    assert answer.text == text
    assert [(call.name, call.status) for call in answer.calls] == [("look", "ok")] * calls
    assert answer.call_tokens + answer.text_tokens == len(tokens)
    assert SHORTHAND.parse(tokens[:-1], [LOOK]).closed is False


def test_a_call_of_something_else_is_told_so() -> None:
    (call,) = SHORTHAND.parse([SHORTHAND.call, *SHORTHAND.encode("jump"), SHORTHAND.end], [LOOK]).calls
    assert (call.status, call.arguments) == ("unknown_tool", None)


# ------------------------------------------------------------------------------------------------- names and files


def test_every_study_has_a_name_and_a_question() -> None:
    assert set(known_studies()) >= {"std", "kl", "length", "summary", "replay"}
    assert all(each.question.endswith("?") for each in known_studies().values())
    with pytest.raises(InputError, match=r"nonsense.*there are .*kl, length"):
        find_study("nonsense")
    with pytest.raises(InputError, match="two of the name std"):
        study("std")(std.std)


def test_the_command_lists_the_studies_and_leaves_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(seed: int, report: Any) -> Finding:
        panel = Panel(Axis("x"), Axis("y"), [Line("", [0, 1], [seed, 2])])
        return Finding("A title", f"It is {seed}.", ("a", "b"), [("1", "2")], [panel], {"x": 1 / 3}, kl.Settings())

    monkeypatch.setitem(known_studies.__globals__["STUDIES"], "trial", Study("trial", "Is it?", ask))
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).output
    assert "std: Advantages divided" in shown
    assert "trial: Is it?" in shown
    result = CliRunner().invoke(app, ["trial", "--out", str(tmp_path), "--seed", "7"])
    assert result.exit_code == 0, result.output
    assert "It is 7." in result.output
    assert "seed 7" in result.output
    record = json.loads((tmp_path / "trial.json").read_text())
    assert (record["seed"], record["data"]) == (7, {"x": 0.333333})
    assert (tmp_path / "trial.svg").exists()


def test_numbers_that_are_none_are_none_in_the_record() -> None:
    assert shortened({"a": [1.23456789, float("nan")], "b": (2, float("inf"))}) == {
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


@patient
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


@patient
@given(st.floats(-1e5, 1e5), st.floats(1e-4, 1e5), st.booleans())
@example(1e-12, 0.0625, True)
def test_ticks_are_few_and_round_and_on_the_axis(low: float, span: float, log: bool) -> None:
    low = abs(low) + 1e-3 if log else low
    scale = Scale(Axis("x", log=log), low, low * (1 + span) if log else low + span, 0.0, 100.0)
    ticks = scale.ticks()
    assert len(ticks) <= 12
    assert all(-1e-6 <= scale.at(tick) <= 100 + 1e-6 for tick in ticks)
    assert len({scale.name(tick) for tick in ticks}) == len(ticks)


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
