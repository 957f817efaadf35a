"""What a run shows of itself: lines of facts, words, a table, and its rollouts."""

import io
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases import case, changed, did
from harness_traces import equal, example
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table

from etude.errors import EtudeError, InputError
from etude.evaluation import held_out
from etude.harness.atif import from_atif
from etude.harness.trace_store import save_trace
from etude.rewards import score
from etude.rl import metrics as observe
from etude.rollouts.queue import Plan, ReadyGroup, Slot, Slots
from etude.runs.layout import Place, statuses, write_status

PLAN = Plan(group_size=2, groups_per_step=2, max_staleness=2, in_flight=100, lease_s=10.0, attempts=2)
TOLD = {
    "groups": [1, 2],
    "version": 5,
    "values": {"loss": -0.1, "entropy_seen": 0.7, "mismatch": 0.01, "ratio": 1.001},
    "gradient_norm": 0.4,
    "mismatch_mean": 0.01,
    "mismatch_p99": 0.05,
    "trained_tokens": 100,
    "tokens": 120,
    "step_s": 2.0,
    "waited_s": 3.0,
    "wall_s": 6.0,
    "upload": [{"bytes": 500, "seconds": 0.2, "full": False, "changed": 20, "values": 1000, "skipped": False}],
}


def said(total: float, **facts: Any) -> dict[str, Any]:
    cost = {"thinking": 10, "call": 6, "final": 4, "output": 30, "prompt": 200, "turns": 3, "calls": 2, "wall_s": 7.0}
    plain = {"total": total, "parts": {"correctness": total}, "hack": "", "score": total, "solved": total >= 1}
    plain |= {"category": "debugging", "ending": "final", "cost": cost, "errors": {}, "pod_s": 1.5, "made": 20}
    return plain | {"seconds": {"ground": 0.5, "session": 7.0, "grading": 0.25}} | facts


def group(*rewards: dict[str, Any], versions: tuple[int, int] = (3, 4), id: int = 1) -> ReadyGroup:
    slots = (Slot(n, id, "t", n, 1, "ready", *versions, reward=reward) for n, reward in enumerate(rewards))
    return ReadyGroup(id, "t", tuple(slots))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    there = Place(tmp_path)
    there.make()
    return there


@pytest.fixture
def slots(place: Place) -> Slots:
    return Slots(place.slots, PLAN)


def fill(slots: Slots, *rewards: dict[str, Any], version: int = 0) -> None:
    for reward in rewards:
        slot = slots.claim("w", 0.0)
        assert slot is not None
        slots.finish(
            slot, reward, f"traces/{slot.group:06d}/{slot.number:02d}-{slot.attempt}.trace", (version, version)
        )


def shown(table: Table) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# ------------------------------------------------------------------------------------------- the line of a step


def test_a_line_says_rewards_by_part_and_category_average_and_best() -> None:
    groups = [
        group(said(1.0, parts={"correctness": 1.0, "effort_spent": -0.25}), said(0.0, category="docs", ending="turns")),
        group(said(0.5), said(0.5, errors={"timeout": 1, "environment": 2})),
        group(said(0.0, parts={}, hack="tests: edited"), said(0.0)),
    ]
    line = observe.rollout_facts(groups)
    assert (line["groups"], line["rollouts"], line["hacks"]) == (3, 6, 1)
    assert line["reward"] == pytest.approx(2 / 6)
    assert line["reward_best"] == pytest.approx(1.5 / 3)
    assert (line["solved"], line["solved_best"]) == pytest.approx((1 / 6, 1 / 3))
    assert line["groups_alike"] == pytest.approx(2 / 3)
    assert line["reward/correctness"] == pytest.approx(2 / 6)
    assert line["reward/effort_spent"] == pytest.approx(-0.25 / 6)
    assert (line["category/docs/rollouts"], line["category/docs/reward"]) == (1, 0.0)
    assert line["category/debugging/solved"] == pytest.approx(1 / 5)
    assert (line["ending/final"], line["ending/turns"]) == pytest.approx((5 / 6, 1 / 6))
    assert (line["tokens/thinking"], line["tokens/output"], line["turns"]) == (10, 30, 3)
    assert (line["errors/timeout"], line["errors/environment"]) == pytest.approx((1 / 12, 2 / 12))
    assert (line["pod_s"], line["seconds/grading"], line["session_s"]) == (1.5, 0.25, 7.0)


