"""The viewer's server on finished, running, damaged and hostile runs; and its speed."""

import json
import os
import shutil
import socket
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from etude.harness.trace_store import load_trace
from etude.rollouts.queue import RolloutQueue
from etude.rollouts.settings import QueueSettings
from etude.runs.layout import RunLayout
from etude.runs.service_status import write_copy
from etude.viewer.api import RunApi
from etude.viewer.catalogue import COLUMNS
from etude.viewer.server import assets, make_app


def client(path: Path) -> TestClient:
    return TestClient(make_app(path), base_url="http://127.0.0.1")


def ask(path: Path, address: str) -> Any:
    answer = client(path).get(f"/api/{address}")
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


def rows(data: Any) -> list[dict[str, Any]]:
    """Return the rollouts as rows."""
    count, columns = data["rollouts"]["count"], data["rollouts"]["columns"]
    plain = {
        name: [column["words"][at] for at in column["at"]] if isinstance(column, dict) else column
        for name, column in columns.items()
    }
    return [{name: plain[name][at] for name in COLUMNS} for at in range(count)]


# ------------------------------------------------------------------------------------------- contents


def test_a_run_has_its_stages_curves_and_evaluations(run: Path) -> None:
    data = ask(run, "run")
    assert data["name"] == "nano"
    assert data["status"]["state"] == "finished"
    assert data["problems"] == []
    assert [stage["name"] for stage in data["stages"]] == ["init", "corpus", *TEXT_STAGES, "rl", "evaluation"]
    curve = data["training"][0]
    assert (curve["stage"], curve["steps"]) == ("pretrain", 300)
    assert curve["curve"]["x"] == sorted(curve["curve"]["x"])
    assert len(curve["curve"]["x"]) <= 240
    assert len(curve["held_out"]) == 4
    steps = data["rl"]["steps"]["columns"]
    assert steps["step"] == [1, 2, 3]
    assert all(low <= mean <= high for low, mean, high in zip(*(steps[n] for n in BOUNDS), strict=True))
    assert [test["step"] for test in data["rl"]["evaluations"]] == [0, 2, 3]
    assert {"solved", "solved_low", "solved_high", "best/2", "category/debugging/solved"} <= {
        name for test in data["rl"]["evaluations"] for name in test
    }
    assert data["rl"]["deaths"][0]["name"] == "worker-0"


TEXT_STAGES = ["pretrain", "mtp", "extend", "sft"]
BOUNDS = ("reward_low", "reward", "reward_high")


def test_every_rollout_is_listed_and_can_be_opened(run: Path) -> None:
    http = client(run)
    found = rows(http.get("/api/rollouts").json())
    assert len(found) == 3 * 2 * 4 + 3 * 3 * 2
    for row in found:
        address = f"{row['set']}/{row['group']}/{row['number']}/{row['attempt']}"
        data = http.get(f"/api/rollout/{address}").json()
        assert data["task"] == row["task"]
        assert data["reward"]["total"] == pytest.approx(row["total"], abs=1e-3)
        assert data["session"]["steps"]
        tokens = http.get(f"/api/tokens/{address}/0/0").json()
        assert len(tokens["texts"]) == len(tokens["ids"]) == len(tokens["logprobs"]) == min(2000, tokens["total"])
        assert tokens["problem"] == ""
    some = [row for row in found if row["set"] == "training"]
    groups = {(row["group"]): [each["advantage"] for each in some if each["group"] == row["group"]] for row in some}
    assert all(abs(sum(values)) < 1e-2 for values in groups.values()), "advantages of a group add up to zero"


def test_a_group_shows_its_rollouts_and_those_not_finished(run: Path) -> None:
    data = ask(run, "group/training/1")
    assert [slot["number"] for slot in data["slots"]] == [0, 1, 2, 3]
    assert all(slot["strip"] for slot in data["slots"])
    assert data["instruction"]
    last = max(group[1] for group in ask(run, "rollouts")["groups"] if group[0] == "training")
    waiting = ask(run, f"group/training/{last}")
    assert {slot["state"] for slot in waiting["slots"]} == {"queued"}
    assert all(slot["reward"] is None for slot in waiting["slots"])


