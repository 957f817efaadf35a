"""`etude rl` with real processes, real pods and a tiny model; and with every process killed in turn."""

import json
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import transformers
from ranks import follower_of
from rl_runs import make_recipe

from etude.chat.tokenizer import Tokenizer
from etude.evaluation.run_results import validations
from etude.evaluation.scorings import count_scorings
from etude.files import content_digest
from etude.harness.trace_store import load_trace
from etude.model import load
from etude.rollouts.live_settings import recorded_changes
from etude.rollouts.settings import EvaluationSettings, load_evaluation
from etude.runs.address import read_address
from etude.runs.layout import RunLayout
from etude.runs.run import Parent, Run
from etude.runs.service_status import read_statuses
from etude.weights.object_store import ObjectStore
from etude.weights.versions import follow
from etude_nano.source import generate_nano

LIMIT_S = 300


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    evaluation: dict[str, Any] = {"test": ["./new"], "max_tasks": 2, "validation_samples": 2, "temperature": 1.0}
    directory = tmp_path_factory.mktemp("recipe")
    evaluation["benchmarks"] = [{"tasks": "./more", "every": 2, "max_tasks": 1}]
    generate_nano(directory / "new", 3, "unseen", 1, (1,))
    generate_nano(directory / "more", 2, "validation", 2, (1,))
    return make_recipe(directory, tasks=40, evaluation=evaluation)


def command(recipe: Path, run: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "etude.cli", "rl", str(recipe), "--out", str(run), "--json", *more]


def trained_prompts(layout: RunLayout) -> dict[str, tuple[int, bool]]:
    """Return every consumed prompt with its step and whether it was informative; fail if one was consumed twice."""
    with sqlite3.connect(layout.slots) as db:
        rows = db.execute("SELECT task, step, informative FROM groups WHERE step IS NOT NULL").fetchall()
    assert len(rows) == len({task for task, *_ in rows}), "a prompt was trained on twice"
    return {task: (step, bool(informative)) for task, step, informative in rows}


def children(layout: RunLayout) -> dict[str, int]:
    """Return the pids of the running services."""
    names = ("trainer", "sampler-0", "worker-0", "run-service")
    found = {name: status.facts for name, status in read_statuses(layout).items() if name in names}
    return {name: facts["pid"] for name, facts in found.items() if _alive(facts["pid"])}


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except OSError:
        return False


def services_of(layout: RunLayout) -> list[str]:
    """Return the command lines of all running services of this run."""
    found, address = [], read_address(layout)
    names = [str(layout.run), *([address.url] if address else [])]
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            line = path.read_bytes().replace(b"\0", b" ").decode()
            if (
                re.search(r"-m etude\.(rl|rollouts|inference)\.", line)
                and any(name in line for name in names)
                and _alive(int(path.parent.name))
            ):
                found.append(line)
    return found


def evaluation_of(layout: RunLayout) -> EvaluationSettings:
    found = load_evaluation(layout)
    assert found is not None
    return found