@given(st.lists(st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0]), min_size=2, max_size=4), min_size=1, max_size=5))
def test_means_and_bests_are_those_of_the_rewards(totals: list[list[float]]) -> None:
    line = observe.rollout_facts([group(*map(said, row)) for row in totals])
    flat = [total for row in totals for total in row]
    assert line["reward"] == pytest.approx(sum(flat) / len(flat))
    assert line["reward_best"] == pytest.approx(sum(map(max, totals)) / len(totals))
    assert line["groups_alike"] == pytest.approx(sum(len(set(row)) == 1 for row in totals) / len(totals))
    assert line["reward_best"] >= line["reward"] - 1e-12 if len({*map(len, totals)}) == 1 else True


def test_what_nobody_said_is_left_out_and_never_zero() -> None:
    line = observe.rollout_facts([group({"total": 1.0}, {"total": 0.0})])
    assert line.keys() == {"groups", "rollouts", "reward", "reward_std", "reward_best", "groups_alike", "hacks"}
    with pytest.raises(EtudeError, match="is ready: it has no reward"):
        observe.rollout_facts([ReadyGroup(1, "t", (Slot(1, 1, "t", 0, 1, "ready"),))])


def test_staleness_is_from_the_trainer_to_the_oldest_token_and_to_the_newest() -> None:
    groups = [
        group(said(1), said(0), versions=(3, 5)),
        group(said(1), versions=(5, 5)),
        group(said(1), versions=(-1, -1)),
    ]
    line = observe.staleness_facts(groups, 5)
    assert (line["staleness"], line["staleness_max"], line["staleness_newest"]) == (pytest.approx(4 / 3), 2, 0)
    assert (line["staleness/0"], line["staleness/2"]) == pytest.approx((1 / 3, 2 / 3))
    assert line["swapped"] == 0.5


def test_the_trainers_word_is_taken_under_the_lines_names() -> None:
    line = observe.trainer_facts({**TOLD, "waited_for": {"groups": 2.5, "the first measurement": 0.5}})
    assert (line["entropy"], line["ratio"], line["mismatch_p99"], line["gradient_norm"]) == (0.7, 1.001, 0.05, 0.4)
    assert (line["waited_share"], line["waited/groups"]) == (0.5, 2.5)
    assert (line["changed"], line["upload_bytes"]) == (0.02, 500)


def test_idle_seconds_of_samplers_are_between_two_of_their_words() -> None:
    def word(time: float, busy: float) -> dict[str, Any]:
        return {"time": time, "busy_s": busy, "made_tokens": 7}

    first = observe.sampler_facts(
        {"sampler-0": word(100, 50), "sampler-1": word(100, 9), "worker-0": {"time": 1}}, None
    )
    assert "samplers_idle_s" not in first
    second = observe.sampler_facts({"sampler-0": word(104, 53), "sampler-1": word(104, 1)}, first)
    assert (second["samplers_idle_s"], second["samplers_seen_s"]) == (1.0, 4.0)  # sampler-1 is another process
    third = observe.sampler_facts({"sampler-0": word(104, 53), "sampler-1": word(108, 1)}, second)
    assert (third["samplers_idle_s"], third["samplers_seen_s"]) == (4.0, 4.0)


