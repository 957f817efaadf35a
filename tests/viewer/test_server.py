"""The pages' server: what it answers of runs that are whole, going on, damaged, or hostile; and how fast."""

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
from etude.rollouts.queue import Plan, Slots
from etude.runs.layout import Place, write_status
from etude.viewer.api import Answers
from etude.viewer.catalogue import COLUMNS
from etude.viewer.server import app, assets


def client(path: Path) -> TestClient:
    return TestClient(app(path), base_url="http://127.0.0.1")


def ask(path: Path, address: str) -> Any:
    answer = client(path).get(f"/api/{address}")
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


def rows(told: Any) -> list[dict[str, Any]]:
    """The table of rollouts, row by row."""
    count, columns = told["rollouts"]["count"], told["rollouts"]["columns"]
    plain = {
        name: [column["words"][at] for at in column["at"]] if isinstance(column, dict) else column
        for name, column in columns.items()
    }
    return [{name: plain[name][at] for name in COLUMNS} for at in range(count)]


# ------------------------------------------------------------------------------------------- what is told


def test_a_run_is_told_with_its_stages_curves_and_measurements(run: Path) -> None:
    told = ask(run, "run")
    assert told["name"] == "nano"
    assert told["life"]["state"] == "finished"
    assert told["problems"] == []
    assert [stage["name"] for stage in told["stages"]] == ["init", "corpus", *TEXT_STAGES, "rl"]
    curve = told["training"][0]
    assert (curve["stage"], curve["steps"]) == ("pretrain", 300)
    assert curve["curve"]["x"] == sorted(curve["curve"]["x"])
    assert len(curve["curve"]["x"]) <= 240
    assert len(curve["held_out"]) == 4
    steps = told["rl"]["steps"]["columns"]
    assert steps["step"] == [1, 2, 3]
    assert all(low <= mean <= high for low, mean, high in zip(*(steps[n] for n in BOUNDS), strict=True))
    assert [test["step"] for test in told["rl"]["evaluations"]] == [0, 2, 3]
    assert {"solved", "solved_low", "solved_high", "best/2", "category/debugging/solved"} <= {
        name for test in told["rl"]["evaluations"] for name in test
    }
    assert told["rl"]["deaths"][0]["name"] == "worker-0"


TEXT_STAGES = ["pretrain", "mtp", "extend", "sft"]
BOUNDS = ("reward_low", "reward", "reward_high")


def test_every_rollout_is_listed_and_can_be_opened(run: Path) -> None:
    here = client(run)
    found = rows(here.get("/api/rollouts").json())
    assert len(found) == 3 * 2 * 4 + 3 * 3 * 2
    for row in found:
        address = f"{row['set']}/{row['group']}/{row['number']}/{row['attempt']}"
        told = here.get(f"/api/rollout/{address}").json()
        assert told["task"] == row["task"]
        assert told["reward"]["total"] == pytest.approx(row["total"], abs=1e-3)
        assert told["story"]["steps"]
        tokens = here.get(f"/api/tokens/{address}/0/0").json()
        assert len(tokens["texts"]) == len(tokens["ids"]) == len(tokens["logprobs"]) == min(2000, tokens["total"])
        assert tokens["problem"] == ""
    some = [row for row in found if row["set"] == "training"]
    groups = {(row["group"]): [each["advantage"] for each in some if each["group"] == row["group"]] for row in some}
    assert all(abs(sum(values)) < 1e-2 for values in groups.values()), "advantages of a group add up to nothing"


def test_a_group_shows_its_rollouts_side_by_side_and_one_under_way_says_so(run: Path) -> None:
    told = ask(run, "group/training/1")
    assert [slot["number"] for slot in told["slots"]] == [0, 1, 2, 3]
    assert all(slot["strip"] for slot in told["slots"])
    assert told["instruction"]
    last = max(group[1] for group in ask(run, "rollouts")["groups"] if group[0] == "training")
    waiting = ask(run, f"group/training/{last}")
    assert {slot["state"] for slot in waiting["slots"]} == {"queued"}
    assert all(slot["reward"] is None for slot in waiting["slots"])


def test_a_task_shows_its_instruction_files_and_solve_rate_over_time(run: Path) -> None:
    tasks = {task["name"]: task for task in ask(run, "tasks")["tasks"]}
    measured = next(task for task in tasks.values() if task["split"] == "held-out")
    told = ask(run, f"task/{measured['name']}")
    assert [tried["step"] for tried in told["tries"]] == [0, 2, 3]
    assert told["instruction"]
    assert "task.toml" in {file["path"] for file in told["files"]}
    assert told["validation"] is None
    assert any(not task["tries"] for task in tasks.values()), "tasks that nobody tried are there too"


