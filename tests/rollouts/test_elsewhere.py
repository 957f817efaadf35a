"""Processes that cannot see the run directory: what they need comes from the run service, what they make goes there."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from run_services import ServiceProcess, elsewhere, environment_of, facts_of, service_url
from scripted_lines import TASK, lines_sampler
from session_helpers import chatml

from etude.config import render_toml
from etude.errors import InputError
from etude.files import write_atomically
from etude.harness.trace_store import load_trace
from etude.model.config import ModelConfig
from etude.pods import open_fleet
from etude.recipe.recipe import load_recipe
from etude.rl.settings import open_rl_run
from etude.rollouts.queue import RolloutQueue
from etude.runs.client import RunClient
from etude.runs.layout import RunLayout
from etude.runs.member import RunMember, mirror
from etude.runs.trees import TreeLink, pack_tree, read_tree, tree_digest, unpack_tree
from etude.tasks.harbor import write_task

RECIPE = """
name = "test"
stages = ["rl"]
plugins = ["./praise.py"]
[rl]
model = "{model}"
tasks = "./tasks"
steps = 1
group_size = 2
in_flight = 2
groups_per_step = 1
window = 1024
length = 1024
sampler = {{ kv_cache_tokens = 1024 }}
rewards = {{ correctness = 1.0, praise = 0.25 }}
tool_set = {{ tools = ["read_file", "run_terminal_cmd"], short_system_prompt = true }}
budget = {{ turns = 12, max_turn_tokens = 500 }}
summaries = {{ mode = "off" }}
"""
PLUGIN = """
from etude.rewards import TermResult, VerifiedTrial, term

@term
def praise(trial: VerifiedTrial) -> TermResult:
    return TermResult(1.0)