def check_finished(layout: RunLayout, facts: dict[str, Any], steps: int, groups: int) -> None:
    """Check what must hold for every finished run."""
    assert facts["steps"] == steps
    trained = trained_prompts(layout).values()
    informative = sorted(step for step, informative in trained if informative)
    # A random model's rollouts rarely end alike: no step reaches its limit of groups.
    assert informative == sorted(step for step in range(1, steps + 1) for _ in range(groups))
    run = Run.read(layout.run)
    records = run.metrics("rl")
    assert [record["step"] for record in records if not record.get("evaluation")] == list(range(1, steps + 1))
    evaluations = list(validations(records))
    assert [record["step"] for record in evaluations] == [0, steps]
    further = [record["step"] for record in records if record.get("benchmark") == "more"]
    benchmarks = [each.name for each in evaluation_of(layout).benchmarks]
    assert sorted(further) == (sorted({*range(0, steps + 1, 2), steps}) if "more" in benchmarks else [])
    assert (evaluations[-1]["versions/oldest"], evaluations[-1]["versions/newest"]) == (steps, steps)
    for record in evaluations:
        assert record["tasks"] + record["infrastructure/given_up"] == 2
    with sqlite3.connect(layout.evaluations) as db:
        scored = {task.split("/")[1] for (task,) in db.execute("SELECT task FROM groups WHERE dropped IS NULL")}
    assert scored == {"held-out", *benchmarks}, "RL has looked at a test set"
    assert count_scorings(layout).keys() == {"held-out", *benchmarks}
    load(run.path / "checkpoints" / f"rl-{steps}")
    with sqlite3.connect(layout.slots) as db:
        traces = db.execute(
            "SELECT trace, oldest, step FROM slots JOIN groups ON groups.id = grp WHERE step IS NOT NULL"
        ).fetchall()
    assert len(traces) == len(trained) * 2
    for name, oldest, step in traces:
        assert load_trace(layout.root / name).segments
        # About 2 is usual (prefetch_steps); a killed worker or trainer delays groups up to max_staleness.
        assert step - 1 - oldest <= 4, "staler than allowed"


