"""Metrics of an RL run: step records, progress record, health table, and the list of rollouts."""

import io
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases import case, changed, did
from harness_traces import example
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table

from etude.errors import EtudeError, InputError
from etude.evaluation import held_out
from etude.harness.atif import to_atif
from etude.harness.trace_store import save_trace
from etude.rewards import score
from etude.rewards.monitors import behaviour_rates
from etude.rl import metrics
from etude.rl.health import health_table
from etude.rollouts.listing import export_rollouts, list_rollouts, rollouts_table
from etude.rollouts.queue import RolloutQueue
from etude.rollouts.queue_records import ReadyGroup, Slot
from etude.rollouts.settings import QueueSettings, evaluation_queue
from etude.runs.layout import RunLayout
from etude.runs.service_status import write_copy

SETTINGS = QueueSettings(group_size=2, groups_per_step=2, max_staleness=2, in_flight=100, lease_s=10.0, max_attempts=2)
STEP_FACTS = {
    "groups": [1, 2],
    "version": 5,
    "values": {"loss": -0.1, "entropy_seen": 0.7, "mismatch": 0.01, "ratio": 1.001},
    "gradient_norm": 0.4,
    "mismatch_numerics_mean": 0.01,
    "mismatch_numerics_p99": 0.05,
    "mismatch_staleness_p99": 0.2,
    "trained_tokens": 100,
    "tokens": 120,
    "step_s": 2.0,
    "waited_s": 3.0,
    "wall_s": 6.0,
    "upload": [{"bytes": 500, "seconds": 0.2, "full": False, "changed": 20, "values": 1000, "skipped": False}],
}


def reward(total: float, **facts: Any) -> dict[str, Any]:
    cost = {"thinking": 10, "call": 6, "final": 4, "output": 30, "prompt": 200, "turns": 3, "calls": 2, "wall_s": 7.0}
    plain = {"total": total, "parts": {"correctness": total}, "hack": "", "score": total, "solved": total >= 1}
    plain |= {"category": "debugging", "ending": "final", "cost": cost, "errors": {}, "pod_s": 1.5, "made": 20}
    return plain | {"seconds": {"ground": 0.5, "session": 7.0, "grading": 0.25}} | facts


def group(*rewards: dict[str, Any], versions: tuple[int, int] = (3, 4), id: int = 1) -> ReadyGroup:
    slots = (Slot(n, id, "t", n, 1, "ready", *versions, reward=reward) for n, reward in enumerate(rewards))
    return ReadyGroup(id, "t", tuple(slots))


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    there = RunLayout(tmp_path)
    there.make()
    return there


@pytest.fixture
def queue(layout: RunLayout) -> RolloutQueue:
    return RolloutQueue(layout.slots, SETTINGS)


def fill(queue: RolloutQueue, *rewards: dict[str, Any], version: int = 0) -> None:
    for reward in rewards:
        slot = queue.claim("w", 0.0)
        assert slot is not None
        queue.finish(
            slot, reward, f"traces/{slot.group:06d}/{slot.number:02d}-{slot.attempt}.trace", (version, version)
        )


def shown(table: Table) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# ------------------------------------------------------------------------------------------- step records


def test_a_record_has_rewards_by_part_and_category_mean_and_best() -> None:
    groups = [
        group(
            reward(1.0, parts={"correctness": 1.0, "effort_spent": -0.25}), reward(0.0, category="docs", ending="turns")
        ),
        group(reward(0.5), reward(0.5, errors={"timeout": 1, "environment": 2})),
        group(reward(0.0, parts={}, hack="tests: edited"), reward(0.0)),
    ]
    record = metrics.rollout_facts(groups)
    assert (record["groups"], record["rollouts"], record["hacks"]) == (3, 6, 1)
    assert record["reward"] == pytest.approx(2 / 6)
    assert record["reward_best"] == pytest.approx(1.5 / 3)
    assert (record["solved"], record["solved_best"]) == pytest.approx((1 / 6, 1 / 3))
    assert record["groups_alike"] == pytest.approx(2 / 3)
    assert record["reward/correctness"] == pytest.approx(2 / 6)
    assert record["reward/effort_spent"] == pytest.approx(-0.25 / 6)
    assert (record["category/docs/rollouts"], record["category/docs/reward"]) == (1, 0.0)
    assert record["category/debugging/solved"] == pytest.approx(1 / 5)
    assert (record["ending/final"], record["ending/turns"]) == pytest.approx((5 / 6, 1 / 6))
    assert (record["tokens/thinking"], record["tokens/output"], record["turns"]) == (10, 30, 3)
    assert (record["errors/timeout"], record["errors/environment"]) == pytest.approx((1 / 12, 2 / 12))
    assert (record["pod_s"], record["seconds/grading"], record["session_s"]) == (1.5, 0.25, 7.0)