def test_a_run_that_was_moved_still_shows_the_tasks_it_made(copy: Path) -> None:
    lists = json.loads(Place(copy).tasks.read_text())
    name, directory = next(iter(lists["held_out"].items()))
    shutil.copytree(directory, copy / "artefacts/tasks-fresh/one")
    lists["held_out"][name] = "/gone/runs/nano/artefacts/tasks-fresh/one"
    Place(copy).tasks.write_text(json.dumps(lists))
    assert ask(copy, f"task/{name}")["instruction"]
    lists["held_out"][name] = "/gone/artefacts/../../one"
    Place(copy).tasks.write_text(json.dumps(lists))
    assert ask(copy, f"task/{name}")["instruction"] == "", "no way out of the run"


def test_nobody_learns_from_a_measurement_so_it_has_no_advantage(run: Path) -> None:
    assert all((row["advantage"] is None) == (row["set"] == "evaluation") for row in rows(ask(run, "rollouts")))
    assert all(slot["advantage"] is None for slot in ask(run, "group/evaluation/1")["slots"])


def test_what_validation_found_of_a_task_is_shown(run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from etude.tasks.harbor import task_digest
    from etude.tasks.validate import Reason, Report, Shelf, default_shelf

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    name, directory = next(iter(json.loads(Place(run).tasks.read_text())["train"].items()))
    found = Report(name, directory, task_digest(directory), (Reason("flaky", "1, 0"),), {"noop": [0.0, 0.0]}, ("a.py",))
    Shelf(default_shelf()).keep(found)
    told = ask(run, f"task/{name}")["validation"]
    assert not told["admitted"]
    assert told["reasons"] == [{"code": "flaky", "evidence": "1, 0", "means": "reruns do not agree"}]
    assert told["scores"] == {"noop": [0.0, 0.0]}


def test_an_attempt_that_was_sampled_again_is_still_there_and_says_so(copy: Path) -> None:
    place = Place(copy)
    shutil.copy(place.traces / "000001/00-1.trace", place.traces / "000001/00-7.trace")
    assert ask(copy, "group/training/1")["slots"][0]["others"] == [7]
    told = ask(copy, "rollout/training/1/0/7")
    assert not told["counts"]
    assert told["advantage"] is None


# ------------------------------------------------------------------------------------------- going on


def test_changes_tell_a_page_when_to_ask_again(copy: Path) -> None:
    here = client(copy)
    before = here.get("/api/changes").json()
    assert here.get("/api/changes").json()["metrics"] == before["metrics"]
    with (copy / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"time": 1.0, "stage": "rl", "step": 4, "reward": 0.5}) + "\n")
    after = here.get("/api/changes").json()
    assert after["metrics"] != before["metrics"]
    assert after["rollouts"] == before["rollouts"]
    assert here.get("/api/run").json()["rl"]["steps"]["columns"]["step"] == [1, 2, 3, 4]


def test_a_writer_at_work_is_not_disturbed_and_its_rollouts_appear(copy: Path) -> None:
    place = Place(copy)
    here = client(copy)
    before = here.get("/api/rollouts").json()["rollouts"]["count"]
    with closing(Slots(place.slots, Plan(group_size=4))) as slots:
        slot = slots.claim("worker-0", time.time())
        assert slot is not None
        trace = "traces/000001/00-1.trace"
        slots.finish(slot, {"total": 1.0, "solved": True, "category": "new"}, trace, (3, 3))
        told = here.get("/api/rollouts").json()
        assert told["rollouts"]["count"] == before + 1
        shown = here.get(f"/api/group/training/{slot.group}").json()
        assert [each["reward"] is not None for each in shown["slots"]].count(True) == 1
        assert all(each["advantage"] is None for each in shown["slots"]), "there is none before all are graded"


def test_a_rollout_that_became_too_old_and_came_again_is_the_new_one(copy: Path) -> None:
    place, here = Place(copy), client(copy)
    with closing(Slots(place.slots, Plan(group_size=4, max_staleness=0))) as slots:
        while (slot := slots.claim("w", 0.0)) is not None:
            slots.finish(slot, {"total": 0.25, "category": "first"}, "traces/000001/00-1.trace", (0, 0))
        assert "first" in here.get("/api/rollouts").json()["rollouts"]["columns"]["category"]["words"]
        assert slots.reconcile(0.0, 9)["stale"] == 4
        while (slot := slots.claim("w", 0.0)) is not None:
            slots.finish(slot, {"total": 0.75, "category": "second"}, "traces/000001/00-1.trace", (9, 9))
    words = here.get("/api/rollouts").json()["rollouts"]["columns"]["category"]["words"]
    assert "second" in words
    assert "first" not in words