def test_a_task_shows_its_instruction_files_and_solve_rate_over_time(run: Path) -> None:
    tasks = {task["name"]: task for task in ask(run, "tasks")["tasks"]}
    measured = next(task for task in tasks.values() if task["split"] == "held-out")
    data = ask(run, f"task/{measured['name']}")
    assert [group["step"] for group in data["groups"]] == [0, 2, 3]
    assert data["instruction"]
    assert "task.toml" in {file["path"] for file in data["files"]}
    assert data["validation"] is None
    assert any(not task["groups"] for task in tasks.values()), "tasks that were never run are listed too"


def test_a_moved_run_still_shows_its_generated_tasks(copy: Path) -> None:
    lists = json.loads(RunLayout(copy).tasks.read_text())
    name, directory = next(iter(lists["held_out"].items()))
    shutil.copytree(directory, copy / "artefacts/tasks-new/one")
    lists["held_out"][name] = "/gone/runs/nano/artefacts/tasks-new/one"
    RunLayout(copy).tasks.write_text(json.dumps(lists))
    assert ask(copy, f"task/{name}")["instruction"]
    lists["held_out"][name] = "/gone/artefacts/../../one"
    RunLayout(copy).tasks.write_text(json.dumps(lists))
    assert ask(copy, f"task/{name}")["instruction"] == "", "no way out of the run"


def test_evaluations_have_no_advantage(run: Path) -> None:
    assert all((row["advantage"] is None) == (row["set"] == "evaluation") for row in rows(ask(run, "rollouts")))
    assert all(slot["advantage"] is None for slot in ask(run, "group/evaluation/1")["slots"])


def test_the_validation_report_of_a_task_is_shown(run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from etude.tasks.harbor import task_digest
    from etude.tasks.validate import Reason, ValidationCache, ValidationReport, default_validation_cache

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    name, directory = next(iter(json.loads(RunLayout(run).tasks.read_text())["train"].items()))
    found = ValidationReport(
        name, directory, task_digest(directory), (Reason("flaky", "1, 0"),), {"noop": [0.0, 0.0]}, ("a.py",)
    )
    ValidationCache(default_validation_cache()).save(found)
    data = ask(run, f"task/{name}")["validation"]
    assert not data["admitted"]
    assert data["reasons"] == [{"code": "flaky", "evidence": "1, 0", "means": "reruns do not agree"}]
    assert data["scores"] == {"noop": [0.0, 0.0]}


def test_a_discarded_attempt_can_still_be_shown(copy: Path) -> None:
    layout = RunLayout(copy)
    shutil.copy(layout.traces / "000001/00-1.trace", layout.traces / "000001/00-7.trace")
    assert ask(copy, "group/training/1")["slots"][0]["others"] == [7]
    data = ask(copy, "rollout/training/1/0/7")
    assert not data["counts"]
    assert data["advantage"] is None


# ------------------------------------------------------------------------------------------- running runs


def test_changes_show_when_data_is_out_of_date(copy: Path) -> None:
    http = client(copy)
    before = http.get("/api/changes").json()
    assert http.get("/api/changes").json()["metrics"] == before["metrics"]
    with (copy / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"time": 1.0, "stage": "rl", "step": 4, "reward": 0.5}) + "\n")
    after = http.get("/api/changes").json()
    assert after["metrics"] != before["metrics"]
    assert after["rollouts"] == before["rollouts"]
    assert http.get("/api/run").json()["rl"]["steps"]["columns"]["step"] == [1, 2, 3, 4]