@given(st.lists(st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0]), min_size=2, max_size=4), min_size=1, max_size=5))
def test_mean_and_best_match_the_rewards(totals: list[list[float]]) -> None:
    record = metrics.rollout_facts([group(*map(reward, row)) for row in totals])
    flat = [total for row in totals for total in row]
    assert record["reward"] == pytest.approx(sum(flat) / len(flat))
    assert record["reward_best"] == pytest.approx(sum(map(max, totals)) / len(totals))
    assert record["groups_alike"] == pytest.approx(sum(len(set(row)) == 1 for row in totals) / len(totals))
    assert record["reward_best"] >= record["reward"] - 1e-12 if len({*map(len, totals)}) == 1 else True


def test_unknown_facts_are_left_out_and_never_zero() -> None:
    record = metrics.rollout_facts([group({"total": 1.0}, {"total": 0.0})])
    counts = {"groups", "rollouts", "groups_alike", "informative", "hacks"}
    assert record.keys() == {*counts, "reward", "reward_std", "reward_best"}
    with pytest.raises(EtudeError, match="has no reward: its state is ready"):
        metrics.rollout_facts([ReadyGroup(1, "t", (Slot(1, 1, "t", 0, 1, "ready"),))])


def test_staleness_of_the_oldest_and_the_newest_token() -> None:
    groups = [
        group(reward(1), reward(0), versions=(3, 5)),
        group(reward(1), versions=(5, 5)),
        group(reward(1), versions=(-1, 4)),  # sampled by weights that were lost in a rewind to step 0 or 1
    ]
    record = metrics.staleness_facts(groups, 5)
    assert (record["staleness"], record["staleness_max"], record["staleness_newest"]) == (2.5, 6, 0.25)
    assert (record["staleness/0"], record["staleness/2"]) == (0.25, 0.5)
    assert record["swapped"] == 0.75


def test_step_facts_have_the_names_of_metrics() -> None:
    record = metrics.trainer_facts({**STEP_FACTS, "waited_for": {"groups": 2.5, "measurement": 0.5}})
    assert (record["entropy"], record["ratio"], record["mismatch_numerics_p99"], record["gradient_norm"]) == (
        0.7,
        1.001,
        0.05,
        0.4,
    )
    assert (record["waited_share"], record["waited/groups"]) == (0.5, 2.5)
    assert (record["changed"], record["upload_bytes"]) == (0.02, 500)


def test_idle_seconds_of_samplers_are_between_two_statuses() -> None:
    def status(time: float, busy: float) -> dict[str, Any]:
        return {"time": time, "busy_s": busy, "made_tokens": 7}

    first = metrics.sampler_facts(
        {"sampler-0": status(100, 50), "sampler-1": status(100, 9), "worker-0": {"time": 1}}, None
    )
    assert "samplers_idle_s" not in first
    second = metrics.sampler_facts({"sampler-0": status(104, 53), "sampler-1": status(104, 1)}, first)
    assert (second["samplers_idle_s"], second["samplers_seen_s"]) == (1.0, 4.0)  # sampler-1 was restarted
    third = metrics.sampler_facts({"sampler-0": status(104, 53), "sampler-1": status(108, 1)}, second)
    assert (third["samplers_idle_s"], third["samplers_seen_s"]) == (4.0, 4.0)


