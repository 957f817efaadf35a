"""The recipes for 8 and 64 GPUs: a dry run accepts them, and a twin with small sizes runs on CPU processes.

A twin is the recipe itself with other sizes, paths, devices and meshes; its model has the family and the layers of the
real one.
"""

from __future__ import annotations

import json
import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rl_runs import tiny_tokenizer

from etude.chat.tokenizer import train_tokenizer
from etude.model import ModelConfig, initialize, save
from etude.model.describe import find_config
from etude.pipeline.plan import make_plan
from etude.pipeline.stages import run_recipe
from etude.recipe.recipe import Recipe, load_recipe
from etude.runs.run import Run

RECIPES = Path(__file__).parents[2] / "recipes"
TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_experts_per_tok": 2,
}


@dataclass(frozen=True)
class Twin:
    """Sizes of a twin: of its model, and of its stages, by recipe key."""

    recipe: str
    model: dict[str, Any]
    sizes: dict[str, Any]


TRAINING = {
    "pretrain": {"length": 64, "tokens": 2048, "rows": 1, "micro_batches": 4, "held_out.window": 64},
    "extend": {"length": 128, "tokens": 1024, "rows": 1, "micro_batches": 2},
    "sft": {"length": 128, "tokens": 1024, "rows": 1, "micro_batches": 4},
}
RL = {
    "parallel": {"dp_shard": 2, "ep": 2},
    "steps": 1,
    "group_size": 2,
    "groups_per_step": 2,
    "in_flight": 4,
    "workers": 1,
    "length": 2048,
    "window": 2048,
    "lora": {"rank": 2},
    "tool_set": {"tools": ["read_file"], "short_system_prompt": True},
    "budget": {"turns": 2, "max_turn_tokens": 16},
    "rewards": {"correctness": 1.0, "effort_spent": 0.5},  # a random model solves nothing, but its effort varies
    "summaries.mode": "off",
    "informative_groups": False,
    "sampler.count": 1,
    "sampler.device": "cpu",
    "sampler.kv_cache_tokens": 16384,
}
TWO, SHARED_ROWS = {"dp_shard": 2, "ep": 2}, {"cp": 2, "ep": 2}
FOUR = {"dp_shard": 2, "cp": 2, "ep": 4}
QWEN = Twin(
    "qwen3-30b-a3b",
    {**TINY, "num_key_value_heads": 1, "head_dim": 16, "num_experts": 8, "max_position_embeddings": 64},
    {
        "parallel": TWO,
        **{f"{stage}.{key}": value for stage, table in TRAINING.items() for key, value in table.items()},
        "mtp.length": 64,
        "mtp.tokens": 512,
        "mtp.rows": 1,
        "mtp.micro_batches": 4,
        "extend.parallel": SHARED_ROWS,
        "extend.length": 2048,
        "extend.tokens": 8192,
        **{f"rl.{key}": value for key, value in RL.items()},
        "evaluation.max_tasks": 1,
        "evaluation.samples": 1,
        "evaluation.validation_samples": 1,
        "evaluation.models": ["rl"],
    },
)
KIMI = Twin(
    "kimi-k2.5",
    {
        **TINY,
        "num_key_value_heads": 2,
        "n_routed_experts": 8,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "max_position_embeddings": 256,
    },
    {
        "parallel": FOUR,
        **{f"{stage}.{key}": value for stage, table in TRAINING.items() for key, value in table.items()},
        "extend.parallel": {"cp": 4, "ep": 4},
    },
)


def recipe_of(twin: Twin, place: Path) -> Recipe:
    """Return the recipe with the sizes of the twin, and make the model and the sources that it names."""
    for package in ("one", "away"):
        (place / "code" / package).mkdir(parents=True)
        text = "".join(f"def {package}_{i}(x, y):\n    return x * {i} + y\n\n" for i in range(60))
        (place / f"code/{package}/a.py").write_text(text)
    question = [{"role": "user", "content": "add 2 and 3"}, {"role": "assistant", "content": "the sum is 5"}]
    (place / "chat.jsonl").write_text("".join(json.dumps({"messages": question}) + "\n" for _ in range(30)))
    named = load_recipe(RECIPES / f"{twin.recipe}.toml")
    assert named.base is not None
    assert named.corpus is not None
    texts = [(place / "code/one/a.py").read_text()]
    tokenizer = tiny_tokenizer() if named.rl else train_tokenizer(texts, 300)  # prompts of tasks fit the window
    config = find_config(named.base.source).evolve(**twin.model, vocab_size=len(tokenizer))
    save(initialize(config, 0), place / "model")
    tokenizer.save(place / "model")
    corpora = [
        {
            "name": corpus.name,
            "sources": [str(place / ("chat.jsonl" if corpus.chat else "code"))],
            "chat": corpus.chat,
            "held_out": [] if corpus.chat else ["away"],
            "layout": corpus.layout,
        }
        for corpus in named.corpus.build
    ]
    sizes = {"base.source": str(place / "model"), "corpus.build": corpora, **twin.sizes}
    if named.tasks is not None:
        written = tomllib.loads((RECIPES / f"{twin.recipe}.toml").read_text())["tasks"]["build"]
        sizes["tasks.build"] = [{**each, "count": 4, "demonstrations": 0} for each in written]
    devices = [stage for stage in named.stages if hasattr(getattr(named, stage), "device")]
    sizes |= {f"{stage}.device": "cpu" for stage in devices}
    return load_recipe(RECIPES / f"{twin.recipe}.toml", [f"{key}={toml(value)}" for key, value in sizes.items()])


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)


@pytest.mark.parametrize(("name", "gpus"), [("qwen3-30b-a3b", 8), ("kimi-k2.5", 64)])
def test_a_dry_run_accepts_the_recipe(name: str, gpus: int) -> None:
    plan = make_plan(load_recipe(RECIPES / f"{name}.toml"), budget=0.05)
    for stage in plan.stages:
        trainers = [each for each in stage.memory if each.process == "trainer"]
        if trainers:
            samplers = [each for each in stage.memory if each.process == "sampler"]
            assert [each.device for each in (*trainers, *samplers)] == [f"cuda:{number}" for number in range(gpus)]
            assert max(each.total for each in (*trainers, *samplers)) < 120 * 2**30  # an H200 has 141 GB


@pytest.mark.slow
@pytest.mark.parametrize("twin", [QWEN, KIMI], ids=lambda twin: twin.recipe)
def test_a_twin_runs_on_cpu_processes(twin: Twin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    recipe, out = recipe_of(twin, tmp_path), tmp_path / "run"
    run_recipe(recipe, out)
    run = Run.read(out)
    assert all(run.stage_done(stage) for stage in recipe.stages)
    trained = [stage for stage in ("pretrain", "mtp", "extend", "sft", "rl") if stage in recipe.stages]
    for stage in trained:
        steps = [record for record in run.metrics(stage) if "loss" in record and not record.get("evaluation")]
        assert steps
        assert all(math.isfinite(record["loss"]) and "imbalance" in record for record in steps)  # of several processes
    checkpoint = run.find("checkpoint").path
    assert checkpoint.name.startswith(f"{trained[-1]}-")
    assert ModelConfig.load(checkpoint).family == find_config(str(tmp_path / "model")).family
    assert (checkpoint / "adapter_model.safetensors").exists() == (
        (table := getattr(recipe, trained[-1])) is not None and table.lora is not None
    )