def test_failures_of_the_infrastructure_stand_beside_the_mean_in_their_step(slots: Slots) -> None:
    slots.add([("a", 9), ("b", 8), ("c", 0)])
    slot = slots.claim("w", 0.0)
    assert slot is not None
    slots.fail(slot, "the pod died")
    fill(slots, said(1.0), said(0.0), said(1.0), said(0.0))
    groups = slots.take(0)
    assert groups is not None
    slots.mark_trained(groups, 1)
    first = observe.step_facts(groups, 1, TOLD, {}, slots)
    assert (first["reward"], first["infrastructure/failed"], first["infrastructure/stale"]) == (0.5, 1, 0)
    assert first["infrastructure/mostly"] == "the pod died"
    for _ in range(2):  # of c, one is heard of no more, twice: it is given up
        assert slots.claim("w", 0.0) is not None
        slots.reconcile(50.0, 1)
    second = observe.trouble_facts(slots, 2)
    assert (second["infrastructure/lost"], second["infrastructure/failed"]) == (2, 0)
    assert second["infrastructure/dropped"] == 1
    assert "infrastructure/mostly" not in second
    assert [trouble.number for trouble in slots.troubles() if trouble.kind == "dropped"] == [None]


def test_what_is_sampled_again_for_its_age_is_counted_as_such(slots: Slots) -> None:
    slots.add([("a", 0)])
    fill(slots, said(1.0), said(1.0), version=0)
    assert slots.reconcile(0.0, 3)["stale"] == 2
    assert observe.trouble_facts(slots, 1)["infrastructure/stale"] == 2


def test_a_line_is_flat_and_json(slots: Slots, place: Place) -> None:
    slots.add([("a", 0), ("b", 0)])
    fill(slots, *[said(1.0, habits={"asking": 0.0})] * 4)
    groups = slots.take(0) or []
    slots.mark_trained(groups, 1)
    write_status(place, "sampler-0", busy_s=1.0, made_tokens=9)
    line = observe.step_facts(groups, 1, TOLD, statuses(place), slots)
    assert json.loads(json.dumps(line, allow_nan=False)) == line
    assert all(isinstance(value, int | float | str) for name, value in line.items() if name != "alarms")
    assert not line.keys() & {"time", "stage", "step"}


# ------------------------------------------------------------------------------------------- monitors


def test_a_habit_alarms_once_enough_sessions_have_it_and_a_restart_forgets_none(tmp_path: Path) -> None:
    plan = replace(PLAN, group_size=10, groups_per_step=1)
    path = tmp_path / "s.sqlite"
    asked = case(final="Shall I go on?", changes=())
    edited = case(did("write", path="a.py"), changes=[changed("a.py", "1\n", "2\n")])
    records = [said(0.0, habits=observe.habits(graded, score(graded, {}))) for graded in (asked, edited)]
    assert (records[0]["habits"]["asking"], records[1]["habits"]["asking"]) == (1.0, 0.0)
    assert (records[0]["habits"]["edit_rate"], records[1]["habits"]["edit_rate"]) == (0.0, 1.0)
    alarms = []
    for step in (1, 2, 3):
        slots = Slots(path, plan)
        slots.add([(f"t{step}", 0)])
        fill(slots, *(records[:1] * 4 + records[1:] * 6))
        groups = slots.take(0) or []
        slots.mark_trained(groups, step)
        line = observe.step_facts(groups, step, TOLD, {}, slots)
        assert line["habit/asking"] == pytest.approx(0.4)
        alarms.append(line["alarms"])
        slots.close()
    assert alarms[0] == []  # ten sessions are too few to say
    assert alarms[2] == ["asks instead of doing: 40% of 30 sessions"]
    assert "ALARM asks instead of doing" in observe.line(line)


# ------------------------------------------------------------------------------------------- for people


def test_a_step_in_words() -> None:
    facts = {"reward": 0.4312, "solved": 0.38, "solved_best": 0.71, "staleness_max": 2, "mismatch_p99": 0.0312}
    facts |= {"infrastructure/failed": 1, "infrastructure/lost": 2, "waited_share": 0.25}
    assert observe.line(facts) == "reward 0.431  solved 38%  best 71%  stale 2  mismatch 0.031  waits 25%  3 retried"
    assert observe.line({}) == ""