"""
TIMEOUT_S = 120.0


@pytest.fixture
def layout(isolated_plugins: None, tmp_path: Path) -> RunLayout:
    """Return a run as the orchestrator prepares it, with one prompt; all of it is below one directory."""
    here = tmp_path / "here"
    here.mkdir()
    (here / "praise.py").write_text(PLUGIN)
    (here / "recipe.toml").write_text(RECIPE.format(model=here / "start"))
    write_atomically(here / "run/recipe.toml", render_toml(load_recipe(here / "recipe.toml")))
    layout, settings = open_rl_run(here / "run")
    layout.make()
    write_atomically(layout.id, "c" * 32)
    layout.model.mkdir()
    chatml().tokenizer.save(layout.model)
    (layout.model / "model.safetensors").write_bytes(bytes(1000))
    task = write_task(here / "tasks/lines", TASK)
    (task.directory / "environment/repo/link").symlink_to("README.md")
    (task.directory / "tests/test.sh").chmod(0o750)
    write_atomically(layout.tasks, json.dumps({"train": {"lines": str(task.directory)}, "held_out": {}}))
    RolloutQueue(layout.slots, settings).add([("lines", 0)])
    return layout


def wait(process: "subprocess.Popen[str]", true: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not true():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def worker(layout: RunLayout, tmp_path: Path) -> tuple[list[str], dict[str, str]]:
    """Return the command and environment of a worker that cannot see the run."""
    command = [sys.executable, "-m", "etude.rollouts.worker", "--service", service_url(layout), "--name", "worker-0"]
    cache = {"XDG_CACHE_HOME": str(tmp_path / "there/cache")}
    return elsewhere(tmp_path / "here", command), environment_of(layout) | cache


def test_a_worker_without_the_run_directory_finishes_rollouts(layout: RunLayout, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    with ServiceProcess(layout) as service, closing(service.client(patience_s=60)), lines_sampler(layout):
        command, environment = worker(layout, tmp_path)
        queue = RolloutQueue.open_read_only(layout.slots)
        with subprocess.Popen(command, cwd=there, env=environment, stderr=subprocess.PIPE, text=True) as process:
            wait(process, lambda: queue.counts() == {"ready": 2})
            assert (facts_of(layout, "worker-0") or {})["state"] in ("working", "waiting")
            process.terminate()
            assert process.wait(TIMEOUT_S) == 0
        asyncio.run(shut(there))
        # A plugin that has changed since the run was started is refused there as it is here.
        (tmp_path / "here/praise.py").write_text(PLUGIN + "# changed\n")
        done = subprocess.run(
            command, cwd=there, env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
        )
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert "praise.py has changed since the run was started" in done.stderr
        assert (facts_of(layout, "worker-0") or {})["problem"] in done.stderr
    for slot in queue.group(1).slots:
        assert (slot.record["total"], slot.record["parts"]) == (1.25, {"correctness": 1.0, "praise": 0.25})
        trace = load_trace(layout.root / slot.trace)
        assert trace.facts["run"] == "run"
    trees = list((there / "cache/etude/trees").iterdir())
    assert len(trees) == 2, "the task and the tokenizer, once"
    (task,) = (tree for tree in trees if (tree / "task.toml").exists())
    assert os.readlink(task / "environment/repo/link") == "README.md"
    assert (task / "tests/test.sh").stat().st_mode & 0o777 == 0o750
    assert not any((tree / "model.safetensors").exists() for tree in trees)


async def shut(there: Path) -> None:
    """Check that no pod is left where the worker had them, and stop their zygote."""
    (state,) = (there / "cache").rglob("rl/pods")
    async with open_fleet(state=state) as fleet:
        assert fleet.local is not None
        assert not fleet.local.registry.records()
        await fleet.local.backend.shutdown()


# ------------------------------------------------------------------------------------------- trees


def test_a_tree_arrives_as_it_was_and_nothing_else_does(tmp_path: Path) -> None:
    source, cache = tmp_path / "source", tmp_path / "cache"
    (source / "empty").mkdir(parents=True)
    (source / "a b").mkdir()
    (source / "a b/run.sh").write_text("echo\n")
    (source / "a b/run.sh").chmod(0o755)
    (source / "link").symlink_to("a b/run.sh")
    tree = {**read_tree(source), "made": b"bytes of its own"}
    digest = tree_digest(tree)
    path = unpack_tree(Reader(b"".join(pack_tree(tree))), digest, cache)
    assert tree_digest(read_tree(path)) == digest
    assert (path / "made").read_bytes() == b"bytes of its own"
    assert (path / "empty").is_dir()
    assert os.access(path / "link", os.X_OK)
    assert unpack_tree(Reader(b"".join(pack_tree(tree))), digest, cache) == path
    for name, entry in {"../out": b"x", "/tmp/out-of-it": b"x", "up": TreeLink("../../out")}.items():
        evil = {name: entry}
        with pytest.raises(InputError, match=r"refused: .* outside"):
            unpack_tree(Reader(b"".join(pack_tree(evil))), tree_digest(evil), cache)
    with pytest.raises(InputError, match="not those that were announced"):
        unpack_tree(Reader(b"".join(pack_tree(tree))), "0" * 64, cache)
    with pytest.raises(InputError, match=r"is refused|not those that were announced"):  # it broke off
        unpack_tree(Reader(b"".join(pack_tree(tree))[:1700]), digest, tmp_path / "other")
    assert [each.name for each in cache.iterdir()] == [digest]
    assert not (tmp_path / "out").exists()


class Reader:
    """Bytes as a response gives them: forwards only."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def read(self, size: int = -1) -> bytes:
        taken, self.data = self.data[: len(self.data) if size < 0 else size], self.data[size if size >= 0 else 0 :]
        return taken


def test_a_model_with_adapters_comes_with_its_base(
    layout: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = layout.root / "base"
    base.mkdir()
    config = {"model_type": "qwen3", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config |= {"intermediate_size": 8, "vocab_size": 300, "num_key_value_heads": 1, "max_position_embeddings": 64}
    (base / "config.json").write_text(json.dumps(config))
    (base / "model.safetensors").write_bytes(bytes(2000))
    (layout.model / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "../base"}))
    (layout.model / "agent.json").write_text(json.dumps({"plugins": [str(tmp_path / "here/praise.py"), "json"]}))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "there"))
    with ServiceProcess(layout) as service:
        client: RunClient = service.client(patience_s=60)
        info = client.connect()
        member = RunMember("sampler-0", client, info, mirror(info), sees_run=False, same_machine=False)
        whole, small = member.model(weights=True), member.model(weights=False)
        assert ModelConfig.load(small).vocab_size == ModelConfig.load(whole).vocab_size == 300
        assert (whole / "base/model.safetensors").stat().st_size == 2000
        assert not list(small.rglob("*.safetensors"))
        assert json.loads((whole / "agent.json").read_text())["plugins"] == ["json"], "its own come with the recipe"
        assert member.task_names("training", 5) == ["lines"]
        assert member.task_directory("training", "other") is None
        client.close()