def test_rollouts_of_a_running_writer_appear(copy: Path) -> None:
    layout = RunLayout(copy)
    http = client(copy)
    before = http.get("/api/rollouts").json()["rollouts"]["count"]
    with closing(RolloutQueue(layout.slots, QueueSettings(group_size=4))) as slots:
        slot = slots.claim("worker-0", time.time())
        assert slot is not None
        trace = "traces/000001/00-1.trace"
        slots.finish(slot, {"total": 1.0, "solved": True, "category": "new"}, trace, (3, 3))
        data = http.get("/api/rollouts").json()
        assert data["rollouts"]["count"] == before + 1
        shown = http.get(f"/api/group/training/{slot.group}").json()
        assert [each["reward"] is not None for each in shown["slots"]].count(True) == 1
        assert all(each["advantage"] is None for each in shown["slots"]), "there is none before all are scored"


def test_a_stale_rollout_is_replaced_by_the_new_one(copy: Path) -> None:
    layout, http = RunLayout(copy), client(copy)
    with closing(RolloutQueue(layout.slots, QueueSettings(group_size=4, max_staleness=0))) as slots:
        while (slot := slots.claim("w", 0.0)) is not None:
            slots.finish(slot, {"total": 0.25, "category": "first"}, "traces/000001/00-1.trace", (0, 0))
        assert "first" in http.get("/api/rollouts").json()["rollouts"]["columns"]["category"]["words"]
        assert slots.reconcile(0.0, 9)["stale"] == 4
        while (slot := slots.claim("w", 0.0)) is not None:
            slots.finish(slot, {"total": 0.75, "category": "second"}, "traces/000001/00-1.trace", (9, 9))
    words = http.get("/api/rollouts").json()["rollouts"]["columns"]["category"]["words"]
    assert "second" in words
    assert "first" not in words


def test_silent_processes_are_distinguished_from_working_ones(copy: Path) -> None:
    layout = RunLayout(copy)
    (copy / "lock").write_text(f"pid {os.getpid()} on {socket.gethostname()} since 2026-01-01T00:00:00+00:00\n")
    state = json.loads((copy / "state.json").read_text())
    state["stages"]["rl"]["done"] = False
    (copy / "state.json").write_text(json.dumps(state))
    now = time.time()
    statuses: dict[str, dict[str, Any]] = {
        "sampler-0": {"state": "working", "version": 3, "time": now},
        "worker-0": {"state": "working", "time": now - 100},
        "trainer": {"state": "ended", "time": now - 100},
    }
    write_copy(layout, statuses)
    data = ask(copy, "run")
    assert data["status"]["state"] == "running"
    assert {service["name"]: service["state"] for service in data["rl"]["services"]} == {
        "sampler-0": "working",
        "worker-0": "silent",
        "trainer": "ended",
    }
    layout.statuses.write_text("{")
    data = ask(copy, "run")
    assert data["rl"]["services"] == []
    assert any("statuses.json" in problem for problem in data["problems"])


def test_viewing_a_run_changes_nothing_in_it(copy: Path) -> None:
    def content() -> dict[str, bytes]:
        files = [path for path in copy.rglob("*") if path.is_file() and not path.name.endswith(("-shm", "-wal"))]
        return {path.relative_to(copy).as_posix(): path.read_bytes() for path in files}

    before, http = content(), client(copy)
    for address in ("run", "rollouts", "tasks", "changes", "group/training/1", "rollout/training/1/0/1"):
        assert http.get(f"/api/{address}").status_code == 200
    assert content() == before


# ------------------------------------------------------------------------------------------- damaged runs