def test_processes_that_are_silent_are_told_from_those_at_work(copy: Path) -> None:
    place = Place(copy)
    (copy / "lock").write_text(f"pid {os.getpid()} on {socket.gethostname()} since 2026-01-01T00:00:00+00:00\n")
    state = json.loads((copy / "state.json").read_text())
    state["stages"]["rl"]["done"] = False
    (copy / "state.json").write_text(json.dumps(state))
    write_status(place, "sampler-0", state="working", version=3)
    write_status(place, "worker-0", state="working")
    old = json.loads((place.services / "worker-0.json").read_text()) | {"time": time.time() - 100}
    (place.services / "worker-0.json").write_text(json.dumps(old))
    (place.services / "broken.json").write_text("{")
    told = ask(copy, "run")
    assert told["life"]["state"] == "running"
    assert {service["name"]: service["state"] for service in told["rl"]["services"]} == {
        "sampler-0": "working",
        "worker-0": "silent",
        "trainer": "ended",
    }
    assert any("broken.json" in problem for problem in told["problems"])


def test_looking_at_a_run_changes_nothing_in_it(copy: Path) -> None:
    def content() -> dict[str, bytes]:
        files = [path for path in copy.rglob("*") if path.is_file() and not path.name.endswith(("-shm", "-wal"))]
        return {path.relative_to(copy).as_posix(): path.read_bytes() for path in files}

    before, here = content(), client(copy)
    for address in ("run", "rollouts", "tasks", "changes", "group/training/1", "rollout/training/1/0/1"):
        assert here.get(f"/api/{address}").status_code == 200
    assert content() == before


# ------------------------------------------------------------------------------------------- half a run, or less


def test_a_run_without_reinforcement_learning_has_a_page(copy: Path) -> None:
    shutil.rmtree(copy / "rl")
    lines = [line for line in (copy / "metrics.jsonl").read_text().splitlines() if '"rl"' not in line]
    (copy / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    told = ask(copy, "run")
    assert told["rl"] is None
    assert [curve["stage"] for curve in told["training"]] == TEXT_STAGES
    assert told["outcome"] is None
    assert ask(copy, "rollouts")["rollouts"]["count"] == 0
    assert ask(copy, "tasks")["tasks"] == []


def test_a_run_that_has_only_begun_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text('name = "young"\nstages = ["pretrain"]\n')
    told = ask(tmp_path, "run")
    assert told["life"]["state"] == "stopped"
    assert told["training"] == []


def test_damage_is_told_on_the_page_and_the_rest_is_shown(copy: Path) -> None:
    place = Place(copy)
    with (copy / "metrics.jsonl").open("ab") as file:
        file.write(b"\xff rubbish\n" + json.dumps({"stage": "rl", "step": "four", "reward": "NaN"}).encode() + b"\n")
    place.evaluations.write_bytes(b"this is no database" * 100)
    place.tasks.write_text("[]")
    for path in (place.traces / "000001").iterdir():
        path.write_bytes(b"damaged")
    here = client(copy)
    told = here.get("/api/run").json()
    assert told["rl"]["steps"]["columns"]["step"] == [1, 2, 3]
    words = " ".join(told["problems"])
    assert "metrics.jsonl" in words
    assert "evaluations.sqlite" in words
    group = here.get("/api/group/training/1").json()
    assert all("damaged" in slot["problem"] for slot in group["slots"])
    refused = here.get("/api/rollout/training/1/0/1")
    assert refused.status_code == 409
    assert "damaged" in refused.json()["error"]
    assert here.get("/api/rollout/training/2/0/1").status_code == 200
    assert here.get("/api/tasks").status_code == 200


def test_rewards_of_another_shape_do_no_harm(copy: Path) -> None:
    with closing(sqlite3.connect(Place(copy).slots)) as db, db:
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
    here = client(tmp_path)
    assert b'data-mode="runs"' in here.get("/").content
    told = here.get("/api/runs").json()["runs"]
    assert [each["directory"] for each in told] == ["one", "two & a half"]
    assert told[0]["after"]["step"] == 3
    assert here.get("/run/one", follow_redirects=False).headers["location"] == "/run/one/"
    assert b'data-mode="run-of-many"' in here.get("/run/one/").content
    assert here.get("/run/two%20%26%20a%20half/api/run").json()["name"] == "nano"
    assert here.get("/run/notes/").status_code == 404
    assert here.get("/run/..%2F..%2Fetc/api/run").status_code == 404
    shutil.copytree(run, tmp_path / "three")
    assert here.get("/run/three/api/run").status_code == 200, "a run that was begun meanwhile"


# ------------------------------------------------------------------------------------------- trust


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
        "task/nobody",
        "nothing",
        "",
    ],
)
def test_there_is_nothing_but_what_is_named(run: Path, address: str) -> None:
    answer = client(run).get(f"/api/{address}")
    assert answer.status_code in (404, 409)
    assert set(answer.json()) == {"error"}