def test_the_table_shows_services_what_they_wait_for_and_who_fell_silent(place: Place, slots: Slots) -> None:
    slots.add([("a", 0)])
    assert slots.claim("worker-0", 0.0) is not None
    write_status(place, "trainer", state="waiting", waiting_for="groups: 1 [queued], 1 starting", step=3)
    write_status(place, "sampler-0", state="ready", version=4, running=2, tokens_s=31.5)
    write_status(place, "worker-0", state="working", held=[{"slot": 1}])
    write_status(place, "gone", state="working", time=time.time() - 100)
    text = shown(observe.table(place.run))
    assert "groups: 1 [queued], 1 starting" in text
    assert "version 4, running 2, tokens/s 31.5" in text
    assert "1 rollouts" in text
    (gone,) = (row for row in text.splitlines() if row.strip().startswith("gone"))
    assert "silent" in gone
    assert "100 s ago" in gone
    assert "1 queued, 1 starting" in text.splitlines()[-1]
    (place.logs / "deaths.jsonl").write_text(json.dumps({"time": time.time(), "name": "w", "why": "fell"}) + '\n{"ti')
    assert "1, the last: w fell" in shown(observe.table(place.run)).splitlines()[-1]
    with pytest.raises(InputError, match="no reinforcement learning here"):
        observe.table(place.run / "elsewhere")


def test_looking_neither_makes_nor_disturbs_a_table(place: Place, slots: Slots) -> None:
    slots.add([("a", 0)])
    with slots._change() as db:  # somebody is in the middle of a change
        db.execute("UPDATE slots SET state = 'running'")
        looking = Slots.look(place.slots)
        assert looking.counts() == {"queued": 2}
        assert looking.plan.group_size == 2
    assert looking.counts() == {"running": 2}
    with pytest.raises(Exception, match="readonly"):
        looking.add([("b", 0)])
    with pytest.raises(InputError, match="no table of slots"):
        Slots.look(place.evaluations)
    assert not place.evaluations.exists()


def test_a_finished_stage_is_remembered_by_what_it_changed(slots: Slots) -> None:
    metrics: list[dict[str, Any]] = [
        {
            "step": 0,
            "evaluation": True,
            "solved": 0.2,
            "solved_low": 0.1,
            "solved_high": 0.3,
            "best/2": 0.3,
            "best/16": 0.5,
        },
        {"step": 1, "reward": 0.1, "wall_s": 4.0, "waited_s": 1.0, "samplers_idle_s": 1.0, "samplers_seen_s": 4.0},
        {"step": 2, "reward": 0.6, "wall_s": 6.0, "waited_s": 4.0, "staleness_max": 2, "mismatch_p99": 0.1},
        {"step": 2, "evaluation": True, "solved": 0.4, "solved_low": 0.3, "solved_high": None, "best/16": 0.7},
    ]
    facts = observe.stage_facts(metrics, slots, ["sampler-0 ended with signal 9"])
    assert (facts["steps"], facts["reward_first"], facts["reward_last"]) == (2, 0.1, 0.6)
    assert (facts["waited_share"], facts["samplers_idle_share"], facts["deaths"]) == (0.5, 0.25, 1)
    assert facts["before"] == {"step": 0, "solved": 0.2, "solved_low": 0.1, "solved_high": 0.3, "best/16": 0.5}
    assert facts["after"] == {"step": 2, "solved": 0.4, "solved_low": 0.3, "best/16": 0.7}
    assert observe.stage_facts([], slots, [])["steps"] == 0


# ------------------------------------------------------------------------------------------- every rollout


def keep(place: Place, name: str) -> None:
    path = place.root / f"{name}.trace"
    path.parent.mkdir(parents=True, exist_ok=True)
    save_trace(replace(example(), id=name), path)