def test_a_run_without_reinforcement_learning_has_a_page(copy: Path) -> None:
    shutil.rmtree(copy / "rl")
    lines = [line for line in (copy / "metrics.jsonl").read_text().splitlines() if '"rl"' not in line]
    (copy / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    data = ask(copy, "run")
    assert data["rl"] is None
    assert [curve["stage"] for curve in data["training"]] == TEXT_STAGES
    assert [row["model"] for row in data["outcome"]["rows"]] == ["sft"]
    assert ask(copy, "rollouts")["rollouts"]["count"] == 0
    assert ask(copy, "tasks")["tasks"] == []


def test_a_run_that_has_just_started_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text('name = "young"\nstages = ["pretrain"]\n')
    data = ask(tmp_path, "run")
    assert data["status"]["state"] == "stopped"
    assert data["training"] == []


def test_damage_is_reported_and_the_rest_is_shown(copy: Path) -> None:
    layout = RunLayout(copy)
    with (copy / "metrics.jsonl").open("ab") as file:
        file.write(b"\xff rubbish\n" + json.dumps({"stage": "rl", "step": "four", "reward": "NaN"}).encode() + b"\n")
    layout.evaluations.write_bytes(b"this is no database" * 100)
    layout.tasks.write_text("[]")
    for path in (layout.traces / "000001").iterdir():
        path.write_bytes(b"damaged")
    http = client(copy)
    data = http.get("/api/run").json()
    assert data["rl"]["steps"]["columns"]["step"] == [1, 2, 3]
    words = " ".join(data["problems"])
    assert "metrics.jsonl" in words
    assert "evaluations.sqlite" in words
    group = http.get("/api/group/training/1").json()
    assert all("damaged" in slot["problem"] for slot in group["slots"])
    refused = http.get("/api/rollout/training/1/0/1")
    assert refused.status_code == 409
    assert "damaged" in refused.json()["error"]
    assert http.get("/api/rollout/training/2/0/1").status_code == 200
    assert http.get("/api/tasks").status_code == 200


def test_rewards_of_another_shape_are_tolerated(copy: Path) -> None:
    with closing(sqlite3.connect(RunLayout(copy).slots)) as db, db:
        odd = ['{"total": NaN}', '{"total": "x", "cost": [], "errors": 3, "seconds": null}', '{"solved": "yes"}', "{}"]
        for number, reward in enumerate(odd):
            db.execute("UPDATE slots SET reward=? WHERE grp=1 AND number=?", (reward, number))
    assert len(rows(ask(copy, "rollouts"))) == 42
    assert ask(copy, "group/training/1")["slots"][0]["reward"]["total"] is None


# ------------------------------------------------------------------------------------------- many runs


def test_a_directory_of_runs_is_a_list_and_each_has_its_pages(run: Path, tmp_path: Path) -> None:
    for name in ("one", "two & a half"):
        shutil.copytree(run, tmp_path / name)
    (tmp_path / "notes").mkdir()
    http = client(tmp_path)
    assert b'data-mode="runs"' in http.get("/").content
    data = http.get("/api/runs").json()["runs"]
    assert [each["directory"] for each in data] == ["one", "two & a half"]
    gain = data[0]["gain"]
    assert (gain["model"], gain["against"], gain["set"]) == ("rl", "sft", "new")
    assert gain["low"] <= gain["at"] <= gain["high"]
    assert http.get("/run/one", follow_redirects=False).headers["location"] == "/run/one/"
    assert b'data-mode="run-of-many"' in http.get("/run/one/").content
    assert http.get("/run/two%20%26%20a%20half/api/run").json()["name"] == "nano"
    assert http.get("/run/notes/").status_code == 404
    assert http.get("/run/..%2F..%2Fetc/api/run").status_code == 404
    shutil.copytree(run, tmp_path / "three")
    assert http.get("/run/three/api/run").status_code == 200, "a run that was started since"


# ------------------------------------------------------------------------------------------- security


@pytest.mark.parametrize(
    "address",
    [
        "rollout/training/1/0/..%2F..%2F..%2F..%2Fstate.json",
        "rollout/training/1/0/9",
        "rollout/training/999/0/1",
        "rollout/other/1/0/1",
        "rollout/training/-1/0/1",
        "rollout/training/1/0/1/2",
        "tokens/training/1/0/1/0/x",
        "group/training/%00",
        "task/..%2F..%2F..%2F..%2Fetc%2Fpasswd",
        "../../etc/passwd",
        "task/unknown",
        "nothing",
        "",
    ],
)
def test_unknown_addresses_are_refused(run: Path, address: str) -> None:
    answer = client(run).get(f"/api/{address}")
    assert answer.status_code in (404, 409)
    assert set(answer.json()) == {"error"}


def test_files_of_the_pages_are_served_and_no_others(run: Path) -> None:
    http = client(run)
    for name in assets():
        assert http.get(f"/pages/{name}").status_code == 200
    for name in ("../server.py", "..%2Fserver.py", "%2e%2e/server.py", "nothing.js", "/etc/passwd"):
        assert http.get(f"/pages/{name}").status_code == 404
    assert http.post("/api/run").status_code == 405


def test_a_trace_is_never_read_from_outside_the_run(copy: Path, tmp_path: Path) -> None:
    layout = RunLayout(copy)
    outside = tmp_path / "secret.trace"
    shutil.copy(layout.traces / "000001/00-1.trace", outside)
    with closing(sqlite3.connect(layout.slots)) as db, db:
        db.execute("UPDATE slots SET trace=? WHERE grp=1 AND number=0", (f"../../{outside.name}",))
        db.execute("UPDATE slots SET trace=? WHERE grp=1 AND number=1", (str(outside),))
    (layout.traces / "000001/02-1.trace").unlink()
    (layout.traces / "000001/02-1.trace").symlink_to(outside)
    assert load_trace(outside)
    for number in (0, 1, 2):
        assert client(copy).get(f"/api/rollout/training/1/{number}/1").status_code == 404


def test_every_response_has_the_security_headers(run: Path) -> None:
    http = client(run)
    for address in ("/", "/pages/app.js", "/api/run", "/api/nothing"):
        headers = http.get(address).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self'" in policy
        assert "unsafe" not in policy
        assert "require-trusted-types-for 'script'" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
    assert http.get("/api/run").headers["content-type"] == "application/json"


def test_a_foreign_host_name_or_origin_is_refused(run: Path) -> None:
    assert client(run).get("/", headers={"host": "evil.example"}).status_code == 421
    assert client(run).get("/api/run", headers={"origin": "http://evil.example"}).status_code == 403
    assert TestClient(make_app(run, ["runs.example"]), base_url="http://runs.example").get("/").status_code == 200


def test_the_front_end_never_turns_text_into_markup() -> None:
    for name in assets():
        text = (Path("etude/viewer/pages") / name).read_text()
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "http"):
            allowed = text.count("http://www.w3.org/2000/svg") if word == "http" else 0
            assert text.count(word) == allowed, f"{name}: {word}"


# ------------------------------------------------------------------------------------------- many rollouts


def test_ten_thousand_rollouts_are_listed(large: Path) -> None:
    http = client(large)
    assert http.get("/api/rollouts").json()["rollouts"]["count"] == 10_000
    assert http.get("/api/run").json()["rl"]["rollouts"]["training"] > 0
    assert http.get("/api/group/training/500").json()["id"] == 500


def test_an_unchanged_group_is_not_read_again(large: Path) -> None:
    api = RunApi(large)
    first = api.groups()
    assert all(one is other for one, other in zip(first, api.groups(), strict=True))


def test_very_many_steps_are_averaged(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text('name = "long"\nstages = ["rl"]\n')
    lines = [json.dumps({"stage": "rl", "step": step, "reward": step / 3000}) for step in range(1, 3001)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    steps = ask(tmp_path, "run")["rl"]["steps"]
    assert steps["each"] == 5
    assert len(steps["columns"]["step"]) == 600
    assert steps["columns"]["reward"] == sorted(steps["columns"]["reward"])
