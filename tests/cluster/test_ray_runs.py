"""Whole RL runs on a Ray cluster, also while its nodes are killed and others join."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from ray_nodes import add_node, blind_node, free_port, open_nodes
from rl_runs import make_recipe
from test_run import check_finished, command

from etude.runs.address import read_address
from etude.runs.layout import RunLayout
from etude.runs.service_status import read_statuses
from etude_nano.source import generate_nano

pytestmark = pytest.mark.slow
LIMIT_S = 1500


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    evaluation = {"test": ["./new"], "max_tasks": 2, "validation_samples": 2, "temperature": 1.0}
    directory = tmp_path_factory.mktemp("recipe")
    generate_nano(directory / "new", 3, "unseen", 1, (1,))
    return make_recipe(directory, tasks=60, evaluation=evaluation)


def services_of(layout: RunLayout) -> list[str]:
    """Return the command lines of all running services of this run."""
    address = read_address(layout)
    marks, found = [str(layout.run), *([address.url] if address else [])], []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            line = path.read_bytes().replace(b"\0", b" ").decode()
            if " -m etude." in line and " rl " not in line and any(mark in line for mark in marks):
                found.append(line)
    return found


class RunningCommand:
    """`etude rl` on a cluster."""

    def __init__(self, nodes: Any, recipe: Path, directory: Path, *more: str, address: str = "ray") -> None:
        self.layout, self.directory = RunLayout(directory / "run"), directory
        self.command = command(recipe, self.layout.run, "--cluster", address, "--resume", *more)
        self.environment = {**os.environ, "RAY_ADDRESS": nodes.address}
        with open(directory / "out", "w") as out, open(directory / "err", "w") as err:
            self.process = subprocess.Popen(self.command, env=self.environment, stdout=out, stderr=err)
        self.deadline = time.monotonic() + LIMIT_S

    def again(self, **changes: str) -> subprocess.CompletedProcess[str]:
        """Run the same command with some words changed."""
        given = [changes.get(word.strip("-"), word) for word in self.command]
        return subprocess.run(given, env=self.environment, capture_output=True, text=True, check=False, timeout=LIMIT_S)

    def step(self) -> int:
        return max((int(path.stem) for path in self.layout.steps.glob("[0-9]*.json")), default=0)

    def wait_for_step(self, step: int) -> None:
        while self.step() < step:
            assert self.process.poll() is None, self.errors()
            assert time.monotonic() < self.deadline, self.errors()
            time.sleep(0.1)

    def finish(self) -> dict[str, Any]:
        self.process.wait(self.deadline - time.monotonic())
        assert self.process.returncode == 0, self.errors()
        facts: dict[str, Any] = json.loads((self.directory / "out").read_text())["stages"]["rl"]
        return facts

    def errors(self) -> str:
        return (self.directory / "err").read_text()[-3000:]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_on_two_nodes(ranks: int, recipe: Path, tmp_path: Path) -> None:
    """With two ranks, each node has room for one of them only."""
    spread = ["--set", "cluster.trainer.cpus=3", "--set", "rl.parallel.dp_shard=2", "--set", "rl.threads=1"]
    with open_nodes(2, cpus=5) as nodes:
        run = RunningCommand(nodes, recipe, tmp_path, *(spread if ranks == 2 else []))
        run.wait_for_step(1)
        statuses = read_statuses(run.layout)
        facts, address = run.finish(), nodes.address
        check_finished(run.layout, facts, steps=3, groups=2)
        if ranks == 1:
            plan = run.again(rl="evaluation", resume="--dry-run")
            assert json.loads(plan.stdout)["stages"]["evaluation"]["cluster"]["nodes"] == 2, plan.stderr
            done = run.again(rl="evaluation")
            assert done.returncode == 0, done.stderr
            figures = json.loads(done.stdout)["stages"]["evaluation"]["models"]
            assert list(figures) == ["start", "rl"]
            assert all(list(sets) == ["held-out", "new"] for sets in figures.values())
    assert services_of(run.layout) == []
    assert statuses["orchestrator"].facts["cluster"] == f"the Ray cluster at {address}"
    workers = {status.facts["host"] for name, status in statuses.items() if name.startswith("worker")}
    assert len(workers) == 2
    assert facts["deaths"] == 0
    if ranks == 2:
        assert (run.layout.logs / "trainer-rank-1.log").exists()


def test_workers_and_samplers_need_no_run_directory(
    recipe: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The node of the command has room for the trainer only; the other one sees neither the run nor its cache."""
    cache = tmp_path_factory.mktemp("cache")
    with open_nodes(1, cpus=1) as nodes, blind_node(nodes, tmp_path, cache, sessions=1):
        run = RunningCommand(nodes, recipe, tmp_path, "--set", "cluster.worker_resource=sessions")
        run.wait_for_step(1)
        statuses = read_statuses(run.layout)
        facts = run.finish()
    check_finished(run.layout, facts, steps=3, groups=2)
    hosts = {name: statuses[name].facts["host"] for name in ("trainer", "sampler-0", "worker-0")}
    assert hosts["sampler-0"] == hosts["worker-0"] != hosts["trainer"]
    assert list(cache.glob("etude/trees/*")), "the files of the run were not fetched"


def test_a_command_outside_of_the_cluster(recipe: Path, tmp_path: Path) -> None:
    """It holds the run and its trainer, through Ray's client."""
    with open_nodes(2, ray_client_server_port=(port := free_port())) as nodes:
        run = RunningCommand(nodes, recipe, tmp_path, address=f"ray://127.0.0.1:{port}")
        run.wait_for_step(1)
        statuses = read_statuses(run.layout)
        facts = run.finish()
    check_finished(run.layout, facts, steps=3, groups=2)
    assert statuses["trainer"].facts["host"] == socket.gethostname()
    assert len({status.facts["host"] for name, status in statuses.items() if name.startswith("worker")}) == 2


def test_nodes_may_be_killed_and_join_at_any_time(recipe: Path, tmp_path: Path) -> None:
    """Kill nodes of four, replace them, and kill the command itself: nothing is trained twice, the run finishes."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    options = ["--set", "rl.steps=14", "--set", "rl.sampler.count=2", "--set", "rl.checkpoint_every=2"]
    with open_nodes(4) as nodes:
        others = list(nodes.worker_nodes)
        run = RunningCommand(nodes, recipe, tmp_path, *options)
        for step in (1, 3, 5):
            run.wait_for_step(step)
            nodes.remove_node(others.pop(rng.randrange(len(others))), allow_graceful=False)
            if step != 3:
                others.append(add_node(nodes))
        run.wait_for_step(8)
        run.process.kill()
        run.process.wait()
        while services_of(run.layout):
            assert time.monotonic() < run.deadline
            time.sleep(0.1)
        run = RunningCommand(nodes, recipe, tmp_path, *options)
        run.wait_for_step(9)
        nodes.remove_node(others.pop(), allow_graceful=False)
        facts = run.finish()
    check_finished(run.layout, facts, steps=14, groups=2)
    assert services_of(run.layout) == []
    deaths = [json.loads(line) for line in (run.layout.logs / "deaths.jsonl").read_text().splitlines()]
    print(*deaths, sep="\n")
    lost = {death["name"] for death in deaths if "was lost with its node" in death["why"]}
    assert any(name.startswith("worker") for name in lost)