def test_files_of_the_pages_are_served_and_no_others(run: Path) -> None:
    here = client(run)
    for name in assets():
        assert here.get(f"/pages/{name}").status_code == 200
    for name in ("../server.py", "..%2Fserver.py", "%2e%2e/server.py", "nothing.js", "/etc/passwd"):
        assert here.get(f"/pages/{name}").status_code == 404
    assert here.post("/api/run").status_code == 405


def test_a_trace_is_never_read_from_outside_the_run(copy: Path, tmp_path: Path) -> None:
    place = Place(copy)
    outside = tmp_path / "secret.trace"
    shutil.copy(place.traces / "000001/00-1.trace", outside)
    with closing(sqlite3.connect(place.slots)) as db, db:
        db.execute("UPDATE slots SET trace=? WHERE grp=1 AND number=0", (f"../../{outside.name}",))
        db.execute("UPDATE slots SET trace=? WHERE grp=1 AND number=1", (str(outside),))
    (place.traces / "000001/02-1.trace").unlink()
    (place.traces / "000001/02-1.trace").symlink_to(outside)
    assert load_trace(outside)
    for number in (0, 1, 2):
        assert client(copy).get(f"/api/rollout/training/1/{number}/1").status_code == 404


def test_every_answer_forbids_what_pages_do_not_need(run: Path) -> None:
    here = client(run)
    for address in ("/", "/pages/app.js", "/api/run", "/api/nothing"):
        headers = here.get(address).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self'" in policy
        assert "unsafe" not in policy
        assert "require-trusted-types-for 'script'" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
    assert here.get("/api/run").headers["content-type"] == "application/json"


def test_another_name_for_this_machine_is_refused(run: Path) -> None:
    assert client(run).get("/", headers={"host": "evil.example"}).status_code == 400


def test_the_front_end_never_makes_markup_out_of_text() -> None:
    for name in assets():
        text = (Path("etude/viewer/pages") / name).read_text()
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "http"):
            allowed = text.count("http://www.w3.org/2000/svg") if word == "http" else 0
            assert text.count(word) == allowed, f"{name}: {word}"


# ------------------------------------------------------------------------------------------- many rollouts


def test_ten_thousand_rollouts_are_told_with_less_than_a_second_of_work(large: Path) -> None:
    took: dict[str, float] = {}
    for _ in range(3):
        here = client(large)
        for address in ("rollouts", "run", "group/training/500"):
            started = time.process_time()  # what others on this machine do is not counted
            answer = here.get(f"/api/{address}").json()
            took[address] = min(took.get(address, 99.0), time.process_time() - started)
            if address == "rollouts":
                assert answer["rollouts"]["count"] == 10_000
    print({address: f"{seconds:.2f} s" for address, seconds in took.items()})
    assert took["rollouts"] < 1.0
    assert took["run"] < 1.0
    assert took["group/training/500"] < 0.2


def test_a_group_that_did_not_change_is_not_read_again(large: Path) -> None:
    answers = Answers(large)
    first = answers.groups()
    assert all(one is other for one, other in zip(first, answers.groups(), strict=True))


def test_very_many_steps_are_thinned_and_the_page_says_so(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text('name = "long"\nstages = ["rl"]\n')
    lines = [json.dumps({"stage": "rl", "step": step, "reward": step / 3000}) for step in range(1, 3001)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    steps = ask(tmp_path, "run")["rl"]["steps"]
    assert steps["each"] == 5
    assert len(steps["columns"]["step"]) == 600
    assert steps["columns"]["reward"] == sorted(steps["columns"]["reward"])
