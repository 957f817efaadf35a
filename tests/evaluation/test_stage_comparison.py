"""Comparing the models of stages: the best earlier one, verdicts, and sessions that are proper."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from etude.evaluation.held_out import Evaluation
from etude.evaluation.stage_comparison import best_earlier, main_figures, stage_gains, summary_lines
from etude.evaluation.statistics import compare, is_proper, summarise
from etude.rollouts.queue_records import ReadyGroup, Slot
from etude.rollouts.worker import slot_seed

Session = tuple[bool, bool]  # solved, proper


def record(solved: bool, proper: bool, **facts: Any) -> dict[str, Any]:
    ending = {"ending": "final" if proper else "turns", "errors": {}}
    return {"solved": solved, "score": float(solved), "made": 1, "cost": {"turns": 1}, **ending, **facts}


def evaluation(tasks: Sequence[Sequence[Session]], **facts: Any) -> Evaluation:
    groups = []
    for number, sessions in enumerate(tasks):
        slots = [
            Slot(at, number, f"t{number}", at, 1, "ready", reward=record(*session, **facts))
            for at, session in enumerate(sessions)
        ]
        groups.append(ReadyGroup(number, f"t{number}", tuple(slots)))
    return Evaluation(0, tuple(groups))


def constant(solved: float, proper: float, tasks: int = 40, samples: int = 10) -> Evaluation:
    """Return tasks that all have these shares; the sessions that are solved are proper first."""
    each = [(at < round(solved * samples), at < round(proper * samples)) for at in range(samples)]
    return evaluation([each] * tasks)


@pytest.mark.parametrize(
    ("changes", "proper"),
    [
        ({}, True),
        ({"errors": {"environment": 3, "timeout": 1}}, True),
        ({"ending": "length"}, False),
        ({"ending": "turns"}, False),
        *(({"errors": {name: 1}}, False) for name in ("malformed_call", "unknown_tool", "bad_arguments", "denied")),
    ],
)
def test_a_proper_session_has_valid_calls_and_a_final_message(changes: Mapping[str, Any], proper: bool) -> None:
    assert is_proper({"ending": "final", "errors": {}, **changes}) is proper


def test_the_rate_among_proper_sessions_is_a_ratio_over_all_tasks() -> None:
    some = evaluation([[(True, True), (False, True)], [(False, False), (False, False)], [(True, False), (False, True)]])
    figures = summarise(some)
    assert figures["proper"] == pytest.approx((1 + 0 + 0.5) / 3)
    assert figures["proper_solved"] == pytest.approx(1 / 3)
    assert figures["proper_solved_low"] <= 1 / 3 <= figures["proper_solved_high"]
    assert summarise(evaluation([[(True, False)]] * 2))["proper_solved"] is None, "there is none"


def test_the_best_earlier_model_is_chosen_on_validation_only() -> None:
    low, high = constant(0.2, 1.0), constant(0.6, 1.0)
    results = {
        "base": {"validation": high, "new": low},
        "sft": {"validation": low, "new": high},
        "rl": {"validation": high, "new": high},
    }
    assert best_earlier(results, "rl", "validation") == "base"
    assert best_earlier(results, "base", "validation") is None
    (sft, rl) = stage_gains(results, "validation")
    assert (sft["model"], rl["model"], rl["against"]) == ("sft", "rl", "base")
    assert rl["sets"]["new"]["solved"] == pytest.approx(0.4)


def test_rl_is_compared_with_its_control_which_is_no_earlier_model() -> None:
    low, high, best = constant(0.2, 1.0), constant(0.4, 1.0), constant(0.6, 1.0)
    results = {name: {"new": each} for name, each in (("sft", low), ("control", best), ("rl", high))}
    gains = stage_gains(results, "new")
    pairs = [(gain["model"], gain["against"]) for gain in gains]
    assert pairs == [("control", "sft"), ("rl", "sft"), ("rl", "control")]
    assert [gain["sets"]["new"]["solved"] for gain in gains] == pytest.approx([0.4, 0.2, -0.2])
    figures = {model: {"new": main_figures(summarise(sets["new"]))} for model, sets in results.items()}
    text = "\n".join(summary_lines({"models": figures, "gains": gains, "scored": {}, "control": "placebo"}))
    assert "rl against control, placebo:\n  new: a loss; average -20.0" in text


def gain(before: Evaluation, after: Evaluation) -> dict[str, Any]:
    found: dict[str, Any] = stage_gains({"sft": {"new": before}, "rl": {"new": after}}, "new")[0]["sets"]["new"]
    return found


def test_a_gain_of_format_is_called_that() -> None:
    # half as many sessions end properly, and of those every second is solved in both
    assert gain(constant(0.2, 0.4), constant(0.4, 0.8))["verdict"] == "only format or ending"
    assert gain(constant(0.2, 1.0), constant(0.4, 1.0))["verdict"] == "proven"
    assert gain(constant(0.4, 1.0), constant(0.2, 1.0))["verdict"] == "worse"
    mixed = evaluation([[(at % 2 == 0, True)] for at in range(10)])
    other = evaluation([[(at % 2 == 1, True)] for at in range(10)])
    assert gain(mixed, other)["verdict"] == "unproven"
    assert gain(evaluation([[(False, True)]]), evaluation([[(True, True)]]))["verdict"] == "unproven", "one task"


def test_differences_are_paired_by_task() -> None:
    hard, easy = [(False, True)] * 4, [(True, True)] * 4
    before, after = evaluation([hard, easy] * 10), evaluation([[(True, True), *hard[1:]], easy] * 10)
    difference = compare(before, after)
    assert difference["solved"] == pytest.approx(0.125)
    assert difference["solved_low"] > 0, "unpaired, the spread between tasks would hide it"


def test_the_summary_says_it_in_plain_words() -> None:
    results = {"sft": {"new": constant(0.2, 0.4)}, "rl": {"new": constant(0.4, 0.8)}}
    figures = {
        model: {name: main_figures(summarise(each)) for name, each in sets.items()} for model, sets in results.items()
    }
    facts = {"models": figures, "gains": stage_gains(results, "new"), "scored": {"new": 2, "validation": 1}}
    text = "\n".join(summary_lines(facts))
    assert "rl against sft, the best earlier model on validation:" in text
    assert "new: a gain in format or ending only" in text
    assert "among proper sessions +0.0 (+0.0 to +0.0), share of those +40.0 (+40.0 to +40.0) (40 tasks)" in text
    assert text.endswith("scored in this run so far: new 2 times, validation 1 time")


def test_an_evaluation_has_one_seed_per_task_and_sample() -> None:
    def seed(task: str, number: int, group: int = 1, attempt: int = 1) -> int:
        return slot_seed(7, "evaluation", Slot(1, group, task, number, attempt, "starting"))

    assert seed("000000/new/a", 0) == seed("000012/new/a", 0, group=9, attempt=4), "whatever the model and the attempt"
    assert len({seed("000000/new/a", 0), seed("000000/new/a", 1), seed("000000/new/b", 0)}) == 3
    training = [slot_seed(7, "training", Slot(1, 1, "a", 0, attempt, "starting")) for attempt in (1, 2)]
    assert training[0] != training[1]