def test_infrastructure_failures_are_counted_in_their_step(queue: RolloutQueue) -> None:
    queue.add([("a", 9), ("b", 8), ("c", 0)])
    slot = queue.claim("w", 0.0)
    assert slot is not None
    queue.fail(slot, "the pod died")
    fill(queue, reward(1.0), reward(0.0), reward(1.0), reward(0.0))
    groups = queue.take(0)
    assert groups is not None
    queue.mark_trained(groups, 1)
    first = metrics.step_metrics(groups, 1, STEP_FACTS, {}, queue)
    assert (first["reward"], first["infrastructure/failed"], first["infrastructure/stale"]) == (0.5, 1, 0)
    assert first["infrastructure/mostly"] == "the pod died"
    for _ in range(2):  # a slot of c is lost twice: its group is dropped
        assert queue.claim("w", 0.0) is not None
        queue.reconcile(50.0, 1)
    second = metrics.incident_facts(queue, 2)
    assert (second["infrastructure/lost"], second["infrastructure/failed"]) == (2, 0)
    assert second["infrastructure/dropped"] == 1
    assert "infrastructure/mostly" not in second
    assert [incident.number for incident in queue.incidents() if incident.kind == "dropped"] == [None]


def test_stale_rollouts_are_counted(queue: RolloutQueue) -> None:
    queue.add([("a", 0)])
    fill(queue, reward(1.0), reward(1.0), version=0)
    assert queue.reconcile(0.0, 3)["stale"] == 2
    assert metrics.incident_facts(queue, 1)["infrastructure/stale"] == 2


def test_a_record_is_flat_and_json(queue: RolloutQueue) -> None:
    queue.add([("a", 0), ("b", 0)])
    fill(queue, *[reward(1.0, habits={"asking": 0.0})] * 4)
    groups = queue.take(0) or []
    queue.mark_trained(groups, 1)
    services = {"sampler-0": {"busy_s": 1.0, "made_tokens": 9, "time": 1.0}}
    record = metrics.step_metrics(groups, 1, STEP_FACTS, services, queue)
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert all(isinstance(value, int | float | str) for name, value in record.items() if name != "alarms")
    assert not record.keys() & {"time", "stage", "step"}


# ------------------------------------------------------------------------------------------- monitors


def test_a_monitor_alarms_after_enough_sessions_also_across_restarts(tmp_path: Path) -> None:
    settings = SETTINGS.model_copy(update={"group_size": 10, "groups_per_step": 1})
    path = tmp_path / "s.sqlite"
    asked = case(final="Shall I go on?", changes=())
    edited = case(did("write", path="a.py"), changes=[changed("a.py", "1\n", "2\n")])
    records = [reward(0.0, habits=behaviour_rates(trial, score(trial, {}))) for trial in (asked, edited)]
    assert (records[0]["habits"]["asking"], records[1]["habits"]["asking"]) == (1.0, 0.0)
    assert (records[0]["habits"]["edit_rate"], records[1]["habits"]["edit_rate"]) == (0.0, 1.0)
    alarms = []
    for step in (1, 2, 3, 4):
        queue = RolloutQueue(path, settings)
        queue.add([(f"t{step}", 0)])
        asking = 0 if step < 3 else 8
        fill(queue, *(records[:1] * asking + records[1:] * (10 - asking)))
        groups = queue.take(0) or []
        queue.mark_trained(groups, step)
        record = metrics.step_metrics(groups, step, STEP_FACTS, {}, queue)
        alarms.append(record["alarms"])
        queue.close()
    assert record["habit/asking"] == pytest.approx(0.4)
    assert alarms[:3] == [[], [], []]  # too few sessions to compare
    assert alarms[3] == [
        "edits files less often: 20% of the last 20 sessions, 100% before",
        "asks instead of editing: 80% of the last 20 sessions, 0% before",
    ]
    assert "ALARM asks instead of editing" in metrics.progress_line(record)


# ------------------------------------------------------------------------------------------- summaries