def test_every_rollout_is_listed_with_what_came_of_it(place: Place, slots: Slots) -> None:
    slots.add([("a", 0), ("b", 0)])
    first = slots.claim("w", 0.0)
    assert first is not None
    keep(place, "traces/000001/00-1")  # saved, and then its worker died before it could say so
    slots.fail(first, "lost")
    fill(slots, said(1.0), said(0.0), said(0.0), said(0.0))
    for name in ("000001/00-2", "000001/01-1", "000002/00-1", "000002/01-1"):
        keep(place, f"traces/{name}")
    slots.mark_trained(slots.take(0) or [], 1)
    evaluations = Slots(place.evaluations, held_out.evaluation_plan(PLAN, 1))
    held_out.begin(evaluations, 4, ["org/c"])
    slot = evaluations.claim("w", 0.0)
    assert slot is not None
    evaluations.finish(slot, said(1.0), "evaluation-traces/000001/00-1.trace", (4, 4))
    keep(place, "evaluation-traces/000001/00-1")
    found = observe.rollouts(place)
    assert [kept.name for kept in found] == [
        "traces/000001/00-1",
        "traces/000001/00-2",
        "traces/000001/01-1",
        "traces/000002/00-1",
        "traces/000002/01-1",
        "evaluation-traces/000001/00-1",
    ]
    assert [(kept.step, kept.reward is None) for kept in found] == [(None, True), *[(1, False)] * 4, (4, False)]
    assert found[-1].task == "org/c"
    row = found[1].row
    assert (row["group"], row["slot"], row["attempt"], row["total"], row["ending"], row["turns"]) == (
        1,
        0,
        2,
        1.0,
        "final",
        3,
    )
    assert [kept.name for kept in observe.rollouts(place, "traces/000002/")] == [kept.name for kept in found[3:5]]
    text = shown(observe.rollouts_table(found))
    assert "sampled again" in text.splitlines()[1]
    assert "org/c" in text.splitlines()[-1]


def test_rollouts_are_exported_as_atif_to_the_bit_with_their_reward(place: Place, slots: Slots, tmp_path: Path) -> None:
    slots.add([("a", 0)])
    fill(slots, said(1.0), said(0.0))
    keep(place, "traces/000001/00-1")
    keep(place, "traces/000001/01-1")
    out = tmp_path / "out"
    assert observe.export_rollouts(observe.rollouts(place), out) == (2, [])
    document = json.loads((out / "traces-000001-00-1.json").read_text(encoding="utf-8"))
    assert document["schema_version"] == "ATIF-v1.8"
    assert document["extra"]["rollout"]["reward"]["total"] == 1.0
    assert equal(from_atif(document), replace(example(), id="traces/000001/00-1"))


def test_a_damaged_rollout_is_named_and_the_others_are_exported(place: Place, slots: Slots, tmp_path: Path) -> None:
    slots.add([("a", 0)])
    fill(slots, said(1.0), said(0.0))
    keep(place, "traces/000001/00-1")
    keep(place, "traces/000001/01-1")
    (damaged,) = place.root.glob("traces/000001/00-1*")
    damaged.write_bytes(damaged.read_bytes()[:40])
    count, problems = observe.export_rollouts(observe.rollouts(place), tmp_path / "out")
    assert count == 1
    assert "00-1" in problems[0]


def test_traces_whose_table_is_lost_are_not_passed_over(place: Place, slots: Slots) -> None:
    slots.add([("a", 0)])
    keep(place, "traces/000001/00-1")
    for path in place.root.glob("slots.sqlite*"):
        path.unlink()
    with pytest.raises(EtudeError, match=r"slots\.sqlite is missing"):
        observe.rollouts(place)
    with pytest.raises(InputError, match="no reinforcement learning here"):
        observe.rollouts(Place(place.run / "nowhere"))