def test_a_run_trains_evaluates_and_saves_its_checkpoint(recipe: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        command(recipe, tmp_path / "run"), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)["stages"]["rl"]
    layout = RunLayout(tmp_path / "run")
    check_finished(layout, facts, steps=3, groups=2)
    assert {status.state for status in read_statuses(layout).values()} == {"ended"}
    records = [record for record in Run.read(layout.run).metrics("rl") if not record.get("evaluation")]
    for name in ("reward", "entropy", "gradient_norm", "waited_s"):
        assert any(name in record for record in records), name
    (made,) = Run.read(layout.run).artefacts("checkpoint")
    assert [file.name for file in made.path.glob("*.safetensors")] == ["model.safetensors"]
    assert isinstance(transformers.AutoModelForCausalLM.from_pretrained(made.path), transformers.Qwen3ForCausalLM)
    text = "def f(x):"
    assert transformers.AutoTokenizer.from_pretrained(made.path).encode(text) == Tokenizer.load(made.path).encode(text)
    origin = recipe.parent / "model"
    assert made.parents == (Parent(str(origin), content_digest(origin)),)
    assert records[0]["staleness_max"] == 0
    assert records[0].get("mismatch_numerics_p99", 0.0) < 1e-4  # on the same weights trainer and sampler agree
    again = subprocess.run(
        command(recipe, tmp_path / "run", "--resume"), capture_output=True, text=True, timeout=60, check=False
    )
    assert again.returncode == 0
    assert json.loads(again.stdout)["stages"]["rl"] == facts


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["etude run", "torchrun"])
def test_a_run_with_two_trainer_processes(launcher: str, recipe: Path, tmp_path: Path) -> None:
    given = command(recipe, tmp_path / "run", "--set", "rl.parallel.dp_shard=2")
    if launcher == "torchrun":  # which starts two of the command: one of them starts the processes of the trainer
        rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0")
        given[1:1] = ["-m", "torch.distributed.run", "--nproc-per-node", "2", *rendezvous]
    done = subprocess.run(given, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    layout = RunLayout(tmp_path / "run")
    check_finished(layout, json.loads(done.stdout)["stages"]["rl"], steps=3, groups=2)
    records = [record for record in Run.read(layout.run).metrics("rl") if not record.get("evaluation")]
    assert all(record["imbalance"] >= 1 for record in records)
    assert records[0].get("mismatch_numerics_p99", 0.0) < 1e-4
    shards = follow(ObjectStore(layout.store))[0].shards
    assert {shard.name.split("-")[1] for shard in shards} == {"000", "001"}


def test_an_input_error_in_a_rollout_ends_the_run_with_its_own_words(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, tasks=8, held_out=1, window=160, steps=2)
    done = subprocess.run(
        command(recipe, tmp_path / "run"), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert re.search(r"nano-\S+: the prompt has [\d,]+ tokens, but only 144 of the window of 160 are free for it", last)
    with sqlite3.connect(RunLayout(tmp_path / "run").slots) as db:
        assert db.execute("SELECT SUM(failures) FROM slots").fetchone() == (0,), "it was retried"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_process_may_be_killed_at_any_time(ranks: int, recipe: Path, tmp_path: Path) -> None:
    """Kill run service, trainer, its other rank, sampler, worker, orchestrator at random times; the run must finish."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    layout = RunLayout(tmp_path / "run")
    overrides = ["--set", "rl.steps=12", "--set", "rl.checkpoint_every=2", "--set", f"rl.parallel.dp_shard={ranks}"]
    names = ["trainer", "sampler-0", "worker-0", "run-service", "orchestrator", *(["rank-1"] if ranks > 1 else [])]
    waiting = rng.sample(names, len(names)) + rng.sample(names * 2, 8)  # each once, then at random
    killed: list[str] = []
    deadline = time.monotonic() + 900
    while True:
        with open(tmp_path / "out", "w") as out, open(tmp_path / "err", "a") as err:
            process = subprocess.Popen(
                command(recipe, layout.run, "--resume", *overrides), stdout=out, stderr=err, start_new_session=True
            )
            while process.poll() is None:
                assert time.monotonic() < deadline, (killed, (tmp_path / "err").read_text()[-2000:])
                time.sleep(0.1)
                running = children(layout) | {"orchestrator": process.pid}
                if ranks > 1:
                    with suppress(AssertionError):
                        running["rank-1"] = follower_of(process.pid, "etude.rl.trainer_process")
                if waiting and len(running) == len(names):  # all processes are running
                    time.sleep(rng.uniform(0.2, 4.0))
                    with suppress(ProcessLookupError):  # it had finished
                        os.kill(running[waiting[0]], signal.SIGKILL)
                        killed.append(waiting.pop(0))
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, (tmp_path / "err").read_text()[-3000:]
    print("killed", killed)
    assert services_of(layout) == [], "a process outlived its orchestrator"
    assert len(set(killed)) == len(names), "the run finished before every process had been killed"
    check_finished(layout, json.loads((tmp_path / "out").read_text())["stages"]["rl"], steps=12, groups=2)


@pytest.mark.slow
def test_a_copied_run_whose_newest_checkpoint_is_damaged_goes_on_to_its_end(recipe: Path, tmp_path: Path) -> None:
    """Kill the run in the middle, copy it, delete the original, damage the newest checkpoint, resume the copy."""
    old = RunLayout(tmp_path / "here" / "run")
    overrides = ["--set", "rl.steps=6", "--set", "rl.checkpoint_rollouts_s=0.01", "--set", "rl.budget.turns=4"]
    process = subprocess.Popen(command(recipe, old.run, *overrides), stdout=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + LIMIT_S
    while not (old.trainer / "000003").exists():
        assert process.poll() is None, "the run ended"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.wait()
    while services_of(old):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    with closing(sqlite3.connect(old.slots)) as db:
        (started,) = db.execute("SELECT COUNT(*) FROM slots WHERE resume != ''").fetchone()
    print("rollouts with a checkpoint", started)
    new = RunLayout(tmp_path / "there" / "copy")
    new.run.parent.mkdir()
    subprocess.run(["cp", "-a", old.run, new.run], check=True)  # with sockets of pods and the like
    shutil.rmtree(tmp_path / "here")
    newest = max(path for path in new.trainer.glob("[0-9]*"))
    (newest / "model.safetensors").write_bytes((newest / "model.safetensors").read_bytes()[:-1])
    done = subprocess.run(
        command(recipe, new.run, "--resume", *overrides), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"{newest}: the checkpoint is damaged" in done.stderr
    assert f"goes back to {int(newest.name) - 1:06d}" in done.stderr
    check_finished(new, json.loads(done.stdout)["stages"]["rl"], steps=6, groups=2)
    assert not (tmp_path / "here").exists(), "the copy wrote to the place of the original"


@pytest.mark.slow
def test_settings_and_workers_change_during_a_run(tmp_path: Path) -> None:
    """With the commands of a user: what they change takes effect, is recorded, and loses no rollout."""
    recipe = make_recipe(tmp_path, tasks=1000, steps=200, checkpoint_every=50)  # it is interrupted before
    layout = RunLayout(tmp_path / "run")

    def etude(*arguments: str) -> str:
        line = [sys.executable, "-m", "etude.cli", *arguments]
        done = subprocess.run(line, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    def wait_for(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert running.poll() is None, "the run ended"
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def workers() -> dict[str, Any]:
        found = {name: each.facts for name, each in read_statuses(layout).items() if each.facts.get("kind") == "worker"}
        return {name: facts for name, facts in found.items() if facts["state"] in ("working", "waiting")}

    with open(tmp_path / "log", "wb") as log:
        running = subprocess.Popen(command(recipe, layout.run), stdout=log, stderr=log)
    try:
        wait_for(lambda: layout.step_file(2).exists())
        said = etude("change", str(layout.run), "rl.temperature=0.5", "rl.workers=2", "rl.in_flight=6")
        assert "rl.workers: 1 -> 2; applies to at once" in said
        wait_for(lambda: workers().keys() == {"worker-0", "worker-1"})
        wait_for(lambda: all(facts["max_rollouts"] == 3 for facts in workers().values()))
        first = workers()["worker-0"]["session"]
        assert "worker-0: replaced" in etude("drain", str(layout.run), "worker-0")
        wait_for(lambda: workers().get("worker-0", {}).get("session") not in (None, first))
        etude("change", str(layout.run), "rl.workers=1", "rl.rewards.correctness=2.0")
        wait_for(lambda: workers().keys() == {"worker-0"} and "worker-1" not in read_statuses(layout))
        text = etude("status", str(layout.run))
        assert "worker-0" in text
        seen = max(entry["step"] for entry in recorded_changes(layout))
        wait_for(lambda: layout.step_file(seen + 4).exists())
        running.send_signal(signal.SIGINT)
        assert running.wait(LIMIT_S) == 130, (tmp_path / "log").read_text()
    finally:
        running.kill()
        running.wait()
    assert not (layout.logs / "deaths.jsonl").exists(), "a drained worker has not died"
    changes = {entry["key"]: entry["step"] for entry in recorded_changes(layout)}
    assert changes.keys() == {"rl.temperature", "rl.workers", "rl.in_flight", "rl.rewards"}
    assert all(2 < step <= seen for step in changes.values()), changes
    with sqlite3.connect(layout.slots) as db:
        rows = db.execute(
            "SELECT trace, attempt, step FROM slots JOIN groups ON groups.id = grp WHERE step IS NOT NULL ORDER BY step"
        ).fetchall()
    assert {attempt for _, attempt, _ in rows} == {1}, "a rollout was sampled again"
    temperatures = [load_trace(layout.root / name).facts["temperature"] for name, _, _ in rows]
    assert temperatures[0] == 1.0
    assert temperatures[-1] == 0.5
    records = [record for record in Run.read(layout.run).metrics("rl") if not record.get("evaluation")]
    late = [record for record in records if record["step"] > changes["rl.temperature"]]
    found = [record["mismatch_numerics_p99"] for record in late if "mismatch_numerics_p99" in record]
    # the median: a step may have tokens over caches of older weights
    assert not found or sorted(found)[len(found) // 2] < 1e-4, "every rollout is trained at its temperature"
    informative = sorted(step for step, counted in trained_prompts(layout).values() if counted)
    # A step may reach its limit of groups: after a while all rollouts end alike.
    assert all(informative.count(step) <= 2 for step in informative), informative