def test_the_progress_line() -> None:
    facts = {"reward": 0.4312, "solved": 0.38, "solved_best": 0.71, "staleness_max": 2}
    facts |= {"mismatch_numerics_p99": 0.0312, "mismatch_staleness_p99": 0.4}
    facts |= {"infrastructure/failed": 1, "infrastructure/lost": 2, "waited_share": 0.25}
    assert (
        metrics.progress_line(facts)
        == "reward 0.431  solved 38%  best 71%  stale 2  mismatch 0.031 numerics  0.4 staleness  waits 25%  3 retried"
    )
    assert metrics.progress_line({}) == ""


def test_the_health_table_shows_services_what_they_wait_for_and_silent_ones(
    layout: RunLayout, queue: RolloutQueue
) -> None:
    queue.add([("a", 0)])
    assert queue.claim("worker-0", 0.0) is not None
    now = time.time()
    statuses: dict[str, dict[str, Any]] = {
        "trainer": {"state": "waiting", "waiting_for": "groups: 1 [queued], 1 starting", "step": 3, "time": now},
        "sampler-0": {
            "state": "ready",
            "host": "b",
            "etude": "0.9",
            "version": 4,
            "cpus": 0.5,
            "time": now,
            "running": 2,
            "tokens_s": 31.5,
        },
        "worker-0": {"state": "working", "rollouts": 1, "max_rollouts": 4, "time": now},
        "gone": {"state": "working", "time": now - 100},
    }
    write_copy(layout, statuses)
    text = shown(health_table(layout.run, now))
    assert "groups: 1 [queued], 1 starting" in text
    (sampler,) = (row.split("  ") for row in text.splitlines() if row.strip().startswith("sampler-0"))
    found = [cell.strip() for cell in sampler if cell.strip()]
    assert found == ["sampler-0", "ready", "b", "0.9, weights 4", "0.50 CPUs, 2 sequences, 32 tokens/s"]
    assert "1 of 4 rollouts" in text
    (gone,) = (row for row in text.splitlines() if row.strip().startswith("gone"))
    assert "silent 100 s" in gone
    assert "1 queued, 1 starting" in text.splitlines()[-1]
    (layout.logs / "deaths.jsonl").write_text(json.dumps({"time": time.time(), "name": "w", "why": "fell"}) + '\n{"ti')
    last = shown(health_table(layout.run)).splitlines()[-1].split()
    assert (last[:2], last[-2:]) == (["deaths", "1"], ["w", "fell"])
    with pytest.raises(InputError, match="has no RL stage yet"):
        health_table(layout.run / "elsewhere")


def test_reading_neither_creates_nor_disturbs_a_queue(layout: RunLayout, queue: RolloutQueue) -> None:
    queue.add([("a", 0)])
    with queue._transaction() as db:  # a change in progress
        db.execute("UPDATE slots SET state = 'running'")
        reader = RolloutQueue.open_read_only(layout.slots)
        assert reader.counts() == {"queued": 2}
        assert reader.settings.group_size == 2
    assert reader.counts() == {"running": 2}
    with pytest.raises(Exception, match="readonly"):
        reader.add([("b", 0)])
    with pytest.raises(InputError, match="is not a rollout queue"):
        RolloutQueue.open_read_only(layout.evaluations)
    assert not layout.evaluations.exists()


def test_the_summary_of_a_finished_stage(queue: RolloutQueue) -> None:
    lines: list[dict[str, Any]] = [
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
        {"step": 2, "reward": 0.6, "wall_s": 6.0, "waited_s": 4.0, "staleness_max": 2, "mismatch_numerics_p99": 0.1},
        {"step": 2, "evaluation": True, "solved": 0.4, "solved_low": 0.3, "solved_high": None, "best/16": 0.7},
    ]
    facts = metrics.stage_facts(lines, queue, ["sampler-0 ended with signal 9"])
    assert (facts["steps"], facts["reward_first"], facts["reward_last"]) == (2, 0.1, 0.6)
    assert (facts["waited_share"], facts["samplers_idle_share"], facts["deaths"]) == (0.5, 0.25, 1)
    assert facts["before"] == {"step": 0, "solved": 0.2, "solved_low": 0.1, "solved_high": 0.3, "best/16": 0.5}
    assert facts["after"] == {"step": 2, "solved": 0.4, "solved_low": 0.3, "best/16": 0.7}
    assert metrics.stage_facts([], queue, [])["steps"] == 0


