"""`etude rl` as it is: real processes, real pods, a tiny model; and every one of them killed in turn."""

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rl_runs import make_recipe

from etude.harness.trace_store import load_trace
from etude.model import load
from etude.runs.layout import Place, read_status, statuses
from etude.runs.run import Parent, Run, content_digest
from etude_nano.source import generate_nano

LIMIT_S = 300


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    measured = {"tasks": ["./held-out", "./fresh"], "most": 2, "samples": 2, "temperature": 1.0}
    directory = tmp_path_factory.mktemp("recipe")
    generate_nano(directory / "fresh", 3, "held-out", 1, (1,))
    return make_recipe(directory, tasks=40, evaluation=measured)


def command(recipe: Path, run: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "etude.cli", "rl", str(recipe), "--out", str(run), "--json", *more]


def ledger(place: Place) -> dict[str, int]:
    """Every trained prompt with its step; an error if one is there twice."""
    with sqlite3.connect(place.slots) as db:
        rows = db.execute("SELECT task, step FROM groups WHERE step IS NOT NULL").fetchall()
    assert len(rows) == len({task for task, _ in rows}), "a prompt was trained on twice"
    return dict(rows)


def children(place: Place) -> dict[str, int]:
    """The pids of the services that live."""
    names = ("trainer", "sampler-0", "worker-0")
    found = {name: read_status(place, name) for name in names}
    return {name: status["pid"] for name, status in found.items() if status and _alive(status["pid"])}


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except OSError:
        return False


def services_of(place: Place) -> list[str]:
    """Command lines of services of this run that live, whoever started them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            line = path.read_bytes().replace(b"\0", b" ").decode()
            if "etude.rl." in line and str(place.run) in line and _alive(int(path.parent.name)):
                found.append(line)
    return found


def check_finished(place: Place, facts: dict[str, Any], steps: int, groups: int) -> None:
    """What must be true of a run that reached its end, whatever happened on the way."""
    assert facts["steps"] == steps
    trained = ledger(place)
    assert sorted(trained.values()) == sorted(step for step in range(1, steps + 1) for _ in range(groups))
    run = Run.read(place.run)
    records = run.metrics("rl")
    assert [record["step"] for record in records if not record.get("evaluation")] == list(range(1, steps + 1))
    measured = [record for record in records if record.get("evaluation")]
    assert [record["step"] for record in measured] == [0, steps]
    for record in measured:
        assert record["tasks"] + record["infrastructure/given_up"] == 4
        parts = [record[f"set/{name}/solved"] for name in ("held-out", "fresh")]
        assert record["solved"] == pytest.approx(sum(parts) / 2)
    load(run.path / "checkpoints" / f"rl-{steps}")
    with sqlite3.connect(place.slots) as db:
        traces = db.execute(
            "SELECT trace, oldest, step FROM slots JOIN groups ON groups.id = grp WHERE step IS NOT NULL"
        ).fetchall()
    assert len(traces) == steps * groups * 2
    for name, oldest, step in traces:
        assert load_trace(place.root / name).segments
        assert step - 1 - oldest <= 2, "staler than allowed"


def test_a_run_learns_measures_and_leaves_its_checkpoint(recipe: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        command(recipe, tmp_path / "run"), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)["stages"]["rl"]
    place = Place(tmp_path / "run")
    check_finished(place, facts, steps=3, groups=2)
    assert {name: told["state"] for name, told in statuses(place).items()} == dict.fromkeys(statuses(place), "ended")
    records = [record for record in Run.read(place.run).metrics("rl") if not record.get("evaluation")]
    for name in ("reward", "mismatch_mean", "mismatch_p99", "entropy", "gradient_norm", "waited_s"):
        assert any(name in record for record in records), name
    (made,) = Run.read(place.run).artefacts("checkpoint")
    began_with = recipe.parent / "model"
    assert made.parents == (Parent(str(began_with), content_digest(began_with)),)
    assert records[0]["staleness_max"] == 0
    assert records[0].get("mismatch_p99", 0.0) < 1e-4  # on the same weights trainer and sampler agree
    again = subprocess.run(
        command(recipe, tmp_path / "run", "--resume"), capture_output=True, text=True, timeout=60, check=False
    )
    assert again.returncode == 0
    assert json.loads(again.stdout)["stages"]["rl"] == facts


@pytest.mark.slow
def test_every_process_may_be_killed_at_any_time(recipe: Path, tmp_path: Path) -> None:
    """Trainer, sampler, worker with its pods, and the orchestrator, again and again, until the run is through."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    chance = random.Random(seed)
    place = Place(tmp_path / "run")
    overrides = ["--set", "rl.steps=12", "--set", "rl.checkpoint_every=2"]
    names = ["trainer", "sampler-0", "worker-0", "orchestrator"]
    waiting = chance.sample(names, 4) + chance.sample(names * 2, 8)  # each once, then as it comes
    killed: list[str] = []
    deadline = time.monotonic() + 900
    while True:
        with open(tmp_path / "out", "w") as out, open(tmp_path / "err", "a") as err:
            process = subprocess.Popen(
                command(recipe, place.run, "--resume", *overrides), stdout=out, stderr=err, start_new_session=True
            )
            while process.poll() is None:
                assert time.monotonic() < deadline, (killed, (tmp_path / "err").read_text()[-2000:])
                time.sleep(0.1)
                there = children(place) | {"orchestrator": process.pid}
                if waiting and len(there) == 4:  # all at work: whom does it hit?
                    time.sleep(chance.uniform(0.2, 4.0))
                    with suppress(ProcessLookupError):  # it was through before
                        os.kill(there[waiting[0]], signal.SIGKILL)
                        killed.append(waiting.pop(0))
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, (tmp_path / "err").read_text()[-3000:]
    print("killed", killed)
    assert services_of(place) == [], "a process outlived its orchestrator"
    assert len(set(killed)) == 4, "the run was through before everybody had been killed"
    check_finished(place, json.loads((tmp_path / "out").read_text())["stages"]["rl"], steps=12, groups=2)