# ------------------------------------------------------------------------------------------- the list of rollouts


def keep(layout: RunLayout, name: str) -> None:
    path = layout.root / f"{name}.trace"
    path.parent.mkdir(parents=True, exist_ok=True)
    save_trace(replace(example(), id=name), path)


def test_every_rollout_is_listed_with_its_reward(layout: RunLayout, queue: RolloutQueue) -> None:
    queue.add([("a", 0), ("b", 0)])
    first = queue.claim("w", 0.0)
    assert first is not None
    keep(layout, "traces/000001/00-1")  # saved, but its worker died before reporting it
    queue.fail(first, "lost")
    fill(queue, reward(1.0), reward(0.0), reward(0.0), reward(0.0))
    for name in ("000001/00-2", "000001/01-1", "000002/00-1", "000002/01-1"):
        keep(layout, f"traces/{name}")
    queue.mark_trained(queue.take(0) or [], 1)
    evaluations = RolloutQueue(layout.evaluations, evaluation_queue(SETTINGS, 1))
    held_out.start(evaluations, 4, ["org/c"])
    slot = evaluations.claim("w", 0.0)
    assert slot is not None
    evaluations.finish(slot, reward(1.0), "evaluation-traces/000001/00-1.trace", (4, 4))
    keep(layout, "evaluation-traces/000001/00-1")
    found = list_rollouts(layout)
    assert [rollout.name for rollout in found] == [
        "traces/000001/00-1",
        "traces/000001/00-2",
        "traces/000001/01-1",
        "traces/000002/00-1",
        "traces/000002/01-1",
        "evaluation-traces/000001/00-1",
    ]
    assert [(rollout.step, rollout.reward is None) for rollout in found] == [
        (None, True),
        *[(1, False)] * 4,
        (4, False),
    ]
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
    assert list_rollouts(layout, "traces/000002/") == found[3:5]
    text = shown(rollouts_table(found))
    assert "resampled" in text.splitlines()[1]
    assert "org/c" in text.splitlines()[-1]


def test_the_atif_export_has_the_trace_and_the_reward(layout: RunLayout, queue: RolloutQueue, tmp_path: Path) -> None:
    queue.add([("a", 0)])
    fill(queue, reward(1.0), reward(0.0))
    keep(layout, "traces/000001/00-1")
    keep(layout, "traces/000001/01-1")
    out = tmp_path / "out"
    assert export_rollouts(layout, list_rollouts(layout), out) == (2, [])
    document = json.loads((out / "traces-000001-00-1.json").read_text(encoding="utf-8"))
    assert document["schema_version"] == "ATIF-v1.8"
    assert document["extra"]["rollout"]["reward"]["total"] == 1.0
    assert document["session_id"] == "traces/000001/00-1"
    assert document["steps"] == to_atif(example())["steps"]


def test_a_damaged_rollout_is_reported_and_the_others_are_exported(
    layout: RunLayout, queue: RolloutQueue, tmp_path: Path
) -> None:
    queue.add([("a", 0)])
    fill(queue, reward(1.0), reward(0.0))
    keep(layout, "traces/000001/00-1")
    keep(layout, "traces/000001/01-1")
    (damaged,) = layout.root.glob("traces/000001/00-1*")
    damaged.write_bytes(damaged.read_bytes()[:40])
    count, problems = export_rollouts(layout, list_rollouts(layout), tmp_path / "out")
    assert count == 1
    assert "00-1" in problems[0]


def test_traces_without_their_queue_are_an_error(layout: RunLayout, queue: RolloutQueue) -> None:
    queue.add([("a", 0)])
    keep(layout, "traces/000001/00-1")
    for path in layout.root.glob("slots.sqlite*"):
        path.unlink()
    with pytest.raises(EtudeError, match=r"slots\.sqlite is missing"):
        list_rollouts(layout)
    with pytest.raises(InputError, match="has no rollouts"):
        list_rollouts(RunLayout(layout.run / "nowhere"))
